"""From weights on a GPU to a runner: memory planned, kernels compiled, graphs captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ragserve.kernels import KVLayer

from ..config import EngineConfig
from ..errors import InvalidParamsError, OutOfMemoryError
from ..models.decoder import DecoderModel
from .block_io import GPUBlockIO, staging_bytes
from .memory import free_memory, plan_gpu_blocks
from .runner import GPURunner
from .stream import DeviceStream

__all__ = ["build_gpu"]

_BLOCK_SIZES = (16, 32, 64, 128)
_MAX_HEAD_DIM = 256


def build_gpu(model: DecoderModel, config: EngineConfig) -> tuple[GPURunner, int, int]:
    """Make the KV pool and the runner of a model whose weights are on the device.

    :returns: the runner, the number of blocks, and the bytes of the pool.
    :raises InvalidParamsError: if a knob does not fit the kernels.
    :raises OutOfMemoryError: if the pool does not fit.
    """
    shape = model.config
    if config.block_size not in _BLOCK_SIZES:
        raise InvalidParamsError(
            "block_size", config.block_size, f"one of {', '.join(map(str, _BLOCK_SIZES))} on a GPU"
        )
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 8:
        raise InvalidParamsError(
            "device",
            config.device,
            f'"cpu" for a head_dim of {shape.head_dim}; the GPU kernels take multiples of 8 up '
            f"to {_MAX_HEAD_DIM}",
        )
    tiers = config.swap_space_bytes > 0 or config.disk_cache is not None
    stream = DeviceStream(model.device)
    # The weights are there already; what others hold is not ours to count.
    free_at_open = free_memory(model.device) + model.num_bytes
    with stream.current(), _explained(config):
        runner = GPURunner(model, stream, config)
        per_block = 2 * shape.num_layers * config.block_size * shape.num_kv_heads * shape.head_dim
        per_block *= model.dtype.itemsize
        num_blocks = plan_gpu_blocks(
            config,
            block_bytes=per_block,
            max_model_len=model.max_model_len,
            free_at_open=free_at_open,
            used=model.num_bytes + runner.num_bytes + (staging_bytes(per_block) if tiers else 0),
        )
        # One piece of memory, in which a block's keys and values are found by strides.
        pool = torch.empty(
            (
                shape.num_layers,
                2,
                num_blocks,
                shape.num_kv_heads,
                config.block_size,
                shape.head_dim,
            ),
            dtype=model.dtype,
            device=model.device,
        )
        runner.prepare([KVLayer(*layer) for layer in pool])
        if tiers:
            runner.block_io = GPUBlockIO(pool, stream)
    return runner, num_blocks, num_blocks * per_block


@contextlib.contextmanager
def _explained(config: EngineConfig) -> Iterator[None]:
    """Say which knobs decide what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the device's memory ran out while the engine was opened: {error}; lower "
            f"max_num_batched_tokens={config.max_num_batched_tokens}, "
            f"max_num_seqs={config.max_num_seqs}, kv_cache_bytes={config.kv_cache_bytes} or "
            f"gpu_memory_utilization={config.gpu_memory_utilization}"
        ) from error
