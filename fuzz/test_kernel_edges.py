"""Shapes and values at the kernels' edges; `fuzz/sanitize.py` runs them under sanitizers.

They check that finite inputs give finite results and that rows do not disturb each other; whether
the values are right is what `tests/kernels/test_native.py` asks.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ragserve import kernels
from ragserve.kernels.cpu import native

try:
    BEST = native.NativeOps(native.library_path())
except native.NativeUnavailableError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

LEVELS = native.LEVELS[: native.LEVELS.index(BEST.level) + 1]
DTYPES = [torch.float32, torch.bfloat16]
VALUES = (0.0, -0.0, 1e-45, 1e-38, 3e38, -3e38, float("inf"), -float("inf"), float("nan"))


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest) -> native.NativeOps:
    """The library at each instruction set."""
    return native.NativeOps(native.library_path(), level=request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes_of_rows(ops: native.NativeOps, dtype: torch.dtype) -> None:
    for rows, size in itertools.product((0, 1, 3), (1, 2, 15, 16, 17, 33, 8193)):
        x = torch.ones(rows, size, dtype=dtype)
        assert ops.rms_norm(x, torch.ones(size, dtype=dtype), 1e-5).isfinite().all()
        assert ops.add_rms_norm(x, x.clone(), torch.ones(size, dtype=dtype), 1e-5).isfinite().all()
        gate = torch.ones(rows, 2 * size, dtype=dtype)
        assert ops.silu_and_mul(gate).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes_of_products(ops: native.NativeOps, dtype: torch.dtype) -> None:
    for rows, inner, outer in itertools.product((0, 1, 13, 14), (2, 6, 34), (1, 47, 48, 49)):
        weight = ops.pack(torch.ones(outer, inner, dtype=dtype))
        x = torch.ones(rows, inner, dtype=dtype)
        for bias in (None, torch.ones(outer, dtype=dtype)):
            result = ops.linear(x, weight, bias, dtype=torch.float32)
            assert torch.equal(result, torch.full_like(result, inner + (bias is not None)))
        ids = torch.tensor([0, outer - 1])
        assert torch.equal(ops.embedding(ids, weight), torch.ones(2, inner, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_stay_in_their_rows(ops: native.NativeOps, dtype: torch.dtype) -> None:
    size = 34
    x = torch.ones(len(VALUES) + 1, size, dtype=dtype)
    for row, value in enumerate(VALUES):
        x[row] = value
    ones = torch.ones(size, dtype=dtype)
    assert ops.rms_norm(x, ones, 1e-5)[-1].isfinite().all()
    assert ops.silu_and_mul(torch.cat([x, x], 1))[-1].isfinite().all()
    product = ops.linear(x, ops.pack(torch.ones(5, size, dtype=dtype)))
    assert torch.equal(product[-1], torch.full((5,), size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 14, 16, 18, 256])
@pytest.mark.parametrize("block_size", [1, 7, 16, 33])
def test_attention_at_the_edges(
    ops: native.NativeOps, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    """Lengths around a tile, a chunk, a cell and a split; heads from 1 to 48 on one KV head."""
    for grouped, length in itertools.product((1, 48), (1, 16, 17, 65, 129)):
        for num_new in {1, min(length, 3)}:
            blocks = -(-length // block_size)
            starts = torch.tensor([[*range(0, length, block_size), length]])
            positions = torch.arange(length)
            batch = kernels.PagedBatch(
                query_starts=[0, num_new],
                seq_lens=[length],
                block_tables=torch.arange(blocks)[None],
                block_starts=starts,
                slots=positions[length - num_new :],
                positions=positions[length - num_new :],
            )
            shape = ops.pool_shape(
                blocks, block_size=block_size, num_kv_heads=1, head_dim=head_dim, dtype=dtype
            )
            pool = torch.full(shape, float("nan"), dtype=dtype)
            row = torch.ones(length, (grouped + 2) * head_dim, dtype=dtype)
            query = ops.rope_and_store(
                row,
                torch.ones(length, head_dim // 2, dtype=dtype),
                torch.zeros(length, head_dim // 2, dtype=dtype),
                positions,
                pool,
                num_heads=grouped,
                num_kv_heads=1,
                block_size=block_size,
            )
            attention = ops.plan_attention(
                batch,
                block_size=block_size,
                num_heads=grouped,
                num_kv_heads=1,
                head_dim=head_dim,
                scale=1.0,
                dtype=dtype,
            )
            for window in (None, 1, 5):
                result = attention(query[length - num_new :], pool, window=window)
                assert torch.allclose(result, torch.ones_like(result), atol=1e-2)
