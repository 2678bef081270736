"""The engine without threads: add, abort, step. Synchronous and deterministic."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from .block_pool import BlockPool
from .config import EngineConfig
from .errors import QueueTimeoutError
from .outputs import Delta, FinishReason
from .request import Request, RequestState
from .scheduler import SampledToken, Scheduler, StepPlan, StepResult

__all__ = ["EngineCore", "Runner", "Update"]


class Runner(Protocol):
    """Computes plans: a model on a device, or a script in a test."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. Any exception ends the engine."""

    def close(self) -> None:
        """Give back the memory. Called once, after the last step."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a step means for one request: a delta, or the error that ended it."""

    request: Request
    delta: Delta
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last one of its request."""
        return self.delta.finish_reason is not None


class EngineCore:
    """Requests in, updates out, one step at a time. Owned by one thread.

    :param config: knobs of the scheduler.
    :param pool: blocks; as many as the runner has memory for.
    :param runner: what computes the steps.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, runner: Runner) -> None:
        self.config = config
        self.pool = pool
        self.runner = runner
        self.scheduler = Scheduler(config, pool)
        self.num_steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request that has been checked to fit."""
        request.timeline.queued = request.stamp()
        self.scheduler.add(request)

    def abort(self, request: Request, error: Exception | None = None) -> Update | None:
        """End a request now, whatever it is doing; None if it had ended already.

        Its blocks are free when this returns; the complete ones stay in the cache.
        """
        if request.state is RequestState.FINISHED:
            return None
        return self._end(request, "error" if error else "abort", error=error)

    def expire(self) -> list[Update]:
        """End the requests that have waited longer than `queue_timeout` to be started."""
        limit = self.config.queue_timeout
        if limit is None:
            return []
        now = time.monotonic_ns()
        updates = []
        for request in list(self.scheduler.waiting):
            queued = request.timeline.queued
            # Of a request with choices the leader waits for all; another leads when it ends.
            if request not in self.scheduler.queued or queued is None:
                continue
            if now - queued >= limit * 1e9:
                error = QueueTimeoutError((now - queued) / 1e9, limit)
                updates.append(self._end(request, "error", error=error))
        return updates

    def next_expiry(self) -> float | None:
        """Seconds until `expire` has something to do; None if it never will."""
        if self.config.queue_timeout is None:
            return None
        since = (request.timeline.queued for request in self.scheduler.queued)
        stamps = [stamp for stamp in since if stamp is not None]
        if not stamps:
            return None
        return max(0.0, self.config.queue_timeout - (time.monotonic_ns() - min(stamps)) / 1e9)

    def step(self) -> list[Update]:
        """Compute one step; empty, having done nothing, if no request can run now."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return []
        started = time.monotonic_ns()
        result = self.runner.execute(plan)
        ended = time.monotonic_ns()
        self.scheduler.commit(plan, result, started, ended)
        self.num_steps += 1
        updates = []
        for index, (chunk, sampled) in enumerate(zip(plan.chunks, result.sampled, strict=True)):
            if index in result.errors:
                updates.append(self._end(chunk.request, "error", error=result.errors[index]))
                continue
            # After a preemption a chunk recomputes output too, which is no prompt.
            self.prompt_tokens += max(
                0, min(chunk.end, chunk.request.num_prompt_tokens) - chunk.start
            )
            if sampled is None:
                continue
            self.generated_tokens += 1
            updates.append(self._advance(chunk.request, sampled, ended))
        return updates

    def check_integrity(self) -> None:
        """Check the pool against the live requests (see `BlockPool.check_integrity`)."""
        self.pool.check_integrity(r.blocks for r in self.scheduler.live())

    def _advance(self, request: Request, sampled: SampledToken, at: int) -> Update:
        """Append a token, turn it into text, end the request if it is over."""
        reason = self.scheduler.append(request, sampled.token_id, at)
        text = ""
        if request.text is not None:
            # The token that stops is shown only if asked for, like a stop string.
            hidden = reason == "stop" and not request.params.include_stop_str_in_output
            try:
                text = "" if hidden else request.text.push((sampled.token_id,))
            except Exception as error:
                # One request's text must not end the others.
                return self._end(request, "error", sampled, error=error)
            if request.text.stop_reason is not None:
                request.stop_reason = request.text.stop_reason
                reason = "stop"
        if reason is not None:
            return self._end(request, reason, sampled, text)
        return Update(request, _delta(request, text, sampled, None))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        sampled: SampledToken | None = None,
        text: str = "",
        error: Exception | None = None,
    ) -> Update:
        self.scheduler.finish(request, reason)
        if request.text is not None and error is None:
            try:
                text += request.text.finish()
            except Exception as failure:
                request.finish_reason, reason, error = "error", "error", failure
        return Update(request, _delta(request, text, sampled, reason), error)


def _delta(
    request: Request, text: str, sampled: SampledToken | None, reason: FinishReason | None
) -> Delta:
    return Delta(
        text=text,
        token_ids=() if sampled is None else (sampled.token_id,),
        index=request.index,
        logprobs=None if sampled is None or sampled.logprob is None else (sampled.logprob,),
        finish_reason=reason,
    )
