"""Times of decode attention that reads what sequences share once, beside that which does not.

    python -P benchmarks/gpu/gpu_cascade.py [--only 28/4x128] [--no-sweep] [--seconds 115]

Batches whose sequences hold the same leading blocks (some of them two levels: a system prompt that
all hold, documents that some hold), in bfloat16, blocks of 16 slots, scattered. The plain kernel
reads the same tables, so it has what the L2 cache makes of repeated reads. Every case is checked
against attention in float32, then timed: launches in one CUDA graph, which take turns on enough
pools that none is still in the L2 cache; the median over replays.

First every case with the config that is used, then other configs on some cases. The last table
sorts the cases by the bytes of a layer that a cascade does not read again: `min_saved_bytes` in
`kernels/triton/cascade.py` belongs where the ratio rises above 1.

`measure` gives the figures of a few cases to a larger benchmark. Without a GPU,
`TRITON_INTERPRET=1` and `--tiny` run the same code on small cases, for its logic only.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ragserve import kernels
from ragserve.kernels import shared_runs
from ragserve.kernels.triton import attention, cascade

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))

from gpu_attention import BLOCK, ROTATED_BYTES, Bench

Heads = tuple[int, int, int]
"""Query heads, KV heads, elements of a head."""

SHAPES: tuple[Heads, ...] = ((28, 4, 128), (14, 2, 64), (32, 8, 128))


@dataclass(frozen=True)
class Case:
    """Decoding sequences.

    :param shared: tokens of the segments that all sequences begin with.
    :param own: tokens of each one's rest.
    :param document: tokens of a document behind `shared`, which `readers` sequences hold each.
    """

    heads: Heads
    batch: int
    shared: tuple[int, ...]
    own: int
    document: int = 0
    readers: int = 1

    def __str__(self) -> str:
        num_heads, num_kv_heads, head_dim = self.heads
        text = f"{num_heads}/{num_kv_heads}x{head_dim} {self.batch} x ({sum(self.shared)}"
        if len(self.shared) > 1:
            text += f" in {len(self.shared)}"
        if self.document:
            text += f" + {self.document} by {self.readers}"
        return f"{text} + {self.own})"


CASES = (
    *(
        Case(heads, batch, (shared,), own)
        for heads in SHAPES
        for batch, shared, own in itertools.product((8, 32, 64, 128), (256, 1024, 4096), (128, 512))
    ),
    *(
        case
        for heads in SHAPES[:2]
        for case in (
            Case(heads, 4, (4096,), 128),
            Case(heads, 64, (500,) * 8, 128),
            Case(heads, 64, (512,), 128, document=1024, readers=4),
            Case(heads, 64, (512,), 128, document=1024, readers=2),
            Case(heads, 32, (512,), 128, document=2048, readers=16),
            Case(heads, 64, (), 512),
        )
    ),
)
MEASURED = tuple(
    Case(heads, batch, (shared,), 128)
    for heads in SHAPES[:2]
    for batch, shared in ((8, 4096), (32, 1024), (64, 1024), (64, 4096))
)
TINY = (
    Case((6, 2, 16), 5, (40, 30), 9),
    Case((6, 2, 16), 6, (32,), 5, document=20, readers=2),
    Case((6, 2, 16), 3, (), 20),
)
SWEPT = (
    *(
        Case(heads, batch, (shared,), 128)
        for heads in SHAPES[:2]
        for batch, shared in ((8, 4096), (32, 1024), (32, 4096), (128, 1024), (128, 4096))
    ),
    Case(SHAPES[0], 64, (512,), 128, document=1024, readers=4),
)

_WIDE = cascade.CascadeConfig(128, 64, num_warps=8, num_stages=3)
_HALF = cascade.CascadeConfig(64, 64, num_warps=4, num_stages=3, programs_per_sm=2)
SWEEP = (
    _WIDE,
    replace(_WIDE, num_stages=2),
    replace(_WIDE, split_tokens=512),
    replace(_WIDE, programs_per_sm=2),
    _HALF,
    replace(_HALF, num_warps=8),
    replace(_HALF, programs_per_sm=1),
    replace(_HALF, programs_per_sm=4),
    replace(_HALF, split_tokens=512),
    cascade.CascadeConfig(32, 64, num_warps=4, num_stages=4, programs_per_sm=2),
)
"""Five kernels; the others differ only in how the host cuts the work."""


@dataclass
class Batch:
    """A case on the device: scattered blocks of several pools, all alike."""

    case: Case
    bench: Bench
    tables: list[list[int]] = field(init=False)
    starts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        case, device = self.case, self.bench.device
        self._num_blocks = 0
        front = self._extend(([], [0]), case.shared)
        paths = []
        for row in range(case.batch):
            if row % case.readers == 0:
                document = self._extend(front, (case.document,) if case.document else ())
            paths.append(self._extend(document, (case.own,)))
        order = torch.randperm(self._num_blocks).tolist()
        self.tables = [[order[block] for block in table] for table, _ in paths]
        self.starts = [starts for _, starts in paths]
        _, num_kv_heads, head_dim = case.heads
        shape = (self._num_blocks, num_kv_heads, BLOCK, head_dim)
        size = 2 * math.prod(shape) * self.bench.dtype.itemsize
        count = max(1, math.ceil(ROTATED_BYTES / size)) if self.bench.on_gpu else 1
        self.layers = [
            kernels.KVLayer(
                torch.randn(shape, dtype=self.bench.dtype, device=device),
                torch.randn(shape, dtype=self.bench.dtype, device=device),
            )
            for _ in range(count)
        ]
        self._spoil_holes()
        self.seats = list(range(case.batch))
        self.runs = shared_runs(self.tables, [len(table) - 1 for table in self.tables])
        width = max(map(len, self.tables))
        self.host_starts = np.zeros((case.batch, width + 1), dtype=np.int32)
        for row, starts in enumerate(self.starts):
            self.host_starts[row, : len(starts)] = starts
        self.arguments: dict[str, Tensor] = {
            "rows": self._int32(self.seats),
            "seq_lens": self._int32([starts[-1] for starts in self.starts]),
            "block_counts": self._int32([len(table) for table in self.tables]),
        }
        self.paged: dict[str, Any] = {
            "block_tables": self._int32([t + [0] * (width - len(t)) for t in self.tables]),
            "block_starts": self._int32(self.host_starts),
            "scale": head_dim**-0.5,
        }
        self.query = torch.randn(
            case.batch, case.heads[0], head_dim, dtype=self.bench.dtype, device=device
        )
        self.out = torch.empty_like(self.query)
        self.checked = sorted({0, case.batch // 2, case.batch - 1})
        self.expected = torch.stack([self._oracle(row) for row in self.checked])

    def _int32(self, values: Any) -> Tensor:
        array = np.ascontiguousarray(values, dtype=np.int32)
        return torch.from_numpy(array).to(self.bench.device)

    def _extend(
        self, path: tuple[list[int], list[int]], segments: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        table, starts = list(path[0]), list(path[1])
        for length in segments:
            begin = starts[-1]
            ends = [*range(begin + BLOCK, begin + length, BLOCK), begin + length]
            table += range(self._num_blocks, self._num_blocks + len(ends))
            self._num_blocks += len(ends)
            starts += ends
        return table, starts

    def _spoil_holes(self) -> None:
        holes = {
            block: filled
            for table, starts in zip(self.tables, self.starts, strict=True)
            for block, filled in zip(table, np.diff(starts).tolist(), strict=True)
            if filled < BLOCK
        }
        for block, filled in holes.items():
            for layer in self.layers:
                layer.keys[block, :, filled:] = layer.values[block, :, filled:] = math.nan

    def _oracle(self, row: int) -> Tensor:
        """Attention of a row in float32, over the first pool: [num_heads, head_dim]."""
        num_heads, num_kv_heads, head_dim = self.case.heads
        slots = np.concatenate(
            [np.arange(n) + i * BLOCK for i, n in enumerate(np.diff(self.starts[row]).tolist())]
        )
        index = torch.from_numpy(slots).to(self.bench.device)

        def gather(pool: Tensor) -> Tensor:
            blocks = pool[self.tables[row]].transpose(0, 1)
            dense = blocks.reshape(num_kv_heads, -1, head_dim)[:, index].float()
            return dense.repeat_interleave(num_heads // num_kv_heads, 0)

        layer = self.layers[0]
        query = self.query[row, :, None].float()
        result = F.scaled_dot_product_attention(query, gather(layer.keys), gather(layer.values))
        return result[:, 0]

    @property
    def saved_bytes(self) -> int:
        """Keys and values of a layer that a cascade does not read again."""
        _, num_kv_heads, head_dim = self.case.heads
        tokens = cascade.saved_tokens(self.runs, self.seats, self.host_starts)
        return tokens * 2 * num_kv_heads * head_dim * self.bench.dtype.itemsize


class CascadeBench:
    """Batches, and the workspaces and times of their launches."""

    def __init__(self) -> None:
        self.bench = Bench()

    def default(self, case: Case) -> cascade.CascadeConfig:
        """The config that an engine would use."""
        num_heads, num_kv_heads, head_dim = case.heads
        group = num_heads // num_kv_heads
        return cascade.cascade_config(case.batch * group, head_dim, self.bench.dtype)

    def plain(self, batch: Batch) -> dict[str, Any]:
        """Check and time the kernel that reads everything for each sequence."""
        return self._timed(batch, self._decode(batch))

    def cascade(self, batch: Batch, config: cascade.CascadeConfig) -> dict[str, Any]:
        """Check and time a cascade."""
        bench, case = self.bench, batch.case
        num_heads, num_kv_heads, head_dim = case.heads
        workspace = cascade.cascade_workspace(
            case.batch, num_heads, head_dim, num_sms=bench.num_sms, device=bench.device
        )
        programs = cascade.num_programs(num_kv_heads, bench.num_sms, config)
        started = time.perf_counter()
        plan = cascade.plan_cascade(
            batch.runs,
            batch.seats,
            batch.host_starts,
            workspace,
            block_size=BLOCK,
            group=num_heads // num_kv_heads,
            programs=programs,
            config=config,
        )
        plan_us = (time.perf_counter() - started) * 1e6
        if plan is None:
            return {"error": "the workspace is too small"}
        workspace.plan.copy_(torch.from_numpy(plan))
        decode = self._decode(batch)

        def launch(i: int) -> None:
            shared = cascade.paged_shared(
                batch.query,
                batch.layers[i],
                workspace=workspace,
                programs=programs,
                config=config,
                **batch.paged,
            )
            decode(i, shared)

        row = self._timed(batch, launch)
        return row | {"items": int(plan[0]), "programs": programs, "plan_us": plan_us}

    def _decode(self, batch: Batch) -> Callable[..., None]:
        bench, case = self.bench, batch.case
        num_heads, num_kv_heads, head_dim = case.heads
        config = attention.decode_config(case.batch * num_kv_heads, head_dim, bench.dtype)
        workspace = attention.decode_workspace(
            case.batch,
            num_heads,
            num_kv_heads,
            head_dim,
            num_sms=bench.num_sms,
            device=bench.device,
        )
        # As an engine does, which records its graphs for the longest sequences there may be.
        num_splits = attention.choose_splits(
            case.batch, num_kv_heads, 8192, bench.num_sms, config=config
        )

        def launch(i: int, shared: attention.SharedPartials | None = None) -> None:
            attention.paged_decode(
                batch.query,
                batch.layers[i],
                batch.out,
                workspace=workspace,
                num_splits=num_splits,
                shared=shared,
                config=config,
                **batch.arguments,
                **batch.paged,
            )

        return launch

    def _timed(self, batch: Batch, launch: Callable[[int], None]) -> dict[str, Any]:
        """A failure becomes the row's `error`."""
        row: dict[str, Any] = {}
        try:
            batch.out.fill_(math.nan)
            start = time.perf_counter()
            launch(0)
            if self.bench.on_gpu:
                torch.cuda.synchronize()
            row["first_s"] = time.perf_counter() - start
            error = (batch.out[batch.checked].float() - batch.expected).abs().max()
            row["error_max"] = float(error)
            limit = 2e-2 if self.bench.dtype == torch.bfloat16 else 1e-4
            if not row["error_max"] < limit:
                return row | {"error": f"wrong by {row['error_max']:.3g}"}
            row["us"] = self.bench.microseconds(launch, len(batch.layers))
        except Exception as error:  # one config must not end the run
            return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        return row


def name(config: cascade.CascadeConfig) -> str:
    """A config in a few letters."""
    return (
        f"m{config.block_m} n{config.block_n} w{config.num_warps} s{config.num_stages} "
        f"p{config.programs_per_sm} t{config.split_tokens}"
    )


def run(
    cases: Sequence[Case],
    *,
    swept: Sequence[Case] = (),
    seconds: float = 115,
    report: Callable[[dict[str, Any]], object] = lambda row: None,
) -> list[dict[str, Any]]:
    """Check and time every case.

    :param swept: cases for which all of `SWEEP` is tried, after the others.
    :param seconds: no other is begun after this long.
    :param report: told each row as it is made.
    :returns: rows with `case`, `config`, and either `error` or `us`, `plain_us`, their `ratio`,
        and `saved_mib` of a layer.
    """
    torch.manual_seed(0)
    bench = CascadeBench()
    end = time.perf_counter() + seconds
    rows: list[dict[str, Any]] = []
    todo: list[tuple[Case, Sequence[cascade.CascadeConfig]]] = [
        (case, (bench.default(case),)) for case in cases
    ]
    todo += [(case, SWEEP) for case in swept]
    for case, configs in todo:
        if time.perf_counter() > end:
            report({"case": str(case), "config": "rest", "error": "no time left"})
            break
        batch = Batch(case, bench.bench)
        plain = bench.plain(batch)
        for config in configs:
            row: dict[str, Any] = {"case": str(case), "config": name(config)}
            if "error" in plain:
                row["error"] = f"plain: {plain['error']}"
            elif time.perf_counter() > end:
                break
            else:
                row |= bench.cascade(batch, config)
                row |= {"plain_us": plain["us"], "saved_mib": batch.saved_bytes / 2**20}
                if "us" in row:
                    row["ratio"] = row["plain_us"] / row["us"]
            rows.append(row)
            report(row)
        if bench.bench.on_gpu:
            del batch
            torch.cuda.empty_cache()
    return rows


def measure() -> list[dict[str, Any]]:
    """A few cases with the config that is used, for a larger benchmark (see `run`)."""
    return run(MEASURED if CascadeBench().bench.on_gpu else TINY, seconds=40)


def line(row: dict[str, Any]) -> str:
    """A row of `run`, for people."""
    text = f"{row['case']:36} {row['config']:24}"
    if "error" in row:
        return f"{text} {row['error']}"
    return (
        f"{text} {row['plain_us']:8.1f} -> {row['us']:7.1f} us, x {row['ratio']:5.2f}; "
        f"saves {row['saved_mib']:6.1f} MiB; {row['items']} items on {row['programs']}, "
        f"planned in {row['plan_us']:.0f} us; err {row['error_max']:.1e}, "
        f"first {row['first_s']:.1f} s"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases that start with these")
    parser.add_argument("--no-sweep", action="store_true", help="only the config that is used")
    parser.add_argument("--tiny", action="store_true", help="small cases, for the logic only")
    parser.add_argument("--seconds", type=float, default=115.0)
    args = parser.parse_args()

    def wanted(cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if str(case).startswith(tuple(args.only))]

    cases = wanted(TINY if args.tiny else CASES)
    swept = [] if args.tiny or args.no_sweep else wanted(SWEPT)
    defaults = len(cases)
    rows = run(
        cases,
        swept=swept,
        seconds=args.seconds,
        report=lambda row: print(line(row), flush=True),
    )
    print("\nby bytes saved, with the config that is used:")
    used = [row for row in rows[:defaults] if "ratio" in row]
    for row in sorted(used, key=lambda row: float(row["saved_mib"])):
        gain = row["plain_us"] - row["us"]
        print(f"{row['saved_mib']:7.1f} MiB  x {row['ratio']:5.2f}  {gain:+7.1f} us  {row['case']}")
    best: dict[str, dict[str, Any]] = {}
    for row in rows[defaults:]:
        if "us" in row and row["us"] < best.get(row["case"], {"us": math.inf})["us"]:
            best[row["case"]] = row
    for case, row in best.items():
        print(f"best {case:36} {row['config']:24} {row['us']:7.1f} us, x {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
