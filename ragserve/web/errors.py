"""What an error is in HTTP: its status, when to come again, what may be told to the client."""

from __future__ import annotations

import math

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ragserve.engine import (
    EngineClosedError,
    EngineDeadError,
    InvalidParamsError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RagserveError,
)

__all__ = [
    "CLIENT_LEFT",
    "ClientLeftError",
    "error_response",
    "public_message",
    "public_type",
    "retry_after",
    "retry_headers",
    "status_of",
]

CLIENT_LEFT = 499
"""The status of a request whose client has left: never sent, but counted and logged."""

_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (InvalidParamsError, 400),
    (PromptTooLongError, 400),
    (QueueFullError, 429),
    (QueueTimeoutError, 503),
    (EngineClosedError, 503),
    (EngineDeadError, 503),
)

_RESTART_SECONDS = 5.0
"""When to come again to a server that is shutting down: another takes its place, mostly."""


class ClientLeftError(HTTPException):
    """The client has closed its connection, so what it asked for was ended.

    Starlette and FastAPI make a response of it, which goes nowhere, and log no error.
    """

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client has closed the connection")


def status_of(error: BaseException) -> int:
    """The HTTP status for an error: 4xx if the request is at fault, 503 if coming again may help.

    A cancellation, of asyncio's or trio's kind, is 499; what is not known is 500.
    """
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    if isinstance(error, HTTPException):
        return error.status_code
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit | GeneratorExit):
        return CLIENT_LEFT  # cancelled; asyncio's and trio's errors share no base class
    return 500


def retry_after(error: BaseException) -> float | None:
    """Seconds after which the same request may be taken; None if waiting is not what helps."""
    if isinstance(error, QueueFullError):
        return error.retry_after
    if isinstance(error, QueueTimeoutError):
        return error.limit  # what waits now is over by then
    if isinstance(error, EngineClosedError):
        return _RESTART_SECONDS
    return None


def retry_headers(error: BaseException) -> dict[str, str]:
    """The `Retry-After` header, in whole seconds, if there is something to wait for."""
    seconds = retry_after(error)
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}


def public_message(error: BaseException) -> str:
    """What the client may read: our errors say what is wrong with the request; others nothing."""
    if isinstance(error, EngineClosedError):
        return "the server is shutting down"
    if isinstance(error, EngineDeadError):
        return "the engine has failed"
    if isinstance(error, HTTPException):
        return str(error.detail)
    if isinstance(error, RagserveError):
        return str(error)
    return "internal error"


def public_type(error: BaseException) -> str:
    """The error's class, if it is one that the client may know of; else "InternalError"."""
    known = isinstance(error, RagserveError | HTTPException)
    return type(error).__name__ if known else "InternalError"


def error_response(error: BaseException) -> Response:
    """A JSON response, `{"error": {"type", "message"}}`, with the error's status and headers."""
    return JSONResponse(
        {"error": {"type": public_type(error), "message": public_message(error)}},
        status_of(error),
        retry_headers(error),
    )
