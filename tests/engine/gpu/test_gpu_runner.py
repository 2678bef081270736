"""The GPU runner under the whole scheduler: a GPU's, or on a CPU Triton's interpreter.

The KV memory starts out as NaN, so that reading a slot which no token was written to would show.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from on_gpu import MEDIUM
from rig import Answer, EngineRig, make_prompt

from ragserve.engine import InvalidParamsError, OutOfMemoryError, SamplingParams
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.config import EngineConfig
from ragserve.engine.cpu.backend import make_backend
from ragserve.engine.cpu.runner import ModelRunner
from ragserve.engine.gpu import build_gpu
from ragserve.engine.gpu.batch import BatchLayout
from ragserve.engine.models.load import load_model
from ragserve.engine.runtime.core import EngineCore

pytestmark = pytest.mark.triton

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("torch sees no GPU, and Triton does not interpret", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ON_GPU = DEVICE.type == "cuda"
# The interpreter takes its time: there, a window, and a norm of heads.
FAMILIES = ("mistral", "qwen3", *(("llama", "llama3", "qwen2", "smollm2") if ON_GPU else ()))
SMALL = {"num_hidden_layers": 2, "max_position_embeddings": 128}
VOCAB_SIZE = 384
NUM_TOKENS = 7 if ON_GPU else 5  # more than a plan of three steps after the first token

Oracle = Callable[..., list[int]]


class Rig(EngineRig):
    """An engine core over a tiny model, stepped by the test.

    :param on_cpu: run the CPU's runner instead, on torch's operations.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 64,
        on_cpu: bool = False,
        dtype: torch.dtype = torch.float32,
        steps: int | None = None,
        **knobs: Any,
    ) -> None:
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "watermark": 0.0, **knobs}
        device = torch.device("cpu") if on_cpu else DEVICE
        model = load_model(folder, dtype=dtype, device=device)
        shape = model.config
        size = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        block_size = options.get("block_size", 16)
        config = EngineConfig(**options, kv_cache_bytes=num_blocks * size * block_size)
        runner: Any
        if on_cpu:
            backend = make_backend(model, None, num_blocks=num_blocks, block_size=block_size)
            runner = ModelRunner(backend, num_threads=1)
        else:
            runner, built, num_bytes = build_gpu(model, config)
            assert built == num_blocks
            assert num_bytes == config.kv_cache_bytes
            for pool in runner.pools:
                pool.keys.fill_(float("nan"))
                pool.values.fill_(float("nan"))
            if steps is not None:
                runner.max_decode_steps = steps
        core = EngineCore(config, BlockPool(num_blocks), runner)
        super().__init__(core, config, num_tokens=NUM_TOKENS)

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> list[list[int]]:
        """One request, alone; the tokens of each choice."""
        return self.finish(self.add(token_ids, params, **options))


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


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", **SMALL)


# -- exactness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(
    family: str, tiny_model: Callable[..., Path], oracle: Oracle
) -> None:
    """Prompts in chunks beside decodes, arrivals apart, holes, then all of it from the cache."""
    folder = tiny_model(family, **SMALL)
    rig = Rig(folder, steps=3)
    prompts = [make_prompt(length) for length in (3, 37, 58)]
    cuts = [None, (20, 17), (1, 16, 30, 11)]
    expected = [oracle(folder, token_ids) for token_ids in prompts]
    for warm in (False, True):
        answers: list[Answer] = []
        for token_ids, segments in zip(prompts, cuts, strict=True):
            answers += rig.add(token_ids, segments=segments)
            rig.step(answers)
        assert rig.finish(answers) == expected
        cached = [answer.request.timeline.cached_tokens for answer in answers]
        assert cached == ([0, 36, 47] if warm else [0, 0, 0])


@pytest.mark.parametrize("block_size", [32, *([64] if ON_GPU else [])])
def test_other_block_sizes(llama: Path, oracle: Oracle, block_size: int) -> None:
    rig = Rig(llama, block_size=block_size, num_blocks=8)
    prompts = [make_prompt(length) for length in (5, 64, 40)]
    answers = [answer for token_ids in prompts for answer in rig.add(token_ids)]
    assert rig.finish(answers) == [oracle(llama, token_ids) for token_ids in prompts]


def test_preempted(llama: Path, oracle: Oracle) -> None:
    rig = Rig(llama, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=256, steps=4)
    prompts = [make_prompt(length) for length in (46, 47, 48)]
    answers = [answer for token_ids in prompts for answer in rig.add(token_ids)]
    assert rig.finish(answers) == [oracle(llama, token_ids) for token_ids in prompts]
    assert rig.core.scheduler.num_preemptions > 0


def test_choices_of_one_prompt_share_it_and_differ(llama: Path) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    token_ids = make_prompt(33)
    alone = Rig(llama, on_cpu=True).generate(token_ids, params)
    assert Rig(llama, steps=3).generate(token_ids, params) == alone
    assert len({tuple(ids) for ids in alone}) == 3


# -- sampling ----------------------------------------------------------------------------------

SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_k": SamplingParams(top_k=5, seed=2),
    "top_p": SamplingParams(top_p=0.7, seed=3),
    "min_p": SamplingParams(min_p=0.2, temperature=1.5, seed=4),
    "all filters": SamplingParams(top_k=20, top_p=0.9, min_p=0.02, temperature=1.3, seed=5),
    "repetition": SamplingParams.greedy(repetition_penalty=1.7),
    "presence and frequency": SamplingParams.greedy(presence_penalty=1.1, frequency_penalty=0.4),
    "bias": SamplingParams.greedy(logit_bias={7: 4.0, 9: -30.0}),
    "allowed": SamplingParams(allowed_token_ids=[5, 6, 70, 71], seed=6),
    "logprobs": SamplingParams(seed=7, logprobs=4),
    "prompt_logprobs": SamplingParams.greedy(prompt_logprobs=2, logprobs=0),
    "min_tokens": SamplingParams.greedy(min_tokens=3, stop_token_ids=list(range(4, 11))),
    "min_tokens, many stops": SamplingParams.greedy(min_tokens=2, stop_token_ids=range(4, 60)),
}


@pytest.fixture(scope="module")
def answered(tiny_model: Callable[..., Path]) -> tuple[list[Answer], list[Answer]]:
    """All of `SAMPLINGS` by the CPU's sampler, and by the device's, in mixed batches."""
    folder = tiny_model("llama", **SMALL)
    lists: list[list[Answer]] = []
    for on_cpu in (True, False):
        rig = Rig(folder, on_cpu=on_cpu, max_num_seqs=8, steps=4)
        answers = [
            answer
            for index, params in enumerate(SAMPLINGS.values())
            for answer in rig.add(make_prompt(20 + index), params)
        ]
        answers += rig.add(
            make_prompt(11),
            SamplingParams.greedy(),
            bad_word_ids=((5,), (answers[0].request.prompt_token_ids[0], 6), (7, 8, 9)),
        )
        rig.finish(answers)
        lists.append(answers)
    return lists[0], lists[1]


@pytest.mark.parametrize("index", range(len(SAMPLINGS) + 1), ids=[*SAMPLINGS, "bad words"])
def test_samples_like_the_cpu(answered: tuple[list[Answer], list[Answer]], index: int) -> None:
    expected, answer = answered[0][index], answered[1][index]
    assert answer.token_ids == expected.token_ids
    assert answer.request.finish_reason == expected.request.finish_reason
    assert len(answer.logprobs) == len(expected.logprobs)
    pairs = list(zip(answer.logprobs, expected.logprobs, strict=True))
    prompts = answer.request.prompt_logprobs, expected.request.prompt_logprobs
    pairs += list(zip(*prompts, strict=True))
    for one, other in pairs:
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def test_stops_in_the_middle_of_several_steps(llama: Path, oracle: Oracle) -> None:
    rig = Rig(llama, steps=8)
    rig.core.config = rig.config
    for length in (9, 20):
        token_ids = make_prompt(length)
        expected = oracle(llama, token_ids)
        stop = expected[2]
        cut = expected[: expected.index(stop) + 1]
        params = SamplingParams.greedy(stop_token_ids=[stop], ignore_eos=True)
        answers = rig.add(token_ids, params) + rig.add(token_ids)
        assert rig.finish(answers) == [cut, expected]
        assert answers[0].request.finish_reason == "stop"


def test_broken_weights_end_the_request_and_say_so(tiny_model: Callable[..., Path]) -> None:
    rig = Rig(tiny_model("llama", **SMALL))
    rig.core.runner.decoder.model.lm_head.fill_(float("nan"))
    (answer,) = rig.add(make_prompt(9))
    rig.finish([answer])
    assert answer.request.finish_reason == "error"
    assert "NaN" in str(answer.error)


# -- graphs ------------------------------------------------------------------------------------


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_and_eager_steps_give_the_same_tokens(
    dtype: torch.dtype, tiny_model: Callable[..., Path]
) -> None:
    """Bit for bit, as long as the same requests share each step, padded in the same way: any other
    batch is rounded differently, and a token on an edge becomes another one. So plans must not
    depend on the time, as they do in an engine that is asked while it computes.
    """
    folder = tiny_model("qwen2", **MEDIUM)
    params = SamplingParams(max_tokens=40, seed=3, temperature=0.7, logprobs=3, ignore_eos=True)
    prompts = [make_prompt(length) for length in (1, 5, 16, 33, 64, 200, 450)]
    rigs = [
        Rig(
            folder,
            num_blocks=128,
            dtype=dtype,
            steps=1,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            enforce_eager=enforce_eager,
        )
        for enforce_eager in (False, True)
    ]
    graphs, eager = (rig.core.runner for rig in rigs)
    # Only graphs need padding, up to as many tokens as were fast enough when they were recorded.
    eager.layouts = graphs.layouts
    told: list[Any] = []
    for rig in rigs:
        runner, plans, replays = rig.core.runner, [], []
        launch, replay = runner.launch, runner._graphs.replay

        def note_plan(plan: Any, launch: Any = launch, plans: list[Any] = plans) -> Any:
            plans.append([(c.request.request_id, c.start, c.num_tokens) for c in plan.chunks])
            return launch(plan)

        def note_replay(key: Any, replay: Any = replay, replays: list[Any] = replays) -> None:
            replays.append(key)
            replay(key)

        runner.launch, runner._graphs.replay = note_plan, note_replay
        answers = [answer for token_ids in prompts for answer in rig.add(token_ids, params)]
        tokens = rig.finish(answers)
        told.append((plans, tokens, [answer.logprobs for answer in answers]))
        assert bool(replays) is (runner is graphs)
    assert told[0] == told[1]


# -- all at once -------------------------------------------------------------------------------


def test_random_requests_and_cancels(llama: Path, oracle: Oracle) -> None:
    rig = Rig(llama, num_blocks=16, steps=3)
    generator = random.Random(0)
    answers: list[Answer] = []
    gone: list[Answer] = []
    for _ in range(200 if ON_GPU else 9):
        length = generator.choice((1, 15, 16, 31, 50))
        max_tokens = generator.randint(1, 8)
        params = SamplingParams.greedy(max_tokens=max_tokens, ignore_eos=True)
        answers += rig.add(make_prompt(length, seed=generator.randrange(2)), params)
        rig.step(answers)
        if generator.random() < 0.3:
            victim = generator.choice(answers)
            if rig.core.abort(victim.request) is not None:
                gone.append(victim)
    rig.finish(answers)
    for answer in answers:
        request = answer.request
        expected = oracle(llama, request.prompt_token_ids, 8)[: request.max_tokens]
        if answer in gone:
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert answer.token_ids == expected


def test_a_closed_runner_holds_nothing(llama: Path) -> None:
    rig = Rig(llama)
    rig.generate(make_prompt(5))
    rig.core.close()
    assert not hasattr(rig.core.runner, "pools")


@pytest.mark.parametrize("block_size", [1, 8, 24])
def test_block_sizes_without_a_kernel_are_refused(llama: Path, block_size: int) -> None:
    model = load_model(llama, dtype=torch.float32, device=DEVICE)
    with pytest.raises(InvalidParamsError, match=r"block_size=.*one of 16, 32"):
        build_gpu(model, EngineConfig(block_size=block_size))


def test_a_pool_too_small_for_one_sequence_is_refused(llama: Path) -> None:
    model = load_model(llama, dtype=torch.float32, device=DEVICE)
    with pytest.raises(OutOfMemoryError, match="max_model_len=128 needs 8") as caught:
        build_gpu(model, EngineConfig(kv_cache_bytes=50_000, max_num_batched_tokens=64))
    assert "lower max_model_len to " in str(caught.value)


def test_padding_changes_nothing(llama: Path, oracle: Oracle) -> None:
    """Steps laid out with room for more than they hold, as those of CUDA graphs are."""
    rig = Rig(llama)
    rig.core.runner.layouts = [
        BatchLayout(singles=4, tokens=4 + 44, sequences=7, tiles=8, samples=4)
    ]
    prompts = [make_prompt(length) for length in (20, 3, 1)]
    answers: list[Answer] = []
    for token_ids in prompts:
        answers += rig.add(token_ids)
        rig.step(answers)
    assert rig.finish(answers) == [oracle(llama, token_ids) for token_ids in prompts]
