"""Times of requests and answers into OpenTelemetry's histograms, as they end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ragserve.engine import FinishedRequest

from .metric_table import (
    ANSWER_DURATION,
    CONTEXT,
    DECODE,
    EMBEDDING,
    INTER_TOKEN_LATENCY,
    PREFILL,
    QUEUE,
    REQUEST_DURATION,
    RETRIEVAL,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Attributes,
)
from .names import Names
from .statistics import FinishedAnswer

if TYPE_CHECKING:
    from opentelemetry.metrics import (
        Histogram,
    )


__all__ = ["AnswerHistograms", "EngineHistograms"]


class EngineHistograms:
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


class AnswerHistograms:
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
