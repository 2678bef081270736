"""The KV tensors, and how many blocks fit into the memory given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ragserve.kernels import KVLayer

from .block_pool import BlockLayout
from .errors import OutOfMemoryError

if TYPE_CHECKING:
    from .models import ModelConfig

__all__ = ["KVCache", "available_memory", "plan_blocks"]

_DEFAULT_BYTES = 1 << 30


def available_memory() -> int:
    """Bytes of memory that could be taken now without swapping, as the system sees it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: what is free is the best that the standard library can tell
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
        raise OutOfMemoryError(
            f"kv_cache_bytes={budget} holds {num_blocks} blocks of {block_size} tokens and one "
            f"sequence of max_model_len={max_model_len} needs {needed} "
            f"({needed * bytes_per_block} bytes); raise kv_cache_bytes to that, or lower "
            f"max_model_len to {num_blocks * block_size}"
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
