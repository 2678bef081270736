"""What engines and pipelines do, for OpenTelemetry's metrics and for Prometheus.

    metrics = Metrics(engine, rag)

    async def scrape(request):  # a route of the application
        return Response(metrics.prometheus(), media_type=metrics.content_type)

Both give the same numbers, which are those of `Engine.statistics` and `RagPipeline.statistics`.
Only OpenTelemetry's API is used; a provider is the application's to install, and without
OpenTelemetry there is Prometheus' text alone.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); what those have no name for is under
`ragserve.`. No series is about one request or one tenant, and none quotes what was asked.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from ragserve.engine import (
    Distribution,
    Engine,
    FinishedRequest,
    InvalidParamsError,
    Statistics,
)

from ._version import __version__
from .exposition import CONTENT_TYPE, Family, Kind, exposition
from .pipeline import RagPipeline
from .statistics import FinishedAnswer, PipelineStatistics
from .tracing import PROVIDER, Names

if TYPE_CHECKING:
    from opentelemetry.metrics import (
        CallbackOptions,
        Histogram,
        Meter,
        MeterProvider,
        Observation,
    )

    from ragserve.engine import TierStatistics

__all__ = ["Metrics"]

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
class _Metric(Generic[S]):
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
) -> _Metric[Statistics]:
    """A metric of each tier behind the KV pool."""

    def read(statistics: Statistics) -> dict[str, int]:
        return {tier: of(values) for tier, values in statistics.cache.tiers.items()}

    return _Metric(name, exposed, kind, unit, help, read, "tier", "ragserve.tier")


_OF_TIERS: Final[tuple[_Metric[Statistics], ...]] = (
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

_OF_ENGINE: Final[tuple[_Metric[Statistics], ...]] = (
    _Metric(
        "ragserve.sequences.running",
        "ragserve_running_sequences",
        "gauge",
        "{sequence}",
        "Sequences with a seat in the current steps.",
        lambda s: s.num_running,
    ),
    _Metric(
        "ragserve.sequences.waiting",
        "ragserve_waiting_sequences",
        "gauge",
        "{sequence}",
        "Sequences that wait for a seat.",
        lambda s: s.num_waiting,
    ),
    _Metric(
        "ragserve.kv.usage",
        "ragserve_kv_usage_ratio",
        "gauge",
        "1",
        "Share of the KV blocks that live requests hold.",
        lambda s: s.kv_usage,
    ),
    _Metric(
        "ragserve.kv.blocks",
        "ragserve_kv_blocks",
        "gauge",
        "{block}",
        "KV blocks: used by live requests, cached for later ones, or free. Their sum is all.",
        _blocks,
        "state",
        "ragserve.kv.block.state",
    ),
    _Metric(
        "ragserve.kv.evictions",
        "ragserve_kv_evictions_total",
        "counter",
        "{block}",
        "Cached KV blocks that were given to others.",
        lambda s: s.num_evictions,
    ),
    _Metric(
        "ragserve.prefix.query_tokens",
        "ragserve_prefix_query_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens of all started requests, by kind of segment.",
        lambda s: s.cache.query_tokens,
        "kind",
        "ragserve.segment.kind",
    ),
    _Metric(
        "ragserve.prefix.hit_tokens",
        "ragserve_prefix_hit_tokens_total",
        "counter",
        "{token}",
        "Of the prompt tokens of started requests, those found in the cache.",
        lambda s: s.cache.hit_tokens,
        "kind",
        "ragserve.segment.kind",
    ),
    _Metric(
        "ragserve.prefix.miss_tokens",
        "ragserve_prefix_miss_tokens_total",
        "counter",
        "{token}",
        "Of the prompt tokens of started requests, those not found in the cache, by the reason.",
        lambda s: s.cache.miss_tokens,
        "reason",
        "ragserve.miss_reason",
    ),
    _Metric(
        "ragserve.prefix.awaited_tokens",
        "ragserve_prefix_awaited_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens that were waited for while another request computed them.",
        lambda s: s.cache.awaited_tokens,
    ),
    *_OF_TIERS,
    _Metric(
        "ragserve.prefix.hit_ratio",
        "ragserve_prefix_hit_ratio",
        "gauge",
        "1",
        "Share of prompt tokens found in the cache, since the engine was opened.",
        lambda s: s.prefix_hit_rate,
    ),
    _Metric(
        "ragserve.prompt_tokens",
        "ragserve_prompt_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens computed.",
        lambda s: s.prompt_tokens,
    ),
    _Metric(
        "ragserve.generated_tokens",
        "ragserve_generated_tokens_total",
        "counter",
        "{token}",
        "Tokens generated.",
        lambda s: s.generated_tokens,
    ),
    _Metric(
        "ragserve.steps",
        "ragserve_steps_total",
        "counter",
        "{step}",
        "Steps of the model.",
        lambda s: s.num_steps,
    ),
    _Metric(
        "ragserve.preemptions",
        "ragserve_preemptions_total",
        "counter",
        "{preemption}",
        "Sequences that lost their KV blocks to others, and were recomputed.",
        lambda s: s.num_preemptions,
    ),
    _Metric(
        "ragserve.sequences.finished",
        "ragserve_finished_sequences_total",
        "counter",
        "{sequence}",
        "Sequences that ended, by finish reason.",
        lambda s: s.num_finished,
        "reason",
        "ragserve.finish_reason",
    ),
    _Metric(
        "ragserve.sequences.failed",
        "ragserve_failed_sequences_total",
        "counter",
        "{sequence}",
        "Sequences that ended with finish reason error, by the error's class.",
        lambda s: s.num_errors,
        "error_type",
        Names.ERROR,
    ),
    _Metric(
        "ragserve.requests.rejected",
        "ragserve_rejected_requests_total",
        "counter",
        "{request}",
        "Requests that were refused with nothing queued, by the error's class.",
        lambda s: s.num_rejected,
        "error_type",
        Names.ERROR,
    ),
    _Metric(
        TIME_TO_FIRST_TOKEN,
        "ragserve_time_to_first_token_seconds",
        "histogram",
        "s",
        "From arrival, before tokenizing, to the first token.",
        lambda s: s.time_to_first_token,
    ),
    _Metric(
        TIME_PER_OUTPUT_TOKEN,
        "ragserve_time_per_output_token_seconds",
        "histogram",
        "s",
        "Of each sequence, the mean time of a token after the first.",
        lambda s: s.time_per_output_token,
    ),
    _Metric(
        INTER_TOKEN_LATENCY,
        "ragserve_inter_token_latency_seconds",
        "histogram",
        "s",
        "Between two tokens of a sequence.",
        lambda s: s.inter_token_latency,
    ),
    _Metric(
        REQUEST_DURATION,
        "ragserve_request_duration_seconds",
        "histogram",
        "s",
        "From arrival to the end, however it ended.",
        lambda s: s.request_duration,
    ),
    _Metric(
        QUEUE,
        "ragserve_queue_time_seconds",
        "histogram",
        "s",
        "From arrival to the first step.",
        lambda s: s.queue_time,
    ),
    _Metric(
        PREFILL,
        "ragserve_prefill_time_seconds",
        "histogram",
        "s",
        "From the first step to the first token.",
        lambda s: s.prefill_time,
    ),
    _Metric(
        DECODE,
        "ragserve_decode_time_seconds",
        "histogram",
        "s",
        "From the first token to the end.",
        lambda s: s.decode_time,
    ),
)

_OF_PIPELINE: Final[tuple[_Metric[PipelineStatistics], ...]] = (
    _Metric(
        "ragserve.answers",
        "ragserve_answers_total",
        "counter",
        "{answer}",
        "Answers by outcome: ok, cancelled, abort, or the error's class.",
        lambda s: s.num_answers,
        "outcome",
        "ragserve.outcome",
    ),
    _Metric(
        ANSWER_DURATION,
        "ragserve_answer_duration_seconds",
        "histogram",
        "s",
        "From the first read of an answer to its end, however it ended.",
        lambda s: s.duration,
    ),
    _Metric(
        EMBEDDING,
        "ragserve_embedding_time_seconds",
        "histogram",
        "s",
        "Embedding the question.",
        lambda s: s.embedding,
    ),
    _Metric(
        RETRIEVAL,
        "ragserve_retrieval_time_seconds",
        "histogram",
        "s",
        "Finding chunks.",
        lambda s: s.retrieval,
    ),
    _Metric(
        CONTEXT,
        "ragserve_context_time_seconds",
        "histogram",
        "s",
        "Making and tokenizing the prompt.",
        lambda s: s.context,
    ),
    _Metric(
        "ragserve.prefill_ahead.answers",
        "ragserve_prefill_ahead_answers_total",
        "counter",
        "{answer}",
        "Answers by what came of computing the beginning of their prompts ahead.",
        lambda s: s.num_ahead,
        "outcome",
        "ragserve.outcome",
    ),
    _Metric(
        "ragserve.prefill_ahead.computed_tokens",
        "ragserve_prefill_ahead_computed_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens computed ahead, before the prompts were known.",
        lambda s: s.ahead_computed_tokens,
    ),
    _Metric(
        "ragserve.prefill_ahead.found_tokens",
        "ragserve_prefill_ahead_found_tokens_total",
        "counter",
        "{token}",
        "Of the prompt tokens computed ahead, those that their answers found in the cache.",
        lambda s: s.ahead_found_tokens,
    ),
)


class _Source:
    """An engine or a pipeline, and what its series are called. Does not keep it alive."""

    def __init__(self, source: Engine | RagPipeline, name: str) -> None:
        self.name = name
        self.metrics: tuple[_Metric[Any], ...]
        self.labels: Attributes
        self.attributes: Attributes
        self._listening: tuple[weakref.WeakMethod[Callable[[Any], None]], object] | None = None
        self._reference = weakref.ref(source)
        if isinstance(source, Engine):
            self.metrics = _OF_ENGINE
            self.labels = {"engine": name, "model": source.model_name}
            self.attributes = {
                Names.OPERATION: "chat",
                Names.PROVIDER: PROVIDER,
                Names.MODEL: source.model_name,
                "ragserve.engine.name": name,
            }
        else:
            self.metrics = _OF_PIPELINE
            self.labels = {"pipeline": name}
            self.attributes = {
                Names.OPERATION: "invoke_workflow",
                Names.PROVIDER: PROVIDER,
                Names.WORKFLOW: name,
            }

    def listens(self, remove: Callable[[Any], None], listener: object) -> None:
        """A listener was added for it, which `detach` is to remove."""
        self._listening = weakref.WeakMethod(remove), listener

    def detach(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            reference, listener = self._listening
            if (remove := reference()) is not None:
                remove(listener)

    def get(self) -> Engine | RagPipeline | None:
        """None if nobody else has it any more."""
        return self._reference()

    def read(self, metric: _Metric[Any]) -> Iterator[tuple[str | None, float | Distribution]]:
        """The metric's values, each with its label's value if it has one."""
        source = self.get()
        if source is None or metric not in self.metrics:
            return
        value = metric.read(source.statistics())
        if isinstance(value, Mapping):
            yield from value.items()
        else:
            yield None, value


class Metrics:
    """Gives out what engines and pipelines count and time. Any number of them.

    Their counters go back to when they were opened, OpenTelemetry's histograms to when they were
    added here. It does not keep them alive. From any thread.

    OpenTelemetry's API cannot record a value with a weight. Where several tokens of a sequence
    came together, `ragserve.inter_token_latency` therefore gets one value, their mean, there, and
    one for every token in `prometheus`. Recording takes the engine's thread some 10 µs of each
    delta, if a provider is installed.

    :param sources: engines and pipelines; see `add`.
    :param meter_provider: None is the one the application has installed, if any.
    :param names: one for each source, as in `add`.
    :param inter_token_latency: False leaves that one out of OpenTelemetry's metrics.
    :raises InvalidParamsError: as `add` does, or if names and sources differ in number.
    """

    content_type: Final = CONTENT_TYPE
    """Of `prometheus`."""

    def __init__(
        self,
        *sources: Engine | RagPipeline,
        meter_provider: MeterProvider | None = None,
        names: Sequence[str] | None = None,
        inter_token_latency: bool = True,
    ) -> None:
        if names is not None and len(names) != len(sources):
            raise InvalidParamsError("names", names, f"one for each of {len(sources)} sources")
        self._inter_token_latency = inter_token_latency
        self._lock = threading.Lock()
        # Replaced, never changed: it is walked through in other threads.
        self._sources: tuple[_Source, ...] = ()
        self._closed = False
        self._meter = _meter(meter_provider)
        if self._meter is not None:
            _instruments_of(self._meter).join(self)
        try:
            for index, source in enumerate(sources):
                self.add(source, None if names is None else names[index])
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Metrics of {', '.join(source.name for source in self._sources) or 'nothing'}>"

    def add(self, source: Engine | RagPipeline, name: str | None = None) -> None:
        """Give out an engine's, or a pipeline's, too.

        :param name: tells it from others in their labels. None is the model's name, or the
            pipeline's; with a number, if another has it.
        :raises InvalidParamsError: if it is neither, if it has been added already, or if another
            one has the name.
        """
        if not isinstance(source, Engine | RagPipeline):
            raise InvalidParamsError("source", source, "an Engine or a RagPipeline")
        with self._lock:
            if self._closed:
                raise InvalidParamsError("source", source, "none: these metrics were closed")
            alive = [(known, known.get()) for known in self._sources]
            if any(other is source for _, other in alive):
                raise InvalidParamsError("source", source, "one that was not added before")
            taken = {known.name for known, other in alive if isinstance(other, type(source))}
            if name in taken:
                raise InvalidParamsError("name", name, "one that no other has")
            added = _Source(source, name or _free_name(source, taken))
            if self._meter is not None:
                self._listen(source, added, self._meter)
            self._sources = (*(known for known, other in alive if other is not None), added)

    def prometheus(self) -> str:
        """All of it in Prometheus' text format; serve it as `content_type`."""
        sources = self._sources
        statistics = [(source, alive.statistics()) for source in sources if (alive := source.get())]
        metrics: tuple[_Metric[Any], ...] = (*_OF_ENGINE, *_OF_PIPELINE)
        families = []
        for metric in metrics:
            family = Family(metric.exposed, metric.kind, metric.help)
            for source, values in statistics:
                if metric in source.metrics:
                    _append(family, metric, metric.read(values), source.labels)
            families.append(family)
        return exposition(families)

    def close(self) -> None:
        """Give out nothing any more, and listen to nobody. Idempotent."""
        with self._lock:
            self._closed = True
            sources, self._sources = self._sources, ()
        if self._meter is not None:
            _instruments_of(self._meter).leave(self)
        for source in sources:
            source.detach()

    def observe(self, metric: _Metric[Any]) -> Iterator[tuple[float, Attributes]]:
        """What OpenTelemetry is told of a metric that is not a histogram."""
        for source in self._sources:
            for label, value in source.read(metric):
                if not isinstance(value, Distribution):
                    attributes = source.attributes
                    if label is not None:
                        attributes = {**attributes, metric.attribute: label}
                    yield value, attributes

    def _listen(self, source: Engine | RagPipeline, added: _Source, meter: Meter) -> None:
        instruments = _instruments_of(meter)
        instruments.create(meter, added.metrics, source.statistics())
        histograms, attributes = instruments.histograms, added.attributes
        if isinstance(source, Engine):
            listener = _EngineListener(
                histograms, attributes, inter_token_latency=self._inter_token_latency
            )
            source.add_listener(listener)
            added.listens(source.remove_listener, listener)
        else:
            answer_listener = _AnswerListener(histograms, attributes)
            source.add_listener(answer_listener)
            added.listens(source.remove_listener, answer_listener)


class _EngineListener:
    """An engine's times into OpenTelemetry's histograms."""

    def __init__(
        self,
        histograms: Mapping[str, Histogram],
        attributes: Attributes,
        *,
        inter_token_latency: bool,
    ) -> None:
        self._histograms = histograms
        self._attributes = attributes
        self._between = histograms[INTER_TOKEN_LATENCY] if inter_token_latency else None

    def first_token(self, seconds: float) -> None:
        """See `Listener.first_token`."""
        self._histograms[TIME_TO_FIRST_TOKEN].record(seconds, self._attributes)

    def tokens(self, seconds: float, count: int) -> None:
        """See `Listener.tokens`."""
        if self._between is not None:
            self._between.record(seconds, self._attributes)

    def finished(self, request: FinishedRequest) -> None:
        """See `Listener.finished`."""
        _record_duration(
            self._histograms[REQUEST_DURATION], request.duration, request.error, self._attributes
        )
        times = {
            TIME_PER_OUTPUT_TOKEN: request.time_per_output_token,
            QUEUE: request.queue,
            PREFILL: request.prefill,
            DECODE: request.decode,
        }
        _record_times(self._histograms, times, self._attributes)


class _AnswerListener:
    """A pipeline's times into OpenTelemetry's histograms."""

    def __init__(self, histograms: Mapping[str, Histogram], attributes: Attributes) -> None:
        self._histograms = histograms
        self._attributes = attributes

    def answered(self, answer: FinishedAnswer) -> None:
        """See `AnswerListener.answered`."""
        _record_duration(
            self._histograms[ANSWER_DURATION], answer.duration, answer.error, self._attributes
        )
        times = {
            EMBEDDING: answer.embedding,
            RETRIEVAL: answer.retrieval,
            CONTEXT: answer.context,
        }
        _record_times(self._histograms, times, self._attributes)


class _Instruments:
    """The instruments of one meter. They outlive those whose values they give.

    A meter makes an instrument of a name once: asked again, it gives the old one and never calls
    the new callback. So what it calls asks all who are members by then.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._members: tuple[Metrics, ...] = ()
        self._created: set[str] = set()
        self._lock = threading.Lock()

    def join(self, member: Metrics) -> None:
        """Ask it for values from now on."""
        with self._lock:
            self._members = (*self._members, member)

    def leave(self, member: Metrics) -> None:
        """Do not ask it any more."""
        with self._lock:
            self._members = tuple(other for other in self._members if other is not member)

    def create(self, meter: Meter, metrics: Sequence[_Metric[Any]], example: object) -> None:
        """Make those that are missing.

        :param example: what the metrics read from; it has the boundaries of histograms.
        """
        with self._lock:
            for metric in metrics:
                if metric.name not in self._created:
                    self._created.add(metric.name)
                    self._create(meter, metric, metric.read(example))

    def _create(self, meter: Meter, metric: _Metric[Any], value: Value) -> None:
        about = {"unit": metric.unit, "description": metric.help}
        if isinstance(value, Distribution):
            self.histograms[metric.name] = meter.create_histogram(
                metric.name, **about, explicit_bucket_boundaries_advisory=value.boundaries
            )
        elif metric.kind == "gauge":
            meter.create_observable_gauge(metric.name, [self._callback(metric)], **about)
        else:
            meter.create_observable_counter(metric.name, [self._callback(metric)], **about)

    def _callback(self, metric: _Metric[Any]) -> Callable[[CallbackOptions], list[Observation]]:
        from opentelemetry.metrics import Observation

        return lambda options: [
            Observation(value, attributes)
            for member in self._members
            for value, attributes in member.observe(metric)
        ]


# A meter is the provider's, so what was made with it lives as long.
_instruments: weakref.WeakKeyDictionary[Meter, _Instruments] = weakref.WeakKeyDictionary()
_instruments_lock: Final = threading.Lock()


def _meter(provider: MeterProvider | None) -> Meter | None:
    """None without OpenTelemetry."""
    try:
        from opentelemetry import metrics
    except ImportError:
        return None
    return metrics.get_meter("ragserve", __version__, provider)


def _instruments_of(meter: Meter) -> _Instruments:
    with _instruments_lock:
        return _instruments.setdefault(meter, _Instruments())


def _append(family: Family, metric: _Metric[Any], value: Value, labels: Attributes) -> None:
    if isinstance(value, Mapping):
        for label, number in value.items():
            family.samples.append(({**labels, metric.label: label}, number))
    else:
        family.samples.append((labels, value))


def _record_times(
    histograms: Mapping[str, Histogram],
    times: Mapping[str, float | None],
    attributes: Attributes,
) -> None:
    """Those that there are."""
    for name, seconds in times.items():
        if seconds is not None:
            histograms[name].record(seconds, attributes)


def _record_duration(
    histogram: Histogram, seconds: float, error: str | None, attributes: Attributes
) -> None:
    if error is not None:
        attributes = {**attributes, Names.ERROR: error}
    histogram.record(seconds, attributes)


def _free_name(source: Engine | RagPipeline, taken: set[str]) -> str:
    base = source.model_name if isinstance(source, Engine) else source.name
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)
