"""Blocks go to the tiers behind the pool before they are evicted, and come back when asked for.

Nothing waits for it: blocks are copied while they are still in the pool, and idle; what is evicted
before its turn came is lost, and computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ..cache.block_hash import BlockHash
from ..cache.block_pool import BlockPool
from ..prompt import Retention
from ..scheduling.request import Request
from .tiers import BlockStore, TierName, Tiers, Transfer

__all__ = ["Loaded", "OffloadPolicy"]

_logger = logging.getLogger("ragserve")

_CANDIDATES = 64
"""Blocks that are looked at, of those that are evicted next."""
_PRESSURE = 8
"""They are looked at once less than one block in so many is free."""
_SAVING_SHARE = 8
"""Saves under way hold at most one block of the pool in so many: however slow a tier is, who runs
has the others."""
_BEHIND_SHARE = 4
"""No more is computed for the sake of a tier once one block in so many waits to be written."""
_SAVED_AT_ONCE = 16
"""Blocks of one save: a load waits for the one that is under way."""
_TRIED_AGAIN = 50
"""Of loads that seem slower than computing, one in so many is made."""
_MIN_SCORE = 1.5
"""What was not asked for again after it was computed, or not for long, is let go."""


class Loaded(NamedTuple):
    """A load that has ended.

    :param num_blocks: of the request's blocks after those that it had found, so many are filled.
    :param tier: the slowest that they came from.
    :param counts: as given to `Spill.load`.
    """

    request: Request
    num_blocks: int
    tier: TierName
    counts: bool


class OffloadPolicy:
    """Decides which blocks are moved between the pool and the tiers, and when."""

    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._loads: dict[Transfer, tuple[Request, bool]] = {}
        self._saving: Transfer | None = None
        self._num_saving = 0
        """Blocks that saves hold."""
        self._most_saving = max(1, pool.num_blocks // _SAVING_SHARE)
        self._unsaved: dict[BlockHash, None] = {}
        """To be written to the slowest tier, in this order. Their blocks are held by nobody for
        it, and are evicted after those that nobody wants."""
        self._lost = False
        self._evictions_seen = -1
        self._seconds_per_token: float | None = None
        self._num_refused = 0

    @property
    def held(self) -> list[Sequence[int]]:
        """Blocks that transfers hold, besides what requests do."""
        return self._tiers.held

    @property
    def unsaved(self) -> Iterable[BlockHash]:
        """Keys of blocks that are spared until they are written."""
        return self._unsaved

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that more is not to be computed for that alone."""
        return len(self._unsaved) * _BEHIND_SHARE >= max(_BEHIND_SHARE, self._pool.num_blocks)

    def note_prefill(self, seconds: float, num_tokens: int) -> None:
        """Learn what computing costs, from a step with prompts in it."""
        measured = seconds / num_tokens
        known = self._seconds_per_token
        # Steps count by their tokens: small ones cost more a token than what is to be compared.
        weight = min(1.0, num_tokens / 1024)
        self._seconds_per_token = measured if known is None else known + weight * (measured - known)

    def num_to_load(self, keys: Sequence[BlockHash], tokens_of: Callable[[int], int]) -> int:
        """How many of the first blocks are in some tier, if loading is the faster way to have them.

        :param tokens_of: tokens in so many of them.
        """
        count = self._tiers.num_leading(keys)
        if count and self._seconds_per_token is not None:
            computing = tokens_of(count) * self._seconds_per_token
            if self._tiers.seconds(keys[:count]) > computing:
                # Now and then it is tried all the same: what was measured may have changed.
                self._num_refused += 1
                return 0 if self._num_refused % _TRIED_AGAIN else count
        return count

    def load(self, request: Request, start: int, count: int, counts: bool) -> None:
        """Fill blocks of a request, from its `start`-th on; it rests meanwhile.

        :param counts: given back with the result.
        """
        keys, blocks = request.keys[start : start + count], request.blocks[start : start + count]
        request.loading = self._tiers.load(keys, blocks, self._pool.hold(blocks))
        self._loads[request.loading] = request, counts

    def collect(self) -> Iterator[Loaded]:
        """Loads that have ended, of requests that still wait for them."""
        for transfer in self._tiers.ended():
            if transfer is self._saving:
                self._saving = None
            if transfer.store is not None:
                self._num_saving -= len(transfer.blocks)
            request, counts = self._loads.pop(transfer, (None, False))
            if request is not None and request.loading is transfer:
                request.loading = None
                num_done = 0 if transfer.dropped else transfer.num_done
                yield Loaded(request, num_done, transfer.slowest or "disk", counts)
            self._pool.let_go(transfer.blocks, transfer.places)
        self._save_next()

    def save_victims(self) -> None:
        """Copy what will be evicted soon and is likely to be asked for again."""
        pool = self._pool
        room = self._most_saving - self._num_saving
        if self._saving is not None or room <= 0 or pool.num_free * _PRESSURE >= pool.num_blocks:
            return
        if pool.num_evictions == self._evictions_seen:
            return  # nothing has moved up since
        self._evictions_seen = pool.num_evictions
        store = self._tiers.stores[0]
        blocks = [
            block
            for block in pool.next_victims(_CANDIDATES)
            if self._is_worth_saving(block, store)
            and (key := pool.hash_of(block)) is not None
            and key not in store
        ][:room]
        if blocks:
            # The end of a prefix is evicted first, and its beginning is to be the last to go.
            self._saving = self._save(store, blocks[::-1])[-1]

    def persist(self, blocks: Sequence[int]) -> None:
        """Copy blocks to the slowest tier, as soon as it takes them."""
        keys = (self._pool.hash_of(block) for block in blocks)
        new = [key for key in keys if key is not None and key not in self._unsaved]
        self._pool.protect(new)
        self._unsaved.update(dict.fromkeys(new))
        self._save_next()

    def check_integrity(self) -> None:
        """Check that what saves hold is counted, and bounded.

        :raises RuntimeError: if not.
        """
        if not 0 <= self._num_saving <= self._most_saving:
            raise RuntimeError(f"saves hold {self._num_saving} of {self._most_saving} blocks")
        if self._num_saving + sum(len(t.blocks) for t in self._loads) != sum(
            map(len, self._tiers.held)
        ):
            raise RuntimeError("transfers hold more or fewer blocks than they are counted with")

    def forget(self) -> None:
        """Write nothing of what is still to be written."""
        self._pool.unprotect(self._unsaved)
        self._unsaved = {}

    def _save_next(self) -> None:
        """Start to write what is to be written, as far as may be held for it."""
        while self._unsaved and (room := self._most_saving - self._num_saving) > 0:
            keys = list(islice(self._unsaved, min(room, _SAVED_AT_ONCE)))
            for key in keys:
                del self._unsaved[key]
            self._pool.unprotect(keys)
            blocks = [b for key in keys if (b := self._pool.block_of(key)) is not None]
            if len(blocks) < len(keys) and not self._lost:
                self._lost = True
                _logger.warning(
                    "KV blocks made room for requests before they were written to the %s tier; "
                    "warm documents while less is asked, or raise kv_cache_bytes",
                    self._tiers.stores[-1].name,
                )
            if blocks:
                self._save(self._tiers.stores[-1], blocks)

    def _save(self, store: BlockStore, blocks: Sequence[int]) -> list[Transfer]:
        transfers = []
        self._num_saving += len(blocks)
        for start in range(0, len(blocks), _SAVED_AT_ONCE):
            part = blocks[start : start + _SAVED_AT_ONCE]
            keys = [key for block in part if (key := self._pool.hash_of(block)) is not None]
            transfers.append(self._tiers.save(store, keys, part, self._pool.hold(part)))
        return transfers

    def _is_worth_saving(self, block: int, store: BlockStore) -> bool:
        # Copies to the host's memory cost next to nothing, and other questions will need the
        # document; a disk is slower, and wears.
        always = Retention.DOCUMENT if store.name == "host" else Retention.SYSTEM
        pool = self._pool
        return pool.score_of(block) >= _MIN_SCORE or pool.retention_of(block).retention >= always
