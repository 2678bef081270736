"""What of a prompt is in the cache now, asked before the prompt is made."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from .block_hash import BlockHash, chain_hashes, next_hash, root_hash

__all__ = ["PrefixProbe", "SegmentHashes"]


class SegmentHashes:
    """Keys of segments behind what stood before them, as they were asked for last.

    To hash a document takes longer than to look whether its blocks are cached, and the same ones
    are asked for again and again. From any thread.

    :param capacity: segments; when there are more, all are forgotten.
    """

    def __init__(self, block_size: int, capacity: int = 1024) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._known: dict[bytes, list[BlockHash]] = {}

    def __call__(self, parent: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        """The keys of all blocks of a segment that another one follows. Not to be changed."""
        if not (isinstance(token_ids, array) and token_ids.itemsize == 4):
            token_ids = array("I", token_ids)
        name = parent + token_ids.tobytes()
        keys = self._known.get(name)
        if keys is None:
            ends = [*range(0, len(token_ids), self._block_size), len(token_ids)]
            keys = chain_hashes(parent, token_ids, ends)
            if len(self._known) >= self._capacity:
                self._known = {}
            self._known[name] = keys
        return keys


class PrefixProbe:
    """Walks segment by segment through what the pool and the tiers hold. Made by `Engine.probe`.

    From any thread, and without a lock: what it says may be out of date when it is read. Nothing
    changes by it.

    :param is_cached: whether a block with this key is in the pool or a tier.
    :param keys_of: of a segment.
    """

    __slots__ = ("_block_size", "_is_cached", "_keys_of", "root")

    def __init__(
        self,
        is_cached: Callable[[BlockHash], bool],
        block_size: int,
        namespace: str,
        keys_of: SegmentHashes,
    ) -> None:
        self._is_cached = is_cached
        self._block_size = block_size
        self._keys_of = keys_of
        self.root = root_hash(namespace)
        """The key before the first segment."""

    def begins(self, parent: BlockHash, token_ids: Sequence[int]) -> bool:
        """Whether the first block of a segment of these tokens is cached behind `parent`."""
        return self._is_cached(next_hash(parent, token_ids[: self._block_size]))

    def extend(self, parent: BlockHash, token_ids: Sequence[int]) -> tuple[BlockHash, int]:
        """Go on by a segment that another one follows.

        :param parent: `root`, or what this gave for the segment before.
        :returns: the key after the segment, and how many of its leading tokens are cached.
        """
        keys = self._keys_of(parent, token_ids)
        for index, key in enumerate(keys):
            if not self._is_cached(key):
                return keys[-1], index * self._block_size
        return (keys[-1] if keys else parent), len(token_ids)
