"""Documents, and the chunks they are cut into: by tokens, at sentence boundaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

from ragserve.engine import InvalidParamsError

__all__ = ["Chunk", "Document", "TokenCounter", "TokenEncoder", "TokenSplitter"]


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be found again.

    :param id: unique within an index.
    :param metadata: anything JSON can hold; every chunk of the document carries it.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document: what is embedded, retrieved and put into a prompt.

    :param id: unique within an index.
    :param document_id: id of the `Document` it was cut from.
    :param index: its place in the document, from 0.
    """

    id: str
    document_id: str
    text: str
    index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


class TokenEncoder(Protocol):
    """What turns text into tokens: a tokenizer of transformers, tokenizers, or an engine's."""

    def encode(self, text: str, /) -> Any:
        """The tokens of `text`; only their number, `len()`, is used."""


TokenCounter: TypeAlias = Callable[[str], int]
"""The number of tokens of a text."""

_PARAGRAPH = re.compile(r"\n[^\S\n]*+\n\s*+")
# A Latin full stop ends a sentence only before white space, and not before a small letter
# ("e.g. this"); a CJK one needs no space. Closing quotes and brackets belong to the sentence.
# The possessive quantifiers keep the look-ahead from matching inside the white space.
_SENTENCE = re.compile(
    r"""[.!?…]++["'”’)\]»]*+\s++(?![a-z])|[。！？；]++[”’」』）】》"')\]]*+\s*+""",
)
_LINE = re.compile(r"\n\s*+")
_WORD = re.compile(r"\s++")
# From the boundary that means most to the one that means least.
_BOUNDARIES = (_PARAGRAPH, _SENTENCE, _LINE, _WORD)
_LONG = 8
"""More characters a token than this: taken for too long without counting."""
_PIECES = 16
"""Into how many pieces a word that is too long is cut, again and again until they fit."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A stretch of text that is kept whole while it fits: `text[start:end]`."""

    start: int
    end: int
    level: int
    """Index in `_BOUNDARIES` of the kind of boundary it was cut at."""


class TokenSplitter:
    """Cuts text into chunks of at most `chunk_tokens` tokens.

    Whole paragraphs are packed together while they fit. One that is too long is cut at
    sentences (English and Chinese punctuation), then at lines, then at words, then between
    characters. Chunks are stretches of the text itself, in order. Only white space at a
    chunk's two ends is dropped, so that without overlap the chunks joined are the text up to
    white space at the cuts.

    :param tokenizer: an object with `encode(text)`, or a function that counts tokens. Use the
        tokenizer of the model that has to fit the chunk: the embedder's, or the engine's.
    :param chunk_tokens: most tokens of a chunk, special tokens included if `tokenizer` adds
        any.
    :param overlap_tokens: a chunk starts with at most this many of the last tokens of the one
        before it: whole sentences, or whole words if no sentence is that short.
    :raises InvalidParamsError: if a parameter is out of range.
    """

    def __init__(
        self,
        tokenizer: TokenEncoder | TokenCounter,
        chunk_tokens: int = 256,
        overlap_tokens: int = 0,
    ) -> None:
        if chunk_tokens < 1:
            raise InvalidParamsError("chunk_tokens", chunk_tokens, "at least 1")
        if not 0 <= overlap_tokens < chunk_tokens:
            raise InvalidParamsError(
                "overlap_tokens", overlap_tokens, f"from 0 to chunk_tokens - 1 = {chunk_tokens - 1}"
            )
        self._count_tokens = _counter(tokenizer)
        self.chunk_tokens = chunk_tokens
        self.overlap_tokens = overlap_tokens

    def __repr__(self) -> str:
        return (
            f"TokenSplitter(chunk_tokens={self.chunk_tokens}, overlap_tokens={self.overlap_tokens})"
        )

    def split(self, document: Document) -> list[Chunk]:
        """The document's chunks; none if it is blank. Their ids are `<document id>#<index>`.

        :raises InvalidParamsError: if `chunk_tokens` is too small for a single character.
        """
        return [
            Chunk(f"{document.id}#{index}", document.id, text, index, document.metadata)
            for index, text in enumerate(self.split_text(document.text))
        ]

    def split_many(self, documents: Iterable[Document]) -> list[Chunk]:
        """The chunks of several documents, in order.

        :raises InvalidParamsError: if `chunk_tokens` is too small for a single character.
        """
        return [chunk for document in documents for chunk in self.split(document)]

    def split_text(self, text: str) -> list[str]:
        """The chunks of a text, without white space at their ends.

        :raises InvalidParamsError: if `chunk_tokens` is too small for a single character.
        """
        chunks = (text[start:end].strip() for start, end in self._spans(text))
        return [chunk for chunk in chunks if chunk]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the chunks lie in `text`, white space at their ends included."""
        todo = [_Unit(0, len(text), -1)]  # a stack: what comes next in the text is its last item
        taken: list[_Unit] = []
        start = 0  # of the chunk being filled; with overlap, before its first unit
        tokens = 0  # of the chunk being filled: an estimate, for counts do not quite add up
        while True:
            if todo:
                unit = todo.pop()
                # What is cut for no need is packed together again, and a whole document need
                # not be tokenized to know that it is long.
                is_long = unit.end - unit.start > _LONG * self.chunk_tokens
                unit_tokens = 0 if is_long else self._count(text, unit.start, unit.end)
                if is_long or unit_tokens > self.chunk_tokens:
                    todo.extend(reversed(self._parts(text, unit)))
                    continue
                tokens += unit_tokens
                if taken and tokens > self.chunk_tokens:
                    tokens = self._count(text, start, unit.end)
                if not taken or tokens <= self.chunk_tokens:
                    taken.append(unit)
                    continue
                todo.append(unit)
            elif not taken:
                return
            # Full, or all placed. The estimate may have been too low: put back what is too much.
            while len(taken) > 1 and self._count(text, start, taken[-1].end) > self.chunk_tokens:
                todo.append(taken.pop())
            end = taken[-1].end
            yield start, end
            taken.clear()
            if todo:
                start = self._overlap(text, start, end, todo[-1].end)
                tokens = self._count(text, start, end)

    def _overlap(self, text: str, start: int, end: int, next_end: int) -> int:
        """Where the chunk after `text[start:end]` starts, if its first unit ends at `next_end`."""
        for boundary in (_SENTENCE, _WORD) if self.overlap_tokens else ():
            best = end
            for match in reversed(list(boundary.finditer(text, start, end))):
                if match.end() == end:
                    continue
                if (
                    self._count(text, match.end(), end) > self.overlap_tokens
                    or self._count(text, match.end(), next_end) > self.chunk_tokens
                ):
                    break
                best = match.end()
            if best < end:
                return best
        return end

    def _parts(self, text: str, unit: _Unit) -> list[_Unit]:
        """A unit that is too long, cut at the strongest boundary inside it."""
        for level in range(unit.level + 1, len(_BOUNDARIES)):
            cuts = [m.end() for m in _BOUNDARIES[level].finditer(text, unit.start, unit.end)]
            edges = [unit.start, *(cut for cut in cuts if cut < unit.end), unit.end]
            if len(edges) > 2:
                return [_Unit(a, b, level) for a, b in pairwise(edges)]
        # One long word, or text in a script without spaces.
        length = unit.end - unit.start
        if length == 1:
            raise InvalidParamsError(
                "chunk_tokens",
                self.chunk_tokens,
                f"at least {self._count(text, unit.start, unit.end)}, the tokens of the single "
                f"character {text[unit.start]!r}",
            )
        edges = [*range(unit.start, unit.end, max(1, length // _PIECES)), unit.end]
        return [_Unit(a, b, len(_BOUNDARIES)) for a, b in pairwise(edges)]

    def _count(self, text: str, start: int, end: int) -> int:
        stretch = text[start:end].strip()
        return self._count_tokens(stretch) if stretch else 0


def _counter(tokenizer: TokenEncoder | TokenCounter) -> TokenCounter:
    # A transformers tokenizer is callable too, so `encode` is looked for first.
    encode = getattr(tokenizer, "encode", None)
    if callable(encode):
        return lambda text: len(encode(text))
    if callable(tokenizer):
        return tokenizer
    raise InvalidParamsError(
        "tokenizer", tokenizer, "an object with encode(text), or a function that counts tokens"
    )
