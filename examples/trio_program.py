"""A trio program: a nursery of questions, each with a time limit.

python examples/trio_program.py --model HuggingFaceTB/SmolLM2-135M-Instruct --timeout 5
"""

from __future__ import annotations

import argparse

import trio

import ragserve as rs

QUESTIONS = [
    "Why is the sky blue?",
    "Name three programming languages.",
    "Tell me a story that never ends.",
]


async def ask(engine: rs.Engine, question: str, timeout: float) -> None:
    text = ""
    chat = [{"role": "user", "content": question}]
    params = rs.SamplingParams(temperature=0.5, max_tokens=256)
    with trio.move_on_after(timeout) as limit:
        # Whatever ends this block early, the time limit too, ends the request: its memory is free
        # again within one step of the engine.
        async with engine.stream(chat, params) as stream:
            async for delta in stream:
                text += delta.text
    ending = "out of time" if limit.cancelled_caught else stream.completion.finish_reason
    print(f"\n{question}\n  {text.strip()}\n  ({ending})")


async def main(model: str, timeout: float) -> None:
    async with rs.Engine.open(model, max_model_len=2048) as engine, trio.open_nursery() as nursery:
        for question in QUESTIONS:
            nursery.start_soon(ask, engine, question, timeout)
    print(f"\n{engine}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each answer")
    args = parser.parse_args()
    trio.run(main, args.model, args.timeout)
