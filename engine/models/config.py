"""A model folder's `config.json` -> `ModelConfig`, whatever spelling its age gave it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelLoadError, UnsupportedModelError
from .json_file import read_json_object
from .rope import ROPE_TYPES, RopeConfig, inverse_frequencies

__all__ = ["ModelConfig"]

_MAX_INTEGER = 1 << 28
"""No size of a model comes near it, and the product of two in bytes fits into 64 bits."""
_MAX_LAYERS = 1 << 12
_MAX_HEAD_DIM = 1 << 14
_MAX_NUMBER = 1e18
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and options of one decoder.

    :ivar architecture: Hugging Face's class name.
    :ivar max_position_embeddings: context length in tokens, as the config has it.
    :ivar layer_windows: per layer, how many of the last tokens it sees, the token itself
        included; None sees all.
    :ivar qkv_bias: the query, key and value projections have biases.
    :ivar output_bias: so has attention's output projection.
    :ivar mlp_bias: so have the MLP's three.
    :ivar qk_norm: each head of queries and keys is normed before RoPE.
    :ivar tie_word_embeddings: the output layer is the input embedding.
    :ivar dtype: what the weights were saved for; None if the config does not say.
    :ivar eos_token_ids: tokens that end an answer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: torch.dtype | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return math.pow(self.head_dim, -0.5)

    @property
    def context_length(self) -> int:
        """Tokens the model handles as configured: the default of `max_model_len`.

        Linear and dynamic RoPE scaling do not count here: configs disagree on whether
        `max_position_embeddings` has the factor in it, and dynamic scaling costs accuracy on
        short sequences, so both are used when asked for.
        """
        return (
            self.max_context_length
            if self.rope.rope_type == "yarn"
            else (self.max_position_embeddings)
        )

    @property
    def max_context_length(self) -> int:
        """Largest sensible `max_model_len`: the context length stretched by RoPE scaling."""
        stretched = math.floor(self.rope.factor * self.rope.original_max_position_embeddings)
        if self.rope.rope_type in ("linear", "dynamic", "yarn"):
            return max(stretched, self.max_position_embeddings)
        return self.max_position_embeddings

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json`, and the end-of-sequence tokens of `generation_config.json`.

        :raises ModelLoadError: if a file is missing, is not JSON, or lacks or garbles a key.
        :raises UnsupportedModelError: if the architecture or one of its options is not one we
            implement.
        """
        path = folder / "config.json"
        if not path.exists():
            raise ModelLoadError(
                f"{path} is missing; a model folder holds config.json, *.safetensors and a "
                "tokenizer"
            )
        config = _read_json(path)
        family = _family(config)
        config = _Keys({**family.defaults, **config.values}, config.path)
        if config.values.get("quantization_config"):
            raise UnsupportedModelError(
                f"{config.path}: the weights are quantized (quantization_config) and only "
                f"{', '.join(_DTYPES)} are supported; use the original model"
            )
        activation = config.values.get("hidden_act")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.path}: hidden_act={reprlib.repr(activation)} is not supported; "
                f"known: {', '.join(_ACTIVATIONS)}"
            )

        num_heads = config.integer("num_attention_heads")
        hidden_size = config.integer("hidden_size")
        max_position_embeddings = config.integer("max_position_embeddings")
        attention_bias = family.reads_attention_bias and config.flag("attention_bias")
        result = cls(
            architecture=family.architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers", _MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=config.optional_integer("num_key_value_heads") or num_heads,
            head_dim=config.optional_integer("head_dim") or hidden_size // num_heads,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=config.number("rms_norm_eps", most=1.0),
            rope=_rope(config, max_position_embeddings),
            layer_windows=_layer_windows(config, family),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and config.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            dtype=_dtype(config),
            eos_token_ids=_eos_token_ids(config),
        )
        if result.num_heads % result.num_kv_heads:
            raise ModelLoadError(
                f"{config.path}: num_attention_heads={result.num_heads} is not a multiple of "
                f"num_key_value_heads={result.num_kv_heads}"
            )
        if result.head_dim % 2 or not 4 <= result.head_dim <= _MAX_HEAD_DIM:
            raise ModelLoadError(
                f"{config.path}: head_dim={result.head_dim} must be even and at least 4 for RoPE, "
                f"and at most {_MAX_HEAD_DIM}"
            )
        if result.num_heads * result.head_dim > _MAX_INTEGER:
            raise ModelLoadError(
                f"{config.path}: num_attention_heads={result.num_heads} of "
                f"head_dim={result.head_dim} are more than {_MAX_INTEGER} together"
            )
        _check_angles(result, config.path)
        return result


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture decides without its config, and what it lets the config decide.

    `defaults` are the values that Hugging Face assumes for keys that are absent.
    """

    architecture: str
    model_type: str
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    windows: str = "none"
    """Which layers have a sliding window: none, all, or those the config chooses."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FAMILIES: tuple[_Family, ...] = (
    _Family(
        "LlamaForCausalLM",
        "llama",
        reads_attention_bias=True,
        reads_mlp_bias=True,
        defaults={**_COMMON, "max_position_embeddings": 2048},
    ),
    _Family(
        "MistralForCausalLM",
        "mistral",
        windows="all",
        defaults={
            **_COMMON,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
    ),
    _Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, windows="chosen", defaults=_QWEN),
    _Family(
        "Qwen3ForCausalLM",
        "qwen3",
        reads_attention_bias=True,
        qk_norm=True,
        windows="chosen",
        defaults={**_QWEN, "head_dim": 128},
    ),
)


class _Keys:
    """A JSON object whose values are checked as they are taken."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def _wrong(self, key: str, expected: str) -> ModelLoadError:
        if key not in self.values:
            return ModelLoadError(f"{self.path}: {key} is missing; expected {expected}")
        value = reprlib.repr(self.values[key])
        return ModelLoadError(f"{self.path}: {key}={value} is not {expected}")

    def integer(self, key: str, most: int = _MAX_INTEGER) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self._wrong(key, f"an integer from 1 to {most}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, most: float = _MAX_NUMBER) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise self._wrong(key, f"a positive number of at most {most:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def object(self, key: str) -> _Keys | None:
        """The object under a key; None if there is none or it is empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return _Keys(value, f"{self.path}: {key}")


def _read_json(path: Path) -> _Keys:
    return _Keys(read_json_object(path), str(path))


def _family(config: _Keys) -> _Family:
    named = config.values.get("architectures") or []
    model_type = config.values.get("model_type")
    if not isinstance(named, list):
        raise config._wrong("architectures", "a list of names")
    for family in _FAMILIES:
        if family.architecture in named or (not named and family.model_type == model_type):
            return family
    raise UnsupportedModelError(
        f"{config.path}: architectures={reprlib.repr(named)} "
        f"(model_type={reprlib.repr(model_type)}) is not supported; "
        f"known: {', '.join(family.architecture for family in _FAMILIES)}"
    )


def _rope(config: _Keys, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    rope = config.object("rope_scaling") or config.object("rope_parameters")
    if rope is None:
        rope = _Keys({}, config.path)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise UnsupportedModelError(f"{rope.path}: RoPE that differs by layer is not supported")
    rope_type = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{rope.path}: rope_type={reprlib.repr(rope_type)} is not supported; known: "
            f"{', '.join(ROPE_TYPES)}"
        )
    for keys in (rope, config):
        if keys.values.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModelError(f"{keys.path}: partial_rotary_factor is not supported")

    theta = rope.optional_number("rope_theta") or config.optional_number("rope_theta") or 10_000.0
    if rope_type == "default":
        return RopeConfig("default", theta, max_position_embeddings)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(rope_type, theta, max_position_embeddings, rope.number("factor"))
    original = (
        config.optional_integer("original_max_position_embeddings")
        or rope.optional_integer("original_max_position_embeddings")
        or max_position_embeddings
    )
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            original,
            rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        "yarn",
        theta,
        original,
        rope.optional_number("factor") or max_position_embeddings / original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
    )


def _check_angles(config: ModelConfig, path: str) -> None:
    """:raises ModelLoadError: if RoPE's options give no angles that can be computed with."""
    try:
        # The longest sequence is where dynamic scaling is furthest from where it begins.
        frequencies, factor = inverse_frequencies(
            config.rope, config.head_dim, config.max_context_length
        )
        if math.isfinite(factor) and bool(frequencies.isfinite().all()):
            return
        why = "the angles are not finite"
    except (ArithmeticError, ValueError) as error:
        why = str(error)
    raise ModelLoadError(f"{path}: RoPE cannot be computed from {config.rope}: {why}")


def _layer_windows(config: _Keys, family: _Family) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers", _MAX_LAYERS)
    if family.windows == "none" or (
        family.windows == "chosen" and not config.flag("use_sliding_window")
    ):
        return (None,) * num_layers
    window = config.optional_integer("sliding_window")
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = 0 if family.windows == "all" else config.values.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int):
            raise config._wrong("max_window_layers", "an integer")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelLoadError(
            f"{config.path}: layer_types={reprlib.repr(kinds)} must list "
            f"num_hidden_layers={num_layers} layers"
        )
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModelError(
                f"{config.path}: layer type {reprlib.repr(kind)} is not supported; known: "
                f"{', '.join(known)}"
            )
    return tuple(known[kind] for kind in kinds)


def _dtype(config: _Keys) -> torch.dtype | None:
    name = config.values.get("dtype") or config.values.get("torch_dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedModelError(
            f"{config.path}: dtype={reprlib.repr(name)} is not supported; known: "
            f"{', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def _eos_token_ids(config: _Keys) -> tuple[int, ...]:
    path = Path(config.path).with_name("generation_config.json")
    source = _read_json(path) if path.exists() else config
    if source.values.get("eos_token_id") is None:
        source = config
    ids = source.values.get("eos_token_id")
    if ids is None:
        return ()
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise source._wrong("eos_token_id", "a token id or a list of them")
    return tuple(ids)
