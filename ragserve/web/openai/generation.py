"""What answers a request: streams of an engine, or a pipeline's answer. Both look the same here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import anyio
import anyio.to_thread

from ragserve.engine import (
    Completion,
    Delta,
    Engine,
    PromptLike,
    SamplingParams,
    Stream,
    TokenizedPrompt,
    Usage,
)
from ragserve.prompting import PromptTemplate

from ...documents.document import Chunk
from ...observability.records import GenerationRecord
from ...observability.tracing import GenerationTracer
from ...pipeline.answer import Done, RagTimings, Retrieved
from ...pipeline.answer_stream import AnswerStream
from ...retrieval.retriever import ScoredChunk
from ..problem import Problem
from ..sources import source_data
from .protocol import GivenDocument

if TYPE_CHECKING:
    from opentelemetry.context import Context

__all__ = [
    "EngineGeneration",
    "Extras",
    "Generation",
    "RagGeneration",
    "document_prompt",
    "total_usage",
]

_ANSWER_TOKENS = 256
"""Room kept for an answer of unlimited length when a request's documents are laid out."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a response tells beyond OpenAI's fields, of an answer from documents.

    :param sources: the documents in the prompt, numbered as citations name them.
    :param dropped: how many more did not fit.
    """

    sources: list[dict[str, Any]]
    dropped: int


class Generation(Protocol):
    """The deltas of all choices of a request, numbered through.

    Nothing happens before `start`. `aclose` must be called, whatever happened; it ends what runs.
    """

    @property
    def extras(self) -> Extras | None:
        """After the start: which documents it is about, if any."""

    @property
    def completions(self) -> Sequence[Completion]:
        """After the end: one for each prompt, with its choices. Empty if it never began."""

    async def start(self) -> None:
        """Hand the request to the engine; raises what refuses it."""

    def __aiter__(self) -> Generation:
        """Itself."""

    async def __anext__(self) -> Delta:
        """The next delta."""

    def timings(self) -> dict[str, Any] | None:
        """After the end: seconds by stage; None if a response should not tell them."""

    async def aclose(self) -> None:
        """End it, free what it holds, and trace it. Idempotent."""


class EngineGeneration:
    """Answers of an engine to one or several prompts.

    :param prompts: what to continue; or what makes the one prompt, and says what is in it.
    :param request_id: the engine's, and if there are several prompts, the start of it.
    :param parent: where in a trace it belongs.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[PromptLike | TokenizedPrompt]
        | Callable[[], Awaitable[tuple[TokenizedPrompt, Extras]]],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        namespace: str,
        tracer: GenerationTracer,
        parent: Context | None,
    ) -> None:
        self.extras: Extras | None = None
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._request_id = request_id
        self._priority = priority
        self._namespace = namespace
        self._tracer = tracer
        self._parent = parent
        self._streams: list[Stream] = []
        self._ready: deque[Delta] = deque()
        self._running: dict[int, Stream] = {}
        self._context = 0.0
        self._error: BaseException | None = None
        self._closed = False

    async def start(self) -> None:
        """See `Generation.start`."""
        engine = self._engine
        try:
            if callable(self._prompts):
                began = time.monotonic()
                prompt, self.extras = await self._prompts()
                self._prompts = [prompt]
                self._context = time.monotonic() - began
            several = len(self._prompts) > 1
            for place, given in enumerate(self._prompts):
                stream = engine.stream(
                    given,
                    self._params,
                    request_id=f"{self._request_id}-{place}" if several else self._request_id,
                    priority=self._priority,
                    namespace=self._namespace,
                )
                self._streams.append(stream)
                await stream.__aenter__()
        except BaseException as error:
            self._error = error
            raise
        self._running = dict(enumerate(self._streams))

    def __aiter__(self) -> EngineGeneration:
        return self

    async def __anext__(self) -> Delta:
        """See `Generation.__anext__`."""
        try:
            if len(self._streams) == 1:
                return await anext(self._streams[0])
            while not self._ready:
                if not self._running:
                    raise StopAsyncIteration
                await self._read_some()
            return self._ready.popleft()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self._error = error
            raise

    async def _read_some(self) -> None:
        """Wait until one of the streams has something, and take what the others have by then."""
        errors: list[Exception] = []
        # A read that is cancelled has taken nothing from its stream.
        async with anyio.create_task_group() as tasks:

            async def read(place: int, stream: Stream) -> None:
                try:
                    delta = await anext(stream)
                except StopAsyncIteration:
                    del self._running[place]
                    return
                except Exception as error:
                    errors.append(error)
                else:
                    delta.index += place * self._params.n
                    self._ready.append(delta)
                tasks.cancel_scope.cancel()

            for place, stream in list(self._running.items()):
                tasks.start_soon(read, place, stream)
        if errors:
            raise errors[0]

    @property
    def completions(self) -> Sequence[Completion]:
        """See `Generation.completions`."""
        return [known for stream in self._streams if (known := _completion(stream)) is not None]

    def timings(self) -> dict[str, Any] | None:
        """See `Generation.timings`. Only of answers from documents: others are OpenAI's alone."""
        if self.extras is None:
            return None
        of_engine = self._streams[0].completion.timings
        timings = RagTimings(
            context=self._context,
            queue=of_engine.queue,
            prefill=of_engine.prefill,
            decode=of_engine.decode,
        )
        return _timings(timings, self._streams[0].completion)

    async def aclose(self) -> None:
        """See `Generation.aclose`."""
        if self._closed:
            return
        self._closed = True
        for place, stream in enumerate(self._streams):
            await stream.aclose()
            given = None if callable(self._prompts) else self._prompts[place]
            record = GenerationRecord.of(
                stream,
                self._params,
                model=self._engine.model_name,
                # An answer that is whole was not cancelled by closing it now.
                error=self._error or "cancelled",
                prompt=_readable(given),
            )
            self._tracer.emit(record, self._parent)


class RagGeneration:
    """A pipeline's answer."""

    def __init__(self, answer: AnswerStream) -> None:
        self.extras: Extras | None = None
        self._answer = answer

    async def start(self) -> None:
        """See `Generation.start`."""
        event = await anext(self._answer, None)
        if not isinstance(event, Retrieved):
            raise Problem(503, "the answer was ended before it began", code="request_aborted")
        self.extras = Extras(
            [source_data(s.number, s.chunk, s.score) for s in event.sources], len(event.dropped)
        )

    def __aiter__(self) -> RagGeneration:
        return self

    async def __anext__(self) -> Delta:
        """See `Generation.__anext__`."""
        event = await anext(self._answer)
        if isinstance(event, Done):
            raise StopAsyncIteration
        if isinstance(event, Retrieved):
            raise RuntimeError(f"{self._answer!r} told twice what it retrieved")
        return event

    @property
    def completions(self) -> Sequence[Completion]:
        """See `Generation.completions`."""
        known = _completion(self._answer)
        return [] if known is None else [known]

    def timings(self) -> dict[str, Any] | None:
        """See `Generation.timings`."""
        timings = _timings(self._answer.timings, self._answer.completion)
        if self._answer.trace_id is not None:
            timings["trace_id"] = self._answer.trace_id
        return timings

    async def aclose(self) -> None:
        """See `Generation.aclose`."""
        await self._answer.aclose()


def total_usage(completions: Sequence[Completion]) -> Usage:
    """Tokens of all prompts and all answers."""
    usages = [completion.usage for completion in completions]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


async def document_prompt(
    question: str,
    documents: Sequence[GivenDocument],
    template: PromptTemplate,
    engine: Engine,
    params: SamplingParams,
) -> tuple[TokenizedPrompt, Extras]:
    """The prompt for a question about documents that came with it, in their order.

    Those at the end that do not fit are dropped.
    """
    chunks = [_chunk(place, document) for place, document in enumerate(documents)]
    limit = engine.config.max_model_len
    if limit is not None:
        # As in a pipeline: an answer never claims more than half of what the model can take in.
        limit -= min(params.max_tokens or _ANSWER_TOKENS, limit // 2)
    # The template scores nothing; it takes them in the order given.
    scored = [ScoredChunk(chunk, 0.0) for chunk in chunks]
    build = partial(template.build, question, scored, engine.tokenizer, limit)
    built = await anyio.to_thread.run_sync(build, abandon_on_cancel=True)
    used = chunks[: len(built.used)]
    sources = [source_data(number, chunk) for number, chunk in enumerate(used, 1)]
    return built.tokenized, Extras(sources, len(built.dropped))


def _chunk(place: int, document: GivenDocument) -> Chunk:
    # A title is part of what the model should know of a document.
    text = f"{document.title}\n{document.text}" if document.title else document.text
    metadata = {} if document.title is None else {"title": document.title}
    return Chunk(document.id, document.id, text, place, metadata)


def _completion(stream: Stream | AnswerStream) -> Completion | None:
    """What has come of it; None if the engine never took it."""
    try:
        return stream.completion
    except RuntimeError:
        return None


def _readable(prompt: PromptLike | TokenizedPrompt | None) -> str | list[Mapping[str, Any]] | None:
    """A prompt as a trace may show it: text or messages."""
    match prompt:
        case str():
            return prompt
        case [Mapping(), *_]:
            return cast("list[Mapping[str, Any]]", prompt)
        case _:
            return None


def _timings(timings: RagTimings, completion: Completion) -> dict[str, Any]:
    rounded = {stage: round(seconds, 6) for stage, seconds in asdict(timings).items()}
    rounded["total"] = round(timings.total, 6)
    first = completion.timings.time_to_first_token
    return {**rounded, "time_to_first_token": None if first is None else round(first, 6)}
