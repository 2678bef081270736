"""Bodies of requests: JSON within bounds, in time, and what each field of them may hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve import Engine, RequestLimits
from ragserve.testing import ScriptedModel
from ragserve.web import ApiKey, openai_app
from ragserve.web.bodies import to_json, to_json_in_pieces
from ragserve.web.json_text import MAX_DEPTH, parse_json
from ragserve.web.openai.protocol import Bounds, read_chat, read_completion
from ragserve.web.problem import Problem

PATIENCE = 60.0
JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"

texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_what_json_writes_is_read(value: Any, ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert parse_json(text.encode(), 10_000) == value


@given(st.text('[]{}",:0123-.eE\\ unltrueafs\n\t', max_size=12))
def test_what_json_does_not_read_is_refused(text: str) -> None:
    try:
        expected = json.loads(text)
    except (ValueError, RecursionError):
        with pytest.raises(Problem) as caught:
            parse_json(text.encode(), 10_000)
        assert caught.value.status == 400
    else:
        try:
            value = parse_json(text.encode(), 10_000)
        except Problem as problem:  # of what json takes and others do not
            known = "twice" in problem.message or "too large" in problem.message
            value = expected if known else problem
        assert value == expected


@pytest.mark.parametrize("piece", ["x", "\n", "é", "\\", '"', "🙂", "a\U0001f642\\", "世"])
@pytest.mark.parametrize("ahead", range(13))
def test_long_strings_are_read_in_slices(piece: str, ahead: int) -> None:
    value = "-" * ahead + piece * (100_000 // len(piece))
    for ascii in (False, True):
        text = json.dumps([value, {value: 1}], ensure_ascii=ascii)
        assert parse_json(text.encode(), 100) == [value, {value: 1}]


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        (b'{"a":[{"b":"x\\ud83d"}]}', "a[0].b", "lone surrogate"),
        (b'{"a":["\\ude42\\ud83d"]}', "a[0]", "lone surrogate"),
        (b'{"\\ud800":1}', "the name of a field", "lone surrogate"),
        (b'"\xed\xa0\x80"', None, "UTF-8"),
        (b'"\xff"', None, "UTF-8"),
        (b"[NaN]", None, "NaN"),
        (b"[-Infinity]", None, "-Infinity"),
        (b"[1e999]", None, "too large"),
        (b"[" + b"1" * 5000 + b"]", None, "characters"),
        (b"[" + b"1" * 31 + b"]", None, "digits"),
        (b'{"a":1,"b":2,"a":1}', None, "'a' twice"),
        (b'["' + b"x" * 100_000, None, "not JSON"),
        (b'["\\u12"]', None, "not JSON"),
        (b"[1] 2", None, "not JSON"),
        (b"", None, "not JSON"),
        (b"[" + b"1," * 26 + b"1]", None, "more than 34 items"),
        (b"[" + b"[]," * 4 + b"[]]", None, "more than 34 items"),
        (b'{"a":{"b":[1,1,1,1,1,1,1,1,1,1]}}', None, "more than 34 items"),
    ],
)
def test_what_is_refused_in_json(body: bytes, param: str | None, why: str) -> None:
    with pytest.raises(Problem, match=why) as caught:
        parse_json(body, 34)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 200


def test_what_is_just_within_bounds() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]", 10) == [1]
    assert parse_json(b"[" + b"1," * 9 + b"1]", 18) == [1] * 10
    for body in (b"[" * 100_000, b"[" * 65 + b"]" * 65):
        with pytest.raises(Problem, match=f"{MAX_DEPTH} deep"):
            parse_json(body, 1000)
    deep = parse_json(b"[" * 64 + b"]" * 64, 1000)
    for _ in range(63):
        (deep,) = deep
    assert deep == []


@given(values)
def test_json_in_pieces_is_the_same(value: Any) -> None:
    value = {"long": [value] * 200, "short": [value, {}, []], "empty": {}}
    assert to_json_in_pieces(value) == to_json(value)


# -- fields ---------------------------------------------------------------------------------

LIMITS = RequestLimits()
MESSAGE = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def bounds(model: str) -> Bounds:
    return Bounds(LIMITS, 100, writes_tools=True)


@pytest.mark.parametrize(
    ("fields", "param", "most"),
    [
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", 128),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", 1024),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids", 16_384),
        ({"stop": ["x"] * 5}, "stop", 4),
        ({"stop": "x" * 257}, "stop", 256),
        ({"stop": ["x" * 257]}, "stop", 256),
        ({"bad_words": ["x"] * 129}, "bad_words", 128),
        ({"bad_words": ["x" * 257]}, "bad_words", 256),
        ({"messages": [MESSAGE] * 2049}, "messages", 2048),
        ({"messages": [{**MESSAGE, "content": "x" * 2_097_153}]}, "messages", 2_097_152),
        ({"messages": [{**MESSAGE, "content": "x" * 1_048_577}] * 2}, "messages", 2_097_152),
        (
            {"messages": [{**MESSAGE, "content": [{"type": "text", "text": "x"}] * 2049}]},
            "messages[0].content",
            2048,
        ),
        ({"messages": [{**MESSAGE, "name": "x" * 257}]}, "messages[0].name", 256),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]},
            "messages[0].tool_calls",
            128,
        ),
        ({"documents": ["x"] * 257}, "documents", 256),
        ({"documents": ["x" * 2_097_153]}, "documents", 2_097_152),
        ({"documents": [{"id": "x" * 257, "text": "x"}]}, "documents[0].id", 256),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", 16),
        ({"metadata": {"x" * 65: "x"}}, "metadata", 64),
        ({"metadata": {"x": "x" * 513}}, "metadata.x", 512),
        ({"user": "x" * 257}, "user", 256),
        ({"safety_identifier": "x" * 257}, "safety_identifier", 256),
        ({"namespace": "x" * 257}, "namespace", 256),
        ({"model": "x" * 257}, "model", 256),
    ],
)
def test_limits_of_a_chat(fields: dict[str, Any], param: str, most: int) -> None:
    with pytest.raises(Problem) as caught:
        read_chat({"model": "m", "messages": [MESSAGE], **fields}, bounds)
    problem = caught.value
    assert (problem.status, problem.param) == (400, param)
    assert str(most) in problem.message
    assert len(problem.message) < 300


@pytest.mark.parametrize(
    ("fields", "param", "most"),
    [
        ({"prompt": [1] * 100}, "prompt", 99),
        ({"prompt": [[1], [1] * 100]}, "prompt", 99),
        ({"prompt": ["x"] * 2049}, "prompt", 2048),
        ({"prompt": "x" * 2_097_153}, "prompt", 2_097_152),
        ({"prompt": ["x" * 1_048_577] * 2}, "prompt", 2_097_152),
        ({"prompt": "x" * 1_048_577, "n": 2, "echo": True}, "echo", 2_097_152),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt", 128),
    ],
)
def test_limits_of_a_completion(fields: dict[str, Any], param: str, most: int) -> None:
    with pytest.raises(Problem) as caught:
        read_completion({"model": "m", **fields}, bounds)
    problem = caught.value
    assert (problem.status, problem.param) == (400, param)
    assert str(most) in problem.message


def test_names_that_nobody_knows_are_not_quoted_whole() -> None:
    for name in ("x" * 100_000, "\n" * 100_000):
        with pytest.raises(Problem) as caught:
            read_chat({"model": "m", "messages": [MESSAGE], name: 1}, bounds)
        assert len(caught.value.message) < 200
        assert caught.value.param == name[:64]


# -- what clients send back -----------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none", "tools": []},
        {"tools": None, "functions": None, "function_call": "auto"},
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"parallel_tool_calls": False, "store": False, "service_tier": "auto"},
        {"stream_options": None, "reasoning_effort": None, "response_format": {"type": "text"}},
        {"audio": None, "modalities": ["text"], "metadata": {"a": "b"}},
    ],
)
def test_fields_that_say_what_is_so_anyway(fields: dict[str, Any]) -> None:
    plain = read_chat({"model": "m", "messages": [MESSAGE]})
    assert read_chat({"model": "m", "messages": [MESSAGE], **fields}) == plain


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # openai's `message.model_dump()`
        (
            {
                "content": "Hi",
                "refusal": None,
                "role": "assistant",
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            {"content": "Hi"},
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"content": "No."},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "content": "",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": {"a": 1}},
                    }
                ],
            },
        ),
        (
            {"role": "tool", "content": "42", "tool_call_id": "c"},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ),
    ],
)
def test_messages_that_clients_send_back(message: Any, expected: Any) -> None:
    request = read_chat({"model": "m", "messages": [MESSAGE, message, MESSAGE]}, bounds)
    assert request.messages[1] == {"role": "assistant", **expected}


def test_calls_of_tools_that_a_template_does_not_write() -> None:
    for message, param in (
        ({"role": "assistant", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "42"}, "messages[0].role"),
    ):
        with pytest.raises(Problem, match="chat template writes no") as caught:
            read_chat({"model": "m", "messages": [message]})
        assert caught.value.param == param


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 1000, '{"a":NaN}', 1, None])
def test_arguments_that_are_no_object(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(Problem) as caught:
        read_chat({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]}, bounds)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


# -- time -----------------------------------------------------------------------------------


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(PATIENCE):
            await test()

    asyncio.run(bounded())


class Halves:
    """A client that sends half a body, and never the rest."""

    def __init__(self, key: str) -> None:
        self.sent: list[Any] = []
        self.waits = anyio.Event()
        self._key = key
        self._left = [b'{"model":']

    async def __call__(self, app: Any) -> None:
        headers = {**JSON, "authorization": f"Bearer {self._key}"}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
        }

        async def receive() -> Any:
            if self._left:
                return {"type": "http.request", "body": self._left.pop(), "more_body": True}
            self.waits.set()
            await anyio.sleep_forever()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        await app(scope, receive, send)


def test_half_a_body_takes_no_place_and_has_its_time() -> None:
    async def test() -> None:
        async with Engine.open(ScriptedModel("Hello.")) as engine:
            key = ApiKey(key="k", name="k", max_concurrent=4)
            slow = openai_app(engine, api_keys=[key], max_concurrent_requests=4)
            body = {"model": "scripted", "messages": [MESSAGE]}
            transport = httpx.ASGITransport(slow)
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
                anyio.create_task_group() as tasks,
            ):
                for half in [Halves("k") for _ in range(8)]:
                    tasks.start_soon(half, slow)
                    await half.waits.wait()
                headers = {"authorization": "Bearer k"}
                assert (await client.post(CHAT, json=body, headers=headers)).status_code == 200
                tasks.cancel_scope.cancel()
            half = Halves("k")
            await half(openai_app(engine, api_keys=["k"], body_timeout=0.01))
            start, end = half.sent
            assert start["status"] == 408
            assert (b"connection", b"close") in start["headers"]
            assert json.loads(end["body"])["error"]["code"] == "body_timeout"

    run(test)


def test_a_body_of_many_items_is_refused_by_the_engine_that_is_asked() -> None:
    async def test() -> None:
        model = ScriptedModel("Hello.", max_model_len=50)
        async with (
            Engine.open(model) as usual,
            Engine.open(ScriptedModel("Hello."), limits=RequestLimits(max_stop=6)) as other,
        ):
            app = openai_app({"usual": usual, "other": other})
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

                async def ask(**fields: Any) -> Any:
                    response = await client.post(COMPLETION, json={"prompt": "x", **fields})
                    if response.status_code == 200:
                        return 200
                    error = response.json()["error"]
                    return response.status_code, error["param"], error["code"]

                stop = ["1", "2", "3", "4", "5"]
                assert await ask(model="usual", stop=stop) == (400, "stop", "invalid_value")
                assert await ask(model="other", stop=stop) == 200
                for size in (50, 100_000):
                    assert await ask(model="usual", prompt=[1] * size) == (
                        400,
                        "prompt",
                        "context_length_exceeded",
                    )
                assert await ask(model="usual", prompt=[1] * 300_000) == (
                    400,
                    None,
                    "too_many_items",
                )
                assert usual.statistics().num_steps == 0

    run(test)


def test_the_page_of_limits_shows_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    for name, field, default, unit in RequestLimits.table():
        assert f"| `{name}` | {field} | {default:,} | {unit} |\n" in page
    assert page.count("| `max_") == len(RequestLimits.table()) + 4  # those of bodies and keys
