"""One question from embedding to answer: the order of the stages, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ragserve.engine import (
    Engine,
    InvalidParamsError,
    SamplingParams,
)

from ..documents.document import Chunk
from ..observability.records import AnswerRecord
from ..observability.statistics import AnswerListener, PipelineRecorder, PipelineStatistics
from ..observability.tracing import AnswerTracer
from ..prompting.template import PromptTemplate
from ..retrieval.embedder import Embedder, check_embedder, lone_surrogate
from ..retrieval.retriever import (
    ChunkFilter,
    Retriever,
    check_filter,
    check_retriever,
)
from ..workers import HomeProcess, Places
from .answer import Answer
from .answer_stream import AnswerStream, Stages
from .prompts import Prompts, Question

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

    from ragserve.engine import Pin


__all__ = ["RagPipeline"]


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
        self._prompts = Prompts(engine, template or PromptTemplate(), self._process)

    def __repr__(self) -> str:
        return f"<RagPipeline {self.name} [{self.index!r} -> {self.engine!r}]>"

    @property
    def template(self) -> PromptTemplate:
        """Makes the prompts; may be replaced by another one."""
        return self._prompts.template

    @template.setter
    def template(self, template: PromptTemplate) -> None:
        self._prompts.template = template

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
            now; see `ragserve.observability.request_context` for a request's.
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
        asked = Question(
            text=question,
            top_k=self.top_k if top_k is None else self._checked_top_k(top_k),
            filter=filter,
            params=self.params if params is None else params,
            priority=priority,
            namespace=self.namespace if namespace is None else namespace,
        )
        self.engine.check_options(asked.params, priority=priority, namespace=asked.namespace)
        record = AnswerRecord(
            name=self.name,
            question=question,
            top_k=asked.top_k,
            params=asked.params,
            model=self.engine.model_name,
            index=self.index.name,
            embedding_model=None if self.embedder is None else self.embedder.model_name,
        )
        stages = Stages(
            engine=self.engine,
            embedder=self.embedder,
            index=self.index,
            prompts=self._prompts,
            places=self._places,
            overlap=self.overlap and self.engine.config.enable_prefix_caching,
        )
        return AnswerStream(stages, asked, record, self._tracer, self._recorder, trace_context)

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
        for chunk in () if top is None else self._prompts.top(namespace, top):
            wanted.setdefault(chunk.id, chunk)
        firsts = wanted.values() if chunks is not None or top is not None else (None,)
        prompts = [
            prompt
            for first in firsts
            if (prompt := await self._prompts.begin(namespace, first)) is not None
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
        prompt = await self._prompts.begin(namespace, None)
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
