"""Worker threads and the places in front of them: bounded, and known to one process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from ragserve.engine import EngineClosedError, InvalidParamsError, QueueFullError, result_of

__all__ = ["HomeProcess", "Places", "Workers"]

T = TypeVar("T")


class HomeProcess:
    """The process that something was first used in, in which its threads are.

    :param what: what it is, for the error.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._pid: int | None = None

    @property
    def forked(self) -> bool:
        """Whether this is another process, forked from the one it was used in: its threads are not
        here, and its locks may be held by threads that are not here either."""
        return self._pid is not None and self._pid != os.getpid()

    def check(self) -> None:
        """Make this its process, if it has none yet.

        :raises EngineClosedError: if it was used in another one.
        """
        if self.forked:
            raise EngineClosedError(
                f"{self.what} was used in process {self._pid} and this is process {os.getpid()}, "
                "forked from it: threads stay behind in a fork; make it anew in each worker, after "
                "it was forked"
            )
        self._pid = os.getpid()


class Places:
    """So many callers may wait for something at a time. From any thread.

    :param what: what waits, as in the option's name, `max_queued_<what>`.
    :param most: how many, at least 1.
    :raises InvalidParamsError: if `most` is not.
    """

    def __init__(self, what: str, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidParamsError(f"max_queued_{what}", most, "an integer of at least 1")
        self._what = what
        self._most = most
        self._taken = 0
        self._lock = threading.Lock()
        self._interval = 1.0  # mean seconds from one place that is given back to the next
        self._last = time.monotonic()

    @property
    def num_taken(self) -> int:
        """Places that are taken now."""
        return self._taken

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have a place as long as the block lasts.

        :raises QueueFullError: if there is none.
        """
        with self._lock:
            if self._taken >= self._most:
                raise QueueFullError(self._what, self._taken, self._most, self._interval)
            self._taken += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken -= 1
                now = time.monotonic()
                self._interval += 0.2 * (now - self._last - self._interval)
                self._last = now


class Workers:
    """A few threads, which end when this is collected.

    :param count: how many threads.
    :param name: what theirs begin with.
    :param process: whose they are.
    """

    def __init__(self, count: int, name: str, process: HomeProcess) -> None:
        self._process = process
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` in a thread and wait for it without blocking the event loop.

        Cancelling the caller gives up waiting at once; the function is not started any more, or
        its result is dropped.

        :raises EngineClosedError: if the threads are another process's, or Python is ending.
        """
        self._process.check()
        try:
            future = self._threads.submit(function, *args)
        except RuntimeError as error:  # what a pool raises that takes no more
            raise EngineClosedError(
                f"{self._process.what} cannot start a thread: Python is shutting down"
            ) from error
        return await result_of(future)
