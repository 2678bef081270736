"""Document policies on thousands of questions, with the real engine core and no model.

Blocks, scheduler, admission, probe and document order are ragserve's; the runner gives tokens and
computes nothing. So what is counted, prompt tokens, is exact, and host time is the policies' own.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from documents_workload import draw_documents

from ragserve.engine import (
    EngineConfig,
    EngineCore,
    Request,
    SamplingParams,
    SegmentKind,
    StepPlan,
    StepResult,
    TokenizedPrompt,
)
from ragserve.engine.cache.block_hash import BlockHash
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.cache.probe import PrefixProbe, SegmentHashes
from ragserve.engine.offload.host_tier import HostTier
from ragserve.engine.offload.tiers import Tiers
from ragserve.prompting import DocumentOrder, Popularity, order_documents

__all__ = ["DEFAULT", "OFF", "OURS", "PLAIN", "POLICIES", "Case", "Outcome", "Policy", "answer"]

BLOCK_SIZE = 16
SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 120, 252, 22, 16
"""As in the real workload: the last block of each segment is not quite full."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done so that prompts share what was computed.

    :param cache: the engine's `cache_policy`; None is without a cache.
    :param tier: whether evicted blocks go on to a tier behind the pool.
    """

    name: str
    order: DocumentOrder
    cache: str | None
    tier: bool = False


OFF = Policy("no cache", "relevance", None)
PLAIN = Policy("plain", "relevance", "lru")
DEFAULT = Policy("relevance", "relevance", "cost_aware")
OURS = Policy("cache_aware", "cache_aware", "cost_aware")
POLICIES = (
    OFF,
    PLAIN,
    DEFAULT,
    Policy("canonical, lru", "canonical", "lru"),
    Policy("cache_aware, lru", "cache_aware", "lru"),
    Policy("canonical", "canonical", "cost_aware"),
    OURS,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload and a machine.

    :param pool: KV pool in parts of the corpus' KV.
    :param tier: the tier behind the pool, likewise, for policies that have one.
    :param warm: of the questions, the first so many only fill the cache.
    :param seconds_per_token: that the runner takes; 0 is at once.
    """

    zipf: float
    pool: float
    concurrency: int
    documents: int = 150
    questions: int = 2000
    warm: int = 500
    seed: int = 0
    tier: float = 1.0
    seconds_per_token: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return max(_blocks(self.pool * self.documents), _blocks(4) + 12)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means per question, of those that count.

    :param hit_tokens: prompt tokens that need not be computed.
    :param computed_tokens: prompt tokens that were, what was computed again after preemption too.
    :param order_us: microseconds of putting documents in order, the median.
    :param engine_us: of the engine core, from hashing the prompt to the last token: the median at
        a concurrency of 1, else the mean.
    """

    prompt_tokens: float
    hit_tokens: float
    computed_tokens: float
    order_us: float
    engine_us: float
    preemptions: int


def answer(case: Case, policy: Policy) -> Outcome:
    """Answer a case's questions under a policy."""
    drawn = draw_documents(case.questions, case.documents, case.zipf, case.seed)
    desk = _Desk(case, policy)
    try:
        desk.run(drawn[: case.warm])
        desk.reset()
        desk.run(drawn[case.warm :])
    finally:
        desk.core.close()
    return desk.outcome(len(drawn) - case.warm)


def _blocks(documents: float) -> int:
    return int(documents * -(-DOCUMENT_TOKENS // BLOCK_SIZE))


class _Desk:
    """Takes questions, keeps so many of them under way, and counts."""

    def __init__(self, case: Case, policy: Policy) -> None:
        self._concurrency = case.concurrency
        self._policy = policy
        rng = random.Random(case.seed)
        ids = iter(lambda: rng.randrange(1 << 15), -1)
        self._system = array("I", itertools.islice(ids, SYSTEM_TOKENS))
        # A document's first tokens are its number in the prompt.
        self._numbers = [list(itertools.islice(ids, 4)) for _ in range(8)]
        self._documents = [
            list(itertools.islice(ids, DOCUMENT_TOKENS - 4)) for _ in range(case.documents)
        ]
        self._ids = ids
        self._names = [f"{number:04}" for number in range(case.documents)]
        self._popularity = Popularity()
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=policy.cache is not None,
            cache_policy=policy.cache or "lru",  # type: ignore[arg-type]
            max_num_batched_tokens=2048,
        )
        self._pool = BlockPool(
            case.num_blocks,
            enable_prefix_caching=policy.cache is not None,
            cost_aware=policy.cache == "cost_aware",
        )
        tiers: Tiers | None = None
        if policy.tier:
            io = _NoBytes()
            tiers = Tiers([HostTier(io, _blocks(case.tier * case.documents) * io.block_bytes)], io)
        self.core = EngineCore(config, self._pool, _Free(case.seconds_per_token), tiers)
        is_cached = self._pool.__contains__
        if tiers is not None:
            behind = tiers.__contains__

            def is_cached(key: BlockHash) -> bool:
                return key in self._pool or behind(key)

        self._probe = PrefixProbe(is_cached, BLOCK_SIZE, "", SegmentHashes(BLOCK_SIZE))
        self._count = itertools.count()
        self._segments: dict[tuple[int, int], array[int]] = {}
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self._order_ns: list[int] = []
        self._engine_ns: list[int] = []
        self._prompt_tokens = self._hit_tokens = 0
        self._computed_before = self.core.prompt_tokens
        self._preemptions_before = self.core.scheduler.num_preemptions

    def outcome(self, questions: int) -> Outcome:
        """Since `reset`."""
        return Outcome(
            self._prompt_tokens / questions,
            self._hit_tokens / questions,
            (self.core.prompt_tokens - self._computed_before) / questions,
            statistics.median(self._order_ns) / 1e3,
            (statistics.median if self._concurrency == 1 else statistics.mean)(self._engine_ns)
            / 1e3,
            self.core.scheduler.num_preemptions - self._preemptions_before,
        )

    def run(self, drawn: Sequence[tuple[int, ...]]) -> None:
        """Answer questions on these documents, to the last."""
        todo, live, clock = iter(drawn), 0, time.perf_counter_ns
        spent = 0
        while True:
            while live < self._concurrency and (chosen := next(todo, None)) is not None:
                spent += self._add(chosen)
                live += 1
            if not live:
                return
            before = clock()
            updates = self.core.step()
            spent += clock() - before
            for update in updates:
                if update.finished:
                    live -= 1
                    self._engine_ns.append(spent)
                    spent = 0
                    self._prompt_tokens += update.request.num_prompt_tokens
                    self._hit_tokens += update.request.timeline.cached_tokens
            if not updates and self._policy.tier:
                time.sleep(1e-5)  # blocks are on their way

    def _add(self, chosen: tuple[int, ...]) -> int:
        """Ask a question on these documents; nanoseconds that the engine took to accept it."""
        clock = time.perf_counter_ns
        before = clock()
        names = [self._names[number] for number in chosen]
        self._popularity.note("", names)
        order = order_documents(
            self._policy.order,
            names,
            popularity=self._popularity,
            probe=self._probe,
            system=self._system,
            tokens=lambda index, place: self._segment(chosen[index], place),
        )
        self._order_ns.append(clock() - before)
        segments: list[Sequence[int]] = [self._system]
        segments += [self._segment(chosen[index], place) for place, index in enumerate(order, 1)]
        segments.append(list(itertools.islice(self._ids, QUESTION_TOKENS)))
        documents: list[SegmentKind] = ["document"] * len(order)
        kinds: tuple[SegmentKind, ...] = ("system", *documents, "question")
        prompt = TokenizedPrompt(
            [token for segment in segments for token in segment],
            tuple(map(len, segments)),
            kinds=kinds,
        )
        before = clock()
        request = Request(
            str(next(self._count)),
            prompt,
            _PARAMS,
            block_size=BLOCK_SIZE,
            max_tokens=ANSWER_TOKENS,
        )
        self.core.add(request)
        return clock() - before

    def _segment(self, document: int, place: int) -> array[int]:
        """As a pipeline remembers them."""
        known = self._segments.get((document, place))
        if known is None:
            known = array("I", self._numbers[place] + self._documents[document])
            self._segments[document, place] = known
        return known


_PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


class _Free:
    """A runner that gives tokens for nothing, or for some time.

    :param seconds_per_token: of prompts.
    """

    depth = 1
    max_decode_steps = 8
    block_io = None

    def __init__(self, seconds_per_token: float) -> None:
        self._seconds_per_token = seconds_per_token
        self._tokens: list[Sequence[int]] = [
            list(range(count)) for count in range(self.max_decode_steps + 1)
        ]

    def samples_on_host(self, request: Request) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        if self._seconds_per_token:
            time.sleep(plan.num_tokens * self._seconds_per_token)
        result = StepResult([self._tokens[chunk.num_samples] for chunk in plan.chunks])
        return lambda: result

    def close(self) -> None:
        pass


class _NoBytes:
    """Moves blocks that have nothing in them."""

    block_bytes = 64
    layout = "scripted"

    def mark(self) -> object:
        return None

    def allocate(self, num_rows: int) -> Any:
        import numpy as np

        return np.zeros((num_rows, self.block_bytes), np.uint8)

    def read(self, blocks: Sequence[int], memory: Any, rows: Sequence[int], after: object) -> None:
        pass

    def write(self, blocks: Sequence[int], memory: Any, rows: Sequence[int], after: object) -> None:
        pass

    def close(self) -> None:
        pass


def cases(
    zipfs: Sequence[float], pools: Sequence[float], concurrencies: Sequence[int], **rest: Any
) -> Iterator[Case]:
    """All combinations."""
    for zipf, pool, concurrency in itertools.product(zipfs, pools, concurrencies):
        yield Case(zipf, pool, concurrency, **rest)
