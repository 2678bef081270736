"""One question from embedding to answer: the order of the stages, and nothing else."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import anyio

from ragserve.engine import (
    Completion,
    Delta,
    Engine,
    InvalidParamsError,
    SamplingParams,
    Stream,
    Usage,
    current_event_loop,
    run_in,
)

from .documents import Chunk
from .embedding import Embedder
from .index import ChunkFilter, Query, Retriever, ScoredChunk
from .prompting import PromptTemplate
from .statistics import AnswerListener, PipelineRecorder, PipelineStatistics
from .tracing import AnswerRecord, AnswerTracer, GenerationRecord, error_type

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

__all__ = [
    "Answer",
    "AnswerEvent",
    "AnswerStream",
    "Done",
    "RagPipeline",
    "RagTimings",
    "Retrieved",
    "Source",
]

_ANSWER_TOKENS = 256
"""Room kept for an answer of unlimited length when documents are chosen."""


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk that the answer was given.

    :param number: its number in the prompt, from 1: what a citation like [1] means.
    :param score: similarity to the question.
    """

    number: int
    chunk: Chunk
    score: float


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

    :param dropped: chunks that were found and did not fit into the prompt.
    """

    sources: tuple[Source, ...]
    dropped: tuple[ScoredChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The last event."""

    completion: Completion
    timings: RagTimings
    sources: tuple[Source, ...]


AnswerEvent: TypeAlias = Retrieved | Delta | Done


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    :param trace_id: of its spans, 32 hexadecimal digits; None if it was not traced.
    """

    text: str
    sources: tuple[Source, ...]
    usage: Usage
    timings: RagTimings
    completion: Completion
    trace_id: str | None = None


class RagPipeline:
    """Answers questions from documents. One object serves every request of an application.

    :param engine: generates; stays the caller's to close.
    :param index: finds chunks: a `FaissIndex`, or any `Retriever`.
    :param embedder: embeds questions. Default: the index's own; if it has none, the index is
        given the question itself.
    :param template: makes the prompt.
    :param top_k: how many chunks to retrieve.
    :param params: how to sample. Default: greedy, at most 512 tokens.
    :param name: what traces call it.
    :param tracer_provider: None is the one the application has installed, if any.
    :param capture_content: put questions, documents and answers into spans.
    :param openinference: give the spans OpenInference's attributes too.
    :param namespace: the tenant; cached blocks are never shared between namespaces.
    :raises InvalidParamsError: if `top_k` is below 1.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        index: Retriever,
        embedder: Embedder | None = None,
        template: PromptTemplate | None = None,
        top_k: int = 4,
        params: SamplingParams | None = None,
        name: str = "rag",
        tracer_provider: TracerProvider | None = None,
        capture_content: bool = False,
        openinference: bool = False,
        namespace: str = "",
    ) -> None:
        self.engine = engine
        self.index = index
        self.embedder: Embedder | None = embedder or getattr(index, "embedder", None)
        self.template = template or PromptTemplate()
        self.top_k = _checked_top_k(top_k)
        self.params = params or SamplingParams(temperature=0.0, max_tokens=512)
        self.name = name
        self.namespace = namespace
        self._tracer = AnswerTracer(
            tracer_provider, capture_content=capture_content, openinference=openinference
        )
        self._recorder = PipelineRecorder()
        # Prompts are made here, off the event loop. The threads end when the pipeline is
        # collected.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ragserve-prompt")

    def __repr__(self) -> str:
        return f"<RagPipeline {self.name} [{self.index!r} -> {self.engine!r}]>"

    def stream(
        self,
        question: str,
        *,
        top_k: int | None = None,
        filter: ChunkFilter | None = None,
        params: SamplingParams | None = None,
        priority: int = 0,
        namespace: str | None = None,
        trace_context: Context | None = None,
    ) -> AnswerStream:
        """Answer a question as a stream of `Retrieved`, then `Delta`s, then `Done`.

        Nothing happens before the stream is read.

        :param filter: only chunks for which it returns True are retrieved.
        :param priority: lower goes first in the engine's queue.
        :param trace_context: where in a trace it belongs. None is under the span that is current
            now; see `ragserve.tracing.request_context` for a request's.
        :raises InvalidParamsError: if `question` is not text, or `top_k` is below 1.
        """
        if not isinstance(question, str):
            raise InvalidParamsError("question", question, "a string")
        request = _Request(
            question=question,
            top_k=self.top_k if top_k is None else _checked_top_k(top_k),
            filter=filter,
            params=params or self.params,
            priority=priority,
            namespace=self.namespace if namespace is None else namespace,
        )
        record = AnswerRecord(
            name=self.name,
            question=question,
            top_k=request.top_k,
            params=request.params,
            model=self.engine.model_name,
            index=self.index.name,
            embedding_model=None if self.embedder is None else self.embedder.model_name,
        )
        return AnswerStream(self, request, record, self._tracer, self._recorder, trace_context)

    async def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        filter: ChunkFilter | None = None,
        params: SamplingParams | None = None,
        priority: int = 0,
        namespace: str | None = None,
        trace_context: Context | None = None,
    ) -> Answer:
        """Answer a question, and return when it is finished. Arguments as for `stream`."""
        async with self.stream(
            question,
            top_k=top_k,
            filter=filter,
            params=params,
            priority=priority,
            namespace=namespace,
            trace_context=trace_context,
        ) as stream:
            async for _ in stream:
                pass
        completion = stream.completion
        return Answer(
            completion.text,
            stream.sources,
            completion.usage,
            stream.timings,
            completion,
            stream.trace_id,
        )

    def statistics(self) -> PipelineStatistics:
        """Counts and times of all answers that have ended, from any thread."""
        return self._recorder.statistics()

    def add_listener(self, listener: AnswerListener) -> None:
        """Tell it of every answer that ends from now on."""
        self._recorder.listeners.add(listener)

    def remove_listener(self, listener: AnswerListener) -> None:
        """Tell it no more. Idempotent."""
        self._recorder.listeners.remove(listener)


@dataclass(frozen=True, slots=True)
class _Request:
    question: str
    top_k: int
    filter: ChunkFilter | None
    params: SamplingParams
    priority: int
    namespace: str


class AnswerStream:
    """The events of one answer, as they happen. Made by `RagPipeline.stream`.

    Use it as a context manager: leaving the block early ends the answer and frees what it
    holds. A plain `async for` works too; a stream that is dropped unfinished is ended when it
    is collected. A read that is cancelled ends the answer.

    :ivar sources: what the answer is based on; empty before `Retrieved`.
    :ivar trace_id: of its spans, once it has ended; None if it was not traced.
    """

    def __init__(
        self,
        pipeline: RagPipeline,
        request: _Request,
        record: AnswerRecord,
        tracer: AnswerTracer,
        recorder: PipelineRecorder,
        trace_context: Context | None,
    ) -> None:
        self.sources: tuple[Source, ...] = ()
        self.trace_id: str | None = None
        self._pipeline = pipeline
        self._request = request
        self._record = record
        self._tracer = tracer
        self._recorder = recorder
        self._parent = tracer.current_context() if trace_context is None else trace_context
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
        if self._scope is not None:
            self._scope.cancel()
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
        return Done(self.completion, self.timings, self.sources)

    async def _prepare(self) -> Retrieved:
        """Every stage up to the engine's. Each ends with a stamp, where the next one begins."""
        pipeline, request, record = self._pipeline, self._request, self._record
        self._loop = current_event_loop()
        record.started = time.monotonic_ns()

        query: Query = request.question
        if pipeline.embedder is not None:
            vectors = await pipeline.embedder.embed([request.question], kind="query")
            query = vectors[0]
            record.dimension = len(query)
            record.embedded = time.monotonic_ns()
        else:
            record.embedded = record.started

        found = await pipeline.index.retrieve(query, top_k=request.top_k, filter=request.filter)
        record.found = found
        record.retrieved = time.monotonic_ns()

        record.prompt = prompt = await run_in(
            pipeline._threads,
            pipeline.template.build,
            request.question,
            found,
            pipeline.engine.tokenizer,
            self._max_prompt_tokens(),
        )
        stream = pipeline.engine.stream(
            prompt.tokenized,
            request.params,
            priority=request.priority,
            namespace=request.namespace,
        )
        record.built = time.monotonic_ns()

        self._stream = stream
        await stream.__aenter__()
        self.sources = tuple(
            Source(number, scored.chunk, scored.score)
            for number, scored in enumerate(prompt.used, 1)
        )
        return Retrieved(self.sources, prompt.dropped)

    def _max_prompt_tokens(self) -> int | None:
        limit = self._pipeline.engine.config.max_model_len
        if limit is None:
            return None
        # An answer never claims more than half of what the model can take in.
        return limit - min(self._request.params.max_tokens or _ANSWER_TOKENS, limit // 2)

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
    recorder.answered(stages, record.error)
    return tracer.emit(record, parent)


def _checked_top_k(top_k: int) -> int:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise InvalidParamsError("top_k", top_k, "an integer of at least 1")
    return top_k
