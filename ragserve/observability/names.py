"""The names of attributes, in two tables: OpenTelemetry's and OpenInference's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    pass

__all__ = ["Names", "OpenInferenceNames", "PROVIDER"]

PROVIDER: Final = "ragserve"


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
