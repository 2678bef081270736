"""Cancelling a request in every state it can be in, and what must be as if it had never been."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest
import trio

from ragserve import Engine, InvalidParamsError, SamplingParams
from ragserve.engine import StepPlan, Stream
from ragserve.testing import ScriptedModel

pytestmark = pytest.mark.anyio

BLOCK = 4
KNOBS: dict[str, Any] = {"block_size": BLOCK, "max_num_batched_tokens": 8, "max_num_seqs": 3}
VICTIM = list(range(1, 31))
OTHERS = [[40, 41, 42], [50, 51]]
LONG = SamplingParams(max_tokens=60)


def answer(tokens: Sequence[int]) -> int:
    """Depends on every token before, so that one lost or changed block changes the rest."""
    return 32 + (7 * sum(tokens) + len(tokens)) % 95


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tuple(tokens[len(prompt) :])


class Gate:
    """Holds the engine's thread at the beginning of each step, until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._plan = StepPlan([])
        self._held = False

    def __call__(self, plan: StepPlan) -> None:
        if not self._is_open:
            self._plan = plan
            self._reached.release()
            assert self._permits.acquire(timeout=60)

    def wait(self) -> StepPlan:
        """The step that is held now, or the next one."""
        if not self._held:
            assert self._reached.acquire(timeout=60)
            self._held = True
        return self._plan

    def step(self) -> None:
        self._held = False
        self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    async def reached(self) -> StepPlan:
        return await anyio.to_thread.run_sync(self.wait)

    async def until(self, condition: Callable[[StepPlan], bool]) -> None:
        while not condition(await self.reached()):
            self.step()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


class SlowIds(Sequence[int]):
    """Token ids that keep the tokenizer's thread waiting."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.entered = threading.Event()
        self.release = threading.Event()

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        self.entered.set()
        assert self.release.wait(60)
        return self._token_ids[index]


async def read(stream: Stream, answers: list[tuple[int, ...]]) -> None:
    async for _ in stream:
        pass
    answers.append(stream.completion.token_ids)


def chunk_of(plan: StepPlan, request_id: str) -> tuple[int, int] | None:
    """Where the request's chunk of the plan begins and ends."""
    for chunk in plan.chunks:
        if chunk.request.request_id == request_id:
            return chunk.start, chunk.end
    return None


def is_at(start: int) -> Callable[[StepPlan], bool]:
    """The victim is being computed from position `start`."""

    def condition(plan: StepPlan) -> bool:
        chunk = chunk_of(plan, "victim")
        return chunk is not None and chunk[0] == start

    return condition


def both_run(plan: StepPlan) -> bool:
    return len(plan.chunks) == len(OTHERS) and all(c.sample for c in plan.chunks)


class Victim:
    """Reads a stream in a task of its own until it is made to stop."""

    def __init__(self, engine: Engine, prompt: Sequence[int] = VICTIM) -> None:
        self.stream = engine.stream(prompt, LONG, request_id="victim")
        self.ended = anyio.Event()
        self.scope = anyio.CancelScope()
        self.timed_out = False

    async def run(self, *, timeout_error: bool = False) -> None:
        try:
            if timeout_error:
                with anyio.fail_after(1e9) as self.scope:
                    await self._read()
            else:
                with self.scope:
                    await self._read()
        except TimeoutError:
            self.timed_out = True
        finally:
            self.ended.set()

    async def _read(self) -> None:
        async with self.stream as stream:
            async for _ in stream:
                pass


async def stop_by_cancel(victim: Victim) -> None:
    victim.scope.cancel()


async def stop_by_deadline(victim: Victim) -> None:
    victim.scope.deadline = anyio.current_time()


async def stop_by_close(victim: Victim) -> None:
    await victim.stream.aclose()


async def stop_by_abort(victim: Victim) -> None:
    assert victim.stream.abort()


Stop = Callable[[Victim], Awaitable[None]]
STOPS: list[Stop] = [stop_by_cancel, stop_by_deadline, stop_by_close, stop_by_abort]


async def check_gone(engine: Engine, model: ScriptedModel, gate: Gate) -> None:
    """The victim is in no step after the one under way, and after that holds nothing."""
    steps = len(model.plans)
    gate.step()
    await engine.check_integrity()
    gate.open()
    later = [request_id for plan in model.plans[steps:] for request_id, *_ in plan]
    assert "victim" not in later


async def check_idle(engine: Engine) -> None:
    await engine.check_integrity()
    statistics = engine.statistics()
    assert statistics.num_running == statistics.num_waiting == 0
    assert statistics.blocks_used == 0


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(
    ("start", "hits"),
    [
        # `start` tokens have been computed when it is stopped, and the step under way is still
        # finished: the complete blocks of both are found afterwards.
        (0, 8),
        (8, 16),
        (24, 28),
        (len(VICTIM) + 5, 28),
    ],
)
async def test_cancel_in_a_step(gate: Gate, stop: Stop, start: int, hits: int) -> None:
    model = ScriptedModel(answer, on_step=gate)
    answers: list[tuple[int, ...]] = []
    async with Engine.open(model, **{**KNOBS, "max_num_batched_tokens": 10}) as engine:
        async with anyio.create_task_group() as tasks:
            for prompt in OTHERS:
                # Submitted one after another, and all while the engine is held.
                other = await engine.stream(prompt, LONG).__aenter__()
                tasks.start_soon(read, other, answers)
            await gate.until(both_run)  # so they take two tokens of each step, and leave eight
            victim = Victim(engine)
            await victim.stream.__aenter__()
            tasks.start_soon(victim.run)
            await gate.until(is_at(start))
            await stop(victim)
            if stop is not stop_by_abort:
                await victim.ended.wait()
            await check_gone(engine, model, gate)
        assert sorted(answers) == sorted(expected(prompt, 60) for prompt in OTHERS)
        assert victim.stream.completion.finish_reason == "abort"
        await check_idle(engine)
        assert engine.statistics().num_finished["abort"] == 1
        again = await engine.generate(VICTIM, LONG)
        assert again.usage.cached_tokens == hits
        assert again.token_ids == expected(VICTIM, 60)


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("stop", STOPS)
async def test_cancel_of_what_is_under_way(gate: Gate, stop: Stop, steps: int) -> None:
    """Its blocks are free, and given away, while a device still works on it."""
    ahead = {"depth": 2, "max_decode_steps": steps}
    model = ScriptedModel(answer, on_step=gate, num_blocks=64, max_model_len=120, **ahead)
    answers: list[tuple[int, ...]] = []
    async with Engine.open(model, **KNOBS) as engine:
        async with anyio.create_task_group() as tasks:
            victim = Victim(engine)
            await victim.stream.__aenter__()
            tasks.start_soon(victim.run)
            await gate.until(lambda plan: (chunk_of(plan, "victim") or (0, 0))[1] > len(VICTIM) + 9)
            for prompt in OTHERS:
                other = await engine.stream(prompt, LONG).__aenter__()
                tasks.start_soon(read, other, answers)
            await stop(victim)
            if stop is not stop_by_abort:
                await victim.ended.wait()
            await check_gone(engine, model, gate)
        assert sorted(answers) == sorted(expected(prompt, 60) for prompt in OTHERS)
        received = victim.stream.completion.token_ids
        assert received == expected(VICTIM, len(received))
        await check_idle(engine)
        assert (await engine.generate(VICTIM, LONG)).token_ids == expected(VICTIM, 60)


@pytest.mark.parametrize("stop", STOPS)
async def test_cancel_while_queued(gate: Gate, stop: Stop) -> None:
    model = ScriptedModel(answer, on_step=gate)
    answers: list[tuple[int, ...]] = []
    async with Engine.open(model, **{**KNOBS, "max_num_seqs": 2}) as engine:
        async with anyio.create_task_group() as tasks:
            for prompt in OTHERS:
                other = await engine.stream(prompt, LONG).__aenter__()
                tasks.start_soon(read, other, answers)
            await gate.until(both_run)
            victim = Victim(engine)
            await victim.stream.__aenter__()
            tasks.start_soon(victim.run)
            gate.step()
            await gate.reached()
            assert engine.statistics().num_waiting == 1
            await stop(victim)
            if stop is not stop_by_abort:
                await victim.ended.wait()
            await check_gone(engine, model, gate)
        assert sorted(answers) == sorted(expected(prompt, 60) for prompt in OTHERS)
        await check_idle(engine)
        assert "victim" not in str(model.plans)


@pytest.mark.parametrize("stop", STOPS)
async def test_cancel_while_tokenizing(stop: Stop) -> None:
    model = ScriptedModel(answer)
    ids = SlowIds(VICTIM)
    async with Engine.open(model, **KNOBS) as engine:
        async with anyio.create_task_group() as tasks:
            victim = Victim(engine, ids)
            tasks.start_soon(victim.run)
            await anyio.to_thread.run_sync(ids.entered.wait)
            other = await engine.generate(OTHERS[0], LONG)
            await stop(victim)
            if stop in (stop_by_cancel, stop_by_deadline):
                await victim.ended.wait()  # though the tokenizer is still busy
            ids.release.set()
        assert other.token_ids == expected(OTHERS[0], 60)
        assert victim.stream.ended
        await check_idle(engine)
        if stop is stop_by_abort:
            assert victim.stream.completion.finish_reason == "abort"
            assert victim.stream.completion.usage.completion_tokens == 0
        else:
            assert "victim" not in str(model.plans)


async def test_timeout_error_from_outside_is_raised(gate: Gate) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS) as engine:
        async with anyio.create_task_group() as tasks:
            victim = Victim(engine)
            tasks.start_soon(lambda: victim.run(timeout_error=True))
            await gate.until(is_at(len(VICTIM) + 3))
            victim.scope.deadline = anyio.current_time()
            await victim.ended.wait()
            await check_gone(engine, model, gate)
        assert victim.timed_out
        await check_idle(engine)


async def test_expired_timeout_before_anything_happened() -> None:
    model = ScriptedModel(answer)
    async with Engine.open(model, **KNOBS) as engine:
        with anyio.move_on_after(0) as scope:
            await engine.generate(VICTIM, LONG)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError), anyio.fail_after(0):
            await engine.generate(VICTIM, LONG)
        await check_idle(engine)
        assert (await engine.generate(VICTIM, LONG)).token_ids == expected(VICTIM, 60)


async def test_leave_before_the_first_delta(gate: Gate) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS) as engine:
        async with engine.stream(VICTIM, LONG, request_id="victim") as stream:
            await gate.until(is_at(16))
        await check_gone(engine, model, gate)
        assert stream.completion.text == ""
        assert stream.completion.finish_reason == "abort"
        await check_idle(engine)
        assert [delta async for delta in stream] == []
        assert (await engine.generate(VICTIM, LONG)).usage.cached_tokens >= 16


async def test_a_stream_that_is_never_entered_does_nothing() -> None:
    model = ScriptedModel(answer)
    async with Engine.open(model, **KNOBS) as engine:
        stream = engine.stream(VICTIM, LONG)
        await stream.aclose()
        assert [delta async for delta in stream] == []
        assert stream.abort() is False
        engine.stream(VICTIM, LONG)
        gc.collect()
        await check_idle(engine)
        assert model.plans == []


@pytest.mark.parametrize("how", ["leave", "raise", "aclose"])
async def test_between_two_tokens(gate: Gate, how: str) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS) as engine:
        stream = engine.stream(VICTIM, LONG, request_id="victim")

        async def read_two() -> None:
            async with stream:
                async for _ in stream:
                    if stream.num_read == 2:
                        break
                # The third is being computed, and nobody waits for it.
                await gate.until(is_at(len(VICTIM) + 1))
                if how == "raise":
                    raise LookupError
                if how == "aclose":
                    await stream.aclose()

        async def let_two_pass() -> None:
            await gate.until(is_at(len(VICTIM)))
            gate.step()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_two_pass)
            if how == "raise":
                with pytest.raises(LookupError):
                    await read_two()
            else:
                await read_two()
        await check_gone(engine, model, gate)
        assert stream.completion.token_ids == expected(VICTIM, 2)
        await check_idle(engine)
        assert (await engine.generate(VICTIM, LONG)).usage.cached_tokens == 28


@pytest.mark.parametrize("in_a_cycle", [False, True])
async def test_break_drops_the_stream(gate: Gate, in_a_cycle: bool) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS) as engine:
        made: list[weakref.ref[Stream]] = []

        def make() -> Stream:
            stream = engine.stream(VICTIM, LONG, request_id="victim")
            if in_a_cycle:
                stream.__dict__["itself"] = stream
            made.append(weakref.ref(stream))
            return stream

        async def let_one_pass() -> None:
            await gate.until(is_at(24))
            gate.step()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_one_pass)
            async for delta in make():
                assert delta.token_ids == expected(VICTIM, 1)
                break
            await gate.reached()
        gc.collect()
        assert made[0]() is None
        await check_gone(engine, model, gate)
        await check_idle(engine)
        assert engine.abort("victim") is False
        assert engine.statistics().num_finished["abort"] == 1


async def test_a_dropped_stream_that_was_paused_frees_its_blocks(gate: Gate) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS, stream_buffer_tokens=4) as engine:
        stream = await enter(engine)
        await gate.until(is_at(len(VICTIM) + 2))  # which gives the fourth token
        gate.step()
        await engine.check_integrity()
        assert engine.statistics().blocks_used > 0
        del stream
        gc.collect()
        await check_idle(engine)
        assert engine.statistics().generated_tokens == 4


async def test_abort_by_id_gives_what_came_before(gate: Gate) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS) as engine:
        async with anyio.create_task_group() as tasks:
            completions = []

            async def generate() -> None:
                completions.append(await engine.generate(VICTIM, LONG, request_id="victim"))

            tasks.start_soon(generate)
            await gate.until(is_at(len(VICTIM) + 3))
            assert engine.abort("victim") is True
            assert engine.abort("nobody") is False
            gate.open()
        (completion,) = completions
        assert completion.finish_reason == "abort"
        # The step that was under way counts, unless it came too late.
        assert completion.token_ids == expected(VICTIM, len(completion.token_ids))
        assert len(completion.token_ids) == 5
        assert engine.abort("victim") is False
        await check_idle(engine)


async def test_cancel_one_of_a_shared_prefix(gate: Gate) -> None:
    """Blocks that another request holds too must survive."""
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **KNOBS) as engine:
        answers: list[tuple[int, ...]] = []
        async with anyio.create_task_group() as tasks:
            other = await engine.stream([*VICTIM, 99], LONG).__aenter__()
            tasks.start_soon(read, other, answers)
            await gate.until(lambda plan: plan.chunks[0].start > len(VICTIM))
            victim = Victim(engine)
            await victim.stream.__aenter__()
            tasks.start_soon(victim.run)
            await gate.until(is_at(len(VICTIM)))
            assert victim.stream.timeline.cached_tokens == 28
            victim.scope.cancel()
            await victim.ended.wait()
            await check_gone(engine, model, gate)
        assert answers == [expected([*VICTIM, 99], 60)]
        await check_idle(engine)


async def test_cancel_several_choices(gate: Gate) -> None:
    model = ScriptedModel(answer, on_step=gate)
    async with Engine.open(model, **{**KNOBS, "max_num_seqs": 2}) as engine:
        async with anyio.create_task_group() as tasks:
            victim = Victim(engine)
            victim.stream = engine.stream(
                VICTIM, SamplingParams(n=3, max_tokens=60), request_id="many"
            )
            tasks.start_soon(victim.run)
            # Two run, and the third waits with the prompt's blocks in its hands.
            await gate.until(lambda plan: len(plan.chunks) == 2)
            victim.scope.cancel()
            await victim.ended.wait()
            await check_gone(engine, model, gate)
        assert engine.statistics().num_finished["abort"] == 3
        await check_idle(engine)


def open_engine(model: ScriptedModel, **knobs: Any) -> Engine:
    async def opened() -> Engine:
        return await Engine.open(model, **KNOBS, **knobs)

    return asyncio.run(opened())


def close_engine(engine: Engine) -> None:
    asyncio.run(engine.aclose())


async def enter(engine: Engine) -> Stream:
    stream = engine.stream(VICTIM, LONG, request_id="victim")
    return await stream.__aenter__()


@pytest.mark.parametrize("unopened", [False, True])
def test_asyncio_loop_closed_while_a_stream_runs(gate: Gate, unopened: bool) -> None:
    engine = open_engine(ScriptedModel(answer, on_step=gate))
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(enter(engine))
    while not is_at(len(VICTIM) + 2 * unopened)(gate.wait()):
        gate.step()
    loop.close()
    gate.step()  # its token finds nobody
    asyncio.run(engine.check_integrity())
    assert engine.statistics().blocks_used == 0
    gate.open()
    assert asyncio.run(engine.generate(VICTIM, LONG)).token_ids == expected(VICTIM, 60)
    del stream
    close_engine(engine)


@pytest.mark.parametrize("unopened", [False, True])
def test_trio_run_ended_while_a_stream_runs(gate: Gate, unopened: bool) -> None:
    engine = open_engine(ScriptedModel(answer, on_step=gate))

    async def main() -> Stream:
        stream = await enter(engine)
        while not is_at(len(VICTIM) + 2 * unopened)(gate.wait()):
            gate.step()
        return stream

    stream = trio.run(main)
    gate.step()
    asyncio.run(engine.check_integrity())
    assert engine.statistics().blocks_used == 0
    gate.open()
    assert asyncio.run(engine.generate(VICTIM, LONG)).token_ids == expected(VICTIM, 60)
    del stream
    close_engine(engine)


def test_asyncio_run_cancels_the_tasks_it_leaves(gate: Gate) -> None:
    engine = open_engine(ScriptedModel(answer, on_step=gate))
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        victim = Victim(engine)
        kept.append(asyncio.create_task(victim.run()))
        await gate.until(is_at(len(VICTIM) + 1))

    asyncio.run(main())
    assert kept[0].cancelled()
    gate.step()
    asyncio.run(engine.check_integrity())
    assert engine.statistics().blocks_used == 0
    gate.open()
    close_engine(engine)


async def test_an_error_on_entering_is_not_an_empty_answer() -> None:
    async with Engine.open(ScriptedModel(answer), **KNOBS) as engine:
        stream = engine.stream([])
        with pytest.raises(InvalidParamsError):
            await stream.__aenter__()
        with pytest.raises(InvalidParamsError):
            await anext(stream)
        assert stream.ended


async def leave_somehow(engine: Engine, how: random.Random, streams: list[Any]) -> None:
    """One request, ended at a random moment in a random way."""
    prompt = [how.randrange(2, 6)] * how.randrange(1, 24) + [how.randrange(256)]
    params = SamplingParams(max_tokens=how.randrange(1, 24), n=how.choice((1, 1, 2)))
    stream = engine.stream(prompt, params)
    streams.append(weakref.ref(stream))
    count = how.randrange(4)
    match how.randrange(7):
        case 0:  # cancelled at its first wait
            with anyio.CancelScope() as scope:
                scope.cancel()
                async with stream:
                    pass
        case 1:  # left after some deltas
            async with stream:
                for _ in range(count):
                    await anext(stream, None)
        case 2:  # cancelled after some deltas
            with anyio.CancelScope() as scope:
                async with stream:
                    for _ in range(count):
                        await anext(stream, None)
                    scope.cancel()
                    async for _ in stream:
                        pass
        case 3:  # dropped
            async for _ in stream:
                if stream.num_read > count:
                    break
        case 4:  # aborted by its id
            async with stream:
                await anext(stream, None)
                engine.abort(stream.request_id)
                async for _ in stream:
                    pass
        case 5:  # closed from outside
            async with anyio.create_task_group() as tasks:

                async def drain() -> None:
                    async for _ in stream:
                        pass

                tasks.start_soon(drain)
                for _ in range(count):
                    await anyio.lowlevel.checkpoint()
                await stream.aclose()
        case 6:  # read to its end
            async with stream:
                async for _ in stream:
                    pass
            for choice in stream.completion.choices:
                assert choice.token_ids == expected(prompt, params.max_tokens or 0)


@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (2, 8)])
async def test_two_thousand_cancels_leak_nothing(
    anyio_backend_name: str, depth: int, steps: int
) -> None:
    # So small a pool that requests are preempted and evict each other's blocks as well.
    ahead = {"depth": depth, "max_decode_steps": steps}
    model = ScriptedModel(answer, num_blocks=40, max_model_len=64, **ahead)
    knobs = {**KNOBS, "max_num_seqs": 6, "stream_buffer_tokens": 8}
    streams: list[weakref.ref[Stream]] = []
    async with Engine.open(model, **knobs) as engine:
        await engine.generate(VICTIM)
        await engine.check_integrity()
        threads_before, tasks_before = engine_threads(), count_tasks(anyio_backend_name)

        async def one_of_many(seed: int) -> None:
            how = random.Random(seed)
            for _ in range(100):
                await leave_somehow(engine, how, streams)

        async with anyio.create_task_group() as tasks:
            for seed in range(20):
                tasks.start_soon(one_of_many, seed)
        assert len(streams) == 2000
        await engine.check_integrity()  # every abort was obeyed before this
        await anyio.lowlevel.checkpoint()  # what it had sent is opened, and dropped
        gc.collect()
        await check_idle(engine)
        assert sum(reference() is not None for reference in streams) == 0
        assert engine_threads() == threads_before
        # A timer of trio's that was there before may have ended.
        assert count_tasks(anyio_backend_name) <= tasks_before


def engine_threads() -> list[str]:
    """The tokenizer's threads come with the need, but never more than `num_tokenizers`."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(n for n in names if n.startswith("ragserve engine"))


def count_tasks(backend: str) -> int:
    if backend == "asyncio":
        return len(asyncio.all_tasks())
    return trio.lowlevel.current_statistics().tasks_living
