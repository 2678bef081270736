"""What a pipeline counts and times, over all its answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ragserve.engine import STAGE_BOUNDARIES, Distribution, Histogram, Listeners

from .records import AheadOutcome, AheadRecord

__all__ = ["AnswerListener", "FinishedAnswer", "PipelineRecorder", "PipelineStatistics"]

# Those that OpenTelemetry's conventions for generative AI name for a workflow, which may take
# hours, and finer ones below, where answers are.
_ANSWER: Final = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0),
)


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """What a pipeline has answered, and how long it took. Distributions are of seconds.

    Answers that failed or were cancelled are counted and timed like all others, up to where they
    came. What the engine did is in `Engine.statistics`.
    """

    num_answers: dict[str, int]
    """By outcome: ok, cancelled (by who asked), abort (by its id), or the error's class."""
    duration: Distribution
    """From the first read of the stream to the answer's end."""
    embedding: Distribution
    """Of the question; empty if nothing is embedded."""
    retrieval: Distribution
    """Finding chunks."""
    context: Distribution
    """Making and tokenizing the prompt."""
    num_ahead: dict[AheadOutcome, int] = field(default_factory=dict)
    """Answers by what came of computing the beginning of their prompts ahead (see
    `ragserve.observability.AheadOutcome`); those that were to do so."""
    ahead_computed_tokens: int = 0
    """Prompt tokens computed ahead."""
    ahead_found_tokens: int = 0
    """Of those, found in the cache by the answers that they were computed for."""


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """How one answer went. Times in seconds; None did not happen.

    :param outcome: as in `PipelineStatistics.num_answers`.
    """

    outcome: str
    duration: float
    embedding: float | None
    retrieval: float | None
    context: float | None

    @property
    def error(self) -> str | None:
        """The outcome, unless it is a success."""
        return None if self.outcome == "ok" else self.outcome


class AnswerListener(Protocol):
    """Told of what a pipeline does. One that raises is not told any more."""

    def answered(self, answer: FinishedAnswer) -> None:
        """An answer ended. Called in its event loop: be quick, never block."""


class PipelineRecorder:
    """Writes down how answers went, and tells listeners. From any thread."""

    def __init__(self) -> None:
        self.listeners: Listeners[AnswerListener] = Listeners()
        # Reentrant: an answer may be garbage-collected, and recorded, at any moment.
        self._lock = threading.RLock()
        self._num_answers: dict[str, int] = {"ok": 0, "cancelled": 0}
        self._num_ahead: dict[AheadOutcome, int] = {}
        self._ahead_computed = self._ahead_found = 0
        self._duration = Histogram(_ANSWER)
        self._stages = {
            name: Histogram(STAGE_BOUNDARIES) for name in ("embedding", "retrieval", "context")
        }

    def answered(
        self,
        stages: Sequence[tuple[str, int, int]],
        error: str | None,
        ahead: Sequence[AheadRecord] = (),
        ahead_outcome: AheadOutcome | None = None,
    ) -> None:
        """An answer ended; one that had not begun is none.

        :param stages: `(stage, start, end)` in nanoseconds, without gaps.
        :param error: OpenTelemetry's `error.type`, if it was no success.
        :param ahead: what was computed before its prompt was known.
        :param ahead_outcome: what came of that; None if it is switched off.
        """
        if not stages:
            return
        seconds = {name: (end - start) / 1e9 for name, start, end in stages}
        record = FinishedAnswer(
            outcome="ok" if error is None else error.rpartition(".")[2],
            duration=(stages[-1][2] - stages[0][1]) / 1e9,
            embedding=seconds.get("embedding"),
            retrieval=seconds.get("retrieval"),
            context=seconds.get("context"),
        )
        with self._lock:
            self._num_answers[record.outcome] = self._num_answers.get(record.outcome, 0) + 1
            if ahead_outcome is not None:
                self._num_ahead[ahead_outcome] = self._num_ahead.get(ahead_outcome, 0) + 1
            self._ahead_computed += sum(guess.computed_tokens for guess in ahead)
            self._ahead_found += sum(guess.found_tokens for guess in ahead)
            self._duration.observe(record.duration)
            for name, histogram in self._stages.items():
                if name in seconds:
                    histogram.observe(seconds[name])
        self.listeners.tell(lambda listener: listener.answered(record))

    def statistics(self) -> PipelineStatistics:
        """What has been recorded until now."""
        return PipelineStatistics(
            num_answers=dict(self._num_answers),
            num_ahead=dict(self._num_ahead),
            ahead_computed_tokens=self._ahead_computed,
            ahead_found_tokens=self._ahead_found,
            duration=self._duration.read(),
            **{name: histogram.read() for name, histogram in self._stages.items()},
        )
