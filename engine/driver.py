"""The engine thread: commands in, steps, one hand-off per event loop and step out.

It never waits for a consumer. A stream whose consumer falls too far behind is paused instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, TypeAlias, TypeVar

from .core import EngineCore, Update
from .errors import EngineClosedError, EngineDeadError, QueueFullError
from .handoff import Mailbox
from .outputs import Delta
from .request import Request

__all__ = ["Driver", "DriverState", "Subscriber"]

T = TypeVar("T")

DriverState: TypeAlias = Literal["ready", "draining", "closed", "dead"]


class Subscriber(Protocol):
    """Who gets the updates of a request."""

    mailbox: Mailbox
    """Where they are put, as `(subscriber, update)`."""
    num_read: int
    """Tokens that the consumer has taken; written by the consumer, read here."""
    num_sent: int
    """Tokens that were put into the mailbox; written here."""
    paused: bool
    """Whether its requests wait for the consumer to read."""


class Driver:
    """Runs an `EngineCore` in a thread of its own. Every method may be called from any thread.

    :param core: driven by the thread alone from here on.
    :param name: of the thread.
    """

    def __init__(self, core: EngineCore, name: str) -> None:
        self._core = core
        self._wake = threading.Condition()
        self._commands: list[Callable[[], object]] = []
        self._state: DriverState = "ready"
        self._cause: BaseException | None = None
        self._terminated = False
        self._num_submitted = self._num_submitted_tokens = 0
        self._subscribers: dict[Request, Subscriber] = {}
        self._finish_interval = 1.0
        self._last_finish = time.monotonic()
        self.num_finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def state(self) -> DriverState:
        """ready, draining (ends what runs, takes no more), closed, or dead (a step failed)."""
        return self._state

    @property
    def cause(self) -> BaseException | None:
        """What killed it, if it is dead."""
        return self._cause

    @property
    def num_queued(self) -> int:
        """Requests that have never been started."""
        return self._core.scheduler.num_queued + self._num_submitted

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[Request], subscriber: Subscriber) -> None:
        """Queue the choices of one request.

        :raises QueueFullError: if too much waits already; nothing is queued.
        :raises EngineClosedError: if the engine is closing or closed.
        :raises EngineDeadError: if a step has failed.
        """
        first = requests[0]
        with self._wake:
            self._check_open()
            self._check_room(first.num_prompt_tokens)
            self._num_submitted += 1
            self._num_submitted_tokens += first.num_prompt_tokens

            def add() -> None:
                self._num_submitted -= 1
                self._num_submitted_tokens -= first.num_prompt_tokens
                for request in requests:
                    self._subscribers[request] = subscriber
                    self._core.add(request)

            self._commands.append(add)
            self._wake.notify()

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests within one step; ended ones are left alone."""
        self._command(lambda: self._abort(requests))

    def resume(self, subscriber: Subscriber, requests: Sequence[Request]) -> None:
        """Let paused requests run again."""

        def unpause() -> None:
            subscriber.paused = False
            for request in requests:
                request.paused = False

        self._command(unpause)

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function(core)` in the thread, between two steps.

        :raises EngineClosedError: if the engine is closed.
        :raises EngineDeadError: if a step has failed.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._core))
                except BaseException as error:
                    future.set_exception(error)

        with self._wake:
            if self._state in ("closed", "dead"):
                self._check_open()
            self._commands.append(run)
            self._wake.notify()
        return future

    def drain(self) -> None:
        """Take no more requests; the thread ends when those it has are over."""
        with self._wake:
            if self._state == "ready":
                self._state = "draining"
            self._wake.notify()

    def terminate(self) -> None:
        """End every request with EngineClosedError; the thread ends after its current step."""
        with self._wake:
            if self._state in ("ready", "draining"):
                self._state = "closed"
            self._terminated = True
            self._wake.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- checks, under the lock -----------------------------------------------------------

    def _check_open(self) -> None:
        if self._state == "dead":
            raise EngineDeadError(
                f"the engine died of {self._cause!r}; open a new one"
            ) from self._cause
        if self._state != "ready":
            raise EngineClosedError(
                f"the engine is {self._state} and takes no more requests; open a new one"
            )

    def _check_room(self, num_tokens: int) -> None:
        config, scheduler = self._core.config, self._core.scheduler
        queued = self.num_queued
        if queued >= config.max_queued_requests:
            raise QueueFullError(
                "requests", queued, config.max_queued_requests, self._finish_interval
            )
        limit = config.max_queued_tokens
        tokens = scheduler.num_queued_tokens + self._num_submitted_tokens
        if limit is not None and tokens + num_tokens > limit and queued > 0:
            raise QueueFullError("tokens", tokens + num_tokens, limit, self._finish_interval)

    # -- the thread -----------------------------------------------------------------------

    def _command(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            cause = error
            with self._wake:
                self._cause, self._state = cause, "dead"
            self._fail_all(lambda: _died_of(cause))
        else:
            with self._wake:
                self._state = "closed"
            self._fail_all(lambda: EngineClosedError("the engine was closed"))
        finally:
            self._core.runner.close()
            with self._wake:
                # A command that came too late must still answer whoever waits for it.
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            self._fail_all(lambda: EngineClosedError("the engine was closed"))

    def _loop(self) -> None:
        core, busy = self._core, False
        while True:
            with self._wake:
                if not busy and not self._commands and not self._terminated:
                    if self._state == "draining" and not core.scheduler.has_requests:
                        return
                    self._wake.wait(core.next_expiry())
                if self._terminated:
                    return
                commands, self._commands = self._commands, []
                for command in commands:
                    command()
            updates = core.expire()
            num_steps = core.num_steps
            updates += core.step()
            busy = core.num_steps > num_steps
            self._deliver(updates)

    def _abort(self, requests: Sequence[Request]) -> None:
        updates = [self._core.abort(request) for request in requests]
        self._deliver([update for update in updates if update is not None])

    def _fail_all(self, make_error: Callable[[], Exception]) -> None:
        updates = [
            self._core.abort(request, make_error())
            or Update(request, Delta("", (), request.index, None, "error"), make_error())
            for request in list(self._subscribers)
        ]
        self._deliver(updates)

    def _deliver(self, updates: Sequence[Update]) -> None:
        letters: dict[Mailbox, list[tuple[Subscriber, Update]]] = {}
        for update in updates:
            subscriber = self._subscribers.get(update.request)
            if subscriber is None:
                continue
            if update.finished:
                self._note_finish(update)
            subscriber.num_sent += len(update.delta.token_ids)
            letters.setdefault(subscriber.mailbox, []).append((subscriber, update))
            self._pause_if_behind(subscriber, update.request)
        for mailbox, content in letters.items():
            if not mailbox.put(content):
                self._abandon(mailbox)

    def _note_finish(self, update: Update) -> None:
        del self._subscribers[update.request]
        self.num_finished[update.delta.finish_reason or "abort"] += 1
        now = time.monotonic()
        self._finish_interval += 0.2 * (now - self._last_finish - self._finish_interval)
        self._last_finish = now

    def _pause_if_behind(self, subscriber: Subscriber, request: Request) -> None:
        limit = self._core.config.stream_buffer_tokens
        if subscriber.num_sent - subscriber.num_read >= limit:
            request.paused = subscriber.paused = True
            # The consumer may have read all while this was decided, and will not look again.
            if subscriber.num_sent - subscriber.num_read < limit:
                request.paused = False

    def _abandon(self, mailbox: Mailbox) -> None:
        """The event loop is closed: nobody will ever read these streams."""
        gone = [r for r, s in self._subscribers.items() if s.mailbox is mailbox]
        for request in gone:
            update = self._core.abort(request)
            if update is not None:
                self._note_finish(update)


def _died_of(cause: BaseException) -> EngineDeadError:
    """A fresh one for each stream: raising one object in many tasks would mix their tracebacks."""
    error = EngineDeadError(f"a step of the engine failed: {cause!r}")
    error.__cause__ = cause
    return error
