"""When a decode step reads what its sequences share once for all of them, and what that is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragserve.kernels import KVLayer, shared_runs
from ragserve.kernels import triton as ops

from ..models.config import ModelConfig
from ..scheduling.plan import ScheduledChunk
from .seats import Seats
from .stream import DeviceStream, Staging

__all__ = ["Cascade"]

_LEAST_ROWS = 4
"""Batches for which graphs of cascade steps are recorded; below, little can be shared."""


class Cascade:
    """The shared runs of decode steps: found when a sequence comes or goes, kept on the device.

    :param shape: of the model.
    :param sizes: batch sizes that decode steps are padded to.
    :ivar sizes: those of them for which there are cascade steps; none for a model all of whose
        layers have a window.
    :ivar always: True: wherever anything is shared, False: nowhere, None: where it pays. For tests
        and measurements.
    :ivar num_plans: plans that were run as a cascade.
    """

    def __init__(
        self,
        shape: ModelConfig,
        dtype: torch.dtype,
        sizes: Sequence[int],
        block_size: int,
        stream: DeviceStream,
        staging: Staging,
    ) -> None:
        self._group = shape.num_heads // shape.num_kv_heads
        self._block_size = block_size
        self._staging = staging
        self._min_saved_bytes = ops.min_saved_bytes(shape.head_dim)
        self._token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        has_whole_layers = any(window is None for window in shape.layer_windows)
        self.sizes = [size for size in sizes if size >= _LEAST_ROWS and has_whole_layers]
        self.always: bool | None = None
        self.num_plans = 0
        self.workspace = ops.cascade_workspace(
            max(self.sizes, default=0),
            shape.num_heads,
            shape.head_dim,
            num_sms=stream.num_processors,
            device=stream.device,
        )
        self._cuts: dict[int, tuple[ops.CascadeConfig, int]] = {}
        for size in self.sizes:
            config = ops.cascade_config(
                size * self._group, shape.head_dim, dtype, shared_memory=stream.shared_memory
            )
            programs = ops.num_programs(shape.num_kv_heads, stream.num_processors, config)
            self._cuts[size] = config, programs
        # What the plan on the device is for.
        self._known: tuple[bool | None, list[int]] | None = None
        self._chosen = False

    def choose(
        self, chunks: Sequence[ScheduledChunk], rows: Sequence[int], size: int, seats: Seats
    ) -> bool:
        """Whether this plan is to be a cascade; if so, the device knows what is shared when it
        comes to the plan.

        While a sequence has its seat it only gains blocks of its own behind those it came with, so
        that what is shared stays the same for as long as the same sequences decode.

        :param chunks: of sequences that decode, with all their blocks in the tables of `seats`.
        :param rows: their seats.
        :param size: of the batch that they are padded to.
        """
        if size not in self.sizes or self.always is False:
            return False
        known = self.always, [seats.tenures[row] for row in rows]
        if known != self._known:
            self._known = known
            self._chosen = self._plan(chunks, rows, size, seats)
        self.num_plans += self._chosen
        return self._chosen

    def _plan(
        self, chunks: Sequence[ScheduledChunk], rows: Sequence[int], size: int, seats: Seats
    ) -> bool:
        requests = [chunk.request for chunk in chunks]
        runs = shared_runs(
            [request.blocks for request in requests],
            [
                request.layout.num_complete(chunk.start)
                for request, chunk in zip(requests, chunks, strict=True)
            ],
            min_blocks=1 if self.always else ops.MIN_SHARED_BLOCKS,
        )
        if not runs:
            return False
        saved = ops.saved_tokens(runs, rows, seats.starts) * self._token_bytes
        if not self.always and saved < self._min_saved_bytes:
            return False
        config, programs = self._cuts[size]
        plan = ops.plan_cascade(
            runs,
            rows,
            seats.starts,
            self.workspace,
            block_size=self._block_size,
            group=self._group,
            programs=programs,
            config=config,
        )
        if plan is None:
            return False
        self.workspace.plan.copy_(self._staging.upload(plan))
        return True

    def attend(
        self, query: Tensor, pool: KVLayer, state: ops.SeatState, scale: float
    ) -> ops.SharedPartials:
        """Attention of a step's rows to what the plan on the device says that they share.

        :param query: [size, num_heads, head_dim].
        """
        config, programs = self._cuts[len(query)]
        return ops.paged_shared(
            query,
            pool,
            block_tables=state.block_tables,
            block_starts=state.block_starts,
            workspace=self.workspace,
            programs=programs,
            scale=scale,
            config=config,
        )
