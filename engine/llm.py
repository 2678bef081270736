"""A small synchronous face for scripts and notebooks; web applications use `Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard, overload

import anyio
from anyio.from_thread import start_blocking_portal

from .engine import Engine
from .errors import EngineClosedError, InvalidParamsError
from .outputs import Completion
from .prompt import Prompt, PromptLike
from .runtime.loading import ModelSource
from .runtime.statistics import Statistics
from .sampling_params import SamplingParams

__all__ = ["LLM"]


class LLM:
    """An engine for code without an event loop: `with LLM(model) as llm: llm.generate(...)`.

    It runs an event loop in a thread of its own, and may be used from several threads.

    :param model: as for `Engine.open`.
    :param knobs: fields of `EngineConfig`.
    :raises: what `Engine.open` raises.
    """

    def __init__(self, model: str | Path | ModelSource, **knobs: Any) -> None:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())

            async def open_engine() -> Engine:
                return await Engine.open(model, **knobs)

            self._engine = self._portal.call(open_engine)
            stack.callback(self._close)
            self._stack = stack.pop_all()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._engine.terminate()
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self._engine!r}>"

    @overload
    def generate(
        self,
        prompts: str | Prompt | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[Prompt] | list[list[int]] | list[list[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: PromptLike
        | list[str]
        | list[Prompt]
        | list[list[int]]
        | list[list[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> Completion | list[Completion]:
        """Continue one prompt, or a list of them together.

        A list of integers, or of chat messages, is one prompt; a list of anything else is many.

        :param params: for all, or a list with one for each.
        :param use_tqdm: show a progress bar on standard error.
        :returns: one completion, or a list in the order of the prompts.
        :raises EngineClosedError: if it was closed.
        :raises InvalidParamsError: for lists of different lengths, or what a prompt makes
            `Engine.generate` raise; the other prompts of the list are ended then.
        """
        batch: list[Any] = [*prompts] if _are_many(prompts) else [prompts]
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(batch)
        elif isinstance(params, Mapping | str) or not isinstance(params, Sequence):
            raise InvalidParamsError("params", params, "a SamplingParams, or a list of them")
        elif len(params) == len(batch):
            each = list(params)
        else:
            raise InvalidParamsError("params", len(params), f"one for each of {len(batch)} prompts")
        if self._engine.health().status == "closed":
            raise EngineClosedError("the engine is closed; open a new one")
        call = _Call()
        try:
            completions = self._portal.start_task_soon(
                self._generate, call, batch, each, use_tqdm
            ).result()
        except BaseException:
            # Ctrl-C ends what runs, too, even if it came before we had anything to cancel.
            self._portal.start_task_soon(call.cancel)
            raise
        return completions if _are_many(prompts) else completions[0]

    def statistics(self) -> Statistics:
        """See `Engine.statistics`."""
        return self._engine.statistics()

    def close(self) -> None:
        """Free all memory; idempotent."""
        self._stack.close()

    def _close(self) -> None:
        self._portal.call(self._engine.aclose)

    async def _generate(
        self,
        call: _Call,
        prompts: list[PromptLike],
        params: list[SamplingParams | None],
        use_tqdm: bool,
    ) -> list[Completion]:
        with anyio.CancelScope() as call.scope:
            if call.cancelled:
                call.scope.cancel()
            return await self._generate_all(prompts, params, use_tqdm)
        return []  # to nobody

    async def _generate_all(
        self, prompts: list[PromptLike], params: list[SamplingParams | None], use_tqdm: bool
    ) -> list[Completion]:
        completions: list[Completion | None] = [None] * len(prompts)
        # No more at a time than may wait, so that a long list does not fill its own queue.
        limit = anyio.CapacityLimiter(self._engine.config.max_queued_requests)

        async def one(index: int) -> None:
            async with limit:
                completions[index] = await self._engine.generate(prompts[index], params[index])
            if progress is not None:
                progress.update()

        with _progress_bar(len(prompts)) if use_tqdm else nullcontext() as progress:
            try:
                async with anyio.create_task_group() as tasks:
                    for index in range(len(prompts)):
                        tasks.start_soon(one, index)
            except BaseExceptionGroup as group:
                # The first error is what a caller without tasks expects.
                raise group.exceptions[0] from None
        return [completion for completion in completions if completion is not None]


class _Call:
    """A call that may be given up. All of it belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.scope: anyio.CancelScope | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End it, whether it has begun or not."""
        self.cancelled = True
        if self.scope is not None:
            self.scope.cancel()


def _progress_bar(total: int) -> Any:
    # Made only when asked for: even a disabled one starts a thread.
    from tqdm import tqdm

    return tqdm(total=total, unit="prompt")


def _are_many(prompts: object) -> TypeGuard[Sequence[Any]]:
    if isinstance(prompts, str | Prompt) or not isinstance(prompts, Sequence) or not prompts:
        return isinstance(prompts, Sequence) and not prompts and not isinstance(prompts, str)
    return not isinstance(prompts[0], int | Mapping)
