"""Answers over HTTP: what arrives, and what is freed when a client leaves, at whatever moment."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from servers import SERVERS, ServerThread, raw_request, read_until
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from ragserve import (
    Chunk,
    Engine,
    EngineClosedError,
    EngineDeadError,
    InvalidParamsError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RagPipeline,
    SamplingParams,
    ScoredChunk,
    Stream,
)
from ragserve.engine import StepPlan
from ragserve.retrieval import EmbeddingError
from ragserve.testing import ScriptedModel
from ragserve.web.errors import ClientLeftError, error_response, retry_after, status_of
from ragserve.web.sse import Event, SSEResponse, sse, until_disconnect

LINE = "Grüße, 世界 🙂!\nA line.\r\n"
REPLY = LINE * 20
TOKENS = len(LINE.encode()) * 20
PATIENCE = 120.0
KNOBS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 2,
    "stream_buffer_tokens": 8,
    "stream_interval": 0.0,
}
WRAPPERS = ("bare", "base", "body", "gzip", "both", "fastapi")


class Gate:
    """Holds the engine at the beginning of each step while it is shut."""

    def __init__(self) -> None:
        self._reached: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._shut = False

    def __call__(self, plan: StepPlan) -> None:
        if self._shut:
            self._reached.put(plan)
            self._permits.get(timeout=PATIENCE)

    def shut(self) -> None:
        self._reached, self._permits = queue.SimpleQueue(), queue.SimpleQueue()
        self._shut = True

    def wait(self) -> StepPlan:
        """The step that is held next."""
        return self._reached.get(timeout=PATIENCE)

    def step(self) -> None:
        self._permits.put(None)

    def open(self) -> None:
        self._shut = False
        self._permits.put(None)

    def until(self, condition: Callable[[StepPlan], bool]) -> None:
        """Step until one that fulfils the condition is held."""
        while not condition(self.wait()):
            time.sleep(0.001)
            self.step()


class Places:
    """An embedder and a retriever, which wait for ever when told to."""

    model_name = "places"
    name = "places"
    dimension: int | None = 2

    def __init__(self) -> None:
        self.hang_in = ""
        self.entered = threading.Event()
        self.running = 0

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        await self._pass("embedding")
        return [[1.0, 0.0] for _ in texts]

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
        await self._pass("retrieval")
        chunk = Chunk("c1", "d1", "A document.\nOf two lines.", 0, {"title": "Größe"})
        return [ScoredChunk(chunk, 0.5)]

    async def _pass(self, stage: str) -> None:
        if self.hang_in == stage:
            self.running += 1
            self.entered.set()
            try:
                await anyio.sleep_forever()
            finally:
                self.running -= 1


class Site:
    """An application with every kind of endpoint, bare and behind middlewares."""

    def __init__(self, model: ScriptedModel | None = None) -> None:
        self.gate = Gate()
        self.model = model or ScriptedModel(REPLY, on_step=self.gate)
        self.places = Places()
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.num_open = 0
        self.engine: Engine
        self.fat: Stream
        endpoints = {
            "/rag/stream": self.rag_stream,
            "/rag/plain": self.rag_plain,
            "/engine/stream": self.engine_stream,
            "/engine/plain": self.engine_plain,
            "/fat": self.fat_stream,
        }
        methods = ["GET", "POST"]
        routes = [Route(path, endpoint, methods=methods) for path, endpoint in endpoints.items()]
        stacks = {
            "bare": [],
            "base": [Middleware(BaseHTTPMiddleware, dispatch=passing)],
            "body": [Middleware(BaseHTTPMiddleware, dispatch=reading)],
            "gzip": [Middleware(GZipMiddleware, minimum_size=1)],
            "both": [
                Middleware(BaseHTTPMiddleware, dispatch=passing),
                Middleware(GZipMiddleware, minimum_size=1),
                Middleware(BaseHTTPMiddleware, dispatch=reading),
            ],
        }
        fastapi = FastAPI()
        for path, endpoint in endpoints.items():
            fastapi.add_api_route(path, endpoint, response_model=None, methods=methods)
        mounts = [Mount(f"/{name}", routes=routes, middleware=stacks[name]) for name in stacks]
        self.app = Starlette(
            lifespan=self.lifespan, routes=[*mounts, Mount("/fastapi", app=fastapi)]
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].endswith("ready"):
            await self.app(scope, receive, send)
            return
        error: BaseException | None = None
        self.num_open += 1
        try:
            await self.app(scope, receive, send)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.num_open -= 1
            self.ended.put(error)

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        async with Engine.open(self.model, **KNOBS) as self.engine:
            self.rag = RagPipeline(
                engine=self.engine, index=self.places, embedder=self.places, overlap=False
            )
            yield

    async def rag_stream(self, request: Request) -> Response:
        await request.body()
        return sse(self.rag.stream("Why?", params=params_of(request)), **options_of(request))

    async def rag_plain(self, request: Request) -> Response:
        await request.body()
        answer = await until_disconnect(request, self.rag.answer("Why?", params=params_of(request)))
        return JSONResponse({"text": answer.text})

    async def engine_stream(self, request: Request) -> Response:
        prompt = "x" * int(request.query_params.get("length", 100))
        return sse(self.engine.stream(prompt, params_of(request)), **options_of(request))

    async def engine_plain(self, request: Request) -> Response:
        work = self.engine.generate("x" * 100, params_of(request))
        return JSONResponse({"text": (await until_disconnect(request, work)).text})

    async def fat_stream(self, request: Request) -> Response:
        self.fat = stream = self.engine.stream("fat", params_of(request))

        async def events() -> AsyncIterator[Event]:
            async for delta in stream:
                yield Event(json.dumps({"text": delta.text, "pad": "." * 4000}), "delta")

        return SSEResponse(events(), close=stream.aclose, **options_of(request))

    def wait_for_end(self) -> BaseException | None:
        """Wait until a request is over; what it raised."""
        return self.ended.get(timeout=PATIENCE)

    def check_idle(self) -> None:
        """Nothing runs, and nothing is held."""
        asyncio.run(self.engine.check_integrity())
        statistics = self.engine.statistics()
        assert statistics.num_running == statistics.num_waiting == statistics.blocks_used == 0
        assert self.places.running == 0

    def reset(self) -> None:
        self.places.hang_in = ""
        self.gate.open()
        wait_until(lambda: self.num_open == 0)
        while not self.ended.empty():
            self.ended.get()


async def passing(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    return response


async def reading(request: Request, call_next: Any) -> Response:
    await request.body()
    response: Response = await call_next(request)
    return response


def params_of(request: Request) -> SamplingParams:
    tokens = int(request.query_params.get("tokens", TOKENS + 1))
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def options_of(request: Request) -> dict[str, Any]:
    names = ("heartbeat", "patience")
    query = request.query_params
    return {name: float(query[name]) if name in query else None for name in names}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass
class Served:
    site: Site
    server: ServerThread


@pytest.fixture(scope="module", params=SERVERS)
def module_server(request: pytest.FixtureRequest) -> Iterator[Served]:
    site = Site()
    with ServerThread(site, request.param, send_buffer=8192) as server:
        yield Served(site, server)
        site.gate.open()


@pytest.fixture
def served(module_server: Served) -> Iterator[Served]:
    module_server.site.reset()
    yield module_server
    module_server.site.reset()


def get(served: Served, path: str, **headers: str) -> httpx.Response:
    headers = {"accept-encoding": "gzip", **headers}
    return httpx.get(served.server.url + path, headers=headers, timeout=PATIENCE, trust_env=False)


def parse(body: str) -> list[tuple[str, Any]]:
    """Events as (type, data); comments are left out."""
    assert body.endswith("\n\n")
    events = []
    for block in body[:-2].split("\n\n"):
        lines = block.split("\n")
        if lines != [": keep-alive"]:
            kind, data = lines  # so the data are one line
            assert kind.startswith("event: ")
            assert data.startswith("data: ")
            events.append((kind[7:], json.loads(data[6:])))
    return events


def text_of(events: Sequence[tuple[str, Any]]) -> str:
    return "".join(data["text"] for kind, data in events if kind == "delta")


# -- what arrives ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_events_of_an_answer(served: Served, wrapper: str) -> None:
    response = get(served, f"/{wrapper}/rag/stream")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    events = parse(response.content.decode())
    assert [kind for kind, _ in (events[0], events[-1])] == ["retrieval", "done"]
    assert {kind for kind, _ in events[1:-1]} == {"delta"}
    source = events[0][1]["sources"][0]
    assert source == {
        "number": 1,
        "id": "c1",
        "document_id": "d1",
        "score": 0.5,
        "title": "Größe",
        "text": "A document.\nOf two lines.",
    }
    assert events[0][1]["dropped"] == 0
    assert text_of(events) == REPLY
    done = events[-1][1]
    assert done["finish_reason"] == "stop"
    assert done["usage"]["completion_tokens"] == TOKENS + 1
    assert done["sources"] == [1]
    stages = ("embedding", "retrieval", "context", "queue", "prefill", "decode")
    assert sum(done["timings"][stage] for stage in stages) == pytest.approx(
        done["timings"]["total"]
    )
    assert served.site.wait_for_end() is None


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_event_arrives_while_the_next_is_made(served: Served, wrapper: str) -> None:
    site = served.site
    site.gate.shut()
    headers = {"accept-encoding": "gzip"}
    with raw_request(served.server.port, f"/{wrapper}/rag/stream", headers=headers) as client:
        read_until(client, b"event: retrieval")
        site.gate.until(lambda plan: plan.chunks[0].decode)
        read_until(client, b"event: delta\ndata: " + b'{"text":"G"}\n\n')
        for character in "r", "ü":
            for _ in character.encode():
                site.gate.step()
                site.gate.wait()
            read_until(client, f'{{"text":"{character}"}}\n\n'.encode())
        site.gate.open()
        assert b"event: done" in read_until(client, None)


def test_a_plain_stream_says_what_applies_to_it(served: Served) -> None:
    events = parse(get(served, "/bare/engine/stream?tokens=3").text)
    assert text_of(events) == "Gr"  # the last token is half a character
    done = events[-1][1]
    assert set(done["timings"]) == {"queue", "prefill", "decode", "total", "time_to_first_token"}
    assert done["finish_reason"] == "length"
    assert done["sources"] == []
    assert done["trace_id"] is None


def test_an_error_before_the_first_event_has_a_status(served: Served) -> None:
    response = get(served, "/both/engine/stream?length=5000")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "PromptTooLongError"
    assert "5000 tokens" in error["message"]
    assert served.site.wait_for_end() is None


def test_a_heartbeat_comes_before_the_first_event(served: Served) -> None:
    site = served.site
    site.gate.shut()
    path = "/both/engine/stream?heartbeat=0.01&tokens=3"
    with raw_request(served.server.port, path) as client:
        assert b"200" in read_until(client, b": keep-alive\n\n")
        site.gate.until(lambda plan: plan.chunks[0].decode)
        read_until(client, b"event: delta")
        read_until(client, b": keep-alive\n\n")
        site.gate.open()
        assert b"event: done" in read_until(client, None)


# -- clients that leave ---------------------------------------------------------------------


def has_begun(stage: str, served: Served) -> None:
    """Step until the one request is at that stage; the engine is held then."""
    gate = served.site.gate
    if stage == "prefill":
        gate.until(lambda plan: plan.chunks[0].start > 0)
    elif stage == "decode":
        gate.until(lambda plan: plan.chunks[0].decode)
    else:
        assert served.site.places.entered.wait(PATIENCE)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("stage", ["embedding", "retrieval", "prefill", "decode"])
def test_a_client_leaves(served: Served, stage: str, wrapper: str) -> None:
    site = served.site
    kinds = ["rag/stream", "rag/plain"]
    if stage in ("prefill", "decode"):
        kinds += ["engine/stream", "engine/plain"]
    for kind in kinds:
        body = b'{"question": "Why?"}' if stage == "decode" and kind.startswith("rag") else None
        asyncio.run(site.engine.reset_prefix_cache())
        site.places.hang_in = stage
        site.places.entered.clear()
        site.gate.shut()
        with raw_request(served.server.port, f"/{wrapper}/{kind}", body=body):
            has_begun(stage, served)
        # The engine is held: it is the connection's end that ends the request, not an event.
        assert site.wait_for_end() is None
        steps = len(site.model.plans)
        site.gate.step()
        site.check_idle()
        assert len(site.model.plans) == steps


@pytest.mark.parametrize("wrapper", ["bare", "both"])
@pytest.mark.parametrize("kind", ["rag/stream", "rag/plain"])
def test_a_client_leaves_the_queue(served: Served, kind: str, wrapper: str) -> None:
    site, port = served.site, served.server.port
    statistics = site.engine.statistics
    site.gate.shut()
    before = len(site.model.plans)
    with raw_request(port, "/bare/engine/stream") as a, raw_request(port, "/bare/engine/stream"):
        site.gate.until(lambda plan: statistics().num_running == 2)
        site.gate.step()
        with raw_request(port, f"/{wrapper}/{kind}"):
            site.gate.until(lambda plan: statistics().num_waiting == 1)
        assert site.wait_for_end() is None
        site.gate.step()
        site.gate.until(lambda plan: True)
        assert statistics().num_waiting == 0
        assert statistics().num_running == 2
        site.gate.open()
        assert b"event: done" in read_until(a, None)
    wait_until(lambda: statistics().num_running == 0)
    site.check_idle()
    assert len({request_id for plan in site.model.plans[before:] for request_id, *_ in plan}) == 2


def test_crowds_that_connect_and_vanish(served: Served) -> None:
    site = served.site

    def steps_of_an_answer() -> int:
        before = len(site.model.plans)
        assert text_of(parse(get(served, "/bare/rag/stream").text)) == REPLY
        assert site.wait_for_end() is None
        return len(site.model.plans) - before

    steps_of_an_answer()  # after which its prompt is cached
    steps = steps_of_an_answer()
    for _ in range(3):
        site.gate.shut()
        clients = [raw_request(served.server.port, "/both/rag/stream") for _ in range(64)]
        site.gate.wait()
        for client in clients:
            client.close()
        for _ in clients:
            assert site.wait_for_end() is None
        site.gate.open()
        site.check_idle()
    assert steps_of_an_answer() == steps


# -- clients that do not read ---------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["bare", "both"])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_does_not_read_pauses_its_own_stream(
    served: Served, wrapper: str, leaves: bool
) -> None:
    site = served.site
    path = f"/{wrapper}/fat"
    with raw_request(served.server.port, path, receive_buffer=4096) as client:
        read_until(client, b"event: delta")
        stream = site.fat
        sent = 0
        while stream.num_sent > sent:  # until it stands still while another answer is made
            sent = stream.num_sent
            assert text_of(parse(get(served, "/bare/engine/stream").text)) == REPLY
            assert site.wait_for_end() is None
        assert stream.paused
        assert sent < TOKENS
        assert sent - stream.num_read <= KNOBS["stream_buffer_tokens"] + 1
        if not leaves:
            assert b'"A' not in read_until(client, None)[-4000:]  # padding, to the end
            assert stream.completion.text == REPLY
            assert stream.num_read == stream.num_sent == TOKENS + 1
    assert site.wait_for_end() is None
    site.check_idle()


def test_a_client_that_never_reads_counts_as_gone(served: Served) -> None:
    path = "/bare/fat?heartbeat=0.05&patience=0.05"
    with raw_request(served.server.port, path, receive_buffer=4096):
        assert served.site.wait_for_end() is None
        served.site.check_idle()


def test_a_server_that_ends_a_response(request: pytest.FixtureRequest) -> None:
    for kind in SERVERS:
        site = Site()
        wait = "graceful_timeout" if kind == "hypercorn" else "timeout_graceful_shutdown"
        with ServerThread(site, kind, **{wait: 0}) as server:
            site.gate.shut()
            with raw_request(server.port, "/bare/rag/stream") as client:
                read_until(client, b"event: retrieval")
                server.request_stop()
                rest = read_until(client, None)
            assert isinstance(site.wait_for_end(), asyncio.CancelledError)
            assert b'event: error\ndata: {"type":"EngineClosedError"' in rest
            site.gate.open()


# -- without a server -----------------------------------------------------------------------


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Client:
    """Calls an ASGI app and keeps what it sends."""

    def __init__(self, *, fail_after: int | None = None) -> None:
        self.messages: list[Any] = []
        self.left = anyio.Event()
        self._fail_after = fail_after

    async def call(self, app: Any) -> None:
        await app({"type": "http", "method": "GET", "headers": []}, self.receive, self.send)

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.messages) == self._fail_after:
            raise ConnectionResetError("closed")
        self.messages.append(message)
        await anyio.lowlevel.checkpoint()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def is_complete(self) -> bool:
        return self.messages[-1].get("more_body") in (None, False)


async def nothing() -> None:
    pass


async def raising(error: Exception, before: Sequence[Event | bytes] = ()) -> AsyncIterator[Event]:
    for event in before:
        yield event  # type: ignore[misc]
    raise error


ERRORS: list[tuple[Exception, int, float | None]] = [
    (InvalidParamsError("top_p", 2, "0 to 1"), 400, None),
    (PromptTooLongError(9, 8, "long"), 400, None),
    (QueueFullError("requests", 9, 8, 2.5), 429, 2.5),
    (QueueTimeoutError(3.1, 3.0), 503, 3.0),
    (EngineClosedError("the engine is draining"), 503, 5.0),
    (EngineDeadError("a step failed: secret"), 503, None),
    (EmbeddingError("not finite"), 500, None),
    (ValueError("secret"), 500, None),
    (HTTPException(404), 404, None),
    (ClientLeftError(), 499, None),
]


@pytest.mark.parametrize(("error", "status", "wait"), ERRORS)
def test_what_errors_are_in_http(error: Exception, status: int, wait: float | None) -> None:
    assert status_of(error) == status
    assert retry_after(error) == wait
    response = error_response(error)
    assert response.headers.get("retry-after") == (None if wait is None else f"{-(-wait // 1):.0f}")
    assert b"secret" not in response.body


@pytest.mark.anyio
async def test_the_status_of_a_cancellation() -> None:
    statuses: list[int] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as cancelled:
            statuses.append(status_of(cancelled))
            raise
    assert statuses == [499]
    assert status_of(KeyboardInterrupt()) == 500


@pytest.mark.anyio
@pytest.mark.parametrize(("error", "status", "wait"), ERRORS[:-1])
async def test_errors_before_and_after_the_headers(
    error: Exception, status: int, wait: float | None
) -> None:
    early = Client()
    await early.call(SSEResponse(raising(error), close=nothing))
    assert early.status == status
    assert early.is_complete
    kind = json.loads(early.body)["error"]["type"]

    late = Client()
    events = raising(error, [Event("1", "delta")])
    await late.call(SSEResponse(events, close=nothing))
    assert late.status == 200
    assert late.is_complete
    (_, one), (event, data) = parse(late.body)
    assert (one, event) == (1, "error")
    assert data["type"] == kind
    assert data["status"] == status
    assert "secret" not in late.body


@pytest.mark.anyio
async def test_other_forms_of_errors_can_be_given() -> None:
    def respond(error: Exception) -> Response:
        return Response(f"no: {error}", 418)

    def tell(error: Exception) -> bytes:
        return f"data: no: {error}\n\ndata: [DONE]\n\n".encode()

    for before, expected in (
        ([], "no: x"),
        ([b"data: 1\n\n"], "data: 1\n\ndata: no: x\n\ndata: [DONE]\n\n"),
    ):
        client = Client()
        events = raising(ValueError("x"), before)
        response = SSEResponse(events, close=nothing, on_error=respond, error_event=tell)
        await client.call(response)
        assert client.body == expected


@pytest.mark.anyio
@pytest.mark.parametrize("fails_at_step", [0, 6])
async def test_an_engine_that_dies(fails_at_step: int) -> None:
    client = Client()
    async with Engine.open(ScriptedModel(REPLY, fail_at_step=fails_at_step), **KNOBS) as engine:
        await client.call(sse(engine.stream("x" * 40), heartbeat=None))
    assert client.is_complete
    if fails_at_step == 0:
        assert client.status == 503
        assert json.loads(client.body)["error"]["type"] == "EngineDeadError"
    else:
        assert parse(client.body)[-1][1]["type"] == "EngineDeadError"


@pytest.mark.anyio
@pytest.mark.parametrize("fail_after", [0, 1, 5])
async def test_sending_fails_because_the_client_has_left(fail_after: int) -> None:
    async with Engine.open(ScriptedModel(REPLY), **KNOBS) as engine:
        client, done = Client(fail_after=fail_after), anyio.Event()

        async def finish() -> None:
            done.set()

        stream = engine.stream("x" * 40)
        await client.call(sse(stream, background=BackgroundTask(finish)))
        assert len(client.messages) == fail_after
        assert stream.ended
        assert done.is_set()
        await engine.check_integrity()
        assert engine.statistics().blocks_used == 0


@pytest.mark.anyio
@pytest.mark.parametrize("num_messages", [0, 2, 5])
async def test_the_server_cancels(num_messages: int) -> None:
    gate = Gate()
    async with Engine.open(ScriptedModel(REPLY, on_step=gate), **KNOBS) as engine:
        client, stream = Client(), engine.stream("x" * 40)
        if num_messages == 0:
            gate.shut()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call, sse(stream))
            if num_messages == 0:
                await anyio.to_thread.run_sync(gate.wait)
            else:
                while len(client.messages) < num_messages:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        gate.open()
        assert stream.ended
        assert client.is_complete
        if num_messages == 0:
            assert client.status == 503
            assert client.messages[0]["headers"]
        else:
            assert parse(client.body)[-1][0] == "error"
        await engine.check_integrity()
        assert engine.statistics().blocks_used == 0


@pytest.mark.anyio
async def test_a_server_that_cancels_is_not_kept_waiting_by_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules[SSEResponse.__module__]
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.01)
    ended = anyio.Event()

    class Deaf(Client):
        async def send(self, message: Any) -> None:
            await anyio.sleep_forever()

    async def close() -> None:
        ended.set()

    async def events() -> AsyncIterator[Event]:
        yield Event("1")

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Deaf().call, SSEResponse(events(), close=close))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert ended.is_set()


@pytest.mark.anyio
async def test_choices_and_token_ids() -> None:
    async with Engine.open(ScriptedModel("ab"), **KNOBS) as engine:
        client = Client()
        stream = engine.stream("x", SamplingParams(n=2, max_tokens=8))
        await client.call(sse(stream, token_ids=True))
    events = parse(client.body)
    deltas = [data for kind, data in events if kind == "delta"]
    for index in 0, 1:
        mine = [data for data in deltas if data.get("index", 0) == index]
        assert "".join(data["text"] for data in mine) == "ab"
        assert [token for data in mine for token in data["token_ids"]] == [97, 98, 256]
    assert events[-1][1]["finish_reasons"] == ["stop", "stop"]


@pytest.mark.anyio
async def test_generators_are_closed_and_headers_can_be_given() -> None:
    log: list[str] = []

    async def events() -> AsyncIterator[Event]:
        try:
            while True:
                yield Event("1")
        finally:
            log.append("generator")

    async def close() -> None:
        log.append("close")

    client = Client(fail_after=3)
    await client.call(SSEResponse(events(), close=close, headers={"X-Request-Id": "7"}))
    assert log == ["generator", "close"]
    assert (b"x-request-id", b"7") in client.messages[0]["headers"]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Event("x"), "data: x\n\n"),
        (
            Event("a\nb\r\nc\rd\n", "e", "7"),
            "event: e\nid: 7\ndata: a\ndata: b\ndata: c\ndata: d\ndata: \n\n",
        ),
        (Event("世界\u2028🙂"), "data: 世界\u2028🙂\n\n"),
        (Event("\ud800"), "data: \\ud800\n\n"),
    ],
)
def test_the_encoding_of_an_event(event: Event, expected: str) -> None:
    assert event.encode().decode() == expected


@pytest.mark.parametrize("event", [Event("", "a\nb"), Event("", id="a\rb"), Event("", id="\0")])
def test_an_event_whose_fields_break_lines(event: Event) -> None:
    with pytest.raises(ValueError, match="one line"):
        event.encode()


# -- until_disconnect -----------------------------------------------------------------------


async def fail(error: Exception) -> None:
    raise error


async def forever(ended: anyio.Event) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        ended.set()


@pytest.mark.anyio
async def test_until_disconnect() -> None:
    async def value() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    client = Client()
    assert await until_disconnect(client.receive, value()) == 7
    with pytest.raises(QueueFullError):
        await until_disconnect(client.receive, fail(QueueFullError("requests", 9, 8, 1.0)))
    ended = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def leave() -> None:
            await anyio.wait_all_tasks_blocked()
            client.left.set()

        tasks.start_soon(leave)
        with pytest.raises(ClientLeftError):
            await until_disconnect(client.receive, forever(ended))
    assert ended.is_set()


@pytest.mark.anyio
async def test_until_disconnect_is_cancelled_as_any_call() -> None:
    ended = anyio.Event()
    with anyio.move_on_after(0.01) as scope:
        await until_disconnect(Client().receive, forever(ended))
    assert scope.cancelled_caught
    assert ended.is_set()


@pytest.mark.anyio
async def test_until_disconnect_passes_on_what_receive_raises() -> None:
    async def receive() -> Any:
        raise LookupError("receive")

    work: Awaitable[None] = forever(anyio.Event())
    with pytest.raises(LookupError):
        await until_disconnect(receive, work)
