"""Builds, checks and measures everything on a GPU machine, in one run of some minutes.

    python -P benchmarks/gpu/gpu.py --out results --write docs/performance.md
    python -P benchmarks/gpu/gpu.py --stages w1,w3 --knob w1:max_num_seqs=256 --out results
    python -P benchmarks/gpu/gpu.py --from results --write docs/performance.md   # anywhere, no GPU
    python -P benchmarks/gpu/gpu.py --device cpu --dims tiny --stages w1,host-7b --out /tmp/try

Stages run one after the other in a worker process, each with a time limit; one that fails is
reported, and the next starts in a new worker. Figures are appended to `results.jsonl` of the
folder as they come, logs stand beside it, and a short table is printed at the end. The report
replaces what stands between the markers `<!-- gpu:begin -->` and `<!-- gpu:end -->`.

With `--peers DIR`, vLLM runs the same workloads afterwards on the same machine: `DIR/unpack.sh`
is sourced (it sets `S`, the folder of vLLM's packages), and `DIR/bench_vllm.py` run with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import faulthandler
import importlib.util
import json
import os
import platform
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# `python -P` leaves it out, for the repository's root has folders that shadow packages.
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_report import Results, read_records, section, short, write_section  # noqa: E402
from gpu_stages import GROUPS, STAGES, Bench  # noqa: E402

DEFAULT = (
    "ceilings,kernels,check,w1,w1-small,w2,w2-off,w3,w3-small,w4,host,consumers,numerics,memory"
)
CHECKS = {
    "kernels and engine": ("test_triton_*.py", "test_gpu.py", "test_gpu_runner.py"),
    "memory": ("test_gpu_memory.py",),
}
"""Test files of the stage `check`, in parts that run apart: the first in parallel, for most of it
is compiling, and on the CPU; the other has to be alone on the device."""
CHECK_SECONDS = 170.0

PEERS: dict[str, tuple[str, float]] = {
    "v7": ("--model qwen2.5-7b --works w1,w3,w2on --prefix 1 --reps 2", 240.0),
    "v7off": ("--model qwen2.5-7b --works w1,w3,w2off --prefix 0 --reps 2", 240.0),
    "v7on": ("--model qwen2.5-7b --works w2on --prefix 1 --reps 2", 150.0),
    "v05": ("--model qwen2.5-0.5b --works w1,w3 --prefix 0 --reps 2", 120.0),
    "v4": (
        "--model qwen3-0.6b --works w4 --prefix 0 --reps 2 --seqs 512 --batched 16384 --engine llm",
        120.0,
    ),
}
"""Arguments of vLLM's runner, and seconds it may take."""
PEER_WORKS = {
    ("qwen2.5-7b", "w1"): "w1",
    ("qwen2.5-7b", "w3"): "w3",
    ("qwen2.5-7b", "w2off"): "w2-off",
    ("qwen2.5-7b", "w2on"): "w2",
    ("qwen2.5-0.5b", "w1"): "w1-small",
    ("qwen2.5-0.5b", "w3"): "w3-small",
    ("qwen3-0.6b", "w4"): "w4",
}


# -- processes ------------------------------------------------------------------------------------


class Process:
    """A command whose output is read line by line until a deadline; in a group of its own.

    :param log: where its error output goes.
    """

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str] | None = None):
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def send(self, line: str) -> None:
        """Give it a line; a process that has died takes none, and `lines` will say so."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def lines(self, deadline: float) -> Iterator[str]:
        """What it prints, to the end.

        :param deadline: of `time.monotonic`.
        :raises TimeoutError: if it comes first.
        """
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return
            yield line

    def show_stacks(self) -> None:
        """Let a worker that hangs write its stacks to its log."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)

    def close(self, patience: float) -> None:
        """Close its input, and wait so long for its end; then kill it and all it started."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# -- the worker -----------------------------------------------------------------------------------


def worker(args: argparse.Namespace) -> None:
    """Run the stages that standard input names, and print a record a line."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # What libraries print must not get between the records.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(kind: str, **fields: Any) -> None:
        # Numbers may be numpy's.
        print(json.dumps({"kind": kind, **fields}, default=float), file=out, flush=True)

    bench = Bench(
        emit, device=args.device, dims=args.dims, repeat=args.repeat, segments=args.segments
    )
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            stage = line.strip()
            bench.knobs = knobs_of(args.knob, stage)
            started, error = time.monotonic(), ""
            try:
                runner.run(_run(bench, stage))
            except Exception as failure:
                traceback.print_exc()
                error = message_of(failure)
            emit("end", ok=not error, error=error, seconds=time.monotonic() - started)
        runner.run(bench.close())


async def _run(bench: Bench, stage: str) -> None:
    await STAGES[stage].run(bench)


def message_of(error: BaseException) -> str:
    """What went wrong, in a line; of a group, the first thing in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:600]


def knobs_of(given: Sequence[str], stage: str) -> dict[str, Any]:
    """Those of `NAME=VALUE` and `STAGE:NAME=VALUE` that are for a stage or its group.

    Values are JSON; what is not is a string.
    """
    group = next((name for name, stages in GROUPS.items() if stage in stages), None)
    knobs: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        where, colon, rest = name.partition(":")
        if colon and where not in (stage, group):
            continue
        try:
            knobs[rest if colon else name] = json.loads(value)
        except ValueError:
            knobs[rest if colon else name] = value
    return knobs


# -- the run --------------------------------------------------------------------------------------


class Run:
    """Stages in order, their records in a file, until the time is up."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._out: Path = args.out
        self._out.mkdir(parents=True, exist_ok=True)
        self._deadline = time.monotonic() + args.limit
        self._worker: Process | None = None
        self._used = False
        self._stage, self._attempt = "", 0.0

    def all(self) -> None:
        """Run what was asked for."""
        self.record("machine", **machine(self._args))
        for stage in stages_of(self._args.stages):
            self._one(stage)
        self._close_worker()
        if self._args.peers is not None:
            for name in self._args.peer_stages.split(","):
                self._one(f"peer-{name}")

    def record(self, kind: str, **fields: Any) -> None:
        """Append a record, and say in a line what it is."""
        record = {"kind": kind, "stage": self._stage, "attempt": self._attempt, **fields}
        with (self._out / "results.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        brief = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
        print(self._stage, kind, json.dumps(brief)[:300], flush=True)

    def _one(self, stage: str) -> None:
        self._stage, self._attempt = stage, time.time()
        left, started = self._deadline - time.monotonic(), time.monotonic()
        if left < 10:
            self.record("end", ok=False, error="skipped: no time was left", seconds=0.0)
            return
        self.record("start")
        if stage == "check":
            self._close_worker()
            limit, run = CHECK_SECONDS, self._check
        elif stage.startswith("peer-"):
            limit, run = PEERS[stage.removeprefix("peer-")][1], self._peer
        else:
            limit, run = STAGES[stage].limit, self._in_worker
        limit = min(limit, left)
        try:
            run(stage, time.monotonic() + limit)
        except TimeoutError:
            error = f"not done after {limit:.0f} s"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        else:
            return
        self.record("end", ok=False, error=error, seconds=time.monotonic() - started)

    # A stage ends with an "end" record of its own, or with an exception.

    def _in_worker(self, stage: str, deadline: float) -> None:
        if STAGES[stage].fresh and self._used:
            self._close_worker()
        if self._worker is None:
            command = [sys.executable, "-P", str(HERE / "gpu.py"), *sys.argv[1:], "--worker"]
            self._worker, self._used = Process(command, self._out / "worker.log"), False
        self._used = True
        self._worker.send(stage)
        try:
            for line in self._worker.lines(deadline):
                record = json.loads(line)
                self.record(**record)
                if record["kind"] == "end":
                    if not record["ok"]:
                        # A failed kernel leaves the device's context unusable.
                        self._close_worker(patience=5.0)
                    return
        except TimeoutError:
            self._worker.show_stacks()
            self._close_worker(patience=0.1)
            raise
        self._close_worker()
        raise RuntimeError(f"the worker died; {_tail(self._out / 'worker.log')}")

    def _close_worker(self, patience: float = 30.0) -> None:
        if self._worker is not None:
            self._worker.close(patience)
            self._worker = None

    def _check(self, stage: str, deadline: float) -> None:
        started, ok = time.monotonic(), True
        for name, patterns in CHECKS.items():
            tests = HERE.parents[1] / "tests"
            files = [str(path) for pattern in patterns for path in sorted(tests.rglob(pattern))]
            command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-rfE"]
            # Without the project's -q: each name is to be there even if the run is cut off.
            command += ["-o", "addopts=--import-mode=importlib", "-v", "-W", "default"]
            command += ["--tb", "short"]
            if len(files) > 1 and importlib.util.find_spec("xdist") is not None:
                command += ["-n", str(min(14, os.cpu_count() or 1))]
            lines: list[str] = []
            try:
                for line in self._lines_of([*command, *files], "check.log", deadline):
                    lines.append(line)
            finally:  # what failed before the time was up is known all the same
                result = parse_pytest(lines)
                self.record("check", tests=name, **result)
            counts = set(result["counts"])
            ok = ok and bool(counts) and counts <= {"passed", "skipped", "warnings", "warning"}
        self.record(
            "end", ok=ok, error="" if ok else "see check.log", seconds=time.monotonic() - started
        )

    def _peer(self, stage: str, deadline: float) -> None:
        peers = shlex.quote(str(self._args.peers))
        arguments = PEERS[stage.removeprefix("peer-")][0]
        script = (
            f'. {peers}/unpack.sh && PYTHONPATH="$S" exec python3 {peers}/bench_vllm.py {arguments}'
        )
        # Its packages are its own, and must not meet ours.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_CACHE_DIR")}
        started, found = time.monotonic(), 0
        for line in self._lines_of(["bash", "-c", script], "peers.log", deadline, env):
            if line.startswith("RESULT "):
                self.record("peer", **peer_figures(json.loads(line.removeprefix("RESULT "))))
                found += 1
        if not found:
            raise RuntimeError(f"no results; {_tail(self._out / 'peers.log')}")
        self.record("end", ok=True, error="", seconds=time.monotonic() - started)

    def _lines_of(
        self,
        command: Sequence[str],
        log: str,
        deadline: float,
        env: dict[str, str] | None = None,
    ) -> Iterator[str]:
        process = Process(command, self._out / log, env)
        try:
            with (self._out / log).open("a") as file:
                for line in process.lines(deadline):
                    print(line, file=file, flush=True)
                    yield line
        finally:
            process.close(3.0)


def stages_of(text: str) -> list[str]:
    """Names of stages and groups, as stages in the order that opens the fewest engines.

    :raises ValueError: if one is not known.
    """
    wanted: set[str] = set()
    for name in filter(None, text.split(",")):
        if name not in STAGES and name not in GROUPS and name != "check":
            known = ", ".join([*STAGES, *GROUPS, "check"])
            raise ValueError(f"{name!r} is no stage; there are {known}")
        wanted.update(GROUPS.get(name, (name,)))
    order = [*(s for s in STAGES if s == "ceilings" or s in GROUPS["kernels"]), "check"]
    order += [stage for stage in STAGES if stage not in order]
    return [stage for stage in order if stage in wanted]


_OUTCOME_FIRST = re.compile(
    r"(?:\[gw\d+\] \[ *\d+%\] )?(?P<outcome>FAILED|ERROR) (?P<test>\S+\.py\b.*?)"
    r"(?P<why> - .*)?$"
)
"""A line of pytest's summary, or of `-v` with several workers."""
_OUTCOME_LAST = re.compile(r"(?P<test>\S+\.py::.*?) (?P<outcome>FAILED|ERROR) +\[ *\d+%\]$")
"""A line of `-v` with one."""


def parse_pytest(lines: Sequence[str]) -> dict[str, Any]:
    """Counts of a run of pytest by outcome, and the tests that failed (twenty at most).

    The counts are empty if it was cut off; what had failed by then is named if it ran with `-v`.
    """
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}
    for line in lines:
        found = _OUTCOME_FIRST.match(line.rstrip()) or _OUTCOME_LAST.match(line.rstrip())
        if found is not None:
            why = found.groupdict().get("why") or ""
            name = f"{found['outcome']} {found['test']}"
            if why or name not in failed:
                failed[name] = (name + why)[:160]
        elif re.search(r"\d+ \w+.* in [\d.]+s", line):
            outcomes = r"(\d+) (passed|failed|errors?|skipped|warnings?|deselected)"
            counts = {outcome: int(count) for count, outcome in re.findall(outcomes, line)}
    return {"counts": counts, "failed": list(failed.values())[:20]}


def peer_figures(line: dict[str, Any]) -> dict[str, Any]:
    """A result line of vLLM's runner, in our words."""
    figures: dict[str, Any] = {
        "work": PEER_WORKS[line["model"], line["work"]],
        "output_tok_s": line["out_tok_s"],
        "requests_s": line["req_s"],
        "wall_s": line["wall_s"],
    }
    for name in ("ttft", "tpot", "itl"):
        percentiles = line.get(f"{name}_ms")
        if isinstance(percentiles, dict):
            figures |= {f"{name}_{key}_ms": value for key, value in percentiles.items()}
    return figures


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on, besides us."""
    device, driver = platform.processor() or platform.machine(), ""
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
            device, driver = (part.strip() for part in listed.splitlines()[0].split(","))
    versions = {"Python": platform.python_version()}
    if driver:
        versions["driver"] = driver
    for name in ("torch", "triton", "transformers", "numpy"):
        with contextlib.suppress(ModuleNotFoundError):
            versions[name] = version(name)
    shown = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    return {
        "date": f"{datetime.date.today():%d %B %Y}",
        "device": device,
        "cores": os.cpu_count(),
        "versions": versions,
        "command": shlex.join(["python", "-P", "benchmarks/gpu/gpu.py", *shown]),
    }


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-6:])[-600:]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--stages", default=DEFAULT, help=f"of {', '.join([*STAGES, *GROUPS, 'check'])}"
    )
    parser.add_argument("--out", type=Path, help="folder for records and logs")
    parser.add_argument("--limit", type=float, default=475.0, help="seconds for everything")
    parser.add_argument("--repeat", type=int, default=2, help="runs of a workload")
    parser.add_argument(
        "--knob",
        action="append",
        default=[],
        help="[STAGE:]NAME=VALUE, a field of EngineConfig; may be repeated",
    )
    parser.add_argument("--segments", action="store_true", help="RAG prompts as segments")
    parser.add_argument("--peers", type=Path, help="folder of vLLM's runner")
    parser.add_argument("--peer-stages", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dims", choices=("tiny",), help="tiny only tries the benchmark")
    parser.add_argument(
        "--from", dest="source", nargs="+", type=Path, help="report on saved records, run nothing"
    )
    parser.add_argument("--write", type=Path, help="Markdown file with the gpu markers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.out is None and args.source is None:
        parser.error("give --out to run, or --from to report")
    try:
        stages_of(args.stages)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    if args.source is None:
        Run(args).all()
    results = Results.of(read_records(args.source or [args.out]))
    text = section(results)
    print(text)
    if args.write is not None:
        write_section(args.write, text)
    if args.source is None:
        print("\n" + "=" * 80 + "\n\n" + short(results))


if __name__ == "__main__":
    main()
