"""Blocks of KV memory as numbers: who holds each, which prefix each one stores, who goes next.

Pure bookkeeping; the tensors are in `kv_cache.py`. A block is in exactly one of three states:

    free      nobody holds it, it stores nothing worth keeping
    cached    nobody holds it, but a key finds it: a later request with that prefix may take it
    held      at least one request holds it (it may have a key too, and then be shared)

`allocate` takes free blocks first and then evicts cached ones: lowest retention class first,
within a class the one unused for longest. All operations are O(1) per block.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .prompt import Retention

__all__ = ["BlockKey", "BlockLayout", "BlockPool", "PoolStatistics", "block_keys", "next_key"]

BlockKey = bytes
"""Names the content of a block: its own tokens, all tokens before, and the namespace."""


class BlockLayout:
    """Which tokens of one sequence lie in which of its blocks.

    Every segment of the prompt starts a new block, so the last block of a segment may be only
    partly filled (the rest is a hole). Generated tokens go on filling the last segment's tail:

        block      0     1   | 2     3     4  | 5   6 ...
        tokens     16    9   | 16    16    1  | 16  ...
        segment    system    | document       | question, then the answer

    Block i always holds tokens `start(i)` to `start(i + 1)`, once all of them are computed.
    """

    __slots__ = ("_starts", "block_size")

    def __init__(self, segment_lengths: Iterable[int], block_size: int) -> None:
        self.block_size = block_size
        starts: list[int] = []
        position = 0
        for length in segment_lengths:
            starts.extend(range(position, position + length, block_size))
            position += length
        self._starts = starts

    def start(self, block: int) -> int:
        """Position of the first token of the sequence's `block`-th block."""
        last = len(self._starts) - 1
        if block <= last:
            return self._starts[block]
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
        return len(self._starts) - 1 + (num_tokens - tail) // self.block_size

    def block_of(self, position: int) -> int:
        """The block that holds the token at `position`."""
        return self.num_blocks(position + 1) - 1


def block_keys(
    token_ids: Sequence[int],
    layout: BlockLayout,
    namespace: str,
    *,
    known: Sequence[BlockKey] = (),
) -> list[BlockKey]:
    """Keys of all complete blocks of `token_ids`, in order.

    A key is BLAKE2b over (parent key, number of tokens, tokens); the first parent is a hash of
    the namespace. Since every field has a fixed or stated length, two different contents never
    feed the hash the same bytes.

    :param known: keys of the first blocks, computed before.
    """
    keys = list(known)
    if keys:
        parent = keys[-1]
    else:
        parent = hashlib.blake2b(
            namespace.encode("utf-8", "surrogatepass"), digest_size=32, person=b"ragserve-kv-root"
        ).digest()
    for index in range(len(keys), layout.num_complete(len(token_ids))):
        parent = next_key(parent, token_ids[layout.start(index) : layout.start(index + 1)])
        keys.append(parent)
    return keys


def next_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the block of `token_ids` that follows the one of `parent` (see `block_keys`)."""
    tokens = array("I", token_ids)
    digest = hashlib.blake2b(parent, digest_size=32, person=b"ragserve-kv-blck")
    digest.update(len(tokens).to_bytes(4, "little"))
    digest.update(tokens)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of blocks by state, and what happened since the pool was made."""

    total: int
    free: int
    cached: int
    held: int
    evictions: int


class BlockPool:
    """Reference-counted blocks with a prefix index and eviction by (retention, age).

    :param num_blocks: blocks there are; their numbers are 0 .. `num_blocks` - 1.
    :param enable_prefix_caching: if False, nothing is ever found or kept.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = enable_prefix_caching
        # A stack, lowest number on top: memory is touched only as far as it was ever needed.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._retention = [Retention.ANSWER] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._idle: dict[Retention, OrderedDict[int, None]] = {
            level: OrderedDict() for level in Retention
        }
        self._num_idle = 0
        self._evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and cached ones."""
        return len(self._free) + self._num_idle

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
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

    def num_idle_of(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: acquiring them makes that many fewer available."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold `blocks` once more. They must be held or cached, not free."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[self._retention[block]][block]
                self._num_idle -= 1
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` blocks with nothing in them; None, and no change, if there are too few.

        Evicts cached blocks if the free ones do not suffice.
        """
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: BlockKey, retention: Retention) -> None:
        """Make a held block's content findable under `key`, now that it is complete.

        If another block has that key already, that one stays the one that is found and this one
        stays private. The higher retention wins where the two differ.
        """
        if not self._caching:
            return
        found = self._block_of.setdefault(key, block)
        if found == block:
            self._key_of[block] = key
        if retention > self._retention[found] or found == block:
            self._retain(found, retention)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold on each of `blocks`, which are in sequence order.

        Works from the tail, so that the end of a prefix is evicted before its beginning, without
        which it could not be found.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._idle[self._retention[block]][block] = None
                    self._num_idle += 1

    def clear(self) -> None:
        """Forget every cached block. Held blocks stay, but are no longer found."""
        for idle in self._idle.values():
            while idle:
                block, _ = idle.popitem()
                self._forget(block)
                self._free.append(block)
        self._num_idle = 0
        for block in list(self._block_of.values()):
            self._forget(block)

    def statistics(self) -> PoolStatistics:
        """Blocks by state."""
        free, cached = len(self._free), self._num_idle
        return PoolStatistics(
            total=self.num_blocks,
            free=free,
            cached=cached,
            held=self.num_blocks - free - cached,
            evictions=self._evictions,
        )

    def check_integrity(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Check that the states partition the pool and the counts equal the holders.

        :param held: the blocks of every live request.
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
        idle = [block for level in self._idle.values() for block in level]
        states = sorted(self._free + idle + [b for b, n in enumerate(self._references) if n])
        if states != list(range(self.num_blocks)) or len(idle) != self._num_idle:
            raise RuntimeError("free, cached and held blocks are not a partition of the pool")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise RuntimeError(f"block {block} is found under a key that is not its own")
        if sum(key is not None for key in self._key_of) != len(self._block_of):
            raise RuntimeError("a block has a key under which it is not found")
        if any(self._key_of[block] is not None for block in self._free):
            raise RuntimeError("a free block still has a key")
        for level, blocks_of_level in self._idle.items():
            if any(self._key_of[b] is None or self._retention[b] != level for b in blocks_of_level):
                raise RuntimeError("a cached block has no key, or is in another class than its own")

    def _retain(self, block: int, retention: Retention) -> None:
        if self._references[block] == 0 and self._retention[block] != retention:
            del self._idle[self._retention[block]][block]
            self._idle[retention][block] = None
        self._retention[block] = retention

    def _evict(self) -> int:
        idle = next(level for level in self._idle.values() if level)
        block, _ = idle.popitem(last=False)
        self._num_idle -= 1
        self._evictions += 1
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
