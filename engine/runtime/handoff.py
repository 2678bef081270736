"""Between the engine's threads and the event loops of its callers, without a wake-up too many."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

import anyio

from ..errors import EventLoopError

__all__ = [
    "EventLoop",
    "Mailbox",
    "check_event_loop",
    "current_event_loop",
    "result_of",
    "run_in",
]

T = TypeVar("T")


class EventLoop(Protocol):
    """A running event loop, seen from another thread."""

    def post(self, callback: Callable[[], object]) -> bool:
        """Run `callback` in the loop soon; False if the loop is closed."""

    def later(self, seconds: float, callback: Callable[[], object]) -> None:
        """Run `callback` in the loop after some time, unless the loop has ended by then.

        To be called in the loop.
        """

    def is_closed(self) -> bool:
        """Whether it will never run anything again."""

    @property
    def key(self) -> object:
        """Equal for the same loop."""


class _AsyncioLoop:
    def __init__(self) -> None:
        self.key = asyncio.get_running_loop()

    def post(self, callback: Callable[[], object]) -> bool:
        try:
            self.key.call_soon_threadsafe(callback)
        except RuntimeError:  # what asyncio raises for a closed loop
            return False
        return True

    def later(self, seconds: float, callback: Callable[[], object]) -> None:
        self.key.call_later(seconds, callback)

    def is_closed(self) -> bool:
        return self.key.is_closed()


class _TrioLoop:
    def __init__(self, trio: Any) -> None:
        self.key = trio.lowlevel.current_trio_token()
        self._finished = trio.RunFinishedError
        self._trio = trio

    def post(self, callback: Callable[[], object]) -> bool:
        try:
            self.key.run_sync_soon(callback)
        except self._finished:
            return False
        return True

    def later(self, seconds: float, callback: Callable[[], object]) -> None:
        async def wait() -> None:
            await self._trio.sleep(seconds)
            callback()

        self._trio.lowlevel.spawn_system_task(wait)

    def is_closed(self) -> bool:
        # A token cannot be asked; however often this is posted, it waits once.
        try:
            self.key.run_sync_soon(_do_nothing, idempotent=True)
        except self._finished:
            return True
        return False


def _do_nothing() -> None:
    pass


def current_event_loop() -> EventLoop:
    """The event loop that runs the caller: asyncio's or trio's.

    :raises RuntimeError: outside an event loop.
    """
    trio = sys.modules.get("trio")  # if trio runs us, it has been imported
    if trio is not None and trio.lowlevel.in_trio_run():
        return _TrioLoop(trio)
    return _AsyncioLoop()


def check_event_loop(loop: EventLoop, what: str) -> None:
    """Check that the caller runs in the event loop in which something was begun.

    In another one it would wait for ever: what it waits for is delivered to the first.

    :param what: what was begun, for the error.
    :raises EventLoopError: if it runs in another one.
    """
    if current_event_loop().key is not loop.key:
        raise EventLoopError(
            f"{what} was entered in another event loop than the one that reads it now, and its "
            "tokens are delivered there; enter and read it in one event loop"
        )


class Holder(Protocol):
    """Who keeps something back for a while."""

    def release(self) -> None:
        """Keep it back no longer."""


class Mailbox:
    """Letters for one event loop. However many arrive before the loop looks, it is woken once.

    :param loop: where letters are opened.
    :param open_letters: called in the loop with all that came, in order.
    :param interval: seconds for which `hold` puts off a reminder at most.
    """

    def __init__(
        self,
        loop: EventLoop,
        open_letters: Callable[[list[Any]], None],
        interval: float = 0.0,
    ) -> None:
        self.loop = loop
        self._open_letters = open_letters
        self._interval = interval
        self._held: list[weakref.ref[Holder]] = []
        self._lock = threading.Lock()
        self._letters: list[Any] = []
        self._closed = False

    def put(self, letters: list[Any]) -> bool:
        """Deliver `letters`, from any thread; False if the loop is closed and nobody will read."""
        with self._lock:
            if self._closed:
                return False
            # Letters that lie here unopened: it is busy, or was closed before it came to them.
            if self._letters:
                self._closed = self.loop.is_closed()
            else:
                self._closed = not self.loop.post(self._deliver)
            if self._closed:
                self._letters.clear()
                return False
            self._letters.extend(letters)
        return True

    def hold(self, holder: Holder) -> None:
        """Have `holder.release()` called soon, in the loop: at one time for all that are held.

        To be called in the loop.
        """
        if not self._held:
            self.loop.later(self._interval, self._release)
        self._held.append(weakref.ref(holder))

    def _release(self) -> None:
        held, self._held = self._held, []
        for reference in held:
            if (holder := reference()) is not None:
                holder.release()

    def _deliver(self) -> None:
        with self._lock:
            letters, self._letters = self._letters, []
        self._open_letters(letters)


async def run_in(executor: Executor, function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in `executor` and wait for it without blocking the event loop.

    Cancelling the caller gives up waiting at once; the function is not started any more, or its
    result is dropped.
    """
    return await result_of(executor.submit(function, *args))


async def result_of(future: Future[T]) -> T:
    """Wait for what another thread computes, without blocking the event loop.

    Cancelling the caller gives up waiting at once, and cancels the future if it has not begun.
    """
    loop = current_event_loop()
    done = anyio.Event()
    future.add_done_callback(lambda _: loop.post(done.set))
    try:
        await done.wait()
    except BaseException:
        future.cancel()
        raise
    try:
        return future.result()
    finally:
        del future  # or its exception would hold this frame, and the frame the exception
