"""The engine without threads: add, abort, step. Synchronous and deterministic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..cache.block_pool import BlockPool
from ..config import EngineConfig
from ..errors import QueueTimeoutError
from ..offload.tiers import Tiers
from ..outputs import Delta, FinishReason, TokenLogprob
from ..scheduling.integrity import check_scheduler
from ..scheduling.plan import StepPlan, StepResult
from ..scheduling.request import Request, RequestState
from ..scheduling.scheduler import Scheduler
from .statistics import Recorder

__all__ = ["EngineCore", "Runner", "Update"]


class Runner(Protocol):
    """Computes plans: a model on a device, or a script in a test.

    A device that works by itself is kept busy: the next plan is launched before the result of the
    last one is looked at, and says nothing of tokens that the host does not know yet. Plans are
    computed in the order of their launches. Any exception ends the engine.
    """

    @property
    def depth(self) -> int:
        """Plans that may be under way at once: 1 if it computes in `launch`, 2 keeps a GPU busy."""

    @property
    def max_decode_steps(self) -> int:
        """Most decode steps that one plan may have."""

    def samples_on_host(self, request: Request) -> bool:
        """Whether the request's next token can only be sampled once the host knows the last one.

        Asked once for each request. Such a request never has a plan under way when the next is
        made, nor more than one step in a plan.
        """

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start computing a plan; what it gives waits for the result and gives that.

        Blocks and tokens are to be read from the plan's requests now: they change afterwards.
        Results are waited for in the order of the launches, or, when the engine ends, not at all.
        """

    def close(self) -> None:
        """Give back the memory, once what is under way has ended. Called once, as the last."""


@dataclass(slots=True)
class Update:
    """What a result means for one request: a delta, or the error that ended it."""

    request: Request
    delta: Delta
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last one of its request."""
        return self.delta.finish_reason is not None


_TOUCH_NANOSECONDS = 150_000
"""Per sequence: three times what the host needs to hand out the tokens of a plan."""


class _Pace:
    """How many decode steps a plan may have, from how long they took: of batches alike in size.

    :param seconds: that the steps of one plan may take.
    :param most: steps, however short they are.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._nanoseconds = seconds * 1e9
        self._most = most
        self._step: dict[int, float] = {}
        """Nanoseconds of a step (a moving average), by the binary digits of the batch's size."""

    def steps(self, num_seqs: int) -> int:
        """Steps for so many sequences; 1 until there is a measurement."""
        step = self._step.get(num_seqs.bit_length())
        if step is None:
            return 1
        # Handing tokens out costs some 50 µs a sequence, here and in who reads them: with many
        # sequences it is done less often, or the device would wait for it.
        wanted = min(num_seqs * _TOUCH_NANOSECONDS, 3 * self._nanoseconds)
        return max(1, min(self._most, int(max(self._nanoseconds, wanted) / step)))

    def note(self, plan: StepPlan, nanoseconds: int) -> None:
        """Learn from a plan how long its steps took."""
        # Chunks of prompts come last.
        if self._most > 1 and plan.chunks[-1].decode:
            size = len(plan.chunks).bit_length()
            step = max(1.0, nanoseconds / plan.num_steps)
            known = self._step.get(size, step)
            self._step[size] = known + 0.2 * (step - known)


class _Launched(NamedTuple):
    """A plan under way."""

    plan: StepPlan
    at: int
    wait: Callable[[], StepResult]


class EngineCore:
    """Requests in, updates out, one result at a time. Owned by one thread.

    :param config: knobs of the scheduler.
    :param pool: blocks; as many as the runner has memory for.
    :param runner: what computes the steps.
    :param tiers: behind the pool, if there are any; closed with the core.
    :param attention_tokens: position at which a token's attention costs as much as all else.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        runner: Runner,
        tiers: Tiers | None = None,
        *,
        attention_tokens: float = float("inf"),
    ) -> None:
        self.config = config
        self.pool = pool
        self.runner = runner
        self.tiers = tiers
        self.scheduler = Scheduler(config, pool, tiers, attention_tokens=attention_tokens)
        self.recorder = Recorder()
        self._launched: deque[_Launched] = deque()
        """In order, at most as many as the runner's depth."""
        self._last_ended = 0
        self._pace = _Pace(config.multi_step_seconds, runner.max_decode_steps)
        self.num_steps = 0
        """Steps whose result was taken."""
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request that has been checked to fit."""
        request.timeline.queued = request.stamp()
        request.samples_on_host = self.runner.samples_on_host(request)
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
            since = _waiting_since(request)
            # Of a request with choices the leader waits for all; another leads when it ends.
            if request not in self.scheduler.queued or since is None:
                continue
            if now - since >= limit * 1e9:
                error = QueueTimeoutError((now - since) / 1e9, limit)
                updates.append(self._end(request, "error", error=error))
        return updates

    def next_expiry(self) -> float | None:
        """Seconds until `expire` has something to do; None if it never will."""
        if self.config.queue_timeout is None:
            return None
        since = map(_waiting_since, self.scheduler.queued)
        stamps = [stamp for stamp in since if stamp is not None]
        if not stamps:
            return None
        return max(0.0, self.config.queue_timeout - (time.monotonic_ns() - min(stamps)) / 1e9)

    def step(self) -> list[Update]:
        """Launch what can be, up to the runner's depth, and take the oldest result.

        Empty, having done nothing, if no request can run now.
        """
        updates: list[Update] = []
        while len(self._launched) < self.runner.depth:
            plan = self.scheduler.schedule(self._pace.steps)
            num_ended = len(updates)
            for request in self.scheduler.take_complete():
                if request.state is not RequestState.FINISHED:
                    updates.append(self._end(request, "length"))
            for request, error in self.scheduler.take_broken():
                if request.state is not RequestState.FINISHED:
                    updates.append(self._end(request, "error", error=error))
            if not plan.chunks:
                if len(updates) > num_ended:
                    continue  # what they held may be what others need to run
                break
            at = time.monotonic_ns()
            self._launched.append(_Launched(plan, at, self.runner.launch(plan)))
        if self._launched:
            updates += self._take(self._launched.popleft())
        return updates

    def close(self) -> None:
        """Drop what is under way, and close the runner."""
        self._launched.clear()
        try:
            if self.tiers is not None:
                self.tiers.close()
        finally:
            self.runner.close()

    def forget_cache(self) -> Future[None]:
        """Forget all that is cached, in the pool and behind it, and what was sent; live requests
        are not disturbed.

        :returns: set once the tiers are empty, to an error if one of them cannot be emptied.
        """
        self.scheduler.forget_cached()
        self.pool.clear()
        if self.tiers is not None:
            return self.tiers.clear()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_integrity(self) -> None:
        """Check the queues, and the pool against the live requests.

        :raises RuntimeError: naming the first thing that does not add up.
        """
        check_scheduler(self.scheduler)
        self.pool.check_integrity(self.scheduler.held, self.scheduler.wanted)

    def _take(self, launched: _Launched) -> list[Update]:
        """Wait for a result and hand out what it gave."""
        plan = launched.plan
        result = launched.wait()
        ended = time.monotonic_ns()
        started = max(launched.at, self._last_ended)
        self._last_ended = ended
        self._pace.note(plan, ended - started)
        self.scheduler.commit(plan, result, started, ended)
        self.num_steps += plan.num_steps
        updates = []
        errors, logprobs = result.errors, result.logprobs
        for index, (chunk, token_ids) in enumerate(zip(plan.chunks, result.sampled, strict=True)):
            request = chunk.request
            if not chunk.decode:
                # After a preemption a chunk recomputes output too, which is no prompt.
                end = min(chunk.end, request.num_prompt_tokens)
                self.prompt_tokens += max(0, end - chunk.start)
            if request.state is RequestState.FINISHED:
                continue  # it ended while this was under way
            error = errors.get(index) if errors else None
            if token_ids:
                scores = logprobs.get(index) if logprobs else None
                updates.append(self._advance(request, token_ids, scores, ended, error))
            elif error is not None:
                updates.append(self._end(request, "error", error=error))
            elif request.prefill_only and chunk.end == request.num_prompt_tokens:
                updates.append(self._end(request, "length"))
            if len(token_ids) < chunk.num_samples and request.finish_reason is None:
                raise RuntimeError(f"{request!r}: the runner gave {token_ids} for {chunk}")
        return updates

    def _advance(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprob] | None,
        at: int,
        error: Exception | None,
    ) -> Update:
        """Append tokens up to the answer's end, turn them into text, end it if it is over.

        :param error: what went wrong after them.
        """
        count, reason = request.find_end(token_ids)
        text, sink = "", request.text
        if sink is not None:
            # The token that stops is shown only if asked for, like a stop string.
            hidden = reason == "stop" and not request.params.include_stop_str_in_output
            if shown := token_ids[: count - hidden]:
                try:
                    text = sink.push(shown)
                except Exception as failure:
                    # One request's text must not end the others.
                    reason, error = None, failure
                if sink.stop_reason is not None:
                    count, reason = sink.num_tokens - len(request.output_token_ids), "stop"
        kept = tuple(token_ids[:count])
        self.recorder.tokens(request, count, at)
        self.scheduler.append(request, kept, at)
        self.generated_tokens += count
        delta = Delta(
            text, kept, request.index, None if logprobs is None else tuple(logprobs[:count])
        )
        if reason is not None:
            if reason == "stop":
                request.stop_reason = _stop_reason(request)
            return self._end(request, reason, delta)
        if error is not None:
            return self._end(request, "error", delta, error)
        return Update(request, delta)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        delta: Delta | None = None,
        error: Exception | None = None,
    ) -> Update:
        """End a request.

        :param delta: its last tokens, if there are any.
        """
        self.scheduler.finish(request, reason)
        delta = Delta("", (), request.index) if delta is None else delta
        if request.text is not None and error is None:
            try:
                delta.text += request.text.finish()
            except Exception as failure:
                request.finish_reason, reason, error = "error", "error", failure
        delta.finish_reason = reason
        return Update(request, delta, error)


def _waiting_since(request: Request) -> int | None:
    """Waiting for the tokenizer counts, too."""
    return request.timeline.arrived or request.timeline.queued


def _stop_reason(request: Request) -> str | int | None:
    """The stop string or token that ended the answer; None for an end-of-sequence token."""
    if request.text is not None and request.text.stop_reason is not None:
        return request.text.stop_reason
    last = request.output_token_ids[-1]
    return None if last in request.eos_token_ids else last
