"""Several questions at the same time, from a plain asyncio script.

python examples/script.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import asyncio

import ragserve as rs

DOCUMENTS = [
    rs.Document("hours", "The shop is open from 9 to 18 o'clock, Monday to Saturday."),
    rs.Document("returns", "Goods can be returned within 30 days. Bring the receipt."),
    rs.Document("delivery", "Delivery takes three days. Orders above 50 euros are delivered free."),
]
QUESTIONS = [
    "When is the shop open?",
    "Can I return what I have bought?",
    "How long does delivery take?",
]


async def ask(rag: rs.RagPipeline, question: str) -> None:
    answer = await rag.answer(question)
    # Tasks take turns only where they await, so these lines stay together.
    print(f"\n{question}\n  {answer.text.strip()}")
    for source in answer.sources:
        print(f"  [{source.number}] {source.chunk.document_id}, score {source.score:.2f}")
    print(f"  {answer.usage}")
    print(f"  {answer.timings}")


async def main(model: str, embedder_model: str) -> None:
    async with (
        rs.Engine.open(model, max_model_len=2048) as engine,
        rs.SentenceTransformerEmbedder(embedder_model) as embedder,
    ):
        index = rs.FaissIndex(embedder)
        await index.add(DOCUMENTS)
        rag = rs.RagPipeline(
            engine=engine,
            index=index,
            top_k=2,
            params=rs.SamplingParams(temperature=0.0, max_tokens=64),
        )
        # One batch: the engine computes a token of every answer in each of its steps.
        async with asyncio.TaskGroup() as tasks:
            for question in QUESTIONS:
                tasks.create_task(ask(rag, question))
        print(f"\n{engine}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--embedder", default="sentence-transformers/all-MiniLM-L6-v2")
    args = parser.parse_args()
    asyncio.run(main(args.model, args.embedder))
