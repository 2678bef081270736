"""One question from embedding to answer: the order of the stages, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
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
    TokenizedPrompt,
    Usage,
    check_event_loop,
    current_event_loop,
)

from .documents import Chunk
from .embedding import Embedder, check_embedder, check_vectors, lone_surrogate
from .index import (
    ChunkFilter,
    Query,
    Retriever,
    ScoredChunk,
    StagedRetriever,
    check_filter,
    check_retriever,
)
from .ordering import DocumentOrder, Popularity
from .overlap import PrefillAhead, Recent, beginning, beside, normalized
from .prompting import BuiltPrompt, PromptTemplate, SegmentTokens
from .reuse import PromptReuse
from .statistics import AnswerListener, PipelineRecorder, PipelineStatistics
from .tracing import AnswerRecord, AnswerTracer, GenerationRecord, error_type
from .workers import HomeProcess, Places, Workers

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

    from ragserve.engine import Pin

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
_MAX_CHUNKS = 4096
"""Questions and chunks that are remembered, for guesses and for `warm(top=...)`."""
_MAX_BEGINNINGS = 128
"""Tokenized beginnings of prompts that are remembered."""


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


class RagPipeline:
    """Answers questions from documents. One object serves every request of an application.

    Questions, `top_k`, namespaces and what is retrieved are held to the engine's `config.limits`.
    At most `max_num_seqs + max_queued_requests` answers, what the engine could take in, are being
    prepared at a time; further ones are refused.

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
    :param overlap: have the engine compute the system prompt, and the first document where it can
        be guessed, while the question is embedded and documents are found, whenever it has nothing
        else to do and they are not in the cache. Nothing waits for it.
    :raises InvalidParamsError: if one of these is not what it has to be; says what is.
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
        overlap: bool = True,
    ) -> None:
        _check_engine(engine)
        check_retriever(index)
        self.engine = engine
        self.index = index
        self.embedder: Embedder | None = (
            getattr(index, "embedder", None) if embedder is None else embedder
        )
        if self.embedder is not None:
            check_embedder(self.embedder)
        if template is not None and not callable(getattr(template, "build", None)):
            raise InvalidParamsError("template", template, "a PromptTemplate(...), or None")
        self.template = PromptTemplate() if template is None else template
        self.top_k = self._checked_top_k(top_k)
        self.params = SamplingParams(temperature=0.0, max_tokens=512) if params is None else params
        engine.check_options(self.params, priority=0, namespace=namespace)
        engine.config.limits.check_name("name", name)
        self.name = name
        self.namespace = namespace
        self.overlap = overlap
        self._tracer = AnswerTracer(
            tracer_provider, capture_content=capture_content, openinference=openinference
        )
        self._recorder = PipelineRecorder()
        config = engine.config
        self._places = Places("requests", config.max_num_seqs + config.max_queued_requests)
        self._process = HomeProcess(f"the pipeline {name!r}")
        # Prompts are made here, off the event loop. The threads end when the pipeline is
        # collected.
        self._workers = Workers(2, "ragserve-prompt", self._process)
        # And guesses here, so that no answer's prompt waits for them.
        self._guessers = Workers(1, "ragserve-guess", self._process)
        self._tokens = SegmentTokens(engine.tokenizer)
        self._popularity = Popularity()
        self._seen: Recent[Chunk] = Recent(_MAX_CHUNKS)  # by id
        self._first_of: Recent[Chunk] = Recent(_MAX_CHUNKS)  # by question: the first of its prompt
        self._beginnings: Recent[_Beginning] = Recent(_MAX_BEGINNINGS)  # by the document's id
        self._under_way: set[bytes] = set()

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
        :raises InvalidParamsError: if `question` is blank, too long or no text that can be encoded,
            or another argument is not what it has to be, or beyond the engine's `config.limits`.

        Reading it raises whatever a stage raises: what the embedder and the retriever raise, and

        :raises EmbeddingError: if the embedder does not give one finite vector.
        :raises EngineClosedError: if the engine is closed, or another process's.
        :raises EngineDeadError: if the engine failed.
        :raises EventLoopError: in another event loop than the first read's.
        :raises PromptTooLongError: if the question leaves no room for an answer.
        :raises QueueFullError: if too many answers are being prepared, or wait for the engine.
        :raises QueueTimeoutError: if it was not started in time.
        """
        self._check_question(question)
        check_filter(filter)
        request = _Request(
            question=question,
            top_k=self.top_k if top_k is None else self._checked_top_k(top_k),
            filter=filter,
            params=self.params if params is None else params,
            priority=priority,
            namespace=self.namespace if namespace is None else namespace,
        )
        self.engine.check_options(request.params, priority=priority, namespace=request.namespace)
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
        """Answer a question, and return when it is finished. Arguments and errors as for `stream`,
        those of reading it included."""
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
            stream.order,
            stream.reuse,
            stream.trace_id,
        )

    async def warm(
        self,
        chunks: Iterable[Chunk] | None = None,
        top: int | None = None,
        *,
        namespace: str | None = None,
        persist: bool = True,
    ) -> int:
        """Compute, ahead of questions, the system prompt with each document as the first one.

        With neither `chunks` nor `top`, the system prompt alone. Requests of the usual priorities
        go first; what is cached already is not computed again.

        :param chunks: the documents.
        :param top: so many documents too, those that answers in the namespace were given most
            often of late.
        :param namespace: the tenant; None is the pipeline's.
        :param persist: write it to the engine's disk cache too, if it has one.
        :returns: how many tokens were computed.
        :raises InvalidParamsError: if `top` is below 1, `chunks` are no chunks, or the template
            cannot be used.
        :raises PromptTooLongError: if a document does not fit.
        :raises: what `Engine.warm` raises.
        """
        self.engine.check_open()
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise InvalidParamsError("top", top, "an integer of at least 1, or None")
        namespace = self._checked_namespace(namespace)
        wanted = {chunk.id: chunk for chunk in _checked_chunks(chunks)}
        for chunk_id in () if top is None else self._popularity.top(namespace, top):
            known = self._seen.get(namespace, chunk_id)
            if known is not None:
                wanted.setdefault(chunk_id, known)
        firsts = wanted.values() if chunks is not None or top is not None else (None,)
        prompts = [
            prompt
            for first in firsts
            if (prompt := await self._guessers.run(self._begin, namespace, first))
        ]
        return await self.engine.warm(prompts, namespace=namespace, persist=persist)

    async def pin_system(self, namespace: str | None = None) -> Pin:
        """Compute the system prompt, and keep it in the cache until the pin is released.

        :param namespace: the tenant; None is the pipeline's.
        :raises InvalidParamsError: if the template has no system prompt, or cannot be used.
        :raises: what `Engine.pin` raises.
        """
        self.engine.check_open()
        namespace = self._checked_namespace(namespace)
        prompt = await self._guessers.run(self._begin, namespace, None)
        if prompt is None:
            raise InvalidParamsError("system", self.template.system, "a system prompt, to pin one")
        return await self.engine.pin(prompt, namespace=namespace)

    def statistics(self) -> PipelineStatistics:
        """Counts and times of all answers that have ended, from any thread."""
        return self._recorder.statistics()

    def add_listener(self, listener: AnswerListener) -> None:
        """Tell it of every answer that ends from now on."""
        self._recorder.listeners.add(listener)

    def remove_listener(self, listener: AnswerListener) -> None:
        """Tell it no more. Idempotent."""
        self._recorder.listeners.remove(listener)

    # -- what is asked for ----------------------------------------------------------------

    def _check_question(self, question: object) -> None:
        """Check a question before any work on it. Errors do not quote it: they may be logged."""
        if not isinstance(question, str):
            raise InvalidParamsError("question", f"<{type(question).__name__}>", "a string")
        self.engine.config.limits.check_count("question", question, "max_prompt_characters")
        if not question or question.isspace():
            raise InvalidParamsError("question", "<blank>", "a question that is not blank")
        if (position := lone_surrogate(question)) is not None:
            raise InvalidParamsError(
                "question",
                f"<{len(question)} characters>",
                f"a string without lone surrogates; character {position} is one: replace it, with "
                'text.encode("utf-8", "replace").decode() say',
            )

    def _checked_top_k(self, top_k: object) -> int:
        most = self.engine.config.limits.max_documents
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= most:
            raise InvalidParamsError(
                "top_k",
                top_k,
                f"an integer from 1 to {most}; for more, raise max_documents in "
                "EngineConfig.limits",
            )
        return top_k

    def _checked_namespace(self, namespace: str | None) -> str:
        if namespace is None:
            return self.namespace
        self.engine.config.limits.check_name("namespace", namespace)
        return namespace

    # -- prompts: called in threads -------------------------------------------------------

    def _build(self, request: _Request, found: Sequence[ScoredChunk]) -> BuiltPrompt:
        return self.template.build(
            request.question,
            found,
            self._tokens,
            self._max_prompt_tokens(request.params),
            popularity=self._popularity,
            namespace=request.namespace,
            probe=self.engine.probe(request.namespace),
        )

    def _build_noted(self, request: _Request, found: Sequence[ScoredChunk]) -> BuiltPrompt:
        prompt = self._build(request, found)
        self._note(request, prompt)
        return prompt

    def _max_prompt_tokens(self, params: SamplingParams) -> int | None:
        limit = self.engine.config.max_model_len
        if limit is None:
            return None
        # An answer never claims more than half of what the model can take in.
        return limit - min(params.max_tokens or _ANSWER_TOKENS, limit // 2)

    def _note(self, request: _Request, prompt: BuiltPrompt) -> None:
        """Remember what an answer is given, for those that follow."""
        namespace = request.namespace
        self._popularity.note(namespace, [scored.chunk.id for scored in prompt.used])
        for scored in prompt.used:
            self._seen.note(namespace, scored.chunk.id, scored.chunk)
        if prompt.used:
            self._first_of.note(namespace, normalized(request.question), prompt.used[0].chunk)

    def _begin(self, namespace: str, first: Chunk | None) -> TokenizedPrompt | None:
        """How a prompt begins with this document, or without: with the system prompt alone."""
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

    def _guess_by_question(self, request: _Request) -> TokenizedPrompt | None:
        first = self._first_of.get(request.namespace, normalized(request.question))
        if first is not None and request.filter is not None and not request.filter(first):
            first = None
        return self._begin(request.namespace, first)

    def _guess_by_results(
        self, request: _Request, found: Sequence[ScoredChunk]
    ) -> TokenizedPrompt | None:
        return beginning(self._build(request, found).tokenized, 1)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How prompts begin with a document, or with none. What it was made of says if it still is."""

    template: PromptTemplate
    first: Chunk | None
    prompt: TokenizedPrompt | None


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
    is collected. A read that is cancelled ends the answer. All of it is read in one event loop.

    :ivar sources: what the answer is based on; empty before `Retrieved`.
    :ivar order: how the documents are ordered.
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
        self.order: DocumentOrder = pipeline.template.order
        self.trace_id: str | None = None
        self._pipeline = pipeline
        self._request = request
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
        pipeline, record = self._pipeline, self._record
        self._loop = current_event_loop()
        record.started = time.monotonic_ns()
        pipeline.engine.check_open()
        # Until the engine has it in its own queue.
        with pipeline._places.taken():
            prompt = await self._find_with_ahead()
            stream = pipeline.engine.stream(
                prompt.tokenized,
                self._request.params,
                priority=self._request.priority,
                namespace=self._request.namespace,
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
        pipeline, request = self._pipeline, self._request
        if not (pipeline.overlap and pipeline.engine.config.enable_prefix_caching):
            return await self._find()
        self._ahead = ahead = PrefillAhead(
            pipeline.engine, request.namespace, pipeline._guessers, pipeline._under_way
        )
        ahead.guess(partial(pipeline._guess_by_question, request))
        try:
            return await beside(self._find, ahead.run)
        finally:
            ahead.stop()  # before the answer's own request is submitted, which may need it

    async def _find(self) -> BuiltPrompt:
        """Embed, retrieve, make the prompt."""
        pipeline, request, record = self._pipeline, self._request, self._record
        query: Query = request.question
        if pipeline.embedder is not None:
            vectors = await pipeline.embedder.embed([request.question], kind="query")
            query = check_vectors(vectors, 1, pipeline.embedder.model_name)[0]
            record.dimension = len(query)
            record.embedded = time.monotonic_ns()
        else:
            record.embedded = record.started

        found = await self._retrieve(query)
        pipeline.engine.config.limits.check_count("documents", found, "max_documents")
        record.found = found
        record.retrieved = time.monotonic_ns()

        record.prompt = prompt = await pipeline._workers.run(pipeline._build_noted, request, found)
        return prompt

    async def _retrieve(self, query: Query) -> Sequence[ScoredChunk]:
        index, request, ahead = self._pipeline.index, self._request, self._ahead
        if ahead is None or not isinstance(index, StagedRetriever):
            return await index.retrieve(query, top_k=request.top_k, filter=request.filter)
        found: Sequence[ScoredChunk] = ()
        stages = index.retrieve_stages(query, top_k=request.top_k, filter=request.filter)
        async for found in stages:
            ahead.guess(partial(self._pipeline._guess_by_results, request, found))
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


def _check_engine(engine: object) -> None:
    if isinstance(engine, Engine):
        return
    allowed = "an open Engine: `async with Engine.open(...) as engine`, or `await Engine.open(...)`"
    if not isinstance(engine, type) and hasattr(type(engine), "__await__"):
        allowed += "; this one is not open"
    raise InvalidParamsError("engine", engine, allowed)


def _checked_chunks(chunks: Iterable[Chunk] | None) -> list[Chunk]:
    if chunks is None:
        return []
    allowed = "a list of Chunk, as those of Answer.sources"
    if isinstance(chunks, str | Chunk) or not isinstance(chunks, Iterable):
        raise InvalidParamsError("chunks", f"<{type(chunks).__name__}>", allowed)
    listed = list(chunks)
    for number, chunk in enumerate(listed):
        if not isinstance(chunk, Chunk):
            raise InvalidParamsError(f"chunks[{number}]", f"<{type(chunk).__name__}>", allowed)
    return listed
