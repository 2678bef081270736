"""How long the event loop stands still for bodies that no client would send.

    python -P benchmarks/web/hostile_bodies.py

A ticker sleeps for 1 ms in the loop that answers; the longest time between two ticks, less that
millisecond, is the gap. Each body is sent several times, and the median of the longest gaps is
shown, beside that of a small request, which the machine's other work causes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx

from ragserve import Engine
from ragserve.testing import ScriptedModel
from ragserve.web import openai_app

TICK: Final = 0.001
SIZE: Final = 4 * 1024 * 1024 - 4096
CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"


def completion(**fields: Any) -> tuple[str, bytes]:
    """A body of `/v1/completions`."""
    body = {"model": "m", "prompt": "Say", "max_tokens": 1, **fields}
    return COMPLETION, json.dumps(body, separators=(",", ":")).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    """A body of `/v1/chat/completions`."""
    question = [{"role": "user", "content": "Say"}]
    body = {"model": "m", "messages": question, "max_tokens": 1, **fields}
    return CHAT, json.dumps(body, separators=(",", ":")).encode()


def filled(name: str, item: bytes, size: int = SIZE) -> tuple[str, bytes]:
    """A body whose field `name` is a list of the same item, up to `size`."""
    items = b",".join([item] * (size // (len(item) + 1)))
    return CHAT, b'{"model":"m","%s":[%s]}' % (name.encode(), items)


def text(piece: bytes, size: int = SIZE) -> tuple[str, bytes]:
    """A body with one long string, where none is taken: its tokenizing is not measured here."""
    return COMPLETION, b'{"model":"m","prompt":"x","x":"%s"}' % (piece * (size // len(piece)))


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """(what it is, path, body)."""
    message = {"role": "user", "content": "x"}
    yield "a small request", *completion()
    yield "1.4 M stop_token_ids", *completion(stop_token_ids=[1] * 1_400_000)
    yield "300,000 logit_bias", *completion(logit_bias={f"{i}": 1 for i in range(300_000)})
    yield "1 M allowed_token_ids", *completion(allowed_token_ids=[10] * 1_000_000)
    yield "420,000 stop strings", *completion(stop=["abcdef"] * 420_000)
    yield "90,000 messages", *chat(messages=[message] * 90_000)
    yield "1 M prompt ids", *completion(prompt=[10] * 1_000_000)
    yield "echo of 3.7 MiB", *completion(prompt="x" * 3_800_000, echo=True)
    yield "echo of 1 MiB, n=2", *completion(prompt="x" * 1_000_000, echo=True, n=2)
    yield "199,000 prompt ids", *completion(prompt=[10] * 199_000)
    yield "199,000 small floats", *filled("x", b"1.5e3", 199_000 * 6)
    yield "199,000 strings", *filled("x", b'"ab"', 199_000 * 5)
    yield "99,000 empty lists", *filled("x", b"[]", 99_000 * 3)
    yield "99,000 empty objects", *filled("x", b"{}", 99_000 * 3)
    yield (
        "60,000 content parts",
        *chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 20}] * 2048),
    )
    yield "nested 2 M deep", CHAT, b"[" * (SIZE // 2)
    yield "brackets in a string", *text(b"[{,")
    yield "escapes in a string", *text(b"\\n")
    yield "\\u escapes in a string", *text(b"\\u00e9")
    yield "surrogate pairs, then half a one", *text(b"\\ud83d\\ude00")
    yield "quotes in a string, and commas", *text(b'\\",')
    yield "1.3 M strings", *filled("x", b'""')
    yield "commas alone", CHAT, b"," * SIZE
    yield "an integer of 4 M digits", CHAT, b'{"model":' + b"1" * SIZE + b"}"
    yield "64 KiB of empty strings", *filled("x", b'""', 65_000)
    yield "64 KiB of integers", *filled("x", b"1", 65_000)
    yield "64 KiB of objects", *filled("x", b"{}", 65_000)


async def longest_gap(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[float, int]:
    """Seconds that the loop stood still at most while a body was answered, and the status."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            gaps.append(now - last - TICK)
            last = now

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK)
    gaps.clear()
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=body, headers=headers)
    await asyncio.sleep(2 * TICK)
    ticker.cancel()
    return max(gaps), response.status_code


async def measure(repeats: int, only: str) -> None:
    """Print the table."""
    async with Engine.open(ScriptedModel("ok", max_model_len=200_000)) as engine:
        app = openai_app({"m": engine})
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=60
        ) as client:
            print("| body | MiB | status | gap, ms | least, ms | answered in, ms |")
            print("|---|---|---|---|---|---|")
            for name, path, body in bodies():
                if only not in name:
                    continue
                gaps, times, status = [], [], 0
                for _ in range(repeats):
                    began = time.perf_counter()
                    gap, status = await longest_gap(client, path, body)
                    times.append(time.perf_counter() - began)
                    gaps.append(gap)
                print(
                    f"| {name} | {len(body) / 2**20:.2f} | {status} "
                    f"| {statistics.median(gaps) * 1e3:.1f} | {min(gaps) * 1e3:.1f} "
                    f"| {statistics.median(times) * 1e3:.0f} |"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of a body's name")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.repeats, arguments.only))
