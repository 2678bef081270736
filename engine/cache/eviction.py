"""Idle blocks in the order in which they are evicted."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

__all__ = ["PINNED_LEVEL", "IdleBlocks"]

PINNED_LEVEL = 1 << 62
"""Level of what goes last."""
_SLACK = 64
"""Levels without blocks that the heap may hold besides as many as it has with some."""


class IdleBlocks:
    """Blocks that nobody holds, by level: the lowest goes first, of one level the oldest.

    All operations take constant time, but for a level's first block, which takes the logarithm of
    the number of levels.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, None]] = {}
        self._heap: list[int] = []
        """Every level that has blocks, and some that have none any more."""
        self._level_of: dict[int, int] = {}
        self._spared: OrderedDict[int, None] = OrderedDict()
        """Met when they were to go, and wanted by somebody then."""

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, block: int) -> bool:
        return block in self._level_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._level_of)

    def add(self, block: int, level: int, *, pinned: bool = False, oldest: bool = False) -> None:
        """A block becomes idle.

        :param oldest: of its level, not the newest.
        """
        if pinned:
            level = PINNED_LEVEL
        blocks = self._levels.get(level)
        if blocks is None:
            blocks = self._levels[level] = OrderedDict()
            if len(self._heap) > 2 * len(self._levels) + _SLACK:
                self._heap = list(self._levels)
                heapq.heapify(self._heap)
            else:
                heapq.heappush(self._heap, level)
        blocks[block] = None
        if oldest:
            blocks.move_to_end(block, last=False)
        self._level_of[block] = level

    def add_all(self, blocks: Sequence[int], level: int) -> None:
        """Blocks become idle, one after the other."""
        if not blocks:
            return
        self.add(blocks[0], level)
        if len(blocks) > 1:
            places = dict.fromkeys(blocks[1:])
            self._levels[level].update(places)
            self._level_of.update(dict.fromkeys(places, level))

    def remove_all(self, blocks: Sequence[int]) -> None:
        """Blocks are idle no more."""
        level_of, levels, spared = self._level_of, self._levels, self._spared
        for block in blocks:
            level = level_of.pop(block)
            if spared and block in spared:
                del spared[block]
                continue
            at_level = levels[level]
            del at_level[block]
            if not at_level:
                # Its place in the heap goes when it comes up.
                del levels[level]

    def remove(self, block: int) -> int:
        """It is idle no more; gives the level that it had."""
        level = self._level_of[block]
        self.remove_all([block])
        return level

    def take(self, count: int, wanted: Callable[[int], bool] | None = None) -> list[int]:
        """Take out the blocks that go next, in that order. There must be so many.

        :param wanted: says which blocks go only after all others but the pinned ones.
        """
        taken: list[int] = []
        heap, levels = self._heap, self._levels
        while len(taken) < count and heap and heap[0] < PINNED_LEVEL:
            level = heap[0]
            blocks = levels.get(level)
            if blocks is None:
                heapq.heappop(heap)
                continue
            for block in list(islice(blocks, count - len(taken))):
                del blocks[block]
                if wanted is not None and wanted(block):
                    self._spared[block] = None
                else:
                    taken.append(block)
            if not blocks:
                del levels[level]
        pinned = levels.get(PINNED_LEVEL, OrderedDict())
        for rest in (self._spared, pinned):
            last = list(islice(rest, count - len(taken)))
            for block in last:
                del rest[block]
            taken += last
        if not pinned:
            levels.pop(PINNED_LEVEL, None)
        for block in taken:
            del self._level_of[block]
        return taken

    def unspare(self) -> None:
        """Put back what was wanted: who wanted it may not any more."""
        while self._spared:
            block, _ = self._spared.popitem()
            # They were the oldest of their level.
            self.add(block, self._level_of[block], oldest=True)

    def next(self, count: int, wanted: Callable[[int], bool]) -> list[int]:
        """Up to `count` blocks that go next, in that order; pinned and wanted ones are not among
        them. Nothing changes."""
        found: list[int] = []
        for level in sorted(self._levels):
            if level == PINNED_LEVEL:
                break
            for block in self._levels[level]:
                if not wanted(block):
                    found.append(block)
                    if len(found) == count:
                        return found
        return found

    def check_integrity(self) -> None:
        """Check that every block is at one place, its own.

        :raises RuntimeError: if not.
        """
        places = {block: level for level, blocks in self._levels.items() for block in blocks}
        count = sum(len(blocks) for blocks in self._levels.values()) + len(self._spared)
        places |= {block: self._level_of.get(block, -1) for block in self._spared}
        if places != self._level_of or count != len(places):
            raise RuntimeError("an idle block is at no level, at two, or at another than its own")
        if not set(self._levels) <= set(self._heap):
            raise RuntimeError("a level of idle blocks will never come up")

    def clear(self) -> None:
        """Forget them all."""
        self._levels.clear()
        self._heap.clear()
        self._level_of.clear()
        self._spared.clear()
