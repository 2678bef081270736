"""RoPE: frequencies of each scaling against transformers, the table, the rotation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ragserve import kernels
from ragserve.engine.models.config import ModelConfig
from ragserve.engine.models.rope import inverse_frequencies, rope_table

MAX_POSITIONS = 256

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3-original-from-config": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-original-from-config": {"rope_type": "yarn", "factor": 4.0},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}


def config_with(folder: Path, tmp_path: Path, **changes: Any) -> ModelConfig:
    """The config of a folder with keys changed; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_transformers(
    name: str, theta: float, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    scaling = SCALINGS[name]
    config = config_with(
        tiny_model("llama"),
        tmp_path,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    oracle = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](oracle, seq_len=400)
    frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim, 400)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_spellings_agree(
    name: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder, scaling = tiny_model("llama"), SCALINGS[name]
    old = {key: value for key, value in scaling.items() if key != "rope_type"}
    new = config_with(folder, tmp_path, rope_parameters={**scaling, "rope_theta": 5e5})
    for key in ("type", "rope_type"):
        assert new == config_with(
            folder,
            tmp_path,
            rope_parameters=None,
            rope_theta=5e5,
            rope_scaling={**old, key: scaling["rope_type"]},
        )


def test_a_config_without_rope_uses_the_default(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_with(tiny_model("llama"), tmp_path, rope_parameters=None)
    assert config.rope.rope_type == "default"
    assert config.rope.theta == 10_000.0


@pytest.mark.parametrize(
    ("scaling", "default", "largest"),
    [
        ({"rope_type": "default"}, 256, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 256, 512),
        (SCALINGS["llama3"], 256, 256),
        (SCALINGS["yarn-original-from-config"], 1024, 1024),
        (SCALINGS["yarn"], 256, 256),
    ],
)
def test_context_lengths(
    scaling: dict[str, Any],
    default: int,
    largest: int,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config = config_with(
        tiny_model("llama"), tmp_path, max_position_embeddings=256, rope_parameters=scaling
    )
    assert (config.context_length, config.max_context_length) == (default, largest)


def test_dynamic_is_the_default_up_to_the_original_length(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama", max_position_embeddings=MAX_POSITIONS)
    plain = config_with(folder, tmp_path)
    dynamic = config_with(folder, tmp_path, rope_parameters=SCALINGS["dynamic"])
    for length in (1, 100, MAX_POSITIONS):
        torch.testing.assert_close(
            inverse_frequencies(dynamic.rope, 16, length)[0],
            inverse_frequencies(plain.rope, 16, length)[0],
            rtol=0,
            atol=0,
        )


def test_table_is_rounded_once(tiny_model: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(tiny_model("llama3"))
    device = torch.device("cpu")
    exact = rope_table(config.rope, 16, 64, dtype=torch.float32, device=device)
    assert exact.shape == (64, 16)
    rounded = rope_table(config.rope, 16, 64, dtype=torch.bfloat16, device=device)
    assert torch.equal(rounded, exact.bfloat16())
    torch.testing.assert_close(exact[:, :8] ** 2 + exact[:, 8:] ** 2, torch.ones(64, 8))


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 4),
    half=st.integers(2, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_operations_match_their_reference(
    tokens: int, heads: int, half: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance * 4)

    # Strided, as the views of a joined projection are.
    q = random(tokens, 3 * heads, 2 * half)[:, :heads]
    k = random(tokens, 2, 2 * half)[:, 1:]
    angles = torch.rand(tokens, half, generator=generator) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for got, expected in zip(
        kernels.apply_rope(q, k, cos, sin),
        kernels.reference.apply_rope(q, k, cos, sin),
        strict=True,
    ):
        close(got, expected)

    weight = random(2 * half)
    close(kernels.rms_norm(q, weight, 1e-5), kernels.reference.rms_norm(q, weight, 1e-5))
    close(kernels.silu_and_mul(q), kernels.reference.silu_and_mul(q))


def test_rotation_depends_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64, generator=generator)
    frequencies = torch.rand(8, dtype=torch.float64, generator=generator)

    def score(at: int, other: int) -> torch.Tensor:
        angles = torch.tensor([[at], [other]], dtype=torch.float64) * frequencies
        rotated, _ = kernels.apply_rope(
            torch.stack((q, k)), torch.stack((q, k)), angles.cos(), angles.sin()
        )
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(3, 10), score(103, 110))
