"""What tracing costs: an answer's spans in microseconds, and its share of time and throughput.

    python -P benchmarks/web/tracing_cost.py

Compared are no tracing SDK; an SDK that samples every answer out; and one that records all of
them and sends them over OTLP, in batches, to a receiver in another process. The third is also
measured with OpenInference's attributes.

First one answer's spans are made over and over: on the event loop's thread, which is what other
requests may notice, and in all of the process, with the thread that encodes and sends.

Then 64 callers ask without a pause, of a scripted model with steps of 7 ms, two of them under
way at once as on a GPU, and answers of 96 to 160 tokens, which take about a second. All the
while the variants take turns of a few seconds, and each turn is compared with the one without an
SDK in its round. Whatever else runs on the machine is in these figures; the microseconds are of
CPU time, and steadier.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import numpy as np
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from ragserve import Chunk, Engine, RagPipeline, SamplingParams, ScoredChunk
from ragserve.retrieval import ChunkFilter, Query
from ragserve.testing import ScriptedModel

STEP_SECONDS = 0.007
TOKENS = (96, 160)
CALLERS = 64
BATCH = 100
"""Answers whose spans are made at a stretch; they fit into the exporter's queue."""
SETTLE_SECONDS = 1.5
"""Until the answers under way are those of the variant whose turn it is."""


class Receiver(BaseHTTPRequestHandler):
    """Takes what is sent and says so."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def receive() -> None:
    """Serve on a port of its own, which is printed, until the standard input ends."""
    import threading

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


@contextmanager
def receiver() -> Iterator[str]:
    """A receiver in another process, as its URL."""
    command = [sys.executable, "-P", __file__, "--receive"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("the receiver has no pipes")
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
        process.stdin.close()


class Ones:
    """Embeds anything as the same vector."""

    model_name = "ones"
    dimension: int | None = 4

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        return np.full((len(texts), 4), 0.5, np.float32)


class Shelf:
    """Always finds the same four chunks."""

    name = "shelf"

    async def retrieve(
        self, query: Query, *, top_k: int, filter: ChunkFilter | None = None
    ) -> Sequence[ScoredChunk]:
        return [
            ScoredChunk(Chunk(f"c{i}", "d", f"document {i} " * 8), 1.0 - i / 10) for i in range(4)
        ]


class Variant:
    """One way of tracing."""

    def __init__(
        self, name: str, provider: TracerProvider | None, openinference: bool = False
    ) -> None:
        self.name = name
        self.provider = provider
        self.openinference = openinference
        self.microseconds: list[float] = []
        self.process_microseconds: list[float] = []
        self.tokens_per_second: list[float] = []

    def pipeline(self, engine: Engine) -> RagPipeline:
        return RagPipeline(
            engine=engine,
            index=Shelf(),
            embedder=Ones(),
            params=SamplingParams(temperature=0.0, max_tokens=TOKENS[1]),
            tracer_provider=self.provider,
            openinference=self.openinference,
        )

    def flush(self) -> None:
        if self.provider is not None:
            self.provider.force_flush()

    async def make_spans(self, engine: Engine) -> None:
        """Measure the spans of one answer, made `BATCH` times."""
        async with self.pipeline(engine).stream("What is it?") as answer:
            async for _ in answer:
                pass
        # What the answer has just done at its end, over again.
        tracer, record = answer._tracer, answer._record
        self.flush()
        process = time.process_time()
        started = time.thread_time()
        for _ in range(BATCH):
            tracer.emit(record, tracer.current_context())
        self.microseconds.append(1e6 * (time.thread_time() - started) / BATCH)
        self.flush()
        self.process_microseconds.append(1e6 * (time.process_time() - process) / BATCH)

    def row(self, baseline: Variant) -> str:
        here = statistics.median(self.microseconds)
        in_all = statistics.median(self.process_microseconds)
        rate = statistics.median(self.tokens_per_second)
        answers = rate / statistics.mean(TOKENS)
        changes = [
            100 * (mine / other - 1)
            for mine, other in zip(self.tokens_per_second, baseline.tokens_per_second, strict=True)
        ]
        low, change, high = statistics.quantiles(changes, n=4)
        cells = [
            self.name,
            f"{here:,.0f}",
            f"{in_all:,.0f}",
            f"{here / 1e4:.3f} %",
            f"{in_all * answers / 1e4:.2f} %",
            f"{rate:,.0f}",
            "" if self is baseline else f"{change:+.1f} % ({low:+.1f} to {high:+.1f})",
        ]
        return f"| {' | '.join(cells)} |"


class Callers:
    """Ask without a pause, of the pipeline that is set."""

    def __init__(self, rag: RagPipeline) -> None:
        self.rag = rag
        self._random = Random(1)

    async def __aenter__(self) -> Callers:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(CALLERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            params = SamplingParams(temperature=0.0, max_tokens=self._random.randint(*TOKENS))
            async with self.rag.stream("What is it?", params=params) as answer:
                async for _ in answer:
                    pass


async def measure(variants: list[Variant], repeats: int, rounds: int, seconds: float) -> None:
    async with Engine.open(ScriptedModel("x" * TOKENS[0])) as engine:
        for repeat in range(repeats):
            for variant in in_turn(variants, repeat):
                await variant.make_spans(engine)
    model = ScriptedModel(lambda tokens: 97, step_seconds=STEP_SECONDS, num_blocks=4096, depth=2)
    async with Engine.open(model, max_num_seqs=CALLERS) as engine:
        pipelines = {variant: variant.pipeline(engine) for variant in variants}
        async with Callers(pipelines[variants[0]]) as callers:
            for round in range(rounds):
                for variant in in_turn(variants, round):
                    callers.rag = pipelines[variant]
                    await asyncio.sleep(SETTLE_SECONDS)
                    before = engine.statistics().generated_tokens
                    started = time.perf_counter()
                    await asyncio.sleep(seconds)
                    tokens = engine.statistics().generated_tokens - before
                    variant.tokens_per_second.append(tokens / (time.perf_counter() - started))


def in_turn(variants: list[Variant], number: int) -> list[Variant]:
    """Begins with another one each time, so that none always comes after the same other."""
    first = number % len(variants)
    order = variants[first:] + variants[:first]
    return order if number % 2 == 0 else order[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30, help="of making spans, per variant")
    parser.add_argument("--rounds", type=int, default=16, help="of answering")
    parser.add_argument("--seconds", type=float, default=3.0, help="a variant's turn in a round")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive()
        return
    with receiver() as url:

        def exporting() -> TracerProvider:
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
            return provider

        variants = [
            Variant("no SDK", None),
            Variant("sampled out", TracerProvider(sampler=ALWAYS_OFF)),
            Variant("exported over OTLP", exporting()),
            Variant("the same, OpenInference too", exporting(), openinference=True),
        ]
        asyncio.run(measure(variants, arguments.repeats, arguments.rounds, arguments.seconds))
        for variant in variants:
            if variant.provider is not None:
                variant.provider.shutdown()
    print(
        "| tracing | µs an answer, event loop | µs an answer, all threads | of a 1,000 ms answer "
        f"| of one core, {CALLERS} callers | tokens/s | change (quartiles) |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for variant in variants:
        print(variant.row(variants[0]))


if __name__ == "__main__":
    main()
