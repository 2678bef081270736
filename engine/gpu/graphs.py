"""Steps recorded as CUDA graphs: decodes of a dozen batch sizes, and prompts of a few lengths.

A step is some three hundred kernels, which the host takes longer to start one by one than a GPU
takes to run them for a small model or a short prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch

from .batch import BatchLayout
from .memory import clear_workspaces
from .stream import DeviceStream

__all__ = ["DecodeStep", "StepGraphs", "batch_sizes", "mixed_layouts"]

_logger = logging.getLogger("ragserve")

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Padding costs little where weights dominate; where it does not, sizes are 33 % apart."""
_FEW_SINGLES = 8
_PROMPT_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
_MOST_PROMPTS = 32


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that decode steps are padded to, up to and with `max_num_seqs`."""
    return [size for size in _SIZES if size < max_num_seqs] + [max_num_seqs]


def mixed_layouts(
    max_num_seqs: int, max_tokens: int, *, group: int, block_m: int
) -> list[BatchLayout]:
    """Layouts that steps with prompts are padded to, the smallest first.

    :param max_tokens: most prompt tokens that are worth it.
    :param group: query heads per KV head.
    :param block_m: rows of a prefill tile.
    """
    layouts = []
    for prompt_tokens in _PROMPT_TOKENS:
        for singles in sorted({min(_FEW_SINGLES, max_num_seqs), max_num_seqs}):
            prompts = min(_MOST_PROMPTS, max_num_seqs)
            if prompt_tokens <= max_tokens:
                layouts.append(
                    BatchLayout(
                        singles=singles,
                        tokens=singles + prompt_tokens,
                        sequences=singles + prompts,
                        tiles=prompt_tokens * group // block_m + prompts,
                        samples=min(singles + prompts, max_num_seqs),
                    )
                )
    return layouts


class DecodeStep(NamedTuple):
    """What a decode step is recorded for.

    :param size: rows, those of nobody included.
    :param cascade: whether what sequences share is read once for all (see `cascade.py`).
    """

    size: int
    cascade: bool


class StepGraphs:
    """Recorded steps, by what they were recorded for."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def replay(self, key: Hashable) -> None:
        """Enqueue a recorded step."""
        self._graphs[key].replay()

    def capture(self, steps: Mapping[Hashable, Callable[[], None]]) -> None:
        """Record steps, which must have run before, in this order: the largest first.

        They share a pool of memory of their own, so that what they hold is not given to anybody
        else.
        """
        started = time.monotonic()
        before = torch.cuda.memory_reserved(self._stream.device)
        pool = torch.cuda.graph_pool_handle()
        # cuBLAS's workspace then comes from the graphs' own pool, where nobody can free it.
        clear_workspaces()
        for key, step in steps.items():
            graph = torch.cuda.CUDAGraph()
            with self._stream.capture(graph, pool):
                step()
            self._graphs[key] = graph
        self._stream.synchronize()
        _logger.info(
            "captured %d CUDA graphs in %.2f s, %.1f MiB",
            len(steps),
            time.monotonic() - started,
            (torch.cuda.memory_reserved(self._stream.device) - before) / 2**20,
        )

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self._graphs.clear()
