"""Blocks between a GPU's KV pool and memory of the host, beside what the GPU computes.

All copying goes to a stream of its own, in one of two ways. Staged: a kernel gathers blocks into
a small buffer of the device, at the speed of its memory, and the copy engine takes them over the
bus. Direct: the kernel itself reads or writes the host's memory. Blocks leave staged, for writes
of a kernel over the bus slow down whatever else computes. They come back directly: somebody waits
for them, and what is staged has to find room on the multiprocessors again and again (see
`benchmarks/gpu/gpu_swap.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragserve.kernels import triton as ops

from ..errors import OutOfMemoryError
from ..models.free_memory import available_memory
from .stream import DeviceStream, Mark

__all__ = ["GPUBlockIO", "staging_bytes"]

_STAGING_BYTES = 32 << 20
"""Memory of the device that blocks go through: enough that launches cost little beside copying."""
_MOST_BLOCKS = 4096
"""Blocks whose numbers are sent to the device together."""
_DIRECT_WORDS = 16 * 4096
"""Words on the bus at a time, without staging: enough to keep it full."""
_MOST_THREADS = 8
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every CUDA context of the process."""


def staging_bytes(block_bytes: int) -> int:
    """Device memory that a `GPUBlockIO` takes: whole blocks, one at least."""
    return max(1, _STAGING_BYTES // block_bytes) * block_bytes


class GPUBlockIO:
    """The `BlockIO` of a KV pool on a GPU. On a CPU, where the GPU path runs under Triton's
    interpreter, torch copies: the interpreter serves one thread at a time.

    `mark` is for the engine's thread, all else for one other thread at a time.

    :param pool: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], all keys and
        values.
    :param stream: the engine's.
    :param direct_reads: let the kernel write the host's memory itself, rather than staged.
    :param direct_writes: let it read the host's memory itself; where that is pinned, that is,
        of `allocate`.
    :ivar block_bytes: of one block.
    :ivar layout: how a block's bytes lie.
    """

    def __init__(
        self,
        pool: Tensor,
        stream: DeviceStream,
        *,
        direct_reads: bool = False,
        direct_writes: bool = True,
    ) -> None:
        layers, parts, _, heads, slots, size = pool.shape
        self.block_bytes = pool[:, :, 0].numel() * pool.itemsize
        dtype = str(pool.dtype).removeprefix("torch.")
        self.layout = f"gpu {dtype} [{layers} layers, {parts}, {heads} heads, {slots}, {size}]"
        self._pool = pool
        self._engine = stream
        # CUDA's default priority, which this stream has, is the lowest there is.
        self._copies = DeviceStream(stream.device)
        self._direct = {False: direct_reads, True: direct_writes}
        """By whether the pool is the target."""
        self._pinned: list[NDArray[np.uint8]] = []
        self._host_numbers = stream.host_buffer(2 * _MOST_BLOCKS)
        rows = staging_bytes(self.block_bytes) // self.block_bytes
        with self._copies.current():
            self._numbers = torch.zeros(2 * _MOST_BLOCKS, dtype=torch.int32, device=stream.device)
            self._staging = torch.empty(
                (rows, self.block_bytes), dtype=torch.uint8, device=stream.device
            )
        if stream.is_cuda:
            self._compile()

    def mark(self) -> Mark:
        """The point behind every plan launched so far. Called by the engine's thread."""
        return self._engine.mark()

    def allocate(self, num_rows: int) -> NDArray[np.uint8]:
        """[num_rows, block_bytes] bytes of the host, zeros; pinned until `close`.

        They come from the system, not from torch, whose allocator rounds up to a power of two and
        keeps what it has.

        :raises OutOfMemoryError: if the host lacks the memory.
        """
        size, available = num_rows * self.block_bytes, available_memory()
        if size == 0:
            return np.empty((0, self.block_bytes), dtype=np.uint8)
        asked = f"{size} bytes of host memory were asked for ({num_rows} KV blocks)"
        remedy = f"{available} are available; lower swap_space_bytes"
        if size > available:
            raise OutOfMemoryError(f"{asked} and {remedy}")
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"{asked}, the system refused ({error}) and {remedy}") from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            # Large pages are pinned faster. A child process does not need the memory, and to share
            # its pages with one would move them away from where the device writes.
            with contextlib.suppress(AttributeError, OSError):  # not every system knows them
                memory.madvise(getattr(mmap, advice))
        flat = np.frombuffer(memory, dtype=np.uint8)
        if self._copies.is_cuda:
            _touch(flat)
            self._pin(flat, f"{asked}, CUDA cannot pin them (error {{}}) and {remedy}")
        return flat.reshape(num_rows, self.block_bytes)

    def read(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        """Copy pool blocks to `memory[rows]`; see `BlockIO.read`.

        :param memory: of `allocate`.
        :param after: of `mark`; also without any blocks this returns when the device is past it.
        """
        self._transfer(blocks, memory, rows, after, to_pool=False)

    def write(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        """Copy `memory[rows]` to pool blocks; else like `read`."""
        self._transfer(blocks, memory, rows, after, to_pool=True)

    def close(self) -> None:
        """Unpin the host's memory, which its arrays keep until they go, and let go of the pool
        and of the device's memory. A second call does nothing."""
        self._copies.synchronize()
        with self._copies.current():
            while self._pinned:
                torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().ctypes.data)
        self._pool = self._staging = self._numbers = torch.empty(0)

    # -- transfers --------------------------------------------------------------------------

    @torch.inference_mode()
    def _transfer(
        self,
        blocks: Sequence[int],
        memory: NDArray[np.uint8],
        rows: Sequence[int],
        after: object,
        *,
        to_pool: bool,
    ) -> None:
        if not isinstance(after, Mark):
            raise TypeError(f"after is what mark() gave, not {type(after).__name__}")
        numbers = np.array([blocks, rows], dtype=np.int32)
        # In the order of the rows: those that lie together cross the bus together.
        numbers = np.ascontiguousarray(numbers[:, np.argsort(numbers[1], kind="stable")])
        lines = torch.from_numpy(memory)
        if not self._copies.is_cuda:
            self._copy_on_cpu(numbers, lines, to_pool)
            return
        if len(blocks) == 0:
            after.wait()
        with self._copies.current():
            for first in range(0, len(blocks), _MOST_BLOCKS):
                self._enqueue(numbers[:, first : first + _MOST_BLOCKS], lines, after, to_pool)
                self._copies.mark().wait()

    def _enqueue(
        self, numbers: NDArray[np.int32], lines: Tensor, after: Mark, to_pool: bool
    ) -> None:
        """:param numbers: [2, n], of blocks and of rows."""
        count = numbers.shape[1]
        host, device = self._host_numbers[: 2 * count], self._numbers[: 2 * count]
        host.numpy()[:] = numbers.ravel()
        device.copy_(host, non_blocking=True)
        blocks, rows = device.chunk(2)
        self._copies.follow(after)
        if self._direct[to_pool] and self._is_pinned(lines):
            if to_pool:
                ops.rows_to_blocks(lines, rows, self._pool, blocks, at_a_time=_DIRECT_WORDS)
            else:
                ops.blocks_to_rows(self._pool, blocks, lines, rows, at_a_time=_DIRECT_WORDS)
        else:
            size = len(self._staging)
            for first in range(0, count, size):
                part = slice(first, first + size)
                self._stage(blocks[part], lines, numbers[1, part], to_pool)

    def _stage(self, blocks: Tensor, lines: Tensor, rows: NDArray[np.int32], to_pool: bool) -> None:
        """Copy as many blocks as the staging buffer holds, at most."""
        if not to_pool:
            ops.blocks_to_rows(self._pool, blocks, self._staging)
        starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for start, end in itertools.pairwise(starts):
            row = int(rows[start])
            there, here = lines[row : row + end - start], self._staging[start:end]
            source, target = (there, here) if to_pool else (here, there)
            target.copy_(source, non_blocking=True)
        if to_pool:
            ops.rows_to_blocks(self._staging, None, self._pool, blocks)

    def _is_pinned(self, lines: Tensor) -> bool:
        start, end = lines.data_ptr(), lines.data_ptr() + lines.nbytes
        pinned = ((flat.ctypes.data, flat.nbytes) for flat in self._pinned)
        return any(first <= start and end <= first + size for first, size in pinned)

    def _copy_on_cpu(self, numbers: NDArray[np.int32], lines: Tensor, to_pool: bool) -> None:
        blocks, rows = torch.from_numpy(numbers)
        pool, order = self._pool, (2, 0, 1, 3, 4, 5)
        if to_pool:
            shape = (len(rows), *pool.shape[:2], *pool.shape[3:])
            pool[:, :, blocks] = lines[rows].view(pool.dtype).view(shape).permute(1, 2, 0, 3, 4, 5)
        else:
            picked = pool[:, :, blocks].permute(order).contiguous()
            lines[rows] = picked.view(torch.uint8).view(len(rows), self.block_bytes)

    # -- once -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compile(self) -> None:
        """Copy a block to and fro, so that no transfer waits for a compiler."""
        memory, mark = self.allocate(1), self._engine.mark()
        self.read([0], memory, [0], mark)
        self.write([0], memory, [0], mark)

    def _pin(self, flat: NDArray[np.uint8], message: str) -> None:
        with self._copies.current():
            status = torch.cuda.cudart().cudaHostRegister(flat.ctypes.data, len(flat), _PORTABLE)
            if int(status):
                # The next launch reports an earlier call's error once more: here, to nobody.
                with contextlib.suppress(RuntimeError):
                    self._numbers.zero_()
                raise OutOfMemoryError(message.format(int(status)))
        self._pinned.append(flat)


def _touch(flat: NDArray[np.uint8]) -> None:
    """Have the system provide all pages now, in several threads: pinning asks for one after the
    other, which takes four times as long."""
    count = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count, thread_name_prefix="ragserve pinning") as threads:
        list(threads.map(lambda part: part[:: mmap.PAGESIZE].fill(0), np.array_split(flat, count)))
