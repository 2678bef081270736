"""Bodies of OpenAI's requests, read by hand: every field is checked, and none is dropped unsaid.

What is wrong with a body is a 400 that names the field, as OpenAI's own service answers; 422 is
not used, so that its clients raise the error that their users expect. `None` is the same as a
field that was left out.

A field that would change the answer and is not understood (`tools`, `response_format`, images,
...) is refused, and so is one that nobody knows. Only `IGNORED` is taken and has no effect.

What clients send back of earlier turns is taken as they send it. An assistant's `tool_calls`, and
the results in messages of the role `tool`, go to the chat template as fields, with a call's
arguments as an object. A template that does not write them would leave them out unsaid, so there
they are refused.

How much a field holds is checked before anything is done with its items, by the limits of the
model that is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from ragserve.engine import InvalidParamsError, RequestLimits, SamplingParams

from ..json_text import parse_json
from ..problem import Problem, problem_of

__all__ = [
    "IGNORED",
    "Bounds",
    "ChatRequest",
    "CompletionRequest",
    "GivenDocument",
    "Options",
    "read_chat",
    "read_completion",
]

Message: TypeAlias = dict[str, Any]
"""`role` and `content` are strings."""

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
_MAX_PRIORITY: Final = 2**31 - 1
_ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; chat templates know the older one
    "user": "user",
    "assistant": "assistant",
}
_MAX_ARGUMENT_ITEMS: Final = 4096
"""Most items in the arguments of a call of a tool."""
_SHOWN: Final = 64
"""Most characters of a name that a message quotes."""
_WITHIN_LIMITS: Final = {
    "stop": ("max_stop", "max_stop_characters"),
    "bad_words": ("max_bad_words", "max_bad_word_characters"),
    "stop_token_ids": ("max_stop_token_ids", None),
    "logit_bias": ("max_logit_bias", None),
    "allowed_token_ids": ("max_allowed_token_ids", None),
}
"""Limits of count, and of each string's characters, by the field of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the model that is asked can take.

    :param max_model_len: tokens of a prompt and its answer; None is no limit.
    :param writes_tools: whether its chat template writes `tool_calls` and messages of tools.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    max_model_len: int | None = None
    writes_tools: bool = False


BoundsOf: TypeAlias = Callable[[str], Bounds]
"""Bounds by the request's `model`; raises a `Problem` if there is none of that name."""


def _usual_bounds(model: str) -> Bounds:
    return Bounds()


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
    :param priority: lower goes first; None if it was not said.
    :param namespace: the tenant asked for; None if it was not said.
    """

    model: str
    stream: bool
    include_usage: bool
    sampling: Mapping[str, Any]
    priority: int | None
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
        return str(last["content"])


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body of `/v1/completions`."""

    options: Options
    prompts: list[str | list[int]]
    echo: bool = False


def read_chat(data: object, bounds_of: BoundsOf = _usual_bounds) -> ChatRequest:
    """Check the body of a chat request.

    :raises Problem: 400, naming the field; what `bounds_of` raises.
    """
    body = _Body(data, bounds_of)
    given = body.list("messages", "a list of messages")
    body.check_count("messages", given, "max_messages")
    messages = [
        _message(f"messages[{index}]", message, body.bounds) for index, message in enumerate(given)
    ]
    if not messages:
        raise Problem(400, "messages must have at least one message", param="messages")
    body.check_characters("messages", (message["content"] for message in messages))
    documents = _documents(body)
    body.refuse("tools", "tools are not supported", unless=([],))
    body.refuse("functions", "functions are not supported", unless=([],))
    # With no tools there is nothing to choose from, which "auto" leaves to the model.
    for name in ("tool_choice", "function_call"):
        body.refuse(
            name, "tools are not supported; only 'none' and 'auto' are", unless=("none", "auto")
        )
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
    num_top = 0 if top is None else body.integer("top_logprobs", top, 0, 20)
    if wanted:
        sampling["logprobs"] = num_top
    elif num_top:
        raise Problem(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return ChatRequest(body.options(sampling), messages, documents)


def read_completion(data: object, bounds_of: BoundsOf = _usual_bounds) -> CompletionRequest:
    """Check the body of a completion request.

    :raises Problem: 400, naming the field; what `bounds_of` raises.
    """
    body = _Body(data, bounds_of)
    prompts = _prompts(body)
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
    if echo:
        most = body.bounds.limits.max_prompt_characters
        characters = n * sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        if characters > most:
            raise Problem(
                400,
                f"echo gives back {characters} characters, n={n} times the prompts', and at most "
                f"{most}; leave it out, or raise max_prompt_characters in EngineConfig.limits",
                param="echo",
            )
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


class _Fields:
    """The fields of an object. Each is taken once; what is left over at the end is refused."""

    def __init__(self, data: Mapping[str, Any]) -> None:
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

    def refuse(
        self, name: str, why: str, *, unless: Sequence[object] = (), prefix: str = ""
    ) -> None:
        value = self.take(name)
        # True == 1 in Python, and means something else here.
        if value is None or any(value == v and type(value) is type(v) for v in unless):
            return
        name = f"{prefix}{name}"
        raise Problem(400, f"{name}: {why}", param=name, code="unsupported_parameter")

    def refuse_rest(self, prefix: str = "") -> None:
        for name in self._left:
            if prefix or name not in IGNORED:
                shown = f"{prefix}{name[:_SHOWN]}"
                raise Problem(
                    400,
                    f"{shown} is not a field that is known here",
                    param=shown,
                    code="unknown_parameter",
                )


class _Body(_Fields):
    """The fields of a whole request."""

    def __init__(self, data: object, bounds_of: BoundsOf) -> None:
        if not isinstance(data, dict):
            raise Problem(400, "the body must be a JSON object")
        super().__init__(data)
        model = self.string("model")
        if model is None:
            raise Problem(400, "model must say which model is to answer", param="model")
        if len(model) > (most := RequestLimits().max_name_characters):
            raise Problem(
                400, f"model has {len(model)} characters and at most {most}", param="model"
            )
        self.model = model
        # Before the rest is read: its limits are what the rest is checked by.
        self.bounds = bounds_of(model)

    def check_count(self, name: str, value: Sized, limit: str) -> None:
        """Check how many items or characters a field has.

        :raises Problem: if there are too many.
        """
        _check_count(self.bounds, name, value, limit)

    def check_characters(self, name: str, texts: Iterable[str]) -> None:
        """Check the characters of several texts together.

        :raises Problem: if there are too many.
        """
        characters, most = sum(map(len, texts)), self.bounds.limits.max_prompt_characters
        if characters > most:
            raise Problem(
                400,
                f"{name} has {characters} characters, all together, and at most {most}; send "
                "less, or raise max_prompt_characters in EngineConfig.limits",
                param=name,
                code="invalid_value",
            )

    def name(self, name: str) -> str | None:
        """A string that names something."""
        value = self.string(name)
        if value is not None:
            self.check_count(name, value, "max_name_characters")
        return value

    def sampling(self) -> dict[str, Any]:
        """Those fields that `SamplingParams` checks."""
        given: dict[str, Any] = {}
        given |= {name: self.take(name) for name in _SAMPLING if name in self._left}
        if (most := self.take("max_tokens")) is not None:
            given["max_tokens"] = most
        if (bias := self.take("logit_bias")) is not None:
            given["logit_bias"] = bias
        for name, (count, characters) in _WITHIN_LIMITS.items():
            value = given.get(name)
            texts: Iterable[object] = (value,)
            if isinstance(value, list | dict):
                self.check_count(name, value, count)
                texts = value
            for text in texts:
                if isinstance(text, str) and characters is not None:
                    self.check_count(name, text, characters)
        if bias is not None:
            given["logit_bias"] = _logit_bias(bias)
        return given

    def options(self, sampling: Mapping[str, Any]) -> Options:
        """What is common to requests; the last to be read."""
        stream = self.flag("stream")
        include_usage = False
        if (given := self.take("stream_options")) is not None:
            if not stream:
                raise Problem(400, "stream_options needs stream to be true", param="stream_options")
            if not isinstance(given, dict):
                raise _wrong("stream_options", "an object", given)
            of_stream = _Fields(given)
            include_usage = of_stream.flag("include_usage")
            of_stream.flag("include_obfuscation")  # padding against listeners; TLS is the app's
            of_stream.refuse_rest("stream_options.")
        priority = self.take("priority")
        options = Options(
            model=self.model,
            stream=stream,
            include_usage=include_usage,
            sampling=sampling,
            priority=(
                None
                if priority is None
                else self.integer("priority", priority, -_MAX_PRIORITY - 1, _MAX_PRIORITY)
            ),
            namespace=self.name("namespace"),
        )
        self._check_ignored()
        self.refuse_rest()
        return options

    def _check_ignored(self) -> None:
        """Those that have no effect still have a size."""
        for name in ("user", "safety_identifier", "prompt_cache_key"):
            self.name(name)
        metadata = self.take("metadata")
        if metadata is None:
            return
        if not isinstance(metadata, dict):
            raise _wrong("metadata", "an object of strings", metadata)
        self.check_count("metadata", metadata, "max_metadata")
        for key, value in metadata.items():
            self.check_count("metadata", key, "max_metadata_key_characters")
            if not isinstance(value, str):
                raise _wrong(f"metadata.{key}", "a string", value)
            self.check_count(f"metadata.{key}", value, "max_metadata_value_characters")


def _check_count(bounds: Bounds, name: str, value: Sized, limit: str) -> None:
    try:
        bounds.limits.check_count(name, value, limit)
    except InvalidParamsError as error:
        raise problem_of(error) from error


def _wrong(name: str, wanted: str, value: object) -> Problem:
    # The kind of value only: it may be a part of what somebody asked.
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    kind = "missing" if value is None else kinds.get(type(value), f"{value!r:.40}")
    code = "missing_required_parameter" if value is None else "invalid_type"
    return Problem(400, f"{name} must be {wanted}, and is {kind}", param=name, code=code)


def _message(name: str, message: object, bounds: Bounds) -> Message:
    if not isinstance(message, dict):
        raise _wrong(name, "an object with role and content", message)
    fields = _Fields(message)
    role = fields.take("role")
    if role == "tool" and bounds.writes_tools:
        return _tool_result(name, fields, bounds)
    if not isinstance(role, str) or role not in _ROLES:
        why = "; this model's chat template writes no tool's results" if role == "tool" else ""
        raise Problem(
            400, f"{name}.role must be one of {', '.join(_ROLES)}{why}", param=f"{name}.role"
        )
    content = fields.take("content")
    checked: Message = {"role": _ROLES[role]}
    if role == "assistant":
        # What an answer of ours, or of OpenAI's, may have when it is sent back.
        calls = _tool_calls(f"{name}.tool_calls", fields.take("tool_calls"), bounds)
        refusal = fields.string("refusal")
        if content is None and (calls or refusal is not None):
            content = "" if refusal is None else refusal
        elif refusal:
            raise Problem(
                400,
                f"{name} has content and refusal; an answer has one of them",
                param=f"{name}.refusal",
            )
        if calls:
            checked["tool_calls"] = calls
    checked["content"] = _content(f"{name}.content", content, bounds, role == "assistant")
    if (author := fields.string("name")) is not None:
        _check_count(bounds, f"{name}.name", author, "max_name_characters")
        checked["name"] = author  # for templates that write it
    for field_name in ("tool_calls", "annotations"):
        fields.refuse(field_name, "tools are not supported", unless=([],), prefix=f"{name}.")
    for field_name in ("function_call", "audio", "refusal"):
        fields.refuse(field_name, "only text is supported", prefix=f"{name}.")
    fields.refuse_rest(f"{name}.")
    return checked


def _tool_result(name: str, fields: _Fields, bounds: Bounds) -> Message:
    checked = {
        "role": "tool",
        "content": _content(f"{name}.content", fields.take("content"), bounds, False),
    }
    for key in ("tool_call_id", "name"):
        if (value := fields.string(key)) is not None:
            _check_count(bounds, f"{name}.{key}", value, "max_name_characters")
            checked[key] = value
    fields.refuse_rest(f"{name}.")
    return checked


def _tool_calls(name: str, calls: object, bounds: Bounds) -> list[dict[str, Any]]:
    """Calls that an assistant made, as chat templates take them."""
    if calls is None or calls == []:
        return []
    if not isinstance(calls, list):
        raise _wrong(name, "a list of calls", calls)
    _check_count(bounds, name, calls, "max_tool_calls")
    if not bounds.writes_tools:
        raise Problem(
            400,
            f"{name}: this model's chat template writes no calls of tools; send them as text",
            param=name,
            code="unsupported_parameter",
        )
    return [_tool_call(f"{name}[{index}]", call, bounds) for index, call in enumerate(calls)]


def _tool_call(name: str, call: object, bounds: Bounds) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _wrong(name, "an object with id, type and function", call)
    fields = _Fields(call)
    call_id, kind, function = fields.string("id"), fields.take("type"), fields.take("function")
    fields.take("index")  # of a stream's chunk; clients that join those leave it in
    fields.refuse_rest(f"{name}.")
    if kind not in (None, "function"):
        raise Problem(400, f"{name}.type must be 'function'", param=f"{name}.type")
    if not isinstance(function, dict):
        raise _wrong(f"{name}.function", "an object with name and arguments", function)
    of_function = _Fields(function)
    called, arguments = of_function.string("name"), of_function.take("arguments")
    of_function.refuse_rest(f"{name}.function.")
    if called is None:
        raise _wrong(f"{name}.function.name", "a string", called)
    for key, value in (("id", call_id or ""), ("function.name", called)):
        _check_count(bounds, f"{name}.{key}", value, "max_name_characters")
    if isinstance(arguments, str):
        _check_count(bounds, f"{name}.function.arguments", arguments, "max_tool_characters")
        try:
            arguments = parse_json(arguments.encode(), _MAX_ARGUMENT_ITEMS)
        except Problem as problem:
            raise Problem(
                400,
                f"{name}.function.arguments: {problem.message.replace('the body', 'the text')}",
                param=f"{name}.function.arguments",
                code="invalid_json",
            ) from problem
    if not isinstance(arguments, dict):
        raise _wrong(f"{name}.function.arguments", "an object, or one as JSON", arguments)
    return {
        **({} if call_id is None else {"id": call_id}),
        "type": "function",
        "function": {"name": called, "arguments": arguments},
    }


def _content(name: str, content: object, bounds: Bounds, assistant: bool) -> str:
    """Text of a message. The parts of one that has several follow each other on new lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(name, "a string, or a list of text parts", content)
    _check_count(bounds, name, content, "max_content_parts")
    parts = (_part(f"{name}[{index}]", part, assistant) for index, part in enumerate(content))
    return "\n".join(parts)


def _part(name: str, part: object, assistant: bool) -> str:
    if not isinstance(part, dict):
        raise _wrong(name, "an object with type and text", part)
    fields = _Fields(part)
    kind = fields.take("type")
    key = "refusal" if assistant and kind == "refusal" else "text"
    if kind != key:
        raise Problem(
            400,
            f"{name}.type must be 'text': images, sound and files are not understood",
            param=f"{name}.type",
            code="unsupported_parameter",
        )
    text = fields.take(key)
    if not isinstance(text, str):
        raise _wrong(f"{name}.{key}", "a string", text)
    fields.refuse("annotations", "files are not supported", unless=([],), prefix=f"{name}.")
    fields.refuse_rest(f"{name}.")
    return text


def _documents(body: _Body) -> tuple[GivenDocument, ...] | None:
    given = body.take("documents")
    if given is None:
        return None
    if not isinstance(given, list):
        raise _wrong("documents", "a list", given)
    body.check_count("documents", given, "max_documents")
    documents = tuple(
        _document(index, document, body.bounds) for index, document in enumerate(given)
    )
    body.check_characters(
        "documents", (text for each in documents for text in (each.title or "", each.text))
    )
    return documents


def _document(index: int, document: object, bounds: Bounds) -> GivenDocument:
    name, number = f"documents[{index}]", str(index + 1)
    if isinstance(document, str):
        return GivenDocument(number, document)
    if not isinstance(document, dict):
        raise _wrong(name, "a string, or an object of id, title and text", document)
    body = _Fields(document)
    known = {key: body.take(key) for key in ("id", "title", "text")}
    for key, value in known.items():
        if not isinstance(value, str) and (value is not None or key == "text"):
            raise _wrong(f"{name}.{key}", "a string", value)
    if known["id"]:
        _check_count(bounds, f"{name}.id", known["id"], "max_name_characters")
    body.refuse_rest(f"{name}.")
    return GivenDocument(known["id"] or number, known["text"], known["title"])


def _prompts(body: _Body) -> list[str | list[int]]:
    """The prompts of a completion: text or token ids, one or a list of them."""
    prompt = body.take("prompt")
    match prompt:
        case str():
            prompts: list[str | list[int]] = [prompt]
        case [int(), *_]:
            prompts = [_token_ids("prompt", prompt, body.bounds)]
        case [str() | [*_], *_]:
            body.check_count("prompt", prompt, "max_prompts")
            prompts = [
                item if isinstance(item, str) else _token_ids(f"prompt[{index}]", item, body.bounds)
                for index, item in enumerate(prompt)
            ]
        case _:
            raise _wrong("prompt", "text, token ids, or a list of either that has some", prompt)
    body.check_characters("prompt", (text for text in prompts if isinstance(text, str)))
    return prompts


def _token_ids(name: str, ids: object, bounds: Bounds) -> list[int]:
    most = bounds.max_model_len
    if isinstance(ids, list) and most is not None and len(ids) >= most:
        raise Problem(
            400,
            f"{name} has {len(ids)} token ids and at most {most - 1} fit: max_model_len is {most}",
            param="prompt",
            code="context_length_exceeded",
        )
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
