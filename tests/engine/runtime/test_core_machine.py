"""Anything, in any order, through `EngineCore`: every step is checked by the rig.

Requests of every kind come, wait, run, are paused, preempted, given up and go on, over tiers that
are slow, fail and lose blocks, while time passes that the test alone decides on. Whatever happens,
each answer is the one that its prompt has alone, every request comes to its end, and at the end
nothing is held.

    make soak-core MINUTES=30

goes on for as long as it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from core_rig import MODES, Letters, Rig, Shelf
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ragserve.engine import QueueTimeoutError, Request, Retention
from ragserve.engine.cache import block_pool as block_pool_module
from ragserve.engine.cache.block_hash import BlockHash
from ragserve.engine.cache.layout import BlockLayout
from ragserve.engine.offload import host_tier as host_tier_module
from ragserve.engine.offload.host_tier import HostTier
from ragserve.engine.offload.tiers import BlockIO, BlockStore
from ragserve.engine.runtime import core as core_module
from ragserve.engine.scheduling import request as request_module
from ragserve.engine.scheduling.request import RequestState

SYSTEM, DOCUMENT, ANSWER = Retention.SYSTEM, Retention.DOCUMENT, Retention.ANSWER

FAMILIES = [
    [[seed + position % 3 for position in range(length)] for seed, length in enumerate(lengths)]
    for lengths in ((8, 9, 4, 5), (3, 13, 8, 1))
]
"""Segments that requests have in common."""

NAMESPACES = ["", "tenant"]
LEASES = st.sampled_from([None, None, 1.0, 10.0])
TIERS = ["none", "none", "disk", "disk", "host", "both"]


class Clock:
    """Time that passes when the test says so, and a little whenever it is looked at.

    Stands for the module `time` in those that look at leases, time limits and the cost of a load.
    """

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        self.now += 1000
        return self.now

    def perf_counter(self) -> float:
        return self.monotonic_ns() / 1e9

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


def stores_of(kind: str, rows: int) -> Callable[[BlockIO], Sequence[BlockStore]]:
    """Makes the tiers of a core.

    :param rows: blocks that the host's memory holds; a disk holds three times as many.
    """

    def make(io: BlockIO) -> list[BlockStore]:
        host: list[BlockStore] = [HostTier(io, rows * io.block_bytes)] if kind != "disk" else []
        return [*host, *([Shelf("disk", 3 * rows)] if kind != "host" else [])]

    return make if kind != "none" else lambda io: ()


class CoreMachine(RuleBasedStateMachine):
    """Requests of every kind, and everything that can happen to them."""

    @initialize(
        num_blocks=st.integers(5, 20),
        block_size=st.sampled_from([4, 2, 8, 1]),
        max_num_seqs=st.sampled_from([3, 4, 2, 1]),
        budget=st.sampled_from([0, 1, 4, 12, 40]),
        caching=st.sampled_from([True, True, True, False]),
        threshold=st.sampled_from([None, 1, 8, 20]),
        max_long=st.integers(1, 2),
        watermark=st.sampled_from([0.0, 0.0, 0.25]),
        max_prefill=st.sampled_from([None, None, 1, 5]),
        mode=st.sampled_from([*MODES, (3, 2)]),
        stops=st.booleans(),
        policy=st.sampled_from(["cost_aware", "cost_aware", "lru"]),
        timeout=st.sampled_from([None, None, 5.0]),
        tiers=st.sampled_from(TIERS),
        rows=st.integers(1, 12),
    )
    def open(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        threshold: int | None,
        max_long: int,
        watermark: float,
        max_prefill: int | None,
        mode: tuple[int, int],
        stops: bool,
        policy: str,
        timeout: float | None,
        tiers: str,
        rows: int,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        for module in (block_pool_module, core_module, host_tier_module, request_module):
            self.patch.setattr(module, "time", self.clock)
        self.rig = Rig(
            num_blocks,
            cache_policy=policy,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=threshold,
            max_long_partial_prefills=max_long,
            watermark=watermark,
            max_num_mixed_tokens=max_prefill,
            queue_timeout=timeout,
            depth=mode[0],
            steps=mode[1],
            stops=stops,
            stores=stores_of(tiers if caching else "none", rows),
        )
        self.aborted: set[Request] = set()
        self.expired: set[Request] = set()
        self.pins: list[list[BlockHash]] = []

    @property
    def live(self) -> list[Request]:
        return [r for r in self.rig.requests if r.state is not RequestState.FINISHED]

    # -- requests -------------------------------------------------------------------------

    @rule(
        family=st.sampled_from(FAMILIES),
        depth=st.integers(0, 4),
        question=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        priority=st.integers(-1, 1),
        namespace=st.sampled_from(NAMESPACES),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.sampled_from([20, 1, 2, 8, 30]),
        stop=st.sampled_from([False, False, True]),
        min_tokens=st.integers(0, 3),
        letter=st.sampled_from(["", "", "e", "k"]),
        on_host=st.sampled_from([False, False, False, True]),
        scored=st.sampled_from([False, False, False, True]),
        seconds=LEASES,
    )
    def add(
        self,
        family: list[list[int]],
        depth: int,
        question: list[int],
        priority: int,
        namespace: str,
        n: int,
        max_tokens: int,
        stop: bool,
        min_tokens: int,
        letter: str,
        on_host: bool,
        scored: bool,
        seconds: float | None,
    ) -> None:
        segments = self._fitting([*family[:depth], question])
        if not segments:
            segments = [[1] * self.rig.config.block_size]
        kinds = [SYSTEM, *[DOCUMENT] * len(segments)][: len(segments) - 1]
        choices = self.rig.add_choices(
            segments,
            kinds=[*kinds, ANSWER],
            priority=priority,
            namespace=namespace,
            seconds=seconds,
            n=n,
            max_tokens=max_tokens,
            stop_token_ids=range(8) if stop else None,
            min_tokens=min(min_tokens, max_tokens),
            bad_words=["x"] if on_host else None,
            prompt_logprobs=0 if scored else None,
        )
        for choice in choices:
            choice.text = Letters(letter) if letter else None
        note(f"{choices[0]!r}: {[*map(len, segments)]}, at most {choices[0].max_tokens}")

    @rule(
        family=st.sampled_from(FAMILIES),
        depth=st.integers(1, 4),
        namespace=st.sampled_from(NAMESPACES),
        how=st.sampled_from(["plain", "speculative", "speculative", "persist", "persist"]),
        seconds=LEASES,
    )
    def prefill(
        self,
        family: list[list[int]],
        depth: int,
        namespace: str,
        how: str,
        seconds: float | None,
    ) -> None:
        segments = self._fitting(family[:depth])
        if segments:
            kinds = [SYSTEM, *[DOCUMENT] * len(segments)][: len(segments)]
            request = self.rig.add_prefill(
                segments,
                kinds,
                namespace=namespace,
                speculative=how == "speculative",
                persist=how == "persist",
                seconds=seconds,
            )
            note(f"{request!r}: {[*map(len, segments)]}, {how}")

    def _fitting(self, segments: list[list[int]]) -> list[list[int]]:
        """The first segments, and, if there are several, the last one, as far as the pool holds
        them and a token."""
        size, most = self.rig.config.block_size, self.rig.num_blocks
        while segments:
            lengths = [*map(len, segments)]
            if BlockLayout(lengths, size).num_blocks(sum(lengths) + 1) <= most:
                break
            segments = segments[:-1]
        return segments

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
        note(f"{self.rig.model.plans[-1:]}, {list(self.rig.scheduler.live())}")

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 20), whole=st.booleans())
    def abort(self, number: int, whole: bool) -> None:
        self._abort(self.live[number % len(self.live)], whole)

    @precondition(lambda self: any(r.loading for r in self.live))
    @rule(number=st.integers(0, 20))
    def abort_while_it_loads(self, number: int) -> None:
        loading = [r for r in self.live if r.loading]
        self._abort(loading[number % len(loading)], whole=False)

    def _abort(self, chosen: Request, whole: bool) -> None:
        for request in self.live if whole else [chosen]:
            if request.request_id == chosen.request_id:
                update = self.rig.core.abort(request)
                assert update is not None
                assert update.finished
                self.aborted.add(request)
        self.rig.check()

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 20))
    def pause(self, number: int) -> None:
        # Mostly one that runs, as those are that a slow consumer stops.
        chosen = self.rig.scheduler.running or self.live
        chosen[number % len(chosen)].paused = True

    @precondition(lambda self: any(r.paused for r in self.live))
    @rule(number=st.integers(0, 20))
    def resume(self, number: int) -> None:
        paused = [r for r in self.live if r.paused]
        paused[number % len(paused)].paused = False

    # -- the cache ------------------------------------------------------------------------

    @rule(really=st.integers(0, 3))
    def forget(self, really: int) -> None:
        if really:
            return
        done = self.rig.core.forget_cache()
        self.rig.check()
        if really == 0 and self.rig.tiers is not None:
            self.rig.move()
            assert done.done()
            assert not any(key in self.rig.tiers for key in self._keys())

    @precondition(lambda self: self.rig.requests)
    @rule(number=st.integers(0, 20), count=st.integers(1, 4))
    def pin(self, number: int, count: int) -> None:
        request = self.rig.requests[number % len(self.rig.requests)]
        room = self.rig.num_blocks // 2 - self.rig.pool.num_pinned
        keys = request.keys[: min(count, max(0, room))]
        if keys:
            self.pins.append(keys)
            self.rig.pool.pin(keys)

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 20))
    def unpin(self, number: int) -> None:
        self.rig.pool.unpin(self.pins.pop(number % len(self.pins)))

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for update in self.rig.core.expire():
            assert isinstance(update.error, QueueTimeoutError)
            assert update.request.timeline.first_scheduled is None
            self.expired.add(update.request)
        self.rig.check()

    # -- tiers ----------------------------------------------------------------------------

    @precondition(lambda self: self.rig.moving)
    @rule(count=st.integers(1, 3), failing=st.sampled_from([False, False, False, True]))
    def move(self, count: int, failing: bool) -> None:
        self.rig.io.failing = failing
        self.rig.move(count)
        self.rig.io.failing = False

    @precondition(lambda self: self.rig.stores)
    @rule(share=st.integers(0, 255), slow=st.sampled_from([None, 0.0, 1e9]))
    def lose(self, share: int, slow: float | None) -> None:
        for store in self.rig.stores:
            if isinstance(store, Shelf):
                store.seconds = slow
                for key in [key for key in store.kept if key[0] < share]:
                    del store.kept[key]

    @precondition(lambda self: self.rig.stores)
    @rule(share=st.sampled_from([0, 0, 64, 255]))
    def damage(self, share: int) -> None:
        for store in self.rig.stores:
            if isinstance(store, Shelf):
                store.is_broken = lambda key: key[0] < share

    @precondition(lambda self: self.rig.stores)
    @rule()
    def leave_to_the_tiers(self) -> None:
        """What the pool has cached is in the tiers alone now."""
        pool, store = self.rig.pool, self.rig.stores[-1]
        for key in self._keys():
            block = pool.block_of(key)
            if block is not None:
                store.save([key], [block], self.rig.io, None)
        pool.clear()
        self.rig.check()

    @precondition(lambda self: self.rig.stores)
    @rule(
        family=st.sampled_from(FAMILIES),
        depth=st.integers(1, 4),
        namespace=st.sampled_from(NAMESPACES),
        crowd=st.lists(st.sampled_from([1, 2, 3, 12]), max_size=4),
    )
    def speculate_on_tiers(
        self, family: list[list[int]], depth: int, namespace: str, crowd: list[int]
    ) -> None:
        """Blocks that only a tier has are loaded on speculation, and a crowd arrives meanwhile.

        By chance alone this is rare: nothing else may run when the load starts.

        :param crowd: the lengths of the prompts that arrive, a step apart.
        """
        for request in self.live:
            request.paused = False
        self.rig.drain()
        self.prefill(family, depth, namespace, "plain", None)
        self.rig.drain()
        self.leave_to_the_tiers()
        self.prefill(family, depth, namespace, "speculative", None)
        self.rig.step()
        for length in crowd:
            segments = self._fitting([[length % 3] * length])
            if segments:
                self.rig.add_choices(segments, kinds=[ANSWER], max_tokens=12)
            self.rig.step()

    def _keys(self) -> list[BlockHash]:
        return [*dict.fromkeys(key for request in self.rig.requests for key in request.keys)]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self._come_to_the_end()
        finally:
            self.patch.undo()

    def _come_to_the_end(self) -> None:
        rig = self.rig
        for request in self.live:
            request.paused = False
        rig.drain()
        for request in rig.requests:
            reasons: tuple[str, ...] = ("stop", "length")
            if request in self.aborted:
                reasons = ("abort",)
            elif request in self.expired:
                reasons = ("error",)
            assert request.finish_reason in reasons
            if request.index == 0:
                whole = request.num_prompt_tokens + request.prefill_only
                assert request.timeline.cached_tokens < whole
                if not rig.config.enable_prefix_caching:
                    assert request.timeline.cached_tokens == 0
        assert rig.hit_tokens <= rig.query_tokens
        generated = sum(len(r.output_token_ids) for r in rig.requests)
        assert rig.core.generated_tokens == generated
        # Nothing lingers: the whole pool can be had.
        for keys in self.pins:
            rig.pool.unpin(keys)
        while rig.moving:
            rig.move()
            rig.scheduler.schedule()
        rig.check()
        assert not rig.scheduler._inflight
        assert rig.pool.num_pinned == 0
        assert not [*rig.scheduler.wanted]
        assert rig.pool.allocate(rig.num_blocks) is not None


CoreMachine.TestCase.settings = settings(deadline=None, max_examples=300, stateful_step_count=60)
TestCore: Any = CoreMachine.TestCase
TestCore.pytestmark = [pytest.mark.timeout(600)]
