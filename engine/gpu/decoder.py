"""The decoder's layers on Triton kernels and cuBLAS, over buffers that are made once.

The layers allocate nothing, so that memory is known when the engine is opened and a CUDA graph
can replay them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ragserve.kernels import KVLayer
from ragserve.kernels import triton as ops

from ..models.decoder import DecoderModel

__all__ = ["AttendGPU", "GPUDecoder", "Residual"]

AttendGPU: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""`attend(layer, query, out)`: attention over the layer's pool, in which the step's keys and
values are already. Both are [T, num_heads, head_dim]."""


Residual: TypeAlias = tuple[Tensor, Tensor | None]
"""The residual stream, [m, hidden_size], and what the last layer has still to add to it."""


class GPUDecoder:
    """Hidden states and logits of up to `max_tokens` tokens a step.

    :param model: weights on the device; used where they are.
    :param max_tokens: most tokens of a step.
    :param max_logits: most rows of logits at a time.
    :ivar hidden: [max_tokens, hidden_size]: put the embeddings of a step's tokens here.
    :ivar logits: [max_logits, vocab_size] in the model's dtype.
    """

    def __init__(
        self, model: DecoderModel, *, max_tokens: int, max_logits: int, block_size: int
    ) -> None:
        config = model.config
        self.model = model
        self.config = config
        self._block_size = block_size
        self.hidden = self._buffer(max_tokens, config.hidden_size)
        self._x = self._buffer(max_tokens, config.hidden_size)
        self._delta = self._buffer(max_tokens, config.hidden_size)
        # Triton's interpreter, on a CPU, takes minutes for what torch does at once.
        self._few = ops.GEMV_ROWS if model.device.type == "cuda" else 0
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = self._buffer(max_tokens, heads * config.head_dim)
        self._attended = self._buffer(max_tokens, config.num_heads * config.head_dim)
        self._gate_up = self._buffer(max_tokens, 2 * config.intermediate_size)
        self._activated = self._buffer(max_tokens, config.intermediate_size)
        self._picked = self._buffer(2, max_logits, config.hidden_size)
        self._picked_heads = self._buffer(max_logits, config.num_heads * config.head_dim)
        self.logits = self._buffer(max_logits, config.vocab_size)

    def _buffer(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def forward(
        self,
        num_tokens: int,
        positions: Tensor,
        kv_slots: Tensor,
        pools: list[KVLayer],
        attend: AttendGPU,
        rows: Tensor | None = None,
    ) -> Residual:
        """Run all layers over `hidden[:num_tokens]`.

        :param positions: [T] int32.
        :param kv_slots: [T] int64, where each token's key and value go; negative: nowhere.
        :param rows: [m] int32, the tokens that matter when the layers are done; None is all T.
        :returns: of the m rows; valid until the next call.
        """
        if num_tokens <= self._few:
            residual = self._forward_few(num_tokens, positions, kv_slots, pools, attend)
            return residual if rows is None else self._pick(residual, rows)
        return self._forward_many(num_tokens, positions, kv_slots, pools, attend, rows)

    def _forward_few(
        self,
        num_tokens: int,
        positions: Tensor,
        kv_slots: Tensor,
        pools: list[KVLayer],
        attend: AttendGPU,
    ) -> Residual:
        """Products of few rows are as fast as their weights are read: our own kernels, with the
        norm before and the addition after in them."""
        eps = self.config.rms_norm_eps
        hidden, qkv = self.hidden[:num_tokens], self._qkv[:num_tokens]
        attended = self._attended[:num_tokens]
        query, out = self._heads(qkv), self._heads(attended)
        activated = self._activated[:num_tokens]
        for index, layer in enumerate(self.model.layers):
            attention, mlp = layer.attention, layer.mlp
            ops.gemv(
                hidden,
                attention.qkv.weight,
                qkv,
                bias=attention.qkv.bias,
                norm=layer.attention_norm,
                eps=eps,
            )
            self._rope_and_store(index, qkv, positions, kv_slots, pools)
            attend(index, query, out)
            ops.gemv(
                attended,
                attention.output.weight,
                hidden,
                bias=attention.output.bias,
                residual=hidden,
            )
            ops.gemv_silu(
                hidden,
                mlp.gate_up.weight,
                activated,
                bias=mlp.gate_up.bias,
                norm=layer.mlp_norm,
                eps=eps,
            )
            ops.gemv(activated, mlp.down.weight, hidden, bias=mlp.down.bias, residual=hidden)
        return hidden, None

    def _forward_many(
        self,
        num_tokens: int,
        positions: Tensor,
        kv_slots: Tensor,
        pools: list[KVLayer],
        attend: AttendGPU,
        rows: Tensor | None,
    ) -> Residual:
        eps = self.config.rms_norm_eps
        hidden, x, delta = (b[:num_tokens] for b in (self.hidden, self._x, self._delta))
        qkv, attended = self._qkv[:num_tokens], self._attended[:num_tokens]
        query, out = self._heads(qkv), self._heads(attended)
        inner = self.config.intermediate_size
        gate_up, activated = self._gate_up[:num_tokens], self._activated[:num_tokens]
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            attention, mlp = layer.attention, layer.mlp
            if index == 0:
                ops.rms_norm(hidden, layer.attention_norm, x, eps=eps)
            else:
                ops.add_rms_norm(delta, hidden, layer.attention_norm, x, eps=eps)
            ops.linear(x, attention.qkv.weight, qkv, attention.qkv.bias)
            self._rope_and_store(index, qkv, positions, kv_slots, pools)
            attend(index, query, out)
            if index == last and rows is not None:
                # All keys and values are stored: the rest is only for the tokens that matter.
                m = len(rows)
                x, delta = x[:m], delta[:m]
                gate_up, activated = gate_up[:m], activated[:m]
                hidden = torch.index_select(hidden, 0, rows, out=self._picked[0, :m])
                attended = torch.index_select(attended, 0, rows, out=self._picked_heads[:m])
            ops.linear(attended, attention.output.weight, delta, attention.output.bias)
            ops.add_rms_norm(delta, hidden, layer.mlp_norm, x, eps=eps)
            ops.linear(x, mlp.gate_up.weight, gate_up, mlp.gate_up.bias)
            ops.silu_and_mul(gate_up[:, :inner], gate_up[:, inner:], activated)
            ops.linear(activated, mlp.down.weight, delta, mlp.down.bias)
        return hidden, delta

    def compute_logits(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """Scores of the next token.

        :param residual: what `forward` gave.
        :param rows: [m] int32 of its rows; None is all of them.
        :returns: [m, vocab_size], a view of `logits`, valid until the next call.
        """
        hidden, delta = residual if rows is None else self._pick(residual, rows)
        eps, norm, logits = self.config.rms_norm_eps, self.model.norm, self.logits[: len(hidden)]
        if delta is None:
            ops.gemv(hidden, self.model.lm_head, logits, norm=norm, eps=eps)
            return logits
        x = self._x[: len(hidden)]
        ops.add_rms_norm(delta, hidden, norm, x, eps=eps)
        ops.linear(x, self.model.lm_head, logits)
        return logits

    def _pick(self, residual: Residual, rows: Tensor) -> Residual:
        hidden, delta = residual
        m = len(rows)
        return (
            torch.index_select(hidden, 0, rows, out=self._picked[0, :m]),
            None if delta is None else torch.index_select(delta, 0, rows, out=self._picked[1, :m]),
        )

    def _heads(self, x: Tensor) -> Tensor:
        """[T, num_heads, head_dim] view of the queries in [T, at least that many columns]."""
        config = self.config
        width = config.num_heads * config.head_dim
        return x[:, :width].view(len(x), config.num_heads, config.head_dim)

    def _rope_and_store(
        self, index: int, qkv: Tensor, positions: Tensor, kv_slots: Tensor, pools: list[KVLayer]
    ) -> None:
        config, attention = self.config, self.model.layers[index].attention
        ops.rope_and_store(
            qkv,
            positions,
            self.model.cos_sin,
            kv_slots,
            pools[index],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._block_size,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            eps=config.rms_norm_eps,
        )
