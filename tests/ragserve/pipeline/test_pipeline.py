"""The pipeline on the real engine with a scripted model: events, timings, cancelling, errors."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from ragserve.documents import Chunk
from ragserve.engine import (
    Delta,
    Engine,
    InvalidParamsError,
    PromptTooLongError,
    SamplingParams,
)
from ragserve.pipeline import AnswerStream, Done, RagPipeline, RagTimings, Retrieved
from ragserve.prompting import PromptTemplate
from ragserve.retrieval import FaissIndex, ScoredChunk
from ragserve.testing import ScriptedFailure, ScriptedModel

DOCUMENTS = ["alpha document", "beta document", "gamma document"]
REPLY = "The answer is forty-two."
PARAMS = SamplingParams(max_tokens=64)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class LetterEmbedder:
    """Counts letters. Can be made to wait, or to fail."""

    model_name = "letters"
    dimension: int | None = 26

    def __init__(self) -> None:
        self.on_query: Callable[[], Any] | None = None
        self.running = 0

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        self.running += 1
        try:
            if kind == "query" and self.on_query is not None:
                await self.on_query()
            vectors = np.array(
                [[1e-3 + text.lower().count(chr(97 + i)) for i in range(26)] for text in texts],
                np.float32,
            )
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        finally:
            self.running -= 1


@asynccontextmanager
async def pipeline(
    model: ScriptedModel | None = None, **options: Any
) -> AsyncIterator[tuple[RagPipeline, LetterEmbedder]]:
    embedder = LetterEmbedder()
    index = FaissIndex(embedder, name="kb")
    await index.add([Chunk(f"c{i}", "d", text, i) for i, text in enumerate(DOCUMENTS)])
    async with Engine.open(model or ScriptedModel(REPLY)) as engine:
        options = {"top_k": 2, "params": PARAMS, **options}
        yield RagPipeline(engine=engine, index=index, **options), embedder
        await idle(engine)


async def idle(engine: Engine) -> None:
    """Wait until the engine has nothing to do, and check that nothing is left behind."""
    with anyio.fail_after(60):
        while True:
            statistics = engine.statistics()
            if not statistics.num_running and not statistics.num_waiting:
                break
            await anyio.lowlevel.checkpoint()
    if engine.health().ok:
        await engine.check_integrity()
        assert engine.statistics().blocks_used == 0


@pytest.mark.anyio
async def test_events_in_order() -> None:
    template = PromptTemplate(order="relevance")
    async with pipeline(template=template) as (rag, _), rag.stream("beta?") as answer:
        events = [event async for event in answer]
        assert await anext(answer, None) is None
    retrieved, *deltas, done = events
    assert isinstance(retrieved, Retrieved)
    assert [source.number for source in retrieved.sources] == [1, 2]
    assert retrieved.sources[0].chunk.text == "beta document"
    assert retrieved.sources[0].score > retrieved.sources[1].score
    assert retrieved.dropped == ()
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == REPLY
    assert isinstance(done, Done)
    assert done.completion is answer.completion
    assert done.completion.text == REPLY
    assert done.sources == answer.sources == retrieved.sources
    assert done.timings == answer.timings


@pytest.mark.anyio
async def test_the_prompt_is_what_the_template_makes() -> None:
    seen: list[list[int]] = []

    def reply(tokens: list[int]) -> int:
        seen.append(tokens)
        return 256

    async with pipeline(ScriptedModel(reply)) as (rag, _):
        answer = await rag.answer("beta?", top_k=1)
        prompt = rag.template.build(
            "beta?", [ScoredChunk(answer.sources[0].chunk, 0.0)], rag.engine.tokenizer
        )
    assert seen[0] == prompt.tokenized.token_ids
    assert answer.usage.prompt_tokens == prompt.num_tokens
    assert len(prompt.tokenized.segment_lengths) == 3


@pytest.mark.anyio
async def test_answers_at_the_same_time_share_documents() -> None:
    async with pipeline(top_k=3, overlap=False) as (rag, _):
        first = await rag.answer("alpha?")
        answers: list[Any] = []

        async def ask(question: str) -> None:
            answers.append(await rag.answer(question))

        async with anyio.create_task_group() as group:
            for i in range(8):
                group.start_soon(ask, f"alpha {'?' * i}")
        assert [answer.text for answer in answers] == [REPLY] * 8
        assert first.usage.cached_tokens == 0
        assert all(answer.usage.cached_tokens > 0 for answer in answers)
        other = await rag.answer("alpha?", namespace="another tenant")
        assert other.usage.cached_tokens == 0


@pytest.mark.anyio
async def test_timings_sum_to_the_total() -> None:
    async with pipeline(ScriptedModel(REPLY, step_seconds=0.001)) as (rag, _):
        answer = await rag.answer("beta?")
    t = answer.timings
    stages = (t.embedding, t.retrieval, t.context, t.queue, t.prefill, t.decode)
    assert all(stage >= 0 for stage in stages)
    assert t.total == sum(stages)
    assert t.prefill >= 0.001
    assert t.decode >= 0.001 * (len(REPLY) - 1)
    assert t.prefill + t.decode <= answer.completion.timings.total


@pytest.mark.anyio
async def test_options_of_one_answer() -> None:
    async with pipeline() as (rag, _):
        answer = await rag.answer(
            "beta?",
            top_k=3,
            filter=lambda chunk: chunk.id != "c1",
            params=SamplingParams(max_tokens=3),
        )
        assert {source.chunk.id for source in answer.sources} == {"c0", "c2"}
        assert answer.text == REPLY[:3]
        assert answer.completion.finish_reason == "length"
        assert answer.trace_id is None
        with pytest.raises(InvalidParamsError):
            rag.stream("beta?", top_k=0)
        with pytest.raises(InvalidParamsError):
            rag.stream(None)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_retriever_without_embedder_gets_the_question() -> None:
    class Words:
        name = "words"

        async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
            assert query == "beta?"
            return [ScoredChunk(Chunk("x", "x", "found by words"), 2.0)][:top_k]

    async with Engine.open(ScriptedModel(REPLY)) as engine:
        rag = RagPipeline(engine=engine, index=Words(), params=PARAMS)
        answer = await rag.answer("beta?")
    assert answer.sources[0].chunk.text == "found by words"
    assert answer.timings.embedding == 0.0


@pytest.mark.anyio
async def test_documents_that_do_not_fit_are_dropped_and_told() -> None:
    model = ScriptedModel(REPLY, max_model_len=140)
    async with pipeline(model, top_k=3, template=PromptTemplate(system="Go.")) as (rag, _):
        async with rag.stream("beta?") as answer:
            retrieved = await anext(answer)
            assert isinstance(retrieved, Retrieved)
            assert len(retrieved.sources) + len(retrieved.dropped) == 3
            assert retrieved.dropped
            assert retrieved.sources
        with pytest.raises(PromptTooLongError):
            await rag.answer("beta?" * 100)


@pytest.mark.anyio
async def test_cancelled_while_embedding() -> None:
    async with pipeline() as (rag, embedder):
        embedder.on_query = anyio.sleep_forever
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(rag.answer, "beta?")
                await anyio.wait_all_tasks_blocked()
                assert embedder.running == 1
                scope.cancel()
        assert scope.cancelled_caught
        assert embedder.running == 0
        embedder.on_query = None
        assert (await rag.answer("beta?")).text == REPLY


@pytest.mark.anyio
@pytest.mark.parametrize("events", [0, 1, 2, 5])
@pytest.mark.parametrize("how", ["cancel", "leave", "aclose"])
async def test_stopped_after_some_events(events: int, how: str) -> None:
    async with pipeline(ScriptedModel(lambda tokens: 97, step_seconds=0.001)) as (rag, _):
        params = SamplingParams(max_tokens=500)
        with anyio.CancelScope() as scope:
            async with rag.stream("beta?", params=params) as answer:
                for _ in range(events):
                    await anext(answer)
                if how == "cancel":
                    scope.cancel()
                    await anext(answer)
                elif how == "aclose":
                    await answer.aclose()
                    await answer.aclose()
        assert scope.cancelled_caught == (how == "cancel")
        assert await anext(answer, None) is None
        if events:
            assert answer.completion.finish_reason == "abort"
            assert answer.timings.total > 0


@pytest.mark.anyio
async def test_dropped_half_way() -> None:
    async with pipeline(ScriptedModel(lambda tokens: 97, step_seconds=0.001)) as (rag, _):
        async for event in rag.stream("beta?", params=SamplingParams(max_tokens=2000)):
            if isinstance(event, Delta):
                break
        gc.collect()
        await idle(rag.engine)
        assert rag.engine.statistics().num_finished.get("abort") == 1
        never_read = rag.stream("beta?")
        del never_read


@pytest.mark.anyio
async def test_closed_by_another_task() -> None:
    async with pipeline(ScriptedModel(lambda tokens: 97, step_seconds=0.01)) as (rag, embedder):
        ends: list[str] = []

        async def read(answer: AnswerStream) -> None:
            async for _ in answer:
                pass
            ends.append("stopped")

        # While it embeds, and while it decodes.
        for wait in (anyio.sleep_forever, None):
            embedder.on_query = wait
            answer = rag.stream("beta?", params=SamplingParams(max_tokens=2000))
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(read, answer)
                    if wait is None:
                        while not answer.sources:
                            await anyio.lowlevel.checkpoint()
                    else:
                        await anyio.wait_all_tasks_blocked()
                        with pytest.raises(RuntimeError, match="another task"):
                            await anext(answer)
                    await answer.aclose()
        assert ends == ["stopped", "stopped"]
        assert embedder.running == 0


@pytest.mark.anyio
async def test_errors_of_each_stage_propagate() -> None:
    async def fail() -> None:
        raise ValueError("embedding failed")

    class Broken:
        name = "broken"

        async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
            raise LookupError("retrieval failed")

    async with pipeline() as (rag, embedder):
        embedder.on_query = fail
        with pytest.raises(ValueError, match="embedding failed"):
            await rag.answer("beta?")
        embedder.on_query = None
        broken = RagPipeline(engine=rag.engine, index=Broken(), params=PARAMS)
        with pytest.raises(LookupError, match="retrieval failed"):
            await broken.answer("beta?")
        with pytest.raises(InvalidParamsError):
            await rag.answer("beta?", params=SamplingParams(allowed_token_ids=[10**9]))
        assert (await rag.answer("beta?")).text == REPLY


@pytest.mark.anyio
async def test_the_engine_fails() -> None:
    async with pipeline(ScriptedModel(REPLY, fail_at_step=3)) as (rag, _):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await rag.answer("beta?")
        assert isinstance(caught.value.__cause__, ScriptedFailure)


@pytest.mark.anyio
async def test_what_has_not_ended_has_no_timings() -> None:
    async with pipeline() as (rag, _), rag.stream("beta?") as answer:
        with pytest.raises(RuntimeError, match="not ended"):
            _ = answer.timings
        with pytest.raises(RuntimeError, match="no completion"):
            _ = answer.completion
        assert "not started" in repr(answer)


def test_timings_read_as_milliseconds() -> None:
    timings = RagTimings(0.024, 0.0012, 0.002, 0.0, 0.5, 1.25)
    assert str(timings) == (
        "embedding 24.0 ms, retrieval 1.2 ms, context 2.0 ms, queue 0.0 ms, "
        "prefill 500.0 ms, decode 1250.0 ms, total 1777.2 ms"
    )
