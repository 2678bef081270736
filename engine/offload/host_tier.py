"""Blocks in the host's memory: what left a GPU's pool comes back sooner than computed anew."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Sequence

from ..cache.block_hash import BlockHash
from ..errors import InvalidParamsError
from .tiers import BlockIO, TierName, TierStatistics

__all__ = ["HostTier"]

_MEASURED_BLOCKS = 128
"""About a document of some pages; a few blocks alone take longer each."""
_MEASURED_TIMES = 3
_AVERAGED_BLOCKS = 256
"""Blocks whose times count: a load of as many leaves half of the average before it."""


class HostTier:
    """The `BlockStore` that is nearest to the pool: rows of one piece of memory, the least
    recently used given up first.

    A row belongs to a key from when its copy is complete until it is chosen for another block.

    :param io: gives the memory, [capacity_bytes // io.block_bytes, io.block_bytes].
    :param capacity_bytes: of the memory.
    :raises InvalidParamsError: if it does not hold one block.
    :raises OutOfMemoryError: if the host lacks the memory.
    """

    name: TierName = "host"

    def __init__(self, io: BlockIO, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._block_bytes = io.block_bytes
        num_rows = capacity_bytes // io.block_bytes
        if num_rows < 1:
            raise InvalidParamsError(
                "swap_space_bytes",
                capacity_bytes,
                f"at least the {io.block_bytes} bytes of one block, or 0 for no host tier",
            )
        self._memory = io.allocate(num_rows)
        self._rows: OrderedDict[BlockHash, int] = OrderedDict()
        """The least recently used first."""
        self._free = list(range(num_rows))
        """A heap: low rows first, so that what is saved together lies together."""
        self._num_rows = num_rows
        self._saved = self._loaded = self._evicted = 0
        self._seconds_per_block: float | None = None
        self.measure(io)

    def __contains__(self, key: BlockHash) -> bool:
        """Whether it holds the block. From any thread, without a lock."""
        return key in self._rows

    def __repr__(self) -> str:
        return f"<HostTier [{len(self._rows)}/{self._num_rows} blocks]>"

    def measure(self, io: BlockIO) -> None:
        """Find out, with copies of the pool's first block, how long a block takes to load.

        Changes no block, but must not run beside anything that does. Done at construction.
        """
        rows = sorted(self._free[:_MEASURED_BLOCKS])
        if not rows:
            return
        blocks = [0] * len(rows)
        io.read(blocks, self._memory, rows, io.mark())
        times = []
        for _ in range(_MEASURED_TIMES):
            started = time.perf_counter()
            io.write(blocks, self._memory, rows, io.mark())
            times.append(time.perf_counter() - started)
        self._seconds_per_block = min(times) / len(rows)

    def save(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> None:
        """See `BlockStore.save`. The last are left out if there are more than rows."""
        new: dict[BlockHash, int] = {}
        known: list[BlockHash] = []
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            if key not in self._rows:
                new[key] = block
            else:
                self._rows.move_to_end(key)
                known.append(key)
        # What has just been touched is as good as what is new: it does not go for it.
        room = self._num_rows - len(set(known))
        taken = list(new)[max(0, len(new) - room) :]
        if not taken:
            return
        rows = self._take_rows(len(taken))
        try:
            io.read([new[key] for key in taken], self._memory, rows, after)
        except BaseException:
            for row in rows:
                heapq.heappush(self._free, row)
            raise
        self._rows.update(zip(taken, rows, strict=True))
        self._saved += len(taken)

    def load(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> int:
        """See `BlockStore.load`. Of the blocks loaded the last counts as used first, as each is of
        use only with those before it."""
        rows = []
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                break
            rows.append(row)
        if not rows:
            return 0
        count = len(rows)
        for key in reversed(keys[:count]):
            self._rows.move_to_end(key)
        # What is timed is the copying, without the plans that it has to wait for.
        io.write((), self._memory, (), after)
        started = time.perf_counter()
        io.write(blocks[:count], self._memory, rows, after)
        self._add_time(time.perf_counter() - started, count)
        self._loaded += count
        return count

    def statistics(self) -> TierStatistics:
        """See `BlockStore.statistics`."""
        blocks = len(self._rows)
        return TierStatistics(
            blocks=blocks,
            bytes=blocks * self._block_bytes,
            capacity_bytes=self._capacity,
            saved=self._saved,
            loaded=self._loaded,
            evicted=self._evicted,
            rejected=0,
            seconds_per_block=self._seconds_per_block,
        )

    def clear(self) -> None:
        """See `BlockStore.clear`."""
        self._free = list(range(self._num_rows))
        self._rows.clear()

    def close(self) -> None:
        """Forget all blocks, and let go of the memory."""
        self._rows.clear()
        self._free.clear()
        self._num_rows = 0
        self._memory = self._memory[:0].copy()

    def _take_rows(self, count: int) -> list[int]:
        """Rows that belong to nobody, in order; the oldest blocks go if there are too few."""
        while len(self._free) < count:
            _, row = self._rows.popitem(last=False)
            heapq.heappush(self._free, row)
            self._evicted += 1
        return [heapq.heappop(self._free) for _ in range(count)]

    def _add_time(self, seconds: float, count: int) -> None:
        known, each = self._seconds_per_block, seconds / count
        weight = count / (count + _AVERAGED_BLOCKS)
        self._seconds_per_block = each if known is None else known + weight * (each - known)
