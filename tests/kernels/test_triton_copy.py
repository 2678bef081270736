"""The Triton kernel that copies whole blocks, against torch's indexing: in Triton's interpreter,
or on a GPU, there to and from pinned memory of the host too."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("torch sees no GPU, and Triton does not interpret", allow_module_level=True)

from ragserve.kernels.triton import blocks_to_rows, rows_to_blocks  # noqa: E402

pytestmark = pytest.mark.triton

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0))
"""Of layers, keys and values, and blocks, in the device's memory."""


def make_pool(
    order: tuple[int, ...],
    *,
    layers: int,
    blocks: int,
    heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    spread: int,
) -> tuple[Tensor, Tensor]:
    """Random bits in a pool with strides of its own; and all of the memory it lies in.

    :param spread: only each so many-th block of the memory is the pool's.
    """
    sizes = (layers, 2, blocks * spread)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    shape = [*(sizes[axis] for axis in order), heads, block_size, head_dim]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max, shape, dtype=integers, device=DEVICE)
    axes = [order.index(axis) for axis in range(3)]
    pool = bits.view(dtype).permute(*axes, 3, 4, 5)[:, :, spread - 1 :: spread]
    return pool, bits


def rows_of(pool: Tensor, blocks: list[int]) -> Tensor:
    """[n, bytes of a block]: what the kernel shall make of blocks."""
    picked = pool[:, :, blocks].permute(2, 0, 1, 3, 4, 5).contiguous()
    return picked.view(torch.uint8).reshape(len(blocks), pool[:, :, 0].numel() * pool.itemsize)


def memory(num_rows: int, width: int, *, pad: int = 0) -> Tensor:
    """[num_rows, width] of random bytes, with a gap behind each row."""
    return torch.randint(0, 256, (num_rows, width + pad), dtype=torch.uint8, device=DEVICE)[
        :, :width
    ]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    order=st.sampled_from(ORDERS),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    block_size=st.sampled_from((16, 32)),
    head_dim=st.sampled_from((8, 40, 64)),
    dtype=st.sampled_from((torch.float16, torch.float32, torch.bfloat16)),
    spread=st.integers(1, 2),
    pad=st.sampled_from((0, 16)),
    copied=st.integers(0, 5),
    in_order=st.booleans(),
    at_a_time=st.sampled_from((1, 3 * 4096, 64 * 4096)),
    seed=st.integers(0, 1 << 30),
)
def test_blocks_go_and_come_back_and_nothing_else_is_touched(
    order: tuple[int, ...],
    layers: int,
    heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    spread: int,
    pad: int,
    copied: int,
    in_order: bool,
    at_a_time: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    pool, bits = make_pool(
        order,
        layers=layers,
        blocks=7,
        heads=heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
        spread=spread,
    )
    generator = random.Random(seed)
    blocks, rows = generator.sample(range(7), copied), generator.sample(range(6), copied)
    if in_order:
        rows = list(range(copied))
    width = layers * 2 * heads * block_size * head_dim * dtype.itemsize
    numbers = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    places = None if in_order else torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    lines, before = memory(6, width, pad=pad), bits.clone()
    expected = lines.clone()
    expected[rows] = rows_of(pool, blocks)
    blocks_to_rows(pool, numbers, lines, places, at_a_time=at_a_time)
    assert torch.equal(lines, expected)
    assert torch.equal(bits, before)

    lines = memory(6, width, pad=pad)
    kept = lines.clone()
    rows_to_blocks(lines, places, pool, numbers, at_a_time=at_a_time)
    assert torch.equal(lines, kept)
    assert torch.equal(rows_of(pool, blocks), lines[rows])
    # With the old bits written back, all is as it was: nothing else has changed.
    shape = (len(blocks), layers, 2, heads, block_size, head_dim)
    old = rows_of(_like(pool, bits, before), blocks).view(dtype).view(shape)
    pool[:, :, blocks] = old.permute(1, 2, 0, 3, 4, 5)
    assert torch.equal(bits, before)


def _like(pool: Tensor, bits: Tensor, other: Tensor) -> Tensor:
    """The view that `pool` is of `bits`, of other memory."""
    return other.view(pool.dtype).as_strided(
        pool.shape, pool.stride(), pool.storage_offset() - bits.storage_offset()
    )


def test_a_row_of_another_size_is_refused() -> None:
    pool = torch.zeros(2, 2, 3, 1, 16, 8, device=DEVICE)
    numbers = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    lines = torch.zeros(1, 2 * 2 * 16 * 8 * 4 + 4, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="a row of 2052 bytes for a block of 2048"):
        blocks_to_rows(pool, numbers, lines)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("axis", [0, 2])
def test_a_pool_of_more_words_than_32_bits_count(axis: int) -> None:
    """Layers that lie more than 2 ** 31 words apart, and blocks."""
    far, piece = (1 << 31) + (1 << 10), 16 * 64
    flat = torch.empty(far + 16 * piece, device=DEVICE)
    strides = [4 * piece, 2 * piece, piece]
    strides[axis] = far
    sizes = [2, 2, 2]
    pool = flat.as_strided((*sizes, 1, 16, 64), (*strides, piece, 64, 1))
    pool.normal_()
    numbers = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    lines = memory(2, 4 * piece * 4)
    blocks_to_rows(pool, numbers, lines)
    assert torch.equal(lines, rows_of(pool, [1, 0]))
    other = lines.flip(0).contiguous()
    rows_to_blocks(other, None, pool, numbers)
    assert torch.equal(other, rows_of(pool, [1, 0]))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_pinned_memory_of_the_host_is_written_and_read_directly() -> None:
    pool = torch.randn(3, 2, 9, 2, 16, 64, device=DEVICE)
    numbers = torch.tensor([7, 2, 5], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([3, 0, 1], dtype=torch.int32, device=DEVICE)
    lines = torch.zeros(4, 3 * 2 * 2 * 16 * 64 * 4, dtype=torch.uint8, pin_memory=True)
    blocks_to_rows(pool, numbers, lines, rows)
    torch.cuda.synchronize()
    assert torch.equal(lines[[3, 0, 1]], rows_of(pool, [7, 2, 5]).cpu())
    assert not lines[2].any()
    other = torch.zeros_like(pool)
    rows_to_blocks(lines, rows, other, numbers)
    torch.cuda.synchronize()
    assert torch.equal(other[:, :, [7, 2, 5]], pool[:, :, [7, 2, 5]])
    assert not other[:, :, [0, 1, 3, 4, 6, 8]].any()
