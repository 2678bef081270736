"""What a step's forward pass runs on: torch's operations, or our library of C kernels.

Both compute the same model; the C kernels run all layers of a step in one call, over a KV pool
in a layout of their own.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

import torch
from torch import Tensor

from ragserve import kernels

from ..models.config import ModelConfig
from ..models.decoder import DecoderModel
from .memory import KVCache

__all__ = [
    "Backend",
    "NativeBackend",
    "TorchBackend",
    "block_bytes",
    "make_backend",
    "native_operations",
]

_logger = logging.getLogger("ragserve")


class Backend(Protocol):
    """A model's weights and its KV pool."""

    config: ModelConfig
    block_size: int
    pools: list[Tensor]
    """The KV memory, in a layout of the backend's own."""
    sharing: kernels.Sharing
    """What decoding sequences share from which on attention is faster if it reads that once."""

    def forward(self, token_ids: Tensor, batch: kernels.PagedBatch) -> Tensor:
        """Store the step's keys and values; hidden states after the last norm.

        :param token_ids: [T] int64.
        :returns: [T, hidden_size].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden_size] -> scores of the next token, [m, vocab_size] float32."""


class TorchBackend:
    """Plain torch: every model, dtype and device."""

    sharing = kernels.Sharing(min_tokens=64, min_saved_tokens=8192)

    def __init__(self, model: DecoderModel, *, num_blocks: int, block_size: int) -> None:
        self.config = model.config
        self.block_size = block_size
        self._model = model
        self._cache = KVCache(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.pools = [pool for layer in self._cache.layers for pool in (layer.keys, layer.values)]

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of all layers."""
        width = config.num_kv_heads * config.head_dim
        return 2 * config.num_layers * block_size * width * dtype.itemsize

    def forward(self, token_ids: Tensor, batch: kernels.PagedBatch) -> Tensor:
        """See `Backend.forward`."""
        config, layers = self.config, self._cache.layers
        attention = kernels.plan_attention(
            batch,
            block_size=self.block_size,
            num_kv_heads=config.num_kv_heads,
            scale=config.attention_scale,
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query, key, value, layers[layer], window=config.layer_windows[layer])

        return self._model.forward(token_ids, batch.positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Backend.logits`."""
        return self._model.logits(hidden)


class NativeBackend:
    """The C kernels: float32 and bfloat16 on a CPU.

    :param model: its weights are taken over, one after the other, into the order in which the
        kernels read them; it cannot be used afterwards.
    """

    sharing = kernels.Sharing(min_tokens=256, min_saved_tokens=512)

    def __init__(
        self, model: DecoderModel, ops: kernels.NativeOps, *, num_blocks: int, block_size: int
    ) -> None:
        config = model.config
        self.config = config
        self.block_size = block_size
        self._ops = ops
        self._dtype = model.dtype
        self._angles = model.cos_sin
        shape = _pool_shape(ops, config, num_blocks, block_size, model.dtype)
        layers = []
        for window in config.layer_windows:
            layer = model.layers.pop(0)
            attention, mlp = layer.attention, layer.mlp
            layers.append(
                kernels.NativeLayer(
                    attention_norm=layer.attention_norm,
                    qkv=ops.pack(attention.qkv.weight),
                    output=ops.pack(attention.output.weight),
                    mlp_norm=layer.mlp_norm,
                    gate_up=ops.pack(mlp.gate_up.weight),
                    down=ops.pack(mlp.down.weight),
                    pool=ops.allocate_pool(shape, model.dtype),
                    window=window,
                    qkv_bias=attention.qkv.bias,
                    q_norm=attention.q_norm,
                    k_norm=attention.k_norm,
                    output_bias=attention.output.bias,
                    gate_up_bias=mlp.gate_up.bias,
                    down_bias=mlp.down.bias,
                )
            )
            del layer, attention, mlp
            _trim_heap()
        self.pools = [layer.pool for layer in layers]
        self._decoder = kernels.NativeDecoder(
            ops, layers, norm=model.norm, block_size=block_size, eps=config.rms_norm_eps
        )
        self._lm_head = ops.pack(model.lm_head)
        # A tied embedding is read from the packed rows, so that it is in memory once.
        self._embedding = None if config.tie_word_embeddings else model.embedding
        del model.embedding, model.lm_head
        _trim_heap()

    @staticmethod
    def block_bytes(
        ops: kernels.NativeOps, config: ModelConfig, block_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one block: keys and values of all layers."""
        elements = 1
        for size in _pool_shape(ops, config, 1, block_size, dtype):
            elements *= size
        return config.num_layers * elements * dtype.itemsize

    def forward(self, token_ids: Tensor, batch: kernels.PagedBatch) -> Tensor:
        """See `Backend.forward`."""
        config = self.config
        attention = self._ops.plan_attention(
            batch,
            block_size=self.block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            dtype=self._dtype,
        )
        if self._embedding is None:
            hidden = self._ops.embedding(token_ids, self._lm_head)
        else:
            hidden = torch.nn.functional.embedding(token_ids, self._embedding)
        cos, sin = self._angles[batch.positions].chunk(2, dim=-1)
        return self._decoder.forward(hidden, cos, sin, batch.slots, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Backend.logits`."""
        return self._ops.linear(hidden, self._lm_head, dtype=torch.float32)


def make_backend(
    model: DecoderModel, ops: kernels.NativeOps | None, *, num_blocks: int, block_size: int
) -> Backend:
    """The backend of a model: on the C kernels if there are `ops`, else on torch."""
    if ops is None:
        return TorchBackend(model, num_blocks=num_blocks, block_size=block_size)
    return NativeBackend(model, ops, num_blocks=num_blocks, block_size=block_size)


def block_bytes(model: DecoderModel, ops: kernels.NativeOps | None, block_size: int) -> int:
    """Bytes of one block in that backend: keys and values of all layers."""
    config, dtype = model.config, model.dtype
    if ops is None:
        return TorchBackend.block_bytes(config, block_size, dtype)
    return NativeBackend.block_bytes(ops, config, block_size, dtype)


def native_operations(model: DecoderModel) -> kernels.NativeOps | None:
    """The C kernels, if they can run this model; if not, the log says why."""
    config = model.config
    if model.device.type != "cpu":
        return None
    try:
        ops = kernels.load_native()
    except kernels.NativeUnavailableError as error:
        _logger.info("running on torch's operations: %s", error)
        return None
    refusal = ops.refusal(
        dtype=model.dtype,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sizes=(config.hidden_size, config.intermediate_size),
    )
    if refusal is not None:
        _logger.info("running on torch's operations: %s", refusal)
        return None
    return ops


def _trim_heap() -> None:
    """Give freed weights back to the system, so that no more than a layer is in memory twice:
    glibc keeps freed memory of this size for itself."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, TypeError, OSError):
        return  # another C library: it has its own way
    trim(0)


def _pool_shape(
    ops: kernels.NativeOps,
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[int, int, int, int]:
    return ops.pool_shape(
        num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
