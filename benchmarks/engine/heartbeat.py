"""How long the engine keeps the event loop waiting: the gaps of a 1 ms heartbeat.

    python -P benchmarks/engine/heartbeat.py

Sixteen streams run on a real model in the same process; in the middle a prompt of 20,000 tokens
arrives. A task that sleeps for 1 ms, over and over, notes how late it wakes up, as a request
handler would be. The same is measured with the loop idle, for what the machine itself does.

The model is SmolLM2 with its context set to 32,768 tokens: what it says does not matter here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from pathlib import Path

from ragserve import Engine, SamplingParams


def long_context(folder: Path) -> Path:
    """A folder with the same weights and a longer context, beside the given one."""
    copy = folder.with_name(folder.name + "-32k")
    if not copy.is_dir():
        copy.mkdir()
        for file in folder.iterdir():
            if file.name != "config.json":
                os.link(file, copy / file.name)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = 32768
        (copy / "config.json").write_text(json.dumps(config))
    return copy


class Heartbeat:
    """Notes how much later than asked for each sleep of 1 ms ends."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            self.late_ms.append(1e3 * (time.perf_counter() - started) - 1.0)

    def row(self, name: str) -> str:
        late = sorted(self.late_ms)
        at = [late[min(len(late) - 1, int(q * len(late)))] for q in (0.5, 0.99, 0.999)]
        return f"| {name} | {len(late)} | " + " | ".join(f"{x:.1f}" for x in (*at, late[-1])) + " |"


async def measure(folder: Path, prompt_tokens: int, streams: int, tokens: int) -> list[str]:
    rows = [
        "| while | beats | p50 ms | p99 ms | p99.9 ms | largest ms |",
        "|---|---|---|---|---|---|",
    ]
    async with Heartbeat() as beat:
        await asyncio.sleep(3)
    rows.append(beat.row("idle"))
    async with Heartbeat() as beat:
        opening = await Engine.open(folder, dtype="bfloat16", max_model_len=32768)
    rows.append(beat.row("the model is opened"))
    async with opening as engine:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

        async def one(number: int) -> None:
            async for _ in engine.stream(f"Stream number {number} tells a story.", params):
                pass

        async with Heartbeat() as beat, asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(one(number))
        rows.append(beat.row(f"{streams} streams run"))

        text = " ".join(f"word{number % 977}" for number in range(prompt_tokens))
        long = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        while len((await engine.tokenize(text)).token_ids) > prompt_tokens:
            text = text[: int(len(text) * 0.98)]
        async with Heartbeat() as beat, asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(one(number))
            await asyncio.sleep(0.5)
            completion = await engine.generate(text, long)
        rows.append(
            beat.row(f"{streams} streams run, {completion.usage.prompt_tokens} tokens arrive")
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()

    from ragserve.demo import language_model
    from ragserve.engine.models.gguf.convert import convert

    folder = long_context(convert(language_model()))
    try:
        print(
            "\n".join(asyncio.run(measure(folder, args.prompt_tokens, args.streams, args.tokens)))
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
