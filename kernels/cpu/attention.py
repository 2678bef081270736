"""Attention over the paged pool in plain torch: gather the blocks, then dense attention.

Correct for every shape, head size and data type; the reference for faster kernels, and what is
used where there is none.

Blocks that several decoding sequences share (`PagedBatch.shared_runs`) are gathered once, and meet
the queries of all of them in one product. Each piece of a sequence then gives its own softmax and
the logarithm of the sum that this divided by, by which the pieces are weighed against each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..paging import KVLayer, PagedBatch
from ..sharing import SharedRun

__all__ = ["GatherAttention"]

_GROUP_SLOTS = 8192
"""Slots gathered at once for several sequences: bounds the copy, and keeps it in cache."""

_GROUP_SCORES = 1 << 15
"""Scores of one head that are computed at once for several sequences: as for a prompt's tile."""

_TILE_QUERIES = 64
"""Queries of a prompt computed at once: their scores stay in cache, and the keys that come after
them are left out of the product rather than masked."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a group, and the slots that they see.

    :param tokens: [n, Q] index of the queries in the step.
    :param slots: of the group's M * block_size slots, those that some query may see.
    :param mask: [n, 1, 1, Q, m], added to the scores of the last m of these slots: -inf where a
        query does not see a slot. It sees all slots before the m.
    """

    tokens: torch.Tensor
    slots: slice
    mask: torch.Tensor


class _Blocks:
    """Blocks that are gathered together: M of each of n sequences.

    :param tables: [n, M] the blocks.
    :param starts: [n, M + 1] position of the first token of each, and after the last.
    :ivar positions: [n, M * block_size] position in each slot; in holes, one that nobody has
        reached yet.
    :ivar rows: [n * num_kv_heads * M] of the pool as [num_blocks * num_kv_heads, ...].
    :ivar holes: those of the n * num_kv_heads * M * block_size gathered slots that hold no token.
    :ivar first_hole: the first slot that is a hole in some sequence.
    """

    def __init__(
        self, tables: torch.Tensor, starts: torch.Tensor, block_size: int, num_kv_heads: int
    ) -> None:
        self.num_sequences = len(tables)
        positions = starts[:, :-1, None] + torch.arange(block_size)
        empty = positions >= starts[:, 1:, None]
        self.positions = positions.masked_fill_(empty, torch.iinfo(torch.int64).max).flatten(1)
        self.first_hole = int((~empty.flatten(1).any(0)).int().cumprod(0).sum())
        heads = torch.arange(num_kv_heads)
        self.rows = (tables[:, None] * num_kv_heads + heads[:, None]).flatten()
        empty = empty[:, None].expand(-1, num_kv_heads, -1, -1)
        self.holes = empty.flatten().nonzero().squeeze(1)


class _Group:
    """Sequences whose keys are gathered together.

    :param sequences: n of the batch's.
    :param first_blocks: of all the batch's sequences, where in their tables they begin here.
    :param num_queries: most that one of them has.
    :param num_blocks: M, most that one of them uses from there on.
    """

    def __init__(
        self,
        batch: PagedBatch,
        sequences: list[int],
        first_blocks: Sequence[int],
        num_queries: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
    ) -> None:
        index = torch.tensor(sequences)[:, None]
        first = torch.tensor([batch.query_starts[s] for s in sequences])
        last = torch.tensor([batch.query_starts[s + 1] - 1 for s in sequences])
        self._block_size = block_size
        # A sequence with fewer queries repeats its last one, and stores its output again.
        self._tokens = (first[:, None] + torch.arange(num_queries)).minimum(last[:, None])
        self._queries = batch.positions[self._tokens]
        # Past the table's end there are only holes, of whichever block.
        columns = torch.tensor([[first_blocks[s]] for s in sequences]) + torch.arange(
            num_blocks + 1
        )
        columns.clamp_(max=batch.block_tables.shape[1])
        self._starts = batch.block_starts[index, columns]
        tables = batch.block_tables[
            index, columns[:, :-1].clamp(max=batch.block_tables.shape[1] - 1)
        ]
        self.blocks = _Blocks(tables, self._starts, block_size, num_kv_heads)
        self._tiles: dict[int | None, list[_Tile]] = {}

    def tiles(self, window: int | None, dtype: torch.dtype) -> list[_Tile]:
        """All queries, in tiles; made once per window."""
        if window not in self._tiles:
            self._tiles[window] = [
                self._tile(slice(i, i + _TILE_QUERIES), window, dtype)
                for i in range(0, self._tokens.shape[1], _TILE_QUERIES)
            ]
        return self._tiles[window]

    def _tile(self, part: slice, window: int | None, dtype: torch.dtype) -> _Tile:
        queries = self._queries[:, part]
        own = self._slots_of(queries)
        start, stop, total = 0, int(own.max()) + 1, self.blocks.positions.shape[1]
        clear = min(self.blocks.first_hole, int(own.min()) + 1)
        if window is not None:
            start = clear = int(self._slots_of((queries - window + 1).clamp_(min=0)).min())
        if stop - start > total * 7 // 8:
            start, stop = 0, total  # a slice is not contiguous, which costs more than it saves
            clear = 0 if window is not None else clear
        keys, queries = self.blocks.positions[:, None, clear:stop], queries[:, :, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return _Tile(self._tokens[:, part].contiguous(), slice(start, stop), mask[:, None, None])

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """[n, Q] positions of the sequences -> where of their gathered slots these are."""
        block = torch.searchsorted(self._starts, positions.contiguous(), right=True) - 1
        return block * self._block_size + positions - self._starts.gather(1, block)


class _Run:
    """A shared run, with the queries of all its rows: one sequence that all of them see wholly."""

    def __init__(
        self, batch: PagedBatch, run: SharedRun, block_size: int, num_kv_heads: int
    ) -> None:
        row, columns = run.rows[0], slice(run.first, run.last)
        starts = batch.block_starts[row, None, run.first : run.last + 1]
        tables = batch.block_tables[row, None, columns]
        self.blocks = _Blocks(tables, starts, block_size, num_kv_heads)
        self._tokens = torch.tensor([[batch.query_starts[row] for row in run.rows]])

    def tiles(self, window: int | None, dtype: torch.dtype) -> list[_Tile]:
        """All queries, in tiles; there must be no window that hides something."""
        keys = self.blocks.positions[:, self.blocks.first_hole :]
        hidden = keys == torch.iinfo(torch.int64).max
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return [
            _Tile(tokens, slice(None), mask[:, None, None, None])
            for tokens in self._tokens.split(_TILE_QUERIES, dim=1)
        ]


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
        self._batch, self._block_size, self._num_kv_heads = batch, block_size, num_kv_heads
        self._longest = max(batch.seq_lens)
        covered = [0] * len(batch.seq_lens)
        for run in batch.shared_runs:
            for row in run.rows:
                covered[row] = run.last
        alone = [s for s, blocks in enumerate(covered) if not blocks]
        shared = [s for s, blocks in enumerate(covered) if blocks]
        self._groups = list(_groups(batch, alone, covered, block_size, num_kv_heads))
        self._pieces: list[_Run | _Group] = [
            _Run(batch, run, block_size, num_kv_heads) for run in batch.shared_runs
        ]
        self._pieces += _groups(batch, shared, covered, block_size, num_kv_heads)
        self._shared = torch.tensor([batch.query_starts[s] for s in shared], dtype=torch.int64)
        # For layers whose window hides something: made by the first of them if there are runs.
        self._windowed = None if shared else self._groups
        block, offset = batch.slots[:, None] // block_size, batch.slots[:, None] % block_size
        # [T * num_kv_heads] of the pool as [num_blocks * num_kv_heads * block_size, head_dim].
        stored = (block * num_kv_heads + torch.arange(num_kv_heads)) * block_size + offset
        self._stored = stored.flatten()
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
        windowed = window is not None and window < self._longest
        groups = self._windowed_groups() if windowed else self._groups
        pieces = [] if windowed else self._pieces
        most = max(len(piece.blocks.rows) for piece in (*groups, *pieces))
        if self._gathered is None or len(self._gathered[0]) < most:
            shape = (most, *cache.keys.shape[2:])
            self._gathered = cache.keys.new_empty(shape), cache.values.new_empty(shape)
        for new, pool in ((key, cache.keys), (value, cache.values)):
            dim = new.shape[-1]
            pool.view(-1, dim).index_copy_(0, self._stored, new.reshape(-1, dim))
        output = query.new_empty(query.shape)
        for group in groups:
            keys, values = self._gather(cache, group.blocks)
            for tile in group.tiles(window, query.dtype):
                output[tile.tokens] = self._attend(query[tile.tokens], keys, values, tile)[0]
        if pieces:
            output[self._shared] = self._attend_pieces(query, cache).to(query.dtype)
        return output

    def _attend_pieces(self, query: torch.Tensor, cache: KVLayer) -> torch.Tensor:
        """Outputs of the sequences that share something, [n, num_heads, head_dim] float32."""
        rows, outputs, logs = [], [], []
        for piece in self._pieces:
            keys, values = self._gather(cache, piece.blocks)
            for tile in piece.tiles(None, query.dtype):
                output, scores = self._attend(query[tile.tokens], keys, values, tile)
                log = scores.float().logsumexp(-1).view(len(output), -1, output.shape[1])
                rows.append(tile.tokens.flatten())
                outputs.append(output.flatten(0, 1))
                logs.append(log.transpose(1, 2).flatten(0, 1))
        row, output, log = torch.cat(rows), torch.cat(outputs).float(), torch.cat(logs)
        # All pieces at once: each weighs as much as the sum of its weights, of which `log` is the
        # logarithm.
        index = row[:, None].expand_as(log)
        top = log.new_full(query.shape[:2], float("-inf")).scatter_reduce_(0, index, log, "amax")
        weight = (log - top[row]).exp_()
        total = torch.zeros_like(top).index_add_(0, row, weight)
        sums = query.new_zeros(query.shape, dtype=torch.float32)
        sums.index_add_(0, row, output * weight[..., None])
        return sums[self._shared] / total[self._shared, :, None]

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: _Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of a tile's queries, [n, Q, num_heads, head_dim] like them, and the scores that
        they are of, [n * num_kv_heads, grouped * Q, slots]."""
        n, num_queries, num_heads, dim = query.shape
        kv_heads = keys.shape[0] // n
        grouped = num_heads // kv_heads
        # The queries of all heads that share a KV head meet its keys in one product.
        query = query.view(n, num_queries, kv_heads, grouped, dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(n * kv_heads, grouped * num_queries, dim)
        scores = torch.bmm(query, keys[:, tile.slots].transpose(1, 2)).mul_(self._scale)
        seen = scores.shape[-1] - tile.mask.shape[-1]
        scores.view(n, kv_heads, grouped, num_queries, -1)[..., seen:] += tile.mask
        output = torch.bmm(scores.softmax(-1), values[:, tile.slots])
        output = output.view(n, kv_heads, grouped, num_queries, dim).permute(0, 3, 1, 2, 4)
        return output.reshape(n, num_queries, num_heads, dim), scores

    def _gather(self, cache: KVLayer, blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks, [n * num_kv_heads, M * block_size, head_dim] each."""
        if self._gathered is None:
            raise RuntimeError("no memory to gather into")
        keys, values = self._gathered
        return _gather(cache.keys, blocks, keys), _gather(cache.values, blocks, values)

    def _windowed_groups(self) -> list[_Group]:
        """All sequences, with nothing shared."""
        if self._windowed is None:
            size = len(self._batch.seq_lens)
            self._windowed = list(
                _groups(
                    self._batch, list(range(size)), [0] * size, self._block_size, self._num_kv_heads
                )
            )
        return self._windowed


def _groups(
    batch: PagedBatch,
    sequences: list[int],
    first_blocks: list[int],
    block_size: int,
    num_kv_heads: int,
) -> Iterator[_Group]:
    """Sequences with about as many queries and blocks together: each group costs calls, and each
    sequence in it is padded to the largest."""
    queries = [last - first for first, last in itertools.pairwise(batch.query_starts)]
    # Blocks in use, from the starts: those that begin before the sequence's end.
    ends = torch.tensor(batch.seq_lens)[:, None]
    used = (batch.block_starts[:, :-1] < ends).sum(1).tolist()
    blocks = [end - first for end, first in zip(used, first_blocks, strict=True)]

    def most(sequences: list[int]) -> tuple[int, int]:
        return max(queries[s] for s in sequences), max(blocks[s] for s in sequences)

    def fit(sequences: list[int]) -> bool:
        most_queries, most_blocks = most(sequences)
        return (
            2 * min(queries[s] for s in sequences) > most_queries
            and 2 * min(blocks[s] for s in sequences) >= most_blocks
            and len(sequences) * most_blocks * block_size <= _GROUP_SLOTS
            and len(sequences) * most_queries * most_blocks * block_size <= _GROUP_SCORES
        )

    group: list[int] = []
    for s in sorted(sequences, key=lambda s: (queries[s], blocks[s])):
        if group and not fit([*group, s]):
            yield _Group(batch, group, first_blocks, *most(group), block_size, num_kv_heads)
            group = []
        group.append(s)
    if group:
        yield _Group(batch, group, first_blocks, *most(group), block_size, num_kv_heads)


def _gather(pool: torch.Tensor, blocks: _Blocks, out: torch.Tensor) -> torch.Tensor:
    """[num_blocks, num_kv_heads, block_size, head_dim] -> [n * num_kv_heads, M * block_size,
    head_dim] of the blocks, in the memory of `out`."""
    _, num_kv_heads, _, dim = pool.shape
    out = out[: len(blocks.rows)]
    torch.index_select(pool.flatten(0, 1), 0, blocks.rows, out=out)
    # Holes keep what was last in the memory, maybe NaN, which neither a score of -inf nor a
    # weight of 0 would stop.
    out.view(-1, dim).index_fill_(0, blocks.holes, 0)
    return out.view(blocks.num_sequences * num_kv_heads, -1, dim)
