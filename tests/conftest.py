"""Fixtures that several test modules share: tiny random models, and Hugging Face's answers.

What a test finds does not depend on the machine: see what is set first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch

# Before anything imports Triton: where there is no GPU, kernels are interpreted.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Before anything imports torch: tests keep the cores busy side by side, and second threads would
# only wait for work in tiny models. Those that are about threads set how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples at every run, so that a failure comes from a change; no deadline, and no check
# of how long examples take to draw. `--hypothesis-profile=search` draws others each time.
hypothesis.settings.load_profile("ci")
hypothesis.settings.register_profile(
    "search", hypothesis.settings.get_profile("ci"), derandomize=False
)

_MOST_WORKERS = 8
"""Each has some hundred MiB of libraries and models, and memory is not counted."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` is: one worker for each core that we may use; one for a GPU, whose memory
    some tests measure."""
    if shutil.which("nvidia-smi") is not None:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    return min(os.cpu_count() or 1, _MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest module first: one worker begins with it, and others take what comes after."""
    items.sort(key=lambda item: item.path.name != "test_smollm2.py")


VOCAB_SIZE = 384
BOS, EOS, TURN_START, TURN_END = "<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Retrieval finds the documents; generation answers the question from the documents.",
    "A block holds sixteen tokens. Tokens are not characters, and characters are not bytes.",
    "Why is the sky blue? Because the air scatters the blue light more than the red light.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # prints 3",
    "天空为什么是蓝色的？因为空气散射蓝光。文档、问题、回答。",
    "Größe, naïveté, façade, Ærøskøbing, 東京, Москва, 🙂🚀.",
)

SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "smollm2": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 96,
        },
    ),
}

BEGINS_WITH_BOS = ("llama", "llama3", "mistral")


def save_tokenizer(folder: Path, *, add_bos: bool) -> None:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens and save it as Hugging Face does.

    Ids 0 to 3 are the special tokens; any text survives a round trip.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that attention matters and that likeliest tokens are clear."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests make of tiny models is kept out of the user's cache."""
    monkeypatch.setenv("RAGSERVE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., None]:
    """`make_tokenizer(folder, add_bos=...)`: put the tiny models' tokenizer into a folder."""
    return save_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family, **overrides)`: a folder with a small random model and a tokenizer.

    `family` is a key of `FAMILIES`; overrides are fields of its Hugging Face config. The same
    arguments give the same folder all session long, so treat it as read-only.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: Any) -> Path:
        import torch
        import transformers

        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            config_class, options = FAMILIES[family]
            config = getattr(transformers, config_class)(**{**SHAPES, **options, **overrides})
            folder = tmp_path_factory.mktemp(family)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            randomize(model, seed=sorted(FAMILIES).index(family))
            model.save_pretrained(folder)
            save_tokenizer(folder, add_bos=family in BEGINS_WITH_BOS)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., Any]:
    """`hf_model(folder, dtype=float32)`: the same weights in transformers, the oracle."""
    loaded: dict[tuple[Path, torch.dtype], Any] = {}

    def load(folder: Path, dtype: torch.dtype | None = None) -> Any:
        import torch
        import transformers

        dtype = dtype or torch.float32
        if (folder, dtype) not in loaded:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager"
            )
            loaded[folder, dtype] = model.eval()
        return loaded[folder, dtype]

    return load


@pytest.fixture(scope="session")
def hf_greedy(hf_model: Callable[..., Any]) -> Callable[..., list[int]]:
    """`hf_greedy(folder, token_ids, num_tokens)`: transformers' greedy continuation."""

    def generate(folder: Path, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        import torch

        model = hf_model(folder)
        prompt = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        ids: list[int] = out[0, prompt.shape[1] :].tolist()
        return ids

    return generate
