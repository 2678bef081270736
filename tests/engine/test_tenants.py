"""A tenant sees nothing of what another sent: what it can read is equal, whatever that was."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from ragserve import Engine
from ragserve.testing import ScriptedModel
from ragserve.web import ApiKey, openai_app

PATIENCE = 60.0
SECRET = "The merger with Initech is announced on Friday, and nobody may know of it before."
OTHER = "The picnic beside the lake is planned for Sunday, and everybody may bring cakess."
assert len(SECRET) == len(OTHER)

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
KEYS = [
    ApiKey(key="a", name="A", namespace="a"),
    ApiKey(key="b", name="B", namespace="b"),
    ApiKey(key="none", name="without a namespace"),
    ApiKey(key="operator", name="operator", metrics=True),
]


class Tenant:
    """A client with a key, that writes down all that it is told."""

    def __init__(self, client: httpx.AsyncClient, key: str | None) -> None:
        self._client = client
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.transcript: list[Any] = []

    async def get(self, path: str) -> None:
        self._note(await self._client.get(path, headers=self._headers))

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> None:
        body = {"model": "m", "max_tokens": 3, "temperature": 0, **body}
        headers = {**self._headers, **(headers or {})}
        self._note(await self._client.post(path, json=body, headers=headers))

    def _note(self, response: httpx.Response) -> None:
        text = re.sub(r'"(?:chatcmpl|cmpl)-[0-9a-f]{24}"', '"ID"', response.text)
        text = re.sub(r'"created":\d+', '"created":0', text)
        # Seconds that stages took.
        text = re.sub(r'"timings":\{[^}]*\}', '"timings":{}', text)
        if response.headers["content-type"].startswith("text/event-stream"):
            text = self._joined(text)
        headers = {k: v for k, v in response.headers.items() if k != "x-request-id"}
        headers.pop("content-length", None)
        self.transcript.append((response.status_code, headers, text))

    @staticmethod
    def _joined(text: str) -> str:
        """A stream as one chunk: how many tokens each has depends on the time."""
        *lines, done = [line[6:] for line in text.splitlines() if line]
        said, kept = "", dict[str, Any]()
        for chunk in map(json.loads, lines):
            for choice in chunk.pop("choices", ()):
                said += choice.get("text") or choice.get("delta", {}).get("content") or ""
                kept["finish_reason"] = choice["finish_reason"]
            kept |= chunk
        return json.dumps([said, kept, done])


async def tell(tenant: Tenant, text: str) -> None:
    """Send a text in every way in which one can be sent."""
    for stream in (False, True):
        options: dict[str, Any] = {"stream": stream}
        if stream:
            options["stream_options"] = {"include_usage": True}
        await tenant.post(CHAT, messages=[{"role": "user", "content": text}], **options)
        await tenant.post(COMPLETION, prompt=text, user=text, **options)
    await tenant.post(COMPLETION, prompt=[text, text + text], headers={"x-request-id": "mine"})
    await tenant.post(COMPLETION, prompt=text, echo=True, logprobs=2)
    await tenant.post(
        CHAT,
        messages=[{"role": "user", "content": "What is planned?"}],
        documents=[{"id": "d1", "title": "Plan", "text": text}],
    )
    await tenant.post(COMPLETION, prompt=text, stop=[text])
    await tenant.post(COMPLETION, prompt=text, temperature=-1)
    await tenant.post(CHAT, messages=[{"role": "user", "content": text}], **{text: 1})


async def look(tenant: Tenant) -> None:
    """Look at everything that a route shows, and guess."""
    for path in ("/health", "/v1/models", "/v1/models/m", "/v1/models/x", "/metrics", "/nothing"):
        await tenant.get(path)
    await tell(tenant, SECRET)
    for namespace in ("a", "b", "", "c"):
        await tenant.post(COMPLETION, prompt=SECRET, namespace=namespace)
    await tenant.post(COMPLETION, prompt=SECRET, priority=-1)
    await tenant.post(COMPLETION, prompt=SECRET, request_id="mine")
    await tenant.post(COMPLETION, prompt=SECRET * 100_000)
    await tenant.get("/metrics")


async def scenario(source: Any, first: str, looker: str | None, **knobs: Any) -> list[Any]:
    """What `looker` is told after tenant A has sent `first`."""
    with anyio.fail_after(PATIENCE):
        async with Engine.open(source, seed=1, **knobs) as engine:
            app = openai_app({"m": engine}, api_keys=KEYS)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await tell(Tenant(client, "a"), first)
                tenant = Tenant(client, looker)
                await look(tenant)
                await tell(Tenant(client, "a"), first)
                await look(tenant)
                return tenant.transcript


@pytest.mark.parametrize("looker", ["b", "none", None])
def test_what_a_tenant_sees_is_the_same_whatever_another_sent(looker: str | None) -> None:
    def run(first: str) -> list[Any]:
        return asyncio.run(scenario(ScriptedModel("Nothing."), first, looker))

    seen = run(SECRET)
    assert seen == run(OTHER)
    # It was answered, unless it has no key; and one's own text is found again.
    answered = [text for status, _, text in seen if status == 200]
    assert len(answered) >= (2 if looker is None else 20)
    found = any(re.search(r'"cached_tokens":[1-9]', text) for text in answered)
    assert found == (looker is not None)


def test_a_real_model_tells_no_more(tiny_model: Callable[..., Path]) -> None:
    source = str(tiny_model("llama"))

    def run(first: str) -> list[Any]:
        return asyncio.run(scenario(source, first, "b", num_threads=1))

    assert run(SECRET) == run(OTHER)


def test_the_comparison_sees_what_is_shared() -> None:
    """A tenant in the same namespace can tell: so the tests above would notice."""

    def run(first: str) -> list[Any]:
        return asyncio.run(scenario(ScriptedModel("Nothing."), first, "a"))

    assert run(SECRET) != run(OTHER)


def test_who_may_read_metrics() -> None:
    async def statuses() -> list[int]:
        async with Engine.open(ScriptedModel("Nothing.")) as engine:
            transport = httpx.ASGITransport(openai_app(engine, api_keys=KEYS))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                tenants = [Tenant(client, key) for key in (None, "wrong", "a", "none", "operator")]
                for tenant in tenants:
                    await tenant.get("/metrics")
                return [tenant.transcript[0][0] for tenant in tenants]

    assert asyncio.run(statuses()) == [401, 401, 403, 403, 200]


@pytest.mark.parametrize(
    ("options", "key", "priorities"),
    [
        ({}, None, {None: 0, 0: 0, 7: 7, -1: None, -(2**40): None}),
        ({"min_priority": -5}, None, {None: 0, -5: -5, -6: None}),
        ({"min_priority": 3}, None, {None: 3, 2: None, 3: 3}),
        ({"min_priority": -5, "api_keys": ["k"]}, "k", {None: 0, -1: None}),
        (
            {"api_keys": [ApiKey(key="k", name="k", min_priority=-2)]},
            "k",
            {None: 0, -2: -2, -3: None},
        ),
        ({"api_keys": [ApiKey(key="k", name="k", min_priority=4)]}, "k", {None: 4, 0: None, 5: 5}),
    ],
)
def test_priorities_are_bounded(
    options: dict[str, Any], key: str | None, priorities: dict[int | None, int | None]
) -> None:
    """Priorities that were asked for, and those that the engine saw; None is a refusal."""
    seen: list[int] = []

    def on_step(plan: Any) -> None:
        seen.extend(chunk.request.priority for chunk in plan.chunks)

    async def run() -> None:
        async with Engine.open(ScriptedModel("", on_step=on_step)) as engine:
            transport = httpx.ASGITransport(openai_app({"m": engine}, **options))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                for asked, expected in priorities.items():
                    seen.clear()
                    tenant = Tenant(client, key)
                    await tenant.post(COMPLETION, prompt="Say", priority=asked)
                    ((status, _, text),) = tenant.transcript
                    if expected is None:
                        assert status in (400, 403)
                        assert '"param":"priority"' in text
                        assert not seen
                    else:
                        assert status == 200
                        assert set(seen) == {expected}

    asyncio.run(run())
