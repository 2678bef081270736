"""Prometheus' text format, version 0.0.4, written without a library.

See https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ragserve.engine import Distribution

__all__ = ["CONTENT_TYPE", "Family", "Kind", "Labels", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind: TypeAlias = Literal["gauge", "counter", "histogram"]
Labels: TypeAlias = Mapping[str, str]

_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(slots=True)
class Family:
    """All series of one name.

    :param name: a counter's ends in `_total`; with its unit, in base units.
    :param samples: values by their labels; of a histogram, distributions.
    """

    name: str
    kind: Kind
    help: str
    samples: list[tuple[Labels, float | Distribution]] = field(default_factory=list)


def exposition(families: Iterable[Family]) -> str:
    """What a scraper reads. A family without samples is left out."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    if family.samples:
        yield f"# HELP {family.name} {family.help.translate(_IN_HELP)}"
        yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
        if isinstance(value, Distribution):
            yield from _histogram(family.name, labels, value)
        else:
            yield _sample(family.name, labels, value)


def _histogram(name: str, labels: Labels, distribution: Distribution) -> Iterator[str]:
    bounds = [*(repr(boundary) for boundary in distribution.boundaries), "+Inf"]
    cumulative = 0
    for bound, count in zip(bounds, distribution.counts, strict=True):
        cumulative += count
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, cumulative)
    yield _sample(f"{name}_sum", labels, distribution.sum)
    yield _sample(f"{name}_count", labels, distribution.count)


def _sample(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{text.translate(_IN_LABEL)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}"
