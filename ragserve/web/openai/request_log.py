"""A line of log for each request: what it was and what it cost, and never what was in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ragserve.engine import Completion

from .generation import total_usage

__all__ = ["RequestLog", "logger"]

logger: Final = logging.getLogger("ragserve.web")


@dataclass(slots=True)
class RequestLog:
    """What is known of a request so far. Each field is an attribute of the log's record.

    :param path: of the route.
    """

    path: str
    request_id: str
    model: str | None = None
    """One that exists: what else a client asked for is its own text."""
    key: str | None = None
    """The key's name."""
    stream: bool = False
    status: int = 499
    """Until something is answered, it looks as if the client had left."""
    error: str | None = None
    finish_reason: str | None = None
    """Of the first choice."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token: float | None = None
    """Seconds, from the engine's taking it."""
    started: float = field(default_factory=time.monotonic)

    def note(self, completions: Sequence[Completion]) -> None:
        """Write down what has come of it."""
        if not completions:
            return
        usage = total_usage(completions)
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens
        self.completion_tokens = usage.completion_tokens
        self.finish_reason = completions[0].finish_reason
        self.time_to_first_token = completions[0].timings.time_to_first_token

    def write(self) -> None:
        """Log it."""
        duration = time.monotonic() - self.started
        logger.info(
            "POST %s %d, model %s, %d + %d tokens, %.3f s",
            self.path,
            self.status,
            self.model,
            self.prompt_tokens,
            self.completion_tokens,
            duration,
            extra={
                "request_id": self.request_id,
                "path": self.path,
                "model": self.model,
                "key": self.key,
                "stream": self.stream,
                "status": self.status,
                "error": self.error,
                "finish_reason": self.finish_reason,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "time_to_first_token": self.time_to_first_token,
                "duration": duration,
            },
        )
