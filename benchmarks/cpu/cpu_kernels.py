"""Times of the native CPU operations beside torch's, at one model's shapes.

    python -P benchmarks/cpu/cpu_kernels.py [--threads 2] [attention cascade linear step]

Everything compared is timed in turns in one run, and the best time of many counts, so that a
busy machine blurs all alike. With one thread the time is that of the processor, which a busy
machine changes least; with more it is that of the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ragserve import kernels
from ragserve.kernels.cpu import native

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 30, 9, 3, 64, 576, 1536, 49152
BLOCK = 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
LINEARS = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER), (VOCAB, HIDDEN)]


class Bench:
    """The library, the data type and the clock."""

    def __init__(self, dtype: torch.dtype, seconds: float) -> None:
        self.ops = native.load()
        self.dtype = dtype
        self.seconds = seconds
        one = torch.get_num_threads() == 1
        self.clock = time.process_time if one else time.perf_counter

    def best(self, **functions: Callable[[], object]) -> dict[str, float]:
        """Seconds of each function, the best of as many turns as there is time for."""
        result = dict.fromkeys(functions, float("inf"))
        for function in functions.values():
            function()
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            for name, function in functions.items():
                start = self.clock()
                function()
                result[name] = min(result[name], self.clock() - start)
        return result

    def random(self, *shape: int) -> Tensor:
        return (torch.randn(shape) * 0.05).to(self.dtype)

    def pools(self, num_blocks: int) -> list[Tensor]:
        shape = self.ops.pool_shape(
            num_blocks,
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=self.dtype,
        )
        return [self.ops.allocate_pool(shape, self.dtype).normal_() for _ in range(LAYERS)]

    def batch(
        self, sequences: int, context: int, queries: int, shared: int = 0
    ) -> kernels.PagedBatch:
        blocks = -(-context // BLOCK)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks)
        tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK]
        starts = torch.arange(0, blocks * BLOCK + 1, BLOCK).clamp(max=context)
        at = torch.arange(context - queries, context)
        return kernels.PagedBatch(
            query_starts=list(range(0, sequences * queries + 1, queries)),
            seq_lens=[context] * sequences,
            block_tables=tables,
            block_starts=starts.repeat(sequences, 1),
            slots=(tables[:, at // BLOCK] * BLOCK + at % BLOCK).flatten(),
            positions=at.repeat(sequences),
        )

    def plan(self, batch: kernels.PagedBatch) -> native.NativeAttention:
        return self.ops.plan_attention(
            batch,
            block_size=BLOCK,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            dtype=self.dtype,
        )


def attention(bench: Bench) -> None:
    """All layers of a step's attention, beside SDPA on keys that lie ready and contiguous."""
    print(f"attention, {LAYERS} layers | ms | GB/s of KV | SDPA ms (no gather)")
    for sequences, context, queries in [
        (1, 768, 1),
        (1, 8192, 1),
        (8, 768, 1),
        (32, 160, 1),
        (32, 768, 1),
        (1, 512, 512),
        (1, 770, 512),
        (1, 770, 64),
    ]:
        batch = bench.batch(sequences, context, queries)
        pools, plan = bench.pools(batch.block_tables.numel()), bench.plan(batch)
        query = bench.random(sequences * queries, HEADS, HEAD_DIM)
        dense_query = query.view(sequences, queries, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        key, value = (bench.random(sequences, KV_HEADS, context, HEAD_DIM) for _ in "kv")
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)

        def ours(plan=plan, query=query, pools=pools) -> None:  # type: ignore[no-untyped-def]
            for pool in pools:
                plan(query, pool)

        def sdpa(q=dense_query, k=key, v=value, mask=mask) -> None:  # type: ignore[no-untyped-def]
            for _ in range(LAYERS):
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        times = bench.best(ours=ours, sdpa=sdpa)
        size = sequences * context * 2 * KV_HEADS * HEAD_DIM * LAYERS * bench.dtype.itemsize
        print(
            f"{sequences} x {context}, {queries} queries | {times['ours'] * 1e3:.2f} | "
            f"{size / times['ours'] / 1e9:.1f} | {times['sdpa'] * 1e3:.2f}",
            flush=True,
        )


def cascade(bench: Bench) -> None:
    """All layers of a decoding step's attention, with what the sequences share read once."""
    print(f"shared, own tokens, {LAYERS} layers | ms plain | ms shared read once | times faster")
    for sequences, shared, own in itertools.product((2, 8, 32, 64), (128, 512, 2048), (64, 256)):
        batch = bench.batch(sequences, shared + own, 1, shared)
        run = kernels.SharedRun(tuple(range(sequences)), 0, shared // BLOCK)
        pools = bench.pools(batch.block_tables.numel())
        query = bench.random(sequences, HEADS, HEAD_DIM)
        plans = {
            "plain": bench.plan(batch),
            "once": bench.plan(dataclasses.replace(batch, shared_runs=(run,))),
        }

        def attend(plan, query=query, pools=pools) -> None:  # type: ignore[no-untyped-def]
            for pool in pools:
                plan(query, pool)

        times = bench.best(**{name: partial(attend, plan) for name, plan in plans.items()})
        print(
            f"{sequences} x {shared} + {own} | {times['plain'] * 1e3:.2f} | "
            f"{times['once'] * 1e3:.2f} | {times['plain'] / times['once']:.2f}",
            flush=True,
        )


def linear(bench: Bench) -> None:
    """A linear layer, with as many weights in turn as a model has, beside torch and oneDNN."""
    print("linear | M | ours us, GFLOP/s, GB/s | F.linear us | oneDNN packed us")
    for out_features, in_features in LINEARS:
        copies = max(1, min(LAYERS, 60_000_000 // (out_features * in_features)))
        weights = [bench.random(out_features, in_features) for _ in range(copies)]
        packed = [bench.ops.pack(weight) for weight in weights]
        for rows in (1, 2, 4, 8, 16, 32, 256, 512):
            if out_features == VOCAB and rows > 32:
                continue
            x = bench.random(rows, in_features)
            reordered = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]

            def dnn(x=x, p=reordered) -> None:  # type: ignore[no-untyped-def]
                for w in p:
                    torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")

            times = bench.best(
                ours=lambda x=x, p=packed: [bench.ops.linear(x, w) for w in p],
                torch=lambda x=x, p=weights: [F.linear(x, w) for w in p],
                dnn=dnn,
            )
            each = {name: seconds / copies for name, seconds in times.items()}
            count = out_features * in_features
            print(
                f"{out_features} x {in_features} | {rows} | {each['ours'] * 1e6:.0f}, "
                f"{2 * rows * count / each['ours'] / 1e9:.0f}, "
                f"{count * bench.dtype.itemsize / each['ours'] / 1e9:.1f} | "
                f"{each['torch'] * 1e6:.0f} | {each['dnn'] * 1e6:.0f}",
                flush=True,
            )


def step(bench: Bench) -> None:
    """A whole step of random weights, without sampling."""
    ops, batch_of = bench.ops, bench.batch
    pools = bench.pools(32 * 50)
    layers = [
        native.NativeLayer(
            attention_norm=bench.random(HIDDEN) + 1,
            qkv=ops.pack(bench.random(QKV, HIDDEN)),
            output=ops.pack(bench.random(HIDDEN, HEADS * HEAD_DIM)),
            mlp_norm=bench.random(HIDDEN) + 1,
            gate_up=ops.pack(bench.random(2 * INNER, HIDDEN)),
            down=ops.pack(bench.random(HIDDEN, INNER)),
            pool=pool,
        )
        for pool in pools
    ]
    head = ops.pack(bench.random(VOCAB, HIDDEN))
    norm = bench.random(HIDDEN) + 1
    decoder = native.NativeDecoder(ops, layers, norm=norm, block_size=BLOCK, eps=1e-5)
    table = bench.random(4096, HEAD_DIM)
    print("step | ms: plan | embedding, angles | layers | logits | all")
    for sequences, context, queries in [
        (1, 160, 1),
        (1, 768, 1),
        (8, 160, 1),
        (8, 768, 1),
        (32, 160, 1),
        (32, 768, 1),
        (1, 256, 256),
        (1, 512, 512),
        (1, 768, 256),
    ]:
        batch = batch_of(sequences, context, queries)
        ids = torch.randint(VOCAB, (sequences * queries,))
        parts = [float("inf")] * 5
        end = time.perf_counter() + 2 * bench.seconds
        while time.perf_counter() < end:
            times = [bench.clock()]
            plan = bench.plan(batch)
            times.append(bench.clock())
            hidden = ops.embedding(ids, head)
            cos, sin = table[batch.positions].chunk(2, dim=-1)
            times.append(bench.clock())
            hidden = decoder.forward(hidden, cos, sin, batch.slots, plan)
            times.append(bench.clock())
            ops.linear(hidden[queries - 1 :: queries], head, dtype=torch.float32)
            times.append(bench.clock())
            took = [b - a for a, b in itertools.pairwise(times)]
            parts = [min(a, b) for a, b in zip(parts, [*took, times[-1] - times[0]], strict=True)]
        figures = " | ".join(f"{part * 1e3:.2f}" for part in parts)
        print(f"{sequences} x {context}, {queries} queries | {figures}", flush=True)


def main() -> None:
    parts = {"attention": attention, "cascade": cascade, "linear": linear, "step": step}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all if none is named")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    bench = Bench(getattr(torch, arguments.dtype), arguments.seconds)
    print(f"{bench.ops}, {torch.get_num_threads()} threads, {bench.dtype}")
    with torch.inference_mode():
        for name in arguments.parts or parts:
            parts[name](bench)


if __name__ == "__main__":
    main()
