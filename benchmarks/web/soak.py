"""Hours of bad weather in some minutes: nothing may be lost, nothing may grow.

    python -P benchmarks/web/soak.py --minutes 30 --json soak.json --write docs/performance.md

A server (`soak_app.py`: uvicorn, the OpenAI routes with keys and limits, an SSE route, a scripted
model with few blocks) and, in this process, `--workers` clients that behave at random, from a seed,
one thing after the other (`soak_clients.py`): they read streams and whole answers, quickly and
slowly, leave at any time, send bad, oversized and half requests, come twenty at once, have wrong
keys. Every answer that has to come is compared with what the model was told to say, every refusal
with the status that it has to have.

Of the server's process memory, open files and threads are read from /proc all the while. Growth is
the median of the last quarter of the samples less that of the first, after the warm-up. At the end
the clients stop, the engine has to hold no block and its pool to add up, files have to be as few as
before the first client, and SIGTERM has to close the engine and end the process. The exit status is
1 if something of all this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
# `python -P` leaves it out, for the repository's root has folders that shadow packages.
sys.path[:0] = [str(HERE), str(HERE.parent)]

from page import write_part  # noqa: E402
from soak_app import CLOSED  # noqa: E402
from soak_clients import BEHAVIOURS, Client, Lost, Visitor, request  # noqa: E402

PATIENCE = 60.0
"""Seconds that anything may take; later it is lost."""
NUM_SHOWN = 20
MORE_FILES = 3
"""Files that may be open at the end beyond those before the first client."""
MORE_THREADS = 8
"""Threads likewise, of pools that fill when they are first needed."""


@dataclass
class Sample:
    """What the server's process has, at some time."""

    seconds: float
    rss_mib: float
    files: int
    threads: int

    @classmethod
    def take(cls, pid: int, seconds: float) -> Sample:
        """Read it from /proc."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        return cls(
            seconds=round(seconds, 1),
            rss_mib=int(status["VmRSS"].split()[0]) / 1024,
            files=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"]),
        )


@dataclass
class Result:
    """What came of it."""

    seconds: float = 0.0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """By behaviour: how many ended "ok", "refused", "left", "lost"."""
    lost: list[str] = field(default_factory=list)
    """The first of them, in words."""
    num_refused: int = 0
    """Requests that were told to come again, and did."""
    before: Sample | None = None
    """When the server had started."""
    samples: list[Sample] = field(default_factory=list)
    after: Sample | None = None
    """When the clients had stopped."""
    state: dict[str, Any] = field(default_factory=dict)
    """The engine's counts at the end."""
    closed: bool = False
    """Whether the server closed its engine and ended when it was told to."""
    log: str = ""
    """What the server said."""

    def count(self, name: str, outcome: str) -> None:
        """Count an end."""
        self.counts.setdefault(name, Counter())[outcome] += 1

    def total(self, outcome: str) -> int:
        """How many ended like this."""
        return sum(counts[outcome] for counts in self.counts.values())

    def quarters(self, name: str) -> tuple[float, float]:
        """Medians of the first and the last quarter of the samples."""
        values = [getattr(sample, name) for sample in self.samples]
        size = max(1, len(values) // 4)
        return statistics.median(values[:size]), statistics.median(values[-size:])

    def growth(self, name: str) -> float:
        """From the first quarter to the last."""
        first, last = self.quarters(name)
        return last - first

    def faults(self, max_growth_mib: float) -> list[str]:
        """What is not as it has to be."""
        faults = []
        if lost := self.total("lost"):
            faults.append(f"{lost} requests were lost")
        if not self.total("ok"):
            faults.append("nothing was answered")
        if (growth := self.growth("rss_mib")) > max_growth_mib:
            faults.append(f"memory grew by {growth:.1f} MiB, more than {max_growth_mib:g}")
        if self.before and self.after:
            for name, more in (("files", MORE_FILES), ("threads", MORE_THREADS)):
                first, last = getattr(self.before, name), getattr(self.after, name)
                if last > first + more:
                    faults.append(f"{last} {name} at the end, {first} at the beginning")
        if self.state.get("broken"):
            faults.append(f"the block pool is broken: {self.state['broken']}")
        if used := self.state.get("blocks_used"):
            faults.append(f"{used} blocks are in use at the end")
        if not self.closed:
            faults.append("SIGTERM did not end the server as it should")
        if "Traceback" in self.log:
            faults.append("the server logged a traceback")
        return faults


class Server:
    """The server's process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self.port = port
        self.pid = process.pid

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls) -> AsyncIterator[Server]:
        """Start it; it is killed at the end if it still runs."""
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                str(HERE / "soak_app.py"),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
            try:
                line = await process.stdout.readline() if process.stdout else b""
                server = cls(process, int(line or 0), log)
                if not server.port:
                    raise RuntimeError(f"the server did not start: {server.log()}")
                yield server
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def state(self) -> dict[str, Any]:
        """The engine's counts."""
        async with Client.connect(self.port) as client:
            await client.send(request("GET", "/state"))
            state: dict[str, Any] = json.loads((await client.answer()).body)
            return state

    async def end(self) -> bool:
        """Tell it to end; whether it closed its engine and did so."""
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(PATIENCE):
                said, _ = await self._process.communicate()
        except TimeoutError:
            return False
        return said.decode().split() == [CLOSED]

    def log(self) -> str:
        """What it wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


async def soak(options: argparse.Namespace) -> Result:
    """Run it all."""
    result = Result()
    behaviours = {behaviour.__name__: behaviour for behaviour in BEHAVIOURS}
    weights = [*BEHAVIOURS.values()]

    async def work(number: int, port: int, until: float) -> None:
        visitor = Visitor(port, random.Random(f"{options.seed} {number}"))
        # Each begins elsewhere, so that even the shortest run has some of everything.
        todo = [name for at, name in enumerate(behaviours) if at % options.workers == number]
        while todo or time.monotonic() < until:
            name = todo.pop() if todo else visitor.chance.choices([*behaviours], weights)[0]
            try:
                async with asyncio.timeout(PATIENCE):
                    outcome = await behaviours[name](visitor)
            except (Lost, OSError, ValueError, TimeoutError) as error:
                outcome = "lost"
                if len(result.lost) < NUM_SHOWN:
                    result.lost.append(f"{name}: {error!r:.600}")
            result.count(name, outcome)
        result.num_refused += visitor.num_refused

    async with Server.start() as server:
        state = await server.state()
        result.before = Sample.take(server.pid, 0.0)
        started = time.monotonic()
        until = started + 60 * options.minutes
        sampling = asyncio.create_task(_sample(server, result, started, until, options))
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.workers):
                tasks.create_task(work(number, server.port, until))
        await sampling
        result.seconds = time.monotonic() - started
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while (state := await server.state())["blocks_used"] or state["num_waiting"]:
                    await asyncio.sleep(0.1)
                # Connections are closed by the other side a little later.
                most = result.before.files + MORE_FILES
                while Sample.take(server.pid, 0.0).files > most:
                    await asyncio.sleep(0.1)
        result.state = state
        result.after = Sample.take(server.pid, time.monotonic() - started)
        result.closed = await server.end()
        result.log = server.log()
    return result


async def _sample(
    server: Server, result: Result, started: float, until: float, options: argparse.Namespace
) -> None:
    """Look at the process, now and then, from the end of the warm-up until clients end."""
    await asyncio.sleep(options.warm_up * 60 * options.minutes)
    while not result.samples or time.monotonic() < until:
        result.samples.append(Sample.take(server.pid, time.monotonic() - started))
        await asyncio.sleep(options.every)


# -- the report -----------------------------------------------------------------------------------


def report(options: argparse.Namespace, result: Result) -> str:
    """A summary as Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "starlette"))
    faults = result.faults(options.max_growth_mib)
    total = sum(sum(counts.values()) for counts in result.counts.values())
    state = result.state
    lines = [
        f"Measured on {datetime.date.today():%d %B %Y}: {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}; {options.workers} clients for "
        f"{result.seconds / 60:.1f} minutes, seed {options.seed}.",
        "",
        f"{total} visits, {total / result.seconds:.0f} a second: {result.total('ok')} answered as "
        f"they should be, {result.total('left')} that left, {result.total('refused')} refused "
        f"within a limit, **{result.total('lost')} lost**. {result.num_refused} requests more were "
        f"told to come again and did. {state['generated_tokens']} tokens, "
        f"{state['num_preemptions']} preemptions, {state['num_evictions']} evictions.",
        "",
        "| of the server | first quarter | last quarter | growth |",
        "|---|---|---|---|",
    ]
    for name, title in (
        ("rss_mib", "memory, MiB"),
        ("files", "open files"),
        ("threads", "threads"),
    ):
        first, last = result.quarters(name)
        lines.append(f"| {title} | {first:.1f} | {last:.1f} | {last - first:+.1f} |")
    if result.before and result.after:
        lines += [
            "",
            f"Before the first client and after the last: {result.before.files} and "
            f"{result.after.files} open files, {result.before.threads} and {result.after.threads} "
            f"threads. Blocks in use at the end: {state['blocks_used']}.",
        ]
    lines += ["", "| visit | ok | refused | left | lost |", "|---|---|---|---|---|"]
    for name, counts in sorted(result.counts.items()):
        cells = (str(counts[outcome]) for outcome in ("ok", "refused", "left", "lost"))
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    lines += ["", f"Faults: {'; '.join(faults) or 'none'}."]
    return "\n".join(lines)


def summary(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "options": {key: str(value) for key, value in vars(options).items()},
        "faults": result.faults(options.max_growth_mib),
        "rss_growth_mib": result.growth("rss_mib"),
        # Counters are not copied by `asdict`.
        **asdict(replace(result, counts={})),
        "counts": result.counts,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=48, help="clients at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the time")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument(
        "--max-growth-mib", type=float, default=16.0, help="growth of memory that is no fault"
    )
    parser.add_argument("--json", type=Path, help="file for everything")
    parser.add_argument("--write", type=Path, help="Markdown file with the soak markers")
    return parser.parse_args(arguments)


def main() -> None:
    """Run it; the exit status is 1 if there are faults."""
    options = parse()
    result = asyncio.run(soak(options))
    text = report(options, result)
    print(text)
    for lost in result.lost:
        print(lost, file=sys.stderr)
    if "Traceback" in result.log:
        print(result.log[-10_000:], file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(summary(options, result), indent=1))
    if options.write:
        write_part(options.write, "soak", text)
    sys.exit(1 if result.faults(options.max_growth_mib) else 0)


if __name__ == "__main__":
    main()
