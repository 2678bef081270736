"""What requests and answers did: records, traces, statistics, metrics.

A record (`records.py`) says what is known of an answer that has ended. `tracing` makes spans of
it, `statistics` counts it, `Metrics` gives out what engines and pipelines count, to OpenTelemetry
and as Prometheus' text.

Only OpenTelemetry's API is used, and only if it is installed. Pipelines and routes stand above it.
"""

from __future__ import annotations

from .metrics import Metrics
from .names import PROVIDER, Names, OpenInferenceNames
from .prompt_reuse import PromptReuse
from .records import STAGES, AheadOutcome, AheadRecord, AnswerRecord, GenerationRecord, error_type
from .statistics import AnswerListener, FinishedAnswer, PipelineRecorder, PipelineStatistics
from .tracing import AnswerTracer, GenerationTracer, request_context

__all__ = [
    "AheadOutcome",
    "AheadRecord",
    "AnswerListener",
    "AnswerRecord",
    "AnswerTracer",
    "FinishedAnswer",
    "GenerationRecord",
    "GenerationTracer",
    "Metrics",
    "Names",
    "OpenInferenceNames",
    "PROVIDER",
    "PipelineRecorder",
    "PipelineStatistics",
    "PromptReuse",
    "STAGES",
    "error_type",
    "request_context",
]
