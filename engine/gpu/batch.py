"""A plan as the arrays that one eager step reads: prompts, and decodes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragserve.kernels.triton import prefill_tiles

from ..scheduler import ScheduledChunk
from .seats import Seats
from .stream import Staging

__all__ = ["MixedBatch", "pack_batch", "pack_nobody"]

_ALIGN = 32
"""int32s that every uploaded array is aligned to, so that all steps look alike to a kernel."""


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Tensors of one step, int32 on the device unless said. Sequences of one token come first.

    :param order: of the step's sequences: indices of the plan's chunks.
    :param num_tokens: T.
    :param num_singles: sequences of one token: token t is sequence t for these.
    :param token_ids: [T]; -(seat + 1) for the token that the seat holds.
    :param positions: [T].
    :param kv_slots: [T] int64.
    :param rows: [S] seats.
    :param query_starts: [S + 1].
    :param seq_lens: [S], the step's tokens included.
    :param block_counts: [S] blocks in use.
    :param tile_rows: [n], see `paged_prefill`; `tile_queries` and `tile_ends` likewise.
    :param sampled: indices into `order` of the m sequences that are due a token.
    :param sampled_tokens: [m] index of each one's last token.
    :param sampled_seats: [m].
    :param next_positions: [m] of the token to be sampled; 0 if the host samples it.
    """

    order: list[int]
    num_tokens: int
    num_singles: int
    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    rows: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_counts: Tensor
    tile_rows: Tensor
    tile_queries: Tensor
    tile_ends: Tensor
    sampled: list[int]
    sampled_tokens: Tensor
    sampled_seats: Tensor
    next_positions: Tensor


def pack_batch(
    chunks: Sequence[ScheduledChunk],
    seats: Seats,
    staging: Staging,
    *,
    block_size: int,
    group: int,
    block_m: int,
) -> MixedBatch:
    """Lay out a plan's chunks and bring them to the device, all in one copy.

    :param chunks: of one token per sequence or more; all of them have a seat already.
    :param group: query heads per KV head.
    :param block_m: rows of a prefill tile.
    """
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
    ordered = [chunks[index] for index in order]
    lengths = np.array([chunk.num_tokens for chunk in ordered])
    num_singles = int((lengths == 1).sum())
    rows = [seats.seat(chunk.request) for chunk in ordered]
    ends = [chunk.end for chunk in ordered]
    counts = [chunk.request.layout.num_blocks(chunk.end) for chunk in ordered]
    num_tokens = int(lengths.sum())
    token_ids = np.empty(num_tokens, dtype=np.int32)
    positions = np.empty(num_tokens, dtype=np.int32)
    kv_slots = np.empty(num_tokens, dtype=np.int64)
    if num_singles:
        seated, last = np.array(rows[:num_singles]), np.array(counts[:num_singles]) - 1
        positions[:num_singles] = np.array(ends[:num_singles]) - 1
        offsets = positions[:num_singles] - seats.starts[seated, last]
        kv_slots[:num_singles] = seats.tables[seated, last] * np.int64(block_size) + offsets
        token_ids[:num_singles] = [
            _input_of(chunk, row)
            for chunk, row in zip(ordered[:num_singles], rows[:num_singles], strict=True)
        ]
    block_starts = []
    query_starts = np.concatenate(([0], np.cumsum(lengths)))
    for s in range(num_singles, len(ordered)):
        chunk, row, count = ordered[s], rows[s], counts[s]
        here = slice(query_starts[s], query_starts[s + 1])
        starts = seats.starts[row, :count]
        at = np.arange(chunk.start, chunk.end)
        block = np.searchsorted(starts, at, side="right") - 1
        token_ids[here] = chunk.request.tokens(chunk.start, chunk.end)
        positions[here] = at
        kv_slots[here] = seats.tables[row][block] * np.int64(block_size) + at - starts[block]
        block_starts.append(starts)
    tiles = prefill_tiles(
        lengths[num_singles:],
        np.array(ends[num_singles:], dtype=np.int64) - lengths[num_singles:],
        block_starts,
        group=group,
        block_m=block_m,
        first=num_singles,
    )
    sampled = [s for s, chunk in enumerate(ordered) if chunk.num_samples]
    host = [ordered[s].request.samples_on_host for s in sampled]
    arrays: dict[str, object] = {
        "kv_slots": kv_slots.view(np.int32),
        "token_ids": token_ids,
        "positions": positions,
        "rows": rows,
        "query_starts": query_starts,
        "seq_lens": ends,
        "block_counts": counts,
        "tile_rows": tiles.rows,
        "tile_queries": tiles.queries,
        "tile_ends": tiles.ends,
        "sampled_tokens": query_starts[[s + 1 for s in sampled]] - 1,
        "sampled_seats": [rows[s] for s in sampled],
        "next_positions": [
            0 if on_host else ends[s] for s, on_host in zip(sampled, host, strict=True)
        ],
    }
    return _on_device(
        arrays,
        staging,
        order=order,
        num_tokens=num_tokens,
        num_singles=num_singles,
        sampled=sampled,
    )


def _input_of(chunk: ScheduledChunk, seat: int) -> int:
    """The one token of a chunk; -(seat + 1) if the device knows it better than we."""
    if chunk.decode and not chunk.request.samples_on_host:
        return -(seat + 1)
    return chunk.request.tokens(chunk.start, chunk.end)[0]


def pack_nobody(num_tokens: int, seat: int, staging: Staging) -> MixedBatch:
    """A batch of a single token and, with more tokens, one prompt, which reads and stores nothing.

    :param seat: of nobody.
    """
    num_sequences = min(num_tokens, 2)
    prompts = num_sequences - 1
    arrays: dict[str, object] = {
        "kv_slots": np.full(num_tokens, -1, dtype=np.int64).view(np.int32),
        "token_ids": [0] * num_tokens,
        "positions": [0] * num_tokens,
        "rows": [seat] * num_sequences,
        "query_starts": [0, 1, num_tokens][: num_sequences + 1],
        "seq_lens": [0] * num_sequences,
        "block_counts": [0] * num_sequences,
        "tile_rows": [1] * prompts,
        "tile_queries": [0] * prompts,
        "tile_ends": [0] * prompts,
        "sampled_tokens": [0],
        "sampled_seats": [seat],
        "next_positions": [0],
    }
    return _on_device(
        arrays,
        staging,
        order=list(range(num_sequences)),
        num_tokens=num_tokens,
        num_singles=1,
        sampled=[0],
    )


def _on_device(
    arrays: dict[str, object],
    staging: Staging,
    *,
    order: list[int],
    num_tokens: int,
    num_singles: int,
    sampled: list[int],
) -> MixedBatch:
    tensors = _upload(arrays, staging)
    tensors["kv_slots"] = tensors["kv_slots"].view(torch.int64)
    return MixedBatch(
        order=order, num_tokens=num_tokens, num_singles=num_singles, sampled=sampled, **tensors
    )


def _upload(arrays: dict[str, object], staging: Staging) -> dict[str, Tensor]:
    """Each array as an int32 tensor on the device, out of one copy."""
    parts: list[NDArray[np.int32]] = [np.asarray(a, dtype=np.int32) for a in arrays.values()]
    places, size = [], 0
    for part in parts:
        places.append(size)
        size += -(-len(part) // _ALIGN) * _ALIGN
    whole = np.zeros(size, dtype=np.int32)
    for place, part in zip(places, parts, strict=True):
        whole[place : place + len(part)] = part
    device = staging.upload(whole)
    return {
        name: device[place : place + len(part)]
        for name, place, part in zip(arrays, places, parts, strict=True)
    }
