"""Worker threads and the places before them: bounded, and those of one process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import Any

import anyio
import pytest

from ragserve.engine import InvalidParamsError, QueueFullError
from ragserve.workers import HomeProcess, Places, Workers


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_places_are_bounded_and_given_back() -> None:
    places = Places("calls", 2)
    with places.taken(), places.taken():
        with pytest.raises(QueueFullError, match="raise max_queued_calls") as caught:
            places.taken().__enter__()
        assert caught.value.retry_after > 0
        assert places.num_taken == 2
    with pytest.raises(LookupError), places.taken():
        raise LookupError
    assert places.num_taken == 0
    for most in (0, True, 1.5, "3"):
        with pytest.raises(InvalidParamsError, match="max_queued_calls"):
            Places("calls", most)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_what_is_cancelled_is_not_begun() -> None:
    workers, gate = Workers(1, "test", HomeProcess("it")), threading.Event()
    done: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(workers.run, gate.wait, 60)
        await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await workers.run(done.append, "cancelled")
        gate.set()
    assert await workers.run(len, "four") == 4
    assert done == []


def test_a_process_is_its_own() -> None:
    process = HomeProcess("it")
    assert not process.forked
    process.check()
    process.check()
    assert not process.forked


FORK = """
import asyncio, os, signal, sys, traceback
import numpy as np
from ragserve import Chunk, Document, FaissIndex, RagPipeline, SentenceTransformerEmbedder
from ragserve.engine import Engine, EngineClosedError
from ragserve.testing import ScriptedModel

class Model:
    def encode(self, texts):
        return np.array([[1.0 + len(text), 1.0] for text in texts], np.float32)

embedder = SentenceTransformerEmbedder(Model())
untouched = SentenceTransformerEmbedder(Model())
index = FaissIndex(embedder, name="kb")

async def before():
    global rag
    engine = await Engine.open(ScriptedModel("Yes."))
    rag = RagPipeline(engine=engine, index=index)
    await index.add([Document("a", "one"), Document("b", "two")])
    await rag.answer("One?")

async def refused(name, call):
    try:
        await asyncio.wait_for(call(), 60)
    except EngineClosedError as error:
        assert str(os.getpid()) in str(error) and str(os.getppid()) in str(error), error
        print(name, "refused", flush=True)

async def in_child():
    await refused("embed", lambda: embedder.embed(["x"]))
    await refused("search", lambda: index.search("x"))
    await refused("vector", lambda: index.search(np.ones(2, np.float32)))
    await refused("add", lambda: index.add([Document("c", "three")]))
    await refused("save", lambda: index.save(sys.argv[1]))
    await refused("answer", lambda: rag.answer("One?"))
    await refused("warm", lambda: rag.warm(top=1))
    await refused("pin", lambda: rag.pin_system())
    await embedder.aclose()
    assert (await untouched.embed(["x"])).shape == (1, 2)
    fresh = FaissIndex(SentenceTransformerEmbedder(Model()))
    await fresh.add([Document("a", "one")])
    assert len(await fresh.search("one")) == 1
    print("fresh ones work", flush=True)

asyncio.run(before())
child = os.fork()
if not child:
    signal.alarm(120)
    status = 1
    try:
        asyncio.run(in_child())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert len(asyncio.run(index.search("one"))) == 2
print("the parent goes on")
asyncio.run(rag.engine.aclose())
"""


def test_after_a_fork_all_say_so(tmp_path: Any) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", textwrap.dedent(FORK), str(tmp_path / "kb")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    calls = ("embed", "search", "vector", "add", "save", "answer", "warm", "pin")
    assert result.stdout.splitlines() == [
        *(f"{call} refused" for call in calls),
        "fresh ones work",
        "the parent goes on",
    ]
