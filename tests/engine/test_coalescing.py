"""What a stream joins in one delta, and what it never holds back; draining; forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import anyio
import pytest

from ragserve import Engine, EngineClosedError, EngineDeadError, InvalidParamsError, SamplingParams
from ragserve.testing import ScriptedModel

pytestmark = pytest.mark.anyio

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 4
FOR_EVER = 1e9
"""An interval that no test waits for: longer, too, than any machine's clock has run."""


async def test_only_the_first_and_the_last_delta_come_at_once() -> None:
    permits = threading.Semaphore(1)
    model = ScriptedModel(TEXT, on_step=lambda plan: permits.acquire(timeout=60))
    async with Engine.open(model, stream_interval=FOR_EVER) as engine:
        async with engine.stream("Say it.", SamplingParams(max_tokens=300)) as stream:
            first = await anext(stream)
            permits.release(300)
            rest = [delta async for delta in stream]
        assert (first.text, first.finish_reason) == (TEXT[0], None)
        assert [(delta.text, delta.finish_reason) for delta in rest] == [(TEXT[1:], "stop")]
        assert len(rest[0].token_ids) == len(TEXT)  # and one that ends it


async def test_choices_are_joined_each_by_itself() -> None:
    # More tokens than a stream may have unread: held back, they would wait for one another.
    async with Engine.open(ScriptedModel(TEXT), stream_interval=FOR_EVER) as engine:
        async with engine.stream("Say it.", SamplingParams(max_tokens=300, n=3)) as stream:
            deltas = [delta async for delta in stream]
        for index in range(3):
            own = [delta for delta in deltas if delta.index == index]
            assert "".join(delta.text for delta in own) == TEXT
            assert [d.finish_reason for d in own if d.finish_reason] == ["stop"]


async def test_what_is_held_back_comes_after_the_interval() -> None:
    # The model does not go on before it was read: nothing but the time can bring the second token.
    permits = threading.Semaphore(2)
    model = ScriptedModel("abcdef", on_step=lambda plan: permits.acquire(timeout=60))
    async with Engine.open(model, stream_interval=0.05) as engine:
        text = ""
        async with engine.stream("Say it.") as stream:
            async for delta in stream:
                text += delta.text
                permits.release()
        assert text == "abcdef"


async def test_without_an_interval_each_step_is_given_at_once() -> None:
    permits = threading.Semaphore(1)
    model = ScriptedModel("abcdef", on_step=lambda plan: permits.acquire(timeout=60))
    async with Engine.open(model, stream_interval=0.0) as engine:
        async with engine.stream("Say it.") as stream:
            first = await anext(stream)
            permits.release()
            second = await anext(stream)
            permits.release(60)
            rest = [delta.text async for delta in stream]
        assert (first.text, second.text, "".join(rest)) == ("a", "b", "cdef")


async def test_the_end_is_never_held_back() -> None:
    permits = threading.Semaphore(1)
    model = ScriptedModel(TEXT, on_step=lambda plan: permits.acquire(timeout=60))
    async with Engine.open(model, stream_interval=FOR_EVER) as engine:
        async with engine.stream("Say it.") as stream:
            await anext(stream)
            engine.abort(stream.request_id)
            permits.release(300)
            deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "abort"


async def test_a_failure_comes_after_all_that_was_held_back() -> None:
    told: list[str] = []

    async def listen(engine: Engine) -> None:
        async for delta in engine.stream("Say it."):
            told.append(delta.text)

    model = ScriptedModel(TEXT, fail_at_step=40)
    async with Engine.open(model, stream_interval=FOR_EVER) as engine:
        with pytest.raises(EngineDeadError):
            await listen(engine)
    assert "".join(told) == TEXT[:40]


@pytest.mark.parametrize("interval", [-0.001, float("inf"), float("nan")])
def test_intervals_are_checked(interval: float) -> None:
    with pytest.raises(InvalidParamsError, match="stream_interval"):
        Engine.open(ScriptedModel(), stream_interval=interval)


async def test_a_draining_engine_ends_what_it_has_and_takes_no_more() -> None:
    permits = threading.Semaphore(1)
    model = ScriptedModel("abcdef", on_step=lambda plan: permits.acquire(timeout=60))
    engine = await Engine.open(model)
    async with engine.stream("Say it.") as stream:
        await anext(stream)
        engine.begin_drain()
        engine.begin_drain()
        assert engine.health().status == "draining"
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.generate("No more.")
        permits.release(60)
        assert "".join([delta.text async for delta in stream]) == "bcdef"
        assert stream.completion.finish_reason == "stop"
    await engine.aclose()
    assert engine.health().status == "closed"


FORK = """
    import os, traceback
    import anyio
    from ragserve import Engine, EngineClosedError
    from ragserve.testing import ScriptedModel

    async def ask(engine):
        return (await engine.generate("Say it.")).text

    async def refused(engine):
        for what in (engine.generate, engine.tokenize):
            try:
                await what("Say it.")
            except EngineClosedError as error:
                assert "fork" in str(error), error
            else:
                raise RuntimeError("not refused")
        assert engine.health().status == "closed"
        engine.statistics()
        engine.begin_drain()
        await engine.aclose()
        engine.terminate()

    async def open_engine():
        return await Engine.open(ScriptedModel("abc"))

    engine = anyio.run(open_engine)
    assert anyio.run(ask, engine) == "abc"
    child = os.fork()
    if child == 0:
        try:
            anyio.run(refused, engine)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert anyio.run(ask, engine) == "abc"
    anyio.run(engine.aclose)
    print("fine")
"""


def test_an_engine_says_that_it_was_forked() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", textwrap.dedent(FORK)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


async def test_a_stream_that_is_held_is_collected_all_the_same() -> None:
    permits = threading.Semaphore(1)
    model = ScriptedModel(TEXT, on_step=lambda plan: permits.acquire(timeout=60))
    async with Engine.open(model, stream_interval=FOR_EVER) as engine:
        stream = engine.stream("Say it.")
        await anext(stream)
        permits.release()
        with anyio.fail_after(60):
            while not stream._pending:
                await anyio.sleep(0.001)
            del stream
            permits.release(300)
            while engine.statistics().num_running:
                await anyio.sleep(0.001)
        await engine.check_integrity()
        assert engine.statistics().num_finished["abort"] == 1
