"""The C operations against float32 oracles: every instruction set, data type, shape and tail."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragserve import kernels
from ragserve.kernels.cpu import native
from ragserve.kernels.cpu import ops as torch_ops

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
NAN = float("nan")

try:
    BEST = native.NativeOps(native.library_path())
except native.NativeUnavailableError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

LEVELS = native.LEVELS[: native.LEVELS.index(BEST.level) + 1]
OPS = {level: native.NativeOps(native.library_path(), level=level) for level in LEVELS}
levels = st.sampled_from(LEVELS)
dtypes = st.sampled_from(DTYPES)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- attention and the pool ----


@dataclass(frozen=True)
class Sequence:
    """Tokens of each segment, how many of them (the last) are computed in this step."""

    segments: tuple[int, ...]
    num_new: int


MIXED = (
    Sequence((5, 20, 16), 1),
    Sequence((33,), 17),
    Sequence((1,), 1),
    Sequence((16, 16), 32),
    Sequence((7, 9, 2), 4),
    Sequence((48,), 1),
)


@dataclass(frozen=True)
class Shape:
    """What does not change from step to step."""

    num_kv_heads: int = 2
    grouped: int = 3
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.grouped

    @property
    def row(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Step:
    """A step over shuffled blocks; unwritten memory of the pool is all `poison`.

    `past` tokens are stored first, as if by earlier steps. Angles are 0: RoPE changes nothing.
    """

    def __init__(
        self,
        sequences: tuple[Sequence, ...],
        shape: Shape,
        *,
        seed: int = 0,
        poison: float = NAN,
        shuffle: bool = True,
    ) -> None:
        self.shape = shape
        size = shape.block_size
        lengths = [sum(s.segments) for s in sequences]
        starts: list[list[int]] = []
        for sequence in sequences:
            ends = list(itertools.accumulate(sequence.segments))
            pairs = zip(ends, sequence.segments, strict=True)
            starts.append([b for end, n in pairs for b in range(end - n, end, size)])
        most = max(map(len, starts))
        num_blocks = sum(map(len, starts)) + 3
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_blocks, generator=generator) if shuffle else None
        numbers = order.tolist() if order is not None else list(range(num_blocks))[::-1]
        tables = torch.zeros(len(sequences), most, dtype=torch.int64)
        block_starts = torch.tensor(
            [b + [n] * (most + 1 - len(b)) for b, n in zip(starts, lengths, strict=True)]
        )
        slots, past_slots, positions = [], [], []
        for s, (begins, sequence) in enumerate(zip(starts, sequences, strict=True)):
            tables[s, : len(begins)] = torch.tensor([numbers.pop() for _ in begins])
            at = torch.arange(lengths[s])
            block = torch.searchsorted(torch.tensor(begins), at, right=True) - 1
            where = tables[s, block] * size + at - torch.tensor(begins)[block]
            new = lengths[s] - sequence.num_new
            past_slots.append(where[:new])
            slots.append(where[new:])
            positions.append(at[new:])
        self.batch = kernels.PagedBatch(
            query_starts=[0, *itertools.accumulate(s.num_new for s in sequences)],
            seq_lens=lengths,
            block_tables=tables,
            block_starts=block_starts,
            slots=torch.cat(slots),
            positions=torch.cat(positions),
        )
        self.past_slots = torch.cat(past_slots)
        self.past = random(len(self.past_slots), shape.row, dtype=shape.dtype, seed=seed + 1)
        self.qkv = random(len(self.batch.slots), shape.row, dtype=shape.dtype, seed=seed + 2)
        self.pool_shape = native.NativeOps.pool_shape(
            num_blocks,
            block_size=size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )
        self.pool = torch.full(self.pool_shape, poison, dtype=shape.dtype)
        plain = (num_blocks, shape.num_kv_heads, size, shape.head_dim)
        self.cache = kernels.KVLayer(*(torch.full(plain, NAN, dtype=shape.dtype) for _ in "kv"))
        for rows, where in ((self.past, self.past_slots), (self.qkv, self.batch.slots)):
            _, key, value = self.split(rows)
            self.cache.keys[where // size, :, where % size] = key
            self.cache.values[where // size, :, where % size] = value

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        counts = [self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads]
        return rows.view(len(rows), sum(counts), self.shape.head_dim).split(counts, dim=1)

    def store(self, ops: native.NativeOps, rows: Tensor, slots: Tensor) -> Tensor:
        half = self.shape.head_dim // 2
        return ops.rope_and_store(
            rows,
            torch.ones(len(rows), half, dtype=rows.dtype),
            torch.zeros(len(rows), half, dtype=rows.dtype),
            slots,
            self.pool,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            block_size=self.shape.block_size,
        )

    def run(self, ops: native.NativeOps, *windows: int | None) -> list[Tensor]:
        shape = self.shape
        self.store(ops, self.past, self.past_slots)
        query = self.store(ops, self.qkv, self.batch.slots)
        attention = ops.plan_attention(
            self.batch,
            block_size=shape.block_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            dtype=shape.dtype,
        )
        return [attention(query, self.pool, window=window) for window in windows]

    def check(self, levels: Iterable[native.NativeOps], *windows: int | None) -> None:
        tolerance = TOLERANCE[self.shape.dtype]
        expected = [
            kernels.reference.paged_attention(
                self.split(self.qkv)[0],
                self.cache,
                self.batch,
                scale=self.shape.head_dim**-0.5,
                window=window,
            )
            for window in windows
        ]
        for ops in levels:
            for output, wanted in zip(self.run(ops, *windows), expected, strict=True):
                assert output.dtype == self.shape.dtype
                torch.testing.assert_close(output.float(), wanted, rtol=tolerance, atol=tolerance)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    segments = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    return Sequence(segments, draw(st.one_of(st.just(1), st.integers(1, sum(segments)))))


@given(
    batch=st.lists(sequences(), min_size=1, max_size=5),
    shape=st.builds(
        Shape,
        num_kv_heads=st.sampled_from([1, 2, 3]),
        grouped=st.sampled_from([1, 2, 3, 4, 7]),
        head_dim=st.sampled_from([2, 8, 18, 64, 80]),
        block_size=st.sampled_from([1, 3, 16, 24, 32, 64]),
        dtype=dtypes,
    ),
    window=st.integers(1, 90),
    level=levels,
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=50)
def test_any_step_matches_the_oracle(
    batch: list[Sequence], shape: Shape, window: int, level: str, seed: int
) -> None:
    Step(tuple(batch), shape, seed=seed).check([OPS[level]], None, window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    Step(MIXED, Shape(head_dim=head_dim, dtype=dtype)).check(OPS.values(), None, 9)


@pytest.mark.parametrize("grouped", [1, 5, 6, 8, 16, 48])
def test_head_groups(grouped: int) -> None:
    Step(MIXED, Shape(num_kv_heads=1, grouped=grouped)).check([BEST], None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_new", [1, 3, 20])
def test_long_contexts_are_split(num_new: int, dtype: torch.dtype) -> None:
    long = (Sequence((300, 801), num_new), Sequence((513,), 1), Sequence((512,), 1))
    step = Step(long, Shape(num_kv_heads=1, head_dim=32, dtype=dtype))
    step.check([BEST], None, 5, 600)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, float("inf"), float("-inf"), 1e30])
def test_unwritten_memory_never_counts(poison: float, dtype: torch.dtype, level: str) -> None:
    shape = Shape(head_dim=18, block_size=24, dtype=dtype)
    clean = Step(MIXED, shape, poison=0.0).run(OPS[level], None, 7)
    poisoned = Step(MIXED, shape, poison=poison).run(OPS[level], None, 7)
    assert all(map(torch.equal, poisoned, clean))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broken_sequence_breaks_no_other(dtype: torch.dtype, level: str) -> None:
    shape = Shape(dtype=dtype)
    step, clean = Step(MIXED, shape), Step(MIXED, shape)
    start, end = step.batch.query_starts[3:5]
    step.qkv[start:end] = NAN
    broken, expected = step.run(OPS[level], None)[0], clean.run(OPS[level], None)[0]
    assert broken[start:end].isnan().all()
    broken[start:end] = expected[start:end]
    assert torch.equal(broken, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    alone = Step((Sequence((5, 700), 1),), Shape(dtype=dtype), shuffle=False)
    together = Step((Sequence((5, 700), 1), *MIXED), Shape(dtype=dtype), shuffle=False)
    together.past[: len(alone.past)] = alone.past
    together.qkv[:1] = alone.qkv
    assert torch.equal(together.run(BEST, None)[0][:1], alone.run(BEST, None)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    batch = (*MIXED, Sequence((700, 90), 1), Sequence((600,), 100))
    results = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        step = Step(batch, Shape(dtype=dtype))
        x, packed = random(40, 64, dtype=dtype), BEST.pack(random(500, 64, dtype=dtype))
        norm = BEST.rms_norm(random(300, 200, dtype=dtype), random(200, dtype=dtype), 1e-5)
        silu = BEST.silu_and_mul(random(300, 200, dtype=dtype))
        results.append([*step.run(BEST, None, 50), BEST.linear(x, packed), norm, silu])
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def test_queries_may_be_strided() -> None:
    step = Step(MIXED, Shape())
    expected = step.run(BEST, None)[0]
    attention = BEST.plan_attention(
        step.batch, block_size=16, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25,
        dtype=torch.float32,
    )  # fmt: skip
    query = step.split(step.qkv)[0]
    assert torch.equal(attention(query, step.pool), expected)
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attention(transposed, step.pool), expected)


# ---- norm, RoPE and the write ----


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 18, 64, 80])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
def test_rope_rounds_as_separate_operations_do(
    normed: bool, head_dim: int, dtype: torch.dtype, level: str
) -> None:
    shape = Shape(head_dim=head_dim, dtype=dtype)
    step = Step(MIXED, shape)
    num_tokens = len(step.qkv)
    angles = random(num_tokens, 2 * head_dim, dtype=dtype, seed=3)
    cos, sin = angles[:, : head_dim // 2], angles[:, head_dim : head_dim + head_dim // 2]
    weights = [random(head_dim, dtype=dtype, seed=s) if normed else None for s in (4, 5)]
    query = OPS[level].rope_and_store(
        step.qkv, cos, sin, step.batch.slots, step.pool, num_heads=6, num_kv_heads=2,
        block_size=16, q_norm=weights[0], k_norm=weights[1], eps=1e-6,
    )  # fmt: skip
    q, k, v = step.split(step.qkv)
    if weights[0] is not None and weights[1] is not None:
        q, k = torch_ops.rms_norm(q, weights[0], 1e-6), torch_ops.rms_norm(k, weights[1], 1e-6)
    q, k = torch_ops.apply_rope(q, k, cos, sin)
    stored_keys, stored_values = unpack_pool(step)
    compare = close if normed else torch.testing.assert_close
    exact = {} if normed else {"rtol": 0, "atol": 0}
    compare(query, q, **exact)
    compare(stored_keys, k, **exact)
    assert torch.equal(stored_values, v)


def unpack_pool(step: Step) -> tuple[Tensor, Tensor]:
    """Keys and values of the step's tokens, as the documented layout has them."""
    size, pair = step.shape.head_dim, 2 if step.shape.dtype == torch.bfloat16 else 1
    slots = step.batch.slots
    block, tile, token = slots // 16, slots % 16 // 16, slots % 16
    tiles = step.pool[block, :, tile]
    keys = tiles[..., : 16 * size].unflatten(-1, (size // pair, 16, pair))
    values = tiles[..., 16 * size :].unflatten(-1, (16 // pair, -1, pair))
    rows = torch.arange(len(slots))
    key = keys[rows, :, :, token].flatten(2)
    value = values[rows, :, token // pair, :, token % pair][..., :size]
    return key, value


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the order of a float32 sum: a bfloat16 result may round the other way."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-5)
    if expected.dtype == torch.bfloat16:
        assert (actual != expected).float().mean() <= 0.02


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 700),
    dtype=dtypes,
    level=levels,
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=40)
def test_rows(rows: int, size: int, dtype: torch.dtype, level: str, seed: int) -> None:
    ops = OPS[level]
    hidden, delta = (random(rows, size, dtype=dtype, seed=seed + i) for i in range(2))
    weight = random(size, dtype=dtype, seed=seed + 2)
    close(ops.rms_norm(hidden, weight, 1e-5), torch_ops.rms_norm(hidden, weight, 1e-5))
    total = hidden + delta
    normed = ops.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, total)
    close(normed, torch_ops.rms_norm(total, weight, 1e-5))
    gate_up = 4 * random(rows, 2 * size, dtype=dtype, seed=seed + 3)
    close(ops.silu_and_mul(gate_up), torch_ops.silu_and_mul(gate_up))


@pytest.mark.parametrize("level", LEVELS)
def test_silu_at_the_ends(level: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, 200.0, -200.0, 3e38, -3e38, NAN])
    actual = OPS[level].silu_and_mul(torch.cat((gate, torch.ones(len(gate)))))
    torch.testing.assert_close(actual, F.silu(gate), equal_nan=True, atol=1e-34, rtol=1e-6)


# ---- linear layers ----


@given(
    rows=st.integers(1, 40),
    in_features=st.integers(1, 100),
    out_features=st.integers(1, 200),
    bias=st.booleans(),
    dtype=dtypes,
    level=levels,
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=80)
def test_linear(
    rows: int,
    in_features: int,
    out_features: int,
    bias: bool,
    dtype: torch.dtype,
    level: str,
    seed: int,
) -> None:
    ops = OPS[level]
    in_features *= 2
    x = random(rows, in_features, dtype=dtype, seed=seed)
    weight = random(out_features, in_features, dtype=dtype, seed=seed + 1)
    offset = random(out_features, dtype=dtype, seed=seed + 2) if bias else None
    packed = ops.pack(weight)
    wide = ops.linear(x, packed, offset, dtype=torch.float32)
    expected = F.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    ).float()
    torch.testing.assert_close(wide, expected, rtol=1e-5, atol=3e-5)
    assert torch.equal(ops.linear(x, packed, offset), wide.to(dtype))
    ids = torch.randint(out_features, (9,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.embedding(ids, packed), weight[ids])


def test_linear_takes_strided_rows() -> None:
    x = random(7, 100)
    packed = BEST.pack(random(50, 40, seed=1))
    assert torch.equal(BEST.linear(x[:, 3:43], packed), BEST.linear(x[:, 3:43].clone(), packed))


def test_odd_bfloat16_is_refused() -> None:
    with pytest.raises(ValueError, match="in_features=3 is odd"):
        BEST.pack(torch.zeros(4, 3, dtype=torch.bfloat16))


# ---- a decoder's step ----


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases and qk-norm"])
def test_forward_is_its_operations_in_order(extras: bool, dtype: torch.dtype, level: str) -> None:
    ops, shape, hidden_size, inner = OPS[level], Shape(head_dim=32, dtype=dtype), 100, 70
    step = Step(MIXED, shape)
    seeds = itertools.count(10)

    def weight(*size: int) -> Tensor:
        return random(*size, dtype=dtype, seed=next(seeds)) * 0.2

    def maybe(size: int) -> Tensor | None:
        return weight(size) if extras else None

    q_size = shape.num_heads * shape.head_dim
    layers = [
        native.NativeLayer(
            attention_norm=weight(hidden_size),
            qkv=ops.pack(weight(shape.row, hidden_size)),
            output=ops.pack(weight(hidden_size, q_size)),
            mlp_norm=weight(hidden_size),
            gate_up=ops.pack(weight(2 * inner, hidden_size)),
            down=ops.pack(weight(hidden_size, inner)),
            pool=torch.zeros(step.pool_shape, dtype=dtype),
            window=window,
            qkv_bias=maybe(shape.row),
            q_norm=maybe(shape.head_dim),
            k_norm=maybe(shape.head_dim),
            output_bias=maybe(hidden_size),
            gate_up_bias=maybe(2 * inner),
            down_bias=maybe(hidden_size),
        )
        for window in (None, 7)
    ]
    norm = weight(hidden_size)
    num_tokens = len(step.batch.slots)
    embedded = random(num_tokens, hidden_size, dtype=dtype, seed=1)
    cos, sin = random(num_tokens, shape.head_dim, dtype=dtype, seed=2).chunk(2, dim=-1)
    sizes = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
    attention = ops.plan_attention(
        step.batch, block_size=16, head_dim=shape.head_dim, scale=0.2, dtype=dtype, **sizes
    )

    decoder = native.NativeDecoder(ops, layers, norm=norm, block_size=16, eps=1e-5)
    actual = decoder.forward(embedded.clone(), cos, sin, step.batch.slots, attention)

    hidden = embedded
    for layer in layers:
        x = ops.rms_norm(hidden, layer.attention_norm, 1e-5)
        query = ops.rope_and_store(
            ops.linear(x, layer.qkv, layer.qkv_bias), cos, sin, step.batch.slots,
            torch.zeros_like(layer.pool).copy_(layer.pool), block_size=16, q_norm=layer.q_norm,
            k_norm=layer.k_norm, eps=1e-5, **sizes,
        )  # fmt: skip
        x = attention(query, layer.pool, window=layer.window).view(num_tokens, -1)
        hidden = hidden + ops.linear(x, layer.output, layer.output_bias)
        x = ops.rms_norm(hidden, layer.mlp_norm, 1e-5)
        x = ops.silu_and_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
        hidden = hidden + ops.linear(x, layer.down, layer.down_bias)
    assert torch.equal(actual, ops.rms_norm(hidden, norm, 1e-5))
    again = decoder.forward(embedded.clone(), cos, sin, step.batch.slots, attention)
    assert torch.equal(again, actual)


def test_a_layer_can_be_refused_with_a_reason() -> None:
    fine = {"dtype": torch.bfloat16, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    assert native.NativeOps.refusal(**fine, sizes=(576, 1536)) is None
    assert "odd" not in str(native.NativeOps.refusal(**fine))
    for change, reason in (
        ({"dtype": torch.float16}, "float16"),
        ({"head_dim": 33}, "head_dim=33"),
        ({"head_dim": 512}, "head_dim=512"),
        ({"num_heads": 10}, "10 heads"),
        ({"num_heads": 147}, "147 heads"),
        ({"sizes": (5,)}, "even"),
    ):
        assert reason in str(native.NativeOps.refusal(**{**fine, **change}))


# ---- finding the library ----


def test_the_environment_switches_it_off_or_down(monkeypatch: pytest.MonkeyPatch) -> None:
    load = native.load.__wrapped__
    monkeypatch.setenv("RAGSERVE_NATIVE", "generic")
    assert load().level == "generic"
    monkeypatch.setenv("RAGSERVE_NATIVE", "0")
    with pytest.raises(native.NativeUnavailableError, match="switched off"):
        load()
    monkeypatch.setenv("RAGSERVE_NATIVE", "mmx")
    with pytest.raises(native.NativeUnavailableError, match="'mmx' is none of"):
        load()
    monkeypatch.delenv("RAGSERVE_NATIVE")
    monkeypatch.setenv("RAGSERVE_NATIVE_LIBRARY", "/nowhere/lib.so")
    with pytest.raises(native.NativeUnavailableError, match="cannot be loaded"):
        load()


def test_it_runs_on_the_threads_that_torch_has() -> None:
    assert BEST.threaded or "GNU" not in torch.__config__.parallel_info()
