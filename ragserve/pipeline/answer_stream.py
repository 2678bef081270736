"""The events of one answer, as they happen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from ragserve.engine import (
    Completion,
    Engine,
    Stream,
    check_event_loop,
    current_event_loop,
)

from ..observability.prompt_reuse import PromptReuse
from ..observability.records import AnswerRecord, GenerationRecord, error_type
from ..observability.statistics import PipelineRecorder
from ..observability.tracing import AnswerTracer
from ..prompting.ordering import DocumentOrder
from ..prompting.template import BuiltPrompt
from ..retrieval.embedder import Embedder, check_vectors
from ..retrieval.retriever import (
    Query,
    Retriever,
    ScoredChunk,
    StagedRetriever,
)
from ..workers import Places
from .answer import AnswerEvent, Done, RagTimings, Retrieved, Source
from .prefill_ahead import PrefillAhead, beside
from .prompts import Prompts, Question

if TYPE_CHECKING:
    from opentelemetry.context import Context


__all__ = ["AnswerStream", "Stages"]


@dataclass(frozen=True, slots=True)
class Stages:
    """What an answer passes through, in this order.

    :param places: one is taken until the engine has the answer in its own queue.
    :param overlap: whether the engine computes the prompt's beginning while documents are found.
    """

    engine: Engine
    embedder: Embedder | None
    index: Retriever
    prompts: Prompts
    places: Places
    overlap: bool


class AnswerStream:
    """The events of one answer, as they happen. Made by `RagPipeline.stream`.

    Use it as a context manager: leaving the block early ends the answer and frees what it
    holds. A plain `async for` works too; a stream that is dropped unfinished is ended when it
    is collected. A read that is cancelled ends the answer. All of it is read in one event loop.

    :ivar sources: what the answer is based on; empty before `Retrieved`.
    :ivar order: how the documents are ordered.
    :ivar trace_id: of its spans, once it has ended; None if it was not traced.
    """

    def __init__(
        self,
        stages: Stages,
        question: Question,
        record: AnswerRecord,
        tracer: AnswerTracer,
        recorder: PipelineRecorder,
        trace_context: Context | None,
    ) -> None:
        self.sources: tuple[Source, ...] = ()
        self.order: DocumentOrder = stages.prompts.template.order
        self.trace_id: str | None = None
        self._stages = stages
        self._question = question
        self._record = record
        self._tracer = tracer
        self._recorder = recorder
        self._parent = tracer.current_context() if trace_context is None else trace_context
        self._ahead: PrefillAhead | None = None
        self._stream: Stream | None = None
        self._scope: anyio.CancelScope | None = None  # of a read that is preparing
        self._reading = False
        self._ended = False

    def __repr__(self) -> str:
        if self._ended:
            state = "ended"
        elif self._record.started is None:
            state = "not started"
        else:
            state = "preparing" if self._stream is None else repr(self._stream)
        return f"<AnswerStream {self._record.name} [{state}]>"

    @property
    def completion(self) -> Completion:
        """What the engine answered; if the answer was ended early, what had come until then.

        :raises RuntimeError: if it has not ended, or ended before the engine took it.
        """
        if self._record.completion is None:
            raise RuntimeError(f"{self!r} has no completion; read it to its end first")
        return self._record.completion

    @property
    def timings(self) -> RagTimings:
        """How long each stage took; of an answer that was ended early, until then.

        :raises RuntimeError: if it has not ended.
        """
        if not self._ended:
            raise RuntimeError(f"{self!r} has not ended; read it to its end first")
        return RagTimings(
            **{stage: (end - start) / 1e9 for stage, start, end in self._record.stages()}
        )

    @property
    def reuse(self) -> PromptReuse:
        """What of the prompt was found in the cache, and why not more.

        :raises RuntimeError: as for `completion`.
        """
        return PromptReuse(self.completion.reuse, tuple(source.chunk.id for source in self.sources))

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> AnswerEvent:
        if self._ended:
            raise StopAsyncIteration
        if self._reading:
            raise RuntimeError("another task is waiting for this answer's next event")
        self._reading = True
        try:
            if self._record.started is not None:
                check_event_loop(self._loop, f"the answer of {self._record.name}")
            return await self._next()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            await self._end(error_type(error))
            raise
        finally:
            self._reading = False

    async def aclose(self) -> None:
        """End the answer now, if it has not ended; a task that waits for an event stops."""
        if (scope := self._scope) is not None:
            # Of a task that may run in another event loop, whose scopes are its own.
            if current_event_loop().key is self._loop.key:
                scope.cancel()
            else:
                self._loop.post(scope.cancel)
        await self._end("cancelled")

    def __del__(self) -> None:
        # Dropped half-way. The engine's stream is dropped with it and ends its request.
        if not self._ended and self._record.started is not None:
            self._settle("cancelled")
            emit = partial(_publish, self._record, self._tracer, self._parent, self._recorder)
            # The collector runs anywhere, in the midst of the tracing library too, whose locks
            # must not be met there. So the spans are made in the event loop, or if that has
            # ended, here.
            if not self._loop.post(emit):
                emit()

    async def _next(self) -> AnswerEvent:
        if self._stream is None:
            with anyio.CancelScope() as self._scope:
                event = await self._prepare()
            if self._ended:  # by another task, meanwhile
                raise StopAsyncIteration
            return event
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            if self._ended:
                raise
        await self._end(None)
        return Done(self.completion, self.timings, self.sources, self.reuse)

    async def _prepare(self) -> Retrieved:
        """Every stage up to the engine's. Each ends with a stamp, where the next one begins."""
        stages, question, record = self._stages, self._question, self._record
        self._loop = current_event_loop()
        record.started = time.monotonic_ns()
        stages.engine.check_open()
        with stages.places.taken():
            prompt = await self._find_with_ahead()
            stream = stages.engine.stream(
                prompt.tokenized,
                question.params,
                priority=question.priority,
                namespace=question.namespace,
            )
            record.built = time.monotonic_ns()

            self._stream = stream
            await stream.__aenter__()
        self.sources = tuple(
            Source(number, scored.chunk, scored.score, rank)
            for number, (scored, rank) in enumerate(zip(prompt.used, prompt.ranks, strict=True), 1)
        )
        self.order = prompt.order
        return Retrieved(self.sources, prompt.dropped, prompt.order)

    async def _find_with_ahead(self) -> BuiltPrompt:
        if not self._stages.overlap:
            return await self._find()
        self._ahead = ahead = self._stages.prompts.ahead(self._question)
        try:
            return await beside(self._find, ahead.run)
        finally:
            ahead.stop()  # before the answer's own request is submitted, which may need it

    async def _find(self) -> BuiltPrompt:
        """Embed, retrieve, make the prompt."""
        stages, question, record = self._stages, self._question, self._record
        query: Query = question.text
        if stages.embedder is not None:
            vectors = await stages.embedder.embed([question.text], kind="query")
            query = check_vectors(vectors, 1, stages.embedder.model_name)[0]
            record.dimension = len(query)
            record.embedded = time.monotonic_ns()
        else:
            record.embedded = record.started

        found = await self._retrieve(query)
        stages.engine.config.limits.check_count("documents", found, "max_documents")
        record.found = found
        record.retrieved = time.monotonic_ns()

        record.prompt = prompt = await stages.prompts.make(question, found)
        return prompt

    async def _retrieve(self, query: Query) -> Sequence[ScoredChunk]:
        index, question, ahead = self._stages.index, self._question, self._ahead
        if ahead is None or not isinstance(index, StagedRetriever):
            return await index.retrieve(query, top_k=question.top_k, filter=question.filter)
        found: Sequence[ScoredChunk] = ()
        found_so_far = index.retrieve_stages(query, top_k=question.top_k, filter=question.filter)
        async for found in found_so_far:
            ahead.guess(self._stages.prompts.guess_from(question, found))
        return found

    async def _end(self, error: str | None) -> None:
        """Stop what runs and make the spans. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if self._stream is not None:
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()
        self._settle(error)
        self.trace_id = _publish(self._record, self._tracer, self._parent, self._recorder)

    def _settle(self, error: str | None) -> None:
        """Write down how it ended."""
        record, prompt = self._record, self._record.prompt
        if self._ahead is not None:
            cached = 0 if self._stream is None else self._stream.timeline.cached_tokens
            tokenized = None if self._stream is None or prompt is None else prompt.tokenized
            record.ahead = self._ahead.records(tokenized, cached)
            record.ahead_error = self._ahead.error
        # After that was read: it ends within the answer.
        record.error, record.ended = error, time.monotonic_ns()
        if self._stream is not None and prompt is not None:
            record.generation = GenerationRecord.of(
                self._stream,
                record.params,
                model=record.model,
                error=error,
                prompt_tokens=prompt.num_tokens,
                started=record.built,
            )
            record.error, record.ended = record.generation.error, record.generation.ended


def _publish(
    record: AnswerRecord,
    tracer: AnswerTracer,
    parent: Context | None,
    recorder: PipelineRecorder,
) -> str | None:
    """Count an answer that has ended, and make its spans; gives the trace's id."""
    stages = record.stages()
    if record.embedding_model is None:
        stages = [stage for stage in stages if stage[0] != "embedding"]
    recorder.answered(stages, record.error, record.ahead or (), record.ahead_outcome)
    return tracer.emit(record, parent)
