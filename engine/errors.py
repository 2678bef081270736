"""Every error that ragserve raises on purpose: one flat tree.

Each message names the state, the value, the limit and what to do about it; the
same facts are attributes, so that a program need not parse the text.
"""

from __future__ import annotations

import reprlib

__all__ = [
    "DiskCacheError",
    "EngineClosedError",
    "EngineDeadError",
    "EventLoopError",
    "InternalError",
    "InvalidParamsError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "QueueFullError",
    "QueueTimeoutError",
    "RagserveError",
    "UnsupportedModelError",
]


class RagserveError(Exception):
    """Base of every error below."""


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python writes out no integer of more than some 4,300 digits.
        return f"<{type(value).__name__}>"


class InvalidParamsError(RagserveError, ValueError):
    """A parameter is outside its range; nothing was queued.

    :ivar parameter: name of the offending parameter.
    :ivar value: what was given.
    """

    def __init__(self, parameter: str, value: object, allowed: str) -> None:
        super().__init__(f"{parameter}={_shown(value)} is not valid: {allowed}")
        self.parameter = parameter
        self.value = value
        self.allowed = allowed


class PromptTooLongError(RagserveError, ValueError):
    """The prompt leaves no room for an answer; nothing was queued.

    :ivar prompt_tokens: length of the prompt in tokens; of a text, as far as it was encoded.
    :ivar limit: most prompt tokens that would have been accepted.
    """

    def __init__(self, prompt_tokens: int, limit: int, reason: str, *, at_least: str = "") -> None:
        super().__init__(
            f"the prompt has {at_least}{prompt_tokens} tokens and at most {limit} fit: {reason}"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class QueueFullError(RagserveError):
    """Too much is waiting already; nothing was queued. Map it to HTTP 429.

    :ivar retry_after: estimate, in seconds, of when a place will be free.
    """

    def __init__(self, what: str, queued: int, limit: int, retry_after: float) -> None:
        super().__init__(
            f"the queue is full: {queued} {what} wait and the limit is {limit}; "
            f"retry in about {retry_after:.1f} s, or raise max_queued_{what}"
        )
        self.queued = queued
        self.limit = limit
        self.retry_after = retry_after


class QueueTimeoutError(RagserveError, TimeoutError):
    """The request waited longer than `queue_timeout` without being started.

    :ivar waited: seconds it waited.
    :ivar limit: the timeout in seconds.
    """

    def __init__(self, waited: float, limit: float) -> None:
        super().__init__(
            f"the request waited {waited:.2f} s without being started and queue_timeout is "
            f"{limit:.2f} s; lower the load or raise queue_timeout"
        )
        self.waited = waited
        self.limit = limit


class EngineClosedError(RagserveError):
    """The engine is closing or closed and takes no more requests."""


class EngineDeadError(RagserveError):
    """A step failed and the engine stopped; `__cause__` is what happened."""


class EventLoopError(RagserveError, RuntimeError):
    """A stream is read in another event loop than the one in which it was entered."""


class InternalError(RagserveError):
    """The engine has found a mistake of its own, and ended the one request that it concerned."""


class DiskCacheError(RagserveError):
    """The disk cache could not be emptied: some of its files cannot be removed."""


class UnsupportedModelError(RagserveError):
    """The model's architecture, or an option of it, is not one we implement."""


class ModelLoadError(RagserveError):
    """The model's files are missing, broken, or do not fit each other."""


class OutOfMemoryError(RagserveError, MemoryError):
    """The KV pool does not fit; says what was asked, what fits and which knob to turn."""
