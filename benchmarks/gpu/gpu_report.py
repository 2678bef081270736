"""Records of the GPU benchmark -> the GPU section of the performance page, and a short table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_workloads import WORKS, Ceilings, floor
from page import write_part

__all__ = ["Results", "read_records", "section", "short", "write_section"]

Record = dict[str, Any]

_NOTES = ("start", "end", "open")
"""Kinds of records that are no figures."""


@dataclass(slots=True)
class Results:
    """Of every stage its last attempt that gave figures, and how last attempts failed."""

    stages: dict[str, list[Record]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    machines: list[Record] = field(default_factory=list)
    opens: list[Record] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Results:
        """Sort records out; a later attempt at a stage replaces an earlier one."""
        results = cls()
        attempts: dict[str, dict[float, list[Record]]] = {}
        for record in records:
            if record["kind"] == "machine":
                results.machines.append(record)
            else:
                attempts.setdefault(record["stage"], {}).setdefault(record["attempt"], []).append(
                    record
                )
        for stage, by_time in attempts.items():
            ordered = [by_time[at] for at in sorted(by_time)]
            with_figures = [a for a in ordered if any(r["kind"] not in _NOTES for r in a)]
            if with_figures:
                chosen = with_figures[-1]
                results.stages[stage] = [r for r in chosen if r["kind"] not in _NOTES]
                results.opens += [r for r in chosen if r["kind"] == "open"]
            last = [r for r in ordered[-1] if r["kind"] == "end"]
            if not last:
                results.failures[stage] = "did not end"
            elif not last[-1]["ok"]:
                results.failures[stage] = last[-1]["error"]
        return results

    def rows(self, stage: str, kind: str) -> list[Record]:
        """Records of one kind from one stage."""
        return [r for r in self.stages.get(stage, ()) if r["kind"] == kind]

    @property
    def ceilings(self) -> Ceilings | None:
        """Rates of the chip, if they were measured."""
        measured = self.rows("ceilings", "ceilings")
        if not measured:
            return None
        return Ceilings(1e9 * measured[-1]["read_gb_s"], 1e12 * measured[-1]["matmul_tflop_s"])

    def ours(self, work: str) -> dict[str, float]:
        """Medians of a workload's runs; empty if there are none."""
        return _medians(self.rows(work, "run"))

    def peer(self, work: str) -> dict[str, float]:
        """Medians of what the other engine did on a workload, where both ran it."""
        runs = [
            record
            for records in self.stages.values()
            for record in records
            if record["kind"] == "peer" and record["work"] == work
        ]
        return _medians(runs)


def _medians(runs: Sequence[Record]) -> dict[str, float]:
    skipped = ("attempt", "stage", "kind", "work")
    keys = dict.fromkeys(key for run in runs for key in run if key not in skipped)
    return {key: statistics.median(r[key] for r in runs if key in r) for key in keys}


def read_records(folders: Sequence[Path]) -> list[Record]:
    """All records of the `*.jsonl` files in some folders, in the order of folders and names."""
    return [
        json.loads(line)
        for folder in folders
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines()
        if line
    ]


def write_section(path: Path, text: str) -> None:
    """Put `text` between the markers of a file.

    :raises ValueError: if the markers are not there.
    """
    write_part(path, "gpu", text)


# -- the section ----------------------------------------------------------------------------------


def section(results: Results) -> str:
    """Everything as Markdown."""
    parts = [
        _machines(results),
        _goals(results),
        _latencies(results),
        _ceilings(results),
        *(_rows(results, stage) for stage in results.stages),
        _host(results),
        _consumers(results),
        _numerics(results),
        _memory(results),
        _opens(results),
        _checks(results),
        _failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def short(results: Results) -> str:
    """What matters most, to be read at the end of a log."""
    parts = (_checks, _host, _consumers, _numerics, _memory, _goals, _failures)
    return "\n\n".join(text for part in parts if (text := part(results)))


def _machines(results: Results) -> str:
    seen: dict[str, Record] = {r["command"]: r for r in results.machines}
    about = dict.fromkeys(
        f"{r['date']}: {r['device']}, {r['cores']} CPU cores, "
        + ", ".join(f"{name} {number}" for name, number in r["versions"].items())
        for r in seen.values()
    )
    commands = dict.fromkeys(f"`{command}`" for command in seen)
    if not seen:
        return ""
    return f"Measured on {'; '.join(about)}. Run as {', '.join(commands)}."


def _goals(results: Results) -> str:
    rows = []
    for work in WORKS.values():
        ours, peer = results.ours(work.name), results.peer(work.name)
        if not ours and not peer:
            continue
        best = floor(work, results.ceilings or Ceilings())
        for goal in work.goals:
            mine, theirs = ours.get(goal.metric), peer.get(goal.metric)
            ratio = None
            if mine and theirs:
                ratio = theirs / mine if goal.at_most else mine / theirs
            rows.append(
                (
                    f"{work.name.upper()}: {work.title}",
                    goal.label,
                    _number(mine),
                    _number(theirs),
                    _number(ratio),
                    _number(goal.vllm),
                    _number(best.get(goal.metric)),
                    f"{'≤' if goal.at_most else '≥'} {_number(goal.target)}",
                    "–" if mine is None else "yes" if goal.met(mine) else "no",
                )
            )
    columns = (
        "work",
        "figure",
        "ours",
        "vLLM beside it",
        "ratio",
        "vLLM, another day",
        "floor",
        "target",
        "met",
    )
    return _table(columns, rows)


def _latencies(results: Results) -> str:
    rows = []
    for name in WORKS:
        for engine, of, runs in (
            ("ragserve", results.ours(name), len(results.rows(name, "run"))),
            ("vLLM", results.peer(name), 0),
        ):
            if not of:
                continue
            rows.append(
                (
                    name.upper(),
                    engine + (f", {runs} runs" if runs else ""),
                    _number(of["output_tok_s"]),
                    _number(of.get("requests_s")),
                    _join(of, "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"),
                    _join(of, "tpot_p50_ms", "tpot_p99_ms"),
                    _join(of, "itl_p50_ms", "itl_p99_ms", "itl_max_ms"),
                    _number(of.get("wall_s")),
                    _number(of.get("cached_tokens")),
                )
            )
    columns = (
        "work",
        "engine",
        "output tok/s",
        "requests/s",
        "TTFT p50 / p90 / p99 ms",
        "TPOT p50 / p99 ms",
        "ITL p50 / p99 / max ms",
        "wall s",
        "cached tokens",
    )
    return _table(columns, rows)


def _ceilings(results: Results) -> str:
    measured = results.rows("ceilings", "ceilings")
    if not measured:
        return ""
    r = measured[-1]
    text = (
        f"Ceilings, in the same run: copying {_number(r['copy_gb_s'])} GB/s (read and written), "
        f"reading {_number(r['read_gb_s'])} GB/s, a bfloat16 product of 8192³ "
        f"{_number(r['matmul_tflop_s'])} TFLOP/s"
    )
    if "graph_kernel_us" in r:
        text += (
            f"; enqueuing an operation {_number(r['eager_enqueue_us'])} µs, a graph "
            f"{_number(r['graph_enqueue_us'])} µs, a graph of one small kernel and waiting for it "
            f"{_number(r['graph_round_trip_us'])} µs, each further small kernel of a graph "
            f"{_number(r['graph_kernel_us'])} µs, reading 128 numbers back "
            f"{_number(r['read_back_us'])} µs"
        )
    return text + "."


def _rows(results: Results, stage: str) -> str:
    """A table with the keys that a module gave its rows; one for each set of keys."""
    tables: dict[tuple[str, ...], list[Record]] = {}
    for record in results.rows(stage, "row"):
        row = record["row"]
        tables.setdefault(tuple(row), []).append(row)
    texts = [
        _table(
            tuple(key.replace("_", " ") for key in keys),
            [tuple(_number(row[key]) for key in keys) for row in rows],
        )
        for keys, rows in tables.items()
    ]
    if not texts:
        return ""
    return f"{stage.replace('-', ': ').capitalize()}\n\n" + "\n\n".join(texts)


def _host(results: Results) -> str:
    rows = [
        (
            r["dims"],
            str(r["sequences"]),
            _number(r["step_ms"]),
            _number(r.get("busy_ms")),
            _number(r["thread_ms"]),
            _number(r.get("host_ms")),
            _number(r["tokens_per_delta"]),
            _percent(r.get("idle_share")),
            _percent(r.get("stall_share")),
        )
        for stage in results.stages
        for r in results.rows(stage, "steady")
    ]
    columns = (
        "steady decoding",
        "sequences",
        "step ms",
        "GPU busy ms",
        "engine thread ms",
        "host's work ms",
        "tokens a delta",
        "GPU idle",
        "in gaps over 20 µs",
    )
    return _table(columns, rows)


def _consumers(results: Results) -> str:
    rows = []
    for stage in results.stages:
        by_mode: dict[str, list[Record]] = {}
        for r in results.rows(stage, "consumers"):
            by_mode.setdefault(r["mode"], []).append(r)
        if {"drain", "sse"} - set(by_mode):
            continue
        alone, sse = (
            {
                key: statistics.median(r[key] for r in by_mode[mode])
                for key in ("output_tok_s", "events", "lag_p50_ms", "lag_p99_ms", "lag_max_ms")
            }
            for mode in ("drain", "sse")
        )
        kept = sse["output_tok_s"] / alone["output_tok_s"]
        rows.append(
            (
                by_mode["sse"][0]["dims"],
                _number(alone["output_tok_s"]),
                _number(sse["output_tok_s"]),
                _number(kept),
                "≥ 0.95",
                "yes" if kept >= 0.95 else "no",
                _number(sse["events"]),
                _join(alone, "lag_p50_ms", "lag_p99_ms", "lag_max_ms"),
                _join(sse, "lag_p50_ms", "lag_p99_ms", "lag_max_ms"),
            )
        )
    columns = (
        "64 consumers",
        "alone tok/s",
        "with SSE tok/s",
        "kept",
        "target",
        "met",
        "events",
        "loop lag p50 / p99 / max ms, alone",
        "with SSE",
    )
    return _table(columns, rows)


def _numerics(results: Results) -> str:
    found = results.rows("numerics", "numerics")
    if not found:
        return ""
    rows = [
        (
            r["pair"],
            f"{r['answers_differ']} of {r['answers']} ({r['answers_differ'] / r['answers']:.0%})",
            f"{r['answers_differ']} of {r['tokens']:,} ({r['flip_share']:.2%})",
            _number(r["logprob_apart_p50"]),
            _number(r["logprob_apart_max"]),
            _percent(r["cached_tokens"] / r["prompt_tokens"]),
        )
        for r in found
    ]
    columns = (
        "a small trained model, greedy",
        "answers that differ",
        "tokens flipped, up to the first difference",
        "log-probability apart, median",
        "largest",
        "prompt tokens from the cache",
    )
    return (
        "What batch and cache change in bfloat16: other tile shapes and splits of a sum are chosen "
        "for other numbers of rows and keys, and round differently; nothing else differs.\n\n"
        + _table(columns, rows)
    )


def _memory(results: Results) -> str:
    rows = results.rows("memory", "memory")
    if not rows:
        return ""
    taken, kept = (
        ", ".join(f"{row[key]:,.1f}" for row in rows) for key in ("taken_mib", "kept_mib")
    )
    return (
        f"GPU memory, opened and closed {len(rows)} times in a row: taken {taken} MiB, still taken "
        f"after closing {kept} MiB (target: at most 16)."
    )


def _opens(results: Results) -> str:
    names = list(dict.fromkeys(phase for r in results.opens for phase in r["seconds"]))
    rows = [
        (
            r["stage"],
            r["dims"],
            *(_number(r["seconds"].get(phase)) for phase in names),
            _number(r["total_s"]),
            _number(r["blocks"]),
        )
        for r in results.opens
    ]
    columns = (
        "opened for",
        "dims",
        *(f"{name} s" for name in names),
        "until ready s",
        "blocks",
    )
    return _table(columns, rows)


def _checks(results: Results) -> str:
    parts = []
    for r in results.rows("check", "check"):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in r["counts"].items())
        parts.append(f"{r['tests']}: {counts or 'no summary'}")
        parts += r["failed"]
    return "Tests on the GPU: " + "; ".join(parts) + "." if parts else ""


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    lines = [f"- {stage}: {error}" for stage, error in results.failures.items()]
    return "Stages that failed:\n\n" + "\n".join(lines)


# -- formatting -----------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing without rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _join(figures: Mapping[str, float], *keys: str) -> str:
    if not any(key in figures for key in keys):
        return "–"
    return " / ".join(_number(figures.get(key)) for key in keys)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: Any) -> str:
    """Three digits that count, or more of a large number; other things as they are."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
