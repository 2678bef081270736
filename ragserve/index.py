"""Finding chunks by their vectors: the retriever protocol, and an exact index in FAISS."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from ragserve.engine import InvalidParamsError, RagserveError, run_in

from .documents import Chunk, Document, TokenSplitter
from .embedding import Embedder, Vectors

__all__ = [
    "ChunkFilter",
    "DuplicateChunkError",
    "FaissIndex",
    "IndexLoadError",
    "IndexMismatchError",
    "Query",
    "Retriever",
    "ScoredChunk",
    "StagedRetriever",
]

Query: TypeAlias = str | Vectors
"""What is looked for: a text, or its vector."""

ChunkFilter: TypeAlias = Callable[[Chunk], bool]
"""Says whether a chunk may be found."""

_FORMAT: Final = 1
_BATCH: Final = 256
"""Chunks embedded between two reports of progress."""


class DuplicateChunkError(RagserveError, ValueError):
    """A chunk of that id is in the index already; nothing was added.

    :ivar chunk_id: the id.
    """

    def __init__(self, chunk_id: str, index: str) -> None:
        super().__init__(
            f"chunk {chunk_id!r} is in index {index!r} already, or twice in the call; ids must be "
            "unique, so nothing was added"
        )
        self.chunk_id = chunk_id


class IndexLoadError(RagserveError):
    """A saved index is missing, broken, or of another format."""


class IndexMismatchError(IndexLoadError):
    """The index's vectors are not of the embedder's space; searching it would find noise."""


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


class FaissIndex:
    """Exact search by cosine, in memory: FAISS's IndexFlatIP over vectors of length 1.

    May be shared by threads and event loops. Everything that computes or touches files runs in
    worker threads; searches and additions take turns.

    :param embedder: makes the vectors of chunks and of queries.
    :param splitter: cuts documents that are added into chunks; without one, a document is one
        chunk, and what the embedder's model doesn't take in of it is not found.
    :param name: how traces call it.
    """

    def __init__(
        self, embedder: Embedder, *, splitter: TokenSplitter | None = None, name: str = "faiss"
    ) -> None:
        self.embedder = embedder
        self.splitter = splitter
        self._name = name
        self._lock = threading.Lock()
        # Its own, so that neither these calls nor the application's can use up the other's threads.
        # They end when the index is collected.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="ragserve-index")
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
        """
        folder = Path(path)
        index = cls(embedder, splitter=splitter, name=folder.name if name is None else name)
        await run_in(index._threads, index._read, folder)
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

        :param progress: called with how many chunks are embedded, and of how many, as it goes.
        :returns: how many chunks were added.
        :raises DuplicateChunkError: if an id is there already.
        :raises IndexMismatchError: if the embedder's vectors have another length than before.
        """
        items = list(items)
        chunks = await run_in(self._threads, self._cut, items)
        addition = self._reserve(chunks)
        try:
            parts: list[Vectors] = []
            for start in range(0, len(chunks), _BATCH):
                batch = chunks[start : start + _BATCH]
                parts.append(await self.embedder.embed([chunk.text for chunk in batch]))
                if progress is not None:
                    progress(start + len(batch), len(chunks))
            if chunks:
                await run_in(self._threads, self._append, addition, parts)
        finally:
            self._release(addition)
        return len(chunks)

    async def search(
        self, query: Query, top_k: int = 4, *, filter: ChunkFilter | None = None
    ) -> list[ScoredChunk]:
        """The chunks most similar to a text or vector, best first; fewer if there are fewer.

        :param filter: only chunks for which it returns True are found. It is called for every
            chunk of the index, in a worker thread.
        :raises InvalidParamsError: if `top_k` is below 1.
        :raises IndexMismatchError: if the query's vector has another length than the index's.
        """
        queries: Sequence[str] | Vectors
        queries = [query] if isinstance(query, str) else np.asarray(query)[np.newaxis]
        return (await self.search_many(queries, top_k, filter=filter))[0]

    async def search_many(
        self,
        queries: Sequence[str] | Vectors,
        top_k: int = 4,
        *,
        filter: ChunkFilter | None = None,
    ) -> list[list[ScoredChunk]]:
        """`search` for several texts, or the rows of an array, in one go.

        :raises InvalidParamsError: if `top_k` is below 1.
        :raises IndexMismatchError: if the queries' vectors have another length than the index's.
        """
        if top_k < 1:
            raise InvalidParamsError("top_k", top_k, "at least 1")
        if isinstance(queries, np.ndarray):
            vectors = queries
        else:
            vectors = await self.embedder.embed(list(queries), kind="query")
        if not len(vectors):
            return []
        return await run_in(self._threads, self._find, vectors, top_k, filter)

    async def retrieve(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> list[ScoredChunk]:
        """`search`, as the `Retriever` protocol calls it.

        :raises InvalidParamsError: if `top_k` is below 1.
        :raises IndexMismatchError: if the query's vector has another length than the index's.
        """
        return await self.search(query, top_k, filter=filter)

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index into folder `path`; one that is there is replaced at once, or not.

        The folder holds `meta.json`, the chunks as JSON lines, and FAISS's own file.

        :raises InvalidParamsError: if a chunk's metadata is not JSON.
        :raises OSError: if the folder cannot be written.
        """
        await run_in(self._threads, self._write, Path(path))

    # What follows runs in worker threads.

    def _cut(self, items: list[Chunk | Document]) -> list[Chunk]:
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
            new: set[str] = set()
            for chunk in chunks:
                if chunk.id in self._ids or chunk.id in new:
                    raise DuplicateChunkError(chunk.id, self._name)
                new.add(chunk.id)
            self._ids |= new
        return _Addition(chunks)

    def _release(self, addition: _Addition) -> None:
        """Give the ids back if the chunks were not added, and see that they never are."""
        with self._lock:
            if addition.open:
                addition.open = False
                self._ids.difference_update(chunk.id for chunk in addition.chunks)

    def _append(self, addition: _Addition, parts: list[Vectors]) -> None:
        import faiss

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
        if vectors.ndim != 2:
            raise InvalidParamsError("query", vectors.shape, "one vector, or rows of vectors")
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
        """Write new files beside the old ones; the new `meta.json` then names the new ones."""
        import faiss

        folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        chunks_file = folder / f"chunks-{token}.jsonl"
        vectors_file = folder / f"vectors-{token}.faiss"
        meta_file = folder / f"meta-{token}.json"
        try:
            with self._lock:
                chunks = list(self._chunks)
                if self._vectors is not None:
                    faiss.write_index(self._vectors, str(vectors_file))
            with chunks_file.open("w", encoding="ascii") as stream:
                stream.writelines(_to_json(chunk) + "\n" for chunk in chunks)
            files = [chunks_file, vectors_file] if chunks else [chunks_file]
            meta = {
                "format": _FORMAT,
                "embedder": self.embedder.model_name,
                "dimension": self.dimension,
                "count": len(chunks),
                "files": {
                    file.name.split("-")[0]: {"name": file.name, "blake2b": _digest(file)}
                    for file in files
                },
            }
            meta_file.write_text(json.dumps(meta, indent=1) + "\n", encoding="ascii")
            for file in (*files, meta_file):
                _to_disk(file)
            meta_file.replace(folder / "meta.json")
        except BaseException:
            for file in (chunks_file, vectors_file, meta_file):
                file.unlink(missing_ok=True)
            raise
        for pattern in ("chunks-*.jsonl", "vectors-*.faiss"):
            for file in folder.glob(pattern):
                if token not in file.name:
                    file.unlink(missing_ok=True)

    def _read(self, folder: Path) -> None:
        import faiss

        meta_file = folder / "meta.json"
        try:
            meta = json.loads(meta_file.read_text(encoding="utf-8"))
            version = meta["format"]
            embedder, dimension, count = meta["embedder"], meta["dimension"], meta["count"]
            files = {kind: (file["name"], file["blake2b"]) for kind, file in meta["files"].items()}
            chunks_file = files["chunks"]
        except FileNotFoundError as exc:
            raise IndexLoadError(f"{folder} holds no index: there is no meta.json in it") from exc
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
            raise IndexLoadError(f"{meta_file} is broken ({exc!r}); save the index anew") from exc
        if version != _FORMAT:
            raise IndexLoadError(
                f"{folder} is an index of format {version!r} and this version reads {_FORMAT}; "
                "build the index anew"
            )
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
        try:
            for name, digest in files.values():
                if Path(name).name != name or _digest(folder / name) != digest:
                    raise IndexLoadError(
                        f"{folder / name} is truncated or was changed after it was saved; save "
                        "the index anew"
                    )
            with (folder / chunks_file[0]).open(encoding="ascii") as file:
                chunks = [Chunk(**json.loads(line)) for line in file]
            vectors = None
            if "vectors" in files:
                vectors = faiss.read_index(str(folder / files["vectors"][0]))
        except (OSError, ValueError, TypeError, RuntimeError) as exc:
            raise IndexLoadError(f"the index in {folder} cannot be read: {exc}") from exc
        found = (0, None) if vectors is None else (vectors.ntotal, vectors.d)
        if found != (count, dimension) or len(chunks) != count:
            raise IndexLoadError(
                f"the files in {folder} do not fit each other: {len(chunks)} chunks, "
                f"{found[0]} vectors, and {count} of both are expected; save the index anew"
            )
        self._chunks, self._vectors = chunks, vectors
        self._ids = {chunk.id for chunk in chunks}


@dataclass(slots=True)
class _Addition:
    """Chunks whose ids are taken and that are not added yet, while `open`."""

    chunks: list[Chunk]
    open: bool = True


def _to_json(chunk: Chunk) -> str:
    try:
        return json.dumps(
            {
                "id": chunk.id,
                "document_id": chunk.document_id,
                "text": chunk.text,
                "index": chunk.index,
                "metadata": dict(chunk.metadata),
            }
        )
    except (TypeError, ValueError) as exc:
        raise InvalidParamsError(
            "metadata", chunk.metadata, f"what JSON can hold (chunk {chunk.id!r}: {exc})"
        ) from exc


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _to_disk(file: Path) -> None:
    """See to it that a crash after the rename does not leave an empty file behind it."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
