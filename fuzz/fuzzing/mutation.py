"""How an input becomes another one: bytes, JSON values, lines of HTTP."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["mutate_bytes", "mutate_http", "mutate_json", "mutate_json_text", "mutate_text"]

INTEGERS = (0, 1, 2, 3, 7, 8, 16, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
LARGE = (2**32, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
STRINGS = ("", " ", "a", "\0", "\ud83d", "é", "🙂", "../x", "/etc/passwd", "%s", "{{", "<|end|>")
_NEST, _MANY = "@nest@", "@many@"
"""Stand for values that `json.dumps` could not write, or that are better written as text."""


_MOST_TO_PARSE = 1 << 16


def _value(rng: random.Random, words: Sequence[str]) -> Any:
    """A JSON value of any kind, of which most are of the wrong one."""
    kind = rng.randrange(14)
    if kind < 3:
        return rng.choice(INTEGERS) * rng.choice((1, 1, -1))
    if kind < 4:
        return rng.choice(LARGE) * rng.choice((1, -1))
    if kind < 5:
        return rng.choice((0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 1.0, 2.5))
    if kind < 8:
        return rng.choice((None, True, False, [], {}, [None], [[]], {"": None}))
    if kind < 10:
        return rng.choice(STRINGS)
    if kind < 12:
        return rng.choice(words) if words else "x"
    if kind < 13:
        return rng.choice(STRINGS) * rng.choice((10, 300, 5000))
    return f"{rng.choice((_NEST, _MANY))}{rng.choice((100, 2000, 20_000))}"


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    """Every (container, key) of a value."""
    stack = [value]
    while stack:
        one = stack.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one)
        for key, child in items:
            found.append((one, key))
            if isinstance(child, dict | list) and len(found) < 2000:
                stack.append(child)


def mutate_json(rng: random.Random, value: Any, words: Sequence[str] = ()) -> Any:
    """The value with one thing in it changed; it may be changed in place.

    :param words: names of fields, and values, that mean something to the reader.
    """
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        _places(value, found)
    if not found or rng.random() < 0.02:
        return _value(rng, words)
    container, key = rng.choice(found)
    child = container[key]
    what = rng.randrange(10)
    if what < 4:
        container[key] = _value(rng, words)
    elif what < 5:
        del container[key]
    elif what < 7 and isinstance(container, dict):
        container[rng.choice(words) if words and rng.random() < 0.9 else "x"] = (
            child if rng.random() < 0.3 else _value(rng, words)
        )
    elif what < 8 and isinstance(child, int | float) and not isinstance(child, bool):
        container[key] = child + rng.choice((1, -1, 0.5, 1000, -1000))
    elif what < 8 and isinstance(child, str):
        container[key] = mutate_text(rng, child, words)
    elif what < 9:
        small = not isinstance(child, dict | list) and len(str(child)) < 100
        container[key] = [child] * rng.choice((1, 2, 5, 200 if small else 3))
    else:
        other, name = rng.choice(found)
        container[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else child
    return value


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _written(rng: random.Random, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8)

    def spell(match: re.Match[str]) -> str:
        count = int(match[2])
        if match[1] == _NEST:
            return "[" * count + "]" * count
        return "[" + ",".join(["1"] * count) + "]"

    text = re.sub(r'"(@nest@|@many@)(\d{1,6})"', spell, text)
    return text.encode("utf-8", "surrogatepass")


def mutate_json_text(rng: random.Random, data: bytes, words: Sequence[str] = ()) -> bytes:
    """A JSON text with some of its values changed; now and then, with some of its bytes."""
    # What has grown is not made larger yet: a few mutations may multiply it by hundreds.
    if rng.random() < 0.1 or len(data) > _MOST_TO_PARSE:
        return mutate_bytes(rng, data)
    try:
        value = json.loads(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = mutate_json(rng, value, words)
        return _written(rng, value)
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data)


def mutate_text(rng: random.Random, text: str, words: Sequence[str] = ()) -> str:
    """A text with a piece of it dropped, repeated or replaced."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice((0, 1, 2, 5, 20)))
    piece = rng.choice(
        ("", text[start:end] * 2, rng.choice(STRINGS), rng.choice(list(words) or ["x"]))
    )
    return text[:start] + piece + text[end:]


def mutate_bytes(rng: random.Random, data: bytes, *, head: int | None = None) -> bytes:
    """Bytes with some of them changed.

    :param head: the part of them to change; None: any.
    """
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(result)
        limit = size if head is None else min(head, size)
        at = rng.randrange(limit + 1)
        what = rng.randrange(8)
        if what == 0 and at < size:
            result[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < size:
            result[at] = rng.randrange(256)
        elif what in (2, 3):  # a number where there may have been one
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(INTEGERS + LARGE) % 2 ** (8 * width)
            if rng.random() < 0.5:
                at = at // width * width
            result[at : at + width] = number.to_bytes(width, "little")
        elif what == 4:
            del result[at : at + rng.choice((1, 2, 8, 64))]
        elif what == 5:
            result[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        elif what == 6:
            result[at:at] = result[at : at + rng.choice((1, 8, 64))]
        elif rng.random() < 0.3:
            del result[at:]
    return bytes(result)


HEADERS = (
    b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Type: multipart/form-data; boundary=x",
    b"Content-Encoding: gzip",
    b"Content-Length: 0",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 1_0",
    b"Transfer-Encoding: chunked",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Upgrade: websocket\r\nConnection: upgrade",
    b"Authorization: Bearer key-1",
    b"Authorization: Bearer \xff\xfe",
    b"Authorization: Basic Og==",
    b"Authorization:",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"traceparent: 00-" + b"f" * 500,
    b"tracestate: " + b"a=1," * 200,
    b"X-Request-Id: " + b"\xff" * 20,
    b"X-Request-Id: " + b"r" * 5000,
    b"Accept: */*;q=\xff",
    b"Host: \xff",
    b"Range: bytes=0-",
    b"Origin: null",
    b"Cookie: " + b"c" * 2000,
    b"X: " + b"y" * 70_000,
    b"baggage: " + b"a=%ff," * 50,
)
LINES = (
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH", b"CONNECT", b"PRI"
)  # fmt: skip
PATHS = (
    b"/v1/chat/completions", b"/v1/completions", b"/v1/models", b"/v1/models/scripted",
    b"/v1/models/%00", b"/v1/models/%ff%fe", b"/v1/models/a/b/../../c",
    b"/v1/models/" + b"m" * 2000,
    b"/v1/models/%F0%9F%99%82", b"/health", b"/metrics", b"/metrics?name[]=x&%ff=%ff", b"/", b"*",
    b"//", b"/v1/chat/completions/", b"/keyed/v1/models", b"/keyed/v1/chat/completions",
    b"/keyed/v1/completions", b"/keyed/metrics", b"http://x/v1/models", b"/v1/completions?stream=1",
)  # fmt: skip


def mutate_http(
    rng: random.Random,
    data: bytes,
    words: Sequence[str],
    grammar: Sequence[Callable[[random.Random], bytes]] = (),
) -> bytes:
    """A request with its body, a header or its first line changed; its length mostly right.

    :param grammar: each makes a new valid body.
    """
    if rng.random() < 0.06:
        return mutate_bytes(rng, data)
    if rng.random() < 0.03:
        return data + data  # pipelined
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    what = rng.random()
    if what < 0.08:
        first = lines[0].split(b" ")
        if rng.random() < 0.5:
            first[0] = rng.choice(LINES)
        else:
            first[1:2] = [rng.choice(PATHS)]
        lines[0] = b" ".join(first)
    elif what < 0.2:
        at = rng.randrange(1, len(lines) + 1)
        if rng.random() < 0.3 and at < len(lines):
            lines[at] = mutate_bytes(rng, lines[at])
        else:
            lines.insert(at, rng.choice(HEADERS))
    elif what < 0.3 and grammar:
        body = rng.choice(grammar)(rng)
    else:
        body = mutate_json_text(rng, body, words)
    if rng.random() < 0.95:
        lines = [line for line in lines if not line.lower().startswith(b"content-length")]
        if not any(line.lower().startswith(b"transfer-encoding") for line in lines):
            lines.append(b"Content-Length: %d" % len(body))
        elif rng.random() < 0.9 and not re.match(rb"[0-9a-f]+\r\n", body):
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
