"""Linear layers: matrix-vector products that read a weight once at full bandwidth, with the
norm before them and what follows them fused in, and the vendor's library for anything wider.

A product with few rows is bound by reading the weight. A program computes a few output
features over the whole inner dimension: no program waits for another, and the order of
summation depends on the shapes alone, never on the batch or on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layers import launch_options

__all__ = ["GEMV_ROWS", "GemvConfig", "gemv", "gemv_config", "gemv_silu", "linear"]

GEMV_ROWS: Final = 2
"""Most rows that `gemv` and `gemv_silu` take: measured on an H200, cuBLAS wins from 3 on."""


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How a matrix-vector product is cut up.

    :param block_n: output features a program computes; a power of two. With a gate, each
        comes with a row of the gate and one of the up half.
    :param block_k: inner elements read at a time, a power of two. From 512 bytes times
        `num_warps` on, all warps stand side by side in one row of the weight, and no data
        moves between threads before the final sum.
    :param num_warps: warps of a program.
    :param num_stages: tiles in flight through shared memory; 1 loads to registers.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


def gemv_config(n: int, k: int, *, gated: bool = False) -> GemvConfig:
    """The one place that decides how a matrix-vector product is cut up.

    What counts is how many bytes a multiprocessor has in flight. Wide products have programs
    enough to fill the chip with one warp each; narrow ones give each output feature more warps.
    The best of about ten, measured on an H200 at the dimensions of three models.

    :param n: output features.
    :param k: inner elements.
    :param gated: whether it is `gemv_silu`, which reads two weight rows a feature.
    """
    if n >= 4096 and gated:
        return GemvConfig(block_n=2, block_k=512, num_warps=1)
    if n >= 8192:
        return GemvConfig(block_n=4, block_k=512, num_warps=1)
    if n >= 2048:
        return GemvConfig(block_n=2, block_k=1024, num_warps=2)
    if k >= 4096:
        return GemvConfig(block_n=1, block_k=2048, num_warps=4)
    return GemvConfig(block_n=2, block_k=1024, num_warps=4)


def linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """`out = x W^T + bias`, by the kernel that suits the number of rows.

    :param x: `[T, k]`, last dimension contiguous, like that of the others.
    :param weight: `[n, k]`, contiguous.
    :param out: `[T, n]`; must not overlap `x`.
    :param bias: `[n]` or None.
    """
    if x.shape[0] <= GEMV_ROWS and x.is_cuda:
        gemv(x, weight, out, bias=bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> None:
    """`out = residual + norm(x) W^T + bias` for a few rows, in one pass over the weight.

    The norm is the root-mean-square norm of `ragserve.kernels.rms_norm`. Its scale is a factor
    of a whole row, so it is applied to the finished sum, and the sum of squares is taken on
    the way. Everything is computed in float32 and rounded once, where separate operations
    would round the normed `x` as well.

    :param x: `[T, k]`, `T <= GEMV_ROWS`, last dimension contiguous, like that of the others.
    :param weight: `[n, k]`, contiguous.
    :param out: `[T, n]`; may be `residual`, must not overlap `x`.
    :param bias: `[n]` or None.
    :param residual: `[T, n]` or None, added last.
    :param norm: `[k]`, weight of the norm; None leaves `x` as it is.
    :param eps: added to the mean square.
    :param config: overrides `gemv_config`.
    :param pdl: start while the kernel before still runs and fetch the weight meanwhile
        (programmatic dependent launch; CUDA from compute capability 9.0 on).
    :raises ValueError: more than `GEMV_ROWS` rows.
    """
    _launch(x, weight, out, bias, residual, norm, eps, config, pdl, gated=False)


def gemv_silu(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> None:
    """`out = silu(gate) * up` with `gate, up = norm(x) W^T + bias`: the first half of a SwiGLU
    block (Shazeer, arXiv 2002.05202) in one pass over the weight.

    :param weight: `[2 n, k]`, contiguous; the gate's rows, then the up rows.
    :param out: `[T, n]`; must not overlap `x`.
    :param bias: `[2 n]` or None.

    The other parameters, and what is raised, are those of `gemv`.
    """
    _launch(x, weight, out, bias, None, norm, eps, config, pdl, gated=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    config: GemvConfig | None,
    pdl: bool,
    *,
    gated: bool,
) -> None:
    rows, k = x.shape
    if rows > GEMV_ROWS:
        raise ValueError(f"{rows} rows; a matrix-vector product takes at most {GEMV_ROWS}")
    if rows == 0:
        return
    n = out.shape[1]
    config = config or gemv_config(n, k, gated=gated)
    # Absent tensors are stood in for by one that is there; the kernel does not look at them.
    _gemv_kernel[(triton.cdiv(n, config.block_n),)](
        x,
        weight,
        out,
        weight if bias is None else bias,
        out if residual is None else residual,
        weight if norm is None else norm,
        eps,
        x.stride(0) if rows > 1 else 0,
        out.stride(0) if rows > 1 else 0,
        residual.stride(0) if residual is not None and rows > 1 else 0,
        N=n,
        K=k,
        NUM_ROWS=rows,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        VECTOR=16 // weight.element_size(),
        STAGES=config.num_stages,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        GATED=gated,
        PDL=pdl,
        num_warps=config.num_warps,
        **launch_options(pdl),
    )


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N output features of all rows. NUM_ROWS is padded to ROWS."""
    first = tl.program_id(0) * BLOCK_N
    rows = tl.minimum(tl.arange(0, ROWS), NUM_ROWS - 1)
    # Features past the end repeat the last one, and are not stored.
    features = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first)
    weight_ptr += first.to(tl.int64) * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if K % VECTOR == 0:
            _prefetch(weight_ptr, tl.minimum(BLOCK_N, N - first) * K)
            if GATED:
                _prefetch(weight_ptr + N * K, tl.minimum(BLOCK_N, N - first) * K)
        tl.extra.cuda.gdc_wait()
    # What the end needs is asked for at the beginning, and is there when it is needed.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first + features).to(tl.float32)[:, None]
        if GATED:
            bias_up = tl.load(bias_ptr + N + first + features).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + first + features[:, None] + rows[None, :] * RESIDUAL_STRIDE
        residual = tl.load(residual_ptrs).to(tl.float32)

    # Tiles are [features, rows, inner]: all threads stand side by side along the last.
    inner = tl.arange(0, BLOCK_K)[None, None, :]
    x_ptrs = x_ptr + rows[None, :, None] * X_STRIDE + inner
    weight_ptrs = weight_ptr + features[:, None, None] * K + inner
    norm_ptrs = norm_ptr + inner
    total = tl.zeros((BLOCK_N, ROWS, BLOCK_K // VECTOR), tl.float32)
    total_up = tl.zeros((BLOCK_N, ROWS, BLOCK_K // VECTOR), tl.float32)
    squares = tl.zeros((1, ROWS, BLOCK_K // VECTOR), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # True everywhere, and known to be when compiled, if BLOCK_K divides K.
        here = (inner < K - start) | (K % BLOCK_K == 0)
        # A weight is read once a step: it should push nothing else out of the caches.
        weight = tl.load(weight_ptrs + start, mask=here, other=0.0, eviction_policy="evict_first")
        if GATED:
            weight_up = tl.load(
                weight_ptrs + N * K + start, mask=here, other=0.0, eviction_policy="evict_first"
            )
        x = tl.load(x_ptrs + start, mask=here, other=0.0)
        if HAS_NORM:
            gain = tl.load(norm_ptrs + start, mask=here, other=0.0)
        x = x.to(tl.float32)
        if HAS_NORM:
            squares += _sum_runs(x * x, VECTOR)
            x *= gain.to(tl.float32)
        total += _sum_runs(weight.to(tl.float32) * x, VECTOR)
        if GATED:
            total_up += _sum_runs(weight_up.to(tl.float32) * x, VECTOR)

    result = tl.sum(total, axis=2)
    result_up = tl.sum(total_up, axis=2)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
        result *= scale
        result_up *= scale
    if HAS_BIAS:
        result += bias
        if GATED:
            result_up += bias_up
    if GATED:
        result = result / (1 + tl.exp(-result)) * result_up
    if HAS_RESIDUAL:
        result += residual
    tl.store(
        out_ptr + first + features[:, None] + rows[None, :] * OUT_STRIDE,
        result,
        mask=(tl.arange(0, BLOCK_N)[:, None] < N - first)
        & (tl.arange(0, ROWS)[None, :] < NUM_ROWS),
    )


@triton.jit
def _sum_runs(terms, VECTOR: tl.constexpr):
    """Sums of runs of VECTOR neighbours in the last dimension. A thread has loaded such a run at
    once, so this needs no exchange, and leaves one register of VECTOR."""
    FEATURES: tl.constexpr = terms.shape[0]
    ROWS: tl.constexpr = terms.shape[1]
    INNER: tl.constexpr = terms.shape[2]
    return tl.sum(tl.reshape(terms, (FEATURES, ROWS, INNER // VECTOR, VECTOR)), axis=3)


@triton.jit
def _prefetch(pointer, count):
    """Ask for `count` elements from `pointer` to be brought into the L2 cache (sm_90). One
    thread asks; both the address and the size have to be multiples of 16 bytes."""
    size = count * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        """{
            .reg .pred one;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 one, thread, 0;
            @one cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointer.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
