"""Decode steps as CUDA graphs, one for each of a dozen batch sizes."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch

from .memory import clear_workspaces
from .stream import DeviceStream

__all__ = ["DecodeGraphs", "batch_sizes"]

_logger = logging.getLogger("ragserve")

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Padding costs little where weights dominate; where it does not, sizes are 33 % apart."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that decode steps are padded to, up to and with `max_num_seqs`."""
    return [size for size in _SIZES if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Runs one decode step of a batch padded to the next size: replayed, or eagerly.

    :param step: enqueues a decode step of so many rows; always over the same tensors.
    :param sizes: ascending.
    """

    def __init__(self, step: Callable[[int], None], sizes: list[int], stream: DeviceStream) -> None:
        self._step = step
        self._sizes = sizes
        self._stream = stream
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def padded(self, num_rows: int) -> int:
        """The smallest size that holds so many rows."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(self, size: int) -> None:
        """Enqueue one step of `size` rows, one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self._step(size)
        else:
            graph.replay()

    def warm_up(self) -> None:
        """Run each size once, so that no request has to wait for a compiler."""
        for size in self._sizes:
            self._step(size)

    def capture(self) -> None:
        """Record all sizes, the largest first: its memory is enough for the others.

        They share a pool of their own, so that what they hold is not given to anybody else.
        """
        started = time.monotonic()
        before = torch.cuda.memory_reserved(self._stream.device)
        pool = torch.cuda.graph_pool_handle()
        # cuBLAS's workspace then comes from the graphs' own pool, where nobody can free it.
        clear_workspaces()
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            with self._stream.capture(graph, pool):
                self._step(size)
            self._graphs[size] = graph
        self._stream.synchronize()
        _logger.info(
            "captured decode graphs of %s rows in %.2f s, %.1f MiB",
            ", ".join(map(str, self._sizes)),
            time.monotonic() - started,
            (torch.cuda.memory_reserved(self._stream.device) - before) / 2**20,
        )

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self._graphs.clear()
