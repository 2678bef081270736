"""Hashes that name a block's content: its tokens, all tokens before them, and the namespace."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise

from .layout import BlockLayout

__all__ = ["BlockHash", "block_hashes", "chain_hashes", "next_hash", "root_hash"]

BlockHash = bytes
"""Names the content of a block: its own tokens, all tokens before, and the namespace."""


def block_hashes(
    token_ids: Sequence[int],
    layout: BlockLayout,
    namespace: str,
    *,
    known: Sequence[BlockHash] = (),
) -> list[BlockHash]:
    """Keys of all complete blocks of `token_ids`, in order.

    A key is BLAKE2b over (parent key, number of tokens, tokens); the first parent is a hash of
    the namespace. Since every field has a fixed or stated length, two different contents never
    feed the hash the same bytes.

    :param known: keys of the first blocks, computed before.
    """
    keys = list(known)
    parent = keys[-1] if keys else root_hash(namespace)
    complete = layout.num_complete(len(token_ids))
    ends = [*layout.starts(complete), layout.start(complete)][len(keys) :]
    return keys + chain_hashes(parent, token_ids, ends)


def chain_hashes(
    parent: BlockHash, token_ids: Sequence[int], ends: Sequence[int]
) -> list[BlockHash]:
    """Keys of consecutive blocks (see `block_hashes`).

    :param ends: where the blocks begin in `token_ids`, and, at the end, where the last one ends.
    """
    # One call for each block: a prompt of 1,000 tokens has 64.
    data, keys = array("I", token_ids).tobytes(), []
    for start, end in pairwise(ends):
        content = parent + (end - start).to_bytes(4, "little") + data[4 * start : 4 * end]
        parent = hashlib.blake2b(content, digest_size=32, person=b"ragserve-kv-blck").digest()
        keys.append(parent)
    return keys


def root_hash(namespace: str) -> BlockHash:
    """What stands for the parent of a prompt's first block (see `block_hashes`)."""
    return hashlib.blake2b(
        namespace.encode("utf-8", "surrogatepass"), digest_size=32, person=b"ragserve-kv-root"
    ).digest()


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Key of the block of `token_ids` that follows the one of `parent` (see `block_hashes`)."""
    return chain_hashes(parent, token_ids, (0, len(token_ids)))[0]
