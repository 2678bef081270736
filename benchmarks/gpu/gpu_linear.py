"""Times of the GPU's matrix-vector products and layer kernels, at the shapes of three models.

    python -P benchmarks/gpu/gpu_linear.py [--sweep] [--json FILE]

Each figure is the median time of one call in a CUDA graph of many. Weights are rotated, so that
none is found in the L2 cache. GB/s counts a weight once, and for layer kernels all that is read
and written. The kernels are compiled first, by several processes side by side. With `--sweep`,
many configurations and variants are tried beside those that are used. Without a GPU, under
TRITON_INTERPRET=1, small shapes run once, which shows that the benchmark itself works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragserve.kernels.paging import KVLayer
from ragserve.kernels.triton import layers
from ragserve.kernels.triton.linear import GEMV_ROWS, GemvConfig, gemv, gemv_config, gemv_silu

EPS = 1e-6
COLD_BYTES = 160_000_000  # several times the L2 cache
COMPILERS = 12


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bias: bool = False
    qk_norm: bool = False
    layers: int = 4

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attended(self) -> int:
        return self.heads * self.head_dim


MODELS = [
    Model("7B", 3584, 18944, 28, 4, 128, 152064, bias=True),
    Model("0.5B", 896, 4864, 14, 2, 64, 151936, bias=True, layers=24),
    Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936, qk_norm=True, layers=28),
]
TINY = [Model("tiny", 16, 16, 1, 1, 16, 16, bias=True, qk_norm=True, layers=2)]


@dataclass(frozen=True)
class Product:
    """A matrix-vector product as a model uses it, with what is fused into it."""

    name: str
    n: int
    k: int
    rows: int = 1
    norm: bool = False
    bias: bool = False
    residual: bool = False
    gated: bool = False

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.gated else self.n

    @property
    def plain(self) -> Product:
        """Without anything fused."""
        return Product(self.name, self.weight_rows, self.k, self.rows)

    def candidates(self) -> list[GemvConfig]:
        """Configurations to compare; the first is the one that is used."""
        default = gemv_config(self.n, self.k, gated=self.gated)
        if self.gated:
            shapes = [
                (2, 512, 1, 1),
                (1, 1024, 1, 1),
                (1, 1024, 2, 1),
                (2, 1024, 2, 1),
                (4, 256, 1, 1),
                (1, 512, 1, 1),
                (2, 512, 1, 3),
            ]
        elif self.n >= 8192:
            shapes = [
                (4, 512, 1, 1),
                (2, 1024, 1, 1),
                (8, 256, 1, 1),
                (4, 1024, 2, 1),
                (2, 512, 1, 1),
                (4, 512, 1, 4),
            ]
        elif self.n >= 2048:
            shapes = [
                (2, 1024, 2, 1),
                (1, 1024, 1, 1),
                (1, 2048, 2, 1),
                (1, 2048, 4, 1),
                (2, 512, 1, 1),
                (4, 512, 2, 1),
                (1, 4096, 4, 1),
                (2, 1024, 2, 3),
            ]
        else:
            shapes = [
                (1, 1024, 4, 1),
                (1, 1024, 2, 1),
                (1, 1024, 1, 1),
                (2, 1024, 4, 1),
                (1, 2048, 4, 1),
                (1, 2048, 8, 1),
                (1, 1024, 4, 3),
            ]
        return list(dict.fromkeys([default, *(GemvConfig(*shape) for shape in shapes)]))


def products(model: Model) -> list[Product]:
    return [
        Product("qkv", model.qkv, model.hidden, norm=True, bias=model.bias),
        Product("o", model.hidden, model.attended, residual=True),
        Product("gate_up", model.inner, model.hidden, norm=True, gated=True),
        Product("down", model.hidden, model.inner, residual=True),
        Product("lm_head", model.vocab, model.hidden, norm=True),
    ]


def cases(models: list[Model], *, sweep: bool) -> Iterator[tuple[Model, Product, GemvConfig]]:
    """Every matrix-vector product that is timed."""
    for model in models:
        for product in products(model):
            for config in product.candidates()[: None if sweep else 1]:
                yield model, product, config
            if sweep and product.norm and product.name != "lm_head":
                plain = product.plain
                yield model, plain, gemv_config(plain.n, plain.k)
            for rows in range(2, GEMV_ROWS + 1):
                few = replace(product, rows=rows)
                for config in few.candidates()[: 2 if sweep else 1]:
                    yield model, few, config


class Bench:
    """The device, its clock, and one buffer that all weights are cut from."""

    def __init__(self, models: list[Model], *, cold: bool = True) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.device = "cuda" if self.on_gpu else "cpu"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.cold_bytes = COLD_BYTES if cold and self.on_gpu else 0
        largest = max(product.weight_rows * product.k for m in models for product in products(m))
        size = largest + self.cold_bytes // self.dtype.itemsize
        self.buffer = torch.empty(size, dtype=self.dtype, device=self.device).uniform_(-0.02, 0.02)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def weights(self, n: int, k: int) -> list[Tensor]:
        """`[n, k]`, as many as it takes for the first to have left the cache after the last."""
        count = self.cold_bytes // (n * k * self.dtype.itemsize) + 1
        return list(self.buffer[: count * n * k].view(count, n, k))

    def time(
        self, call: Callable[[], object], *, calls: int = 1, repeats: int | None = None
    ) -> float:
        """Microseconds of one of the `calls` calls that `call` makes, `repeats` times in a graph;
        if not given, so often that the graph's own start does not count."""
        call()
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6 / calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        repeats = repeats or max(1, 40 // calls)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
        times = []
        graph.replay()
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times) / (calls * repeats)

    def product(
        self, product: Product, config: GemvConfig | None = None, *, pdl: bool = False
    ) -> Callable[[Tensor], None]:
        """The product as a function of the weight."""
        x, out = self.random(product.rows, product.k), self.random(product.rows, product.n)
        norm = self.random(product.k) if product.norm else None
        bias = self.random(product.n) if product.bias else None
        if product.gated:
            return lambda w: gemv_silu(x, w, out, norm=norm, eps=EPS, config=config, pdl=pdl)
        residual = out if product.residual else None
        return lambda w: gemv(
            x, w, out, bias=bias, residual=residual, norm=norm, eps=EPS, config=config, pdl=pdl
        )

    def time_weights(self, call: Callable[[Tensor], object], n: int, k: int) -> float:
        weights = self.weights(n, k)
        return self.time(lambda: [call(weight) for weight in weights], calls=len(weights))


Row = dict[str, Any]


def _row(
    model: str, what: str, variant: str, call: Callable[[], float], num_bytes: float = 0
) -> Row:
    """A line of the result; what fails is reported, and the rest goes on."""
    row: Row = {"model": model, "what": what, "variant": variant}
    try:
        row["us"] = round(call(), 2)
        if num_bytes:
            row["GB/s"] = round(num_bytes / row["us"] / 1e3)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def measure_products(bench: Bench, models: list[Model], *, sweep: bool) -> Iterator[Row]:
    """Every matrix-vector product beside torch.mm; in a sweep with all candidates."""
    size = bench.dtype.itemsize
    compared = set()
    for model, product, config in cases(models, sweep=sweep):
        n, k, rows = product.weight_rows, product.k, product.rows
        what = f"{product.name} {n}x{k} T={rows}"
        if (model.name, what) not in compared:
            compared.add((model.name, what))
            x, out = bench.random(rows, k), bench.random(rows, n)

            def library(n: int = n, k: int = k, x: Tensor = x, out: Tensor = out) -> float:
                return bench.time_weights(lambda w: torch.mm(x, w.t(), out=out), n, k)

            yield _row(model.name, what, "torch.mm", library, n * k * size)
        fused = "+".join(
            name for name in ("norm", "bias", "residual", "gated") if getattr(product, name)
        )
        variant = (
            f"{config.block_n},{config.block_k},{config.num_warps},{config.num_stages} "
            f"{fused or 'plain'}"
        )
        if config == gemv_config(product.n, k, gated=product.gated):
            variant += " *"

        def ours(
            n: int = n, k: int = k, product: Product = product, config: GemvConfig = config
        ) -> float:
            return bench.time_weights(bench.product(product, config), n, k)

        yield _row(model.name, what, variant, ours, n * k * size)


def measure_layers(bench: Bench, models: list[Model], tokens: list[int]) -> Iterator[Row]:
    """Norms, RoPE and SwiGLU's activation."""
    size = bench.dtype.itemsize
    for model in models:
        for t in tokens:
            hidden, heads, kv_heads = model.hidden, model.heads, model.kv_heads
            # Few tokens are still in the cache when the next kernel reads them; many are not.
            copies = 1 + bench.cold_bytes // (t * hidden * size) if t > 1024 else 1
            xs, residuals = (
                [bench.random(t, hidden) for _ in range(copies)] for _ in ("x", "residual")
            )
            weight, out = bench.random(hidden), bench.random(t, hidden)
            gate_ups = [bench.random(t, 2 * model.inner)]
            acts = bench.random(t, model.inner)
            qkvs = [bench.random(t, model.qkv) for _ in range(min(copies, 3))]
            blocks = -(-t // 16) + 1
            cache = KVLayer(*(bench.random(blocks, kv_heads, 16, model.head_dim) for _ in range(2)))
            positions = torch.arange(t, dtype=torch.int32, device=bench.device)
            slots = torch.randperm(t, device=bench.device)
            cos_sin = torch.rand(max(t, 16), model.head_dim, device=bench.device)
            norm = bench.random(model.head_dim) if model.qk_norm else None

            def run_norm(xs=xs, w=weight, out=out) -> float:  # type: ignore[no-untyped-def]
                return bench.time(
                    lambda: [layers.rms_norm(x, w, out, eps=EPS) for x in xs], calls=len(xs)
                )

            def run_add(xs=xs, rs=residuals, w=weight, out=out) -> float:  # type: ignore[no-untyped-def]
                return bench.time(
                    lambda: [
                        layers.add_rms_norm(x, r, w, out, eps=EPS)
                        for x, r in zip(xs, rs, strict=True)
                    ],
                    calls=len(xs),
                )

            def run_silu(gate_ups=gate_ups, n=model.inner, out=acts) -> float:  # type: ignore[no-untyped-def]
                return bench.time(
                    lambda: [layers.silu_and_mul(g[:, :n], g[:, n:], out) for g in gate_ups],
                    calls=len(gate_ups),
                )

            def run_rope(  # type: ignore[no-untyped-def]
                qkvs=qkvs, p=positions, cs=cos_sin, s=slots, cache=cache, model=model, norm=norm
            ) -> float:
                return bench.time(
                    lambda: [
                        layers.rope_and_store(
                            qkv,
                            p,
                            cs,
                            s,
                            cache,
                            num_heads=model.heads,
                            num_kv_heads=model.kv_heads,
                            head_dim=model.head_dim,
                            block_size=16,
                            q_norm=norm,
                            k_norm=norm,
                            eps=EPS,
                        )
                        for qkv in qkvs
                    ],
                    calls=len(qkvs),
                )

            each = t * size
            rope_bytes = each * model.head_dim * (2 * heads + 4 * kv_heads)
            yield _row(model.name, f"rms_norm T={t}", "", run_norm, 2 * each * hidden)
            yield _row(model.name, f"add_rms_norm T={t}", "", run_add, 4 * each * hidden)
            yield _row(model.name, f"silu_and_mul T={t}", "", run_silu, 3 * each * model.inner)
            yield _row(model.name, f"rope_and_store T={t}", "", run_rope, rope_bytes)


def measure_gate_up(bench: Bench, model: Model, tokens: list[int]) -> Iterator[Row]:
    """The widest product at many tokens: whole, and in halves, with the activation and without."""
    n, k = model.inner, model.hidden
    weight = bench.weights(2 * n, k)[0]
    halves = weight[:n], weight[n:]
    for t in tokens:
        x, whole = bench.random(t, k), bench.random(t, 2 * n)
        views, apart = (whole[:, :n], whole[:, n:]), (bench.random(t, n), bench.random(t, n))

        def one(x: Tensor = x, whole: Tensor = whole) -> None:
            torch.mm(x, weight.t(), out=whole)

        def two(outs: tuple[Tensor, Tensor], x: Tensor = x) -> None:
            for half, out in zip(halves, outs, strict=True):
                torch.mm(x, half.t(), out=out)

        variants: dict[str, tuple[Callable[[], None], tuple[Tensor, Tensor]]] = {
            "one product": (one, views),
            "halves, columns of one": (lambda two=two, o=views: two(o), views),
            "halves, two outputs": (lambda two=two, o=apart: two(o), apart),
        }
        for name, (call, outs) in variants.items():

            def run(call: Callable[[], None] = call) -> float:
                return bench.time(call, repeats=4)

            def run_silu(
                call: Callable[[], None] = call, outs: tuple[Tensor, Tensor] = outs
            ) -> float:
                def both() -> None:
                    call()
                    layers.silu_and_mul(*outs, outs[0])

                return bench.time(both, repeats=4)

            for label, function in ((name, run), (f"{name} + silu", run_silu)):
                row = _row(model.name, f"gate_up T={t}", label, function)
                if "us" in row:
                    row["TFLOP/s"] = round(4 * t * n * k / row["us"] / 1e6)
                yield row


def measure_chain(bench: Bench, model: Model, *, sweep: bool) -> Iterator[Row]:
    """A decode step's layers without attention, for one token: separate kernels around
    torch.mm, and fused ones; in a sweep also norms apart, and dependent launches."""
    hidden = model.hidden
    shapes = [(p.weight_rows, p.k) for p in products(model)[:4]]
    weights: list[list[Tensor]] = []
    start = 0
    for _ in range(model.layers):
        layer = []
        for n, k in shapes:
            if start + n * k > bench.buffer.numel():
                start = 0
            layer.append(bench.buffer[start : start + n * k].view(n, k))
            start += n * k
        weights.append(layer)
    x, normed, norm = bench.random(1, hidden), bench.random(1, hidden), bench.random(hidden)
    outs = [(bench.random(1, k), bench.random(1, n)) for n, k in shapes]
    gate, up = outs[2][1].chunk(2, dim=-1)

    def separate() -> None:
        for layer in weights:
            for i, (weight, (source, out)) in enumerate(zip(layer, outs, strict=True)):
                if i in (0, 2):
                    layers.add_rms_norm(normed, x, norm, source, eps=EPS)
                torch.mm(source, weight.t(), out=out)
            layers.silu_and_mul(gate, up, gate)

    def ours(*, apart: bool, pdl: bool) -> Callable[[], None]:
        parts = [
            bench.product(replace(p, norm=p.norm and not apart), pdl=pdl)
            for p in products(model)[:4]
        ]

        def call() -> None:
            for layer in weights:
                for i, (part, weight) in enumerate(zip(parts, layer, strict=True)):
                    if apart and i in (0, 2):
                        layers.rms_norm(x, norm, normed, eps=EPS, pdl=pdl)
                    part(weight)

        return call

    variants = {"torch.mm, separate": separate, "fused": ours(apart=False, pdl=False)}
    if sweep:
        variants["norm apart, gemv"] = ours(apart=True, pdl=False)
    if sweep and bench.on_gpu:
        variants["norm apart, gemv, pdl"] = ours(apart=True, pdl=True)
        variants["fused, pdl"] = ours(apart=False, pdl=True)
    num_bytes = sum(n * k for n, k in shapes) * bench.dtype.itemsize
    for name, call in variants.items():

        def run(call: Callable[[], None] = call) -> float:
            return bench.time(call, calls=model.layers)

        yield _row(model.name, "layer without attention T=1", name, run, num_bytes)


def measure() -> list[Row]:
    """What is used beside torch's own: lines with the model, what was timed, microseconds of
    both and GB/s of ours (or the error)."""
    lines: dict[tuple[str, str], Row] = {}
    for row in run(sweep=False):
        about = {key: row[key] for key in ("model", "what")}
        line = lines.setdefault(
            (row["model"], row["what"]), {**about, "us": None, "GB/s": None, "torch_us": None}
        )
        if "error" in row:
            line["error"] = f"{row['variant']}: {row['error']}"
        elif row["variant"].startswith("torch"):
            line["torch_us"] = row["us"]
        else:
            line |= {"us": row["us"], "GB/s": row["GB/s"]}
    return list(lines.values())


def run(*, sweep: bool) -> list[Row]:
    """Lines with the model, what was timed, the variant, microseconds and GB/s (or the error).

    :param sweep: all variants; else those that are used, and torch's.
    """
    if not torch.cuda.is_available():
        return _run(TINY, sweep=sweep, tokens=[1, 3], many=[4])
    _compile(sweep)
    return _run(MODELS, sweep=sweep, tokens=[1, 64, 8192], many=[2048, 8192])


def _run(models: list[Model], *, sweep: bool, tokens: list[int], many: list[int]) -> list[Row]:
    torch.manual_seed(0)
    bench = Bench(models)
    parts = [
        measure_products(bench, models, sweep=sweep),
        *(measure_chain(bench, model, sweep=sweep) for model in models),
        measure_layers(bench, models if sweep else models[:1], tokens),
    ]
    if sweep:
        parts.append(measure_gate_up(bench, models[0], many))
    rows: list[Row] = []
    for part in parts:
        start = time.perf_counter()
        rows.extend(part)
        print(f"# {len(rows)} lines, {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return rows


def _compile(sweep: bool) -> None:
    """Compile the matrix-vector products into Triton's cache, in several processes."""
    start = time.perf_counter()
    command = [sys.executable, "-P", __file__, *(["--sweep"] if sweep else []), "--compile"]
    processes = [subprocess.Popen([*command, str(i)]) for i in range(COMPILERS)]
    for process in processes:
        process.wait()
    print(f"# compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr)


def _compile_share(share: int, *, sweep: bool) -> None:
    bench = Bench(MODELS, cold=False)
    jobs: list[tuple[Product, GemvConfig | None, bool]] = [
        (product, config, False) for _, product, config in cases(MODELS, sweep=sweep)
    ]
    for model in MODELS if sweep else []:
        for product in products(model)[:4]:
            for form in {product, replace(product, norm=False)}:
                jobs += [(form, None, False), (form, None, True)]
    for product, config, pdl in jobs[share::COMPILERS]:
        try:
            weight = bench.weights(product.weight_rows, product.k)[0]
            bench.product(product, config, pdl=pdl)(weight)
        except Exception as error:  # reported where it is timed
            print(f"# {product}, {config}: {type(error).__name__}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sweep", action="store_true", help="try many variants")
    parser.add_argument("--json", metavar="FILE", help="write the lines to a file as well")
    parser.add_argument("--compile", type=int, metavar="SHARE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        _compile_share(arguments.compile, sweep=arguments.sweep)
        return
    rows = run(sweep=arguments.sweep)
    before = None
    for row in rows:
        head = f"{row['model']} {row['what']}"
        if head != before:
            print(f"\n{head}:", end=" ")
            before = head
        value = row.get("error") or " ".join(
            [f"{row['us']:g}us", *(f"{row[u]}{u}" for u in ("GB/s", "TFLOP/s") if u in row)]
        )
        print(f"[{row['variant']}] {value}", end="; ")
    print()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
