"""Where to cut a row of units so that the parts fill whole KV blocks: a dynamic program."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

__all__ = ["Packing"]

_PART_COST = 3.0
"""What one part more weighs against empty slots: the same text in fewer parts is fuller parts."""
_SHORT_COST = 0.25
"""What each token that a part lacks to half of the limit weighs against empty slots."""


class Packing:
    """The cheapest ways to cut what is left of a row of units, from every unit on.

    A part is a stretch of units of at most `limit` tokens. It costs the empty slots of its last
    block, and a little that is no slots: for being a part, for being shorter than half of the
    limit, and for where it ends. Sizes are estimated from pairs of neighbours, since a tokenizer
    merges across little more than one boundary; `last()` takes the exact size of what it returns.

    :param starts: tokens of the part that is unit `i` alone; at most `limit`.
    :param steps: tokens by which a part that ends with unit `i - 1` grows when unit `i` is added.
    :param cut_costs: what a part that ends with unit `i` costs for that, in empty slots.
    :param limit: most tokens of a part.
    :param block_size: token slots of a block.
    """

    def __init__(
        self,
        starts: Sequence[int],
        steps: Sequence[int],
        cut_costs: Sequence[float],
        limit: int,
        block_size: int,
    ) -> None:
        self._before = list(accumulate(steps))  # growth up to and with each unit
        self._cut_costs = cut_costs
        self._limit = limit
        # By a part's size; the smallest is 0, for a tokenizer may count nothing.
        self._part_costs = [
            -size % block_size + _PART_COST + _SHORT_COST * max(0, limit // 2 - size)
            for size in range(limit + 1)
        ]
        self._rest = [0.0] * (len(starts) + 1)  # least cost from each unit to the end
        for first in reversed(range(len(starts))):
            self._rest[first] = min(cost for cost, _, _ in self._candidates(first, starts[first]))

    def cost(self, last: int, size: int) -> float:
        """What a part of `size` tokens costs that ends with unit `last`."""
        return self._part_costs[size] + self._cut_costs[last]

    def last(self, first: int, size: Callable[[int], int]) -> int:
        """The last unit of the part that begins with unit `first` in the cheapest way to go on.

        :param size: the exact tokens of that part if it ends with a given unit. Called for the
            end that is returned, for those that looked better until then, and for `first`, with
            which it has to be at most `limit`.
        """
        exact = {first: size(first)}
        candidates = list(self._candidates(first, exact[first]))
        heapq.heapify(candidates)
        while True:
            _, last, assumed = heapq.heappop(candidates)
            if last not in exact:
                exact[last] = size(last)
            if exact[last] == assumed:
                return last
            if exact[last] <= self._limit:  # again, as what it is
                heapq.heappush(candidates, (self._cost(last, exact[last]), last, exact[last]))

    def _candidates(self, first: int, start: int) -> Iterator[tuple[float, int, int]]:
        """Cost to the text's end, last unit, and estimated size of each part from `first` on."""
        offset = start - self._before[first]
        for last in range(first, len(self._before)):
            size = max(0, offset + self._before[last])
            if size > self._limit and last > first:
                return
            yield self._cost(last, size), last, size

    def _cost(self, last: int, size: int) -> float:
        return self.cost(last, size) + self._rest[last + 1]
