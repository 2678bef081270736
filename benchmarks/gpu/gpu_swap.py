"""What KV blocks cost on their way between a GPU's pool and the host's memory.

    python -P benchmarks/gpu/gpu_swap.py [--json FILE] [--only transfers beside engine]

- transfers: 1, 16 and 250 blocks of Qwen2.5-7B's and 0.5B's shapes in both directions, through the
  staging buffer and directly, to rows that lie together and that do not; beside it, what one copy
  of as many bytes reaches.
- beside: the same while a stream computes large products, or reads memory, without pause; what
  that loses by it.
- engine: 4,000 tokens of an engine with random weights, from arrival to the first token: computed,
  returned from the host's memory, and found on the device.

Without a GPU, under TRITON_INTERPRET=1, small pools run once: for the benchmark's logic only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
# `python -P` leaves it out, for the repository's root has folders that shadow packages.
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_stages import RandomModel  # noqa: E402
from gpu_workloads import write_config  # noqa: E402

from ragserve import Engine, SamplingParams  # noqa: E402
from ragserve.engine.gpu.block_io import GPUBlockIO  # noqa: E402
from ragserve.engine.gpu.stream import DeviceStream  # noqa: E402

Row = dict[str, Any]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
SHAPES = {"7b": (28, 4, 128), "0.5b": (24, 2, 64)}
"""Layers, KV heads, elements of a head."""
COUNTS = (1, 16, 250) if ON_GPU else (1, 3)
NUM_BLOCKS = 4096 if ON_GPU else 8
NUM_ROWS = 512 if ON_GPU else 8
BLOCK_SIZE = 16
PROMPT_TOKENS = 4000
SIDE = 8192 if ON_GPU else 64
TARGET = 3.0
"""So many times faster than computing them shall 4,000 tokens return."""


class Pool:
    """Blocks of a model's shape, and rows for them."""

    def __init__(self, shape: str, *, direct: bool) -> None:
        layers, heads, size = SHAPES[shape]
        self.stream = DeviceStream(DEVICE)
        self.pool = torch.zeros(
            (layers, 2, NUM_BLOCKS, heads, BLOCK_SIZE, size), dtype=torch.bfloat16, device=DEVICE
        )
        self.io = GPUBlockIO(self.pool, self.stream, direct_reads=direct, direct_writes=direct)
        started = time.perf_counter()
        self.memory = self.io.allocate(NUM_ROWS)
        self.pin_gb_s = self.memory.nbytes / (time.perf_counter() - started) / 1e9
        generator = np.random.default_rng(0)
        self.blocks: list[int] = generator.permutation(NUM_BLOCKS)[:NUM_ROWS].tolist()
        self.scattered: list[int] = generator.permutation(NUM_ROWS).tolist()

    def copy(self, count: int, *, to_pool: bool, together: bool) -> None:
        """Copy so many blocks, and wait."""
        rows = range(count) if together else self.scattered[:count]
        function = self.io.write if to_pool else self.io.read
        function(self.blocks[:count], self.memory, rows, self.io.mark())

    def close(self) -> None:
        """Give everything back."""
        self.io.close()
        del self.pool, self.memory
        if ON_GPU:
            torch.cuda.empty_cache()


def median(function: Callable[[], object], seconds: float) -> float:
    """Median time of a call, of so many as fit in `seconds`."""
    function()
    times: list[float] = []
    while sum(times) < seconds and len(times) < 200:
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def transfers(seconds: float = 0.2) -> list[Row]:
    """Times of copies, the device idle otherwise."""
    rows = []
    for shape in SHAPES:
        for direct in (False, True) if ON_GPU else (False,):
            pool = Pool(shape, direct=direct)
            for count in COUNTS:
                for to_pool in (False, True):
                    for together in (True, False):
                        copy = partial(pool.copy, count, to_pool=to_pool, together=together)
                        spent = median(copy, seconds)
                        size = count * pool.io.block_bytes
                        rows.append(
                            {
                                "kind": "transfer",
                                "shape": shape,
                                "way": "direct" if direct else "staged",
                                "blocks": count,
                                "to": "pool" if to_pool else "host",
                                "rows": "together" if together else "scattered",
                                "us": 1e6 * spent,
                                "gb_s": size / spent / 1e9,
                            }
                        )
            rows.append({"kind": "pinning", "shape": shape, "gb_s": pool.pin_gb_s})
            if not direct:
                rows += plain_copies(shape, pool, seconds)
            pool.close()
    return rows


def plain_copies(shape: str, pool: Pool, seconds: float) -> list[Row]:
    """One copy of all rows, and nothing else: what the bus can do."""
    host = torch.from_numpy(pool.memory[: max(COUNTS)])
    device = torch.empty_like(host, device=DEVICE)
    rows = []
    for to_pool in (False, True):
        source, target = (host, device) if to_pool else (device, host)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source, non_blocking=True)
            if ON_GPU:
                torch.cuda.synchronize()

        spent = median(copy, seconds)
        rows.append(
            {
                "kind": "transfer",
                "shape": shape,
                "way": "one copy",
                "blocks": max(COUNTS),
                "to": "pool" if to_pool else "host",
                "rows": "together",
                "us": 1e6 * spent,
                "gb_s": host.nbytes / spent / 1e9,
            }
        )
    return rows


# -- beside something else ------------------------------------------------------------------------


def beside() -> list[Row]:
    """What computing loses while blocks are copied without pause, and how fast these are."""
    left, right, out = (
        torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)
    )
    large = torch.zeros(1 << (30 if ON_GPU else 12), dtype=torch.int32, device=DEVICE)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "products": (lambda: torch.mm(left, right, out=out), 150),
        "memory": (lambda: torch.amax(large), 150),
    }
    rows = []
    count = max(COUNTS)
    for shape in SHAPES:
        for direct in (False, True) if ON_GPU else (False,):
            pool = Pool(shape, direct=direct)
            for name, (work, repeat) in works.items():
                alone = _work_seconds(pool, work, repeat)
                for to_pool in (False, True):
                    with _Copying(pool, count, to_pool) as copying:
                        shared = _work_seconds(pool, work, repeat)
                    rows.append(
                        {
                            "kind": "beside",
                            "work": name,
                            "shape": shape,
                            "way": "direct" if direct else "staged",
                            "to": "pool" if to_pool else "host",
                            "alone_ms": 1e3 * alone,
                            "shared_ms": 1e3 * shared,
                            "slower_percent": 100 * (shared / alone - 1),
                            "copies_gb_s": copying.gb_s,
                        }
                    )
            pool.close()
    return rows


class _Copying:
    """Copies the same blocks again and again in a thread of its own, while entered."""

    def __init__(self, pool: Pool, count: int, to_pool: bool) -> None:
        self._pool, self._count, self._to_pool = pool, count, to_pool
        self._mark = pool.io.mark()  # of an idle stream: nothing to wait for
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._copies = 0
        self.gb_s = 0.0

    def _run(self) -> None:
        pool, rows = self._pool, range(self._count)
        function = pool.io.write if self._to_pool else pool.io.read
        started = time.perf_counter()
        while not self._stop.is_set():
            function(pool.blocks[: self._count], pool.memory, rows, self._mark)
            self._copies += 1
        spent = time.perf_counter() - started
        self.gb_s = self._copies * self._count * pool.io.block_bytes / spent / 1e9

    def __enter__(self) -> _Copying:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _work_seconds(pool: Pool, work: Callable[[], object], repeat: int) -> float:
    """Mean time of a call, of many in a row, in the engine's stream."""
    with pool.stream.current():
        for _ in range(3):
            work()
        pool.stream.synchronize()
        if not ON_GPU:
            repeat = 2
        started = time.perf_counter()
        for _ in range(repeat):
            work()
        pool.stream.synchronize()
    return (time.perf_counter() - started) / repeat


# -- the engine -----------------------------------------------------------------------------------


def engine(rounds: int = 8) -> list[Row]:
    """How long 4,000 tokens take to their first answer, by where they come from."""
    return [asyncio.run(_returns(shape, rounds)) for shape in (SHAPES if ON_GPU else ("tiny",))]


async def _returns(shape: str, rounds: int) -> Row:
    tokens = PROMPT_TOKENS if ON_GPU else 200
    layers, heads, size = SHAPES.get(shape, (2, 2, 16))
    itemsize = 2 if ON_GPU else 4
    block_bytes = layers * 2 * heads * BLOCK_SIZE * size * itemsize
    num_blocks = -(-tokens // BLOCK_SIZE)
    knobs: dict[str, Any] = {
        "dtype": "bfloat16" if ON_GPU else "float32",
        "max_model_len": tokens + 96,
        "max_num_seqs": 4,
        # Room for one prompt and a half: the next one drives most of it out.
        "kv_cache_bytes": block_bytes * (num_blocks * 3 // 2),
        "cache_policy": "lru",  # what is asked for is always what has just been driven out
        "seed": 0,
    }
    if ON_GPU:
        knobs |= {
            "device": "cuda",
            "max_num_batched_tokens": 8192,
            "swap_space_bytes": block_bytes * num_blocks * 6,
        }
    generator = np.random.default_rng(0)
    ids = (1000, 150_000) if ON_GPU else (2, 512)
    warm, *prompts = (generator.integers(*ids, tokens).tolist() for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        model = RandomModel(write_config(shape, Path(folder)), shape)
        async with Engine.open(model, **knobs) as engine:
            for _ in range(2):  # whatever the first long prompt still sets up
                await _first_token(engine, warm, fresh=True)
            computed = [await _first_token(engine, prompts[0], fresh=True) for _ in range(rounds)]
            resident = [await _first_token(engine, prompts[0]) for _ in range(rounds + 1)][1:]
            await engine.warm(prompts)  # the host keeps what was computed ahead
            await asyncio.sleep(0.5)
            returned = []
            for index in range(3 + rounds):
                # Each drives the one before it out of the pool.
                one = await _first_token(engine, prompts[index % 3])
                await asyncio.sleep(0.05)
                if index >= 3:
                    returned.append(one)
    return {
        "kind": "engine",
        "shape": shape,
        "tokens": tokens,
        "computed_ms": _milliseconds(computed),
        "resident_ms": _milliseconds(resident),
        "returned_ms": _milliseconds(returned),
        "computed_cached": max(cached for _, cached in computed),
        "resident_cached": min(cached for _, cached in resident),
        "returned_cached": min(cached for _, cached in returned),
        "times_faster": _milliseconds(computed) / _milliseconds(returned),
        "target": TARGET,
    }


async def _first_token(
    engine: Engine, prompt: Sequence[int], *, fresh: bool = False
) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's were cached.

    :param fresh: with an empty cache.
    """
    if fresh:
        await engine.reset_prefix_cache()
    started = time.perf_counter()
    completion = await engine.generate(
        list(prompt), SamplingParams.greedy(max_tokens=1, ignore_eos=True, detokenize=False)
    )
    return time.perf_counter() - started, completion.usage.cached_tokens


def _milliseconds(seen: Sequence[tuple[float, int]]) -> float:
    return 1e3 * statistics.median(seconds for seconds, _ in seen)


# -- all of it ------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], list[Row]]] = {
    "transfers": transfers,
    "beside": beside,
    "engine": engine,
}


def copies_beside_computing(rows: Sequence[Row]) -> list[Row]:
    """What copying 4,000 tokens takes, beside the computing that it saves."""
    copies = {
        row["shape"]: row["us"] / 1e3
        for row in rows
        if row["kind"] == "transfer" and row["blocks"] == max(COUNTS) and row["to"] == "pool"
        if row["way"] == "direct" and row["rows"] == "scattered"
    }
    return [
        {
            "kind": "saved",
            "shape": row["shape"],
            "copy_ms": copies[row["shape"]],
            "computing_ms": row["computed_ms"] - row["resident_ms"],
            "times_faster": (row["computed_ms"] - row["resident_ms"]) / copies[row["shape"]],
            "target": TARGET,
        }
        for row in rows
        if row["kind"] == "engine" and row["shape"] in copies
    ]


def measure() -> list[Row]:
    """All figures, as lines whose `kind` says what they are."""
    rows = [row for part in PARTS.values() for row in part()]
    return rows + copies_beside_computing(rows)


def show(row: Row) -> None:
    """Print a line of figures."""
    values = [f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()]
    names = [f"{name}={value}" for name, value in zip(row, values, strict=True)]
    print(" ".join(names), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the lines to a file as well")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.only:
        started = time.monotonic()
        part = PARTS[name]()
        rows += part
        for row in part:
            show(row)
        print(f"# {name}: {time.monotonic() - started:.1f} s", flush=True)
    for row in copies_beside_computing(rows):
        show(row)
        rows.append(row)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
