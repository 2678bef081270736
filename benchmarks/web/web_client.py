"""Many SSE clients in one process, as lean as Python can be; driven by lines on standard input.

    python -P benchmarks/web/web_client.py 127.0.0.1 8000

Each order is a line of JSON, and so is its answer, on standard output:

    {"start": 64, "path": "/stream", "lengths": [[900], ...]}
        Open so many streams; answered when each has had its first event. A client asks for answers
        of its own lengths, in tokens, one after the other and from the beginning again.
    {"mark": true}      Events, bytes, finished answers, CPU and clock up to now.
    {"stop": true}      Close all connections. Says what the first client's bytes were: its frames
                        are taken apart completely, the others' events are only counted.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

EVENT = b"event: delta\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"
KEPT = len(EVENT) - 1  # bytes of a read that may be the beginning of an event's line
PATIENCE = 60.0


class Client:
    """One connection, and what came over it."""

    def __init__(
        self, address: tuple[str, int], path: str, lengths: Sequence[int], keep: bool
    ) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setblocking(False)
        self.events = self.bytes = self.answers = 0
        self.kept: list[bytes] | None = [] if keep else None
        self._path, self._lengths, self._tail = path, lengths, b""
        self.ask()

    def ask(self) -> None:
        """Send the next request."""
        length = self._lengths[self.answers % len(self._lengths)]
        head = f"GET {self._path}?max_tokens={length} HTTP/1.1\r\nhost: bench\r\n\r\n"
        self.socket.send(head.encode())

    def read(self) -> None:
        """Take what is there.

        :raises RuntimeError: if the server has closed the connection.
        """
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the server closed the connection after {self.bytes} bytes")
        self.bytes += len(data)
        if self.kept is not None:
            self.kept.append(data)
        data = self._tail + data
        self.events += data.count(EVENT)
        self._tail = data[-KEPT:]
        if data.endswith(LAST_CHUNK):
            self.answers += 1
            self._tail = b""
            self.ask()


class Clients:
    """All of them, in one thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._selector = selectors.DefaultSelector()
        self._clients: list[Client] = []
        self._orders = b""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> None:
        """Obey orders until standard input ends."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data.read()
                elif not self._obey():
                    return
                else:
                    break  # what else was ready may be closed now

    def _obey(self) -> bool:
        data = os.read(0, 1 << 20)
        *orders, self._orders = (self._orders + data).split(b"\n")
        for order in orders:
            print(json.dumps(self._answer(json.loads(order))), flush=True)
        return bool(data)

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if "start" in order:
            for number in range(order["start"]):
                client = Client(
                    self._address, order["path"], order["lengths"][number], keep=number == 0
                )
                self._clients.append(client)
                self._selector.register(client.socket, selectors.EVENT_READ, client)
            self._until_all_have_begun()
            return {"started": len(self._clients)}
        if "stop" in order:
            kept = b"".join(self._clients[0].kept or ())
            for client in self._clients:
                self._selector.unregister(client.socket)
                client.socket.close()
            self._clients = []
            return check(kept)
        return {
            "events": sum(client.events for client in self._clients),
            "bytes": sum(client.bytes for client in self._clients),
            "answers": sum(client.answers for client in self._clients),
            "cpu": time.process_time(),
            "clock": time.perf_counter(),
        }

    def _until_all_have_begun(self) -> None:
        until = time.monotonic() + PATIENCE
        while not all(client.events for client in self._clients):
            if time.monotonic() > until:
                raise RuntimeError(f"not every stream had an event within {PATIENCE} s")
            for key, _ in self._selector.select(1.0):
                if key.data is not None:
                    key.data.read()


def check(data: bytes) -> dict[str, Any]:
    """Take HTTP responses with chunked bodies of events apart; the last one may be cut off.

    :raises ValueError: if they are not what they should be.
    """
    deltas = answers = 0
    texts: list[str] = []
    while data:
        head, found, data = data.partition(b"\r\n\r\n")
        if not found:
            break
        if not head.startswith(b"HTTP/1.1 200 ") or b"text/event-stream" not in head:
            raise ValueError(f"not a stream of events: {head!r}")
        body, data, complete = _chunks(data)
        frames = body.split(b"\n\n")
        for frame in frames[:-1]:  # what follows the last empty line is nothing, or cut off
            if frame.startswith(EVENT):
                texts.append(json.loads(frame.removeprefix(EVENT).removeprefix(b"data: "))["text"])
                deltas += 1
            elif not frame.startswith((b"event: done\n", b": ")):
                raise ValueError(f"not an event that was expected: {frame!r}")
        if complete:
            answers += 1
            if not frames[-2].startswith(b"event: done\n"):
                raise ValueError(f"the last event of an answer is {frames[-2]!r}")
    return {"deltas": deltas, "answers": answers, "characters": sorted(set("".join(texts)))}


def _chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """The body, what follows it, and whether its end was there."""
    body: list[bytes] = []
    position = 0
    while (end := data.find(b"\r\n", position)) >= 0:
        size = int(data[position:end], 16)
        begin, position = end + 2, end + 4 + size
        if position > len(data):
            break
        if size == 0:
            return b"".join(body), data[position:], True
        body.append(data[begin : begin + size])
    return b"".join(body), b"", False


if __name__ == "__main__":
    Clients((sys.argv[1], int(sys.argv[2]))).run()
