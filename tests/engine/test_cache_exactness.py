"""A prompt's answer is the same whatever of it was cached, and wherever that came from.

Real small models in float32, greedy, against transformers; on both CPU backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from ragserve.engine import Engine, SamplingParams, SegmentKind, TokenizedPrompt
from ragserve.engine.offload.tiers import Tiers

pytestmark = pytest.mark.cpu

Greedy = Callable[[Path, Sequence[int], int], list[int]]
Expected = Callable[[Path, TokenizedPrompt], list[int]]

NUM_TOKENS = 4
PARAMS = SamplingParams.greedy(max_tokens=NUM_TOKENS, ignore_eos=True)
SYSTEM = tuple(4 + 3 * n % 50 for n in range(21))
DOCUMENTS = [tuple(4 + (7 * d + 5 * n) % 60 for n in range(16 + 11 * d)) for d in range(4)]
KNOBS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 192,
    "max_num_batched_tokens": 64,
    "num_tokenizers": 1,
}


def asked(order: Sequence[int], question: int | None) -> TokenizedPrompt:
    """System prompt, documents, and a question, if there is one."""
    parts, kinds = [SYSTEM, *(DOCUMENTS[index] for index in order)], ["system"]
    kinds += ["document"] * len(order)
    if question is not None:
        parts.append(tuple(10 + (question + n) % 9 for n in range(9)))
        kinds.append("question")
    return TokenizedPrompt(
        [token for part in parts for token in part],
        tuple(map(len, parts)),
        kinds=cast("tuple[SegmentKind, ...]", tuple(kinds)),
    )


@pytest.fixture(scope="module")
def expected(hf_greedy: Greedy) -> Expected:
    known: dict[tuple[Path, tuple[int, ...]], list[int]] = {}

    def ask(folder: Path, prompt: TokenizedPrompt) -> list[int]:
        key = folder, tuple(prompt.token_ids)
        if key not in known:
            known[key] = hf_greedy(folder, key[1], NUM_TOKENS)
        return known[key]

    return ask


async def ask(engine: Engine, prompt: TokenizedPrompt, expected: list[int]) -> int:
    """Tokens that were cached; the answer must be as expected."""
    completion = await engine.generate(prompt, PARAMS)
    assert list(completion.token_ids) == expected
    return completion.usage.cached_tokens


@pytest.mark.parametrize("policy", ["cost_aware", "lru"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_any_order_after_eviction_and_from_the_disk(
    tiny_model: Callable[..., Path],
    expected: Expected,
    tmp_path: Path,
    family: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small a model computes faster than any disk reads.
    monkeypatch.setattr(Tiers, "seconds", lambda self, keys: 0.0)
    folder = tiny_model(family)
    prompts = [asked(order, 3) for order in itertools.permutations(range(4), 2)]

    async def main() -> None:
        knobs = {**KNOBS, "cache_policy": policy, "disk_cache": tmp_path / "kv"}
        async with Engine.open(folder, **KNOBS) as engine:
            block_bytes = engine._loaded.kv_bytes // engine._loaded.num_blocks
        # Room for one prompt and a little: everything is evicted all the time.
        async with Engine.open(folder, **knobs, kv_cache_bytes=30 * block_bytes) as engine:
            assert await engine.warm([asked([index], None) for index in range(4)]) > 0
            await saved(engine)
            for prompt in prompts:
                cached = await ask(engine, prompt, expected(folder, prompt))
                assert cached >= len(SYSTEM)
            await engine.check_integrity()
            assert engine.statistics().num_evictions > 0
        # Another one finds what was warmed.
        async with Engine.open(folder, **knobs) as engine:
            for prompt in prompts[::3]:
                cached = await ask(engine, prompt, expected(folder, prompt))
                assert cached >= sum(prompt.segment_lengths[:2])
            assert engine.statistics().cache.tiers["disk"].loaded > 0
            # All at once, sharing what is under way.
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(ask, engine, prompt, expected(folder, prompt))
            await engine.check_integrity()

    anyio.run(main)


async def saved(engine: Engine) -> None:
    """Until nothing is on its way to a tier."""
    with anyio.fail_after(60):
        while engine.statistics().cache.tiers["disk"].saved == 0:
            await anyio.sleep(0.005)
        tiers = engine._core.tiers
        assert tiers is not None
        while tiers.num_under_way:
            await engine._call(lambda core: core.scheduler.schedule())
            await anyio.sleep(0.005)
