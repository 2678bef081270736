"""Prefixes that running requests are computing, so that others wait for them.

A request that runs is the *owner* of the blocks of its prompt that it has yet to compute. A
*waiter* needs one of them next, and waits rather than compute it too. Ownership ends when a block
is published, or when its owner is preempted or ends.

Block hashes hold the namespace, so no request waits for another tenant's.
"""

from __future__ import annotations

from bisect import bisect_left

from ..cache.block_hash import BlockHash
from .request import Request, RequestState

__all__ = ["InflightPrefixes"]


class InflightPrefixes:
    """Which running request computes which block. Written by the scheduler alone."""

    def __init__(self) -> None:
        self._owner_of: dict[BlockHash, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._owner_of)

    def own(self, request: Request) -> None:
        """The request computes all blocks of its prompt that are not published; of each block the
        first owner stays the owner."""
        end = request.layout.num_complete(request.num_prompt_tokens)
        for name in request.keys[request.num_published : end]:
            self._owner_of.setdefault(name, request)
        request.owns_until = end

    def disown(self, request: Request, end: int | None = None) -> None:
        """The request's blocks up to `end` are published, or will not be; None is all of them.

        Called before `num_published` changes.
        """
        last = request.owns_until if end is None else min(end, request.owns_until)
        for name in request.keys[request.num_published : last]:
            if self._owner_of.get(name) is request:
                del self._owner_of[name]
        if end is None:
            request.owns_until = 0

    def owner(self, request: Request, found: int, end: int) -> tuple[Request, int] | None:
        """The request that computes this one's block at `found`, and the last block in sequence
        that it computes before `end`; None if that block is not being computed.

        A paused owner does not count: when it goes on is not known.
        """
        owner_of, keys = self._owner_of, request.keys
        owner = owner_of.get(keys[found])
        if owner is None or owner.paused:
            return None
        after = bisect_left(
            keys, True, found + 1, end, key=lambda name: owner_of.get(name) is not owner
        )
        return owner, after - 1

    @staticmethod
    def is_coming(owner: Request, block: int) -> bool:
        """Whether that owner still runs, and will compute its block at this index."""
        return owner.num_published <= block < owner.owns_until and not owner.paused

    def check_integrity(self) -> None:
        """Check that owners run, and own what they have not published.

        :raises RuntimeError: if not.
        """
        for name, owner in self._owner_of.items():
            if owner.state is not RequestState.RUNNING:
                raise RuntimeError(f"{owner!r} owns blocks, and does not run")
            if name not in owner.keys[owner.num_published : owner.owns_until]:
                raise RuntimeError(f"{owner!r} has published what it still owns")
