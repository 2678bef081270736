"""What only a real GPU can show: half precision, CUDA graphs, memory, many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pydoc_data.topics
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import transformers
import triton
from on_gpu import DEVICE, MEDIUM, MIB, SMALL_ENGINE
from rig import make_prompt

from ragserve.engine import Engine, SamplingParams

pytestmark = pytest.mark.triton  # as `make test` runs the GPU's only once

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"head_dim": 80},
    "mistral": {"sliding_window": 100, "head_dim": 96},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "smollm2": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
}


@contextlib.contextmanager
def no_compiling() -> Iterator[None]:
    """Fails if Triton compiles or loads a kernel meanwhile."""
    seen: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        seen.append(str(kwargs.get("repr") or args))

    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert not seen, seen


def ask_all(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    **knobs: Any,
) -> list[Any]:
    """The completions of all prompts, asked for at once."""

    async def main() -> list[Any]:
        async with Engine.open(folder, **{**SMALL_ENGINE, **knobs}) as engine:
            answers = await asyncio.gather(*(engine.generate(list(p), params) for p in prompts))
            await engine.check_integrity()
            return list(answers)

    return asyncio.run(main())


def hf_logprobs(
    folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Transformers' log-probabilities of each prompt's tokens but the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).to(DEVICE)
    result = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=DEVICE)
            logits = model(ids).logits[0, :-1].float()
            picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
            result.append(picked[:, 0].cpu())
    return result


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_as_exact_as_transformers(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    """In float32 they are transformers'; in half precision no further from them than its own."""
    folder = tiny_model(family, **{**MEDIUM, **FAMILIES[family]})
    prompts = [make_prompt(length) for length in (2, 17, 130, 601)]
    params = SamplingParams.greedy(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    exact = torch.cat(hf_logprobs(folder, torch.float32, prompts))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        answers = ask_all(folder, prompts, params, dtype=name, enforce_eager=True)
        ours = torch.cat(
            [torch.tensor([p.logprob for p in a.prompt_logprobs[1:]]) for a in answers]
        )
        error = (ours - exact).square().mean().sqrt().item()
        if dtype is torch.float32:
            assert error < 2e-3
            continue
        theirs = torch.cat(hf_logprobs(folder, dtype, prompts))
        assert error <= 1.3 * (theirs - exact).square().mean().sqrt().item() + 1e-3


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., None]
) -> tuple[Path, list[list[int]]]:
    """A small model that has learnt some English, and prompts in it: its answers are sure ones,
    as a real model's are, where those of random weights hang by a hair."""
    folder = tmp_path_factory.mktemp("trained")
    make_tokenizer(folder, add_bos=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "\n".join(pydoc_data.topics.topics.values())[:400_000]
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), device=DEVICE)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**MEDIUM, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 384}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for _ in range(400):
        at = torch.randint(0, len(ids) - 257, (32,), device=DEVICE)
        batch = ids[at[:, None] + torch.arange(256, device=DEVICE)]
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 3.0
    model.save_pretrained(folder)
    places = random.Random(0).sample(range(len(ids) - 200), 64)
    prompts = [ids[p : p + 20 + i].tolist() for i, p in enumerate(places)]
    return folder, prompts


def test_a_trained_model_answers_like_transformers(
    trained: tuple[Path, list[list[int]]],
) -> None:
    """Token for token, but where two tokens are as good as equally likely: there the order of
    additions decides, which differs between implementations."""
    folder, prompts = trained
    params = SamplingParams.greedy(max_tokens=32, ignore_eos=True)
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact = exact.to(DEVICE)
    for name, near in (("float32", 1e-3), ("bfloat16", 0.5)):
        answers = ask_all(folder, prompts, params, dtype=name)
        same = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ours = list(answer.token_ids)
            ids = torch.tensor([prompt + ours], device=DEVICE)
            with torch.inference_mode():
                logits = exact(ids).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert (logits.amax(-1) - chosen).max().item() < near
            same += logits.argmax(-1).tolist() == ours
        assert same >= (0.95 if name == "float32" else 0.6) * len(prompts)


# -- batches, compilers ----------------------------------------------------------------------------


def test_no_request_waits_for_a_compiler(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", **MEDIUM)

    async def main() -> None:
        async with Engine.open(folder, dtype="bfloat16", **SMALL_ENGINE) as engine:
            with no_compiling():
                for count in (1, 3, 8):
                    lengths = [1, 2, 15, 16, 17, 100, 511, 900][:count]
                    params = SamplingParams(max_tokens=20, top_k=9, logprobs=3, ignore_eos=True)
                    penal = SamplingParams(max_tokens=9, repetition_penalty=1.2, top_p=0.9)
                    await asyncio.gather(
                        *(engine.generate(make_prompt(n, count), params) for n in lengths),
                        *(engine.generate(make_prompt(n, count + 50), penal) for n in lengths),
                    )

    asyncio.run(main())


def test_ten_thousand_requests_some_cancelled(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", **MEDIUM)
    count, generator = 10_000, random.Random(0)

    async def one(engine: Engine, gate: asyncio.Semaphore) -> int:
        async with gate:
            length, num_tokens = generator.randint(1, 60), generator.randint(1, 12)
            leave_after = generator.randint(1, 6) if generator.random() < 0.2 else None
            seed = generator.randrange(40)
            params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True)
            seen = 0
            async with engine.stream(make_prompt(length, seed % 3), params) as stream:
                async for delta in stream:
                    seen += len(delta.token_ids)
                    if leave_after is not None and seen >= leave_after:
                        return seen
            assert seen == num_tokens
            return seen

    async def main() -> None:
        knobs = {**SMALL_ENGINE, "max_num_seqs": 64, "kv_cache_bytes": 8 * MIB}
        async with Engine.open(folder, dtype="bfloat16", max_model_len=256, **knobs) as engine:
            gate = asyncio.Semaphore(300)
            await asyncio.gather(*(one(engine, gate) for _ in range(count)))
            await engine.check_integrity()
            statistics = engine.statistics()
            assert sum(statistics.num_finished.values()) == count
            assert statistics.num_finished["abort"] > 500
            assert statistics.blocks_used == 0

    asyncio.run(main())


# -- neighbours ----------------------------------------------------------------------------------


def test_two_engines_and_an_embedder_share_a_gpu(tiny_model: Callable[..., Path]) -> None:
    folders = [tiny_model("llama", **MEDIUM), tiny_model("qwen2", **MEDIUM)]
    params = SamplingParams.greedy(max_tokens=30, ignore_eos=True)
    prompts = [make_prompt(n) for n in (3, 40, 200)]

    async def ask(engine: Engine) -> list[Sequence[int]]:
        # One after the other: which requests share a step, which changes how sums are rounded,
        # does not depend on who is faster.
        return [(await engine.generate(prompt, params)).token_ids for prompt in prompts]

    async def ask_alone(folder: Path) -> list[Sequence[int]]:
        async with Engine.open(folder, dtype="float32", **SMALL_ENGINE) as engine:
            return await ask(engine)

    alone = [asyncio.run(ask_alone(folder)) for folder in folders]
    linear = torch.nn.Linear(256, 256, device=DEVICE)
    x = torch.randn(64, 256, device=DEVICE)
    expected = linear(x).sum().item()
    stop = threading.Event()
    wrong: list[float] = []

    def embed() -> None:
        torch.cuda.set_device(DEVICE)  # or cuBLAS warns that this thread has no context yet
        while not stop.is_set():
            with torch.inference_mode():
                value = linear(x).sum().item()
            if value != expected:
                wrong.append(value)

    async def main() -> list[list[Sequence[int]]]:
        thread = threading.Thread(target=embed)
        thread.start()
        try:
            async with (
                Engine.open(folders[0], dtype="float32", **SMALL_ENGINE) as first,
                Engine.open(folders[1], dtype="float32", **SMALL_ENGINE) as second,
            ):
                return await asyncio.gather(ask(first), ask(second))
        finally:
            stop.set()
            thread.join()

    together = asyncio.run(main())
    assert together == alone
    assert not wrong


def test_capture_is_logged(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ragserve"):
        ask_all(
            tiny_model("llama", **MEDIUM),
            [make_prompt(3)],
            SamplingParams.greedy(max_tokens=2),
            dtype="bfloat16",
        )
    (line,) = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert re.fullmatch(r"captured \d+ CUDA graphs in [\d.]+ s, [\d.]+ MiB", line)
