"""What the largest inputs that an engine takes cost everybody else.

    python -P benchmarks/engine/hostile_inputs.py
    python -P benchmarks/engine/hostile_inputs.py --tokenizer ~/models/SmolLM2 --repeats 5

Eight streams run on a model that computes nothing and takes 5 ms a step, while one more request
with the largest input of a kind arrives. Three figures for each kind, the best of the repeats, for
other programs on the machine only make them worse:

- gap: the longest time for which a task that sleeps for 1 ms, over and over, was not run, beyond
  the 1 ms. This is what another request's handler waits.
- tokenizer: processor time of the engine's tokenizer threads.
- steps: time of a step while the input is dealt with, over that before it arrived.

Refused inputs are in the table too: to refuse one must cost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.engine import (
    Engine,
    EngineConfig,
    LoadedModel,
    Prompt,
    RagserveError,
    Request,
    SamplingParams,
    Segment,
    StepPlan,
    StepResult,
    Tokenizer,
)
from ragserve.testing import byte_tokenizer

STREAMS = 8
STEP_SECONDS = 0.005
LONG = 190_000
MAX_MODEL_LEN = 200_000


class Idle:
    """A model and its runner: every token is the same, and every step takes as long."""

    depth = 1
    max_decode_steps = 1

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.launches: list[float] = []

    def load(self, config: EngineConfig) -> LoadedModel:
        if self._folder is None:
            tokenizer = Tokenizer.from_fast(byte_tokenizer(), config.num_tokenizers)
        else:
            tokenizer = Tokenizer.load(self._folder, num_clones=config.num_tokenizers)
        return LoadedModel(
            name="idle",
            runner=self,
            tokenizer=tokenizer,
            vocab_size=tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=4 * MAX_MODEL_LEN // config.block_size,
        )

    def samples_on_host(self, request: Request) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.launches.append(time.perf_counter())

        def wait() -> StepResult:
            time.sleep(STEP_SECONDS)
            return StepResult([(65,) * chunk.num_samples for chunk in plan.chunks])

        return wait

    def close(self) -> None:
        pass


class Heartbeat:
    """The longest lateness of a sleep of 1 ms, in milliseconds."""

    def __init__(self) -> None:
        self.largest = 0.0

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.002)
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            self.largest = max(self.largest, 1e3 * (time.perf_counter() - started) - 1.0)


@dataclass
class Case:
    """An input, made anew for each repeat, so that nothing of it is known."""

    name: str
    prompt: Callable[[random.Random], Any]
    params: Callable[[random.Random], dict[str, Any]] = lambda _: {}


def words(chance: random.Random, characters: int) -> str:
    some = ["the", "retrieval", "of", "documents", "is", "a", "matter", "of", "tokens,", "blocks"]
    text = " ".join(chance.choices(some, k=characters // 4))
    return text[:characters]


def unicode_text(chance: random.Random, characters: int) -> str:
    return "".join(map(chr, chance.choices(range(0x4E00, 0x9FFF), k=characters)))


def ids(chance: random.Random, number: int) -> list[int]:
    return chance.choices(range(32, 127), k=number)


def strings(chance: random.Random, number: int, characters: int) -> list[str]:
    return [words(chance, characters + 8)[-characters:] for _ in range(number)]


LIMIT = EngineConfig().limits
CASES = [
    Case("nothing more", lambda c: [65]),
    # What 128 more streams cost, however short their prompt: for comparison.
    Case("1 token id, 128 choices", lambda c: [65], lambda c: {"n": 128}),
    Case("190,000 token ids", lambda c: ids(c, LONG)),
    Case("190,000 token ids, 128 choices", lambda c: ids(c, LONG), lambda c: {"n": 128}),
    Case(
        "190,000 token ids, repetition penalty",
        lambda c: ids(c, LONG),
        lambda c: {"repetition_penalty": 1.1},
    ),
    Case("text of 190,000 characters", lambda c: words(c, LONG)),
    Case(
        f"{LIMIT.max_segments} segments, 190,000 characters",
        lambda c: Prompt(
            tuple(Segment(words(c, LONG // LIMIT.max_segments)) for _ in range(LIMIT.max_segments))
        ),
    ),
    Case(
        f"{LIMIT.max_messages} messages, 150,000 characters",
        lambda c: [
            {"role": "user", "content": words(c, 150_000 // LIMIT.max_messages)}
            for _ in range(LIMIT.max_messages)
        ],
    ),
    Case("text of the most characters", lambda c: words(c, LIMIT.max_prompt_characters)),
    Case("... one word", lambda c: "a" * LIMIT.max_prompt_characters),
    Case("... of random Unicode", lambda c: unicode_text(c, LIMIT.max_prompt_characters)),
    Case("... of spaces", lambda c: " " * LIMIT.max_prompt_characters),
    Case("text of one character more", lambda c: "a" * (LIMIT.max_prompt_characters + 1)),
    Case("2,000,000 token ids", lambda c: [65] * 2_000_000),
    Case(
        "the most bad_words and stop",
        lambda c: [65],
        lambda c: {
            "bad_words": strings(c, LIMIT.max_bad_words, LIMIT.max_bad_word_characters),
            "stop": strings(c, LIMIT.max_stop, LIMIT.max_stop_characters),
            "n": 128,
        },
    ),
    Case(
        "the most token ids in parameters",
        lambda c: [65],
        lambda c: {
            "allowed_token_ids": [65, *([66] * (LIMIT.max_allowed_token_ids - 1))],
            "logit_bias": dict.fromkeys(range(256), 1.0),
            "stop_token_ids": [1] * LIMIT.max_stop_token_ids,
        },
    ),
    Case(
        "200,000 allowed_token_ids", lambda c: [65], lambda c: {"allowed_token_ids": [65] * 200_000}
    ),
    Case("100,000 bad_words", lambda c: [65], lambda c: {"bad_words": ["abc def"] * 100_000}),
]


def step_times(launches: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(launches)]


def tokenizer_seconds() -> float:
    """Processor time of the tokenizer threads."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("ragserve tokenizer"):
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            total += int(stat.read_text().split()[0])
    return total / 1e9


async def run_case(
    engine: Engine, model: Idle, case: Case, seed: int
) -> tuple[float, float, float, str]:
    """Gap, tokenizer's seconds, ratio of step times, and how it ended."""
    chance = random.Random(seed)
    prompt, options = case.prompt(chance), case.params(chance)
    # Let all be quiet before: making the input takes longer than dealing with it.
    await asyncio.sleep(0.3)
    before, seconds = len(model.launches), tokenizer_seconds()
    await asyncio.sleep(0.3)
    arrived = len(model.launches)
    ended = "answered"
    async with Heartbeat() as beat:
        try:
            params = SamplingParams(max_tokens=1, detokenize="stop" in options, **options)
            async with engine.stream(prompt, params) as stream:
                # Entered when it is queued; its prompt is computed while this looks on.
                await asyncio.sleep(0.2)
                await stream.aclose()
        except RagserveError as error:
            ended = type(error).__name__
            await asyncio.sleep(0.1)
    after = model.launches[arrived:]
    usual = statistics.mean(step_times(model.launches[before:arrived]))
    during = statistics.mean(step_times(after))
    return beat.largest, tokenizer_seconds() - seconds, during / usual, ended


async def measure(folder: Path | None, repeats: int) -> list[str]:
    rows = ["| input | ended | gap ms | tokenizer s | steps |", "|---|---|---|---|---|"]
    model = Idle(folder)
    async with await Engine.open(model) as engine:
        endless = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True, detokenize=False)

        async def read() -> None:
            async for _ in engine.stream([65, 66], endless):
                pass

        readers = [asyncio.create_task(read()) for _ in range(STREAMS)]
        for case in CASES:
            results = [await run_case(engine, model, case, seed) for seed in range(repeats)]
            gap, seconds, ratio = (min(result[i] for result in results) for i in range(3))
            rows.append(
                f"| {case.name} | {results[0][3]} | {gap:.1f} | {seconds:.2f} | {ratio:.2f} |"
            )
            print(rows[-1], flush=True)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        engine.terminate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, help="a model's folder; bytes by default")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    asyncio.run(measure(args.tokenizer, args.repeats))


if __name__ == "__main__":
    main()
