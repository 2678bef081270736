"""Which tokens of a sequence lie in which of its blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

__all__ = ["BlockLayout"]


class BlockLayout:
    """Which tokens of one sequence lie in which of its blocks.

    Every segment of the prompt starts a new block, so the last block of a segment may be only
    partly filled (the rest is a hole). Generated tokens go on filling the last segment's tail:

        block      0     1   | 2     3     4  | 5   6 ...
        tokens     16    9   | 16    16    1  | 16  ...
        segment    system    | document       | question, then the answer

    Block i always holds tokens `start(i)` to `start(i + 1)`, once all of them are computed.

    :param closed: nothing will be generated, and the last segment's end is the end of a block
        too. Then no more tokens than the segments' may be asked about.
    """

    __slots__ = ("_closed_at", "_starts", "block_size")

    def __init__(
        self, segment_lengths: Iterable[int], block_size: int, *, closed: bool = False
    ) -> None:
        self.block_size = block_size
        starts: list[int] = []
        position = 0
        for length in segment_lengths:
            starts.extend(range(position, position + length, block_size))
            position += length
        self._starts = starts
        self._closed_at = position if closed else None

    def start(self, block: int) -> int:
        """Position of the first token of the sequence's `block`-th block."""
        last = len(self._starts) - 1
        if block <= last:
            return self._starts[block]
        if self._closed_at is not None:
            return self._closed_at
        return self._starts[last] + (block - last) * self.block_size

    def starts(self, num_blocks: int) -> list[int]:
        """`start(i)` for i in 0 .. `num_blocks` - 1."""
        known = self._starts[:num_blocks]
        tail = self._starts[-1]
        extra = num_blocks - len(known)
        if extra > 0:
            size = self.block_size
            known.extend(range(tail + size, tail + size * extra + 1, size))
        return known

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks needed to hold the first `num_tokens` tokens."""
        tail = self._starts[-1]
        if num_tokens <= tail:
            return bisect_left(self._starts, num_tokens)
        return len(self._starts) + (num_tokens - tail - 1) // self.block_size

    def num_complete(self, num_tokens: int) -> int:
        """Blocks whose tokens all lie within the first `num_tokens`."""
        tail = self._starts[-1]
        if num_tokens < tail:
            return bisect_right(self._starts, num_tokens) - 1
        if num_tokens == self._closed_at:
            return len(self._starts)
        return len(self._starts) - 1 + (num_tokens - tail) // self.block_size

    def block_of(self, position: int) -> int:
        """The block that holds the token at `position`."""
        return self.num_blocks(position + 1) - 1
