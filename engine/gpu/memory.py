"""What fits on a GPU: the KV pool gets what the rest leaves of the memory that is free."""

from __future__ import annotations

import gc
import itertools

import torch

from ..cache.layout import BlockLayout
from ..config import EngineConfig
from ..errors import OutOfMemoryError

__all__ = [
    "clear_workspaces",
    "free_memory",
    "plan_gpu_blocks",
    "release_memory",
    "tensor_bytes",
]

_MIB = 1 << 20
_RESERVE = 256 * _MIB
"""Kept for what is not ours to count: cuBLAS's workspace, kernels, the bookkeeping of graphs."""


def free_memory(device: torch.device) -> int:
    """Bytes of the device that can be allocated now, whoever has the rest."""
    if device.type != "cuda":
        return 1 << 40
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def release_memory(device: torch.device) -> None:
    """Give the device's memory back that no tensor uses any more."""
    if device.type != "cuda":
        return
    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()


def clear_workspaces() -> None:
    """Let go of cuBLAS's workspaces, one for each stream that it was ever used on.

    Torch allocates a new one where it is next needed. What is enqueued goes on safely: the
    allocator gives memory of a stream to that stream alone, and frees it only when the device is
    idle.
    """
    torch._C._cuda_clearCublasWorkspaces()


def tensor_bytes(owner: object) -> int:
    """Bytes of the device tensors that an object holds itself, alone or in lists; views of one
    memory count once."""
    names = getattr(owner, "__slots__", None) or vars(owner)
    values = [getattr(owner, name) for name in names]
    lists = [value for value in values if isinstance(value, list)]
    tensors = [v for v in itertools.chain(values, *lists) if isinstance(v, torch.Tensor)]
    storages = (t.untyped_storage() for t in tensors if not t.is_pinned())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def plan_gpu_blocks(
    config: EngineConfig,
    *,
    block_bytes: int,
    max_model_len: int,
    free_at_open: int,
    used: int,
) -> int:
    """How many blocks the pool gets.

    :param block_bytes: of one block, all layers.
    :param free_at_open: free memory before anything of this engine was allocated.
    :param used: what weights and buffers take of it.
    :raises OutOfMemoryError: if a sequence of `max_model_len` tokens does not fit, or if
        `kv_cache_bytes` asks for more than there is.
    """
    size = config.block_size
    needed = BlockLayout((max_model_len,), size).num_blocks(max_model_len)
    left = free_at_open - used - _RESERVE
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes > left:
            raise OutOfMemoryError(
                f"kv_cache_bytes={config.kv_cache_bytes} was asked for and {max(0, left)} fit: "
                f"{free_at_open} bytes of the device are free, weights and buffers take {used} "
                f"and {_RESERVE} are kept for libraries; lower kv_cache_bytes, "
                f"max_num_batched_tokens={config.max_num_batched_tokens} or "
                f"max_num_seqs={config.max_num_seqs}"
            )
        budget, source = config.kv_cache_bytes, f"kv_cache_bytes={config.kv_cache_bytes}"
    else:
        # A share of what is free, not of the card: other tenants' memory is not ours to count.
        budget = int(free_at_open * config.gpu_memory_utilization) - used - _RESERVE
        source = (
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {free_at_open} bytes "
            f"free, less {used} for weights and buffers,"
        )
    num_blocks = max(0, budget) // block_bytes
    if num_blocks < needed:
        fits = num_blocks * size
        raise OutOfMemoryError(
            f"{source} leaves {max(0, budget)} bytes, which hold {num_blocks} blocks of {size} "
            f"tokens, and one sequence of max_model_len={max_model_len} needs {needed} "
            f"({needed * block_bytes} bytes); lower max_model_len"
            + (f" to {fits}" if fits > 1 else "")
            + ", max_num_batched_tokens or max_num_seqs, or give it more memory"
        )
    return num_blocks
