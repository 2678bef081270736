"""Attention over the paged pool against the float32 oracle, whatever the step looks like."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragserve import kernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Sequence:
    """Tokens of each segment, how many of them (the last) are computed in this step."""

    segments: tuple[int, ...]
    num_new: int


@dataclass(frozen=True)
class Case:
    """One step of attention: a batch, its inputs, and the pool before it."""

    batch: kernels.PagedBatch
    query: Tensor
    key: Tensor
    value: Tensor
    before: kernels.KVLayer
    after: kernels.KVLayer
    block_size: int

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def plan(self) -> kernels.Attention:
        return kernels.plan_attention(
            self.batch,
            block_size=self.block_size,
            num_kv_heads=self.key.shape[1],
            scale=self.scale,
        )

    def run(self, window: int | None = None) -> Tensor:
        """Run the fast one over a pool that it may change; check what it stored."""
        cache = kernels.KVLayer(self.before.keys.clone(), self.before.values.clone())
        output = self.plan()(self.query, self.key, self.value, cache, window=window)
        torch.testing.assert_close(cache.keys, self.after.keys, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(cache.values, self.after.values, rtol=0, atol=0, equal_nan=True)
        return output

    def check(self, window: int | None = None) -> None:
        expected = kernels.reference.paged_attention(
            self.query, self.after, self.batch, scale=self.scale, window=window
        )
        tolerance = TOLERANCE[self.query.dtype]
        output = self.run(window)
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)


def make_case(
    sequences: list[Sequence],
    *,
    num_kv_heads: int = 2,
    grouped: int = 3,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: float = float("nan"),
) -> Case:
    """Lay sequences out in shuffled blocks of a pool whose unwritten slots are all `poison`."""
    # Equal seeds give equal tokens, whatever blocks they lie in.
    generator = torch.Generator().manual_seed(seed)
    shuffle = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    starts = []
    for sequence in sequences:
        ends = list(itertools.accumulate(sequence.segments))
        starts.append(
            [
                start
                for end, length in zip(ends, sequence.segments, strict=True)
                for start in range(end - length, end, block_size)
            ]
        )
    lengths = [sum(sequence.segments) for sequence in sequences]
    longest = max(map(len, starts))
    num_blocks = sum(map(len, starts)) + 3
    numbers = torch.randperm(num_blocks, generator=shuffle).tolist()

    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    before = kernels.KVLayer(*(torch.full(shape, poison, dtype=dtype) for _ in range(2)))
    after = kernels.KVLayer(*(torch.full(shape, poison, dtype=dtype) for _ in range(2)))
    tables, block_starts, slots, positions, keys, values = [], [], [], [], [], []
    query_starts = [0]
    for sequence, begins, length in zip(sequences, starts, lengths, strict=True):
        blocks = [numbers.pop() for _ in begins]
        padding = longest - len(blocks)
        tables.append(blocks + [0] * padding)
        block_starts.append(begins + [length] * (padding + 1))
        query_starts.append(query_starts[-1] + sequence.num_new)
        for position in range(length):
            index = max(i for i, start in enumerate(begins) if start <= position)
            block, offset = blocks[index], position - begins[index]
            key, value = random(num_kv_heads, head_dim), random(num_kv_heads, head_dim)
            after.keys[block, :, offset], after.values[block, :, offset] = key, value
            if position < length - sequence.num_new:
                before.keys[block, :, offset], before.values[block, :, offset] = key, value
            else:
                slots.append(block * block_size + offset)
                positions.append(position)
                keys.append(key)
                values.append(value)
    batch = kernels.PagedBatch(
        query_starts=query_starts,
        seq_lens=lengths,
        block_tables=torch.tensor(tables),
        block_starts=torch.tensor(block_starts),
        slots=torch.tensor(slots),
        positions=torch.tensor(positions),
    )
    query = random(len(slots), num_kv_heads * grouped, head_dim)
    return Case(batch, query, torch.stack(keys), torch.stack(values), before, after, block_size)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    segments = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    total = sum(segments)
    return Sequence(segments, draw(st.one_of(st.just(1), st.integers(1, total))))


@given(
    batch=st.lists(sequences(), min_size=1, max_size=6),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    grouped=st.sampled_from([1, 2, 3, 4]),
    head_dim=st.sampled_from([2, 8, 18, 64]),
    block_size=st.sampled_from([1, 3, 16, 32, 64]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=60)
def test_any_step_matches_the_oracle(
    batch: list[Sequence],
    num_kv_heads: int,
    grouped: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    make_case(
        batch,
        num_kv_heads=num_kv_heads,
        grouped=grouped,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    ).check(window)


MIXED = [
    Sequence((5, 20, 16), 1),
    Sequence((33,), 17),
    Sequence((1,), 1),
    Sequence((16, 16), 32),
    Sequence((7, 9, 2), 4),
    Sequence((48,), 1),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_block_sizes(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, head_dim=head_dim, block_size=block_size, dtype=dtype)
    case.check()
    case.check(window=9)


@pytest.mark.parametrize("grouped", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 5])
def test_head_groups(num_kv_heads: int, grouped: int) -> None:
    make_case(MIXED, num_kv_heads=num_kv_heads, grouped=grouped).check()


@pytest.mark.parametrize("window", [1, 15, 16, 17, 48, 1000])
def test_windows(window: int) -> None:
    make_case(MIXED).check(window)


def test_one_plan_serves_layers_with_and_without_a_window() -> None:
    case = make_case(MIXED)
    attention = case.plan()
    for window in (None, 9, None, 20):
        cache = kernels.KVLayer(case.before.keys.clone(), case.before.values.clone())
        output = attention(case.query, case.key, case.value, cache, window=window)
        expected = kernels.reference.paged_attention(
            case.query, case.after, case.batch, scale=case.scale, window=window
        )
        torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_unwritten_slots_never_count(poison: float, dtype: torch.dtype) -> None:
    clean = make_case(MIXED, poison=0.0, dtype=dtype).run()
    assert torch.equal(make_case(MIXED, poison=poison, dtype=dtype).run(), clean)


@pytest.mark.parametrize("num_new", [1, 23, 60])
@pytest.mark.parametrize("segments", [(1, 59), (59, 1), (17, 3, 40), (15,) * 4])
def test_holes_change_nothing(segments: tuple[int, ...], num_new: int) -> None:
    whole = make_case([Sequence((60,), num_new)])
    holes = make_case([Sequence(segments, num_new)])
    assert torch.equal(whole.query, holes.query)
    torch.testing.assert_close(holes.run(), whole.run(), rtol=2e-5, atol=2e-5)


def test_queries_may_be_strided_views() -> None:
    case = make_case(MIXED)
    heads, kv_heads = case.query.shape[1], case.key.shape[1]
    joined = torch.cat((case.query, case.key, case.value), dim=1)
    query, key, value = joined.split([heads, kv_heads, kv_heads], dim=1)
    attention = case.plan()
    expected = case.run()
    torch.testing.assert_close(attention(query, key, value, case.before), expected)
