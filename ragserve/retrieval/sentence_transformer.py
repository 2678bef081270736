"""Texts to vectors: the embedder protocol, and sentence-transformers behind one thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from ragserve.engine import (
    InvalidParamsError,
    ModelLoadError,
    current_event_loop,
)

from ..workers import HomeProcess, Places
from .embedder import (
    EmbedderClosedError,
    EmbeddingError,
    TextKind,
    Vectors,
    check_vectors,
    lone_surrogate,
)

__all__ = ["SentenceTransformerEmbedder"]


_CHARACTERS_A_TOKEN = 64
"""Of a text that is embedded, at most so many for each token that the model takes in are looked
at: far more than any language has, and few enough that no text holds the thread for long."""


class SentenceTransformerEmbedder:
    """Embeds with a sentence-transformers model, or any object with `encode(texts)`.

    One thread, started when needed, does the work. Whatever waits when it gets free is embedded
    together, at most `batch_size` texts at a time, and each waiting call has its share of every
    batch: a question does not wait behind a thousand documents. May be shared by threads and
    by event loops, asyncio and trio.

    On a CPU, questions are embedded on one core, so as not to fight over cores with the engine's
    steps; documents, which come in bulk, on as many as torch is set to.

    :param model: a hub id or folder, loaded at first use; or an object with `encode`.
    :param batch_size: most texts that go through the model at once.
    :param device: where to load the model, like "cpu" or "cuda:0"; None lets the library choose.
    :param model_name: name of the vectors' space, kept in an index. Default: the hub id, the
        folder's name, or the object's class.
    :param query_prompt_name: which of the model's prompts stands before a query. Default: the
        one called "query", if the model has it.
    :param document_prompt_name: likewise for documents; default "document".
    :param trust_remote_code: let the model's repository run its own code.
    :param max_queued_calls: most calls of `embed` that may wait or be at work at a time.
    :raises InvalidParamsError: if `batch_size` or `max_queued_calls` is below 1, or `model` has no
        `encode`.
    """

    def __init__(
        self,
        model: str | Path | Any,
        *,
        batch_size: int = 32,
        device: str | None = None,
        model_name: str | None = None,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        trust_remote_code: bool = False,
        max_queued_calls: int = 4096,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidParamsError("batch_size", batch_size, "an integer of at least 1")
        self._source: str | Path | None = None
        self._model: Any = None
        if isinstance(model, str | Path):
            self._source = model
        elif callable(getattr(model, "encode", None)):
            self._model = model
        else:
            raise InvalidParamsError(
                "model", model, "a hub id, a folder, or an object with encode(texts)"
            )
        self._batch_size = batch_size
        self._device = device
        self._trust_remote_code = trust_remote_code
        self._model_name = model_name or _default_name(model)
        self._prompt_names = {"query": query_prompt_name, "document": document_prompt_name}
        self._dimension: int | None = None
        self._lock = threading.Lock()
        # In the order of service. A dictionary, so that what is cancelled leaves it at once.
        self._jobs: dict[_Job, None] = {}
        self._places = Places("calls", max_queued_calls)
        self._process = HomeProcess(f"the embedder {self._model_name}")
        self._working = False
        self._closed = False
        # Ends its thread when the embedder is collected, and joins it when Python exits.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragserve-embedder")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not loaded" if self._model is None else "loaded"
        return f"<SentenceTransformerEmbedder {self._model_name} [{state}]>"

    @property
    def model_name(self) -> str:
        """Names the vectors' space."""
        return self._model_name

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None before the first `embed` or `load`."""
        return self._dimension

    async def load(self) -> None:
        """Load the model now, off the event loop, rather than at the first `embed`.

        :raises ModelLoadError: if it cannot be loaded.
        :raises EmbedderClosedError: after `aclose`.
        """
        await self.embed([""])

    async def embed(self, texts: Sequence[str], *, kind: TextKind = "document") -> Vectors:
        """One vector a text: float32, `[len(texts), dimension]`, each of length 1.

        Cancelling drops those texts that have not started.

        :raises ModelLoadError: if the model cannot be loaded; the next call tries again.
        :raises EmbeddingError: if the model's answer is not one finite vector a text.
        :raises EmbedderClosedError: after `aclose`.
        :raises EngineClosedError: in a process that was forked after the embedder was used.
        :raises InvalidParamsError: if `texts` is no list of strings that can be encoded as UTF-8.
        :raises QueueFullError: if `max_queued_calls` wait already.
        """
        _check_texts(texts)
        if kind not in self._prompt_names:
            raise InvalidParamsError("kind", kind, "query or document")
        if not texts:
            if self._dimension is None:
                await self.load()
            return np.empty((0, self._dimension or 0), np.float32)
        self._process.check()
        with self._places.taken():
            job = _Job(list(texts), kind)
            self._submit(job)
            try:
                await job.event.wait()
            finally:
                job.finished = True
                with self._lock:
                    self._jobs.pop(job, None)
        return job.result()

    async def aclose(self) -> None:
        """Refuse new texts, end what waits with `EmbedderClosedError`, free the model.

        A batch that is at the model already is let finish; its result is dropped.
        """
        if self._process.forked:
            return  # the thread is the other process's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            jobs, self._jobs = self._jobs, {}
        for job in jobs:
            job.finish(EmbedderClosedError(f"{self!r} was closed while texts were waiting"))
        self._thread.submit(self._unload)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> SentenceTransformerEmbedder:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise EmbedderClosedError(f"{self!r} takes no more texts; make a new one")
            if not self._working:
                try:
                    self._thread.submit(self._work)
                except RuntimeError as error:  # what a pool raises that takes no more
                    raise EmbedderClosedError(
                        f"{self!r} cannot start its thread: Python is shutting down"
                    ) from error
                self._working = True
            self._jobs[job] = None

    # What follows runs in the worker thread.

    def _work(self) -> None:
        while jobs := self._waiting():
            try:
                if self._model is None:
                    self._model = self._load()
                batch = self._next_batch()
            except BaseException as exc:
                # Whatever it is, nobody else would tell those who wait.
                for job in jobs:
                    job.finish(_load_error(self._model_name, exc))
            else:
                self._encode(batch)

    def _waiting(self) -> list[_Job]:
        """The jobs with texts still to embed. None: the thread is told that it is idle."""
        with self._lock:
            self._jobs = {job: None for job in self._jobs if job.remaining}
            self._working = bool(self._jobs)
            return list(self._jobs)

    def _next_batch(self) -> list[_Part]:
        """A share of each waiting job that goes with the first one's prompt."""
        with self._lock:
            if not self._jobs:
                return []
            prompt = self._prompt(next(iter(self._jobs)).kind)
            peers = [job for job in self._jobs if self._prompt(job.kind) == prompt]
            peers = peers[: self._batch_size]
            # Those that were served go to the end of the queue.
            for job in peers:
                self._jobs[job] = self._jobs.pop(job)
        parts = []
        room = self._batch_size
        # The smallest first: what they leave of their share goes to the others.
        for i, job in enumerate(sorted(peers, key=lambda job: job.remaining)):
            part = job.take(room // (len(peers) - i))
            room -= len(part.rows)
            parts.append(part)
        return [part for part in parts if part.rows]

    def _encode(self, batch: list[_Part]) -> None:
        texts = [part.job.texts[row] for part in batch for row in part.rows]
        if not texts:
            return
        try:
            vectors = self._vectors(texts, batch[0].job.kind)
        except BaseException as exc:
            if len(batch) == 1:
                batch[0].job.finish(exc)
                return
            # Whose fault was it? Each alone, so that an error meets nobody else.
            for part in batch:
                self._encode([part])
            return
        start = 0
        for part in batch:
            part.job.fill(part.rows, vectors[start : start + len(part.rows)])
            start += len(part.rows)

    def _vectors(self, texts: list[str], kind: TextKind) -> Vectors:
        if _is_sentence_transformer(self._model):
            longest = getattr(self._model, "max_seq_length", None)
            if isinstance(longest, int):
                # The model takes in only so many tokens, but the library encodes the whole text.
                texts = [text[: longest * _CHARACTERS_A_TOKEN] for text in texts]
            with _threads(1 if kind == "query" else None):
                output = self._model.encode(
                    texts,
                    prompt_name=self._prompt(kind),
                    batch_size=self._batch_size,
                    show_progress_bar=False,
                    convert_to_numpy=True,
                )
        else:
            output = self._model.encode(texts)
        if callable(getattr(output, "detach", None)):  # a torch tensor, on any device
            output = output.detach().float().cpu().numpy()
        vectors = check_vectors(output, len(texts), self._model_name)
        if self._dimension not in (None, vectors.shape[1]):
            raise EmbeddingError(
                f"{self._model_name} gave vectors of dimension {vectors.shape[1]}, and of "
                f"{self._dimension} before; use one embedder for one model"
            )
        self._dimension = vectors.shape[1]
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalized: Vectors = vectors / np.maximum(norms, 1e-12)
        return normalized

    def _load(self) -> Any:
        with _no_progress_bars():
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(
                str(self._source),
                device=self._device,
                trust_remote_code=self._trust_remote_code,
            )
        for kind, name in self._prompt_names.items():
            if name is not None and name not in model.prompts:
                raise InvalidParamsError(
                    f"{kind}_prompt_name", name, f"one of the model's: {sorted(model.prompts)}"
                )
        return model

    def _unload(self) -> None:
        self._model = None

    def _prompt(self, kind: TextKind) -> str | None:
        """Name of the model's prompt for such a text; None if it has none, or an empty one."""
        prompts = getattr(self._model, "prompts", None)
        name = self._prompt_names[kind] or kind
        return name if isinstance(prompts, dict) and prompts.get(name) else None


class _Job:
    """One call of `embed`: its texts, what is done of them, and how to wake its caller."""

    def __init__(self, texts: list[str], kind: TextKind) -> None:
        self.texts = texts
        self.kind = kind
        self.finished = False
        self.event = anyio.Event()
        self._loop = current_event_loop()
        # Texts of like length go together: less padding.
        self._todo = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        self._missing = len(texts)
        self._vectors: Vectors | None = None
        self._error: BaseException | None = None

    @property
    def remaining(self) -> int:
        """How many texts nobody has started; 0 when the caller has gone."""
        return 0 if self.finished else len(self._todo)

    def take(self, most: int) -> _Part:
        """Take up to `most` of the remaining texts, the longest first."""
        rows = [] if self.finished else self._todo[-most:]
        del self._todo[len(self._todo) - len(rows) :]
        return _Part(self, rows)

    def fill(self, rows: list[int], vectors: Vectors) -> None:
        """Take in the vectors of some rows; wake the caller if they were the last."""
        if self._vectors is None:
            self._vectors = np.empty((len(self.texts), vectors.shape[1]), np.float32)
        self._vectors[rows] = vectors
        self._missing -= len(rows)
        if not self._missing:
            self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """End it and wake the caller. Of no effect if it has ended."""
        if self.finished:
            return
        self._error = error
        self.finished = True
        self._loop.post(self.event.set)  # if the loop has ended, so has the caller

    def result(self) -> Vectors:
        """What came out of it.

        :raises BaseException: whatever ended it.
        """
        if self._error is not None:
            raise self._error
        if self._vectors is None:
            raise EmbeddingError("the texts were dropped before they were embedded")
        return self._vectors


@dataclass(frozen=True, slots=True)
class _Part:
    """Some texts of one job, about to be embedded."""

    job: _Job
    rows: list[int]


def _check_texts(texts: object) -> None:
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        kind = type(texts).__name__  # and not the text itself, which is nobody else's business
        raise InvalidParamsError("texts", f"<{kind}>", "a list of texts, not one text")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InvalidParamsError(f"texts[{number}]", f"<{kind}>", "a string")
        if (position := lone_surrogate(text)) is not None:
            raise InvalidParamsError(
                f"texts[{number}]",
                f"<{len(text)} characters>",
                f"a string without lone surrogates; character {position} is one: replace it, with "
                'text.encode("utf-8", "replace").decode() say',
            )


def _default_name(model: object) -> str:
    if isinstance(model, str | Path):
        # A folder's place differs between machines; its name need not.
        return Path(model).resolve().name if Path(model).is_dir() else str(model)
    return type(model).__qualname__


def _is_sentence_transformer(model: object) -> bool:
    library = sys.modules.get("sentence_transformers")
    return library is not None and isinstance(model, library.SentenceTransformer)


def _load_error(name: str, cause: BaseException) -> ModelLoadError:
    error = ModelLoadError(f"the embedding model {name} cannot be loaded: {cause}")
    error.__cause__ = cause
    return error


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads; None leaves torch's setting, which is the calling thread's."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on the application's terminal while it loads."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # untyped

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
