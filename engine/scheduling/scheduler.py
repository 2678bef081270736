"""Who runs in the next step, or steps, and with how many tokens.

There are no phases: each step has a budget of `max_num_batched_tokens`. Sequences that decode
take one token each first; prompts take chunks from what is left; then waiting requests are
admitted: of one priority, those first that have most of their prompt in the cache (see
`admission.py`). A long prompt therefore never stalls a stream.

A request whose next block is being computed by one that runs waits for it, rather than compute it
too. One whose next blocks are in a tier behind the pool is given a seat, and rests while they are
on their way.

When blocks run out, the newest sequence of the lowest priority is preempted: its blocks go
back (the complete ones stay in the cache), it waits again, and what it had is recomputed later.

Plans are made ahead of results: `schedule` counts what it plans as computed, and the tokens that
are being sampled by their number alone. That blocks change hands while plans that use them are
under way is safe, for a device executes plans in the order in which they were made: an older plan
has read and written its blocks before a newer one writes them.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from ..cache.block_hash import BlockHash
from ..cache.block_pool import BlockPool
from ..config import EngineConfig
from ..errors import InternalError
from ..offload.policy import OffloadPolicy
from ..offload.tiers import Tiers
from ..outputs import FinishReason, ReuseSource
from .admission import Admission
from .cache_report import CacheReport
from .inflight_prefix import InflightPrefixes
from .plan import ScheduledChunk, StepPlan, StepResult
from .request import Request, RequestState
from .timeline import Chunk

__all__ = ["Scheduler"]

_logger = logging.getLogger("ragserve")

_MAX_AWAITING = 32
"""Requests, per step, that are found to have to wait for what others compute: bounds the time that
many of them take. The rest is looked at in the next step; they are not looked at again."""
_LONG_LOOKUPS = 32
"""Long prompts without a place, per step, for which the cache is asked whether it makes them short:
bounds the time that many of them take."""


_SPECULATIVE_SHARE = 6
"""Of a step's tokens, one part in so many is for prompts that are computed on speculation, so that
whoever comes meanwhile does not wait long."""
_SPECULATIVE_TOKENS = 64
"""But so many in any case."""

_by_key = attrgetter("sort_key")


class Scheduler:
    """Queues of requests over one block pool. Not thread-safe: owned by the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        tiers: Tiers | None = None,
        *,
        attention_tokens: float = float("inf"),
    ) -> None:
        """
        :param tiers: behind the pool; None if there are none.
        :param attention_tokens: position at which a token's attention costs as much to compute as
            all else.
        """
        self._config = config
        self._pool = pool
        self._attention_tokens = attention_tokens
        self._watermark = int(config.watermark * pool.num_blocks)
        self._order = itertools.count()
        self._shares = config.enable_prefix_caching and config.cache_policy == "cost_aware"
        self._admission = Admission(pool, by_hits=self._shares)
        self._spill = None if tiers is None else OffloadPolicy(pool, tiers)
        self._inflight = InflightPrefixes()
        self.waiting: list[Request] = []
        """Sorted by (priority, arrival)."""
        self.running: list[Request] = []
        """In order of admission."""
        self.queued: set[Request] = set()
        """Requests that have never been started, but for speculative ones; of one with choices, the
        leader stands for all."""
        self.num_queued_tokens = 0
        """Their prompt tokens."""
        self._released: list[Request] = []
        self._complete: list[Request] = []
        """Prompts to be computed, and no more, that were all in the cache."""
        self._broken: list[tuple[Request, InternalError]] = []
        self.num_preemptions = 0
        self.reuse = CacheReport(pool)

    @property
    def num_queued(self) -> int:
        """Requests (not choices) that have never been started."""
        return len(self.queued)

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once."""
        return self._config.max_num_seqs

    @property
    def has_requests(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a new request, behind its equals."""
        request.number = number = next(self._order)
        request.sort_key = (request.speculative, request.priority, number, number)
        # Speculation takes no place in the queue: no request is refused for it.
        if request.leader is None and not request.speculative:
            self._enqueue(request)
        bisect.insort(self.waiting, request, key=_by_key)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state and give back its blocks. Ending it twice is harmless."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._released.append(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.timeline.finished = request.stamp()
        request.loading = request.waits_for = None
        if request.prefill_only and request.persist and reason == "length" and self._spill:
            self._spill.persist(request.blocks)
        self._release(request)
        self._admission.forget(request)
        was_queued = self._dequeue(request)
        if request.num_computed < request.num_prompt_tokens:
            leader = self._elect_leader(request)
            if was_queued and leader is not None:
                self._enqueue(leader)

    def schedule(self, steps_for: Callable[[int], int] = lambda num_seqs: 1) -> StepPlan:
        """Plan the next step and hold the blocks it needs. Empty if nothing can run.

        :param steps_for: most steps that so many sequences may decode in one plan, if nothing
            else can be computed.
        """
        if self._spill is not None:
            self._collect_loads(self._spill)
        decoding: list[Request] = []
        prefilling: list[Request] = []
        prompts: dict[Request, int] = {}
        num_preemptions = self.num_preemptions
        most_left, one_step = 0, False

        for request in sorted(self.running, key=_by_key):
            length = request.length
            if request.paused or request.loading is not None:
                continue
            if request.speculative:
                continue  # it takes what nobody wants
            if length - request.num_computed > 1 or request.prefill_only:
                if length > request.num_computed:
                    prefilling.append(request)
                continue
            left = request.max_length - length
            if left == 0:
                continue  # its last token is on its way
            if request.samples_on_host:
                if request.num_in_flight:
                    continue
                one_step = True
            if length > request.capacity and not self._make_room(request):
                continue
            if request.num_computed < request.num_known:
                one_step = True  # the last token of a prompt
            if left > most_left:
                most_left = left
            decoding.append(request)
        preempted = self.num_preemptions > num_preemptions
        budget = self._config.max_num_batched_tokens
        if decoding and self._config.max_num_mixed_tokens is not None:
            # However many decode, a prompt gets on.
            budget = min(budget, max(self._config.max_num_mixed_tokens, len(decoding) + 1))
        budget -= len(decoding)

        threshold = self._config.long_threshold
        if preempted:
            prefilling = [r for r in prefilling if r.state is RequestState.RUNNING]
        long = [r for r in prefilling if r.num_to_compute > threshold]
        # Half of the step is kept for long prompts; short ones and new ones go first with the
        # other half, and what they leave is the long ones' too. So neither holds up the other.
        reserve = budget // 2 if long else 0
        spare = budget - reserve
        for request in prefilling:
            if request.num_to_compute <= threshold:
                spare -= self._plan_prefill(request, spare, prompts)
        if not preempted:
            spare -= self._admit(spare, prompts, long)
        left = spare + reserve
        for request in long:
            left -= self._plan_prefill(request, left, prompts)

        if not decoding and not prompts:
            self._plan_speculative(prompts)
        if self.waiting:
            self._admission.protect(self.waiting)
        if self._spill is not None:
            self._spill.save_victims()

        steps = 1
        if decoding and not prompts and not one_step:
            steps = min(steps_for(len(decoding)), most_left)
            if steps > 1 and not self._reserve(decoding, steps):
                steps = 1
        return self._plan(decoding, steps, prompts)

    def commit(self, plan: StepPlan, result: StepResult, started: int, ended: int) -> None:
        """Record when prompts were computed, and their log-probabilities.

        Sampled tokens are appended by `append`, after the caller has looked at them.

        :param started: when the plan's first step started, `time.monotonic_ns`.
        :param ended: when its result was there.
        """
        prompt_tokens = 0
        for index, chunk in enumerate(plan.chunks):
            request = chunk.request
            if chunk.decode or request.state is RequestState.FINISHED:
                continue
            request.timeline.chunks.append(Chunk(started, ended, chunk.num_tokens))
            prompt_tokens += chunk.num_tokens
            for position, logprob in enumerate(
                result.prompt_logprobs.get(index, ()), start=chunk.start
            ):
                # A recomputed prompt gives them again.
                if position == len(request.prompt_logprobs):
                    request.prompt_logprobs.append(logprob)
        if prompt_tokens and self._spill is not None:
            self._spill.note_prefill((ended - started) / 1e9, plan.num_tokens)

    def take_complete(self) -> list[Request]:
        """Prompts to be computed, and no more, that `schedule` has found whole in the cache. They
        are to be ended."""
        complete, self._complete = self._complete, []
        return complete

    def take_broken(self) -> list[tuple[Request, InternalError]]:
        """Requests that `schedule` has left out of its plan, for they were in no state to be in
        one. They are to be ended; all others go on."""
        broken, self._broken = self._broken, []
        return broken

    def forget_cached(self) -> None:
        """Forget which segments were sent, and what is on its way to or from the tiers."""
        self.reuse.forget()
        for request in self.waiting:
            self._admission.forget(request)
            request.waits_for = None
        if self._spill is not None:
            self._spill.forget()

    def append(self, request: Request, token_ids: Sequence[int], at: int) -> None:
        """Append sampled tokens, which belong to the answer (see `Request.find_end`).

        :param at: when they were there, `time.monotonic_ns`.
        """
        request.output_token_ids.extend(token_ids)
        timeline = request.timeline
        if timeline.first_token is None:
            timeline.first_token = at
        timeline.last_token = at
        # Whether the KV of the last one will ever be computed is not known: it may be a stop.
        computed = request.num_prompt_tokens + len(request.output_token_ids) - 1
        if computed >= request.next_published:
            self._publish(request, computed)

    def live(self) -> Iterator[Request]:
        """Every request that has not ended."""
        return itertools.chain(self.running, self.waiting)

    @property
    def held(self) -> Iterator[Sequence[int]]:
        """The blocks of every holder: requests, and transfers to and from other tiers."""
        transfers = () if self._spill is None else self._spill.held
        return itertools.chain((request.blocks for request in self.live()), transfers)

    @property
    def wanted(self) -> Iterator[BlockHash]:
        """Keys whose blocks are spared, as often as somebody wants that."""
        unsaved = () if self._spill is None else self._spill.unsaved
        return itertools.chain(unsaved, *(request.protected for request in self.waiting))

    def check_integrity(self) -> None:
        """Check in-flight prefixes and transfers, and that nothing is left to hand over.

        :raises RuntimeError: naming the first thing that does not add up.
        """
        self._inflight.check_integrity()
        if self._complete or self._broken:
            raise RuntimeError("requests that are to be ended were not taken")
        if self._spill is not None:
            self._spill.check_integrity()

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
        request.capacity = request.layout.start(len(request.blocks))
        return True

    def _make_room(self, request: Request) -> bool:
        """Hold the block of its next token, whoever must be preempted for it; False if itself."""
        while request.state is RequestState.RUNNING:
            if self._grow(request, request.length):
                return True
            if len(self.running) > 1 or not self._release_holder(request):
                self._preempt(max(self.running, key=_rank_of_victim))
        return False

    def _reserve(self, requests: list[Request], steps: int) -> bool:
        """Hold the blocks for several steps; False, and no change, if too few are left."""
        missing = 0
        growing = []
        for request in requests:
            end = min(request.num_computed + steps, request.max_length - 1)
            if end > request.capacity:
                missing += request.layout.num_blocks(end) - len(request.blocks)
                growing.append((request, end))
        if missing > self._pool.num_available:
            return False
        return all(self._grow(request, end) for request, end in growing)

    def _publish(self, request: Request, num_tokens: int) -> None:
        """Let the complete blocks of its first tokens be found. Their ids must be known."""
        complete = request.layout.num_complete(min(num_tokens, request.num_computed))
        if complete <= request.num_published:
            return
        request.extend_keys()
        self._inflight.disown(request, complete)
        for index in range(request.num_published, complete):
            self._pool.publish(
                request.blocks[index],
                request.keys[index],
                request.retention_of(index),
                self._cost(request, index),
            )
        self._note_published(request, complete)

    def _cost(self, request: Request, index: int) -> float:
        """Of computing a block, where a full one at the beginning of a prompt is 1."""
        start = request.layout.start(index)
        share = (request.layout.start(index + 1) - start) / request.layout.block_size
        return share * (1.0 + start / self._attention_tokens)

    @staticmethod
    def _note_published(request: Request, count: int) -> None:
        request.num_published = count
        request.next_published = request.layout.start(count + 1)

    def _release(self, request: Request) -> None:
        self._inflight.disown(request)
        self._pool.release(request.blocks)
        request.blocks = []
        request.capacity = 0

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        # They will be asked for again: by it.
        self._pool.note_use(request.blocks[: request.num_published])
        request.loading = None
        self._release(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.timeline.preemptions += 1
        self.num_preemptions += 1
        self._released.append(request)
        bisect.insort(self.waiting, request, key=_by_key)

    def _take_seat(self, *, loading: bool) -> bool:
        """Preempt one that runs and is paused, or runs on speculation; False if there is none.

        No such request is planned before those that wait are looked at, so that no plan loses one.

        :param loading: whether it may be one whose blocks are on their way to it: these stay held
            until they have come.
        """
        idle = [r for r in self.running if r.paused or r.speculative]
        victim = max(idle, key=_rank_of_victim, default=None)
        if victim is None or (victim.loading is not None and not loading):
            return False
        self._preempt(victim)
        return True

    # -- plans ----------------------------------------------------------------------------

    def _plan(self, decoding: list[Request], steps: int, prompts: dict[Request, int]) -> StepPlan:
        """Make the plan, and count it as computed."""
        chunks = []
        if len({*decoding, *prompts}) != len(decoding) + len(prompts):
            decoding = self._without_doubles(decoding, prompts)
        for request in decoding:
            start = request.num_computed
            count = 1 if steps == 1 else min(steps, request.max_length - request.length)
            if not (
                request.state is RequestState.RUNNING
                and request.loading is None
                and start + count <= request.capacity
            ):
                self._leave_out(request, start + count)
                continue
            chunks.append(ScheduledChunk(request, start, count, count, start >= request.num_known))
            request.num_computed += count
            request.length += count
            if start < request.num_known:
                self._note_prefill(request)
        for request, count in prompts.items():
            end = request.num_computed + count
            if not (
                request.state is RequestState.RUNNING
                and request.loading is None
                and end <= request.capacity
            ):
                self._leave_out(request, end)
                continue
            sample = int(count == request.num_to_compute and not request.prefill_only)
            chunks.append(ScheduledChunk(request, request.num_computed, count, sample, False))
            request.num_computed += count
            request.length += sample
            self._note_prefill(request)
        if not chunks:
            return StepPlan(chunks)
        released, self._released = self._released, []
        return StepPlan(chunks, steps, released)

    def _without_doubles(
        self, decoding: list[Request], prompts: dict[Request, int]
    ) -> list[Request]:
        """What decodes, without what is in the plan twice."""
        counts = Counter([*decoding, *prompts])
        for request, count in counts.items():
            if count > 1:
                self._leave_out(request, request.length)
                prompts.pop(request, None)
        return [request for request in decoding if counts[request] == 1]

    def _leave_out(self, request: Request, end: int) -> None:
        """It was to be planned up to `end`, and cannot be: a mistake of ours, that would have the
        device write to blocks of others, or none."""
        error = InternalError(
            f"{request!r} was to be computed up to token {end} and holds blocks for "
            f"{request.capacity}{', which are being loaded' if request.loading else ''}; this is a "
            "mistake of the engine, please report it; other requests go on, and this one may be "
            "sent again"
        )
        _logger.error("%s", error)
        if request.state is RequestState.FINISHED:
            # Whatever list it is still in.
            self.running = [r for r in self.running if r is not request]
            self.waiting = [r for r in self.waiting if r is not request]
        self._broken.append((request, error))

    def _note_prefill(self, request: Request) -> None:
        """Part of a prompt is planned: who is planned after this may use its blocks."""
        self._publish(request, request.num_computed)
        if request.num_computed == request.num_prompt_tokens:
            self._share_prompt(request)

    # -- prompts --------------------------------------------------------------------------

    @staticmethod
    def _plan_prefill(request: Request, budget: int, prompts: dict[Request, int]) -> int:
        count = min(request.num_to_compute, budget)
        if count > 0:
            prompts[request] = count
        return count

    def _plan_speculative(self, prompts: dict[Request, int]) -> None:
        """A little of what may turn out to be of use, in a step that is nobody's."""
        requests = [r for r in self.running if r.speculative and r.loading is None and not r.paused]
        if not requests:
            return
        budget = self._config.max_num_batched_tokens
        most = self._config.max_num_mixed_tokens or budget
        left = min(budget, max(_SPECULATIVE_TOKENS, most // _SPECULATIVE_SHARE))
        for request in requests:
            left -= self._plan_prefill(request, left, prompts)

    def _admit(self, budget: int, prompts: dict[Request, int], long: list[Request]) -> int:
        """Start waiting requests; give the tokens planned for them.

        Long ones are appended to `long` rather than planned.
        """
        left = budget
        # A paused request gives up its seat: a slow consumer must not hold up the others. So does
        # one that runs on speculation.
        seats = self._config.max_num_seqs
        seats -= sum(not (r.paused or r.speculative) for r in self.running)
        if seats <= 0 or not self.waiting:
            return 0
        threshold, lookups, num_awaiting = self._config.long_threshold, 0, 0
        for request in self._admission.order(self.waiting):
            if left <= 0 or seats <= 0:
                break
            if request.paused or request.leader is not None:
                continue
            if request.waits_for is not None:
                if self._inflight.is_coming(*request.waits_for):
                    continue
                request.waits_for = None
            if request.num_in_flight:
                break  # preempted just now: it must know its tokens first, and keeps its turn
            if request.speculative and (prompts or any(not r.paused for r in self.running)):
                break  # it comes after all others
            if request.persist and self._spill is not None and self._spill.is_behind:
                continue  # what is to be written first is not to make room for it
            no_long = len(long) >= self._config.max_long_partial_prefills
            if no_long and request.num_tokens > threshold:
                if lookups == _LONG_LOOKUPS:
                    continue
                lookups += 1
            if self._inflight and self._waits_for_another(request):
                num_awaiting += 1
                if num_awaiting == _MAX_AWAITING:
                    break
                continue
            shared = request.blocks or self._find_prefix(request)
            found = len(shared)
            if request.prefill_only and found == len(request.keys):
                self._note_complete(request, shared)
                continue
            loads = self._num_to_load(request, found)
            cached = request.layout.start(found + loads)
            is_long = request.num_tokens - cached > threshold
            if is_long and no_long:
                continue
            if not self._seat(request, shared):
                break
            self._admission.note_started(request, self.waiting)
            counts = self._dequeue(request) and not request.prefill_only
            if request.timeline.first_scheduled is None:
                request.timeline.first_scheduled = request.stamp()
                if not loads:
                    self._note_reuse(request, found, counts)
            if len(self.running) == self._config.max_num_seqs:
                self._take_seat(loading=True)
            self.waiting.remove(request)
            self.running.append(request)
            request.state = RequestState.RUNNING
            request.num_computed = request.layout.start(found)
            request.num_known = request.num_tokens
            self._note_published(request, found)
            # What it computes again after a preemption has no waiters: it may be paused then.
            if self._shares and not request.speculative and not request.output_token_ids:
                self._inflight.own(request)
            if request.retains:
                self._retain(request, found)
            if not request.speculative:
                seats -= 1
            if loads and self._spill is not None:
                self._spill.load(request, found, loads, counts)
            elif is_long:
                long.append(request)
            elif not request.speculative:
                left -= self._plan_prefill(request, left, prompts)
        return budget - left

    def _find_prefix(self, request: Request) -> list[int]:
        """Stored blocks that it may take; of what is to be continued one token at least is left to
        compute."""
        if not self._may_share(request):
            return []
        request.extend_keys()
        return self._pool.find(request.keys[: request.num_shareable])

    @staticmethod
    def _may_share(request: Request) -> bool:
        # Of its log-probabilities the logits must be computed.
        return request.params.prompt_logprobs is None or bool(request.output_token_ids)

    # -- blocks that others compute, or have computed ---------------------------------------

    def _waits_for_another(self, request: Request) -> bool:
        """Whether its next block is being computed, and will be there before it could do so.

        If so it is not looked at again before the last of those blocks is there, or will not be.
        """
        if request.speculative or not self._may_share(request):
            return False
        request.extend_keys()
        keys, end = request.keys, request.num_shareable
        found = len(request.blocks) or self._pool.num_found(keys, end)
        if found >= end:
            return False
        waits_for = self._inflight.owner(request, found, end)
        if waits_for is None:
            return False
        request.waits_for = waits_for
        if request.waited_from is None:
            request.waited_from = request.layout.start(found)
        # A waiter lends its place to the owner.
        owner = waits_for[0]
        lent = (*request.sort_key[:3], -1 - owner.number)
        owner.sort_key = min(owner.sort_key, lent)
        return True

    def _retain(self, request: Request, num_shared: int) -> None:
        """What it has found is kept as long as it says."""
        for index in range(num_shared - 1, -1, -1):
            self._pool.retain([request.blocks[index]], request.retention_of(index))

    def _note_complete(self, request: Request, blocks: list[int]) -> None:
        """All of a prompt that was only to be computed is there."""
        self._pool.acquire(blocks)
        request.blocks = blocks
        request.num_computed = request.num_prompt_tokens
        self._note_published(request, len(blocks))
        if request.retains:
            self._retain(request, len(blocks))
        self._dequeue(request)
        if request.timeline.first_scheduled is None:
            request.timeline.first_scheduled = request.stamp()
            self._note_reuse(request, len(blocks), counts=False)
        self._complete.append(request)

    def _note_reuse(
        self,
        request: Request,
        num_cached: int,
        counts: bool,
        num_loaded: int = 0,
        tier: ReuseSource = "device",
    ) -> None:
        """Write down what of its prompt need not be computed: `num_cached` blocks, of which the
        last `num_loaded` came from a tier."""
        cached = min(request.layout.start(num_cached), request.num_prompt_tokens)
        request.timeline.cached_tokens = cached
        self.reuse.note(
            request,
            num_cached,
            source_of=lambda block: tier if block >= num_cached - num_loaded else "device",
            may_share=self._config.enable_prefix_caching and self._may_share(request),
            counts=counts,
        )

    def _num_to_load(self, request: Request, num_shared: int) -> int:
        """Blocks after those in the pool that are better loaded than computed."""
        if self._spill is None or request.blocks or not self._may_share(request):
            return 0
        keys = request.keys[num_shared : request.num_shareable]
        start = request.layout.start(num_shared)
        return self._spill.num_to_load(
            keys, lambda count: request.layout.start(num_shared + count) - start
        )

    def _collect_loads(self, spill: OffloadPolicy) -> None:
        """Let requests go on whose blocks have come, or will not."""
        for request, num_loaded, tier, counts in spill.collect():
            there = request.num_published + num_loaded
            request.num_computed = request.layout.start(there)
            self._publish(request, request.num_computed)
            if not request.timeline.reuse:
                self._note_reuse(request, there, counts, num_loaded, tier)
            if request.prefill_only and request.num_computed == request.num_prompt_tokens:
                self._complete.append(request)

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
            if self._take_seat(loading=False):
                continue
            if self.running or not self._release_holder(request):
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
        others = (r for r in self.waiting if r.blocks and r is not request)
        holder = next((r for r in others if r not in self._complete), None)
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


def _rank_of_victim(request: Request) -> tuple[int, ...]:
    """Whose blocks are taken: those of the request for which this is largest.

    Paused ones first, then lowest priority, then newest. Before them all, those that run on
    speculation, and one that loses nothing: its last token is on its way. Last, what has blocks on
    their way to it: these are held until they have come.
    """
    over = request.length == request.max_length and not request.prefill_only
    free = request.loading is None
    return (free, request.speculative, over, request.paused, *request.sort_key)
