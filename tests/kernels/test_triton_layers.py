"""The Triton layer and linear kernels against float32 oracles: in Triton's interpreter, or on a
GPU, there at real dimensions too.

    TRITON_INTERPRET=1 python -P -m pytest tests/kernels/test_triton_layers.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragserve.kernels import reference
from ragserve.kernels.paging import KVLayer

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
if not (ON_GPU or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from ragserve.kernels.triton import layers  # noqa: E402
from ragserve.kernels.triton.linear import (  # noqa: E402
    GEMV_ROWS,
    GemvConfig,
    gemv,
    gemv_config,
    gemv_silu,
    linear,
)

pytestmark = pytest.mark.triton

DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAN = float("nan")
EPS = 1e-5

dtypes = st.sampled_from([*TOLERANCE])
seeds = st.integers(0, 2**31)
# A new shape is compiled on a GPU, which takes longer than the interpreter takes to run it.
# Each example of a GPU waits for a compiler.
examples = settings(max_examples=6 if ON_GPU else 20, deadline=None, derandomize=True)
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


@dataclass
class Random:
    """A source of random tensors of one dtype."""

    dtype: torch.dtype
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(self.seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=DEVICE) * scale
        return values.to(self.dtype)

    def columns(self, rows: int, columns: int) -> Tensor:
        """`[rows, columns]` of a wider tensor, whose other columns nobody may look at."""
        wide = torch.full((rows, columns + 24), NAN, dtype=self.dtype, device=DEVICE)
        part = wide[:, 8 : 8 + columns]
        part.copy_(self(rows, columns))
        return part


def check(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


# ---- norms and activation ----

widths = st.sampled_from([1, 7, 64, 96, 896, 1000])


@examples
@given(dtype=dtypes, seed=seeds, tokens=st.integers(0, 4), n=widths, in_place=st.booleans())
def test_rms_norm(dtype: torch.dtype, seed: int, tokens: int, n: int, in_place: bool) -> None:
    random = Random(dtype, seed)
    x, weight = random.columns(tokens, n), random(n)
    expected = reference.rms_norm(x, weight, EPS)
    out = x if in_place else random.columns(tokens, n)
    layers.rms_norm(x, weight, out, eps=EPS)
    check(out, expected)


@examples
@given(dtype=dtypes, seed=seeds, tokens=st.integers(0, 4), n=widths, in_place=st.booleans())
def test_add_rms_norm(dtype: torch.dtype, seed: int, tokens: int, n: int, in_place: bool) -> None:
    random = Random(dtype, seed)
    x, residual, weight = random.columns(tokens, n), random(tokens, n), random(n)
    total = x + residual
    out = x if in_place else random.columns(tokens, n)
    layers.add_rms_norm(x, residual, weight, out, eps=EPS)
    if INTERPRETED and dtype == torch.bfloat16:  # where the interpreter rounds towards zero
        check(residual, total)
    else:
        assert torch.equal(residual, total)
    check(out, reference.rms_norm(residual, weight, EPS))


@examples
@given(
    dtype=dtypes,
    seed=seeds,
    tokens=st.integers(0, 3),
    n=st.sampled_from([1, 96, 1000, 2048, 2049, 4864]),
    target=st.sampled_from(["gate", "up", "new"]),
)
def test_silu_and_mul(dtype: torch.dtype, seed: int, tokens: int, n: int, target: str) -> None:
    random = Random(dtype, seed)
    gate_up = random.columns(tokens, 2 * n)
    expected = reference.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    out = {"gate": gate, "up": up, "new": random(tokens, n)}[target]
    layers.silu_and_mul(gate, up, out)
    check(out, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by numpy
def test_silu_of_extreme_values() -> None:
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]], device=DEVICE)
    out = torch.empty_like(gate)
    layers.silu_and_mul(gate, torch.ones_like(gate), out)
    check(out, gate.clamp(min=0))


# ---- RoPE and the pool ----


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (14, 2), (3, 1)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rope_and_store(
    head_dim: int, num_heads: int, num_kv_heads: int, norm: bool, dtype: torch.dtype
) -> None:
    random = Random(dtype, seed=head_dim + num_heads)
    num_tokens, num_blocks, block_size, half = 5, 6, 16, head_dim // 2
    heads = (num_heads, num_kv_heads, num_kv_heads)
    qkv = random.columns(num_tokens, sum(heads) * head_dim)
    positions = torch.tensor([3, 0, 40, 41, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([95, 0, -1, 33, 17], dtype=torch.int64, device=DEVICE)
    angles = torch.arange(50, device=DEVICE)[:, None] / torch.arange(1, half + 1, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if dtype != torch.float16:  # the angles may be of the model's dtype, or of float32
        cos_sin = cos_sin.to(dtype)
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    cache = KVLayer(pool[:, 0], pool[:, 1])
    q_norm, k_norm = (random(head_dim), random(head_dim)) if norm else (None, None)

    sizes = [count * head_dim for count in heads]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.clone().split(sizes, dim=-1))
    normed_q, normed_k = q, k
    if q_norm is not None and k_norm is not None:
        normed_q = reference.rms_norm(q, q_norm, EPS)
        normed_k = reference.rms_norm(k, k_norm, EPS)
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    expected_q, expected_k = reference.apply_rope(normed_q, normed_k, cos, sin)

    layers.rope_and_store(
        qkv,
        positions,
        cos_sin,
        slots,
        cache,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=EPS,
    )

    new_q, new_k, new_v = qkv.split(sizes, dim=-1)
    check(new_q.unflatten(-1, (-1, head_dim)), expected_q)
    assert torch.equal(new_k.unflatten(-1, (-1, head_dim)), k)
    assert torch.equal(new_v.unflatten(-1, (-1, head_dim)), v)
    stored = slots >= 0
    block, offset = slots[stored] // block_size, slots[stored] % block_size
    check(cache.keys[block, :, offset], expected_k[stored])
    assert torch.equal(cache.values[block, :, offset], v[stored])
    pool[block, :, :, offset] = NAN
    assert pool.isnan().all()


def test_rope_of_no_tokens() -> None:
    random = Random(torch.float32)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    cache = KVLayer(random(1, 1, 16, 64), random(1, 1, 16, 64))
    kwargs = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16}
    layers.rope_and_store(random(0, 192), none, random(4, 64), none, cache, **kwargs)


# ---- matrix-vector products ----

CONFIGS = [
    None,
    GemvConfig(block_n=1, block_k=128, num_warps=4),
    GemvConfig(block_n=2, block_k=64, num_warps=1, num_stages=3),
    GemvConfig(block_n=8, block_k=512, num_warps=2),
]
configs = st.sampled_from(CONFIGS)
outputs = st.sampled_from([1, 3, 16, 37])
inners = st.sampled_from([8, 13, 128, 136, 896])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
    wide = x.float() if norm is None else reference.rms_norm(x, norm, EPS)
    result = wide.double() @ weight.double().t()
    return result if bias is None else result + bias.double()


@examples
@given(
    dtype=dtypes,
    seed=seeds,
    rows=st.integers(0, GEMV_ROWS),
    n=outputs,
    k=inners,
    config=configs,
    bias=st.booleans(),
    norm=st.booleans(),
    residual=st.sampled_from(["none", "other", "out"]),
)
def test_gemv(
    dtype: torch.dtype,
    seed: int,
    rows: int,
    n: int,
    k: int,
    config: GemvConfig | None,
    bias: bool,
    norm: bool,
    residual: str,
) -> None:
    random = Random(dtype, seed)
    x, weight, out = random.columns(rows, k), random(n, k, scale=k**-0.5), random.columns(rows, n)
    added = random(n) if bias else None
    gain = random(k) if norm else None
    old = {"none": None, "other": random.columns(rows, n), "out": out}[residual]
    expected = product(x, weight, added, gain)
    if old is not None:
        expected = expected + old.double()
    gemv(x, weight, out, bias=added, residual=old, norm=gain, eps=EPS, config=config)
    check(out, expected)


@examples
@given(
    dtype=dtypes,
    seed=seeds,
    rows=st.integers(0, GEMV_ROWS),
    n=outputs,
    k=inners,
    config=configs,
    bias=st.booleans(),
    norm=st.booleans(),
)
def test_gemv_silu(
    dtype: torch.dtype,
    seed: int,
    rows: int,
    n: int,
    k: int,
    config: GemvConfig | None,
    bias: bool,
    norm: bool,
) -> None:
    random = Random(dtype, seed)
    x, weight, out = random(rows, k), random(2 * n, k, scale=k**-0.5), random.columns(rows, n)
    added = random(2 * n) if bias else None
    gain = random(k) if norm else None
    expected = reference.silu_and_mul(product(x, weight, added, gain))
    gemv_silu(x, weight, out, bias=added, norm=gain, eps=EPS, config=config)
    check(out, expected)


@pytest.mark.parametrize("rows", [0, 1, GEMV_ROWS, GEMV_ROWS + 1, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows: int, bias: bool) -> None:
    random = Random(torch.float32)
    x, weight, out = random.columns(rows, 96), random(50, 96, scale=0.1), random.columns(rows, 50)
    added = random(50) if bias else None
    linear(x, weight, out, added)
    check(out, product(x, weight, added, None))


def test_a_row_does_not_depend_on_the_others() -> None:
    random = Random(torch.float16)
    x, weight = random(GEMV_ROWS, 896), random(40, 896)
    config = GemvConfig(block_n=2, block_k=256, num_warps=1)
    together, alone = random(len(x), 40), random(len(x), 40)
    gemv(x, weight, together, config=config)
    for i in range(len(x)):
        gemv(x[i : i + 1], weight, alone[i : i + 1], config=config)
    check(together, alone.float())


def test_too_many_rows() -> None:
    random = Random(torch.float32)
    rows = GEMV_ROWS + 1
    with pytest.raises(ValueError, match=f"{rows} rows"):
        gemv(random(rows, 8), random(8, 8), random(rows, 8))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", range(1, GEMV_ROWS + 1))
def test_configs_fit_every_shape(rows: int, gated: bool) -> None:
    for n in (1, 896, 4608, 152064):
        for k in (8, 896, 18944):
            config = gemv_config(n, k, gated=gated)
            for size in (config.block_n, config.block_k, config.num_warps):
                assert size & (size - 1) == 0
            # All warps side by side in a row, and within what a thread has of registers.
            assert config.block_k >= 256 * config.num_warps
            weights = 2 if gated else 1
            per_thread = weights * config.block_n * config.block_k / (32 * config.num_warps)
            assert per_thread <= 64


# ---- real dimensions ----

SHAPES = [(4608, 3584), (3584, 18944), (152064, 3584), (1152, 896), (896, 4864), (1024, 2048)]


@on_gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", range(1, GEMV_ROWS + 1))
def test_gemv_at_real_dimensions(n: int, k: int, rows: int) -> None:
    random = Random(torch.bfloat16)
    x, weight = random(rows, k), random(n, k, scale=k**-0.5)
    norm, residual, out = random(k), random(rows, n), random(rows, n)
    expected = reference.rms_norm(x, norm, EPS) @ weight.float().t() + residual.float()
    gemv(x, weight, out, residual=residual, norm=norm, eps=EPS)
    check(out, expected)


@on_gpu
@pytest.mark.parametrize(("n", "k"), [(18944, 3584), (4864, 896), (3072, 1024)])
def test_gemv_silu_at_real_dimensions(n: int, k: int) -> None:
    random = Random(torch.bfloat16)
    x, weight = random(1, k), random(2 * n, k, scale=k**-0.5)
    norm, out = random(k), random(1, n)
    expected = reference.silu_and_mul(reference.rms_norm(x, norm, EPS) @ weight.float().t())
    gemv_silu(x, weight, out, norm=norm, eps=EPS)
    check(out, expected)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_layers_at_real_dimensions(tokens: int) -> None:
    random = Random(torch.bfloat16)
    x, residual, weight = random(tokens, 3584), random(tokens, 3584), random(3584)
    total, out = x + residual, torch.empty_like(x)
    layers.add_rms_norm(x, residual, weight, out, eps=EPS)
    assert torch.equal(residual, total)
    check(out, reference.rms_norm(total, weight, EPS))
    gate_up = random(tokens, 2 * 18944)
    expected = reference.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    layers.silu_and_mul(gate, up, gate)
    check(gate, expected)


@on_gpu
def test_a_chain_of_dependent_launches() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    random = Random(torch.bfloat16)
    hidden, norm = random(1, 3584), random(3584)
    up_down = random(2 * 8192, 3584, scale=3584**-0.5), random(3584, 8192, scale=8192**-0.5)
    results = []
    for pdl in (False, True):
        x, normed, inner = hidden.clone(), torch.empty_like(hidden), hidden.new_empty(1, 8192)
        graph = torch.cuda.CUDAGraph()

        def step(x: Tensor = x, a: Tensor = normed, b: Tensor = inner, pdl: bool = pdl) -> None:
            for _ in range(4):
                layers.rms_norm(x, norm, a, eps=EPS, pdl=pdl)
                gemv_silu(a, up_down[0], b, pdl=pdl)
                gemv(b, up_down[1], x, residual=x, pdl=pdl)

        step()
        x.copy_(hidden)
        with torch.cuda.graph(graph):
            step()
        for _ in range(20):
            graph.replay()
        results.append(x)
    assert torch.equal(*results)
