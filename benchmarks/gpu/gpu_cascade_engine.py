"""What a cascade makes of an engine's decode steps: many sequences behind one shared prompt.

    python -P benchmarks/gpu/gpu_cascade_engine.py

Random weights at the dimensions of Qwen2.5-7B and Qwen2.5-0.5B, bfloat16. The plain kernel and the
cascade take turns in one engine; a step is timed from when all sequences have their first token to
when the first of them ends. Needs a GPU, and takes about 100 s.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))

from gpu_stages import RandomModel
from gpu_workloads import write_config

from ragserve import Engine, SamplingParams

CASES = (("7b", 64, 4096, 128), ("7b", 128, 4096, 64), ("0.5b", 128, 4096, 64))
"""(dimensions, sequences, tokens that all share, tokens of each one's own)."""
OUTPUT_TOKENS = 128
ROUNDS = 3


async def measure(dims: str, batch: int, shared: int, own: int) -> None:
    """Print one case."""
    generator = np.random.default_rng(0)
    head = generator.integers(1000, 150_000, shared).tolist()
    prompts = [head + generator.integers(1000, 150_000, own).tolist() for _ in range(batch)]
    answer = SamplingParams.greedy(max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        model = RandomModel(write_config(dims, Path(folder)), dims)
        length = shared + own + OUTPUT_TOKENS + 8
        knobs = {"dtype": "bfloat16", "device": "cuda", "max_model_len": length, "seed": 0}
        async with Engine.open(model, **knobs) as engine:
            cascade = engine._core.runner.cascade  # type: ignore[attr-defined]

            async def token_times(prompt: list[int]) -> list[float]:
                times: list[float] = []
                async with engine.stream(prompt, answer) as stream:
                    async for delta in stream:
                        times += [time.perf_counter()] * len(delta.token_ids)
                return times

            async with engine.prefill(head) as stream:
                async for _ in stream:
                    pass
            steps: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(ROUNDS):
                for wanted, seconds in steps.items():
                    cascade.always = None if wanted else False
                    seen = await asyncio.gather(*map(token_times, prompts))
                    start, end = max(t[0] for t in seen), min(t[-1] for t in seen)
                    count = sum(start < at < end for times in seen for at in times)
                    seconds.append((end - start) * batch / count)
    plain, once = (statistics.median(steps[wanted]) for wanted in (False, True))
    print(
        f"{dims:5} {batch:4} x ({shared} + {own}): plain {1e3 * plain:.2f} ms a step, "
        f"{batch / plain:,.0f} tok/s; read once {1e3 * once:.2f} ms, {batch / once:,.0f} tok/s; "
        f"x {plain / once:.2f}",
        flush=True,
    )


def main() -> None:
    """See the module."""
    for case in CASES:
        asyncio.run(measure(*case))


if __name__ == "__main__":
    main()
