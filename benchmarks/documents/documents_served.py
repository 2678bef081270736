"""Document policies with a real model: answers through `RagPipeline`, timed as a user sees them.

Each order opens an engine anew, with a pool of the size that is asked for, and closes it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from documents_scripted import Policy
from documents_workload import SYSTEM, Question, cut_documents, draw_questions

from ragserve import Chunk, Engine, PromptTemplate, RagPipeline, SamplingParams, ScoredChunk
from ragserve.bench import build_workload
from ragserve.engine import Delta, Tokenizer
from ragserve.pipeline import Done
from ragserve.retrieval import ChunkFilter, Query

__all__ = ["Order", "answer_orders", "peer_requests", "pool_blocks"]

BLOCK_SIZE = 16
ANSWER_TOKENS = 16
MAX_MODEL_LEN = 2304


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a run is to be.

    :param work: "questions"; "again": each question once from an empty cache, and once more;
        "unshared": prompts that have nothing in common.
    :param pool: KV pool in parts of the corpus' KV.
    :param per_question: documents in a prompt.
    """

    work: str
    policy: Policy
    zipf: float = 1.0
    pool: float = 1.0
    concurrency: int = 1
    documents: int = 150
    questions: int = 1
    warm: int = 0
    per_question: int = 4
    seed: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Order:
        """What `asdict` was given."""
        return cls(**{**fields, "policy": Policy(**fields["policy"])})


class Shelf:
    """Finds what each question is to get."""

    name = "shelf"

    def __init__(self, documents: Sequence[str], questions: Sequence[Question]) -> None:
        chunks = [Chunk(f"{n:04}", f"{n:04}", text) for n, text in enumerate(documents)]
        self._found = {
            question.text: [
                ScoredChunk(chunks[number], 1.0 - place / 8)
                for place, number in enumerate(question.documents)
            ]
            for question in questions
        }

    async def retrieve(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> Sequence[ScoredChunk]:
        return self.of(str(query))

    def of(self, question: str) -> list[ScoredChunk]:
        """The most relevant first."""
        return self._found[question]


def pool_blocks(pool: float, documents: int) -> int:
    """Blocks of a pool that is so large a part of the corpus' KV; one prompt fits in any case."""
    return max(int(pool * documents * 16), -(-MAX_MODEL_LEN // BLOCK_SIZE))


def block_bytes(model: Path, dtype: str) -> int:
    """Keys and values of a block, in all layers."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = {"bfloat16": 2, "float32": 4}[dtype]
    return int(2 * config["num_hidden_layers"] * heads * size * width * BLOCK_SIZE)


def _workload(order: Order, tokenizer: Tokenizer) -> tuple[Shelf, list[Question]]:
    documents = cut_documents(
        order.documents, lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    questions = draw_questions(
        order.questions, documents, order.zipf, order.seed, order.per_question
    )
    return Shelf(documents, questions), questions


def peer_requests(order: Order, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The same prompts in relevance order as token ids, for engines that take those."""
    shelf, questions = _workload(order, tokenizer)
    template = PromptTemplate(system=SYSTEM)
    return [
        {
            "id": number,
            "prompt": template.build(
                question.text, shelf.of(question.text), tokenizer
            ).tokenized.token_ids,
            "n_out": ANSWER_TOKENS,
        }
        for number, question in enumerate(questions)
    ]


def answer_orders(model: Path, dtype: str, threads: int) -> None:
    """Read orders from standard input, a line of JSON each; answer each with a line of results."""
    tokenizer = Tokenizer.load(model)
    print(json.dumps({"ready": "ragserve"}), flush=True)
    for line in sys.stdin:
        order = Order.of(json.loads(line))
        with tempfile.TemporaryDirectory() as folder:
            desk = _Desk(order, model, dtype, threads, Path(folder), tokenizer)
            print(json.dumps(asyncio.run(desk.run())), flush=True)


class _Desk:
    """One order, from opening the engine to closing it."""

    def __init__(
        self,
        order: Order,
        model: Path,
        dtype: str,
        threads: int,
        folder: Path,
        tokenizer: Tokenizer,
    ) -> None:
        self._order = order
        self._model = model
        policy = order.policy
        self._knobs: dict[str, Any] = {
            "dtype": dtype,
            "num_threads": threads,
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_bytes": pool_blocks(order.pool, order.documents) * block_bytes(model, dtype),
            "enable_prefix_caching": policy.cache is not None,
            "cache_policy": policy.cache or "lru",
        }
        if policy.tier:
            self._knobs["disk_cache"] = folder
        self._tokenizer = tokenizer
        self._params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    async def run(self) -> dict[str, Any]:
        async with Engine.open(str(self._model), **self._knobs) as engine:
            if self._order.work == "unshared":
                return await self._unshared(engine)
            shelf, questions = _workload(self._order, self._tokenizer)
            pipeline = self._pipeline(engine, shelf)
            if self._order.work == "again":
                return {"again": [await self._again(engine, pipeline, q) for q in questions]}
            warm = self._order.warm
            await self._answer(pipeline, questions[:warm])
            seen = await self._answer(pipeline, questions[warm:])
            tiers = {name: asdict(tier) for name, tier in engine.statistics().cache.tiers.items()}
            return {"seen": seen, "tiers": tiers}

    def _pipeline(self, engine: Engine, shelf: Shelf) -> RagPipeline:
        policy = self._order.policy
        return RagPipeline(
            engine=engine,
            index=shelf,
            template=PromptTemplate(system=SYSTEM, order=policy.order),
            top_k=self._order.per_question,
            params=self._params,
            # There is no embedding or retrieval here to be beside.
            overlap=False,
        )

    async def _answer(
        self, pipeline: RagPipeline, questions: Sequence[Question]
    ) -> list[dict[str, Any]]:
        todo = iter(questions)
        seen: list[dict[str, Any]] = []

        async def client(todo: Iterator[Question]) -> None:
            for question in todo:
                seen.append(await _one(pipeline, question))

        await asyncio.gather(*(client(todo) for _ in range(self._order.concurrency)))
        return seen

    async def _again(
        self, engine: Engine, pipeline: RagPipeline, question: Question
    ) -> dict[str, Any]:
        await engine.reset_prefix_cache()
        return {
            "cold": await _one(pipeline, question),
            "warm": await _one(pipeline, question),
        }

    async def _unshared(self, engine: Engine) -> dict[str, Any]:
        requests = build_workload(
            "noshare", lambda text: self._tokenizer.encode(text, add_special_tokens=False)
        )
        todo = iter(requests)
        started, cpu = time.perf_counter(), time.process_time()

        async def client() -> None:
            for request in todo:
                await engine.generate(list(request.prompt), self._params)

        await asyncio.gather(*(client() for _ in range(self._order.concurrency)))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(len(request.prompt) + ANSWER_TOKENS for request in requests),
        }


async def _one(pipeline: RagPipeline, question: Question) -> dict[str, Any]:
    """Ask, and read to the end."""
    started = time.perf_counter()
    times: list[float] = []
    usage = None
    async with pipeline.stream(question.text) as answer:
        async for event in answer:
            if isinstance(event, Delta):
                times.extend([time.perf_counter()] * len(event.token_ids))
            elif isinstance(event, Done):
                usage = event.completion.usage
    if usage is None:
        raise RuntimeError(f"no answer to {question.text!r}")
    return {
        "started": started,
        "times": times,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
    }
