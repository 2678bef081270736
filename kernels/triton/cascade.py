"""Decode attention that reads what sequences share once for all of them.

Sequences that decode often hold the same leading blocks: a system prompt, a document.
`paged_decode` alone reads these again for each. Here `paged_shared` first meets every run of shared
blocks with the queries of all the run's sequences, packed into tiles as a prompt's are, and leaves
each sequence's partial output and the logarithm of its sum of exponentials. `paged_decode` goes on
from there and reads only the sequence's own blocks. The merge is exact, for attention to some keys
is the mean of attentions to parts of them, weighted by these sums (cascade inference of FlashInfer,
Ye et al., arXiv 2501.01005; Hydragen, Juravsky et al., arXiv 2402.05099).

Who shares what changes only when a sequence comes or goes. The host lays it out as an array
(`plan_cascade`), which the kernel reads; grids come from shapes alone, so that one CUDA graph of a
batch size serves all plans. The work is cut by the host, which knows how long the runs are, and
dealt to as many programs as run at once.

Tile sizes, warps, and what is worth a cascade stand in `cascade_config`, `min_saved_bytes` and
`MIN_SHARED_BLOCKS`, and nowhere else.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..paging import KVLayer
from ..sharing import SharedRun
from .attention import (
    _HOPPER_SHARED_MEMORY,
    SharedPartials,
    _attend,
    _normalized,
    _score_factors,
)

__all__ = [
    "MIN_SHARED_BLOCKS",
    "CascadeConfig",
    "CascadeWorkspace",
    "cascade_config",
    "cascade_workspace",
    "min_saved_bytes",
    "num_programs",
    "paged_shared",
    "plan_cascade",
    "saved_tokens",
]


def min_saved_bytes(head_dim: int) -> int:
    """Keys and values of a layer that must not be read again, for a cascade to be worth it.

    Measured on an H200, whose cache serves much of what is read again. A second kernel and a tile
    of many queries cost some 10 us a layer; heads of 64 make the plain kernel slower by the byte.
    """
    return (40 if head_dim <= 64 else 160) << 20


MIN_SHARED_BLOCKS: Final = 4
"""Blocks that a run of its own has at least."""

# Columns of an item of work.
_SEAT = tl.constexpr(0)  # row of the block tables
_FIRST = tl.constexpr(1)  # the run's first block in that row, and ...
_BLOCKS = tl.constexpr(2)  # ... how many
_BEGIN = tl.constexpr(3)  # tiles of keys, counted from the run's first block
_WHOLE = tl.constexpr(4)  # ... the first one that may have slots that are not written
_END = tl.constexpr(5)
_MEMBERS = tl.constexpr(6)  # where the run's list of members begins, and ...
_NUM_MEMBERS = tl.constexpr(7)  # ... how many they are
_QUERY = tl.constexpr(8)  # first packed row: member * group + head
_PART = tl.constexpr(9)  # which of the parts into which the run's keys are cut
_ITEM_WIDTH = tl.constexpr(10)

_FAR = tl.constexpr((1 << 31) - 1)
"""A length that no sequence has: all of a run precedes its queries."""


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """How runs of shared blocks are read.

    :param block_m: packed rows (sequence, head) per tile.
    :param block_n: keys per tile.
    :param num_warps: warps per program.
    :param num_stages: tiles of keys in flight.
    :param programs_per_sm: programs that fit on a multiprocessor at once.
    :param split_tokens: slots per item of work at least.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    split_tokens: int = 128


def cascade_config(
    num_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared_memory: int = _HOPPER_SHARED_MEMORY,
) -> CascadeConfig:
    """The default for a batch.

    :param num_rows: sequences times query heads per KV head.
    :param shared_memory: bytes that a program of the device can have.
    """
    if dtype.itemsize > 2:  # products of float32 do not use tensor cores
        if head_dim > 128:
            return CascadeConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
        return CascadeConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    small = shared_memory < _HOPPER_SHARED_MEMORY // 2  # of a consumer's GPU: 99 KiB
    if head_dim > 128:
        return CascadeConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if num_rows <= 32:
        stages = 2 if small else 4
        per_sm = 1 if small else 2
        return CascadeConfig(32, 64, num_warps=4, num_stages=stages, programs_per_sm=per_sm)
    if num_rows <= 64 or small:
        stages = 2 if small else 3
        per_sm = 1 if small else 2
        return CascadeConfig(64, 64, num_warps=4, num_stages=stages, programs_per_sm=per_sm)
    return CascadeConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)


@dataclass(frozen=True, slots=True)
class CascadeWorkspace:
    """Who shares what, and the partial results; one serves all layers and batch sizes.

    :param plan: int32, flat, what `plan_cascade` made; the next five are views of it.
    :param num_items: [1].
    :param items: [n, _ITEM_WIDTH].
    :param member_rows: [n], rows of the batch, run by run.
    :param member_lines: [n], where the lines of each member of a run begin.
    :param partials: [max_batch] of each row; what the second kernel goes on from.
    """

    plan: Tensor
    num_items: Tensor
    items: Tensor
    member_rows: Tensor
    member_lines: Tensor
    partials: SharedPartials

    @property
    def max_batch(self) -> int:
        """Rows of a batch at most."""
        return len(self.partials.counts)

    @property
    def max_lines(self) -> int:
        """Lines of partial results at most; also members of runs, and items."""
        return len(self.items)


def cascade_workspace(
    max_batch: int,
    num_heads: int,
    head_dim: int,
    *,
    num_sms: int,
    device: torch.device | str,
) -> CascadeWorkspace:
    """Allocate for batches of up to `max_batch` sequences, with no plan.

    :param num_sms: multiprocessors of the device.
    """
    # As many lines as programs at work at once leave, and two for each sequence at least.
    lines = 2 * max_batch + _cdiv(num_sms * 128, num_heads)
    width = int(_ITEM_WIDTH)
    sizes = [1, lines * width, lines, lines, max_batch, max_batch, max_batch]
    plan = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    num_items, items, member_rows, member_lines, *of_batch = plan.split(sizes)
    block_counts, firsts, counts = of_batch
    return CascadeWorkspace(
        plan=plan,
        num_items=num_items,
        items=items.view(lines, width),
        member_rows=member_rows,
        member_lines=member_lines,
        partials=SharedPartials(
            block_counts=block_counts,
            firsts=firsts,
            counts=counts,
            outputs=torch.zeros(lines, num_heads, head_dim, dtype=torch.float32, device=device),
            logs=torch.zeros(lines, num_heads, dtype=torch.float32, device=device),
        ),
    )


def saved_tokens(
    runs: Sequence[SharedRun], seats: Sequence[int], block_starts: NDArray[np.int32]
) -> int:
    """Tokens whose keys and values are not read again, thanks to a cascade over `runs`.

    :param seats: of each row of the batch, its row in `block_starts`.
    :param block_starts: [num_seats, M + 1], on the host.
    """
    saved = 0
    for run in runs:
        starts = block_starts[seats[run.rows[0]]]
        saved += (len(run.rows) - 1) * int(starts[run.last] - starts[run.first])
    return saved


def plan_cascade(
    runs: Sequence[SharedRun],
    seats: Sequence[int],
    block_starts: NDArray[np.int32],
    workspace: CascadeWorkspace,
    *,
    block_size: int,
    group: int,
    programs: int,
    config: CascadeConfig,
) -> NDArray[np.int32] | None:
    """Lay out the work of a decode step's shared runs, for `CascadeWorkspace.plan`.

    :param runs: as `shared_runs` gives them: of one row disjoint, and consecutive from block 0.
    :param seats: of each row of the batch, its row in the tables.
    :param block_starts: [num_seats, M + 1], the tables' on the host.
    :param workspace: its sizes count.
    :param group: query heads per KV head.
    :param programs: of each KV head that run at once; see `num_programs`.
    :param config: that will run.
    :returns: None if the workspace is too small for so many runs.
    """
    tiles = [_cdiv((run.last - run.first) * block_size, config.block_n) for run in runs]
    heights = [_cdiv(len(run.rows) * group, config.block_m) for run in runs]
    parts = _cut(runs, tiles, heights, workspace.max_lines, programs, config)
    if parts is None:
        return None
    batch = workspace.max_batch
    block_counts, counts = [0] * batch, [0] * batch
    for run, num_parts in zip(runs, parts, strict=True):
        for row in run.rows:
            counts[row] += num_parts
            block_counts[row] = max(block_counts[row], run.last)
    firsts = list(itertools.accumulate(counts[:-1], initial=0))
    next_lines = list(firsts)
    items: list[tuple[int, ...]] = []
    members: list[int] = []
    member_lines: list[int] = []
    for run, num_tiles, height, num_parts in zip(runs, tiles, heights, parts, strict=True):
        first, count, seat = run.first, run.last - run.first, seats[run.rows[0]]
        starts = block_starts[seat, first : run.last + 1]
        filled = count
        if starts[-1] - starts[0] < count * block_size:  # there is a hole
            filled = int((np.diff(starts) == block_size).argmin())
        whole = filled * block_size // config.block_n
        for part in range(num_parts):
            begin, end = part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts
            keys = begin, min(max(whole, begin), end), end
            items += [
                (seat, first, count, *keys, len(members), len(run.rows), query, part)
                for query in range(0, height * config.block_m, config.block_m)
            ]
        members += run.rows
        for row in run.rows:
            member_lines.append(next_lines[row])
            next_lines[row] += num_parts
    # Dealt in turn, so the longest come first.
    items.sort(key=lambda item: item[_BEGIN] - item[_END])
    plan = np.zeros(workspace.plan.numel(), dtype=np.int32)
    flat = list(itertools.chain.from_iterable(items))
    start = 0
    for values, room in (
        ([len(items)], 1),
        (flat, workspace.items.numel()),
        (members, workspace.max_lines),
        (member_lines, workspace.max_lines),
        (block_counts, batch),
        (firsts, batch),
        (counts, batch),
    ):
        plan[start : start + len(values)] = values
        start += room
    return plan


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _cut(
    runs: Sequence[SharedRun],
    tiles: Sequence[int],
    heights: Sequence[int],
    max_lines: int,
    programs: int,
    config: CascadeConfig,
) -> list[int] | None:
    """Into how many parts each run's keys are cut: into parts as short as leave one item for each
    program, if there are not more items anyway.

    :param tiles: of keys, of each run.
    :param heights: tiles of queries, of each run.
    :returns: None if even one part each takes too many lines.
    """

    def parts_of(size: int) -> list[int]:
        return [_cdiv(width, size) for width in tiles]

    def fits(size: int, most_items: int) -> bool:
        parts = parts_of(size)
        items = sum(part * height for part, height in zip(parts, heights, strict=True))
        lines = sum(part * len(run.rows) for part, run in zip(parts, runs, strict=True))
        return items <= most_items and lines <= max_lines

    work = sum(width * height for width, height in zip(tiles, heights, strict=True))
    longest = max(tiles, default=1)
    size = max(1, config.split_tokens // config.block_n, _cdiv(work, programs))
    if sum(heights) < programs:
        size += bisect_left(range(size, longest), True, key=lambda size: fits(size, programs))
    else:
        size = longest
    return parts_of(size) if fits(size, max_lines) else None


def num_programs(num_kv_heads: int, num_sms: int, config: CascadeConfig) -> int:
    """Programs of each KV head that run at once."""
    return max(1, num_sms * config.programs_per_sm // num_kv_heads)


def paged_shared(
    query: Tensor,
    cache: KVLayer,
    *,
    block_tables: Tensor,
    block_starts: Tensor,
    workspace: CascadeWorkspace,
    programs: int,
    scale: float,
    soft_cap: float | None = None,
    config: CascadeConfig,
) -> SharedPartials:
    """Attention of sequences with one query each to the runs of a plan, read once for all.

    :param query: [S, num_heads, head_dim], a head's elements contiguous.
    :param cache: the layer's pool, contiguous.
    :param block_tables: as all that follows, see `paged_decode`.
    :param workspace: with a plan of this batch; its partial results are overwritten.
    :param programs: of each KV head; see `num_programs`. Any number gives the same.
    :param config: that the plan was made for.
    :returns: what `paged_decode` is to go on from.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.keys.shape[1], cache.keys.shape[2]
    _shared_kernel[num_kv_heads, programs](
        query,
        cache.keys,
        cache.values,
        workspace.partials.outputs,
        workspace.partials.logs,
        workspace.num_items,
        workspace.items,
        workspace.member_rows,
        workspace.member_lines,
        block_tables,
        block_starts,
        *_score_factors(scale, soft_cap),
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        block_starts.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_M=config.block_m,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        SOFT_CAP=soft_cap is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return workspace.partials


@triton.jit(
    do_not_specialize_on_alignment=["num_items", "items", "member_rows", "member_lines"],
)
def _shared_kernel(
    query,
    keys,
    values,
    outputs,
    logs,
    num_items,
    items,
    member_rows,
    member_lines,
    block_tables,
    block_starts,
    cap_factor,
    factor,
    query_token_stride,
    query_head_stride,
    table_stride,
    starts_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    keys += kv_head * (BLOCK_SIZE * HEAD_DIM)
    values += kv_head * (BLOCK_SIZE * HEAD_DIM)
    dims = tl.arange(0, DIM)
    for number in range(tl.program_id(1), tl.load(num_items), tl.num_programs(1)):
        item = items + number * _ITEM_WIDTH
        seat = tl.load(item + _SEAT).to(tl.int64)
        first = tl.load(item + _FIRST)
        num_blocks = tl.load(item + _BLOCKS)
        begin = tl.load(item + _BEGIN)
        whole = tl.load(item + _WHOLE)
        end = tl.load(item + _END)
        members = tl.load(item + _MEMBERS)
        row = tl.load(item + _QUERY) + tl.arange(0, BLOCK_M)
        member, head = row // GROUP, kv_head * GROUP + row % GROUP
        inside = member < tl.load(item + _NUM_MEMBERS)
        sequence = tl.load(member_rows + members + member, mask=inside, other=0).to(tl.int64)
        line = tl.load(member_lines + members + member, mask=inside, other=0)
        line = (line + tl.load(item + _PART)).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        query_tile = tl.load(
            query
            + (sequence * query_token_stride + head * query_head_stride)[:, None]
            + dims[None, :],
            mask=mask,
            other=0.0,
        )
        table = block_tables + seat * table_stride + first
        starts = block_starts + seat * starts_stride + first
        output = tl.zeros([BLOCK_M, DIM], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # Tiles of filled blocks, which need no mask; then the others.
        output, largest, total = _attend(
            output,
            largest,
            total,
            query_tile,
            row,
            begin,
            whole,
            table,
            starts,
            num_blocks,
            _FAR,
            keys,
            values,
            cap_factor,
            factor,
            0,
            BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            HEAD_DIM=HEAD_DIM,
            DIM=DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            HOLES=False,
            CAUSAL=False,
            WINDOW=False,
            SOFT_CAP=SOFT_CAP,
        )
        output, largest, total = _attend(
            output,
            largest,
            total,
            query_tile,
            row,
            whole,
            end,
            table,
            starts,
            num_blocks,
            _FAR,
            keys,
            values,
            cap_factor,
            factor,
            0,
            BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            HEAD_DIM=HEAD_DIM,
            DIM=DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            HOLES=True,
            CAUSAL=False,
            WINDOW=False,
            SOFT_CAP=SOFT_CAP,
        )
        tl.store(logs + line, largest + tl.log2(tl.where(total > 0, total, 1.0)), mask=inside)
        tl.store(
            outputs + line[:, None] * HEAD_DIM + dims[None, :],
            _normalized(output, total),
            mask=mask,
        )
