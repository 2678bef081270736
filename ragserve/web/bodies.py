"""JSON bodies: those of requests, read within bounds, and those of responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive

from .errors import ClientLeftError
from .problem import Problem

__all__ = ["json_response", "read_json", "to_json"]

_encoder = json.JSONEncoder(separators=(",", ":"))


def to_json(value: Any) -> str:
    """One line of ASCII, so that whatever a client sent can be sent back to it."""
    return _encoder.encode(value)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response with `value` as its body."""
    return Response(to_json(value), status, headers, "application/json")


async def read_json(headers: Headers, receive: Receive, limit: int) -> Any:
    """The body of a request.

    A browser sends another site's JSON as it is only if it is called something else, so what is
    not called JSON is refused.

    :param limit: most bytes, whether the length is announced or the body comes in chunks.
    :raises Problem: 413 if it is longer, as soon as that is known; 415 if it is not called JSON;
        400 if it is not JSON.
    :raises ClientLeftError: if the client left before all of it came.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise Problem(
            415, f"the body must be JSON, with content-type application/json, not {media_type!r}"
        )
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            break
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        # Not the error's own words, which may quote the body.
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise Problem(400, f"the body is not JSON{where}", code="invalid_json") from error


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body has more than {limit} bytes", code="body_too_large")
