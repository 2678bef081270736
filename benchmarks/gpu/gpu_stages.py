"""The stages of the GPU benchmark that compute: each opens what it needs and emits its figures.

They run in a worker process (see `gpu.py`). Engines are opened through the public face, on random
weights at real dimensions; one stays open as long as the stages that follow want the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_workloads import WORKS, BenchRequest, Seen, Work, summarize, uniform, write_config

from ragserve import Engine, Prompt, SamplingParams, Segment
from ragserve.engine import EngineConfig, LoadedModel, ModelSource, Tokenizer

__all__ = ["GROUPS", "STAGES", "Bench", "RandomModel", "Stage", "busy_intervals", "drive"]

Emit = Callable[..., None]

_TINY_IDS = (2, 512)
_STALL_NS = 20_000
"""A longer gap between two kernels is the host's doing, not the chip's between dependent ones."""


# -- a model without a checkpoint -----------------------------------------------------------------


class RandomModel(ModelSource):
    """Random weights at the dimensions of a `config.json`, made on the device.

    Uniform in ±1e-3, norms 1. Each token of its vocabulary is a word.

    :param folder: holds the `config.json`.
    :ivar seconds: time per phase of the last `load`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.seconds: dict[str, float] = {}

    def load(self, config: EngineConfig) -> LoadedModel:
        """See `ModelSource.load`."""
        started = time.monotonic()
        import torch

        from ragserve.engine.models.config import ModelConfig
        from ragserve.engine.models.decoder import DecoderModel
        from ragserve.engine.runtime.loading import build

        seconds = self.seconds = {"import": time.monotonic() - started}
        started = time.monotonic()
        device = torch.empty(0, device=config.device).device  # with its index
        dims = ModelConfig.from_folder(self._folder)
        model = DecoderModel(
            dims,
            dtype=getattr(torch, config.dtype),
            device=device,
            max_model_len=config.max_model_len,
        )
        generator = torch.Generator(device).manual_seed(0)
        for name, tensor in model.tensors().items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.uniform_(-1e-3, 1e-3, generator=generator)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds["weights"] = time.monotonic() - started
        started = time.monotonic()
        tokenizer = Tokenizer.from_fast(word_tokenizer(dims.vocab_size), config.num_tokenizers)
        seconds["tokenizer"] = time.monotonic() - started
        return build(model, tokenizer, config, name=self._name, seconds=seconds)


def word_tokenizer(vocab_size: int) -> Any:
    """A fast tokenizer that decodes to numbered words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f"Ġword{number}": number for number in range(vocab_size)}  # Ġ: a space, in GPT-2's way
    backend = Backend(models.WordLevel(vocab=words, unk_token="Ġword0"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# -- what stages share ----------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """The state of a worker: its options, and the engine that is open.

    :param emit: takes a kind of record and its fields.
    :param dims: instead of each stage's own dimensions; "tiny" shrinks the workloads too.
    :param repeat: runs of a workload.
    :param segments: give RAG prompts as segments instead of plain token ids.
    """

    emit: Emit
    device: str = "cuda"
    dims: str | None = None
    repeat: int = 2
    segments: bool = False
    knobs: dict[str, Any] = field(default_factory=dict)
    """Of the stage that runs; they win over the stage's own."""
    engine: Engine | None = None
    _key: object = None

    @property
    def tiny(self) -> bool:
        """Whether this only tries the benchmark."""
        return self.dims == "tiny"

    async def open(self, dims: str, **knobs: Any) -> Engine:
        """An engine of these dimensions and knobs; the open one, if it is that."""
        dims = self.dims or dims
        base: dict[str, Any] = (
            {"dtype": "float32", "max_model_len": 2048, "kv_cache_bytes": 8 << 20}
            if self.tiny
            else {"dtype": "bfloat16", "max_model_len": 4096}
        )
        base |= {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "seed": 0}
        knobs = {**base, **knobs, **self.knobs}
        key = (dims, json.dumps(knobs, sort_keys=True))
        if self.engine is None or self._key != key:
            await self.close()
            with tempfile.TemporaryDirectory() as folder:
                model = RandomModel(write_config(dims, Path(folder)), dims)
                started = time.monotonic()
                self.engine = await Engine.open(model, device=self.device, **knobs)
            total = time.monotonic() - started
            statistics = self.engine.statistics()
            self.emit(
                "open",
                dims=dims,
                knobs=knobs,
                seconds=model.seconds,
                total_s=total,
                blocks=statistics.blocks_total,
            )
            self._key = key
            # As an application should: to look through all that is alive takes Python 130 ms here.
            gc.collect()
            gc.freeze()
            warm_up = WORKS["w1"].warm_up(tiny=self.tiny)
            await drive(self.engine, warm_up, len(warm_up))
        return self.engine

    async def close(self) -> None:
        """Close the engine that is open, if one is."""
        if self.engine is not None:
            await self.engine.aclose()
            self.engine = None
            gc.unfreeze()
            gc.collect()


def greedy(max_tokens: int, *, text: bool = False) -> SamplingParams:
    """The likeliest tokens, so many; ids alone unless `text` is wanted."""
    return SamplingParams.greedy(max_tokens=max_tokens, ignore_eos=True, detokenize=text)


def as_segments(request: BenchRequest) -> Prompt:
    """A RAG request as a system prompt, documents, and a question."""
    kinds = ("system", *["document"] * (len(request.segments) - 2), "question")
    return Prompt(
        tuple(
            Segment(token_ids=tokens, kind=kind)  # type: ignore[arg-type]
            for tokens, kind in zip(request.segments, kinds, strict=True)
        )
    )


async def drive(
    engine: Engine, requests: Sequence[BenchRequest], concurrency: int, *, segments: bool = False
) -> tuple[list[Seen], float]:
    """Run requests in order with so many clients; what each saw, and the seconds all took.

    :raises RuntimeError: if one got another number of tokens than it asked for.
    """
    prompts = [
        as_segments(request) if segments and len(request.segments) > 1 else request.prompt
        for request in requests
    ]
    todo = iter(zip(prompts, requests, strict=True))
    seen: list[Seen] = []

    async def client() -> None:
        for prompt, request in todo:
            one = Seen(time.perf_counter())
            async with engine.stream(prompt, greedy(request.output_tokens)) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        one.times.append(time.perf_counter())
                        one.counts.append(len(delta.token_ids))
            if sum(one.counts) != request.output_tokens:
                raise RuntimeError(f"{sum(one.counts)} tokens, not {request.output_tokens}")
            seen.append(one)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(requests))):
            clients.create_task(client())
    return seen, time.perf_counter() - started


# -- the workloads --------------------------------------------------------------------------------


async def run_work(bench: Bench, work: Work) -> None:
    """A workload, several times, each from an empty prefix cache."""
    requests = work.requests(tiny=bench.tiny)
    concurrency = work.concurrency or len(requests)
    if bench.tiny:
        concurrency = min(concurrency, 3)
    engine = await bench.open(work.dims, **work.knobs)
    for _ in range(max(work.repeat or 0, bench.repeat)):
        await engine.reset_prefix_cache()
        before = engine.statistics()
        seen, wall = await drive(engine, requests, concurrency, segments=bench.segments)
        after = engine.statistics()
        bench.emit(
            "run",
            **summarize(seen, wall),
            cached_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
            preemptions=after.num_preemptions - before.num_preemptions,
        )


# -- what the chip can do -------------------------------------------------------------------------


async def ceilings(bench: Bench) -> None:
    """Bandwidth, products and launches, of the device itself."""
    figures = _bandwidths(bench.device) | _products(bench.device)
    if bench.device == "cuda":
        import torch

        torch.cuda.empty_cache()
        figures |= _launches()
    bench.emit("ceilings", **figures)


def _bandwidths(device: str) -> dict[str, float]:
    import torch

    source = torch.randn(1 << (31 if device == "cuda" else 16), device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    integers = source.view(torch.int32)
    copy = _median_seconds(lambda: target.copy_(source), device)
    read = _median_seconds(lambda: torch.amax(integers), device)
    return {"copy_gb_s": 2 * source.nbytes / copy / 1e9, "read_gb_s": source.nbytes / read / 1e9}


def _products(device: str) -> dict[str, float]:
    import torch

    side = 8192 if device == "cuda" else 128
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _median_seconds(lambda: left @ right, device)
    return {"matmul_tflop_s": 2 * side**3 / seconds / 1e12}


def _median_seconds(function: Callable[[], object], device: str, repeat: int = 20) -> float:
    """How long a call takes on the device, without the launch."""
    import torch

    for _ in range(3):
        function()
    times = []
    for _ in range(repeat):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def _launches() -> dict[str, float]:
    """Microseconds that launching costs, one way and another."""
    import torch

    numbers = torch.zeros(128, device="cuda")
    graphs = {}
    for count in (1, 300):
        numbers.add_(1.0)
        torch.cuda.synchronize()
        graphs[count] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                numbers.add_(1.0)
    short, long = (_median_seconds(graphs[count].replay, "cuda") for count in (1, 300))
    pinned = torch.empty(128, pin_memory=True)

    def read_back() -> None:
        pinned.copy_(numbers, non_blocking=True)
        torch.cuda.synchronize()

    def round_trip() -> None:
        graphs[1].replay()
        torch.cuda.synchronize()

    return {
        "eager_enqueue_us": _host_microseconds(lambda: numbers.add_(1.0)),
        "graph_enqueue_us": _host_microseconds(graphs[1].replay),
        "graph_round_trip_us": _host_microseconds(round_trip),
        "graph_kernel_us": 1e6 * (long - short) / 299,
        "read_back_us": _host_microseconds(read_back),
    }


def _host_microseconds(function: Callable[[], object], repeat: int = 300) -> float:
    import torch

    for _ in range(10):
        function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeat):
        function()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return 1e6 * spent / repeat


# -- figures that other modules take --------------------------------------------------------------


def rows_of(module: str) -> Callable[[Bench], Awaitable[None]]:
    """The stage of a module beside this one whose `measure()` gives a list of dicts."""

    async def stage(bench: Bench) -> None:
        await bench.close()
        for row in importlib.import_module(module).measure():
            bench.emit("row", row=row)

    return stage


async def numerics(bench: Bench) -> None:
    """What batch and cache change in the answers of a model that is trained for it."""
    await bench.close()
    await importlib.import_module("gpu_numerics").measure(bench)


# -- the host's part of a step --------------------------------------------------------------------


async def host(bench: Bench, dims: str) -> None:
    """Steady decoding of some sequences: a step's time, the host's in it, the chip's share."""
    engine = await _open_for_decoding(bench, dims)
    if bench.device == "cuda":
        await _profile(0.01)  # the profiler's own start takes long the first time
    for count in (1, 4) if bench.tiny else (1, 64, 128, 256):
        async with _decoding(engine, count, bench.tiny) as decoding:
            figures = await _window(engine, decoding, 0.05 if bench.tiny else 1.0)
            if bench.device == "cuda":
                figures |= await _profiled_window(figures)
            decoding.check_alive()
        bench.emit("steady", dims=bench.dims or dims, sequences=count, **figures)


async def _open_for_decoding(bench: Bench, dims: str) -> Engine:
    knobs = {"max_num_seqs": 256, "enable_prefix_caching": False}
    if not bench.tiny:
        knobs["max_model_len"] = 8192
    return await bench.open(dims, **knobs)


@dataclass(slots=True)
class _Decoding:
    """Streams that run side by side."""

    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    started: int = 0
    """Streams past their first token."""
    deltas: int = 0
    """Of all of them."""

    def check_alive(self) -> None:
        """Check that none has ended.

        :raises RuntimeError: if one has; if it failed, what it failed with.
        """
        for task in self.tasks:
            if task.done():
                task.result()
                raise RuntimeError("a stream ended inside the window")


@contextlib.asynccontextmanager
async def _decoding(engine: Engine, count: int, tiny: bool) -> AsyncIterator[_Decoding]:
    """So many streams, all past their first token."""
    prompt, output = (8, 2000) if tiny else (128, 8000)
    requests = uniform(count, prompt, output, **({"ids": _TINY_IDS} if tiny else {}))
    decoding = _Decoding()

    async def read(request: BenchRequest) -> None:
        async with engine.stream(request.prompt, greedy(output)) as stream:
            await anext(stream)
            decoding.started += 1
            async for _ in stream:
                decoding.deltas += 1

    decoding.tasks = [asyncio.create_task(read(request)) for request in requests]
    try:
        while decoding.started < count:
            decoding.check_alive()
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02 if tiny else 0.2)
        yield decoding
    finally:
        for task in decoding.tasks:
            task.cancel()
        await asyncio.gather(*decoding.tasks, return_exceptions=True)
        while (now := engine.statistics()).num_running or now.num_waiting:
            await asyncio.sleep(0.005)


async def _window(engine: Engine, decoding: _Decoding, seconds: float) -> dict[str, float]:
    """Figures per decode step, in milliseconds, of a stretch of steady decoding."""
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("ragserve engine"))
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    before, started, cpu = engine.statistics(), time.perf_counter(), time.clock_gettime(clock)
    deltas = decoding.deltas
    await asyncio.sleep(seconds)
    after, wall = engine.statistics(), time.perf_counter() - started
    cpu, deltas = time.clock_gettime(clock) - cpu, decoding.deltas - deltas
    tokens = after.generated_tokens - before.generated_tokens
    steps = max(1.0, tokens / len(decoding.tasks))
    return {
        "step_ms": 1e3 * wall / steps,
        "thread_ms": 1e3 * cpu / steps,
        "tokens_per_delta": tokens / max(1, deltas),
    }


async def _profiled_window(plain: dict[str, float]) -> dict[str, float]:
    """What a trace of the chip adds to the figures `plain` of a window without one.

    Tracing slows the gaps down but not the kernels, so the idle share takes kernels from the
    trace and the step's time from `plain`.
    """
    started = time.perf_counter()
    trace = await _profile(0.6)
    if not trace.steps:
        return {}  # there is no tracer here, or somebody else has it
    wall = time.perf_counter() - started
    busy_ms, step_ms = 1e3 * trace.busy / trace.steps, plain["step_ms"]
    waited_ms = step_ms * min(1.0, trace.waited / wall)
    # A wait for the chip that spins is time of the thread, but not of the host's work.
    spins = plain["thread_ms"] + waited_ms > 1.05 * step_ms
    return {
        "busy_ms": busy_ms,
        "idle_share": max(0.0, 1 - busy_ms / step_ms),
        "stall_share": trace.stalled,
        "host_ms": max(0.0, plain["thread_ms"] - (waited_ms if spins else 0.0)),
    }


class _Trace(NamedTuple):
    """What a trace of the chip says.

    :param busy: seconds.
    :param stalled: share of the time that lies in long gaps.
    :param waited: seconds that the host waited.
    :param steps: decode steps that began, by the kernel that each begins with. (Those that the
        engine counts meanwhile are more: the tracer takes its time to start and to stop.)
    """

    busy: float
    stalled: float
    waited: float
    steps: int


async def _profile(seconds: float) -> _Trace:
    """Trace the chip."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        await asyncio.sleep(seconds)
    starts, ends, waited, steps = [], [], 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            starts.append(event.start_ns())
            ends.append(event.start_ns() + event.duration_ns())
            steps += "_prepare_decode" in event.name()
        elif "Synchronize" in event.name():
            waited += event.duration_ns()
    busy, stalled = busy_intervals(starts, ends)
    return _Trace(busy / 1e9, stalled, waited / 1e9, steps)


def busy_intervals(starts: Sequence[int], ends: Sequence[int]) -> tuple[float, float]:
    """Of intervals in nanoseconds: the length of their union, and the share of long gaps in the
    time from the first to the last."""
    if not starts:
        return 0.0, 0.0
    order = np.argsort(starts)
    start = np.asarray(starts, dtype=np.int64)[order]
    covered = np.maximum.accumulate(np.asarray(ends, dtype=np.int64)[order])
    gaps = np.maximum(start[1:] - covered[:-1], 0)
    span = int(covered[-1] - start[0])
    return float(span - gaps.sum()), float(gaps[gaps > _STALL_NS].sum()) / max(1, span)


# -- the application beside it --------------------------------------------------------------------


async def consumers(bench: Bench, dims: str) -> None:
    """64 streams read by tasks that do nothing, and by tasks that send events over SSE."""
    engine = await _open_for_decoding(bench, dims)
    count, prompt, output = (4, 8, 32) if bench.tiny else (64, 128, 512)
    requests = uniform(count, prompt, output, **({"ids": _TINY_IDS} if bench.tiny else {}))
    for repeat in range(max(2, bench.repeat)):
        order = ("drain", "sse")
        for mode in order if repeat % 2 == 0 else order[::-1]:
            late: list[float] = []
            heart = asyncio.create_task(_beat(late))
            started = time.perf_counter()
            sent = await asyncio.gather(
                *(_consume(engine, request, sse=mode == "sse") for request in requests)
            )
            wall = time.perf_counter() - started
            heart.cancel()
            bench.emit(
                "consumers",
                dims=bench.dims or dims,
                mode=mode,
                output_tok_s=count * output / wall,
                events=sum(sent),
                lag_p50_ms=1e3 * float(np.percentile(late or [0.0], 50)),
                lag_p99_ms=1e3 * float(np.percentile(late or [0.0], 99)),
                lag_max_ms=1e3 * max(late, default=0.0),
            )


async def _beat(late: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - started - 0.005)


async def _consume(engine: Engine, request: BenchRequest, *, sse: bool) -> int:
    """Read a stream to its end; with `sse`, make of each delta an event and send it."""
    events = size = 0

    async def send(message: bytes) -> None:
        nonlocal size
        size += len(message)
        await asyncio.sleep(0)

    async with engine.stream(request.prompt, greedy(request.output_tokens, text=True)) as stream:
        async for delta in stream:
            events += 1
            if sse:
                choice = {
                    "index": delta.index,
                    "delta": {"content": delta.text},
                    "logprobs": None,
                    "finish_reason": delta.finish_reason,
                }
                chunk = {
                    "id": stream.request_id,
                    "object": "chat.completion.chunk",
                    "created": 1_700_000_000,
                    "model": engine.model_name,
                    "choices": [choice],
                }
                await send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return events


# -- memory ---------------------------------------------------------------------------------------


async def memory(bench: Bench) -> None:
    """Open and close three times: the device's memory before, while it is open, and after."""
    await bench.close()
    _free_bytes(bench.device)  # makes the context, which is no engine's
    for number in range(3):
        before = _free_bytes(bench.device)
        await bench.open("0.5b")
        opened = _free_bytes(bench.device)
        await bench.close()
        after = _free_bytes(bench.device)
        bench.emit(
            "memory",
            round=number,
            taken_mib=(before - opened) / 2**20,
            kept_mib=(before - after) / 2**20,
        )


def _free_bytes(device: str) -> int:
    import torch

    if device != "cuda":
        from ragserve.engine.models.free_memory import available_memory

        return available_memory()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


# -- the list -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """What a worker can be told to do."""

    run: Callable[[Bench], Awaitable[None]]
    limit: float
    """Seconds after which it is given up, its worker with it."""
    fresh: bool = False
    """It needs a worker that has done nothing yet."""


def _work_stage(work: Work) -> Callable[[Bench], Awaitable[None]]:
    return lambda bench: run_work(bench, work)


def _at(
    stage: Callable[[Bench, str], Awaitable[None]], dims: str
) -> Callable[[Bench], Awaitable[None]]:
    return lambda bench: stage(bench, dims)


STAGES: dict[str, Stage] = {
    "ceilings": Stage(ceilings, 60),
    "kernels-attention": Stage(rows_of("gpu_attention"), 60),
    "kernels-sampling": Stage(rows_of("gpu_sampling"), 60),
    "kernels-linear": Stage(rows_of("gpu_linear"), 60),
    **{name: Stage(_work_stage(work), 150) for name, work in WORKS.items()},
    "host-python": Stage(rows_of("host"), 60),
    "host-7b": Stage(_at(host, "7b"), 90),
    "consumers-7b": Stage(_at(consumers, "7b"), 90),
    "host-0.5b": Stage(_at(host, "0.5b"), 90),
    "consumers-0.5b": Stage(_at(consumers, "0.5b"), 60),
    "numerics": Stage(numerics, 90),
    "memory": Stage(memory, 90, fresh=True),
}
"""In the order in which they run."""

GROUPS = {
    name: tuple(stage for stage in STAGES if stage.startswith(f"{name}-"))
    for name in ("kernels", "host", "consumers")
}
"""Names that stand for several stages."""
