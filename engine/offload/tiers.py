"""Where blocks are kept behind the pool: what a tier is, and who moves blocks there and back.

Blocks are moved by a thread of their own, in transfers. The engine's thread starts a transfer,
holds its blocks, and looks now and then whether it has ended; so steps go on meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from ..cache.block_hash import BlockHash
from ..cache.block_pool import Place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlockIO", "BlockStore", "TierName", "TierStatistics", "Tiers", "Transfer"]

_logger = logging.getLogger("ragserve")

TierName: TypeAlias = Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """What a tier holds and has done since it was opened.

    :param blocks: kept now, and their bytes; `capacity_bytes` is the bound.
    :param saved: blocks that came from the pool; `loaded` went back to it.
    :param evicted: blocks that went to make room.
    :param rejected: blocks that were broken or foreign, and were not served.
    :param seconds_per_block: of loads, a moving average; None before the first.
    """

    blocks: int
    bytes: int
    capacity_bytes: int
    saved: int
    loaded: int
    evicted: int
    rejected: int
    seconds_per_block: float | None


class BlockIO(Protocol):
    """Moves whole blocks, keys and values of all layers, between the pool and host memory.

    :ivar block_bytes: of one block.
    :ivar layout: how a block's bytes lie: backend, data type, shapes.
    """

    block_bytes: int
    layout: str

    def mark(self) -> object:
        """The point behind every plan launched so far. Called by the engine thread."""

    def allocate(self, num_rows: int) -> NDArray[np.uint8]:
        """[num_rows, block_bytes] of host memory that this can copy to and from."""

    def read(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        """Copy pool blocks to `memory[rows]`, once the device has come past `after`. Returns when
        it is done; not called by the engine thread."""

    def write(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        """Copy `memory[rows]` to pool blocks; else like `read`. Of no blocks it only waits."""

    def close(self) -> None:
        """Give back what it holds."""


class BlockStore(Protocol):
    """A tier: blocks by key. Used by the mover's thread, but for what says otherwise."""

    name: TierName

    def __contains__(self, key: BlockHash) -> bool:
        """Whether it holds the block. From any thread, without a lock."""

    def save(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> None:
        """Take copies of pool blocks; of those that are there already only the age changes. Its
        own oldest blocks go to make room.

        :param keys: in sequence order: the last is the first that may go, for it is found only
            through the others.
        """

    def load(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> int:
        """Copy the longest prefix of `keys` that it holds intact into pool blocks.

        A broken block is dropped with a warning, and ends the prefix.

        :returns: how many blocks were copied.
        """

    def clear(self) -> None:
        """Forget all blocks, so that they do not come back.

        :raises DiskCacheError: if some stay where another engine may find them.
        """

    def statistics(self) -> TierStatistics:
        """What it holds and has done; from any thread."""

    def close(self) -> None:
        """Give back what it holds."""


class Transfer:
    """Blocks on their way between the pool and a tier. The mover writes it, the engine reads it.

    :ivar keys: in sequence order; `blocks` of the pool likewise.
    :ivar store: where to; None for a load, whose blocks come from wherever they are.
    :ivar num_done: the first so many have arrived; the others will not. Valid once it has ended.
    :ivar slowest: the slowest tier that a load has taken blocks from.
    """

    __slots__ = (
        "after",
        "blocks",
        "dropped",
        "ended",
        "keys",
        "num_done",
        "places",
        "slowest",
        "store",
    )

    def __init__(
        self,
        keys: Sequence[BlockHash],
        blocks: Sequence[int],
        store: BlockStore | None,
        after: object,
        places: Sequence[Place],
    ) -> None:
        self.keys = keys
        self.blocks = blocks
        self.store = store
        self.after = after
        self.places = places
        """Where the pool will put its blocks back (see `BlockPool.hold`)."""
        self.num_done = 0
        self.slowest: TierName | None = None
        self.ended = False
        self.dropped = False
        """What it moves was forgotten meanwhile: none of it counts. Written by the engine."""


class Tiers:
    """The tiers of an engine, fastest first, and the thread that moves blocks.

    All methods are the engine thread's, but for those that say otherwise.

    :param stores: fastest first.
    :param io: between the pool and host memory.
    :param threaded: if False there is no such thread, and blocks are moved by `move`: in tests.
    """

    def __init__(self, stores: Sequence[BlockStore], io: BlockIO, *, threaded: bool = True) -> None:
        self.stores = tuple(stores)
        self._io = io
        self.on_end: Callable[[], object] = lambda: None
        """Called by the mover when a transfer has ended."""
        self._under_way: list[Transfer] = []
        self._jobs: queue.PriorityQueue[tuple[int, int, Transfer | Future[None] | None]]
        self._jobs = queue.PriorityQueue()
        """What to move; or the future of an order to clear; None is to end."""
        self._numbers = itertools.count()
        self._closing = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="ragserve mover", daemon=True)
            self._thread.start()

    def __contains__(self, key: BlockHash) -> bool:
        """Whether some tier holds the block. From any thread."""
        return any(key in store for store in self.stores)

    def num_leading(self, keys: Sequence[BlockHash]) -> int:
        """How many of the first `keys` are in some tier."""
        for index, key in enumerate(keys):
            if key not in self:
                return index
        return len(keys)

    def seconds(self, keys: Sequence[BlockHash]) -> float:
        """About how long a load of `keys` takes; 0 while nothing is known."""
        total = 0.0
        for store in self.stores:
            mine = [key for key in keys if key in store]
            total += len(mine) * (store.statistics().seconds_per_block or 0.0)
            keys = [key for key in keys if key not in store]
        return total

    @property
    def held(self) -> list[Sequence[int]]:
        """The blocks that transfers hold."""
        return [transfer.blocks for transfer in self._under_way]

    @property
    def num_under_way(self) -> int:
        """Transfers that have not been taken by `ended`."""
        return len(self._under_way)

    def load(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], places: Sequence[Place]
    ) -> Transfer:
        """Fill pool blocks, which are held for it, with what the tiers have under `keys`."""
        return self._start(Transfer(keys, blocks, None, self._io.mark(), places), 0)

    def save(
        self,
        store: BlockStore,
        keys: Sequence[BlockHash],
        blocks: Sequence[int],
        places: Sequence[Place],
    ) -> Transfer:
        """Copy pool blocks, which are held for it, to a tier. Loads go first."""
        return self._start(Transfer(keys, blocks, store, self._io.mark(), places), 1)

    def ended(self) -> list[Transfer]:
        """Transfers that have ended since the last time; their blocks may be let go."""
        if not any(transfer.ended for transfer in self._under_way):
            return []
        # One flag is looked at once: what ends just now is for the next time.
        over = [transfer for transfer in self._under_way if transfer.ended]
        self._under_way = [transfer for transfer in self._under_way if transfer not in over]
        return over

    def clear(self) -> Future[None]:
        """Empty all tiers. What is on its way to or from them is dropped.

        :returns: set once they are empty, to an error if one of them cannot be emptied.
        """
        for transfer in self._under_way:
            transfer.dropped = True
        done: Future[None] = Future()
        self._jobs.put((0, next(self._numbers), done))
        return done

    def statistics(self) -> dict[str, TierStatistics]:
        """By the name of the tier. From any thread."""
        return {store.name: store.statistics() for store in self.stores}

    def close(self) -> None:
        """Wait for the transfer under way, drop the others, and close the tiers."""
        self._closing = True
        self._jobs.put((-1, next(self._numbers), None))
        if self._thread is not None:
            self._thread.join()
        while not self._jobs.empty():
            job = self._jobs.get()[2]
            if isinstance(job, Future):
                self._clear(job)
        for store in self.stores:
            store.close()
        self._io.close()

    def _start(self, transfer: Transfer, priority: int) -> Transfer:
        self._under_way.append(transfer)
        self._jobs.put((priority, next(self._numbers), transfer))
        return transfer

    # -- the mover ------------------------------------------------------------------------

    def _run(self) -> None:
        while self.move(wait=True):
            pass

    def move(self, *, wait: bool = False) -> bool:
        """Move the blocks of one transfer, or clear the tiers if that is next.

        :param wait: for something to do.
        :returns: False if there is nothing to do, or it is to end.
        """
        try:
            job = self._jobs.get(block=wait)[2]
        except queue.Empty:
            return False
        if job is None or (self._closing and isinstance(job, Transfer)):
            return False
        if isinstance(job, Future):
            self._clear(job)
        else:
            self._move(job)
        return True

    def _clear(self, done: Future[None]) -> None:
        failure: Exception | None = None
        for store in self.stores:
            try:
                store.clear()
            except Exception as error:
                failure = error
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)

    def _move(self, transfer: Transfer) -> None:
        try:
            if transfer.dropped:
                pass
            elif transfer.store is None:
                self._load(transfer)
            else:
                transfer.store.save(transfer.keys, transfer.blocks, self._io, transfer.after)
                transfer.num_done = len(transfer.keys)
        except Exception:
            # What has not arrived is computed again; the engine goes on without.
            _logger.exception("moving %d KV blocks failed", len(transfer.keys))
        transfer.ended = True
        self.on_end()

    def _load(self, transfer: Transfer) -> None:
        keys, blocks = transfer.keys, transfer.blocks
        while transfer.num_done < len(keys):
            start = transfer.num_done
            store = next((store for store in self.stores if keys[start] in store), None)
            if store is None:
                return
            stop = start
            while stop < len(keys) and keys[stop] in store:
                stop += 1
            count = store.load(keys[start:stop], blocks[start:stop], self._io, transfer.after)
            if count:
                transfer.num_done += count
                if transfer.slowest is None or store is self.stores[-1]:
                    transfer.slowest = store.name
            if count < stop - start and keys[start + count] in store:
                return  # it says that it has it, and does not give it
