"""Times of the Triton attention kernels on a GPU, beside torch's attention without pages.

    python -P benchmarks/gpu/gpu_attention.py [--sweep] [--only decode prefill] [--seconds 55]

Heads of Qwen2.5-7B: 28 of queries, 4 of keys, 128 elements, in bfloat16; random blocks of 16
slots. Every case first checks a config against attention in float32, then times it: launches in
one CUDA graph, which take turns on enough pools that none is still in the L2 cache; the median
over replays. A config that fails is reported and left out. With `--sweep`, many configs are tried
beside the one that is used.

`measure` gives the figures to a larger benchmark, with their targets. Without a GPU,
`TRITON_INTERPRET=1` and `--tiny` run the same code on small cases, for its logic only.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ragserve import kernels
from ragserve.kernels.triton import attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 28, 4, 128, 16
ROTATED_BYTES = 200 << 20
"""Keys and values that launches take turns on; some times the L2 cache."""

_TORCH = "torch, no pages"

READ_BYTES_PER_SECOND = 4.3e12
"""What an H200 reads at most, about; for the floor that is printed."""


@dataclass(frozen=True)
class Decode:
    """Sequences with one query each; `segments` are the tokens of each one's segments."""

    batch: int
    segments: tuple[int, ...]

    def __str__(self) -> str:
        holes = f" in {len(self.segments)} segments" if len(self.segments) > 1 else ""
        return f"decode {self.batch} x {sum(self.segments)}{holes}"


@dataclass(frozen=True)
class Prefill:
    """One prompt, computed at once."""

    segments: tuple[int, ...]

    def __str__(self) -> str:
        holes = f" in {len(self.segments)} segments" if len(self.segments) > 1 else ""
        return f"prefill {sum(self.segments)}{holes}"


Case = Decode | Prefill

CASES: tuple[Case, ...] = (
    Decode(64, (4096,)),
    Decode(64, (520,) * 8),
    Decode(64, (1152,)),
    Decode(128, (1152,)),
    Decode(32, (3136,)),
    Decode(8, (3000,)),
    Decode(1, (3000,)),
    Decode(1, (32768,)),
    Prefill((1024,)),
    Prefill((3000,)),
    Prefill((500,) * 6),
    Prefill((8192,)),
)
DECODE_TARGETS = {
    Decode(64, (4096,)): 135.0,
    Decode(1, (3000,)): 9.0,
    Decode(1, (32768,)): 25.0,
}
"""Microseconds, at most."""
PREFILL_TARGET = 0.7
"""Of the speed of torch's attention in the same run, at least."""
TINY: tuple[Case, ...] = (Decode(2, (40, 30)), Decode(1, (600,)), Prefill((40, 21)))

_DEFAULT = attention.decode_config(1 << 30, HEAD_DIM, torch.bfloat16)
_FEW = attention.decode_config(1, HEAD_DIM, torch.bfloat16)
_ONE_WARP = replace(_DEFAULT, num_warps=1)
_WIDE = replace(_DEFAULT, block_n=64, num_stages=3)

# Splits: None for what `choose_splits` says.
MANY_DECODES: tuple[tuple[attention.DecodeConfig, int | None], ...] = (
    (_DEFAULT, None),
    (_DEFAULT, 1),
    (_DEFAULT, 2),
    (_DEFAULT, 3),
    (_ONE_WARP, 1),
    (_ONE_WARP, 2),
    (_ONE_WARP, 3),
    (replace(_ONE_WARP, num_stages=5), 2),
    (replace(_DEFAULT, num_stages=3), 1),
    (replace(_DEFAULT, num_stages=3), 2),
    (replace(_DEFAULT, num_stages=5), 2),
    (replace(_DEFAULT, block_n=16, num_warps=1, num_stages=6), 2),
    (_WIDE, 1),
    (_WIDE, 2),
)
FEW_DECODES: tuple[tuple[attention.DecodeConfig, int | None], ...] = (
    (_FEW, None),
    (_FEW, 66),
    (_FEW, 99),
    (_FEW, 132),
    (replace(_FEW, num_stages=3), 66),
    (replace(_FEW, block_n=128), 33),
    (replace(_FEW, block_n=128), 66),
    (replace(_FEW, num_warps=2), 132),
    (replace(_FEW, num_warps=2), 198),
    (replace(_FEW, block_n=32, num_warps=2), 198),
)
PREFILLS = (
    attention.prefill_config(HEAD_DIM, torch.bfloat16),
    attention.PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=2),
    attention.PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=4),
    attention.PrefillConfig(block_m=128, block_n=64, num_warps=4, num_stages=3),
    attention.PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
    attention.PrefillConfig(block_m=256, block_n=64, num_warps=16, num_stages=3),
)


class Paged:
    """Sequences of equal segments in shuffled blocks of several pools, all alike.

    :ivar layers: the pools; each launch of a graph takes the next one.
    :ivar starts: positions at which a sequence's blocks start.
    """

    def __init__(
        self, batch: int, segments: Sequence[int], *, dtype: torch.dtype, device: str, rotate: bool
    ) -> None:
        self.batch, self.length = batch, sum(segments)
        ends = list(itertools.accumulate(segments))
        begins = [
            start
            for end, length in zip(ends, segments, strict=True)
            for start in range(end - length, end, BLOCK)
        ]
        self.starts = np.array([*begins, self.length])
        self.num_blocks = len(begins)
        shape = (batch * self.num_blocks, KV_HEADS, BLOCK, HEAD_DIM)
        size = 2 * math.prod(shape) * dtype.itemsize
        count = max(1, math.ceil(ROTATED_BYTES / size)) if rotate else 1
        self.layers = [
            kernels.KVLayer(
                torch.randn(shape, dtype=dtype, device=device),
                torch.randn(shape, dtype=dtype, device=device),
            )
            for _ in range(count)
        ]
        order = torch.randperm(shape[0], device=device).to(torch.int32)
        self.tables = order.view(batch, self.num_blocks)
        for index, filled in enumerate(np.diff(self.starts).tolist()):
            if filled < BLOCK:
                blocks = self.tables[:, index].long()
                for layer in self.layers:
                    layer.keys[blocks, :, filled:] = layer.values[blocks, :, filled:] = math.nan
        starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.block_starts = starts.expand(batch, -1).contiguous()

        def int32(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.seq_lens = int32(self.length).expand(batch).contiguous()
        self.block_counts = int32(self.num_blocks).expand(batch).contiguous()
        self.query_starts = int32(0, self.length)

    def dense(self, sequence: int) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values in the first pool, [KV_HEADS, length, HEAD_DIM]."""
        slots = np.concatenate(
            [np.arange(n) + i * BLOCK for i, n in enumerate(np.diff(self.starts).tolist())]
        )
        index = torch.from_numpy(slots).to(self.tables.device)

        def gather(pool: Tensor) -> Tensor:
            blocks = pool[self.tables[sequence].long()].transpose(0, 1)
            return blocks.reshape(KV_HEADS, -1, HEAD_DIM)[:, index]

        return gather(self.layers[0].keys), gather(self.layers[0].values)


class Bench:
    """The device, and how things are timed on it."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
        self.device = "cuda" if self.on_gpu else "cpu"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.num_sms = (
            torch.cuda.get_device_properties(0).multi_processor_count if self.on_gpu else 132
        )

    def microseconds(self, launch: Callable[[int], object], count: int) -> float:
        """Of one launch, the median of many graphs with some turns of launches 0 to count - 1."""
        if not self.on_gpu:
            start = time.perf_counter()
            launch(0)
            return (time.perf_counter() - start) * 1e6
        turns = max(1, 16 // count)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch(0)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(turns):
                    for i in range(count):
                        launch(i)
            times: list[float] = []
            spent = 0.0
            while len(times) < 7 or (spent < 60e3 and len(times) < 40):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(float(begin.elapsed_time(end)) * 1e3 / (turns * count))
                spent += times[-1] * turns * count
        return statistics.median(times[2:])

    def decode(self, case: Decode, configs: Sequence[Any]) -> Iterator[dict[str, Any]]:
        paged = self._paged(case.batch, case.segments)
        query = torch.randn(case.batch, HEADS, HEAD_DIM, dtype=self.dtype, device=self.device)
        out = torch.empty_like(query)
        workspace = attention.decode_workspace(
            case.batch, HEADS, KV_HEADS, HEAD_DIM, num_sms=self.num_sms, device=self.device
        )
        checked = sorted({0, case.batch // 2, case.batch - 1})
        expected = torch.stack([_oracle(query[s, None], *paged.dense(s))[0] for s in checked])
        floor = 2 * case.batch * paged.length * KV_HEADS * HEAD_DIM * self.dtype.itemsize
        for config, wanted in configs:
            num_splits = wanted or attention.choose_splits(
                case.batch, KV_HEADS, paged.length, self.num_sms, config=config
            )

            def launch(
                i: int, config: attention.DecodeConfig = config, num_splits: int = num_splits
            ) -> None:
                attention.paged_decode(
                    query,
                    paged.layers[i],
                    out,
                    rows=paged.rows,
                    seq_lens=paged.seq_lens,
                    block_counts=paged.block_counts,
                    block_tables=paged.tables,
                    block_starts=paged.block_starts,
                    workspace=workspace,
                    num_splits=num_splits,
                    scale=HEAD_DIM**-0.5,
                    config=config,
                )

            name = (
                f"n{config.block_n} w{config.num_warps} s{config.num_stages} "
                f"t{config.split_tokens} {'fused' if config.fused else 'apart'} x{num_splits}"
            )
            yield self._row(case, name, launch, paged, lambda: out[checked], expected, floor=floor)
        if self.on_gpu:
            shape = (case.batch, KV_HEADS, -1, HEAD_DIM)

            def torch_launch(i: int) -> Tensor:
                key, value = paged.layers[i].keys.view(shape), paged.layers[i].values.view(shape)
                return F.scaled_dot_product_attention(
                    query[:, :, None], key, value, enable_gqa=True
                )

            yield self._row(case, _TORCH, torch_launch, paged, floor=floor)

    def prefill(self, case: Prefill, configs: Sequence[Any]) -> Iterator[dict[str, Any]]:
        paged = self._paged(1, case.segments)
        n = paged.length
        query = torch.randn(n, HEADS, HEAD_DIM, dtype=self.dtype, device=self.device)
        out = torch.empty_like(query)
        expected = _oracle(query, *paged.dense(0))
        flops = 2 * n * (n + 1) * HEADS * HEAD_DIM
        for config in configs:
            tiles = attention.prefill_tiles(
                [n], [0], [paged.starts[:-1]], group=HEADS // KV_HEADS, block_m=config.block_m
            )
            on_device = [
                torch.from_numpy(x).to(self.device) for x in (tiles.rows, tiles.queries, tiles.ends)
            ]

            def launch(
                i: int,
                config: attention.PrefillConfig = config,
                tiles: list[Tensor] = on_device,
            ) -> None:
                attention.paged_prefill(
                    query,
                    paged.layers[i],
                    out,
                    rows=paged.rows,
                    query_starts=paged.query_starts,
                    seq_lens=paged.seq_lens,
                    tile_rows=tiles[0],
                    tile_queries=tiles[1],
                    tile_ends=tiles[2],
                    block_tables=paged.tables,
                    block_starts=paged.block_starts,
                    scale=HEAD_DIM**-0.5,
                    config=config,
                )

            name = f"m{config.block_m} n{config.block_n} w{config.num_warps} s{config.num_stages}"
            yield self._row(case, name, launch, paged, lambda: out, expected, flops=flops)
        if self.on_gpu:
            heads = query.transpose(0, 1)[None].contiguous()
            key, value = (x[None].contiguous() for x in paged.dense(0))

            def torch_launch(_: int) -> Tensor:
                return F.scaled_dot_product_attention(
                    heads, key, value, is_causal=True, enable_gqa=True
                )

            yield self._row(case, _TORCH, torch_launch, paged, flops=flops)

    def _paged(self, batch: int, segments: Sequence[int]) -> Paged:
        return Paged(batch, segments, dtype=self.dtype, device=self.device, rotate=self.on_gpu)

    def _row(
        self,
        case: Case,
        name: str,
        launch: Callable[[int], object],
        paged: Paged,
        output: Callable[[], Tensor] | None = None,
        expected: Tensor | None = None,
        *,
        floor: int = 0,
        flops: int = 0,
    ) -> dict[str, Any]:
        """Check and time one config; a failure becomes the row's `error`."""
        row: dict[str, Any] = {"case": str(case), "config": name}
        try:
            start = time.perf_counter()
            launch(0)
            if self.on_gpu:
                torch.cuda.synchronize()
            row["first_s"] = time.perf_counter() - start
            if output is not None and expected is not None:
                row["error_max"] = float((output().float() - expected).abs().max())
                limit = 2e-2 if self.dtype == torch.bfloat16 else 1e-4
                if not row["error_max"] < limit:
                    return row | {"error": f"wrong by {row['error_max']:.3g}"}
            row["us"] = self.microseconds(launch, len(paged.layers))
        except Exception as error:  # one config must not end the run
            return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        if floor:
            row["gb_per_s"] = floor / row["us"] / 1e3
            row["of_floor"] = floor / READ_BYTES_PER_SECOND * 1e6 / row["us"]
        if flops:
            row["tflop_per_s"] = flops / row["us"] / 1e6
        return row


def _oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in float32 of the last tokens of a sequence: [T, HEADS, HEAD_DIM]."""
    group = HEADS // KV_HEADS
    key, value = (x.float().repeat_interleave(group, 0)[None] for x in (key, value))
    heads = query.float().transpose(0, 1)[None]
    output = F.scaled_dot_product_attention(heads, key, value, is_causal=len(query) > 1)
    return output[0].transpose(0, 1)


def measure() -> list[dict[str, Any]]:
    """The config that is used beside torch's attention, a row a case: `us` and `torch_us` with
    the target and whether it is met, or an `error`."""
    cases = CASES if Bench().on_gpu else TINY
    rows = run(cases, seconds=18)
    return [_compared(case, [row for row in rows if row["case"] == str(case)]) for case in cases]


def _compared(case: Case, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the rows that `run` gave for a case."""
    ours = next(row for row in rows if row["config"] != _TORCH)
    if "error" in ours:
        return {key: ours[key] for key in ("case", "config", "error")}
    us = ours["us"]
    torch_us = next((row.get("us") for row in rows if row["config"] == _TORCH), None)
    result = {"case": str(case), "us": us}
    result |= {key: ours[key] for key in ("gb_per_s", "tflop_per_s") if key in ours}
    result |= {"torch_us": torch_us, "of_torch": torch_us / us if torch_us else None}
    target, met = "–", None
    if isinstance(case, Prefill):
        target = f"≥ {PREFILL_TARGET:.0%} of torch"
        met = torch_us / us >= PREFILL_TARGET if torch_us else None
    elif case in DECODE_TARGETS:
        target, met = f"≤ {DECODE_TARGETS[case]:g} µs", us <= DECODE_TARGETS[case]
    return result | {"target": target, "met": "–" if met is None else "yes" if met else "no"}


def run(
    cases: Sequence[Case],
    *,
    sweep: bool = False,
    seconds: float = 55,
    report: Callable[[dict[str, Any]], object] = lambda row: None,
) -> list[dict[str, Any]]:
    """Check and time configs of every case.

    :param sweep: all of them; else the one that is used.
    :param seconds: no other config is begun after this long.
    :param report: told each row as it is made.
    :returns: rows with `case`, `config`, and either `error` or `us` with `gb_per_s` (and
        `of_floor`, the share of the memory's speed) or `tflop_per_s`; `error_max` against
        float32; `first_s`, of the first call, which compiles.
    """
    torch.manual_seed(0)
    bench = Bench()
    end = time.perf_counter() + seconds
    rows = []
    for case in cases:
        if isinstance(case, Decode):
            decodes = FEW_DECODES if case.batch <= 16 else MANY_DECODES
            made = bench.decode(case, decodes if sweep else decodes[:1])
        else:
            made = bench.prefill(case, PREFILLS if sweep else PREFILLS[:1])
        while True:
            if time.perf_counter() > end:
                rows.append({"case": str(case), "config": "rest", "error": "no time left"})
                report(rows[-1])
                break
            try:
                row = next(made, None)
            except Exception as error:  # nor must one case
                row = None
                rows.append({"case": str(case), "config": "all", "error": repr(error)[:200]})
                report(rows[-1])
            if row is None:
                break
            rows.append(row)
            report(row)
        if bench.on_gpu:
            torch.cuda.empty_cache()
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of `run`, for people."""
    text = f"{row['case']:28} {row['config']:30}"
    if "error" in row:
        return f"{text} {row['error']}"
    text += f" {row['us']:8.1f} us"
    if "gb_per_s" in row:
        text += f" {row['gb_per_s']:6.0f} GB/s ({row['of_floor']:4.0%} of floor)"
    if "tflop_per_s" in row:
        text += f" {row['tflop_per_s']:6.0f} TFLOP/s"
    if "error_max" in row:
        text += f"  err {row['error_max']:.1e}"
    return f"{text}  first {row['first_s']:.1f} s"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try many configs")
    parser.add_argument("--tiny", action="store_true", help="small cases, for the logic only")
    parser.add_argument("--only", nargs="*", default=[""], help="cases that start with these")
    parser.add_argument("--seconds", type=float, default=55.0)
    args = parser.parse_args()
    cases = TINY if args.tiny else CASES
    cases = tuple(case for case in cases if str(case).startswith(tuple(args.only)))
    run(
        cases,
        sweep=args.sweep,
        seconds=args.seconds,
        report=lambda row: print(line(row), flush=True),
    )


if __name__ == "__main__":
    main()
