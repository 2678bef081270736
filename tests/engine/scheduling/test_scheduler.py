"""The scheduler through `EngineCore`, without threads: who runs, with what, and to what end.

Requests of every kind, in any order, are in test_core_machine.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from core_rig import EOS, MODES, Letters, Rig, unique

from ragserve.engine import (
    QueueTimeoutError,
    Request,
    Retention,
    ScheduledChunk,
    StepPlan,
    StepResult,
)
from ragserve.engine.runtime.core import _Pace
from ragserve.engine.scheduling.request import RequestState

ahead = pytest.mark.parametrize(("depth", "steps"), MODES)

# -- everything makes progress ------------------------------------------------------------


def test_a_request_that_runs_alone_gets_the_blocks_that_waiting_choices_hold() -> None:
    rig = Rig(8, max_num_seqs=1, max_num_batched_tokens=64)
    choices = rig.add_choices(65, n=3, max_tokens=2)
    rig.step()
    rig.step()
    urgent = rig.add(33, max_tokens=60, priority=-1)  # grows to 6 of 8 blocks, and 4 are held
    rig.until(lambda: urgent.state is RequestState.FINISHED)
    assert [c.state for c in choices].count(RequestState.FINISHED) < 3
    rig.drain()


def test_paused_requests_do_not_keep_others_from_their_seats() -> None:
    rig = Rig(max_num_seqs=2, max_num_batched_tokens=64)
    slow = [rig.add(20, max_tokens=10) for _ in range(2)]
    rig.step()
    for request in slow:
        request.paused = True
    quick = rig.add(20, max_tokens=3)
    rig.until(lambda: quick.state is RequestState.FINISHED)
    for request in slow:
        request.paused = False
    rig.drain()
    assert all(r.finish_reason == "length" for r in rig.requests)


def test_a_paused_request_is_not_computed_whatever_its_state() -> None:
    rig = Rig(max_num_seqs=3, max_num_batched_tokens=32, long_prefill_token_threshold=100)
    requests = [rig.add(20, max_tokens=9), rig.add(60), rig.add(200)]
    rig.step()
    assert all(r.state is RequestState.RUNNING for r in requests[:2])
    for request in requests:
        request.paused = True
        other = rig.add(10, max_tokens=2)
        rig.until(lambda other=other: other.state is RequestState.FINISHED)
        assert all(rig.computed(r) == 0 for r in requests if r.paused)
    assert rig.step() == []
    for request in requests:
        request.paused = False
    rig.drain()


def test_many_requests_that_cannot_run_do_not_hide_one_that_can() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=64)
    for _ in range(70):
        rig.add(20).paused = True
    other = rig.add(20)
    rig.until(lambda: other.state is RequestState.FINISHED)
    for request in rig.requests:
        request.paused = False
    rig.drain()


def test_choices_that_wait_for_their_prompt_let_others_pass() -> None:
    rig = Rig(max_num_batched_tokens=64)
    rig.add_choices(600, n=100, max_tokens=2)
    other = rig.add(20, max_tokens=1)
    rig.step()
    rig.step()
    assert other.state is RequestState.FINISHED
    rig.drain()


# -- decode first and chunks ----------------------------------------------------------


def test_short_prompts_pass_any_number_of_long_ones() -> None:
    rig = Rig(4096, max_num_batched_tokens=64, max_num_seqs=8)
    long = [rig.add(600, max_tokens=1) for _ in range(100)]
    rig.step()
    short = rig.add(20, max_tokens=1)
    rig.step()
    assert short.output_token_ids
    rig.drain()
    assert all(request.output_token_ids for request in long)


def test_streams_get_a_token_in_every_step_while_a_long_prompt_is_computed() -> None:
    rig = Rig(2048, max_num_batched_tokens=512)
    streams = [rig.add(20, max_tokens=100) for _ in range(5)]
    rig.step()
    long = rig.add(20_000, max_tokens=2)
    steps = 0
    while not long.output_token_ids:
        rig.step()
        steps += 1
        assert [rig.computed(r) for r in streams] == [1] * 5
        assert rig.plan.num_tokens == 512 or long.output_token_ids
    assert steps == -(-20_000 // (512 - 5))
    rig.drain()


def test_a_prompt_is_computed_in_chunks_of_what_the_budget_leaves() -> None:
    rig = Rig(max_num_batched_tokens=33, max_num_seqs=8)
    request = rig.add(100, max_tokens=2)
    rig.drain()
    assert [chunk.num_tokens for chunk in request.timeline.chunks] == [33, 33, 33, 1]
    times = [t for chunk in request.timeline.chunks for t in (chunk.start, chunk.end)]
    assert times == sorted(times)


@pytest.mark.parametrize("size", [1, 16, 33, 512])
def test_answers_do_not_depend_on_the_chunk_size(size: int) -> None:
    rig = Rig(max_num_batched_tokens=size, max_num_seqs=1)
    rig.add([[1] * 17, [2] * 16, [3] * 31], max_tokens=20)
    rig.drain()


# -- long prompts and short ones ----------------------------------------------------------


def test_short_prompts_overtake_long_ones_that_wait() -> None:
    rig = Rig(max_num_batched_tokens=64, long_prefill_token_threshold=100)
    long = [rig.add(400, max_tokens=4) for _ in range(3)]
    short = [rig.add(20, max_tokens=4) for _ in range(6)]
    most = 0

    def all_short_done() -> bool:
        nonlocal most
        under_way = [r for r in long if rig.computed(r) > 1 and r.num_to_compute > 100]
        most = max(most, len(under_way))
        return all(r.state is RequestState.FINISHED for r in short)

    assert rig.until(all_short_done) < 12
    assert all(r.state is not RequestState.FINISHED for r in long)
    rig.until(lambda: all_short_done() and not rig.scheduler.has_requests)
    assert most == 1, "one at a time"
    started = [r.timeline.first_scheduled for r in long]
    assert started == sorted(started, key=lambda t: t or 0)
    rig.drain()


def test_as_many_long_prompts_as_allowed_are_under_way() -> None:
    rig = Rig(
        max_num_batched_tokens=64, long_prefill_token_threshold=50, max_long_partial_prefills=2
    )
    for _ in range(4):
        rig.add(300)
    rig.step()
    assert len(rig.scheduler.running) == 2
    rig.drain()


@pytest.mark.parametrize("per_step", [1, 3])
def test_a_steady_flow_of_short_prompts_does_not_starve_a_long_one_nor_the_reverse(
    per_step: int,
) -> None:
    rig = Rig(max_num_batched_tokens=64, max_num_seqs=8, long_prefill_token_threshold=100)
    long = rig.add(960, max_tokens=1)
    for _ in range(40):
        if long.state is RequestState.FINISHED:
            break
        for _ in range(per_step):
            rig.add(24, max_tokens=2)
        rig.step()
    # It gets at least half of what decoding leaves; the short ones go on all the while.
    assert long.state is RequestState.FINISHED
    assert sum(r.state is RequestState.FINISHED for r in rig.requests) > 15
    rig.drain()


def test_long_prompts_that_queue_behind_short_ones_are_not_passed_for_ever() -> None:
    rig = Rig(
        max_num_batched_tokens=32, max_num_seqs=2, long_prefill_token_threshold=40, num_blocks=64
    )
    first, second = rig.add(200, max_tokens=2), rig.add(200, max_tokens=2)
    for _ in range(60):
        rig.add(10, max_tokens=1)
        rig.step()
        if second.state is RequestState.FINISHED:
            break
    assert first.state is second.state is RequestState.FINISHED
    rig.drain()


# -- order --------------------------------------------------------------------------------


def test_lower_priority_values_go_first_and_equals_in_order_of_arrival() -> None:
    rig = Rig(max_num_seqs=1)
    requests = [rig.add(20, max_tokens=2, priority=p) for p in (1, 0, -1, 0, 1, -1)]
    rig.drain()
    order = sorted(requests, key=lambda r: r.timeline.first_scheduled or 0)
    assert [requests.index(r) for r in order] == [2, 5, 1, 3, 0, 4]


def test_a_request_is_started_with_blocks_for_its_whole_prompt_or_not_at_all() -> None:
    rig = Rig(8)
    running = rig.add(64, max_tokens=16)
    rig.step()
    big, small = rig.add(80), rig.add(16)
    rig.step()
    assert big.blocks == small.blocks == []
    assert small.timeline.first_scheduled is None, "nor does a later one overtake it"
    rig.until(lambda: running.state is RequestState.FINISHED)
    rig.step()
    assert len(big.blocks) == 5
    assert running.timeline.preemptions == 0
    rig.drain()


@pytest.mark.parametrize(("blocks", "started"), [(2, True), (3, False)])
def test_starting_a_request_leaves_the_watermark_to_those_that_run(
    blocks: int, started: bool
) -> None:
    rig = Rig(10, watermark=0.35)  # 3 blocks
    rig.add(79, max_tokens=10)
    rig.step()
    other = rig.add(blocks * 16)
    rig.step()
    assert (other.state is RequestState.RUNNING) == started
    rig.drain()


def test_the_watermark_does_not_keep_out_a_request_that_is_alone() -> None:
    rig = Rig(10, watermark=0.9)
    rig.add(159, max_tokens=1)
    rig.drain()


# -- preemption ---------------------------------------------------------------------------


def test_the_newest_of_the_lowest_priority_is_preempted_and_no_answer_changes() -> None:
    rig = Rig(12)
    a, b, c, d = (rig.add(47, max_tokens=60, priority=p) for p in (0, 1, 1, 0))
    rig.step()
    assert len(rig.scheduler.running) == 4
    preempted = []
    for victim in (c, b, d):
        rig.until(lambda victim=victim: victim.timeline.preemptions)
        preempted.append([r.timeline.preemptions > 0 for r in (a, b, c, d)])
    assert preempted == [
        [False, False, True, False],
        [False, True, True, False],
        [False, True, True, True],
    ]
    assert rig.scheduler.num_preemptions == sum(r.timeline.preemptions for r in rig.requests)
    rig.drain()
    assert a.timeline.preemptions == 0
    assert all(r.finish_reason == "length" for r in rig.requests)


def test_a_paused_request_is_preempted_before_any_other() -> None:
    rig = Rig(6)
    paused, running = rig.add(33, max_tokens=40), rig.add(33, max_tokens=40)
    rig.step()
    paused.paused = True
    rig.until(lambda: running.state is RequestState.FINISHED)
    assert (paused.timeline.preemptions, running.timeline.preemptions) == (1, 0)
    rig.step()
    assert paused.state is RequestState.WAITING
    paused.paused = False
    rig.drain()


def test_a_preempted_request_finds_its_complete_blocks_again() -> None:
    rig = Rig(6)
    first, second = rig.add(40, max_tokens=20), rig.add(40, max_tokens=20)
    rig.until(lambda: second.timeline.preemptions)
    assert rig.pool.find(second.keys), "until somebody needs the space"
    rig.drain()
    assert first.timeline.preemptions == 0


def test_only_one_preemption_makes_room_for_one_block() -> None:
    rig = Rig(9)
    for _ in range(3):
        rig.add(47, max_tokens=20)
    rig.step()
    rig.step()
    rig.step()
    assert rig.scheduler.num_preemptions == 1
    rig.drain()


# -- the queue ----------------------------------------------------------------------------


def queue(rig: Rig) -> tuple[int, int]:
    return rig.scheduler.num_queued, rig.scheduler.num_queued_tokens


def test_the_queue_counts_requests_that_have_never_been_started() -> None:
    rig = Rig(8, max_num_seqs=2, max_num_batched_tokens=64)
    first = rig.add(40, max_tokens=30)
    rig.add(40, max_tokens=30)
    third = rig.add(30)
    choices = rig.add_choices(20, n=3)
    assert queue(rig) == (4, 40 + 40 + 30 + 20)
    rig.step()
    assert queue(rig) == (2, 50)
    rig.until(lambda: rig.scheduler.num_preemptions)
    assert queue(rig) == (2, 50), "a preempted request does not queue again"
    rig.core.abort(third)
    assert queue(rig) == (1, 20)
    rig.core.abort(choices[0])
    assert queue(rig) == (1, 20), "its other choices still wait"
    rig.core.abort(choices[1])
    rig.core.abort(choices[2])
    assert queue(rig) == (0, 0)
    rig.core.abort(first)
    rig.drain()


def age(requests: Iterable[Request], seconds: float) -> None:
    """Let them have waited that long."""
    for request in requests:
        assert request.timeline.queued is not None
        request.timeline.queued -= int(seconds * 1e9)


def test_a_request_that_is_not_started_in_time_ends_with_an_error() -> None:
    rig = Rig(max_num_seqs=1, queue_timeout=60.0)
    running, late, later = rig.add(20, max_tokens=30), rig.add(20), rig.add(20)
    rig.step()
    age([running, late], 100)
    age([later], 20)
    expiry = rig.core.next_expiry()
    assert expiry == 0.0
    (update,) = rig.core.expire()
    assert update.request is late
    assert update.finished
    assert update.delta.finish_reason == late.finish_reason == "error"
    assert isinstance(update.error, QueueTimeoutError)
    assert update.error.limit == 60.0
    assert update.error.waited >= 100
    expiry = rig.core.next_expiry()
    assert expiry is not None
    assert 0 < expiry <= 40
    assert rig.core.expire() == []
    rig.drain()
    assert later.finish_reason == "length"
    assert rig.core.next_expiry() is None


def test_a_preempted_request_does_not_time_out() -> None:
    rig = Rig(6, queue_timeout=60.0)
    rig.add(33, max_tokens=40)
    second = rig.add(33, max_tokens=40)
    rig.until(lambda: second.timeline.preemptions)
    age(rig.requests, 100)
    assert rig.core.expire() == []
    assert rig.core.next_expiry() is None
    rig.drain()


@pytest.mark.parametrize("length", [5, 40])
def test_choices_time_out_together_and_not_once_one_of_them_is_started(length: int) -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=16, queue_timeout=60.0)
    started = rig.add_choices(length, n=3)
    queued = rig.add_choices(length, n=3)
    rig.step()
    age(rig.requests, 100)
    expired = rig.core.expire()
    assert [u.request for u in expired] == queued
    assert queue(rig) == (0, 0)
    assert rig.core.next_expiry() is None
    rig.drain()
    assert [r.finish_reason for r in started] == ["length"] * 3


def test_without_a_timeout_nothing_expires() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add(20)
    rig.add(20)
    age(rig.requests, 1e6)
    assert rig.core.expire() == []
    assert rig.core.next_expiry() is None
    rig.drain()


# -- prefix hits --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("max_tokens", [1, 17])
def test_a_cached_prompt_is_found_up_to_its_last_token(length: int, max_tokens: int) -> None:
    rig = Rig()
    cold = rig.add(unique(length, 7), max_tokens=max_tokens)
    rig.drain()
    warm = rig.add(unique(length, 7), max_tokens=max_tokens)
    rig.drain()
    expected = (length - 1) // 16 * 16
    assert (cold.timeline.cached_tokens, warm.timeline.cached_tokens) == (0, expected)
    assert [c.num_tokens for c in warm.timeline.chunks] == [length - expected]
    assert warm.output_token_ids == cold.output_token_ids
    assert rig.query_tokens == 2 * length
    assert rig.hit_tokens == expected
    assert rig.core.prompt_tokens == 2 * length - expected


def test_without_prefix_caching_nothing_is_found() -> None:
    rig = Rig(enable_prefix_caching=False)
    for _ in range(2):
        rig.add(unique(40, 7))
        rig.drain()
    assert rig.hit_tokens == 0
    assert rig.pool.statistics().free == rig.num_blocks


def test_segments_are_found_whatever_their_lengths() -> None:
    rig = Rig()
    system, document = [1] * 21, [2] * 35
    rig.add([system, document, [3] * 5])
    rig.drain()
    other = rig.add([system, document, [4] * 5])
    swapped = rig.add([document, system, [4] * 5])
    rig.drain()
    assert other.timeline.cached_tokens == 21 + 35
    assert swapped.timeline.cached_tokens == 0


def test_an_answer_is_found_by_the_next_turn() -> None:
    rig = Rig()
    first = rig.add(unique(20, 1), max_tokens=30)
    rig.drain()
    tokens = first.prompt_token_ids + first.output_token_ids
    second = rig.add([*tokens, 1, 2, 3])
    rig.drain()
    # The last token of an answer is never computed: 49 of the 50 are, in 3 complete blocks.
    assert second.timeline.cached_tokens == 48


def test_namespaces_do_not_see_each_other() -> None:
    rig = Rig()
    for namespace, cached in (("a", 0), ("b", 0), ("a", 32), ("b", 32), ("", 0)):
        request = rig.add(unique(40, 7), namespace=namespace)
        rig.drain()
        assert request.timeline.cached_tokens == cached


def test_an_aborted_request_leaves_its_complete_blocks() -> None:
    rig = Rig(max_num_batched_tokens=40, max_num_seqs=4)
    request = rig.add(unique(100, 7))
    rig.step()
    update = rig.core.abort(request)
    assert update is not None
    assert update.delta.finish_reason == request.finish_reason == "abort"
    assert rig.core.abort(request) is None
    rig.check()
    assert rig.pool.statistics().cached == 2
    again = rig.add(unique(100, 7))
    rig.drain()
    assert again.timeline.cached_tokens == 32


def test_blocks_are_shared_as_soon_as_a_chunk_has_filled_them() -> None:
    rig = Rig(max_num_batched_tokens=64, long_prefill_token_threshold=100)
    first = rig.add(unique(300, 7))
    rig.step()
    second = rig.add([*unique(300, 7)[:60], *range(20)])
    rig.step()
    assert second.timeline.cached_tokens == 48
    assert second.blocks[:3] == first.blocks[:3]
    assert first.num_to_compute > 1
    rig.drain()


def test_a_request_that_must_wait_does_not_hold_the_blocks_it_found() -> None:
    rig = Rig(8)
    rig.add(unique(64, 7), max_tokens=1)
    rig.drain()
    running = rig.add(47, max_tokens=1 + 16)
    rig.step()
    waiting = rig.add([*unique(64, 7), *range(40)])  # 4 of 7 blocks are there, and 1 is free
    rig.step()
    assert waiting.state is RequestState.WAITING
    assert waiting.blocks == []
    rig.drain()
    assert running.timeline.preemptions == 0
    assert waiting.timeline.cached_tokens == 64


def test_a_hit_does_not_change_how_long_blocks_are_kept() -> None:
    rig = Rig(8)
    first = rig.add([[1] * 48, [2] * 8], kinds=[SYSTEM, ANSWER], max_tokens=1)
    rig.drain()
    second = rig.add([[1] * 48, [3] * 8], kinds=[ANSWER, ANSWER], max_tokens=1)
    rig.drain()
    assert second.timeline.cached_tokens == 48
    rig.add([[4] * 32], kinds=[DOCUMENT], max_tokens=1)
    rig.drain()
    rig.add(79, max_tokens=1)
    rig.drain()
    assert len(rig.pool.find(first.keys)) == 3


def test_clearing_the_cache_disturbs_nobody() -> None:
    rig = Rig()
    rig.add(unique(40, 7), max_tokens=40)
    for _ in range(3):
        rig.step()
    rig.pool.clear()
    other = rig.add(unique(40, 7))
    rig.drain()
    assert other.timeline.cached_tokens == 0
    third = rig.add(unique(40, 7))
    rig.drain()
    assert third.timeline.cached_tokens == 32


def test_prompt_logprobs_are_not_taken_from_the_cache() -> None:
    rig = Rig()
    rig.add(unique(40, 7))
    rig.drain()
    request = rig.add(unique(40, 7), prompt_logprobs=1)
    rig.drain()
    assert request.timeline.cached_tokens == 0


SYSTEM, DOCUMENT, ANSWER = Retention.SYSTEM, Retention.DOCUMENT, Retention.ANSWER


def test_system_prompts_outlive_documents_and_documents_outlive_answers() -> None:
    rig = Rig(12)
    kept = rig.add([[1] * 32, [2] * 32, [3] * 16], kinds=[SYSTEM, DOCUMENT, ANSWER], max_tokens=1)
    rig.drain()
    for _ in range(20):  # newer, but worth less
        rig.add(16, max_tokens=1)
        rig.drain()
    assert len(rig.pool.find(kept.keys)) == 4
    for blocks, left in ((8, 4), (9, 3), (10, 2), (11, 1)):
        request = rig.add(blocks * 16 - 1, max_tokens=1)
        rig.drain()
        assert len(request.output_token_ids) == 1
        assert len(rig.pool.find(kept.keys)) == left


def test_a_retrieved_document_outlives_newer_answers_of_its_own_request() -> None:
    rig = Rig(8)
    first = rig.add([[1] * 48, [2] * 8], kinds=[DOCUMENT, ANSWER], max_tokens=40)
    rig.drain()
    assert rig.pool.statistics().cached == 5
    rig.add(80, max_tokens=1)
    rig.drain()
    assert len(rig.pool.find(first.keys)) == 3


# -- several choices ----------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 16, 17, 40, 48])
def test_choices_compute_their_prompt_once(caching: bool, length: int) -> None:
    rig = Rig(enable_prefix_caching=caching, max_num_batched_tokens=32, max_num_seqs=8)
    choices = rig.add_choices(length, n=4, max_tokens=20)
    rig.until(lambda: all(r.output_token_ids for r in choices))
    shared = (length - 1) // 16
    for choice in choices[1:]:
        assert choice.blocks[:shared] == choices[0].blocks[:shared]
        assert not set(choice.blocks[shared:]) & set(choices[0].blocks[shared:])
    rig.drain()
    assert rig.core.prompt_tokens == length + 3 * (length - shared * 16)
    assert len({tuple(r.output_token_ids) for r in choices}) == 4
    # They are one request to the prefix cache, and its blocks were not in it.
    assert rig.query_tokens == length
    assert rig.hit_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_leader_aborted_before_its_prompt_is_computed_is_replaced(
    caching: bool, steps: int
) -> None:
    rig = Rig(enable_prefix_caching=caching, max_num_batched_tokens=16, max_num_seqs=4)
    choices = rig.add_choices(64, n=4, max_tokens=5)
    for _ in range(steps):
        rig.step()
    rig.core.abort(choices[0])
    assert queue(rig) == ((1, 64) if steps == 0 else (0, 0))
    rig.step()
    rig.core.abort(choices[1])  # and its replacement
    rig.drain()
    assert [r.finish_reason for r in choices] == ["abort", "abort", "length", "length"]
    assert choices[3].blocks == []


def test_a_leader_that_ends_with_its_first_token_leaves_the_prompt_to_the_others() -> None:
    rig = Rig(enable_prefix_caching=False)
    choices = rig.add_choices(40, n=3, max_tokens=1)
    rig.step()
    assert choices[0].state is RequestState.FINISHED
    assert choices[1].blocks == choices[2].blocks
    assert len(choices[1].blocks) == 2
    rig.step()
    assert not rig.scheduler.has_requests


@ahead
def test_more_choices_than_seats_or_blocks_all_come_to_their_end(depth: int, steps: int) -> None:
    for caching in (True, False):
        knobs = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "enable_prefix_caching": caching}
        rig = Rig(5, depth=depth, steps=steps, **knobs)
        choices = rig.add_choices(33, n=20, max_tokens=30)
        other = rig.add(33, max_tokens=30, priority=-1)
        rig.drain()
        assert all(r.finish_reason == "length" for r in (*choices, other))


# -- ends ---------------------------------------------------------------------------------


@ahead
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(
    ("params", "count", "reason", "stop_reason"),
    [
        ({}, 3, "stop", None),
        ({"max_tokens": 2}, 2, "length", None),
        ({"max_tokens": 3}, 3, "stop", None),
        ({"max_tokens": 1}, 1, "length", None),
        ({"ignore_eos": True}, 8, "length", None),
        ({"stop_token_ids": [6]}, 2, "stop", 6),
        ({"stop_token_ids": [5, 6]}, 1, "stop", 5),
        ({"stop_token_ids": [8]}, 3, "stop", None),
        ({"stop_token_ids": [8], "ignore_eos": True}, 5, "stop", 8),
        ({"stop_token_ids": [5, 6], "min_tokens": 2}, 2, "stop", 6),
        ({"stop_token_ids": [8], "min_tokens": 4}, 5, "stop", 8),
        ({"min_tokens": 8, "stop_token_ids": [6]}, 8, "length", None),
    ],
)
def test_what_ends_an_answer(
    params: dict[str, Any],
    count: int,
    reason: str,
    stop_reason: int | None,
    stops: bool,
    depth: int,
    steps: int,
) -> None:
    script = [5, 6, EOS, 7, 8, 9, 10, 11]
    rig = Rig(script=script, stops=stops, depth=depth, steps=steps, block_size=2)
    warm_up(rig)
    request = rig.add(20, **params)
    rig.drain()
    # Past the end nothing is found, whatever was computed there; nor the token that ends it.
    assert len(rig.pool.find(request.keys)) == (20 + count - 1) // 2
    assert request.output_token_ids == script[:count]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert [t for u in rig.updates for t in u.delta.token_ids] == script[:count]
    reasons = [u.delta.finish_reason for u in rig.updates]
    assert reasons == [None] * (len(reasons) - 1) + [reason]
    assert len(reasons) == count or steps > 1
    assert rig.core.generated_tokens == count


INCLUDE = "include_stop_str_in_output"


def warm_up(rig: Rig) -> None:
    """Let it learn that steps are short, with a request that leaves no other trace."""
    rig.add(1, max_tokens=4, ignore_eos=True)
    rig.drain()
    rig.pool.clear()
    rig.updates.clear()
    rig.core.generated_tokens = 0
    while rig.under_way:
        rig.step()


@ahead
@pytest.mark.parametrize(
    ("params", "stop", "text", "reason", "stop_reason"),
    [
        ({}, "z", "fg.", "stop", None),
        ({"include_stop_str_in_output": True}, "z", "fgl.", "stop", None),
        ({"ignore_eos": True}, "z", "fglhijkl.", "length", None),
        ({"ignore_eos": True}, "i", "fglhi.", "stop", "i"),
        ({"max_tokens": 2}, "g", "fg.", "stop", "g"),
        ({"max_tokens": 2}, "z", "fg.", "length", None),
        ({"stop_token_ids": [6]}, "z", "f.", "stop", 6),
    ],
)
def test_what_text_an_answer_has(
    params: dict[str, Any],
    stop: str,
    text: str,
    reason: str,
    stop_reason: str | int | None,
    depth: int,
    steps: int,
) -> None:
    rig = Rig(script=[5, 6, EOS, 7, 8, 9, 10, 11], depth=depth, steps=steps)
    warm_up(rig)
    request = rig.add(20, **params)
    request.text = Letters(stop)
    rig.drain()
    shown = len(text) - 1
    hidden = reason == "stop" and stop_reason != stop and not params.get(INCLUDE, False)
    assert len(request.output_token_ids) == shown + hidden
    assert "".join(u.delta.text for u in rig.updates) == text
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


class FailingText:
    """Text that cannot be made."""

    stop_reason = None
    num_tokens = 0

    def __init__(self, pushes: int) -> None:
        self.pushes = pushes

    def push(self, token_ids: Sequence[int]) -> str:
        self.pushes -= 1
        if self.pushes < 0:
            raise ValueError("no text")
        return "x"

    def finish(self) -> str:
        raise ValueError("no end")


@pytest.mark.parametrize(("pushes", "count"), [(0, 1), (3, 4), (100, 8)])
def test_a_request_whose_text_fails_ends_alone(pushes: int, count: int) -> None:
    rig = Rig()
    bad, good = rig.add(20), rig.add(20)
    bad.text = FailingText(pushes)
    rig.drain()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    (last,) = (u for u in rig.updates if u.request is bad and u.finished)
    assert isinstance(last.error, ValueError)
    assert last.delta.finish_reason == "error"
    assert len(bad.output_token_ids) == count


def test_a_sequence_that_the_runner_fails_ends_alone() -> None:
    rig = Rig()
    bad, good = rig.add(20), rig.add(20)
    failure = ValueError("these logits are no numbers")
    launch = rig.launch

    def fail_one(plan: StepPlan) -> Callable[[], StepResult]:
        wait = launch(plan)

        def take() -> StepResult:
            result = wait()
            for index, chunk in enumerate(plan.chunks):
                if chunk.request is bad and bad.output_token_ids:
                    result.sampled[index] = ()
                    result.errors[index] = failure
            return result

        return take

    rig.launch = fail_one  # type: ignore[method-assign]
    rig.drain()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert [u.error for u in rig.updates if u.finished] == [failure, None]
    assert len(bad.output_token_ids) == 1


@ahead
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("victim", range(4))
def test_aborting_one_in_any_state_changes_no_other(
    after: int, victim: int, depth: int, steps: int
) -> None:
    rig = Rig(9, max_num_seqs=3, max_num_batched_tokens=24, depth=depth, steps=steps)
    rig.add(40, max_tokens=30)
    rig.add_choices(20, n=2, max_tokens=20)
    rig.add(33, max_tokens=9)
    for _ in range(after):
        rig.step()
    held = rig.pool.statistics().held
    alive = rig.requests[victim].state is not RequestState.FINISHED
    rig.core.abort(rig.requests[victim])
    assert rig.requests[victim].blocks == []
    assert rig.pool.statistics().held <= held
    rig.check()
    rig.drain()
    aborted = [r for r in rig.requests if r.finish_reason == "abort"]
    assert aborted == ([rig.requests[victim]] if alive else [])


# -- working ahead of the host ------------------------------------------------------------


def ahead_rig(num_blocks: int = 512, *, steps: int = 8, **knobs: Any) -> Rig:
    """Two plans at a time, and it has learnt already that steps are short."""
    rig = Rig(num_blocks, depth=2, steps=steps, **knobs)
    warm_up(rig)
    rig.core._pace._step = dict.fromkeys(range(10), 1.0)
    return rig


def test_the_next_plan_is_launched_before_the_last_result_is_looked_at() -> None:
    rig = Rig(depth=2, max_num_batched_tokens=16, max_num_seqs=4)
    request = rig.add(40, max_tokens=4)
    for in_flight, updates in ((0, 0), (1, 0), (1, 1), (1, 1), (1, 1)):
        assert len(rig.step()) == updates
        assert len(rig.under_way) == 1
        assert request.num_in_flight == in_flight
    assert len(rig.step()) == 1, "its last token was under way, and nothing after that"
    assert not rig.under_way
    assert request.finish_reason == "length"
    assert [c.num_tokens for c in request.timeline.chunks] == [16, 16, 8]
    chunks = request.timeline.chunks
    assert all(a.end <= b.start <= b.end for a, b in itertools.pairwise(chunks))


def test_a_plan_has_many_steps_while_nothing_else_is_to_be_computed() -> None:
    rig = ahead_rig(max_num_seqs=3)
    first = rig.add(20, max_tokens=60)
    rig.step()
    assert (rig.plan.num_steps, first.num_in_flight) == (8, 8)
    assert rig.step()[0].delta.token_ids == tuple(first.output_token_ids[1:])
    second = rig.add(20, max_tokens=40)
    rig.step()
    assert rig.plan.num_steps == 1, "the prompt"
    rig.step()
    assert rig.plan.num_steps == 8
    others = [rig.add(20, max_tokens=12) for _ in range(2)]
    rig.step()
    rig.step()
    assert rig.plan.num_steps == 8, "the last has no seat"
    assert others[1].state is RequestState.WAITING
    rig.drain()
    steps = [plan.num_steps for plan in rig.made if any(c.request is second for c in plan.chunks)]
    assert set(steps) >= {1, 8}


def test_a_plan_has_no_more_steps_than_tokens_are_left() -> None:
    rig = ahead_rig()
    short, long = rig.add(20, max_tokens=4), rig.add(20, max_tokens=6)
    rig.step()
    assert rig.plan.num_steps == 5
    assert [c.num_samples for c in rig.plan.chunks] == [3, 5]
    rig.step()
    assert not rig.under_way
    assert short.finish_reason == long.finish_reason == "length"


def test_blocks_for_many_steps_are_taken_from_nobody() -> None:
    rig = ahead_rig(5)
    first, second = rig.add(20, max_tokens=20), rig.add(30, max_tokens=9)
    rig.step()
    assert rig.plan.num_steps == 8
    assert (len(first.blocks), len(second.blocks)) == (2, 3)
    rig.step()
    assert rig.plan.num_steps == 1, "for eight it needs a third block, for one it does not"
    assert second.state is RequestState.FINISHED
    rig.step()
    assert rig.plan.num_steps == 8
    rig.drain()
    assert rig.scheduler.num_preemptions == 0


def test_blocks_are_taken_first_from_who_needs_them_no_more() -> None:
    rig = ahead_rig(4)
    first, second = rig.add(24, max_tokens=8), rig.add(24, max_tokens=20)
    rig.step()
    assert first.num_in_flight == 7
    rig.step()
    assert second.blocks[2:], "which it gave, though it is older, while its last steps ran"
    assert (first.finish_reason, second.timeline.preemptions) == ("length", 0)
    rig.drain()


def test_one_step_at_a_time_if_the_time_is_short() -> None:
    rig = Rig(depth=2, steps=8, multi_step_seconds=0.0)
    rig.add(20, max_tokens=30)
    rig.drain()
    assert {plan.num_steps for plan in rig.made} == {1}


def test_the_pace_is_what_fits_into_the_time() -> None:
    def plan(num_seqs: int, steps: int, decode: bool = True) -> StepPlan:
        request = Rig().add(1)
        return StepPlan([ScheduledChunk(request, 0, 1, 1, decode)] * num_seqs, steps)

    pace = _Pace(0.010, 8)
    assert pace.steps(5) == 1, "nothing is known yet"
    pace.note(plan(4, 1, decode=False), 1_000_000)
    assert pace.steps(5) == 1, "of prompts it learns nothing"
    pace.note(plan(4, 1), 2_500_000)
    assert [pace.steps(n) for n in (3, 4, 7, 8)] == [1, 4, 4, 1]
    for _ in range(50):
        pace.note(plan(6, 4), 4 * 500_000)
    assert pace.steps(5) == 8, "no more than the runner can"
    for _ in range(50):
        pace.note(plan(6, 4), 4 * 50_000_000)
    assert pace.steps(5) == 1
    pace.note(plan(1, 1), 0)
    assert pace.steps(1) == 8


def test_a_preempted_request_gets_what_was_under_way_before_it_is_seated_again() -> None:
    rig = Rig(6, depth=3, steps=1)
    first, second = rig.add(40, max_tokens=40), rig.add(40, max_tokens=40)
    rig.until(lambda: second.timeline.preemptions)
    assert second.state is RequestState.WAITING
    in_flight, known = second.num_in_flight, len(second.output_token_ids)
    assert in_flight > 0
    assert second in rig.under_way[-1].released
    rig.until(lambda: second.num_in_flight == 0)
    assert second.state is RequestState.WAITING
    assert len(second.output_token_ids) == known + in_flight
    rig.drain()
    assert first.timeline.preemptions == 0


def test_tokens_under_way_come_before_a_seat_even_if_there_is_one() -> None:
    rig = Rig(6, depth=3)
    first, second = rig.add(40, max_tokens=40), rig.add(40, max_tokens=40)
    third = rig.add(20, max_tokens=2)
    rig.until(lambda: second.timeline.preemptions)
    assert second.num_in_flight
    rig.core.abort(first)  # so there is room
    rig.step()
    assert second.state is third.state is RequestState.WAITING, "it keeps its turn"
    rig.step()
    assert second.state is RequestState.RUNNING
    assert second.num_known > 40
    rig.drain()


@pytest.mark.parametrize("max_tokens", range(12, 20))
def test_a_preempted_request_may_end_with_what_was_under_way(max_tokens: int) -> None:
    rig = Rig(5, depth=2, steps=1)
    rig.add(33, max_tokens=40)
    second = rig.add(20, max_tokens=max_tokens)
    rig.drain()
    assert (second.finish_reason, len(second.output_token_ids)) == ("length", max_tokens)


def test_blocks_of_an_ended_request_are_free_while_it_is_under_way() -> None:
    rig = ahead_rig()
    request, other = rig.add(20, max_tokens=60), rig.add(20, max_tokens=60)
    rig.step()
    assert request.num_in_flight == 8
    held, count = rig.pool.statistics().held, len(request.output_token_ids)
    rig.core.abort(request)
    assert rig.pool.statistics().held == held // 2
    updates = rig.step()
    assert [u.request for u in updates] == [other]
    assert len(request.output_token_ids) == count
    assert request in rig.under_way[-1].released
    rig.drain()


def test_seats_are_given_back_in_the_plan_that_gives_them_away() -> None:
    rig = ahead_rig(max_num_seqs=2)
    for number in range(6):
        rig.add(20, max_tokens=3 + number)
    rig.drain()
    seated: set[Request] = set()
    for plan in rig.made:
        seated -= set(plan.released)
        seated |= {chunk.request for chunk in plan.chunks}
        assert len(seated) <= 2  # the model checks it too
    assert len(seated) <= 2


def test_a_request_that_is_sampled_on_the_host_is_never_ahead_of_it() -> None:
    rig = ahead_rig()
    slow, quick = rig.add(20, max_tokens=10, bad_words=["x"]), rig.add(20, max_tokens=40)
    rig.until(lambda: slow.state is RequestState.FINISHED)
    assert len(quick.output_token_ids) > 10
    assert any(len(plan.chunks) == 1 for plan in rig.made), "every other plan is without it"
    rig.drain()


def test_prompts_take_little_of_a_step_in_which_others_decode() -> None:
    rig = Rig(max_num_batched_tokens=64, max_num_mixed_tokens=10)
    first = rig.add(100, max_tokens=30)
    rig.step()
    assert rig.computed(first) == 64, "nobody decodes"
    rig.step()
    second = rig.add(100, max_tokens=2)
    rig.step()
    assert (rig.computed(first), rig.computed(second)) == (1, 9)
    rig.until(lambda: first.state is RequestState.FINISHED)
    rig.drain()
    assert [c.num_tokens for c in second.timeline.chunks] == [9] * 11 + [1]


def test_what_comes_before_an_error_counts() -> None:
    def script(tokens: list[int]) -> int:
        return 1 // (len(tokens) - 26)

    rig = ahead_rig(script=script)
    request = rig.add(20, max_tokens=30, ignore_eos=True)
    rig.until(lambda: request.state is RequestState.FINISHED)
    assert request.finish_reason == "error"
    assert len(request.output_token_ids) == 6
    errors = [u.error for u in rig.updates if u.error is not None]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    rig.drain()


def test_a_runner_that_gives_too_little_is_found_out() -> None:
    rig = ahead_rig(script=[1, 2, 3, EOS])
    request = rig.add(20, max_tokens=30)
    rig.step()
    request.stop_token_ids = frozenset()  # the host does not agree that the third ends it
    with pytest.raises(RuntimeError, match="the runner gave"):
        rig.drain()


def test_closing_drops_what_is_under_way() -> None:
    rig = ahead_rig()
    rig.add(20, max_tokens=60)
    rig.step()
    assert rig.under_way
    rig.core.close()
    assert rig.model.closed
    assert not rig.core._launched


# -- statistics and timeline --------------------------------------------------------------


def test_counts_are_of_what_was_computed_and_not_confused_by_preemption() -> None:
    rig = Rig(6, enable_prefix_caching=False)
    for _ in range(2):
        rig.add(33, max_tokens=40)
    rig.drain()
    assert rig.core.generated_tokens == 80
    # The preempted one computed its whole prompt once more each time.
    assert rig.scheduler.num_preemptions >= 1
    assert rig.core.prompt_tokens == 33 * (2 + rig.scheduler.num_preemptions)
    assert rig.core.num_steps == len(rig.model.plans)
    assert (rig.query_tokens, rig.hit_tokens) == (66, 0)


def test_a_step_without_work_is_none() -> None:
    rig = Rig()
    assert rig.step() == []
    request = rig.add(20)
    request.paused = True
    assert rig.step() == []
    assert rig.core.num_steps == 0
    request.paused = False
    rig.drain()


def test_the_timeline_is_in_order() -> None:
    rig = Rig(max_num_batched_tokens=16, max_num_seqs=2)
    request = rig.add(40, max_tokens=3)
    rig.drain()
    t = request.timeline
    stamps = [t.queued, t.first_scheduled, t.chunks[0].start, t.chunks[-1].end]
    stamps += [t.first_token, t.last_token, t.finished]
    assert None not in stamps
    assert stamps == sorted(stamps, key=lambda stamp: stamp or 0)
    assert sum(chunk.num_tokens for chunk in t.chunks) == 40
