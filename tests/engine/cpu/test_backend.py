"""On the C kernels where they can run a model, else on torch; the log says why."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ragserve.engine import LLM, Engine, SamplingParams
from ragserve.engine.cpu.backend import (
    NativeBackend,
    TorchBackend,
    block_bytes,
    make_backend,
    native_operations,
)
from ragserve.engine.models.decoder import DecoderModel
from ragserve.engine.models.load import load_model
from ragserve.kernels import NativeUnavailableError, load_native

PROMPT = list(range(4, 40))


pytestmark = [pytest.mark.anyio, pytest.mark.cpu]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _load_afresh() -> Iterator[None]:
    load_native.cache_clear()
    yield
    load_native.cache_clear()


def model(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(folder, dtype=dtype, device=torch.device("cpu"))


def has_kernels() -> bool:
    try:
        load_native()
    except NativeUnavailableError:
        return False
    return True


def test_switched_off(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_model("llama")
    with LLM(folder, dtype="float32") as llm:
        expected = llm.generate(PROMPT, SamplingParams.greedy(max_tokens=12)).token_ids
    load_native.cache_clear()
    monkeypatch.setenv("RAGSERVE_NATIVE", "0")
    with caplog.at_level(logging.INFO, "ragserve"), LLM(folder, dtype="float32") as llm:
        assert llm.generate(PROMPT, SamplingParams.greedy(max_tokens=12)).token_ids == expected
    said = [record.message for record in caplog.records if "torch's operations" in record.message]
    assert len(said) == 1
    assert "RAGSERVE_NATIVE=0" in said[0]


def test_not_built(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RAGSERVE_NATIVE", "1")
    monkeypatch.setenv("RAGSERVE_NATIVE_LIBRARY", str(tmp_path / "absent.so"))
    with caplog.at_level(logging.INFO, "ragserve"):
        assert native_operations(model(tiny_model("llama"))) is None
    assert "absent.so" in caplog.text


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, torch.float16, "float16"),
        ({"head_dim": 264, "num_attention_heads": 4}, torch.float32, "head_dim=264"),
    ],
)
def test_what_the_kernels_refuse_runs_on_torch(
    tiny_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, int],
    dtype: torch.dtype,
    reason: str,
) -> None:
    if not has_kernels():
        pytest.skip("the C kernels are switched off or were not built")
    folder = tiny_model("llama", **options)
    name = str(dtype).removeprefix("torch.")
    with caplog.at_level(logging.INFO, "ragserve"), LLM(folder, dtype=name) as llm:
        completion = llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4
    assert sum("running on torch's operations" in r.message for r in caplog.records) == 1
    assert reason in caplog.text


async def test_closing_gives_the_memory_back_while_the_engine_object_lives(
    tiny_model: Callable[..., Path],
) -> None:
    for _ in range(3):
        engine = await Engine.open(tiny_model("llama"), dtype="float32")
        await engine.generate(PROMPT, SamplingParams(max_tokens=4))
        backend = weakref.ref(engine._loaded.runner._backend)  # type: ignore[attr-defined]
        assert backend() is not None
        await engine.aclose()
        gc.collect()
        assert backend() is None


@pytest.mark.parametrize("block_size", [1, 16, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_are_what_the_pool_takes(
    tiny_model: Callable[..., Path], block_size: int, dtype: torch.dtype
) -> None:
    for native in (False, True):
        loaded = model(tiny_model("qwen3"), dtype)
        ops = native_operations(loaded) if native else None
        expected = 7 * block_bytes(loaded, ops, block_size)
        backend = make_backend(loaded, ops, num_blocks=7, block_size=block_size)
        assert isinstance(backend, TorchBackend if ops is None else NativeBackend)
        assert sum(pool.numel() * pool.element_size() for pool in backend.pools) == expected
