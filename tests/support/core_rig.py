"""An engine core over a scripted model, which a test steps, and a watch over every step.

The model is scripted: a token is a hash of all tokens before it, read back from the blocks, so
that a block lost, mixed up or shared wrongly changes an answer or raises. Blocks are wiped when
they are handed out, so that nothing is right only because it was right before.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragserve.engine import (
    EngineConfig,
    EngineCore,
    Request,
    Retention,
    SamplingParams,
    StepPlan,
    StepResult,
    TierStatistics,
    TokenizedPrompt,
    Update,
)
from ragserve.engine.cache.block_hash import BlockHash
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.cache.layout import BlockLayout
from ragserve.engine.errors import InternalError
from ragserve.engine.offload.tiers import BlockIO, BlockStore, TierName, Tiers
from ragserve.engine.scheduling.request import RequestState
from ragserve.testing import ScriptedModel

__all__ = [
    "EOS",
    "MODES",
    "VOCAB",
    "Letters",
    "Model",
    "Rig",
    "ScriptedIO",
    "Shelf",
    "WipingPool",
    "alone",
    "next_token",
    "unique",
]

VOCAB = 64
EOS = VOCAB - 1

MODES = [(1, 1), (2, 1), (2, 8), (1, 3)]
"""(plans under way, decode steps in a plan): a CPU, and devices that the host lags behind."""


def next_token(tokens: Sequence[int], index: int = 0) -> int:
    """Any token but EOS; another one for each choice."""
    data = b"".join(token.to_bytes(4, "little") for token in (*tokens, index))
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % EOS


def alone(request: Request) -> list[int]:
    """What `next_token` gives to a request, whatever else goes on."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens, request.index))
        count = len(tokens) - request.num_prompt_tokens
        if tokens[-1] in request.stop_token_ids and count >= request.params.min_tokens:
            break
        if isinstance(request.text, Letters) and request.text.letter(tokens[-1]) == (
            request.text.stop
        ):
            break
    return tokens[request.num_prompt_tokens :]


class Model(ScriptedModel):
    """Answers with `next_token`, or a script.

    :param stops: whether the device itself sees what ends an answer.
    """

    def __init__(self, script: Any, *, stops: bool, **options: Any) -> None:
        super().__init__(script or (), **options)
        self.scripted = script is not None
        self.stops = stops

    def _next(self, request: Request, token_ids: list[int]) -> int:
        if self.scripted:
            return super()._next(request, token_ids)
        return next_token(token_ids, request.index)

    def _sample(self, request: Request, end: int, index: int, result: StepResult) -> None:
        super()._sample(request, end, index, result)
        if not self.stops:
            self._seats[request].stopped = False


class WipingPool(BlockPool):
    """Wipes blocks when they are handed out, and knows whose content each of them holds.

    The model has done by then what was launched before, as a device will have.
    """

    model: ScriptedModel

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool, cost_aware: bool) -> None:
        super().__init__(
            num_blocks, enable_prefix_caching=enable_prefix_caching, cost_aware=cost_aware
        )
        self.namespace_of: dict[int, str] = {}

    def allocate(self, count: int) -> list[int] | None:
        blocks = super().allocate(count)
        for block in blocks or ():
            self.model._kv[block][:] = [None] * len(self.model._kv[block])
            self.namespace_of.pop(block, None)
        return blocks


class Rig:
    """A core, its scripted model, and a watch over every step.

    :param script: what the model answers; None is `next_token`.
    :param depth: of the runner.
    :param steps: most decode steps in a plan; of which, in this test, no clock says how many.
    :param stops: whether the device itself sees what ends an answer.
    :param stores: makes the tiers behind the pool, whose blocks move when `move` is called.
    :param knobs: of `EngineConfig`; blocks have 16 tokens and the watermark is off.
    """

    def __init__(
        self,
        num_blocks: int = 512,
        *,
        script: Any = None,
        depth: int = 1,
        steps: int = 1,
        stops: bool = True,
        stores: Callable[[BlockIO], Sequence[BlockStore]] = lambda io: (),
        **knobs: Any,
    ) -> None:
        knobs = {"block_size": 16, "watermark": 0.0, "num_tokenizers": 1} | knobs
        self.config = EngineConfig(**{"multi_step_seconds": 1e9} | knobs)
        self.num_blocks = num_blocks
        self.depth = depth
        self.max_decode_steps = steps
        options = {"depth": depth, "max_decode_steps": steps, "num_blocks": num_blocks}
        self.model = Model(script, stops=stops, **options)
        self.model.load(self.config)
        self.pool = WipingPool(
            num_blocks,
            enable_prefix_caching=self.config.enable_prefix_caching,
            cost_aware=self.config.cache_policy == "cost_aware",
        )
        self.pool.model = self.model
        self.io = ScriptedIO(self.model, self.config.block_size)
        self.stores = stores(self.io)
        self.tiers = Tiers(self.stores, self.io, threaded=False) if self.stores else None
        self.core = EngineCore(self.config, self.pool, self, self.tiers)
        self.scheduler = self.core.scheduler
        self.plan = StepPlan([])
        """The last one."""
        self.made: list[StepPlan] = []
        self.under_way: list[StepPlan] = []
        self.requests: list[Request] = []
        self.updates: list[Update] = []
        self._ids = itertools.count()

    @property
    def query_tokens(self) -> int:
        return sum(self.scheduler.reuse.query_tokens.values())

    @property
    def hit_tokens(self) -> int:
        return sum(self.scheduler.reuse.hit_tokens.values())

    # Runner
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.plan = plan
        self._note_owners(chunk.request for chunk in plan.chunks)
        self.check_plan(plan)
        wait = self.model.launch(plan)
        self.made.append(plan)
        self.under_way.append(plan)
        assert len(self.under_way) <= self.depth

        def take() -> StepResult:
            assert self.under_way.pop(0) is plan, "results are taken in order"
            return wait()

        return take

    def samples_on_host(self, request: Request) -> bool:
        return request.params.bad_words != ()

    def close(self) -> None:
        self.model.close()

    def check_plan(self, plan: StepPlan) -> None:
        """What must be true of any plan."""
        config = self.config
        planned = [chunk.request for chunk in plan.chunks]
        assert 0 < len(planned) == len(set(planned)) <= config.max_num_seqs
        assert not any(r.paused for r in planned)
        assert plan.num_tokens <= config.max_num_batched_tokens * plan.num_steps
        decodes = sum(c.decode for c in plan.chunks)
        limit = config.max_num_mixed_tokens
        if limit is not None and 0 < decodes < len(planned):
            assert plan.num_tokens <= max(limit, decodes + 2)  # one of them a prompt's last token
        assert plan.num_steps == 1 or decodes == len(planned)
        assert plan.num_steps == max(1, *(c.num_samples for c in plan.chunks), 1)
        for chunk in plan.chunks:
            request = chunk.request
            assert chunk.end == request.num_computed
            assert request.layout.num_blocks(chunk.end) <= len(request.blocks)
            assert request.num_prompt_tokens <= request.length <= request.max_length
            if chunk.decode:
                assert chunk.num_tokens == chunk.num_samples > 0
                assert chunk.start >= request.num_prompt_tokens
                assert request.layout.num_blocks(chunk.end) == len(request.blocks)
            else:
                assert chunk.end <= request.num_tokens
                assert chunk.num_samples == (
                    chunk.end == request.num_tokens and not request.prefill_only
                )
            if self.samples_on_host(request):
                assert plan.num_steps == 1
                assert not any(
                    c.request is request and c.sample for p in self.under_way for c in p.chunks
                )

    def add(
        self,
        prompt: int | Sequence[int] | Sequence[Sequence[int]],
        *,
        kinds: Iterable[Retention] = (),
        priority: int = 0,
        namespace: str = "",
        **params: Any,
    ) -> Request:
        """Add a request: of tokens, of segments, or of a length (and like no other)."""
        return self.add_choices(
            prompt, kinds=kinds, priority=priority, namespace=namespace, **params
        )[0]

    def add_choices(
        self,
        prompt: int | Sequence[int] | Sequence[Sequence[int]],
        *,
        kinds: Iterable[Retention] = (),
        priority: int = 0,
        namespace: str = "",
        seconds: float | None = None,
        **params: Any,
    ) -> list[Request]:
        number = next(self._ids)
        if isinstance(prompt, int):
            prompt = unique(prompt, number)
        segments = [[t] if isinstance(t, int) else list(t) for t in prompt]
        if isinstance(prompt[0], int):
            segments = [[t for segment in segments for t in segment]]
        tokens = [t for segment in segments for t in segment]
        retentions = tuple(kinds) or (Retention.ANSWER,) * len(segments)
        lengths = tuple(map(len, segments))
        sampling = SamplingParams(**({"max_tokens": 8} | params))
        choices: list[Request] = []
        for index in range(sampling.n):
            choices.append(
                Request(
                    f"r{number}",
                    TokenizedPrompt(
                        tokens, lengths, retentions, retention_seconds=(seconds,) * len(lengths)
                    ),
                    sampling,
                    block_size=self.config.block_size,
                    max_tokens=min(sampling.max_tokens or 8, self.room(lengths)),
                    eos_token_ids=frozenset({EOS}),
                    priority=priority,
                    namespace=namespace,
                    index=index,
                    leader=choices[0] if choices else None,
                )
            )
        for choice in choices:
            self.core.add(choice)
        self.requests += choices
        return choices

    def add_prefill(
        self,
        segments: Sequence[Sequence[int]],
        kinds: Iterable[Retention],
        *,
        namespace: str = "",
        speculative: bool = False,
        persist: bool = False,
        seconds: float | None = None,
    ) -> Request:
        """A prompt that is only to be computed."""
        request = Request(
            f"r{next(self._ids)}",
            TokenizedPrompt(
                [t for segment in segments for t in segment],
                tuple(map(len, segments)),
                tuple(kinds),
                retention_seconds=(seconds,) * len(segments),
            ),
            SamplingParams(max_tokens=1),
            block_size=self.config.block_size,
            max_tokens=0,
            namespace=namespace,
            prefill_only=True,
            speculative=speculative,
            persist=persist,
        )
        self.core.add(request)
        self.requests.append(request)
        return request

    def room(self, lengths: Sequence[int]) -> int:
        """Tokens that fit behind a prompt if it has the pool for itself."""
        layout, total = BlockLayout(lengths, self.config.block_size), sum(lengths)
        tail = layout.num_blocks(total) - 1
        room = layout.start(tail) + (self.num_blocks - tail) * self.config.block_size - total
        assert room >= 1, "the test's prompt does not fit"
        return room

    def step(self) -> list[Update]:
        """A step, and everything that must be true of any step."""
        scheduler = self.scheduler
        ready = [r for r in self.requests if self.may_run(r)]
        decoding = {
            r: r.timeline.preemptions
            for r in ready
            if r.state is RequestState.RUNNING
            and r.num_to_compute == 1
            and not (r.prefill_only or r.loading)
        }
        seated = {
            r: r.timeline.preemptions for r in scheduler.running if not (r.paused or r.speculative)
        }
        running = set(scheduler.running)
        num_steps = self.core.num_steps
        self.plan = StepPlan([])
        updates = self.core.step()
        self.updates += updates
        for update in updates:
            assert not isinstance(update.error, InternalError), update.error
        progress = self.core.num_steps > num_steps
        assert progress or not self.plan.chunks
        if not progress and not self.moving:
            # The engine's thread waits for a command now.
            ready = [r for r in self.requests if self.may_run(r)]
            assert not ready, f"nothing runs, and could: {ready}"
        assert len(scheduler.running) <= self.config.max_num_seqs
        if self.depth == 1:
            planned = [chunk.request for chunk in self.plan.chunks]
            for request, preemptions in decoding.items():
                assert request in planned or request.timeline.preemptions > preemptions
            if any(r.timeline.preemptions > count for r, count in seated.items()):
                # Taking blocks from one request to start another would go round in circles.
                assert {r for r in scheduler.running if not r.paused} <= running
        self.check()
        return updates

    @property
    def moving(self) -> int:
        """Transfers that have not ended, and those that the scheduler does not know to have."""
        return 0 if self.tiers is None else self.tiers.num_under_way

    def move(self, count: int = 1_000_000) -> int:
        """Carry out up to so many transfers; how many there were."""
        return next(n for n in range(count + 1) if n == count or not self._move())

    def _move(self) -> bool:
        return self.tiers is not None and self.tiers.move()

    def may_run(self, request: Request) -> bool:
        """Whether it has not ended and waits for nobody but the scheduler."""
        if request.speculative and any(not r.speculative for r in self.scheduler.live()):
            return False  # it takes what is left
        if request.state is RequestState.FINISHED or request.paused:
            return False
        return request.leader is None or not request.leader.paused

    def check(self) -> None:
        """Invariants between steps: blocks add up, and none is in two namespaces."""
        self.core.check_integrity()
        self._note_owners(self.scheduler.live())
        live = [r for r in self.requests if r.state is not RequestState.FINISHED]
        assert set(self.scheduler.live()) == set(live)
        # Exactly these are sampled by plans that are under way.
        in_flight = collections.Counter(
            {c.request: 0 for p in self.under_way for c in p.chunks} | dict.fromkeys(live, 0)
        )
        for plan in self.under_way:
            in_flight.update({c.request: c.num_samples for c in plan.chunks})
        assert all(r.num_in_flight == in_flight[r] for r in live)
        if not live and not self.moving:
            stats = self.pool.statistics()
            assert stats.free + stats.cached == stats.total
            assert self.scheduler.num_queued == self.scheduler.num_queued_tokens == 0

    def _note_owners(self, requests: Iterable[Request]) -> None:
        for request in requests:
            for block in request.blocks:
                owner = self.pool.namespace_of.setdefault(block, request.namespace)
                assert owner == request.namespace, "two namespaces share a block"

    def drain(self) -> None:
        """Step until all has ended, in a bounded number of steps, each of which does something."""
        live = list(self.scheduler.live())
        for _ in range(20 + 2 * sum(r.num_prompt_tokens + r.max_tokens for r in live)):
            self.move()
            if not self.scheduler.has_requests:
                break
            self.step()
        assert not self.scheduler.has_requests, "does not come to an end"
        for request in self.requests:
            if request.finish_reason in ("stop", "length") and not self.model.scripted:
                assert request.output_token_ids == alone(request)

    def computed(self, request: Request) -> int:
        """Tokens of it that the last step computed."""
        return sum(c.num_tokens for c in self.plan.chunks if c.request is request)

    def until(self, condition: Callable[[], object], limit: int = 500) -> int:
        """Step until it holds; how many steps it took."""
        for count in range(limit):
            if condition():
                return count
            self.step()
        raise AssertionError("it never came true")


def unique(length: int, number: int) -> list[int]:
    """A prompt that shares no prefix with one of another number."""
    return [100 + number, *(position % 50 for position in range(length - 1))]


class Letters:
    """One letter per token, and one of them is a stop string."""

    def __init__(self, stop: str) -> None:
        self.stop, self.stop_reason, self.num_tokens = stop, None, 0

    def push(self, token_ids: Sequence[int]) -> str:
        text = "".join(map(self.letter, token_ids))
        if self.stop in text:
            self.stop_reason = self.stop
            text = text[: text.index(self.stop) + 1]
        self.num_tokens += len(text)
        return text

    @staticmethod
    def letter(token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return "."


class ScriptedIO:
    """The scripted model's blocks, a token each slot, as bytes."""

    layout = "tokens"

    def __init__(self, model: ScriptedModel, block_size: int) -> None:
        self._model = model
        self.block_bytes = 4 * block_size
        self.failing = False

    def mark(self) -> object:
        return None

    def allocate(self, num_rows: int) -> NDArray[np.uint8]:
        return np.zeros((num_rows, self.block_bytes), dtype=np.uint8)

    def read(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        self._check()
        for block, row in zip(blocks, rows, strict=True):
            tokens = [-1 if token is None else token for token in self._model._kv[block]]
            memory[row] = np.array(tokens, dtype=np.int32).view(np.uint8)

    def write(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self._check()
            tokens = memory[row].view(np.int32).tolist()
            self._model._kv[block][:] = [None if token < 0 else token for token in tokens]

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.failing:
            raise OSError("the disk is gone")


class Shelf:
    """A tier in memory."""

    def __init__(self, name: TierName = "host", capacity: int = 1000) -> None:
        self.name = name
        self.capacity = capacity
        self.kept: OrderedDict[BlockHash, NDArray[np.uint8]] = OrderedDict()
        self.is_broken: Callable[[BlockHash], bool] = lambda key: False
        self.saved = self.loaded = self.evicted = 0
        self.seconds: float | None = None

    def __contains__(self, key: BlockHash) -> bool:
        return key in self.kept

    def save(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> None:
        memory = io.allocate(len(blocks))
        io.read(blocks, memory, range(len(blocks)), after)
        for key, row in zip(keys, memory, strict=True):
            self.kept[key] = row
            self.saved += 1
            if len(self.kept) > self.capacity:
                self.kept.popitem(last=False)
                self.evicted += 1

    def load(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> int:
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self.is_broken(key):
                self.kept.pop(key, None)
            if key not in self.kept:
                return index
            io.write([block], self.kept[key][None], [0], after)
            self.loaded += 1
        return len(keys)

    def statistics(self) -> TierStatistics:
        blocks = len(self.kept)
        return TierStatistics(
            blocks, 64 * blocks, 64 * self.capacity, self.saved, self.loaded, self.evicted, 0,
            self.seconds,
        )  # fmt: skip

    def clear(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        self.kept.clear()
