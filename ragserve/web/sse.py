"""Server-sent events: an answer's stream as an HTTP response that ends when its client leaves.

    @app.get("/answer")
    async def answer(q: str) -> Response:
        return sse(rag.stream(q))

Events, each with JSON on one line as its data:

    retrieval  {"sources": [{"number", "id", "document_id", "score", "title"?, "text"?}], "dropped"}
    delta      {"text", "index"?, "token_ids"?}
    done       {"finish_reason", "usage", "timings", "sources", "trace_id"}
    error      {"type", "message", "status"}

The first event is awaited before the headers are sent, so that what fails until then has a status
of its own: see `ragserve.web.errors`. After `heartbeat` seconds without an event the headers are
sent all the same, with a comment, and from then on an error is an `error` event, after which the
stream ends as if nothing were wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

import anyio
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ragserve.engine import Completion, Delta, EngineClosedError, Stream

from ..pipeline.answer import Done, RagTimings, Retrieved, Source
from ..pipeline.answer_stream import AnswerStream
from .errors import ClientLeftError, error_response, public_message, public_type, status_of
from .sources import source_data

__all__ = ["Event", "SSEResponse", "error_event", "sse", "until_disconnect"]

T = TypeVar("T")

logger = logging.getLogger("ragserve.web")

_KEEP_ALIVE = b": keep-alive\n\n"
_LAST_WORDS_SECONDS = 1.0
"""For sending what nobody may read: of a response that its client or its server has ended."""

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that compresses would hold events back until it has enough of them.
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",  # nginx
}


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event.

    :param data: any text; each of its lines becomes a `data` line.
    :param event: its type; None is what browsers call "message".
    :param id: what a browser sends back as `Last-Event-ID` when it reconnects.
    """

    data: str
    event: str | None = None
    id: str | None = None

    def encode(self) -> bytes:
        """As it goes over the wire.

        :raises ValueError: if `event` or `id` holds a line break.
        """
        lines: list[str] = []
        for field, value in (("event", self.event), ("id", self.id)):
            if value is not None:
                if "\n" in value or "\r" in value or "\0" in value:
                    raise ValueError(f"an event's {field} is one line without NUL, not {value!r}")
                lines.append(f"{field}: {value}\n")
        data = self.data
        if "\r" in data:  # which ends a line, too
            data = data.replace("\r\n", "\n").replace("\r", "\n")
        lines.extend(f"data: {line}\n" for line in data.split("\n"))
        lines.append("\n")
        # A lone surrogate has no UTF-8; nothing that a tokenizer gives holds one.
        return "".join(lines).encode("utf-8", "backslashreplace")


def error_event(error: Exception) -> Event:
    """The `error` event: `{"type", "message", "status"}`."""
    return _event(
        "error",
        {
            "type": public_type(error),
            "message": public_message(error),
            "status": status_of(error),
        },
    )


class SSEResponse(Response):
    """Sends events as they come, and ends them when the client leaves.

    An ASGI callable, so it can be returned by endpoints of Starlette and FastAPI and called by
    anything else. From its first moment it also listens for the client's leaving; then, or if the
    server cancels it, or if sending fails, `close` is called at once.

    A client that does not read is waited for: no further event is taken meanwhile.

    :param events: what to send; read by one task, to its end. Bytes are sent as they are.
    :param close: frees what the events come from. Called once, however it ends, never cancelled.
    :param heartbeat: seconds without an event after which a comment is sent, which keeps proxies
        from closing the connection; None sends none.
    :param patience: seconds that a heartbeat may wait for a client that does not read, before it
        counts as gone; None waits for ever. Nothing is noticed without heartbeats.
    :param headers: more headers, or others in place of the usual ones.
    :param on_error: the response to an error before the headers.
    :param error_event: what is sent for an error after the headers: one or more events.
    :param background: run after the response, however it ended, unless cancelled by the server.
    """

    def __init__(
        self,
        events: AsyncIterator[Event | bytes],
        *,
        close: Callable[[], Awaitable[None]],
        heartbeat: float | None = 15.0,
        patience: float | None = 60.0,
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[Exception], Response] = error_response,
        error_event: Callable[[Exception], Event | bytes] = error_event,
        background: BackgroundTask | None = None,
    ) -> None:
        self.status_code = 200
        self.background = background
        self.init_headers({**_HEADERS, **{k.lower(): v for k, v in (headers or {}).items()}})
        self._events = events
        self._close = close
        self._heartbeat = heartbeat
        self._patience = patience
        self._on_error = on_error
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond. Returns quietly if the client leaves.

        If the server cancels it, the client is told of it as of an error.
        """
        body = _Body(send, self.raw_headers, scope, receive)
        enders = [partial(_disconnect, receive)]
        if self._heartbeat is not None:
            enders.append(partial(body.beat, self._heartbeat, self._patience))
        try:
            try:
                await _unless(self._respond(body), enders)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end()
        except ClientLeftError as error:
            # Nobody is left to be told, but a middleware may insist on a response.
            await _say_goodbye(body.replace(error_response(error)))
        except anyio.get_cancelled_exc_class():
            ended = EngineClosedError("the server has ended the response")
            await _say_goodbye(self._fail(body, ended))
            raise
        if self.background is not None:
            await self.background()

    async def _respond(self, body: _Body) -> None:
        events = self._events
        while True:
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            except Exception as error:
                if status_of(error) == 500:
                    logger.exception("an answer failed")
                await self._fail(body, error)
                return
            await body.write(event if isinstance(event, bytes) else event.encode())
        await body.finish()

    async def _fail(self, body: _Body, error: Exception) -> None:
        if not await body.replace(self._on_error(error)):
            event = self._error_event(error)
            await body.write(event if isinstance(event, bytes) else event.encode())
            await body.finish()

    async def _end(self) -> None:
        try:
            # An async generator that was left half-way is closed now, not when it is collected.
            if (aclose := getattr(self._events, "aclose", None)) is not None:
                await aclose()
        finally:
            await self._close()


async def _say_goodbye(sending: Awaitable[object]) -> None:
    """Send what may find nobody, nor a server that still takes it."""
    with anyio.move_on_after(_LAST_WORDS_SECONDS, shield=True):
        try:
            await sending
        except Exception:
            logger.debug("a response that had ended already could not be closed", exc_info=True)


class _Body:
    """The response as it is sent: headers with the first bytes, one sender at a time."""

    def __init__(
        self, send: Send, headers: Sequence[tuple[bytes, bytes]], scope: Scope, receive: Receive
    ) -> None:
        self._send = send
        self._headers = headers
        self._scope = scope
        self._receive = receive
        self._started = self._finished = False
        self._last = anyio.current_time()
        # Events and heartbeats come from two tasks.
        self._lock = anyio.Lock(fast_acquire=True)

    async def write(self, data: bytes) -> None:
        async with self._lock:
            await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        async with self._lock:
            await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    async def replace(self, response: Response) -> bool:
        """Send another response instead, unless this one has begun; says whether it was sent."""
        async with self._lock:
            if self._started:
                return False
            self._started = self._finished = True
            await response(self._scope, self._receive, self._send_checked)
            return True

    async def beat(self, interval: float, patience: float | None) -> None:
        """Send a comment whenever nothing was sent for a while; return if nobody reads it."""
        while True:
            while (left := self._last + interval - anyio.current_time()) > 0:
                await anyio.sleep(left)
            with anyio.move_on_after(patience) as waiting:
                await self.write(_KEEP_ALIVE)
            if waiting.cancelled_caught:
                return

    async def _write(self, message: Message) -> None:
        if self._finished:
            return  # a heartbeat that waited for its turn until the end
        if not self._started:
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send_checked(start)
            self._started = True  # not before: what is cancelled there has mostly sent nothing
        self._finished = not message["more_body"]
        await self._send_checked(message)
        self._last = anyio.current_time()

    async def _send_checked(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # how newer servers say that the connection is closed
            raise ClientLeftError from error


async def until_disconnect(client: Request | Receive, work: Awaitable[T]) -> T:
    """Wait for something that only the client wants: it is cancelled if the client leaves.

        completion = await until_disconnect(request, engine.generate(prompt))

    The request's body must have been read, since what is left of it is dropped here. What awaits
    `request.is_disconnected()` or `request.receive()` meanwhile would take the news from it.

    :param client: the request, or the `receive` of an ASGI application.
    :param work: runs in the calling task.
    :raises ClientLeftError: if the client left before it was done.
    """
    receive = client.receive if isinstance(client, Request) else client
    return await _unless(work, [partial(_disconnect, receive)])


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(work: Awaitable[T], enders: Sequence[Callable[[], Awaitable[None]]]) -> T:
    """Await `work`, unless one of `enders` returns first; then it is cancelled.

    Errors come out as they are, not in groups.

    :raises ClientLeftError: if an ender was first.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async with anyio.create_task_group() as tasks:

        async def end(ender: Callable[[], Awaitable[None]]) -> None:
            try:
                await ender()
            except Exception as error:
                errors.append(error)
            tasks.cancel_scope.cancel()

        for ender in enders:
            tasks.start_soon(end, ender)
        try:
            results.append(await work)
        except Exception as error:
            errors.append(error)
        tasks.cancel_scope.cancel()
    if results:
        return results[0]
    raise errors[0] if errors else ClientLeftError()


def sse(
    answer: AnswerStream | Stream,
    *,
    heartbeat: float | None = 15.0,
    patience: float | None = 60.0,
    text: bool = True,
    token_ids: bool = False,
    headers: Mapping[str, str] | None = None,
    background: BackgroundTask | None = None,
) -> SSEResponse:
    """The response that streams an answer: of `rag.stream(...)` or `engine.stream(...)`.

    The answer is ended, and its KV blocks are free again one engine step later, as soon as the
    client leaves, whatever the answer is waiting for.

    :param heartbeat: seconds without an event after which the connection is kept alive by a
        comment; None for none. See `SSEResponse`.
    :param patience: seconds that a client may refuse to read before it counts as gone.
    :param text: send the sources' texts.
    :param token_ids: send token ids with each delta.
    """
    return SSEResponse(
        _AnswerEvents(answer, text=text, token_ids=token_ids),
        close=answer.aclose,
        heartbeat=heartbeat,
        patience=patience,
        headers=headers,
        background=background,
    )


class _AnswerEvents:
    """An answer's events as server-sent ones."""

    def __init__(self, answer: AnswerStream | Stream, *, text: bool, token_ids: bool) -> None:
        self._answer = answer
        self._text = text
        self._token_ids = token_ids
        self._done = False

    def __aiter__(self) -> _AnswerEvents:
        return self

    async def __anext__(self) -> Event:
        while not self._done:
            try:
                event = await anext(self._answer)
            except StopAsyncIteration:
                if isinstance(self._answer, AnswerStream):
                    raise  # it has said so itself, or was ended by another task
                self._done = True
                return _done(self._answer.completion)
            if isinstance(event, Done):
                self._done = True
                trace_id = self._answer.trace_id if isinstance(self._answer, AnswerStream) else None
                return _done(event.completion, event.timings, event.sources, trace_id)
            if isinstance(event, Retrieved):
                sources = [
                    source_data(source.number, source.chunk, source.score, text=self._text)
                    for source in event.sources
                ]
                return _event("retrieval", {"sources": sources, "dropped": len(event.dropped)})
            # A delta may hold no text: of a character that is not complete, say.
            if event.text or (self._token_ids and event.token_ids):
                return _event("delta", self._delta(event))
        raise StopAsyncIteration

    def _delta(self, delta: Delta) -> dict[str, Any]:
        data: dict[str, Any] = {"text": delta.text}
        if delta.index:
            data["index"] = delta.index
        if self._token_ids:
            data["token_ids"] = delta.token_ids
        return data


_RAG_STAGES = tuple(field.name for field in fields(RagTimings))


def _done(
    completion: Completion,
    timings: RagTimings | None = None,
    sources: Sequence[Source] = (),
    trace_id: str | None = None,
) -> Event:
    usage, engine = completion.usage, completion.timings
    stages = ("queue", "prefill", "decode") if timings is None else _RAG_STAGES
    data: dict[str, Any] = {
        "finish_reason": completion.finish_reason,
        "usage": {**asdict(usage), "total_tokens": usage.total_tokens},
        "timings": {
            **{stage: getattr(timings or engine, stage) for stage in (*stages, "total")},
            "time_to_first_token": engine.time_to_first_token,
        },
        "sources": [source.number for source in sources],
        "trace_id": trace_id,
    }
    if len(completion.choices) > 1:
        data["finish_reasons"] = [choice.finish_reason for choice in completion.choices]
    return _event("done", data)


def _event(kind: str, data: Mapping[str, Any]) -> Event:
    return Event(json.dumps(data, ensure_ascii=False, separators=(",", ":")), kind)
