"""Llama-family GGUF file -> a Hugging Face folder, made once and kept in the user's cache.

The folder holds config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json, so from there on a GGUF model is a model like any other.

Each tensor is stored in the narrowest type that holds it exactly: float16 and bfloat16 tensors
stay as they are, quantized ones become float32. (A Q4_1 value is a float16 scale times a 4-bit
integer plus a float16 offset: float16's 11 and bfloat16's 8 significant bits would round it.)

Format: the GGUF specification of ggml (docs/gguf.md); what the keys mean: llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...errors import ModelLoadError, UnsupportedModelError
from ..config import ModelConfig
from ..conversion_cache import cache_directory, check_room, is_made, make_folder, short_name, sweep
from .reader import GGUFFile, GGUFTensor
from .tokenizer import build_tokenizer, special_token_ids

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType

__all__ = ["Progress", "convert"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and in all."""

_CONVERTER = "2"
"""Part of every fingerprint; raise it when what is written changes."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_T = TypeVar("_T", str, int, float)


def convert(path: Path, out: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Converts the GGUF file at `path`, or finds the result of an earlier call.

    :param path: a Llama (also Mistral, SmolLM2), Qwen2 or Qwen3 model in one file.
    :param out: folder to write; by default one in `cache_directory()` that is named after the
        file's name and content.
    :param progress: called while weights are written.
    :returns: the folder. It appears at once and whole: nothing half-written is ever left in it.
    :raises ModelLoadError: if the `gguf` library is absent, the file is missing, truncated or
        inconsistent, there is no room for the result, or `out` holds something else.
    :raises UnsupportedModelError: if the architecture, a quantization or the tokenizer is not
        one that is implemented.
    """
    path = Path(path).expanduser()
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelLoadError(f"{path} is not a file; expected one in GGUF")
    try:
        fingerprint = _fingerprint(path)
        if out is not None:
            target = Path(out)
        else:
            name = f"{short_name(path.stem)}-{fingerprint[:16]}"
            target = cache_directory() / "models" / name
        sweep(target.parent)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if is_made(target, fingerprint):
        return target
    if out is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelLoadError(
            f"{target} exists and does not hold the conversion of {path}; "
            f"remove it or name another folder"
        )
    try:
        checkpoint = _read(path)
        return make_folder(
            target, fingerprint, lambda folder: _write_folder(checkpoint, folder, progress)
        )
    except OSError as error:
        raise ModelLoadError(f"cannot convert {path} to {target}: {error}") from error


def _fingerprint(path: Path) -> str:
    """Tells files apart by their size and 16 MiB of evenly spaced samples (ms, not seconds)."""
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{_CONVERTER} {size} ".encode(), digest_size=16)
    samples, length = 64, 1 << 18
    with path.open("rb") as file:
        for i in range(samples):
            file.seek(max(0, size - length) * i // (samples - 1))
            digest.update(file.read(length))
    return digest.hexdigest()


# ---- reading


@dataclass(frozen=True)
class _Checkpoint:
    """A GGUF file of an architecture that is known; its tensors are still on the disk."""

    file: GGUFFile
    architecture: str

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def metadata(self) -> dict[str, Any]:
        return self.file.metadata

    @property
    def tensors(self) -> dict[str, GGUFTensor]:
        return self.file.tensors

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """The entry `{architecture}.{key}`, which some files list once for each layer.

        :raises ModelLoadError: if it is missing without a default, or of another type.
        :raises UnsupportedModelError: if layers differ in it.
        """
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.path} has no {key}")
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UnsupportedModelError(
                    f"{self.path}: {key} is {reprlib.repr(value)}; layers that differ are not "
                    "supported"
                )
            value = value[0]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelLoadError(
                f"{self.path}: {key} is {reprlib.repr(value)}, expected {kind.__name__}"
            )
        return kind(_shortest(value)) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.99999974e-06 was written as 1e-05."""
    import numpy as np

    with np.errstate(over="ignore"):  # a number that float32 lacks is refused as infinite
        return float(str(np.float32(value)))


def _read(path: Path) -> _Checkpoint:
    file = GGUFFile(path)
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"{path}: general.architecture is {reprlib.repr(architecture)}; known are "
            f"{', '.join(_CLASSES)}"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{path} is one of {reprlib.repr(metadata['split.count'])} parts; merge them with "
            f"llama.cpp's llama-gguf-split first"
        )
    checkpoint = _Checkpoint(file, architecture)
    if checkpoint.get("expert_count", int, 0) > 0:
        raise UnsupportedModelError(f"{path} is a mixture of experts, which is not implemented")
    return checkpoint


# ---- config.json


def _config(checkpoint: _Checkpoint) -> dict[str, Any]:
    """The Hugging Face configuration of the model."""
    get, tensors = checkpoint.get, checkpoint.tensors
    heads = get("attention.head_count", int)
    hidden = get("embedding_length", int)
    kv_heads = get("attention.head_count_kv", int, heads)
    if kv_heads < 1 or heads < kv_heads or heads % kv_heads:
        raise ModelLoadError(f"{checkpoint.path}: {heads} heads with {kv_heads} heads of keys")
    layers = get("block_count", int)
    # Checked here, since the list of expected tensors grows with it.
    if not 1 <= layers <= len(tensors):
        raise ModelLoadError(f"{checkpoint.path}: {layers} layers but {len(tensors)} tensors")
    head_dim = get("attention.key_length", int, hidden // heads)
    rotated = get("rope.dimension_count", int, head_dim)
    value_dim = get("attention.value_length", int, head_dim)
    if rotated != head_dim or value_dim != head_dim or head_dim % 2:
        raise UnsupportedModelError(
            f"{checkpoint.path}: keys of {head_dim} dimensions with {rotated} of them rotated and "
            f"values of {value_dim}; all must be equal and even"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{checkpoint.path} has no matrix token_embd.weight")
    config = {
        "architectures": [_CLASSES[checkpoint.architecture]],
        "model_type": checkpoint.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length", int),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(checkpoint, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": embedding.shape[0],
        "dtype": _config_dtype(checkpoint),
        **_token_ids(checkpoint.metadata),
    }
    if checkpoint.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    elif checkpoint.architecture == "qwen3":
        config["attention_bias"] = False
    return config


_ENDS = ("eos_token", "eot_token", "eom_token")
"""What may end a chat model's answer: a text, a turn, a message."""


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids. A chat model may end its turn with another token than EOS."""
    ids = special_token_ids(metadata)
    eos = list(dict.fromkeys(ids[name] for name in _ENDS if name in ids))
    return {
        "bos_token_id": ids.get("bos_token"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": ids.get("pad_token"),
    }


def _rope(checkpoint: _Checkpoint, head_dim: int) -> dict[str, Any]:
    """Hugging Face's `rope_parameters`."""
    get = checkpoint.get
    base = get("rope.freq_base", float, 10_000.0)
    context = get("context_length", int)
    kind = get("rope.scaling.type", str, "none")
    if not (math.isfinite(base) and base > 0):
        raise ModelLoadError(f"{checkpoint.path}: rope.freq_base is {base}")
    if "rope_freqs.weight" in checkpoint.tensors:
        return {"rope_theta": base, **_llama3_scaling(checkpoint, base, head_dim)}
    # Files older than rope.scaling.* have rope.scale_linear.
    factor = get("rope.scaling.factor", float, get("rope.scale_linear", float, 1.0))
    if not (math.isfinite(factor) and factor >= 1):
        raise ModelLoadError(f"{checkpoint.path}: the RoPE scaling factor is {factor}")
    if kind == "none" and factor != 1.0:
        kind = "linear"
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind == "yarn":
        attention = get("rope.scaling.attn_factor", float, 1.0)
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": get(
                "rope.scaling.original_context_length", int, context
            ),
            "beta_fast": get("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": get("rope.scaling.yarn_beta_slow", float, 1.0),
            # llama.cpp multiplies its attn_factor with the paper's; Hugging Face takes all.
            "attention_factor": attention * (0.1 * math.log(factor) + 1.0),
        }
    raise UnsupportedModelError(
        f"{checkpoint.path}: rope.scaling.type is {reprlib.repr(kind)}; known are none, linear, "
        "yarn"
    )


def _llama3_scaling(checkpoint: _Checkpoint, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, which GGUF keeps as one divisor per frequency (`rope_freqs.weight`).

    All published Llama 3 models stretch wavelengths beyond 8,192 tokens by `factor`, leave those
    below a quarter of it alone, and interpolate between; only the factor differs (8 or 32).
    """
    import numpy as np

    unknown = UnsupportedModelError(
        f"{checkpoint.path}: rope_freqs.weight is not the scaling of a Llama 3 model"
    )
    tensor = checkpoint.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,) or tensor.kind.name != "F32":
        raise unknown
    stored = _dequantize(checkpoint.file, tensor).astype(np.float64)
    factor = _shortest(float(stored.max(initial=1.0)))
    original, low, high = 8192, 1.0, 4.0
    with np.errstate(all="ignore"):  # what is not finite differs from what is stored
        wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1 - smooth) / factor + smooth)
    if not math.isfinite(factor) or not np.allclose(stored, expected, rtol=1e-3):
        raise unknown
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# ---- weights


def _layout(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor the model has: GGUF name -> (Hugging Face name, shape)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    projections = {
        "attn_q": ("self_attn.q_proj", (query, hidden)),
        "attn_k": ("self_attn.k_proj", (key, hidden)),
        "attn_v": ("self_attn.v_proj", (key, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, query)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    biased: set[str] = set()
    if config["model_type"] == "qwen2":
        biased |= {"attn_q", "attn_k", "attn_v"}
    elif config.get("attention_bias"):
        biased |= {"attn_q", "attn_k", "attn_v", "attn_output"}
    if config.get("mlp_bias"):
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}

    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden))
    }
    for i in range(config["num_hidden_layers"]):
        here, there = f"blk.{i}", f"model.layers.{i}"
        layout[f"{here}.attn_norm.weight"] = (f"{there}.input_layernorm.weight", (hidden,))
        layout[f"{here}.ffn_norm.weight"] = (f"{there}.post_attention_layernorm.weight", (hidden,))
        for name, (projection, shape) in projections.items():
            layout[f"{here}.{name}.weight"] = (f"{there}.{projection}.weight", shape)
            if name in biased:
                layout[f"{here}.{name}.bias"] = (f"{there}.{projection}.bias", shape[:1])
        if config["model_type"] == "qwen3":
            for part in "qk":
                layout[f"{here}.attn_{part}_norm.weight"] = (
                    f"{there}.self_attn.{part}_norm.weight",
                    (config["head_dim"],),
                )
    layout["output_norm.weight"] = ("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        layout["output.weight"] = ("lm_head.weight", (config["vocab_size"], hidden))
    return layout


def _check_layout(checkpoint: _Checkpoint, layout: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    tensors = checkpoint.tensors
    missing = [name for name in layout if name not in tensors]
    if missing:
        raise ModelLoadError(
            f"{checkpoint.path} lacks {len(missing)} tensors, the first is {missing[0]}"
        )
    # rope_freqs became part of config.json.
    unknown = [name for name in tensors if name not in layout and name != "rope_freqs.weight"]
    if unknown:
        raise UnsupportedModelError(
            f"{checkpoint.path} has {len(unknown)} tensors that a {checkpoint.architecture} model "
            f"here does not have, the first is {reprlib.repr(unknown[0])}"
        )
    for name, (_, shape) in layout.items():
        stored = tensors[name].shape
        if stored != shape:
            raise ModelLoadError(
                f"{checkpoint.path}: {name} has shape {stored}, its metadata say {shape}"
            )
    for kind in {tensors[name].kind for name in layout}:
        _check_kind(checkpoint.path, kind)


def _check_kind(path: Path, kind: GGMLQuantizationType) -> None:
    """Find out by one block of zeros, before anything is written."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{path} is quantized as {kind.name}: {error}") from error


def _dtype(tensor: GGUFTensor) -> str:
    """The narrowest type that holds the tensor exactly, by its safetensors name."""
    return {"F16": "F16", "BF16": "BF16"}.get(tensor.kind.name, "F32")


def _config_dtype(checkpoint: _Checkpoint) -> str:
    """What the matrices have in common; llama.cpp keeps vectors in float32 regardless."""
    dtypes = {_dtype(t) for t in checkpoint.tensors.values() if len(t.shape) > 1}
    if len(dtypes) != 1:
        return "float32"
    return {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[dtypes.pop()]


def _dequantize(file: GGUFFile, tensor: GGUFTensor) -> np.ndarray[Any, Any]:
    """The tensor in its lossless type; bfloat16, which numpy lacks, as its bit pattern."""
    import numpy as np
    from gguf import dequantize

    data = file.read(tensor)
    unquantized = {"F16": np.float16, "BF16": np.uint16}.get(tensor.kind.name)
    if unquantized is not None:
        return data.view(unquantized).reshape(tensor.shape)
    with np.errstate(all="ignore"):  # infinite or NaN weights are as they are
        values = dequantize(data.reshape(*tensor.shape[:-1], -1), tensor.kind)
    return values.reshape(tensor.shape)


def _unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes llama.cpp's reordering of a "llama" model's query and key rows.

    It rotates neighbouring dimensions (2i, 2i + 1) where Hugging Face rotates (i, i + d/2), so
    its converter interleaves the two halves of each head's rows.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _write_weights(
    checkpoint: _Checkpoint, config: dict[str, Any], path: Path, progress: Progress | None
) -> None:
    """Writes model.safetensors one tensor at a time, so that memory holds one tensor.

    Format: an 8-byte little-endian header length, the header as JSON, the tensors' bytes.
    """
    layout = _layout(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, (target, shape) in layout.items():
        dtype = _dtype(checkpoint.tensors[name])
        end = total + math.prod(shape) * (4 if dtype == "F32" else 2)
        header[target] = {"dtype": dtype, "shape": shape, "data_offsets": [total, end]}
        total = end
    check_room(path.parent, total)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the tensors, which may be memory-mapped

    permuted = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    written = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in layout:
            weight = _dequantize(checkpoint.file, checkpoint.tensors[name])
            match = permuted.fullmatch(name)
            if match and checkpoint.architecture == "llama":
                weight = _unpermute(weight, heads[match[1]])
            written += file.write(weight.tobytes())
            if progress is not None:
                progress(written, total)


# ---- the folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_folder(checkpoint: _Checkpoint, folder: Path, progress: Progress | None) -> None:
    metadata = checkpoint.metadata
    config = _config(checkpoint)
    _check_layout(checkpoint, _layout(config))
    tokenizer = build_tokenizer(metadata)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {name: value for name, value in _token_ids(metadata).items() if value is not None},
    )
    try:
        ModelConfig.from_folder(folder)  # refused before, not after, gigabytes are written
    except (ModelLoadError, UnsupportedModelError) as error:
        raise type(error)(f"{checkpoint.path} describes a model that cannot be: {error}") from error
    # Not by its own save(), whose errors are bare Exceptions.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer_config: dict[str, Any] = {
        # Takes tokenizer.json as it is, whatever the model type.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{
            name: tokens[token_id]
            for name, token_id in special_token_ids(metadata).items()
            if name not in ("eot_token", "eom_token")  # not Hugging Face's; they are EOS ids
        },
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer_config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_weights(checkpoint, config, folder / "model.safetensors", progress)
