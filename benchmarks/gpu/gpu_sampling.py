"""Times of sampling on a GPU, at the vocabulary of Qwen2.5 and in bfloat16.

    python -P benchmarks/gpu/gpu_sampling.py [--json FILE] [--tune]

Each figure is the median time of one call in a CUDA graph of many, in microseconds. Logits are
`text`, a few likely tokens and a long tail as a language model gives them, or `flat`, thousands
of tokens about as likely as each other. With --tune, launch parameters are compared too. Without
a GPU, under TRITON_INTERPRET=1, small shapes run once, which shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ragserve.kernels.triton import sampling, steps

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
VOCAB = 152_064 if ON_GPU else 1000
HIDDEN = 3584
BATCHES = [1, 64, 256] if ON_GPU else [1, 3]
CALLS, REPEATS = 20, 9
PENALTIES = {"repetition": 1.1, "presence": 0.2, "frequency": 0.2}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("text", {"temperature": 0.0}),
    "temperature": ("text", {"temperature": 0.8}),
    "top_k=50": ("text", {"temperature": 0.8, "top_k": 50}),
    "top_p=0.9": ("text", {"temperature": 0.8, "top_p": 0.9}),
    "top_p=0.9, flat": ("flat", {"temperature": 0.8, "top_p": 0.9}),
    "min_p=0.05": ("text", {"temperature": 0.8, "min_p": 0.05}),
    "top_k, top_p, min_p": (
        "text",
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    ),
    "all of them, penalties": (
        "text",
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, **PENALTIES},
    ),
    "greedy, penalties": ("text", {"temperature": 0.0, **PENALTIES}),
    "greedy, logprobs=5": ("text", {"temperature": 0.0, "num_logprobs": 5}),
    "temperature, logprobs=20": ("text", {"temperature": 0.8, "num_logprobs": 20}),
}
TUNED = ["greedy", "temperature", "top_p=0.9", "top_p=0.9, flat", "top_k=50"]
LAUNCHES = [(32, 8, 64, 16), (16, 4, 64, 16), (32, 4, 64, 16), (32, 8, 32, 16), (32, 8, 32, 8)]
"""Tile and warps of the first and of the second kernel; the first line is what is used."""

Row = dict[str, Any]


def make_logits(batch: int, kind: str) -> Tensor:
    """[batch, VOCAB] bfloat16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    noise = torch.randn(batch, VOCAB, device=DEVICE, generator=generator)
    if kind == "flat":
        return (2.0 * noise).bfloat16()
    # Probabilities fall with rank as rank to the power of -1.6, in random order.
    rank = torch.arange(1, VOCAB + 1, device=DEVICE, dtype=torch.float32)
    logits = torch.empty_like(noise)
    logits.scatter_(1, noise.argsort(dim=1), (25.0 - 1.6 * rank.log()).expand(batch, -1))
    return logits.bfloat16()


def microseconds(function: Callable[[], object]) -> float:
    """Median time of one of many calls in a CUDA graph."""
    function()
    if not ON_GPU:
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


class Bench:
    """Sequences of one batch size, all with the same parameters."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.logits = {kind: make_logits(batch, kind) for kind in ("text", "flat")}
        self.state = steps.seat_state(batch, 4, DEVICE)
        self.workspace = sampling.sampler_workspace(batch, VOCAB, batch, 1, DEVICE)
        self.rows = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        self.positions = torch.full_like(self.rows, 2)

    def sample(self, kind: str, fields: dict[str, Any]) -> Callable[[], None]:
        """What to time: the sampler alone."""
        edits = not PENALTIES.keys().isdisjoint(fields)
        lines = [
            steps.seat_line(
                token=0,
                position=1,
                remaining=2**30,
                tail_block=0,
                tail_start=0,
                seed=seat,
                edits=seat if edits else -1,
                **fields,
            )
            for seat in range(self.batch)
        ]
        for seat, line in enumerate(lines):
            self.state.seats[seat] = torch.from_numpy(line)
        self.state.step.zero_()
        logits = self.logits[kind]

        def call() -> None:
            sampling.sample(
                logits,
                rows=self.rows,
                next_positions=self.positions,
                seats=self.state.seats,
                step=self.state.step,
                workspace=self.workspace,
            )

        return call

    def prepare(self) -> Callable[[], None]:
        """What to time: the beginning of a decode step."""
        self.sample("text", {})
        embedding = torch.zeros(1000, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        out = {
            "positions": torch.empty_like(self.rows),
            "kv_slots": self.rows.long(),
            "seq_lens": torch.empty_like(self.rows),
            "block_counts": torch.empty_like(self.rows),
            "hidden": torch.empty(self.batch, HIDDEN, dtype=torch.bfloat16, device=DEVICE),
        }

        def call() -> None:
            steps.prepare_decode(self.state, self.rows, embedding, block_size=16, **out)

        return call


def _row(batch: int, variant: str, function: Callable[[], object], launch: str = "") -> Row:
    row: Row = {"batch": batch, "vocab": VOCAB, "variant": variant}
    if launch:
        row["launch"] = launch
    try:
        return {**row, "us": round(microseconds(function), 2)}
    except Exception as error:  # one variant that fails leaves the others
        return {**row, "error": f"{type(error).__name__}: {error}"[:200]}


def measure() -> list[Row]:
    """All figures, as lines with batch, vocab, variant and microseconds (or the error)."""
    rows = []
    for batch in BATCHES:
        bench = Bench(batch)
        rows.append(_row(batch, "prepare_decode", bench.prepare()))
        text = bench.logits["text"]
        rows.append(_row(batch, "torch argmax", lambda text=text: text.argmax(-1)))
        rows += [_row(batch, name, bench.sample(*what)) for name, what in VARIANTS.items()]
    return rows


def tune() -> Iterator[Row]:
    """The same for some variants and several launch parameters."""
    names = ("_FIRST_TILE", "_FIRST_WARPS", "_SECOND_TILE", "_SECOND_WARPS")
    for batch in BATCHES:
        bench = Bench(batch)
        for launch in LAUNCHES:
            for name, value in zip(names, launch, strict=True):
                setattr(sampling, name, value)
            for variant in TUNED:
                call = bench.sample(*VARIANTS[variant])
                yield _row(batch, variant, call, launch="/".join(map(str, launch)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the lines to a file as well")
    parser.add_argument("--tune", action="store_true", help="compare launch parameters too")
    arguments = parser.parse_args()
    rows = measure()
    if arguments.tune:
        rows += tune()
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        name = f"{row['variant']} {row['launch']}" if "launch" in row else row["variant"]
        table.setdefault(name, {})[row["batch"]] = row.get("error") or f"{row['us']:.1f}"
    print(f"{'microseconds':40}", *(f"{f'B={batch}':>8}" for batch in BATCHES))
    for name, values in table.items():
        print(f"{name:40}", *(f"{values[batch]:>8}" for batch in BATCHES))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
