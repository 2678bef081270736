"""The decoder's building blocks: linear layer, attention, MLP, layer.

They are plain objects around tensors, not `torch.nn.Module`s: a step calls every one of
them, and a module's bookkeeping would cost more than a small layer's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ragserve import kernels

from .config import ModelConfig

__all__ = ["Attend", "Attention", "DecoderLayer", "Linear", "MLP"]

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q, k, v)`: store the keys and values of this step's tokens and return the
attention output `[T, num_heads, head_dim]`. `q` is `[T, num_heads, head_dim]`, `k` and `v`
are `[T, num_kv_heads, head_dim]`, after qk-norm and RoPE; they may be strided views whose
last two dimensions are contiguous."""

NamedTensors: TypeAlias = Iterator[tuple[str, Tensor]]
"""Checkpoint names and the memory each is to be read into."""


class Linear:
    """`x W^T + b`. What replaces it needs `__call__` and `tensors`.

    :ivar weight: `[out_features, in_features]`.
    :ivar bias: `[out_features]` or None.
    """

    __slots__ = ("bias", "weight")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def tensors(self, **parts: int) -> NamedTensors:
        """Where to read the weights of the layers joined in this one.

        :param parts: name in the checkpoint -> its output features, in order.
        """
        start = 0
        for name, size in parts.items():
            yield f"{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + size]
            start += size


class Attention:
    """Projections, qk-norm and RoPE around an `Attend`."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = index
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self.sizes = [self.q_size, self.kv_size, self.kv_size]
        self.qkv = Linear(
            config.hidden_size, sum(self.sizes), bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.output = Linear(
            self.q_size, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device
        )
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        if config.qk_norm:
            self.q_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
            self.k_norm = torch.empty(config.head_dim, dtype=dtype, device=device)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        num_tokens = x.shape[0]
        q, k, v = (
            part.view(num_tokens, -1, self.head_dim)
            for part in torch.split(self.qkv(x), self.sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = kernels.rms_norm(q, self.q_norm, self.eps)
            k = kernels.rms_norm(k, self.k_norm, self.eps)
        q, k = kernels.apply_rope(q, k, cos, sin)
        return self.output(attend(self.index, q, k, v).reshape(num_tokens, self.q_size))

    def tensors(self) -> NamedTensors:
        """Names and memory, see `Linear.tensors`."""
        yield from self.qkv.tensors(q_proj=self.q_size, k_proj=self.kv_size, v_proj=self.kv_size)
        yield from self.output.tensors(o_proj=self.output.weight.shape[0])
        if self.q_norm is not None and self.k_norm is not None:
            yield "q_norm.weight", self.q_norm
            yield "k_norm.weight", self.k_norm


class MLP:
    """SwiGLU: `down(silu(gate(x)) * up(x))`, gate and up joined."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.inner = inner
        self.gate_up = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(kernels.silu_and_mul(self.gate_up(x)))

    def tensors(self) -> NamedTensors:
        """Names and memory, see `Linear.tensors`."""
        yield from self.gate_up.tensors(gate_proj=self.inner, up_proj=self.inner)
        yield from self.down.tensors(down_proj=self.down.weight.shape[0])


class DecoderLayer:
    """Attention and MLP, each normed before and added to the residual stream after."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = config.rms_norm_eps
        self.attention = Attention(config, index, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)
        self.attention_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = kernels.rms_norm(hidden, self.attention_norm, self.eps)
        hidden = hidden + self.attention(x, cos, sin, attend)
        x = kernels.rms_norm(hidden, self.mlp_norm, self.eps)
        return hidden + self.mlp(x)

    def tensors(self) -> NamedTensors:
        """Names and memory, see `Linear.tensors`."""
        yield "input_layernorm.weight", self.attention_norm
        yield "post_attention_layernorm.weight", self.mlp_norm
        for name, tensor in self.attention.tensors():
            yield f"self_attn.{name}", tensor
        for name, tensor in self.mlp.tensors():
            yield f"mlp.{name}", tensor
