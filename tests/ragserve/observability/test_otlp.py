"""Traces as a backend sees them: sent by a web app over OTLP, whole and in the right place."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from random import Random
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import uvicorn
from opentelemetry import baggage, trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from otlp import Collector, ReceivedSpan, by_name
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ragserve.documents import Chunk
from ragserve.engine import Delta, Engine, RagserveError, SamplingParams
from ragserve.observability import (
    GenerationRecord,
    GenerationTracer,
    OpenInferenceNames,
    request_context,
)
from ragserve.pipeline import RagPipeline
from ragserve.prompting import PromptTemplate
from ragserve.retrieval import ChunkFilter, Query, ScoredChunk
from ragserve.testing import ScriptedModel

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}

ROOT, CHAT = "invoke_workflow rag", "chat scripted"
BEFORE = ["embeddings ones", "retrieval kb", "rag.context"]
INSIDE = ["llm.queue", "llm.prefill", "llm.decode"]
RAG = [ROOT, *BEFORE, CHAT, *INSIDE]
REPLY = "The answer."
PARAMS = SamplingParams(temperature=0.5, max_tokens=64, seed=11, stop=["###"])
LONG = SamplingParams(temperature=0.0, max_tokens=2000)
SERVER = 2
"""The kind of a server's span."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


class Ones:
    """Embeds anything as the same vector."""

    model_name = "ones"
    dimension: int | None = 4

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        return np.full((len(texts), 4), 0.5, np.float32)


class Shelf:
    """Always finds the same two chunks."""

    name = "kb"

    async def retrieve(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> Sequence[ScoredChunk]:
        return [
            ScoredChunk(Chunk("c0", "d", "secret document"), 0.75),
            ScoredChunk(Chunk("c1", "d", "another"), 0.5),
        ]


def rag_on(engine: Engine, provider: TracerProvider, **options: Any) -> RagPipeline:
    options = {"params": PARAMS, **options}
    # Whether something is computed ahead depends on who is faster.
    options = {"overlap": False, **options}
    return RagPipeline(
        engine=engine, index=Shelf(), embedder=Ones(), tracer_provider=provider, **options
    )


class App:
    """A web app with a route for answers and one for plain generation.

    A streamed body ends with a line that holds the trace's id.
    """

    def __init__(
        self, engine: Engine, provider: TracerProvider, instrumented: bool = True, **options: Any
    ) -> None:
        self.engine = engine
        self.params: SamplingParams = options.get("params", PARAMS)
        self.rag = rag_on(engine, provider, **options)
        options.pop("params", None)
        self.tracer = GenerationTracer(provider, **options)
        self.left = asyncio.Event()
        """An answer was given up."""
        routes = [Route("/rag", self.answer), Route("/generate", self.generate)]
        self.asgi: Any = Starlette(routes=routes)
        if instrumented:
            self.asgi = OpenTelemetryMiddleware(
                self.asgi, tracer_provider=provider, exclude_spans=["send", "receive"]
            )

    async def answer(self, request: Request) -> Response:
        answer = self.rag.stream("secret question?", trace_context=request_context(request.headers))

        async def body() -> AsyncIterator[str]:
            try:
                async with answer:
                    async for event in answer:
                        if isinstance(event, Delta):
                            yield event.text
            except RagserveError as error:
                yield type(error).__name__
            finally:
                self.left.set()
            yield f"\n{answer.trace_id}"

        return StreamingResponse(body())

    async def generate(self, request: Request) -> Response:
        parent = request_context(request.headers)
        messages = [{"role": "user", "content": "secret question?"}]
        stream = self.engine.stream(messages, self.params)

        async def body() -> AsyncIterator[str]:
            error: BaseException | str = "cancelled"
            trace_id = None
            try:
                async with stream:
                    async for delta in stream:
                        yield delta.text
            except RagserveError as failure:
                error = failure
                yield type(failure).__name__
            finally:
                record = GenerationRecord.of(
                    stream,
                    self.params,
                    model=self.engine.model_name,
                    error=error,  # of an answer that is whole, this is nothing
                    prompt=messages,
                )
                trace_id = self.tracer.emit(record, parent)
                self.left.set()
            yield f"\n{trace_id}"

        return StreamingResponse(body())


@asynccontextmanager
async def served(app: App) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, which uvicorn serves on a port of its own."""
    config = uvicorn.Config(app.asgi, log_level="warning", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config.load()
        # Not `serve`: that takes over the process's signals.
        task = asyncio.create_task(server._serve([listener]))
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with anyio.fail_after(60):
                while not server.started:
                    await asyncio.sleep(0.005)
            async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            await task


def run(
    collector: Collector,
    scenario: Callable[[httpx.AsyncClient, App], Awaitable[None]],
    *,
    model: ScriptedModel | None = None,
    provider: TracerProvider | None = None,
    **options: Any,
) -> list[ReceivedSpan]:
    """Play a scenario against the served app, and give what the backend has got."""

    async def main() -> None:
        async with Engine.open(model or ScriptedModel(REPLY)) as engine:
            app = App(engine, provider or collector.provider(), **options)
            async with served(app) as client:
                await scenario(client, app)

    asyncio.run(main())
    return collector.spans()


def check_inside(spans: dict[str, ReceivedSpan], parent: str, children: Sequence[str]) -> None:
    """Children are `parent`'s, lie in it, and follow each other without gaps."""
    outer = spans[parent]
    for name in children:
        assert spans[name].parent_id == outer.span_id, name
    assert spans[children[0]].start == outer.start
    assert spans[children[-1]].end == outer.end
    for before, after in pairwise(children):
        assert spans[before].end == spans[after].start


def check_server(spans: dict[str, ReceivedSpan], route: str, root: str) -> None:
    """The server's span is the caller's child, and `root` is its, in time too."""
    server = spans[f"GET {route}"] if f"GET {route}" in spans else spans["GET"]
    assert server.kind == SERVER
    assert server.parent_id == CALLER
    assert spans[root].parent_id == server.span_id
    assert server.start <= spans[root].start <= spans[root].end <= server.end
    assert {span.trace_id for span in spans.values()} == {TRACE}


def ask(route: str, headers: dict[str, str]) -> Callable[[httpx.AsyncClient, App], Awaitable[None]]:
    async def scenario(client: httpx.AsyncClient, app: App) -> None:
        response = await client.get(route, headers=headers)
        assert response.text.split("\n") == [REPLY, TRACE]

    return scenario


def test_an_answer_arrives_whole_under_the_servers_span(collector: Collector) -> None:
    spans = by_name(run(collector, ask("/rag", SAMPLED)))
    assert len(spans) == len(RAG) + 1
    check_server(spans, "/rag", ROOT)
    check_inside(spans, ROOT, [*BEFORE, CHAT])
    check_inside(spans, CHAT, INSIDE)
    assert not any(span.failed for span in spans.values())
    assert {spans[name].scope for name in RAG} == {"ragserve"}
    chat = spans[CHAT].attributes
    assert chat["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["gen_ai.usage.output_tokens"] == len(REPLY) + 1
    assert spans["llm.prefill"].attributes["ragserve.prefill.chunks"] == 1
    assert "secret" not in repr(spans)
    assert REPLY not in repr(spans)


def test_plain_generation_arrives_as_an_answers_chat_does(collector: Collector) -> None:
    async def scenario(client: httpx.AsyncClient, app: App) -> None:
        await ask("/generate", SAMPLED)(client, app)
        await ask("/rag", SAMPLED)(client, app)

    spans = run(collector, scenario)
    (in_rag,) = (span for span in spans if span.name == ROOT)
    chats = [span for span in spans if span.name == CHAT]
    (in_rag_chat,) = (span for span in chats if span.parent_id == in_rag.span_id)
    (chat,) = (span for span in chats if span is not in_rag_chat)
    (server,) = (span for span in spans if span.span_id == chat.parent_id)
    mine = by_name([server, chat, *(s for s in spans if s.parent_id == chat.span_id)])
    assert len(mine) == 5
    check_server(mine, "/generate", CHAT)
    check_inside(mine, CHAT, INSIDE)
    assert set(chat.attributes) == set(in_rag_chat.attributes)
    for name in INSIDE:
        (in_rag_stage,) = (
            s for s in spans if s.name == name and s.parent_id == in_rag_chat.span_id
        )
        assert set(mine[name].attributes) == set(in_rag_stage.attributes)
    assert "secret" not in repr(mine)


@pytest.mark.parametrize("route", ["/rag", "/generate"])
def test_without_instrumentation_the_callers_headers_are_the_parent(
    collector: Collector, route: str
) -> None:
    spans = by_name(run(collector, ask(route, SAMPLED), instrumented=False))
    root = spans[ROOT if route == "/rag" else CHAT]
    assert root.parent_id == CALLER
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert len(spans) == len(RAG if route == "/rag" else [CHAT, *INSIDE])


def test_without_headers_an_answer_is_a_trace_of_its_own(collector: Collector) -> None:
    seen: list[str] = []

    async def scenario(client: httpx.AsyncClient, app: App) -> None:
        for headers in ({}, {"traceparent": "00-nonsense"}):
            seen.append((await client.get("/rag", headers=headers)).text.split("\n")[1])

    spans = run(collector, scenario, instrumented=False)
    assert len(set(seen)) == 2
    assert Counter(span.trace_id for span in spans) == dict.fromkeys(seen, len(RAG))
    assert [span.parent_id for span in spans if span.name == ROOT] == ["", ""]


def test_where_a_request_is() -> None:
    headers = {"TraceParent": SAMPLED["traceparent"], "Baggage": "tenant=blue"}
    found = request_context(headers)
    assert found is not None
    span = trace.get_current_span(found).get_span_context()
    assert span.is_remote
    assert trace.format_trace_id(span.trace_id) == TRACE
    assert trace.format_span_id(span.span_id) == CALLER
    assert baggage.get_baggage("tenant", found) == "blue"
    # A span that is current goes first: it is the request's own, in this process.
    with TracerProvider().get_tracer("server").start_as_current_span("server") as server:
        inside = request_context(headers)
    assert inside is not None
    assert trace.get_current_span(inside) is server
    nowhere = request_context({})
    assert nowhere is not None
    assert not trace.get_current_span(nowhere).get_span_context().is_valid


def test_without_opentelemetry_a_request_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert request_context(SAMPLED) is None
    assert GenerationTracer().current_context() is None


@pytest.mark.parametrize("route", ["/rag", "/generate"])
@pytest.mark.parametrize("instrumented", [True, False])
@pytest.mark.parametrize("who", ["caller", "app"])
def test_not_sampled_gives_no_spans_and_the_same_id(
    collector: Collector, route: str, instrumented: bool, who: str
) -> None:
    provider = collector.provider(ParentBased(ALWAYS_ON) if who == "caller" else ALWAYS_OFF)
    headers = NOT_SAMPLED if who == "caller" else SAMPLED
    spans = run(collector, ask(route, headers), provider=provider, instrumented=instrumented)
    assert spans == []


@pytest.mark.parametrize("route", ["/rag", "/generate"])
def test_an_engine_that_fails(collector: Collector, route: str) -> None:
    async def scenario(client: httpx.AsyncClient, app: App) -> None:
        response = await client.get(route, headers=SAMPLED)
        assert response.text.endswith(f"EngineDeadError\n{TRACE}")

    spans = by_name(run(collector, scenario, model=ScriptedModel(REPLY, fail_at_step=3)))
    failed = {name for name, span in spans.items() if span.failed}
    assert failed == {CHAT, "llm.decode"} | ({ROOT} if route == "/rag" else set())
    for name in failed:
        assert spans[name].attributes["error.type"] == "ragserve.engine.errors.EngineDeadError"


@pytest.mark.parametrize("route", ["/rag", "/generate"])
def test_a_client_that_leaves(collector: Collector, route: str) -> None:
    async def scenario(client: httpx.AsyncClient, app: App) -> None:
        async with client.stream("GET", route, headers=SAMPLED) as response:
            async for _ in response.aiter_text():
                break
        with anyio.fail_after(60):
            await app.left.wait()
            while app.engine.statistics().blocks_used:
                await asyncio.sleep(0.002)
        await app.engine.check_integrity()

    endless = ScriptedModel(lambda tokens: 97, step_seconds=0.001)
    spans = by_name(run(collector, scenario, model=endless, params=LONG))
    root = ROOT if route == "/rag" else CHAT
    check_server(spans, route, root)
    check_inside(spans, CHAT, INSIDE)
    failed = {name for name, span in spans.items() if span.scope == "ragserve" and span.failed}
    assert failed == {root, CHAT, "llm.decode"}
    assert {spans[name].attributes["error.type"] for name in failed} == {"cancelled"}


def openinference(spans: dict[str, ReceivedSpan], name: str) -> dict[str, Any]:
    prefixes = ("openinference.", "llm.", "embedding.", "retrieval.", "input.", "output.")
    return {k: v for k, v in spans[name].attributes.items() if k.startswith(prefixes)}


def test_openinference_only_where_it_was_asked_for(collector: Collector) -> None:
    spans = by_name(run(collector, ask("/rag", SAMPLED)))
    assert all(openinference(spans, name) == {} for name in spans)


def test_openinference(collector: Collector) -> None:
    spans = by_name(run(collector, ask("/rag", SAMPLED), openinference=True))
    kinds = {name: spans[name].attributes[OpenInferenceNames.KIND] for name in RAG}
    assert kinds == {
        ROOT: "CHAIN",
        "embeddings ones": "EMBEDDING",
        "retrieval kb": "RETRIEVER",
        "rag.context": "CHAIN",
        CHAT: "LLM",
        "llm.queue": "CHAIN",
        "llm.prefill": "CHAIN",
        "llm.decode": "CHAIN",
    }
    assert openinference(spans, "embeddings ones") == {
        "openinference.span.kind": "EMBEDDING",
        "embedding.model_name": "ones",
    }
    assert openinference(spans, "retrieval kb") == {
        "openinference.span.kind": "RETRIEVER",
        "retrieval.documents.0.document.id": "c0",
        "retrieval.documents.0.document.score": 0.75,
        "retrieval.documents.1.document.id": "c1",
        "retrieval.documents.1.document.score": 0.5,
    }
    usage = spans[CHAT].attributes
    chat = openinference(spans, CHAT)
    assert json.loads(chat.pop("llm.invocation_parameters")) == {
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 64,
        "seed": 11,
        "stop": ["###"],
    }
    assert chat == {
        "openinference.span.kind": "LLM",
        "llm.model_name": "scripted",
        "llm.token_count.prompt": usage["gen_ai.usage.input_tokens"],
        "llm.token_count.prompt_details.cache_read": usage["gen_ai.usage.cache_read.input_tokens"],
        "llm.token_count.completion": len(REPLY) + 1,
        "llm.token_count.total": usage["gen_ai.usage.input_tokens"] + len(REPLY) + 1,
    }
    assert "secret" not in repr(spans)
    assert REPLY not in repr(spans)


@pytest.mark.parametrize("route", ["/rag", "/generate"])
def test_openinference_with_content(collector: Collector, route: str) -> None:
    spans = by_name(run(collector, ask(route, SAMPLED), openinference=True, capture_content=True))
    chat = spans[CHAT].attributes
    assert chat["output.value"] == REPLY
    (sent,) = json.loads(chat["gen_ai.input.messages"])
    text = sent["parts"][0]["content"]
    assert sent["role"] == "user"
    if route == "/generate":
        assert text == "secret question?"
        assert json.loads(chat["input.value"]) == [{"role": "user", "content": text}]
        return
    assert "secret document" in text
    assert chat["input.value"] == text
    root, retrieval = spans[ROOT].attributes, spans["retrieval kb"].attributes
    assert root["input.value"] == spans["embeddings ones"].attributes["input.value"]
    assert root["input.value"] == retrieval["input.value"] == "secret question?"
    assert root["output.value"] == REPLY
    assert retrieval["retrieval.documents.0.document.content"] == "secret document"


# -- many streams that are given up ---------------------------------------------------------


class Counting(SpanProcessor):
    """Counts spans by trace, as they start and as they end."""

    def __init__(self) -> None:
        self.open = 0
        self.num_roots = 0
        self.traces: dict[int, Counter[str]] = {}

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.open += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.open -= 1
        self.num_roots += span.name == ROOT
        context = span.get_span_context()
        assert context is not None
        self.traces.setdefault(context.trace_id, Counter())[span.name] += 1


class Ear(logging.Handler):
    """Notes what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What is said meanwhile: logged, warned of, or raised where nobody can catch it."""
    ear, hook = Ear(), sys.unraisablehook
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "asyncio")]
    sys.unraisablehook = lambda what: ear.heard.append(repr(what.exc_value))
    for logger in loggers:
        logger.addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield ear.heard
    finally:
        sys.unraisablehook = hook
        for logger in loggers:
            logger.removeHandler(ear)
    ear.heard += [str(warning.message) for warning in warned]


def test_complaints_are_heard() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")

    async def main() -> None:
        async def numbers() -> AsyncIterator[int]:
            with tracer.start_as_current_span("held across a yield"):
                yield 1
                yield 2

        async for _ in numbers():
            break
        gc.collect()
        await asyncio.sleep(0)

    with complaints() as heard:
        asyncio.run(main())
    assert any("detach" in complaint for complaint in heard)


class GivenUp:
    """Asks, reads a little or nothing, and gives up, in each way that a caller can."""

    def __init__(self, rag: RagPipeline, provider: TracerProvider) -> None:
        self.rag = rag
        self.engine = rag.engine
        self.provider = provider
        self.generations = GenerationTracer(provider)
        self.random = Random(5)
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_answers = 0

    async def one(self, number: int) -> None:
        ways = (
            self.leave,
            self.drop,
            self.cancel,
            self.drop_generator,
            self.leave_generation,
            self.cancel_generation,
        )
        tracer = self.provider.get_tracer("caller")
        with tracer.start_as_current_span("caller"):
            await ways[number % len(ways)]()

    def ask(self) -> Any:
        answer = self.rag.stream("question?")
        self.streams.add(answer)
        self.num_answers += 1
        return answer

    async def leave(self) -> None:
        reads = self.random.randrange(1, 4)
        async with self.ask() as answer:
            async for _ in answer:
                reads -= 1
                if not reads:
                    break

    async def drop(self) -> None:
        answer = self.ask()
        for _ in range(self.random.randrange(1, 4)):
            await anext(answer)
        if self.random.random() < 0.5:
            answer.itself = answer  # for the collector to find, at any time

    async def cancel(self) -> None:
        async def read() -> None:
            async for _ in self.ask():
                pass

        await self.cancelled(read())

    async def drop_generator(self) -> None:
        async def events() -> AsyncIterator[Any]:
            async with self.ask() as answer:
                async for event in answer:
                    yield event

        async for _ in events():
            break  # asyncio closes the generator later, in a task of its own

    async def leave_generation(self) -> None:
        await self.generate(num_reads=1)

    async def cancel_generation(self) -> None:
        await self.cancelled(self.generate(num_reads=1000))

    async def generate(self, num_reads: int) -> None:
        parent = self.generations.current_context()
        stream = self.engine.stream([1, 2, 3], LONG)
        self.streams.add(stream)
        try:
            async with stream:
                for _ in range(num_reads):
                    await anext(stream)
        finally:
            model = self.engine.model_name
            record = GenerationRecord.of(stream, LONG, model=model, error="cancelled")
            self.generations.emit(record, parent)

    async def cancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Cancel it in any of its stages, once it has begun."""
        task = asyncio.create_task(work)
        for _ in range(self.random.randrange(2, 12)):
            await asyncio.sleep(0)
        if self.random.random() < 0.5:
            await asyncio.sleep(0.01 * self.random.random())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


NUM_GIVEN_UP = 4_000


def test_streams_given_up_leave_nothing_and_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(counting)

    async def main() -> None:
        model = ScriptedModel(lambda tokens: 97, step_seconds=0.002)
        async with Engine.open(model, stream_interval=0.0, max_num_batched_tokens=4096) as engine:
            rag = rag_on(engine, provider, params=LONG)
            # The prompt is made once: what is tried here is around it.
            found = await rag.index.retrieve("question?", top_k=2)
            built = rag.template.build("question?", found, engine.tokenizer)
            monkeypatch.setattr(PromptTemplate, "build", lambda *args, **options: built)
            given_up = GivenUp(rag, provider)
            numbers = iter(range(NUM_GIVEN_UP))

            async def work() -> None:
                for number in numbers:
                    await given_up.one(number)

            await asyncio.gather(*(work() for _ in range(64)))
            gc.collect()
            with anyio.fail_after(60):
                while engine.statistics().blocks_used or given_up.num_answers > counting.num_roots:
                    await asyncio.sleep(0.002)
            await engine.check_integrity()
            assert len(given_up.streams) == 0

    with complaints() as heard:
        asyncio.run(main())
    assert heard == []
    assert counting.open == 0
    assert len(counting.traces) == NUM_GIVEN_UP
    for spans in counting.traces.values():
        assert set(spans.values()) == {1}
        assert "caller" in spans
        assert ROOT in spans or CHAT in spans
    assert len({frozenset(spans) for spans in counting.traces.values()}) > 3  # in several stages
