"""What is computed before a prompt is known: it helps, it never harms, and it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from ragserve.documents import Chunk
from ragserve.engine import (
    Engine,
    InvalidParamsError,
    QueueFullError,
    SamplingParams,
    SegmentReuse,
    TokenizedPrompt,
)
from ragserve.observability import PromptReuse
from ragserve.pipeline import Answer, RagPipeline
from ragserve.pipeline.prefill_ahead import Recent, beginning, beside, normalized
from ragserve.prompting import PromptTemplate
from ragserve.retrieval import ScoredChunk
from ragserve.testing import ScriptedModel

REPLY = "Yes."
BLOCK = 8
SYSTEM = "Answer from the documents, all of you."
CHUNKS = [Chunk(f"c{i}", "d", f"{name} is what this is about.") for i, name in enumerate("abc")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Kb:
    """Finds what it is told to, when it is told to."""

    name = "kb"

    def __init__(self) -> None:
        self.found: Sequence[Chunk] = CHUNKS
        self.before: Callable[[], Awaitable[object]] | None = None

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> list[ScoredChunk]:
        if self.before is not None:
            await self.before()
        found = [chunk for chunk in self.found if filter is None or filter(chunk)]
        return [ScoredChunk(chunk, 1.0) for chunk in found[:top_k]]


class StagedKb(Kb):
    """Has a first idea, and changes its mind or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Sequence[Chunk] = CHUNKS
        self.staged = 0

    async def retrieve_stages(
        self, query: Any, *, top_k: int, filter: Any = None
    ) -> AsyncIterator[list[ScoredChunk]]:
        self.staged += 1
        yield [ScoredChunk(chunk, 0.5) for chunk in self.first[:top_k]]
        yield await self.retrieve(query, top_k=top_k, filter=filter)


class Rig:
    """A pipeline on a scripted model, and how much it computed."""

    def __init__(self, rag: RagPipeline, kb: Kb, model: ScriptedModel) -> None:
        self.rag, self.kb, self.model = rag, kb, model
        self._before: dict[Any, int] = {}

    @property
    def engine(self) -> Engine:
        return self.rag.engine

    def length(self, *first: Chunk) -> int:
        """Tokens of a prompt's beginning: the system segment, then these documents."""
        built = self.rag.template.build(
            "", [ScoredChunk(chunk, 0.0) for chunk in first], self.engine.tokenizer
        )
        begun = beginning(built.tokenized, len(first))
        assert begun is not None
        return len(begun.token_ids)

    def computed(self) -> int:
        return self.engine.statistics().prompt_tokens

    async def until_computed(self, tokens: int) -> None:
        with anyio.fail_after(60):
            while self.computed() < tokens:
                await anyio.sleep(0.0005)

    def after_computing(self, tokens: int) -> Callable[[], Awaitable[None]]:
        """Wait until the engine has computed so many more than now."""
        goal = self.computed() + tokens
        return lambda: self.until_computed(goal)

    async def forget(self) -> None:
        await idle(self.engine)
        await self.engine.reset_prefix_cache()

    def outcome(self) -> str:
        """Of the one answer since the last call."""
        now = dict(self.rag.statistics().num_ahead)
        new = {name: count - self._before.get(name, 0) for name, count in now.items()}
        self._before = now
        (outcome,) = (name for name, count in new.items() if count)
        assert sum(new.values()) == 1
        return outcome


@asynccontextmanager
async def rig(
    model: ScriptedModel | None = None,
    kb: Kb | None = None,
    knobs: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    model, kb = model or ScriptedModel(REPLY), kb or Kb()
    async with Engine.open(model, block_size=BLOCK, **(knobs or {})) as engine:
        options = {"top_k": 2, "params": SamplingParams(max_tokens=16), **options}
        template = PromptTemplate(system=SYSTEM)
        rag = RagPipeline(engine=engine, index=kb, **{"template": template, **options})
        yield Rig(rag, kb, model)
        await idle(engine)
        assert not rag._prompts._under_way


async def idle(engine: Engine) -> None:
    with anyio.fail_after(60):
        while engine.statistics().num_running or engine.statistics().num_waiting:
            await anyio.lowlevel.checkpoint()
    if engine.health().ok:
        await engine.check_integrity()


def cached(answer: Answer) -> list[int]:
    return [segment.cached_tokens for segment in answer.reuse.segments]


# -- what is computed -------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_system_prompt_is_computed_while_documents_are_looked_for() -> None:
    async with rig() as r:
        system = r.length()
        r.kb.before = r.after_computing(system)
        answer = await r.rag.answer("a?")
        statistics = r.rag.statistics()
        assert r.outcome() == "used"
    assert answer.text == REPLY
    assert cached(answer)[0] == system
    assert cached(answer)[1:] == [0, 0, 0]
    assert statistics.ahead_computed_tokens == statistics.ahead_found_tokens == system
    async with rig(overlap=False) as r:
        plain = await r.rag.answer("a?")
        assert r.rag.statistics().num_ahead == {}
    assert plain.text == answer.text
    assert plain.usage.cached_tokens == 0
    assert plain.usage.prompt_tokens == answer.usage.prompt_tokens


@pytest.mark.anyio
async def test_the_first_document_too_if_the_question_was_asked_before() -> None:
    async with rig() as r:
        await r.rag.answer("Is it A or B?")
        await r.forget()
        begun = r.length(CHUNKS[0])
        r.kb.before = r.after_computing(begun)
        r.outcome()
        answer = await r.rag.answer("  is it a or\nB ")
        assert r.outcome() == "used"
    assert cached(answer)[:2] == [r.length(), begun - r.length()]
    assert cached(answer)[2:] == [0, 0]


@pytest.mark.anyio
async def test_another_namespace_has_asked_nothing() -> None:
    async with rig() as r:
        await r.rag.answer("a?", namespace="one")
        system = r.length()
        r.kb.before = r.after_computing(system)
        answer = await r.rag.answer("a?", namespace="two")
        await idle(r.engine)
    assert cached(answer)[1:] == [0, 0, 0]
    assert r.rag.statistics().ahead_computed_tokens <= 2 * system


@pytest.mark.anyio
async def test_a_document_that_may_not_be_found_is_not_guessed() -> None:
    async with rig() as r:
        await r.rag.answer("a?")
        await r.forget()
        r.outcome()
        r.kb.before = r.after_computing(r.length())
        answer = await r.rag.answer("a?", filter=lambda chunk: chunk.id != "c0")
        assert r.outcome() == "used"
    assert [source.chunk.id for source in answer.sources] == ["c1", "c2"]
    assert cached(answer)[0] == r.length()


@pytest.mark.anyio
async def test_nothing_is_computed_that_is_in_the_cache() -> None:
    async with rig() as r:
        await r.rag.answer("a?")
        r.outcome()
        computed = r.rag.statistics().ahead_computed_tokens
        for _ in range(3):
            plans = len(r.model.plans)
            answer = await r.rag.answer("a?")
            assert r.outcome() == "skipped"
            ids = {chunk[0] for plan in r.model.plans[plans:] for chunk in plan}
            assert ids == {answer.completion.request_id}
        assert r.rag.statistics().ahead_computed_tokens == computed


@pytest.mark.anyio
async def test_a_wrong_guess_changes_no_answer() -> None:
    async with rig() as r:
        await r.rag.answer("a?")
        await r.forget()
        r.outcome()
        r.kb.found = CHUNKS[::-1]
        r.kb.before = r.after_computing(r.length(CHUNKS[0]))
        answer = await r.rag.answer("a?")
        assert r.outcome() == "wrong"
        before = r.rag.statistics()
        # What was right of it is used all the same.
        assert cached(answer)[0] == r.length()
        assert cached(answer)[1] == 0
        assert answer.text == REPLY
        # And it has learnt.
        await r.forget()
        r.kb.before = r.after_computing(r.length(CHUNKS[2]))
        answer = await r.rag.answer("a?")
        assert r.outcome() == "used"
    assert before.ahead_computed_tokens - before.ahead_found_tokens >= r.length(CHUNKS[0]) - (
        r.length()
    )


@pytest.mark.anyio
async def test_what_was_reached_is_used_and_the_rest_computed_by_the_answer() -> None:
    model = ScriptedModel(REPLY, step_seconds=0.002)
    system = SYSTEM * 40
    async with rig(
        model, knobs={"max_num_batched_tokens": 64}, template=PromptTemplate(system=system)
    ) as r:
        whole = r.length()
        r.kb.before = r.after_computing(64)
        answer = await r.rag.answer("a?")
        statistics = r.rag.statistics()
        assert r.outcome() == "unfinished"
        await idle(r.engine)
        # Whatever was computed, was computed once.
        assert r.computed() == answer.usage.prompt_tokens
    assert 0 < statistics.ahead_found_tokens <= statistics.ahead_computed_tokens < whole
    assert answer.usage.cached_tokens == statistics.ahead_found_tokens
    assert [segment.miss for segment in answer.reuse.segments[:2]] == ["never_seen"] * 2
    assert answer.text == REPLY
    # The guess was ended before the answer was begun, and never ran beside it.
    began = next(
        index
        for index, plan in enumerate(model.plans)
        if any(chunk[0] == answer.completion.request_id for chunk in plan)
    )
    assert began > 0
    ids = {chunk[0] for plan in model.plans[began:] for chunk in plan}
    assert ids == {answer.completion.request_id}


@pytest.mark.anyio
async def test_many_answers_at_once_compute_it_once() -> None:
    async with rig() as r:
        r.kb.before = r.after_computing(r.length())
        answers: list[Answer] = []

        async def ask(number: int) -> None:
            answers.append(await r.rag.answer(f"{number}?"))

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(ask, number)
        statistics = r.rag.statistics()
    assert statistics.ahead_computed_tokens == r.length()
    assert statistics.num_ahead == {"used": 1, "skipped": 7}
    assert {cached(answer)[0] for answer in answers} == {r.length()}


# -- provisional results ----------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("final", ["same", "other"])
async def test_provisional_results_are_a_guess(final: str) -> None:
    kb = StagedKb()
    async with rig(kb=kb) as r:
        r.kb.found = CHUNKS if final == "same" else CHUNKS[1:]
        r.kb.before = r.after_computing(r.length(CHUNKS[0]))
        answer = await r.rag.answer("a?")
        ids = [source.chunk.id for source in answer.sources]
        if final == "same":
            assert r.outcome() == "used"
            assert ids == ["c0", "c1"]
            assert cached(answer)[:3] == [r.length(), r.length(CHUNKS[0]) - r.length(), 0]
        else:
            assert ids == ["c1", "c2"]
            assert cached(answer)[0] == r.length()
    assert kb.staged == 1
    assert answer.text == REPLY


@pytest.mark.anyio
async def test_provisional_results_are_not_asked_for_if_nothing_is_computed_ahead() -> None:
    kb = StagedKb()
    async with rig(kb=kb, overlap=False) as r:
        assert (await r.rag.answer("a?")).text == REPLY
    assert kb.staged == 0
    kb = StagedKb()
    async with rig(kb=kb, knobs={"enable_prefix_caching": False}) as r:
        assert (await r.rag.answer("a?")).text == REPLY
        assert r.rag.statistics().num_ahead == {}
    assert kb.staged == 0


# -- it never harms ---------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_guess_that_fails_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise QueueFullError("requests", 1, 1, 1.0)

    async with rig() as r:
        monkeypatch.setattr(r.engine, "prefill", refuse)
        assert (await r.rag.answer("a?")).text == REPLY
        assert r.outcome() == "skipped"
        # Nor is a template, or a filter, that only the guess has met.
        calls = 0

        def filter_(chunk: Chunk) -> bool:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise LookupError("not yet")
            return True

        async def until_guessed() -> None:
            with anyio.fail_after(60):
                while not calls:
                    await anyio.sleep(0.0005)

        r.kb.before = until_guessed
        assert (await r.rag.answer("a?", filter=filter_)).text == REPLY
        assert calls == 1 + len(CHUNKS)


@pytest.mark.anyio
async def test_an_answer_is_not_refused_for_its_own_guess() -> None:
    # A step takes longer than all that comes before the answer's own request.
    model = ScriptedModel("x" * 4000, step_seconds=0.1, max_model_len=8000)
    knobs = {"max_num_seqs": 1, "max_queued_requests": 1}
    async with rig(model, knobs=knobs, params=SamplingParams(max_tokens=1)) as r:
        r.kb.before = lambda: anyio.sleep(0.02)
        async with r.engine.stream([1, 2, 3], SamplingParams(max_tokens=4000)) as running:
            await anext(running)
            async with r.rag.stream("a?") as answer:
                await anext(answer)  # queued
                await running.aclose()
                async for _ in answer:
                    pass
        assert answer.completion.text == "x"
        await idle(r.engine)


@pytest.mark.anyio
async def test_a_guess_that_the_engine_has_no_time_for_is_no_refusal() -> None:
    model = ScriptedModel("x" * 4000, step_seconds=0.001, max_model_len=8000)
    async with rig(model, knobs={"max_num_seqs": 1}, params=SamplingParams(max_tokens=1)) as r:
        r.kb.before = lambda: anyio.sleep(0.02)
        async with r.engine.stream([1, 2, 3], SamplingParams(max_tokens=4000)) as running:
            await anext(running)
            async with (
                r.engine.stream([4, 5], SamplingParams(max_tokens=1)),
                r.rag.stream("a?") as a,
            ):
                await anext(a)
                await running.aclose()
                async for _ in a:
                    pass
        assert a.completion.text == "x"
        assert r.outcome() == "skipped"
        assert r.engine.statistics().num_rejected == {}


@pytest.mark.anyio
@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_cancelled_answer_takes_its_guess_along(when: str) -> None:
    gone: list[bool] = []

    async def wait() -> None:
        if when == "during":
            await r.until_computed(16)
        gone.append(True)
        await anyio.sleep_forever()

    model = ScriptedModel(REPLY, step_seconds=0.001)
    template = PromptTemplate(system=SYSTEM * 80)
    knobs = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with rig(model, knobs=knobs, template=template) as r:
        r.kb.before = wait
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(r.rag.answer, "a?")
                while not gone:
                    await anyio.sleep(0.0005)
                scope.cancel()
        await idle(r.engine)
        assert r.computed() < r.length()
        assert r.rag.statistics().num_answers["cancelled"] == 1
        r.kb.before = None
        assert (await r.rag.answer("a?")).text == REPLY


@pytest.mark.anyio
async def test_errors_come_as_they_are() -> None:
    async with rig() as r:
        error = ValueError("nothing was found")

        async def fail() -> None:
            await r.until_computed(1)
            raise error

        r.kb.before = fail
        with pytest.raises(ValueError, match="nothing was found") as caught:
            await r.rag.answer("a?")
        assert caught.value is error
        await idle(r.engine)
        r.kb.before = None
        with pytest.raises(InvalidParamsError):
            await r.rag.answer("a?", params=SamplingParams(allowed_token_ids=[10**9]))
        assert (await r.rag.answer("a?")).text == REPLY


@pytest.mark.anyio
async def test_work_beside_other_work() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")

    async def work() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    async def interrupted() -> int:
        raise KeyboardInterrupt

    assert await beside(work, other) == 7
    with pytest.raises(KeyboardInterrupt):
        await beside(interrupted, other)
    assert ended[0] == "cancelled"


# -- warm and pin -----------------------------------------------------------------------


@pytest.mark.anyio
async def test_warm_documents_are_there_when_they_come_first() -> None:
    async with rig(overlap=False) as r:
        system = r.length()
        firsts = [r.length(chunk) - system for chunk in CHUNKS]
        assert await r.rag.warm() >= system - 1
        assert await r.rag.warm(CHUNKS[:2]) <= sum(firsts[:2]) + 2
        answer = await r.rag.answer("a?")
        assert cached(answer) == [system, firsts[0], 0, 0]
        r.kb.found = CHUNKS[1:]
        answer = await r.rag.answer("b?")
        assert cached(answer) == [system, firsts[1], 0, 0]
        other = await r.rag.answer("b?", namespace="other")
        assert cached(other) == [0, 0, 0, 0]


@pytest.mark.anyio
async def test_the_most_popular_documents_can_be_warmed() -> None:
    async with rig(overlap=False, top_k=1) as r:
        for times, chunk in enumerate(CHUNKS, 1):
            r.kb.found = [chunk]
            for _ in range(times):
                await r.rag.answer("a?")
        await r.forget()
        await r.rag.warm(top=2)
        for chunk, hit in zip(CHUNKS, (False, True, True), strict=True):
            r.kb.found = [chunk]
            answer = await r.rag.answer("b?")
            assert (cached(answer)[1] > 0) == hit
        for top in (0, -1, True, "2"):
            with pytest.raises(InvalidParamsError, match="top"):
                await r.rag.warm(top=top)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_pinned_system_prompt_outlives_all_others() -> None:
    model = ScriptedModel(REPLY, num_blocks=64)
    async with rig(model, overlap=False) as r:
        pin = await r.rag.pin_system()
        for number in range(30):
            await r.engine.generate([number] * 60, SamplingParams(max_tokens=1))
        answer = await r.rag.answer("a?")
        assert cached(answer)[0] == r.length()
        pin.release()
        pin.release()
    async with rig(template=PromptTemplate(system="", plain_answer="")) as r:
        r.rag.template = _Bare()
        with pytest.raises(InvalidParamsError, match="system"):
            await r.rag.pin_system()


class _Bare(PromptTemplate):
    """Has no system segment."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        built = super().build(*args, **kwargs)
        object.__setattr__(built, "tokenized", TokenizedPrompt([1], (1,), kinds=("question",)))
        return built


# -- the parts --------------------------------------------------------------------------


def test_the_beginning_of_a_prompt() -> None:
    kinds: Any = ("system", "document", "document", "question")
    prompt = TokenizedPrompt(
        list(range(10)), (2, 3, 4, 1), (None,) * 4, kinds, (None, 1.0, 2.0, None)
    )
    expected = TokenizedPrompt([0, 1], (2,), (None,), ("system",), (None,))
    assert beginning(prompt, 0) == expected
    assert beginning(prompt, 1) == TokenizedPrompt(
        [0, 1, 2, 3, 4], (2, 3), (None, None), ("system", "document"), (None, 1.0)
    )
    assert beginning(prompt, 9) == beginning(prompt, 2)
    assert beginning(TokenizedPrompt([1, 2], (2,), kinds=("question",)), 1) is None
    assert beginning(TokenizedPrompt.of([1, 2]), 1) is None


def test_questions_that_are_the_same() -> None:
    assert normalized("  Why IS\tthe sky blue?! ") == normalized("why is the sky blue")
    assert normalized("why is the sea blue") != normalized("why is the sky blue")
    assert normalized("為什麼？") == normalized("為什麼?")
    assert normalized("?") == ""


def test_what_is_remembered_is_bounded_and_apart() -> None:
    recent: Recent[Chunk] = Recent(2)
    recent.note("n", "a", CHUNKS[0])
    recent.note("n", "b", CHUNKS[1])
    recent.note("n", "a", CHUNKS[2])
    assert recent.get("n", "a") is CHUNKS[2]
    assert recent.get("", "na") is None
    recent.note("m", "a", CHUNKS[0])  # b was noted longest ago
    assert len(recent) == 2
    assert recent.get("n", "b") is None
    assert recent.get("n", "a") is CHUNKS[2]


# -- what is said of it -----------------------------------------------------------------


def test_reuse_reads_as_a_line_and_as_a_table() -> None:
    reuse = PromptReuse(
        (
            SegmentReuse("system", 120, 120, "device"),
            SegmentReuse("document", 96, 96, "host"),
            SegmentReuse("document", 96, 0, None, "other_order"),
            SegmentReuse("question", 88, 8, "device", "never_seen"),
        ),
        ("git#1", "git#7"),
    )
    assert (reuse.tokens, reuse.cached_tokens) == (400, 224)
    assert reuse.ratio == pytest.approx(0.56)
    assert reuse.misses == {"other_order": 96, "never_seen": 80}
    assert str(reuse) == (
        "224 of 400 prompt tokens reused: system 120/120, [1] 96/96 (host), "
        "[2] 0/96 (other_order), question 8/88 (never_seen)"
    )
    assert reuse.table().splitlines() == [
        "segment    tokens  reused  from    why not more",
        "system        120     120  device",
        "[1] git#1      96      96  host",
        "[2] git#7      96       0          sent before, but behind other text",
        "question       88       8  device  not sent before",
        "all           400     224  56%",
    ]


def test_reuse_without_numbers_if_a_document_has_no_segment() -> None:
    reuse = PromptReuse((SegmentReuse("document", 4, 0, None, "evicted"),), ("a", "b"))
    assert str(reuse) == "0 of 4 prompt tokens reused: document 0/4 (evicted)"
    assert "a" not in reuse.table().splitlines()[1].split()
    nothing = PromptReuse(())
    assert "not started" in str(nothing)
    assert (nothing.ratio, nothing.misses) == (0.0, {})
    assert nothing.table()


@pytest.mark.anyio
async def test_every_answer_says_what_was_reused_and_in_which_order() -> None:
    template = PromptTemplate(system=SYSTEM, order="canonical")
    async with rig(template=template, overlap=False) as r:
        first = await r.rag.answer("a?")
        r.kb.found = [CHUNKS[1], CHUNKS[0]]
        async with r.rag.stream("other?") as stream:
            events = [event async for event in stream]
        done: Any = events[-1]
        retrieved: Any = events[0]
    assert first.order == retrieved.order == stream.order == "canonical"
    # Numbers are places in the prompt; ranks are those of the retriever.
    assert [(s.number, s.chunk.id, s.rank) for s in retrieved.sources] == [
        (1, "c0", 2),
        (2, "c1", 1),
    ]
    assert done.reuse == stream.reuse
    assert done.reuse.cached_tokens == done.completion.usage.cached_tokens
    assert done.reuse.tokens == done.completion.usage.prompt_tokens
    kinds = [segment.kind for segment in done.reuse.segments]
    assert kinds == ["system", "document", "document", "question"]
    assert all(s.cached_tokens == s.tokens for s in done.reuse.segments[:3])
    assert "[2] c1" in done.reuse.table()
