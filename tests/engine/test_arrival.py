"""From a call to a queued request: places, turns, limits, and what is given back on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest

import ragserve.engine.text.tokenizer as text_module
from ragserve import (
    LLM,
    Engine,
    EngineClosedError,
    EventLoopError,
    InvalidParamsError,
    Prompt,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RequestLimits,
    SamplingParams,
    Segment,
)
from ragserve.engine import (
    EngineConfig,
    EngineCore,
    Request,
    StepPlan,
    Stream,
    TokenizedPrompt,
)
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.runtime.encoders import Encoders
from ragserve.engine.text.stop_strings import StopStrings
from ragserve.testing import ScriptedModel

pytestmark = pytest.mark.anyio

ONE = SamplingParams(max_tokens=1)
NO_TOKENIZER_FREE: dict[str, Any] = {"num_tokenizers": 1}


class HeldIds(Sequence[int]):
    """Token ids that hold the tokenizer's thread until they are released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._release = threading.Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        self.entered.set()
        assert self._release.wait(60)
        return [65, 66][index]

    async def hold(self) -> None:
        assert await anyio.to_thread.run_sync(self.entered.wait, 60)

    def release(self) -> None:
        self._release.set()


class Untouchable(Sequence[int]):
    """A billion token ids, none of which may be looked at."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(f"item {index} was looked at")


@pytest.fixture
def held() -> Iterator[HeldIds]:
    ids = HeldIds()
    yield ids
    ids.release()


async def ask(engine: Engine, prompt: Any, outcomes: list[Any]) -> None:
    try:
        outcomes.append((await engine.generate(prompt, ONE)).text)
    except Exception as error:
        outcomes.append(error)


async def check_idle(engine: Engine) -> None:
    await engine.check_integrity()
    statistics = engine.statistics()
    assert statistics.num_running == statistics.num_waiting == statistics.blocks_used == 0


# -- a place in the queue ---------------------------------------------------------------------


async def test_the_queue_is_full_before_anything_is_encoded(held: HeldIds) -> None:
    outcomes: list[Any] = []
    async with Engine.open(
        ScriptedModel("x"), max_queued_requests=4, **NO_TOKENIZER_FREE
    ) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, held, outcomes)
            await held.hold()
            for _ in range(200):
                tasks.start_soon(ask, engine, "a prompt", outcomes)
            # Refused while the only tokenizer is held: nobody waits to be told so.
            while len(outcomes) < 197:
                await anyio.lowlevel.checkpoint()
            assert {type(outcome) for outcome in outcomes} == {QueueFullError}
            assert engine.statistics().num_waiting == 4
            held.release()
        assert outcomes[197:] == ["x"] * 4
        assert engine.statistics().num_rejected == {"QueueFullError": 197}
        await check_idle(engine)


async def test_tokenizing_takes_a_place_too(held: HeldIds) -> None:
    async with Engine.open(
        ScriptedModel("x"), max_queued_requests=1, **NO_TOKENIZER_FREE
    ) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.tokenize, held)
            await held.hold()
            with pytest.raises(QueueFullError, match="max_queued_requests"):
                await engine.tokenize("a")
            with pytest.raises(QueueFullError):
                await engine.generate("a")
            held.release()
        assert (await engine.tokenize("a")).token_ids == [97]


async def test_warming_takes_no_more_places_than_there_are() -> None:
    async with Engine.open(ScriptedModel("x"), max_queued_requests=1) as engine:
        prompts = [[number] * 20 for number in range(6)]
        assert await engine.warm(prompts) == 6 * 20
        await check_idle(engine)


async def test_waiting_for_the_tokenizer_has_the_queues_time_limit(held: HeldIds) -> None:
    async with Engine.open(
        ScriptedModel("x"), queue_timeout=0.1, max_queued_requests=2, **NO_TOKENIZER_FREE
    ) as engine:
        outcomes: list[Any] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, held, outcomes)
            await held.hold()
            with pytest.raises(QueueTimeoutError, match=r"queue_timeout is 0\.10 s") as caught:
                await engine.generate("b")
            assert caught.value.waited >= 0.1
        # The one that is being encoded was not started either.
        assert [type(outcome) for outcome in outcomes] == [QueueTimeoutError]
        await check_idle(engine)
        assert engine._preparation.encoders.num_waiting == 0
        assert engine.statistics().num_rejected == {"QueueTimeoutError": 2}


def test_the_time_limit_counts_from_the_arrival() -> None:
    config = EngineConfig(queue_timeout=30.0)
    model = ScriptedModel("x")
    model.load(config)
    core = EngineCore(config, BlockPool(16), model)
    late, fresh = (
        Request(name, TokenizedPrompt.of([65]), ONE, block_size=config.block_size, max_tokens=1)
        for name in ("late", "fresh")
    )
    late.timeline.arrived = time.monotonic_ns() - 31 * 10**9
    fresh.timeline.arrived = time.monotonic_ns()
    for request in (late, fresh):
        core.add(request)
    assert core.next_expiry() == 0.0
    (update,) = core.expire()
    assert update.request is late
    assert isinstance(update.error, QueueTimeoutError)
    assert update.error.waited > 31


async def leave_by_cancel(stream: Stream, scope: anyio.CancelScope) -> None:
    scope.cancel()


async def leave_by_close(stream: Stream, scope: anyio.CancelScope) -> None:
    await stream.aclose()


@pytest.mark.parametrize("leave", [leave_by_cancel, leave_by_close])
async def test_who_leaves_gives_up_place_and_turn_at_once(
    held: HeldIds, leave: Callable[[Stream, anyio.CancelScope], Any]
) -> None:
    never = HeldIds()
    async with Engine.open(
        ScriptedModel("x"), max_queued_requests=2, **NO_TOKENIZER_FREE
    ) as engine:
        outcomes: list[Any] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, held, outcomes)
            await held.hold()
            stream = engine.stream(never, ONE)
            left = anyio.Event()

            async def enter() -> None:
                with scope:
                    async with stream:
                        pass
                left.set()

            scope = anyio.CancelScope()
            tasks.start_soon(enter)
            encoders = engine._preparation.encoders
            while not encoders.num_waiting:
                await anyio.lowlevel.checkpoint()
            assert engine.statistics().num_waiting == 2
            await leave(stream, scope)
            await left.wait()
            # The tokenizer is still held, and there is room for another.
            assert engine.statistics().num_waiting == 1
            assert encoders.num_waiting == 0
            tasks.start_soon(ask, engine, "b", outcomes)
            while not encoders.num_waiting:
                await anyio.lowlevel.checkpoint()
            held.release()
        assert outcomes == ["x", "x"]
        assert not never.entered.is_set()
        await check_idle(engine)


async def test_encoding_ends_with_its_request() -> None:
    """Between two segments: the call into the tokenizer itself cannot be interrupted."""
    first, second = HeldIds(), HeldIds()

    prompt = Prompt(tuple(Segment(token_ids=ids) for ids in (first, second)))  # type: ignore[arg-type]
    async with Engine.open(ScriptedModel("x"), **NO_TOKENIZER_FREE) as engine:
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def enter() -> None:
                with scope:
                    await engine.generate(prompt, ONE)

            tasks.start_soon(enter)
            await first.hold()
            scope.cancel()
        first.release()
        assert (await engine.generate("b", ONE)).text == "x"  # the thread is free
        assert not second.entered.is_set()


async def test_closing_ends_those_that_wait_for_the_tokenizer(held: HeldIds) -> None:
    outcomes: list[Any] = []
    engine = await Engine.open(ScriptedModel("x"), **NO_TOKENIZER_FREE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, held, outcomes)
        await held.hold()
        tasks.start_soon(ask, engine, "b", outcomes)
        while not engine._preparation.encoders.num_waiting:
            await anyio.lowlevel.checkpoint()
        engine.terminate()
        while not outcomes:
            await anyio.lowlevel.checkpoint()
        held.release()
    assert [type(outcome) for outcome in outcomes] == [EngineClosedError] * 2


# -- turns ------------------------------------------------------------------------------------


class Work:
    """Work for encoders that notes when it is done, and may be held."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def __call__(self, name: str, *, hold: bool = False) -> Callable[[Any], None]:
        def work(_: Any) -> None:
            self.begun.release()
            if hold:
                assert self.permits.acquire(timeout=60)
            self.done.append(name)

        return work


async def test_namespaces_take_turns() -> None:
    encoders, work = Encoders(1), Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(encoders.run, "a", 10, work("a0", hold=True))
        await anyio.to_thread.run_sync(work.begun.acquire)
        for number in range(1, 5):
            tasks.start_soon(encoders.run, "a", 10, work(f"a{number}"))
        while encoders.num_waiting < 4:
            await anyio.lowlevel.checkpoint()
        for number in range(2):
            tasks.start_soon(encoders.run, "b", 10, work(f"b{number}"))
        while encoders.num_waiting < 6:
            await anyio.lowlevel.checkpoint()
        work.permits.release()
    assert "".join(name[0] for name in work.done) == "aababaa"
    encoders.close()


async def test_long_prompts_leave_a_thread_to_short_ones() -> None:
    encoders, work = Encoders(2), Work()
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(encoders.run, "a", 10**6, work(f"long{number}", hold=True))
        while encoders.num_waiting < 2:  # one is under way, and never another beside it
            await anyio.lowlevel.checkpoint()
        await encoders.run("a", 10, work("short"))
        assert work.done == ["short"]
        work.permits.release(3)
    assert sorted(work.done) == ["long0", "long1", "long2", "short"]
    encoders.close()


# -- limits -----------------------------------------------------------------------------------

LIMITS = RequestLimits(
    max_prompt_characters=100,
    max_segments=3,
    max_messages=3,
    max_content_parts=2,
    max_message_values=12,
    max_message_depth=5,
    max_name_characters=8,
)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else "x"


LARGE: dict[str, tuple[Any, str]] = {
    "text": ("x" * 101, "max_prompt_characters"),
    "segments": (Prompt((Segment("x"),) * 4), "max_segments"),
    "segments of text": (Prompt((Segment("x" * 60), Segment("y" * 60))), "max_prompt_characters"),
    "segments of ids": (TokenizedPrompt([1] * 4, (1, 1, 1, 1)), "max_segments"),
    "messages": ([{"role": "user", "content": "x"}] * 4, "max_messages"),
    "messages of text": (
        [{"role": "user", "content": "x" * 60}] * 2,
        "max_prompt_characters",
    ),
    "message of parts": (
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3}],
        "max_content_parts",
    ),
    "message of fields": ([{str(n): n for n in range(20)}], "max_message_values"),
    "message of names": ([{"x" * 101: 1}], "max_prompt_characters"),
    "deep message": ([{"role": "user", "tool": nested(9)}], "max_message_depth"),
    "name": ([{"role": "user", "content": "x", "name": "x" * 9}], "max_name_characters"),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_prompt_is_measured_before_it_is_encoded(held: HeldIds, name: str) -> None:
    prompt, limit = LARGE[name]
    model = ScriptedModel("x")
    async with Engine.open(model, limits=LIMITS, **NO_TOKENIZER_FREE) as engine:
        async with anyio.create_task_group() as tasks:
            # Nothing can be encoded meanwhile.
            tasks.start_soon(engine.tokenize, held)
            await held.hold()
            for call in (engine.generate, engine.pin, engine.tokenize):
                with pytest.raises(InvalidParamsError, match=limit):
                    await call(prompt)
            with pytest.raises(InvalidParamsError, match=limit):
                await engine.warm([prompt])
            for stream in (engine.stream(prompt), engine.prefill(prompt)):
                with pytest.raises(InvalidParamsError, match=limit):
                    await anext(stream)
            held.release()
        await check_idle(engine)
    assert model.plans == []


async def test_ids_that_cannot_fit_are_refused_by_their_number() -> None:
    async with Engine.open(ScriptedModel("x", max_model_len=100)) as engine:
        for call in (engine.generate, engine.pin, engine.tokenize):
            with pytest.raises(PromptTooLongError, match="1000000000 tokens and at most 99"):
                await call(Untouchable())
        many = Prompt((Segment(token_ids=(1,) * 60), Segment(token_ids=(2,) * 60)))
        with pytest.raises(PromptTooLongError, match="120 tokens"):
            await engine.generate(many)


async def test_a_text_that_cannot_fit_is_not_encoded_to_its_end() -> None:
    async with Engine.open(ScriptedModel("x")) as engine:
        with pytest.raises(PromptTooLongError, match="at least") as caught:
            await engine.generate("word " * 200_000)
        assert caught.value.prompt_tokens < 100_000
        many = Prompt((Segment("word " * 400),) * 500)
        with pytest.raises(PromptTooLongError, match="at least") as caught:
            await engine.generate(many)
        assert caught.value.prompt_tokens < 10_000


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"namespace": "x" * 9}, "namespace"),
        ({"namespace": "\ud800"}, "namespace"),
        ({"namespace": 5}, "namespace"),
        ({"request_id": "x" * 9}, "request_id"),
        ({"request_id": "\udfff"}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"params": {"temperature": 0.0}}, "params"),
        ({"params": SamplingParams}, "params"),
        ({"params": SamplingParams(stop=["x"] * 5)}, "stop"),
        ({"params": SamplingParams(stop="x" * 257)}, "stop"),
        ({"params": SamplingParams(bad_words=["x"] * 129)}, "bad_words"),
        ({"params": SamplingParams(bad_words=["x" * 257])}, "bad_words"),
        ({"params": SamplingParams(stop_token_ids=[1] * 129)}, "stop_token_ids"),
        ({"params": SamplingParams(allowed_token_ids=[1] * 16_385)}, "allowed_token_ids"),
        ({"params": SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.0))}, "logit_bias"),
    ],
)
async def test_arguments_are_measured_when_a_stream_is_made(
    arguments: dict[str, Any], parameter: str
) -> None:
    async with Engine.open(
        ScriptedModel("x"), limits=RequestLimits(max_name_characters=8)
    ) as engine:
        with pytest.raises(InvalidParamsError) as caught:
            engine.stream("x", **arguments)
        assert caught.value.parameter == parameter


async def test_choices_share_what_is_made_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StopStrings] = []

    class Counted(StopStrings):
        def __init__(self, stop: Any) -> None:
            super().__init__(stop)
            made.append(self)

    monkeypatch.setattr(text_module, "StopStrings", Counted)
    async with Engine.open(ScriptedModel("one stop two")) as engine:
        completion = await engine.generate("a" * 40, SamplingParams(n=4, stop="stop"))
    assert [choice.text for choice in completion.choices] == ["one "] * 4
    assert len(made) == 1


# -- given back -------------------------------------------------------------------------------


class Hold:
    """Holds the engine's thread in each step until released."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._release = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self._entered.set()
        assert self._release.wait(60)

    async def entered(self) -> None:
        assert await anyio.to_thread.run_sync(self._entered.wait, 60)

    def release(self) -> None:
        self._release.set()


@pytest.fixture
def step() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.release()


async def test_a_pin_that_was_cancelled_keeps_nothing(step: Hold) -> None:
    system = list(range(32, 96))
    async with Engine.open(ScriptedModel("xyz", on_step=step), block_size=4) as engine:
        outcomes: list[Any] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine, "a", outcomes)
            await step.entered()
            for _ in range(8):
                pinning = anyio.CancelScope()

                async def pin(scope: anyio.CancelScope = pinning) -> None:
                    with scope:
                        await engine.pin(system)

                queued = engine._driver._commands.qsize()
                async with anyio.create_task_group() as inner:
                    inner.start_soon(pin)
                    while engine._driver._commands.qsize() == queued:
                        await anyio.lowlevel.checkpoint()
                    pinning.cancel()
            step.release()
        await check_idle(engine)
        assert engine.statistics().cache.blocks_pinned == 0
        # One that holds is not released by those that were given up.
        kept = await engine.pin(system)
        with anyio.move_on_after(0):
            await engine.pin(system)
        await check_idle(engine)
        assert engine.statistics().cache.blocks_pinned == kept.num_blocks == 16
        kept.release()
        await check_idle(engine)
        assert engine.statistics().cache.blocks_pinned == 0


def test_a_stream_is_read_in_the_event_loop_in_which_it_was_entered() -> None:
    async def open_and_enter() -> tuple[Engine, Stream]:
        engine = await Engine.open(ScriptedModel("x" * 40))
        return engine, await engine.stream("a", SamplingParams(max_tokens=40)).__aenter__()

    async def read(stream: Stream) -> None:
        with anyio.fail_after(60):
            await anext(stream)

    engine, stream = asyncio.run(open_and_enter())
    with pytest.raises(EventLoopError, match="another event loop"):
        asyncio.run(read(stream))
    with pytest.raises(EventLoopError):
        anyio.run(read, stream, backend="trio")
    asyncio.run(engine.aclose())
    with pytest.raises(EventLoopError):
        asyncio.run(read(stream))


async def test_a_stream_that_is_read_after_the_engine_closed_says_so() -> None:
    engine = await Engine.open(ScriptedModel("x" * 4000))
    stream = engine.stream("a", SamplingParams(max_tokens=4000))
    await stream.__aenter__()
    await engine.aclose(drain=False)
    with anyio.fail_after(60), pytest.raises(EngineClosedError):
        async for _ in stream:
            pass
    late = engine.stream("a")
    with pytest.raises(EngineClosedError):
        await anext(late)


# -- errors that name the fix -----------------------------------------------------------------


async def test_an_engine_is_opened_not_constructed() -> None:
    for arguments in (("/models/x",), ("/models/x", EngineConfig()), (ScriptedModel("x"),)):
        with pytest.raises(InvalidParamsError, match=r"await Engine\.open\(model\)"):
            Engine(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match=r"await Engine\.open\(model\)"):
        Engine("/models/x", max_model_len=100)  # type: ignore[arg-type]
    for model in (None, 5, ScriptedModel, ["x"]):
        with pytest.raises(InvalidParamsError, match="ModelSource"):
            Engine.open(model)  # type: ignore[arg-type]


async def test_an_engine_that_is_not_open_yet_says_how_to_open_it() -> None:
    opening = Engine.open(ScriptedModel("x"))
    for use in (
        lambda: opening.stream("a"),
        lambda: opening.statistics(),
        lambda: opening.tokenizer,
        lambda: opening.__enter__(),
    ):
        with pytest.raises(InvalidParamsError, match=r"await Engine\.open"):
            use()
    with pytest.raises(AttributeError):
        opening.no_such_thing  # noqa: B018
    assert not hasattr(opening, "__wrapped__")


def test_llm_says_what_it_takes() -> None:
    with LLM(ScriptedModel("x")) as llm:
        for prompt in (None, 5, {"role": "user", "content": "a"}, b"a", [None]):
            with pytest.raises(InvalidParamsError):
                llm.generate(prompt, ONE)  # type: ignore[call-overload]
        for params in ({"temperature": 0.0}, SamplingParams, 0.5, "greedy", [0.5]):
            with pytest.raises(InvalidParamsError, match="SamplingParams"):
                llm.generate(["a"], params)  # type: ignore[call-overload]
        assert llm.generate(["a"], [ONE])[0].text == "x"
