"""The KV tensors, and how many blocks fit into the memory given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ragserve.kernels import KVLayer

from ..cache.layout import BlockLayout
from ..errors import OutOfMemoryError
from ..models.free_memory import available_memory

if TYPE_CHECKING:
    from ..models.config import ModelConfig

__all__ = ["KVCache", "plan_blocks"]

_DEFAULT_BYTES = 1 << 30


def plan_blocks(
    bytes_per_block: int, block_size: int, max_model_len: int, kv_cache_bytes: int | None
) -> int:
    """How many blocks the pool gets.

    :param kv_cache_bytes: the memory for them; None chooses (see `EngineConfig`).
    :raises OutOfMemoryError: if one sequence of `max_model_len` tokens would not fit, or if the
        memory is not there.
    """
    needed = BlockLayout((max_model_len,), block_size).num_blocks(max_model_len)
    available = available_memory()
    if kv_cache_bytes is None:
        budget = max(min(_DEFAULT_BYTES, available // 4), needed * bytes_per_block)
    else:
        budget = kv_cache_bytes
    num_blocks = budget // bytes_per_block
    if num_blocks < needed:
        fits = num_blocks * block_size
        raise OutOfMemoryError(
            f"kv_cache_bytes={budget} holds {num_blocks} blocks of {block_size} tokens, "
            f"{bytes_per_block} bytes each, and one sequence of max_model_len={max_model_len} "
            f"needs {needed} ({needed * bytes_per_block} bytes); raise kv_cache_bytes to that"
            # A sequence has at least one token of prompt and one of answer.
            + (f", or lower max_model_len to {fits}" if fits > 1 else "")
        )
    if budget > available:
        raise OutOfMemoryError(
            f"the KV pool wants {budget} bytes and {available} are available; lower "
            f"kv_cache_bytes, or max_model_len (now {max_model_len})"
        )
    return num_blocks


class KVCache:
    """Keys and values of all layers, for all blocks.

    Memory is reserved here and touched when a block is first written.

    :ivar layers: one `KVLayer` each, [num_blocks, num_kv_heads, block_size, head_dim] twice.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [
            KVLayer(
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in range(config.num_layers)
        ]
