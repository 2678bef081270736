"""A closed loop of clients, and the figures of what they saw."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from .workloads import BenchRequest

__all__ = ["Figures", "Record", "closed_loop", "figures"]


@dataclass(slots=True)
class Record:
    """What one client saw of one request. Seconds of `time.perf_counter`."""

    started: float
    times: list[float] = field(default_factory=list)
    """Arrival of each token."""
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers. Percentiles are over requests (TTFT) and over gaps between tokens (ITL)."""

    requests: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    wrong_length: int
    """Requests that gave another number of tokens than was asked for."""


async def closed_loop(
    stream: Callable[[BenchRequest], AsyncIterator[Sequence[int]]],
    requests: Sequence[BenchRequest],
    concurrency: int,
) -> dict[int, Record]:
    """Run `requests` in order with `concurrency` clients, each starting the next when one ends.

    :param stream: gives a request's new token ids as they come.
    """
    todo = iter(requests)
    records: dict[int, Record] = {}

    async def client() -> None:
        for request in todo:
            record = records[request.id] = Record(time.perf_counter())
            async for token_ids in stream(request):
                record.times.extend([time.perf_counter()] * len(token_ids))
                record.token_ids.extend(token_ids)

    async with anyio.create_task_group() as clients:
        for _ in range(concurrency):
            clients.start_soon(client)
    return records


def figures(requests: Sequence[BenchRequest], records: dict[int, Record]) -> Figures:
    """Reduce a run's records; failed requests count, with the tokens they gave."""
    seconds = max(r.times[-1] for r in records.values() if r.times) - min(
        r.started for r in records.values()
    )
    output = sum(len(r.token_ids) for r in records.values())
    prompt = sum(len(request.prompt) for request in requests)
    ttft = [r.times[0] - r.started for r in records.values() if r.times]
    itl = [b - a for r in records.values() for a, b in zip(r.times, r.times[1:], strict=False)]
    return Figures(
        requests=len(requests),
        seconds=seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(output + prompt) / seconds,
        ttft_p50_ms=1e3 * _percentile(ttft, 0.5),
        ttft_p95_ms=1e3 * _percentile(ttft, 0.95),
        itl_p50_ms=1e3 * _percentile(itl, 0.5),
        itl_p95_ms=1e3 * _percentile(itl, 0.95),
        wrong_length=sum(len(records[r.id].token_ids) != r.output_tokens for r in requests),
    )


def _percentile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * q
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
