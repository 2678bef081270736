"""Whether requests that are accepted keep their latency while many others are refused.

    python -P benchmarks/web/overload.py
    python -P benchmarks/web/overload.py --seconds 5 --repeat 3 --json overload.json

One process holds the engine (the `device` of `web.py` with steps of 7 ms, 32 sequences, room for 16
requests to wait) and, in one event loop, uvicorn with a route that answers with `ragserve.web.sse`.
Another process holds the clients; each asks for an answer of 64 to 128 tokens, reads it, and asks
for the next. In phase A there are 32, which fit; in phase B 96 more. A client that is refused comes
again after what `Retry-After` says, but 0.25 s at most: impatient ones are the harder test. The
phases take turns on one open engine, and the one that begins changes from repeat to repeat.

Times are the clients'. TTFT is from sending the request that was accepted, not the refused ones
before it, to its first delta; TPOT from an answer's first delta to its last, over the tokens after
the first delta. Answers count if they end within the watched seconds. A request is lost if it got
neither its whole answer nor a 429 with `Retry-After`; the exit status is 1 if one was, or if the
engine has not refused just as many as its clients were told. It does not depend on any time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import json
import math
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from ragserve import Engine

# `python -P` leaves it out, for the repository's root has folders that shadow packages.
sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))

from web import Clock, Device, serving, stream

STEP_SECONDS = 0.007
NUM_SEQS, NUM_QUEUED = 32, 16
CLIENTS = {"A": NUM_SEQS, "B": NUM_SEQS + 96}
LEAST, MOST = 64, 128
"""Tokens of an answer."""
IMPATIENCE = 0.25
"""Most seconds that a refused client waits."""
PATIENCE = 30.0
"""Seconds that anything may take; later it is lost."""


# -- the clients' process -------------------------------------------------------------------------


@dataclass
class Seen:
    """What the clients saw: counts, and seconds."""

    begin: float
    end: float
    answers: int = 0
    tokens: int = 0
    refused: int = 0
    refused_ever: int = 0
    """Outside the watched seconds, too; as is what was lost."""
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def watching(self) -> bool:
        """Whether what happens now counts."""
        return self.begin <= time.perf_counter() < self.end


async def visit(port: int, delay: float, chance: random.Random, seen: Seen) -> None:
    """One client: an answer after the other, until the time is over or something is lost."""
    await asyncio.sleep(delay)
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < seen.end:
            async with asyncio.timeout(PATIENCE):
                length = chance.randint(LEAST, MOST)
                pause = await ask(reader, writer, length, seen)
            await asyncio.sleep(pause)
        writer.close()
    except (OSError, EOFError, ValueError, LookupError, TimeoutError) as error:
        seen.lost.append(f"{type(error).__name__}: {error!s:.200}")


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int, seen: Seen
) -> float:
    """Send one request and read what comes; gives the seconds to wait before the next.

    :raises ValueError: if it is neither the whole answer nor a proper refusal.
    """
    sent = time.perf_counter()
    writer.write(f"GET /stream?max_tokens={length} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if status.split()[1] != "200":
        await reader.readexactly(int(headers["content-length"]))
        if status.split()[1] != "429" or "retry-after" not in headers:
            raise ValueError(f"refused with {status} and {headers}")
        seen.refused += seen.watching()
        seen.refused_ever += 1
        return min(float(headers["retry-after"]), IMPATIENCE)
    deltas: list[tuple[float, int]] = []
    done, rest = False, b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        *frames, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n\n")
        for frame in frames:
            kind, _, data = frame.partition(b"\ndata: ")
            if kind == b"event: delta":
                count = len(json.loads(data)["text"])  # the device says a letter for each token
                deltas.append((time.perf_counter(), count))
                seen.tokens += count * seen.watching()
            elif kind == b"event: done":
                done = True
            else:
                raise ValueError(f"not an event that was expected: {frame!r}")
    await reader.readexactly(2)
    if not done or sum(count for _, count in deltas) != length:
        raise ValueError(f"of {length} tokens {deltas} came, {done=}")
    if seen.watching():
        (first, begun), (last, _) = deltas[0], deltas[-1]
        seen.answers += 1
        seen.ttft.append(first - sent)
        seen.tpot.append((last - first) / (length - begun))
    return 0.0


async def visit_all(order: dict[str, Any]) -> Seen:
    """All clients of a phase; they come one by one during half of the warm-up."""
    chance = random.Random(order["seed"])
    begin = time.perf_counter() + order["warm_up"]
    seen = Seen(begin, begin + order["seconds"])
    async with asyncio.TaskGroup() as tasks:
        for _ in range(order["clients"]):
            delay = chance.uniform(0.0, order["warm_up"] / 2)
            mine = random.Random(chance.random())
            tasks.create_task(visit(order["port"], delay, mine, seen))
    return seen


# -- the server's process -------------------------------------------------------------------------


async def phase(
    engine: Engine, options: argparse.Namespace, port: int, name: str, repeat: int
) -> dict[str, Any]:
    """Let the clients of one phase come, and sum up what they saw."""
    order = {"port": port, "clients": CLIENTS[name], "seed": repeat}
    order |= {"seconds": options.seconds, "warm_up": options.warm_up}
    clock, rejected = Clock(engine), sum(engine.statistics().num_rejected.values())
    before, children = clock.read(), _children_cpu()
    command = [sys.executable, "-P", __file__, "--clients", json.dumps(order)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(options.warm_up + options.seconds + 3 * PATIENCE):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the clients ended with status {process.returncode}")
    wall, *_, cpu, machine_cpu = (b - a for a, b in zip(before, clock.read(), strict=True))
    others = (machine_cpu - cpu - (_children_cpu() - children)) / wall
    async with asyncio.timeout(PATIENCE):
        while engine.statistics().blocks_used:
            await asyncio.sleep(0.01)
    await engine.check_integrity()
    seen = Seen(**json.loads(output))
    rejected = sum(engine.statistics().num_rejected.values()) - rejected
    row: dict[str, Any] = {"phase": name, "repeat": repeat, "others": others, "lost": seen.lost}
    row |= {"uncounted": rejected - seen.refused_ever}
    for count in ("answers", "refused", "tokens"):
        row[count] = getattr(seen, count) / options.seconds
    for what in ("tpot", "ttft"):
        for share in (50, 99):
            row[f"{what}_p{share}"] = 1e3 * _quantile(getattr(seen, what), share / 100)
    row["ttft_max"] = 1e3 * max(seen.ttft, default=math.nan)
    print(json.dumps(row), file=sys.stderr)
    return row


def _children_cpu() -> float:
    """CPU seconds of the clients' processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _quantile(values: Sequence[float], share: float) -> float:
    """The value that so many are not above; NaN if there are none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both phases `--repeat` times, turn and turn about."""
    rows: list[dict[str, Any]] = []
    app = Starlette(routes=[Route("/stream", stream)])
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            Engine.open(
                Device(STEP_SECONDS, depth=2, max_decode_steps=8),
                max_num_seqs=NUM_SEQS,
                max_queued_requests=NUM_QUEUED,
                max_num_batched_tokens=384,
                max_model_len=512,
            )
        )
        app.state.engine = engine
        port = await stack.enter_async_context(serving(app))
        # As an application should; or Python looks through all that was imported, now and then.
        gc.collect()
        gc.freeze()
        for repeat in range(options.repeat):
            for name in ("AB", "BA")[repeat % 2]:
                rows.append(await phase(engine, options, port, name, repeat))
    return rows


# -- the report -----------------------------------------------------------------------------------


def report(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The medians as Markdown, with the ratios and the bound."""
    a, b = ([row for row in rows if row["phase"] == name] for name in "AB")
    a.sort(key=lambda row: row["repeat"])
    b.sort(key=lambda row: row["repeat"])

    def line(name: str, mine: Sequence[dict[str, Any]]) -> str:
        def of(key: str, digits: int = 0) -> str:
            return f"{statistics.median(row[key] for row in mine):.{digits}f}"

        lost = sum(len(row["lost"]) for row in mine)
        cells = [name, of("answers", 1), of("refused", 1)]
        cells += [f"{of('tpot_p50', 2)} / {of('tpot_p99', 2)}"]
        cells += [f"{of('ttft_p50')} / {of('ttft_p99')} / {of('ttft_max')}"]
        return f"| {' | '.join([*cells, of('tokens'), str(lost), of('others', 2)])} |"

    def ratio(key: str) -> str:
        ratios = [y[key] / x[key] for x, y in zip(a, b, strict=True)]
        return f"{statistics.median(ratios):.3f} (most {max(ratios):.3f})"

    bound = statistics.median(
        MOST * y["tpot_p99"] + x["ttft_p99"] for x, y in zip(a, b, strict=True)
    )
    # NaN, of a phase without answers, stays NaN.
    turn = statistics.median(1e3 * NUM_QUEUED / (row["answers"] or math.nan) for row in b)
    shown = ["benchmarks/web/overload.py", *(Path(x).name if "/" in x else x for x in sys.argv[1:])]
    return "\n".join(
        [
            f"Measured on {datetime.date.today():%d %B %Y}: {os.cpu_count()} cores, Python "
            f"{platform.python_version()}; median of {options.repeat} of {options.seconds:g} s "
            f"each; `python -P {' '.join(shown)}`.",
            "",
            "| phase | answers/s | refused/s | TPOT p50 / p99 ms | TTFT p50 / p99 / max ms "
            "| output tok/s | lost | others' cores |",
            "|---|---|---|---|---|---|---|---|",
            line(f"A: {CLIENTS['A']} clients, which fit", a),
            line(f"B: {CLIENTS['B']} clients", b),
            "",
            f"TPOT in B over A, pair by pair: p50 {ratio('tpot_p50')}, p99 {ratio('tpot_p99')}. "
            f"TTFT in B: {NUM_QUEUED} places in the queue are {turn:.0f} ms at this rate of "
            f"answers, and at most {bound:.0f} ms: by then all {NUM_SEQS} that ran have ended "
            f"({MOST} tokens at B's TPOT p99, and A's TTFT p99).",
        ]
    )


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What should not have been."""
    found = [f"lost in {row['phase']}: {text}" for row in rows for text in row["lost"]]
    return found + [
        f"in {row['phase']} the engine refused {row['uncounted']:+d} more than clients were told"
        for row in rows
        if row["uncounted"]
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="watched, each time")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before that")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--clients", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print; or be the clients."""
    options = parse()
    if options.clients:
        gc.freeze()
        print(json.dumps(asdict(asyncio.run(visit_all(options.clients)))))
        return
    rows = asyncio.run(measure(options))
    print(report(options, rows))
    if options.json:
        content = {"options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1, default=str))
    found = faults(rows)
    print(*found[:20], sep="\n", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
