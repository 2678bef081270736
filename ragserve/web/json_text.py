"""JSON as requests may have it: RFC 8259, without what readers disagree about, and in bounds.

`json.loads` is one call that holds the GIL until it is done: 4 MiB of numbers, escapes or empty
lists stop every thread for 50 to 200 ms. This parser's calls take at most about 1 ms each, and
other threads run between them; and it stops at the first item too many.
"""

from __future__ import annotations

import math
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from .problem import Problem

__all__ = ["CONTAINER_ITEMS", "MAX_DEPTH", "parse_json"]

MAX_DEPTH: Final = 64
"""Most lists and objects inside each other."""
CONTAINER_ITEMS: Final = 8
"""A list or object counts as so many items: it costs more, and the collector looks at each."""
_MAX_DIGITS: Final = 30
"""Most characters of an integer; 64 bits are 20."""
_MAX_NUMBER: Final = 400
"""Most characters of any number."""
_SLICE: Final = 32_768
"""Most characters of a string, or of white space, that one call looks at."""

_SPACE: Final = re.compile(r"[ \t\n\r]{0,32768}+")
_NUMBER: Final = re.compile(
    r"-?(?:0|[1-9][0-9]{0,399}+)(\.[0-9]{1,400}+)?([eE][-+]?[0-9]{1,400}+)?"
)
_INTEGERS: Final = re.compile(r"(?:(?:0|[1-9][0-9]{0,14}+),){8,256}+")
_WHOLE_ESCAPES: Final = re.compile(
    r"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u])*+",
    re.DOTALL,
)
_FIRST_HALF: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}$")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_WORDS: Final = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}


def parse_json(body: bytes, items: int) -> Any:
    """The value of a JSON text.

    :param items: most values in its lists and objects, all together; each list and each object
        counts as `CONTAINER_ITEMS` more.
    :raises Problem: 400, if it is not JSON in UTF-8; has more items, or deeper ones; a number
        that is not finite, or an integer of more digits than any field takes; a name twice in an
        object; or a lone surrogate, which no text has. Never quotes more of it than a name.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid("the body is not JSON: it is not UTF-8") from error
    parser = _Parser(text, items)
    value, end = parser.value(parser.space(0), 0, "")
    end = parser.space(end)
    if end < len(text):
        raise _not_json(end)
    return value


class _Parser:
    """One parse. Methods take a position, and return what they read and the position after it."""

    def __init__(self, text: str, items: int) -> None:
        self._text = text
        self._items = self._left = items

    def space(self, at: int) -> int:
        """The position after white space."""
        while (match := _SPACE.match(self._text, at)) is not None and match.end() > at:
            at = match.end()
        return at

    def value(self, at: int, depth: int, path: str) -> tuple[Any, int]:
        """Any value; `path` is the field that it is in."""
        text = self._text
        first = text[at : at + 1]
        if first == '"':
            return self.string(at + 1, path)
        if first in ("[", "{") and first:
            if depth == MAX_DEPTH:
                raise _invalid(
                    f"the body has lists and objects more than {MAX_DEPTH} deep", "too_deep"
                )
            self._left -= CONTAINER_ITEMS
            self.count(0)
            read = self.list if first == "[" else self.object
            return read(self.space(at + 1), depth + 1, path)
        if first in _WORDS:
            word, value = _WORDS[first]
            if text.startswith(word, at):
                return value, at + len(word)
        for name in ("NaN", "Infinity", "-Infinity"):
            if first in "NI-" and text.startswith(name, at):
                raise _invalid(f"the body has {name}, which is not JSON")
        return self.number(at)

    def list(self, at: int, depth: int, path: str) -> tuple[list[Any], int]:
        """The rest of a list."""
        text, values = self._text, list[Any]()
        if text.startswith("]", at):
            return values, at + 1
        while True:
            # Token ids, many at a time.
            while (run := _INTEGERS.match(text, at)) is not None:
                values.extend(map(int, text[at : run.end() - 1].split(",")))
                self.count(len(values))
                at = run.end()
            value, at = self.value(self.space(at), depth, f"{path}[{len(values)}]")
            values.append(value)
            self.count(len(values))
            at = self.space(at)
            if text.startswith("]", at):
                self._left -= len(values)
                return values, at + 1
            if not text.startswith(",", at):
                raise _not_json(at)
            at += 1

    def object(self, at: int, depth: int, path: str) -> tuple[dict[str, Any], int]:
        """The rest of an object."""
        text, values = self._text, dict[str, Any]()
        if text.startswith("}", at):
            return values, at + 1
        while True:
            at = self.space(at)
            if not text.startswith('"', at):
                raise _not_json(at)
            name, at = self.string(at + 1, path or "the name of a field")
            if name in values:
                raise _invalid(f"the body has {name[:64]!r} twice in one object")
            at = self.space(at)
            if not text.startswith(":", at):
                raise _not_json(at)
            inner = f"{path}.{name[:64]}" if path else name[:64]
            values[name], at = self.value(self.space(at + 1), depth, inner)
            self.count(len(values))
            at = self.space(at)
            if text.startswith("}", at):
                self._left -= len(values)
                return values, at + 1
            if not text.startswith(",", at):
                raise _not_json(at)
            at += 1

    def count(self, here: int) -> None:
        """See that there are not too many, with those of the list or object that is being read."""
        if here > self._left:
            raise _invalid(
                f"the body has more than {self._items} items in its lists and objects",
                "too_many_items",
            )

    def string(self, at: int, path: str) -> tuple[str, int]:
        """The rest of a string."""
        text, pieces = self._text, list[str]()
        while True:
            piece = text[at : at + _SLICE]
            if "\\" in piece and len(piece) == _SLICE:
                piece = _whole_escapes(piece)
            try:
                read, end = scanstring(piece + '"', 0, True)
            except ValueError as error:
                raise _not_json(at) from error
            pieces.append(read)
            at += end
            if end <= len(piece):
                break
            at -= 1  # the quotation mark is ours
            if at >= len(text):
                raise _not_json(at)
        value = "".join(pieces) if len(pieces) > 1 else pieces[0]
        if any(_SURROGATE.search(piece) for piece in pieces):
            raise Problem(
                400,
                f"{path or 'the body'} has a lone surrogate, half of a character that needs two "
                "(\\ud800 to \\udfff); remove it or replace it by \\ufffd",
                param=path or None,
                code="invalid_value",
            )
        return value, at

    def number(self, at: int) -> tuple[int | float, int]:
        """An integer, or a number that is none."""
        match = _NUMBER.match(self._text, at)
        if match is None:
            raise _not_json(at)
        end, text = match.end(), match[0]
        if len(text) > _MAX_NUMBER - 2 or self._text[end : end + 1].isdigit():
            raise _invalid(f"the body has a number of more than {len(text)} characters")
        if match[1] is None and match[2] is None:
            if len(text) > _MAX_DIGITS:
                raise _invalid(
                    f"the body has an integer of {len(text)} digits; at most {_MAX_DIGITS} are read"
                )
            return int(text), end
        value = float(text)
        if not math.isfinite(value):
            raise _invalid("the body has a number that is too large for 64 bits")
        return value, end


def _whole_escapes(piece: str) -> str:
    """A part of a string without an escape at its end that goes on behind it."""
    match = _WHOLE_ESCAPES.match(piece)
    whole = piece[: match.end()] if match is not None else ""
    if _FIRST_HALF.search(whole[-64:]) and len(whole) > 6:
        whole = whole[:-6]
    return whole or piece  # which is not valid, and refused


def _invalid(message: str, code: str = "invalid_json") -> Problem:
    return Problem(400, message, code=code)


def _not_json(at: int) -> Problem:
    # Not what is there, which may be anybody's text.
    return _invalid(f"the body is not JSON at character {at}")
