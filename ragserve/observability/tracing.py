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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ragserve.engine import Completion, SamplingParams

from .._version import __version__
from .names import PROVIDER, Names, OpenInferenceNames
from .records import AheadRecord, AnswerRecord, GenerationRecord, Stages

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanContext, Tracer, TracerProvider


__all__ = ["AnswerTracer", "GenerationTracer", "request_context"]

Attributes: TypeAlias = dict[str, Any]


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
