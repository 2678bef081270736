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
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from ragserve.engine import (
    Distribution,
    Engine,
    InvalidParamsError,
)

from .exposition import CONTENT_TYPE, Family, exposition
from .histograms import AnswerHistograms, EngineHistograms
from .instruments import instruments_of, meter_of
from .metric_table import ENGINE_METRICS, PIPELINE_METRICS, Attributes, Metric, Value
from .names import PROVIDER, Names
from .statistics import AnswerListener, PipelineStatistics

if TYPE_CHECKING:
    from opentelemetry.metrics import (
        Meter,
        MeterProvider,
    )


__all__ = ["AnswerSource", "Metrics"]


@runtime_checkable
class AnswerSource(Protocol):
    """What is counted of answers: a `RagPipeline`."""

    @property
    def name(self) -> str:
        """What traces and metrics call it."""

    def statistics(self) -> PipelineStatistics:
        """Counts and times of all answers that have ended."""

    def add_listener(self, listener: AnswerListener) -> None:
        """Tell it of every answer that ends from now on."""

    def remove_listener(self, listener: AnswerListener) -> None:
        """Tell it no more. Idempotent."""


class _Source:
    """An engine or a pipeline, and what its series are called. Does not keep it alive."""

    def __init__(self, source: Engine | AnswerSource, name: str) -> None:
        self.name = name
        self.metrics: tuple[Metric[Any], ...]
        self.labels: Attributes
        self.attributes: Attributes
        self._listening: tuple[weakref.WeakMethod[Callable[[Any], None]], object] | None = None
        self._reference = weakref.ref(source)
        if isinstance(source, Engine):
            self.metrics = ENGINE_METRICS
            self.labels = {"engine": name, "model": source.model_name}
            self.attributes = {
                Names.OPERATION: "chat",
                Names.PROVIDER: PROVIDER,
                Names.MODEL: source.model_name,
                "ragserve.engine.name": name,
            }
        else:
            self.metrics = PIPELINE_METRICS
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

    def get(self) -> Engine | AnswerSource | None:
        """None if nobody else has it any more."""
        return self._reference()

    def read(self, metric: Metric[Any]) -> Iterator[tuple[str | None, float | Distribution]]:
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
        *sources: Engine | AnswerSource,
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
        self._meter = meter_of(meter_provider)
        if self._meter is not None:
            instruments_of(self._meter).join(self)
        try:
            for index, source in enumerate(sources):
                self.add(source, None if names is None else names[index])
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Metrics of {', '.join(source.name for source in self._sources) or 'nothing'}>"

    def add(self, source: Engine | AnswerSource, name: str | None = None) -> None:
        """Give out an engine's, or a pipeline's, too.

        :param name: tells it from others in their labels. None is the model's name, or the
            pipeline's; with a number, if another has it.
        :raises InvalidParamsError: if it is neither, if it has been added already, or if another
            one has the name.
        """
        if not isinstance(source, Engine | AnswerSource):
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
        metrics: tuple[Metric[Any], ...] = (*ENGINE_METRICS, *PIPELINE_METRICS)
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
            instruments_of(self._meter).leave(self)
        for source in sources:
            source.detach()

    def observe(self, metric: Metric[Any]) -> Iterator[tuple[float, Attributes]]:
        """What OpenTelemetry is told of a metric that is not a histogram."""
        for source in self._sources:
            for label, value in source.read(metric):
                if not isinstance(value, Distribution):
                    attributes = source.attributes
                    if label is not None:
                        attributes = {**attributes, metric.attribute: label}
                    yield value, attributes

    def _listen(self, source: Engine | AnswerSource, added: _Source, meter: Meter) -> None:
        instruments = instruments_of(meter)
        instruments.create(meter, added.metrics, source.statistics())
        histograms, attributes = instruments.histograms, added.attributes
        if isinstance(source, Engine):
            listener = EngineHistograms(
                histograms, attributes, inter_token_latency=self._inter_token_latency
            )
            source.add_listener(listener)
            added.listens(source.remove_listener, listener)
        else:
            answer_listener = AnswerHistograms(histograms, attributes)
            source.add_listener(answer_listener)
            added.listens(source.remove_listener, answer_listener)


def _append(family: Family, metric: Metric[Any], value: Value, labels: Attributes) -> None:
    if isinstance(value, Mapping):
        for label, number in value.items():
            family.samples.append(({**labels, metric.label: label}, number))
    else:
        family.samples.append((labels, value))


def _free_name(source: Engine | AnswerSource, taken: set[str]) -> str:
    base = source.model_name if isinstance(source, Engine) else source.name
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)
