"""A FastAPI application that answers questions from its own documents.

python examples/fastapi_app.py --model HuggingFaceTB/SmolLM2-135M-Instruct

curl -N localhost:8000/ask -H content-type:application/json -d '{"question": "Is the shop open?"}'
curl localhost:8000/answer -H content-type:application/json -d '{"question": "Is the shop open?"}'
curl localhost:8000/llm/v1/models
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

import ragserve as rs
from ragserve.web import error_response, graceful_shutdown, openai_app, sse, until_disconnect

DOCUMENTS = [
    rs.Document("hours", "The shop is open from 9 to 18 o'clock, Monday to Saturday."),
    rs.Document("returns", "Goods can be returned within 30 days. Bring the receipt."),
    rs.Document("delivery", "Delivery takes three days. Orders above 50 euros are delivered free."),
]


class Question(BaseModel):
    question: str


def create_app(model: str, embedder_model: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            rs.SentenceTransformerEmbedder(embedder_model) as embedder,
            rs.Engine.open(model, max_model_len=2048, max_queued_requests=64) as engine,
            # When the server is told to stop, answers have ten seconds to come to their end.
            graceful_shutdown(engine, deadline=10.0),
        ):
            index = rs.FaissIndex(embedder)
            await index.add(DOCUMENTS)
            params = rs.SamplingParams(temperature=0.0, max_tokens=64)
            rag = rs.RagPipeline(engine=engine, index=index, top_k=2, params=params)
            app.state.rag = rag
            # The same engine and documents for OpenAI's clients: see langchain_client.py.
            app.mount("/llm", openai_app(engine, rag=rag))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/ask")
    async def ask(question: Question, request: Request) -> Response:
        """Server-sent events: retrieval, then deltas, then done."""
        return sse(request.app.state.rag.stream(question.question))

    @app.post("/answer")
    async def answer(question: Question, request: Request) -> dict[str, Any]:
        """The whole answer. It is given up if the client hangs up."""
        rag: rs.RagPipeline = request.app.state.rag
        answer = await until_disconnect(request, rag.answer(question.question))
        return {
            "text": answer.text,
            "sources": [source.chunk.document_id for source in answer.sources],
            "usage": answer.usage,
        }

    @app.exception_handler(rs.RagserveError)
    async def failed(request: Request, error: rs.RagserveError) -> Response:
        """A full queue is 429 with Retry-After, a prompt that is too long 400, and so on."""
        return error_response(error)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--embedder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(
        create_app(args.model, args.embedder),
        port=args.port,
        # A little more than the answers have: then not even a client that reads no more is
        # waited for.
        timeout_graceful_shutdown=12,
    )
