"""In float32, greedy tokens are transformers', whatever the engine does on the way to them.

The engine's KV memory starts out as NaN in all of these tests, so that reading a slot which no
token was written to would show at once.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Answer, EngineRig, make_prompt

from ragserve.engine import LLM, Engine, Prompt, SamplingParams, Segment
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.config import EngineConfig
from ragserve.engine.cpu.backend import make_backend, native_operations
from ragserve.engine.cpu.runner import ModelRunner
from ragserve.engine.models.load import load_model
from ragserve.engine.runtime.core import EngineCore

pytestmark = pytest.mark.cpu

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "smollm2")
VOCAB_SIZE = 384
BLOCK_SIZE = 16
NUM_TOKENS = 20
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 77, 130)
"""Prompts of every family: about block boundaries, and beyond Mistral's window of 24."""

Oracle = Callable[..., list[int]]


PROMPTS = [make_prompt(length) for length in LENGTHS]


class Rig(EngineRig):
    """An engine core over a real model, stepped by the test."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 512,
        dtype: torch.dtype = torch.float32,
        **knobs: Any,
    ) -> None:
        config = EngineConfig(**{"block_size": BLOCK_SIZE, **knobs})
        cpu = torch.device("cpu")
        model = load_model(folder, dtype=dtype, device=cpu)
        backend = make_backend(
            model, native_operations(model), num_blocks=num_blocks, block_size=config.block_size
        )
        for memory in backend.pools:
            memory.fill_(float("nan"))
        pool = BlockPool(num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        core = EngineCore(config, pool, ModelRunner(backend, num_threads=1))
        super().__init__(core, config, num_tokens=NUM_TOKENS)

    def finish(self, answers: list[Answer]) -> list[list[int]]:
        """See `EngineRig.finish`; none of these answers ends but by its length."""
        token_ids = super().finish(answers)
        assert all(answer.request.finish_reason == "length" for answer in answers)
        return token_ids

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> list[int]:
        """One request, alone."""
        (ids,) = self.finish(self.add(token_ids, params, **options))
        return ids


@pytest.fixture(scope="module")
def oracle(hf_greedy: Oracle) -> Oracle:
    """`oracle(folder, token_ids, num_tokens=NUM_TOKENS)`: transformers' answer, computed once."""
    known: dict[tuple[Path, tuple[int, ...]], list[int]] = {}

    def ask(folder: Path, token_ids: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        key = folder, tuple(token_ids)
        if len(known.get(key, ())) < num_tokens:
            known[key] = hf_greedy(folder, token_ids, num_tokens)
        return known[key][:num_tokens]

    return ask


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(request.param)


# -- every family ------------------------------------------------------------------------------


def test_alone_cold_then_from_the_cache(folder: Path, oracle: Oracle) -> None:
    rig = Rig(folder)
    for token_ids in PROMPTS:
        expected = oracle(folder, token_ids)
        for cached in (0, (len(token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE):
            (answer,) = rig.add(token_ids)
            assert rig.finish([answer]) == [expected]
            assert answer.request.timeline.cached_tokens == cached


def test_oracle_is_worth_asking(folder: Path, oracle: Oracle) -> None:
    """Random models may repeat themselves; these do not, so a wrong mask or position shows."""
    answers = [oracle(folder, token_ids) for token_ids in PROMPTS]
    assert len({tuple(ids) for ids in answers}) == len(PROMPTS)
    assert sum(len(set(ids)) for ids in answers) > len(PROMPTS) * NUM_TOKENS / 2


def test_batch_of_32_with_staggered_arrivals(folder: Path, oracle: Oracle) -> None:
    prompts = (PROMPTS * 3)[:32]
    expected = [oracle(folder, token_ids) for token_ids in prompts]
    for caching in (False, True):
        for apart in (0, 1):
            rig = Rig(folder, enable_prefix_caching=caching)
            assert rig.generate_all(prompts, apart=apart) == expected


@pytest.mark.parametrize("chunk", [16, 33, 512])
def test_chunked_prompts(folder: Path, oracle: Oracle, chunk: int) -> None:
    rig = Rig(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 32))
    expected = [oracle(folder, token_ids) for token_ids in PROMPTS]
    assert rig.generate_all(PROMPTS) == expected
    if chunk == 16:
        (answer,) = rig.add(make_prompt(130, seed=1))
        rig.finish([answer])
        assert [c.num_tokens for c in answer.request.timeline.chunks] == [16] * 8 + [2]


@pytest.mark.parametrize("caching", [False, True])
def test_preempted(folder: Path, oracle: Oracle, caching: bool) -> None:
    rig = Rig(folder, num_blocks=12, enable_prefix_caching=caching, watermark=0.0)
    expected = [oracle(folder, token_ids) for token_ids in PROMPTS]
    assert rig.generate_all(PROMPTS) == expected
    assert rig.core.scheduler.num_preemptions > 0


def test_segments_with_holes(folder: Path, oracle: Oracle) -> None:
    cuts = [(1, 76), (76, 1), (16, 61), (17, 17, 43), (5, 32, 7, 33), (1,) * 20 + (57,)]
    token_ids = make_prompt(77)
    expected = oracle(folder, token_ids)
    rig = Rig(folder, max_num_batched_tokens=33, max_num_seqs=8)
    for warm in (False, True):
        for segments in cuts:
            (answer,) = rig.add(token_ids, segments=segments)
            assert rig.finish([answer]) == [expected]
            assert (answer.request.timeline.cached_tokens > 0) or not warm
    together = Rig(folder, enable_prefix_caching=False)
    answers = [a for segments in cuts for a in together.add(token_ids, segments=segments)]
    assert together.finish(answers) == [expected] * len(cuts)


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_other_block_sizes(folder: Path, oracle: Oracle, block_size: int) -> None:
    rig = Rig(folder, num_blocks=2048 // block_size, block_size=block_size)
    expected = [oracle(folder, token_ids) for token_ids in PROMPTS]
    assert rig.generate_all(PROMPTS, apart=1) == expected
    assert rig.generate_all(PROMPTS) == expected


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_through_the_async_face(folder: Path, oracle: Oracle, backend: str) -> None:
    """Each request starts when the one before has streamed its first tokens."""
    prompts: list[list[int]] = PROMPTS[-6:]
    streamed: list[list[int]] = [[] for _ in prompts]

    async def main() -> None:
        params = SamplingParams.greedy(max_tokens=NUM_TOKENS, ignore_eos=True)
        begun = [anyio.Event() for _ in prompts]

        async def consume(index: int) -> None:
            if index:
                await begun[index - 1].wait()
            async with engine.stream(prompts[index], params) as stream:
                async for delta in stream:
                    streamed[index] += delta.token_ids
                    begun[index].set()
            assert list(stream.completion.token_ids) == streamed[index]

        async with (
            Engine.open(folder, dtype="float32", max_num_batched_tokens=64) as engine,
            anyio.create_task_group() as tasks,
        ):
            for index in range(len(prompts)):
                tasks.start_soon(consume, index)

    anyio.run(main, backend=backend)
    assert streamed == [oracle(folder, token_ids) for token_ids in prompts]


def test_bfloat16_is_as_close_as_transformers(folder: Path, hf_model: Callable[..., Any]) -> None:
    """Against float32, the error of log-probabilities is like that of transformers' bfloat16."""
    token_ids = make_prompt(130, seed=2)
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        exact = hf_model(folder)(ids).logits[0].float().log_softmax(-1)
        theirs = hf_model(folder, torch.bfloat16)(ids).logits[0].float().log_softmax(-1)
    rig = Rig(folder, dtype=torch.bfloat16, max_num_batched_tokens=33, max_num_seqs=8)
    (answer,) = rig.add(token_ids, SamplingParams.greedy(prompt_logprobs=0, logprobs=5))
    rig.finish([answer])
    ours = torch.tensor([entry.logprob for entry in answer.request.prompt_logprobs])
    at = torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])
    our_error = (ours - exact[at]).abs().mean()
    their_error = (theirs[at] - exact[at]).abs().mean()
    assert our_error < 1.5 * their_error + 1e-3
    assert all(torch.isfinite(torch.tensor([e.logprob for e in answer.logprobs])))
    assert answer.logprobs[0].token_id in exact[-1].topk(3).indices


# -- log-probabilities and penalties ------------------------------------------------------------


@pytest.mark.parametrize("chunk", [16, 512])
def test_logprobs(folder: Path, hf_model: Callable[..., Any], chunk: int) -> None:
    rig = Rig(folder, max_num_batched_tokens=chunk, max_num_seqs=8)
    for token_ids in (make_prompt(1), make_prompt(33), make_prompt(77)):
        params = SamplingParams.greedy(max_tokens=8, logprobs=4, prompt_logprobs=3)
        for _ in range(2):  # the second time there is a cache to be tempted by
            (answer,) = rig.add(token_ids, params)
            rig.finish([answer])
            everything = torch.tensor([token_ids + answer.token_ids])
            with torch.inference_mode():
                logprobs = hf_model(folder)(everything).logits[0].log_softmax(-1)
            entries = answer.request.prompt_logprobs + answer.logprobs
            assert [entry.token_id for entry in entries] == everything[0, 1:].tolist()
            for position, entry in enumerate(entries):
                row = logprobs[position]
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
                assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
                num_top = 3 if position < len(token_ids) - 1 else 4
                top = row.topk(num_top)
                assert [token for token, _ in entry.top] == top.indices.tolist()
                values = [logprob for _, logprob in entry.top]
                assert values == pytest.approx(top.values.tolist(), abs=1e-4)


def test_repetition_penalty(folder: Path, hf_model: Callable[..., Any]) -> None:
    rig = Rig(folder, max_num_batched_tokens=33, max_num_seqs=8)
    answers, expected = [], []
    for token_ids in PROMPTS[1:]:
        answers += rig.add(token_ids, SamplingParams.greedy(repetition_penalty=1.3))
        prompt = torch.tensor([token_ids])
        with torch.inference_mode():
            output = hf_model(folder).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                repetition_penalty=1.3,
            )
        expected.append(output[0, len(token_ids) :].tolist())
    assert rig.finish(answers) == expected


def test_presence_and_frequency_penalties(
    tiny_model: Callable[..., Path], hf_model: Callable[..., Any]
) -> None:
    """By their definition: logits less presence, less frequency per occurrence, in the output."""
    folder = tiny_model("llama")
    model = hf_model(folder)
    presence, frequency = 1.5, 0.75
    rig = Rig(folder)
    params = SamplingParams.greedy(presence_penalty=presence, frequency_penalty=frequency)
    for token_ids in (make_prompt(17), make_prompt(48)):
        ids, counts = list(token_ids), torch.zeros(VOCAB_SIZE)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                logits = model(torch.tensor([ids])).logits[0, -1]
                token = int((logits - presence * (counts > 0) - frequency * counts).argmax())
                counts[token] += 1
                ids.append(token)
        assert rig.generate(token_ids, params) == ids[len(token_ids) :]


# -- lengths, choices, seeds -------------------------------------------------------------------


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_cached_prompt_of_whole_blocks_computes_its_last_block(
    llama: Path, oracle: Oracle, length: int
) -> None:
    """A hit never covers the whole prompt: its last token's logits are needed."""
    rig = Rig(llama)
    token_ids = make_prompt(length)
    for cached in (0, length - BLOCK_SIZE, length - BLOCK_SIZE):
        (answer,) = rig.add(token_ids)
        assert rig.finish([answer]) == [oracle(llama, token_ids)]
        assert answer.request.timeline.cached_tokens == cached


def test_generated_tokens_are_cached_too(llama: Path, oracle: Oracle) -> None:
    """A conversation: each turn's prompt is all that was said, and a little more."""
    rig = Rig(llama)
    token_ids = make_prompt(20)
    for turn in range(4):
        (answer,) = rig.add(token_ids)
        assert rig.finish([answer]) == [oracle(llama, token_ids)]
        if turn:
            # The last token of an answer is never computed: nothing came after it.
            known = len(token_ids) - 5 - 1
            assert answer.request.timeline.cached_tokens == known // BLOCK_SIZE * BLOCK_SIZE
        token_ids = token_ids + answer.token_ids + make_prompt(5, seed=turn)


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17])
def test_answers_of_any_length(llama: Path, oracle: Oracle, max_tokens: int) -> None:
    rig = Rig(llama)
    for length in (1, 15, 16, 17, 32):
        params = SamplingParams.greedy(max_tokens=max_tokens)
        token_ids = make_prompt(length)
        assert rig.generate(token_ids, params) == oracle(llama, token_ids, max_tokens)


@pytest.mark.parametrize("length", [1, 16, 17, 77])
def test_greedy_choices_are_equal(llama: Path, oracle: Oracle, length: int) -> None:
    token_ids = make_prompt(length)
    for num_blocks in (512, 9):
        rig = Rig(llama, num_blocks=num_blocks, watermark=0.0)
        answers = rig.add(token_ids, SamplingParams.greedy(n=5))
        assert rig.finish(answers) == [oracle(llama, token_ids)] * 5
    assert length < 77 or rig.core.scheduler.num_preemptions > 0


def test_choices_share_the_prompt(llama: Path) -> None:
    rig = Rig(llama, enable_prefix_caching=False)
    rig.finish(rig.add(make_prompt(48), SamplingParams.greedy(n=5)))
    # The last block is each choice's own: generated tokens go on filling it.
    assert rig.core.prompt_tokens == 48 + 4 * 16


SAMPLED = SamplingParams(temperature=2.0, seed=7, n=3, logprobs=0)


def test_sampling_depends_on_nothing_but_the_seed(llama: Path) -> None:
    prompts = [make_prompt(length) for length in (1, 17, 33, 64, 77)]
    alone = []
    for token_ids in prompts:
        rig = Rig(llama)
        alone.append(rig.finish(rig.add(token_ids, SAMPLED)))
        assert len({tuple(ids) for ids in alone[-1]}) == 3
    for knobs in (
        {},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_blocks": 12, "watermark": 0.0},
    ):
        rig = Rig(llama, **knobs)
        answers = [answer for token_ids in prompts for answer in rig.add(token_ids, SAMPLED)]
        assert rig.finish(answers) == [ids for choices in alone for ids in choices]
        assert ("num_blocks" in knobs) == (rig.core.scheduler.num_preemptions > 0)


def test_seeds_differ(llama: Path) -> None:
    rig = Rig(llama)
    answers = {
        tuple(rig.generate(make_prompt(33), SamplingParams(temperature=2.0, seed=seed)))
        for seed in range(8)
    }
    assert len(answers) == 8


# -- anything at all ----------------------------------------------------------------------------


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    chunk = draw(st.sampled_from([4, 16, 33, 512]))
    block_size = draw(st.sampled_from([4, 16, 32]))
    requests = []
    for _ in range(draw(st.integers(1, 10))):
        token_ids = draw(st.sampled_from(PROMPTS))
        cuts = draw(st.lists(st.integers(1, len(token_ids)), max_size=3, unique=True))
        bounds = [0, *sorted({*cuts, len(token_ids)})]
        segments = [b - a for a, b in itertools.pairwise(bounds)]
        requests.append(
            {
                "token_ids": token_ids,
                "segments": segments,
                "max_tokens": draw(st.integers(1, NUM_TOKENS)),
                "wait": draw(st.integers(0, 6)),
                "abort_after": draw(st.one_of(st.none(), st.none(), st.integers(0, 8))),
                "priority": draw(st.integers(0, 2)),
            }
        )
    # Enough for the largest of them alone.
    needed = 2 + max(
        sum(-(-n // block_size) for n in r["segments"]) + -(-NUM_TOKENS // block_size)
        for r in requests
    )
    return {
        "requests": requests,
        "num_blocks": needed + draw(st.sampled_from([0, 3, 200])),
        "knobs": {
            "block_size": block_size,
            "max_num_batched_tokens": chunk,
            "max_num_seqs": draw(st.integers(1, min(chunk, 8))),
            "enable_prefix_caching": draw(st.booleans()),
            "watermark": draw(st.sampled_from([0.0, 0.1])),
            "long_prefill_token_threshold": draw(st.sampled_from([None, 20])),
        },
    }


@pytest.mark.parametrize("family", ["llama", "mistral"])
@given(scenario=scenarios())
@settings(deadline=None, max_examples=30)
def test_any_scenario(
    family: str,
    scenario: dict[str, Any],
    tiny_model: Callable[..., Path],
    oracle: Oracle,
) -> None:
    folder = tiny_model(family)
    rig = Rig(folder, num_blocks=scenario["num_blocks"], **scenario["knobs"])
    answers: list[Answer] = []
    aborts: dict[int, Answer] = {}
    for request in scenario["requests"]:
        (answer,) = rig.add(
            request["token_ids"],
            SamplingParams.greedy(max_tokens=request["max_tokens"]),
            segments=request["segments"],
            priority=request["priority"],
        )
        answers.append(answer)
        if request["abort_after"] is not None:
            aborts[rig.core.num_steps + request["abort_after"]] = answer
        for _ in range(request["wait"]):
            rig.step(answers)
            rig.core.check_integrity()
    for _ in range(10_000):
        for step in [step for step in aborts if step <= rig.core.num_steps]:
            rig.core.abort(aborts.pop(step).request)
        if not rig.core.scheduler.has_requests:
            break
        rig.step(answers)
        rig.core.check_integrity()
    for request, answer in zip(scenario["requests"], answers, strict=True):
        expected = oracle(folder, request["token_ids"])[: request["max_tokens"]]
        assert answer.request.finish_reason in ("length", "abort")
        if answer.request.finish_reason == "abort":
            assert request["abort_after"] is not None
            expected = expected[: len(answer.token_ids)]
        assert answer.token_ids == expected
    statistics = rig.core.pool.statistics()
    assert statistics.free + statistics.cached == statistics.total


# -- the synchronous face ------------------------------------------------------------------------


def test_through_the_synchronous_face(tiny_model: Callable[..., Path], oracle: Oracle) -> None:
    folder = tiny_model("qwen2")  # of those that do not begin with BOS, which would be added
    params = SamplingParams.greedy(max_tokens=NUM_TOKENS, ignore_eos=True)
    segmented = [
        Prompt(
            (
                Segment(token_ids=tuple(ids[:5]), kind="system"),
                Segment(token_ids=tuple(ids[5:30]), kind="document"),
                Segment(token_ids=tuple(ids[30:]), kind="question"),
            )
        )
        for ids in PROMPTS[-5:]
    ]
    expected = [tuple(oracle(folder, ids)) for ids in PROMPTS[-5:]]
    with LLM(folder, dtype="float32") as llm:
        first = llm.generate(segmented, params)
        again = llm.generate(segmented, params)
    assert [c.token_ids for c in first] == expected
    assert [c.token_ids for c in again] == expected
    assert all(c.usage.cached_tokens >= 30 for c in again)


@pytest.mark.parametrize(
    ("ending", "code"), [("raise SystemExit(3)", 3), ("raise KeyError('x')", 1), ("return", 0)]
)
def test_process_ends_cleanly_while_the_engine_computes(
    tiny_model: Callable[..., Path], ending: str, code: int
) -> None:
    script = f"""
import asyncio
from ragserve import Engine, SamplingParams

async def main():
    engine = await Engine.open({str(tiny_model("llama"))!r}, max_model_len=2048)
    async def run():
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        async for _ in engine.stream(list(range(4, 40)), params):
            pass
    tasks = [asyncio.create_task(run()) for _ in range(8)]
    while not engine.statistics().generated_tokens:
        await asyncio.sleep(0)
    {ending}

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    assert "terminate called" not in done.stderr
