"""When things happened to a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..outputs import SegmentReuse

if TYPE_CHECKING:
    pass

__all__ = ["Chunk", "Timeline"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt that one step computed. Times from `time.monotonic_ns`."""

    start: int
    end: int
    num_tokens: int


@dataclass(slots=True)
class Timeline:
    """When things happened to a request, by `time.monotonic_ns`; None is not yet.

    The engine only stamps integers; spans are made from them elsewhere, afterwards.
    """

    arrived: int | None = None
    """Before tokenizing."""
    tokenized: int | None = None
    queued: int | None = None
    first_scheduled: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    finished: int | None = None
    chunks: list[Chunk] = field(default_factory=list)
    """Prefill only; after a preemption the recomputed part appears again."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache when it was first started."""
    reuse: tuple[SegmentReuse, ...] = ()
    """The same by segment, and why it was not more."""
