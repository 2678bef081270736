"""One trace per answer: the spans, their times and attributes, on success, failure and leaving."""

from __future__ import annotations

import builtins
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from ragserve.documents import Chunk
from ragserve.engine import (
    Delta,
    Engine,
    EngineDeadError,
    InvalidParamsError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
)
from ragserve.pipeline import RagPipeline
from ragserve.prompting import PromptTemplate
from ragserve.retrieval import FaissIndex, ScoredChunk
from ragserve.testing import ScriptedModel

REPLY = "The answer."
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, max_tokens=64, seed=11, stop=["###"])
NAMES = [
    "invoke_workflow rag",
    "embeddings ones",
    "retrieval kb",
    "rag.context",
    "chat scripted",
    "llm.queue",
    "llm.prefill",
    "llm.decode",
]
AHEAD = "prefill_ahead"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Spans:
    """A local provider and what it exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def by_name(self) -> dict[str, ReadableSpan]:
        spans = {span.name: span for span in self.all()}
        assert len(spans) == len(self.all())  # each once
        return spans


@pytest.fixture
def spans() -> Spans:
    return Spans()


class Ones:
    model_name = "ones"
    dimension: int | None = 4

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.wait = False
        self.on_query: Callable[[], Awaitable[object]] | None = None

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        if kind == "query":
            if self.error is not None:
                raise self.error
            if self.wait:
                await anyio.sleep_forever()
            if self.on_query is not None:
                await self.on_query()
        return np.full((len(texts), 4), 0.5, np.float32)


@asynccontextmanager
async def pipeline(
    model: ScriptedModel | None = None, embedder: Ones | None = None, **options: Any
) -> AsyncIterator[RagPipeline]:
    """Nothing is computed ahead, unless it is asked for: whether there is time for it varies."""
    embedder = embedder or Ones()
    index = FaissIndex(embedder, name="kb")
    await index.add([Chunk("c0", "d", "secret document"), Chunk("c1", "d", "another")])
    async with Engine.open(model or ScriptedModel(REPLY)) as engine:
        options = {"top_k": 2, "params": PARAMS, "overlap": False, **options}
        yield RagPipeline(engine=engine, index=index, **options)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def duration(span: ReadableSpan) -> int:
    start, end = times(span)
    return end - start


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def check_tree(spans: dict[str, ReadableSpan], workflow: str = NAMES[0]) -> None:
    """Children lie in their parents without gaps, and their durations sum to the parent's; but for
    what was computed ahead, which lies beside them."""
    root = spans[workflow]
    for parent in (root, spans.get("chat scripted")):
        if parent is None:
            continue
        children = sorted(
            (
                s
                for name, s in spans.items()
                if s.parent and s.parent.span_id == parent.context.span_id and name != AHEAD
            ),
            key=lambda span: (span.start_time or 0, span.end_time or 0),
        )
        assert children[0].start_time == parent.start_time
        assert children[-1].end_time == parent.end_time
        assert sum(map(duration, children)) == duration(parent)
    if AHEAD in spans:
        ahead = spans[AHEAD]
        assert ahead.parent is not None
        assert ahead.parent.span_id == root.context.span_id
        start, end = times(ahead)
        assert times(root)[0] <= start < end <= times(root)[1]
    assert {span.context.trace_id for span in spans.values()} == {root.context.trace_id}
    assert {span.kind for span in spans.values()} == {SpanKind.INTERNAL}


@pytest.mark.anyio
async def test_a_span_per_stage_under_the_callers(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("caller")
    async with pipeline(tracer_provider=spans.provider) as rag:
        with tracer.start_as_current_span("caller") as caller:
            stream = rag.stream("secret question?")
        async with stream as answer:  # read elsewhere: the parent is where it was asked for
            async for _ in answer:
                pass
    found = spans.by_name()
    del found["caller"]
    assert sorted(found) == sorted(NAMES)
    check_tree(found)
    root, chat = found[NAMES[0]], found["chat scripted"]
    assert root.parent is not None
    assert root.parent.span_id == caller.get_span_context().span_id
    assert answer.trace_id == trace.format_trace_id(root.context.trace_id)
    for name in NAMES[5:]:
        parent = found[name].parent
        assert parent is not None
        assert parent.span_id == chat.context.span_id
    assert duration(root) == pytest.approx(answer.timings.total * 1e9, abs=10)
    assert duration(found["llm.decode"]) == pytest.approx(answer.timings.decode * 1e9, abs=10)
    assert {span.status.status_code for span in found.values()} == {StatusCode.UNSET}


@pytest.mark.anyio
async def test_attributes(spans: Spans) -> None:
    async with pipeline(tracer_provider=spans.provider) as rag:
        await rag.answer("secret question?")
        spans.exporter.clear()
        answer = await rag.answer("secret question?")
    found = spans.by_name()
    usage = answer.usage
    assert usage.cached_tokens > 0
    assert attributes(found["invoke_workflow rag"]) == {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.provider.name": "ragserve",
        "gen_ai.workflow.name": "rag",
    }
    assert attributes(found["embeddings ones"]) == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "ragserve",
        "gen_ai.request.model": "ones",
        "gen_ai.embeddings.dimension.count": 4,
    }
    assert attributes(found["retrieval kb"]) == {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": "ragserve",
        "gen_ai.data_source.id": "kb",
        "gen_ai.retrieval.top_k": 2,
        "ragserve.retrieval.documents": 2,
    }
    assert attributes(found["rag.context"]) == {
        "ragserve.context.order": "cache_aware",
        "ragserve.context.ranks": (2, 1),
        "ragserve.context.documents": 2,
        "ragserve.context.dropped_documents": 0,
        "ragserve.context.prompt_tokens": usage.prompt_tokens,
    }
    chat = attributes(found["chat scripted"])
    wait = answer.timings.queue + answer.timings.prefill
    assert chat.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(wait)
    assert chat == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ragserve",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.seed": 11,
        "gen_ai.request.stop_sequences": ("###",),
        "gen_ai.response.id": answer.completion.request_id,
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "ragserve.reuse.kinds": ("system", "document", "document", "question"),
        "ragserve.reuse.tokens": tuple(segment.tokens for segment in answer.reuse.segments),
        "ragserve.reuse.cached_tokens": tuple(s.cached_tokens for s in answer.reuse.segments),
        "ragserve.reuse.sources": ("device",) * 4,
        "ragserve.reuse.miss_reasons": ("", "", "", "shorter_than_block"),
    }
    assert sum(chat["ragserve.reuse.cached_tokens"]) == usage.cached_tokens
    assert attributes(found["llm.queue"]) == {}
    assert attributes(found["llm.prefill"]) == {
        "ragserve.prefill.prompt_tokens": usage.prompt_tokens,
        "ragserve.prefill.cached_tokens": usage.cached_tokens,
        "ragserve.prefill.computed_tokens": usage.prompt_tokens - usage.cached_tokens,
        "ragserve.prefill.chunks": 1,
    }
    assert attributes(found["llm.decode"]) == {
        "ragserve.decode.tokens": usage.completion_tokens,
        "ragserve.decode.time_per_output_token": answer.completion.timings.time_per_output_token,
        "ragserve.preemptions": 0,
    }


@pytest.mark.anyio
async def test_what_was_computed_ahead_lies_beside_the_stages(spans: Spans) -> None:
    embedder = Ones()
    model = ScriptedModel(REPLY, step_seconds=0.002)
    async with pipeline(model, embedder, tracer_provider=spans.provider, overlap=True) as rag:
        embedder.on_query = lambda: computed(rag.engine)
        first = await rag.answer("secret question?")
        request_id = first.completion.request_id
        chunks = sum(chunk[0] != request_id for plan in model.plans for chunk in plan)
        found = spans.by_name()
        spans.exporter.clear()
        second = await rag.answer("secret question?")
        again = spans.by_name()
    assert sorted(found) == sorted([*NAMES, AHEAD])
    check_tree(found)
    ahead = found[AHEAD]
    begun, embedded = times(found["embeddings ones"])
    # It was going on while the question was embedded, for as long as the steps took.
    assert begun < times(ahead)[0] < embedded
    assert duration(ahead) >= chunks * 2_000_000
    system = first.reuse.segments[0].tokens
    assert attributes(ahead) == {
        "ragserve.prefill_ahead.outcome": "used",
        "ragserve.prefill_ahead.documents": 0,
        "ragserve.prefill_ahead.prompt_tokens": system,
        "ragserve.prefill_ahead.cached_tokens": 0,
        "ragserve.prefill_ahead.computed_tokens": system,
        "ragserve.prefill_ahead.found_tokens": system,
        "ragserve.prefill_ahead.chunks": chunks,
    }
    assert attributes(found[NAMES[0]])["ragserve.prefill_ahead.outcome"] == "used"
    assert first.usage.cached_tokens == system
    t = first.timings
    assert t.total == pytest.approx(duration(found[NAMES[0]]) / 1e9, abs=1e-8)
    # All of it is in the cache now.
    assert sorted(again) == sorted(NAMES)
    assert attributes(again[NAMES[0]])["ragserve.prefill_ahead.outcome"] == "skipped"
    assert second.text == first.text


@pytest.mark.anyio
async def test_what_kept_it_from_being_computed_ahead(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = anyio.Event()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        refused.set()
        raise QueueFullError("requests", 1, 0, 1.0)

    async def until_refused() -> None:
        with anyio.fail_after(60):
            await refused.wait()

    embedder = Ones()
    async with pipeline(None, embedder, tracer_provider=spans.provider, overlap=True) as rag:
        monkeypatch.setattr(rag.engine, "prefill", refuse)
        embedder.on_query = until_refused
        await rag.answer("secret question?")
    found = spans.by_name()
    assert sorted(found) == sorted(NAMES)
    root = attributes(found[NAMES[0]])
    assert root["ragserve.prefill_ahead.outcome"] == "skipped"
    assert root["ragserve.prefill_ahead.error"].endswith("errors.QueueFullError")
    assert "error.type" not in root


async def computed(engine: Engine) -> None:
    """Wait until the engine has computed something, and has nothing more to do."""
    with anyio.fail_after(60):
        while not engine.statistics().prompt_tokens or engine.statistics().num_running:
            await anyio.sleep(0.0005)


@pytest.mark.anyio
@pytest.mark.parametrize("capture", [False, True])
async def test_content_only_where_it_was_asked_for(spans: Spans, capture: bool) -> None:
    embedder = Ones()
    async with pipeline(
        None, embedder, tracer_provider=spans.provider, capture_content=capture, overlap=True
    ) as rag:
        embedder.on_query = lambda: computed(rag.engine)
        await rag.answer("secret question?")
    text = " ".join(span.to_json() for span in spans.all())
    assert ("secret question?" in text) == capture
    assert ("secret document" in text) == capture
    assert (REPLY in text) == capture
    if capture:
        found = spans.by_name()
        chat, retrieval = attributes(found["chat scripted"]), attributes(found["retrieval kb"])
        (output,) = json.loads(chat["gen_ai.output.messages"])
        assert output == {
            "role": "assistant",
            "parts": [{"type": "text", "content": REPLY}],
            "finish_reason": "stop",
        }
        (sent,) = json.loads(chat["gen_ai.input.messages"])
        assert "[1] " in sent["parts"][0]["content"]
        assert retrieval["gen_ai.retrieval.query.text"] == "secret question?"
        documents = json.loads(retrieval["gen_ai.retrieval.documents"])
        assert {document["id"] for document in documents} == {"c0", "c1"}


@pytest.mark.anyio
async def test_a_failed_stage(spans: Spans) -> None:
    error = ValueError("secret message")
    async with pipeline(embedder=Ones(error), tracer_provider=spans.provider) as rag:
        with pytest.raises(ValueError, match="secret"):
            await rag.answer("secret question?")
    found = spans.by_name()
    assert sorted(found) == ["embeddings ones", "invoke_workflow rag"]
    check_tree(found)
    for span in found.values():
        assert attributes(span)["error.type"] == "ValueError"
        assert span.status.status_code is StatusCode.ERROR
        assert "secret" not in span.to_json()


@pytest.mark.anyio
async def test_the_engine_fails(spans: Spans) -> None:
    model = ScriptedModel(REPLY, fail_at_step=3)
    async with pipeline(model, tracer_provider=spans.provider) as rag:
        with pytest.raises(EngineDeadError):
            await rag.answer("secret question?")
    found = spans.by_name()
    assert sorted(found) == sorted(NAMES)
    check_tree(found)
    failed = {name for name, span in found.items() if "error.type" in attributes(span)}
    assert failed == {"invoke_workflow rag", "chat scripted", "llm.decode"}
    assert attributes(found["llm.decode"])["error.type"].endswith("errors.EngineDeadError")


@pytest.mark.anyio
async def test_cancelled_while_embedding(spans: Spans) -> None:
    embedder = Ones()
    embedder.wait = True
    async with (
        pipeline(embedder=embedder, tracer_provider=spans.provider) as rag,
        anyio.create_task_group() as group,
    ):
        group.start_soon(rag.answer, "secret question?")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    found = spans.by_name()
    assert sorted(found) == ["embeddings ones", "invoke_workflow rag"]
    check_tree(found)
    assert {attributes(span)["error.type"] for span in found.values()} == {"cancelled"}


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["leave", "drop"])
async def test_left_while_decoding(spans: Spans, how: str) -> None:
    model = ScriptedModel(lambda tokens: 97, step_seconds=0.001)
    async with pipeline(
        model, tracer_provider=spans.provider, params=SamplingParams(max_tokens=2000)
    ) as rag:
        if how == "leave":
            async with rag.stream("secret question?") as answer:
                async for event in answer:
                    if isinstance(event, Delta):
                        break
        else:
            async for event in rag.stream("secret question?"):
                if isinstance(event, Delta):
                    break
            gc.collect()
            with anyio.fail_after(60):
                while not spans.all():
                    await anyio.lowlevel.checkpoint()
    found = spans.by_name()
    assert sorted(found) == sorted(NAMES)
    check_tree(found)
    for name in ("invoke_workflow rag", "chat scripted", "llm.decode"):
        assert attributes(found[name])["error.type"] == "cancelled"
    if how == "leave":
        assert attributes(found["chat scripted"])["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.anyio
async def test_aborted_by_id(spans: Spans) -> None:
    model = ScriptedModel(lambda tokens: 97, step_seconds=0.001)
    async with pipeline(
        model, tracer_provider=spans.provider, params=SamplingParams(max_tokens=2000)
    ) as rag:
        async with rag.stream("secret question?") as answer:
            await anext(answer)
            await anext(answer)
            assert answer._stream is not None
            rag.engine.abort(answer._stream.request_id)
            async for _ in answer:
                pass
        assert answer.completion.finish_reason == "abort"
    found = spans.by_name()
    check_tree(found)
    assert attributes(found["invoke_workflow rag"])["error.type"] == "abort"


@pytest.mark.anyio
async def test_finished_but_for_the_last_event_is_no_error(spans: Spans) -> None:
    async with pipeline(tracer_provider=spans.provider) as rag:
        async with rag.stream("secret question?") as answer:
            async for event in answer:
                if isinstance(event, Delta) and event.finish_reason:
                    break
        assert answer.completion.finish_reason == "stop"
    assert all("error.type" not in attributes(span) for span in spans.all())
    assert len(spans.by_name()) == len(NAMES)


@pytest.mark.anyio
@pytest.mark.parametrize("overlap", [False, True])
async def test_left_anywhere_leaves_one_whole_trace_and_nothing_running(
    spans: Spans, overlap: bool
) -> None:
    random = Random(1)
    started = 0
    async with pipeline(
        ScriptedModel("x" * 40, step_seconds=0.0002),
        tracer_provider=spans.provider,
        overlap=overlap,
    ) as rag:

        async def ask() -> None:
            nonlocal started
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(rag.answer, "secret question?")
                    started += 1
                    for _ in range(random.randrange(1, 400)):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

        async with anyio.create_task_group() as group:
            for _ in range(60):
                group.start_soon(ask)
        with anyio.fail_after(60):
            while rag.engine.statistics().blocks_used:
                await anyio.lowlevel.checkpoint()
        await rag.engine.check_integrity()
    traces: dict[int, dict[str, ReadableSpan]] = {}
    for span in spans.all():
        tree = traces.setdefault(span.context.trace_id, {})
        assert span.name not in tree
        tree[span.name] = span
    assert len(traces) == started == 60
    assert len({len(tree) for tree in traces.values()}) > 1  # left in several stages
    for tree in traces.values():
        check_tree(tree)


@pytest.mark.anyio
async def test_never_read_is_not_traced(spans: Spans) -> None:
    async with pipeline(tracer_provider=spans.provider) as rag:
        async with rag.stream("secret question?"):
            pass
        rag.stream("secret question?")
        gc.collect()
        await anyio.lowlevel.checkpoint()
    assert spans.all() == []


@pytest.mark.anyio
async def test_at_the_same_time_each_under_its_own_parent(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("caller")
    traces: dict[str, str | None] = {}
    async with pipeline(tracer_provider=spans.provider) as rag:

        async def ask(name: str) -> None:
            with tracer.start_as_current_span(name):
                traces[name] = (await rag.answer("secret question?")).trace_id

        async with anyio.create_task_group() as group:
            for i in range(10):
                group.start_soon(ask, f"caller {i}")
    assert len(spans.all()) == 10 * (len(NAMES) + 1)
    for span in spans.all():
        if span.name.startswith("caller"):
            assert traces[span.name] == trace.format_trace_id(span.context.trace_id)
    assert len(set(traces.values())) == 10


@pytest.mark.anyio
async def test_not_sampled_or_no_provider() -> None:
    off = TracerProvider(sampler=ALWAYS_OFF)
    exporter = InMemorySpanExporter()
    off.add_span_processor(SimpleSpanProcessor(exporter))
    async with pipeline(tracer_provider=off) as rag:
        assert (await rag.answer("secret question?")).text == REPLY
    assert exporter.get_finished_spans() == ()
    async with pipeline() as rag:
        assert (await rag.answer("secret question?")).trace_id is None
    # The library has not installed a provider of its own.
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)


@pytest.mark.anyio
async def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_opentelemetry(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_opentelemetry)
    async with pipeline() as rag:
        answer = await rag.answer("secret question?")
    assert answer.text == REPLY
    assert answer.trace_id is None


@pytest.mark.anyio
@pytest.mark.parametrize("capture", [False, True])
async def test_errors_on_spans_quote_nothing(spans: Spans, capture: bool) -> None:
    """Whatever stage fails, and whatever its error says."""
    fail = ValueError("secret question about a secret document")

    class Broken:
        name = "kb"

        async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
            raise fail

    options: dict[str, Any] = {"tracer_provider": spans.provider, "capture_content": capture}
    async with pipeline(embedder=Ones(fail), **options) as rag:
        with pytest.raises(ValueError, match="secret"):
            await rag.answer("secret?")
        with pytest.raises(ValueError, match="secret"):
            await RagPipeline(engine=rag.engine, index=Broken(), **options).answer("secret?")
        build = PromptTemplate(document_format="{metadata[missing]} {text}")
        missing = RagPipeline(engine=rag.engine, index=Texts(), template=build, **options)
        with pytest.raises(InvalidParamsError):
            await missing.answer("secret?")
        with pytest.raises(PromptTooLongError):
            await RagPipeline(engine=rag.engine, index=Texts(), **options).answer("secret " * 2000)
    failed = [span for span in spans.all() if span.status.status_code is StatusCode.ERROR]
    assert len({attributes(span)["error.type"] for span in failed}) == 3
    for span in spans.all():
        assert "secret" not in str(span.status.description)
        assert span.events == ()
        if not capture:
            assert "secret" not in span.to_json()


class Texts:
    name = "texts"

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
        return [ScoredChunk(Chunk("c", "d", "secret document"), 1.0)]
