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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ragserve.engine import Completion, SamplingParams

from ._version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from .pipeline import Source

__all__ = ["AnswerRecord", "AnswerTracer", "PrefillChunk", "Stages"]

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
