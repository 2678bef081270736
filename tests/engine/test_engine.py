"""The engine's faces, asynchronous and synchronous, over a scripted model."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest
import trio

from ragserve import (
    LLM,
    Completion,
    Engine,
    EngineClosedError,
    InvalidParamsError,
    Prompt,
    PromptTooLongError,
    SamplingParams,
    Segment,
)
from ragserve.engine import StepPlan, Stream
from ragserve.engine.runtime.handoff import Mailbox
from ragserve.testing import ScriptedModel

pytestmark = pytest.mark.anyio


def answer(tokens: Sequence[int]) -> int:
    """Depends on every token before, so that each prompt has an answer of its own."""
    return 32 + (7 * sum(tokens) + len(tokens)) % 95


def expected(prompt: Sequence[int], count: int) -> str:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return bytes(tokens[len(prompt) :]).decode()


class Hold:
    """Keeps the engine's thread inside its first step until released."""

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
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.release()


async def text_of(stream: Stream) -> str:
    return "".join([delta.text async for delta in stream])


# -- one request ------------------------------------------------------------------------------


async def test_stream_and_completion_say_the_same() -> None:
    async with Engine.open(ScriptedModel("Grüße, 世界 🙂!")) as engine:
        async with engine.stream("Hello") as stream:
            deltas = [delta async for delta in stream]
        completion = stream.completion
        assert "".join(delta.text for delta in deltas) == completion.text == "Grüße, 世界 🙂!"
        ids = tuple(token for delta in deltas for token in delta.token_ids)
        assert ids == completion.token_ids == (*"Grüße, 世界 🙂!".encode(), 256)
        assert [delta.finish_reason for delta in deltas][-1] == "stop"
        assert completion.finish_reason == "stop"
        assert completion.choices[0].stop_reason is None
        assert completion.usage.prompt_tokens == 5
        assert completion.usage.completion_tokens == len(ids)
        assert completion.usage.total_tokens == 5 + len(ids)
        assert completion.model == engine.model_name == "scripted"
        assert completion.request_id == stream.request_id
        assert (await engine.generate("Hello")).text == completion.text


async def test_without_text_there_are_token_ids() -> None:
    async with Engine.open(ScriptedModel("abc")) as engine:
        completion = await engine.generate("text", SamplingParams(detokenize=False))
        assert completion.text == ""
        assert completion.token_ids == (*b"abc", 256)
        assert completion.finish_reason == "stop"


async def test_both_ways_to_open() -> None:
    async with Engine.open(ScriptedModel("abc"), block_size=8) as engine:
        assert engine.config.block_size == 8
        assert engine.config.max_model_len == 4096
        assert engine.health().ok
    assert not engine.health().ok
    engine = await Engine.open(ScriptedModel("abc"))
    async with engine as same:
        assert same is engine
        assert (await engine.generate("text")).text == "abc"
    assert engine.health().status == "closed"


@pytest.mark.parametrize(
    "prompt",
    [
        "hey",
        [104, 101, 121],
        (104, 101, 121),
        Prompt((Segment("he", kind="system"), Segment(token_ids=(121,), kind="question"))),
    ],
)
async def test_every_kind_of_prompt(prompt: Any) -> None:
    async with Engine.open(ScriptedModel(answer)) as engine:
        params = SamplingParams(max_tokens=20)
        assert (await engine.generate(prompt, params)).text == expected(b"hey", 20)
        tokenized = await engine.tokenize(prompt)
        assert tokenized.token_ids == list(b"hey")
        assert (await engine.generate(tokenized, params)).text == expected(b"hey", 20)


async def test_chat_messages_go_through_the_template() -> None:
    async with Engine.open(ScriptedModel("abc")) as engine:
        messages = [{"role": "user", "content": "hey"}]
        ids = (await engine.tokenize(messages)).token_ids
        assert ids == [257, *b"user\nhey", 256, *b"\n", 257, *b"assistant\n"]


async def test_ends() -> None:
    async with Engine.open(ScriptedModel("one two three"), max_model_len=64) as engine:
        cut = await engine.generate("x", SamplingParams(max_tokens=5))
        assert (cut.text, cut.finish_reason) == ("one t", "length")
        stopped = await engine.generate("x", SamplingParams(stop=["two"]))
        assert (stopped.text, stopped.finish_reason) == ("one ", "stop")
        assert stopped.choices[0].stop_reason == "two"
        by_id = await engine.generate("x", SamplingParams(stop_token_ids=[ord("e")]))
        assert (by_id.text, by_id.choices[0].stop_reason) == ("on", ord("e"))
        endless = await engine.generate("x", SamplingParams(ignore_eos=True))
        assert endless.finish_reason == "length"
        assert endless.usage.total_tokens == 64
        assert engine.statistics().num_finished == {"stop": 2, "length": 2, "abort": 0, "error": 0}


async def test_several_choices() -> None:
    async with Engine.open(ScriptedModel(answer), block_size=4) as engine:
        prompt = list(range(1, 12))
        async with engine.stream(prompt, SamplingParams(n=3, max_tokens=20)) as stream:
            texts = ["", "", ""]
            async for delta in stream:
                texts[delta.index] += delta.text
        assert texts == [expected(prompt, 20)] * 3
        completion = stream.completion
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        assert [choice.text for choice in completion.choices] == texts
        assert completion.usage.prompt_tokens == 11
        assert completion.usage.completion_tokens == 60
        # The prompt is computed once, but for the block that each of the others goes on writing.
        assert engine.statistics().prompt_tokens == 11 + 2 * 3
        await engine.check_integrity()


async def test_cached_tokens_and_namespaces() -> None:
    async with Engine.open(ScriptedModel(answer), block_size=4) as engine:
        prompt, params = list(range(1, 11)), SamplingParams(max_tokens=6)

        async def cached(namespace: str) -> int:
            completion = await engine.generate(prompt, params, namespace=namespace)
            assert completion.text == expected(prompt, 6)
            return completion.usage.cached_tokens

        assert [await cached("") for _ in range(2)] == [0, 8]
        assert [await cached("tenant") for _ in range(2)] == [0, 8]
        assert await cached("other") == 0
        statistics = engine.statistics()
        assert statistics.prefix_query_tokens == 50
        assert statistics.prefix_hit_tokens == 16
        assert math.isclose(statistics.prefix_hit_rate, 0.32)
        assert statistics.blocks_cached > 0
        assert statistics.kv_usage == 0
        await engine.reset_prefix_cache()
        assert engine.statistics().blocks_cached == 0
        assert await cached("") == 0
        await engine.check_integrity()


@pytest.mark.parametrize("n", [1, 2])
async def test_stages_sum_to_the_total(n: int) -> None:
    model = ScriptedModel("abcdef", step_seconds=0.001)
    async with Engine.open(model, max_num_batched_tokens=4, max_num_seqs=4) as engine:
        completion = await engine.generate([1] * 10, SamplingParams(n=n))
        timings = completion.timings
        assert math.isclose(timings.queue + timings.prefill + timings.decode, timings.total)
        assert 0 < timings.tokenize <= timings.queue
        assert timings.time_to_first_token is not None
        assert math.isclose(timings.time_to_first_token, timings.queue + timings.prefill)
        assert timings.time_per_output_token is not None
        assert 0 < timings.time_per_output_token <= timings.total
        assert timings.prefill_chunks >= (3 if n == 1 else 1)


async def test_timings_of_a_request_that_never_ran(hold: Hold) -> None:
    async with Engine.open(ScriptedModel("abc", on_step=hold), max_num_seqs=1) as engine:
        running = await engine.stream("running").__aenter__()
        await hold.entered()
        async with engine.stream("queued") as queued:
            pass
        hold.release()
        await text_of(running)
        timings = queued.completion.timings
        assert timings.time_to_first_token is None
        assert math.isclose(timings.queue, timings.total)


async def test_states_of_a_stream(hold: Hold) -> None:
    async with Engine.open(ScriptedModel("abc", on_step=hold)) as engine:
        stream = engine.stream("text", request_id="mine")
        assert "mine [not started" in repr(stream)
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = stream.completion
        async with stream:
            await hold.entered()
            assert "running" in repr(stream)
            assert "running 1, waiting 0" in repr(engine)
            with pytest.raises(RuntimeError, match="has not ended"):
                _ = stream.completion
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(text_of, stream)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(RuntimeError, match="another task"):
                    await anext(stream)
                hold.release()
        assert "mine [ended" in repr(stream)
        assert stream.completion.text == "abc"
        assert await anext(stream, None) is None


async def test_opening_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ragserve"):
        async with Engine.open(ScriptedModel("abc", num_blocks=32), block_size=4):
            pass
    (message,) = [record.getMessage() for record in caplog.records if record.name == "ragserve"]
    assert "32 blocks x 4 tokens = 128 tokens" in message
    assert "max_model_len=4096" in message


# -- many requests ----------------------------------------------------------------------------


async def many(engine: Engine, count: int, first: int = 0) -> None:
    """So many requests at once, each with the answer that it gets alone."""
    params = SamplingParams(max_tokens=30)

    async def one(index: int) -> None:
        prompt = [index % 7] * (index % 11) + [index]
        assert (await engine.generate(prompt, params)).text == expected(prompt, 30)

    async with anyio.create_task_group() as tasks:
        for index in range(first, first + count):
            tasks.start_soon(one, index)


@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (2, 1), (2, 8)])
@pytest.mark.parametrize("num_blocks", [512, 24])
async def test_many_at_once(num_blocks: int, depth: int, steps: int) -> None:
    ahead = {"depth": depth, "max_decode_steps": steps}
    model = ScriptedModel(answer, num_blocks=num_blocks, max_model_len=64, **ahead)
    async with Engine.open(model, block_size=4, max_num_seqs=8) as engine:
        await many(engine, 60)
        await engine.check_integrity()
        statistics = engine.statistics()
        assert statistics.generated_tokens >= 60 * 30
        assert statistics.num_finished["length"] == 60
        assert statistics.num_running == statistics.num_waiting == statistics.blocks_used == 0
        assert (statistics.num_preemptions > 0) == (num_blocks == 24)


@pytest.mark.parametrize(("depth", "steps"), [(2, 1), (2, 8), (3, 5)])
async def test_a_device_that_works_ahead_gives_the_same(depth: int, steps: int) -> None:
    """Ends in the middle of a plan, of every kind: what comes after them is dropped."""
    text = expected(b"hey", 40)
    asked = [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=11, n=3),
        SamplingParams(max_tokens=40, stop=text[20:23]),
        SamplingParams(max_tokens=40, stop=[text[20:23], text[30]], min_tokens=22),
        SamplingParams(max_tokens=40, stop=text[7:9], include_stop_str_in_output=True),
        SamplingParams(max_tokens=40, stop_token_ids=[ord(text[13])]),
        SamplingParams(max_tokens=40, stop_token_ids=[ord(text[13])], stop=text[12:14]),
        SamplingParams(max_tokens=40, stop_token_ids=[ord(text[5])], min_tokens=18),
    ]

    async def answers(model: ScriptedModel, apart: int) -> list[Any]:
        got: dict[int, Any] = {}

        async def one(index: int) -> None:
            completion = await engine.generate("hey", asked[index])
            got[index] = (completion.choices, completion.usage.completion_tokens)

        async with Engine.open(model, block_size=4, max_num_seqs=5) as engine:
            async with anyio.create_task_group() as tasks:
                for index in range(len(asked)):
                    tasks.start_soon(one, index)
                    for _ in range(apart):
                        await anyio.lowlevel.checkpoint()
            await engine.check_integrity()
            assert engine.statistics().blocks_used == 0
        return [got[index] for index in range(len(asked))]

    plain = await answers(ScriptedModel(answer), 0)
    for apart in (0, 3):
        model = ScriptedModel(answer, depth=depth, max_decode_steps=steps)
        assert await answers(model, apart) == plain
        assert steps == 1 or any(n > 1 and s > 3 for plan in model.plans for _, s, n in plan)


async def test_priority(hold: Hold) -> None:
    model = ScriptedModel("ab", on_step=hold)
    async with Engine.open(model, max_num_seqs=1) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, "first")
            await hold.entered()
            for index, priority in enumerate((5, 0, -1, 0)):
                stream = engine.stream("x", request_id=f"{priority}/{index}", priority=priority)
                await stream.__aenter__()
                tasks.start_soon(text_of, stream)
            hold.release()
        order = list(dict.fromkeys(plan[0][0] for plan in model.plans))
        assert order[1:] == ["-1/2", "0/1", "0/3", "5/0"]


def test_one_engine_and_several_event_loops_one_after_another() -> None:
    async def opened() -> Engine:
        return await Engine.open(ScriptedModel(answer))

    engine = asyncio.run(opened())
    for _ in range(2):
        asyncio.run(many(engine, 5))
        trio.run(many, engine, 5)
    trio.run(engine.aclose)
    assert engine.statistics().num_finished["length"] == 20


def test_one_engine_and_several_event_loops_at_once() -> None:
    async def opened() -> Engine:
        return await Engine.open(ScriptedModel(answer))

    engine = asyncio.run(opened())
    done: list[int] = []
    start = threading.Barrier(6)

    def work(index: int) -> None:
        start.wait(60)
        anyio.run(many, engine, 20, 20 * index, backend=("asyncio", "trio")[index % 2])
        done.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(6))
    asyncio.run(engine.check_integrity())
    assert engine.statistics().blocks_used == 0
    asyncio.run(engine.aclose())


async def test_several_engines() -> None:
    async with (
        Engine.open(ScriptedModel("one")) as first,
        Engine.open(ScriptedModel("two")) as second,
    ):
        assert (await first.generate("x")).text == "one"
        assert (await second.generate("x")).text == "two"
        await first.aclose()
        assert (await second.generate("x")).text == "two"


# -- slow consumers and slow event loops ------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_consumer_that_stops_pauses_only_itself(n: int, max_num_seqs: int) -> None:
    knobs = {"stream_buffer_tokens": 8, "max_num_seqs": max_num_seqs, "block_size": 4}
    async with Engine.open(ScriptedModel(answer), **knobs) as engine:
        slow = engine.stream([1, 2, 3], SamplingParams(n=n, max_tokens=100))
        async with slow:
            others = [[4, 5], [6]]
            for prompt in others:
                completion = await engine.generate(prompt, SamplingParams(max_tokens=150))
                assert completion.text == expected(prompt, 150)
            await engine.check_integrity()
            generated = engine.statistics().generated_tokens - 2 * 150
            assert 0 < generated < 8 + n  # what it may be ahead, however long it is not read
            # All that had come is in one delta for each choice.
            first = await anext(slow)
            assert len(first.token_ids) > 1
            texts = [""] * n
            texts[first.index] += first.text
            async for delta in slow:
                texts[delta.index] += delta.text
        assert texts == [expected([1, 2, 3], 100)] * n
        assert [choice.text for choice in slow.completion.choices] == texts
        await engine.check_integrity()
        assert engine.statistics().blocks_used == 0


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_every_pause_is_followed_by_a_resume(limit: int) -> None:
    knobs = {"stream_buffer_tokens": limit, "block_size": 4}
    model = ScriptedModel(answer, num_blocks=40, max_model_len=160)
    async with Engine.open(model, **knobs) as engine:

        async def read_slowly(first: int) -> None:
            stream = engine.stream([first], SamplingParams(max_tokens=100))
            text = ""
            async for delta in stream:
                assert 0 < len(delta.token_ids) <= limit
                text += delta.text
                for _ in range(first % 4):
                    await anyio.lowlevel.checkpoint()
            assert text == expected([first], 100)

        async with anyio.create_task_group() as tasks:
            for first in range(12):
                tasks.start_soon(read_slowly, first)
        await engine.check_integrity()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_stalled_event_loop_stalls_nobody_else(backend: str) -> None:
    async def opened() -> Engine:
        return await Engine.open(ScriptedModel(answer), stream_buffer_tokens=16)

    engine = asyncio.run(opened())
    stalled, go_on = threading.Event(), threading.Event()
    texts: list[str] = []

    async def stalls() -> None:
        async with engine.stream([1], SamplingParams(max_tokens=200)) as stream:
            text = (await anext(stream)).text
            stalled.set()
            assert go_on.wait(60)  # the whole event loop stands still
            texts.append(text + await text_of(stream))

    thread = threading.Thread(target=lambda: anyio.run(stalls, backend=backend))
    thread.start()
    try:
        assert stalled.wait(60)
        asyncio.run(many(engine, 20))
        asyncio.run(engine.check_integrity())
        # Paused when 16 tokens were unread, after at most 16 that were read.
        assert engine.statistics().generated_tokens <= 20 * 30 + 2 * 16
    finally:
        go_on.set()
        thread.join()
    assert texts == [expected([1], 200)]
    asyncio.run(engine.aclose())


def test_one_wake_up_per_step_and_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_ups = 0

    async def main() -> Engine:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def count(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal wake_ups
            wake_ups += threading.current_thread().name.startswith("ragserve engine")
            return call_soon(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        async with Engine.open(ScriptedModel(answer)) as engine:
            await many(engine, 16)
        return engine

    engine = asyncio.run(main())
    assert engine.statistics().generated_tokens == 16 * 30
    assert 0 < wake_ups <= engine.statistics().num_steps


class FakeLoop:
    """An event loop that runs what was posted when it is told to."""

    key = None

    def __init__(self) -> None:
        self.posted: list[Callable[[], object]] = []
        self.closed = False

    def post(self, callback: Callable[[], object]) -> bool:
        if not self.closed:
            self.posted.append(callback)
        return not self.closed

    def is_closed(self) -> bool:
        return self.closed

    def run(self) -> None:
        posted, self.posted = self.posted, []
        for callback in posted:
            callback()


def test_mailbox_wakes_its_loop_once_for_all_that_came() -> None:
    loop, opened = FakeLoop(), []
    mailbox = Mailbox(loop, opened.append)
    assert mailbox.put([1])
    assert mailbox.put([2, 3])
    assert len(loop.posted) == 1
    loop.run()
    assert opened == [[1, 2, 3]]
    assert mailbox.put([4])
    assert len(loop.posted) == 1
    # Closed before it came to open that: nobody ever will.
    loop.closed = True
    assert not mailbox.put([5])
    assert not mailbox.put([6])
    assert opened == [[1, 2, 3]]


# -- the synchronous face ---------------------------------------------------------------------


def test_llm_one_prompt_or_many() -> None:
    params = SamplingParams(max_tokens=20)
    with LLM(ScriptedModel(answer), max_queued_requests=3) as llm:
        one = llm.generate("hey", params)
        assert isinstance(one, Completion)
        assert one.text == expected(b"hey", 20)
        assert llm.generate([104, 101, 121], params).text == one.text
        assert isinstance(llm.generate([{"role": "user", "content": "hey"}], params), Completion)
        assert llm.generate(Prompt((Segment("hey"),)), params).text == one.text
        # More than may wait at a time, of different lengths: the order is kept all the same.
        prompts = [chr(97 + index) * (20 - index) for index in range(20)]
        each = [SamplingParams(max_tokens=1 + 7 * index % 19) for index in range(20)]
        assert [c.text for c in llm.generate(prompts, each)] == [
            expected(prompt.encode(), 1 + 7 * index % 19) for index, prompt in enumerate(prompts)
        ]
        (segments,) = llm.generate([Prompt((Segment("hey"),))], params)
        assert segments.text == one.text
        assert [c.text for c in llm.generate([[104, 101, 121]], params)] == [one.text]
        assert llm.generate([]) == []
        assert llm.statistics().num_finished["length"] == 26
        assert "LLM" in repr(llm)


def test_llm_errors_end_the_rest_of_the_list() -> None:
    with LLM(ScriptedModel([65] * 5000), max_model_len=4096) as llm:
        with pytest.raises(PromptTooLongError):
            llm.generate(["fine", "x" * 5000, "fine too"])
        with pytest.raises(InvalidParamsError, match="one for each of 2 prompts"):
            llm.generate(["a", "b"], [SamplingParams()])
        assert llm.generate("fine", SamplingParams(max_tokens=3)).text == "AAA"
        statistics = llm.statistics()
        assert statistics.num_running == statistics.num_waiting == 0


def test_llm_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(ScriptedModel("abc")) as llm:
        llm.generate(["a", "b"])
        assert capsys.readouterr().err == ""
        llm.generate(["a", "b"], use_tqdm=True)
        assert "2/2" in capsys.readouterr().err


def test_llm_from_several_threads() -> None:
    texts: list[str] = []
    with LLM(ScriptedModel(answer)) as llm:

        def work(index: int) -> None:
            texts.append(llm.generate([index], SamplingParams(max_tokens=50)).text)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(texts) == sorted(expected([index], 50) for index in range(8))


def test_llm_closing() -> None:
    model = ScriptedModel("abc")
    llm = LLM(model)
    assert llm.generate("text").text == "abc"
    llm.close()
    llm.close()
    assert model.closed
    with pytest.raises(EngineClosedError):
        llm.generate("text")
    model = ScriptedModel("abc")
    with pytest.raises(LookupError), LLM(model):
        raise LookupError
    assert model.closed


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Ctrl-C interrupts, as it does unless this process was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
def test_llm_interrupted_by_the_keyboard() -> None:
    main = threading.main_thread().ident
    assert main is not None
    interrupts = iter([lambda: signal.pthread_kill(main, signal.SIGINT)])

    def on_step(plan: StepPlan) -> None:
        next(interrupts, lambda: None)()

    with LLM(ScriptedModel([65] * 5000, on_step=on_step)) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("endless")
        assert llm.generate("short", SamplingParams(max_tokens=2)).text == "AA"
        statistics = llm.statistics()
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.num_finished["abort"] == 1
