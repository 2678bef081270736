"""What an engine takes of a GPU's memory, and gives back."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from on_gpu import DEVICE, MEDIUM, MIB, SMALL_ENGINE
from rig import make_prompt

from ragserve.engine import Engine, InvalidParamsError, OutOfMemoryError, SamplingParams

pytestmark = pytest.mark.triton  # as `make test` runs the GPU's only once


def free_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


@pytest.mark.parametrize("swap_space_bytes", [0, 256 * MIB])
def test_closing_gives_all_memory_back(
    tiny_model: Callable[..., Path], swap_space_bytes: int
) -> None:
    folder = tiny_model("llama", **MEDIUM)
    knobs = {**SMALL_ENGINE, "kv_cache_bytes": 1 << 30, "swap_space_bytes": swap_space_bytes}
    params = SamplingParams.greedy(max_tokens=8, ignore_eos=True)

    async def once() -> tuple[int, int]:
        async with Engine.open(folder, dtype="bfloat16", **knobs) as engine:
            await asyncio.gather(*(engine.generate(make_prompt(n), params) for n in (5, 300)))
            inside = torch.cuda.mem_get_info(DEVICE)[0]
        torch.cuda.synchronize()
        return inside, torch.cuda.mem_get_info(DEVICE)[0]

    asyncio.run(once())  # the context, the libraries' own memory, the kernels' code
    before = free_memory()
    for _ in range(3):
        inside, after = asyncio.run(once())
        assert before - inside >= 1 << 30
        assert abs(before - after) <= 16 * MIB


def test_a_dropped_engine_gives_its_memory_back_too(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", **MEDIUM)

    async def main() -> None:
        engine = await Engine.open(folder, dtype="bfloat16", **SMALL_ENGINE)
        await engine.generate(make_prompt(5), SamplingParams.greedy(max_tokens=4))

    before = 0
    for _ in range(2):  # the first time loads what stays
        asyncio.run(main())
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("ragserve engine"):
                thread.join(30)
        before, after = before or free_memory(), free_memory()
    assert abs(before - after) <= 16 * MIB


def test_kv_cache_bytes_is_exact_and_utilization_a_share_of_what_is_free(
    tiny_model: Callable[..., Path],
) -> None:
    folder = tiny_model("llama", **MEDIUM)
    tenant = torch.empty(8 << 30, dtype=torch.uint8, device=DEVICE)

    async def blocks(**knobs: Any) -> int:
        knobs = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 4, **knobs}
        async with Engine.open(folder, enforce_eager=True, **knobs) as engine:
            return engine.statistics().blocks_total

    block = 2 * 4 * 16 * 2 * 64 * 2
    assert asyncio.run(blocks(kv_cache_bytes=100 * block + block // 2)) == 100
    free = free_memory()
    taken = asyncio.run(blocks(gpu_memory_utilization=0.1)) * block
    assert 0.1 * free - (1 << 30) < taken < 0.1 * free
    del tenant


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kv_cache_bytes": 1 << 50}, r"kv_cache_bytes=.* was asked for and .* fit"),
        ({"kv_cache_bytes": 1 << 16}, "max_model_len=1024 needs 64"),
        ({"max_num_batched_tokens": 1 << 28}, "lower max_num_batched_tokens"),
        ({"swap_space_bytes": 1 << 50}, r"host memory .* available; lower swap_space_bytes"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    tiny_model: Callable[..., Path], knobs: dict[str, Any], message: str
) -> None:
    folder = tiny_model("llama", **MEDIUM)
    before = free_memory()

    async def main() -> None:
        async with Engine.open(folder, dtype="bfloat16", **{**SMALL_ENGINE, **knobs}):
            pass

    with pytest.raises(OutOfMemoryError, match=message):
        asyncio.run(main())
    assert abs(before - free_memory()) <= 64 * MIB


def test_a_gpu_that_is_not_there_is_refused(tiny_model: Callable[..., Path]) -> None:
    async def main() -> None:
        async with Engine.open(tiny_model("llama"), device="cuda:77"):
            pass

    with pytest.raises(InvalidParamsError, match=r"sees .* GPU"):
        asyncio.run(main())
