"""A question and what was retrieved for it, made into a prompt of shareable segments."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ragserve.engine import (
    InvalidParamsError,
    Prompt,
    PromptTooLongError,
    Segment,
    SegmentKind,
    TokenizedPrompt,
    check_text,
)

from ..documents.document import DOCUMENT_FORMAT
from ..retrieval.retriever import ScoredChunk
from .ordering import ORDERS, DocumentOrder, Popularity, PrefixProbe, order_documents
from .segment_tokens import PromptTokenizer, SegmentTokens, TokenizedSegment

__all__ = ["BuiltPrompt", "PromptTemplate"]

_SYSTEM = (
    "Answer the question from the documents below. Name the documents you use by their numbers, "
    "like [1]. If they do not hold the answer, say so."
)


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt, and what went into it.

    :param prompt: segments: the system prompt, each document, the question.
    :param tokenized: the same as the engine takes it, so that it is tokenized only once.
    :param used: the chunks in it, in the order of their segments; source n is `used[n - 1]`.
    :param dropped: the chunks that did not fit, the best first.
    :param order: how the documents were ordered.
    :param ranks: of each used chunk, its place in the order of relevance, from 1.
    """

    prompt: Prompt
    tokenized: TokenizedPrompt
    used: tuple[ScoredChunk, ...]
    dropped: tuple[ScoredChunk, ...]
    order: DocumentOrder = "relevance"
    ranks: tuple[int, ...] = ()

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

    System prompt, documents and questions cannot speak the model's control language: a control
    token that is written in one, like `<|im_end|>`, is text to the model. Only those of the chat
    template are control tokens, and where there is none, those in `plain_answer`.

    :param system: what the model is told to do.
    :param document_format: a format string of `number` (from 1, what a citation names), `text`,
        `id`, `document_id` and `metadata`, like "{metadata[title]}".
    :param question_format: a format string of `question`.
    :param plain_answer: what opens the answer where there is no chat template.
    :param order: how documents are ordered: "cache_aware", as most of them is found in the cache;
        "canonical", the same two always in the same order, those that are retrieved most often
        first; or "relevance", the best first. The more prompts begin alike, the less of them is
        computed; answers are as good in any order, as far as that was measured (see
        docs/performance.md). The same question may be given its documents in another order later.
    :param relevance_line: a format string of `ranking`, the documents' numbers with the most
        relevant first, like "Most relevant first: {ranking}." A line before the question, where
        there are at least two documents. None is no such line. Try it with your model before you
        use it: the smallest ones may answer with the ranking (see
        `benchmarks/documents/order_quality.py`).
    :param chat_template_kwargs: passed to the chat template, like `{"enable_thinking": False}`.
    :raises InvalidParamsError: if a format string lacks its `text`, `question` or `ranking`, or is
        broken; or there is no such order.
    """

    system: str = _SYSTEM
    document_format: str = DOCUMENT_FORMAT
    question_format: str = "{question}"
    plain_answer: str = "\nAnswer:"
    order: DocumentOrder = "cache_aware"
    relevance_line: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InvalidParamsError("order", self.order, f"one of {', '.join(ORDERS)}")
        object.__setattr__(
            self, "chat_template_kwargs", MappingProxyType(dict(self.chat_template_kwargs))
        )
        formats = {
            "document_format": "text",
            "question_format": "question",
            "relevance_line": "ranking",
        }
        for name, placeholder in formats.items():
            value = getattr(self, name)
            if value is not None and f"{{{placeholder}" not in value:
                raise InvalidParamsError(
                    name, value, f"a format string with {{{placeholder}}} in it"
                )

    def build(
        self,
        question: str,
        retrieved: Sequence[ScoredChunk],
        tokenizer: PromptTokenizer,
        max_prompt_tokens: int | None = None,
        *,
        popularity: Popularity | None = None,
        namespace: str = "",
        probe: PrefixProbe | None = None,
    ) -> BuiltPrompt:
        """The prompt for a question. Tokenizes, so call it off the event loop.

        :param retrieved: the best first.
        :param tokenizer: a `SegmentTokens` does not tokenize a document again that it knows.
        :param max_prompt_tokens: while the prompt is longer, the least relevant document is
            dropped whole, whatever the order.
        :param popularity: for the orders "canonical" and "cache_aware". It is only read: count an
            answer's documents yourself, once. Without it and `probe` there is nothing to go by, and
            the order is that of relevance.
        :param namespace: whose popularity, and whose remembered documents.
        :param probe: for the order "cache_aware", of the same namespace.
        :raises PromptTooLongError: if it is too long without any document.
        :raises InvalidParamsError: if the chat template or a format string cannot be used.
        """
        segments = tokenizer if isinstance(tokenizer, SegmentTokens) else SegmentTokens(tokenizer)
        layout = self._layout(segments)
        asked = self.question_format.format(question=check_text("question", question))
        system = (
            [segments.segment(layout.system, namespace, plain=layout.plain)]
            if layout.system
            else []
        )
        policy: DocumentOrder
        policy = "relevance" if popularity is None and probe is None else self.order
        is_walked = policy == "cache_aware" and probe is not None
        opening = _with_bos(segments, system[0]) if system and is_walked else ()

        def document(index: int, number: int) -> TokenizedSegment:
            return segments.segment(self._document(number, retrieved[index]), namespace)

        def document_tokens(index: int, number: int) -> Sequence[int]:
            made = document(index, number)
            return made.token_ids if system or number > 1 else _with_bos(segments, made)

        ids = [scored.chunk.id for scored in retrieved]
        while True:
            order = order_documents(
                policy,
                ids,
                popularity=popularity,
                namespace=namespace,
                probe=probe,
                system=opening,
                tokens=document_tokens,
            )
            documents = [document(index, number) for number, index in enumerate(order, 1)]
            before = layout.before + self._ranking(order)
            asking = before + asked + layout.after
            plain = ((len(before), len(before) + len(asked)),)
            parts: list[tuple[SegmentKind, TokenizedSegment]] = [
                *(("system", segment) for segment in system),
                *(("document", segment) for segment in documents),
                ("question", segments.fresh(asking, plain)),
            ]
            # From ids, which are mostly known. The prompt itself is given as text, to be read.
            tokenized = segments.tokenize(
                Prompt(
                    tuple(
                        Segment(kind=kind, token_ids=tuple(segment.token_ids))
                        for kind, segment in parts
                    )
                )
            )
            num_tokens = len(tokenized.token_ids)
            if max_prompt_tokens is None or num_tokens <= max_prompt_tokens:
                break
            if not ids:
                raise PromptTooLongError(
                    num_tokens,
                    max_prompt_tokens,
                    "system prompt and question alone are longer than that; shorten them, or "
                    "ask for fewer tokens with max_tokens",
                )
            # What does not fit goes by relevance; then the rest is put in order anew.
            lengths = {i: len(d.token_ids) for i, d in zip(order, documents, strict=True)}
            while ids and num_tokens > max_prompt_tokens:
                ids.pop()
                num_tokens -= lengths[len(ids)]
        return BuiltPrompt(
            Prompt(tuple(Segment(made.text, kind, plain=made.plain) for kind, made in parts)),
            tokenized,
            tuple(retrieved[index] for index in order),
            tuple(retrieved[len(ids) :]),
            policy,
            tuple(index + 1 for index in order),
        )

    def _ranking(self, order: Sequence[int]) -> str:
        """The line that tells the documents' relevance; `order` has the rank of each, from 0."""
        if self.relevance_line is None or len(order) < 2:
            return ""
        numbers = sorted(range(1, len(order) + 1), key=lambda number: order[number - 1])
        try:
            line = self.relevance_line.format(ranking=", ".join(map(str, numbers)))
        except (LookupError, ValueError, AttributeError) as exc:
            raise InvalidParamsError(
                "relevance_line",
                self.relevance_line,
                f"a format string with no other placeholder than {{ranking}} ({exc!r})",
            ) from exc
        return line + "\n"

    def _document(self, number: int, scored: ScoredChunk) -> str:
        chunk = scored.chunk
        try:
            made = self.document_format.format(
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
        return check_text(f"chunk {chunk.id!r} of document {chunk.document_id!r}", made)

    def _layout(self, tokenizer: PromptTokenizer) -> _Layout:
        """What stands around documents and question."""
        system = check_text("system", self.system)
        if not tokenizer.has_chat_template:
            gap = "\n\n" if system else ""
            return _Layout(system, ((0, len(system)),), f"{gap}Question: ", self.plain_answer)
        # The template is rendered around markers, not around the contents, so that a content
        # can neither look like a marker nor change what stands around it.
        here, there = (f"ragserve{secrets.token_hex(8)}" for _ in range(2))
        # A template may drop white space before the system prompt.
        indent = system[: len(system) - len(system.lstrip())]
        with_system = [
            {"role": "system", "content": indent + here},
            {"role": "user", "content": there},
        ]
        only_user = [{"role": "user", "content": f"{indent}{here}\n\n{there}"}]
        refusal: InvalidParamsError | None = None
        for messages in (with_system, only_user):
            try:
                text = tokenizer.apply_chat_template(messages, **self.chat_template_kwargs)
            except InvalidParamsError as exc:
                refusal = exc
                continue
            match = re.fullmatch(f"(?s)(.*){here}(.*){there}(.*)", text)
            if match and text.count(here) == text.count(there) == 1:
                opening, before, after = match.groups()
                text = opening + system.lstrip()
                return _Layout(text, ((len(opening), len(text)),), before, after)
        raise InvalidParamsError(
            "chat_template",
            type(tokenizer).__name__,
            "one that writes the system's or the user's message out once, unchanged",
        ) from refusal


def _with_bos(tokenizer: PromptTokenizer, first: TokenizedSegment) -> Sequence[int]:
    """The ids of a segment that opens a prompt."""
    if not first.token_ids:
        return ()
    return tokenizer.tokenize(Prompt((Segment(token_ids=tuple(first.token_ids)),))).token_ids


class _Layout(NamedTuple):
    system: str
    """Before the documents."""
    plain: tuple[tuple[int, int], ...]
    """Which characters of that are the system prompt's, and not the template's."""
    before: str
    """Between documents and question."""
    after: str
    """After the question, up to the answer."""
