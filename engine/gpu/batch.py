"""A plan as the arrays that a step with prompts reads: prompts, and decodes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragserve.kernels.triton import prefill_tiles

from ..scheduling.plan import ScheduledChunk
from .seats import Seats

__all__ = ["BatchLayout", "BatchTensors", "PackedBatch", "pack_batch"]

_ALIGN = 32
"""int32s that every array is aligned to, so that all steps look alike to a kernel."""


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """Views of a step's upload, int32 unless said. Sequences of one token come first.

    :param token_ids: [T]; -(seat + 1) for the token that the seat holds.
    :param positions: [T].
    :param kv_slots: [T] int64; -1 is not stored.
    :param rows: [S] seats.
    :param query_starts: [S + 1]: token s is the one of sequence s for those of one token.
    :param seq_lens: [S], the step's tokens included; 0 for padding.
    :param block_counts: [S] blocks in use.
    :param tile_rows: [n], see `paged_prefill`; `tile_queries` and `tile_ends` likewise.
    :param sampled_tokens: [m] index of the last token of each sequence that is due a token.
    :param sampled_seats: [m].
    :param next_positions: [m] of the token to be sampled; 0 if the device is not to sample it.
    """

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
    sampled_tokens: Tensor
    sampled_seats: Tensor
    next_positions: Tensor


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How many of everything a step has room for, and so where each array lies.

    :param singles: sequences of one token, which are the first tokens.
    :param tokens: T.
    :param sequences: S.
    :param tiles: of prefill.
    :param samples: m.
    """

    singles: int
    tokens: int
    sequences: int
    tiles: int
    samples: int

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk], *, group: int, block_m: int) -> BatchLayout:
        """Room for just these."""
        lengths = [chunk.num_tokens for chunk in chunks]
        return cls(
            singles=lengths.count(1),
            tokens=sum(lengths),
            sequences=len(lengths),
            tiles=sum(-(-length * group // block_m) for length in lengths if length > 1),
            samples=sum(chunk.num_samples > 0 for chunk in chunks),
        )

    def holds(self, other: BatchLayout) -> bool:
        """Whether a step with `other`'s numbers can be laid out like this."""
        prompts, others = self.sequences - self.singles, other.sequences - other.singles
        return (
            other.singles <= self.singles
            and other.tokens - other.singles <= self.tokens - self.singles
            and others <= prompts
            and other.tiles <= self.tiles
            and other.samples <= self.samples
        )

    def places(self) -> dict[str, slice]:
        """Where each array of `BatchTensors` lies, in int32s."""
        sizes = {
            "kv_slots": 2 * self.tokens,
            "token_ids": self.tokens,
            "positions": self.tokens,
            "rows": self.sequences,
            "query_starts": self.sequences + 1,
            "seq_lens": self.sequences,
            "block_counts": self.sequences,
            "tile_rows": self.tiles,
            "tile_queries": self.tiles,
            "tile_ends": self.tiles,
            "sampled_tokens": self.samples,
            "sampled_seats": self.samples,
            "next_positions": self.samples,
        }
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = slice(start, start + size)
            start += -(-size // _ALIGN) * _ALIGN
        return places

    def size(self) -> int:
        """int32s of an upload."""
        end = max(place.stop for place in self.places().values())
        return int(-(-end // _ALIGN) * _ALIGN)

    def view(self, upload: Tensor) -> BatchTensors:
        """The arrays in an upload."""
        views = {name: upload[place] for name, place in self.places().items()}
        views["kv_slots"] = views["kv_slots"].view(torch.int64)
        return BatchTensors(**views)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A step, to be uploaded.

    :param layout: of the upload.
    :param upload: int32.
    :param order: of the step's sequences: indices of the plan's chunks.
    :param sampled: of the sequences that are due a token: indices of the plan's chunks.
    :param last_tokens: of each sequence in `order`, the index of its last token.
    """

    layout: BatchLayout
    upload: NDArray[np.int32]
    order: list[int]
    sampled: list[int]
    last_tokens: list[int]


def pack_batch(
    chunks: Sequence[ScheduledChunk],
    layout: BatchLayout,
    seats: Seats,
    *,
    block_size: int,
    group: int,
    block_m: int,
) -> PackedBatch:
    """Lay out a plan's chunks.

    :param chunks: of one token per sequence or more; there may be none.
    :param layout: holds them; what they leave of it belongs to nobody.
    :param group: query heads per KV head.
    :param block_m: rows of a prefill tile.
    """
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
    ordered = [chunks[index] for index in order]
    num_singles = sum(chunk.num_tokens == 1 for chunk in ordered)
    singles, prompts = ordered[:num_singles], ordered[num_singles:]
    upload = np.zeros(layout.size(), dtype=np.int32)
    a = {name: upload[place] for name, place in layout.places().items()}
    kv_slots = a["kv_slots"].view(np.int64)
    kv_slots[:] = -1
    a["rows"][:] = a["sampled_seats"][:] = seats.num_seats
    a["query_starts"][:] = layout.tokens
    a["query_starts"][: layout.singles + 1] = np.arange(layout.singles + 1)

    rows = [seats.seat(chunk.request) for chunk in ordered]
    counts = [chunk.request.layout.num_blocks(chunk.end) for chunk in ordered]
    last_tokens = list(range(num_singles))
    # Sequence s of `ordered` is sequence places[s] of the layout.
    places = [*range(num_singles), *range(layout.singles, layout.singles + len(prompts))]
    a["rows"][places] = rows
    a["seq_lens"][places] = [chunk.end for chunk in ordered]
    a["block_counts"][places] = counts
    if singles:
        here = slice(num_singles)
        seated, last = np.array(rows[here]), np.array(counts[here]) - 1
        positions = np.array([chunk.start for chunk in singles])
        a["positions"][here] = positions
        kv_slots[here] = seats.tables[seated, last] * np.int64(block_size)
        kv_slots[here] += positions - seats.starts[seated, last]
        a["token_ids"][here] = [_input_of(c, row) for c, row in zip(singles, rows, strict=False)]
    block_starts, start = [], layout.singles
    for index, chunk in enumerate(prompts):
        row, count = rows[num_singles + index], counts[num_singles + index]
        here = slice(start, start + chunk.num_tokens)
        starts = seats.starts[row, :count]
        at = np.arange(chunk.start, chunk.end)
        block = np.searchsorted(starts, at, side="right") - 1
        a["token_ids"][here] = chunk.request.tokens(chunk.start, chunk.end)
        a["positions"][here] = at
        kv_slots[here] = seats.tables[row][block] * np.int64(block_size) + at - starts[block]
        a["query_starts"][layout.singles + index] = start
        block_starts.append(starts)
        start = here.stop
        last_tokens.append(start - 1)
    a["query_starts"][layout.singles + len(prompts)] = start
    tiles = prefill_tiles(
        [chunk.num_tokens for chunk in prompts],
        [chunk.start for chunk in prompts],
        block_starts,
        group=group,
        block_m=block_m,
        first=layout.singles,
    )
    a["tile_rows"][: len(tiles.rows)] = tiles.rows
    a["tile_queries"][: len(tiles.rows)] = tiles.queries
    a["tile_ends"][: len(tiles.rows)] = tiles.ends
    sampled = [s for s, chunk in enumerate(ordered) if chunk.num_samples]
    a["sampled_tokens"][: len(sampled)] = [last_tokens[s] for s in sampled]
    a["sampled_seats"][: len(sampled)] = [rows[s] for s in sampled]
    a["next_positions"][: len(sampled)] = [
        0 if ordered[s].request.samples_on_host else ordered[s].end for s in sampled
    ]
    return PackedBatch(layout, upload, order, [order[s] for s in sampled], last_tokens)


def _input_of(chunk: ScheduledChunk, seat: int) -> int:
    """The one token of a chunk; -(seat + 1) if the device knows it better than we."""
    if chunk.decode and not chunk.request.samples_on_host:
        return -(seat + 1)
    return chunk.request.tokens(chunk.start, chunk.end)[0]
