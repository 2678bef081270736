"""Rotary position embedding: the frequencies of each scaling, and the table of angles.

The formulas are those of Hugging Face transformers, which names the scalings: `default`
(arXiv 2104.09864), `linear` (arXiv 2306.15595), `dynamic` (NTK-aware), `llama3` (Llama 3.1)
and `yarn` (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ROPE_TYPES", "RopeConfig", "inverse_frequencies", "rope_table"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. What a rope type does not use is ignored.

    :param rope_type: one of `ROPE_TYPES`.
    :param theta: base of the wavelengths.
    :param factor: by how much the context is stretched.
    :param original_max_position_embeddings: context length, in tokens, before stretching.
    :param low_freq_factor: llama3: longer wavelengths than `original / low` are stretched.
    :param high_freq_factor: llama3: shorter wavelengths than `original / high` are kept.
    :param attention_factor: yarn: what cos and sin are multiplied by; None derives it.
    :param beta_fast: yarn: dimensions that turn more often than this are kept.
    :param beta_slow: yarn: dimensions that turn less often than this are stretched.
    :param mscale: yarn: numerator of a derived attention factor.
    :param mscale_all_dim: yarn: its denominator.
    :param truncate: yarn: round the two bounds to whole dimensions.
    """

    rope_type: str
    theta: float
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def _default(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _plain(rope: RopeConfig, dim: int, max_model_len: int) -> tuple[Tensor, float]:
    return _default(rope.theta, dim), 1.0


def _linear(rope: RopeConfig, dim: int, max_model_len: int) -> tuple[Tensor, float]:
    return _default(rope.theta, dim) / rope.factor, 1.0


def _dynamic(rope: RopeConfig, dim: int, max_model_len: int) -> tuple[Tensor, float]:
    # The formula wants the length of the sequence, but keys in the cache were rotated when it
    # was shorter and may be shared with other sequences. One length for all is what is sound.
    original = rope.original_max_position_embeddings
    length = max(max_model_len, original)
    stretch = rope.factor * length / original - (rope.factor - 1)
    return _default(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig, dim: int, max_model_len: int) -> tuple[Tensor, float]:
    original = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = _default(rope.theta, dim)
    stretched = kept / rope.factor
    wavelength = 2 * math.pi / kept
    share = (original / wavelength - low) / (high - low)
    blended = (1 - share) * stretched + share * kept
    frequencies = torch.where(wavelength > original / low, stretched, blended)
    return torch.where(wavelength < original / high, kept, frequencies), 1.0


def _yarn(rope: RopeConfig, dim: int, max_model_len: int) -> tuple[Tensor, float]:
    def dimension_turning(times: float) -> float:
        ratio = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # an empty ramp would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = _default(rope.theta, dim)
    frequencies = kept / rope.factor * ramp + kept * (1 - ramp)

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequencies, magnitude(1.0)


_FREQUENCIES: dict[str, Callable[[RopeConfig, int, int], tuple[Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}

ROPE_TYPES: tuple[str, ...] = tuple(_FREQUENCIES)
"""The scalings we implement."""


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_model_len: int
) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, and what cos and sin are scaled by.

    :param max_model_len: longest sequence in tokens; changes only `dynamic`, whose
        frequencies are those of a sequence of this length for *every* sequence. Up to the
        original context length they equal `default`.
    :returns: `[head_dim / 2]` float32, and the attention factor.
    """
    return _FREQUENCIES[rope.rope_type](rope, head_dim, max_model_len)


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    max_model_len: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Cosines, then sines, of every position: `[max_model_len, head_dim]`.

    Computed in float32 and rounded once to `dtype`.
    """
    frequencies, attention_factor = inverse_frequencies(rope, head_dim, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=-1)
    return table.to(device=device, dtype=dtype)
