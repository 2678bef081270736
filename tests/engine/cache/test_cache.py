"""What prompts share: computed once, found, waited for, kept, explained; through a scripted model.

The model reads every sequence back from its blocks, so that a block that was shared, moved or kept
wrongly raises.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from core_rig import ScriptedIO, Shelf
from hypothesis import given, settings
from hypothesis import strategies as st

from ragserve.engine import (
    Engine,
    EngineConfig,
    EngineCore,
    InvalidParamsError,
    LoadedModel,
    Prompt,
    QueueFullError,
    Request,
    Retention,
    SamplingParams,
    Segment,
    TokenizedPrompt,
)
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.offload.tiers import BlockStore, TierName, Tiers
from ragserve.engine.scheduling.admission import MAX_BYPASSES
from ragserve.engine.scheduling.request import RequestState
from ragserve.testing import ScriptedModel

SIZE = 16
ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Rig:
    """A core over a scripted model; `step` runs one plan."""

    def __init__(self, num_blocks: int = 64, *stores: BlockStore, **knobs: Any) -> None:
        self.config = EngineConfig(
            **({"block_size": SIZE, "watermark": 0.0, "num_tokenizers": 1} | knobs)
        )
        self.model = ScriptedModel([1] * 500, num_blocks=num_blocks)
        self.model.load(self.config)
        self.pool = BlockPool(num_blocks, cost_aware=self.config.cache_policy == "cost_aware")
        tiers = Tiers(stores, ScriptedIO(self.model, SIZE)) if stores else None
        self.moved = threading.Event()
        if tiers is not None:
            tiers.on_end = self.moved.set
        self.core = EngineCore(self.config, self.pool, self.model, tiers)
        self._names = iter(range(10**6))

    def add(
        self,
        *segments: Sequence[int],
        kinds: Sequence[Any] = (),
        namespace: str = "",
        max_tokens: int = 1,
        priority: int = 0,
        params: SamplingParams = ONE,
        **how: Any,
    ) -> Request:
        prompt = TokenizedPrompt(
            [token for segment in segments for token in segment],
            tuple(map(len, segments)),
            kinds=tuple(kinds),
        )
        request = Request(
            str(next(self._names)),
            prompt,
            params,
            block_size=SIZE,
            max_tokens=0 if how.get("prefill_only") else max_tokens,
            namespace=namespace,
            priority=priority,
            **how,
        )
        self.core.add(request)
        return request

    def step(self) -> None:
        self.core.step()
        self.core.check_integrity()

    def run(self, *requests: Request) -> None:
        """Until these have ended, or all."""
        for _ in range(3000):
            live = list(self.core.scheduler.live())
            if not any(r.state is not RequestState.FINISHED for r in requests or live):
                return
            self.moved.clear()
            before = self.core.num_steps
            self.step()
            if self.core.num_steps == before and any(r.loading for r in live):
                assert self.moved.wait(10)
        raise AssertionError(f"{list(self.core.scheduler.live())} do not end")

    def settle(self) -> None:
        """Until every transfer has ended, and the pool has its blocks back."""
        tiers = self.core.tiers
        assert tiers is not None
        with anyio_timeout():
            while tiers.num_under_way:
                self.core.scheduler.schedule()

    def computed(self, request: Request) -> int:
        """Tokens of its prompt that were computed for it."""
        return sum(
            count for plan in self.model.plans for name, _, count in plan
            if name == request.request_id
        )  # fmt: skip

    def close(self) -> None:
        self.core.close()


class anyio_timeout:
    """Ends a test whose transfers never end."""

    def __enter__(self) -> None:
        self._timer = threading.Timer(20, lambda: None)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


SYSTEM = list(range(20))
DOCUMENT = [50 + position % 40 for position in range(100)]
OTHER = [100 + position % 40 for position in range(90)]
KINDS = ("system", "document", "question")


def question(number: int, length: int = 12) -> list[int]:
    return [200 + number % 50] * length


# -- in flight --------------------------------------------------------------------------------


def test_of_many_questions_on_one_document_one_computes_it() -> None:
    rig = Rig(256, max_num_batched_tokens=64)
    requests = [rig.add(SYSTEM, DOCUMENT, question(n), kinds=KINDS) for n in range(32)]
    rig.run()
    assert rig.computed(requests[0]) == 132
    for request in requests[1:]:
        assert rig.computed(request) == 12, "its question alone"
        assert request.timeline.cached_tokens == 120
        assert [part.miss for part in request.timeline.reuse] == [None, None, "shorter_than_block"]
    assert rig.core.scheduler.reuse.awaited_tokens == 31 * 120


def test_by_age_alone_nobody_waits_for_another() -> None:
    rig = Rig(256, max_num_batched_tokens=512, cache_policy="lru")
    requests = [rig.add(SYSTEM, DOCUMENT, question(n), kinds=KINDS) for n in range(3)]
    rig.run()
    assert [rig.computed(request) for request in requests] == [132, 132, 132]


def test_blocks_are_shared_chunk_by_chunk() -> None:
    rig = Rig(256, max_num_batched_tokens=64, max_num_seqs=8)
    first = rig.add(SYSTEM, DOCUMENT * 4, question(0))
    rig.step()
    # It shares what the first chunk has computed, and no more: nothing to wait for.
    second = rig.add(SYSTEM, DOCUMENT[:32], question(1))
    rig.step()
    assert second.timeline.cached_tokens == 52
    assert second.state is RequestState.FINISHED or second.num_computed > 52
    assert first.state is RequestState.RUNNING
    rig.run()


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_who_waits_goes_on_when_the_other_does_not(end: str) -> None:
    rig = Rig(256, max_num_batched_tokens=64)
    first = rig.add(SYSTEM, DOCUMENT, question(0))
    second = rig.add(SYSTEM, DOCUMENT, question(1))
    rig.step()
    assert second.state is RequestState.WAITING
    if end == "abort":
        rig.core.abort(first)
    else:
        rig.core.scheduler._preempt(first)
        first.paused = True
    rig.run(second)
    assert rig.computed(second) <= 132 - 48, "what was there is shared all the same"
    first.paused = False
    rig.run()


def test_another_tenant_neither_finds_nor_waits() -> None:
    rig = Rig(256, max_num_batched_tokens=200)
    first = rig.add(SYSTEM, DOCUMENT, question(0), namespace="one")
    second = rig.add(SYSTEM, DOCUMENT, question(0), namespace="two")
    third = rig.add(SYSTEM, DOCUMENT, question(0), namespace="one")
    rig.step()
    assert second.state is RequestState.RUNNING
    assert third.state is RequestState.WAITING
    rig.run()
    assert [rig.computed(request) for request in (first, second)] == [132, 132]


def test_who_waits_lends_its_priority() -> None:
    rig = Rig(256, max_num_batched_tokens=64, max_num_seqs=64)
    slow = rig.add(SYSTEM, DOCUMENT * 4, question(0), priority=9)
    rig.step()
    urgent = rig.add(SYSTEM, DOCUMENT * 4, question(1), priority=0)
    other = rig.add([9] * 400, priority=5)
    rig.step()
    assert urgent.state is RequestState.WAITING
    assert slow.sort_key < urgent.sort_key < other.sort_key
    rig.run()
    assert rig.computed(urgent) == 12


# -- order of admission -----------------------------------------------------------------------


def test_who_finds_most_goes_first() -> None:
    rig = Rig(256, max_num_seqs=1, max_num_batched_tokens=512)
    rig.run(rig.add(SYSTEM, DOCUMENT, question(0)))
    cold = rig.add(SYSTEM, OTHER, question(1))
    warm = rig.add(SYSTEM, DOCUMENT, question(2))
    rig.run(warm)
    assert cold.state is RequestState.WAITING
    urgent = rig.add([9] * 40, priority=-1)
    rig.run(urgent)
    assert cold.state is RequestState.WAITING, "priority counts more"
    rig.run()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=30, max_size=60))
def test_nobody_is_overtaken_without_end(warm: list[bool]) -> None:
    rig = Rig(256, max_num_seqs=1, max_num_batched_tokens=512)
    rig.run(rig.add(SYSTEM, DOCUMENT, question(0)))
    requests = []
    victim = rig.add(SYSTEM, OTHER, question(1))
    for number, is_warm in enumerate(warm):
        document = DOCUMENT if is_warm else [number] * 30
        requests.append(rig.add(SYSTEM, document, question(number)))
        rig.step()
    rig.run()
    started = victim.timeline.first_scheduled
    assert started is not None
    before = [r for r in requests if (r.timeline.first_scheduled or 0) < started]
    assert len(before) <= MAX_BYPASSES + 1
    assert all(r.bypass_count <= MAX_BYPASSES for r in requests)


def test_what_waiting_requests_name_is_spared() -> None:
    rig = Rig(24, max_num_seqs=1, max_num_batched_tokens=512, max_model_len=320)
    rig.run(rig.add(SYSTEM, DOCUMENT, question(0)))
    running = rig.add([7] * 100, max_tokens=100)
    rig.step()
    waiting = rig.add(SYSTEM, DOCUMENT, question(1), priority=1)
    for _ in range(60):
        rig.step()
    assert len(waiting.protected) == 9
    rig.run()
    assert running.state is RequestState.FINISHED
    assert waiting.timeline.cached_tokens == 120
    assert not rig.pool._wanted


# -- why not more -----------------------------------------------------------------------------


def reuse(request: Request) -> list[tuple[str, int, int, str | None]]:
    return [(r.kind, r.tokens, r.cached_tokens, r.miss) for r in request.timeline.reuse]


def test_every_miss_has_its_reason() -> None:
    rig = Rig(64)
    one = rig.add(SYSTEM, DOCUMENT, OTHER, question(0), kinds=(*KINDS[:2], *KINDS[1:]))
    rig.run()
    assert reuse(one) == [
        ("system", 20, 0, "never_seen"),
        ("document", 100, 0, "never_seen"),
        ("document", 90, 0, "never_seen"),
        ("question", 12, 0, "shorter_than_block"),
    ]
    turned = rig.add(SYSTEM, OTHER, DOCUMENT, question(1), kinds=(*KINDS[:2], *KINDS[1:]))
    rig.run()
    assert reuse(turned)[:3] == [
        ("system", 20, 20, None),
        ("document", 90, 0, "other_order"),
        ("document", 100, 0, "other_order"),
    ]
    again = rig.add(SYSTEM, OTHER, DOCUMENT, question(1, 40), kinds=(*KINDS[:2], *KINDS[1:]))
    rig.run()
    assert reuse(again)[3] == ("question", 40, 0, "never_seen")
    assert again.timeline.reuse[1].source == "device"
    foreign = rig.add(SYSTEM, question(1), kinds=("system", "question"), namespace="other")
    rig.run()
    assert reuse(foreign)[0] == ("system", 20, 0, "never_seen"), "no oracle"
    misses = rig.core.scheduler.reuse.miss_tokens
    assert misses["other_order"] == 190
    assert misses["shorter_than_block"] == 12 + 12 + 8 + 12
    assert misses["never_seen"] == 210 + 32 + 20


def test_what_other_namespaces_send_changes_no_count_of_ours() -> None:
    def counts(*theirs: list[int]) -> tuple[Any, ...]:
        rig = Rig()
        for number, namespace in enumerate("abcdefghijkl"):
            rig.run(rig.add(*theirs, question(number), kinds=KINDS, namespace=namespace))
        recorder = rig.core.scheduler.reuse
        before = recorder.miss_tokens.copy()
        mine = [rig.add(SYSTEM, DOCUMENT, question(0), kinds=KINDS, namespace="mine")]
        rig.run()
        mine.append(rig.add(OTHER, DOCUMENT, question(0), kinds=KINDS, namespace="mine"))
        rig.run()
        return recorder.miss_tokens - before, [reuse(request) for request in mine]

    assert counts(SYSTEM, DOCUMENT) == counts(OTHER, OTHER)


def test_what_made_room_is_called_evicted() -> None:
    rig = Rig(12, max_model_len=192)
    rig.run(rig.add(SYSTEM, DOCUMENT, question(0), kinds=KINDS))
    rig.run(rig.add([7] * 190))
    again = rig.add(SYSTEM, DOCUMENT, question(0), kinds=KINDS)
    rig.run()
    assert reuse(again)[1] == ("document", 100, 0, "evicted")


def test_without_a_cache_that_is_the_reason() -> None:
    rig = Rig(64)
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    rig.run(rig.add(SYSTEM, question(0)))
    request = rig.add(SYSTEM, question(0), params=asked)
    rig.core.scheduler.schedule()
    assert {part.miss for part in request.timeline.reuse} == {"not_cached"}


# -- ahead of the question --------------------------------------------------------------------


def test_a_prompt_that_is_only_computed_is_found_with_its_last_block() -> None:
    rig = Rig(64)
    ahead = rig.add(SYSTEM, DOCUMENT, prefill_only=True)
    rig.run()
    assert ahead.finish_reason == "length"
    assert ahead.output_token_ids == []
    asked = rig.add(SYSTEM, DOCUMENT, question(0))
    rig.run()
    assert asked.timeline.cached_tokens == 120
    again = rig.add(SYSTEM, DOCUMENT, prefill_only=True)
    rig.step()
    assert again.state is RequestState.FINISHED
    assert again.timeline.cached_tokens == 120
    assert rig.computed(again) == 0


def test_speculation_takes_only_what_nobody_wants() -> None:
    rig = Rig(64, max_num_batched_tokens=64)
    guess = rig.add([3] * 300, prefill_only=True, speculative=True)
    running = rig.add([4] * 40, max_tokens=20)
    rig.run(running)
    assert rig.computed(guess) == 0
    rig.step()
    assert rig.computed(guess) == 64
    # Who comes now waits for no more than that, and not for what the other would compute.
    late = rig.add([3] * 300)
    rig.step()
    assert late.state is RequestState.RUNNING
    assert late.timeline.cached_tokens == 64
    rig.run()
    assert guess.finish_reason == "length"


def test_speculation_gives_way() -> None:
    rig = Rig(20, max_num_seqs=1, max_num_batched_tokens=256, max_model_len=320)
    guess = rig.add([3] * 300, prefill_only=True, speculative=True)
    rig.step()
    other = rig.add([4] * 280)
    rig.run(other)
    assert guess.state is RequestState.WAITING
    rig.run()


# -- kept -------------------------------------------------------------------------------------


def cached(pool: BlockPool, request: Request) -> int:
    return len(pool.find(request.keys))


def test_what_is_used_more_stays_longer() -> None:
    rig = Rig(40, max_model_len=320)
    hot = [rig.add(SYSTEM, DOCUMENT, question(n), kinds=KINDS) for n in range(4)]
    rig.run()
    once = rig.add(SYSTEM, OTHER, question(5), kinds=KINDS)
    rig.run()
    for number in range(12):
        rig.run(rig.add([number] * 120, kinds=("document",)))
    assert cached(rig.pool, hot[0]) >= 8
    assert cached(rig.pool, once) < 8


def test_what_was_hot_goes_in_the_end() -> None:
    rig = Rig(40, max_model_len=320)
    hot = [rig.add(SYSTEM, DOCUMENT, question(n), kinds=KINDS) for n in range(4)]
    rig.run()
    for number in range(4000):
        rig.run(rig.add(SYSTEM, [number % 250] * 90, [number // 250] * 12, kinds=KINDS))
        if cached(rig.pool, hot[0]) == 2:
            return
    raise AssertionError("it stays for ever")


def test_a_retention_ends_with_its_time() -> None:
    pool = BlockPool(8)
    kinds = ("document",)
    for seconds, stays in ((1e9, True), (1e-6, False)):
        rig = Rig(8, max_model_len=128)
        pool = rig.pool
        prompt = TokenizedPrompt(
            [1] * 32, (32,), (Retention.SYSTEM,), kinds=kinds, retention_seconds=(seconds,)
        )
        keeper = Request("k", prompt, ONE, block_size=SIZE, max_tokens=0, prefill_only=True)
        rig.core.add(keeper)
        rig.run()
        for number in range(3):  # documents that were found once more
            for _ in range(3):
                rig.run(rig.add([60 + number] * 32, kinds=kinds, prefill_only=True))
        rig.run(rig.add([9] * 50))
        assert (cached(pool, keeper) == 2) is stays


def test_pinned_blocks_go_last_and_only_if_a_request_needs_all() -> None:
    rig = Rig(20, max_model_len=320)
    pinned = rig.add(SYSTEM, prefill_only=True)
    rig.pool.pin(pinned.keys)
    rig.run()
    for number in range(10):
        rig.run(rig.add([number] * 250))
    assert cached(rig.pool, pinned) == 2
    rig.run(rig.add([99] * 300, max_tokens=20))
    assert cached(rig.pool, pinned) == 0
    rig.run(rig.add(SYSTEM, question(1)))
    for number in range(10):
        rig.run(rig.add([number] * 250))
    assert cached(rig.pool, pinned) == 2, "pinned again once it is there again"
    rig.pool.unpin(pinned.keys)
    for number in range(10):
        rig.run(rig.add([number] * 300))
    assert cached(rig.pool, pinned) == 0


# -- tiers ------------------------------------------------------------------------------------


def fill(rig: Rig, count: int, length: int = 250) -> None:
    for number in range(count):
        rig.run(rig.add([number] * length))


def test_what_was_found_comes_back_from_a_tier() -> None:
    shelf = Shelf()
    rig = Rig(24, shelf, max_model_len=320)
    for number in range(3):
        rig.run(rig.add(SYSTEM, DOCUMENT, question(number), kinds=KINDS))
    fill(rig, 30, 100)
    rig.settle()
    fill(rig, 30)
    again = rig.add(SYSTEM, DOCUMENT, question(9), kinds=KINDS)
    found = cached(rig.pool, again)
    assert found < 9
    rig.run()
    assert again.timeline.cached_tokens == 120
    assert rig.computed(again) == 12
    assert [part.source for part in again.timeline.reuse][1:] == ["host", None]
    assert shelf.loaded == 9 - found
    rig.close()


@pytest.mark.parametrize(
    ("name", "kind", "moves"),
    [
        ("host", "turn", False),
        ("host", "document", True),
        ("disk", "document", False),
        ("disk", "system", True),
    ],
)
def test_what_nobody_found_again_moves_where_that_is_likely_to_be_of_use(
    name: TierName, kind: str, moves: bool
) -> None:
    shelf = Shelf(name)
    rig = Rig(24, shelf, max_model_len=320)
    for number in range(30):
        rig.run(rig.add([number] * 100, kinds=[kind]))
    rig.settle()
    assert (shelf.saved > 0) is moves
    rig.close()


def test_a_broken_block_is_computed_again() -> None:
    shelf = Shelf()
    rig = Rig(24, shelf, max_model_len=320)
    first = rig.add(SYSTEM, DOCUMENT, prefill_only=True, persist=True)
    rig.run()
    rig.settle()
    assert shelf.saved == 9
    fill(rig, 20)
    shelf.is_broken = lambda key: key == first.keys[5]
    again = rig.add(SYSTEM, DOCUMENT, question(9), kinds=KINDS)
    rig.run()
    assert again.timeline.cached_tokens == again.layout.start(5)
    assert rig.computed(again) == 132 - again.layout.start(5)
    rig.close()


def test_what_is_faster_computed_is_not_loaded() -> None:
    shelf = Shelf()
    rig = Rig(24, shelf, max_model_len=320)
    rig.run(rig.add(SYSTEM, DOCUMENT, prefill_only=True, persist=True))
    rig.settle()
    fill(rig, 20)
    shelf.seconds = 100.0
    again = rig.add(SYSTEM, DOCUMENT, question(9), kinds=KINDS)
    rig.run()
    assert (shelf.loaded, rig.computed(again)) == (0, 132)
    rig.close()


def test_a_request_that_is_given_up_while_it_loads_loses_no_block() -> None:
    shelf = Shelf()
    rig = Rig(24, shelf, max_model_len=320)
    rig.run(rig.add(SYSTEM, DOCUMENT, prefill_only=True, persist=True))
    rig.settle()
    fill(rig, 20)
    again = rig.add(SYSTEM, DOCUMENT, question(9), kinds=KINDS)
    rig.core.scheduler.schedule()
    assert again.loading is not None
    rig.core.abort(again)
    rig.core.check_integrity()
    rig.settle()
    rig.core.check_integrity()
    assert rig.pool.num_available == 24
    rig.close()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_whatever_moves_the_answers_are_those_without_a_cache(data: st.DataObject) -> None:
    """The scripted model raises if a block holds other tokens than its sequence."""
    shelves: list[BlockStore] = [
        Shelf("host", data.draw(st.integers(1, 12))),
        Shelf("disk", data.draw(st.integers(1, 40))),
    ]
    rig = Rig(
        data.draw(st.integers(21, 30)),
        *shelves[: data.draw(st.integers(1, 2))],
        max_model_len=320,
        max_num_batched_tokens=data.draw(st.sampled_from([8, 40, 300])),
        max_num_seqs=data.draw(st.sampled_from([1, 4])),
    )
    documents = [[60 + n] * length for n, length in enumerate((16, 40, 7, 33))]
    for number in range(data.draw(st.integers(4, 16))):
        chosen = data.draw(st.lists(st.integers(0, 3), max_size=3, unique=True))
        kinds = ["system", *["document"] * len(chosen)]
        parts = [SYSTEM, *(documents[index] for index in chosen)]
        how = data.draw(st.sampled_from(["ask", "ask", "warm", "guess", "broken", "clear"]))
        if how == "ask":
            rig.add(
                *parts, question(number), kinds=[*kinds, "question"],
                max_tokens=data.draw(st.integers(1, 30)),
                namespace=data.draw(st.sampled_from(["", "", "b"])),
            )  # fmt: skip
        elif how == "broken":
            for shelf in shelves:
                assert isinstance(shelf, Shelf)
                share = data.draw(st.integers(0, 64))
                shelf.is_broken = lambda key, share=share: key[0] < share  # type: ignore[misc]
        elif how == "clear":
            rig.pool.clear()
        else:
            rig.add(
                *parts, kinds=kinds, prefill_only=True, speculative=how == "guess",
                persist=how == "warm",
            )  # fmt: skip
        if data.draw(st.booleans()):
            rig.run()
        else:
            rig.step()
        given_up = data.draw(st.integers(0, 5)) == 0
        live = list(rig.core.scheduler.live())
        if live and given_up:
            rig.core.abort(live[0])
            rig.core.check_integrity()
    rig.run()
    rig.settle()
    rig.core.check_integrity()
    assert rig.pool.num_available == rig.pool.num_blocks
    assert not rig.core.scheduler._inflight
    rig.close()


# -- through the engine -----------------------------------------------------------------------


def prompt(*texts: str) -> Prompt:
    kinds: list[Any] = ["system", *["document"] * len(texts)][: len(texts) - 1]
    return Prompt(tuple(Segment(t, k) for t, k in zip(texts, [*kinds, "question"], strict=True)))


def test_prefill_warm_pin_and_probe() -> None:
    async def main() -> None:
        async with Engine.open(ScriptedModel("yes"), block_size=SIZE) as engine:
            system, document = "You are kind. " * 3, "Paris is a city. " * 5
            ahead = Prompt((Segment(system, "system"), Segment(document, "document")))
            probe = engine.probe()
            first = engine.tokenizer.tokenize(ahead)
            cut = first.segment_lengths[0]
            ids = first.token_ids[:cut], first.token_ids[cut:]
            assert not probe.begins(probe.root, ids[0])
            assert await engine.warm([ahead, ahead]) == len(first.token_ids)
            after, cached = probe.extend(probe.root, ids[0])
            assert (probe.begins(probe.root, ids[0]), cached) == (True, cut)
            assert probe.extend(after, ids[1])[1] == len(ids[1])
            assert engine.probe("other").extend(engine.probe("other").root, ids[0])[1] == 0
            answer = await engine.generate(prompt(system, document, "Why?"), ONE)
            assert answer.usage.cached_tokens == len(first.token_ids)
            assert [part.kind for part in answer.reuse] == ["system", "document", "question"]
            async with engine.prefill(ahead) as stream:
                deltas = [delta async for delta in stream]
            assert [(d.text, d.finish_reason) for d in deltas] == [("", "length")]
            assert stream.completion.usage.completion_tokens == 0

            pin = await engine.pin(Prompt((Segment(system, "system"),)))
            assert engine.statistics().cache.blocks_pinned == pin.num_blocks == 3
            pin.release()
            pin.release()
            await engine.check_integrity()
            cache = engine.statistics().cache
            assert cache.blocks_pinned == 0
            assert cache.query_tokens["document"] == cache.hit_tokens["document"] == len(ids[1])
            assert engine.statistics().num_finished["length"] == 1, "what is computed ahead is none"
            await engine.pin("x" * 4080)
            with pytest.raises(InvalidParamsError, match="half of the pool"):
                await engine.pin("y" * 40)

    anyio.run(main)


def test_speculation_is_refused_where_somebody_waits() -> None:
    async def main() -> None:
        model = ScriptedModel("x" * 200, step_seconds=0.002)
        async with Engine.open(model, max_num_seqs=1) as engine:
            streams = [engine.stream("a"), engine.stream("b")]
            for stream in streams:
                await stream.__aenter__()
            with anyio.fail_after(60):
                while not engine.statistics().num_running:
                    await anyio.sleep(0.001)
            with pytest.raises(QueueFullError):
                await engine.prefill("c", speculative=True).__aenter__()
            for stream in streams:
                await stream.aclose()

    anyio.run(main)


def test_an_engine_with_a_tier_wakes_up_when_blocks_have_come() -> None:
    class Tiered(ScriptedModel):
        def load(self, config: EngineConfig) -> LoadedModel:
            loaded = super().load(config)
            loaded.tiers = Tiers([shelf], ScriptedIO(self, SIZE))
            return loaded

    shelf = Shelf("disk")

    async def main() -> None:
        async with Engine.open(Tiered("yes", num_blocks=300), block_size=SIZE) as engine:
            ahead = Prompt((Segment("You are kind. " * 3, "system"),))
            await engine.warm([ahead])
            with anyio.fail_after(60):
                while not shelf.kept:
                    await anyio.sleep(0.001)
            await engine._call(lambda core: core.pool.clear())
            answer = await engine.generate(prompt("You are kind. " * 3, "Why?"), ONE)
            assert answer.reuse[0].source == "disk"
            assert engine.statistics().cache.tiers["disk"].loaded == 3

    anyio.run(main)
