"""Python's time per touch of the host: what the engine itself costs, beside a device that is free.

    python -P benchmarks/engine/host.py [--sequences 1 64 128 256] [--steps 1 8]

A touch is one plan and one result: schedule, launch, take, append, detokenize. The runner does
nothing and is never waited for, so what is timed is the core alone; threads, event loops and what
a real runner does to prepare a plan are not in it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence

from ragserve.engine import (
    EngineConfig,
    EngineCore,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenizedPrompt,
    Tokenizer,
)
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.testing import byte_tokenizer

PROMPT = 512
WARM_UP = 8


class FreeRunner:
    """Gives letters, at once."""

    depth = 2

    def __init__(self, max_decode_steps: int) -> None:
        self.max_decode_steps = max_decode_steps
        self._letters = [list(range(97, 97 + count)) for count in range(max_decode_steps + 1)]

    def samples_on_host(self, request: Request) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        letters = self._letters
        result = StepResult([letters[chunk.num_samples] for chunk in plan.chunks])
        return lambda: result

    def close(self) -> None:
        pass


def measure(
    sequences: Sequence[int] = (1, 64, 128, 256),
    steps: Sequence[int] = (1, 8),
    *,
    touches: int = 200,
) -> list[dict[str, float]]:
    """Time touches of batches that only decode.

    :param sequences: sizes of the batch.
    :param steps: decode steps in a plan.
    :param touches: timed of each kind; the median counts.
    :returns: for each combination `sequences`, `steps`, `text` (whether tokens become text),
        and `us`, the median microseconds of a touch, and `worst_us`, its 99th percentile.
    """
    tokenizer = Tokenizer.from_fast(byte_tokenizer())
    rows = []
    for count, k, text in itertools.product(sequences, steps, (False, True)):
        times = sorted(_touches(tokenizer, count, k, text, touches))
        rows.append(
            {
                "sequences": count,
                "steps": k,
                "text": text,
                "us": times[len(times) // 2] / 1e3,
                "worst_us": times[len(times) * 99 // 100] / 1e3,
            }
        )
    return rows


def _touches(tokenizer: Tokenizer, count: int, k: int, text: bool, touches: int) -> list[int]:
    """Nanoseconds of each."""
    # The first decode while the last are prefilled.
    max_tokens = k * (touches + WARM_UP) + 2 * count
    config = EngineConfig(max_num_seqs=count, max_num_batched_tokens=8192, multi_step_seconds=1.0)
    per_sequence = -(-(PROMPT + max_tokens) // config.block_size)
    core = EngineCore(config, BlockPool(count * per_sequence), FreeRunner(k))
    for number in range(count):
        token_ids = [number % 256, *[position % 256 for position in range(PROMPT - 1)]]
        core.add(
            Request(
                str(number),
                TokenizedPrompt.of(token_ids),
                SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=text),
                block_size=config.block_size,
                max_tokens=max_tokens,
                text=tokenizer.detokenizer(token_ids) if text else None,
            )
        )
    while core.scheduler.waiting or any(r.num_to_compute > 1 for r in core.scheduler.running):
        core.step()
    for _ in range(WARM_UP - 2):
        core.step()
    times = []
    for _ in range(touches):
        start = time.perf_counter_ns()
        updates = core.step()
        times.append(time.perf_counter_ns() - start)
        if len(updates) != count:
            raise RuntimeError(f"a touch gave {len(updates)} updates for {count} sequences")
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    print(f"{'sequences':>9} {'steps':>5} {'text':>5} {'µs':>8} {'p99 µs':>8} {'ns/token':>8}")
    for row in measure(options.sequences, options.steps):
        per_token = row["us"] * 1e3 / (row["sequences"] * row["steps"])
        print(
            f"{row['sequences']:>9} {row['steps']:>5} {'yes' if row['text'] else 'no':>5} "
            f"{row['us']:>8.1f} {row['worst_us']:>8.1f} {per_token:>8.0f}"
        )


if __name__ == "__main__":
    main()
