"""JSON bodies: those of requests, read within bounds, and those of responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive

from .errors import ClientLeftError
from .json_text import parse_json
from .problem import Problem

__all__ = [
    "BodyLimits",
    "json_response",
    "off_loop",
    "read_json",
    "text_response",
    "to_json",
    "to_json_in_pieces",
]

T = TypeVar("T")

LARGE: Final = 64 * 1024
"""Bytes, or characters, from which on JSON is read and written in a thread."""
_MANY_ITEMS: Final = 2048
"""Values from which on a short body is read in a thread, too: each costs some microseconds."""
_SLICE: Final = 64
"""Items of a long list that are encoded in one call, which holds the GIL."""

_encoder = json.JSONEncoder(separators=(",", ":"))
_one_thread: RunVar[anyio.CapacityLimiter] = RunVar("ragserve.web large bodies")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a request's body may be.

    :param size: most bytes.
    :param items: most values in lists and objects, all together.
    :param seconds: most time until all of it has come and is read.
    """

    size: int
    items: int
    seconds: float


def to_json(value: Any) -> str:
    """One line of ASCII, so that whatever a client sent can be sent back to it."""
    return _encoder.encode(value)


def to_json_in_pieces(value: Any) -> str:
    """The same, in many short calls: other threads run between them."""
    return "".join(_pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        before = "{"
        for key, item in value.items():
            yield f"{before}{to_json(key)}:"
            yield from _pieces(item)
            before = ","
        yield "}"
    elif isinstance(value, list) and len(value) > _SLICE:
        before = "["
        for start in range(0, len(value), _SLICE):
            yield before
            yield to_json(value[start : start + _SLICE])[1:-1]
            before = ","
        yield "]"
    elif isinstance(value, list) and value:
        before = "["
        for item in value:
            yield before
            yield from _pieces(item)
            before = ","
        yield "]"
    else:
        yield to_json(value)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response with `value` as its body."""
    return text_response(to_json(value), status, headers)


def text_response(
    text: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response with JSON that is written already."""
    return Response(text, status, headers, "application/json")


async def off_loop(work: Callable[[], T]) -> T:
    """Run work that grows with a request in a thread.

    One at a time in each event loop: every thread that wants the GIL makes the loop wait for it
    once more, up to 5 ms.
    """
    try:
        limiter = _one_thread.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(1)
        _one_thread.set(limiter)
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)


async def read_json(
    headers: Headers, receive: Receive, limits: BodyLimits, read: Callable[[object], T]
) -> T:
    """The body of a request, as `read` makes it of the JSON's value.

    A large one is parsed and read in a thread.

    A browser sends another site's JSON as it is only if it is called something else, so what is
    not called JSON is refused.

    :param limits: of bytes, whether their number is announced or they come in chunks; of what is
        in them; and of the time, however slowly they come.
    :raises Problem: 413 if it is longer, as soon as that is known; 415 if it is not called JSON;
        408 if it takes too long; 400 if it is not JSON, or has too many items; what `read` raises.
    :raises ClientLeftError: if the client left before all of it came.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise Problem(
            415,
            f"the body must be JSON, with content-type application/json, not {media_type[:80]!r}",
        )
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.size:
        raise _too_large(limits.size)
    with anyio.move_on_after(limits.seconds):
        body = await _receive(receive, limits.size)
        work = partial(_read, body, limits.items, read)
        values = body.count(b",") + body.count(b"[") + body.count(b"{")
        if len(body) > LARGE or values > _MANY_ITEMS:
            return await off_loop(work)
        return work()
    raise Problem(
        408,
        f"the body was not there, and read, within {limits.seconds:g} s",
        code="body_timeout",
        headers={"connection": "close"},
    )


async def _receive(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _read(body: bytes, items: int, read: Callable[[object], T]) -> T:
    return read(parse_json(body, items))


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body has more than {limit} bytes", code="body_too_large")
