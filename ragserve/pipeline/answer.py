"""What an answer is made of: events, sources, timings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

from ragserve.engine import (
    Completion,
    Delta,
    Usage,
)

from ..documents.document import Chunk
from ..observability.prompt_reuse import PromptReuse
from ..prompting.ordering import DocumentOrder
from ..retrieval.retriever import (
    ScoredChunk,
)

if TYPE_CHECKING:
    pass

__all__ = ["Answer", "AnswerEvent", "Done", "RagTimings", "Retrieved", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk that the answer was given.

    :param number: its number in the prompt, from 1: what a citation like [1] means.
    :param score: similarity to the question.
    :param rank: its place among all that was retrieved, from 1 for the most relevant. Other than
        `number` if the template orders documents otherwise.
    """

    number: int
    chunk: Chunk
    score: float
    rank: int


@dataclass(frozen=True, slots=True)
class RagTimings:
    """Seconds an answer spent in each stage; they follow each other without gaps.

    embedding: of the question. retrieval: finding chunks. context: making and tokenizing the
    prompt. queue: until the engine's first step for it. prefill: until the first token.
    decode: until the end.
    """

    embedding: float = 0.0
    retrieval: float = 0.0
    context: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        """The sum of the stages: from the first read of the stream to the answer's end."""
        return (
            self.embedding + self.retrieval + self.context + self.queue + self.prefill + self.decode
        )

    def __str__(self) -> str:
        stages = ((field.name, getattr(self, field.name)) for field in fields(self))
        every = (*stages, ("total", self.total))
        return ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in every)


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The first event: what the answer will be based on. The engine is at work already.

    :param sources: in the order of the prompt.
    :param dropped: chunks that were found and did not fit into the prompt.
    :param order: how the documents were ordered.
    """

    sources: tuple[Source, ...]
    dropped: tuple[ScoredChunk, ...] = ()
    order: DocumentOrder = "relevance"


@dataclass(frozen=True, slots=True)
class Done:
    """The last event.

    :param reuse: what of the prompt was found in the cache, and why not more; `print` it.
    """

    completion: Completion
    timings: RagTimings
    sources: tuple[Source, ...]
    reuse: PromptReuse


AnswerEvent: TypeAlias = Retrieved | Delta | Done


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    :param sources: in the order of the prompt.
    :param order: how the documents were ordered.
    :param reuse: what of the prompt was found in the cache, and why not more; `print` it, or its
        `table()`.
    :param trace_id: of its spans, 32 hexadecimal digits; None if it was not traced.
    """

    text: str
    sources: tuple[Source, ...]
    usage: Usage
    timings: RagTimings
    completion: Completion
    order: DocumentOrder
    reuse: PromptReuse
    trace_id: str | None = None
