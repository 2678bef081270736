"""The readable float32 oracle of each operation, for tests to compare the fast ones with.

Every function computes and returns float32 whatever it is given, and favours the formula
over speed.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .paging import KVLayer, PagedBatch

__all__ = ["apply_rope", "paged_attention", "rms_norm", "silu_and_mul"]


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


def paged_attention(
    query: Tensor,
    cache: KVLayer,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention (Vaswani et al., arXiv 1706.03762) over a paged pool (Kwon et al., arXiv
    2309.06180), with groups of query heads on one KV head (Ainslie et al., arXiv 2305.13245).

    Reads the slots that hold the positions a token sees, and no others.

    :param query: `[tokens, num_heads, head_dim]`, tokens as `batch` lays them out.
    :param cache: the layer's pool, with the step's own keys and values stored in it.
    :param scale: factor of the scores.
    :param window: positions that a token sees at most, its own included; None sees all.
    :param soft_cap: bound of the scores, which become `soft_cap * tanh(score / soft_cap)` (Gemma
        Team, arXiv 2408.00118); None leaves them.
    """
    output = torch.empty(query.shape, dtype=torch.float32)
    group = query.shape[1] // cache.keys.shape[1]
    for s, (start, end) in enumerate(itertools.pairwise(batch.query_starts)):
        blocks, slots = _locate(batch, s)
        for t in range(start, end):
            position = int(batch.positions[t])
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            keys = cache.keys[blocks[seen], :, slots[seen]].transpose(0, 1).float()
            values = cache.values[blocks[seen], :, slots[seen]].transpose(0, 1).float()
            # Each KV head meets the query heads of its group: [heads, 1 or seen, head_dim].
            keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
            scores = query[t, :, None].float() @ keys.transpose(1, 2) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            output[t] = (torch.softmax(scores, dim=2) @ values)[:, 0]
    return output


def _locate(batch: PagedBatch, sequence: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of a sequence are stored: of each position its block, and its slot in it."""
    positions = torch.arange(batch.seq_lens[sequence])
    starts = batch.block_starts[sequence].cpu()
    index = torch.searchsorted(starts, positions, right=True) - 1
    return batch.block_tables[sequence].cpu()[index].long(), positions - starts[index]
