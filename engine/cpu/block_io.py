"""Whole blocks between a CPU backend's KV pool and other memory of the host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .backend import Backend

__all__ = ["CPUBlockIO"]


class CPUBlockIO:
    """Copies blocks of a CPU backend: see `BlockIO`.

    In every pool of both backends the block is the first dimension, so a block is one run of bytes
    in each pool, and a row of memory is these runs, pool after pool.

    It copies with numpy, which lets go of the GIL for each run and has no threads of its own:
    torch's operations would start a second team of them beside the engine thread's.

    :param backend: its pools, on the CPU, stay alive until `close`.
    """

    def __init__(self, backend: Backend) -> None:
        self._pools = [_rows(pool) for pool in backend.pools]
        sizes = [pool.shape[1] for pool in self._pools]
        ends = np.cumsum(sizes).tolist()
        self._columns = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.block_bytes: int = ends[-1]
        first = backend.pools[0]
        dtype = str(first.dtype).removeprefix("torch.")
        self.layout = (
            f"{type(backend).__name__}, {dtype}, {sys.byteorder} endian, "
            f"{len(self._pools)} x {list(first.shape[1:])}"
        )

    def mark(self) -> None:
        """See `BlockIO.mark`: a plan is computed when it is launched, so nothing is under way."""

    def allocate(self, num_rows: int) -> NDArray[np.uint8]:
        """See `BlockIO.allocate`."""
        return np.empty((num_rows, self.block_bytes), dtype=np.uint8)

    def read(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        """See `BlockIO.read`.

        :raises RuntimeError: if it is closed.
        """
        for block, row in self._pairs(blocks, rows):
            line = memory[row]
            for pool, columns in zip(self._pools, self._columns, strict=True):
                line[columns] = pool[block]

    def write(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        """See `BlockIO.write`.

        :raises RuntimeError: if it is closed.
        """
        for block, row in self._pairs(blocks, rows):
            line = memory[row]
            for pool, columns in zip(self._pools, self._columns, strict=True):
                pool[block] = line[columns]

    def close(self) -> None:
        """Let go of the pools. No transfer may be under way."""
        self._pools = []

    def _pairs(self, blocks: Sequence[int], rows: Sequence[int]) -> zip[tuple[int, int]]:
        if not self._pools:
            raise RuntimeError("the KV pool is closed; blocks can be copied no more")
        return zip(blocks, rows, strict=True)


def _rows(pool: torch.Tensor) -> NDArray[np.uint8]:
    """The pool's memory as bytes, [num_blocks, bytes of a block]."""
    flat: NDArray[np.uint8] = pool.view(pool.shape[0], -1).view(torch.uint8).numpy()
    return flat
