"""What a client is told of a request that failed: OpenAI's shape, and the right status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException

from ragserve.engine import (
    EngineClosedError,
    EngineDeadError,
    InvalidParamsError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
)

from .errors import public_message, retry_headers, status_of

__all__ = ["Problem", "problem_of"]

_CODES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (PromptTooLongError, "context_length_exceeded"),
    (InvalidParamsError, "invalid_value"),
    (QueueFullError, "queue_full"),
    (QueueTimeoutError, "queue_timeout"),
    (EngineClosedError, "engine_closed"),
    (EngineDeadError, "engine_dead"),
)

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}


class Problem(Exception):
    """A request that is refused or failed, as its client is told.

    :param status: of the response.
    :param param: the field of the request that is at fault.
    :param code: for programs; None if the status says it all.
    :param headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that tells it."""
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def problem_of(error: Exception, *, prompt: str = "prompt") -> Problem:
    """Any error, as a client is told.

    :param prompt: the field of the request that the prompt is in.
    """
    if isinstance(error, Problem):
        return error
    param = None
    if isinstance(error, PromptTooLongError):
        param = prompt
    elif isinstance(error, InvalidParamsError):
        given = ("prompt", "text", "token_id", "token_ids")
        param = prompt if error.parameter in given else error.parameter
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    headers = retry_headers(error)
    if isinstance(error, HTTPException):  # such as Starlette's own 404 and 405
        headers |= {name.lower(): value for name, value in (error.headers or {}).items()}
    return Problem(status_of(error), public_message(error), param=param, code=code, headers=headers)
