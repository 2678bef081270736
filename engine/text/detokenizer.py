"""Ids to text, one token at a time, whatever tokens the characters are cut into.

A character may take several tokens and a token may hold parts of several characters, so
decoding tokens one by one is wrong and decoding everything again for each is quadratic. Here
a token adds a *piece* that depends on nothing but the token: complete text, or raw bytes of
which at most three (the beginning of one UTF-8 character) wait for the next token.

With `decode(ids)` standing for the text of all pieces, an incomplete character at the very end
left out, a completion's text is defined as

    decode(prompt + output) minus decode(prompt)

`decode(prompt)` is a prefix of `decode(prompt + output)` whatever the ids, so this is exact. A
character whose first bytes are the prompt's last token belongs to the completion, and a
leading space survives wherever text stands before it. Bytes that no continuation can make
valid appear as U+FFFD, as many as the tokenizer's own decoder shows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .stop_strings import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["Detokenizer", "Pieces"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 5
"""Tokens of context that decoders without pieces get; only neighbours matter to them."""

Piece: TypeAlias = str | bytes
"""What one token adds: complete text, or bytes that are no text on their own."""


class _TextStream(Protocol):
    """Text of a growing sequence of tokens."""

    def add(self, token_id: int) -> str:
        """The text that this token makes complete."""
        ...

    def add_all(self, token_ids: Sequence[int]) -> str:
        """The text that these make complete, one after the other."""
        ...

    def finish(self) -> str:
        """What had been waiting and is text all the same; incomplete characters are not."""
        ...

    def twin(self) -> _TextStream:
        """Another one at the same place in the same sequence."""
        ...


class Pieces(dict[int, Piece]):
    """What each token adds to the text: read from the decoder's definition, filled on use.

    Understands the byte-level decoder (GPT-2, Llama 3, Qwen, SmolLM ...) and the
    SentencePiece-like ones (Metaspace, or Replace + ByteFallback + Fuse + Strip: Llama 2,
    Mistral, Gemma, T5 ...). For any other decoder, `stream` decodes a short window of tokens
    with the library instead.

    Where the library's ByteFallback turns a whole run of byte tokens into U+FFFD because of
    one wrong byte, only the wrong bytes become U+FFFD here (one each, as there): text that
    was shown must never change because of what follows it.

    Safe to share between threads: an entry is always computed to the same value.

    :param backend: used for look-ups and decoding only.
    :param skip_special_tokens: whether special tokens add nothing.
    """

    def __init__(self, backend: Backend, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        added = backend.get_added_tokens_decoder()
        self._skipped = frozenset(
            token_id for token_id, token in added.items() if skip_special_tokens and token.special
        )
        definition = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        self._to_piece: Callable[[str], Piece] | None = None
        self._to_first_piece: Callable[[str], Piece] | None = None
        self.replacements_per_byte = False
        steps = definition.get("decoders", []) if definition.get("type") == "Sequence" else None
        steps = [definition] if steps is None else steps
        if [step.get("type") for step in steps if step.get("type") != "Fuse"] == ["ByteLevel"]:
            self._to_piece = self._to_first_piece = _byte_level
        elif _is_sentencepiece_like(steps):
            self.replacements_per_byte = True
            self._to_piece = _sentencepiece_like(steps, first=False)
            self._to_first_piece = _sentencepiece_like(steps, first=True)

    def __missing__(self, token_id: int) -> Piece:
        piece = self._compute(token_id, self._to_piece)
        self[token_id] = piece
        return piece

    def first(self, token_id: int) -> Piece:
        """The piece of a token that has no text before it: it may lose its leading space."""
        return self._compute(token_id, self._to_first_piece)

    def _compute(self, token_id: int, convert: Callable[[str], Piece] | None) -> Piece:
        if convert is None or token_id in self._skipped:
            return ""
        token = self._backend.id_to_token(token_id)
        # Models round their vocabulary up: ids without a token are no text, as in the library.
        return "" if token is None else convert(token)

    def stream(self, prompt_token_ids: Sequence[int]) -> _TextStream:
        """A stream that gives the text of the tokens which follow `prompt_token_ids`."""
        if self._to_piece is None:
            return _WindowStream(self._decode, prompt_token_ids)
        return _PieceStream(self, prompt_token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class _PieceStream:
    """Joins pieces. Its whole state: up to three bytes, and whether any token was seen."""

    __slots__ = ("_at_start", "_pending", "_pieces")

    def __init__(self, pieces: Pieces, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._at_start = not any(pieces[token_id] for token_id in prompt_token_ids)
        # The beginning of an incomplete character lies in the last three bytes, so the few
        # tokens that hold those tell all there is to know about a prompt of any length.
        tail = b""
        for token_id in reversed(prompt_token_ids):
            piece = pieces[token_id]
            if isinstance(piece, bytes):
                tail = piece + tail
            elif piece:
                break
            if len(tail) >= 3:
                break
        self._pending = _split(tail, pieces.replacements_per_byte)[1]

    def add(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""
        if self._at_start:
            self._at_start = False
            piece = self._pieces.first(token_id)
        if not self._pending and isinstance(piece, str):
            return piece
        per_byte = self._pieces.replacements_per_byte
        if isinstance(piece, str):
            # Complete text never goes on with a character.
            broken = len(self._pending) if per_byte else 1
            self._pending = b""
            return _REPLACEMENT * broken + piece
        text, self._pending = _split(self._pending + piece, per_byte)
        return text

    def add_all(self, token_ids: Sequence[int]) -> str:
        if not (self._pending or self._at_start):
            # Mostly they are complete text, every one. If not, bytes cannot be joined to it.
            try:
                return "".join(map(self._pieces.__getitem__, token_ids))  # type: ignore[arg-type]
            except TypeError:
                pass
        return "".join(map(self.add, token_ids))

    def finish(self) -> str:
        self._pending = b""
        return ""

    def twin(self) -> _PieceStream:
        return copy.copy(self)


class _WindowStream:
    """For decoders that are not understood: decodes the last few tokens with and without new.

    The window moves on only when there was new text, so it always begins with tokens that
    show something, and the space before a word is kept.
    """

    __slots__ = ("_decode", "_shown", "_token_ids", "_window_end")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        size = _WINDOW
        while size < len(prompt_token_ids) and not decode(prompt_token_ids[-size:]):
            size *= 2
        self._token_ids = list(prompt_token_ids[-size:])
        self._window_end = len(self._token_ids)
        self._shown = decode(self._token_ids).rstrip(_REPLACEMENT)

    def add(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        del self._token_ids[: self._window_end]
        self._window_end = len(self._token_ids)
        self._shown = self._decode(self._token_ids)
        return new

    def add_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.add, token_ids))

    def finish(self) -> str:
        return self._decode(self._token_ids).rstrip(_REPLACEMENT)[len(self._shown) :]

    def twin(self) -> _WindowStream:
        other = copy.copy(self)
        other._token_ids = [*self._token_ids]
        return other


class Detokenizer:
    """Text of one sequence as it grows; cut at the first stop string.

    What `push` returns is final. Held back are only the bytes of an incomplete character and
    the longest suffix that may still become a stop string. Not thread-safe.

    :param min_tokens: the text of the first so many tokens is no part of a stop string.
    :ivar stop_reason: the stop string that ended the text, if one did.
    :ivar num_tokens: tokens taken so far, up to and with the one that completed the stop
        string; those that were pushed after it are ignored.
    """

    __slots__ = (
        "_held",
        "_include_stop",
        "_min_tokens",
        "_parts",
        "_state",
        "_stop",
        "_stream",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        pieces: Pieces,
        prompt_token_ids: Sequence[int],
        *,
        stop: StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self._stream = pieces.stream(prompt_token_ids)
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._state = 0
        self._held = ""
        self._parts: list[str] = []
        self.stop_reason: str | None = None
        self.num_tokens = 0

    def twin(self) -> Detokenizer:
        """One for another answer to the same prompt, made of one that was given nothing yet.

        They share what was made of the prompt and of the stop strings.
        """
        other = copy.copy(self)
        other._stream = self._stream.twin()
        other._parts = []
        return other

    @property
    def text(self) -> str:
        """Everything that `push` and `finish` have returned."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; return the new text that may be shown."""
        if self.stop_reason is not None:
            return ""
        if self._stop is None:
            self.num_tokens += len(token_ids)
            return self._show(self._stream.add_all(token_ids))
        shown = []
        for token_id in token_ids:
            self.num_tokens += 1
            text = self._stream.add(token_id)
            if self.num_tokens <= self._min_tokens:
                shown.append(text)
            elif text:
                shown.append(self._until_stop(self._stop, text))
                if self.stop_reason is not None:
                    break
        return self._show("".join(shown))

    def finish(self) -> str:
        """The sequence has ended: return what was held back, less an incomplete character."""
        if self.stop_reason is not None:
            return ""
        text = self._stream.finish()
        if self._stop is not None and text:
            text = self._until_stop(self._stop, text)
        text += self._held
        self._held, self._state = "", 0
        return self._show(text)

    def _until_stop(self, stop: StopStrings, text: str) -> str:
        """`text` and what was held back before it: as much as may be shown now."""
        self._state, length, self.stop_reason = stop.scan(self._state, text)
        text = self._held + text[:length]
        if self.stop_reason is None:
            end = len(text) - stop.held(self._state)
            self._held = text[end:]
            return text[:end]
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(self.stop_reason)]

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


def _split(data: bytes, replacements_per_byte: bool) -> tuple[str, bytes]:
    """The text in `data`, and the incomplete character at its end.

    Wrong bytes become U+FFFD: one per byte, or one per maximal prefix of a character (Unicode
    15, section 3.9, "U+FFFD Substitution of Maximal Subparts"), as Rust and Python do.
    """
    text = ""
    while data:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode()
            if error.end == len(data) and error.reason == "unexpected end of data":
                return text, data[error.start :]
            text += _REPLACEMENT * (error.end - error.start if replacements_per_byte else 1)
            data = data[error.end :]
    return text, b""


def _piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-ins (GPT-2): themselves where printable, else from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> Piece:
    try:
        return _piece(bytes([_BYTES[character] for character in token]))
    except KeyError:  # an added token, written as it is
        return token


def _is_sentencepiece_like(steps: list[dict[str, Any]]) -> bool:
    """Whether each step, but for a leading space, acts on each token by itself."""
    fused = False
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteFallback" | "Metaspace"} if not fused:
                pass
            case {"type": "Replace", "pattern": {"String": str(pattern)}} if (
                not fused or len(pattern) == 1
            ):
                pass
            case {"type": "Strip", "start": 0 | 1, "stop": 0} if fused:
                pass
            case _:
                return False
    return True


def _sentencepiece_like(steps: list[dict[str, Any]], *, first: bool) -> Callable[[str], Piece]:
    """Apply the steps to one token; `first`: to the first token of a text."""

    def convert(token: str) -> Piece:
        for step in steps:
            match step:
                case {"type": "ByteFallback"} if _is_byte_token(token):
                    piece = _piece(bytes([int(token[3:5], 16)]))
                    if isinstance(piece, bytes):
                        return piece
                    token = piece
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                    token = token.replace(mark, "" if first and scheme != "never" else " ")
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    token = token.replace(pattern, content)
                case {"type": "Strip", "start": 1, "content": content} if first:
                    token = token.removeprefix(content)
        return token

    return convert


def _is_byte_token(token: str) -> bool:
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return False
    return all(character in "0123456789abcdefABCDEF" for character in token[3:5])
