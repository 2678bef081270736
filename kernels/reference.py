"""The readable float32 oracle of each operation, for tests to compare the fast ones with.

Every function computes and returns float32 whatever it is given, and favours the formula
over speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rope", "rms_norm", "silu_and_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    :param x: `[..., n]`.
    :param weight: `[n]`.
    """
    x = x.float()
    root_mean_square = torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return x / root_mean_square * weight.float()


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., arXiv 2104.09864), NeoX layout.

    Element `i` of the first half of a head and element `i` of its second half are the two
    coordinates of one point in the plane, which is turned by the angle `(token, i)`.

    :param q: `[tokens, heads, head_dim]`; `k` likewise, with its own number of heads.
    :param cos: `[tokens, head_dim / 2]`, cosines of the angles; `sin` likewise.
    """
    turn = torch.complex(cos.float(), sin.float())[:, None, :]

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        points = torch.complex(x[..., :half].float(), x[..., half:].float()) * turn
        return torch.cat((points.real, points.imag), dim=-1)

    return rotate(q), rotate(k)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's activation (Shazeer, arXiv 2002.05202): `silu(gate) * up`.

    :param gate_up: `[..., 2 n]`, gate and up side by side. Returns `[..., n]`.
    """
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].float(), gate_up[..., half:].float()
    return gate / (1 + torch.exp(-gate)) * up
