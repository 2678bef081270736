"""What of a prompt is in the cache now, asked before the prompt is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .block_pool import BlockKey, chain_keys, next_key, root_key

__all__ = ["PrefixProbe"]


class PrefixProbe:
    """Walks segment by segment through what the pool and the tiers hold. Made by `Engine.probe`.

    From any thread, and without a lock: what it says may be out of date when it is read. Nothing
    changes by it.

    :param is_cached: whether a block with this key is in the pool or a tier.
    """

    __slots__ = ("_block_size", "_is_cached", "root")

    def __init__(
        self, is_cached: Callable[[BlockKey], bool], block_size: int, namespace: str
    ) -> None:
        self._is_cached = is_cached
        self._block_size = block_size
        self.root = root_key(namespace)
        """The key before the first segment."""

    def begins(self, parent: BlockKey, token_ids: Sequence[int]) -> bool:
        """Whether the first block of a segment of these tokens is cached behind `parent`."""
        return self._is_cached(next_key(parent, token_ids[: self._block_size]))

    def extend(self, parent: BlockKey, token_ids: Sequence[int]) -> tuple[BlockKey, int]:
        """Go on by a segment that another one follows.

        :param parent: `root`, or what this gave for the segment before.
        :returns: the key after the segment, and how many of its leading tokens are cached.
        """
        ends = [*range(0, len(token_ids), self._block_size), len(token_ids)]
        keys = chain_keys(parent, token_ids, ends)
        for index, key in enumerate(keys):
            if not self._is_cached(key):
                return keys[-1], ends[index]
        return (keys[-1] if keys else parent), len(token_ids)
