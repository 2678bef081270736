"""Bodies of OpenAI's requests, read by hand: every field is checked, and none is dropped unsaid.

What is wrong with a body is a 400 that names the field, as OpenAI's own service answers; 422 is
not used, so that its clients raise the error that their users expect. `None` is the same as a
field that was left out.

A field that would change the answer and is not understood (`tools`, `response_format`, images,
...) is refused, and so is one that nobody knows. Only `IGNORED` is taken and has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from ragserve.engine import InvalidParamsError, SamplingParams

from .problem import Problem, problem_of

__all__ = [
    "IGNORED",
    "ChatRequest",
    "CompletionRequest",
    "GivenDocument",
    "Options",
    "read_chat",
    "read_completion",
]

Message: TypeAlias = dict[str, str]

IGNORED: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)
"""Fields that are taken, whatever their value, and change nothing here."""

_SAMPLING: Final = (
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    # vLLM's
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
)
"""Fields that are `SamplingParams`' under the same name, and checked there."""

_COMPLETION_TOKENS: Final = 16
"""`max_tokens` of a completion where none is given, as OpenAI has it."""
_MAX_CHOICES: Final = 128
"""Most prompts times `n` in a request for completions."""
_ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; chat templates know the older one
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class GivenDocument:
    """A document that a request brings along."""

    id: str
    text: str
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What requests of both kinds have.

    :param sampling: fields of `SamplingParams` that were given.
    :param namespace: the tenant asked for; None if it was not said.
    """

    model: str
    stream: bool
    include_usage: bool
    sampling: Mapping[str, Any]
    priority: int
    namespace: str | None

    def params(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """The sampling parameters: what was given, over `defaults`.

        :raises Problem: if a value is out of its range; names the field of the request.
        """
        try:
            return replace(defaults or SamplingParams(), **self.sampling)
        except InvalidParamsError as error:
            raise problem_of(error) from error


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A body of `/v1/chat/completions`."""

    options: Options
    messages: list[Message]
    documents: tuple[GivenDocument, ...] | None = None

    @property
    def question(self) -> str:
        """The last message, which must be the user's.

        :raises Problem: if it is another's.
        """
        last = self.messages[-1]
        if last["role"] != "user":
            raise Problem(
                400,
                "the last message is the question, and must have the role 'user'",
                param=f"messages[{len(self.messages) - 1}].role",
            )
        return last["content"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body of `/v1/completions`."""

    options: Options
    prompts: list[str | list[int]]
    echo: bool = False


def read_chat(data: object) -> ChatRequest:
    """Check the body of a chat request.

    :raises Problem: 400, naming the field.
    """
    body = _Body(data)
    messages = [
        _message(f"messages[{index}]", message)
        for index, message in enumerate(body.list("messages", "a list of messages"))
    ]
    if not messages:
        raise Problem(400, "messages must have at least one message", param="messages")
    documents = _documents(body)
    body.refuse("tools", "tools are not supported", unless=([],))
    body.refuse("functions", "functions are not supported", unless=([],))
    body.refuse("tool_choice", "tools are not supported; only 'none' is", unless=("none",))
    body.refuse("function_call", "functions are not supported; only 'none' is", unless=("none",))
    body.refuse("response_format", "only {'type': 'text'} is supported", unless=({"type": "text"},))
    body.refuse("modalities", "only ['text'] is supported", unless=(["text"],))
    body.refuse("audio", "audio is not supported")
    sampling = body.sampling()
    most = body.take("max_completion_tokens")
    if most is not None and sampling.setdefault("max_tokens", most) != most:
        raise Problem(
            400,
            "max_tokens and max_completion_tokens mean the same and differ; give one",
            param="max_completion_tokens",
        )
    wanted, top = body.flag("logprobs"), body.take("top_logprobs")
    if wanted:
        sampling["logprobs"] = 0 if top is None else body.integer("top_logprobs", top, 0, 20)
    elif top is not None:
        raise Problem(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return ChatRequest(body.options(sampling), messages, documents)


def read_completion(data: object) -> CompletionRequest:
    """Check the body of a completion request.

    :raises Problem: 400, naming the field.
    """
    body = _Body(data)
    prompts = _prompts(body.take("prompt"))
    echo = body.flag("echo")
    body.refuse("suffix", "text is only continued at its end", unless=("",))
    body.refuse("documents", "documents belong to /v1/chat/completions")
    sampling = body.sampling()
    sampling.setdefault("max_tokens", _COMPLETION_TOKENS)
    n = body.integer("n", sampling.get("n", 1), 1, _MAX_CHOICES)
    body.refuse("best_of", "only as many as n are generated, and all are given", unless=(n,))
    if n * len(prompts) > _MAX_CHOICES:
        raise Problem(
            400, f"{len(prompts)} prompts times n={n} is above {_MAX_CHOICES}", param="prompt"
        )
    if (logprobs := body.take("logprobs")) is not None:
        sampling["logprobs"] = body.integer("logprobs", logprobs, 0, 20)
    options = body.options(sampling)
    if echo and logprobs is not None:
        if options.stream:
            raise Problem(
                400,
                "log-probabilities of an echoed prompt are not streamed; leave out one of "
                "stream, echo and logprobs",
                param="echo",
            )
        sampling["prompt_logprobs"] = sampling["logprobs"]
    return CompletionRequest(options, prompts, echo)


class _Body:
    """The fields of a body. Each is taken once; what is left over at the end is refused."""

    def __init__(self, data: object) -> None:
        if not isinstance(data, dict):
            raise Problem(400, "the body must be a JSON object")
        self._left: dict[str, Any] = {k: v for k, v in data.items() if v is not None}

    def take(self, name: str) -> Any:
        """The value of a field; None if it was not given."""
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return bool(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, "a string", value)
        return value

    def list(self, name: str, what: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise _wrong(name, what, value)
        return value

    def integer(
        self, name: str, value: object, least: int | None = None, most: int | None = None
    ) -> int:
        within = (
            isinstance(value, int)
            and not isinstance(value, bool)
            and (least is None or value >= least)
            and (most is None or value <= most)
        )
        if not within or not isinstance(value, int):
            span = "" if least is None else f" from {least} to {most}"
            raise _wrong(name, f"an integer{span}", value)
        return value

    def refuse(self, name: str, why: str, *, unless: Sequence[object] = ()) -> None:
        value = self.take(name)
        # True == 1 in Python, and means something else here.
        if value is None or any(value == v and type(value) is type(v) for v in unless):
            return
        raise Problem(400, f"{name}: {why}", param=name, code="unsupported_parameter")

    def sampling(self) -> dict[str, Any]:
        """Those fields that `SamplingParams` checks."""
        given: dict[str, Any] = {}
        given |= {name: self.take(name) for name in _SAMPLING if name in self._left}
        if (most := self.take("max_tokens")) is not None:
            given["max_tokens"] = most
        if (bias := self.take("logit_bias")) is not None:
            given["logit_bias"] = _logit_bias(bias)
        return given

    def options(self, sampling: Mapping[str, Any]) -> Options:
        """What is common to requests; the last to be read."""
        model = self.string("model")
        if model is None:
            raise Problem(400, "model must say which model is to answer", param="model")
        stream = self.flag("stream")
        include_usage = False
        if (given := self.take("stream_options")) is not None:
            if not stream:
                raise Problem(400, "stream_options needs stream to be true", param="stream_options")
            if not isinstance(given, dict):
                raise _wrong("stream_options", "an object", given)
            of_stream = _Body(given)
            include_usage = of_stream.flag("include_usage")
            of_stream.flag("include_obfuscation")  # padding against listeners; TLS is the app's
            of_stream.refuse_rest("stream_options.")
        priority = self.take("priority")
        options = Options(
            model=model,
            stream=stream,
            include_usage=include_usage,
            sampling=sampling,
            priority=0 if priority is None else self.integer("priority", priority),
            namespace=self.string("namespace"),
        )
        self.refuse_rest()
        return options

    def refuse_rest(self, prefix: str = "") -> None:
        for name in self._left:
            if prefix or name not in IGNORED:
                raise Problem(
                    400,
                    f"{prefix}{name} is not a field that is known here",
                    param=f"{prefix}{name}",
                    code="unknown_parameter",
                )


def _wrong(name: str, wanted: str, value: object) -> Problem:
    # The kind of value only: it may be a part of what somebody asked.
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    kind = "missing" if value is None else kinds.get(type(value), f"{value!r:.40}")
    code = "missing_required_parameter" if value is None else "invalid_type"
    return Problem(400, f"{name} must be {wanted}, and is {kind}", param=name, code=code)


def _message(name: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise _wrong(name, "an object with role and content", message)
    body = _Body(message)
    role = body.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise Problem(400, f"{name}.role must be one of {', '.join(_ROLES)}", param=f"{name}.role")
    content = _content(f"{name}.content", body.take("content"))
    checked = {"role": _ROLES[role], "content": content}
    if (author := body.string("name")) is not None:
        checked["name"] = author  # for templates that write it
    # What an answer of ours, or of OpenAI's, may have when it is sent back.
    for field_name in ("tool_calls", "annotations"):
        body.refuse(field_name, "tools are not supported", unless=([],))
    for field_name in ("function_call", "audio", "refusal"):
        body.refuse(field_name, "only text is supported")
    body.refuse_rest(f"{name}.")
    return checked


def _content(name: str, content: object) -> str:
    """Text of a message. The parts of one that has several follow each other on new lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(name, "a string, or a list of text parts", content)
    return "\n".join(_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise _wrong(name, "an object with type and text", part)
    body = _Body(part)
    if body.take("type") != "text":
        raise Problem(
            400,
            f"{name}.type must be 'text': images, sound and files are not understood",
            param=f"{name}.type",
            code="unsupported_parameter",
        )
    text = body.take("text")
    if not isinstance(text, str):
        raise _wrong(f"{name}.text", "a string", text)
    body.refuse_rest(f"{name}.")
    return text


def _documents(body: _Body) -> tuple[GivenDocument, ...] | None:
    given = body.take("documents")
    if given is None:
        return None
    if not isinstance(given, list):
        raise _wrong("documents", "a list", given)
    return tuple(_document(index, document) for index, document in enumerate(given))


def _document(index: int, document: object) -> GivenDocument:
    name, number = f"documents[{index}]", str(index + 1)
    if isinstance(document, str):
        return GivenDocument(number, document)
    if not isinstance(document, dict):
        raise _wrong(name, "a string, or an object of id, title and text", document)
    body = _Body(document)
    known = {key: body.take(key) for key in ("id", "title", "text")}
    for key, value in known.items():
        if not isinstance(value, str) and (value is not None or key == "text"):
            raise _wrong(f"{name}.{key}", "a string", value)
    body.refuse_rest(f"{name}.")
    return GivenDocument(known["id"] or number, known["text"], known["title"])


def _prompts(prompt: object) -> list[str | list[int]]:
    """The prompts of a completion: text or token ids, one or a list of them."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [_token_ids("prompt", prompt)]
        case [str() | [*_], *_]:
            return [
                item if isinstance(item, str) else _token_ids(f"prompt[{index}]", item)
                for index, item in enumerate(prompt)
            ]
        case _:
            raise _wrong("prompt", "text, token ids, or a list of either that has some", prompt)


def _token_ids(name: str, ids: object) -> list[int]:
    if not isinstance(ids, list) or any(type(token_id) is not int for token_id in ids):
        raise _wrong(name, "a list of token ids, or text like the others", ids)
    return ids


def _logit_bias(bias: object) -> dict[int, Any]:
    """With numbers for keys, which JSON has only as strings."""
    if not isinstance(bias, dict):
        raise _wrong("logit_bias", "an object of token ids and numbers", bias)
    checked = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            raise Problem(
                400,
                f"logit_bias: its keys must be token ids, and {key[:40]!r} is none",
                param="logit_bias",
            )
        checked[int(key)] = value
    return checked
