"""OpenAI's responses: whole ones, and the chunks of streams."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from ragserve.engine import Choice, Completion, Delta, Tokenizer, TokenLogprob, Usage

from ..bodies import LARGE, off_loop, to_json, to_json_in_pieces
from ..problem import Problem
from .generation import Extras, Generation, total_usage

__all__ = ["ChatFormat", "CompletionFormat", "Echo", "Format", "error_chunk", "stream", "whole"]

_LOGPROB: Final = 1024
"""About how many characters a token with its log-probabilities has, the 20 likeliest others too."""
_NEVER: Final = -9999.0
"""What stands for the logarithm of zero, which JSON has not."""


class Format(Protocol):
    """How the choices of one kind of request are written."""

    whole: str
    """What `object` says of a whole response."""
    chunk: str
    """What `object` says of a chunk."""

    def opening(self, index: int) -> str | None:
        """The choice that begins a choice's stream, as JSON."""

    def delta(self, delta: Delta) -> str | None:
        """New text of a choice, as JSON; None if there is nothing to tell."""

    def ending(self, index: int, reason: str) -> str:
        """The choice that ends a choice's stream, as JSON."""

    def choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        """A whole choice."""


class ChatFormat:
    """Choices of a chat.

    :param tokens: the model's, if log-probabilities are wanted.
    """

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, tokens: Tokenizer | None) -> None:
        self._tokens = tokens

    def opening(self, index: int) -> str:
        """See `Format.opening`."""
        return (
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def delta(self, delta: Delta) -> str | None:
        """See `Format.delta`."""
        logprobs = self._logprobs(delta.logprobs)
        if not delta.text and logprobs is None:
            return None
        return (
            f'{{"index":{delta.index},"delta":{{"content":{to_json(delta.text)}}},'
            f'"logprobs":{"null" if logprobs is None else to_json(logprobs)},'
            '"finish_reason":null}'
        )

    def ending(self, index: int, reason: str) -> str:
        """See `Format.ending`."""
        return f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}'

    def choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        """See `Format.choice`."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        tokens = self._tokens
        if tokens is None or logprobs is None:
            return None
        content = [
            {
                **_scored(tokens, of.token_id, of.logprob),
                "top_logprobs": [_scored(tokens, *other) for other in of.top],
            }
            for of in logprobs
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is given back before its continuation.

    :param json: the text, as JSON.
    """

    text: str
    token_ids: Sequence[int]
    json: str


class CompletionFormat:
    """Choices of completions.

    :param n: choices for each prompt.
    :param tokens: the model's, if log-probabilities are wanted.
    :param echo: the prompts, if they are to be given back.
    :param skip_special_tokens: whether those are left out of the text.
    """

    whole = "text_completion"
    chunk = "text_completion"

    def __init__(
        self,
        n: int,
        tokens: Tokenizer | None,
        echo: Sequence[Echo] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._n = n
        self._tokens = tokens
        self._echo = echo
        self._skipped = (
            tokens.special_tokens if tokens is not None and skip_special_tokens else frozenset()
        )
        self._columns: dict[int, _Columns] = {}
        self.size_of_echo = n * sum(len(each.json) for each in echo)

    def opening(self, index: int) -> str | None:
        """See `Format.opening`."""
        if not self._echo:
            return None
        return self._text(index, self._echo[index // self._n].json, None)

    def delta(self, delta: Delta) -> str | None:
        """See `Format.delta`."""
        logprobs = None
        if self._tokens is not None and delta.logprobs is not None:
            columns = self._columns.get(delta.index)
            if columns is None:
                before = self._echo[delta.index // self._n].text if self._echo else ""
                columns = self._columns[delta.index] = self._new_columns(len(before))
            logprobs = columns.add(delta.logprobs)
        if not delta.text and logprobs is None:
            return None
        return self._text(delta.index, to_json(delta.text), logprobs)

    def ending(self, index: int, reason: str) -> str:
        """See `Format.ending`."""
        return f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{reason}"}}'

    def choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        """See `Format.choice`."""
        text, given = choice.text, list[TokenLogprob | None](choice.logprobs or ())
        first = None
        if self._echo:
            echo = self._echo[index // self._n]
            text = echo.text + text
            # Of the prompt's first token there is no probability.
            given = [*(completion.prompt_logprobs or ()), *given]
            first = echo.token_ids[0]
        logprobs = None
        if self._tokens is not None:
            logprobs = self._new_columns(0).add(given, first)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _text(self, index: int, text: str, logprobs: Mapping[str, Any] | None) -> str:
        return (
            f'{{"index":{index},"text":{text},'
            f'"logprobs":{"null" if logprobs is None else to_json(logprobs)},'
            '"finish_reason":null}'
        )

    def _new_columns(self, offset: int) -> _Columns:
        if self._tokens is None:
            raise RuntimeError("no tokenizer to name the tokens with")
        return _Columns(self._tokens, self._skipped, offset)


class _Columns:
    """The lists in which completions have their log-probabilities, of one choice.

    :param skipped: tokens that are not in the text.
    :param offset: where in the text its first token is.
    """

    def __init__(self, tokens: Tokenizer, skipped: frozenset[str], offset: int) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._offset = offset
        # Characters may be spread over tokens.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(
        self, logprobs: Sequence[TokenLogprob | None], first: int | None = None
    ) -> dict[str, Any]:
        """Lists with these tokens.

        :param first: the id of one that has no log-probability.
        """
        names: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for of in logprobs:
            token_id = first if of is None else of.token_id
            raw = b"" if token_id is None else self._tokens.token_bytes(token_id)
            name = _name(raw)
            names.append(name)
            offsets.append(self._offset)
            if name not in self._skipped:
                self._offset += len(self._decoder.decode(raw))
            if of is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(max(of.logprob, _NEVER))
            # The chosen token is told even if it is none of the likeliest.
            top = {name: max(of.logprob, _NEVER)}
            for other, logprob in of.top:
                top.setdefault(_name(self._tokens.token_bytes(other)), max(logprob, _NEVER))
            tops.append(top)
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


async def whole(generation: Generation, form: Format, *, answer_id: str, model: str) -> str:
    """The response to a request that has ended, as JSON. A large one is written in a thread."""

    def write() -> str:
        return to_json_in_pieces(_whole(generation, form, answer_id, model))

    return await off_loop(write) if _size(generation, form) > LARGE else write()


def _size(generation: Generation, form: Format) -> int:
    """About how many characters a response will have."""
    size = _size_of_sources(generation.extras)
    if isinstance(form, CompletionFormat):
        size += form.size_of_echo
    for completion in generation.completions:
        scored = len(completion.prompt_logprobs or ())
        for choice in completion.choices:
            size += len(choice.text) + _LOGPROB * (scored + len(choice.logprobs or ()))
    return size


def _size_of_sources(told: Extras | None) -> int:
    return 0 if told is None else sum(len(source["text"]) for source in told.sources)


def _whole(generation: Generation, form: Format, answer_id: str, model: str) -> dict[str, Any]:
    completions = generation.completions
    choices: list[dict[str, Any]] = []
    for completion in completions:
        for choice in completion.choices:
            _check_finished(choice.finish_reason)
            choices.append(form.choice(len(choices), choice, completion))
    response = {
        "id": answer_id,
        "object": form.whole,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(total_usage(completions)),
    }
    if generation.extras is not None:
        response |= {"sources": generation.extras.sources, "dropped": generation.extras.dropped}
    if (timings := generation.timings()) is not None:
        response["timings"] = timings
    return response


async def stream(
    generation: Generation,
    form: Format,
    *,
    answer_id: str,
    model: str,
    include_usage: bool,
    on_end: Callable[[], None],
) -> AsyncIterator[bytes]:
    """The chunks of a request that is about to start.

    What fails is raised, before the first chunk or after it.

    :param on_end: called when all has been generated.
    """
    head = {"id": answer_id, "object": form.chunk, "created": int(time.time()), "model": model}
    # Everything about a chunk that never changes is written once.
    before = f'data: {to_json(head)[:-1]},"choices":['
    after = '],"usage":null}\n\n' if include_usage else "]}\n\n"
    await generation.start()
    opened: set[int] = set()
    last = ""
    told = generation.extras
    if told is not None:
        # At once: it can be shown while the answer is waited for.
        opened.add(0)
        told_json = partial(to_json_in_pieces, {"sources": told.sources, "dropped": told.dropped})
        large = _size_of_sources(told) > LARGE
        extra = (await off_loop(told_json) if large else told_json())[1:-1]
        yield f"{before}{form.opening(0) or ''}],{extra}{after[1:]}".encode()
    async for delta in generation:
        parts = []
        if delta.index not in opened:
            opened.add(delta.index)
            parts.append(form.opening(delta.index))
        parts.append(form.delta(delta))
        if delta.finish_reason is not None:
            _check_finished(delta.finish_reason)
            # Of the choice that ends last this waits, to be sent with what is told at the end.
            parts.append(last)
            last = form.ending(delta.index, delta.finish_reason)
        if text := "".join(f"{before}{part}{after}" for part in parts if part):
            yield text.encode()
    if not last:
        raise _aborted()
    on_end()
    timings = generation.timings()
    extra = "" if timings is None else f',"timings":{to_json(timings)}'
    if include_usage:
        usage = to_json(_usage(total_usage(generation.completions)))
        end = f'{before}{last}{after}{before}],"usage":{usage}{extra}}}\n\n'
    else:
        end = f"{before}{last}]{extra}}}\n\n"
    yield f"{end}data: [DONE]\n\n".encode()


def error_chunk(problem: Problem) -> bytes:
    """What ends a stream that has failed; no `[DONE]` follows."""
    return f"data: {to_json(problem.body())}\n\n".encode()


def _scored(tokens: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokens.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, _NEVER),
        "bytes": list(raw),
    }


def _name(raw: bytes) -> str:
    """A token where names must differ: bytes that are no text are written out, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _check_finished(reason: str) -> None:
    """Only what OpenAI's clients know as a finish reason is one.

    :raises Problem: if the answer was ended by somebody else.
    """
    if reason not in ("stop", "length"):
        raise _aborted()


def _aborted() -> Problem:
    return Problem(503, "the request was ended by the server", code="request_aborted")
