"""JSON as requests may have it: RFC 8259, without what readers disagree about, and in bounds.

`json.loads` holds the GIL until it is done, which stops every thread for 0.1 s and more if 4 MiB
are a million numbers. So the structure is counted first, by searches that take about 1 ms/MiB,
and what has more of it than any request needs is not parsed.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, Never

from .problem import Problem

__all__ = ["MAX_DEPTH", "parse_json"]

MAX_DEPTH: Final = 64
"""Most lists and objects inside each other."""
_MAX_DIGITS: Final = 30
"""Most characters of an integer; 64 bits are 20."""

_REST_OF_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes, items: int) -> Any:
    """The value of a JSON text.

    :param items: most commas and opening brackets outside strings: about the number of values.
    :raises Problem: 400, if it is not JSON in UTF-8; has more items, or deeper ones; a number
        that is not finite, or an integer of more digits than any field takes; a name twice in an
        object; or a lone surrogate, which no text has. Never quotes more of it than a name.
    """
    body = body.removeprefix(b"\xef\xbb\xbf")
    # What is in strings counts here too, so this may be more than there is, but never less.
    opened = body.count(b"[") + body.count(b"{")
    if opened > MAX_DEPTH or opened + body.count(b",") > items:
        _check_structure(body, items)
    try:
        # Not bytes, in which json takes surrogates and other encodings.
        value = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        # Not the error's own words, which may quote the body.
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise Problem(400, f"the body is not JSON{where}", code="invalid_json") from error
    if _SURROGATE.search(body):
        _check_text(value)
    return value


def _check_structure(body: bytes, items: int) -> None:
    """Count what is outside strings. Each step of the loop is short, so other threads run."""
    depth = count = position = 0
    while True:
        quote = body.find(b'"', position)
        between = body[position:] if quote < 0 else body[position:quote]
        count += between.count(b",") + between.count(b"[") + between.count(b"{")
        if count > items:
            raise Problem(
                400,
                f"the body has more than {items} items in its lists and objects",
                code="too_many_items",
            )
        for bracket in between.translate(None, _OTHERS):
            if bracket in b"[{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise Problem(
                        400,
                        f"the body has lists and objects more than {MAX_DEPTH} deep",
                        code="too_deep",
                    )
            else:
                depth -= 1
        end = None if quote < 0 else _REST_OF_STRING.match(body, quote + 1)
        if end is None:
            return  # its end, or a string without one, which the parser refuses
        # A string costs as much as several numbers; a valid one is followed by one of ,:]}
        position = end.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise Problem(
                    400, f"the body has {name[:64]!r} twice in one object", code="invalid_json"
                )
            names.add(name)
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Problem(
            400,
            f"the body has an integer of {len(text)} digits; at most {_MAX_DIGITS} are read",
            code="invalid_json",
        )
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Problem(
            400, "the body has a number that is too large for 64 bits", code="invalid_json"
        )
    return value


def _constant(name: str) -> Never:
    raise Problem(400, f"the body has {name}, which is not JSON", code="invalid_json")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)


def _check_text(value: Any) -> None:
    """Find a lone surrogate.

    :raises Problem: that names the field it is in.
    """
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        path, item = left.pop()
        if isinstance(item, str):
            if _is_text(item):
                continue
            raise Problem(
                400,
                f"{path or 'the body'} has a lone surrogate, half of a character that needs two "
                "(\\ud800 to \\udfff); remove it or replace it by \\ufffd",
                param=path or None,
                code="invalid_value",
            )
        if isinstance(item, list):
            left.extend((f"{path}[{index}]", each) for index, each in enumerate(item))
        elif isinstance(item, dict):
            for name, each in item.items():
                if not _is_text(name):
                    left.append((path or "a field's name", name))
                    continue
                left.append((f"{path}.{name[:64]}" if path else name[:64], each))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
