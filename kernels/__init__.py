"""Tensors in, tensors out: one function per operation.

What is here runs on a CPU; `triton` is a face of its own, with what a GPU runs. `reference` holds
the float32 oracle of each.
"""

from __future__ import annotations

from torch import Tensor

from . import philox, reference
from .cpu import ops as torch_ops
from .cpu.attention import GatherAttention
from .cpu.native import NativeDecoder, NativeLayer, NativeOps, NativeUnavailableError
from .cpu.native import load as load_native
from .paging import Attention, KVLayer, PagedBatch
from .sharing import SharedRun, Sharing, shared_runs

__all__ = [
    "Attention",
    "KVLayer",
    "NativeDecoder",
    "NativeLayer",
    "NativeOps",
    "NativeUnavailableError",
    "PagedBatch",
    "SharedRun",
    "Sharing",
    "apply_rope",
    "load_native",
    "philox",
    "plan_attention",
    "reference",
    "rms_norm",
    "shared_runs",
    "silu_and_mul",
]


def plan_attention(
    batch: PagedBatch, *, block_size: int, num_kv_heads: int, scale: float
) -> Attention:
    """Prepare attention over the paged pool for one step; call the result once per layer.

    :param batch: the step's sequences.
    :param block_size: slots per block.
    :param num_kv_heads: heads of keys and values.
    :param scale: factor of the scores, usually 1 / sqrt(head_dim).
    """
    return GatherAttention(batch, block_size=block_size, num_kv_heads=num_kv_heads, scale=scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32.

    :param x: `[..., n]`.
    :param weight: `[n]`.
    :param eps: added to the mean square.
    """
    return torch_ops.rms_norm(x, weight, eps)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, first half of a head against its second.

    :param q: `[tokens, num_heads, head_dim]`; strided views are fine, the result is new.
    :param k: `[tokens, num_kv_heads, head_dim]`.
    :param cos: `[tokens, head_dim / 2]`, in the dtype of `q`; `sin` likewise.
    """
    return torch_ops.apply_rope(q, k, cos, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension.

    :param gate_up: `[..., 2 n]`. Returns `[..., n]`.
    """
    return torch_ops.silu_and_mul(gate_up)
