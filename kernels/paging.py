"""The shapes that attention over a paged KV pool works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .sharing import SharedRun

__all__ = ["Attention", "KVLayer", "PagedBatch"]


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Keys and values of one layer, for all blocks.

    :param keys: [num_blocks, num_kv_heads, block_size, head_dim].
    :param values: the same shape.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The sequences of one step. S sequences compute T tokens together; a sequence's tokens
    are consecutive and are its last ones.

    :param query_starts: S + 1 offsets of the sequences' tokens in the step's T tokens.
    :param seq_lens: S lengths, the step's tokens included.
    :param block_tables: [S, M] int64, the blocks of each sequence in order; padded with 0.
    :param block_starts: [S, M + 1] int64, position of the first token of each block. Block i
        holds positions `block_starts[i]` to `block_starts[i + 1]` in its first slots; the rest
        of it is a hole. Padded, and ended, with the sequence's length.
    :param slots: [T] int64, where each token's key and value go: block * block_size + offset.
    :param positions: [T] int64, position of each token in its sequence.
    :param shared_runs: blocks that several of the sequences hold, whose keys and values attention
        may read once for all of them. All rows of a run compute one token each; see
        `sharing.shared_runs`. They change the speed only.
    """

    query_starts: list[int]
    seq_lens: list[int]
    block_tables: torch.Tensor
    block_starts: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    shared_runs: Sequence[SharedRun] = ()


class Attention(Protocol):
    """Causal attention of one step's tokens over the pool."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVLayer,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, then attend.

        :param query: [T, num_heads, head_dim].
        :param key: [T, num_kv_heads, head_dim], stored at the batch's slots.
        :param value: like `key`.
        :param cache: the layer's pool; changed.
        :param window: attend to this many positions at most, the own one included.
        :returns: [T, num_heads, head_dim].
        """
