"""What goes wrong: refused requests, a failing step, a failing request, closing, dropping."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from ragserve import (
    LLM,
    Engine,
    EngineClosedError,
    EngineDeadError,
    InvalidParamsError,
    ModelLoadError,
    Prompt,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    SamplingParams,
    Segment,
)
from ragserve.engine import EngineConfig, LoadedModel, StepPlan, Stream, TokenizedPrompt
from ragserve.testing import ScriptedFailure, ScriptedModel

pytestmark = pytest.mark.anyio

ENDLESS = [65] * 5000


class Hold:
    """Keeps the engine's thread inside its first step until released."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self._entered = threading.Event()
        self._release = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self._entered.set()
        assert self._release.wait(60)
        if self._error is not None:
            raise self._error

    async def entered(self) -> None:
        assert await anyio.to_thread.run_sync(self._entered.wait, 60)

    def release(self) -> None:
        self._release.set()


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.release()


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("ragserve")}


async def ended(started: set[threading.Thread]) -> None:
    """Wait for the end of threads; nothing else may be needed to bring it about."""
    for thread in started:
        await anyio.to_thread.run_sync(thread.join)


# -- refused before anything is queued --------------------------------------------------------


async def test_queue_full_of_requests(hold: Hold) -> None:
    model = ScriptedModel("abc", on_step=hold)
    async with Engine.open(model, max_num_seqs=1, max_queued_requests=2) as engine:
        first = await engine.stream("first").__aenter__()
        await hold.entered()
        waiting = [await engine.stream(f"waiting {i}").__aenter__() for i in range(2)]
        refused = engine.stream("one too many", request_id="refused")
        with pytest.raises(QueueFullError, match="max_queued_requests") as caught:
            await refused.__aenter__()
        assert (caught.value.queued, caught.value.limit) == (2, 2)
        assert caught.value.retry_after > 0
        with pytest.raises(QueueFullError):
            await anext(refused)  # entered again, it still says why it is empty
        hold.release()
        for stream in (first, *waiting):
            assert "".join([delta.text async for delta in stream]) == "abc"
        # There is room again, and the refused id is free.
        assert (await engine.generate("now", request_id="refused")).text == "abc"
        assert engine.statistics().num_finished["stop"] == 4
        await engine.check_integrity()


async def test_queue_full_of_tokens(hold: Hold) -> None:
    model = ScriptedModel("abc", on_step=hold)
    async with Engine.open(model, max_num_seqs=1, max_queued_tokens=10) as engine:
        first = await engine.stream([1] * 20).__aenter__()  # an empty queue takes any one
        await hold.entered()
        second = await engine.stream([2] * 8).__aenter__()
        with pytest.raises(QueueFullError, match="max_queued_tokens") as caught:
            await engine.generate([3] * 3)
        assert (caught.value.queued, caught.value.limit) == (11, 10)
        third = await engine.stream([4] * 2).__aenter__()
        hold.release()
        for stream in (first, second, third):
            assert "".join([delta.text async for delta in stream]) == "abc"


async def test_choices_of_one_request_count_once(hold: Hold) -> None:
    model = ScriptedModel("abc", on_step=hold)
    knobs: dict[str, Any] = {"max_num_seqs": 1, "max_queued_requests": 1, "max_queued_tokens": 6}
    async with Engine.open(model, **knobs) as engine:
        first = await engine.stream("first").__aenter__()
        await hold.entered()
        three = await engine.stream("second", SamplingParams(n=3)).__aenter__()
        with pytest.raises(QueueFullError):
            await engine.generate("third")
        hold.release()
        assert [delta.finish_reason async for delta in first][-1] == "stop"
        async for _ in three:
            pass
        assert [choice.text for choice in three.completion.choices] == ["abc"] * 3


async def test_queue_timeout() -> None:
    model = ScriptedModel(ENDLESS, step_seconds=0.01)
    async with Engine.open(model, max_num_seqs=1, queue_timeout=0.3) as engine:
        async with engine.stream("has the only seat") as first:
            await anext(first)
            late = engine.stream("is never started", SamplingParams(n=2))
            with pytest.raises(QueueTimeoutError, match="queue_timeout is") as caught:
                await anext(late)
            assert caught.value.limit == 0.3
            assert caught.value.waited >= 0.3
            assert late.ended
            assert await anext(first)
        await engine.check_integrity()
        assert engine.statistics().num_finished == {"stop": 0, "length": 0, "abort": 1, "error": 2}


async def test_choices_that_wait_for_their_prompt_do_not_time_out() -> None:
    model = ScriptedModel("abc", step_seconds=0.05)
    knobs: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    async with Engine.open(model, queue_timeout=0.3, **knobs) as engine:
        # Ten steps of prompt: the others wait longer than the timeout, but not to be started.
        completion = await engine.generate([1] * 10, SamplingParams(n=2, max_tokens=1))
        assert [choice.text for choice in completion.choices] == ["a"] * 2


async def test_prompt_too_long() -> None:
    async with Engine.open(ScriptedModel("abc"), max_model_len=16, num_tokenizers=1) as engine:
        for prompt in ([1] * 16, "x" * 16):
            with pytest.raises(PromptTooLongError, match="max_model_len=16") as caught:
                await engine.generate(prompt)
            assert (caught.value.prompt_tokens, caught.value.limit) == (16, 15)
        last = await engine.generate([1] * 15)
        assert last.finish_reason == "length"
        assert last.usage.completion_tokens == 1
        assert engine.statistics().num_steps == 1


async def test_prompt_that_does_not_fit_the_pool() -> None:
    model = ScriptedModel("abc", num_blocks=4)
    async with Engine.open(model, block_size=4) as engine:
        prompt = Prompt(tuple(Segment(token_ids=(7,)) for _ in range(5)))
        with pytest.raises(PromptTooLongError, match="5 segments") as caught:
            await engine.generate(prompt)
        assert caught.value.prompt_tokens == 5
        assert model.plans == []


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", InvalidParamsError),
        ([], InvalidParamsError),
        (5, InvalidParamsError),
        (b"bytes", InvalidParamsError),
        ([1, 99999], InvalidParamsError),
        ([1, -1], InvalidParamsError),
        ([1, True], InvalidParamsError),
        ([{"role": "user"}, 3], InvalidParamsError),
        (TokenizedPrompt([1, 2], (1,)), InvalidParamsError),
        (TokenizedPrompt([1, 2], ()), InvalidParamsError),
    ],
)
async def test_invalid_prompts(prompt: Any, error: type[Exception]) -> None:
    model = ScriptedModel("abc")
    async with Engine.open(model) as engine:
        with pytest.raises(error):
            await engine.generate(prompt)
        with pytest.raises(error):
            await engine.tokenize(prompt)
        assert engine.statistics().num_waiting == 0
        assert model.plans == []
        assert (await engine.generate("fine")).text == "abc"


@pytest.mark.parametrize(
    ("parameter", "arguments"),
    [
        ("params", {"params": {"max_tokens": 3}}),
        ("priority", {"priority": 1.5}),
        ("priority", {"priority": True}),
        ("namespace", {"namespace": 7}),
        ("request_id", {"request_id": 7}),
        ("allowed_token_ids", {"params": SamplingParams(allowed_token_ids=[9999])}),
        ("logit_bias", {"params": SamplingParams(logit_bias={9999: 1.0})}),
    ],
)
async def test_invalid_arguments_are_refused_at_once(
    parameter: str, arguments: dict[str, Any]
) -> None:
    model = ScriptedModel("abc")
    async with Engine.open(model) as engine:
        with pytest.raises(InvalidParamsError) as caught:
            engine.stream("text", **arguments)
        assert caught.value.parameter == parameter
        assert model.plans == []


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_model_length": 5},
        {"block_size": 0},
        {"max_num_seqs": 2.5},
        {"queue_timeout": 0},
        {"watermark": 1.0},
        {"multi_step_seconds": -0.1},
        {"multi_step_seconds": float("nan")},
        {"max_num_mixed_tokens": 0},
        {"device": "tpu"},
        {"max_num_seqs": 600, "max_num_batched_tokens": 599},
        {"trust_remote_code": True},
    ],
)
def test_bad_knobs_are_refused_before_loading(knobs: dict[str, Any]) -> None:
    class Source:
        def load(self, config: EngineConfig) -> LoadedModel:
            raise AssertionError("loaded")

    with pytest.raises(InvalidParamsError) as caught:
        Engine.open(Source(), **knobs)
    assert caught.value.value in knobs.values() or caught.value.parameter in str(knobs)
    with pytest.raises(InvalidParamsError):
        LLM(Source(), **knobs)


async def test_duplicate_request_id(hold: Hold) -> None:
    async with Engine.open(ScriptedModel("abc", on_step=hold)) as engine:
        stream = engine.stream("text", request_id="same")
        with pytest.raises(InvalidParamsError) as caught:
            engine.stream("text", request_id="same")
        assert (caught.value.parameter, caught.value.value) == ("request_id", "same")
        async with stream:
            await hold.entered()
            with pytest.raises(InvalidParamsError):
                engine.stream("text", request_id="same")
            hold.release()
            async for _ in stream:
                pass
        assert (await engine.generate("text", request_id="same")).text == "abc"


async def test_arguments_are_not_changed() -> None:
    async with Engine.open(ScriptedModel("abc")) as engine:
        ids, stop, bias = [1, 2, 3], ["zz"], {5: 1.0}
        messages = [{"role": "user", "content": "hi"}]
        tokenized = TokenizedPrompt([4, 5], (1, 1))
        params = SamplingParams(stop=stop, logit_bias=bias, bad_words=["x"], n=2)
        for prompt in (ids, messages, tokenized):
            await engine.generate(prompt, params)
        with pytest.raises(PromptTooLongError):
            await engine.generate(ids * 2000, params)
        assert ids == [1, 2, 3]
        assert messages == [{"role": "user", "content": "hi"}]
        assert tokenized == TokenizedPrompt([4, 5], (1, 1))
        assert (stop, bias) == (["zz"], {5: 1.0})
        ids.clear()  # and ours are not theirs
        assert (await engine.generate([1, 2, 3])).text == "abc"


# -- a failing step ---------------------------------------------------------------------------


async def expect_death(stream: Stream, caught: list[EngineDeadError]) -> None:
    with pytest.raises(EngineDeadError) as info:
        async for _ in stream:
            pass
    caught.append(info.value)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failing_step_fails_every_stream_with_its_cause(depth: int) -> None:
    cause = ScriptedFailure("a test's")
    hold = Hold(cause)
    model = ScriptedModel(ENDLESS, on_step=hold, depth=depth)
    caught: list[EngineDeadError] = []
    before = threads()
    engine = await Engine.open(model, max_num_seqs=2)
    engine_thread = threads() - before
    running = [await engine.stream(f"running {i}").__aenter__() for i in range(2)]
    await hold.entered()
    # Submitted while the step runs: the engine has not even seen these when it dies.
    late = [await engine.stream("late", SamplingParams(n=2)).__aenter__() for _ in range(2)]
    unentered = engine.stream("not entered")
    async with anyio.create_task_group() as tasks:
        for stream in (*running, *late):
            tasks.start_soon(expect_death, stream, caught)
        await anyio.lowlevel.checkpoint()
        hold.release()
    assert [error.__cause__ for error in caught] == [cause] * 4
    assert len(set(map(id, caught))) == 4  # tasks do not share a traceback
    for call in (
        lambda: engine.generate("later"),
        lambda: engine.tokenize("later"),
        unentered.__aenter__,
        engine.check_integrity,
        engine.reset_prefix_cache,
    ):
        with pytest.raises(EngineDeadError) as info:
            await call()
        assert info.value.__cause__ is cause
    assert engine.health().status == "dead"
    assert engine.health().error is cause
    assert not engine.health().ok
    statistics = engine.statistics()
    assert statistics.num_finished["error"] == 6
    assert statistics.num_running == statistics.num_waiting == statistics.blocks_used == 0
    assert "dead" in repr(engine)
    assert all(stream.ended for stream in (*running, *late))
    assert running[0].completion.finish_reason == "error"
    await ended(engine_thread)
    assert model.closed
    await engine.aclose()
    engine.terminate()
    await engine.aclose(drain=False)
    assert engine.health().status == "dead"  # closing it does not make it forget


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", [0, 1, 5])
async def test_what_came_before_the_failure_is_delivered(step: int, depth: int) -> None:
    model = ScriptedModel("Hello.", fail_at_step=step, depth=depth)
    async with Engine.open(model) as engine:
        stream = engine.stream("text")
        text = ""
        with pytest.raises(EngineDeadError) as caught:  # noqa: PT012
            async for delta in stream:
                text += delta.text
        assert text == "Hello."[:step]
        assert isinstance(caught.value.__cause__, ScriptedFailure)
        with pytest.raises(EngineDeadError):
            await anext(stream)


class Unbearable(BaseException):
    """Not even an Exception."""


async def test_any_exception_whatever_ends_the_engine_aloud() -> None:
    def on_step(plan: StepPlan) -> None:
        raise Unbearable

    async with Engine.open(ScriptedModel("abc", on_step=on_step)) as engine:
        with pytest.raises(EngineDeadError) as caught:
            await engine.generate("text")
        assert isinstance(caught.value.__cause__, Unbearable)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_books_broken_by_the_step_leave_nobody_waiting() -> None:
    def on_step(plan: StepPlan) -> None:
        if len(plan.chunks) == 2:
            plan.chunks[0].request.blocks.append(10**9)  # releasing this must raise
            raise ScriptedFailure

    async with Engine.open(ScriptedModel(ENDLESS, on_step=on_step)) as engine:
        caught: list[EngineDeadError] = []
        async with anyio.create_task_group() as tasks:
            for index in range(2):
                tasks.start_soon(expect_death, engine.stream(f"text {index}"), caught)
        assert [type(error.__cause__) for error in caught] == [ScriptedFailure] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_model_that_fails_to_close_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    def close() -> None:
        raise OSError("cannot close")

    model = ScriptedModel(ENDLESS, on_step=hold)
    monkeypatch.setattr(model, "close", close)
    async with Engine.open(model) as engine:
        stream = await engine.stream("text").__aenter__()
        await hold.entered()
        async with anyio.create_task_group() as tasks:
            refused: list[Exception] = []

            async def check() -> None:
                try:
                    await engine.check_integrity()
                except EngineClosedError as error:
                    refused.append(error)

            tasks.start_soon(check)
            await anyio.lowlevel.checkpoint()
            engine.terminate()
            hold.release()
            await expect_closed(stream)


# -- a failing request ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("sampling", ZeroDivisionError),
        ("text", OverflowError),  # no tokenizer can look up token -1
    ],
)
async def test_one_failing_request_fails_alone(broken: str, error: type[Exception]) -> None:
    def reply(tokens: list[int]) -> int:
        if tokens[0] == 7 and len(tokens) == 5:
            return -1 if broken == "text" else 1 // 0
        return 65 if len(tokens) < 12 else 256

    async with Engine.open(ScriptedModel(reply), block_size=4) as engine:
        texts: list[str] = []

        async def others(first: int) -> None:
            texts.append((await engine.generate([first, first])).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others, 8)
            stream = engine.stream([7, 7], SamplingParams(n=2))
            with pytest.raises(error):
                async for _ in stream:
                    pass
            tasks.start_soon(others, 9)
        assert texts == ["A" * 10] * 2
        assert engine.health().ok
        assert stream.ended
        assert stream.completion.choices[0].finish_reason == "error"
        await engine.check_integrity()
        assert engine.statistics().blocks_used == 0


async def test_failing_end_of_a_text_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sink:
        stop_reason = None

        def push(self, token_ids: Any) -> str:
            return "x"

        def finish(self) -> str:
            raise LookupError("at the end")

    async with Engine.open(ScriptedModel("abc")) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.tokenizer, "detokenizer", lambda *args, **kwargs: Sink())
            with pytest.raises(LookupError, match="at the end"):
                await engine.generate("text")
        assert (await engine.generate("text")).text == "abc"
        await engine.check_integrity()


async def expect_closed(stream: Stream) -> None:
    with pytest.raises(EngineClosedError):
        async for _ in stream:
            pass


# -- closing ----------------------------------------------------------------------------------


async def test_drain_lets_running_streams_finish(hold: Hold) -> None:
    model = ScriptedModel("Hello.", on_step=hold)
    engine = await Engine.open(model, max_num_seqs=1)
    running = await engine.stream("running").__aenter__()
    await hold.entered()
    queued = await engine.stream("queued").__aenter__()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(engine.aclose)
        await anyio.wait_all_tasks_blocked()
        assert engine.health().status == "draining"
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.generate("refused")
        assert not model.closed
        hold.release()
        for stream in (running, queued):
            assert "".join([delta.text async for delta in stream]) == "Hello."
    assert engine.health().status == "closed"
    assert model.closed
    await engine.aclose()
    for call in (
        lambda: engine.generate("later"),
        lambda: engine.tokenize("later"),
        engine.check_integrity,
    ):
        with pytest.raises(EngineClosedError):
            await call()
    assert engine.statistics().blocks_used == 0
    assert "closed" in repr(engine)
    assert engine.abort("nobody") is False


async def test_drain_finishes_what_was_submitted_just_before(hold: Hold) -> None:
    engine = await Engine.open(ScriptedModel("", on_step=hold))
    streams = [await engine.stream("one step long").__aenter__()]
    await hold.entered()
    streams.append(await engine.stream("not seen by the engine yet").__aenter__())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.aclose)
        await anyio.wait_all_tasks_blocked()
        hold.release()
    for stream in streams:
        async for _ in stream:
            pass
        assert stream.completion.finish_reason == "stop"


@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (2, 4)])
async def test_drain_does_not_wait_for_a_consumer(depth: int, steps: int) -> None:
    """A stream that was paused, and that nobody reads, must not keep the engine open."""
    model = ScriptedModel("abcdefgh" * 8, depth=depth, max_decode_steps=steps)
    async with Engine.open(model, stream_buffer_tokens=4) as engine:
        stream = await engine.stream("text").__aenter__()
        first = await anext(stream)
        await engine.generate("meanwhile")  # so many steps that the other was paused long ago
    assert engine.health().status == "closed"
    rest = [delta.text async for delta in stream]
    assert first.text + "".join(rest) == "abcdefgh" * 8


@pytest.mark.parametrize("depth", [1, 2])
async def test_terminate_ends_all_streams(hold: Hold, depth: int) -> None:
    model = ScriptedModel(ENDLESS, on_step=hold, depth=depth, max_decode_steps=4)
    engine = await Engine.open(model, max_num_seqs=1)
    streams = [await engine.stream(f"text {i}").__aenter__() for i in range(3)]
    await hold.entered()
    late = await engine.stream("late").__aenter__()

    async with anyio.create_task_group() as tasks:
        for stream in (*streams, late):
            tasks.start_soon(expect_closed, stream)
        await anyio.wait_all_tasks_blocked()
        engine.terminate()
        engine.terminate()
        assert engine.health().status == "closed"
        hold.release()
    await engine.aclose()
    assert model.closed
    assert engine.statistics().num_finished["error"] == 4
    assert engine.statistics().blocks_used == 0


async def test_aclose_without_draining(hold: Hold) -> None:
    model = ScriptedModel(ENDLESS, on_step=hold)
    engine = await Engine.open(model)
    stream = await engine.stream("text").__aenter__()
    await hold.entered()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.aclose(drain=False))
        await anyio.wait_all_tasks_blocked()
        hold.release()
    await expect_closed(stream)
    assert model.closed


async def test_aclose_cancelled_while_draining_terminates(hold: Hold) -> None:
    model = ScriptedModel(ENDLESS, on_step=hold)
    engine = await Engine.open(model)
    stream = await engine.stream("text").__aenter__()
    await hold.entered()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.aclose)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    assert engine.health().status == "closed"
    hold.release()
    await expect_closed(stream)
    await engine.aclose()
    assert model.closed


@pytest.mark.parametrize("awaited", [False, True])
async def test_an_error_in_the_block_terminates(hold: Hold, awaited: bool) -> None:
    model = ScriptedModel(ENDLESS, on_step=hold)
    opening = Engine.open(model)
    streams = []
    with pytest.raises(LookupError, match="in the block"):  # noqa: PT012
        async with await opening if awaited else opening as engine:
            streams.append(await engine.stream("text").__aenter__())
            await hold.entered()
            raise LookupError("in the block")
    assert engine.health().status == "closed"
    hold.release()
    await expect_closed(streams[0])


async def test_closing_while_requests_tokenize() -> None:
    class SlowIds(list[int]):
        entered, release = threading.Event(), threading.Event()

        def __iter__(self) -> Iterator[int]:
            self.entered.set()
            assert self.release.wait(60)
            return super().__iter__()

    engine = await Engine.open(ScriptedModel("abc"), num_tokenizers=1)
    busy = SlowIds([1, 2])
    refused: list[Exception] = []

    async def expect_refusal(prompt: Any) -> None:
        with pytest.raises(EngineClosedError) as caught:
            await engine.generate(prompt)
        refused.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expect_refusal, busy)
        assert await anyio.to_thread.run_sync(SlowIds.entered.wait, 60)
        tasks.start_soon(expect_refusal, "waits for a free tokenizer")
        await anyio.wait_all_tasks_blocked()
        await engine.aclose()
        SlowIds.release.set()
    assert len(refused) == 2


# -- what is left behind ----------------------------------------------------------------------


async def test_open_and_close_leave_nothing() -> None:
    before = threads()
    root_handlers = list(logging.getLogger().handlers)
    own_handlers = list(logging.getLogger("ragserve").handlers)
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    children = multiprocessing.active_children()
    for _ in range(3):
        model = ScriptedModel("abc")
        async with Engine.open(model) as engine:
            assert (await engine.generate("text")).text == "abc"
            with pytest.raises(InvalidParamsError):
                await engine.generate("")
        gone = weakref.ref(engine)
        del engine
        await ended(threads() - before)
        gc.collect()
        assert gone() is None
        assert model.closed
    assert list(logging.getLogger().handlers) == root_handlers
    assert list(logging.getLogger("ragserve").handlers) == own_handlers
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == signals
    assert multiprocessing.active_children() == children


@pytest.mark.parametrize("used", [False, True])
async def test_a_dropped_engine_ends_its_thread(used: bool) -> None:
    before = threads()
    model = ScriptedModel(ENDLESS)
    engine = await Engine.open(model, stream_buffer_tokens=2)
    if used:
        async for _ in engine.stream("text"):
            break
    del engine
    gc.collect()
    await ended(threads() - before)
    assert model.closed


def test_a_dropped_llm_ends_its_threads() -> None:
    before = set(threading.enumerate())
    model = ScriptedModel("abc")
    llm = LLM(model)
    assert llm.generate("text").text == "abc"
    del llm
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert model.closed


def test_a_stream_keeps_its_engine_alive() -> None:
    before = threads()

    async def main() -> str:
        def start() -> Stream:
            # Nobody else has the engine.
            return opened.pop().stream("text")

        opened = [await Engine.open(ScriptedModel("abc"))]
        stream = start()
        gc.collect()
        return "".join([delta.text async for delta in stream])

    assert asyncio.run(main()) == "abc"
    gc.collect()
    for thread in threads() - before:
        thread.join()


# -- opening ----------------------------------------------------------------------------------


class SlowSource:
    """Loads when it is told to."""

    def __init__(self, model: ScriptedModel, before: Callable[[], object] | None = None) -> None:
        self.model = model
        self.entered = threading.Event()
        self.release = threading.Event()
        self.thread: threading.Thread | None = None
        self._before = before

    def load(self, config: EngineConfig) -> LoadedModel:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.release.wait(60)
        if self._before is not None:
            self._before()
        return self.model.load(config)


async def test_loading_does_not_block_the_event_loop_and_can_be_cancelled() -> None:
    before = threads()
    closed = threading.Event()

    class Model(ScriptedModel):
        def close(self) -> None:
            super().close()
            closed.set()

    source = SlowSource(Model("abc"))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def opening() -> None:
                async with Engine.open(source):
                    raise AssertionError("opened")

            tasks.start_soon(opening)
            assert await anyio.to_thread.run_sync(source.entered.wait, 60)
            scope.cancel()
    assert scope.cancelled_caught
    source.release.set()
    assert await anyio.to_thread.run_sync(closed.wait, 60)  # what was loaded is given back
    assert threads() <= before


async def test_loading_that_raises() -> None:
    before = threads()

    def fail() -> None:
        raise ModelLoadError("no such weights")

    source = SlowSource(ScriptedModel("abc"), fail)
    source.release.set()
    with pytest.raises(ModelLoadError, match="no such weights"):
        await Engine.open(source)
    with pytest.raises(ModelLoadError, match="no such weights"):
        async with Engine.open(source):
            pass
    with pytest.raises(ModelLoadError, match="no such weights"):
        await anyio.to_thread.run_sync(LLM, source)
    assert threads() <= before
