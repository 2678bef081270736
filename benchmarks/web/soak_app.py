"""The server of the soak test: an application as users write it, on a scripted model.

    python -P benchmarks/web/soak_app.py        # says its port, serves until SIGTERM

Answers are told by the end of the prompt: `[[7:120]]` is answered with the 120 bytes of
`script(7, 120)`, so whoever asked knows what has to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from ragserve import Engine, SamplingParams
from ragserve.testing import ScriptedModel
from ragserve.web import ApiKey, graceful_shutdown, openai_app, sse

MODEL = "scripted"
KEY = "soak-key"
LIMITED_KEY = "soak-key-of-few-requests"
LIMITED = 4
"""Requests that `LIMITED_KEY` may have under way."""
MAX_BODY = 64 * 1024
MAX_MODEL_LEN = 2048
CLOSED = "closed"
"""The last line of standard output, if it ended as it should."""
STEP_SECONDS = 0.002

_EOS, _BOS, _BRACKET = 256, 257, ord("]")
_WORDS = ("fox", "dog", "lazy", "sky", "blue", "größer", "façade", "東京", "空", "🙂", "42", "\n")
_ASCII_WORDS = _WORDS[:5]
_TURN = len(b"..\nassistant\n")
"""Tokens between a message's text and the answer to it, in `byte_tokenizer`'s chat template."""


@functools.lru_cache(1024)
def script(seed: int, length: int) -> bytes:
    """An answer of at most `length` bytes; of an even seed it is ASCII, and exactly as long."""
    chance = random.Random(seed)
    if seed % 2 == 0:
        text = ""
        while len(text) < length:
            text += chance.choice(_ASCII_WORDS) + " "
        return text[:length].encode()
    data = b""
    while len(data) < length:
        data += f"{chance.choice(_WORDS)} ".encode()
    return data[:length].decode("utf-8", "ignore").encode()


def reply(tokens: list[int]) -> int:
    """The next token after a prompt and a part of its answer. No answer has a bracket in it."""
    end = len(tokens) - 1
    while tokens[end] != _BRACKET:
        end -= 1
    begin = end
    while tokens[begin] != ord("["):
        begin -= 1
    seed, length = bytes(tokens[begin + 1 : end - 1]).split(b":")
    answer = script(int(seed), int(length))
    start = end + 1
    if tokens[start : start + 1] == [_EOS]:
        start += _TURN
    done = len(tokens) - start
    return answer[done] if done < len(answer) else _EOS


async def fill_word_cache(engine: Engine) -> None:
    """Have the tokenizer's thread remember as many words as it ever will.

    It keeps the first 10,000 (`tokenizers`' own cache). To the scripted
    model's tokenizer a whole prompt is a word, of some 6 KB there, so memory would grow by 60 MB
    in the first hour, and hide what else might.
    """
    for number in range(12_000):
        await engine.tokenize(str(number))  # in its own thread, for each has a cache


async def stream(request: Request) -> Response:
    """An answer as events."""
    engine: Engine = request.app.state.engine
    params = SamplingParams(max_tokens=int(request.query_params["max_tokens"]))
    return sse(engine.stream(request.query_params["prompt"], params))


async def state(request: Request) -> Response:
    """What the engine is doing, and whether its blocks add up."""
    engine: Engine = request.app.state.engine
    broken = None
    try:
        await engine.check_integrity()
    except RuntimeError as error:
        broken = str(error)
    statistics = engine.statistics()
    counts = {
        field.name: getattr(statistics, field.name)
        for field in dataclasses.fields(statistics)
        if isinstance(getattr(statistics, field.name), int | dict)
    }
    return JSONResponse({**counts, "broken": broken, "status": engine.health().status})


async def serve() -> None:
    """Open the engine and serve, until the process is told to end."""
    model = ScriptedModel(
        reply,
        step_seconds=STEP_SECONDS,
        on_step=lambda plan: model.plans.clear(),  # which it keeps for tests, and would grow
        num_blocks=320,  # so few that some requests are preempted
        max_model_len=MAX_MODEL_LEN,
    )
    engine = await Engine.open(
        model,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_queued_requests=96,
        num_tokenizers=1,
    )
    await fill_word_cache(engine)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with graceful_shutdown(engine, deadline=10.0):
            yield
            await engine.aclose()
        # uvicorn ends the process by the signal that it got, so its status does not tell.
        print(CLOSED, flush=True)

    keys = [
        ApiKey(key=KEY, name="soak"),
        ApiKey(key=LIMITED_KEY, name="limited", max_concurrent=LIMITED),
    ]
    api = openai_app(
        {MODEL: engine}, api_keys=keys, max_body_bytes=MAX_BODY, max_concurrent_requests=40
    )
    app = Starlette(
        routes=[Route("/stream", stream), Route("/state", state), Mount("/", api)],
        lifespan=lifespan,
    )
    app.state.engine = engine
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # see `serving` in web.py
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(serve())
