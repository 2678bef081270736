"""The caller's side of one request: an async stream of deltas that owns its cancellation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import anyio

from .errors import QueueFullError
from .outputs import Choice, Completion, Delta, FinishReason, Timings, TokenLogprob, Usage
from .runtime.core import Update
from .runtime.driver import Driver, Place
from .runtime.handoff import Mailbox, check_event_loop
from .scheduling.request import Request
from .scheduling.timeline import Timeline

__all__ = ["Stream"]


class _Pending:
    """What came since the consumer last looked, of one choice: joined, so that it is bounded."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason

    def delta(self, index: int) -> Delta:
        return Delta(
            "".join(self.text),
            tuple(self.token_ids),
            index,
            tuple(self.logprobs) if self.logprobs else None,
            self.finish_reason,
        )


class Stream:
    """The deltas of one request, as they are generated.

    Made by `Engine.stream`. The request is submitted when the stream is entered or first
    awaited. Tokens that come within `EngineConfig.stream_interval` are joined in one delta, but
    for the first one and the last.

    Use it as a context manager: leaving the block early aborts the request and frees its
    KV blocks within one engine step. A plain `async for` works too; a stream that is dropped
    unfinished is aborted when it is collected.

    It is read in the event loop in which it was entered.

    :raises EngineClosedError: while iterating, if the engine was closed meanwhile.
    :raises EngineDeadError: while iterating, if the engine failed meanwhile.
    :raises EventLoopError: while iterating, in another event loop.
    :raises QueueTimeoutError: on entering or while iterating, if it was not started in time.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        driver: Driver,
        make_requests: Callable[[Timeline], Awaitable[tuple[Place, list[Request]]]],
        make_mailbox: Callable[[], Mailbox],
        interval: float,
        *,
        speculative: bool = False,
    ) -> None:
        self.request_id = request_id
        self.num_read = 0
        self.num_sent = 0
        self.paused = False
        self._model = model
        self._driver = driver
        self._speculative = speculative
        self._make_requests = make_requests
        self._make_mailbox = make_mailbox
        self._requests: list[Request] = []
        self._timeline = Timeline()
        self._started = False
        self._starting: anyio.CancelScope | None = None
        """Around what is done before there are requests."""
        self._closed = False
        self._aborted = False
        self._error: Exception | None = None
        self._received: list[_Pending] = []
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._interval = interval
        self._ripe = False
        """Whether what is pending may be given: it is not held back to be joined with more."""
        self._last_given = float("-inf")
        self._num_finished = 0
        self._waiter: anyio.Event | None = None

    def __repr__(self) -> str:
        if not self._started:
            state = "not started"
        elif self.ended:
            state = "ended"
        else:
            state = self._requests[0].state.value if self._requests else "tokenizing"
        return f"<Stream {self.request_id} [{state} | {self.num_read} tokens read]>"

    async def __aenter__(self) -> Stream:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if not self._started:
            await self._start()
        if self._requests:
            check_event_loop(self.mailbox.loop, f"the stream {self.request_id}")
        while not (self._pending and self._ripe):
            if self._error is not None:
                self._close()
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("another task is waiting for this stream's next delta")
            self._waiter = anyio.Event()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None
        index, pending = self._pending.popitem(last=False)
        if not self._pending:
            self._ripe = False
            self._last_given = time.monotonic()
        self.num_read += len(pending.token_ids)
        if self.paused and self.num_read >= self.num_sent:
            self._driver.resume(self, self._requests)
        return pending.delta(index)

    def __del__(self) -> None:
        # Dropped while running, by a `break` out of a plain `async for` say.
        if self._started and not self._closed:
            self._close()

    async def aclose(self) -> None:
        """End the request now, if it has not ended; a task that waits for a delta stops."""
        self._close()

    def abort(self) -> bool:
        """End the request, but go on giving what came before, up to finish reason "abort".

        From any thread. Says whether there was something to end.
        """
        if not self._started or self.ended:
            return False
        self._aborted = True  # before looking, so that a start under way sees it or is seen
        if self._requests:
            self._driver.abort(self._requests)
        return True

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: it finished, failed, or was closed."""
        return self._closed or (self._started and self._num_finished == len(self._requests) > 0)

    @property
    def timeline(self) -> Timeline:
        """When things happened to it; with several choices, to the one that ended last."""
        if not self._requests:
            return self._timeline
        return max(self._requests, key=lambda r: r.timeline.finished or 0).timeline

    @property
    def completion(self) -> Completion:
        """The whole answer; of a stream that was closed early, what had come until then.

        :raises RuntimeError: while the stream runs.
        """
        if not self._requests or not self.ended:
            raise RuntimeError(f"{self!r} has not ended: read it to its end, or close it, first")
        choices = tuple(
            Choice(
                index=index,
                text="".join(received.text),
                token_ids=tuple(received.token_ids),
                finish_reason=received.finish_reason or "abort",
                stop_reason=request.stop_reason,
                logprobs=tuple(received.logprobs) if received.logprobs else None,
            )
            for index, (request, received) in enumerate(
                zip(self._requests, self._received, strict=True)
            )
        )
        first = self._requests[0]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *first.prompt_logprobs)
        return Completion(
            request_id=self.request_id,
            model=self._model,
            choices=choices,
            usage=Usage(
                prompt_tokens=first.num_prompt_tokens,
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
                cached_tokens=first.timeline.cached_tokens,
            ),
            timings=_timings(self.timeline, max(len(c.token_ids) for c in choices)),
            prompt_logprobs=prompt_logprobs,
            reuse=first.timeline.reuse,
        )

    def receive(self, update: Update, now: float) -> None:
        """Take an update; in the event loop of the stream.

        :param now: `time.monotonic`.
        """
        if self._closed:
            return
        delta = update.delta
        self._received[delta.index].add(delta)
        if update.finished:
            self._num_finished += 1
        if update.error is not None:
            self._error = self._error or update.error
        else:
            held = bool(self._pending)
            self._pending.setdefault(delta.index, _Pending()).add(delta)
            urgent = update.finished or self.paused or now - self._last_given >= self._interval
            if not (self._ripe or urgent):
                if not held:
                    self.mailbox.hold(self)
                return
        self.release()

    def release(self) -> None:
        """Hold back no longer what has come."""
        self._ripe = bool(self._pending)
        if self._waiter is not None:
            self._waiter.set()

    async def _start(self) -> None:
        if self._started or self._closed:
            return
        self._started = True
        self._timeline.arrived = time.monotonic_ns()
        place: Place | None = None
        requests: list[Request] = []
        try:
            with anyio.CancelScope() as self._starting:
                place, requests = await self._make_requests(self._timeline)
            if self._closed or place is None:
                return
            self.mailbox = self._make_mailbox()
            self._received = [_Pending() for _ in requests]
            self._driver.submit(requests, self, place)
        except BaseException as error:
            self._closed = True
            if isinstance(error, Exception):
                # That there was nothing to be had for speculation is no refusal.
                if not (self._speculative and isinstance(error, QueueFullError)):
                    self._driver.note_rejected(error)
                self._error = error  # entered once more, it must not look like an empty answer
            raise
        finally:
            self._starting = None
            if place is not None:
                self._driver.release(place)
        self._requests = requests
        if self._aborted:
            self._driver.abort(requests)

    def _close(self) -> None:
        """Synchronous and idempotent: cancellation cannot interrupt it."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        if self._num_finished < len(self._requests):
            self._driver.abort(self._requests)
        self._pending.clear()
        if self._waiter is not None:
            self._waiter.set()


def _timings(timeline: Timeline, num_tokens: int) -> Timings:
    """Stages that share their boundaries, so that they sum to the total."""
    arrived = timeline.arrived or 0
    end = timeline.finished or time.monotonic_ns()
    scheduled = timeline.first_scheduled or end
    first = timeline.first_token or end
    last = timeline.last_token or end

    def seconds(start: int, stop: int) -> float:
        return (stop - start) / 1e9

    return Timings(
        queue=seconds(arrived, scheduled),
        prefill=seconds(scheduled, first),
        decode=seconds(first, end),
        total=seconds(arrived, end),
        tokenize=seconds(arrived, timeline.tokenized or arrived),
        time_to_first_token=seconds(arrived, first) if timeline.first_token else None,
        time_per_output_token=seconds(first, last) / (num_tokens - 1) if num_tokens > 1 else None,
        prefill_chunks=len(timeline.chunks),
        preemptions=timeline.preemptions,
    )


def open_letters(letters: Sequence[tuple[Stream, Update]]) -> None:
    """Hand each update to its stream; runs in the streams' event loop."""
    now = time.monotonic()
    for stream, update in letters:
        stream.receive(update, now)
