"""The engine thread: commands in, steps, one hand-off per event loop and step out.

It never waits for a consumer. A stream whose consumer falls too far behind is paused instead.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

from ..errors import EngineClosedError, EngineDeadError, QueueFullError
from ..outputs import Delta
from ..scheduling.request import Request
from .core import EngineCore, Update
from .handoff import Mailbox

__all__ = ["Driver", "DriverState", "Place", "Subscriber"]

T = TypeVar("T")

DriverState: TypeAlias = Literal["ready", "draining", "closed", "dead"]


_EXIT_SECONDS = 30.0
"""How long the end of the interpreter waits for the step under way."""


class Subscriber(Protocol):
    """Who gets the updates of a request. The driver does not keep it alive."""

    mailbox: Mailbox
    """Where they are put, as `(subscriber, update)`."""
    num_read: int
    """Tokens that the consumer has taken; written by the consumer, read here."""
    num_sent: int
    """Tokens that were put into the mailbox; written here."""
    paused: bool
    """Whether its requests wait for the consumer to read."""


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in the queue, from its arrival until the core has it or it is given up."""

    num_requests: int
    """That it counts for: 1, or 0 if it is speculative, for which no request is refused."""
    num_sequences: int
    """The choices that wait in it."""
    num_tokens: int = 0
    """Of the prompt, once they are known."""
    submitted: bool = False


class Driver:
    """Runs an `EngineCore` in a thread of its own. Every method may be called from any thread.

    :param core: driven by the thread alone from here on.
    :param name: of the thread.
    """

    def __init__(self, core: EngineCore, name: str) -> None:
        self._core = core
        # Reentrant: a stream or an engine may be garbage-collected, and call us, at any moment.
        self._lock = threading.RLock()
        # A SimpleQueue for the same reason, and since a put is never missed by who is about to
        # wait.
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._state: DriverState = "ready"
        self._cause: BaseException | None = None
        self._terminated = self._over = False
        self._places: set[Place] = set()
        """Of requests that the core does not have yet."""
        self._subscribers: dict[Request, weakref.ref[Subscriber]] = {}
        self._finish_interval = 1.0
        self._last_finish = time.monotonic()
        if core.tiers is not None:
            # A thread that waits for a command looks what has come.
            core.tiers.on_end = lambda: self._command(lambda: None)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._pid = os.getpid()

    @property
    def state(self) -> DriverState:
        """ready, draining (ends what runs, takes no more), closed, or dead (a step failed)."""
        return "closed" if self.forked else self._state

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one it was made in: its thread is not here, and
        its locks may be held by threads that are not here either."""
        return os.getpid() != self._pid

    @property
    def cause(self) -> BaseException | None:
        """What killed it, if it is dead."""
        return self._cause

    @property
    def num_queued(self) -> int:
        """Requests that have never been started."""
        with self._lock:
            arriving = sum(place.num_requests for place in self._places)
            return self._core.scheduler.num_queued + arriving

    @property
    def num_arriving(self) -> int:
        """Sequences that wait for their prompt to be encoded, or for the core to take them."""
        with self._lock:
            return sum(place.num_sequences for place in self._places)

    def start(self) -> None:
        """Start the thread."""
        # A daemon thread that still computes when the interpreter ends takes the process down
        # with it; one that is no daemon would keep the process from ending.
        atexit.register(self._end_at_exit)
        self._thread.start()

    def reserve(self, num_sequences: int = 1, *, speculative: bool = False) -> Place:
        """Take a place in the queue, before anything is done for the request.

        It is to be given to `submit` or `release`.

        :param num_sequences: choices of the request.
        :param speculative: it is refused if anybody waits, and takes no place from others.
        :raises QueueFullError: if too many wait already.
        :raises EngineClosedError: if the engine is closing or closed.
        :raises EngineDeadError: if a step has failed.
        """
        self._check_process()
        with self._lock:
            self.check_open()
            if speculative:
                self._check_idle()
            elif (queued := self.num_queued) >= (most := self._core.config.max_queued_requests):
                raise QueueFullError("requests", queued, most, self._finish_interval)
            place = Place(int(not speculative), num_sequences)
            self._places.add(place)
        return place

    def release(self, place: Place) -> None:
        """Give a place up, unless its request was submitted. From any thread; idempotent."""
        if self.forked:
            return
        with self._lock:
            if not place.submitted:
                self._places.discard(place)

    def submit(self, requests: Sequence[Request], subscriber: Subscriber, place: Place) -> None:
        """Queue the choices of one request in the place that was taken for it.

        :raises QueueFullError: if too many tokens wait already; nothing is queued.
        :raises EngineClosedError: if the engine is closing or closed.
        :raises EngineDeadError: if a step has failed.
        """
        first, reference = requests[0], weakref.ref(subscriber)
        self._check_process()
        with self._lock:
            self.check_open()
            if first.speculative:
                self._check_idle()
            else:
                self._check_tokens(first.num_prompt_tokens)
                place.num_tokens = first.num_prompt_tokens
            place.submitted = True

            def add() -> None:
                for request in requests:
                    self._subscribers[request] = reference
                with self._lock:
                    self._places.discard(place)
                    for request in requests:
                        self._core.add(request)

            self._commands.put(add)

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests within one step; ended ones are left alone."""
        self._command(lambda: self._abort(requests))

    def resume(self, subscriber: Subscriber, requests: Sequence[Request]) -> None:
        """Let paused requests run again."""

        reference = weakref.ref(subscriber)

        def unpause() -> None:
            if (alive := reference()) is not None:
                alive.paused = False
            for request in requests:
                request.paused = False

        self._command(unpause)

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function(core)` in the thread, between two steps.

        :raises EngineClosedError: if the engine is closed.
        :raises EngineDeadError: if a step has failed.
        """
        future: Future[T] = Future()
        self._check_process()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._core))
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            if self._state in ("closed", "dead"):
                self.check_open()
            self._commands.put(run)
        return future

    def note_rejected(self, error: Exception) -> None:
        """Count a request that was refused before it was submitted, or when it was."""
        if not self.forked:
            self._core.recorder.rejected(error)

    def drain(self) -> None:
        """Take no more requests; the thread ends when those it has are over.

        They run on even if nobody reads them: what is left to generate is bounded, and an end
        that waits for a consumer might never come.
        """
        if self.forked:
            return
        with self._lock:
            if self._state == "ready":
                self._state = "draining"
        self._command(self._unpause_all)

    def terminate(self) -> None:
        """End every request with EngineClosedError; the thread ends after its current step."""
        if self.forked:
            return
        with self._lock:
            if self._state in ("ready", "draining"):
                self._state = "closed"
            self._terminated = True
        self._command(lambda: None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def check_open(self) -> None:
        """Check that requests are taken.

        :raises EngineClosedError: if the engine is closing or closed.
        :raises EngineDeadError: if a step has failed.
        """
        self._check_process()
        if self._state == "dead":
            raise EngineDeadError(
                f"the engine died of {self._cause!r}; open a new one"
            ) from self._cause
        if self._state != "ready":
            raise EngineClosedError(
                f"the engine is {self._state} and takes no more requests; open a new one"
            )

    def _check_process(self) -> None:
        if self.forked:
            raise EngineClosedError(
                f"the engine was opened in process {self._pid} and this is process {os.getpid()}, "
                "forked from it: threads stay behind in a fork; open an engine in each worker, "
                "after it was forked"
            )

    def _check_idle(self) -> None:
        """Check that nobody waits.

        :raises QueueFullError: if somebody does.
        """
        if waiting := max(self.num_queued, len(self._core.scheduler.waiting)):
            raise QueueFullError("requests", waiting, 0, self._finish_interval)

    def _check_tokens(self, num_tokens: int) -> None:
        """Check that so many more prompt tokens may wait. A prompt that waits alone always may.

        :raises QueueFullError: if not.
        """
        limit, scheduler = self._core.config.max_queued_tokens, self._core.scheduler
        waiting = scheduler.num_queued_tokens + sum(place.num_tokens for place in self._places)
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError("tokens", waiting + num_tokens, limit, self._finish_interval)

    # -- the thread -----------------------------------------------------------------------

    def _command(self, command: Callable[[], object]) -> None:
        if not (self._over or self.forked):
            self._commands.put(command)

    def _end_at_exit(self) -> None:
        self.terminate()
        self.join(_EXIT_SECONDS)

    def _run(self) -> None:
        try:
            self._run_to_the_end()
        finally:
            atexit.unregister(self._end_at_exit)

    def _run_to_the_end(self) -> None:
        cause: BaseException | None = None
        try:
            self._loop()
        except BaseException as error:
            cause = error
        with self._lock:
            self._cause, self._state = cause, "closed" if cause is None else "dead"
            self._over = True
        # Each of these runs whatever the others raise, for somebody waits for it.
        with contextlib.ExitStack() as stack:
            stack.callback(self._core.close)
            stack.callback(self._fail_all, cause)
            left = iter(self._next_command, None)
            for command in reversed(list(left)):
                stack.callback(command)

    def _loop(self) -> None:
        core, busy = self._core, False
        while self._obey(busy):
            num_steps = core.num_steps
            updates = core.expire()
            updates += core.step()
            busy = core.num_steps > num_steps
            self._deliver(updates)

    def _obey(self, busy: bool) -> bool:
        """Carry out commands; if not `busy`, wait for one. False when it is time to end."""
        if self._terminated:
            return False
        # Looked at first: what was submitted before it changed is among the commands.
        draining = self._state == "draining"
        wait = not busy and (not draining or self._core.scheduler.has_requests)
        # One by one, so that those after one that fails are not lost; and without the lock, for
        # mailboxes have one too.
        while (command := self._next_command(wait)) is not None:
            command()
            wait = False
        return not draining or self._core.scheduler.has_requests

    def _next_command(self, wait: bool = False) -> Callable[[], object] | None:
        """None if there is none; with `wait`, if none comes before some request expires."""
        timeout = self._core.next_expiry() if wait else 0.0
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        try:
            return self._commands.get(timeout=timeout)
        except queue.Empty:
            return None

    def _abort(self, requests: Sequence[Request]) -> None:
        updates = [self._core.abort(request) for request in requests]
        self._deliver([update for update in updates if update is not None])

    def _unpause_all(self) -> None:
        for request in self._subscribers:
            request.paused = False

    def _fail_all(self, cause: BaseException | None) -> None:
        updates = {
            request: Update(request, Delta("", (), request.index, None, "error"), _ended_by(cause))
            for request in self._subscribers
        }
        try:
            for request, update in updates.items():
                self._core.abort(request, update.error)
        finally:
            # Whatever state a failed step has left the core in, nobody is left waiting.
            self._deliver(list(updates.values()))

    def _deliver(self, updates: Sequence[Update]) -> None:
        letters: dict[Mailbox, list[tuple[Subscriber, Update]]] = {}
        for update in updates:
            reference = self._subscribers.get(update.request)
            if reference is None:
                continue
            if update.finished:
                self._note_finish(update)
            subscriber = reference()
            if subscriber is None:
                continue  # dropped just now; its abort is under way
            subscriber.num_sent += len(update.delta.token_ids)
            letters.setdefault(subscriber.mailbox, []).append((subscriber, update))
            self._pause_if_behind(subscriber, update.request)
        for mailbox, content in letters.items():
            if not mailbox.put(content):
                self._abandon(mailbox)

    def _note_finish(self, update: Update) -> None:
        del self._subscribers[update.request]
        reason = update.delta.finish_reason or "abort"
        if update.request.prefill_only:
            return
        self._core.recorder.finished(update.request, reason, update.error)
        now = time.monotonic()
        self._finish_interval += 0.2 * (now - self._last_finish - self._finish_interval)
        self._last_finish = now

    def _pause_if_behind(self, subscriber: Subscriber, request: Request) -> None:
        limit = self._core.config.stream_buffer_tokens
        if self._state != "ready":
            return
        if subscriber.num_sent - subscriber.num_read >= limit:
            request.paused = subscriber.paused = True
            # The consumer may have read all while this was decided, and will not look again.
            if subscriber.num_sent - subscriber.num_read < limit:
                request.paused = False

    def _abandon(self, mailbox: Mailbox) -> None:
        """The event loop is closed: nobody will ever read these streams."""
        gone = [
            request
            for request, reference in self._subscribers.items()
            if (subscriber := reference()) is not None and subscriber.mailbox is mailbox
        ]
        for request in gone:
            update = self._core.abort(request)
            if update is not None:
                self._note_finish(update)


def _ended_by(cause: BaseException | None) -> EngineDeadError | EngineClosedError:
    """A fresh one for each stream: raising one object in many tasks would mix their tracebacks."""
    if cause is None:
        return EngineClosedError("the engine was closed while the request ran; open a new one")
    error = EngineDeadError(f"a step of the engine failed: {cause!r}")
    error.__cause__ = cause
    return error
