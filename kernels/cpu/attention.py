"""Attention over the paged pool in plain torch: gather the blocks, then dense attention.

Correct for every shape, head size and data type; the reference for faster kernels, and what is
used where there is none.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..paging import KVLayer, PagedBatch

__all__ = ["GatherAttention"]

_GROUP_SLOTS = 8192
"""Slots gathered at once for sequences that decode: bounds the copy, and keeps it in cache."""


class _Group:
    """Sequences of equal query length whose keys are gathered together.

    :ivar tokens: [n, Q] index of their tokens in the step.
    :ivar rows: [n * M] their blocks.
    :ivar key_positions: [n, M * block_size] position in each slot; -1 in holes.
    """

    def __init__(
        self, batch: PagedBatch, sequences: list[int], block_size: int, num_blocks: int
    ) -> None:
        length = batch.query_starts[sequences[0] + 1] - batch.query_starts[sequences[0]]
        index = torch.tensor(sequences)
        first = torch.tensor([batch.query_starts[s] for s in sequences])
        self.tokens = first[:, None] + torch.arange(length)
        self.rows = batch.block_tables[index, :num_blocks].reshape(-1)
        starts = batch.block_starts[index, : num_blocks + 1]
        positions = starts[:, :-1, None] + torch.arange(block_size)
        filled = positions < starts[:, 1:, None]
        self.key_positions = torch.where(filled, positions, -1).view(len(sequences), -1)
        self.query_positions = batch.positions[self.tokens]
        self.num_sequences = len(sequences)
        self.num_queries = length
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[n, 1, Q, M * block_size] to be added to the scores, or None if nothing is masked."""
        if window not in self._masks:
            keys = self.key_positions[:, None, None, :]
            queries = self.query_positions[:, None, :, None]
            seen = (keys >= 0) & (keys <= queries)
            if window is not None:
                seen &= keys > queries - window
            self._masks[window] = (
                None
                if bool(seen.all())
                else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            )
        return self._masks[window]


class GatherAttention:
    """Attention of one step. Made once a step, called once a layer.

    :param batch: the step's sequences.
    :param block_size: slots per block.
    :param scale: factor of the scores, usually 1 / sqrt(head_dim).
    """

    def __init__(self, batch: PagedBatch, *, block_size: int, scale: float) -> None:
        self._batch = batch
        self._scale = scale
        self._block_size = block_size
        self._groups = list(self._plan())

    def _plan(self) -> list[_Group]:
        batch, size = self._batch, self._block_size
        # Blocks in use, from the starts: those that begin before the sequence's end.
        ends = torch.tensor(batch.seq_lens)[:, None]
        used = (batch.block_starts[:, :-1] < ends).sum(1).tolist()
        decoding = []
        groups = []
        for s in range(len(batch.seq_lens)):
            if batch.query_starts[s + 1] - batch.query_starts[s] == 1:
                decoding.append(s)
            else:
                groups.append(_Group(batch, [s], size, used[s]))
        # Alike lengths together, since all are padded to the longest of their group.
        decoding.sort(key=lambda s: used[s])
        while decoding:
            longest = used[decoding[-1]]
            count = max(1, _GROUP_SLOTS // (longest * size))
            groups.append(_Group(batch, decoding[-count:], size, longest))
            del decoding[-count:]
        return groups

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
        size, slots = self._block_size, self._batch.slots
        blocks, offsets = slots // size, slots % size
        cache.keys[blocks, :, offsets] = key
        cache.values[blocks, :, offsets] = value

        num_heads, dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        grouped = num_heads // num_kv_heads
        output = torch.empty_like(query)
        for group in self._groups:
            n, q = group.num_sequences, group.num_queries
            keys = self._gather(cache.keys, group)
            values = self._gather(cache.values, group)
            mask = group.mask(window, query.dtype)
            queries = query[group.tokens].view(n, q, num_kv_heads, grouped, dim)
            if q == 1:
                # The query heads of one KV head stand where the queries of one head do.
                out = scaled_dot_product_attention(
                    queries[:, 0], keys, values, attn_mask=mask, scale=self._scale
                ).view(n, 1, num_heads, dim)
            else:
                out = scaled_dot_product_attention(
                    queries.reshape(n, q, num_heads, dim).transpose(1, 2),
                    keys,
                    values,
                    attn_mask=mask,
                    scale=self._scale,
                    enable_gqa=grouped > 1,
                ).transpose(1, 2)
            output[group.tokens] = out
        return output

    @staticmethod
    def _gather(pool: torch.Tensor, group: _Group) -> torch.Tensor:
        """[num_blocks, H, B, D] -> [n, H, M * B, D] of the group's blocks."""
        _, heads, size, dim = pool.shape
        n = group.num_sequences
        gathered = pool.index_select(0, group.rows)
        if n * heads == 1:
            return gathered.view(1, 1, -1, dim)
        return gathered.view(n, -1, heads, size, dim).transpose(1, 2).reshape(n, heads, -1, dim)
