"""What a caller asks to be continued: text, token ids, chat messages, or segments.

A `Prompt` is a list of segments. Each is tokenized on its own and starts on a block
boundary, so that the KV blocks of a system prompt or of a retrieved document can be
shared between requests whatever stands before the document's last token.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from .errors import InvalidParamsError
from .slices import SLICE_IDS

__all__ = [
    "RETENTION_OF",
    "Prompt",
    "PromptLike",
    "Retention",
    "Segment",
    "SegmentKind",
    "TokenizedPrompt",
]

SegmentKind: TypeAlias = Literal["system", "document", "turn", "question"]


class Retention(enum.IntEnum):
    """How long a cached block outlives its last user: lower classes are evicted first."""

    ANSWER = 0
    """Generated text and questions: least likely to be asked for again."""
    DOCUMENT = 1
    """Retrieved documents: other questions will retrieve them too."""
    SYSTEM = 2
    """System prompts: part of every request."""


RETENTION_OF: dict[SegmentKind, Retention] = {
    "system": Retention.SYSTEM,
    "document": Retention.DOCUMENT,
    "turn": Retention.ANSWER,
    "question": Retention.ANSWER,
}
"""The class of each kind of segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One shareable unit of a prompt.

    :param text: the text, tokenized on its own without special tokens being added
        (special tokens written out in the text are recognised); or
    :param token_ids: its token ids, used as they are. Exactly one of the two is given.
    :param kind: what it is; decides how long its blocks are kept, if `retention` does not.
    :param retention: the class its blocks are kept in; None is the kind's own. What stands before
        a segment is kept at least as long, for it is found only through that.
    :param retention_seconds: how long after each use `retention` holds; then the kind's own class
        does again. None is for ever.
    :raises InvalidParamsError: if both or neither of `text` and `token_ids` are given, or another
        argument is outside its range.
    """

    text: str | None = None
    kind: SegmentKind = "turn"
    token_ids: tuple[int, ...] | None = None
    retention: Retention | None = None
    retention_seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise InvalidParamsError(
                "Segment", (self.text, self.token_ids), "give exactly one of text and token_ids"
            )
        if self.kind not in RETENTION_OF:
            raise InvalidParamsError("kind", self.kind, f"one of {', '.join(RETENTION_OF)}")
        if self.retention is not None and not isinstance(self.retention, Retention):
            raise InvalidParamsError("retention", self.retention, "a Retention, or None")
        seconds = self.retention_seconds
        if seconds is not None and not 0.0 < seconds < float("inf"):
            raise InvalidParamsError(
                "retention_seconds", seconds, "seconds greater than 0, or None for ever"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of segments, in order. Empty segments are dropped when tokenized."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise InvalidParamsError("segments", self.segments, "at least one segment")


PromptLike: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]] | Prompt
"""Text (special tokens are added), token ids, chat messages (through the model's chat
template), or a `Prompt` of segments."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine sees it. Of what is left out, every segment has the default.

    :param token_ids: all tokens, segments joined; positions in the model are indices in it.
    :param segment_lengths: tokens per segment; sums to `len(token_ids)`.
    :param retentions: per segment, the class its blocks are kept in; None is its kind's own.
    :param kinds: per segment, what it is.
    :param retention_seconds: per segment, how long after each use its class holds; None for ever.
    """

    token_ids: list[int]
    segment_lengths: tuple[int, ...]
    retentions: tuple[Retention | None, ...] = ()
    kinds: tuple[SegmentKind, ...] = ()
    retention_seconds: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> TokenizedPrompt:
        """A prompt of one segment."""
        return cls(list(token_ids), (len(token_ids),))

    def packed(self) -> array[int]:
        """The tokens in 32 bits each, to be hashed."""
        packed = array("I")
        # In slices: no other thread runs during a call, and one over all ids may take long.
        for start in range(0, len(self.token_ids), SLICE_IDS):
            packed.extend(self.token_ids[start : start + SLICE_IDS])
        return packed
