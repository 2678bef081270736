"""Headers and paths that no client would send: refused or ignored, and never a 500."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from servers import ServerThread, raw_request, read_until
from starlette.applications import Starlette
from starlette.routing import Mount

from ragserve import Engine
from ragserve.testing import ScriptedModel
from ragserve.web import openai_app

BODY = json.dumps({"model": "m", "prompt": "Say", "max_tokens": 1}).encode()


@pytest.fixture(scope="module", params=["h11", "httptools"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    engines: dict[str, Engine | None] = {"m": None}

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with Engine.open(ScriptedModel("Hello.")) as engine:
            engines["m"] = engine
            yield

    routes = [
        Mount("/open", openai_app(engines)),
        Mount("/keys", openai_app(engines, api_keys=["k"], body_timeout=0.2)),
    ]
    with ServerThread(Starlette(routes=routes, lifespan=lifespan), request.param) as server:
        yield server.port


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def ask(port: int, path: str, headers: dict[str, str], body: bytes | None = BODY) -> int:
    if body is not None:
        headers = {"content-type": "application/json", **headers}
    with raw_request(port, path, headers=headers, body=body) as sock:
        return status(read_until(sock, None))


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "x" * 5000},
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": "zz-\u00ff\u00fe-\u00fd", "tracestate": "=,=,=;\u00ff"},
        {"tracestate": "a=b," * 1000, "baggage": "%ff=%,;;=" * 500},
        {"baggage": "a=" + "x" * 9000},
        {"authorization": "Bearer " + "x" * 20_000},
        {"authorization": "\u00ff"},
        {"x-request-id": "a" * 9000},
        {"content-type": "application/json; charset=\u00ff"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "APPLICATION/vnd.api+JSON;;;=;"},
    ],
)
def test_headers_that_mean_nothing(port: int, headers: dict[str, str]) -> None:
    raw = {name: value.encode().decode("utf-8") for name, value in headers.items()}
    assert ask(port, "/open/v1/completions", raw) == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic k", "\u00ff", "k", "x" * 20_000])
def test_authorizations_that_are_none(port: int, value: str) -> None:
    assert ask(port, "/keys/v1/completions", {"authorization": value}) == 401
    assert ask(port, "/keys/metrics", {"authorization": value}, None) == 401


@pytest.mark.parametrize("value", ["", "text/plain", "\u00ff" * 3000, ";;;", "multipart/form-data"])
def test_content_types_that_are_not_json(port: int, value: str) -> None:
    headers = {"content-type": value}
    with raw_request(port, "/open/v1/completions", headers=headers, body=BODY) as sock:
        answer = read_until(sock, None)
    assert status(answer) == 415
    assert len(answer) < 2000


@pytest.mark.parametrize("path", ["%ff%fe", "%00", "%ed%a0%80", "x" * 5000, "..%2f..", "%"])
def test_paths_that_name_no_model(port: int, path: str) -> None:
    assert ask(port, f"/open/v1/models/{path}", {}, None) == 404


def test_half_a_body_is_given_up(port: int) -> None:
    lines = [
        "POST /keys/v1/completions HTTP/1.1",
        "host: x",
        "authorization: Bearer k",
        "content-type: application/json",
        "content-length: 100",
        "",
        '{"model"',
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall("\r\n".join(lines).encode())
        answer = read_until(sock, None)  # to the end of the connection
    assert status(answer) == 408
    assert b"body_timeout" in answer
