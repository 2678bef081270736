"""Ending an application that streams: by signals, under each server, and by hand."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from servers import SERVERS, ServerProcess, ServerThread, raw_request, read_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ragserve import Engine, EngineClosedError, InvalidParamsError, SamplingParams
from ragserve.testing import ScriptedModel
from ragserve.web.shutdown import GracefulShutdown, graceful_shutdown
from ragserve.web.sse import sse

NEVER = 1e6
"""A deadline that does not come."""
PATIENCE = 120.0


def endless_model() -> ScriptedModel:
    return ScriptedModel("x" * 100_000, step_seconds=0.002, max_model_len=90_000, num_blocks=6_000)


def short(tokens: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=tokens)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """The signals that a handler like a server's has caught."""
    numbers: list[int] = []

    def handler(number: int, frame: object) -> None:
        numbers.append(number)

    before = {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT)}
    yield numbers
    for number, previous in before.items():
        assert signal.getsignal(number) is handler
        signal.signal(number, previous)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def draining(engine: Engine) -> None:
    await anyio.to_thread.run_sync(wait_until, lambda: not engine.health().ok)


def watchers() -> int:
    return sum(thread.name == "ragserve shutdown" for thread in threading.enumerate())


# -- signals --------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_what_runs_finish_and_refuses_the_rest(
    caught: list[int], number: signal.Signals
) -> None:
    async with (
        Engine.open(endless_model()) as one,
        Engine.open(ScriptedModel("ab")) as two,
        graceful_shutdown(one, two, deadline=NEVER) as shutdown,
    ):
        async with one.stream("x", short(200)) as stream:
            await anext(stream)
            signal.raise_signal(number)
            assert shutdown.draining
            await draining(one)
            await draining(two)
            with pytest.raises(EngineClosedError):
                await two.generate("x")
            async for _ in stream:
                pass
            assert stream.completion.finish_reason == "length"
        assert caught == [number]


@pytest.mark.anyio
async def test_what_is_not_finished_at_the_deadline_is_ended(caught: list[int]) -> None:
    async with (
        Engine.open(endless_model()) as engine,
        graceful_shutdown(engine, deadline=0.05),
        engine.stream("x", short(80_000)) as stream,
    ):
        await anext(stream)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass
    assert caught == [signal.SIGTERM]


@pytest.mark.anyio
async def test_a_second_interrupt_ends_everything_now(caught: list[int]) -> None:
    async with (
        Engine.open(endless_model()) as engine,
        graceful_shutdown(engine, deadline=NEVER),
        engine.stream("x", short(80_000)) as stream,
    ):
        await anext(stream)
        # One may come from the terminal and one from the parent: no reason to hurry.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        await draining(engine)
        assert engine.health().status == "draining"
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass
    assert len(caught) == 3


@pytest.mark.anyio
async def test_the_deadline_holds_when_the_lifespan_is_over(caught: list[int]) -> None:
    with anyio.fail_after(PATIENCE):
        async with Engine.open(endless_model()) as engine:
            stream = await engine.stream("x", short(80_000)).__aenter__()
            async with graceful_shutdown(engine, deadline=0.05):
                signal.raise_signal(signal.SIGTERM)
        # Closing the engine waits for what runs, and something in the background does.
    with pytest.raises(EngineClosedError):
        async for _ in stream:
            pass


def test_handlers_of_an_event_loop_are_called_too(caught: list[int]) -> None:
    async def main() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, told.set)
        async with (
            Engine.open(ScriptedModel("ab")) as engine,
            graceful_shutdown(engine, deadline=NEVER),
        ):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(told.wait(), PATIENCE)
            await draining(engine)
        told.clear()
        signal.raise_signal(signal.SIGTERM)  # ours has gone and the loop's is there again
        await asyncio.wait_for(told.wait(), PATIENCE)
        loop.remove_signal_handler(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    signal.signal(signal.SIGTERM, before)  # a loop that removes its handler leaves the default
    assert caught == []


@pytest.mark.anyio
async def test_a_signal_that_is_ignored_stays_so(caught: list[int]) -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with Engine.open(ScriptedModel("ab")) as engine, graceful_shutdown(engine):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
            assert (await engine.generate("x")).text == "ab"
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.anyio
async def test_a_handler_in_front_of_ours_is_left_there(caught: list[int]) -> None:
    calls: list[str] = []
    async with Engine.open(ScriptedModel("ab")) as engine:
        async with graceful_shutdown(engine):
            ours = signal.getsignal(signal.SIGTERM)

            def later(number: int, frame: Any) -> None:
                calls.append("later")
                assert callable(ours)
                ours(number, frame)

            original = signal.signal(signal.SIGTERM, later)
        assert original == ours
        assert signal.getsignal(signal.SIGTERM) is later
        signal.raise_signal(signal.SIGTERM)
        assert calls == ["later"]
        assert caught == [signal.SIGTERM]
        assert (await engine.generate("x")).text == "ab"  # it has no effect any more
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))


@pytest.mark.anyio
async def test_nothing_is_left_behind() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with Engine.open(ScriptedModel("ab")) as engine:
        for _ in range(3):
            async with graceful_shutdown(engine) as shutdown:
                assert "waiting" in repr(shutdown)
                assert (await engine.generate("x")).text == "ab"
        assert "left" in repr(shutdown)
        await anyio.to_thread.run_sync(wait_until, lambda: watchers() == 0)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("deadline", [-1.0, float("nan")])
def test_a_deadline_that_is_none(deadline: float) -> None:
    with pytest.raises(InvalidParamsError, match="deadline"):
        graceful_shutdown(deadline=deadline)


SCRIPT = """
import asyncio
from ragserve import Engine, EngineClosedError, SamplingParams
from ragserve.testing import ScriptedModel
from ragserve.web.shutdown import graceful_shutdown

async def main():
    model = ScriptedModel("x" * 5000, step_seconds=0.005, max_model_len=4096)
    async with Engine.open(model) as engine, graceful_shutdown(engine, deadline=0.1):
        try:
            async for _ in engine.stream("x", SamplingParams(max_tokens=4000)):
                print("delta", flush=True)
        except EngineClosedError:
            print("closed", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_signal_that_nobody_else_handles_has_its_effect_in_the_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "delta\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    assert output.endswith("closed\n")
    assert process.returncode == -signal.SIGTERM


# -- servers --------------------------------------------------------------------------------

APP = """
from contextlib import asynccontextmanager
from ragserve import Engine, SamplingParams
from ragserve.testing import ScriptedModel
from ragserve.web.shutdown import graceful_shutdown
from ragserve.web.sse import sse
from starlette.applications import Starlette
from starlette.routing import Route

DEADLINE = 1.5

@asynccontextmanager
async def lifespan(app):
    model = ScriptedModel("x" * 20000, step_seconds=0.005, max_model_len=16000, num_blocks=2000)
    async with Engine.open(model) as engine, graceful_shutdown(engine, deadline=DEADLINE):
        app.state.engine = engine
        yield
    print("lifespan has ended", flush=True)

async def answer(request):
    params = SamplingParams(max_tokens=int(request.query_params["tokens"]))
    return sse(request.app.state.engine.stream("x", params))

app = Starlette(lifespan=lifespan, routes=[Route("/answer", answer)])
"""

SCENARIOS: dict[str, tuple[str, tuple[str, ...], int]] = {
    # name: kind of server, its arguments, its exit code
    "h11": ("h11", (), -signal.SIGTERM),
    "httptools": ("httptools", (), -signal.SIGTERM),
    "uvicorn with workers": ("httptools", ("--workers", "2"), 0),
    "hypercorn": ("hypercorn", (), 0),
    "hypercorn with a worker": (
        "hypercorn",
        ("--workers", "1", "--graceful-timeout", "1"),
        0,
    ),
}


def end_a_server(name: str, folder: Path) -> None:
    kind, arguments, expected = SCENARIOS[name]
    with ServerProcess("application:app", kind, folder=folder, arguments=arguments) as server:
        with (
            raw_request(server.port, "/answer?tokens=15000") as endless,
            raw_request(server.port, "/answer?tokens=20") as brief,
        ):
            read_until(endless, b"event: delta")
            begun = read_until(brief, b"event: delta")
            server.signal(signal.SIGTERM)
            # On a busy machine all of it may have come with the first delta.
            assert b"event: done" in begun + read_until(brief, None)
            last = read_until(endless, None)
        code, output = server.wait()
    assert b"event: done" not in last, name
    data = last[last.rindex(b"event: error\ndata: ") :].split(b"\n")[1]
    error = json.loads(data.removeprefix(b"data: "))
    assert error == {
        "type": "EngineClosedError",
        "message": "the server is shutting down",
        "status": 503,
    }
    assert last.endswith(b"0\r\n\r\n"), name  # the response is complete
    assert "lifespan has ended" in output, name
    if name != "hypercorn with a worker":  # which says that it has cancelled its own tasks
        assert "Traceback" not in output, (name, output)
    assert code == expected, (name, output)


def test_servers_end_with_streams_open(tmp_path: Path) -> None:
    (tmp_path / "application.py").write_text(APP)
    with ThreadPoolExecutor(3) as threads:  # they wait, mostly
        for future in [threads.submit(end_a_server, name, tmp_path) for name in SCENARIOS]:
            future.result()


@pytest.mark.parametrize("kind", SERVERS)
def test_ending_by_hand_from_a_thread_that_has_no_signals(kind: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    shutdown: GracefulShutdown

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        nonlocal shutdown
        async with Engine.open(endless_model()) as app.state.engine:
            async with graceful_shutdown(app.state.engine, deadline=NEVER) as shutdown:
                yield
            app.state.engine.terminate()

    async def answer(request: Request) -> Response:
        tokens = int(request.query_params["tokens"])
        return sse(request.app.state.engine.stream("x", short(tokens)))

    async def stop(request: Request) -> Response:
        shutdown.begin_drain()
        shutdown.begin_drain()
        return PlainTextResponse("draining" if shutdown.draining else "?")

    routes = [Route("/answer", answer), Route("/stop", stop, methods=["POST"])]
    with (
        ServerThread(Starlette(lifespan=lifespan, routes=routes), kind) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as client,
        raw_request(server.port, "/answer?tokens=300") as open_one,
    ):
        begun = read_until(open_one, b"event: delta")
        assert client.post("/stop").text == "draining"
        refused = client.get("/answer?tokens=5")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "EngineClosedError"
        assert b"event: done" in begun + read_until(open_one, None)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
