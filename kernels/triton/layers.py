"""What stands between the matrix products of a layer: norms, RoPE with the store to the KV
pool, and SwiGLU's activation.

All are bound by memory: each reads and writes every element once, computes in float32, and
rounds once, to the dtype of what it writes. One program computes one token, or a piece of one;
nothing but the grid depends on the number of tokens.

Every function takes `pdl`: start while the kernel before still runs (programmatic dependent
launch; CUDA from compute capability 9.0 on). Only tensors that no kernel of the step writes,
that is weights, are then read before that kernel has ended.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paging import KVLayer

__all__ = ["add_rms_norm", "launch_options", "rms_norm", "rope_and_store", "silu_and_mul"]

# Elements of a tile that one warp takes, in each kernel: two, or four, runs of 16 bytes a thread
# in flight at once, with which few tokens end soon and many keep the memory busy.
_NORM_PER_WARP = 512
_ROPE_PER_WARP = 1024
_SILU_BLOCK = 2048
_SILU_WARPS = 4


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, pdl: bool = False) -> None:
    """`out = x / rms(x) * weight` over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    :param x: `[T, n]`, last dimension contiguous, like that of the others.
    :param weight: `[n]`.
    :param out: `[T, n]`; may be `x`.
    :param eps: added to the mean square.
    """
    _launch_norm(x, x, weight, out, eps, pdl, add=False)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, *, eps: float, pdl: bool = False
) -> None:
    """`residual += x`, then `out = rms_norm(residual)`, of the sum as it was rounded.

    :param residual: `[T, n]`, changed.
    :param out: `[T, n]`; may be `x`, must not be `residual`.

    The other parameters are those of `rms_norm`.
    """
    _launch_norm(x, residual, weight, out, eps, pdl, add=True)


def _launch_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, pdl: bool, *, add: bool
) -> None:
    tokens, n = x.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(n)
    _norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        N=n,
        BLOCK=block,
        ADD=add,
        PDL=pdl,
        num_warps=_num_warps(block, _NORM_PER_WARP),
        **launch_options(pdl),
    )


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    here = i < N
    weight = tl.load(weight_ptr + i, mask=here, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * X_STRIDE + i, mask=here, other=0.0)
    if ADD:
        residual_ptrs = residual_ptr + token * RESIDUAL_STRIDE + i
        residual = tl.load(residual_ptrs, mask=here, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptrs, x, mask=here)
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(out_ptr + token * OUT_STRIDE + i, x * weight.to(tl.float32), mask=here)


def silu_and_mul(gate: Tensor, up: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """`out = silu(gate) * up`: SwiGLU's activation (Shazeer, arXiv 2002.05202).

    :param gate: `[T, n]`, last dimension contiguous, like that of the others; `up` likewise.
        Both may be columns of one tensor.
    :param out: `[T, n]`; may be `gate` or `up`.
    """
    tokens, n = gate.shape
    if tokens == 0:
        return
    blocks = triton.cdiv(n, _SILU_BLOCK)
    _silu_kernel[(tokens * blocks,)](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        N=n,
        BLOCKS=blocks,
        BLOCK=_SILU_BLOCK,
        PDL=pdl,
        num_warps=_SILU_WARPS,
        **launch_options(pdl),
    )


@triton.jit
def _silu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK elements of one token, which has BLOCKS such pieces."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_ptr + token * GATE_STRIDE + i, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * UP_STRIDE + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * OUT_STRIDE + i, gate / (1 + tl.exp(-gate)) * up, mask=here)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_slots: Tensor,
    cache: KVLayer,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
) -> None:
    """Norm (if asked for) and turn the queries and keys, and store keys and values in the pool.

    The turn is the rotary position embedding (Su et al., arXiv 2104.09864) in NeoX layout, see
    `ragserve.kernels.apply_rope`. Queries are changed in place; the keys in `qkv` are not.

    :param qkv: `[T, (num_heads + 2 num_kv_heads) head_dim]`, queries, keys, values; last
        dimension contiguous.
    :param positions: `[T]` integers.
    :param cos_sin: `[length, head_dim]`, of each position the cosines, then the sines.
    :param kv_slots: `[T]` int64, block * block_size + offset; a negative one is not stored.
    :param cache: the layer's pool; changed. Keys and values have the same strides.
    :param q_norm: `[head_dim]`, weight of the root-mean-square norm over each query head, or
        None for no norm; `k_norm` likewise for keys. Both or neither.
    :param eps: added to the mean square of a head.
    """
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    block_stride, head_stride, slot_stride, _ = cache.keys.stride()
    half = triton.next_power_of_2(head_dim // 2)
    heads = triton.next_power_of_2(num_heads + num_kv_heads)
    _rope_kernel[(tokens,)](
        qkv,
        positions,
        cos_sin,
        kv_slots,
        cache.keys,
        cache.values,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        cos_sin.stride(0),
        block_stride,
        head_stride,
        slot_stride,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HEADS_PADDED=heads,
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HALF_PADDED=half,
        NORM=q_norm is not None,
        PDL=pdl,
        num_warps=_num_warps(2 * half * heads, _ROPE_PER_WARP),
        **launch_options(pdl),
    )


@triton.jit
def _rope_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    kv_slots_ptr,
    keys_ptr,
    values_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    QKV_STRIDE: tl.constexpr,
    COS_SIN_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token, as tiles of [heads, half a head]. Queries and keys lie side by
    side and are one tile."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    qkv_ptr += token * QKV_STRIDE
    i = tl.arange(0, HALF_PADDED)[None, :]
    head = tl.arange(0, HEADS_PADDED)[:, None]
    here = (head < HEADS + KV_HEADS) & (i < HALF)
    is_query = head < HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    slot = tl.load(kv_slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    ptrs = qkv_ptr + head * HEAD_DIM + i
    first = tl.load(ptrs, mask=here, other=0.0).to(tl.float32)
    second = tl.load(ptrs + HALF, mask=here, other=0.0).to(tl.float32)
    kv_head = tl.arange(0, KV_HEADS_PADDED)[:, None]
    kv_here = (kv_head < KV_HEADS) & (i < HALF)
    value_ptrs = qkv_ptr + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + i
    value_first = tl.load(value_ptrs, mask=kv_here, other=0.0)
    value_second = tl.load(value_ptrs + HALF, mask=kv_here, other=0.0)
    turn_ptrs = cos_sin_ptr + position * COS_SIN_STRIDE + i
    cos = tl.load(turn_ptrs, mask=i < HALF, other=0.0).to(tl.float32)
    sin = tl.load(turn_ptrs + HALF, mask=i < HALF, other=0.0).to(tl.float32)

    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, i, HALF)
        second *= scale * _norm_weight(q_norm_ptr + HALF, k_norm_ptr + HALF, is_query, i, HALF)
    first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(ptrs, first, mask=here & is_query)
    tl.store(ptrs + HALF, second, mask=here & is_query)

    if slot >= 0:
        base = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * SLOT_STRIDE
        key_ptrs = keys_ptr + base + (head - HEADS) * HEAD_STRIDE + i
        is_key = here & (head >= HEADS)
        tl.store(key_ptrs, first, mask=is_key)
        tl.store(key_ptrs + HALF, second, mask=is_key)
        value_ptrs = values_ptr + base + kv_head * HEAD_STRIDE + i
        tl.store(value_ptrs, value_first, mask=kv_here)
        tl.store(value_ptrs + HALF, value_second, mask=kv_here)


@triton.jit
def _norm_weight(q_ptr, k_ptr, is_query, i, HALF: tl.constexpr):
    """Half of the norms' weights, for each head its own."""
    q_weight = tl.load(q_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
    k_weight = tl.load(k_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
    return tl.where(is_query, q_weight, k_weight)


def _num_warps(size: int, per_warp: int) -> int:
    """Warps for a tile of `size` elements, both powers of two."""
    return min(max(size // per_warp, 1), 16)


def launch_options(pdl: bool) -> dict[str, Any]:
    """Options of a launch that only NVIDIA's back end knows; for others there are none.

    A bound on registers, though never reached, makes the assembler issue a program's loads one
    after the other; without it, it waits for some in between, to save registers.
    """
    if torch.version.cuda is None:
        return {}
    return {"maxnreg": 128, "launch_pdl": pdl}
