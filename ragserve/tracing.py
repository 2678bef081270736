"""What is known of an answer when it has ended, made into OpenTelemetry spans.

Spans are made afterwards, with explicit times, under the span that was current where the answer
was asked for: so none is ever open while the caller's code runs, and an answer that is dropped
half-way still leaves its trace. Only OpenTelemetry's API is used; a provider is the
application's to install, and without OpenTelemetry nothing is traced.

The attributes follow OpenTelemetry's semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); what those have no name for is under
`ragserve.`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ragserve.engine import Completion, SamplingParams, Timeline

from ._version import __version__
from .prompting import BuiltPrompt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["PROVIDER", "STAGES", "AnswerRecord", "AnswerTracer", "Names"]

Attributes: TypeAlias = dict[str, Any]

PROVIDER: Final = "ragserve"


class Names:
    """Every attribute's name, in one table."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    WORKFLOW = "gen_ai.workflow.name"
    ERROR = "error.type"

    DIMENSION = "gen_ai.embeddings.dimension.count"
    DATA_SOURCE = "gen_ai.data_source.id"
    RETRIEVAL_TOP_K = "gen_ai.retrieval.top_k"
    RETRIEVED = "ragserve.retrieval.documents"
    CONTEXT_ORDER = "ragserve.context.order"
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

    # Content: only where it was asked for.
    QUESTION = "gen_ai.retrieval.query.text"
    DOCUMENTS = "gen_ai.retrieval.documents"
    INPUT_MESSAGES = "gen_ai.input.messages"
    OUTPUT_MESSAGES = "gen_ai.output.messages"


STAGES: Final = ("embedding", "retrieval", "context", "queue", "prefill", "decode")


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

    num_retrieved: int = 0
    prompt: BuiltPrompt | None = None
    timeline: Timeline | None = None
    """The engine's, when the answer had ended."""
    completion: Completion | None = None

    def stages(self) -> list[tuple[str, int, int]]:
        """`(stage, start, end)` of every stage that began, in order, without gaps.

        An answer that failed ends with the stage it failed in.
        """
        if self.started is None or self.ended is None:
            return []
        timeline = self.timeline
        stamps = (
            self.embedded,
            self.retrieved,
            self.built,
            timeline.first_scheduled if timeline and self.built else None,
            timeline.first_token if timeline and self.built else None,
        )
        start = self.started
        last = max(start, self.ended)
        stages = []
        for name, stamp in zip(STAGES, (*stamps, None), strict=True):
            end = last if stamp is None else min(max(start, stamp), last)
            stages.append((name, start, end))
            if stamp is None:
                break
            start = end
        return stages


class AnswerTracer:
    """Makes an answer's spans.

    :param tracer_provider: None is the one the application has installed, if any.
    :param capture_content: put questions, documents and answers into the spans.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, capture_content: bool = False
    ) -> None:
        self._capture_content = capture_content
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

    def emit(self, record: AnswerRecord, parent: Context | None) -> str | None:
        """Make the spans of an answer that has ended, under `parent`.

        :returns: the trace's id, 32 hexadecimal digits; None if there is no trace.
        """
        stages = record.stages()
        if self._tracer is None or not stages:
            return None
        from opentelemetry import trace

        # Spans want the time of day; one anchor for all keeps them as exact as the stamps.
        offset = time.time_ns() - time.monotonic_ns()
        root = self._tracer.start_span(
            f"invoke_workflow {record.name}",
            parent,
            attributes=self._workflow(record),
            start_time=stages[0][1] + offset,
        )
        context = trace.get_current_span(parent).get_span_context()
        if root.is_recording():
            context = root.get_span_context()
            self._emit_stages(record, stages, trace.set_span_in_context(root, parent), offset)
            _end(root, stages[-1][2] + offset, record.error)
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    def _emit_stages(
        self,
        record: AnswerRecord,
        stages: list[tuple[str, int, int]],
        parent: Context,
        offset: int,
    ) -> None:
        from opentelemetry import trace

        tracer = self._tracer
        if tracer is None:
            return
        chat: Span | None = None
        for number, (stage, start, end) in enumerate(stages, 1):
            # What failed, failed in the last stage that began.
            error = record.error if number == len(stages) else None
            if stage == "embedding" and record.embedding_model is None:
                continue
            if stage == "queue":
                chat = tracer.start_span(
                    f"chat {record.model}",
                    parent,
                    attributes=self._chat(record, stages),
                    start_time=start + offset,
                )
                parent = trace.set_span_in_context(chat, parent)
            name, attributes = self._stage(record, stage)
            # All in this process, which is what kind INTERNAL is for; CLIENT would say that
            # another service was called.
            span = tracer.start_span(name, parent, attributes=attributes, start_time=start + offset)
            _end(span, end + offset, error)
        if chat is not None:
            _end(chat, stages[-1][2] + offset, record.error)

    def _workflow(self, record: AnswerRecord) -> Attributes:
        attributes: Attributes = {
            Names.OPERATION: "invoke_workflow",
            Names.PROVIDER: PROVIDER,
            Names.WORKFLOW: record.name,
        }
        if self._capture_content:
            attributes[Names.INPUT_MESSAGES] = _messages("user", record.question)
            if record.completion is not None:
                attributes[Names.OUTPUT_MESSAGES] = _answers(record.completion)
        return attributes

    def _stage(self, record: AnswerRecord, stage: str) -> tuple[str, Attributes]:
        match stage:
            case "embedding":
                return f"embeddings {record.embedding_model}", self._embedding(record)
            case "retrieval":
                return f"retrieval {record.index}", self._retrieval(record)
            case "context":
                return "rag.context", _context(record)
            case "prefill":
                return "llm.prefill", _prefill(record)
            case "decode":
                return "llm.decode", _decode(record)
            case _:
                return f"llm.{stage}", {}

    def _embedding(self, record: AnswerRecord) -> Attributes:
        attributes: Attributes = {
            Names.OPERATION: "embeddings",
            Names.PROVIDER: PROVIDER,
            Names.MODEL: record.embedding_model or "",
        }
        if record.dimension is not None:
            attributes[Names.DIMENSION] = record.dimension
        return attributes

    def _retrieval(self, record: AnswerRecord) -> Attributes:
        attributes: Attributes = {
            Names.OPERATION: "retrieval",
            Names.PROVIDER: PROVIDER,
            Names.DATA_SOURCE: record.index,
            Names.RETRIEVAL_TOP_K: record.top_k,
            Names.RETRIEVED: record.num_retrieved,
        }
        if self._capture_content:
            attributes[Names.QUESTION] = record.question
            if record.prompt is not None:
                found = (*record.prompt.used, *record.prompt.dropped)
                attributes[Names.DOCUMENTS] = json.dumps(
                    [{"id": s.chunk.id, "score": s.score, "content": s.chunk.text} for s in found],
                    ensure_ascii=False,
                )
        return attributes

    def _chat(self, record: AnswerRecord, stages: list[tuple[str, int, int]]) -> Attributes:
        attributes = {
            Names.OPERATION: "chat",
            Names.PROVIDER: PROVIDER,
            Names.MODEL: record.model,
            Names.STREAM: True,
            **_request(record.params),
        }
        times = {name: (start, end) for name, start, end in stages}
        if "decode" in times:
            waited = times["decode"][0] - times["queue"][0]
            attributes[Names.TIME_TO_FIRST_CHUNK] = waited / 1e9
        completion = record.completion
        if completion is not None:
            attributes |= {
                Names.RESPONSE_ID: completion.request_id,
                Names.RESPONSE_MODEL: completion.model,
                Names.FINISH_REASONS: [choice.finish_reason for choice in completion.choices],
                Names.INPUT_TOKENS: completion.usage.prompt_tokens,
                Names.OUTPUT_TOKENS: completion.usage.completion_tokens,
                Names.CACHED_TOKENS: completion.usage.cached_tokens,
            }
        if self._capture_content:
            if record.prompt is not None:
                attributes[Names.INPUT_MESSAGES] = _messages("user", record.prompt.text)
            if completion is not None:
                attributes[Names.OUTPUT_MESSAGES] = _answers(completion)
        return attributes


def _request(params: SamplingParams) -> Attributes:
    """The sampling parameters that conventions name, where they are not switched off."""
    given: dict[str, Any] = {
        Names.CHOICES: params.n if params.n > 1 else None,
        Names.TEMPERATURE: params.temperature,
        Names.TOP_P: params.top_p,
        Names.TOP_K: params.top_k or None,
        Names.MAX_TOKENS: params.max_tokens,
        Names.FREQUENCY_PENALTY: params.frequency_penalty or None,
        Names.PRESENCE_PENALTY: params.presence_penalty or None,
        Names.SEED: params.seed,
        Names.STOP: list(params.stop or ()) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _context(record: AnswerRecord) -> Attributes:
    prompt = record.prompt
    if prompt is None:
        return {}
    return {
        Names.CONTEXT_ORDER: prompt.order,
        Names.CONTEXT_USED: len(prompt.used),
        Names.CONTEXT_DROPPED: len(prompt.dropped),
        Names.CONTEXT_TOKENS: prompt.num_tokens,
    }


def _prefill(record: AnswerRecord) -> Attributes:
    prompt, timeline = record.prompt, record.timeline
    if prompt is None or timeline is None:
        return {}
    chunks = list(timeline.chunks)
    return {
        Names.PREFILL_PROMPT: prompt.num_tokens,
        Names.PREFILL_CACHED: timeline.cached_tokens,
        Names.PREFILL_COMPUTED: sum(chunk.num_tokens for chunk in chunks),
        Names.PREFILL_CHUNKS: len(chunks),
    }


def _decode(record: AnswerRecord) -> Attributes:
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


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _messages(role: str, text: str) -> str:
    return json.dumps([_message(role, text)], ensure_ascii=False)


def _answers(completion: Completion) -> str:
    return json.dumps(
        [
            {**_message("assistant", choice.text), "finish_reason": choice.finish_reason}
            for choice in completion.choices
        ],
        ensure_ascii=False,
    )


def _end(span: Span, at: int, error: str | None) -> None:
    if error is not None:
        from opentelemetry.trace import Status, StatusCode

        # The kind only: an error's message may quote what was asked.
        span.set_attribute(Names.ERROR, error)
        span.set_status(Status(StatusCode.ERROR))
    span.end(at)
