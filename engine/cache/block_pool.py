"""Blocks of KV memory as numbers: who holds each, which prefix each one stores, who goes next.

Pure bookkeeping; the tensors are in `cpu/` and `gpu/`. A block is in exactly one of three states:

    free      nobody holds it, it stores nothing worth keeping
    cached    nobody holds it, but a key finds it: a later request with that prefix may take it
    held      at least one request holds it (it may have a key too, and then be shared)

`allocate` takes free blocks first and then evicts cached ones, those first that are worth least.
What a block is worth is LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001): how often
it was used, where a use counts half after some turnovers of the pool, times what it cost to
compute and a weight for what it is. A block counts as worth at least as much as those that are
found only through it, so the end of a prefix goes before its beginning.
"""

from __future__ import annotations

import heapq
import itertools
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import TypeAlias

from ..prompt import Retention
from .block_hash import BlockHash
from .eviction import PINNED_LEVEL, IdleBlocks
from .retention import NO_RETENTION, RetentionPolicy

__all__ = ["BlockPool", "Place", "PoolStatistics"]

Place: TypeAlias = tuple[int | None, float, float]
"""Level of an idle block, its score, and the logarithm of what a use of it is worth."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of blocks by state, and what happened since the pool was made."""

    total: int
    free: int
    cached: int
    held: int
    evictions: int


_LOG_WEIGHTS = {Retention.ANSWER: 0.0, Retention.DOCUMENT: 2.0, Retention.SYSTEM: 4.0}
"""Logarithms, to the base of 2, of what a use of a full block is worth by its class."""
_HALF_LIFE = 8.0
"""Turnovers of the pool after which a use counts half. A turnover is as many blocks handed out as
there are: a clock that needs no tuning to the size of the pool or the load."""
_LEVELS = 2
"""Levels of eviction in each doubling of worth."""
_LEASE_SLACK = 64
"""Leases that are over, besides as many as last, that the heap may hold."""
_REMEMBERED = 4
"""Evicted blocks whose uses are remembered, in sizes of the pool."""


class BlockPool:
    """Reference-counted blocks with a prefix index and eviction by worth.

    :param num_blocks: blocks there are; their numbers are 0 .. `num_blocks` - 1.
    :param enable_prefix_caching: if False, nothing is ever found or kept.
    :param cost_aware: if False, the block that was unused for longest is evicted, whatever it is.
    """

    def __init__(
        self, num_blocks: int, *, enable_prefix_caching: bool = True, cost_aware: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self._caching = enable_prefix_caching
        self._cost_aware = cost_aware
        # A stack, lowest number on top: memory is touched only as far as it was ever needed.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._key_of: list[BlockHash | None] = [None] * num_blocks
        self._keep = [NO_RETENTION] * num_blocks
        self._base = [0.0] * num_blocks
        """Logarithms, to the base of 2: what a use of it is worth, by its class and its cost."""
        self._score = [0.0] * num_blocks
        """Its uses, as they counted at the last of them; and when that was, in turnovers."""
        self._used_at = [0.0] * num_blocks
        self._heat = [0.0] * num_blocks
        """Logarithms: of the score, as seen from the pool's beginning."""
        self._num_allocated = 0
        self._block_of: dict[BlockHash, int] = {}
        self._idle = IdleBlocks()
        self._evictions = 0
        self._evicted: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()
        """Score and last use of what was evicted, the latest last."""
        self._pins: Counter[BlockHash] = Counter()
        self._wanted: Counter[BlockHash] = Counter()
        """What requests that wait would find, and how many of them."""
        self._leases: list[tuple[int, int, int]] = []
        """A heap of (monotonic nanoseconds, number, block): when an idle block's retention may
        end; the end of a prefix before its beginning."""
        self._lease_numbers = itertools.count()
        self._lease_of: dict[int, tuple[int, int]] = {}
        """Idle blocks whose retention ends: when, and the number of the lease."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_pinned(self) -> int:
        """Keys that are pinned, whether their blocks are there or not."""
        return len(self._pins)

    def __contains__(self, key: BlockHash) -> bool:
        """Whether a block is found under the key. From any thread."""
        return key in self._block_of

    def find(self, keys: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is stored. Does not change the pool.

        The blocks are only safe to use once they are acquired.
        """
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_found(self, keys: Sequence[BlockHash], most: int | None = None) -> int:
        """About how many blocks `find` would give, by bisection: a few look-ups however many keys.

        Exact unless a block's prefix was evicted and it was not.

        :param most: of the first keys alone; None is all.
        """
        end = len(keys) if most is None else min(most, len(keys))
        return bisect_left(keys, True, 0, end, key=lambda key: key not in self._block_of)

    def block_of(self, key: BlockHash) -> int | None:
        """The block that is found under a key."""
        return self._block_of.get(key)

    def num_idle_of(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: acquiring them makes that many fewer available."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def was_evicted(self, key: BlockHash) -> bool:
        """Whether a block with this key made room for another, and that is not forgotten."""
        return key in self._evicted

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold `blocks` once more, and use them. They must be held or cached, not free."""
        references, score, used_at, heat = self._references, self._score, self._used_at, self._heat
        now, before, after, warmth = self._turnovers, (0.0, -1.0), 0.0, 0.0
        idle = []
        for block in blocks:
            if references[block] == 0:
                idle.append(block)
            references[block] += 1
            # Neighbours were mostly used together.
            known = score[block], used_at[block]
            if known != before:
                before = known
                after = 1.0 + known[0] * 2.0 ** ((known[1] - now) / _HALF_LIFE)
                warmth = log2(after) + now / _HALF_LIFE
            score[block], used_at[block], heat[block] = after, now, warmth
        self._idle.remove_all(idle)
        if self._lease_of:
            for block in idle:
                self._lease_of.pop(block, None)

    def hold(self, blocks: Iterable[int]) -> list[Place]:
        """Hold `blocks` once more, so that they stay, without using them.

        :returns: what `let_go` needs to put each back where it was.
        """
        places = []
        for block in blocks:
            level = None if self._references[block] else self._idle.remove(block)
            places.append((level, self._score[block], self._base[block]))
            self._references[block] += 1
        return places

    def let_go(self, blocks: Sequence[int], places: Sequence[Place]) -> None:
        """End a `hold`: a block that nobody has used meanwhile is as old as it was.

        Its level is another one if its retention has ended meanwhile, or it was pinned, or not.
        """
        # In reverse, so that of equals the first is the oldest again.
        for block, (level, score, base) in zip(reversed(blocks), reversed(places), strict=True):
            self._references[block] -= 1
            if self._references[block]:
                continue
            key = self._key_of[block]
            if key is None:
                self._free.append(block)
                continue
            change = self._base[block] - base
            if (
                level is None
                or self._score[block] != score
                or (level == PINNED_LEVEL) != (key in self._pins)
            ):
                self._become_idle(block, self._level(block), time.monotonic_ns())
            elif change and level != PINNED_LEVEL:
                self._become_idle(block, level + self._steps(change), time.monotonic_ns())
            else:
                self._idle.add(block, level, oldest=True)

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` blocks with nothing in them; None, and no change, if there are too few.

        Evicts cached blocks if the free ones do not suffice.
        """
        if count > self.num_available:
            return None
        missing = count - len(self._free)
        blocks = self._free[: -count - 1 : -1] if count else []
        del self._free[len(self._free) - len(blocks) :]
        if missing > 0:
            if self._leases:
                self._end_leases()
            blocks += self._evict(missing)
        for block in blocks:
            self._references[block] = 1
        self._num_allocated += count
        return blocks

    def publish(self, block: int, key: BlockHash, keep: RetentionPolicy, cost: float = 1.0) -> None:
        """Make a held block's content findable under `key`, now that it is complete.

        If another block has that key already, that one stays the one that is found and this one
        stays private. The higher retention wins where the two differ.

        :param cost: of computing it, where a full block at the beginning of a prompt is 1.
        """
        if not self._caching:
            return
        found = self._block_of.setdefault(key, block)
        if found == block:
            self._key_of[block] = key
            self._keep[block] = keep
            self._base[block] = _LOG_WEIGHTS[keep.retention] + log2(cost)
            now = self._turnovers
            score, last = self._evicted.pop(key, (0.0, now))
            self._score[block] = score = 1.0 + score * 2.0 ** ((last - now) / _HALF_LIFE)
            self._used_at[block] = now
            self._heat[block] = log2(score) + now / _HALF_LIFE
        else:
            self.retain([found], keep)

    def retain(self, blocks: Sequence[int], keep: RetentionPolicy) -> None:
        """Keep blocks that are found, in sequence order, at least as long as `keep` says."""
        for block in reversed(blocks):
            known = self._keep[block]
            if known == keep or keep.retention < known.retention:
                continue
            if keep.retention == known.retention and known.seconds is None:
                continue
            self._change_keep(block, keep)

    def note_use(self, blocks: Iterable[int]) -> None:
        """Count a use of blocks that are as good as sure to be used again."""
        for block in blocks:
            self._score[block] += 1.0
            self._heat[block] = log2(self._score[block]) + self._used_at[block] / _HALF_LIFE

    def score_of(self, block: int) -> float:
        """How often a block that is found was used, as that counted at its last use; 1 for one
        that was computed and never found."""
        return self._score[block]

    def retention_of(self, block: int) -> RetentionPolicy:
        """How long a block that is found is kept."""
        return self._keep[block]

    def hash_of(self, block: int) -> BlockHash | None:
        """The key that a block is found under; None if it is not."""
        return self._key_of[block]

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold on each of `blocks`, which are in sequence order.

        Works from the tail, so that the end of a prefix is evicted before its beginning, without
        which it could not be found.
        """
        references, keys, special = self._references, self._key_of, bool(self._pins)
        base, heat, keep = self._base, self._heat, self._keep
        level, now = _LOWEST, 0
        run: list[int] = []  # blocks that become idle at one level
        for block in reversed(blocks):
            references[block] -= 1
            if keys[block] is None:
                if references[block] == 0:
                    self._free.append(block)
                continue
            own = round(_LEVELS * (base[block] + heat[block])) if self._cost_aware else 0
            if own > level:
                self._idle.add_all(run, level)
                run, level = [], own
            if references[block]:
                continue
            if special or keep[block].seconds is not None:
                now = now or time.monotonic_ns()
                self._become_idle(block, level, now)
            else:
                run.append(block)
        self._idle.add_all(run, level)

    # -- what is to stay ------------------------------------------------------------------

    def pin(self, keys: Sequence[BlockHash]) -> None:
        """Let the blocks of `keys`, in sequence order, go only after all others. Counts: unpin as
        often."""
        self._pins.update(keys)
        self._place_again(keys)

    def unpin(self, keys: Sequence[BlockHash]) -> None:
        """Let the blocks of `keys` go like others."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
        self._place_again(keys)

    def protect(self, keys: Iterable[BlockHash]) -> None:
        """Let the blocks of `keys` go only after those that nobody waits for. Counts."""
        self._wanted.update(keys)

    def unprotect(self, keys: Iterable[BlockHash]) -> None:
        """Who waited for `keys` does not any more."""
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
        self._idle.unspare()

    # -- all of it ------------------------------------------------------------------------

    def next_victims(self, count: int) -> list[int]:
        """Up to `count` cached blocks that would be evicted next, in that order."""
        return self._idle.next(count, self._is_wanted)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that made room for others, since the pool was made."""
        return self._evictions

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return len(self._free)

    def clear(self) -> None:
        """Forget every cached block. Held blocks stay, but are no longer found."""
        for block in self._idle:
            self._free.append(block)
        self._idle.clear()
        self._lease_of.clear()
        self._leases.clear()
        for block in list(self._block_of.values()):
            self._forget(block)
        self._evicted.clear()

    def statistics(self) -> PoolStatistics:
        """Blocks by state."""
        free, cached = len(self._free), len(self._idle)
        return PoolStatistics(
            total=self.num_blocks,
            free=free,
            cached=cached,
            held=self.num_blocks - free - cached,
            evictions=self._evictions,
        )

    def check_integrity(
        self, held: Iterable[Sequence[int]] = (), wanted: Iterable[BlockHash] | None = None
    ) -> None:
        """Check that the states partition the pool and the counts equal the holders.

        :param held: the blocks of every live request.
        :param wanted: the keys that are protected, as often as they are; None is not to look.
        :raises RuntimeError: naming the first thing that does not add up.
        """
        expected = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        if expected != self._references:
            wrong = [
                (block, count, self._references[block])
                for block, count in enumerate(expected)
                if count != self._references[block]
            ]
            raise RuntimeError(f"(block, holders, reference count) differ: {wrong[:5]}")
        idle = list(self._idle)
        states = sorted(self._free + idle + [b for b, n in enumerate(self._references) if n])
        if states != list(range(self.num_blocks)):
            raise RuntimeError("free, cached and held blocks are not a partition of the pool")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise RuntimeError(f"block {block} is found under a key that is not its own")
        if sum(key is not None for key in self._key_of) != len(self._block_of):
            raise RuntimeError("a block has a key under which it is not found")
        if any(self._key_of[block] is not None for block in self._free):
            raise RuntimeError("a free block still has a key")
        if any(self._key_of[block] is None for block in idle):
            raise RuntimeError("a cached block has no key")
        if any(self._key_of[block] is None for block in self._lease_of):
            raise RuntimeError("a block without content has a lease")
        if len(self._leases) > 2 * self.num_blocks + _LEASE_SLACK:
            raise RuntimeError(f"{len(self._leases)} leases of {self.num_blocks} blocks")
        if not {(*lease, block) for block, lease in self._lease_of.items()} <= set(self._leases):
            raise RuntimeError("a lease will never end")
        if wanted is not None and Counter(wanted) != self._wanted:
            raise RuntimeError("what is protected is not what those that wait want")
        if min([*self._pins.values(), *self._wanted.values()], default=1) < 1:
            raise RuntimeError("a key is pinned, or wanted, by nobody")
        self._idle.check_integrity()

    # -- eviction -------------------------------------------------------------------------

    @property
    def _turnovers(self) -> float:
        return self._num_allocated / self.num_blocks

    def _level(self, block: int) -> int:
        """The logarithm of what a block is worth; it does not change while the block is idle, for
        all that lies idle loses its worth alike."""
        return round(_LEVELS * (self._base[block] + self._heat[block])) if self._cost_aware else 0

    def _steps(self, change: float) -> int:
        """Levels between what blocks were worth and are, if a use of them is worth that much more,
        as a logarithm."""
        return round(_LEVELS * change) if self._cost_aware else 0

    def _become_idle(self, block: int, level: int, now: int) -> None:
        seconds = self._keep[block].seconds
        if seconds is not None:
            end = now + int(seconds * 1e9)
            lease = end, next(self._lease_numbers)
            self._lease_of[block] = lease
            heapq.heappush(self._leases, (*lease, block))
            if len(self._leases) > 2 * len(self._lease_of) + _LEASE_SLACK:
                self._leases = [(*kept, leased) for leased, kept in self._lease_of.items()]
                heapq.heapify(self._leases)
        pinned = bool(self._pins) and self._key_of[block] in self._pins
        self._idle.add(block, level, pinned=pinned)

    def _change_keep(self, block: int, keep: RetentionPolicy) -> None:
        change = _LOG_WEIGHTS[keep.retention] - _LOG_WEIGHTS[self._keep[block].retention]
        self._keep[block] = keep
        self._base[block] += change
        if block in self._idle:
            # By as much for all of a prefix: what is found through a block still goes before it.
            level = self._idle.remove(block)
            self._become_idle(block, level + self._steps(change), time.monotonic_ns())

    def _place_again(self, keys: Sequence[BlockHash]) -> None:
        """Whether the blocks of a prefix are pinned has changed."""
        level, now = _LOWEST, time.monotonic_ns()
        for key in reversed(keys):
            block = self._block_of.get(key)
            if block is not None and block in self._idle:
                level = max(level, self._level(block))
                self._idle.remove(block)
                self._become_idle(block, level, now)

    def _end_leases(self) -> None:
        """Put idle blocks whose retention has ended where they belong now."""
        now = time.monotonic_ns()
        while self._leases and self._leases[0][0] <= now:
            end, number, block = heapq.heappop(self._leases)
            # It may have been used since.
            if self._lease_of.get(block) == (end, number):
                del self._lease_of[block]
                self._change_keep(block, RetentionPolicy(self._keep[block].otherwise))

    def _is_wanted(self, block: int) -> bool:
        return self._key_of[block] in self._wanted

    def _evict(self, count: int) -> list[int]:
        blocks = self._idle.take(count, self._is_wanted if self._wanted else None)
        evicted, block_of, keys = self._evicted, self._block_of, self._key_of
        for block in blocks:
            key = keys[block]
            if key is not None:
                evicted[key] = self._score[block], self._used_at[block]
                del block_of[key]
                keys[block] = None
        if self._lease_of:
            for block in blocks:
                self._lease_of.pop(block, None)
        while len(evicted) > _REMEMBERED * self.num_blocks:
            evicted.popitem(last=False)
        self._evictions += count
        return blocks

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None


_LOWEST = -(1 << 62)
