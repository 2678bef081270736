"""Which of the waiting requests goes next, and what of the cache is spared for those that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cache.block_pool import BlockPool
from .request import Request

__all__ = ["MAX_BYPASSES", "Admission"]

_WINDOW = 32
"""Requests at the head of the queue that are compared: bounds the time that it takes."""
MAX_BYPASSES = 4
"""A request that so many later ones were started before is the next, whatever they find."""
_PRESSURE = 4
"""Blocks are spared for who waits once less than one in so many is free."""


class Admission:
    """The order in which waiting requests are started.

    Lower priority values go first. Of one priority go first those that were started before, and
    were preempted; then those that have been overtaken too often; then those with most tokens in
    the cache; then the oldest. So nobody is overtaken more than `MAX_BYPASSES` times.

    :param by_hits: if False it is priority and age alone, and nothing is spared for anybody.
    """

    def __init__(self, pool: BlockPool, *, by_hits: bool) -> None:
        self._pool = pool
        self._by_hits = by_hits

    def order(self, waiting: Sequence[Request]) -> Iterator[Request]:
        """The waiting requests, next first; `waiting` may change meanwhile.

        :param waiting: in order of priority and age.
        """
        if self._by_hits and len(waiting) > 1:
            window = sorted(waiting[:_WINDOW], key=self._rank)
            return iter([*window, *waiting[_WINDOW:]])
        return iter([*waiting])

    def note_started(self, request: Request, waiting: Sequence[Request]) -> None:
        """It is started; those of its priority before it in the queue were overtaken."""
        self.forget(request)
        if not self._by_hits:
            return
        for other in waiting[:_WINDOW]:
            if other is request:
                return
            if other.leader is None and other.sort_key[:2] == request.sort_key[:2]:
                other.bypass_count += 1

    def protect(self, waiting: Sequence[Request]) -> None:
        """Spare what those that go on waiting would find, while blocks are scarce."""
        pool = self._pool
        if not self._by_hits or pool.num_free * _PRESSURE >= pool.num_blocks:
            return
        for request in waiting[:_WINDOW]:
            if not request.protected and request.keys:
                request.protected = request.keys[: pool.num_found(request.keys)]
                pool.protect(request.protected)

    def forget(self, request: Request) -> None:
        """It waits no more."""
        if request.protected:
            self._pool.unprotect(request.protected)
            request.protected = ()

    def _rank(self, request: Request) -> tuple[bool, int, int, int, int]:
        speculative, priority, number, _ = request.sort_key
        if request.timeline.first_scheduled is not None:
            return speculative, priority, 0, 0, number
        if request.bypass_count >= MAX_BYPASSES:
            return speculative, priority, 1, 0, number
        if request.waits_for is not None:
            return speculative, priority, 3, 0, number  # it is passed over: nothing to look up
        found = self._pool.num_found(request.keys, request.num_shareable)
        return speculative, priority, 2, -request.layout.start(found), number
