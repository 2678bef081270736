"""What a pipeline is given is checked before any work, what waits is bounded, and what is cancelled
leaves nothing behind, in whatever stage it is."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from ragserve.documents import Chunk
from ragserve.engine import (
    Engine,
    EngineClosedError,
    EventLoopError,
    InvalidParamsError,
    QueueFullError,
    RequestLimits,
    SamplingParams,
)
from ragserve.pipeline import RagPipeline
from ragserve.prompting import PromptTemplate
from ragserve.retrieval import EmbeddingError, FaissIndex, ScoredChunk
from ragserve.testing import ScriptedModel

REPLY = "The answer."
CHUNKS = [Chunk(f"c{i}", "d", f"document {i} " * 8, i) for i in range(3)]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Kb:
    """A retriever and its embedder. Either can be made to wait, and gives what it is told to."""

    name = "kb"
    model_name = "ones"
    dimension: int | None = 2

    def __init__(self) -> None:
        self.embedder = self
        self.on_embedding: Callable[[], Awaitable[object]] | None = None
        self.on_retrieval: Callable[[], Awaitable[object]] | None = None
        self.vectors: Any = np.ones((1, 2), np.float32)
        self.found: Sequence[Chunk] = CHUNKS
        self.embedded = 0

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        self.embedded += 1
        if self.on_embedding is not None:
            await self.on_embedding()
        return self.vectors

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
        if self.on_retrieval is not None:
            await self.on_retrieval()
        return [ScoredChunk(chunk, 1.0) for chunk in self.found[:top_k]]


@asynccontextmanager
async def pipeline(
    model: ScriptedModel | None = None, knobs: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[RagPipeline, Kb]]:
    kb = Kb()
    async with Engine.open(model or ScriptedModel(REPLY), **(knobs or {})) as engine:
        options = {"top_k": 2, "params": SamplingParams(max_tokens=64), **options}
        rag = RagPipeline(engine=engine, index=kb, **options)
        yield rag, kb
        if engine.health().ok:
            await nothing_left(rag)


async def nothing_left(rag: RagPipeline) -> None:
    """Wait until the engine has nothing to do; then nothing is held anywhere."""
    engine = rag.engine
    with anyio.fail_after(60):
        while True:
            statistics = engine.statistics()
            # Blocks are in use until they are on the disk, too.
            busy = statistics.num_running or statistics.num_waiting or statistics.blocks_used
            if not busy:
                break
            await anyio.sleep(0.001)
    await engine.check_integrity()
    assert rag._places.num_taken == 0
    assert not rag._prompts._under_way


# -- what it is given -------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_pipeline_is_made_of_an_open_engine_and_a_retriever(tmp_path: Path) -> None:
    kb = Kb()
    opening = Engine.open(ScriptedModel(REPLY))
    for engine, fix in (
        (None, "async with Engine.open"),
        (Engine, "async with Engine.open"),
        ("model", "async with Engine.open"),
        (opening, "not open"),
    ):
        with pytest.raises(InvalidParamsError, match=fix):
            RagPipeline(engine=engine, index=kb)  # type: ignore[arg-type]
    async with opening as engine:
        forgotten = FaissIndex.open(tmp_path, embedder=kb)
        for index, fix in (
            (None, "FaissIndex"),
            ("kb", "FaissIndex"),
            (FaissIndex, "not the class"),
            (forgotten, "write `await`"),
            (object(), "no retrieve"),
        ):
            with pytest.raises(InvalidParamsError, match=fix):
                RagPipeline(engine=engine, index=index)  # type: ignore[arg-type]
        forgotten.close()
        bad: list[tuple[dict[str, Any], str]] = [
            ({"embedder": "all-MiniLM-L6-v2"}, "SentenceTransformerEmbedder"),
            ({"template": "{question}"}, "PromptTemplate"),
            ({"params": {}}, "SamplingParams"),
            ({"params": {"max_tokens": 3}}, "SamplingParams"),
            ({"top_k": 2.0}, "from 1 to 256"),
            ({"top_k": True}, "from 1 to 256"),
            ({"top_k": 0}, "from 1 to 256"),
            ({"top_k": 10**9}, "max_documents"),
            ({"name": None}, "name"),
            ({"namespace": None}, "namespace"),
            ({"namespace": "n" * 257}, "max_name_characters"),
        ]
        for options, fix in bad:
            with pytest.raises(InvalidParamsError, match=fix):
                RagPipeline(engine=engine, index=kb, **options)


@pytest.mark.anyio
async def test_a_question_and_its_options_are_checked_before_any_work() -> None:
    limits = RequestLimits(max_prompt_characters=1000, max_documents=5)
    async with pipeline(knobs={"limits": limits}) as (rag, kb):
        bad: list[tuple[Any, dict[str, Any], str]] = [
            (None, {}, "a string"),
            (b"secret?", {}, "a string"),
            ("", {}, "not blank"),
            (" \n\t", {}, "not blank"),
            ("secret \ud83d?", {}, "character 7"),
            ("secret " * 200, {}, "1400 characters.*max_prompt_characters"),
            ("secret?", {"top_k": 6}, "from 1 to 5"),
            ("secret?", {"top_k": 2.0}, "from 1 to 5"),
            ("secret?", {"top_k": True}, "from 1 to 5"),
            ("secret?", {"filter": {"year": 2024}}, "a function of a chunk"),
            ("secret?", {"params": {}}, "SamplingParams"),
            ("secret?", {"params": SamplingParams(allowed_token_ids=[10**9])}, "allowed_token_ids"),
            ("secret?", {"priority": 1.5}, "priority"),
            ("secret?", {"namespace": 5}, "namespace"),
            ("secret?", {"namespace": "n" * 257}, "max_name_characters"),
        ]
        for question, options, fix in bad:
            with pytest.raises(InvalidParamsError, match=fix) as caught:
                rag.stream(question, **options)
            assert "secret" not in str(caught.value)
            with pytest.raises(InvalidParamsError, match=fix):
                await rag.answer(question, **options)
        assert kb.embedded == 0
        assert rag.statistics().num_answers == {"ok": 0, "cancelled": 0}
        for options in ({"chunks": "x"}, {"chunks": CHUNKS[0]}, {"chunks": ["x"]}, {"top": 0}):
            with pytest.raises(InvalidParamsError):
                await rag.warm(**options)  # type: ignore[arg-type]
        with pytest.raises(InvalidParamsError, match="namespace"):
            await rag.pin_system("n" * 257)


@pytest.mark.anyio
async def test_what_stages_give_is_checked() -> None:
    limits = RequestLimits(max_documents=3)
    async with pipeline(knobs={"limits": limits}) as (rag, kb):
        for vectors in (None, [1.0, 2.0], [[1.0], [2.0]], [[float("nan"), 1.0]], [["x"]]):
            kb.vectors = vectors
            with pytest.raises(EmbeddingError, match="ones gave"):
                await rag.answer("a?")
        kb.vectors = [[1.0, 2.0]]

        class Many(Kb):
            async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
                return [ScoredChunk(CHUNKS[0], 1.0)] * 4

        with pytest.raises(InvalidParamsError, match=r"4 documents.*max_documents"):
            await RagPipeline(engine=rag.engine, index=Many(), top_k=1).answer("a?")
        assert (await rag.answer("a?")).text == REPLY


# -- what waits -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_answers_that_are_being_prepared_are_bounded() -> None:
    knobs = {"max_num_seqs": 4, "max_queued_requests": 4}
    async with pipeline(knobs=knobs) as (rag, kb):
        kb.on_embedding = anyio.sleep_forever
        refused: list[QueueFullError] = []

        async def ask() -> None:
            try:
                await rag.answer("a?")
            except QueueFullError as error:
                refused.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(3000):
                group.start_soon(ask)
            with anyio.fail_after(60):
                while len(refused) < 3000 - 8:
                    await anyio.sleep(0.001)
            assert kb.embedded == rag._places.num_taken == 8
            group.cancel_scope.cancel()
        assert len(refused) == 3000 - 8
        assert {(error.queued, error.limit) for error in refused} == {(8, 8)}
        assert "max_queued_requests" in str(refused[0])
        kb.on_embedding = None
        assert (await rag.answer("a?")).text == REPLY


class Held:
    """Holds the engine's thread before each step, until it is told to go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, plan: object) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


@pytest.mark.anyio
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "stage", ["embedding", "retrieval", "context", "queue", "prefill", "decode"]
)
async def test_cancelled_in_each_stage(
    stage: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, building, build_on = Held(), threading.Event(), threading.Event()
    on_step = held if stage == "prefill" else None
    model = ScriptedModel(lambda tokens: 97, on_step=on_step, step_seconds=0.001)
    knobs = {"max_num_seqs": 1} if stage == "queue" else {}
    params = SamplingParams(max_tokens=1000)
    async with pipeline(model, knobs, overlap=overlap, params=params) as (rag, kb):
        build = PromptTemplate.build

        def slow(self: PromptTemplate, question: str, *args: Any, **options: Any) -> Any:
            if question:  # and not a guess, which has none
                building.set()
                assert build_on.wait(60)
            return build(self, question, *args, **options)

        async def wait_for(event: threading.Event) -> None:
            await anyio.to_thread.run_sync(event.wait, 60)

        entered = anyio.Event()

        async def wait() -> None:
            entered.set()
            await anyio.sleep_forever()

        async def ask() -> None:
            async with rag.stream("a?") as answer:
                async for _ in answer:
                    if answer.sources:
                        entered.set()
            raise AssertionError("it was to be cancelled")

        async with anyio.create_task_group() as group:
            first = rag.engine.stream("first", params)
            if stage == "queue":
                await anext(first)
            elif stage == "embedding":
                kb.on_embedding = wait
            elif stage == "retrieval":
                kb.on_retrieval = wait
            elif stage == "context":
                monkeypatch.setattr(PromptTemplate, "build", slow)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as asking:
                    asking.start_soon(ask)
                    if stage == "context":
                        await wait_for(building)
                    elif stage == "prefill":
                        await wait_for(held.reached)
                    else:
                        await entered.wait()
                    if stage == "decode":
                        while not rag.engine.statistics().generated_tokens:
                            await anyio.sleep(0.001)
                    asking.cancel_scope.cancel()
            assert rag._places.num_taken == 0
            for event in (held.go_on, build_on):
                event.set()
            await first.aclose()
            await nothing_left(rag)
            group.cancel_scope.cancel()
        assert rag.statistics().num_answers == {"ok": 0, "cancelled": 1}
        kb.on_embedding = kb.on_retrieval = None
        answer = await rag.answer("a?", params=SamplingParams(max_tokens=2))
        assert answer.text == "aa"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cancelled_while_a_guess_comes_from_the_disk(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    knobs = {"dtype": "float32", "disk_cache": tmp_path / "kv", "kv_cache_bytes": 1 << 21}
    template = PromptTemplate(system="Answer from the documents. " * 20)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    kb = Kb()
    async with Engine.open(tiny_model(), **knobs) as engine:
        rag = RagPipeline(engine=engine, index=kb, template=template, params=params)
        text = (await rag.answer("a?")).text
        await rag.warm(CHUNKS)
        await nothing_left(rag)
    async with Engine.open(tiny_model(), **knobs) as engine:
        rag = RagPipeline(engine=engine, index=kb, template=template, params=params)
        for turns in (0, 1, 3, 10, 30, 100):
            entered = anyio.Event()

            async def wait(entered: anyio.Event = entered) -> None:
                entered.set()
                await anyio.sleep_forever()

            kb.on_retrieval = wait
            async with anyio.create_task_group() as group:
                group.start_soon(rag.answer, "a?")
                await entered.wait()
                for _ in range(turns):
                    await anyio.sleep(0.0005)
                group.cancel_scope.cancel()
            await nothing_left(rag)
        kb.on_retrieval = None
        assert (await rag.answer("a?")).text == text
        await nothing_left(rag)


# -- nothing waits for ever -------------------------------------------------------------


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_read_in_another_event_loop_it_says_so(closed: bool) -> None:
    """The first loop is closed, or the second runs beside it in another thread."""
    model = ScriptedModel(lambda tokens: 97, step_seconds=0.001)
    engine = asyncio.run(_opened(model))
    rag = RagPipeline(engine=engine, index=Kb(), params=SamplingParams(max_tokens=2000))
    answer = rag.stream("a?")

    async def read() -> object:
        return await asyncio.wait_for(anext(answer), 60)

    async def read_here_and_there() -> None:
        await read()
        with pytest.raises(EventLoopError, match="rag"):
            await asyncio.to_thread(asyncio.run, read())

    if closed:
        asyncio.run(read())
        with pytest.raises(EventLoopError, match="rag"):
            asyncio.run(read())
    else:
        asyncio.run(read_here_and_there())
    assert asyncio.run(_next_or_none(answer)) is None
    asyncio.run(nothing_left(rag))
    asyncio.run(engine.aclose())


async def _opened(model: ScriptedModel) -> Engine:
    return await Engine.open(model)


async def _next_or_none(answer: Any) -> object:
    return await anext(answer, None)


@pytest.mark.anyio
async def test_a_closed_engine_is_told_before_anything_is_embedded() -> None:
    async with pipeline() as (rag, kb):
        answer = rag.stream("a?")
        await rag.engine.aclose()
        with anyio.fail_after(60):
            for call in (
                lambda: anext(answer),
                lambda: rag.answer("a?"),
                lambda: rag.warm(CHUNKS),
                rag.pin_system,
            ):
                with pytest.raises(EngineClosedError):
                    await call()
        assert kb.embedded == 0


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["on_embedding", "on_retrieval", None])
async def test_the_engine_is_closed_while_an_answer_is_made(stage: str | None) -> None:
    model = ScriptedModel(lambda tokens: 97, step_seconds=0.001)
    async with pipeline(model, params=SamplingParams(max_tokens=2000)) as (rag, kb):

        async def close() -> None:
            await rag.engine.aclose(drain=False)

        if stage is not None:
            setattr(kb, stage, close)

        async def read() -> None:
            async for _ in rag.stream("a?"):
                if stage is None:
                    await close()

        with anyio.fail_after(60), pytest.raises(EngineClosedError):
            await read()
        assert rag._places.num_taken == 0


# -- what others may read ---------------------------------------------------------------


@pytest.mark.anyio
async def test_logs_hold_nothing_of_what_was_asked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = PromptTemplate.build

    def failing(self: PromptTemplate, question: str, *args: Any, **options: Any) -> Any:
        if not question:  # a guess
            raise ValueError("secret question, secret document")
        return build(self, question, *args, **options)

    caplog.set_level(logging.DEBUG, "ragserve")
    async with pipeline() as (rag, kb):
        monkeypatch.setattr(PromptTemplate, "build", failing)

        async def wait() -> None:
            while not caplog.records:
                await anyio.sleep(0.001)

        kb.on_retrieval = wait
        with anyio.fail_after(60):
            assert (await rag.answer("secret?")).text == REPLY
        del rag
        gc.collect()
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
