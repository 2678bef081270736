"""How long the cached blocks of a segment are kept."""

from __future__ import annotations

from dataclasses import dataclass

from ..prompt import Retention

__all__ = ["NO_RETENTION", "RetentionPolicy"]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How long a segment's cached blocks are to be kept.

    :param retention: the class they are kept in.
    :param seconds: how long after each use that holds; None is for ever.
    :param otherwise: the class after that.
    """

    retention: Retention
    seconds: float | None = None
    otherwise: Retention = Retention.ANSWER


NO_RETENTION = RetentionPolicy(Retention.ANSWER)
"""Of what no segment asks to be kept: an answer's blocks."""
