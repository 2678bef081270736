"""What of each prompt was found in the cache, by kind of segment, and why not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..cache.block_pool import BlockPool
from ..outputs import MissReason, ReuseSource, SegmentReuse
from ..prompt import SegmentKind
from .history import PromptHistory
from .request import PromptSegment, Request

__all__ = ["CacheReport"]

_SLOWNESS: dict[ReuseSource, int] = {"device": 0, "host": 1, "disk": 2}


class CacheReport:
    """Explains what each request finds, and counts it. Written by the engine's thread."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._history = PromptHistory()
        self.query_tokens: Counter[SegmentKind] = Counter()
        self.hit_tokens: Counter[SegmentKind] = Counter()
        self.miss_tokens: Counter[MissReason] = Counter()
        self.awaited_tokens = 0
        """Hits of requests that waited until others had computed them."""

    def note(
        self,
        request: Request,
        num_cached: int,
        *,
        source_of: Callable[[int], ReuseSource],
        may_share: bool,
        counts: bool,
    ) -> None:
        """A request is started for the first time.

        :param num_cached: blocks that it has found.
        :param source_of: where the block with this index came from.
        :param may_share: whether it could find any at all.
        :param counts: whether it counts in the sums; further choices of one request do not.
        """
        cached = min(request.layout.start(num_cached), request.num_prompt_tokens)
        reuse = []
        for segment in request.segments:
            found = max(0, min(cached, segment.end) - segment.start)
            miss, source = None, None
            if found:
                first = request.layout.block_of(segment.start)
                last = request.layout.block_of(segment.start + found - 1)
                source = max(source_of(first), source_of(last), key=lambda name: _SLOWNESS[name])
            if segment.start + found < segment.end:
                miss = self._explain(request, segment, segment.start + found, may_share, counts)
            if counts:
                self.query_tokens[segment.kind] += segment.end - segment.start
                self.hit_tokens[segment.kind] += found
            length = segment.end - segment.start
            reuse.append(SegmentReuse(segment.kind, length, found, source, miss))
        request.timeline.reuse = tuple(reuse)
        if counts and request.waited_from is not None:
            self.awaited_tokens += max(0, cached - request.waited_from)
        # What is only speculated on may not come to be computed.
        if may_share and not request.speculative:
            self._history.note((s.digest for s in request.segments), request.namespace)

    def forget(self) -> None:
        """Forget which segments were sent. The sums stay."""
        self._history = PromptHistory()

    def _explain(
        self, request: Request, segment: PromptSegment, start: int, may_share: bool, counts: bool
    ) -> MissReason:
        """Why the segment's tokens from `start` on were not there; counts them by reason."""
        if not may_share:
            if counts:
                self.miss_tokens["not_cached"] += segment.end - start
            return "not_cached"
        # What no block can hold for others: the prompt's tail.
        shareable = max(start, min(segment.end, request.layout.start(request.num_shareable)))
        if counts and shareable < segment.end:
            self.miss_tokens["shorter_than_block"] += segment.end - shareable
        if shareable == start:
            return "shorter_than_block"
        key = request.keys[request.layout.block_of(start)]
        # In the pool, and not found: what it stands behind was evicted.
        if self._pool.was_evicted(key) or key in self._pool:
            reason: MissReason = "evicted"
        else:
            reason = self._history.why_missing(segment.digest, request.namespace)
        if counts:
            self.miss_tokens[reason] += shareable - start
        return reason
