"""OpenAI's routes, asked by its own client, by curl, and by requests that no client would make."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from fastapi import FastAPI
from servers import ServerThread
from starlette.applications import Starlette
from starlette.routing import Mount

from ragserve import (
    Chunk,
    Engine,
    InvalidParamsError,
    PromptTemplate,
    RagPipeline,
    SamplingParams,
    ScoredChunk,
)
from ragserve.engine import StepPlan
from ragserve.testing import EOS, ScriptedModel
from ragserve.web import ApiKey, openai_app
from ragserve.web.openai.protocol import IGNORED, read_chat, read_completion

REPLY = "Grüße, 世界 🙂! It is forty-two."
QUESTION = [{"role": "user", "content": "What is the answer to everything, please?"}]
PATIENCE = 120.0


class Facts:
    """A retriever of two chunks that knows no vectors."""

    name = "facts"

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> list[ScoredChunk]:
        chunks = [
            Chunk("c1", "d1", "Forty-two is the answer.", 0, {"title": "Guide"}),
            Chunk("c2", "d2", "Towels are useful.", 0),
        ]
        return [ScoredChunk(chunk, 0.5) for chunk in chunks[:top_k]]


@dataclass
class Served:
    """A running application, and what stands behind it."""

    url: str
    engines: dict[str, Engine | None]
    asked: list[Any] = field(default_factory=list)
    """The engine's requests, in order."""

    @property
    def engine(self) -> Engine:
        engine = self.engines["scripted"]
        assert engine is not None
        return engine

    def client(self, **options: Any) -> openai.OpenAI:
        options.setdefault("http_client", openai.DefaultHttpxClient(trust_env=False))
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
            return client.post(f"{self.url}{path}", **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
            return client.get(f"{self.url}{path}", **options)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_until_idle(self, engine: Engine | None = None) -> None:
        engine = engine or self.engine

        def idle() -> bool:
            statistics = engine.statistics()
            busy = statistics.num_running + statistics.num_waiting + statistics.blocks_used
            return busy == 0

        self.wait_until(idle)


@contextmanager
def serving(
    model: Any = None,
    *,
    knobs: dict[str, Any] | None = None,
    others: dict[str, ScriptedModel] | None = None,
    with_rag: bool = False,
    kind: str = "h11",
    **options: Any,
) -> Iterator[Served]:
    """An application with OpenAI's routes under /llm, its engines opened by its lifespan."""
    served = Served("", {})
    pipelines: dict[str, RagPipeline | None] = {}

    def on_step(plan: StepPlan) -> None:
        served.asked += [c.request for c in plan.chunks if c.request not in served.asked]

    models = {"scripted": model or ScriptedModel(REPLY, on_step=on_step), **(others or {})}
    for name in models:
        served.engines[name] = None

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        for name, source in models.items():
            knobs_of_it = {"seed": 1, **(knobs or {})}
            served.engines[name] = await Engine.open(source, **knobs_of_it)
        if with_rag:
            pipelines["docs"] = RagPipeline(
                engine=served.engine,
                index=Facts(),  # type: ignore[arg-type]
                overlap=False,  # the gate is for the answer's own steps
                params=SamplingParams(temperature=0.0, max_tokens=20),
                top_k=2,
            )
        yield
        for engine in served.engines.values():
            if engine is not None:
                await engine.aclose(drain=False)

    app = FastAPI(lifespan=lifespan)
    app.mount("/llm", openai_app(served.engines, pipelines, **options))
    with ServerThread(app, kind) as server:
        served.url = f"{server.url}/llm"
        yield served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving(with_rag=True) as served:
        yield served
        served.wait_until_idle()


@pytest.fixture
def client(shared: Served) -> Iterator[openai.OpenAI]:
    with shared.client() as client:
        yield client


# -- chats --------------------------------------------------------------------------------


def test_chat(shared: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=QUESTION)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "scripted"
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", REPLY)
    assert answer.usage.completion_tokens == len(REPLY.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert shared.asked[-1].request_id == answer.id
    text = f"<|begin|>user\n{QUESTION[0]['content']}<|end|>\n<|begin|>assistant\n"
    assert shared.engine.tokenizer.tokenize(text).token_ids == shared.asked[-1].tokens(
        0, shared.asked[-1].num_prompt_tokens
    )


def test_chat_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="scripted", messages=QUESTION, stream=True) as stream:
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(text or "" for text in texts) == REPLY
    assert texts[-1] is None
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="scripted", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage.completion_tokens == len(REPLY.encode()) + 1
    assert last.usage.prompt_tokens_details.cached_tokens <= last.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_async_client(shared: Served) -> None:
    async def ask() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(
            base_url=f"{shared.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:
            create = client.chat.completions.create
            whole = await create(model="scripted", messages=QUESTION)
            stream = await create(model="scripted", messages=QUESTION, stream=True)
            async with stream:
                return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == streamed == REPLY


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="scripted", messages=QUESTION, n=2, stream_options={"include_usage": True}
    ) as stream:
        completion = stream.get_final_completion()
    assert [choice.message.content for choice in completion.choices] == [REPLY, REPLY]
    assert completion.usage.completion_tokens == 2 * (len(REPLY.encode()) + 1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_sees_each_event(shared: Served) -> None:
    command = ["curl", "-sN", "--noproxy", "*", f"{shared.url}/v1/chat/completions"]
    command += ["-H", "content-type: application/json", "-D", "-", "-d"]
    body = {"model": "scripted", "messages": QUESTION, "stream": True}
    output = subprocess.run(
        [*command, json.dumps(body)], capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout
    head, _, events = output.replace("\r\n", "\n").partition("\n\n")
    assert "200" in head.splitlines()[0]
    assert "content-type: text/event-stream" in head
    assert "x-request-id: chatcmpl-" in head
    lines = [line for line in events.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == REPLY
    assert "usage" not in chunks[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_several_choices(shared: Served, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "scripted", "n": 3, "stream": stream, "max_tokens": 100}
    body |= {"messages": QUESTION} if "chat" in path else {"prompt": "Say"}
    response = shared.post(f"/v1/{path}", body)
    if not stream:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = [c["message"]["content"] if "chat" in path else c["text"] for c in choices]
        assert texts == [REPLY] * 3
        return
    texts, reasons = ["", "", ""], {}
    for chunk in events_of(response):
        for choice in chunk["choices"]:
            assert choice["index"] not in reasons
            text = choice["delta"].get("content") if "chat" in path else choice["text"]
            texts[choice["index"]] += text or ""
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [REPLY] * 3
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; checks that it ended as it should."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if event[:1] != ":"]


def test_finish_reasons(client: openai.OpenAI) -> None:
    def finish(**options: Any) -> tuple[str | None, str]:
        options = {"model": "scripted", "messages": QUESTION, **options}
        whole = client.chat.completions.create(**options).choices[0]
        *_, last = client.chat.completions.create(**options, stream=True)
        assert last.choices[0].finish_reason == whole.finish_reason
        return whole.message.content, whole.finish_reason

    assert finish(max_tokens=2) == ("Gr", "length")
    assert finish(max_completion_tokens=3) == ("Gr", "length")  # half of a character is not shown
    assert finish(stop="世") == ("Grüße, ", "stop")
    assert finish(stop=["nothing", "!"]) == ("Grüße, 世界 🙂", "stop")
    assert finish(stop="!", extra_body={"include_stop_str_in_output": True})[0][-1] == "!"
    assert finish(extra_body={"stop_token_ids": [ord(",")]}) == ("Grüße", "stop")
    assert finish(max_tokens=200, extra_body={"ignore_eos": True})[1] == "length"


def test_messages(shared: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One"}]},
            {"role": "assistant", "content": "Two", "refusal": None, "tool_calls": []},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Three"}, {"type": "text", "text": "Four"}],
            },
        ],
        max_tokens=1,
    )
    request = shared.asked[-1]
    prompt = shared.engine.tokenizer.decode(
        request.tokens(0, request.num_prompt_tokens), skip_special_tokens=False
    )
    assert prompt == (
        "<|begin|>system\nBe brief.<|end|>\n<|begin|>user\nOne<|end|>\n"
        "<|begin|>assistant\nTwo<|end|>\n<|begin|>user\nThree\nFour<|end|>\n<|begin|>assistant\n"
    )


def test_every_parameter_arrives(shared: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=QUESTION,
        n=2,
        seed=7,
        stop=["a", "b"],
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"65": 2, "66": -100.0},
        max_completion_tokens=9,
        user="somebody",
        metadata={"any": "thing"},
        store=True,
        extra_body={
            "top_k": 11,
            "min_p": 0.01,
            "repetition_penalty": 1.5,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [200],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "bad_words": ["worse"],
            "allowed_token_ids": list(range(256)),
            "priority": 4,
            "namespace": "tenant",
        },
    )
    request = shared.asked[-1]
    assert request.params == SamplingParams(
        n=2,
        seed=7,
        stop=["a", "b"],
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={65: 2, 66: -100.0},
        max_tokens=9,
        top_k=11,
        min_p=0.01,
        repetition_penalty=1.5,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=[200],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        bad_words=["worse"],
        allowed_token_ids=range(256),
    )
    assert (request.priority, request.namespace) == (4, "tenant")
    chat = {"model": "m", "messages": QUESTION}
    assert read_chat(chat).options.params() == SamplingParams()
    scored = read_chat({**chat, "logprobs": True, "top_logprobs": 3}).options.params()
    assert scored.logprobs == 3
    assert read_chat({**chat, "logprobs": True}).options.params().logprobs == 0
    completion = read_completion({"model": "m", "prompt": "a", "logprobs": 2, "echo": True})
    params = completion.options.params()
    assert (params.logprobs, params.prompt_logprobs, params.max_tokens) == (2, 2, 16)
    nothing = dict.fromkeys([*IGNORED, "n", "stop", "tools", "seed", "stream_options", "documents"])
    assert read_chat({**chat, **nothing}).options.params() == SamplingParams()


def test_cached_tokens_and_namespaces(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "A question that is asked again and again." * 3}]

    def cached(namespace: str | None) -> int:
        extra = None if namespace is None else {"namespace": namespace}
        answer = client.chat.completions.create(
            model="scripted", messages=messages, max_tokens=1, extra_body=extra
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") > 100
    assert cached("two") == 0
    assert cached(None) == 0
    assert cached("one") > 100


# -- completions --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("One", ["One"]),
        (["One", "Other"], ["One", "Other"]),
        ([79, 110, 101], ["One"]),
        ([[79, 110, 101], [33]], ["One", "!"]),
        (["One", [33]], ["One", "!"]),
    ],
)
def test_prompts(shared: Served, prompt: Any, prompts: list[str], stream: bool) -> None:
    body = {"model": "scripted", "prompt": prompt, "n": 2, "echo": True, "max_tokens": 4}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    response = shared.post("/v1/completions", {**body, "stream": stream, **usage})
    expected = [text + "Grü" for text in prompts for _ in range(2)]
    if stream:
        texts = [""] * len(expected)
        chunks = events_of(response)
        for chunk in chunks:
            assert chunk["object"] == "text_completion"
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        total = chunks[-1]["usage"]
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(expected)))
        texts = [choice["text"] for choice in choices]
        total = response.json()["usage"]
    assert texts == expected
    assert total["prompt_tokens"] == sum(map(len, prompts))
    assert total["completion_tokens"] == 4 * len(expected)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="Say", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY, "stop")
    short = client.completions.create(model="scripted", prompt="Say")
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (16, "length")
    stream = client.completions.create(
        model="scripted", prompt="Say", max_tokens=100, best_of=1, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == REPLY


# -- log-probabilities: with a real model ---------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Iterator[Served]:
    with serving(str(tiny_model("llama")), knobs={"num_threads": 1}) as served:
        yield served


def generate(served: Served, prompt: Any, **params: Any) -> Any:
    async def run() -> Any:
        return await served.engine.generate(prompt, SamplingParams.greedy(**params))

    return asyncio.run(run())


def same(got: float, wanted: float) -> bool:
    return got == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(tiny: Served, stream: bool) -> None:
    oracle = generate(tiny, QUESTION, max_tokens=12, logprobs=4).choices[0]
    with tiny.client() as client:
        answer = client.chat.completions.create(
            model="scripted",
            messages=QUESTION,
            temperature=0,
            max_tokens=12,
            logprobs=True,
            top_logprobs=4,
            stream=stream,
        )
        if stream:
            given = [c.choices[0].logprobs for c in answer if c.choices[0].logprobs is not None]
            content = [token for logprobs in given for token in logprobs.content]
        else:
            assert answer.choices[0].message.content == oracle.text
            content = answer.choices[0].logprobs.content
    assert len(content) == len(oracle.token_ids) > 6
    tokenizer = tiny.engine.tokenizer
    for token, wanted in zip(content, oracle.logprobs, strict=True):
        assert same(token.logprob, wanted.logprob)
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
        assert len(token.top_logprobs) == 4
        for other, (token_id, logprob) in zip(token.top_logprobs, wanted.top, strict=True):
            assert same(other.logprob, logprob)
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            assert other.token.rstrip("\ufffd") == text.rstrip("\ufffd")
    shown = [token for token in content if token.token not in tokenizer.special_tokens]
    joined = b"".join(bytes(token.bytes) for token in shown)
    assert joined.decode("utf-8", "replace").startswith(oracle.text.rstrip("\ufffd"))


def test_logprobs_of_completions(tiny: Served) -> None:
    prompt = "Größe: 天空 why"
    ids = tiny.engine.tokenizer.tokenize(prompt).token_ids
    oracle = generate(tiny, prompt, max_tokens=8, logprobs=2, prompt_logprobs=2)
    choice = oracle.choices[0]
    with tiny.client() as client:
        options = {"model": "scripted", "prompt": prompt, "temperature": 0, "max_tokens": 8}
        plain = client.completions.create(**options, logprobs=2).choices[0].logprobs
        echoed = client.completions.create(**options, logprobs=2, echo=True).choices[0]
        streamed = [
            chunk.choices[0].logprobs
            for chunk in client.completions.create(**options, logprobs=2, stream=True)
        ]
    assert len(plain.tokens) == len(plain.token_logprobs) == len(plain.top_logprobs) == 8
    for name, logprob, top, wanted in zip(
        plain.tokens, plain.token_logprobs, plain.top_logprobs, choice.logprobs, strict=True
    ):
        assert same(logprob, wanted.logprob)
        assert same(top[name], wanted.logprob)
        assert 2 <= len(top) <= 3
    assert plain.text_offset[0] == 0
    assert plain.text_offset == sorted(plain.text_offset)
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for part in streamed if part for value in getattr(part, name)]
        if name == "token_logprobs":
            assert joined == pytest.approx(getattr(plain, name), abs=1e-3)
        else:
            assert joined == getattr(plain, name)
    assert echoed.text == prompt + choice.text
    assert len(echoed.logprobs.tokens) == len(ids) + 8
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.top_logprobs[0] is None
    for got, of_prompt in zip(
        echoed.logprobs.token_logprobs[1:], oracle.prompt_logprobs[1:], strict=False
    ):
        assert same(got, of_prompt.logprob)
    # Where a token is text of its own, its offset is where it stands.
    for token, offset in zip(echoed.logprobs.tokens, echoed.logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert echoed.text[offset:].startswith(token) or "\ufffd" in echoed.text
    bytes_of_tokens = [token for token in echoed.logprobs.tokens if token.startswith("bytes:\\x")]
    assert bytes_of_tokens  # the tiny tokenizer cuts characters up


# -- answers from documents -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_pipeline_is_a_model(shared: Served, client: openai.OpenAI, stream: bool) -> None:
    messages = [
        {"role": "system", "content": "Left out."},
        {"role": "user", "content": "Left out, too."},
        *QUESTION,
    ]
    answer = client.chat.completions.create(
        model="docs", messages=messages, seed=5, stream=stream, extra_body={"namespace": "rag"}
    )
    if stream:
        first, *chunks, last = answer
        assert "timings" not in first.model_extra
        assert not any({"sources", "timings"} & c.model_extra.keys() for c in chunks)
        text = "".join(c.choices[0].delta.content or "" for c in (first, *chunks, last))
        sources, timings = first.sources, last.timings
        assert last.choices[0].finish_reason == "length"
    else:
        text, sources, timings = answer.choices[0].message.content, answer.sources, answer.timings
        assert (answer.model, answer.dropped) == ("docs", 0)
    assert text == REPLY.encode()[:20].decode()
    assert sources == [
        {
            "number": 1,
            "id": "c1",
            "document_id": "d1",
            "score": 0.5,
            "title": "Guide",
            "text": "Forty-two is the answer.",
        },
        {
            "number": 2,
            "id": "c2",
            "document_id": "d2",
            "score": 0.5,
            "text": "Towels are useful.",
        },
    ]
    stages = ("embedding", "retrieval", "context", "queue", "prefill", "decode")
    assert timings["total"] == pytest.approx(sum(timings[stage] for stage in stages), abs=1e-4)
    request = shared.asked[-1]
    assert (request.params.seed, request.params.temperature, request.params.max_tokens) == (
        5,
        0.0,
        20,
    )
    assert request.namespace == "rag"
    prompt = shared.engine.tokenizer.decode(request.tokens(0, request.num_prompt_tokens))
    assert "Left out" not in prompt
    assert "[2] Towels" in prompt
    assert "everything, please?" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_documents_of_a_request(shared: Served, client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "system", "content": "Be kind."}, *QUESTION],
        max_tokens=4,
        stream=stream,
        stream_options={"include_usage": True} if stream else openai.omit,
        extra_body={"documents": ["Plain.", {"id": "x", "title": "Title", "text": "Text <|end|>"}]},
    )
    if stream:
        first, *_, last = answer
        sources, timings = first.sources, last.timings
        assert last.usage.completion_tokens == 4
    else:
        sources, timings = answer.sources, answer.timings
    assert [(s["number"], s["id"], s.get("title")) for s in sources] == [
        (1, "1", None),
        (2, "x", "Title"),
    ]
    assert "score" not in sources[0]
    assert timings["retrieval"] == 0
    assert timings["total"] > 0
    request = shared.asked[-1]
    ids = request.tokens(0, request.num_prompt_tokens)
    prompt = shared.engine.tokenizer.decode(ids)
    assert "Be kind.\n\n[1] Plain.\n\n[2] Title\nText <|end|>" in prompt
    assert prompt.count("everything, please?") == 1


def test_documents_that_do_not_fit_are_dropped() -> None:
    template = PromptTemplate(system="")
    with serving(ScriptedModel(REPLY, max_model_len=200), template=template) as served:
        body = {"model": "scripted", "messages": QUESTION, "documents": ["x" * 60, "y" * 60]}
        answer = served.post("/v1/chat/completions", body).json()
        assert [source["text"][0] for source in answer["sources"]] == []
        assert answer["dropped"] == 2
        answer = served.post("/v1/chat/completions", {**body, "max_tokens": 40}).json()
        assert [source["text"][0] for source in answer["sources"]] == ["x"]
        assert answer["dropped"] == 1


# -- what is refused ------------------------------------------------------------------------

CHAT: dict[str, Any] = {"model": "scripted", "messages": QUESTION}
COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": "Say"}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        (message(role="tool"), "messages[0].role"),
        (message(content=None), "messages[0].content"),
        (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
        (message(content=[{"type": "text", "text": 1}]), "messages[0].content[0].text"),
        (message(tool_calls=[{}]), "messages[0].tool_calls"),
        (message(role="assistant", tool_calls=[{}]), "messages[0].tool_calls"),
        (message(role="assistant", content=None), "messages[0].content"),
        (message(role="assistant", refusal="No."), "messages[0].refusal"),
        (message(mood="good"), "messages[0].mood"),
        ({"model": None}, "model"),
        ({"model": 1}, "model"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"priority": 0.5}, "priority"),
        ({"namespace": 1}, "namespace"),
        ({"documents": "x"}, "documents"),
        ({"documents": [1]}, "documents[0]"),
        ({"documents": [{"id": "x"}]}, "documents[0].text"),
        ({"documents": [{"text": "x", "score": 1}]}, "documents[0].score"),
        ({"documents": [], "messages": [*QUESTION, *QUESTION]}, "messages"),
        ({"model": "docs", "documents": []}, "documents"),
        (
            {"model": "docs", "messages": [{"role": "system", "content": "x"}]},
            "messages[0].role",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (message(content="\ud800"), "messages[0].content"),
    ],
)
def test_chats_that_are_refused(shared: Served, fields: dict[str, Any], param: str) -> None:
    steps = shared.engine.statistics().num_steps
    for stream in (False, param != "stream_options"):
        body = json.dumps({"stream": stream, **CHAT, **fields}).encode()
        refused(shared.post("/v1/chat/completions", content=body, headers=JSON), 400, param)
    assert shared.engine.statistics().num_steps == steps


JSON = {"content-type": "application/json"}


def refused(response: httpx.Response, status: int, param: str | None, code: str = "") -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    if code:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt[1]"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"n": "2"}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"documents": ["x"]}, "documents"),
        ({"messages": QUESTION}, "messages"),
        ({"model": "docs"}, "model"),
    ],
)
def test_completions_that_are_refused(shared: Served, fields: dict[str, Any], param: str) -> None:
    refused(shared.post("/v1/completions", {**COMPLETION, **fields}), 400, param)


def test_bodies_that_are_refused(shared: Served) -> None:
    path = "/v1/chat/completions"
    refused(shared.post(path, content=b"{", headers=JSON), 400, None, "invalid_json")
    refused(shared.post(path, content=b"[" * 100_000, headers=JSON), 400, None, "too_deep")
    refused(shared.post(path, content=b"\xff", headers=JSON), 400, None, "invalid_json")
    refused(shared.post(path, []), 400, None)
    refused(shared.post(path, content=json.dumps(CHAT).encode()), 415, None)
    refused(shared.post(path, {**CHAT, "model": "gpt"}), 404, "model", "model_not_found")
    refused(shared.get(path), 405, None)
    refused(shared.get("/v1/nothing"), 404, None)
    refused(shared.get("/v1/models/gpt"), 404, "model", "model_not_found")
    with shared.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=QUESTION, tools=[{}])  # type: ignore[list-item]
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


def test_prompts_that_are_too_long(shared: Served) -> None:
    for stream in (False, True):
        body = {**CHAT, **message(content="x" * 5000), "stream": stream}
        response = shared.post("/v1/chat/completions", body)
        error = refused(response, 400, "messages", "context_length_exceeded")
        assert "at most 4095 fit" in error["message"]
        refused(
            shared.post("/v1/completions", {**COMPLETION, "prompt": "x" * 5000, "stream": stream}),
            400,
            "prompt",
            "context_length_exceeded",
        )


def test_a_body_that_is_too_large() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * 300

    with serving(max_body_bytes=1000) as served:
        path = "/v1/chat/completions"
        refused(served.post(path, content=b" " * 1001, headers=JSON), 413, None, "body_too_large")
        refused(served.post(path, content=pieces(), headers=JSON), 413, None, "body_too_large")
        body = json.dumps(CHAT).encode()
        body += b" " * (1000 - len(body))
        assert served.post(path, content=body, headers=JSON).status_code == 200
        assert served.post(path, content=iter([body]), headers=JSON).status_code == 200


class Gate:
    """Holds the engine at each step until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE)


@contextmanager
def asking(served: Served, body: dict[str, Any]) -> Iterator[Any]:
    """A chat in another thread; gives a list that gets the response."""
    responses: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: responses.append(served.post("/v1/chat/completions", body))
    )
    thread.start()
    try:
        yield responses
    finally:
        thread.join(PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_that_is_full(stream: bool) -> None:
    gate = Gate()
    knobs = {"max_num_seqs": 1, "max_queued_requests": 1}
    with serving(ScriptedModel(REPLY, on_step=gate), knobs=knobs) as served, ExitStack() as stack:
        stack.callback(gate.open.set)
        body = {**CHAT, "stream": stream}
        with asking(served, body) as first:
            assert gate.reached.wait(PATIENCE)
            with asking(served, body) as second:
                served.wait_until(lambda: served.engine._driver.num_queued == 1)
                third = served.post("/v1/chat/completions", body)
                gate.open.set()
        error = refused(third, 429, None, "queue_full")
        assert error["type"] == "rate_limit_error"
        assert int(third.headers["retry-after"]) >= 1
        assert first[0].status_code == second[0].status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_wait_that_is_too_long(stream: bool) -> None:
    enough = threading.Event()

    def reply(tokens: list[int]) -> int:
        return EOS if enough.is_set() else ord("a")

    knobs = {"max_num_seqs": 1, "queue_timeout": 0.2}
    with serving(ScriptedModel(reply, step_seconds=0.01), knobs=knobs) as served:
        with asking(served, {**CHAT, "max_tokens": 2000}) as first:
            served.wait_until(lambda: served.engine.statistics().num_running == 1)
            second = served.post("/v1/chat/completions", {**CHAT, "stream": stream})
            enough.set()
        refused(second, 503, None, "queue_timeout")
        assert int(second.headers["retry-after"]) >= 1
        assert first[0].status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_application_ends(stream: bool) -> None:
    model = ScriptedModel(lambda tokens: ord("a"), step_seconds=0.005)
    with serving(model) as served:
        body = {**CHAT, "stream": stream, "max_tokens": 3000}
        with asking(served, body) as responses:
            served.wait_until(lambda: served.engine.statistics().generated_tokens > 10)
            (request_id,) = served.engine._streams
            assert served.engine.abort(request_id)
        if stream:
            *chunks, last, _ = responses[0].text.split("\n\n")
            assert len(chunks) > 1
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_aborted"
        else:
            refused(responses[0], 503, None, "request_aborted")


@pytest.mark.parametrize("rag", [False, True])
def test_an_engine_that_dies_in_a_stream(rag: bool) -> None:
    model = ScriptedModel(REPLY, fail_at_step=4)
    with serving(model, knobs={"stream_interval": 0.0}, with_rag=True) as served:
        served.wait_until(lambda: served.get("/health").status_code == 200)
        name = "docs" if rag else "scripted"
        response = served.post("/v1/chat/completions", {**CHAT, "model": name, "stream": True})
        assert response.status_code == 200
        *chunks, last, nothing = response.text.split("\n\n")
        assert nothing == ""
        assert chunks
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        with served.client() as client, pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="scripted", messages=QUESTION)
        assert caught.value.status_code == 503
        health = served.get("/health")
        assert health.status_code == 503
        assert health.json()["models"]["scripted"] == {
            "status": "dead",
            "error": "ScriptedFailure",
        }


def test_a_stream_that_fails_is_an_error_to_the_client() -> None:
    model = ScriptedModel(REPLY, fail_at_step=4)
    with (
        serving(model, knobs={"stream_interval": 0.0}) as served,
        served.client() as client,
        client.chat.completions.create(model="scripted", messages=QUESTION, stream=True) as stream,
        pytest.raises(openai.APIError, match="the engine has failed"),
    ):
        list(stream)


def test_what_fails_inside_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def fail(tokens: list[int]) -> int:
        raise LookupError("secret")

    with serving(ScriptedModel(fail)) as served:
        for stream in (False, True):
            response = served.post("/v1/chat/completions", {**CHAT, "stream": stream})
            error = refused(response, 500, None)
            assert error["message"] == "internal error"
            served.wait_until_idle()
        assert sum(record.levelname == "ERROR" for record in caplog.records) == 2


# -- leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["httptools", "hypercorn"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_client_that_leaves(kind: str, stream: bool, when: str) -> None:
    gate = Gate()
    decoding = threading.Event()

    def on_step(plan: StepPlan) -> None:
        if plan.chunks[0].request.output_token_ids:
            decoding.set()
        if (when == "prefill") != decoding.is_set():
            gate(plan)

    model = ScriptedModel(lambda tokens: ord("a"), on_step=on_step)
    with serving(model, kind=kind, with_rag=True) as served, ExitStack() as stack:
        stack.callback(gate.open.set)
        for name in ("scripted", "docs"):
            body = {**CHAT, "model": name, "stream": stream, "max_tokens": 2000}
            with sent(served, body):
                assert gate.reached.wait(PATIENCE)
            served.wait_until(lambda: all(s.ended for s in served.engine._streams.values()))
            steps = served.engine.statistics().num_steps
            gate.open.set()
            served.wait_until_idle()
            assert served.engine.statistics().num_steps <= steps + 1
            gate.open.clear()
            gate.reached.clear()
            decoding.clear()
        assert served.engine.statistics().num_finished["abort"] == 2
        gate.open.set()
        assert served.post("/v1/chat/completions", {**CHAT, "max_tokens": 3}).status_code == 200


@contextmanager
def sent(served: Served, body: dict[str, Any]) -> Iterator[None]:
    """Send a chat, and leave when the block ends, without having read anything."""
    data = json.dumps(body).encode()
    lines = ["POST /llm/v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"content-length: {len(data)}", "", ""]
    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port)) as client:
        client.sendall("\r\n".join(lines).encode() + data)
        yield


# -- several models, health, metrics, logs --------------------------------------------------


def test_several_engines() -> None:
    others = {"a/b": ScriptedModel("Other.")}
    with serving(others=others, with_rag=True) as served, served.client() as client:
        assert [model.id for model in client.models.list()] == ["docs", "scripted", "a/b"]
        card = client.models.retrieve("a/b")
        assert (card.id, card.object, card.owned_by) == ("a/b", "model", "ragserve")
        texts = [
            client.chat.completions.create(model=name, messages=QUESTION).choices[0].message.content
            for name in ("scripted", "a/b")
        ]
        assert texts == [REPLY, "Other."]
        with pytest.raises(openai.NotFoundError, match="a/b"):
            client.chat.completions.create(model="other", messages=QUESTION)


def test_a_single_engine_has_its_own_name() -> None:
    async def names(**options: Any) -> list[str]:
        async with Engine.open(ScriptedModel(REPLY)) as engine:
            rag = RagPipeline(engine=engine, index=Facts(), name="kb")  # type: ignore[arg-type]
            app = Starlette(routes=[Mount("/x", openai_app(engine, rag, **options))])
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                models = (await client.get("/x/v1/models")).json()["data"]
                with pytest.raises(InvalidParamsError, match="rag"):
                    openai_app({"kb": engine}, rag)
                with pytest.raises(InvalidParamsError, match="served_model_name"):
                    openai_app({"kb": engine}, served_model_name="other")
                return [model["id"] for model in models]

    assert asyncio.run(names()) == ["kb", "scripted"]
    assert asyncio.run(names(served_model_name="mine")) == ["kb", "mine"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_health(backend: str) -> None:
    async def check() -> None:
        engines: dict[str, Engine | None] = {}
        app = openai_app(engines)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def status() -> tuple[int, str]:
                response = await client.get("/health")
                return response.status_code, response.json()["status"]

            assert await status() == (503, "loading")
            engines["scripted"] = None
            assert await status() == (503, "loading")
            response = await client.post("/v1/chat/completions", json=CHAT)
            refused(response, 503, None, "model_loading")
            assert response.headers["retry-after"]
            assert (await client.get("/v1/models")).json()["data"] == []
            async with Engine.open(ScriptedModel(REPLY)) as engine:
                engines["scripted"] = engine
                assert await status() == (200, "ready")
                answer = await client.post("/v1/chat/completions", json=CHAT)
                assert answer.json()["choices"][0]["message"]["content"] == REPLY
                answer = await client.post(
                    "/v1/completions", json={**COMPLETION, "prompt": ["a", "b"], "stream": True}
                )
                assert len(events_of(answer)) >= 4
                engines["other"] = None
                assert await status() == (503, "loading")
                del engines["other"]
                engine.begin_drain()
                assert await status() == (503, "draining")
                response = await client.post("/v1/chat/completions", json=CHAT)
                refused(response, 503, None, "engine_closed")
            assert await status() == (503, "closed")

    anyio.run(check, backend=backend)


def test_metrics() -> None:
    with serving(with_rag=True, api_keys=[ApiKey(key="k", name="k", metrics=True)]) as served:
        key = {"authorization": "Bearer k"}
        served.post("/v1/chat/completions", CHAT, headers=key)
        served.post("/v1/chat/completions", {**CHAT, "model": "docs"}, headers=key)
        for _ in range(2):
            response = served.get("/metrics", headers=key)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'model="scripted"' in response.text.replace("_name", "")
            assert "docs" in response.text
        refused(served.get("/metrics"), 401, None)
    with serving(api_keys=["k"]) as served:
        refused(served.get("/metrics", headers=key), 403, None, "metrics_not_allowed")
    with serving() as served:
        assert served.get("/metrics").status_code == 200


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(with_rag=True, log_requests=True) as served:
        for stream in (False, True):
            body = {**CHAT, "stream": stream, "max_tokens": 4}
            served.post("/v1/chat/completions", body)
            served.post("/v1/chat/completions", {**body, "model": "docs"})
            served.post("/v1/chat/completions", {**body, "model": "secret"})
    records = [record for record in caplog.records if record.name == "ragserve.web"]
    records = [record for record in records if record.levelname == "INFO"]
    logged = sorted((r.model or "", r.stream, r.status, r.completion_tokens) for r in records)
    assert logged == [
        ("", False, 404, 0),
        ("", False, 404, 0),  # refused before the rest was read
        ("docs", False, 200, 4),
        ("docs", True, 200, 4),
        ("scripted", False, 200, 4),
        ("scripted", True, 200, 4),
    ]
    for record in records:
        fields = vars(record)
        assert record.path == "/v1/chat/completions"
        assert record.request_id.startswith("chatcmpl-")
        assert record.duration > 0
        if record.status == 200:
            assert record.finish_reason == "length"
            assert 0 < record.time_to_first_token <= record.duration
            assert record.prompt_tokens > record.cached_tokens >= 0
        for text in ("everything", "Grü", "secret"):
            assert text not in str(fields) + record.getMessage()


def test_no_log_unless_asked(shared: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shared.post("/v1/chat/completions", CHAT)
    assert not [record for record in caplog.records if record.name.startswith("ragserve")]


# -- traces ---------------------------------------------------------------------------------


def test_spans_are_under_the_clients() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serving(tracer_provider=provider) as served:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        served.post("/v1/chat/completions", {**CHAT, "stream": True}, headers=headers)
        served.post("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}, headers=headers)
    spans = exporter.get_finished_spans()
    chats = [span for span in spans if span.name == "chat scripted"]
    assert len(chats) == 3
    for chat in chats:
        assert f"{chat.context.trace_id:032x}" == trace
        assert f"{chat.parent.span_id:016x}" == parent
        inside = [s.name for s in spans if s.parent.span_id == chat.context.span_id]
        assert inside == ["llm.queue", "llm.prefill", "llm.decode"]
        assert "everything" not in str(chat.attributes)
    assert chats[0].attributes["gen_ai.response.id"].startswith("chatcmpl-")
