"""A page where one asks a corpus: the answer as it is written, its sources, where its time went.

    python app.py            # the Python language reference, on http://127.0.0.1:8000

Everything runs in this one process: the page's server, the embedder, the index and the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ragserve import Engine, InvalidParamsError, Metrics, RagPipeline, RagserveError
from ragserve.demo import QUESTIONS, Progress, python_reference
from ragserve.web import error_response, graceful_shutdown, openai_app, sse

PAGE = Path(__file__).with_name("page")
DEADLINE = 10.0
MAX_BODY = 16_384  # bytes of a question, as JSON

# The page needs nothing but its own files; should a text ever get into it as HTML by mistake, no
# script in it runs.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(
    open_pipeline: Callable[[], AbstractAsyncContextManager[RagPipeline]],
    *,
    examples: Sequence[str] = (),
    deadline: float = DEADLINE,
) -> Starlette:
    """The app around a pipeline.

    :param open_pipeline: opens model, embedder and index when the server starts; what it gives is
        closed when the server stops.
    :param examples: questions that the page offers.
    :param deadline: seconds that running answers have to end in when the server stops.
    """

    engines: dict[str, Engine] = {}
    pipelines: dict[str, RagPipeline] = {}

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        async with open_pipeline() as rag, graceful_shutdown(rag.engine, deadline=deadline):
            metrics = Metrics(rag.engine, rag)
            model = Path(rag.engine.model_name).name
            engines[model], pipelines[rag.name] = rag.engine, rag
            try:
                yield {"rag": rag, "model": model, "metrics": metrics, "examples": list(examples)}
            finally:
                engines.clear()
                pipelines.clear()
                metrics.close()

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/", page),
            Route("/ask", ask, methods=["POST"]),
            Route("/about", about),
            Route("/health", health),
            Route("/metrics", prometheus),
            Mount("/page", app=StaticFiles(directory=PAGE)),
            # For OpenAI's clients, with base_url="http://127.0.0.1:8000/llm/v1".
            Mount("/llm", app=openai_app(engines, pipelines)),
        ],
        exception_handlers={HTTPException: refuse, RagserveError: refuse},
    )


async def page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


async def ask(request: Request) -> Response:
    """`{"question": "..."}` -> the answer as server-sent events."""
    rag: RagPipeline = request.state.rag
    return sse(rag.stream(await read_question(request)))


async def read_question(request: Request) -> str:
    # A page of another site can send forms and plain text here, but not this type: for that its
    # browser asks first, and is not allowed to.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON, as content type application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a question has at most {MAX_BODY} bytes")
    try:
        question = json.loads(body)["question"]
    except (ValueError, LookupError, TypeError):
        raise HTTPException(400, 'send an object: {"question": "..."}') from None
    if not isinstance(question, str) or not question.strip():
        raise InvalidParamsError("question", question, "a text that is not empty")
    return question


async def about(request: Request) -> Response:
    """What the page says of itself."""
    rag: RagPipeline = request.state.rag
    return JSONResponse(
        {
            "model": request.state.model,
            "corpus": rag.index.name,
            "examples": request.state.examples,
        }
    )


async def health(request: Request) -> Response:
    """200 if questions are taken, 503 if not: for a load balancer."""
    rag: RagPipeline = request.state.rag
    engine = rag.engine.health()
    return JSONResponse({"status": engine.status}, 200 if engine.ok else 503)


async def prometheus(request: Request) -> Response:
    metrics: Metrics = request.state.metrics
    return Response(metrics.prometheus(), headers={"content-type": metrics.content_type})


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(error)


# ---- the real thing


def tracer_provider() -> TracerProvider:
    """Gives every answer a trace; sends it to OTEL_EXPORTER_OTLP_ENDPOINT, if that is set."""
    provider = TracerProvider(resource=Resource.create({"service.name": "ragserve-webapp"}))
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def main() -> None:
    """Serve the Python language reference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    provider = tracer_provider()
    app = make_app(lambda: python_reference(Progress(sys.stderr), provider), examples=QUESTIONS)
    # A little more than the deadline, for a browser that has stopped reading.
    uvicorn.run(
        app, host=arguments.host, port=arguments.port, timeout_graceful_shutdown=int(DEADLINE) + 2
    )
    provider.shutdown()


if __name__ == "__main__":
    main()
