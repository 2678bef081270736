"""Attention over the paged pool: one kernel for decoding sequences, one for prompts.

Both run the same loop, `_attend`: a tile of packed query rows meets the keys of a sequence, tile
by tile, with an online softmax in float32 (Dao et al., arXiv 2205.14135). The query heads that
share a KV head (Ainslie et al., arXiv 2305.13245) lie in one tile, so a key is read once for all.

Keys are found slot by slot through the block table (Kwon et al., arXiv 2309.06180), so a tile's
size does not depend on a block's. Slots are counted along a sequence's blocks: slot `n` is slot
`n % block_size` of block `n // block_size`. Since a block may end in a hole, the token at
position `p` lies in slot `p` or later. Holes, and slots behind the sequence's end, may hold
anything: they are neither read nor counted.

Tile sizes, warps and splits stand in `decode_config` and `prefill_config`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..paging import KVLayer

__all__ = [
    "DecodeConfig",
    "DecodeWorkspace",
    "PrefillConfig",
    "PrefillTiles",
    "SharedPartials",
    "choose_splits",
    "decode_config",
    "decode_workspace",
    "paged_decode",
    "paged_prefill",
    "prefill_config",
    "prefill_tiles",
]

_LOG2_E = 1 / math.log(2)

_SPLIT_TOKENS = 256
"""Fewest keys worth a program of their own: fewer cost more in the merge than they save."""

_HOPPER_SHARED_MEMORY = 227 << 10

_MAX_PROGRAMS_PER_SM = 8
"""Splitting stops at this many decode programs per multiprocessor; it bounds the workspace."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How `paged_decode` runs.

    :param block_n: keys per tile.
    :param num_warps: warps per program.
    :param num_stages: tiles in flight, and the one at work.
    :param programs_per_sm: programs that fit on a multiprocessor at once, by shared memory.
    :param split_tokens: slots per split at least; shorter sequences use fewer splits.
    :param fused: the last program of a sequence and KV head merges the splits; otherwise a second
        kernel does.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    split_tokens: int = _SPLIT_TOKENS
    fused: bool = True


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How `paged_prefill` runs.

    :param block_m: packed rows (token, head) per tile.
    :param block_n: keys per tile.
    :param num_warps: warps per program.
    :param num_stages: tiles in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_config(programs: int, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """The default for a batch.

    :param programs: sequences times KV heads.
    """
    row = triton.next_power_of_2(head_dim) * dtype.itemsize
    if row > 512:
        return DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=4)
    if row > 256:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=3, programs_per_sm=3)
    if programs <= 64:
        # Many splits of few sequences: their merge is work enough for programs of its own.
        return DecodeConfig(
            block_n=64,
            num_warps=4,
            num_stages=2,
            programs_per_sm=2,
            split_tokens=64,
            fused=False,
        )
    return DecodeConfig(block_n=32, num_warps=2, num_stages=4, programs_per_sm=4)


def prefill_config(
    head_dim: int, dtype: torch.dtype, *, shared_memory: int = _HOPPER_SHARED_MEMORY
) -> PrefillConfig:
    """The default for prompts; float32 products do not use tensor cores and need small tiles.

    :param shared_memory: bytes that a program of the device can have.
    """
    if dtype.itemsize > 2:
        if head_dim > 128:
            return PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    if shared_memory < _HOPPER_SHARED_MEMORY // 2:  # of a consumer's GPU: 99 KiB
        if head_dim > 128:
            return PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What the splits of a decode launch leave for the merge; reused by all launches of a stream.

    :param partials: float32 [lines, head_dim], each split's normalized output of each query head.
    :param logs: float32 [lines], log2 of each one's sum of exponentials; -inf for no key.
    :param arrivals: int32 [max_batch * num_kv_heads], splits that are done; 0 between launches.
    """

    partials: Tensor
    logs: Tensor
    arrivals: Tensor


@dataclass(frozen=True, slots=True)
class SharedPartials:
    """What is known already of the attention of decoding sequences, to the leading blocks that
    they share with others (see `cascade.py`). A sequence may have several lines, one of each part.

    :param block_counts: int32 [S], leading blocks of each sequence that are done; fewer than those
        in use. 0 for none.
    :param firsts: int32 [S], where each sequence's lines begin.
    :param counts: int32 [S], lines of each.
    :param outputs: float32 [n, num_heads, head_dim], the normalized output of each line.
    :param logs: float32 [n, num_heads], log2 of each one's sum of exponentials.
    """

    block_counts: Tensor
    firsts: Tensor
    counts: Tensor
    outputs: Tensor
    logs: Tensor


def decode_workspace(
    max_batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    num_sms: int,
    device: torch.device | str,
) -> DecodeWorkspace:
    """Allocate for batches of up to `max_batch` sequences, split as `choose_splits` says.

    One serves every layer and batch size of a model, but only one launch at a time.

    :param num_sms: multiprocessors of the device.
    """
    lines = num_sms * _MAX_PROGRAMS_PER_SM * (num_heads // num_kv_heads)
    return DecodeWorkspace(
        partials=torch.empty(lines, head_dim, dtype=torch.float32, device=device),
        logs=torch.empty(lines, dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device),
    )


def choose_splits(
    batch: int,
    num_kv_heads: int,
    max_len: int,
    num_sms: int,
    *,
    config: DecodeConfig | None = None,
) -> int:
    """Splits of each sequence's keys that fill the device. With a merge of its own, as many as
    run at once; else the fewest whose programs leave at most a tenth more of it idle in their last
    round than the best number does, for the last program of a sequence merges them one by one.

    :param batch: sequences that decode.
    :param max_len: tokens of the longest one, now or ever (for a captured graph).
    :param num_sms: multiprocessors of the device.
    :param config: what will run; None for the default of 16-bit heads of 128 elements.
    """
    programs = batch * num_kv_heads
    config = config or decode_config(programs, 128, torch.float16)
    at_once = num_sms * config.programs_per_sm
    most = min(
        triton.cdiv(max_len, config.split_tokens), num_sms * _MAX_PROGRAMS_PER_SM // programs
    )

    if not config.fused:
        return int(max(1, min(most, at_once // programs)))

    def efficiency(splits: int) -> float:
        rounds = programs * splits / at_once
        return rounds / math.ceil(rounds)

    candidates = range(1, max(1, most) + 1)
    enough = 0.9 * max(map(efficiency, candidates))
    return next(splits for splits in candidates if efficiency(splits) >= enough)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """The programs of a `paged_prefill` launch, those with the most keys first. All int32 [n].

    :param rows: sequence of the tile, as an index into the step's batch.
    :param queries: the tile's first packed row: token * group + head, tokens counted from the
        sequence's first in this step.
    :param ends: blocks of the sequence that the tile's last token sees.
    """

    rows: NDArray[np.int32]
    queries: NDArray[np.int32]
    ends: NDArray[np.int32]


def prefill_tiles(
    query_lens: Sequence[int] | NDArray[np.integer],
    context_lens: Sequence[int] | NDArray[np.integer],
    block_starts: Sequence[NDArray[np.integer]],
    *,
    group: int,
    block_m: int,
    first: int = 0,
) -> PrefillTiles:
    """Cut the prompts of a step into tiles.

    :param query_lens: tokens of each sequence in this step.
    :param context_lens: tokens of each before this step.
    :param block_starts: of each, the sorted positions at which its blocks start; at least those
        up to its last token's.
    :param group: query heads per KV head.
    :param block_m: of the config that will run.
    :param first: index of the first of these sequences in the step's batch.
    """
    if len(query_lens) == 0:
        nothing = np.empty(0, dtype=np.int32)
        return PrefillTiles(nothing, nothing, nothing)
    rows, queries, ends = [], [], []
    for row, (length, context, starts) in enumerate(
        zip(query_lens, context_lens, block_starts, strict=True), start=first
    ):
        begins = np.arange(0, length * group, block_m, dtype=np.int32)
        last = context + np.minimum((begins + (block_m - 1)) // group, length - 1)
        rows.append(np.full(len(begins), row, dtype=np.int32))
        queries.append(begins)
        ends.append(np.searchsorted(starts, last, side="right").astype(np.int32))
    all_ends = np.concatenate(ends)
    order = np.argsort(-all_ends, kind="stable")
    return PrefillTiles(
        np.concatenate(rows)[order], np.concatenate(queries)[order], all_ends[order]
    )


def paged_decode(
    query: Tensor,
    cache: KVLayer,
    out: Tensor,
    *,
    rows: Tensor,
    seq_lens: Tensor,
    block_counts: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    workspace: DecodeWorkspace,
    num_splits: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    shared: SharedPartials | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of sequences with one query each, their last token, whose key is in the pool.

    The grid comes from shapes alone. On the device each sequence's tiles are dealt evenly to
    up to `num_splits` programs per KV head (Flash-Decoding), fewer if it is short.

    :param query: [S, num_heads, head_dim], a head's elements contiguous.
    :param cache: the layer's pool, contiguous.
    :param out: like `query`; written. Zeros for a sequence of length 0.
    :param rows: int32 [S], each sequence's row in the tables; as all integers below, on the
        device, at any alignment.
    :param seq_lens: int32 [S], tokens, the query's own included; 0 skips the sequence.
    :param block_counts: int32 [S], blocks in use.
    :param block_tables: int32 [num_rows, M], blocks of each row in order.
    :param block_starts: int32 [num_rows, M + 1], position of each block's first token. Block i
        holds positions `block_starts[i]` to `block_starts[i + 1]` in its first slots.
    :param num_splits: programs per sequence and KV head; see `choose_splits`.
    :param scale: factor of the scores, positive.
    :param window: positions a token sees at most, its own included.
    :param soft_cap: bound of the scores, `cap * tanh(score / cap)`, as in Gemma 2.
    :param shared: what is known of the sequences' leading blocks, which are then not read; not
        with a window.
    :param config: None for `decode_config`'s.
    :raises ValueError: `workspace` is too small for this batch and `num_splits`, or there are both
        `shared` and a window.
    """
    if shared is not None and window is not None:
        raise ValueError(
            f"a window of {window} positions and shared partial results: these may be of "
            "positions outside the window; leave out one of them"
        )
    batch, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.keys.shape[1], cache.keys.shape[2]
    group = num_heads // num_kv_heads
    split = num_splits > 1
    if split and (
        batch * num_heads * num_splits > len(workspace.logs)
        or batch * num_kv_heads > len(workspace.arrivals)
    ):
        raise ValueError(
            f"{batch} sequences x {num_heads} heads x {num_splits} splits do not fit a workspace "
            f"of {len(workspace.logs)} lines and {len(workspace.arrivals)} counters; see "
            "choose_splits and decode_workspace"
        )
    config = config or decode_config(batch * num_kv_heads, head_dim, query.dtype)
    dim = triton.next_power_of_2(head_dim)
    heads = triton.next_power_of_2(group)
    min_tiles = max(1, config.split_tokens // config.block_n)
    block_m = max(16, heads)
    # Elements of partial outputs that the threads merge at once.
    at_once = 4096 * config.num_warps
    _decode_kernel[num_kv_heads, batch, num_splits](
        query,
        cache.keys,
        cache.values,
        out,
        workspace.partials,
        workspace.logs,
        workspace.arrivals,
        rows,
        seq_lens,
        block_counts,
        block_tables,
        block_starts,
        *_arguments_of(shared),
        *_score_factors(scale, soft_cap),
        window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        block_starts.stride(0),
        num_splits,
        min_tiles,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEADS=heads,
        BLOCK_M=block_m,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        WINDOW=window is not None,
        SOFT_CAP=soft_cap is not None,
        FUSED=config.fused,
        CHUNK=max(1, at_once // (heads * dim)),
        SHARED=shared is not None,
        SHARED_CHUNK=max(1, at_once // (block_m * dim)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split and not config.fused:
        _merge_kernel[num_heads, batch](
            out,
            workspace.partials,
            workspace.logs,
            seq_lens,
            block_counts,
            None if shared is None else shared.block_counts,
            window or 0,
            out.stride(0),
            out.stride(1),
            num_splits,
            min_tiles,
            GROUP=group,
            HEAD_DIM=head_dim,
            DIM=dim,
            BLOCK_SIZE=block_size,
            BLOCK_N=config.block_n,
            WINDOW=window is not None,
            SHARED=shared is not None,
            CHUNK=max(1, 8192 // dim),
            num_warps=4,
        )


def paged_prefill(
    query: Tensor,
    cache: KVLayer,
    out: Tensor,
    *,
    rows: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    tile_rows: Tensor,
    tile_queries: Tensor,
    tile_ends: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Causal attention of the last tokens of some sequences, whose keys are in the pool.

    :param query: [T, num_heads, head_dim], all tokens of the step; a head's elements contiguous.
    :param out: like `query`; the rows of the tiles' tokens are written.
    :param query_starts: int32 [S + 1], where each sequence's tokens begin in the step's T.
    :param seq_lens: int32 [S], tokens of each sequence, this step's included.
    :param tile_rows: int32 [n], with the next two as `prefill_tiles` makes them for `config`; a
        tile whose end is 0 is skipped.

    The other parameters are those of `paged_decode`.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.keys.shape[1], cache.keys.shape[2]
    config = config or prefill_config(head_dim, query.dtype)
    _prefill_kernel[num_kv_heads, len(tile_rows)](
        query,
        cache.keys,
        cache.values,
        out,
        rows,
        query_starts,
        seq_lens,
        tile_rows,
        tile_queries,
        tile_ends,
        block_tables,
        block_starts,
        *_score_factors(scale, soft_cap),
        window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        block_starts.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_M=config.block_m,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        WINDOW=window is not None,
        SOFT_CAP=soft_cap is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _arguments_of(shared: SharedPartials | None) -> tuple[Tensor | None, ...]:
    """The decode kernel's arguments for what sequences share; it ignores None."""
    if shared is None:
        return (None,) * 5
    return shared.block_counts, shared.firsts, shared.counts, shared.outputs, shared.logs


def _score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factors of products (with a soft cap, first inside the tangent's exponential of 2, then of
    the tangent) that make them exponents of 2."""
    if soft_cap is None:
        return 0.0, scale * _LOG2_E
    return 2 * _LOG2_E * scale / soft_cap, soft_cap * _LOG2_E


@triton.jit
def _blocks_of(slot, table, starts, num_blocks, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Numbers, first positions and ends of the blocks from `slot` on, [BLOCKS]; none behind the
    last one."""
    index = slot // BLOCK_SIZE + tl.arange(0, BLOCKS)
    inside = index < num_blocks
    block = tl.load(table + index, mask=inside, other=0)
    start = tl.load(starts + index, mask=inside, other=0)
    stop = tl.load(starts + index + 1, mask=inside, other=0)
    return block, start, stop


@triton.jit
def _spread(of_blocks, BLOCK_N: tl.constexpr):
    """[BLOCKS] -> [BLOCK_N], each block's entry for all its slots in the tile."""
    BLOCKS: tl.constexpr = of_blocks.shape[0]
    wide = tl.broadcast_to(of_blocks[:, None], [BLOCKS, BLOCK_N // BLOCKS])
    return tl.reshape(wide, [BLOCK_N])


@triton.jit
def _attend(
    output,
    largest,
    total,
    query,
    query_positions,
    begin,
    end,
    table,
    starts,
    num_blocks,
    seq_len,
    keys,
    values,
    cap_factor,
    factor,
    window,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOLES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Continue an online softmax over tiles `begin` to `end` of a sequence's slots.

    `output` [BLOCK_M, DIM] is not normalized; `largest` [BLOCK_M] is the largest exponent of 2
    so far and `total` [BLOCK_M] the sum of the exponentials, all float32. Without HOLES all the
    tiles' slots must be written; without CAUSAL all written slots must precede the queries.
    """
    # Blocks and tiles have powers of two of slots: a tile is some blocks, or a part of one.
    BLOCKS: tl.constexpr = (BLOCK_N + BLOCK_SIZE - 1) // BLOCK_SIZE
    within = tl.arange(0, BLOCK_N) % BLOCK_SIZE
    dims = tl.arange(0, DIM)
    block, start, stop = _blocks_of(begin * BLOCK_N, table, starts, num_blocks, BLOCKS, BLOCK_SIZE)
    for tile in range(begin, end):
        offset = tile * BLOCK_N % BLOCK_SIZE + within
        position = _spread(start, BLOCK_N) + offset
        written = position < _spread(tl.minimum(stop, seq_len), BLOCK_N)
        # A pool may have more elements than an int32 counts.
        element = _spread(block, BLOCK_N).to(tl.int64) * BLOCK_STRIDE + offset * HEAD_DIM
        element = element[:, None] + dims[None, :]
        if HOLES:
            mask = written[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(keys + element, mask=mask, other=0.0)
            value = tl.load(values + element, mask=mask, other=0.0)
        elif DIM > HEAD_DIM:
            mask = (dims < HEAD_DIM)[None, :]
            key = tl.load(keys + element, mask=mask, other=0.0)
            value = tl.load(values + element, mask=mask, other=0.0)
        else:
            key = tl.load(keys + element)
            value = tl.load(values + element)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFT_CAP:
            # tanh(x); the exponential may overflow, to 1, or underflow, to -1.
            scores = 1 - 2 / (tl.exp2(scores * cap_factor) + 1)
        if HOLES:
            scores += tl.where(written, 0.0, float("-inf"))[None, :]
        if CAUSAL:
            seen = position[None, :] <= query_positions[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if WINDOW:
            seen = position[None, :] > query_positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        # A row that has seen no key so far: -inf - -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * factor - base[:, None])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weights, 1)
        output = output * fade[:, None]
        output = tl.dot(weights.to(value.dtype), value, output, input_precision="ieee")
        largest = new_largest

        # The next tile's blocks are looked up one turn ahead: its keys need not wait for them.
        block, start, stop = _blocks_of(
            (tile + 1) * BLOCK_N, table, starts, num_blocks, BLOCKS, BLOCK_SIZE
        )
    return output, largest, total


@triton.jit
def _tiles_and_splits(
    seq_len,
    num_blocks,
    window,
    num_splits,
    min_tiles,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """First tile that a decoding sequence sees, number of tiles, and splits that share them."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - window, 0) // BLOCK_N
    num_tiles = tl.cdiv(num_blocks * BLOCK_SIZE, BLOCK_N) - begin
    return begin, num_tiles, tl.minimum(num_splits, tl.cdiv(num_tiles, min_tiles))


@triton.jit
def _merge(
    partials,
    logs,
    count,
    LINES: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge LINES outputs of `count` splits, whose lines are STRIDE apart.

    Gives the state of an online softmax, as `_attend` continues it, with PADDED rows.
    """
    line = tl.arange(0, PADDED)
    dims = tl.arange(0, DIM)
    largest = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    output = tl.zeros([PADDED, DIM], tl.float32)
    for first in range(0, count, CHUNK):
        split = first + tl.arange(0, CHUNK)
        lines = split[:, None] * STRIDE + line[None, :]
        inside = (split < count)[:, None] & (line < LINES)[None, :]
        # Other programs wrote these a moment ago: read them from where all see the same.
        log = tl.load(logs + lines, mask=inside, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partials + lines[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=inside[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(log, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(log - base[None, :])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weight, 0)
        output = output * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        largest = new_largest
    return output, largest, total


@triton.jit
def _normalized(output, total):
    """An online softmax's output [M, DIM], once it has met all keys; zeros if there were none."""
    return output / tl.where(total > 0, total, 1.0)[:, None]


# Table strides are fixed for an engine; what changes from step to step must not compile anew.
@triton.jit(
    do_not_specialize=["window", "num_splits", "min_tiles"],
    do_not_specialize_on_alignment=[
        "rows",
        "seq_lens",
        "block_counts",
        "shared_blocks",
        "shared_firsts",
        "shared_counts",
    ],
)
def _decode_kernel(
    query,
    keys,
    values,
    out,
    partials,
    logs,
    arrivals,
    rows,
    seq_lens,
    block_counts,
    block_tables,
    block_starts,
    shared_blocks,
    shared_firsts,
    shared_counts,
    shared_outputs,
    shared_logs,
    cap_factor,
    factor,
    window,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    starts_stride,
    num_splits,
    min_tiles,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FUSED: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_CHUNK: tl.constexpr,
):
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seat = tl.load(rows + sequence).to(tl.int64)
    seq_len = tl.load(seq_lens + sequence)
    num_blocks = tl.load(block_counts + sequence)

    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out += sequence.to(tl.int64) * out_token_stride + kv_head * GROUP * out_head_stride
    out_tile = out + heads[:, None] * out_head_stride + dims[None, :]
    if seq_len == 0:
        if split == 0:
            tl.store(out_tile, tl.zeros([BLOCK_M, DIM], out.dtype.element_ty), mask=mask)
        return
    if SHARED:
        # From here on the sequence begins with its first own block.
        done = tl.load(shared_blocks + sequence)
        num_blocks -= done
        block_tables += done
        block_starts += done
    first, num_tiles, used = _tiles_and_splits(
        seq_len, num_blocks, window, num_splits, min_tiles, BLOCK_SIZE, BLOCK_N, WINDOW
    )
    if split >= used:
        return

    query += sequence.to(tl.int64) * query_token_stride + kv_head * GROUP * query_head_stride
    query_tile = tl.load(
        query + heads[:, None] * query_head_stride + dims[None, :], mask=mask, other=0.0
    )
    if SHARED:
        # The first split goes on from what is known.
        known = tl.load(shared_firsts + sequence).to(tl.int64) * (NUM_KV_HEADS * GROUP)
        known += kv_head * GROUP
        output, largest, total = _merge(
            shared_outputs + known * HEAD_DIM,
            shared_logs + known,
            tl.where(split == 0, tl.load(shared_counts + sequence), 0),
            LINES=GROUP,
            STRIDE=NUM_KV_HEADS * GROUP,
            PADDED=BLOCK_M,
            CHUNK=SHARED_CHUNK,
            HEAD_DIM=HEAD_DIM,
            DIM=DIM,
        )
    else:
        output = tl.zeros([BLOCK_M, DIM], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    output, largest, total = _attend(
        output,
        largest,
        total,
        query_tile,
        tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1),
        first + split * num_tiles // used,
        first + (split + 1) * num_tiles // used,
        block_tables + seat * table_stride,
        block_starts + seat * starts_stride,
        num_blocks,
        seq_len,
        keys + kv_head * (BLOCK_SIZE * HEAD_DIM),
        values + kv_head * (BLOCK_SIZE * HEAD_DIM),
        cap_factor,
        factor,
        window,
        BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
        DIM=DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        HOLES=True,
        CAUSAL=False,
        WINDOW=WINDOW,
        SOFT_CAP=SOFT_CAP,
    )
    # With a window, a split may have met no key that its query sees; its log is then -inf.
    total = tl.where(total > 0, total, 1.0)
    output = output / total[:, None]
    if used == 1:
        tl.store(out_tile, output.to(out.dtype.element_ty), mask=mask)
    else:
        line = (sequence * NUM_KV_HEADS + kv_head) * num_splits * GROUP
        lines = line + split * GROUP + heads
        tl.store(logs + lines, largest + tl.log2(total), mask=heads < GROUP)
        tl.store(partials + lines[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
        if FUSED:
            # All threads' stores come before the arrival, which makes them visible to whoever
            # counts it.
            tl.debug_barrier()
            arrival = arrivals + sequence * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == used - 1:
                merged, _, merged_total = _merge(
                    partials + line * HEAD_DIM,
                    logs + line,
                    used,
                    LINES=GROUP,
                    STRIDE=GROUP,
                    PADDED=HEADS,
                    CHUNK=CHUNK,
                    HEAD_DIM=HEAD_DIM,
                    DIM=DIM,
                )
                own = tl.arange(0, HEADS)
                tl.store(
                    out + own[:, None] * out_head_stride + dims[None, :],
                    _normalized(merged, merged_total).to(out.dtype.element_ty),
                    mask=(own < GROUP)[:, None] & (dims < HEAD_DIM)[None, :],
                )
                tl.store(arrival, 0)


@triton.jit(
    do_not_specialize=["window", "num_splits", "min_tiles"],
    do_not_specialize_on_alignment=["seq_lens", "block_counts", "shared_blocks"],
)
def _merge_kernel(
    out,
    partials,
    logs,
    seq_lens,
    block_counts,
    shared_blocks,
    window,
    out_token_stride,
    out_head_stride,
    num_splits,
    min_tiles,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head, sequence = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + sequence)
    num_blocks = tl.load(block_counts + sequence)
    if SHARED:
        num_blocks -= tl.load(shared_blocks + sequence)
    _, _, used = _tiles_and_splits(
        seq_len, num_blocks, window, num_splits, min_tiles, BLOCK_SIZE, BLOCK_N, WINDOW
    )
    if seq_len == 0 or used == 1:
        return  # the decode kernel has written the output
    num_kv_heads = tl.num_programs(0) // GROUP
    line = (sequence * num_kv_heads + head // GROUP) * num_splits * GROUP + head % GROUP
    merged, _, total = _merge(
        partials + line * HEAD_DIM,
        logs + line,
        used,
        LINES=1,
        STRIDE=GROUP,
        PADDED=1,
        CHUNK=CHUNK,
        HEAD_DIM=HEAD_DIM,
        DIM=DIM,
    )
    dims = tl.arange(0, DIM)
    out += sequence.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(
        out + dims[None, :],
        _normalized(merged, total).to(out.dtype.element_ty),
        mask=(dims < HEAD_DIM)[None, :],
    )


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=[
        "rows",
        "query_starts",
        "seq_lens",
        "tile_rows",
        "tile_queries",
        "tile_ends",
    ],
)
def _prefill_kernel(
    query,
    keys,
    values,
    out,
    rows,
    query_starts,
    seq_lens,
    tile_rows,
    tile_queries,
    tile_ends,
    block_tables,
    block_starts,
    cap_factor,
    factor,
    window,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    starts_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    # KV heads are the faster axis, so that the heaviest tiles of all of them start first.
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.load(tile_ends + tile)
    if num_blocks == 0:
        return
    sequence = tl.load(tile_rows + tile)
    first_row = tl.load(tile_queries + tile)
    seat = tl.load(rows + sequence).to(tl.int64)
    seq_len = tl.load(seq_lens + sequence)
    first_token = tl.load(query_starts + sequence)
    num_tokens = tl.load(query_starts + sequence + 1) - first_token
    table = block_tables + seat * table_stride
    starts = block_starts + seat * starts_stride

    row = first_row + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    dims = tl.arange(0, DIM)
    mask = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    at = (first_token + token).to(tl.int64)
    query_tile = tl.load(
        query + (at * query_token_stride + head * query_head_stride)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    context = seq_len - num_tokens
    positions = context + token
    first_position = context + first_row // GROUP

    output = tl.zeros([BLOCK_M, DIM], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    keys += kv_head * (BLOCK_SIZE * HEAD_DIM)
    values += kv_head * (BLOCK_SIZE * HEAD_DIM)
    end = tl.cdiv(num_blocks * BLOCK_SIZE, BLOCK_N)
    if WINDOW:
        causal = tl.maximum(first_position - window + 1, 0) // BLOCK_N
    else:
        # Blocks before the one of the tile's first token are seen by all its tokens. Of the
        # blocks behind, each starts at the position of one of the tile's tokens.
        behind = num_blocks - 1 - tl.arange(0, BLOCK_M)
        later = tl.load(starts + behind, mask=behind >= 0, other=0) > first_position
        seen_by_all = num_blocks - 1 - tl.sum(later.to(tl.int32), 0)
        causal = seen_by_all * BLOCK_SIZE // BLOCK_N
        # Without a hole among them, their keys need no mask at all.
        whole = tl.where(tl.load(starts + seen_by_all) == seen_by_all * BLOCK_SIZE, causal, 0)
        output, largest, total = _attend(
            output,
            largest,
            total,
            query_tile,
            positions,
            0,
            whole,
            table,
            starts,
            num_blocks,
            seq_len,
            keys,
            values,
            cap_factor,
            factor,
            window,
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
            positions,
            whole,
            causal,
            table,
            starts,
            num_blocks,
            seq_len,
            keys,
            values,
            cap_factor,
            factor,
            window,
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
    output, largest, total = _attend(
        output,
        largest,
        total,
        query_tile,
        positions,
        causal,
        end,
        table,
        starts,
        num_blocks,
        seq_len,
        keys,
        values,
        cap_factor,
        factor,
        window,
        BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
        DIM=DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        HOLES=True,
        CAUSAL=True,
        WINDOW=WINDOW,
        SOFT_CAP=SOFT_CAP,
    )
    output = _normalized(output, total)
    tl.store(
        out + (at * out_token_stride + head * out_head_stride)[:, None] + dims[None, :],
        output.to(out.dtype.element_ty),
        mask=mask,
    )
