"""The decoder against transformers on the same weights, for every family and option."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from ragserve.engine.errors import InvalidParamsError, ModelLoadError, UnsupportedModelError
from ragserve.engine.models.config import ModelConfig
from ragserve.engine.models.decoder import DecoderModel
from ragserve.engine.models.layers import Attend
from ragserve.engine.models.load import load_model

CPU = torch.device("cpu")
LENGTH = 70

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama3": ("llama3", {}),
    "smollm2": ("smollm2", {}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows-from": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-windows-listed": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def dense_attention(config: ModelConfig) -> Attend:
    """Causal attention within one sequence that is given whole."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = config.num_heads // config.num_kv_heads
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        at = torch.arange(len(q))
        hidden = at[None, :] > at[:, None]
        window = config.layer_windows[layer]
        if window is not None:
            hidden |= at[None, :] <= at[:, None] - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1, dtype=torch.float32)
        return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)

    return attend


def random_ids(length: int = LENGTH, vocab_size: int = 384) -> Tensor:
    return torch.randint(4, vocab_size, (length,), generator=torch.Generator().manual_seed(7))


def forward_logits(model: DecoderModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        attend = dense_attention(model.config)
        return model.logits(model.forward(ids, torch.arange(len(ids)), attend))


def oracle_logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
        return logits


def edited(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A folder with the same weights and a changed config; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    link = tmp_path / "model.safetensors"
    if not link.exists():
        link.symlink_to(folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, tiny_model: Callable[..., Path], hf_model: Callable[..., Any]
) -> None:
    family, overrides = CASES[case]
    folder = tiny_model(family, **overrides)
    model = load_model(folder, dtype=torch.float32, device=CPU)
    ids = random_ids()
    got, expected = forward_logits(model, ids), oracle_logits(hf_model(folder), ids)
    assert got.dtype == torch.float32
    assert expected.std() > 0.5, "the random model must have something to say"
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-5)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3", "smollm2"])
def test_greedy_tokens_equal_transformers(
    family: str, tiny_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    folder = tiny_model(family)
    model = load_model(folder, dtype=torch.float32, device=CPU)
    ids = random_ids(20)
    for _ in range(24):
        ids = torch.cat((ids, forward_logits(model, ids)[-1:].argmax(-1)))
    assert ids[20:].tolist() == hf_greedy(folder, ids[:20].tolist(), 24)
    assert len(set(ids[20:].tolist())) > 2, "an answer that only repeats proves little"


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3", "smollm2"])
def test_bfloat16_is_close_to_transformers(
    family: str, tiny_model: Callable[..., Path], hf_model: Callable[..., Any]
) -> None:
    folder = tiny_model(family)
    ids = random_ids()
    exact = oracle_logits(hf_model(folder), ids)
    oracle = oracle_logits(hf_model(folder, torch.bfloat16), ids).float()
    model = load_model(folder, dtype=torch.bfloat16, device=CPU)
    got = forward_logits(model, ids)
    assert got.dtype == torch.float32
    # As far from the exact logits as transformers is, and no further.
    error, allowed = (got - exact).square().mean(), (oracle - exact).square().mean()
    assert error.sqrt() < 1.2 * allowed.sqrt()
    assert error.sqrt() < 0.05 * exact.std()


def test_dynamic_rope_equals_transformers(
    tiny_model: Callable[..., Path], hf_model: Callable[..., Any]
) -> None:
    folder = tiny_model(
        "llama",
        max_position_embeddings=48,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    )
    ids = random_ids()
    # Within the original length nothing is scaled, by default nor if asked for no more.
    for max_model_len in (None, 48):
        model = load_model(folder, dtype=None, device=CPU, max_model_len=max_model_len)
        torch.testing.assert_close(
            forward_logits(model, ids[:48]),
            oracle_logits(hf_model(folder), ids[:48]),
            rtol=1e-5,
            atol=5e-5,
        )
    # Beyond, the frequencies are those of a sequence of max_model_len tokens given at once.
    model = load_model(folder, dtype=None, device=CPU, max_model_len=LENGTH)
    torch.testing.assert_close(
        forward_logits(model, ids), oracle_logits(hf_model(folder), ids), rtol=1e-5, atol=5e-5
    )


def test_rows_do_not_depend_on_their_batch(tiny_model: Callable[..., Path]) -> None:
    """Tokens of several sequences may share a step: only `attend` relates rows."""
    model = load_model(tiny_model("qwen3"), dtype=None, device=CPU)
    ids, order = random_ids(), torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + v.repeat_interleave(2, dim=1)

    with torch.inference_mode():
        hidden = model.forward(ids, torch.arange(LENGTH), attend)
        shuffled = model.forward(ids[order], torch.arange(LENGTH)[order], attend)
        some = model.logits(hidden[[3, 5]])
    torch.testing.assert_close(shuffled, hidden[order], rtol=1e-5, atol=1e-5)
    assert hidden.shape == (LENGTH, 64)
    torch.testing.assert_close(some, model.logits(hidden)[[3, 5]], rtol=1e-5, atol=1e-5)


def test_attend_sees_every_layer_in_order(tiny_model: Callable[..., Path]) -> None:
    model = load_model(tiny_model("qwen3"), dtype=None, device=CPU)
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    with torch.inference_mode():
        model.forward(random_ids(5), torch.arange(5), attend)
    assert seen == [(layer, (5, 4, 32), (5, 2, 32), (5, 2, 32)) for layer in range(3)]


def test_config_of_each_family(tiny_model: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(tiny_model("llama"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (384, 64, 16)
    assert config.attention_scale == 0.25
    assert config.dtype == torch.float32
    assert config.eos_token_ids == (1,)
    assert not any((config.qkv_bias, config.qk_norm, config.tie_word_embeddings))
    assert ModelConfig.from_folder(tiny_model("mistral")).layer_windows == (24, 24, 24)
    qwen2 = ModelConfig.from_folder(tiny_model("qwen2"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.layer_windows) == (True, False, (None,) * 3)
    assert ModelConfig.from_folder(tiny_model("qwen3")).qk_norm
    assert ModelConfig.from_folder(tiny_model("smollm2")).tie_word_embeddings


def test_eos_tokens_come_from_the_generation_config(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = edited(tiny_model("llama"), tmp_path, eos_token_id=[5, 6])
    assert ModelConfig.from_folder(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert ModelConfig.from_folder(folder).eos_token_ids == (1, 3)
    (folder / "generation_config.json").write_text("{}")
    assert ModelConfig.from_folder(folder).eos_token_ids == (5, 6)


def test_mistral_layers_may_differ(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = edited(tiny_model("mistral"), tmp_path, layer_types=kinds)
    assert ModelConfig.from_folder(folder).layer_windows == (24, None, 24)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm2"])
def test_tokenizer_beside_the_model_fits_it(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == ModelConfig.from_folder(folder).vocab_size
    text = "Why is the sky blue? 天空为什么是蓝色的？ 🙂"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_old_configs_load(
    tiny_model: Callable[..., Path], hf_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Keys that older transformers did not write have its defaults."""
    folder = tiny_model("llama", num_key_value_heads=4)
    old = edited(
        folder,
        tmp_path,
        rope_parameters=None,
        num_key_value_heads=None,
        head_dim=None,
        attention_bias=None,
        mlp_bias=None,
        dtype=None,
        architectures=None,
        tie_word_embeddings=None,
        rope_scaling=None,
        torch_dtype="float32",
    )
    model = load_model(old, dtype=None, device=CPU)
    ids = random_ids()
    torch.testing.assert_close(
        forward_logits(model, ids), oracle_logits(hf_model(folder), ids), rtol=1e-5, atol=5e-5
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["longrope", "llama3", "yarn"]),
        ({"rope_scaling": {"type": "su"}}, ["su", "llama3"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["layer"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_unsupported_models_are_named(
    changes: dict[str, Any], words: list[str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = edited(tiny_model("llama"), tmp_path, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder, dtype=None, device=CPU)
    for word in words:
        assert word in str(caught.value)


def test_unknown_layer_types_are_unsupported(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    kinds = ["full_attention", "full_attention", "linear_attention"]
    folder = edited(tiny_model("qwen2"), tmp_path, use_sliding_window=True, layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        load_model(folder, dtype=None, device=CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": "3"}, ["num_hidden_layers", "'3'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3"]),
        ({"head_dim": 15}, ["head_dim=15"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
    ],
)
def test_broken_configs_are_named(
    changes: dict[str, Any], words: list[str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = edited(tiny_model("llama"), tmp_path, **changes)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, dtype=None, device=CPU)
    for word in [*words, "config.json"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe"])
def test_unreadable_config(content: str | bytes | None, tmp_path: Path) -> None:
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(tmp_path, dtype=None, device=CPU)


@pytest.mark.parametrize("max_model_len", [0, -1, 2049])
def test_max_model_len_is_checked(max_model_len: int, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(InvalidParamsError, match=r"max_model_len.*2048"):
        load_model(tiny_model("llama"), dtype=None, device=CPU, max_model_len=max_model_len)
