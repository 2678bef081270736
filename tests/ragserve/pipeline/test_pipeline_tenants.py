"""What one tenant is told does not depend on what another one asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ragserve.documents import Chunk
from ragserve.engine import Engine, SamplingParams
from ragserve.pipeline import Done, RagPipeline, Retrieved
from ragserve.prompting import ORDERS, DocumentOrder, PromptTemplate
from ragserve.retrieval import ScoredChunk
from ragserve.testing import ScriptedModel

BLOCK = 8
SYSTEM = "Answer from the documents, all of you."
CHUNKS = [Chunk(f"c{i}", "d", f"{name} is what this is about.") for i, name in enumerate("abcd")]
QUESTION = "Which of them is it?"

History = Sequence[tuple[str, Sequence[int]]]
"""(question, indices of the chunks that are found for it), one after the other."""

HISTORIES: dict[str, History] = {
    "nothing": (),
    "the same question": ((QUESTION, (2, 3)),) * 5,
    "the same documents": (("Another?", (3, 2)),) * 5,
    "one of the documents": (("Another?", (3,)),) * 5,
    "something else": (("Another?", (0, 1)),) * 5,
    "much else": [(f"Another {i}?", (i % 4, (i + 1) % 4)) for i in range(20)],
}
UNTOLD = ("gen_ai.response.id", "time")
"""What differs between any two answers, in names of attributes."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Kb:
    name = "kb"

    def __init__(self) -> None:
        self.found: Sequence[int] = ()
        self.before: Callable[[], Awaitable[object]] | None = None

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> list[ScoredChunk]:
        if self.before is not None:
            await self.before()
        return [ScoredChunk(CHUNKS[row], 1.0 - row / 10) for row in self.found]


async def idle(engine: Engine) -> None:
    with anyio.fail_after(60):
        while engine.statistics().num_running or engine.statistics().num_waiting:
            await anyio.sleep(0.0005)


async def told(history: History, order: DocumentOrder, *, overlap: bool) -> list[Any]:
    """What tenant B is told by two answers, and by warming, after tenant A's history."""
    exporter, provider, kb = InMemorySpanExporter(), TracerProvider(), Kb()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    model = ScriptedModel("Yes.", num_blocks=4096)
    async with Engine.open(model, block_size=BLOCK) as engine:
        rag = RagPipeline(
            engine=engine,
            index=kb,
            template=PromptTemplate(system=SYSTEM, order=order),
            params=SamplingParams(temperature=0.0, max_tokens=8, seed=1),
            tracer_provider=provider,
            overlap=overlap,
        )
        for question, kb.found in history:
            await rag.answer(question, namespace="A")
        await idle(engine)
        exporter.clear()

        seen: list[Any] = []
        guessed: list[int] = []
        for kb.found in ((2, 3), (3, 2)):
            before = engine.statistics().prompt_tokens

            async def while_retrieving(before: int = before) -> None:
                if overlap and not guessed:
                    # Whatever is guessed is computed before the documents are known.
                    with anyio.fail_after(60):
                        while engine.statistics().prompt_tokens == before:
                            await anyio.sleep(0.0005)
                    await idle(engine)
                    guessed.append(engine.statistics().prompt_tokens - before)

            kb.before = while_retrieving
            async with rag.stream(QUESTION, namespace="B") as answer:
                async for event in answer:
                    if isinstance(event, Done):
                        seen += [event.completion.usage, event.completion.text, event.reuse]
                        seen += [answer.order, str(event.reuse), event.reuse.table()]
                    elif isinstance(event, Retrieved):
                        seen.append(event)
            kb.before = None
            await idle(engine)
        seen.append(guessed)
        seen.append(await rag.warm(top=3, namespace="B"))
        seen.append(await rag.warm(namespace="B"))
        for span in exporter.get_finished_spans():
            attributes = {
                name: value
                for name, value in (span.attributes or {}).items()
                if not any(part in name for part in UNTOLD)
            }
            seen.append((span.name, span.status.status_code, attributes))
    return seen


@pytest.mark.anyio
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("order", ORDERS)
async def test_nothing_that_a_tenant_is_told_depends_on_what_another_asked(
    order: DocumentOrder, overlap: bool
) -> None:
    alone = await told(HISTORIES["nothing"], order, overlap=overlap)
    for name, history in HISTORIES.items():
        assert await told(history, order, overlap=overlap) == alone, name


@pytest.mark.anyio
async def test_a_tenants_own_history_does_count() -> None:
    """Or the test above would show nothing."""
    async with Engine.open(ScriptedModel("Yes."), block_size=BLOCK) as engine:
        kb = Kb()
        template = PromptTemplate(system=SYSTEM, order="canonical")
        rag = RagPipeline(engine=engine, index=kb, template=template, overlap=False)
        for kb.found in ((3,), (3,), (2, 3)):
            answer = await rag.answer(QUESTION, namespace="B")
        assert [source.chunk.id for source in answer.sources] == ["c3", "c2"]
        answer = await rag.answer(QUESTION, namespace="C")
        assert [source.chunk.id for source in answer.sources] == ["c2", "c3"]
