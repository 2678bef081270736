"""Token ids of the segments that prompts are made of, remembered."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ragserve.engine import (
    InvalidParamsError,
    Plain,
    PromptLike,
    TokenizedPrompt,
)

__all__ = ["PromptTokenizer", "SegmentTokens", "TokenizedSegment"]


class PromptTokenizer(Protocol):
    """What a template needs to know of a tokenizer; an engine's has it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages are understood."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Chat messages as text, with the opening of the assistant's turn."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Ids of a text."""

    def encode_plain(self, text: str, plain: Plain = True) -> Sequence[int]:
        """Ids of a text that others wrote, without special tokens."""

    def tokenize(self, prompt: PromptLike, /) -> TokenizedPrompt:
        """Ids of a prompt, each segment on its own."""


class SegmentTokens:
    """A tokenizer that remembers the documents it has seen: they are asked for again and again.

    Give it to `PromptTemplate.build` in place of the tokenizer. Thread-safe. What one namespace
    has brought in makes nothing faster in another.

    :param tokenizer: does the work.
    :param capacity_tokens: most tokens that are remembered; what was not used for longest goes.
        Each takes some ten bytes, its text included.
    :raises InvalidParamsError: if `capacity_tokens` is negative.
    """

    def __init__(self, tokenizer: PromptTokenizer, capacity_tokens: int = 1_000_000) -> None:
        if capacity_tokens < 0:
            raise InvalidParamsError("capacity_tokens", capacity_tokens, "at least 0")
        self.tokenizer = tokenizer
        self.capacity_tokens = capacity_tokens
        self._lock = threading.Lock()
        self._segments: OrderedDict[tuple[str, str, Plain], TokenizedSegment] = OrderedDict()
        self._num_tokens = 0

    def __repr__(self) -> str:
        return f"<SegmentTokens [{len(self._segments)} segments, {self._num_tokens} tokens]>"

    @property
    def has_chat_template(self) -> bool:
        """See `PromptTokenizer`."""
        return self.tokenizer.has_chat_template

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """See `PromptTokenizer`."""
        return self.tokenizer.apply_chat_template(messages, **kwargs)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """See `PromptTokenizer`. Nothing is remembered."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def tokenize(self, prompt: PromptLike, /) -> TokenizedPrompt:
        """See `PromptTokenizer`. Nothing is remembered."""
        return self.tokenizer.tokenize(prompt)

    def encode_plain(self, text: str, plain: Plain = True) -> Sequence[int]:
        """See `PromptTokenizer`. Nothing is remembered."""
        return self.tokenizer.encode_plain(text, plain)

    def segment(self, text: str, namespace: str = "", *, plain: Plain = True) -> TokenizedSegment:
        """A segment's text and its ids, without BOS; remembered.

        :param plain: which characters of `text` are never control tokens, see `Segment`.
        """
        key = (text, namespace, plain)
        with self._lock:
            known = self._segments.get(key)
            if known is not None:
                self._segments.move_to_end(key)
                return known
        # Not under the lock: two threads may do the same work, and neither waits for the other.
        made = self.fresh(text, plain)
        with self._lock:
            if key not in self._segments:
                self._segments[key] = made
                self._num_tokens += made.cost
            while self._num_tokens > self.capacity_tokens:
                self._num_tokens -= self._segments.popitem(last=False)[1].cost
        return made

    def fresh(self, text: str, plain: Plain = True) -> TokenizedSegment:
        """As `segment()`, and not remembered."""
        return TokenizedSegment(text, array("I", self.encode_plain(text, plain)), plain)


class TokenizedSegment(NamedTuple):
    """A segment's text, and its token ids without BOS."""

    text: str
    token_ids: array[int]
    plain: Plain = True

    @property
    def cost(self) -> int:
        """What it counts for: an empty one takes room too."""
        return len(self.token_ids) + 1
