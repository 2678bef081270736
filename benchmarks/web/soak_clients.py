"""Clients of the soak test: good ones, careless ones, broken ones. They speak HTTP by hand.

A behaviour does one thing to the server and says what came of it: "ok" if it was answered fully
and rightly, "refused" if it was told to come again later where that is allowed, or "left" if it did
not wait for an answer. If something else came, it raises `Lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from soak_app import KEY, LIMITED_KEY, MAX_BODY, MAX_MODEL_LEN, MODEL, script

__all__ = ["BEHAVIOURS", "Behaviour", "Client", "Lost", "Visitor"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
RETRIES = 200
SYSTEM = "Answer as the brackets say, and in their own words only. "
"""Of half of the chats, so that there is something to find in the prefix cache."""


class Lost(Exception):
    """A request was not answered as it should have been."""


@dataclass
class Answer:
    """A response's status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def refused(self) -> bool:
        """Whether the server was full, and said when to come again."""
        return self.status in (429, 503) and "retry-after" in self.headers


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, port: int, *, small: bool = False) -> AsyncIterator[Client]:
        """Open it, and close it at the end.

        :param small: with little room for what is not read yet, so that the server has to wait.
        """
        if small:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            client = cls(*await asyncio.open_connection(sock=sock, limit=2048))
        else:
            client = cls(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            client.writer.close()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, pause: float = 0.0) -> Answer:
        """Read a whole response.

        :param pause: seconds between two reads of 4 KB.
        :raises Lost: if the connection ends before the response does.
        """
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.split("\r\n")[:-2]
            pairs = (line.split(":", 1) for line in lines)
            headers = {name.strip().lower(): value.strip() for name, value in pairs}
            if headers.get("transfer-encoding") == "chunked":
                body = b"".join([part async for part in self._chunks(pause)])
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        except asyncio.IncompleteReadError as error:
            raise Lost(f"the connection ended early, after {error.partial!r:.80}") from error
        return Answer(int(first.split()[1]), headers, body)

    async def _chunks(self, pause: float) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            left = size + 2
            while left:
                part = await self.reader.readexactly(min(left, 4096))
                left -= len(part)
                yield part if left else part[:-2]
            if pause:
                await asyncio.sleep(pause * size / 4096)
        await self.reader.readexactly(2)

    def reset(self) -> None:
        """Close it as a crash does, with a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = AUTHORIZED,
) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"{method} {path} HTTP/1.1", "host: soak"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@dataclass(frozen=True)
class Task:
    """A question, and the answer that has to come."""

    prompt: str
    max_tokens: int
    text: str
    reason: str
    system: bool

    @classmethod
    def make(cls, chance: random.Random, least: int = 4, most: int = 160) -> Task:
        """A random one. One of four is cut off by `max_tokens`."""
        length = chance.randint(least, most)
        seed = chance.randrange(64)
        cut = chance.random() < 0.25
        if cut:
            seed -= seed % 2  # in ASCII, so that it cannot be cut off within a character
        answer = script(seed, length)
        tokens = chance.randint(1, len(answer)) if cut else len(answer) + 1
        filler = "Once upon a time. " * chance.randrange(16)
        return cls(
            prompt=f"{filler}[[{seed}:{length}]]",
            max_tokens=tokens,
            text=answer[:tokens].decode(),
            reason="length" if cut else "stop",
            system=chance.random() < 0.5,
        )

    def chat(self, **fields: Any) -> bytes:
        """The body of a chat request."""
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        body = {"model": MODEL, "messages": messages, "max_tokens": self.max_tokens, **fields}
        return json.dumps(body).encode()

    def completion(self, **fields: Any) -> bytes:
        """The body of a completion request."""
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": self.max_tokens, **fields}
        return json.dumps(body).encode()

    def sse(self) -> bytes:
        """The request for `/stream`."""
        query = urlencode({"prompt": self.prompt, "max_tokens": self.max_tokens})
        return request("GET", f"/stream?{query}", headers={})

    def check(self, text: str, reason: object) -> None:
        """Compare an answer.

        :raises Lost: if it is another one.
        """
        if (text, reason) != (self.text, self.reason):
            raise Lost(f"{self} was answered with {text!r}, {reason!r}")

    def check_sse(self, body: bytes) -> None:
        """Compare typed events."""
        texts: list[str] = []
        last: tuple[str, dict[str, Any]] = ("", {})
        for frame in _frames(body):
            kind, data = frame.split("\n")
            last = (kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
            if last[0] == "delta":
                texts.append(last[1]["text"])
        if last[0] != "done":
            raise Lost(f"the last event is {last}")
        self.check("".join(texts), last[1]["finish_reason"])

    def check_chunks(self, body: bytes, *, chat: bool, choices: int = 1) -> None:
        """Compare an OpenAI stream."""
        frames = [frame.removeprefix("data: ") for frame in _frames(body)]
        if frames[-1:] != ["[DONE]"]:
            raise Lost(f"the last event is {frames[-1:]}")
        texts: dict[int, str] = dict.fromkeys(range(choices), "")
        reasons: dict[int, str] = {}
        for frame in frames[:-1]:
            chunk = json.loads(frame)
            for choice in chunk.get("choices", ()):
                index = choice["index"]
                text = choice["delta"].get("content") if chat else choice["text"]
                texts[index] += text or ""
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
        for index, text in texts.items():
            self.check(text, reasons.get(index))

    def check_whole(self, body: bytes, *, chat: bool) -> None:
        """Compare an OpenAI response."""
        data = json.loads(body)
        (choice,) = data["choices"]
        self.check(
            choice["message"]["content"] if chat else choice["text"], choice["finish_reason"]
        )
        counted = data["usage"]["completion_tokens"]
        if self.reason == "length" and counted != self.max_tokens:
            raise Lost(f"{self} was said to have {counted} tokens")


def _frames(body: bytes) -> list[str]:
    """The events of a body, without comments."""
    *frames, rest = body.decode().split("\n\n")
    if rest:
        raise Lost(f"the body ends within an event: {rest!r:.80}")
    return [frame for frame in frames if not frame.startswith(":")]


@dataclass
class Visitor:
    """Who behaves: where the server is, and a source of random numbers of its own."""

    port: int
    chance: random.Random
    num_refused: int = 0
    """Times that it was told to come again, and did."""

    def later(self, most: float) -> Awaitable[None]:
        """Wait for a random time, in seconds."""
        return asyncio.sleep(self.chance.random() * most)

    async def ask(self, wire: bytes, *, pause: float = 0.0, small: bool = False) -> Answer:
        """Ask until the server has room.

        :raises Lost: if it has none for very long, or its answer is not whole.
        """
        for _ in range(RETRIES):
            async with Client.connect(self.port, small=small) as client:
                await client.send(wire)
                answer = await client.answer(pause=pause)
            if not answer.refused:
                return answer
            self.num_refused += 1
            await self.later(0.5)
        raise Lost(f"refused {RETRIES} times")

    async def expect(self, status: int, wire: bytes) -> str:
        """Ask, for something that has to be refused with this status."""
        answer = await self.ask(wire)
        if answer.status != status:
            raise Lost(f"status {answer.status} instead of {status}: {answer.body!r:.200}")
        if status != 404 or wire.startswith(b"POST"):
            json.loads(answer.body)
        return "ok"


def _good(answer: Answer) -> bytes:
    if answer.status != 200:
        raise Lost(f"status {answer.status}: {answer.body!r:.200}")
    return answer.body


# -- those who want an answer ---------------------------------------------------------------------


async def events(visitor: Visitor) -> str:
    """Read `/stream` to its end."""
    task = Task.make(visitor.chance)
    task.check_sse(_good(await visitor.ask(task.sse())))
    return "ok"


async def chat(visitor: Visitor) -> str:
    """Wait for a whole chat answer."""
    task = Task.make(visitor.chance)
    answer = await visitor.ask(request("POST", CHAT, task.chat()))
    task.check_whole(_good(answer), chat=True)
    return "ok"


async def chat_stream(visitor: Visitor) -> str:
    """Read the stream of a chat."""
    task = Task.make(visitor.chance)
    answer = await visitor.ask(request("POST", CHAT, task.chat(stream=True)))
    task.check_chunks(_good(answer), chat=True)
    return "ok"


async def completion(visitor: Visitor) -> str:
    """Wait for a whole completion."""
    task = Task.make(visitor.chance)
    answer = await visitor.ask(request("POST", COMPLETIONS, task.completion()))
    task.check_whole(_good(answer), chat=False)
    return "ok"


async def completion_stream(visitor: Visitor) -> str:
    """Read the stream of a completion."""
    task = Task.make(visitor.chance)
    answer = await visitor.ask(request("POST", COMPLETIONS, task.completion(stream=True)))
    task.check_chunks(_good(answer), chat=False)
    return "ok"


async def keep_alive(visitor: Visitor) -> str:
    """Several chats over one connection, streams and others in turn."""
    async with Client.connect(visitor.port) as client:
        for number in range(visitor.chance.randint(2, 4)):
            task = Task.make(visitor.chance, most=60)
            streamed = number % 2 == 0
            await client.send(request("POST", CHAT, task.chat(stream=streamed)))
            answer = await client.answer()
            if answer.refused:
                visitor.num_refused += 1
            elif streamed:
                task.check_chunks(_good(answer), chat=True)
            else:
                task.check_whole(_good(answer), chat=True)
    return "ok"


async def slow_reader(visitor: Visitor) -> str:
    """Read a long stream of four choices more slowly than it is generated."""
    task = Task.make(visitor.chance, 300, 500)
    wire = request("POST", CHAT, task.chat(stream=True, n=4))
    answer = await visitor.ask(wire, pause=visitor.chance.uniform(0.02, 0.1), small=True)
    task.check_chunks(_good(answer), chat=True, choices=4)
    return "ok"


async def burst(visitor: Visitor) -> str:
    """Twenty at once, of which some may be refused; the others are answered."""

    async def one(task: Task) -> bool:
        async with Client.connect(visitor.port) as client:
            await client.send(request("POST", CHAT, task.chat()))
            answer = await client.answer()
        if not answer.refused:
            task.check_whole(_good(answer), chat=True)
        return answer.refused

    tasks = [Task.make(visitor.chance, most=40) for _ in range(20)]
    visitor.num_refused += sum(await asyncio.gather(*map(one, tasks)))
    return "ok"


async def limited(visitor: Visitor) -> str:
    """With a key that may have few requests under way."""
    task = Task.make(visitor.chance)
    headers = {"authorization": f"Bearer {LIMITED_KEY}"}
    async with Client.connect(visitor.port) as client:
        await client.send(request("POST", CHAT, task.chat(), headers))
        answer = await client.answer()
    if answer.refused:
        return "refused"
    task.check_whole(_good(answer), chat=True)
    return "ok"


# -- those who leave ------------------------------------------------------------------------------


async def leave_early(visitor: Visitor) -> str:
    """Leave before the first byte, most of the time."""
    task = Task.make(visitor.chance)
    wires = (
        task.sse(),
        request("POST", CHAT, task.chat()),
        request("POST", CHAT, task.chat(stream=True)),
    )
    async with Client.connect(visitor.port) as client:
        await client.send(visitor.chance.choice(wires))
        await visitor.later(0.03)
    return "left"


async def leave_midway(visitor: Visitor) -> str:
    """Leave after some events, by a close or a reset."""
    task = Task.make(visitor.chance, 40, 400)
    wires = (task.sse(), request("POST", CHAT, task.chat(stream=True)))
    async with Client.connect(visitor.port) as client:
        await client.send(visitor.chance.choice(wires))
        await client.reader.read(1)
        await visitor.later(0.2)
        if visitor.chance.random() < 0.5:
            client.reset()
    return "left"


async def leave_sending(visitor: Visitor) -> str:
    """Leave with a part of the body sent."""
    wire = request("POST", CHAT, Task.make(visitor.chance).chat())
    async with Client.connect(visitor.port) as client:
        await client.send(wire[: visitor.chance.randint(len(wire) // 2, len(wire) - 1)])
        await visitor.later(0.1)
    return "left"


async def half_open(visitor: Visitor) -> str:
    """Connect and say nothing, or not enough, for a while."""
    wire = request("POST", CHAT, b"{}")
    async with Client.connect(visitor.port) as client:
        await client.send(wire[: visitor.chance.choice((0, 10, 60))])
        await visitor.later(3.0)
    return "left"


async def half_closed(visitor: Visitor) -> str:
    """Ask, and close the own direction: to a server the same as leaving."""
    async with Client.connect(visitor.port) as client:
        await client.send(Task.make(visitor.chance).sse())
        client.writer.write_eof()
        with contextlib.suppress(OSError):
            while await client.reader.read(4096):
                pass
    return "left"


# -- those who ask wrongly ------------------------------------------------------------------------


async def bad_json(visitor: Visitor) -> str:
    """A body that is no JSON."""
    body = Task.make(visitor.chance).chat()
    cut = visitor.chance.randint(1, len(body) - 1)
    return await visitor.expect(400, request("POST", CHAT, body[:cut]))


async def bad_field(visitor: Visitor) -> str:
    """A value that is out of range, or a field that is missing."""
    task = Task.make(visitor.chance)
    wrong: tuple[dict[str, Any], ...] = (
        {"temperature": -1},
        {"max_tokens": 0},
        {"messages": None},
        {"stop": 5},
    )
    return await visitor.expect(
        400, request("POST", CHAT, task.chat(**visitor.chance.choice(wrong)))
    )


async def too_long(visitor: Visitor) -> str:
    """A prompt that is longer than the context."""
    body = {"model": MODEL, "prompt": "x" * (MAX_MODEL_LEN + 1), "max_tokens": 4}
    return await visitor.expect(400, request("POST", COMPLETIONS, json.dumps(body).encode()))


async def too_large(visitor: Visitor) -> str:
    """A body above the limit, its length announced or in chunks.

    The server may answer and close while it is being sent, and then the answer can be lost on the
    way; nothing else may come.
    """
    size = MAX_BODY + visitor.chance.randint(1, MAX_BODY)
    body = json.dumps({"model": MODEL, "prompt": "x" * size}).encode()
    if visitor.chance.random() < 0.5:
        wire = request("POST", COMPLETIONS, body)
    else:
        headers = {
            **AUTHORIZED,
            "content-type": "application/json",
            "transfer-encoding": "chunked",
        }
        wire = request("POST", COMPLETIONS, headers=headers) + b"".join(_as_chunks(body, 5000))
    try:
        answer = await visitor.ask(wire)
    except OSError:
        return "left"
    if answer.status != 413:
        raise Lost(f"status {answer.status} instead of 413: {answer.body!r:.200}")
    return "ok"


def _as_chunks(body: bytes, size: int) -> Iterable[bytes]:
    for start in range(0, len(body), size):
        part = body[start : start + size]
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


async def no_such_route(visitor: Visitor) -> str:
    """A path that is not there."""
    return await visitor.expect(404, request("GET", "/v1/nothing"))


async def no_such_model(visitor: Visitor) -> str:
    """A model that is not there."""
    body = Task.make(visitor.chance).chat(model="another")
    return await visitor.expect(404, request("POST", CHAT, body))


async def wrong_key(visitor: Visitor) -> str:
    """A key that is not accepted, or none."""
    headers = visitor.chance.choice(({}, {"authorization": "Bearer soak"}))
    body = Task.make(visitor.chance).chat()
    return await visitor.expect(401, request("POST", CHAT, body, headers))


Behaviour = Callable[[Visitor], Awaitable[str]]

BEHAVIOURS: dict[Behaviour, float] = {
    events: 14,
    chat: 12,
    chat_stream: 14,
    completion: 5,
    completion_stream: 5,
    keep_alive: 5,
    slow_reader: 1,
    burst: 1,
    limited: 4,
    leave_early: 8,
    leave_midway: 8,
    leave_sending: 4,
    half_open: 3,
    half_closed: 2,
    bad_json: 2,
    bad_field: 2,
    too_long: 2,
    too_large: 2,
    no_such_route: 2,
    no_such_model: 2,
    wrong_key: 2,
}
"""What clients do, and how often, in relation to each other."""
