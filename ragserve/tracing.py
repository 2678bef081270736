"""What is known of an answer when it has ended, made into OpenTelemetry spans.

Spans are made afterwards, with explicit times, under the span that was current where the answer
was asked for: so none is ever open while the caller's code runs, and an answer that is dropped
half-way still leaves its trace. Only OpenTelemetry's API is used; a provider is the
application's to install, and without OpenTelemetry nothing is traced.

The attributes follow OpenTelemetry's semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); what those have no name for is under
`ragserve.`. OpenInference's (https://arize-ai.github.io/openinference/spec/) can be had beside
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ragserve.engine import Completion, SamplingParams, Stream, Timeline, TokenizedPrompt

from ._version import __version__
from .index import ScoredChunk
from .prompting import BuiltPrompt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanContext, Tracer, TracerProvider

__all__ = [
    "PROVIDER",
    "STAGES",
    "AheadOutcome",
    "AheadRecord",
    "AnswerRecord",
    "AnswerTracer",
    "GenerationRecord",
    "GenerationTracer",
    "Names",
    "OpenInferenceNames",
    "error_type",
    "request_context",
]

Attributes: TypeAlias = dict[str, Any]
Stages: TypeAlias = list[tuple[str, int, int]]
"""`(stage, start, end)` of every stage that began, in order, without gaps."""

PROVIDER: Final = "ragserve"
_CANCELLED: Final = "cancelled"


class Names:
    """Every attribute's name, in one table; OpenInference's are in the next."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    WORKFLOW = "gen_ai.workflow.name"
    ERROR = "error.type"

    DIMENSION = "gen_ai.embeddings.dimension.count"
    DATA_SOURCE = "gen_ai.data_source.id"
    RETRIEVAL_TOP_K = "gen_ai.retrieval.top_k"
    RETRIEVED = "ragserve.retrieval.documents"
    CONTEXT_ORDER = "ragserve.context.order"
    CONTEXT_RANKS = "ragserve.context.ranks"
    CONTEXT_USED = "ragserve.context.documents"
    CONTEXT_DROPPED = "ragserve.context.dropped_documents"
    CONTEXT_TOKENS = "ragserve.context.prompt_tokens"

    MODEL = "gen_ai.request.model"
    STREAM = "gen_ai.request.stream"
    CHOICES = "gen_ai.request.choice.count"
    TEMPERATURE = "gen_ai.request.temperature"
    TOP_P = "gen_ai.request.top_p"
    TOP_K = "gen_ai.request.top_k"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
    PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
    SEED = "gen_ai.request.seed"
    STOP = "gen_ai.request.stop_sequences"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

    PREFILL_PROMPT = "ragserve.prefill.prompt_tokens"
    PREFILL_CACHED = "ragserve.prefill.cached_tokens"
    PREFILL_COMPUTED = "ragserve.prefill.computed_tokens"
    PREFILL_CHUNKS = "ragserve.prefill.chunks"
    DECODE_TOKENS = "ragserve.decode.tokens"
    DECODE_TIME_PER_TOKEN = "ragserve.decode.time_per_output_token"
    PREEMPTIONS = "ragserve.preemptions"

    # One entry for each segment of the prompt, in order.
    REUSE_KINDS = "ragserve.reuse.kinds"
    REUSE_TOKENS = "ragserve.reuse.tokens"
    REUSE_CACHED = "ragserve.reuse.cached_tokens"
    REUSE_SOURCES = "ragserve.reuse.sources"
    REUSE_MISSES = "ragserve.reuse.miss_reasons"

    AHEAD_OUTCOME = "ragserve.prefill_ahead.outcome"
    AHEAD_ERROR = "ragserve.prefill_ahead.error"
    AHEAD_DOCUMENTS = "ragserve.prefill_ahead.documents"
    AHEAD_PROMPT = "ragserve.prefill_ahead.prompt_tokens"
    AHEAD_CACHED = "ragserve.prefill_ahead.cached_tokens"
    AHEAD_COMPUTED = "ragserve.prefill_ahead.computed_tokens"
    AHEAD_FOUND = "ragserve.prefill_ahead.found_tokens"
    AHEAD_CHUNKS = "ragserve.prefill_ahead.chunks"

    # Content: only where it was asked for.
    QUESTION = "gen_ai.retrieval.query.text"
    DOCUMENTS = "gen_ai.retrieval.documents"
    INPUT_MESSAGES = "gen_ai.input.messages"
    OUTPUT_MESSAGES = "gen_ai.output.messages"


class OpenInferenceNames:
    """The attributes of OpenInference, for backends that read those."""

    KIND = "openinference.span.kind"

    EMBEDDING_MODEL = "embedding.model_name"
    MODEL = "llm.model_name"
    PARAMETERS = "llm.invocation_parameters"
    PROMPT_TOKENS = "llm.token_count.prompt"
    CACHED_TOKENS = "llm.token_count.prompt_details.cache_read"
    COMPLETION_TOKENS = "llm.token_count.completion"
    TOTAL_TOKENS = "llm.token_count.total"
    DOCUMENT_ID = "retrieval.documents.{}.document.id"
    DOCUMENT_SCORE = "retrieval.documents.{}.document.score"

    # Content: only where it was asked for.
    DOCUMENT_CONTENT = "retrieval.documents.{}.document.content"
    INPUT = "input.value"
    OUTPUT = "output.value"


STAGES: Final = ("embedding", "retrieval", "context", "queue", "prefill", "decode")
_STAGES_BEFORE: Final = STAGES[:3]
_STAGES_OF_GENERATION: Final = STAGES[3:]


@dataclass(slots=True)
class GenerationRecord:
    """What is known of one request to the engine that has ended. Mostly made by `of`.

    Times are from `time.monotonic_ns`.
    """

    model: str
    params: SamplingParams
    started: int | None
    """None: it was never begun, and there is nothing to trace."""
    ended: int
    timeline: Timeline
    completion: Completion | None = None
    """What came of it, if only in part; None if the engine did not take it."""
    error: str | None = None
    """What kind of error ended it; "cancelled" if its caller left."""
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    """Text or chat messages, for traces that may have content; None is not known."""
    prompt_tokens: int | None = None
    """None is not known; then the completion's are used."""

    @classmethod
    def of(
        cls,
        stream: Stream,
        params: SamplingParams,
        *,
        model: str,
        error: BaseException | str | None = None,
        prompt: str | Sequence[Mapping[str, Any]] | None = None,
        prompt_tokens: int | None = None,
        started: int | None = None,
    ) -> GenerationRecord:
        """Write down how a stream has ended, after it was read to its end or closed.

        :param error: what ended it: an exception, an error type, or "cancelled" for a caller
            that left. It does not count if the answer was whole by then. None looks at the
            finish reasons.
        :param started: None is when the engine was asked.
        """
        kind = error_type(error) if isinstance(error, BaseException) else error
        completion = _completion(stream)
        if completion is not None:
            reasons = {choice.finish_reason for choice in completion.choices}
            broken = next((reason for reason in ("error", "abort") if reason in reasons), None)
            if kind is None or (kind == _CANCELLED and broken is None):
                kind = broken
        # A copy, for the engine may still write to it.
        timeline = replace(stream.timeline, chunks=list(stream.timeline.chunks))
        return cls(
            model=model,
            params=params,
            started=timeline.arrived if started is None else started,
            ended=timeline.finished or time.monotonic_ns(),
            timeline=timeline,
            completion=completion,
            error=kind,
            prompt=prompt,
            prompt_tokens=prompt_tokens,
        )

    def stages(self) -> Stages:
        """Its stages. A request that failed ends with the stage it failed in."""
        stamps = (self.timeline.first_scheduled, self.timeline.first_token, None)
        return _stages(_STAGES_OF_GENERATION, self.started, stamps, self.ended)


AheadOutcome: TypeAlias = Literal["used", "wrong", "unfinished", "skipped"]
"""used: the prompt began as guessed, and all of the guess was computed. unfinished: it was
stopped before that, by the prompt or by the answer's end. wrong: the prompt began otherwise.
skipped: nothing was to be computed, or could be."""


@dataclass(frozen=True, slots=True)
class AheadRecord:
    """What was computed of a guess before the prompt was known. Times from `time.monotonic_ns`.

    :param documents: in the guess, after the system prompt.
    :param prompt_tokens: of the guess.
    :param cached_tokens: of those, in the cache already.
    :param computed_tokens: of those, computed until it was done or stopped.
    :param found_tokens: of the computed ones, those that the answer found in the cache.
    :param chunks: how many steps worked on it.
    :param start: of the first step that did; None if none did.
    :param end: of the last one.
    """

    outcome: AheadOutcome
    documents: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    found_tokens: int
    chunks: int = 0
    start: int | None = None
    end: int | None = None

    @classmethod
    def of(
        cls,
        guess: TokenizedPrompt,
        timeline: Timeline,
        prompt: TokenizedPrompt | None,
        cached_tokens: int,
    ) -> AheadRecord:
        """Write down how a guess came out.

        :param timeline: of the request that computed it.
        :param prompt: the answer's own; None if it never came to be.
        :param cached_tokens: of that, found in the cache.
        """
        chunks, before = list(timeline.chunks), timeline.cached_tokens
        length, computed = len(guess.token_ids), sum(chunk.num_tokens for chunk in chunks)
        reached = min(before + computed, length)
        common = 0 if prompt is None else _common_tokens(guess, prompt)
        outcome: AheadOutcome
        if prompt is not None and common < length:
            outcome = "wrong"
        elif prompt is None or reached < length:
            outcome = "unfinished"
        else:
            outcome = "used" if computed else "skipped"
        return cls(
            outcome=outcome,
            documents=guess.kinds.count("document"),
            prompt_tokens=length,
            cached_tokens=before,
            computed_tokens=computed,
            found_tokens=max(0, min(reached, common, cached_tokens) - before),
            chunks=len(chunks),
            start=chunks[0].start if chunks else None,
            end=chunks[-1].end if chunks else None,
        )


def _common_tokens(one: TokenizedPrompt, other: TokenizedPrompt) -> int:
    """Tokens of the segments that two prompts both begin with."""
    common = 0
    ends = pairwise(accumulate(one.segment_lengths, initial=0))
    for (start, end), length in zip(ends, other.segment_lengths, strict=False):
        if end - start != length or one.token_ids[start:end] != other.token_ids[start:end]:
            break
        common = end
    return common


@dataclass(slots=True)
class AnswerRecord:
    """What is known of one answer. Times are from `time.monotonic_ns`; None did not happen.

    Stages share their boundaries, so that they cover the whole time from `started` to `ended`.
    """

    name: str
    question: str
    top_k: int
    params: SamplingParams
    model: str
    index: str
    embedding_model: str | None
    """None: the retriever takes text, and nothing is embedded."""
    dimension: int | None = None

    started: int | None = None
    embedded: int | None = None
    retrieved: int | None = None
    built: int | None = None
    """The prompt is ready and handed to the engine."""
    ended: int | None = None
    error: str | None = None
    """What kind of error ended it; "cancelled" if its caller left."""

    found: Sequence[ScoredChunk] = ()
    prompt: BuiltPrompt | None = None
    generation: GenerationRecord | None = None
    """The engine's part, when the answer had ended; begins where the prompt was ready."""
    ahead: Sequence[AheadRecord] | None = None
    """What was computed before the prompt was known, one guess after the other; None if that is
    switched off."""
    ahead_error: str | None = None
    """What kind of error kept guesses from being computed."""

    @property
    def ahead_outcome(self) -> AheadOutcome | None:
        """How the last guess came out; None if computing ahead is switched off."""
        if self.ahead is None:
            return None
        return self.ahead[-1].outcome if self.ahead else "skipped"

    @property
    def completion(self) -> Completion | None:
        """What the engine answered, if only in part."""
        return None if self.generation is None else self.generation.completion

    def stages(self) -> Stages:
        """Its stages. An answer that failed ends with the stage it failed in."""
        if self.ended is None:
            return []
        stamps = (self.embedded, self.retrieved, self.built)
        stages = _stages(_STAGES_BEFORE, self.started, stamps, self.ended)
        return stages if self.generation is None else stages + self.generation.stages()


def _stages(
    names: Sequence[str], start: int | None, stamps: Sequence[int | None], ended: int
) -> Stages:
    """Each stage from the end of the one before to its stamp, or if it has none, to the end."""
    stages: Stages = []
    if start is None:
        return stages
    last = max(start, ended)
    for name, stamp in zip(names, stamps, strict=True):
        end = last if stamp is None else min(max(start, stamp), last)
        stages.append((name, start, end))
        if stamp is None:
            break
        start = end
    return stages


@dataclass(frozen=True, slots=True)
class _SpanData:
    """A span to be made. What is inside it is only worked out if it is recorded."""

    name: str
    start: int
    end: int
    attributes: Attributes
    error: str | None = None
    inside: Callable[[], list[_SpanData]] | None = None


class _Tracer:
    """What both tracers have: where spans go, and what may be in them."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        capture_content: bool = False,
        openinference: bool = False,
    ) -> None:
        self._capture_content = capture_content
        self._openinference = openinference
        self._tracer: Tracer | None = None
        try:
            from opentelemetry import trace
        except ImportError:
            return
        self._tracer = trace.get_tracer("ragserve", __version__, tracer_provider)

    def current_context(self) -> Context | None:
        """Where the caller is in its own trace; None if nothing is traced."""
        if self._tracer is None:
            return None
        from opentelemetry import context

        return context.get_current()

    def _emit(self, data: _SpanData, parent: Context | None) -> str | None:
        """Make a span and those inside it.

        :returns: the trace's id, 32 hexadecimal digits; None if there is no trace.
        """
        tracer = self._tracer
        if tracer is None:
            return None
        from opentelemetry import trace

        context = _make(tracer, data, parent, _clock_offset())
        if context is None:
            # Not recorded: then it has no trace but that of its parent, if there is one.
            context = trace.get_current_span(parent).get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    def _chat(self, record: GenerationRecord, stages: Stages) -> _SpanData:
        """The span of the engine's part, with a span for each of its stages."""

        def inside() -> list[_SpanData]:
            spans = []
            for stage, start, end in stages:
                attributes = self._kind("CHAIN")
                if stage == "prefill":
                    attributes |= _prefill(record)
                elif stage == "decode":
                    attributes |= _decode(record)
                spans.append(_SpanData(f"llm.{stage}", start, end, attributes))
            return _failed_in_the_last(spans, record.error)

        return _SpanData(
            f"chat {record.model}",
            stages[0][1],
            stages[-1][2],
            self._chat_attributes(record, stages),
            record.error,
            inside,
        )

    def _chat_attributes(self, record: GenerationRecord, stages: Stages) -> Attributes:
        completion, parameters = record.completion, _parameters(record.params)
        attributes: Attributes = {
            Names.OPERATION: "chat",
            Names.PROVIDER: PROVIDER,
            Names.MODEL: record.model,
            Names.STREAM: True,
            **{_PARAMETERS[name]: value for name, value in parameters.items()},
        }
        times = {name: (start, end) for name, start, end in stages}
        if "decode" in times:
            waited = times["decode"][0] - times["queue"][0]
            attributes[Names.TIME_TO_FIRST_CHUNK] = waited / 1e9
        if completion is not None:
            attributes |= {
                Names.RESPONSE_ID: completion.request_id,
                Names.RESPONSE_MODEL: completion.model,
                Names.FINISH_REASONS: [choice.finish_reason for choice in completion.choices],
                Names.INPUT_TOKENS: completion.usage.prompt_tokens,
                Names.OUTPUT_TOKENS: completion.usage.completion_tokens,
                Names.CACHED_TOKENS: completion.usage.cached_tokens,
                **_reuse(completion),
            }
        if self._capture_content:
            if record.prompt is not None:
                attributes[Names.INPUT_MESSAGES] = _messages(record.prompt)
            if completion is not None:
                attributes[Names.OUTPUT_MESSAGES] = _answers(completion)
        if self._openinference:
            attributes |= self._kind("LLM")
            attributes[OpenInferenceNames.MODEL] = record.model
            attributes[OpenInferenceNames.PARAMETERS] = json.dumps(parameters, ensure_ascii=False)
            if completion is not None:
                attributes |= {
                    OpenInferenceNames.PROMPT_TOKENS: completion.usage.prompt_tokens,
                    OpenInferenceNames.CACHED_TOKENS: completion.usage.cached_tokens,
                    OpenInferenceNames.COMPLETION_TOKENS: completion.usage.completion_tokens,
                    OpenInferenceNames.TOTAL_TOKENS: completion.usage.total_tokens,
                }
            attributes |= self._values(record.prompt, completion)
        return attributes

    def _kind(self, kind: str) -> Attributes:
        return {OpenInferenceNames.KIND: kind} if self._openinference else {}

    def _values(
        self, given: str | Sequence[Mapping[str, Any]] | None, completion: Completion | None
    ) -> Attributes:
        """What went into a span's work and what came out, as OpenInference has it."""
        attributes: Attributes = {}
        if self._openinference and self._capture_content:
            if given is not None:
                attributes[OpenInferenceNames.INPUT] = (
                    given if isinstance(given, str) else json.dumps(list(given), ensure_ascii=False)
                )
            if completion is not None:
                attributes[OpenInferenceNames.OUTPUT] = completion.text
        return attributes


class GenerationTracer(_Tracer):
    """Makes the spans of a plain request to the engine, one that no pipeline made.

        parent = tracer.current_context()
        async with engine.stream(prompt, params) as stream:
            ...
        tracer.emit(GenerationRecord.of(stream, params, model=engine.model_name), parent)

    :param tracer_provider: None is the one the application has installed, if any.
    :param capture_content: put prompts and answers into the spans.
    :param openinference: give the spans OpenInference's attributes too.
    """

    def emit(self, record: GenerationRecord, parent: Context | None) -> str | None:
        """Make the spans of a request that has ended, under `parent`.

        :returns: the trace's id, 32 hexadecimal digits; None if there is no trace.
        """
        stages = record.stages()
        if self._tracer is None or not stages:
            return None
        return self._emit(self._chat(record, stages), parent)


class AnswerTracer(_Tracer):
    """Makes an answer's spans.

    :param tracer_provider: None is the one the application has installed, if any.
    :param capture_content: put questions, documents and answers into the spans.
    :param openinference: give the spans OpenInference's attributes too.
    """

    def emit(self, record: AnswerRecord, parent: Context | None) -> str | None:
        """Make the spans of an answer that has ended, under `parent`.

        :returns: the trace's id, 32 hexadecimal digits; None if there is no trace.
        """
        stages = record.stages()
        if self._tracer is None or not stages:
            return None
        answer = _SpanData(
            f"invoke_workflow {record.name}",
            stages[0][1],
            stages[-1][2],
            self._workflow(record),
            record.error,
            lambda: self._inside(record, stages),
        )
        return self._emit(answer, parent)

    def _inside(self, record: AnswerRecord, stages: Stages) -> list[_SpanData]:
        spans = []
        for stage, start, end in stages:
            match stage:
                case "embedding" if record.embedding_model is not None:
                    name, attributes = f"embeddings {record.embedding_model}", self._embedding
                case "retrieval":
                    name, attributes = f"retrieval {record.index}", self._retrieval
                case "context":
                    name, attributes = "rag.context", self._context
                case _:
                    continue
            spans.append(_SpanData(name, start, end, attributes(record)))
        generation = record.generation
        if generation is not None:
            if self._capture_content and record.prompt is not None:
                generation = replace(generation, prompt=record.prompt.text)
            spans.append(self._chat(generation, generation.stages()))
        spans = _failed_in_the_last(spans, record.error)
        # Beside the stages, which alone make up the whole.
        return spans + [
            _SpanData("prefill_ahead", ahead.start, ahead.end, self._kind("CHAIN") | _ahead(ahead))
            for ahead in record.ahead or ()
            if ahead.start is not None and ahead.end is not None
        ]

    def _workflow(self, record: AnswerRecord) -> Attributes:
        attributes: Attributes = {
            Names.OPERATION: "invoke_workflow",
            Names.PROVIDER: PROVIDER,
            Names.WORKFLOW: record.name,
            **self._kind("CHAIN"),
            **self._values(record.question, record.completion),
        }
        if record.ahead_outcome is not None:
            attributes[Names.AHEAD_OUTCOME] = record.ahead_outcome
        if record.ahead_error is not None:
            attributes[Names.AHEAD_ERROR] = record.ahead_error
        if self._capture_content:
            attributes[Names.INPUT_MESSAGES] = _messages(record.question)
            if record.completion is not None:
                attributes[Names.OUTPUT_MESSAGES] = _answers(record.completion)
        return attributes

    def _embedding(self, record: AnswerRecord) -> Attributes:
        attributes: Attributes = {
            Names.OPERATION: "embeddings",
            Names.PROVIDER: PROVIDER,
            Names.MODEL: record.embedding_model or "",
            **self._kind("EMBEDDING"),
            **self._values(record.question, None),
        }
        if record.dimension is not None:
            attributes[Names.DIMENSION] = record.dimension
        if self._openinference:
            attributes[OpenInferenceNames.EMBEDDING_MODEL] = record.embedding_model or ""
        return attributes

    def _retrieval(self, record: AnswerRecord) -> Attributes:
        attributes: Attributes = {
            Names.OPERATION: "retrieval",
            Names.PROVIDER: PROVIDER,
            Names.DATA_SOURCE: record.index,
            Names.RETRIEVAL_TOP_K: record.top_k,
            Names.RETRIEVED: len(record.found),
            **self._kind("RETRIEVER"),
            **self._values(record.question, None),
        }
        if self._openinference:
            for number, scored in enumerate(record.found):
                attributes[OpenInferenceNames.DOCUMENT_ID.format(number)] = scored.chunk.id
                attributes[OpenInferenceNames.DOCUMENT_SCORE.format(number)] = float(scored.score)
                if self._capture_content:
                    name = OpenInferenceNames.DOCUMENT_CONTENT.format(number)
                    attributes[name] = scored.chunk.text
        if self._capture_content:
            attributes[Names.QUESTION] = record.question
            attributes[Names.DOCUMENTS] = json.dumps(
                [
                    {"id": s.chunk.id, "score": float(s.score), "content": s.chunk.text}
                    for s in record.found
                ],
                ensure_ascii=False,
            )
        return attributes

    def _context(self, record: AnswerRecord) -> Attributes:
        attributes, prompt = self._kind("CHAIN"), record.prompt
        if prompt is not None:
            attributes |= {
                Names.CONTEXT_ORDER: prompt.order,
                Names.CONTEXT_RANKS: list(prompt.ranks),
                Names.CONTEXT_USED: len(prompt.used),
                Names.CONTEXT_DROPPED: len(prompt.dropped),
                Names.CONTEXT_TOKENS: prompt.num_tokens,
            }
        return attributes


def request_context(headers: Mapping[str, str]) -> Context | None:
    """The place in a trace of the request that is being handled.

    If a span is current, as with a framework that is instrumented, it is that; otherwise what
    the headers say, `traceparent` and `baggage` for example, read with the propagators the
    application has set. None without OpenTelemetry.

    :param headers: of the request; their names in any case.
    """
    try:
        from opentelemetry import context, propagate, trace
    except ImportError:
        return None
    if trace.get_current_span().get_span_context().is_valid:
        return context.get_current()
    # Propagators ask for names in lower case. One header may come in several lines.
    carrier: dict[str, list[str]] = {}
    for name, value in headers.items():
        carrier.setdefault(name.lower(), []).append(value)
    return propagate.extract(carrier)


def error_type(error: BaseException) -> str:
    """OpenTelemetry's `error.type` for an exception; "cancelled" for a cancellation."""
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit):
        return _CANCELLED  # asyncio's and trio's, which share no base class
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _completion(stream: Stream) -> Completion | None:
    """What has come of it; None while it runs."""
    try:
        return stream.completion
    except RuntimeError:
        return None


def _clock_offset() -> int:
    """What to add to `time.monotonic_ns` for the time of day, in nanoseconds."""
    best = offset = 0
    for attempt in range(3):
        before = time.monotonic_ns()
        now = time.time_ns()
        took = time.monotonic_ns() - before
        # Another thread may have run in between; the shortest try is the truest.
        if attempt == 0 or took < best:
            best, offset = took, now - before - took // 2
    return offset


def _make(
    tracer: Tracer, data: _SpanData, parent: Context | None, offset: int
) -> SpanContext | None:
    """Make a span and those inside it; None if it is not recorded, and then neither are those.

    All of it is in this process, which is what kind INTERNAL is for; CLIENT would say that
    another service was called.
    """
    span = tracer.start_span(
        data.name, parent, attributes=data.attributes, start_time=data.start + offset
    )
    if not span.is_recording():
        return None
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    if data.inside is not None:
        context = set_span_in_context(span, parent)
        for inner in data.inside():
            _make(tracer, inner, context, offset)
    if data.error is not None:
        # The kind only: an error's message may quote what was asked.
        span.set_attribute(Names.ERROR, data.error)
        span.set_status(Status(StatusCode.ERROR))
    span.end(data.end + offset)
    return span.get_span_context()


def _failed_in_the_last(spans: list[_SpanData], error: str | None) -> list[_SpanData]:
    """What failed, failed in the last stage that began."""
    if error is not None and spans:
        spans[-1] = replace(spans[-1], error=error)
    return spans


def _parameters(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that conventions name, where they are not switched off."""
    given: dict[str, Any] = {
        "n": params.n if params.n > 1 else None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or None,
        "max_tokens": params.max_tokens,
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
        "seed": params.seed,
        "stop": list(params.stop or ()) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


_PARAMETERS: Final = {
    "n": Names.CHOICES,
    "temperature": Names.TEMPERATURE,
    "top_p": Names.TOP_P,
    "top_k": Names.TOP_K,
    "max_tokens": Names.MAX_TOKENS,
    "frequency_penalty": Names.FREQUENCY_PENALTY,
    "presence_penalty": Names.PRESENCE_PENALTY,
    "seed": Names.SEED,
    "stop": Names.STOP,
}


def _prefill(record: GenerationRecord) -> Attributes:
    tokens, completion = record.prompt_tokens, record.completion
    if tokens is None and completion is not None:
        tokens = completion.usage.prompt_tokens
    attributes: Attributes = {} if tokens is None else {Names.PREFILL_PROMPT: tokens}
    chunks = record.timeline.chunks
    return attributes | {
        Names.PREFILL_CACHED: record.timeline.cached_tokens,
        Names.PREFILL_COMPUTED: sum(chunk.num_tokens for chunk in chunks),
        Names.PREFILL_CHUNKS: len(chunks),
    }


def _ahead(record: AheadRecord) -> Attributes:
    return {
        Names.AHEAD_OUTCOME: record.outcome,
        Names.AHEAD_DOCUMENTS: record.documents,
        Names.AHEAD_PROMPT: record.prompt_tokens,
        Names.AHEAD_CACHED: record.cached_tokens,
        Names.AHEAD_COMPUTED: record.computed_tokens,
        Names.AHEAD_FOUND: record.found_tokens,
        Names.AHEAD_CHUNKS: record.chunks,
    }


def _reuse(completion: Completion) -> Attributes:
    """What of each segment of the prompt was cached. An empty string stands for none."""
    reuse = completion.reuse
    if not reuse:
        return {}
    return {
        Names.REUSE_KINDS: [segment.kind for segment in reuse],
        Names.REUSE_TOKENS: [segment.tokens for segment in reuse],
        Names.REUSE_CACHED: [segment.cached_tokens for segment in reuse],
        Names.REUSE_SOURCES: [segment.source or "" for segment in reuse],
        Names.REUSE_MISSES: [segment.miss or "" for segment in reuse],
    }


def _decode(record: GenerationRecord) -> Attributes:
    completion = record.completion
    if completion is None:
        return {}
    attributes: Attributes = {
        Names.DECODE_TOKENS: completion.usage.completion_tokens,
        Names.PREEMPTIONS: completion.timings.preemptions,
    }
    if completion.timings.time_per_output_token is not None:
        attributes[Names.DECODE_TIME_PER_TOKEN] = completion.timings.time_per_output_token
    return attributes


def _message(role: str, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _messages(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return json.dumps(
        [_message(message["role"], message["content"]) for message in messages],
        ensure_ascii=False,
    )


def _answers(completion: Completion) -> str:
    return json.dumps(
        [
            {**_message("assistant", choice.text), "finish_reason": choice.finish_reason}
            for choice in completion.choices
        ],
        ensure_ascii=False,
    )
