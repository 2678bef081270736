"""Blocks whose content follows from their keys, and a process that keeps them in a folder.

python disk_blocks.py hammer FOLDER SEED    saves and loads at random, and checks what it gets
python disk_blocks.py stall FOLDER          stops in the midst of writing a block
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.engine.offload.block_file import BlockFile
from ragserve.engine.offload.disk_tier import DiskTier

__all__ = [
    "BLOCK_BYTES",
    "FILE_BYTES",
    "HEADER_BYTES",
    "IDENTITY",
    "NUM_BLOCKS",
    "MemoryIO",
    "block_files",
    "content",
    "file_of",
    "key",
    "keys_of",
    "load",
    "make_tier",
    "save",
]

NUM_BLOCKS = 64
BLOCK_BYTES = 192
IDENTITY = {"format": "1", "weights": "ab" * 32, "dtype": "float32", "block_size": "16"}
FILE_BYTES = BlockFile({**IDENTITY, "layout": "memory"}, BLOCK_BYTES).num_bytes
HEADER_BYTES = FILE_BYTES - BLOCK_BYTES


class MemoryIO:
    """A pool that is an array."""

    block_bytes = BLOCK_BYTES

    def __init__(self, layout: str = "memory") -> None:
        self.layout = layout
        self.pool = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)

    def mark(self) -> None:
        """Nothing is under way."""

    def allocate(self, num_rows: int) -> Any:
        """Few rows, so that a transfer takes several turns."""
        return np.empty((min(num_rows, 3), BLOCK_BYTES), np.uint8)

    def read(self, blocks: Sequence[int], memory: Any, rows: Sequence[int], after: object) -> None:
        """See `BlockIO`."""
        memory[list(rows)] = self.pool[list(blocks)]

    def write(self, blocks: Sequence[int], memory: Any, rows: Sequence[int], after: object) -> None:
        """See `BlockIO`."""
        self.pool[list(blocks)] = memory[list(rows)]

    def close(self) -> None:
        """Nothing is held."""


def key(number: int) -> bytes:
    """The key of a number."""
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()


def keys_of(count: int, first: int = 0) -> list[bytes]:
    """Keys of consecutive numbers."""
    return [key(number) for number in range(first, first + count)]


def content(name: bytes) -> Any:
    """What belongs to a key."""
    return np.frombuffer(hashlib.shake_128(name).digest(BLOCK_BYTES), np.uint8)


def make_tier(
    folder: Path, *, capacity: int = NUM_BLOCKS, identity: dict[str, str] = IDENTITY
) -> DiskTier:
    """A tier for at most `capacity` blocks."""
    return DiskTier(folder, identity, capacity * FILE_BYTES, MemoryIO())


def save(tier: DiskTier, keys: Sequence[bytes]) -> None:
    """Save what belongs to the keys."""
    io = MemoryIO()
    for block, name in enumerate(keys):
        io.pool[block] = content(name)
    tier.save(keys, range(len(keys)), io, None)


def load(tier: DiskTier, keys: Sequence[bytes]) -> int:
    """How many of the keys could be loaded; what they brought must belong to them, and nothing
    else may have changed."""
    io = MemoryIO()
    blocks = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - len(keys), -1))
    count = tier.load(keys, blocks, io, None)
    for block, name in zip(blocks[:count], keys, strict=False):
        assert np.array_equal(io.pool[block], content(name))
        io.pool[block] = 0
    assert not io.pool.any()
    return count


def block_files(folder: Path) -> list[Path]:
    """All files of blocks, of whatever identity."""
    return sorted(folder.glob("*/*/*.safetensors"))


def file_of(folder: Path, name: bytes) -> Path:
    """The file of a key, of which there must be one."""
    (path,) = folder.glob(f"*/{name.hex()[:2]}/{name.hex()}.safetensors")
    return path


def _hammer(folder: Path, seed: int) -> None:
    choose = random.Random(seed)
    tier = make_tier(folder, capacity=40)
    for _ in range(100):
        keys = keys_of(choose.randint(1, 8), first=choose.randrange(80))
        if choose.random() < 0.5:
            save(tier, keys)
        else:
            load(tier, keys)
    found = tier.statistics()
    print(found.saved, found.loaded, found.rejected)


def _stall(folder: Path) -> None:
    write = os.write

    def half(descriptor: int, data: Any) -> int:
        if len(data) < BLOCK_BYTES:
            return write(descriptor, data)
        write(descriptor, data[: len(data) // 2])
        print("half", flush=True)
        time.sleep(60)
        raise SystemExit("nobody ended it")

    tier = make_tier(folder)
    save(tier, keys_of(2))
    os.write = half
    save(tier, keys_of(1, first=2))


if __name__ == "__main__":
    if sys.argv[1] == "hammer":
        _hammer(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        _stall(Path(sys.argv[2]))
