"""Whole blocks between the KV pool of all layers and rows of memory, one row for each block.

A block's keys and values of a layer are one piece that lies together; its pieces lie far apart, a
stride from layer to layer. A kernel that takes them all together makes one launch of what would
be `2 * num_layers` small copies for every block. It moves words, whatever they hold, so that what
comes back is what went, bit for bit.

The memory is the device's, or pinned memory of the host: a GPU reaches that through the address
that CUDA gives it, and Triton asks CUDA for the address of every tensor it is given.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["blocks_to_rows", "rows_to_blocks"]

_TILE = 4096
"""Words that a program moves at a time: eight runs of 16 bytes for every thread."""
_WARPS = 4
_AT_A_TIME = 64 * _TILE
"""A tenth of what it takes to keep a GPU's memory busy, and most of its multiprocessors left to
what computes meanwhile."""


def blocks_to_rows(
    pool: Tensor,
    blocks: Tensor,
    memory: Tensor,
    rows: Tensor | None = None,
    *,
    at_a_time: int = _AT_A_TIME,
) -> None:
    """Copy blocks of the pool to rows of memory.

    A row holds layer after layer, of each the keys, then the values.

    :param pool: `[num_layers, 2, num_blocks, ...]`, keys and values; the first three dimensions
        may have any strides, the rest lies together and is a multiple of 4 bytes.
    :param blocks: `[n]` int32, of the pool; on its device.
    :param memory: `[m, bytes of a block]` uint8, bytes of a row together; rows begin at multiples
        of 4 bytes. Changed.
    :param rows: `[n]` int32, of `memory`; None for the first n. On the pool's device.
    :param at_a_time: words that are on their way at a time, about; so many keep a GPU's programs
        from what else it computes.
    :raises ValueError: if a row is not as long as a block.
    """
    _copy(pool, blocks, memory, rows, at_a_time, to_pool=False)


def rows_to_blocks(
    memory: Tensor,
    rows: Tensor | None,
    pool: Tensor,
    blocks: Tensor,
    *,
    at_a_time: int = _AT_A_TIME,
) -> None:
    """Copy rows of memory to blocks of the pool, which is changed.

    The parameters are those of `blocks_to_rows`.
    """
    _copy(pool, blocks, memory, rows, at_a_time, to_pool=True)


def _copy(
    pool: Tensor,
    blocks: Tensor,
    memory: Tensor,
    rows: Tensor | None,
    at_a_time: int,
    *,
    to_pool: bool,
) -> None:
    layers, parts, num_blocks = pool.shape[:3]
    pieces = pool.view(layers, parts, num_blocks, -1).view(torch.int32)
    words, lines = pieces.shape[3], memory.view(torch.int32)
    if lines.shape[1] != layers * parts * words:
        raise ValueError(
            f"a row of {memory.shape[1]} bytes for a block of {4 * layers * parts * words}"
        )
    if len(blocks) == 0:
        return
    tile = min(_TILE, triton.next_power_of_2(words))
    items = len(blocks) * layers * parts * triton.cdiv(words, tile)
    _copy_kernel[(max(1, min(items, at_a_time // tile)),)](
        pieces,
        blocks,
        lines,
        blocks if rows is None else rows,
        len(blocks),
        LAYER_STRIDE=pieces.stride(0),
        PART_STRIDE=pieces.stride(1),
        BLOCK_STRIDE=pieces.stride(2),
        ROW_STRIDE=lines.stride(0),
        PARTS=parts,
        PIECES=layers * parts,
        WORDS=words,
        TILE=tile,
        HAS_ROWS=rows is not None,
        TO_POOL=to_pool,
        num_warps=_WARPS,
    )


# How many blocks there are, and where their numbers begin, must not compile a kernel anew.
@triton.jit(
    do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["blocks_ptr", "rows_ptr"]
)
def _copy_kernel(
    pool_ptr,
    blocks_ptr,
    memory_ptr,
    rows_ptr,
    num_blocks,
    LAYER_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """One program: every so many-th tile of the pieces of all blocks. Strides are in words."""
    TILES: tl.constexpr = (WORDS + TILE - 1) // TILE
    for item in range(tl.program_id(0), num_blocks * PIECES * TILES, tl.num_programs(0)):
        index = item // (PIECES * TILES)
        piece = item // TILES % PIECES
        word = item % TILES * TILE + tl.arange(0, TILE)
        here = word < WORDS
        # A pool is larger than what 32 bits can count.
        block = tl.load(blocks_ptr + index).to(tl.int64)
        row = tl.cast(index, tl.int64)
        if HAS_ROWS:
            row = tl.load(rows_ptr + index).to(tl.int64)
        layer, part = tl.cast(piece // PARTS, tl.int64), tl.cast(piece % PARTS, tl.int64)
        pool_ptrs = pool_ptr + layer * LAYER_STRIDE + part * PART_STRIDE + block * BLOCK_STRIDE
        memory_ptrs = memory_ptr + row * ROW_STRIDE + piece * WORDS
        if TO_POOL:
            tl.store(pool_ptrs + word, tl.load(memory_ptrs + word, mask=here), mask=here)
        else:
            tl.store(memory_ptrs + word, tl.load(pool_ptrs + word, mask=here), mask=here)
