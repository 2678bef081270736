"""What the time to the first token tells one tenant of what another has sent.

    python -P benchmarks/engine/tenant_timing.py
    python -P benchmarks/engine/tenant_timing.py --model path/to/model --rounds 200

Each round has three texts that nobody has sent before, all of the same number of tokens. Tenant B
sends one that tenant A has just sent ("another's"), one that B itself has just sent ("its own") and
one that nobody has sent, after A has sent something else ("nobody's"), in an order that is drawn
anew. Each namespace has its own key of the prefix cache, so "another's" must take as long as
"nobody's". How well B can tell them apart is the share of pairs in which "another's" was the faster
(the area under the ROC curve): 0.5 is not at all, 1 is always. It is printed with the interval that
guessing alone would give in 95 of 100 such runs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
from pathlib import Path

import ragserve as rs
from ragserve.demo import language_model

KINDS = ("nobody's", "another's", "its own")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder or .gguf file; default: SmolLM2-135M")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds to the first token, by kind."""
    generator = random.Random(arguments.seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    model = arguments.model or language_model()
    async with rs.Engine.open(model, device=arguments.device) as engine:
        vocabulary = range(100, engine.tokenizer.vocab_size - 100)

        async def ask(prompt: list[int], namespace: str) -> float:
            params = rs.SamplingParams.greedy(max_tokens=2, ignore_eos=True)
            answer = await engine.generate(prompt, params, namespace=namespace)
            first = answer.timings.time_to_first_token
            return math.nan if first is None else first

        def text() -> list[int]:
            return generator.choices(vocabulary, k=arguments.tokens)

        for _ in range(3):
            await ask(text(), "b")  # everything has run once
        for _ in range(arguments.rounds):
            for kind in generator.sample(KINDS, len(KINDS)):
                prompt = text()
                await ask(
                    text() if kind == "nobody's" else prompt, "b" if kind == "its own" else "a"
                )
                seconds[kind].append(await ask(prompt, "b"))
    return seconds


def told_apart(faster: list[float], slower: list[float]) -> float:
    """Share of pairs in which the first is the smaller; ties count half."""
    wins = sum((a < b) + 0.5 * (a == b) for a in faster for b in slower)
    return wins / (len(faster) * len(slower))


def main() -> None:
    """Measure, and print a table."""
    arguments = parse()
    seconds = asyncio.run(measure(arguments))
    n = arguments.rounds
    # The rank sum's standard deviation if both are drawn alike (Mann & Whitney, 1947).
    chance = 1.96 * math.sqrt((2 * n + 1) / (12 * n * n))
    print("| sent before by | p25 / p50 / p75 ms to the first token | told from nobody's |")
    print("|---|---|---|")
    for kind in KINDS:
        quartiles = " / ".join(f"{1000 * q:.1f}" for q in statistics.quantiles(seconds[kind], n=4))
        told = told_apart(seconds[kind], seconds[KINDS[0]])
        note = "" if kind == KINDS[0] else f"{told:.2f}"
        print(f"| {kind.removesuffix(chr(39) + 's')} | {quartiles} | {note} |")
    print(f"\n{n} rounds; guessing gives {0.5 - chance:.2f} to {0.5 + chance:.2f}.")


if __name__ == "__main__":
    main()
