"""Ending an application whose streams are open: told in time, bounded in time.

    @asynccontextmanager
    async def lifespan(app):
        async with Engine.open(MODEL) as engine, graceful_shutdown(engine, deadline=10):
            ...
            yield

A server that is told to stop waits for its open responses first, and ends the application's
lifespan after that; an answer that takes minutes holds it up for minutes, and one whose client
does not read, for ever. So the end has to be noticed where the server notices it: at the signal.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal, TypeAlias

from ragserve.engine import Engine, InvalidParamsError

__all__ = ["GracefulShutdown", "graceful_shutdown"]

_Command: TypeAlias = Literal["drain", "terminate", "leave"]
_Handler: TypeAlias = Callable[[int, FrameType | None], object]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0
"""For the responses to be sent, where nobody but us would end the process."""


def graceful_shutdown(*engines: Engine, deadline: float = 10.0) -> GracefulShutdown:
    """End engines by themselves when the process is told to: for an application's lifespan.

    While it is entered, the first SIGTERM or SIGINT makes each engine take no more requests
    (they raise EngineClosedError, which is 503 with Retry-After) and finish those it has. What
    has not finished after `deadline` seconds ends with EngineClosedError, for a stream an `error`
    event; so every response ends, and the server can. A second SIGINT does that at once.

    Whoever handled the signal before, the server mostly, is called too, whether it uses
    `signal.signal` or its event loop. If that was nobody, the signal has its usual effect once
    the engines have ended. A signal that was ignored stays ignored.

    Signals are handled in the main thread only; entered in another, it has no effect until
    `begin_drain` is called. Anything may call that: a route for Kubernetes' `preStop` hook, or
    the code that stops a server by other means than a signal.

    With several worker processes each opens its own engine in its own lifespan, never before
    the workers are forked. uvicorn passes the signal on to its workers. hypercorn's workers
    (`workers` of 1 or more, and so its command line unless told otherwise) do not get it: they
    cancel what runs after `graceful_timeout` seconds, and each stream ends with an `error` event
    then. So set that to the deadline, or serve with `workers=0`.

    A client that has stopped reading cannot be told anything, and its server waits for it: give
    uvicorn a `timeout_graceful_shutdown` of a little more than the deadline, too. hypercorn has
    nothing of the kind, and whatever started it has to end it then.

    :param engines: to be drained. They stay the caller's to close.
    :param deadline: seconds from the signal.
    :raises InvalidParamsError: if `deadline` is negative.
    """
    return GracefulShutdown(engines, deadline)


class GracefulShutdown:
    """What `graceful_shutdown` returns: enter it, with `async with` or `with`."""

    def __init__(self, engines: tuple[Engine, ...], deadline: float) -> None:
        if not deadline >= 0:
            raise InvalidParamsError("deadline", deadline, "0 or more seconds")
        self._engines = engines
        self._deadline = deadline
        self._draining = False
        self._left = False
        self._previous: dict[int, signal.Handlers | _Handler | int | None] = {}
        self._unhandled: int | None = None
        self._num_interrupts = 0
        # A signal's handler runs in the midst of anything, locks held, and must not take any:
        # putting into this queue is all that it does, and a thread does the rest.
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ragserve shutdown", daemon=True)

    def __repr__(self) -> str:
        state = "draining" if self._draining else "left" if self._left else "waiting"
        return f"<GracefulShutdown of {len(self._engines)} engines [{state}]>"

    def __enter__(self) -> GracefulShutdown:
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                # None is a handler that is not Python's: it could not be called, nor restored.
                if previous is not None and previous != signal.SIG_IGN:
                    self._previous[number] = previous
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            # If another handler was put in front of ours, it may call ours, which then only
            # calls the one before.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
        self._left = True
        self._commands.put("leave")

    async def __aenter__(self) -> GracefulShutdown:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    @property
    def draining(self) -> bool:
        """Whether the end has begun: what a readiness probe asks."""
        return self._draining

    def begin_drain(self) -> None:
        """Do what a signal does, except to stop the server. From any thread; idempotent.

        Requests are refused when it returns. The deadline begins now.
        """
        self._draining = True
        for engine in self._engines:
            engine.begin_drain()
        self._commands.put("drain")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if not self._left:
            self._draining = True
            self._commands.put("drain")
            self._num_interrupts += number == signal.SIGINT
            if self._num_interrupts > 1:
                self._commands.put("terminate")
        if callable(previous):
            previous(number, frame)
        elif self._left or self._unhandled is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        else:
            self._unhandled = number

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        if self._commands.get() == "leave":
            return
        for engine in self._engines:
            engine.begin_drain()
        self._wait_for_the_engines()
        for engine in self._engines:
            engine.terminate()
        number = self._unhandled
        if number is not None and not self._told_to_leave(_GRACE_SECONDS):
            os.kill(os.getpid(), number)  # and now our handler lets it have its usual effect

    def _wait_for_the_engines(self) -> None:
        """Until all have ended, or the deadline. Goes on if the context is left meanwhile."""
        end = time.monotonic() + self._deadline
        while (left := end - time.monotonic()) > 0 and not all(map(_has_ended, self._engines)):
            try:
                command = self._commands.get(timeout=min(left, _POLL_SECONDS))
            except queue.Empty:
                continue
            if command == "terminate":
                return

    def _told_to_leave(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._left and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
        return self._left


def _has_ended(engine: Engine) -> bool:
    return engine.health().status in ("closed", "dead")
