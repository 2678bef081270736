"""Documents, and the chunks they are cut into: by tokens, at sentence boundaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from string import Formatter
from typing import Any, Protocol, TypeAlias

from ragserve.engine import InvalidParamsError, check_text

from .document import DOCUMENT_FORMAT, Chunk, Document, check_document
from .packing import Packing

__all__ = ["DocumentTemplate", "TokenCounter", "TokenEncoder", "TokenSplitter"]


class TokenEncoder(Protocol):
    """What turns text into tokens: a tokenizer of transformers, tokenizers, or an engine's."""

    def encode(self, text: str, /) -> Any:
        """The tokens of `text`; only their number, `len()`, is used."""


class DocumentTemplate(Protocol):
    """What puts a chunk into a prompt: a `PromptTemplate`."""

    @property
    def document_format(self) -> str:
        """A format string of `number`, `text`, `document_id` and `metadata`."""


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
_CUT_COSTS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""What a cut weighs against empty slots, by its index in `_BOUNDARIES`; last, within a word."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A stretch of text that is kept whole while it fits: `text[start:end]`."""

    start: int
    end: int
    level: int = -1
    """Index in `_BOUNDARIES` of the kind of boundary it was cut at."""
    end_level: int = 0
    """Index in `_BOUNDARIES` of the kind of boundary at its end."""

    def parts(self, edges: Iterable[int], level: int) -> list[_Unit]:
        """Cut at `edges`, its own two among them."""
        return [
            _Unit(a, b, level, level if b < self.end else self.end_level)
            for a, b in pairwise(edges)
        ]


@dataclass(frozen=True, slots=True)
class _Text:
    """A text, and how many tokens its stretches have, without white space at their ends."""

    text: str
    tokens: TokenCounter
    render: Callable[[str], str] | None
    """Makes of a chunk what stands in a prompt."""

    def stretch(self, start: int, end: int) -> str:
        return self.text[start:end].strip()

    def count(self, start: int, end: int) -> int:
        """Tokens of a stretch by itself."""
        stretch = self.stretch(start, end)
        return self.tokens(stretch) if stretch else 0

    def size(self, start: int, end: int) -> int:
        """Tokens of a stretch as a chunk, with what the template puts around it."""
        stretch = self.stretch(start, end)
        if not stretch:
            return 0
        return self.tokens(stretch if self.render is None else self.render(stretch))

    def cut(self, unit: _Unit, level: int) -> list[_Unit]:
        """A unit cut at all boundaries of one kind inside it; itself, if there are none."""
        cuts = [m.end() for m in _BOUNDARIES[level].finditer(self.text, unit.start, unit.end)]
        return unit.parts([unit.start, *(cut for cut in cuts if cut < unit.end), unit.end], level)


class TokenSplitter:
    """Cuts text into chunks of at most `chunk_tokens` tokens.

    Whole paragraphs are packed together while they fit. One that is too long is cut at
    sentences (English and Chinese punctuation), then at lines, then at words, then between
    characters. Chunks are stretches of the text itself, in order. Only white space at a
    chunk's two ends is dropped, so that without overlap the chunks joined are the text up to
    white space at the cuts.

    With `block_size`, chunks are cut to fill whole KV blocks of an engine. A document in a
    prompt begins on a block boundary, and what its last block has no tokens for stays empty: a
    *hole*, memory that every cached copy of the chunk takes up. Any sentence may then end a
    chunk, and of all the ways to cut the text the one with the fewest empty slots is taken, with
    a slight preference for full chunks and for cuts between paragraphs. A sentence is still cut
    only if it is too long. The more sentences a chunk holds, the more ways there are, and the
    fewer slots stay empty::

        TokenSplitter(engine.tokenizer, 256, block_size=engine.config.block_size, template=template)

    :param tokenizer: an object with `encode(text)`, or a function that counts tokens. Use the
        tokenizer of the model that has to fit the chunk: the embedder's, or the engine's. With
        `block_size` or `template` it has to be the engine's, and `encode_plain(text)` is called,
        as for a document in a prompt; without that, `encode(text, add_special_tokens=False)`.
    :param chunk_tokens: most tokens of a chunk, special tokens included if `tokenizer` adds
        any, and so is what `template` puts around the chunk. A multiple of `block_size` is best.
    :param overlap_tokens: a chunk starts with at most this many of the last tokens of the one
        before it: whole sentences, or whole words if no sentence is that short.
    :param block_size: token slots of a KV block, `EngineConfig.block_size`; None: chunks are as
        full as they can be, whatever that leaves of their last block.
    :param template: what is counted is the chunk as this template puts it into a prompt, as
        document number 1 (a number of more digits may be more tokens). Default: with
        `block_size`, a `PromptTemplate()`; else the text alone is counted.
    :raises InvalidParamsError: if a parameter is out of range, or the template shows a chunk's
        `id`, which depends on where the text is cut.
    """

    def __init__(
        self,
        tokenizer: TokenEncoder | TokenCounter,
        chunk_tokens: int = 256,
        overlap_tokens: int = 0,
        *,
        block_size: int | None = None,
        template: DocumentTemplate | None = None,
    ) -> None:
        if isinstance(tokenizer, str | bytes | type):  # strings have an encode() of their own
            raise InvalidParamsError(
                "tokenizer",
                tokenizer,
                "an object with encode(text), or a function that counts tokens; for a model's name "
                "AutoTokenizer.from_pretrained(name) of transformers, or engine.tokenizer",
            )
        if chunk_tokens < 1:
            raise InvalidParamsError("chunk_tokens", chunk_tokens, "at least 1")
        if not 0 <= overlap_tokens < chunk_tokens:
            raise InvalidParamsError(
                "overlap_tokens", overlap_tokens, f"from 0 to chunk_tokens - 1 = {chunk_tokens - 1}"
            )
        if block_size is not None and not 1 <= block_size <= chunk_tokens:
            raise InvalidParamsError(
                "block_size", block_size, f"from 1 to chunk_tokens = {chunk_tokens}"
            )
        self._format = None if template is None else template.document_format
        if block_size is not None and template is None:
            self._format = DOCUMENT_FORMAT
        if self._format is not None and "id" in _placeholders(self._format):
            raise InvalidParamsError(
                "template",
                self._format,
                "a document_format without {id}, which depends on where the text is cut; "
                "{document_id} and {metadata} can be used",
            )
        self._count_tokens = _counter(tokenizer, in_prompt=self._format is not None)
        self.chunk_tokens = chunk_tokens
        self.overlap_tokens = overlap_tokens
        self.block_size = block_size

    def __repr__(self) -> str:
        parts = [f"chunk_tokens={self.chunk_tokens}", f"overlap_tokens={self.overlap_tokens}"]
        if self.block_size is not None:
            parts.append(f"block_size={self.block_size}")
        if self._format is not None:
            parts.append(f"document_format={self._format!r}")
        return f"TokenSplitter({', '.join(parts)})"

    def split(self, document: Document) -> list[Chunk]:
        """The document's chunks; none if it is blank. Their ids are `<document id>#<index>`.

        :raises InvalidParamsError: if the document's id or text is no Unicode string, see
            `check_document()`, or it lacks metadata that the template shows; or `chunk_tokens` is
            too small for a single character.
        """
        check_document(document)
        return [
            Chunk(f"{document.id}#{index}", document.id, text, index, document.metadata)
            for index, text in enumerate(self._split(document))
        ]

    def split_many(self, documents: Iterable[Document]) -> list[Chunk]:
        """The chunks of several documents, in order.

        :raises InvalidParamsError: as `split()` does.
        """
        return [chunk for document in documents for chunk in self.split(document)]

    def split_text(self, text: str) -> list[str]:
        """The chunks of a text, without white space at their ends.

        :raises InvalidParamsError: as `split()` does.
        """
        return self._split(Document("", check_text("text", text)))

    def num_tokens(self, chunk: Chunk) -> int:
        """Tokens of a chunk, with what the template puts around it.

        :raises InvalidParamsError: if the chunk lacks metadata that the template shows.
        """
        if self._format is None:
            return self._count_tokens(chunk.text)
        document = Document(chunk.document_id, chunk.text, chunk.metadata)
        return self._count_tokens(self._render(self._format, document, chunk.text))

    def hole_tokens(self, chunks: Iterable[Chunk], block_size: int | None = None) -> int:
        """Slots that the chunks leave empty in KV blocks, one prompt segment each.

        :param block_size: default: the splitter's own.
        :raises InvalidParamsError: if there is no block size.
        """
        block_size = self.block_size if block_size is None else block_size
        if block_size is None or block_size < 1:
            raise InvalidParamsError("block_size", block_size, "at least 1")
        return sum(-self.num_tokens(chunk) % block_size for chunk in chunks)

    def _split(self, document: Document) -> list[str]:
        text = self._text(document)
        spans = self._spans(text) if self.block_size is None else self._full_spans(text)
        chunks = (text.stretch(start, end) for start, end in spans)
        return [chunk for chunk in chunks if chunk]

    def _text(self, document: Document) -> _Text:
        render = None if self._format is None else partial(self._render, self._format, document)
        return _Text(document.text, self._count_tokens, render)

    def _render(self, document_format: str, document: Document, text: str) -> str:
        """A chunk of the document as a `PromptTemplate` puts it into a prompt."""
        try:
            return document_format.format(
                number=1, text=text, document_id=document.id, metadata=document.metadata
            )
        except (LookupError, ValueError, AttributeError) as exc:
            raise InvalidParamsError(
                "template",
                document_format,
                f"placeholders that document {document.id!r} can fill ({exc!r}); metadata it "
                f"has: {sorted(document.metadata)}",
            ) from exc

    def _spans(self, text: _Text) -> Iterator[tuple[int, int]]:
        """Where the chunks lie in `text`, white space at their ends included."""
        todo = [_Unit(0, len(text.text))]  # a stack: what comes next is its last item
        taken: list[_Unit] = []
        start = 0  # of the chunk being filled; with overlap, before its first unit
        tokens = 0  # of the chunk being filled: an estimate, for counts do not quite add up
        while True:
            if todo:
                unit = todo.pop()
                unit_tokens = self._unit_size(text, unit)
                if unit_tokens > self.chunk_tokens:
                    todo.extend(reversed(self._parts(text, unit)))
                    continue
                tokens += unit_tokens
                if taken and tokens > self.chunk_tokens:
                    tokens = text.size(start, unit.end)
                if not taken or tokens <= self.chunk_tokens:
                    taken.append(unit)
                    continue
                todo.append(unit)
            elif not taken:
                return
            # Full, or all placed. The estimate may have been too low: put back what is too much.
            while len(taken) > 1 and text.size(start, taken[-1].end) > self.chunk_tokens:
                todo.append(taken.pop())
            end = taken[-1].end
            yield start, end
            taken.clear()
            if todo:
                start = self._overlap(text, start, end, todo[-1].end)
                tokens = text.size(start, end)

    def _full_spans(self, text: _Text) -> Iterator[tuple[int, int]]:
        """As `_spans()`, but with as few empty slots as can be in the chunks' last blocks."""
        units, sizes = self._units(text)
        if not units or self.block_size is None:
            return
        steps = [text.count(units[0].start, units[0].end)]
        for before, unit in pairwise(units):
            steps.append(text.count(before.start, unit.end) - text.count(before.start, before.end))
        if self.overlap_tokens:
            for index in range(1, len(units)):
                start = self._likely_start(text, units, steps, index)
                sizes[index] = text.size(start, units[index].end)
        cut_costs = [_CUT_COSTS[unit.end_level] for unit in units]
        packing = Packing(sizes, steps, cut_costs, self.chunk_tokens, self.block_size)
        first, start = 0, units[0].start

        def size(last: int) -> int:
            return text.size(start, units[last].end)

        while True:
            last = packing.last(first, size)
            end = units[last].end
            yield start, end
            first = last + 1
            if first == len(units):
                return
            start = self._overlap(text, start, end, units[first].end)

    def _likely_start(
        self, text: _Text, units: Sequence[_Unit], steps: Sequence[int], index: int
    ) -> int:
        """Where a chunk whose first new unit is `index` starts, if the one before is long."""
        earliest, tokens = index, 0
        while earliest > 0 and tokens <= self.overlap_tokens:
            earliest -= 1
            tokens += max(1, steps[earliest])
        start, end = units[earliest].start, units[index - 1].end
        return self._overlap(text, start, end, units[index].end)

    def _units(self, text: _Text) -> tuple[list[_Unit], list[int]]:
        """Sentences, and pieces of those that are too long; and the tokens of each as a chunk."""
        paragraphs = text.cut(_Unit(0, len(text.text)), _BOUNDARIES.index(_PARAGRAPH))
        sentence = _BOUNDARIES.index(_SENTENCE)
        todo = [unit for paragraph in paragraphs for unit in text.cut(paragraph, sentence)]
        todo.reverse()  # a stack, as in `_spans()`
        units: list[_Unit] = []
        sizes: list[int] = []
        while todo:
            unit = todo.pop()
            size = self._unit_size(text, unit)
            if size > self.chunk_tokens:
                todo.extend(reversed(self._parts(text, unit, self.block_size)))
            elif text.stretch(unit.start, unit.end):
                units.append(unit)
                sizes.append(size)
        return units, sizes

    def _overlap(self, text: _Text, start: int, end: int, next_end: int) -> int:
        """Where the chunk after `start:end` starts, if its first unit ends at `next_end`."""
        for boundary in (_SENTENCE, _WORD) if self.overlap_tokens else ():
            best = end
            for match in reversed(list(boundary.finditer(text.text, start, end))):
                if match.end() == end:
                    continue
                if (
                    text.count(match.end(), end) > self.overlap_tokens
                    or text.size(match.end(), next_end) > self.chunk_tokens
                ):
                    break
                best = match.end()
            if best < end:
                return best
        return end

    def _unit_size(self, text: _Text, unit: _Unit) -> int:
        """Tokens of a unit as a chunk; more than `chunk_tokens`, if it is far too long."""
        # What is cut for no need is packed together again, and a whole document need not be
        # tokenized to know that it is long.
        if unit.end - unit.start > _LONG * self.chunk_tokens:
            return self.chunk_tokens + 1
        return text.size(unit.start, unit.end)

    def _parts(self, text: _Text, unit: _Unit, fine: int | None = None) -> list[_Unit]:
        """A unit that is too long, cut at the strongest boundary inside it.

        :param fine: characters up to which short parts are left together and characters are: for
            a choice of cuts that is neither too large nor too small. None: as few cuts as do.
        """
        for level in range(unit.level + 1, len(_BOUNDARIES)):
            parts = text.cut(unit, level)
            if len(parts) > 1:
                return parts if fine is None else unit.parts(_sparse(parts, fine), level)
        # One long word, or text in a script without spaces.
        length = unit.end - unit.start
        if length == 1:
            raise InvalidParamsError(
                "chunk_tokens",
                self.chunk_tokens,
                f"at least {text.size(unit.start, unit.end)}, the tokens of the single character "
                f"{text.text[unit.start]!r}{'' if text.render is None else ' in the template'}",
            )
        step = max(1, min(length // _PIECES, fine or length))
        return unit.parts([*range(unit.start, unit.end, step), unit.end], len(_BOUNDARIES))


def _sparse(parts: Sequence[_Unit], length: int) -> Iterator[int]:
    """The edges of parts that are left together while they are at most `length` long."""
    start = parts[0].start
    yield start
    for part in parts:
        if part.end - start > length and part.start > start:
            start = part.start
            yield start
    yield parts[-1].end


def _placeholders(document_format: str) -> set[str]:
    """The names that a format string shows."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(document_format) if name]
    except ValueError as exc:
        raise InvalidParamsError("template", document_format, f"a format string ({exc})") from exc
    return {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}


def _counter(tokenizer: TokenEncoder | TokenCounter, *, in_prompt: bool) -> TokenCounter:
    """Counts tokens; `in_prompt`: as of a prompt's segment, which gets no special tokens."""
    # A transformers tokenizer is callable too, so `encode` is looked for first.
    encode = getattr(tokenizer, "encode", None)
    plain = getattr(tokenizer, "encode_plain", None)
    if callable(plain) and in_prompt:
        return lambda text: len(plain(text))
    if callable(encode) and in_prompt:
        encode = partial(encode, add_special_tokens=False)
        try:
            encode("")
        except TypeError as exc:
            raise InvalidParamsError(
                "tokenizer",
                tokenizer,
                "with block_size or template, the engine's: an object with "
                "encode(text, add_special_tokens=False), or a function that counts tokens",
            ) from exc
    if callable(encode):
        return lambda text: len(encode(text))
    if callable(tokenizer):
        return tokenizer
    raise InvalidParamsError(
        "tokenizer", tokenizer, "an object with encode(text), or a function that counts tokens"
    )
