"""Whether queues, slots and in-flight prefixes agree. For tests: it looks at everything."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from .request import Request, RequestState

if TYPE_CHECKING:
    from .scheduler import Scheduler

__all__ = ["check_scheduler"]


def check_scheduler(scheduler: Scheduler) -> None:
    """Check what must hold between two steps.

    :raises RuntimeError: naming the first thing that does not.
    """
    waiting, running = scheduler.waiting, scheduler.running
    live = [*running, *waiting]
    _check(len({*live}) == len(live), "a request is in two places")
    _check(
        all(r.state is RequestState.RUNNING for r in running)
        and all(r.state is RequestState.WAITING for r in waiting),
        "a request is where its state does not say",
    )
    _check(
        all(before.sort_key < after.sort_key for before, after in pairwise(waiting)),
        "those that wait are not in order",
    )
    _check(len({r.sort_key for r in live}) == len(live), "two requests have one place in the order")
    _check(len(running) <= scheduler.max_num_seqs, "more run than there are seats")
    queued = scheduler.queued
    _check(queued <= set(waiting), "one that is counted as queued does not wait")
    _check(
        scheduler.num_queued_tokens == sum(r.num_prompt_tokens for r in queued),
        "the queued tokens are counted wrongly",
    )
    for request in live:
        _check_request(request, live)
    scheduler.check_integrity()


def _check_request(request: Request, live: list[Request]) -> None:
    waits = request.state is RequestState.WAITING
    if not waits:
        held = request.layout.start(len(request.blocks))
        _check(
            request.capacity == held and request.num_computed <= held,
            f"{request!r} holds blocks for {held} tokens, not {request.capacity}",
        )
        _check(
            request.loading is not None
            or request.num_computed >= request.num_known
            or request.layout.num_blocks(request.num_tokens) <= len(request.blocks),
            f"{request!r} runs without blocks for its prompt",
        )
        _check(
            request.leader is None and request.waits_for is None and not request.protected,
            f"{request!r} runs, and waits",
        )  # fmt: skip
        return
    _check(request.loading is None, f"{request!r} waits, and is loading")
    _check(request.owns_until == 0, f"{request!r} waits, and owns blocks")
    if request.leader is not None:
        _check(request.leader in live, f"{request!r} waits for a leader that has ended")
        _check(not request.blocks, f"{request!r} holds its prompt, and waits for it")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)
