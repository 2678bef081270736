"""What a target is, and what every target's inputs are judged by."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["MEMORY_LIMIT", "SECONDS_LIMIT", "Target", "Violation", "signature"]

SECONDS_LIMIT = 5.0
MEMORY_LIMIT = 200 << 20
"""Bytes that one input may add to the process's peak."""

ROOT = Path(__file__).resolve().parents[2]


class Violation(Exception):
    """What followed an input is not allowed; the message says what it was."""


class Target(Protocol):
    """Something that reads bytes from outside."""

    name: str
    modules: Sequence[str]
    """Whose coverage guides the search."""

    def seeds(self) -> list[bytes]:
        """Valid inputs, made by code; small."""

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """Another input, mostly of the same structure."""

    def run(self, data: bytes) -> str:
        """Feed it, and check what follows.

        :returns: what it came to, in a word or two, for the table.
        :raises Violation: if it came to something that is not allowed; so does any exception.
        """

    def close(self) -> None:
        """End what it started."""


def signature(error: BaseException) -> str:
    """Names the fault rather than the input: the error's type, and the last line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    where = "?"
    for frame in frames:
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "fuzz" not in path.relative_to(ROOT).parts[:1]:
            parts = path.relative_to(ROOT).parts
            if not parts[0].startswith("."):
                where = f"{'/'.join(parts)}:{frame.lineno}"
    if isinstance(error, Violation):
        cause = error.__cause__
        inner = "" if cause is None else f" {signature(cause)}"
        return f"{error.args[0]}{inner}"
    return f"{type(error).__name__} at {where}"
