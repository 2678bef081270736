"""Operations in plain torch: the ones for CPU, correct on any device.

The order of roundings is that of Hugging Face's models, so that in any dtype the same
numbers come out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["apply_rope", "rms_norm", "silu_and_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ragserve.kernels.rms_norm`."""
    if x.dtype == torch.float32:  # nothing to round in between: one call does the same
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `ragserve.kernels.apply_rope`."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `ragserve.kernels.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
