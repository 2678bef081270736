"""Keys, rates, and how many requests may be under way; from the outside, and each by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import Message

from ragserve import Engine, InvalidParamsError
from ragserve.testing import ScriptedModel
from ragserve.web import ApiKey, openai_app
from ragserve.web.limits import Concurrency, Keyring, TokenBucket
from ragserve.web.problem import Problem

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Say"}]}
PATIENCE = 120.0


@asynccontextmanager
async def serving(
    model: ScriptedModel | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine, Any]]:
    async with Engine.open(model or ScriptedModel("Hello.")) as engine:
        app = openai_app(engine, **options)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, engine, app


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def code(response: httpx.Response) -> tuple[int, str | None]:
    if response.status_code == 200:
        return 200, None
    return response.status_code, response.json()["error"]["code"]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(PATIENCE):
            await test()

    asyncio.run(bounded())


def test_keys() -> None:
    async def test() -> None:
        keys = ["plain", ApiKey(key="full", name="somebody")]
        async with serving(api_keys=keys) as (client, engine, _):
            for headers in (
                {},
                bearer(""),
                bearer("wrong"),
                bearer("plain2"),
                bearer("plai"),
                {"authorization": "Basic plain"},
                {"authorization": b"Bearer \xff".decode("latin-1")},
            ):
                raw = [(k, v.encode("latin-1")) for k, v in headers.items()]
                for response in (
                    await client.post(PATH, json=CHAT, headers=raw),
                    await client.get("/v1/models", headers=raw),
                    await client.get("/v1/models/scripted", headers=raw),
                ):
                    assert code(response) == (401, "invalid_api_key")
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["error"]["type"] == "authentication_error"
            assert engine.statistics().num_steps == 0
            for key in ("plain", "full"):
                assert code(await client.post(PATH, json=CHAT, headers=bearer(key))) == (200, None)
                assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
            assert code(await client.get("/health")) == (200, None)

    run(test)


def test_keys_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = ApiKey(key="s3cret", name="somebody")
    assert "s3cret" not in repr(key)

    async def test() -> None:
        async with serving(api_keys=[key], log_requests=True) as (client, _, _):
            await client.post(PATH, json=CHAT, headers=bearer("s3cret"))
            await client.post(PATH, json=CHAT, headers=bearer("s3cret2"))

    run(test)
    records = [record for record in caplog.records if record.name == "ragserve.web"]
    assert [(record.key, record.status) for record in records] == [("somebody", 200), (None, 401)]
    assert "s3cret" not in "".join(str(vars(record)) for record in records)


def test_namespaces_of_keys() -> None:
    spaces: list[str] = []

    def on_step(plan: Any) -> None:
        spaces.extend(chunk.request.namespace for chunk in plan.chunks)

    async def test() -> None:
        keys = [ApiKey(key="a", name="a", namespace="tenant"), ApiKey(key="b", name="b")]
        model = ScriptedModel("", on_step=on_step)
        async with serving(model, api_keys=keys) as (client, _, _):

            async def ask(key: str, namespace: str | None) -> httpx.Response:
                body = {**CHAT, "namespace": namespace}
                return await client.post(PATH, json=body, headers=bearer(key))

            for key, namespace in (
                ("a", None),
                ("a", "tenant"),
                ("b", None),
                ("b", "x"),
            ):
                assert code(await ask(key, namespace)) == (200, None)
            for key, namespace in (("a", "x"), ("a", ""), ("b", "tenant")):
                response = await ask(key, namespace)
                assert code(response) == (403, "namespace_not_allowed")
                assert response.json()["error"]["param"] == "namespace"

    run(test)
    assert spaces == ["tenant", "tenant", "", "x"]


def test_rate_of_a_key() -> None:
    async def test() -> None:
        keys = [ApiKey(key="a", name="a", requests_per_minute=2), "b"]
        async with serving(api_keys=keys) as (client, _, _):
            for expected in ((200, None), (200, None), (429, "rate_limit_exceeded")):
                response = await client.post(PATH, json=CHAT, headers=bearer("a"))
                assert code(response) == expected
            assert 1 <= int(response.headers["retry-after"]) <= 30
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert code(await client.post(PATH, json=CHAT, headers=bearer("b"))) == (200, None)
            assert (await client.get("/v1/models", headers=bearer("a"))).status_code == 200

    run(test)


def test_token_bucket() -> None:
    now = 0.0
    bucket = TokenBucket(30, lambda: now)
    assert [bucket.take() for _ in range(30)] == [0.0] * 30
    assert bucket.take() == pytest.approx(2)
    now = 1.0
    assert bucket.take() == pytest.approx(1)
    now = 2.0
    assert bucket.take() == 0.0
    assert bucket.take() == pytest.approx(2)
    now = 1000.0
    assert [bucket.take() for _ in range(31)] == [0.0] * 30 + [pytest.approx(2)]
    now = 999.0  # a clock that goes back takes nothing away
    assert bucket.take() == pytest.approx(2)


class Conversation:
    """One request to an ASGI application, step by step, with a client that can leave."""

    def __init__(self, app: Any, body: bytes, key: str | None, headers: dict[str, str]) -> None:
        self.app = app
        self.sent: list[Message] = []
        self.started = anyio.Event()
        self.left = anyio.Event()
        self._body: list[bytes] = [body]
        headers = {"content-type": "application/json", **headers}
        if key is not None:
            headers |= bearer(key)
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
        }

    async def receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.started.set()

    async def run(self) -> None:
        await self.app(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


ENDLESS = b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"stream":%s}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whose", ["key", "server"])
@pytest.mark.parametrize("end", ["finish", "leave", "cancel"])
def test_places_are_given_back(stream: bool, whose: str, end: str) -> None:
    enough: list[bool] = []

    def reply(tokens: list[int]) -> int:
        return 256 if enough else ord("a")

    async def test() -> None:
        if whose == "key":
            options: dict[str, Any] = {
                "api_keys": [ApiKey(key="k", name="k", max_concurrent=1), "other"]
            }
        else:
            options = {"api_keys": ["k", "other"], "max_concurrent_requests": 1}
        model = ScriptedModel(reply, step_seconds=0.002)
        async with serving(model, **options) as (client, engine, app):
            body = ENDLESS % (b"true" if stream else b"false")
            for _ in range(2):
                first = Conversation(app, body, "k", {})
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(first.run)
                    while not engine.statistics().num_running:
                        await anyio.sleep(0.001)
                    if stream:
                        await first.started.wait()
                    response = await client.post(PATH, json=CHAT, headers=bearer("k"))
                    assert code(response) == (429, "concurrency_limit_exceeded")
                    assert response.headers["retry-after"] == "1"
                    if whose == "key":
                        body_of_other = {**CHAT, "max_tokens": 1}
                        response = await client.post(
                            PATH, json=body_of_other, headers=bearer("other")
                        )
                        assert response.status_code == 200
                    if end == "finish":
                        enough.append(True)
                    elif end == "leave":
                        first.left.set()
                    else:
                        tasks.cancel_scope.cancel()
                enough.clear()
                response = await client.post(
                    PATH, json={**CHAT, "max_tokens": 1}, headers=bearer("k")
                )
                assert response.status_code == 200
                while engine.statistics().blocks_used:
                    await anyio.sleep(0.001)
                await engine.check_integrity()

    run(test)


def test_a_client_that_leaves_while_it_sends() -> None:
    async def test() -> None:
        async with serving(max_concurrent_requests=1) as (client, engine, app):
            conversation = Conversation(app, b"", None, {})
            conversation._body = []
            conversation.left.set()
            await conversation.run()
            assert conversation.status == 499
            assert engine.statistics().num_steps == 0
            assert (await client.post(PATH, json=CHAT)).status_code == 200

    run(test)


def test_places_without_a_limit() -> None:
    places = Concurrency(None, "this server")
    with places.slot(), places.slot():
        assert places.num_held == 2
    assert places.num_held == 0
    places = Concurrency(1, "this server")
    with places.slot(), pytest.raises(Problem, match="1 requests under way"), places.slot():
        pass
    assert places.num_held == 0


def test_limits_that_cannot_be() -> None:
    for options in (
        {"key": ""},
        {"key": "schlüssel"},
        {"requests_per_minute": 0},
        {"max_concurrent": 0},
        {"max_concurrent": 1.5},
    ):
        with pytest.raises(InvalidParamsError):
            ApiKey(**{"key": "k", "name": "n", **options})
    with pytest.raises(InvalidParamsError, match="api_keys"):
        Keyring(["k", ApiKey(key="k", name="n")])
    for options in ({"max_body_bytes": 0}, {"max_concurrent_requests": 0}):
        with pytest.raises(InvalidParamsError):
            openai_app({}, **options)
