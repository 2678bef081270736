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
from .text.slices import SLICE_IDS

__all__ = [
    "RETENTION_OF",
    "Plain",
    "Prompt",
    "PromptLike",
    "Retention",
    "Segment",
    "SegmentKind",
    "TokenizedPrompt",
    "check_text",
    "plain_ranges",
]

SegmentKind: TypeAlias = Literal["system", "document", "turn", "question"]

Plain: TypeAlias = bool | tuple[tuple[int, int], ...]
"""Which characters of a text are never a control token: all, none, or ranges (start, end)."""


def check_text(name: str, text: object) -> str:
    """A text that can be encoded, as it is.

    :param name: of the parameter, for the error.
    :raises InvalidParamsError: if it is not a string, or has a lone surrogate in it: half of a
        character, as broken JSON and the texts of some PDF files have them.
    """
    if not isinstance(text, str):
        raise InvalidParamsError(name, text, "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParamsError(
            name,
            text,
            f"a string without lone surrogates; character {error.start} is one, "
            f"{text[error.start]!r}: replace it, for example with "
            "text.encode('utf-8', 'replace').decode()",
        ) from error
    return text


def plain_ranges(text: str, plain: Plain) -> tuple[tuple[int, int], ...]:
    """The ranges of `text` that are plain, those that are empty left out.

    :raises InvalidParamsError: if they lie outside the text, or are not in order.
    """
    if isinstance(plain, bool):
        return ((0, len(text)),) if plain and text else ()
    done = 0
    for start, end in plain:
        if not done <= start <= end <= len(text):
            raise InvalidParamsError(
                "plain", (start, end), f"ranges in order, from 0 to the text's {len(text)}"
            )
        done = end
    return tuple((start, end) for start, end in plain if start < end)


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

    :param text: the text, tokenized on its own without special tokens being added; or
    :param token_ids: its token ids, used as they are. Exactly one of the two is given.
    :param plain: which characters of `text` were written by others: none (False), all (True), or
        ranges of them, (start, end), in order. A control token that is written there, like
        `<|im_end|>`, is text to the model. Elsewhere it is the control token.
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
    plain: Plain = False

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise InvalidParamsError(
                "Segment", (self.text, self.token_ids), "give exactly one of text and token_ids"
            )
        if self.text is not None:
            if not isinstance(self.text, str):
                raise InvalidParamsError("text", self.text, "a string")
            plain_ranges(self.text, self.plain)
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
template), or a `Prompt` of segments.

Text is raw: a control token that is written out in it is one. What a message holds is text to the
model, whatever it looks like, and only the template's own control tokens are such."""


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
