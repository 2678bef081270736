"""How much each field of a request may hold: one table, checked on every way in.

Every check here is made before any work that grows with the field, and costs the same however
large the field is, or at most the limit. The values are OpenAI's where OpenAI has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, cast

from .errors import InvalidParamsError
from .prompt import Prompt, Segment, TokenizedPrompt, check_text

if TYPE_CHECKING:
    from .sampling_params import SamplingParams

__all__ = ["RequestLimits"]


def _limit(most: int, unit: str, parameter: str) -> int:
    """A row of the table.

    :param most: the default.
    :param unit: what is counted.
    :param parameter: the field of a request that it bounds.
    """
    value: int = field(default=most, metadata={"unit": unit, "parameter": parameter})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Most that each field of a request may hold. `EngineConfig(limits=RequestLimits(max_stop=16))`
    changes one.

    :raises InvalidParamsError: for a limit below 1, at construction.
    """

    max_stop: int = _limit(4, "strings", "stop")
    max_stop_characters: int = _limit(256, "characters", "each string of stop")
    max_stop_token_ids: int = _limit(128, "token ids", "stop_token_ids")
    max_logit_bias: int = _limit(1024, "token ids", "logit_bias")
    max_allowed_token_ids: int = _limit(16_384, "token ids", "allowed_token_ids")
    max_bad_words: int = _limit(128, "strings", "bad_words")
    max_bad_word_characters: int = _limit(256, "characters", "each string of bad_words")
    max_messages: int = _limit(2048, "messages", "messages")
    max_message_values: int = _limit(16_384, "values", "messages, with all that is in their fields")
    max_message_depth: int = _limit(64, "levels", "messages, of fields within fields")
    max_content_parts: int = _limit(2048, "parts", "content of each message")
    max_prompts: int = _limit(2048, "prompts", "prompt of a text completion")
    max_prompt_characters: int = _limit(
        2_097_152, "characters", "a prompt's text, all parts together"
    )
    max_segments: int = _limit(1024, "segments", "a Prompt")
    max_documents: int = _limit(256, "documents", "documents")
    max_name_characters: int = _limit(
        256, "characters", "each of namespace, request_id, model, a message's name, a document's id"
    )

    max_metadata: int = _limit(16, "pairs", "metadata")
    max_metadata_key_characters: int = _limit(64, "characters", "each key of metadata")
    max_metadata_value_characters: int = _limit(512, "characters", "each value of metadata")
    max_tool_calls: int = _limit(128, "calls", "tool_calls of each message")
    max_tool_characters: int = _limit(65_536, "characters", "arguments of each of tool_calls")

    def __post_init__(self) -> None:
        for row in fields(self):
            value = getattr(self, row.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParamsError(row.name, value, "an integer of at least 1")

    @classmethod
    def table(cls) -> tuple[tuple[str, str, int, str], ...]:
        """(limit, field that it bounds, default, unit) of every row, for documentation."""
        return tuple(
            (row.name, row.metadata["parameter"], cast("int", row.default), row.metadata["unit"])
            for row in fields(cls)
        )

    def check_count(self, parameter: str, value: Sized, limit: str) -> None:
        """Check how many items, or characters, a field has. Looks at its length alone.

        :param parameter: name of the field.
        :param limit: name of the row that bounds it.
        :raises InvalidParamsError: if it has more; names both numbers and the limit to raise.
        """
        self._check_number(parameter, len(value), limit)

    def check_name(self, parameter: str, value: object) -> None:
        """Check a string that names something.

        :raises InvalidParamsError: if it is no string of Unicode characters, or too long.
        """
        if not isinstance(value, str):
            raise InvalidParamsError(parameter, value, "a string")
        self.check_count(parameter, value, "max_name_characters")
        check_text(parameter, value)

    def check_prompt(self, prompt: object) -> int:
        """Check how much a prompt holds. What is no prompt at all is not looked at.

        :returns: its characters and token ids, as far as they are counted.
        :raises InvalidParamsError: if it holds too much.
        """
        match prompt:
            case str():
                self.check_count("prompt", prompt, "max_prompt_characters")
                return len(prompt)
            case Prompt():
                return self._check_segments(prompt)
            case TokenizedPrompt():
                self.check_count("segments", prompt.segment_lengths, "max_segments")
                return len(prompt.token_ids)
            case list() | tuple() if prompt and isinstance(prompt[0], Mapping):
                return self._check_messages(prompt)
            case Sequence():
                return len(prompt)  # the items of a sequence of another kind may take their time
            case _:
                return 0

    def _check_segments(self, prompt: Prompt) -> int:
        self.check_count("segments", prompt.segments, "max_segments")
        characters = num_ids = 0
        for segment in prompt.segments:
            if not isinstance(segment, Segment):
                raise InvalidParamsError("segments", segment, "Segment(text) for each")
            if isinstance(segment.text, str):
                characters += len(segment.text)
            num_ids += len(segment.token_ids or ())
        self._check_number("segments", characters, "max_prompt_characters")
        return characters + num_ids

    def _check_messages(self, messages: Sequence[object]) -> int:
        """Every string in them counts: a template may write out any field."""
        self.check_count("messages", messages, "max_messages")
        for message in messages:
            if isinstance(message, Mapping):
                self._check_message(message)
        characters = num_values = depth = 0
        level: list[object] = [*messages]
        while level:
            depth += 1
            self._check_number("messages", depth, "max_message_depth")
            below: list[object] = []
            for value in level:
                if isinstance(value, str):
                    characters += len(value)
                    self._check_number("messages", characters, "max_prompt_characters")
                elif isinstance(value, Mapping | Sequence):
                    num_values += len(value)
                    self._check_number("messages", num_values, "max_message_values")
                    if isinstance(value, Mapping):
                        characters += sum(len(name) for name in value if isinstance(name, str))
                        self._check_number("messages", characters, "max_prompt_characters")
                        below += value.values()
                    else:
                        below += value
            level = below
        return characters

    def _check_message(self, message: Mapping[object, object]) -> None:
        name, content = message.get("name"), message.get("content")
        if isinstance(name, str):
            self.check_name("name", name)
        if isinstance(content, list | tuple):
            self.check_count("content", content, "max_content_parts")

    def _check_number(self, parameter: str, number: int, limit: str) -> None:
        most = getattr(self, limit)
        if number > most:
            unit = type(self).__dataclass_fields__[limit].metadata["unit"]
            raise InvalidParamsError(
                parameter,
                f"{number} {unit}",
                f"at most {most} {unit}; send fewer, or raise {limit} in EngineConfig.limits",
            )

    def check_strings(
        self, parameter: str, values: Iterable[str] | None, count: str, characters: str
    ) -> None:
        """Check a field of several strings: first how many, then how long each one is.

        :raises InvalidParamsError: if there are too many, or one is too long.
        """
        if values is None:
            return
        strings = (values,) if isinstance(values, str) else values
        if isinstance(strings, Sized):
            self.check_count(parameter, strings, count)
        for string in strings:
            if isinstance(string, str):
                self.check_count(parameter, string, characters)

    def check_params(self, params: SamplingParams) -> None:
        """Check every field of sampling parameters that has a size.

        :raises InvalidParamsError: for the first that is too large.
        """
        self.check_strings("stop", params.stop, "max_stop", "max_stop_characters")
        self.check_strings(
            "bad_words", params.bad_words, "max_bad_words", "max_bad_word_characters"
        )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            value = getattr(params, name)
            if value is not None:
                self.check_count(name, value, f"max_{name}")
