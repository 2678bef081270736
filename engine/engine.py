"""The async face: open a model in this process, stream from it, see what it does, close it."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import anyio
import anyio.to_thread

from .cache.block_hash import BlockHash
from .cache.block_pool import BlockPool
from .cache.probe import PrefixProbe, SegmentHashes
from .config import EngineConfig
from .errors import EngineClosedError, EngineDeadError, InvalidParamsError
from .outputs import Completion
from .preparation import Call, Preparation
from .prompt import PromptLike, TokenizedPrompt
from .runtime.core import EngineCore
from .runtime.driver import Driver, DriverState, Place
from .runtime.encoders import Encoders
from .runtime.handoff import Mailbox, current_event_loop, result_of
from .runtime.loading import LoadedModel, ModelSource, PretrainedModel, log_opened
from .runtime.pins import Pin, PinnedBlocks
from .runtime.statistics import CacheStatistics, Listener, Statistics
from .sampling_params import SamplingParams
from .scheduling.request import Request
from .scheduling.timeline import Timeline
from .stream import Stream, open_letters
from .text.tokenizer import Tokenizer

__all__ = ["Engine", "Health"]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine takes requests."""

    status: DriverState
    """ready, draining, closed, or dead."""
    error: BaseException | None = None
    """What killed it."""

    @property
    def ok(self) -> bool:
        """Whether a request would be taken now, if there is room."""
        return self.status == "ready"


_NOTHING = SamplingParams(temperature=0.0, max_tokens=1, seed=0, detokenize=False)
"""How to sample what is not generated."""
_WARMING_PRIORITY = 1 << 20
_WARMED_AT_ONCE = 4


class _Opening:
    """What `Engine.open` returns: await it, or enter it.

    :raises InvalidParamsError: when it is used as the engine that it is not yet.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self._source = source
        self._config = config
        self._engine: Engine | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(Engine, name):
            raise _not_open(f"Engine.open(...).{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> NoReturn:
        raise _not_open("with Engine.open(...)")

    def __exit__(self, *_: object) -> None:
        """There is nothing to leave: entering failed."""

    def __await__(self) -> Generator[Any, Any, Engine]:
        return self._open().__await__()

    async def __aenter__(self) -> Engine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._engine is not None:
            await self._engine.__aexit__(kind, error, traceback)

    async def _open(self) -> Engine:
        loaded: list[LoadedModel] = []
        abandoned = threading.Event()

        def load() -> None:
            loaded.append(self._source.load(self._config))
            if abandoned.is_set():
                close()

        def close() -> None:
            # Both sides may come here at once; popping lets one of them have it.
            with contextlib.suppress(IndexError):
                loaded.pop().close()

        try:
            await _in_thread(load)
            engine = Engine(loaded[0], self._config)
        except BaseException:
            # Cancelled, mostly: loading cannot be interrupted, but nobody will want the result.
            abandoned.set()
            close()
            raise
        return engine


class Engine:
    """A batched language model inside this process. Made by `Engine.open`.

    One engine serves any number of tasks, threads and event loops at a time (asyncio and trio),
    and outlives each of them. All computing happens in its one thread.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig | None = None, **knobs: Any
    ) -> None:
        if not isinstance(loaded, LoadedModel) or config is None or knobs:
            raise InvalidParamsError(
                "Engine",
                loaded,
                "made by Engine.open: `async with Engine.open(model) as engine`, or "
                "`engine = await Engine.open(model)`",
            )
        self._loaded = loaded
        self.config = replace(
            config,
            max_model_len=loaded.max_model_len,
            max_num_mixed_tokens=config.max_num_mixed_tokens or loaded.max_num_mixed_tokens,
        )
        self._core = EngineCore(
            self.config,
            BlockPool(
                loaded.num_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
                cost_aware=config.cache_policy == "cost_aware",
            ),
            loaded.runner,
            loaded.tiers,
            attention_tokens=loaded.attention_tokens,
        )
        self._driver = Driver(self._core, f"ragserve engine ({loaded.name})")
        self._preparation = Preparation(loaded, self.config, self._driver)
        self._segment_keys = SegmentHashes(config.block_size)
        self._mailboxes: weakref.WeakValueDictionary[object, Mailbox] = (
            weakref.WeakValueDictionary()
        )
        self._ids = itertools.count()
        self._id_prefix = secrets.token_hex(4)
        self._streams: weakref.WeakValueDictionary[str, Stream] = weakref.WeakValueDictionary()
        # An engine that is dropped unclosed must not leave its thread behind.
        self._finalizer = weakref.finalize(
            self, _terminate, self._driver, self._preparation.encoders
        )
        self._driver.start()
        log_opened(loaded, self.config)

    @staticmethod
    def open(model: str | Path | ModelSource, **knobs: Any) -> _Opening:
        """Load a model: `async with Engine.open(...) as engine`, or `await Engine.open(...)`.

        As a context manager it drains at the end (see `aclose`), and on an error or a
        cancellation ends at once. Awaited, it must be closed by the caller.

        :param model: a Hugging Face folder or hub id (safetensors), a `.gguf` file, or a
            `ModelSource`.
        :param knobs: fields of `EngineConfig`; some defaults depend on the device (see
            `EngineConfig.for_device`).
        :raises InvalidParamsError: for an unknown knob, or one outside its range.
        :raises ModelLoadError: if files are missing, broken, or do not fit each other.
        :raises UnsupportedModelError: if it is an architecture that we do not implement.
        :raises OutOfMemoryError: if the KV pool does not fit.
        """
        source = PretrainedModel(model) if isinstance(model, str | Path) else model
        if isinstance(source, type) or not callable(getattr(source, "load", None)):
            raise InvalidParamsError(
                "model", model, "the path of a model, a hub id, or a ModelSource"
            )
        return _Opening(source, EngineConfig.for_device(**knobs))

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            self.terminate()

    def __repr__(self) -> str:
        s = self.statistics()
        return (
            f"<Engine {self.model_name} {self._driver.state} [running {s.num_running}, waiting "
            f"{s.num_waiting} | blocks {s.blocks_used}/{s.blocks_total} used, "
            f"{s.blocks_cached} cached]>"
        )

    @property
    def model_name(self) -> str:
        """Name or path the model was opened by."""
        return self._loaded.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; thread-safe, but blocking: prefer `tokenize` in async code."""
        return self._loaded.tokenizer

    def stream(
        self,
        prompt: PromptLike | TokenizedPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        namespace: str = "",
    ) -> Stream:
        """Continue a prompt, token by token.

        Nothing happens before the stream is entered, or first iterated.

        :param prompt: text, token ids, chat messages, a `Prompt` of segments, or what
            `tokenize` gave.
        :param params: how to sample; None is `SamplingParams()`.
        :param request_id: for logs and `abort`; None makes one up.
        :param priority: lower goes first.
        :param namespace: the tenant; cached blocks are never shared between namespaces.
        :raises InvalidParamsError: now, if `params` do not fit the model or the id is in use; on
            entering, if the prompt is not valid.

        Entering it raises, with nothing queued, PromptTooLongError, QueueFullError,
        QueueTimeoutError, EngineClosedError or EngineDeadError. The place in the queue is taken
        before the prompt is encoded.
        """
        params = params if params is not None else SamplingParams()
        return self._stream(Call(prompt, params, priority, namespace), request_id)

    async def generate(
        self,
        prompt: PromptLike | TokenizedPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        namespace: str = "",
    ) -> Completion:
        """Continue a prompt and return the whole answer. Arguments and errors as in `stream`."""
        async with self.stream(
            prompt, params, request_id=request_id, priority=priority, namespace=namespace
        ) as stream:
            async for _ in stream:
                pass
            return stream.completion

    # -- the cache ------------------------------------------------------------------------

    def prefill(
        self,
        prompt: PromptLike | TokenizedPrompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        namespace: str = "",
        speculative: bool = False,
        persist: bool = False,
    ) -> Stream:
        """Compute and cache a prompt's KV, and generate nothing.

        The stream has one delta, an empty one with finish reason "length". Its completion tells how
        many of the tokens were cached already. Each segment counts as followed by another, so that
        all its blocks can be found by a prompt that goes on with a further segment.

        :param speculative: only if nothing else is to be computed, a little at a time; nobody waits
            for it, and what it holds is taken from it first.
        :param persist: put the blocks into `disk_cache` too, if there is one.

        The other arguments, and what is raised, are as in `stream`; on entering it raises
        QueueFullError also if it is speculative and somebody waits.
        """
        call = Call(
            prompt,
            _NOTHING,
            priority,
            namespace,
            prefill_only=True,
            speculative=speculative,
            persist=persist,
        )
        return self._stream(call, request_id)

    async def warm(
        self,
        prompts: Iterable[PromptLike | TokenizedPrompt],
        *,
        namespace: str = "",
        persist: bool = True,
    ) -> int:
        """Compute prompts ahead of the first question: documents behind their system prompt, say.

        They go behind all requests of the usual priorities.

        :param persist: put the blocks into `disk_cache` too, if there is one.
        :returns: the tokens that were computed; the others were cached already.
        :raises: what `prefill` raises for one of them; the others are ended then.
        """
        computed, tasks = 0, iter(prompts)

        async def work() -> None:
            nonlocal computed
            for prompt in tasks:
                stream = self.prefill(
                    prompt, namespace=namespace, persist=persist, priority=_WARMING_PRIORITY
                )
                async with stream:
                    async for _ in stream:
                        pass
                usage = stream.completion.usage
                computed += usage.prompt_tokens - usage.cached_tokens

        try:
            async with anyio.create_task_group() as group:
                for _ in range(min(_WARMED_AT_ONCE, self.config.max_queued_requests)):
                    group.start_soon(work)
        except BaseExceptionGroup as errors:
            # The first is what a caller without tasks expects.
            raise errors.exceptions[0] from None
        return computed

    async def pin(self, prompt: PromptLike | TokenizedPrompt, *, namespace: str = "") -> Pin:
        """Compute a prompt, a system prompt say, and keep its blocks in the pool.

        :raises InvalidParamsError: if more than half of the pool would be pinned.
        :raises: what `prefill` raises.
        """
        tokenized, keys = await self._preparation.block_hashes(prompt, namespace)
        blocks = PinnedBlocks(keys)

        def release() -> None:
            # An engine that is closed keeps nothing.
            with contextlib.suppress(EngineClosedError, EngineDeadError):
                self._driver.call(blocks.release)

        pin = Pin(len(tokenized.token_ids), len(keys), release)
        try:
            # Whoever is cancelled here does not know whether they were taken; `blocks` does.
            await result_of(self._driver.call(blocks.take))
            stream = self.prefill(tokenized, namespace=namespace)
            async with stream:
                async for _ in stream:
                    pass
        except BaseException:
            pin.release()
            raise
        return pin

    def probe(self, namespace: str = "") -> PrefixProbe:
        """Look what of a prompt is cached, before it is made; from any thread."""
        pool, tiers = self._core.pool, self._core.tiers
        is_cached = pool.__contains__
        if tiers is not None:

            def is_cached(key: BlockHash) -> bool:
                return key in pool or key in tiers

        return PrefixProbe(is_cached, self.config.block_size, namespace, self._segment_keys)

    # -- looking at it --------------------------------------------------------------------

    async def tokenize(
        self, prompt: PromptLike | TokenizedPrompt, *, namespace: str = ""
    ) -> TokenizedPrompt:
        """Tokenize off the event loop; `stream` takes the result.

        Meanwhile it has a place in the queue, as a request has.

        :param namespace: the tenant; tenants take turns.
        :raises InvalidParamsError: if it is no valid prompt.
        :raises PromptTooLongError: if more token ids are given than fit.
        :raises QueueFullError: if too much waits already.
        :raises QueueTimeoutError: if it waited longer than `queue_timeout`.
        :raises EngineClosedError: if the engine is closing or closed.
        :raises EngineDeadError: if a step has failed.
        """
        return await self._preparation.tokenize(prompt, namespace)

    def abort(self, request_id: str) -> bool:
        """End a running request; its stream ends with finish reason "abort".

        :returns: whether there was such a request.
        """
        stream = self._streams.get(request_id)
        return stream is not None and stream.abort()

    def statistics(self) -> Statistics:
        """Counts and times, from any thread. Not a snapshot of one instant while it runs."""
        pool = self._core.pool.statistics()
        scheduler, recorder = self._core.scheduler, self._core.recorder
        reuse, tiers = scheduler.reuse, self._core.tiers
        cache = CacheStatistics(
            query_tokens=dict(reuse.query_tokens),
            hit_tokens=dict(reuse.hit_tokens),
            miss_tokens=dict(reuse.miss_tokens),
            awaited_tokens=reuse.awaited_tokens,
            blocks_pinned=self._core.pool.num_pinned,
            tiers={} if tiers is None else tiers.statistics(),
        )
        return Statistics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._driver.num_arriving,
            blocks_total=pool.total,
            blocks_used=pool.held,
            blocks_cached=pool.cached,
            cache=cache,
            prompt_tokens=self._core.prompt_tokens,
            generated_tokens=self._core.generated_tokens,
            num_steps=self._core.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_evictions=pool.evictions,
            num_finished=dict(recorder.num_finished),
            num_errors=dict(recorder.num_errors),
            num_rejected=dict(recorder.num_rejected),
            time_to_first_token=recorder.time_to_first_token.read(),
            time_per_output_token=recorder.time_per_output_token.read(),
            inter_token_latency=recorder.inter_token_latency.read(),
            request_duration=recorder.request_duration.read(),
            queue_time=recorder.queue_time.read(),
            prefill_time=recorder.prefill_time.read(),
            decode_time=recorder.decode_time.read(),
        )

    def add_listener(self, listener: Listener) -> None:
        """Tell it of tokens and ended requests from now on, in the engine's thread."""
        self._core.recorder.listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Tell it no more. Idempotent; a call that is under way ends as it will."""
        self._core.recorder.listeners.remove(listener)

    def check_open(self) -> None:
        """Check that requests are taken, before work for one is begun elsewhere.

        :raises EngineClosedError: if the engine is closing or closed, or is another process's.
        :raises EngineDeadError: if a step has failed.
        """
        self._driver.check_open()

    def check_options(self, params: SamplingParams, *, priority: int, namespace: str) -> None:
        """Check what of a request can be told without its prompt. Arguments as in `stream`.

        :raises InvalidParamsError: if one is of the wrong type, too large, or does not fit the
            model.
        """
        self._preparation.check(Call("", params, priority, namespace))

    def health(self) -> Health:
        """Whether it takes requests, and what killed it if it is dead."""
        return Health(self._driver.state, self._driver.cause)

    async def check_integrity(self) -> None:
        """Check the block pool against the live requests.

        :raises RuntimeError: if something does not add up.
        """
        await self._call(EngineCore.check_integrity)

    async def reset_prefix_cache(self) -> None:
        """Forget all that is cached, in the pool, the host's memory and the disk cache, and what
        was sent; live requests are not disturbed.

        :raises DiskCacheError: if files of the disk cache cannot be removed; all else is forgotten.
        """
        emptied: list[Future[None]] = []
        await self._call(lambda core: emptied.append(core.forget_cache()))
        await result_of(emptied[0])

    def begin_drain(self) -> None:
        """Take no more requests; those that run go on. From any thread; idempotent.

        For an application that is about to end: `health` says "draining", and new requests raise
        EngineClosedError. `aclose` or `terminate` is still to be called.
        """
        self._driver.drain()

    async def aclose(self, *, drain: bool = True) -> None:
        """Take no more requests, let those that run finish, free all memory. Idempotent.

        :param drain: False ends running requests with EngineClosedError instead.

        If it is cancelled while draining, what runs is ended and memory is freed all the same.
        """
        try:
            if drain:
                self._driver.drain()
            else:
                self._driver.terminate()
            await _in_thread(self._driver.join)
        except BaseException:
            self.terminate()
            raise
        self._finalizer()

    def terminate(self) -> None:
        """End everything now: streams raise EngineClosedError. From any thread; idempotent.

        The engine's thread ends, and its memory is freed, when its current step is over.
        """
        self._finalizer()

    # -- making requests ------------------------------------------------------------------

    def _stream(self, call: Call, request_id: str | None) -> Stream:
        self._preparation.check(call)
        if request_id is None:
            request_id = f"req-{self._id_prefix}-{next(self._ids)}"
        else:
            self.config.limits.check_name("request_id", request_id)
            if (known := self._streams.get(request_id)) is not None and not known.ended:
                raise InvalidParamsError("request_id", request_id, "not one that is in use")
        stream = Stream(
            request_id,
            self.model_name,
            self._driver,
            partial(self._make_requests, call, request_id),
            self._mailbox,
            self.config.stream_interval,
            speculative=call.speculative,
        )
        self._streams[request_id] = stream
        return stream

    async def _make_requests(
        self, call: Call, request_id: str, timeline: Timeline
    ) -> tuple[Place, list[Request]]:
        # A method, so that a stream keeps the engine alive.
        return await self._preparation.requests(call, request_id, timeline)

    def _mailbox(self) -> Mailbox:
        loop = current_event_loop()
        mailbox = self._mailboxes.get(loop.key)
        if mailbox is None:
            mailbox = self._mailboxes[loop.key] = Mailbox(
                loop, open_letters, self.config.stream_interval
            )
        return mailbox

    async def _call(self, function: Callable[[EngineCore], None]) -> None:
        await result_of(self._driver.call(function))


def _not_open(used: str) -> InvalidParamsError:
    return InvalidParamsError(
        "engine",
        used,
        "an engine that is open: `async with Engine.open(...) as engine`, or "
        "`engine = await Engine.open(...)`",
    )


async def _in_thread(function: Callable[[], object]) -> None:
    """Wait for something slow. It needs a thread even if the application's own are all busy."""
    limiter = anyio.CapacityLimiter(1)
    await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)


def _terminate(driver: Driver, encoders: Encoders) -> None:
    if driver.forked:
        return  # both are the other process's
    driver.terminate()
    encoders.close()
