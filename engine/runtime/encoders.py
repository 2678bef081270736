"""The threads that encode prompts, and whose prompt is next.

Prompts wait in lanes: one for each namespace's short ones, one for its long ones. Lanes take turns,
so that a namespace with many prompts delays another's by at most one of its own; and long prompts
never take all the threads, if there are several, so that a short one needs not wait for a long one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeAlias, TypeVar

from .handoff import result_of

__all__ = ["Encoders", "Encoding"]

T = TypeVar("T")

_LONG = 32_768
"""Characters, or token ids: some 30 ms of work."""

Lane: TypeAlias = tuple[str, bool]
"""A namespace, and whether its prompts are long."""


class Encoding(Generic[T]):
    """One prompt's work, and its result."""

    def __init__(self, lane: Lane, work: Callable[[Encoding[T]], T]) -> None:
        self.lane = lane
        self.future: Future[T] = Future()
        self.abandoned = False
        """Whether nobody waits for the result any more."""
        self._work = work

    def check(self) -> None:
        """To be called between any two parts of the work, which cannot be interrupted otherwise.

        :raises CancelledError: if nobody waits for the result any more.
        """
        if self.abandoned:
            raise CancelledError

    def run(self) -> None:
        """Do it, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work(self))
        except BaseException as error:
            self.future.set_exception(error)


class Encoders:
    """A few threads that share the work fairly. From any thread.

    :param num_threads: how many, at least 1.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ragserve tokenizer")
        # Reentrant: a cancelled future leaves its lane through a callback.
        self._lock = threading.RLock()
        self._lanes: dict[Lane, OrderedDict[Future[Any], Encoding[Any]]] = {}
        """The first lane is next; in it, the first encoding."""
        self._num_busy = 0
        self._num_long = 0
        """Threads that are busy with long prompts."""
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Encodings that no thread has begun."""
        with self._lock:
            return sum(map(len, self._lanes.values()))

    async def run(self, namespace: str, size: int, work: Callable[[Encoding[T]], T]) -> T:
        """Do `work(encoding)` in one of the threads, and wait for it without blocking the loop.

        Cancelling the caller takes it out of its lane at once. Work that has begun is asked to
        end, see `Encoding.check`.

        :param size: of the prompt, in characters or token ids.
        :raises CancelledError: that of `concurrent.futures`, if this is closed before it begins.
        """
        encoding = Encoding((namespace, size > _LONG), work)
        try:
            self._put(encoding)
            return await result_of(encoding.future)
        finally:
            encoding.abandoned = True
            del encoding  # or its exception would hold this frame, and the frame the exception

    def close(self) -> None:
        """Begin nothing more, and cancel what waits. Idempotent; does not wait."""
        with self._lock:
            self._closed = True
            waiting = [future for lane in self._lanes.values() for future in lane]
        for future in waiting:
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _put(self, encoding: Encoding[Any]) -> None:
        with self._lock:
            if self._closed:
                raise CancelledError
            if self._num_busy < self._num_threads:
                self._threads.submit(self._work)
                self._num_busy += 1
            self._lanes.setdefault(encoding.lane, OrderedDict())[encoding.future] = encoding
        lane = encoding.lane
        encoding.future.add_done_callback(lambda future: self._leave(lane, future))

    def _leave(self, lane: Lane, future: Future[Any]) -> None:
        with self._lock:
            waiting = self._lanes.get(lane)
            if waiting is None:
                return
            waiting.pop(future, None)
            if not waiting:
                del self._lanes[lane]

    def _work(self) -> None:
        """What a thread does until nothing is left that it may begin."""
        while (encoding := self._take()) is not None:
            encoding.run()
            with self._lock:
                self._num_long -= encoding.lane[1]
            del encoding  # and its prompt, while the next one is awaited

    def _take(self) -> Encoding[Any] | None:
        with self._lock:
            # A copy, for what is collected as garbage meanwhile leaves its lane.
            for lane in [*self._lanes]:
                waiting, is_long = self._lanes.get(lane), lane[1]
                if not waiting or (is_long and self._num_long >= max(1, self._num_threads - 1)):
                    continue
                _, encoding = waiting.popitem(last=False)
                del self._lanes[lane]
                if waiting:
                    self._lanes[lane] = waiting  # behind all others
                self._num_long += is_long
                return encoding
            self._num_busy -= 1
            return None
