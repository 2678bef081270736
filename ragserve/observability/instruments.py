"""OpenTelemetry's instruments, made once a meter."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ragserve.engine import Distribution

from .._version import __version__
from .metric_table import Metric, Value

if TYPE_CHECKING:
    from opentelemetry.metrics import (
        CallbackOptions,
        Histogram,
        Meter,
        MeterProvider,
        Observation,
    )


__all__ = ["Instruments", "Observed", "instruments_of", "meter_of"]


class Observed(Protocol):
    """Who has values of metrics: a `Metrics`."""

    def observe(self, metric: Metric[Any]) -> Iterator[tuple[float, Mapping[str, str]]]:
        """Every value of a metric that is no histogram, with its attributes."""


class Instruments:
    """The instruments of one meter. They outlive those whose values they give.

    A meter makes an instrument of a name once: asked again, it gives the old one and never calls
    the new callback. So what it calls asks all who are members by then.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._members: tuple[Observed, ...] = ()
        self._created: set[str] = set()
        self._lock = threading.Lock()

    def join(self, member: Observed) -> None:
        """Ask it for values from now on."""
        with self._lock:
            self._members = (*self._members, member)

    def leave(self, member: Observed) -> None:
        """Do not ask it any more."""
        with self._lock:
            self._members = tuple(other for other in self._members if other is not member)

    def create(self, meter: Meter, metrics: Sequence[Metric[Any]], example: object) -> None:
        """Make those that are missing.

        :param example: what the metrics read from; it has the boundaries of histograms.
        """
        with self._lock:
            for metric in metrics:
                if metric.name not in self._created:
                    self._created.add(metric.name)
                    self._create(meter, metric, metric.read(example))

    def _create(self, meter: Meter, metric: Metric[Any], value: Value) -> None:
        about = {"unit": metric.unit, "description": metric.help}
        if isinstance(value, Distribution):
            self.histograms[metric.name] = meter.create_histogram(
                metric.name, **about, explicit_bucket_boundaries_advisory=value.boundaries
            )
        elif metric.kind == "gauge":
            meter.create_observable_gauge(metric.name, [self._callback(metric)], **about)
        else:
            meter.create_observable_counter(metric.name, [self._callback(metric)], **about)

    def _callback(self, metric: Metric[Any]) -> Callable[[CallbackOptions], list[Observation]]:
        from opentelemetry.metrics import Observation

        return lambda options: [
            Observation(value, attributes)
            for member in self._members
            for value, attributes in member.observe(metric)
        ]


# A meter is the provider's, so what was made with it lives as long.
_instruments: weakref.WeakKeyDictionary[Meter, Instruments] = weakref.WeakKeyDictionary()
_instruments_lock: Final = threading.Lock()


def meter_of(provider: MeterProvider | None) -> Meter | None:
    """None without OpenTelemetry."""
    try:
        from opentelemetry import metrics
    except ImportError:
        return None
    return metrics.get_meter("ragserve", __version__, provider)


def instruments_of(meter: Meter) -> Instruments:
    with _instruments_lock:
        return _instruments.setdefault(meter, Instruments())
