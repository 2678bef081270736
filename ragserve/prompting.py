"""A question and what was retrieved for it, made into a prompt of shareable segments."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from ragserve.engine import (
    InvalidParamsError,
    Prompt,
    PromptLike,
    PromptTooLongError,
    Segment,
    TokenizedPrompt,
)

from .index import ScoredChunk

__all__ = ["BuiltPrompt", "DocumentOrder", "PromptTemplate", "PromptTokenizer"]

DocumentOrder: TypeAlias = Literal["relevance"]
"""How documents are ordered in a prompt. relevance: as retrieved, the best first."""

_SYSTEM = (
    "Answer the question from the documents below. Name the documents you use by their numbers, "
    "like [1]. If they do not hold the answer, say so."
)


class PromptTokenizer(Protocol):
    """What a template needs to know of a tokenizer; an engine's has it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages are understood."""

    @property
    def special_tokens(self) -> Collection[str]:
        """Texts that become a control token wherever they are written."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Chat messages as text, with the opening of the assistant's turn."""

    def tokenize(self, prompt: PromptLike, /) -> TokenizedPrompt:
        """Ids of a prompt, each segment on its own."""


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt, and what went into it.

    :param prompt: segments: the system prompt, each document, the question.
    :param tokenized: the same as the engine takes it, so that it is tokenized only once.
    :param used: the chunks in it, in the order of their segments; source n is `used[n - 1]`.
    :param dropped: the chunks that did not fit, the best first.
    """

    prompt: Prompt
    tokenized: TokenizedPrompt
    used: tuple[ScoredChunk, ...]
    dropped: tuple[ScoredChunk, ...]
    order: DocumentOrder = "relevance"

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.tokenized.token_ids)

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(segment.text or "" for segment in self.prompt.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """Lays out system prompt, documents and question.

    With a chat template, system prompt and documents are the system message and the question is
    the user's turn: small models answer best so. A chat template that knows no system message
    gets all of it in the user's turn. Without a chat template it is plain text.

    Documents and questions cannot speak the model's control language: a special token that is
    written in one, like `<|im_end|>`, gets a space after its first character, and so is plain
    text to the tokenizer. `system` is the application's own and is left as it is.

    :param system: what the model is told to do.
    :param document_format: a format string of `number` (from 1, what a citation names), `text`,
        `id`, `document_id` and `metadata`, like "{metadata[title]}".
    :param question_format: a format string of `question`.
    :param plain_answer: what opens the answer where there is no chat template.
    :param order: how documents are ordered.
    :param chat_template_kwargs: passed to the chat template, like `{"enable_thinking": False}`.
    :raises InvalidParamsError: if a format string lacks its `text` or `question`, or is broken.
    """

    system: str = _SYSTEM
    document_format: str = "\n\n[{number}] {text}"
    question_format: str = "{question}"
    plain_answer: str = "\nAnswer:"
    order: DocumentOrder = "relevance"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.order != "relevance":
            raise InvalidParamsError("order", self.order, "relevance")
        object.__setattr__(
            self, "chat_template_kwargs", MappingProxyType(dict(self.chat_template_kwargs))
        )
        for name, placeholder in (("document_format", "text"), ("question_format", "question")):
            if f"{{{placeholder}" not in getattr(self, name):
                raise InvalidParamsError(
                    name, getattr(self, name), f"a format string with {{{placeholder}}} in it"
                )

    def build(
        self,
        question: str,
        retrieved: Sequence[ScoredChunk],
        tokenizer: PromptTokenizer,
        max_prompt_tokens: int | None = None,
    ) -> BuiltPrompt:
        """The prompt for a question. Tokenizes, so call it off the event loop.

        :param retrieved: the best first.
        :param max_prompt_tokens: while the prompt is longer, the last document is dropped whole.
        :raises PromptTooLongError: if it is too long without any document.
        :raises InvalidParamsError: if the chat template or a format string cannot be used.
        """
        special = _special_pattern(tokenizer.special_tokens)
        documents = [
            _neutralized(self._document(number, scored), special)
            for number, scored in enumerate(retrieved, 1)
        ]
        layout = self._layout(tokenizer)
        asked = _neutralized(self.question_format.format(question=question), special)
        question_segment = Segment(layout.before + asked + layout.after, "question")
        system = [Segment(layout.system, "system")] if layout.system else []
        while True:
            prompt = Prompt(
                (*system, *(Segment(text, "document") for text in documents), question_segment)
            )
            tokenized = tokenizer.tokenize(prompt)
            num_tokens = len(tokenized.token_ids)
            if max_prompt_tokens is None or num_tokens <= max_prompt_tokens:
                break
            if not documents:
                raise PromptTooLongError(
                    num_tokens,
                    max_prompt_tokens,
                    "system prompt and question alone are longer than that; shorten them, or "
                    "ask for fewer tokens with max_tokens",
                )
            lengths = iter(tokenized.segment_lengths[len(system) :])  # without empty segments
            document_lengths = [next(lengths) if text else 0 for text in documents]
            while documents and num_tokens > max_prompt_tokens:
                documents.pop()
                num_tokens -= document_lengths[len(documents)]
        used = len(documents)
        return BuiltPrompt(
            prompt, tokenized, tuple(retrieved[:used]), tuple(retrieved[used:]), self.order
        )

    def _document(self, number: int, scored: ScoredChunk) -> str:
        chunk = scored.chunk
        try:
            return self.document_format.format(
                number=number,
                text=chunk.text,
                id=chunk.id,
                document_id=chunk.document_id,
                metadata=chunk.metadata,
            )
        except (LookupError, ValueError, AttributeError) as exc:
            raise InvalidParamsError(
                "document_format",
                self.document_format,
                f"placeholders that chunk {chunk.id!r} can fill ({exc!r}); metadata it has: "
                f"{sorted(chunk.metadata)}",
            ) from exc

    def _layout(self, tokenizer: PromptTokenizer) -> _Layout:
        """What stands around documents and question."""
        if not tokenizer.has_chat_template:
            gap = "\n\n" if self.system else ""
            return _Layout(self.system, f"{gap}Question: ", self.plain_answer)
        # The template is rendered around markers, not around the contents, so that a content
        # can neither look like a marker nor change what stands around it.
        here, there = (f"ragserve{secrets.token_hex(8)}" for _ in range(2))
        with_system = [
            {"role": "system", "content": self.system + here},
            {"role": "user", "content": there},
        ]
        only_user = [{"role": "user", "content": f"{self.system}{here}\n\n{there}"}]
        refusal: InvalidParamsError | None = None
        for messages in (with_system, only_user):
            try:
                text = tokenizer.apply_chat_template(messages, **self.chat_template_kwargs)
            except InvalidParamsError as exc:
                refusal = exc
                continue
            match = re.fullmatch(f"(?s)(.*){here}(.*){there}(.*)", text)
            if match and text.count(here) == text.count(there) == 1:
                return _Layout(*match.groups())
        raise InvalidParamsError(
            "chat_template",
            type(tokenizer).__name__,
            "one that writes the system's or the user's message out once, unchanged",
        ) from refusal


class _Layout(NamedTuple):
    system: str
    """Before the documents."""
    before: str
    """Between documents and question."""
    after: str
    """After the question, up to the answer."""


def _special_pattern(special_tokens: Collection[str]) -> re.Pattern[str] | None:
    # The longest first, so that a token which begins like another is seen whole. A token of one
    # character cannot be broken up, nor can white space; no chat format has such.
    tokens = {token.strip() for token in special_tokens}
    tokens = {token for token in tokens if len(token) > 1}
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


def _neutralized(text: str, special: re.Pattern[str] | None) -> str:
    """`text` with a space after the first character of each special token."""
    # Again until there is none: a broken token can, in theory, make up another one.
    while special is not None and special.search(text):
        text = special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    return text
