"""What a retriever is: a question or its vector in, scored chunks out."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from ragserve.engine import InvalidParamsError

from ..documents.document import Chunk
from .embedder import Vectors

__all__ = [
    "ChunkFilter",
    "Query",
    "Retriever",
    "ScoredChunk",
    "StagedRetriever",
    "check_filter",
    "check_retriever",
]

Query: TypeAlias = str | Vectors
"""What is looked for: a text, or its vector."""

ChunkFilter: TypeAlias = Callable[[Chunk], bool]
"""Says whether a chunk may be found."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk that was found.

    :param score: similarity to the query; more is better. Cosine for `FaissIndex`.
    """

    chunk: Chunk
    score: float


class Retriever(Protocol):
    """Finds chunks for a query. If it has an `embedder`, a pipeline embeds with that first."""

    @property
    def name(self) -> str:
        """How traces call it."""

    async def retrieve(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> Sequence[ScoredChunk]:
        """At most `top_k` chunks, the best first."""


@runtime_checkable
class StagedRetriever(Retriever, Protocol):
    """A retriever that has a first idea soon, as one whose results are ranked anew later.

    A pipeline has the beginning of the prompt computed by what it knows, in the meantime.
    """

    def retrieve_stages(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> AsyncIterator[Sequence[ScoredChunk]]:
        """Provisional results, then the final ones, which are what `retrieve` gives."""


def check_retriever(index: object) -> None:
    """Check that something is a `Retriever`.

    :raises InvalidParamsError: if it lacks one of its parts; names it, and what is one.
    """
    allowed = "a Retriever, like FaissIndex(embedder)"
    if inspect.isawaitable(index):
        raise InvalidParamsError("index", index, f"{allowed}: write `await` before it")
    if isinstance(index, type):
        raise InvalidParamsError("index", index, f"{allowed}, not the class")
    if not callable(getattr(index, "retrieve", None)):
        raise InvalidParamsError("index", index, f"{allowed}: it has no retrieve(query, top_k=)")
    if not isinstance(getattr(index, "name", None), str):
        raise InvalidParamsError("index", index, f"{allowed}: it has no name, for traces")


def check_filter(filter: object) -> None:
    """Check that something can be called, as a `ChunkFilter` is.

    :raises InvalidParamsError: if it is neither that nor None.
    """
    if filter is not None and (not callable(filter) or isinstance(filter, type)):
        raise InvalidParamsError(
            "filter",
            filter,
            'a function of a chunk, like lambda chunk: chunk.metadata["year"] == 2024, or None',
        )
