"""A notebook: try a model out, cell by cell.

python examples/notebook.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Editors that know `# %%` run it cell by cell. A Jupyter kernel is inside an event loop already:
write `await look()` in its cells where `asyncio.run(look())` stands here.
"""

# %% The model
from __future__ import annotations

import argparse
import asyncio

import ragserve as rs

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
MODEL = parser.parse_known_args()[0].model  # a kernel has arguments of its own


# %% Open an engine. It belongs to no event loop, and stays open when this one has ended.
async def open_engine() -> rs.Engine:
    return await rs.Engine.open(MODEL, max_model_len=2048)


engine = asyncio.run(open_engine())
print(engine)


# %% Watch an answer grow
async def look(question: str) -> None:
    chat = [{"role": "user", "content": question}]
    async with engine.stream(chat, rs.SamplingParams(temperature=0.0, max_tokens=48)) as stream:
        async for delta in stream:
            print(delta.text, end="", flush=True)
    print(f"\n{stream.completion.usage}\n{stream.completion.timings}")


asyncio.run(look("What is the capital of France?"))

# %% Once more, in another event loop: the same engine, whose cache still has the prompt
asyncio.run(look("What is the capital of France?"))

# %% Close it: its memory is free again
asyncio.run(engine.aclose())
print(engine.health())

# %% Without any event loop: many prompts at once, answers in the order of the prompts
with rs.LLM(MODEL, max_model_len=2048) as llm:
    prompts = [f"The capital of {country} is" for country in ("France", "Italy", "Japan")]
    completions = llm.generate(prompts, rs.SamplingParams(temperature=0.0, max_tokens=8))
    for prompt, completion in zip(prompts, completions, strict=True):
        print(f"{prompt}{completion.text!r}")
    print(llm.statistics().prefix_hit_rate)
