"""What engines and pipelines count and time, and that it is the same wherever it is given out."""

from __future__ import annotations

import gc
import math
import re
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

import ragserve as rs
from ragserve import Distribution, Engine, Metrics, RagPipeline, SamplingParams, Statistics
from ragserve.documents import Chunk
from ragserve.engine import FinishedRequest, Histogram, StepPlan, TierStatistics
from ragserve.observability.exposition import Family, exposition
from ragserve.retrieval import FaissIndex
from ragserve.testing import ScriptedFailure, ScriptedModel

pytestmark = pytest.mark.anyio

REPLY = "An answer of thirty-two letters."
AHEAD = [(1, 1), (1, 8), (2, 1), (2, 8)]
SECRET = "the prompt nobody else may read"
TENANT = "tenant-of-the-test"
STAGES = ("queue", "prefill", "decode")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Reader:
    """What a provider of its own would export."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        metrics = [
            metric
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        assert len({metric.name for metric in metrics}) == len(metrics)
        return {metric.name: list(metric.data.data_points) for metric in metrics}


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[tuple[float, int]] = []
        self.ended: list[FinishedRequest] = []

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        self.gaps.append((seconds, count))

    def finished(self, request: FinishedRequest) -> None:
        self.ended.append(request)


class Broken(Heard):
    """One that fails when it is told of something."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.calls = 0
        setattr(self, at, self.fail)

    def fail(self, *args: object) -> None:
        self.calls += 1
        raise RuntimeError("a listener's own failure")


class Ones:
    """An embedder; it does what it is told before."""

    model_name = "ones"
    dimension: int | None = 4

    def __init__(self) -> None:
        self.on_query: Callable[[], Awaitable[object]] | None = None

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        if kind == "query" and self.on_query is not None:
            await self.on_query()
        return np.full((len(texts), 4), 0.5, np.float32)


class Texts:
    """A retriever that takes text: nothing is embedded."""

    name = "texts"

    async def retrieve(self, query: Any, *, top_k: int, filter: Any = None) -> list[Any]:
        return []


async def pipeline(engine: Engine, embedder: Ones | None = None, **options: Any) -> RagPipeline:
    index = FaissIndex(embedder or Ones())
    await index.add([Chunk("c0", "d", "a document"), Chunk("c1", "d", "another")])
    return RagPipeline(engine=engine, index=index, top_k=2, **options)


def observed(values: Iterable[float], like: Distribution) -> Distribution:
    """The distribution of these values, counted without the code under test."""
    values = list(values)
    bounds = (-math.inf, *like.boundaries, math.inf)
    counts = [sum(low < value <= high for value in values) for low, high in pairwise(bounds)]
    return Distribution(like.boundaries, tuple(counts), math.fsum(values), len(values))


def check_equal(found: Distribution, values: Iterable[float]) -> None:
    expected = observed(values, found)
    assert found.counts == expected.counts
    assert found.count == expected.count == sum(found.counts)
    assert found.sum == pytest.approx(expected.sum)


def parse(text: str) -> dict[str, Any]:
    """Each family once, by name; the parser refuses what is not the format."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    """The one sample with these labels, among others."""
    family = families[re.sub("_(total|sum|count)$", "", name)]
    found = [
        sample.value
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def distribution(families: dict[str, Any], name: str, **labels: str) -> Distribution:
    samples = [s for s in families[name].samples if labels.items() <= s.labels.items()]
    buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name == f"{name}_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1][0] == math.inf
    cumulative = [0, *(int(count) for _, count in buckets)]
    return Distribution(
        tuple(bound for bound, _ in buckets[:-1]),
        tuple(after - before for before, after in pairwise(cumulative)),
        value(families, f"{name}_sum", **labels),
        int(value(families, f"{name}_count", **labels)),
    )


# -- distributions ----------------------------------------------------------------------


def test_a_histogram_counts_values_up_to_each_boundary() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for number, count in ((0.5, 1), (1.0, 1), (1.5, 3), (4.0, 2), (9.0, 1)):
        histogram.observe(number, count)
    read = histogram.read()
    assert read == Distribution((1.0, 2.0, 4.0), (2, 3, 2, 1), 0.5 + 1.0 + 4.5 + 8.0 + 9.0, 8)
    assert read.mean == pytest.approx(23 / 8)
    histogram.observe(1.0)
    assert read.count == 8  # what was read stays as it was


def test_quantiles_lie_evenly_in_their_bucket() -> None:
    read = Distribution((1.0, 2.0, 4.0), (2, 0, 2, 0), 7.0, 4)
    assert [read.quantile(q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 3.0, 4.0]
    above = Distribution((1.0, 2.0), (0, 0, 5), 50.0, 5)
    assert above.quantile(0.5) == 2.0  # nothing more is known
    assert above.mean == 10.0
    empty = Histogram((1.0, 2.0)).read()
    assert (empty.count, empty.mean, empty.quantile(0.9)) == (0, 0.0, 0.0)
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(rs.InvalidParamsError, match="from 0 to 1"):
            read.quantile(q)


def test_quantiles_are_off_by_a_bucket_at_most() -> None:
    random, histogram = Random(5), Histogram(tuple(k / 10 for k in range(1, 40)))
    values = sorted(random.gauss(1.5, 0.5) ** 2 / 2 for _ in range(5000))
    for number in values:
        histogram.observe(number)
    read = histogram.read()
    quantiles = [read.quantile(q / 100) for q in range(101)]
    assert quantiles == sorted(quantiles)
    for q in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert read.quantile(q) == pytest.approx(values[int(q * 5000)], abs=0.1)


# -- an engine --------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "steps"), AHEAD)
async def test_times_are_those_of_the_streams(depth: int, steps: int) -> None:
    model = ScriptedModel(REPLY, depth=depth, max_decode_steps=steps, step_seconds=0.001)
    completions: list[rs.Completion] = []
    async with Engine.open(model, max_num_seqs=4) as engine:
        heard = Heard()
        engine.add_listener(heard)

        async def ask(number: int) -> None:
            params = SamplingParams(max_tokens=1 + 3 * number)
            completions.append(await engine.generate([number] * 40, params))

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(ask, number)
        statistics = engine.statistics()
    timings = [completion.timings for completion in completions]
    tokens = [completion.usage.completion_tokens for completion in completions]
    check_equal(statistics.request_duration, [t.total for t in timings])
    check_equal(statistics.queue_time, [t.queue for t in timings])
    check_equal(statistics.prefill_time, [t.prefill for t in timings])
    check_equal(statistics.decode_time, [t.decode for t in timings])
    first = [t.time_to_first_token for t in timings]
    check_equal(statistics.time_to_first_token, [f for f in first if f is not None])
    per_token = [t.time_per_output_token for t in timings]
    check_equal(statistics.time_per_output_token, [p for p in per_token if p is not None])
    # One for every token but the first; together the time from the first to the last.
    between = statistics.inter_token_latency
    assert between.count == sum(tokens) - len(tokens) == statistics.generated_tokens - len(tokens)
    spans = [(p or 0.0) * (n - 1) for p, n in zip(per_token, tokens, strict=True)]
    assert between.sum == pytest.approx(sum(spans))
    assert statistics.num_finished == {"stop": 1, "length": 11, "abort": 0, "error": 0}

    check_equal(statistics.time_to_first_token, heard.first)
    check_equal(between, [s for s, count in heard.gaps for _ in range(count)])
    check_equal(statistics.request_duration, [r.duration for r in heard.ended])
    assert sorted(r.generated_tokens for r in heard.ended) == sorted(tokens)
    for record in heard.ended:
        stages = (record.queue, record.prefill or 0.0, record.decode or 0.0)
        assert sum(stages) == pytest.approx(record.duration)
    if steps > 1:  # it was tried that several come at a time
        assert any(count > 1 for _, count in heard.gaps)


async def test_every_choice_is_a_sequence() -> None:
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        await engine.generate("Why?", SamplingParams(n=3, max_tokens=5))
        statistics = engine.statistics()
    assert statistics.num_finished["length"] == 3
    assert statistics.time_to_first_token.count == statistics.request_duration.count == 3
    assert statistics.inter_token_latency.count == 3 * 4


async def test_preempted_sequences_are_timed_through() -> None:
    model = ScriptedModel("x" * 60, num_blocks=10, max_model_len=100)
    async with Engine.open(model, block_size=4, max_num_seqs=3, max_num_batched_tokens=16) as e:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(e.generate, [number] * 9, SamplingParams(max_tokens=16))
        statistics = e.statistics()
    assert statistics.num_preemptions > 0
    assert statistics.generated_tokens == 4 * 16
    assert statistics.inter_token_latency.count == 4 * 15
    assert statistics.time_to_first_token.count == 4
    total = statistics.queue_time.sum + statistics.prefill_time.sum + statistics.decode_time.sum
    assert total == pytest.approx(statistics.request_duration.sum)


def failing(tokens: list[int]) -> int:
    """Fails after three tokens, if the prompt begins with 7."""
    if tokens[0] == 7 and len(tokens) == 7:
        raise LookupError(SECRET)
    return 65


async def test_whoever_does_not_finish_is_counted_and_timed_too() -> None:
    async with Engine.open(ScriptedModel(failing)) as engine:
        await engine.generate([1, 2, 3, 4], SamplingParams(max_tokens=4))
        with pytest.raises(LookupError):
            await engine.generate([7, 2, 3, 4], SamplingParams(max_tokens=9))
        async with engine.stream([1, 2, 3], SamplingParams(max_tokens=4000)) as stream:
            await anext(stream)
        while engine.statistics().num_running:
            await anyio.sleep(0.001)
        statistics = engine.statistics()
    assert statistics.num_finished == {"stop": 0, "length": 1, "abort": 1, "error": 1}
    assert statistics.num_errors == {"LookupError": 1}
    assert statistics.num_rejected == {}
    assert statistics.request_duration.count == statistics.queue_time.count == 3
    assert statistics.time_to_first_token.count == statistics.decode_time.count == 3
    assert statistics.inter_token_latency.count == statistics.generated_tokens - 3


async def test_who_waits_in_vain_has_a_queue_time_and_nothing_else() -> None:
    slow = ScriptedModel("x" * 4000, step_seconds=0.001)
    # The buffer is larger than the answer, or the one that runs would pause and give up its seat.
    options = {"max_num_seqs": 1, "queue_timeout": 0.5, "stream_buffer_tokens": 4000}
    async with Engine.open(slow, **options) as engine:
        heard = Heard()
        engine.add_listener(heard)
        async with engine.stream([1, 2], SamplingParams(max_tokens=4000)) as stream:
            await anext(stream)
            with pytest.raises(rs.QueueTimeoutError):
                await engine.generate([3, 4])
            statistics = engine.statistics()
    assert statistics.num_errors == {"QueueTimeoutError": 1}
    assert statistics.time_to_first_token.count == 1  # the other's
    assert statistics.prefill_time.count == statistics.decode_time.count == 0
    assert statistics.queue_time.count == 1
    assert statistics.queue_time.sum == pytest.approx(statistics.request_duration.sum)
    assert statistics.queue_time.sum >= 0.5
    timed_out = heard.ended[0]
    assert (timed_out.finish_reason, timed_out.error) == ("error", "QueueTimeoutError")
    assert timed_out.prefill is timed_out.decode is timed_out.time_per_output_token is None


async def test_refused_requests_are_counted_apart() -> None:
    gate = threading.Event()

    def on_step(plan: StepPlan) -> None:
        if len(model.plans) > 1:
            assert gate.wait(60)

    model = ScriptedModel("x" * 90, on_step=on_step, max_model_len=100)
    async with (
        Engine.open(model, max_num_seqs=1, max_queued_requests=1) as engine,
        engine.stream([1, 2], SamplingParams(max_tokens=90)) as running,
    ):
        await anext(running)  # it has the only seat, so the next one waits
        refused = engine.stream([1, -5])
        for _ in range(2):  # it was refused once, however often that is looked at
            with pytest.raises(rs.InvalidParamsError):
                await anext(refused)
        async with engine.stream([3, 4], SamplingParams(max_tokens=1)):
            for _ in range(2):
                with pytest.raises(rs.QueueFullError):
                    await engine.generate([5, 6])
            with pytest.raises(rs.PromptTooLongError):
                await engine.generate([1] * 100)
            engine.begin_drain()
            with pytest.raises(rs.EngineClosedError):
                await engine.generate([1])
            statistics = engine.statistics()
            gate.set()
    assert statistics.num_rejected == {
        "QueueFullError": 2,
        "PromptTooLongError": 1,
        "InvalidParamsError": 1,
        "EngineClosedError": 1,
    }
    assert sum(statistics.num_finished.values()) == statistics.request_duration.count == 0
    assert statistics.num_errors == {}


async def test_a_dead_engine_counts_what_it_failed() -> None:
    engine = await Engine.open(ScriptedModel(REPLY, fail_at_step=3))
    try:
        with pytest.raises(rs.EngineDeadError):
            await engine.generate([1, 2, 3])
        with pytest.raises(rs.EngineDeadError):
            await engine.generate([1, 2, 3])
        statistics = engine.statistics()
        assert isinstance(engine.health().error, ScriptedFailure)
    finally:
        engine.terminate()
    assert statistics.num_errors == statistics.num_rejected == {"EngineDeadError": 1}
    assert statistics.num_finished["error"] == statistics.request_duration.count == 1
    assert statistics.inter_token_latency.count == statistics.generated_tokens - 1 == 2


async def test_hits_are_counted() -> None:
    async with Engine.open(ScriptedModel(REPLY), block_size=4) as engine:
        heard = Heard()
        engine.add_listener(heard)
        for _ in range(2):
            await engine.generate(list(range(1, 14)), SamplingParams(max_tokens=2))
        statistics = engine.statistics()
    assert statistics.prefix_query_tokens == 26
    assert statistics.prefix_hit_tokens == 12
    assert statistics.prompt_tokens == 14
    assert [record.cached_tokens for record in heard.ended] == [0, 12]
    assert [record.prompt_tokens for record in heard.ended] == [13, 13]


@pytest.mark.parametrize("at", ["first_token", "tokens", "finished"])
async def test_a_listener_that_fails_is_dropped_and_nothing_else(
    at: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        broken, heard = Broken(at), Heard()
        engine.add_listener(broken)
        engine.add_listener(heard)
        for _ in range(3):
            completion = await engine.generate("Why?")
            assert completion.text == REPLY
        assert engine.health().ok
        assert engine.statistics().num_finished["stop"] == 3
    assert broken.calls == 1
    assert len(heard.first) == len(heard.ended) == 3
    assert [record.name for record in caplog.records if record.levelname == "ERROR"] == ["ragserve"]


async def test_listeners_come_and_go_while_it_runs() -> None:
    heard, other = Heard(), Heard()

    def on_step(plan: StepPlan) -> None:
        # In the engine's thread, with a request half-way.
        if len(model.plans) == 3:
            engine.remove_listener(heard)

    model = ScriptedModel("abcdef", on_step=on_step)
    async with Engine.open(model) as engine:
        engine.add_listener(heard)
        engine.add_listener(heard)  # once is enough
        engine.add_listener(other)
        await engine.generate("Why?")
        engine.remove_listener(heard)
        engine.remove_listener(Heard())
    assert len(heard.first) == len(other.first) == 1
    assert not heard.ended
    assert len(other.ended) == 1


# -- a pipeline -------------------------------------------------------------------------


async def test_a_pipeline_times_its_stages() -> None:
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        rag = await pipeline(engine)
        answers = [await rag.answer(question) for question in ("one?", "two?", "three?")]
        statistics = rag.statistics()
    assert statistics.num_answers == {"ok": 3, "cancelled": 0}
    check_equal(statistics.duration, [a.timings.total for a in answers])
    check_equal(statistics.embedding, [a.timings.embedding for a in answers])
    check_equal(statistics.retrieval, [a.timings.retrieval for a in answers])
    check_equal(statistics.context, [a.timings.context for a in answers])


async def test_a_pipeline_counts_every_outcome() -> None:
    embedder = Ones()
    async with Engine.open(ScriptedModel("x" * 4000, max_model_len=8000)) as engine:
        rag = await pipeline(engine, embedder, params=SamplingParams(max_tokens=8))

        async def fail() -> None:
            raise rs.EmbeddingError(SECRET)

        async def wait() -> None:
            await anyio.sleep_forever()

        embedder.on_query = fail
        with pytest.raises(rs.EmbeddingError):
            await rag.answer("fails")
        embedder.on_query = wait
        with anyio.move_on_after(0.01):
            await rag.answer("is cancelled")
        embedder.on_query = None
        async with rag.stream("is left", params=SamplingParams(max_tokens=3000)) as answer:
            await anext(answer)
        async with rag.stream("is never read"):
            pass
        await rag.answer("is answered")
        dropped = rag.stream("is dropped", params=SamplingParams(max_tokens=3000))
        await anext(dropped)
        del dropped, answer
        gc.collect()
        with anyio.fail_after(60):
            while rag.statistics().num_answers["cancelled"] < 3:
                await anyio.sleep(0.001)
        statistics = rag.statistics()
    assert statistics.num_answers == {"ok": 1, "cancelled": 3, "EmbeddingError": 1}
    assert statistics.duration.count == statistics.embedding.count == 5
    assert statistics.retrieval.count == statistics.context.count == 3


async def test_a_pipeline_that_embeds_nothing_has_no_time_of_it() -> None:
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        rag = RagPipeline(engine=engine, index=Texts())
        answer = await rag.answer("Why?")
        statistics = rag.statistics()
    assert statistics.embedding.count == 0
    assert statistics.retrieval.count == 1
    check_equal(statistics.duration, [answer.timings.total])


# -- metrics ----------------------------------------------------------------------------

ENGINE_HISTOGRAMS = {
    "time_to_first_token": "gen_ai.server.time_to_first_token",
    "time_per_output_token": "gen_ai.server.time_per_output_token",
    "request_duration": "gen_ai.server.request.duration",
    "inter_token_latency": "ragserve.inter_token_latency",
    "queue_time": "ragserve.queue_time",
    "prefill_time": "ragserve.prefill_time",
    "decode_time": "ragserve.decode_time",
}
ENGINE_NUMBERS = {
    "ragserve_running_sequences": ("ragserve.sequences.running", "num_running"),
    "ragserve_waiting_sequences": ("ragserve.sequences.waiting", "num_waiting"),
    "ragserve_kv_usage_ratio": ("ragserve.kv.usage", "kv_usage"),
    "ragserve_kv_evictions_total": ("ragserve.kv.evictions", "num_evictions"),
    "ragserve_prefix_awaited_tokens_total": (
        "ragserve.prefix.awaited_tokens",
        "cache.awaited_tokens",
    ),
    "ragserve_prefix_hit_ratio": ("ragserve.prefix.hit_ratio", "prefix_hit_rate"),
    "ragserve_prompt_tokens_total": ("ragserve.prompt_tokens", "prompt_tokens"),
    "ragserve_generated_tokens_total": ("ragserve.generated_tokens", "generated_tokens"),
    "ragserve_steps_total": ("ragserve.steps", "num_steps"),
    "ragserve_preemptions_total": ("ragserve.preemptions", "num_preemptions"),
}
ENGINE_BY_LABEL = {
    "ragserve_prefix_query_tokens_total": (
        "ragserve.prefix.query_tokens",
        "cache.query_tokens",
        "kind",
        "ragserve.segment.kind",
    ),
    "ragserve_prefix_hit_tokens_total": (
        "ragserve.prefix.hit_tokens",
        "cache.hit_tokens",
        "kind",
        "ragserve.segment.kind",
    ),
    "ragserve_prefix_miss_tokens_total": (
        "ragserve.prefix.miss_tokens",
        "cache.miss_tokens",
        "reason",
        "ragserve.miss_reason",
    ),
    "ragserve_finished_sequences_total": (
        "ragserve.sequences.finished",
        "num_finished",
        "reason",
        "ragserve.finish_reason",
    ),
    "ragserve_failed_sequences_total": (
        "ragserve.sequences.failed",
        "num_errors",
        "error_type",
        "error.type",
    ),
    "ragserve_rejected_requests_total": (
        "ragserve.requests.rejected",
        "num_rejected",
        "error_type",
        "error.type",
    ),
}
PIPELINE_NUMBERS = {
    "ragserve.prefill_ahead.computed_tokens": "ahead_computed_tokens",
    "ragserve.prefill_ahead.found_tokens": "ahead_found_tokens",
}
PIPELINE_HISTOGRAMS = {
    "duration": ("gen_ai.workflow.duration", "ragserve_answer_duration_seconds"),
    "embedding": ("ragserve.embedding_time", "ragserve_embedding_time_seconds"),
    "retrieval": ("ragserve.retrieval_time", "ragserve_retrieval_time_seconds"),
    "context": ("ragserve.context_time", "ragserve_context_time_seconds"),
}


async def all_kinds_of_requests(engine: Engine, rag: RagPipeline) -> None:
    """Answered, stopped, failed, left, and refused ones."""
    for number in range(3):
        await rag.answer(f"{SECRET} {number}?", params=SamplingParams(max_tokens=20))
    await engine.generate(SECRET, SamplingParams(max_tokens=5), namespace=TENANT)
    await engine.generate(SECRET, SamplingParams(max_tokens=5), namespace=TENANT)
    with pytest.raises(LookupError):
        await engine.generate([7, 2, 3, 4], SamplingParams(max_tokens=9))
    with pytest.raises(rs.PromptTooLongError):
        await engine.generate(SECRET * 200, namespace=TENANT)
    with pytest.raises(rs.PromptTooLongError):
        await rag.answer("Why?", params=SamplingParams(max_tokens=1), filter=_fail)
    async with engine.stream(SECRET, SamplingParams(max_tokens=4000), namespace=TENANT) as stream:
        await anext(stream)
    with anyio.fail_after(60):
        while engine.statistics().num_running:
            await anyio.sleep(0.001)


def _fail(chunk: Chunk) -> bool:
    raise rs.PromptTooLongError(1, 0, SECRET)


def merged(points: Sequence[HistogramDataPoint]) -> Distribution:
    """One distribution of those that differ in `error.type`."""
    bounds = {tuple(point.explicit_bounds) for point in points}
    assert len(bounds) == 1
    return Distribution(
        bounds.pop(),
        tuple(map(sum, zip(*(point.bucket_counts for point in points), strict=True))),
        math.fsum(point.sum for point in points),
        sum(point.count for point in points),
    )


def check_prometheus_engine(families: dict[str, Any], s: Statistics, **labels: str) -> None:
    for name, (_, field) in ENGINE_NUMBERS.items():
        assert value(families, name, **labels) == attrgetter(field)(s), name
    for name, (_, field, label, _) in ENGINE_BY_LABEL.items():
        for key, count in attrgetter(field)(s).items():
            assert value(families, name, **labels, **{label: key}) == count
    blocks = {"used": s.blocks_used, "cached": s.blocks_cached}
    blocks["free"] = s.blocks_total - sum(blocks.values())
    for state, count in blocks.items():
        assert value(families, "ragserve_kv_blocks", **labels, state=state) == count
    for field in ENGINE_HISTOGRAMS:
        found = distribution(families, f"ragserve_{field}_seconds", **labels)
        assert found == getattr(s, field), field


async def test_prometheus_and_opentelemetry_say_what_the_statistics_say() -> None:
    reader = Reader()
    async with Engine.open(ScriptedModel(failing), block_size=4) as engine:
        rag = await pipeline(engine)
        metrics = Metrics(engine, rag, meter_provider=reader.provider)
        await all_kinds_of_requests(engine, rag)
        statistics, answers = engine.statistics(), rag.statistics()
        text, points = metrics.prometheus(), reader.points()
        metrics.close()
    assert statistics.num_finished == {"stop": 0, "length": 5, "abort": 1, "error": 1}
    assert statistics.num_rejected == {"PromptTooLongError": 1}
    assert statistics.prefix_hit_tokens > 0
    assert answers.num_answers == {"ok": 3, "cancelled": 0, "PromptTooLongError": 1}

    families = parse(text)
    check_prometheus_engine(families, statistics, engine="scripted", model="scripted")
    for outcome, count in answers.num_answers.items():
        assert value(families, "ragserve_answers_total", pipeline="rag", outcome=outcome) == count
    for field, (_, name) in PIPELINE_HISTOGRAMS.items():
        assert distribution(families, name, pipeline="rag") == getattr(answers, field)
    for name, field in PIPELINE_NUMBERS.items():
        exposed = f"{name.replace('.', '_')}_total"
        assert value(families, exposed, pipeline="rag") == getattr(answers, field)
        (point,) = points[name]
        assert point.value == getattr(answers, field)
    assert sum(answers.num_ahead.values()) == 4
    for outcome, count in answers.num_ahead.items():
        labels = {"pipeline": "rag", "outcome": outcome}
        assert value(families, "ragserve_prefill_ahead_answers_total", **labels) == count

    base = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ragserve",
        "gen_ai.request.model": "scripted",
        "ragserve.engine.name": "scripted",
    }
    for name, field in ENGINE_NUMBERS.values():
        (point,) = points[name]
        assert point.value == attrgetter(field)(statistics), name
        assert dict(point.attributes) == base
    for name, field, _, attribute in ENGINE_BY_LABEL.values():
        found = {dict(p.attributes)[attribute]: p.value for p in points[name]}
        assert found == attrgetter(field)(statistics)
        assert all(base.items() <= dict(p.attributes).items() for p in points[name])
    for field, name in ENGINE_HISTOGRAMS.items():
        known, told = getattr(statistics, field), merged(points[name])
        assert told.boundaries == known.boundaries
        assert told.sum == pytest.approx(known.sum)
        assert told.counts == known.counts, name  # one step at a time: each delta is one token
    by_error = {
        dict(p.attributes).get("error.type"): p.count
        for p in points["gen_ai.server.request.duration"]
    }
    assert by_error == {None: 5, "LookupError": 1, "cancelled": 1}

    workflow = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.provider.name": "ragserve",
        "gen_ai.workflow.name": "rag",
    }
    found = {dict(p.attributes)["ragserve.outcome"]: p.value for p in points["ragserve.answers"]}
    assert found == answers.num_answers
    for field, (name, _) in PIPELINE_HISTOGRAMS.items():
        known, told = getattr(answers, field), merged(points[name])
        assert (told.boundaries, told.counts) == (known.boundaries, known.counts)
        assert told.sum == pytest.approx(known.sum)
        assert all(workflow.items() <= dict(p.attributes).items() for p in points[name])

    # Neither who asked, nor what, nor what an error says of it.
    for given in (text, repr(points)):
        assert TENANT not in given
        assert SECRET not in given
        assert "a document" not in given
        assert "req-" not in given


async def test_tiers_behind_the_pool_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    tiers = {
        "host": TierStatistics(3, 300, 1000, 7, 5, 4, 0, 1e-4),
        "disk": TierStatistics(9, 900, 5000, 9, 2, 0, 1, None),
    }
    fields = {
        "blocks": "ragserve_tier_blocks",
        "size": "ragserve_tier_bytes",
        "capacity": "ragserve_tier_capacity_bytes",
        "saved": "ragserve_tier_saved_blocks_total",
        "loaded": "ragserve_tier_loaded_blocks_total",
        "evicted": "ragserve_tier_evicted_blocks_total",
        "rejected": "ragserve_tier_rejected_blocks_total",
    }
    expected = {"host": (3, 300, 1000, 7, 5, 4, 0), "disk": (9, 900, 5000, 9, 2, 0, 1)}
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        metrics = Metrics(engine, meter_provider=reader.provider)
        none = parse(metrics.prometheus())
        assert not any(name.startswith("ragserve_tier") for name in none)
        known = engine.statistics()
        with_tiers = replace(known, cache=replace(known.cache, tiers=tiers))
        monkeypatch.setattr(Engine, "statistics", lambda self: with_tiers)
        families, points = parse(metrics.prometheus()), reader.points()
        metrics.close()
    for index, (field, exposed) in enumerate(fields.items()):
        told = {
            dict(point.attributes)["ragserve.tier"]: point.value
            for point in points[f"ragserve.tier.{field}"]
        }
        assert told == {tier: numbers[index] for tier, numbers in expected.items()}
        for tier, numbers in expected.items():
            assert value(families, exposed, tier=tier) == numbers[index]


async def test_every_prompt_token_is_a_hit_or_has_a_reason() -> None:
    async with Engine.open(ScriptedModel(REPLY), block_size=4) as engine:
        rag = await pipeline(engine)
        for question in ("one?", "two?", "one?"):
            await rag.answer(question)
        await engine.generate(SECRET, SamplingParams(max_tokens=5), namespace=TENANT)
        await rag.answer("one?", namespace=TENANT)
        cache = engine.statistics().cache
    asked, hit = sum(cache.query_tokens.values()), sum(cache.hit_tokens.values())
    assert asked == hit + sum(cache.miss_tokens.values())
    assert set(cache.query_tokens) == {"system", "document", "question", "turn"}
    assert 0 < cache.hit_tokens["document"] < cache.query_tokens["document"]
    assert set(cache.miss_tokens) <= {"never_seen", "other_order", "shorter_than_block", "evicted"}


async def test_deltas_of_several_tokens_are_one_value_for_opentelemetry() -> None:
    reader, heard = Reader(), Heard()
    model = ScriptedModel(REPLY, depth=2, max_decode_steps=8)
    async with Engine.open(model) as engine:
        metrics = Metrics(engine, meter_provider=reader.provider)
        engine.add_listener(heard)
        for _ in range(4):
            await engine.generate("Why?")
        between = engine.statistics().inter_token_latency
        (point,) = reader.points()["ragserve.inter_token_latency"]
        metrics.close()
    assert point.count == len(heard.gaps) < between.count
    assert point.sum == pytest.approx(sum(seconds for seconds, _ in heard.gaps))


async def test_the_latency_between_tokens_can_be_left_out_of_opentelemetry() -> None:
    reader = Reader()
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        metrics = Metrics(engine, meter_provider=reader.provider, inter_token_latency=False)
        await engine.generate("Why?")
        points = reader.points()
        families = parse(metrics.prometheus())
        metrics.close()
    assert "ragserve.inter_token_latency" not in points
    assert points["gen_ai.server.time_to_first_token"][0].count == 1
    assert distribution(families, "ragserve_inter_token_latency_seconds").count == len(REPLY)


async def test_several_engines_share_a_family() -> None:
    async with (
        Engine.open(ScriptedModel(REPLY)) as one,
        Engine.open(ScriptedModel(REPLY)) as two,
        Engine.open(ScriptedModel(REPLY)) as three,
    ):
        rag = await pipeline(one, name='a "rag" \\ of\nlines')
        reader = Reader()
        metrics = Metrics(one, two, rag, meter_provider=reader.provider)
        metrics.add(three, "the third")
        for count, engine in ((1, one), (2, two), (3, three)):
            for _ in range(count):
                await engine.generate("Why?")
        await rag.answer("Why?")
        text = metrics.prometheus()
        families = parse(text)
        for name, engine in (("scripted", one), ("scripted-2", two), ("the third", three)):
            check_prometheus_engine(families, engine.statistics(), engine=name)
        answered = {"pipeline": 'a "rag" \\ of\nlines', "outcome": "ok"}
        assert value(families, "ragserve_answers_total", **answered) == 1
        for name in families:
            assert text.count(f"# HELP {name} ") + text.count(f"# HELP {name}_total ") == 1
        finished = {
            (dict(p.attributes)["ragserve.engine.name"]): p.value
            for p in reader.points()["ragserve.sequences.finished"]
            if dict(p.attributes)["ragserve.finish_reason"] == "stop"
        }
        assert finished == {"scripted": 2, "scripted-2": 2, "the third": 3}
        metrics.close()


async def test_what_cannot_be_added_is_refused() -> None:
    async with Engine.open(ScriptedModel(REPLY)) as one, Engine.open(ScriptedModel(REPLY)) as two:
        metrics = Metrics(one, names=["first"])
        with pytest.raises(rs.InvalidParamsError, match="not added before"):
            metrics.add(one, "again")
        with pytest.raises(rs.InvalidParamsError, match="no other has"):
            metrics.add(two, "first")
        with pytest.raises(rs.InvalidParamsError, match="an Engine or a RagPipeline"):
            metrics.add("scripted")  # type: ignore[arg-type]
        with pytest.raises(rs.InvalidParamsError, match="one for each of 2 sources"):
            Metrics(one, two, names=["first"])
        metrics.close()
        with pytest.raises(rs.InvalidParamsError, match="closed"):
            metrics.add(two)


async def test_metrics_come_and_go() -> None:
    reader, other = Reader(), Reader()
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        rag = await pipeline(engine)
        first = Metrics(engine, rag, meter_provider=reader.provider)
        second = Metrics(engine, rag, meter_provider=other.provider)
        await rag.answer("Why?")
        first.close()
        first.close()
        await rag.answer("Why?")
        assert first.prometheus() == ""
        told = reader.points()
        assert "ragserve.steps" not in told  # a closed one says nothing new
        assert told["gen_ai.server.time_to_first_token"][0].count == 1
        assert other.points()["gen_ai.server.time_to_first_token"][0].count == 2
        assert other.points()["ragserve.answers"][0].value == 2
        # One that is made anew for the same provider, as an application that starts again does.
        third = Metrics(engine, rag, meter_provider=reader.provider)
        await rag.answer("Why?")
        again = reader.points()
        assert again["ragserve.steps"][0].value == engine.statistics().num_steps
        assert again["gen_ai.server.time_to_first_token"][0].count == 2
        assert again["gen_ai.workflow.duration"][0].count == 2
        assert parse(third.prometheus()) == parse(second.prometheus())
        second.close()
        third.close()
        assert not engine._core.recorder.listeners.any


async def test_metrics_do_not_keep_an_engine_alive() -> None:
    reader = Reader()
    engine = await Engine.open(ScriptedModel(REPLY))
    metrics = Metrics(engine, meter_provider=reader.provider)
    await engine.generate("Why?")
    await engine.aclose()
    assert value(parse(metrics.prometheus()), "ragserve_finished_sequences_total", reason="stop")
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    assert metrics.prometheus() == ""
    assert "ragserve.steps" not in reader.points()
    metrics.close()


async def test_without_opentelemetry_there_is_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    async with Engine.open(ScriptedModel(REPLY)) as engine:
        rag = await pipeline(engine)
        metrics = Metrics(engine, rag)
        assert not engine._core.recorder.listeners.any
        await rag.answer("Why?")
        families = parse(metrics.prometheus())
        check_prometheus_engine(families, engine.statistics())
        assert value(families, "ragserve_answers_total", outcome="ok") == 1
        metrics.close()


def test_the_text_format() -> None:
    families = [
        Family("a_total", "counter", "Of back\\slashes\nand lines.", [({"l": 'q"\\\n'}, 3)]),
        Family("nothing", "gauge", "Has no samples."),
        Family("b", "histogram", "H.", [({}, Distribution((0.5, 1.0), (1, 0, 2), 7.25, 3))]),
    ]
    assert exposition(families) == (
        "# HELP a_total Of back\\\\slashes\\nand lines.\n"
        "# TYPE a_total counter\n"
        'a_total{l="q\\"\\\\\\n"} 3\n'
        "# HELP b H.\n"
        "# TYPE b histogram\n"
        'b_bucket{le="0.5"} 1\n'
        'b_bucket{le="1.0"} 1\n'
        'b_bucket{le="+Inf"} 3\n'
        "b_sum{} 7.25\n"
        "b_count{} 3\n"
    )
    assert Metrics.content_type == "text/plain; version=0.0.4; charset=utf-8"
