"""Finding chunks by their vectors: the retriever protocol, and an exact index in FAISS."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from ragserve.engine import InvalidParamsError, RagserveError

from ..documents.document import Chunk, Document
from ..documents.token_splitter import TokenSplitter
from ..workers import HomeProcess, Places, Workers
from .embedder import Embedder, Vectors, check_embedder, check_vectors, lone_surrogate
from .index_files import IndexLoadError, read_index, read_meta, write_index
from .retriever import (
    ChunkFilter,
    Query,
    ScoredChunk,
    check_filter,
)

__all__ = ["DuplicateChunkError", "FaissIndex", "IndexLoadError", "IndexMismatchError"]

_BATCH: Final = 256
"""Chunks embedded between two reports of progress."""
_NAMED: Final = 20
"""Faulty items that an error names one by one."""


class DuplicateChunkError(RagserveError, ValueError):
    """Chunks of these ids are in the index already, or twice in the call; nothing was added.

    :ivar chunk_id: the first of them.
    :ivar chunk_ids: all of them.
    """

    def __init__(self, chunk_ids: Sequence[str], index: str) -> None:
        named = ", ".join(map(repr, chunk_ids[:_NAMED])) + _more(len(chunk_ids) - _NAMED)
        super().__init__(
            f"in index {index!r} already, or twice in the call: chunk {named}; ids must be "
            "unique, so nothing was added"
        )
        self.chunk_ids = tuple(chunk_ids)
        self.chunk_id = self.chunk_ids[0]


class IndexMismatchError(IndexLoadError):
    """The index's vectors are not of the embedder's space; searching it would find noise."""


class FaissIndex:
    """Exact search by cosine, in memory: FAISS's IndexFlatIP over vectors of length 1.

    May be shared by threads and event loops. Everything that computes or touches files runs in
    worker threads; searches and additions take turns.

    :param embedder: makes the vectors of chunks and of queries.
    :param splitter: cuts documents that are added into chunks; without one, a document is one
        chunk, and what the embedder's model doesn't take in of it is not found.
    :param name: how traces call it.
    :param max_queued_calls: most searches and additions that may wait or be at work at a time.
    :raises InvalidParamsError: if one of these is not what it has to be.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        splitter: TokenSplitter | None = None,
        name: str = "faiss",
        max_queued_calls: int = 4096,
    ) -> None:
        check_embedder(embedder)
        # Strings have a split() of their own.
        cuts = callable(getattr(splitter, "split", None)) and not isinstance(splitter, str | type)
        if splitter is not None and not cuts:
            raise InvalidParamsError("splitter", splitter, "a TokenSplitter(...), or None")
        if not isinstance(name, str):
            raise InvalidParamsError("name", name, "a string")
        self.embedder = embedder
        self.splitter = splitter
        self._name = name
        self._lock = threading.Lock()
        self._process = HomeProcess(f"the index {name!r}")
        self._places = Places("calls", max_queued_calls)
        # Its own, so that neither these calls nor the application's can use up the other's threads.
        self._workers = Workers(4, "ragserve-index", self._process)
        # And saves, which may wait for each other, use up no searches' threads.
        self._savers = Workers(1, "ragserve-index-save", self._process)
        self._vectors: Any = None  # faiss.IndexFlatIP; row i is the vector of chunk i
        self._chunks: list[Chunk] = []
        self._ids: set[str] = set()  # of the chunks, and of those being added

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        embedder: Embedder,
        splitter: TokenSplitter | None = None,
        name: str | None = None,
    ) -> Self:
        """An index as it was saved in folder `path`.

        :param name: default: the folder's name.
        :raises IndexLoadError: if files are missing, truncated or changed.
        :raises IndexMismatchError: if it was built with another embedder.
        :raises InvalidParamsError: if an argument is not what it has to be.
        """
        folder = _folder(path)
        index = cls(embedder, splitter=splitter, name=folder.name if name is None else name)
        await index._workers.run(index._read, folder)
        return index

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        return f"<FaissIndex {self._name} [{len(self)} chunks, {self.embedder.model_name}]>"

    @property
    def name(self) -> str:
        """How traces call it."""
        return self._name

    @property
    def dimension(self) -> int | None:
        """Length of its vectors; None while it is empty."""
        return None if self._vectors is None else int(self._vectors.d)

    async def add(
        self,
        items: Iterable[Chunk | Document],
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Embed and add chunks, or documents cut by the splitter. All or nothing.

        All items are checked before any is embedded, and one error names all that are faulty, so
        that they can be taken out of the list.

        :param progress: called with how many chunks are embedded, and of how many, as it goes.
        :returns: how many chunks were added.
        :raises DuplicateChunkError: if ids are there already, or twice among the items.
        :raises EmbeddingError: if the embedder does not give one finite vector a text.
        :raises EngineClosedError: in a process that was forked after the index was used.
        :raises IndexMismatchError: if the embedder's vectors have another length than before.
        :raises InvalidParamsError: if it is no list of chunks or documents, or some of them have an
            id or text that is no string, or that has a lone surrogate in it.
        :raises QueueFullError: if `max_queued_calls` are under way.
        """
        items = _listed(items)
        self._process.check()
        with self._places.taken():
            chunks = await self._workers.run(self._cut, items)
            addition = self._reserve(chunks)
            try:
                parts: list[Vectors] = []
                for start in range(0, len(chunks), _BATCH):
                    texts = [chunk.text for chunk in chunks[start : start + _BATCH]]
                    vectors = await self.embedder.embed(texts)
                    parts.append(check_vectors(vectors, len(texts), self.embedder.model_name))
                    if progress is not None:
                        progress(start + len(texts), len(chunks))
                if chunks:
                    await self._workers.run(self._append, addition, parts)
            finally:
                self._release(addition)
        return len(chunks)

    async def search(
        self, query: Query, top_k: int = 4, *, filter: ChunkFilter | None = None
    ) -> list[ScoredChunk]:
        """The chunks most similar to a text or vector, best first; fewer if there are fewer.

        :param filter: only chunks for which it returns True are found. It is called for every
            chunk of the index, in a worker thread.
        :raises EmbeddingError: if the embedder does not give one finite vector a text.
        :raises EngineClosedError: in a process that was forked after the index was used.
        :raises IndexMismatchError: if the query's vector has another length than the index's.
        :raises InvalidParamsError: if `top_k` is below 1, or the query is neither a text nor a
            vector of finite numbers.
        :raises QueueFullError: if `max_queued_calls` are under way.
        """
        queries: Sequence[str] | Vectors
        queries = [query] if isinstance(query, str) else _numbers("query", query, 1)[np.newaxis]
        return (await self.search_many(queries, top_k, filter=filter))[0]

    async def search_many(
        self,
        queries: Sequence[str] | Vectors,
        top_k: int = 4,
        *,
        filter: ChunkFilter | None = None,
    ) -> list[list[ScoredChunk]]:
        """`search` for several texts, or the rows of an array, in one go.

        :raises: what `search` raises.
        """
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise InvalidParamsError("top_k", top_k, "an integer of at least 1")
        check_filter(filter)
        if isinstance(queries, np.ndarray):
            queries = _numbers("queries", queries, 2)
        else:
            queries = _texts(queries)
        self._process.check()
        with self._places.taken():
            if isinstance(queries, np.ndarray):
                vectors = queries
            else:
                vectors = await self.embedder.embed(queries, kind="query")
                vectors = check_vectors(vectors, len(queries), self.embedder.model_name)
            if not len(vectors):
                return []
            return await self._workers.run(self._find, vectors, top_k, filter)

    async def retrieve(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> list[ScoredChunk]:
        """`search`, as the `Retriever` protocol calls it.

        :raises: what `search` raises.
        """
        return await self.search(query, top_k, filter=filter)

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index into folder `path`; one that is there is replaced at once, or not.

        The folder holds `meta.json`, the chunks as JSON lines, and FAISS's own file. Saves into
        one folder come one after the other, and the last one stays.

        :raises InvalidParamsError: if a chunk's metadata is not JSON.
        :raises OSError: if the folder cannot be written.
        """
        await self._savers.run(self._write, _folder(path))

    # What follows runs in worker threads.

    def _cut(self, items: list[Chunk | Document]) -> list[Chunk]:
        _check_items(items)
        chunks: list[Chunk] = []
        for item in items:
            if isinstance(item, Chunk):
                chunks.append(item)
            elif self.splitter is not None:
                chunks.extend(self.splitter.split(item))
            else:
                chunks.append(Chunk(f"{item.id}#0", item.id, item.text, 0, item.metadata))
        return chunks

    def _reserve(self, chunks: list[Chunk]) -> _Addition:
        with self._lock:
            new = Counter(chunk.id for chunk in chunks)
            twice = [name for name, count in new.items() if count > 1 or name in self._ids]
            if twice:
                raise DuplicateChunkError(twice, self._name)
            self._ids |= new.keys()
        return _Addition(chunks)

    def _release(self, addition: _Addition) -> None:
        """Give the ids back if the chunks were not added, and see that they never are."""
        with self._lock:
            if addition.open:
                addition.open = False
                self._ids.difference_update(chunk.id for chunk in addition.chunks)

    def _append(self, addition: _Addition, parts: list[Vectors]) -> None:
        import faiss

        if len(dimensions := {part.shape[1] for part in parts}) > 1:
            raise IndexMismatchError(
                f"the embedder {self.embedder.model_name} gave vectors of dimensions "
                f"{sorted(dimensions)}; use one embedder for one model"
            )
        vectors = np.ascontiguousarray(np.concatenate(parts), dtype=np.float32)
        with self._lock:
            if not addition.open:
                return  # its caller was cancelled meanwhile
            if self._vectors is None:
                self._vectors = faiss.IndexFlatIP(vectors.shape[1])
            self._check_dimension(vectors.shape[1])
            self._vectors.add(vectors)
            self._chunks.extend(addition.chunks)
            addition.open = False

    def _find(
        self, vectors: Vectors, top_k: int, keep: ChunkFilter | None
    ) -> list[list[ScoredChunk]]:
        import faiss

        # Of this thread, which is the index's own: the cores are the engine's.
        faiss.omp_set_num_threads(1)
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        with self._lock:
            if self._vectors is None:
                return [[] for _ in vectors]
            self._check_dimension(vectors.shape[1])
            # `_chunks` only grows, so that its rows mean the same after the lock is released.
            count = len(self._chunks)
            params = None
            if keep is not None:
                rows = [row for row, chunk in enumerate(self._chunks) if keep(chunk)]
                count = len(rows)
                selector = faiss.IDSelectorBatch(np.array(rows, np.int64))
                # The stubs know the class without the keywords that it takes.
                params = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
            if not count:
                return [[] for _ in vectors]
            scores, found = self._vectors.search(vectors, min(top_k, count), params=params)
        return [
            [
                ScoredChunk(self._chunks[row], score)
                for row, score in zip(found_row, scores_row, strict=True)
                if row >= 0
            ]
            for found_row, scores_row in zip(found.tolist(), scores.tolist(), strict=True)
        ]

    def _check_dimension(self, dimension: int) -> None:
        if dimension != self._vectors.d:
            raise IndexMismatchError(
                f"index {self._name!r} holds vectors of dimension {self._vectors.d} and was given "
                f"one of {dimension}; use the embedder it was built with, or build it anew"
            )

    def _write(self, folder: Path) -> None:
        write_index(folder, self.embedder.model_name, self._snapshot)

    def _snapshot(self, vectors_file: Path) -> tuple[Sequence[Chunk], int | None]:
        import faiss

        with self._lock:
            if self._vectors is not None:
                faiss.write_index(self._vectors, str(vectors_file))
            return list(self._chunks), self.dimension

    def _read(self, folder: Path) -> None:
        saved = read_meta(folder)
        embedder, dimension = saved.embedder, saved.dimension
        if embedder != self.embedder.model_name:
            raise IndexMismatchError(
                f"{folder} was built with the embedder {embedder!r} and is opened with "
                f"{self.embedder.model_name!r}; use the same one, or build the index anew"
            )
        if None not in (dimension, self.embedder.dimension) and (
            dimension != self.embedder.dimension
        ):
            raise IndexMismatchError(
                f"{folder} holds vectors of dimension {dimension} and the embedder "
                f"{embedder!r} makes vectors of {self.embedder.dimension}; build the index anew"
            )
        chunks, vectors = read_index(folder, saved)
        self._chunks, self._vectors = chunks, vectors
        self._ids = {chunk.id for chunk in chunks}


@dataclass(slots=True)
class _Addition:
    """Chunks whose ids are taken and that are not added yet, while `open`."""

    chunks: list[Chunk]
    open: bool = True


def _folder(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise InvalidParamsError("path", path, "a folder's path")
    return Path(path)


def _listed(items: object) -> list[Any]:
    """What is to be added, as a list; its items are not looked at."""
    if isinstance(items, Chunk | Document):
        name = type(items).__name__
        raise InvalidParamsError("items", f"<{name}>", f"a list: write [{name.lower()}]")
    allowed = 'a list of Document(id, text) or Chunk, like [Document("1", "text")]'
    if isinstance(items, type):
        raise InvalidParamsError("items", items, allowed)
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise InvalidParamsError("items", f"<{type(items).__name__}>", allowed)
    return list(items)


def _check_items(items: Sequence[object]) -> None:
    """Check every item, and name all that cannot be added in one error.

    :raises InvalidParamsError: if there are any.
    """
    faults = [
        f"{_called(item, number)} {fault}"
        for number, item in enumerate(items)
        if (fault := _fault(item)) is not None
    ]
    if faults:
        raise InvalidParamsError(
            "items",
            f"<{len(items)} items>",
            f"of these, nothing was added: {'; '.join(faults[:_NAMED])}"
            f"{_more(len(faults) - _NAMED)}. Give each a string as its id and text; a lone "
            'surrogate is replaced by text.encode("utf-8", "replace").decode()',
        )


def _called(item: object, number: int) -> str:
    name = getattr(item, "id", None)
    return f"item {number}" if not isinstance(name, str) else f"{name[:100]!r} (item {number})"


def _fault(item: object) -> str | None:
    if not isinstance(item, Chunk | Document):
        kind = item.__name__ if isinstance(item, type) else type(item).__name__
        return f"is {'the class ' if isinstance(item, type) else 'of type '}{kind}"
    fields = {"id": item.id, "text": item.text}
    if isinstance(item, Chunk):
        fields["document_id"] = item.document_id
    for name, value in fields.items():
        if not isinstance(value, str):
            return f"has {name} of type {type(value).__name__}"
        if (position := lone_surrogate(value)) is not None:
            return f"has a lone surrogate in its {name}, character {position}"
    if not isinstance(item.metadata, Mapping):
        return f"has metadata of type {type(item.metadata).__name__}, not a mapping"
    return None


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _texts(queries: object) -> list[str]:
    if isinstance(queries, str | bytes) or not isinstance(queries, Sequence):
        kind = type(queries).__name__
        raise InvalidParamsError("queries", f"<{kind}>", "a list of texts, or rows of an array")
    return list(queries)  # which the embedder checks


def _numbers(parameter: str, value: object, ndim: int) -> Vectors:
    allowed = (
        "a text, or a vector of finite numbers"
        if ndim == 1
        else ("a list of texts, or an array of vectors of finite numbers")
    )
    try:
        array: Vectors = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidParamsError(parameter, f"<{type(value).__name__}>", allowed) from error
    if isinstance(value, bytes) or array.ndim != ndim:
        raise InvalidParamsError(parameter, f"<array of shape {array.shape}>", allowed)
    if not np.isfinite(array).all():
        raise InvalidParamsError(parameter, "<infinity or NaN>", allowed)
    return array
