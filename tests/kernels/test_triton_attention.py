"""The Triton attention kernels against the float32 oracle: in Triton's interpreter, or on a GPU.

    TRITON_INTERPRET=1 python -P -m pytest tests/kernels/test_triton_attention.py

The interpreter multiplies bfloat16 matrices wrongly, so it runs float32 and float16.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragserve import kernels

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
if not (ON_GPU or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from ragserve.kernels.triton import attention  # noqa: E402

pytestmark = pytest.mark.triton

DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [*TOLERANCE] if ON_GPU else [torch.float32, torch.float16]

# Small tiles, so that small cases have many of them. The second kernel merges in the second one.
DECODE = [
    attention.DecodeConfig(block_n=16, num_warps=2, num_stages=2, split_tokens=16, fused=True),
    attention.DecodeConfig(block_n=32, num_warps=4, num_stages=3, split_tokens=64, fused=False),
]
PREFILL = [
    attention.PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2),
    attention.PrefillConfig(block_m=32, block_n=64, num_warps=4, num_stages=2),
]


@dataclass(frozen=True)
class Sequence:
    """Tokens of each segment, and how many of the last ones are computed in this step."""

    segments: tuple[int, ...]
    num_new: int = 1

    @property
    def length(self) -> int:
        return sum(self.segments)


@dataclass(frozen=True)
class Case:
    """A step whose keys are in the pool: decoding sequences first, then prompts."""

    query: Tensor
    cache: kernels.KVLayer
    batch: kernels.PagedBatch
    rows: list[int]
    num_decodes: int

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def expected(self, window: int | None, soft_cap: float | None) -> Tensor:
        return kernels.reference.paged_attention(
            self.query,
            self.cache,
            self.batch,
            scale=self.scale,
            window=window,
            soft_cap=soft_cap,
        )

    def run(
        self,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        num_splits: int = 3,
        decode: attention.DecodeConfig | None = DECODE[0],
        prefill: attention.PrefillConfig | None = PREFILL[1],
        query: Tensor | None = None,
        padding: int = 0,
    ) -> Tensor:
        """Both kernels, on tables whose rows are shuffled and whose unused entries are wild."""
        query = self.query.to(DEVICE) if query is None else query
        cache = kernels.KVLayer(self.cache.keys.to(DEVICE), self.cache.values.to(DEVICE))
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = cache.keys.shape[1]
        tables = torch.full((len(self.rows) + 2, self.batch.block_tables.shape[1]), 1 << 30)
        starts = torch.full((len(self.rows) + 2, self.batch.block_starts.shape[1]), 1 << 30)
        counts = []
        for row, own_table, own_starts, length in zip(
            self.rows,
            self.batch.block_tables,
            self.batch.block_starts,
            self.batch.seq_lens,
            strict=True,
        ):
            counts.append(int((own_starts[:-1] < length).sum()))
            tables[row, : counts[-1]] = own_table[: counts[-1]]
            starts[row, : counts[-1] + 1] = own_starts[: counts[-1] + 1]
            # The last block may have room: its end is where the next one will start.
            starts[row, counts[-1]] += cache.keys.shape[2]
        common = {
            "block_tables": _device(tables),
            "block_starts": _device(starts),
            "scale": self.scale,
            "window": window,
            "soft_cap": soft_cap,
        }
        output = torch.full(query.shape, math.nan, dtype=query.dtype, device=DEVICE)

        n = self.num_decodes
        if n:
            workspace = attention.decode_workspace(
                n + padding, num_heads, num_kv_heads, head_dim, num_sms=64, device=DEVICE
            )
            padded = torch.full((n + padding, num_heads, head_dim), math.nan, device=DEVICE)
            result, padded = padded.to(query.dtype), padded.to(query.dtype)
            padded[:n] = query[:n]
            attention.paged_decode(
                padded if padding else query[:n],
                cache,
                result,
                rows=_device(self.rows[:n] + [len(self.rows) + 1] * padding),
                seq_lens=_device(self.batch.seq_lens[:n] + [0] * padding),
                block_counts=_device(counts[:n] + [0] * padding),
                workspace=workspace,
                num_splits=num_splits,
                config=decode,
                **common,
            )
            output[:n] = result[:n]
            assert not result[n:].any()
            assert not workspace.arrivals.any()
        if n < len(self.rows):
            lens = self.batch.seq_lens[n:]
            begins = self.batch.query_starts[n:]
            num_new = [end - begin for begin, end in itertools.pairwise(begins)]
            config = prefill or attention.prefill_config(head_dim, query.dtype)
            tiles = attention.prefill_tiles(
                num_new,
                [length - new for length, new in zip(lens, num_new, strict=True)],
                [np.asarray(own) for own in self.batch.block_starts[n:, :-1]],
                group=num_heads // num_kv_heads,
                block_m=config.block_m,
                first=n,
            )
            assert (np.diff(tiles.ends) <= 0).all()
            attention.paged_prefill(
                query,
                cache,
                output,
                rows=_device(self.rows),
                query_starts=_device(self.batch.query_starts),
                seq_lens=_device(self.batch.seq_lens),
                tile_rows=_device([*tiles.rows.tolist(), 0]),
                tile_queries=_device([*tiles.queries.tolist(), 0]),
                tile_ends=_device([*tiles.ends.tolist(), 0]),
                config=config,
                **common,
            )
        return output.cpu()

    def check(
        self,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        num_splits: int = 3,
        decode: attention.DecodeConfig | None = DECODE[0],
        prefill: attention.PrefillConfig | None = PREFILL[1],
    ) -> None:
        output = self.run(
            window=window,
            soft_cap=soft_cap,
            num_splits=num_splits,
            decode=decode,
            prefill=prefill,
        )
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(
            output.float(), self.expected(window, soft_cap), rtol=tolerance, atol=tolerance
        )


def _device(values: Tensor | list[int]) -> Tensor:
    """An int32 tensor that is not aligned to 16 bytes, as a piece of a larger buffer."""
    values = torch.as_tensor(values)
    buffer = torch.zeros(values.numel() + 1, dtype=torch.int32, device=DEVICE)
    buffer[1:] = values.to(DEVICE).flatten()
    return buffer[1:].view(values.shape)


def make_case(
    sequences: list[Sequence],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: float = math.nan,
) -> Case:
    """Lay sequences out in shuffled blocks of a pool whose unwritten slots are all `poison`."""
    # Equal seeds give equal tokens, wherever they lie; the queries do not depend on the holes.
    sequences = sorted(sequences, key=lambda sequence: sequence.num_new > 1)
    generator = torch.Generator().manual_seed(seed)

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
    longest = max(map(len, starts))
    num_blocks = sum(map(len, starts)) + 2
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    cache = kernels.KVLayer(*(torch.full(shape, poison, dtype=dtype) for _ in range(2)))
    shuffle = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(num_blocks, generator=shuffle).tolist()
    tables, block_starts, positions = [], [], []
    query_starts = [0]
    for sequence, begins in zip(sequences, starts, strict=True):
        blocks = [numbers.pop() for _ in begins]
        tables.append(blocks + [0] * (longest - len(blocks)))
        block_starts.append(begins + [sequence.length] * (longest + 1 - len(begins)))
        keys = random(sequence.length, num_kv_heads, head_dim)
        values = random(sequence.length, num_kv_heads, head_dim)
        for block, begin, end in zip(blocks, begins, [*begins[1:], sequence.length], strict=True):
            cache.keys[block, :, : end - begin] = keys[begin:end].transpose(0, 1)
            cache.values[block, :, : end - begin] = values[begin:end].transpose(0, 1)
        positions += range(sequence.length - sequence.num_new, sequence.length)
        query_starts.append(len(positions))
    batch = kernels.PagedBatch(
        query_starts=query_starts,
        seq_lens=[sequence.length for sequence in sequences],
        block_tables=torch.tensor(tables),
        block_starts=torch.tensor(block_starts),
        slots=torch.empty(0, dtype=torch.int64),
        positions=torch.tensor(positions),
    )
    return Case(
        query=random(len(positions), num_kv_heads * group, head_dim),
        cache=cache,
        batch=batch,
        rows=torch.randperm(len(sequences) + 1, generator=shuffle)[: len(sequences)].tolist(),
        num_decodes=sum(sequence.num_new == 1 for sequence in sequences),
    )


MIXED = [
    Sequence((5, 20, 16)),
    Sequence((33,), 9),
    Sequence((1,)),
    Sequence((16, 11), 27),
    Sequence((7, 9, 2), 4),
    Sequence((48,)),
    Sequence((1, 1, 1, 1, 1, 1, 40), 45),
]


@st.composite
def steps(draw: st.DrawFn) -> list[Sequence]:
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        segments = tuple(draw(st.lists(st.integers(1, 50), min_size=1, max_size=4)))
        num_new = draw(st.one_of(st.just(1), st.integers(1, min(20, sum(segments)))))
        sequences.append(Sequence(segments, num_new))
    return sequences


@given(
    step=steps(),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 7), (3, 2)]),
    head_dim=st.sampled_from([16, 24]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(DTYPES),
    window=st.one_of(st.none(), st.integers(1, 60)),
    soft_cap=st.sampled_from([None, None, 2.0]),
    num_splits=st.integers(1, 6),
    decode=st.sampled_from(DECODE),
    prefill=st.sampled_from(PREFILL),
    seed=st.integers(0, 1 << 30),
)
# Each example of a GPU waits for a compiler.
@settings(deadline=None, max_examples=6 if ON_GPU else 20)
def test_any_step_matches_the_oracle(
    step: list[Sequence],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    num_splits: int,
    decode: attention.DecodeConfig,
    prefill: attention.PrefillConfig,
    seed: int,
) -> None:
    case = make_case(
        step,
        num_kv_heads=heads[0],
        group=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    case.check(
        window=window, soft_cap=soft_cap, num_splits=num_splits, decode=decode, prefill=prefill
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_with_the_default_configs(head_dim: int, dtype: torch.dtype) -> None:
    sequences = MIXED if ON_GPU else [MIXED[0], MIXED[1], MIXED[4]]
    case = make_case(sequences, head_dim=head_dim, dtype=dtype)
    case.check(decode=None, prefill=None)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_head_groups(group: int) -> None:
    make_case(MIXED[:5], num_kv_heads=2, group=group, head_dim=16).check()


@pytest.mark.parametrize(("block_size", "configs"), [(16, 1), (32, 0), (32, 1), (64, 0), (64, 1)])
def test_tiles_and_blocks_have_sizes_of_their_own(block_size: int, configs: int) -> None:
    case = make_case(MIXED[:-1], head_dim=32, block_size=block_size)
    case.check(decode=DECODE[configs], prefill=PREFILL[configs])


@pytest.mark.parametrize("window", [1, 15, 17, 48, 1000])
def test_windows(window: int) -> None:
    case = make_case([*MIXED, Sequence((150,)), Sequence((20, 120), 30)], head_dim=16)
    case.check(window=window, decode=DECODE[window % 2])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, when interpreted
@pytest.mark.parametrize("soft_cap", [0.1, 50.0])
def test_soft_cap(soft_cap: float) -> None:
    case = make_case([*MIXED[:2], MIXED[4]], head_dim=16)
    case.check(soft_cap=soft_cap)
    # Scores far outside what an exponential in float32 can hold.
    case = replace(case, query=case.query * 300)
    case.check(soft_cap=soft_cap)


def test_soft_cap_of_the_oracle_is_a_bound_of_scores() -> None:
    case = make_case([Sequence((2,))], num_kv_heads=1, group=1, head_dim=16)
    keys = case.cache.keys[case.batch.block_tables[0, 0], 0, :2]
    values = case.cache.values[case.batch.block_tables[0, 0], 0, :2]
    scores = 3 * torch.tanh(keys @ case.query[0, 0] * case.scale / 3)
    expected = torch.softmax(scores, 0) @ values
    torch.testing.assert_close(case.expected(None, 3.0)[0, 0], expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 20])
def test_splits_change_nothing(num_splits: int, fused: bool) -> None:
    case = make_case(
        [Sequence((300,)), Sequence((17, 100)), Sequence((16,)), Sequence((1,))], head_dim=16
    )
    case.check(num_splits=num_splits, decode=replace(DECODE[0], fused=fused))


@pytest.mark.parametrize("fused", [True, False])
def test_padding_rows_give_zeros(fused: bool) -> None:
    case = make_case([Sequence((100,)), Sequence((3, 4))], head_dim=24)
    output = case.run(padding=3, decode=replace(DECODE[0], fused=fused))
    torch.testing.assert_close(output, case.expected(None, None), rtol=2e-5, atol=2e-5)
    assert torch.equal(output, case.run(decode=replace(DECODE[0], fused=fused)))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_unwritten_slots_never_count(poison: float, dtype: torch.dtype) -> None:
    clean = make_case(MIXED[:5], head_dim=24, poison=0.0, dtype=dtype).run()
    assert torch.equal(make_case(MIXED[:5], head_dim=24, poison=poison, dtype=dtype).run(), clean)


@pytest.mark.parametrize("num_new", [1, 90])
@pytest.mark.parametrize("segments", [(1, 89), (89, 1), (15,) * 6])
def test_holes_change_nothing(segments: tuple[int, ...], num_new: int) -> None:
    whole = make_case([Sequence((90,), num_new)], head_dim=16)
    holes = make_case([Sequence(segments, num_new)], head_dim=16)
    assert torch.equal(whole.query, holes.query)
    torch.testing.assert_close(holes.run(), whole.run(), rtol=2e-5, atol=2e-5)


def test_a_prompt_in_chunks_is_the_whole_prompt() -> None:
    whole = make_case([Sequence((10, 100), 110)], head_dim=16)
    expected = whole.run()
    for first, last in itertools.pairwise((0, 1, 17, 60, 110)):
        batch = replace(
            whole.batch,
            query_starts=[0, last - first],
            seq_lens=[last],
            positions=whole.batch.positions[first:last],
        )
        # Keys of later chunks are in the pool already here; they must not be seen.
        chunk = replace(whole, query=whole.query[first:last], batch=batch)
        torch.testing.assert_close(chunk.run(), expected[first:last], rtol=2e-5, atol=2e-5)


def test_queries_may_be_strided_views() -> None:
    case = make_case(MIXED[:3], head_dim=16)
    tokens, heads, dim = case.query.shape
    joined = torch.full((tokens, heads + 4, dim), math.nan, device=DEVICE)
    joined[:, :heads] = case.query.to(DEVICE)
    assert torch.equal(case.run(query=joined[:, :heads]), case.run())


def test_pools_beyond_the_range_of_int32() -> None:
    block, heads, size, dim = 70_000, 8, 16, 256
    shape = (block + 1, heads, size, dim)
    assert math.prod(shape) > 1 << 31
    if ON_GPU:
        keys, values = (torch.empty(shape, dtype=torch.float16, device=DEVICE) for _ in range(2))
    else:
        # Pages that are never touched cost no memory.
        keys, values = (torch.empty(shape, dtype=torch.float16) for _ in range(2))
    keys[block], values[block] = 1.0, 2.0
    query = torch.ones(1, heads, dim, dtype=torch.float16, device=DEVICE)
    outputs = [torch.zeros_like(query) for _ in range(2)]
    common = {
        "rows": _device([0]),
        "seq_lens": _device([3]),
        "block_tables": _device([[block]]),
        "block_starts": _device([[0, 16]]),
        "scale": 1.0,
    }
    cache = kernels.KVLayer(keys, values)
    attention.paged_decode(
        query,
        cache,
        outputs[0],
        block_counts=_device([1]),
        workspace=attention.decode_workspace(1, heads, heads, dim, num_sms=1, device=DEVICE),
        num_splits=1,
        **common,
    )
    attention.paged_prefill(
        query,
        cache,
        outputs[1],
        query_starts=_device([0, 1]),
        tile_rows=_device([0]),
        tile_queries=_device([0]),
        tile_ends=_device([1]),
        **common,
    )
    for output in outputs:
        assert (output == 2.0).all()


@pytest.mark.skipif(not ON_GPU, reason="takes long when interpreted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_sequences(dtype: torch.dtype) -> None:
    step = [
        Sequence((3000,)),
        Sequence((500,) * 5),
        Sequence((40,)),
        Sequence((700, 700, 600), 20),
        Sequence((2000,), 12),
        Sequence((400,), 90),
    ]
    case = make_case(step, num_kv_heads=4, group=7, head_dim=128, dtype=dtype)
    tolerance = TOLERANCE[dtype]
    expected = case.expected(None, None)  # of so many keys it takes a second
    for num_splits in (1, 11, 40):
        output = case.run(decode=None, prefill=None, num_splits=num_splits)
        torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
    case.check(decode=None, prefill=None, window=900)


def test_a_workspace_too_small_is_refused() -> None:
    query = torch.zeros(2, 4, 16, device=DEVICE)
    cache = kernels.KVLayer(*(torch.zeros(1, 2, 16, 16, device=DEVICE) for _ in range(2)))
    workspace = attention.decode_workspace(2, 4, 2, 16, num_sms=1, device=DEVICE)
    with pytest.raises(ValueError, match="2 sequences x 4 heads x 100 splits"):
        attention.paged_decode(
            query,
            cache,
            torch.empty_like(query),
            rows=_device([0, 0]),
            seq_lens=_device([1, 1]),
            block_counts=_device([1, 1]),
            block_tables=_device([[0]]),
            block_starts=_device([[0, 16]]),
            workspace=workspace,
            num_splits=100,
            scale=1.0,
        )


@given(
    batch=st.integers(1, 600),
    num_kv_heads=st.integers(1, 16),
    max_len=st.integers(1, 200_000),
    num_sms=st.integers(1, 160),
)
def test_chosen_splits_fit_the_workspace(
    batch: int, num_kv_heads: int, max_len: int, num_sms: int
) -> None:
    splits = attention.choose_splits(batch, num_kv_heads, max_len, num_sms)
    assert 1 <= splits <= max_len
    if splits > 1:
        workspace = attention.decode_workspace(
            batch, 2 * num_kv_heads, num_kv_heads, 8, num_sms=num_sms, device="cpu"
        )
        assert batch * splits * 2 * num_kv_heads <= len(workspace.logs)
        assert batch * num_kv_heads <= len(workspace.arrivals)


def test_splits_grow_with_idle_processors() -> None:
    assert attention.choose_splits(256, 4, 4096, 132) == 1
    assert attention.choose_splits(1, 4, 60, 132) == 1
    assert attention.choose_splits(1, 4, 32_768, 132) >= 24


@pytest.mark.parametrize("kib", [99, 227])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_tiles_fit_the_memory_of_a_program(
    head_dim: int, dtype: torch.dtype, kib: int
) -> None:
    config = attention.prefill_config(head_dim, dtype, shared_memory=kib << 10)
    keys_and_values = 2 * config.num_stages * config.block_n
    assert (config.block_m + keys_and_values) * head_dim * dtype.itemsize <= kib << 10


def test_tiles_cover_every_row_once() -> None:
    query_lens, context_lens = [40, 1, 7], [0, 30, 100]
    starts = [np.arange(0, 40, 16), np.array([0, 16, 20]), np.array([0, 5, 21, 90, 106])]
    tiles = attention.prefill_tiles(query_lens, context_lens, starts, group=3, block_m=32, first=2)
    seen = sorted(zip(tiles.rows.tolist(), tiles.queries.tolist(), strict=True))
    assert seen == [(2, 0), (2, 32), (2, 64), (2, 96), (3, 0), (4, 0)]
    # Rows 0 to 31 are tokens 0 to 10, in one block; the last tile ends with token 39, in the third.
    ends = dict(zip(seen, [1, 2, 2, 3, 3, 5], strict=True))
    assert ends == {
        (row, begin): end
        for row, begin, end in zip(
            tiles.rows.tolist(), tiles.queries.tolist(), tiles.ends.tolist(), strict=True
        )
    }
