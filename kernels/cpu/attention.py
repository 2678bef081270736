"""Attention over the paged pool in plain torch: gather the blocks, then dense attention.

Correct for every shape, head size and data type; the reference for faster kernels, and what is
used where there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..paging import KVLayer, PagedBatch

__all__ = ["GatherAttention"]

_GROUP_SLOTS = 8192
"""Slots gathered at once for sequences that decode: bounds the copy, and keeps it in cache."""

_TILE_QUERIES = 64
"""Queries of a prompt computed at once: their scores stay in cache, and keys that come after
them are left out of the product rather than masked."""

_HOLE = torch.iinfo(torch.int64).max
"""Position of a slot without a token: later than every query's, so that none sees it."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a group, and the slots that one of them at least sees.

    :param tokens: [n, Q] index of the queries in the step.
    :param slots: the slots, of M * block_size.
    :param hidden: [n, 1, 1, Q, m] what a query does not see of the last m of these slots; it
        sees all that come before.
    """

    tokens: torch.Tensor
    slots: slice
    hidden: torch.Tensor


class _Group:
    """Sequences of equal query length whose keys are gathered together.

    :param sequences: n of the batch's.
    :param num_blocks: M, as many as the longest of them uses.
    :ivar rows: [n * num_kv_heads * M] of the pool as [num_blocks * num_kv_heads, ...].
    :ivar holes: those of the n * num_kv_heads * M * block_size gathered slots that hold no token.
    """

    def __init__(
        self,
        batch: PagedBatch,
        sequences: list[int],
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
    ) -> None:
        self.num_sequences = len(sequences)
        index = torch.tensor(sequences)
        first = torch.tensor([batch.query_starts[s] for s in sequences])
        length = batch.query_starts[sequences[0] + 1] - batch.query_starts[sequences[0]]
        self._tokens = first[:, None] + torch.arange(length)
        self._query_positions = batch.positions[self._tokens]
        starts = batch.block_starts[index, : num_blocks + 1]
        positions = starts[:, :-1, None] + torch.arange(block_size)
        empty = positions >= starts[:, 1:, None]
        self._key_positions = positions.masked_fill_(empty, _HOLE).flatten(1)
        heads = torch.arange(num_kv_heads)[:, None]
        blocks = batch.block_tables[index, None, :num_blocks]
        self.rows = (blocks * num_kv_heads + heads).flatten()
        empty = empty[:, None].expand(-1, num_kv_heads, -1, -1)
        self.holes = empty.flatten().nonzero().squeeze(1)
        self._tiles: dict[int | None, list[_Tile]] = {}

    def tiles(self, window: int | None) -> list[_Tile]:
        """All queries, in tiles; made once per window."""
        if window not in self._tiles:
            self._tiles[window] = list(self._make_tiles(window))
        return self._tiles[window]

    def _make_tiles(self, window: int | None) -> Iterator[_Tile]:
        keys = self._key_positions[:, None, :]
        parts = (x.split(_TILE_QUERIES, dim=1) for x in (self._tokens, self._query_positions))
        for tokens, positions in zip(*parts, strict=True):
            queries = positions[:, :, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            unseen = hidden.all(0).all(0)
            used = (~unseen).nonzero()
            start, stop = int(used[0]), int(used[-1]) + 1
            hidden = hidden[:, :, start:stop]
            partly = hidden.any(0).any(0).nonzero()
            clear = int(partly[0]) if len(partly) else stop - start
            yield _Tile(tokens, slice(start, stop), hidden[:, None, None, :, clear:].contiguous())


class GatherAttention:
    """Attention of one step. Made once a step, called once a layer.

    :param batch: the step's sequences.
    :param block_size: slots per block.
    :param num_kv_heads: heads of keys and values.
    :param scale: factor of the scores, usually 1 / sqrt(head_dim).
    """

    def __init__(
        self, batch: PagedBatch, *, block_size: int, num_kv_heads: int, scale: float
    ) -> None:
        self._scale = scale
        blocks, offsets = batch.slots // block_size, batch.slots % block_size
        heads = torch.arange(num_kv_heads)
        # [T * num_kv_heads] of the pool as [num_blocks * num_kv_heads * block_size, head_dim]
        self._stored = (
            (blocks[:, None] * num_kv_heads + heads) * block_size + offsets[:, None]
        ).flatten()
        self._groups = list(_groups(batch, block_size, num_kv_heads))
        # Reused by all layers: fresh memory of this size would cost page faults in each.
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVLayer,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `paging.Attention`."""
        dim = query.shape[-1]
        cache.keys.view(-1, dim).index_copy_(0, self._stored, key.reshape(-1, dim))
        cache.values.view(-1, dim).index_copy_(0, self._stored, value.reshape(-1, dim))
        if self._gathered is None:
            most = max(len(group.rows) for group in self._groups)
            shape = (most, *cache.keys.shape[2:])
            self._gathered = cache.keys.new_empty(shape), cache.values.new_empty(shape)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            keys = self._gather(cache.keys, group, self._gathered[0])
            values = self._gather(cache.values, group, self._gathered[1])
            # What was left in unwritten slots may be NaN, which a weight of 0 does not remove.
            values.view(-1, dim).index_fill_(0, group.holes, 0)
            for tile in group.tiles(window):
                output[tile.tokens] = self._attend(query[tile.tokens], keys, values, tile)
        return output

    @staticmethod
    def _gather(pool: torch.Tensor, group: _Group, out: torch.Tensor) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim] -> [n, num_kv_heads, M * block_size,
        head_dim] of the group's blocks, in the memory of `out`."""
        out = out[: len(group.rows)]
        torch.index_select(pool.flatten(0, 1), 0, group.rows, out=out)
        return out.view(group.num_sequences, pool.shape[1], -1, pool.shape[-1])

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: _Tile
    ) -> torch.Tensor:
        """Outputs of a tile's queries, [n, Q, num_heads, head_dim] like them."""
        n, num_queries, num_heads, dim = query.shape
        kv_heads = keys.shape[1]
        keys, values = keys[:, :, tile.slots], values[:, :, tile.slots]
        # The queries of all heads that share a KV head meet its keys in one product.
        query = query.view(n, num_queries, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        scores = query.reshape(n, kv_heads, -1, dim) @ keys.transpose(2, 3)
        scores *= self._scale
        num_slots, num_hidden = scores.shape[-1], tile.hidden.shape[-1]
        scores.view(n, kv_heads, -1, num_queries, num_slots)[
            ..., num_slots - num_hidden :
        ].masked_fill_(tile.hidden, float("-inf"))
        output = scores.softmax(-1) @ values
        output = output.view(n, kv_heads, -1, num_queries, dim).permute(0, 3, 1, 2, 4)
        return output.reshape(n, num_queries, num_heads, dim)


def _groups(batch: PagedBatch, block_size: int, num_kv_heads: int) -> Iterator[_Group]:
    """Each sequence with several queries on its own; those with one together."""
    # Blocks in use, from the starts: those that begin before the sequence's end.
    ends = torch.tensor(batch.seq_lens)[:, None]
    used = (batch.block_starts[:, :-1] < ends).sum(1).tolist()
    decoding = []
    for s, (first, last) in enumerate(itertools.pairwise(batch.query_starts)):
        if last - first == 1:
            decoding.append(s)
        else:
            yield _Group(batch, [s], used[s], block_size, num_kv_heads)
    # Alike lengths together, since all are padded to the longest of their group.
    decoding.sort(key=lambda s: used[s])
    while decoding:
        longest = used[decoding[-1]]
        count = max(1, _GROUP_SLOTS // (longest * block_size))
        yield _Group(batch, decoding[-count:], longest, block_size, num_kv_heads)
        del decoding[-count:]
