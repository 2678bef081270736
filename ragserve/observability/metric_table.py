"""Every metric of engines and pipelines: name, unit, help, and where its value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from ragserve.engine import Distribution, Statistics

from .exposition import Kind
from .names import Names
from .statistics import PipelineStatistics

if TYPE_CHECKING:
    from ragserve.engine import TierStatistics

__all__ = ["ENGINE_METRICS", "PIPELINE_METRICS", "Metric", "Value"]

S = TypeVar("S")

Attributes: TypeAlias = dict[str, str]
Value: TypeAlias = float | Distribution | Mapping[Any, int]  # by a text

REQUEST_DURATION: Final = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
INTER_TOKEN_LATENCY: Final = "ragserve.inter_token_latency"
QUEUE: Final = "ragserve.queue_time"
PREFILL: Final = "ragserve.prefill_time"
DECODE: Final = "ragserve.decode_time"
ANSWER_DURATION: Final = "gen_ai.workflow.duration"
EMBEDDING: Final = "ragserve.embedding_time"
RETRIEVAL: Final = "ragserve.retrieval_time"
CONTEXT: Final = "ragserve.context_time"


@dataclass(frozen=True, slots=True, eq=False)  # each is itself, and no other
class Metric(Generic[S]):
    """One metric, and where its value is.

    :param name: OpenTelemetry's.
    :param exposed: Prometheus'.
    :param unit: as UCUM writes it.
    :param read: one value, or several by a label.
    :param label: its name in Prometheus.
    :param attribute: its name in OpenTelemetry.
    """

    name: str
    exposed: str
    kind: Kind
    unit: str
    help: str
    read: Callable[[S], Value]
    label: str = ""
    attribute: str = ""


def _blocks(statistics: Statistics) -> dict[str, int]:
    used, cached = statistics.blocks_used, statistics.blocks_cached
    # Not of one instant: while it runs, the parts may be more than the whole.
    free = max(0, statistics.blocks_total - used - cached)
    return {"used": used, "cached": cached, "free": free}


def _tier_metric(
    name: str, exposed: str, kind: Kind, unit: str, help: str, of: Callable[[TierStatistics], int]
) -> Metric[Statistics]:
    """A metric of each tier behind the KV pool."""

    def read(statistics: Statistics) -> dict[str, int]:
        return {tier: of(values) for tier, values in statistics.cache.tiers.items()}

    return Metric(name, exposed, kind, unit, help, read, "tier", "ragserve.tier")


_OF_TIERS: Final[tuple[Metric[Statistics], ...]] = (
    _tier_metric(
        "ragserve.tier.blocks",
        "ragserve_tier_blocks",
        "gauge",
        "{block}",
        "KV blocks kept in a tier behind the pool: in host memory, or on disk.",
        lambda t: t.blocks,
    ),
    _tier_metric(
        "ragserve.tier.size",
        "ragserve_tier_bytes",
        "gauge",
        "By",
        "Bytes of the KV blocks kept in a tier.",
        lambda t: t.bytes,
    ),
    _tier_metric(
        "ragserve.tier.capacity",
        "ragserve_tier_capacity_bytes",
        "gauge",
        "By",
        "Bytes that a tier may take.",
        lambda t: t.capacity_bytes,
    ),
    _tier_metric(
        "ragserve.tier.saved",
        "ragserve_tier_saved_blocks_total",
        "counter",
        "{block}",
        "KV blocks copied from the pool to a tier.",
        lambda t: t.saved,
    ),
    _tier_metric(
        "ragserve.tier.loaded",
        "ragserve_tier_loaded_blocks_total",
        "counter",
        "{block}",
        "KV blocks copied from a tier back to the pool.",
        lambda t: t.loaded,
    ),
    _tier_metric(
        "ragserve.tier.evicted",
        "ragserve_tier_evicted_blocks_total",
        "counter",
        "{block}",
        "KV blocks dropped from a tier to make room.",
        lambda t: t.evicted,
    ),
    _tier_metric(
        "ragserve.tier.rejected",
        "ragserve_tier_rejected_blocks_total",
        "counter",
        "{block}",
        "KV blocks of a tier that were broken or foreign, and were not used.",
        lambda t: t.rejected,
    ),
)

ENGINE_METRICS: Final[tuple[Metric[Statistics], ...]] = (
    Metric(
        "ragserve.sequences.running",
        "ragserve_running_sequences",
        "gauge",
        "{sequence}",
        "Sequences with a seat in the current steps.",
        lambda s: s.num_running,
    ),
    Metric(
        "ragserve.sequences.waiting",
        "ragserve_waiting_sequences",
        "gauge",
        "{sequence}",
        "Sequences that wait for a seat.",
        lambda s: s.num_waiting,
    ),
    Metric(
        "ragserve.kv.usage",
        "ragserve_kv_usage_ratio",
        "gauge",
        "1",
        "Share of the KV blocks that live requests hold.",
        lambda s: s.kv_usage,
    ),
    Metric(
        "ragserve.kv.blocks",
        "ragserve_kv_blocks",
        "gauge",
        "{block}",
        "KV blocks: used by live requests, cached for later ones, or free. Their sum is all.",
        _blocks,
        "state",
        "ragserve.kv.block.state",
    ),
    Metric(
        "ragserve.kv.evictions",
        "ragserve_kv_evictions_total",
        "counter",
        "{block}",
        "Cached KV blocks that were given to others.",
        lambda s: s.num_evictions,
    ),
    Metric(
        "ragserve.prefix.query_tokens",
        "ragserve_prefix_query_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens of all started requests, by kind of segment.",
        lambda s: s.cache.query_tokens,
        "kind",
        "ragserve.segment.kind",
    ),
    Metric(
        "ragserve.prefix.hit_tokens",
        "ragserve_prefix_hit_tokens_total",
        "counter",
        "{token}",
        "Of the prompt tokens of started requests, those found in the cache.",
        lambda s: s.cache.hit_tokens,
        "kind",
        "ragserve.segment.kind",
    ),
    Metric(
        "ragserve.prefix.miss_tokens",
        "ragserve_prefix_miss_tokens_total",
        "counter",
        "{token}",
        "Of the prompt tokens of started requests, those not found in the cache, by the reason.",
        lambda s: s.cache.miss_tokens,
        "reason",
        "ragserve.miss_reason",
    ),
    Metric(
        "ragserve.prefix.awaited_tokens",
        "ragserve_prefix_awaited_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens that were waited for while another request computed them.",
        lambda s: s.cache.awaited_tokens,
    ),
    *_OF_TIERS,
    Metric(
        "ragserve.prefix.hit_ratio",
        "ragserve_prefix_hit_ratio",
        "gauge",
        "1",
        "Share of prompt tokens found in the cache, since the engine was opened.",
        lambda s: s.prefix_hit_rate,
    ),
    Metric(
        "ragserve.prompt_tokens",
        "ragserve_prompt_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens computed.",
        lambda s: s.prompt_tokens,
    ),
    Metric(
        "ragserve.generated_tokens",
        "ragserve_generated_tokens_total",
        "counter",
        "{token}",
        "Tokens generated.",
        lambda s: s.generated_tokens,
    ),
    Metric(
        "ragserve.steps",
        "ragserve_steps_total",
        "counter",
        "{step}",
        "Steps of the model.",
        lambda s: s.num_steps,
    ),
    Metric(
        "ragserve.preemptions",
        "ragserve_preemptions_total",
        "counter",
        "{preemption}",
        "Sequences that lost their KV blocks to others, and were recomputed.",
        lambda s: s.num_preemptions,
    ),
    Metric(
        "ragserve.sequences.finished",
        "ragserve_finished_sequences_total",
        "counter",
        "{sequence}",
        "Sequences that ended, by finish reason.",
        lambda s: s.num_finished,
        "reason",
        "ragserve.finish_reason",
    ),
    Metric(
        "ragserve.sequences.failed",
        "ragserve_failed_sequences_total",
        "counter",
        "{sequence}",
        "Sequences that ended with finish reason error, by the error's class.",
        lambda s: s.num_errors,
        "error_type",
        Names.ERROR,
    ),
    Metric(
        "ragserve.requests.rejected",
        "ragserve_rejected_requests_total",
        "counter",
        "{request}",
        "Requests that were refused with nothing queued, by the error's class.",
        lambda s: s.num_rejected,
        "error_type",
        Names.ERROR,
    ),
    Metric(
        TIME_TO_FIRST_TOKEN,
        "ragserve_time_to_first_token_seconds",
        "histogram",
        "s",
        "From arrival, before tokenizing, to the first token.",
        lambda s: s.time_to_first_token,
    ),
    Metric(
        TIME_PER_OUTPUT_TOKEN,
        "ragserve_time_per_output_token_seconds",
        "histogram",
        "s",
        "Of each sequence, the mean time of a token after the first.",
        lambda s: s.time_per_output_token,
    ),
    Metric(
        INTER_TOKEN_LATENCY,
        "ragserve_inter_token_latency_seconds",
        "histogram",
        "s",
        "Between two tokens of a sequence.",
        lambda s: s.inter_token_latency,
    ),
    Metric(
        REQUEST_DURATION,
        "ragserve_request_duration_seconds",
        "histogram",
        "s",
        "From arrival to the end, however it ended.",
        lambda s: s.request_duration,
    ),
    Metric(
        QUEUE,
        "ragserve_queue_time_seconds",
        "histogram",
        "s",
        "From arrival to the first step.",
        lambda s: s.queue_time,
    ),
    Metric(
        PREFILL,
        "ragserve_prefill_time_seconds",
        "histogram",
        "s",
        "From the first step to the first token.",
        lambda s: s.prefill_time,
    ),
    Metric(
        DECODE,
        "ragserve_decode_time_seconds",
        "histogram",
        "s",
        "From the first token to the end.",
        lambda s: s.decode_time,
    ),
)

PIPELINE_METRICS: Final[tuple[Metric[PipelineStatistics], ...]] = (
    Metric(
        "ragserve.answers",
        "ragserve_answers_total",
        "counter",
        "{answer}",
        "Answers by outcome: ok, cancelled, abort, or the error's class.",
        lambda s: s.num_answers,
        "outcome",
        "ragserve.outcome",
    ),
    Metric(
        ANSWER_DURATION,
        "ragserve_answer_duration_seconds",
        "histogram",
        "s",
        "From the first read of an answer to its end, however it ended.",
        lambda s: s.duration,
    ),
    Metric(
        EMBEDDING,
        "ragserve_embedding_time_seconds",
        "histogram",
        "s",
        "Embedding the question.",
        lambda s: s.embedding,
    ),
    Metric(
        RETRIEVAL,
        "ragserve_retrieval_time_seconds",
        "histogram",
        "s",
        "Finding chunks.",
        lambda s: s.retrieval,
    ),
    Metric(
        CONTEXT,
        "ragserve_context_time_seconds",
        "histogram",
        "s",
        "Making and tokenizing the prompt.",
        lambda s: s.context,
    ),
    Metric(
        "ragserve.prefill_ahead.answers",
        "ragserve_prefill_ahead_answers_total",
        "counter",
        "{answer}",
        "Answers by what came of computing the beginning of their prompts ahead.",
        lambda s: s.num_ahead,
        "outcome",
        "ragserve.outcome",
    ),
    Metric(
        "ragserve.prefill_ahead.computed_tokens",
        "ragserve_prefill_ahead_computed_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens computed ahead, before the prompts were known.",
        lambda s: s.ahead_computed_tokens,
    ),
    Metric(
        "ragserve.prefill_ahead.found_tokens",
        "ragserve_prefill_ahead_found_tokens_total",
        "counter",
        "{token}",
        "Of the prompt tokens computed ahead, those that their answers found in the cache.",
        lambda s: s.ahead_found_tokens,
    ),
)
