"""OpenAI's routes behind uvicorn's two HTTP parsers, fed bytes as if by a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
import zlib
from collections.abc import Sequence
from typing import Any

from .mutation import mutate_http
from .target import SECONDS_LIMIT, Violation

__all__ = ["RoutesTarget"]

PATIENCE = 0.3
"""Seconds after which the client leaves, answered or not: so cancelling is tried, too."""
LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "ragserve", "ragserve.web")
GOOD = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}

SAMPLING: tuple[tuple[str, Sequence[Any]], ...] = (
    ("max_tokens", (1, 4, 16)),
    ("n", (1, 2, 3)),
    ("seed", (0, 7, -1)),
    ("stop", ("l", ["o", "ll"], ["."])),
    ("temperature", (0, 0.5, 2)),
    ("top_p", (0.1, 1)),
    ("presence_penalty", (-2, 0.5)),
    ("frequency_penalty", (-2, 0.5)),
    ("top_k", (-1, 0, 5)),
    ("min_p", (0, 0.2)),
    ("repetition_penalty", (0.9, 1.2)),
    ("min_tokens", (0, 3)),
    ("ignore_eos", (True, False)),
    ("stop_token_ids", ([108], [1, 2, 3])),
    ("skip_special_tokens", (True, False)),
    ("include_stop_str_in_output", (True, False)),
    ("bad_words", (["He"], ["l", "lo"])),
    ("allowed_token_ids", ([65, 66], [256])),
    ("logit_bias", ({"65": 5}, {"256": -100})),
    ("stream", (True, False)),
    ("stream_options", ({"include_usage": True},)),
    ("priority", (0, -5, 3)),
    ("namespace", ("a", "b")),
    ("user", ("u",)),
    ("metadata", ({"a": "b"},)),
    ("response_format", ({"type": "text"},)),
)
CHAT: tuple[tuple[str, Sequence[Any]], ...] = (
    ("logprobs", (True, False)),
    ("top_logprobs", (0, 3)),
    ("max_completion_tokens", (1, 5)),
    ("documents", (["A fact."], [{"id": "d", "text": "A fact.", "title": "T"}])),
    ("tools", ([],)),
    ("tool_choice", ("none",)),
)
COMPLETION: tuple[tuple[str, Sequence[Any]], ...] = (
    ("logprobs", (0, 2, 5)),
    ("echo", (True, False)),
    ("suffix", ("",)),
    ("best_of", (1,)),
)
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "name": "a"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "user", "content": "So?"},
    ],
)
PROMPTS: tuple[Any, ...] = ("Once", ["Once", "Twice"], [72, 105], [[72], [105, 33]], "é🙂<|end|>")
WORDS = (
    *(name for name, _ in (*SAMPLING, *CHAT, *COMPLETION)),
    "model", "messages", "prompt", "role", "content", "type", "text", "image_url", "input_audio",
    "tool_calls", "function", "name", "arguments", "id", "title", "include_usage", "refusal",
    "user", "system", "developer", "assistant", "tool", "scripted", "docs", "json_object", "auto",
)  # fmt: skip


def _body(rng: random.Random, *, chat: bool) -> bytes:
    """A valid body, or one that is nearly so."""
    body: dict[str, Any] = {"model": rng.choice(("scripted", "scripted", "scripted", "docs"))}
    if chat:
        body["messages"] = rng.choice(MESSAGES)
    else:
        body["prompt"] = rng.choice(PROMPTS)
    fields = (*SAMPLING, *(CHAT if chat else COMPLETION))
    for name, values in rng.sample(fields, rng.choice((0, 1, 2, 3, 5))):
        body[name] = rng.choice(values)
    return json.dumps(body).encode()


def _chat(rng: random.Random) -> bytes:
    return _body(rng, chat=True)


def _completion(rng: random.Random) -> bytes:
    return _body(rng, chat=False)


def _request(path: str, body: bytes, method: str = "POST", *headers: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *headers,
        *([f"Content-Length: {len(body)}"] if body else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class _Facts:
    """A retriever that knows one thing."""

    name = "facts"

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> Any:
        from ragserve import Chunk, ScoredChunk

        return [ScoredChunk(Chunk("c1", "d1", "Forty-two.", 0, {"title": "G"}), 0.5)][:top_k]


class _Socket(asyncio.Transport):
    """The server's end of a connection: keeps what is written."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"peername": ("127.0.0.1", 4000), "sockname": ("127.0.0.1", 80)})
        self._loop = loop
        self._protocol: Any = None
        self._closing = self.lost = False
        self.reading = True
        self.written = bytearray()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self.lose, None)

    abort = close

    def lose(self, error: Exception | None) -> None:
        """The connection is gone."""
        if not self.lost:
            self.lost = self._closing = True
            self._protocol.connection_lost(error)


class _Logged(logging.Handler):
    """Keeps what the application logged as the cause of an answer of 500."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.error = record.exc_info[1]


class RoutesTarget:
    """Every route, of an application without keys and, under /keyed, of one with them.

    Allowed: an answer of 2xx, 3xx (a slash too many), 4xx or 503, or none if the client left. After
    it the engine has nothing left to do and all blocks back; now and then, its pool is checked as a
    whole, and a good request must be answered.

    :param kind: uvicorn's parser, "h11" or "httptools".
    """

    modules = ("ragserve.web", "ragserve.engine.prompt", "ragserve.engine.sampling_params")

    def __init__(self, kind: str) -> None:
        self.name = f"http-{kind}"
        self._kind = kind
        self._open = False

    def seeds(self) -> list[bytes]:
        rng = random.Random(0)
        seeds = [
            _request("/v1/models", b"", "GET"),
            _request("/v1/models/scripted", b"", "GET"),
            _request("/health", b"", "GET"),
            _request("/metrics", b"", "GET"),
            _request("/keyed/v1/models", b"", "GET", "Authorization: Bearer key-1"),
        ]
        for _ in range(12):
            seeds.append(_request("/v1/chat/completions", _chat(rng)))
            seeds.append(_request("/v1/completions", _completion(rng)))
        key = "Authorization: Bearer key-1"
        seeds.append(_request("/keyed/v1/chat/completions", _chat(rng), "POST", key))
        return seeds

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        grammar = (_chat,) if b"chat" in data[:60] else (_completion,)
        return mutate_http(rng, data, WORDS, grammar)

    def run(self, data: bytes) -> str:
        if not self._open:
            self._start()
        return self._loop.run_until_complete(self._feed(data))

    def close(self) -> None:
        if self._open:
            self._loop.run_until_complete(self._engine.aclose())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            self._loop.close()
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(self._logged)
                logging.getLogger(name).propagate = True
            self._open = False

    def _start(self) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Mount
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        from ragserve import Engine, RagPipeline, SamplingParams
        from ragserve.testing import ScriptedModel
        from ragserve.web import ApiKey, openai_app

        self._logged = _Logged()
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._logged)
            logging.getLogger(name).propagate = False
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._note)

        async def open_engine() -> Engine:
            model = ScriptedModel("Hello.", max_model_len=256, num_blocks=256)
            return await Engine.open(model, seed=1, max_num_seqs=16)

        self._engine = self._loop.run_until_complete(open_engine())
        rag = RagPipeline(
            engine=self._engine,
            index=_Facts(),  # type: ignore[arg-type]
            params=SamplingParams(max_tokens=4),
            top_k=1,
        )
        engines, pipelines = {"scripted": self._engine}, {"docs": rag}
        keyed = openai_app(engines, pipelines, api_keys=[ApiKey(key="key-1", name="one")])
        app = Starlette(routes=[Mount("/keyed", keyed), Mount("/", openai_app(engines, pipelines))])

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def noted(message: Any) -> None:
                if message["type"] == "http.response.start":
                    self._statuses.append(message["status"])
                try:
                    await send(message)
                except Exception:
                    # h11: the server has answered 400 by itself meanwhile, to a broken chunk.
                    servers.append(True)
                    raise

            servers: list[bool] = []
            try:
                await app(scope, receive, noted)
            except Exception as error:
                if not servers:
                    self._raised.append(error)
                raise

        self._config = Config(
            watched,
            http=self._kind,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
        )  # type: ignore[arg-type]
        self._config.load()
        self._state = ServerState()
        self._statuses: list[int] = []
        self._raised: list[BaseException] = []
        self._count = 0
        self._open = True

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        self._raised.append(error)

    async def _feed(self, data: bytes) -> str:
        self._statuses.clear()
        self._raised.clear()
        self._logged.error = None
        outcome, written = await self._connection(data)
        error = self._raised[0] if self._raised else None
        if error is not None:
            raise Violation("the application raised") from error
        bad = [status for status in self._statuses if not self._allowed(status)]
        if bad:
            raise Violation(f"status {bad[0]}") from (self._logged.error or _reason(written))
        if b'"internal error"' in written:
            raise Violation("an internal error in a stream") from (
                self._logged.error or _reason(written)
            )
        await self._idle()
        self._count += 1
        if self._count % 16 == 0:
            await self._check()
        return outcome

    @staticmethod
    def _allowed(status: int) -> bool:
        return 200 <= status < 500 or status == 503

    async def _connection(self, data: bytes, patience: float = PATIENCE) -> tuple[str, bytes]:
        """Send the bytes, in two pieces or more, and wait for answers, but not for ever."""
        socket = _Socket(self._loop)
        protocol = self._config.http_protocol_class(  # type: ignore[operator, union-attr]
            config=self._config, server_state=self._state, app_state={}, _loop=self._loop
        )
        socket.set_protocol(protocol)
        protocol.connection_made(socket)
        cut = zlib.crc32(data) % (len(data) + 1) if data else 0
        pieces = [data[:cut], *(data[at : at + 65536] for at in range(cut, len(data), 65536))]
        deadline = time.monotonic() + patience
        outcome = ""
        for piece in filter(None, pieces):  # an empty one would mean the end
            while not socket.reading and not socket.lost and time.monotonic() < deadline:
                await asyncio.sleep(0)
            if socket.is_closing():
                break
            try:
                protocol.data_received(piece)
            except Exception as error:  # the server's own fault: asyncio closes the connection
                outcome = f"server {type(error).__name__}"
                socket.lose(error)
            await asyncio.sleep(0)
        while (tasks := set(self._state.tasks)) and time.monotonic() < deadline:
            cycle = protocol.cycle
            if cycle is not None and cycle.more_body and not socket.is_closing():
                await asyncio.sleep(0)
                if len(self._statuses) == 0 and cycle.more_body:
                    break  # it waits for a body that does not come
            await asyncio.wait(tasks, timeout=deadline - time.monotonic())
        left = bool(self._state.tasks)
        socket.lose(None)
        deadline = time.monotonic() + SECONDS_LIMIT
        while tasks := set(self._state.tasks):
            if time.monotonic() > deadline:
                for task in tasks:
                    task.cancel()
                raise Violation("a request goes on after its client has left")
            await asyncio.wait(tasks, timeout=0.5)
        protocol._unset_keepalive_if_required()
        if not outcome:
            answers = [str(status) for status in self._statuses]
            if not answers:
                answers = re.findall(r"^HTTP/1.1 (\d{3})", socket.written[:12].decode("latin-1"))
            outcome = " ".join(answers[:1]) or "none"
            if left:
                outcome += " left"
        return outcome, bytes(socket.written)

    async def _idle(self) -> None:
        deadline = time.monotonic() + SECONDS_LIMIT
        while True:
            now = self._engine.statistics()
            if not (now.num_running or now.num_waiting or now.blocks_used):
                return
            if time.monotonic() > deadline:
                raise Violation(
                    f"the engine is not idle: {now.num_running} running, {now.num_waiting} "
                    f"waiting, {now.blocks_used} blocks used"
                )
            await asyncio.sleep(0.001)

    async def _check(self) -> None:
        """The pool as a whole, and a request that has to succeed."""
        await self._engine.check_integrity()
        self._statuses.clear()
        _, written = await self._connection(
            _request("/v1/chat/completions", json.dumps(GOOD).encode()), patience=60.0
        )
        if self._statuses != [200] or b"Hel" not in written:
            raise Violation(
                f"a good request is answered {self._statuses} after one of the last 16 inputs"
            )


def _reason(written: bytes) -> Exception:
    """What the answer says, without what differs from one to the next."""
    text = written[-300:].decode("utf-8", "replace")
    return Violation(re.sub(r"[0-9a-f-]{12,}|\d+", "#", text)[-200:])
