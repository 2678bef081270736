"""What an engine counts and times: histograms that cost little, and who is told as it happens.

Everything is written by the engine's thread (refusals by their callers) and may be read from any
thread without a lock: a reader copies, and may miss what is being written just then.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from ..errors import InvalidParamsError
from ..offload.tiers import TierStatistics
from ..outputs import FinishReason, MissReason
from ..prompt import SegmentKind
from ..scheduling.request import Request

__all__ = [
    "CacheStatistics",
    "Distribution",
    "FinishedRequest",
    "Histogram",
    "Listener",
    "Listeners",
    "Recorder",
    "STAGE_BOUNDARIES",
    "Statistics",
    "error_name",
]

_logger = logging.getLogger("ragserve")

L = TypeVar("L")

# Seconds. The first three are those that OpenTelemetry's conventions for generative AI name.
_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST: Final = tuple(0.01 * 2**power for power in range(14))
# A GPU's steps take less than the 10 ms at which those per token begin.
_BETWEEN_TOKENS: Final = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03),
    *(0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
STAGE_BOUNDARIES: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""Seconds, for stages of a request of which one may take a millisecond, another a minute."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often a value fell where, since the beginning.

    :param boundaries: upper bounds of the buckets, which include them, in ascending order.
    :param counts: of each bucket; one more than there are boundaries, for what lies above.
    :param sum: of all values.
    :param count: of all values.
    """

    boundaries: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int

    @property
    def mean(self) -> float:
        """Exact; 0 before the first value."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The value that the share `q` of all values does not exceed; 0 before the first value.

        Values are taken to lie evenly in their bucket; above the last boundary nothing more is
        known, and it is given.

        :raises InvalidParamsError: if `q` is not between 0 and 1.
        """
        if not 0.0 <= q <= 1.0:
            raise InvalidParamsError("q", q, "a number from 0 to 1")
        rank, below = q * self.count, 0
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                lower = self.boundaries[index - 1] if index else min(0.0, self.boundaries[0])
                return lower + (self.boundaries[index] - lower) * (rank - below) / count
            below += count
        return self.boundaries[-1] if self.count else 0.0


class Histogram:
    """Counts values by bucket. One thread writes, any may read.

    :param boundaries: upper bounds of the buckets, in ascending order.
    """

    __slots__ = ("_boundaries", "_counts", "_sum")

    def __init__(self, boundaries: tuple[float, ...]) -> None:
        self._boundaries = boundaries
        self._counts = [0] * (len(boundaries) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or several that are equal."""
        self._counts[bisect_left(self._boundaries, value)] += count
        self._sum += value * count

    def read(self) -> Distribution:
        """What has been counted until now."""
        counts = tuple(self._counts)  # copied at one go, so that buckets and count agree
        return Distribution(self._boundaries, counts, self._sum, sum(counts))


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What prompts found in the cache, and why not more. Of requests that generate: what was
    computed ahead is not counted.

    :param query_tokens: prompt tokens of started requests, by kind of segment.
    :param hit_tokens: of those, found in the pool or a tier behind it.
    :param miss_tokens: the others, by reason (see `MissReason`).
    :param awaited_tokens: hits of requests that waited while others computed them.
    :param blocks_pinned: kept for pins.
    :param tiers: by name, what the tiers behind the pool hold and have done.
    """

    query_tokens: dict[SegmentKind, int]
    hit_tokens: dict[SegmentKind, int]
    miss_tokens: dict[MissReason, int]
    awaited_tokens: int
    blocks_pinned: int
    tiers: dict[str, TierStatistics]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an engine is doing and has done since it was opened. Distributions are of seconds.

    A request for `n` choices is `n` sequences. Those that failed, were aborted, or waited in vain
    are counted and timed like all others.
    """

    num_running: int
    """Sequences with a seat in the current steps."""
    num_waiting: int
    """Sequences that wait for a seat: new, preempted, following another choice's prompt, or with a
    prompt that is still to be encoded."""
    blocks_total: int
    blocks_used: int
    """Held by live requests."""
    blocks_cached: int
    """Held by nobody, but found by a request with their prefix."""
    cache: CacheStatistics
    prompt_tokens: int
    """Prompt tokens computed."""
    generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_evictions: int
    num_finished: dict[str, int]
    """Sequences by finish reason: stop, length, abort, error."""
    num_errors: dict[str, int]
    """Sequences that ended with finish reason error, by the error's class."""
    num_rejected: dict[str, int]
    """Requests that were refused when they were entered, with nothing queued, by the error's
    class."""
    time_to_first_token: Distribution
    """From arrival, before tokenizing, to the first token; of sequences that have one."""
    time_per_output_token: Distribution
    """(last token - first token) / (tokens - 1); of ended sequences of two tokens or more."""
    inter_token_latency: Distribution
    """Between two tokens of a sequence, one value for every token but the first. Of tokens that
    come together each has its share of the time since the one before them. Preemption and a
    consumer that is too slow are part of it."""
    request_duration: Distribution
    """From arrival to the end, of ended sequences; the sum of the three stages that follow."""
    queue_time: Distribution
    """From arrival to the first step, or to the end if there was none."""
    prefill_time: Distribution
    """From the first step to the first token, or to the end; of sequences that were started."""
    decode_time: Distribution
    """From the first token to the end; of sequences that have one."""

    @property
    def prefix_query_tokens(self) -> int:
        """Prompt tokens of all started requests."""
        return sum(self.cache.query_tokens.values())

    @property
    def prefix_hit_tokens(self) -> int:
        """Of those, found in the cache."""
        return sum(self.cache.hit_tokens.values())

    @property
    def prefix_hit_rate(self) -> float:
        """`prefix_hit_tokens` of `prefix_query_tokens`; 0 before the first request."""
        return self.prefix_hit_tokens / max(1, self.prefix_query_tokens)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that live requests hold."""
        return self.blocks_used / self.blocks_total


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """How one sequence went. Times in seconds, as in `Statistics`; None did not happen.

    Neither its text nor whose it was is in here.

    :param error: class of the error that ended it; "cancelled" if it was aborted.
    """

    finish_reason: FinishReason
    error: str | None
    duration: float
    queue: float
    prefill: float | None
    decode: float | None
    time_per_output_token: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


class Listener(Protocol):
    """Told of what an engine does, in its thread, which waits meanwhile: be quick, never block.

    One that raises is not told any more. The engine holds its listeners, so one that holds the
    engine keeps it alive.
    """

    def first_token(self, seconds: float) -> None:
        """A sequence got its first token, so long after it arrived."""

    def tokens(self, seconds: float, count: int) -> None:
        """A sequence got more tokens, `seconds` apart on average."""

    def finished(self, request: FinishedRequest) -> None:
        """A sequence ended."""


class Listeners(Generic[L]):
    """Who is told. Changed from any thread, told in one."""

    def __init__(self) -> None:
        # Replaced, never changed: it is walked through in another thread.
        self._all: tuple[L, ...] = ()
        self.any = False
        """Whether there is one."""
        self._lock = threading.Lock()

    def add(self, listener: L) -> None:
        """Tell it from now on; once, however often it is added."""
        with self._lock:
            if not any(known is listener for known in self._all):
                self._all = (*self._all, listener)
                self.any = True

    def remove(self, listener: L) -> None:
        """Tell it no more; nothing happens if it is not told."""
        with self._lock:
            self._all = tuple(known for known in self._all if known is not listener)
            self.any = bool(self._all)

    def tell(self, call: Callable[[L], object]) -> None:
        """Call each; one that fails is dropped, for what it listens to must go on."""
        for listener in self._all:
            try:
                call(listener)
            except Exception:
                _logger.exception("%r failed and is not told of anything any more", listener)
                self.remove(listener)


class Recorder:
    """Writes down what happens to requests, and tells listeners."""

    def __init__(self) -> None:
        self.listeners: Listeners[Listener] = Listeners()
        self.num_finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.num_errors: dict[str, int] = {}
        self.num_rejected: dict[str, int] = {}
        self._rejections = threading.Lock()
        self.time_to_first_token = Histogram(_FIRST_TOKEN)
        self.time_per_output_token = Histogram(_PER_TOKEN)
        self.inter_token_latency = Histogram(_BETWEEN_TOKENS)
        self.request_duration = Histogram(_REQUEST)
        self.queue_time = Histogram(STAGE_BOUNDARIES)
        self.prefill_time = Histogram(STAGE_BOUNDARIES)
        self.decode_time = Histogram(STAGE_BOUNDARIES)

    def tokens(self, request: Request, count: int, at: int) -> None:
        """A request gets tokens; before its timeline says so.

        :param at: when they were there, `time.monotonic_ns`.
        """
        last = request.timeline.last_token
        if last is None:
            self._first_token((at - _arrival(request, at)) / 1e9)
        elif count:
            seconds = (at - last) / (1e9 * count)
            self.inter_token_latency.observe(seconds, count)
            if self.listeners.any:
                self._tell_tokens(seconds, count)

    def finished(self, request: Request, reason: FinishReason, error: Exception | None) -> None:
        """A request has ended."""
        record = _finished(request, reason, error)
        self.num_finished[reason] += 1
        if reason == "error":
            name = record.error or "unknown"
            self.num_errors[name] = self.num_errors.get(name, 0) + 1
        self.request_duration.observe(record.duration)
        self.queue_time.observe(record.queue)
        if record.prefill is not None:
            self.prefill_time.observe(record.prefill)
        if record.decode is not None:
            self.decode_time.observe(record.decode)
        if record.time_per_output_token is not None:
            self.time_per_output_token.observe(record.time_per_output_token)
        self.listeners.tell(lambda listener: listener.finished(record))

    def rejected(self, error: Exception) -> None:
        """A request was refused before anything was queued; from any thread."""
        name = error_name(error)
        with self._rejections:
            self.num_rejected[name] = self.num_rejected.get(name, 0) + 1

    def _first_token(self, seconds: float) -> None:
        self.time_to_first_token.observe(seconds)
        self.listeners.tell(lambda listener: listener.first_token(seconds))

    def _tell_tokens(self, seconds: float, count: int) -> None:
        # Apart from `tokens`, where a closure would cost something every time.
        self.listeners.tell(lambda listener: listener.tokens(seconds, count))


def error_name(error: BaseException) -> str:
    """What errors are counted by: the class alone, for a message may quote what was asked."""
    return type(error).__qualname__


def _arrival(request: Request, otherwise: int) -> int:
    """When it arrived; one that was added to a core directly, when it was queued."""
    timeline = request.timeline
    return timeline.arrived or timeline.queued or otherwise


def _finished(request: Request, reason: FinishReason, error: Exception | None) -> FinishedRequest:
    timeline = request.timeline
    # A core that has failed may not have come to end it.
    end = timeline.finished or time.monotonic_ns()
    arrived = _arrival(request, end)
    scheduled, first, last = timeline.first_scheduled, timeline.first_token, timeline.last_token
    count = len(request.output_token_ids)
    prefill = decode = per_token = None
    if scheduled is not None:
        prefill = ((first or end) - scheduled) / 1e9
    if first is not None:
        decode = (end - first) / 1e9
    if first is not None and last is not None and count > 1:
        per_token = (last - first) / 1e9 / (count - 1)
    name = None if error is None else error_name(error)
    return FinishedRequest(
        finish_reason=reason,
        error="cancelled" if reason == "abort" else name,
        duration=(end - arrived) / 1e9,
        queue=((scheduled or end) - arrived) / 1e9,
        prefill=prefill,
        decode=decode,
        time_per_output_token=per_token,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        generated_tokens=count,
        preemptions=timeline.preemptions,
    )
