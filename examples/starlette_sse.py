"""Token streams from a Starlette application: what is marked 1, 2 and 3 is all it takes.

python examples/starlette_sse.py --model HuggingFaceTB/SmolLM2-135M-Instruct

curl -N 'localhost:8000/generate?q=Why+is+the+sky+blue?'

In a browser:

    const events = new EventSource("/generate?q=...")
    events.addEventListener("delta", event => show(JSON.parse(event.data).text))
    events.addEventListener("done", () => events.close())
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import ragserve as rs
from ragserve.web import graceful_shutdown, sse  # 1

PARAMS = rs.SamplingParams(temperature=0.0, max_tokens=64)


def create_app(model: str) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with rs.Engine.open(model) as engine, graceful_shutdown(engine):  # 2
            yield {"engine": engine}

    async def home(request: Request) -> Response:
        return PlainTextResponse("Ask me at /generate?q=...")

    async def generate(request: Request) -> Response:
        chat = [{"role": "user", "content": request.query_params.get("q", "Hello!")}]
        return sse(request.state.engine.stream(chat, PARAMS))  # 3

    return Starlette(routes=[Route("/", home), Route("/generate", generate)], lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(create_app(args.model), port=args.port)
