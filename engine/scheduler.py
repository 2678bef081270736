"""Who runs in the next step, and with how many tokens.

There are no phases: each step has a budget of `max_num_batched_tokens`. Sequences that decode
take one token each first; prompts take chunks from what is left; then waiting requests are
admitted, in the order of (priority, arrival). A long prompt therefore never stalls a stream.

When blocks run out, the newest sequence of the lowest priority is preempted: its blocks go
back (the complete ones stay in the cache), it waits again, and what it had is recomputed later.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .block_pool import BlockPool
from .config import EngineConfig
from .outputs import FinishReason, TokenLogprob
from .request import Chunk, Request, RequestState

__all__ = ["SampledToken", "ScheduledChunk", "Scheduler", "StepPlan", "StepResult"]

_LONG_LOOKUPS = 32
"""Long prompts without a place, per step, for which the cache is asked whether it makes them short:
bounds the time that many of them take."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + num_tokens` of one sequence, to be computed in this step.

    :param sample: whether the chunk ends at the sequence's end, so that it gives a next token.
    """

    request: Request
    start: int
    num_tokens: int
    sample: bool

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Blocks for all of it are held already."""

    chunks: list[ScheduledChunk]

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class SampledToken(NamedTuple):
    """A sampled token, and its log-probability if asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    :param sampled: one per chunk of the plan, None where the chunk was not to be sampled.
    :param prompt_logprobs: by index of the chunk, for the prompt tokens after each of its
        positions, where asked for.
    :param errors: by index of the chunk, what went wrong with that sequence alone.
    """

    sampled: list[SampledToken | None]
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


class Scheduler:
    """Queues of requests over one block pool. Not thread-safe: owned by the engine thread."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._watermark = int(config.watermark * pool.num_blocks)
        self._order = itertools.count()
        self.waiting: list[Request] = []
        """Sorted by (priority, arrival)."""
        self.running: list[Request] = []
        """In order of admission."""
        self.queued: set[Request] = set()
        """Requests that have never been started; of one with choices, the leader stands for all."""
        self.num_queued_tokens = 0
        """Their prompt tokens."""
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def num_queued(self) -> int:
        """Requests (not choices) that have never been started."""
        return len(self.queued)

    @property
    def has_requests(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a new request, behind its equals."""
        request.order = next(self._order)
        if request.leader is None:
            self._enqueue(request)
        bisect.insort(self.waiting, request, key=lambda r: r.sort_key)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state and give back its blocks. Ending it twice is harmless."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.timeline.finished = request.stamp()
        self._release(request)
        was_queued = self._dequeue(request)
        if request.num_computed < request.num_prompt_tokens:
            leader = self._elect_leader(request)
            if was_queued and leader is not None:
                self._enqueue(leader)

    def schedule(self) -> StepPlan:
        """Plan the next step and hold the blocks it needs. Empty if nothing can run."""
        planned: dict[Request, int] = {}
        budget = self._config.max_num_batched_tokens
        preempted = False

        for request in sorted(self.running, key=lambda r: r.sort_key):
            if request.state is not RequestState.RUNNING or request.paused:
                continue
            if request.num_to_compute != 1:
                continue
            while not self._grow(request, request.num_tokens):
                if len(self.running) == 1 and self._release_holder(request):
                    continue
                victim = self._victim()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                planned[request] = 1
                budget -= 1

        threshold = self._config.long_threshold
        prefilling = sorted(
            (r for r in self.running if r.num_to_compute > 1 and not r.paused),
            key=lambda r: r.sort_key,
        )
        long = [r for r in prefilling if r.num_to_compute > threshold]
        # Half of the step is kept for long prompts; short ones and new ones go first with the
        # other half, and what they leave is the long ones' too. So neither holds up the other.
        reserve = budget // 2 if long else 0
        spare = budget - reserve
        for request in prefilling:
            if request.num_to_compute <= threshold:
                spare -= self._plan_prefill(request, spare, planned)
        if not preempted:
            spare -= self._admit(spare, planned, long)
        left = spare + reserve
        for request in long:
            left -= self._plan_prefill(request, left, planned)
        return StepPlan(
            [
                ScheduledChunk(r, r.num_computed, count, count == r.num_to_compute)
                for r, count in planned.items()
            ]
        )

    def commit(self, plan: StepPlan, result: StepResult, started: int, ended: int) -> None:
        """Record what the step computed: KV, prefill chunks, prompt log-probabilities.

        Sampled tokens are appended by `append`, after the caller has looked at them.

        :param started: when the step started, `time.monotonic_ns`.
        :param ended: when its result was there.
        """
        for index, chunk in enumerate(plan.chunks):
            request = chunk.request
            if request.state is not RequestState.RUNNING:
                continue
            request.num_computed = chunk.end
            if chunk.num_tokens > 1 or not request.output_token_ids:
                request.timeline.chunks.append(Chunk(started, ended, chunk.num_tokens))
            self._publish(request)
            for position, logprob in enumerate(
                result.prompt_logprobs.get(index, ()), start=chunk.start
            ):
                # A recomputed prompt gives them again.
                if position == len(request.prompt_logprobs):
                    request.prompt_logprobs.append(logprob)
            if chunk.end == request.num_prompt_tokens:
                self._share_prompt(request)

    def append(self, request: Request, token_id: int, at: int) -> FinishReason | None:
        """Append a sampled token; say whether it ends the sequence, and how.

        :param at: when it was sampled, `time.monotonic_ns`.
        """
        request.output_token_ids.append(token_id)
        if request.timeline.first_token is None:
            request.timeline.first_token = at
        request.timeline.last_token = at
        count = len(request.output_token_ids)
        if token_id in request.stop_token_ids and count >= request.params.min_tokens:
            if token_id not in request.eos_token_ids:
                request.stop_reason = token_id
            return "stop"
        return "length" if count >= request.max_tokens else None

    def live(self) -> Iterator[Request]:
        """Every request that has not ended."""
        return itertools.chain(self.running, self.waiting)

    def _enqueue(self, request: Request) -> None:
        self.queued.add(request)
        self.num_queued_tokens += request.num_prompt_tokens

    def _dequeue(self, request: Request) -> bool:
        if request not in self.queued:
            return False
        self.queued.remove(request)
        self.num_queued_tokens -= request.num_prompt_tokens
        return True

    # -- blocks ---------------------------------------------------------------------------

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Hold the blocks for `num_tokens` tokens; False, and no change, if too few are left."""
        missing = request.layout.num_blocks(num_tokens) - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def _publish(self, request: Request) -> None:
        complete = request.layout.num_complete(request.num_computed)
        if complete <= request.num_published:
            return
        request.extend_keys()
        for index in range(request.num_published, complete):
            self._pool.publish(
                request.blocks[index], request.keys[index], request.retention_of(index)
            )
        request.num_published = complete

    def _release(self, request: Request) -> None:
        self._pool.release(request.blocks)
        request.blocks = []

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.state = RequestState.WAITING
        request.num_computed = request.num_published = 0
        request.timeline.preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=lambda r: r.sort_key)

    def _victim(self) -> Request:
        """Whose blocks to take: paused ones first, then lowest priority, then newest."""
        return max(self.running, key=lambda r: (r.paused, *r.sort_key))

    # -- prompts --------------------------------------------------------------------------

    @staticmethod
    def _plan_prefill(request: Request, budget: int, planned: dict[Request, int]) -> int:
        count = min(request.num_to_compute, budget)
        if count > 0:
            planned[request] = count
        return count

    def _admit(self, budget: int, planned: dict[Request, int], long: list[Request]) -> int:
        """Start waiting requests; give the tokens planned for them.

        Long ones are appended to `long` rather than planned.
        """
        left = budget
        # A paused request gives up its seat: a slow consumer must not hold up the others.
        seats = self._config.max_num_seqs - sum(not r.paused for r in self.running)
        if seats <= 0:
            return 0
        threshold, lookups = self._config.long_threshold, 0
        for request in list(self.waiting):
            if left <= 0 or seats <= 0:
                break
            if request.paused or request.leader is not None:
                continue
            no_long = len(long) >= self._config.max_long_partial_prefills
            if no_long and request.num_tokens > threshold:
                if lookups == _LONG_LOOKUPS:
                    continue
                lookups += 1
            shared = request.blocks or self._find_prefix(request)
            cached = request.layout.start(len(shared))
            is_long = request.num_tokens - cached > threshold
            if is_long and no_long:
                continue
            if not self._seat(request, shared):
                break
            if request.timeline.first_scheduled is None:
                request.timeline.first_scheduled = request.stamp()
                request.timeline.cached_tokens = cached
            if self._dequeue(request):
                self.prefix_query_tokens += request.num_prompt_tokens
                self.prefix_hit_tokens += cached
            if len(self.running) == self._config.max_num_seqs:
                self._preempt(self._victim())
            self.waiting.remove(request)
            self.running.append(request)
            request.state = RequestState.RUNNING
            request.num_computed = cached
            request.num_published = len(shared)
            seats -= 1
            if is_long:
                long.append(request)
            else:
                left -= self._plan_prefill(request, left, planned)
        return budget - left

    def _find_prefix(self, request: Request) -> list[int]:
        """Stored blocks that it may take; at least one of its tokens is always left to compute."""
        if request.params.prompt_logprobs is not None and not request.output_token_ids:
            return []  # their logits must be computed
        request.extend_keys()
        usable = request.layout.num_complete(request.num_tokens - 1)
        return self._pool.find(request.keys[:usable])

    def _seat(self, request: Request, shared: list[int]) -> bool:
        """Hold `shared` and new blocks for all its tokens; False, and no change, if too few.

        Blocks for the whole prompt are held at once, so that prompts admitted together do not
        preempt one another half-way.
        """
        missing = request.layout.num_blocks(request.num_tokens) - len(shared)
        held_already = shared is request.blocks
        while True:
            idle = 0 if held_already else self._pool.num_idle_of(shared)
            reserve = self._watermark if self.running else 0
            if self._pool.num_available - idle - missing >= reserve:
                break
            paused = next((r for r in reversed(self.running) if r.paused), None)
            if paused is not None:
                self._preempt(paused)
            elif self.running or not self._release_holder(request):
                return False
        if not held_already:
            self._pool.acquire(shared)
            request.blocks = list(shared)
        return self._grow(request, request.num_tokens)

    def _release_holder(self, request: Request) -> bool:
        """Take a shared prompt from another that only waits; False if none has one.

        It must find it again, or recompute it. The last resort: for who has the rest of the
        pool for itself.
        """
        holder = next((r for r in self.waiting if r.blocks and r is not request), None)
        if holder is not None:
            self._release(holder)
        return holder is not None

    # -- choices of one prompt ------------------------------------------------------------

    def _share_prompt(self, leader: Request) -> None:
        """Let the other choices hold the prompt's blocks, complete now, before they can go."""
        usable = leader.layout.num_complete(leader.num_prompt_tokens - 1)
        for request in self.waiting:
            if request.leader is leader:
                request.leader = None
                request.blocks = leader.blocks[:usable]
                self._pool.acquire(request.blocks)

    def _elect_leader(self, gone: Request) -> Request | None:
        """A leader ended before its prompt was computed: the next choice, if any, computes it."""
        followers = [r for r in self.waiting if r.leader is gone]
        for request in followers:
            request.leader = None if request is followers[0] else followers[0]
        return followers[0] if followers else None
