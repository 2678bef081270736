"""The prompts of one pipeline: made from what was found, guessed from what was made before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ragserve.engine import Engine, SamplingParams, TokenizedPrompt

from ..documents.document import Chunk
from ..prompting.ordering import Popularity
from ..prompting.segment_tokens import SegmentTokens
from ..prompting.template import BuiltPrompt, PromptTemplate
from ..retrieval.retriever import ChunkFilter, ScoredChunk
from ..workers import HomeProcess, Workers
from .prefill_ahead import PrefillAhead, Recent, beginning, normalized

__all__ = ["Prompts", "Question"]

_ANSWER_TOKENS = 256
"""Room kept for an answer of unlimited length when documents are chosen."""
_MAX_CHUNKS = 4096
"""Questions and chunks that are remembered, for guesses and for `top`."""
_MAX_BEGINNINGS = 128
"""Tokenized beginnings of prompts that are remembered."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how."""

    text: str
    top_k: int
    filter: ChunkFilter | None
    params: SamplingParams
    priority: int
    namespace: str


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How prompts begin with a document, or with none. What it was made of says if it still is."""

    template: PromptTemplate
    first: Chunk | None
    prompt: TokenizedPrompt | None


class Prompts:
    """Makes prompts in threads of its own, and remembers what later ones can be guessed from.

    :param process: whose the threads are. They end when this is collected.
    :ivar template: makes the prompts; may be replaced.
    """

    def __init__(self, engine: Engine, template: PromptTemplate, process: HomeProcess) -> None:
        self.template = template
        self._engine = engine
        self._workers = Workers(2, "ragserve-prompt", process)
        # Guesses have a thread of their own, so that no answer's prompt waits for them.
        self._guessers = Workers(1, "ragserve-guess", process)
        self._tokens = SegmentTokens(engine.tokenizer)
        self._popularity = Popularity()
        self._seen: Recent[Chunk] = Recent(_MAX_CHUNKS)  # by id
        self._first_of: Recent[Chunk] = Recent(_MAX_CHUNKS)  # by question: the first of its prompt
        self._beginnings: Recent[_Beginning] = Recent(_MAX_BEGINNINGS)  # by the document's id
        self._under_way: set[bytes] = set()

    async def make(self, question: Question, found: Sequence[ScoredChunk]) -> BuiltPrompt:
        """The prompt of an answer, which is remembered for those that follow.

        :raises: what `PromptTemplate.build` raises.
        """
        return await self._workers.run(self._make, question, found)

    async def begin(self, namespace: str, first: Chunk | None) -> TokenizedPrompt | None:
        """How a prompt begins with this document, or without: with the system prompt alone.

        :returns: None if that is nothing.
        :raises: what `PromptTemplate.build` raises.
        """
        return await self._guessers.run(self._begin, namespace, first)

    def top(self, namespace: str, count: int) -> list[Chunk]:
        """The chunks that answers in the namespace were given most often of late."""
        known = (self._seen.get(namespace, name) for name in self._popularity.top(namespace, count))
        return [chunk for chunk in known if chunk is not None]

    def ahead(self, question: Question) -> PrefillAhead:
        """Computes the beginning of the question's prompt, guessed from the question alone."""
        ahead = PrefillAhead(self._engine, question.namespace, self._guessers, self._under_way)
        ahead.guess(partial(self._guess, question))
        return ahead

    def guess_from(
        self, question: Question, found: Sequence[ScoredChunk]
    ) -> Callable[[], TokenizedPrompt | None]:
        """A better guess, once something was found: to be given to `PrefillAhead.guess`."""
        return lambda: beginning(self._build(question, found).tokenized, 1)

    # -- in the threads -------------------------------------------------------------------

    def _make(self, question: Question, found: Sequence[ScoredChunk]) -> BuiltPrompt:
        prompt, namespace = self._build(question, found), question.namespace
        self._popularity.note(namespace, [scored.chunk.id for scored in prompt.used])
        for scored in prompt.used:
            self._seen.note(namespace, scored.chunk.id, scored.chunk)
        if prompt.used:
            self._first_of.note(namespace, normalized(question.text), prompt.used[0].chunk)
        return prompt

    def _build(self, question: Question, found: Sequence[ScoredChunk]) -> BuiltPrompt:
        return self.template.build(
            question.text,
            found,
            self._tokens,
            self._max_prompt_tokens(question.params),
            popularity=self._popularity,
            namespace=question.namespace,
            probe=self._engine.probe(question.namespace),
        )

    def _max_prompt_tokens(self, params: SamplingParams) -> int | None:
        limit = self._engine.config.max_model_len
        if limit is None:
            return None
        # An answer never claims more than half of what the model can take in.
        return limit - min(params.max_tokens or _ANSWER_TOKENS, limit // 2)

    def _begin(self, namespace: str, first: Chunk | None) -> TokenizedPrompt | None:
        template = self.template
        key = "" if first is None else f"#{first.id}"
        known = self._beginnings.get(namespace, key)
        if known is not None and known.template is template and known.first is first:
            return known.prompt
        found = () if first is None else (ScoredChunk(first, 0.0),)
        built = template.build("", found, self._tokens, namespace=namespace)
        prompt = beginning(built.tokenized, len(found))
        self._beginnings.note(namespace, key, _Beginning(template, first, prompt))
        return prompt

    def _guess(self, question: Question) -> TokenizedPrompt | None:
        first = self._first_of.get(question.namespace, normalized(question.text))
        if first is not None and question.filter is not None and not question.filter(first):
            first = None
        return self._begin(question.namespace, first)
