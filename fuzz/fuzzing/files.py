"""Files that a user downloads, or that another process wrote: models, indexes, cached blocks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from .mutation import mutate_bytes, mutate_json_text, mutate_text
from .target import Violation

__all__ = [
    "BlockTarget",
    "ConfigTarget",
    "GGUFTarget",
    "IndexTarget",
    "TemplateTarget",
    "TokenizerTarget",
    "WeightsTarget",
]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": [257],
}
CONFIG_WORDS = (
    *CONFIG, "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window", "layer_types",
    "full_attention", "sliding_attention", "max_window_layers", "attention_bias", "mlp_bias",
    "llama3", "yarn", "linear", "dynamic", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "MistralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "qwen2", "qwen3", "mistral", "dtype", "float16", "bfloat16", "int8",
    "partial_rotary_factor", "quantization_config", "auto_map", "bos_token_id", "pad_token_id",
)  # fmt: skip
TOKENIZER_WORDS = (
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
    "post_processor", "decoder", "model", "type", "BPE", "Unigram", "WordPiece", "WordLevel",
    "ByteLevel", "Metaspace", "Sequence", "Replace", "Regex", "pattern", "Split", "String", "NFKC",
    "vocab", "merges", "unk_token", "byte_fallback", "id", "content", "special", "lstrip",
    "normalized", "single_word", "TemplateProcessing", "single", "special_tokens",
    "tokenizer_class", "eos_token", "bos_token", "pad_token", "chat_template", "model_max_length",
    "added_tokens_decoder", "auto_map", "extra_special_tokens", "(a+)+$", "LlamaTokenizer",
    "GPT2Tokenizer", "PreTrainedTokenizerFast", "add_bos_token", "add_prefix_space",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
TEMPLATE_WORDS = (
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{% if true %}", "{% endif %}",
    "{% set x = 1 %}", "{{ raise_exception('no') }}", "{{ x.y.z }}", "{% generation %}", "{#", "#}",
    "{{ messages[9] }}", "{{ strftime_now('%Y') }}", "{{ ''.__class__ }}", "{% include 'x' %}",
    "{{ 1 / 0 }}", "{{ range(3) | list }}", "{{ 'a' * 100 }}", "{{ messages | tojson }}", "{{ '",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{%- break %}", "| join", "| int", "{{",
)  # fmt: skip


def _tensors() -> dict[str, Any]:
    """A one-layer model of `CONFIG`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (300, 16),
        "model.norm.weight": (16,),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (16, 16),
        "model.layers.0.mlp.up_proj.weight": (16, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 16),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _save_model(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_tensors(), folder / "model.safetensors")


def _save_tokenizer(folder: Path) -> None:
    from ragserve.testing import byte_tokenizer

    byte_tokenizer().save_pretrained(str(folder))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def _load_model(folder: Path) -> None:
    import torch

    from ragserve.engine.models.load import load_model

    load_model(folder, dtype=None, device=torch.device("cpu"))


def _expected(error: Exception) -> str:
    """The outcome of an error, if it is one of those that a caller is promised.

    :raises Violation: if it is another one.
    """
    from ragserve.engine import RagserveError

    if isinstance(error, RagserveError):
        return type(error).__name__
    raise Violation("an error that is not a RagserveError") from error


class _Folder:
    """A target's folder, made when first needed."""

    modules: Sequence[str] = ("ragserve.engine.models",)

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch
        self._ready = False

    def _prepare(self) -> None:
        """Fill the folder with valid files."""

    def _feed(self, data: bytes) -> str:
        raise NotImplementedError

    def run(self, data: bytes) -> str:
        """See `Target.run`."""
        if not self._ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._prepare()
            self._ready = True
        try:
            return self._feed(data)
        except Violation:
            raise
        except Exception as error:
            return _expected(error)

    def close(self) -> None:
        """See `Target.close`."""
        shutil.rmtree(self._folder, ignore_errors=True)


class ConfigTarget(_Folder):
    """`config.json` or `generation_config.json`: what it describes is built and loaded."""

    def __init__(self, scratch: Path, file: str) -> None:
        super().__init__(scratch)
        self.name = file.removesuffix(".json").replace("_", "-")
        self._file = file

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        if self._file == "generation_config.json":
            texts: list[Any] = [
                {"eos_token_id": 257, "bos_token_id": 1, "pad_token_id": 0},
                {"eos_token_id": [257, 2], "temperature": 0.6, "top_p": 0.9, "do_sample": True},
            ]
        else:
            llama3 = {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
            mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            texts = [
                CONFIG,
                CONFIG | {"rope_parameters": llama3},
                CONFIG | mistral | {"sliding_window": 24},
                CONFIG | qwen | {"use_sliding_window": False, "max_window_layers": 1},
                CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4},
            ]
        return [json.dumps(text, indent=1).encode() for text in texts]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        return mutate_json_text(rng, data, CONFIG_WORDS)

    def _prepare(self) -> None:
        _save_model(self._folder)

    def _feed(self, data: bytes) -> str:
        (self._folder / self._file).write_bytes(data)
        _load_model(self._folder)
        return "loaded"


class WeightsTarget(_Folder):
    """`model.safetensors`, or the index of one in two files."""

    def __init__(self, scratch: Path, *, index: bool) -> None:
        super().__init__(scratch)
        self.name = "safetensors-index" if index else "safetensors"
        self._index = index

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        if not self._index:
            from safetensors.torch import save

            return [save(_tensors()), save({"a": _tensors()["model.norm.weight"]})]
        names = list(_tensors())
        shards = {
            name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)
        }
        return [json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}).encode()]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        words = ("dtype", "shape", "data_offsets", "F32", "F16", "BF16", "I64", "U8", "F8_E4M3",
                 "__metadata__", "weight_map", "metadata", "total_size", "model.norm.weight",
                 "model-00001-of-00002.safetensors", "../x", ".", "", "config.json")  # fmt: skip
        if self._index:
            return mutate_json_text(rng, data, words)
        if rng.random() < 0.3 or len(data) < 8:
            return mutate_bytes(rng, data, head=rng.choice((8, 600, None)))
        size = int.from_bytes(data[:8], "little")
        header = mutate_json_text(rng, data[8 : 8 + size], words)
        return len(header).to_bytes(8, "little") + header + data[8 + size :]

    def _prepare(self) -> None:
        from safetensors.torch import save_file

        _save_model(self._folder)
        if self._index:
            (self._folder / "model.safetensors").unlink()
            tensors = list(_tensors().items())
            for part in range(2):
                name = f"model-0000{part + 1}-of-00002.safetensors"
                save_file(dict(tensors[part::2]), self._folder / name)

    def _feed(self, data: bytes) -> str:
        name = "model.safetensors.index.json" if self._index else "model.safetensors"
        # A new file each time: the last one may still be mapped.
        path = self._folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        _load_model(self._folder)
        return "loaded"


class TokenizerTarget(_Folder):
    """`tokenizer.json` or `tokenizer_config.json`: loaded, and texts go there and back."""

    modules = ("ragserve.engine.text.tokenizer",)

    def __init__(self, scratch: Path, file: str) -> None:
        super().__init__(scratch)
        self.name = file.removesuffix(".json").replace("_", "-")
        self._file = file

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        from ragserve.testing import byte_tokenizer

        if self._file == "tokenizer.json":
            text = json.loads(byte_tokenizer().backend_tokenizer.to_str())
            small = json.loads(json.dumps(text))
            kept = dict(list(small["model"]["vocab"].items())[:40])
            small["model"]["vocab"] = {token: index for index, token in enumerate(kept)}
            small["normalizer"] = {"type": "NFKC"}
            return [json.dumps(text).encode(), json.dumps(small).encode()]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "model_max_length": 64,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        }
        other = {
            "eos_token": {"content": "<|end|>", "special": True, "lstrip": False},
            "added_tokens_decoder": {"256": {"content": "<|end|>", "special": True}},
            "chat_template": [{"name": "default", "template": TEMPLATE}],
        }
        return [json.dumps(config).encode(), json.dumps(config | other).encode()]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        return mutate_json_text(rng, data, TOKENIZER_WORDS)

    def _prepare(self) -> None:
        _save_tokenizer(self._folder)
        (self._folder / "config.json").write_text(json.dumps(CONFIG))
        _import_all(self._folder)

    def _feed(self, data: bytes) -> str:
        from ragserve.engine import Tokenizer

        (self._folder / self._file).write_bytes(data)
        tokenizer = Tokenizer.load(self._folder, num_clones=1)
        return _use(tokenizer)


def _import_all(folder: Path) -> None:
    """What the library imports for files that it does not understand, which takes seconds."""
    from ragserve.engine import Tokenizer

    for text in ("127", '{"tokenizer_class": "GPT2Tokenizer"}', '{"added_tokens_decoder": false}'):
        (folder / "tokenizer_config.json").write_text(text)
        with contextlib.suppress(Exception):
            Tokenizer.load(folder, num_clones=1)
    (folder / "tokenizer_config.json").unlink()
    _save_tokenizer(folder)


def _use(tokenizer: Any) -> str:
    """Tokenize as requests do."""
    ids = tokenizer.encode("Hello <|end|> é🙂")
    tokenizer.decode(ids)
    detail = "used"
    if tokenizer.has_chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        detail = "chatted"
    return detail


class TemplateTarget(_Folder):
    """A chat template, as the text of the tokenizer's configuration."""

    name = "chat-template"
    modules = ("ragserve.engine.text.tokenizer",)

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
        return [TEMPLATE.encode(), (tools + TEMPLATE).encode(), b"{{ messages[-1]['content'] }}"]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        if rng.random() < 0.1:
            return mutate_bytes(rng, data)
        text = data.decode("utf-8", "replace")
        for _ in range(rng.choice((1, 1, 2, 4))):
            text = mutate_text(rng, text, TEMPLATE_WORDS)
        return text.encode("utf-8", "surrogatepass")

    def _prepare(self) -> None:
        _save_tokenizer(self._folder)
        (self._folder / "config.json").write_text(json.dumps(CONFIG))
        _import_all(self._folder)

    def _feed(self, data: bytes) -> str:
        from ragserve.engine import Tokenizer

        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "chat_template": data.decode("utf-8", "replace"),
        }
        (self._folder / "tokenizer_config.json").write_text(json.dumps(config))
        return _use(Tokenizer.load(self._folder, num_clones=1))


class GGUFTarget(_Folder):
    """A GGUF file: converted, and what it became is loaded."""

    name = "gguf"

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        return [_gguf(), _gguf(architecture="qwen2")]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        return mutate_bytes(rng, data, head=rng.choice((64, 900, 2500, None)))

    def _feed(self, data: bytes) -> str:
        from ragserve.engine.models.gguf.convert import convert

        path, out = self._folder / "model.gguf", self._folder / "converted"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            _load_model(convert(path, out))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        return "loaded"


def _gguf(architecture: str = "llama") -> bytes:
    """A file of a one-layer model, written by hand: the format is short.

    Format: the GGUF specification of ggml (docs/gguf.md), version 3.
    """
    file = io.BytesIO()

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    tokens = ["<|end|>", "<|user|>", *"abcdefgh", "Ġ", "ab", "Ġa", "Ġab"]
    kinds = [3, 3] + [1] * (len(tokens) - 2)
    dims, vocab, inner = 32, len(tokens), 32
    words: list[tuple[str, int, Any]] = [
        ("general.architecture", 8, architecture),
        (f"{architecture}.block_count", 4, 1),
        (f"{architecture}.context_length", 4, 64),
        (f"{architecture}.embedding_length", 4, dims),
        (f"{architecture}.feed_forward_length", 4, inner),
        (f"{architecture}.attention.head_count", 4, 2),
        (f"{architecture}.attention.head_count_kv", 4, 1),
        (f"{architecture}.attention.layer_norm_rms_epsilon", 6, 1e-5),
        (f"{architecture}.rope.freq_base", 6, 10000.0),
        ("tokenizer.ggml.model", 8, "gpt2"),
        ("tokenizer.ggml.pre", 8, "llama-bpe"),
        ("tokenizer.ggml.tokens", 9, (8, tokens)),
        ("tokenizer.ggml.token_type", 9, (5, kinds)),
        ("tokenizer.ggml.merges", 9, (8, ["a b", "Ġ a", "Ġ ab"])),
        ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 0),
        ("tokenizer.chat_template", 8, "{{ messages[0]['content'] }}"),
    ]
    shapes = {
        "token_embd.weight": (vocab, dims),
        "output_norm.weight": (dims,),
        "blk.0.attn_norm.weight": (dims,),
        "blk.0.ffn_norm.weight": (dims,),
        "blk.0.attn_q.weight": (dims, dims),
        "blk.0.attn_k.weight": (dims // 2, dims),
        "blk.0.attn_v.weight": (dims // 2, dims),
        "blk.0.attn_output.weight": (dims, dims),
        "blk.0.ffn_gate.weight": (inner, dims),
        "blk.0.ffn_up.weight": (inner, dims),
        "blk.0.ffn_down.weight": (dims, inner),
    }
    if architecture == "qwen2":
        shapes |= {f"blk.0.attn_{p}.bias": (dims if p == "q" else dims // 2,) for p in "qkv"}
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(words)))

    def plain(kind: int, value: Any) -> bytes:
        if kind == 8:
            return text(value)
        return struct.pack({4: "<I", 5: "<i", 6: "<f"}[kind], value)

    for key, kind, value in words:
        file.write(text(key) + struct.pack("<I", kind))
        if kind == 9:
            inside, values = value
            file.write(struct.pack("<IQ", inside, len(values)))
            file.write(b"".join(plain(inside, one) for one in values))
        else:
            file.write(plain(kind, value))
    offset = 0
    for name, shape in shapes.items():
        whole = 4
        for size in shape:
            whole *= size
        file.write(text(name) + struct.pack("<I", len(shape)))
        file.write(b"".join(struct.pack("<Q", size) for size in reversed(shape)))
        file.write(struct.pack("<IQ", 0, offset))  # float32
        offset += -(-whole // 32) * 32
    file.write(b"\0" * (-file.tell() % 32))
    file.write(bytes(offset))
    return file.getvalue()


class _LettersEmbedder:
    """Counts letters: vectors without a model."""

    model_name = "letters"
    dimension = 8

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        """See `Embedder.embed`."""
        import numpy as np

        rows = [[text.count(letter) + 1e-3 for letter in "aeioutns"] for text in texts]
        vectors = np.array(rows, np.float32).reshape(len(texts), self.dimension)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    async def embed_documents(self, texts: Sequence[str]) -> Any:
        """The same, for callers that say so by the name."""
        return await self.embed(texts)


class IndexTarget(_Folder):
    """The folder of a saved index: its files, one after the other, in one input.

    The first byte's lowest bit says whether the digests in `meta.json` are made right, so that
    what lies behind the check is reached, too.
    """

    name = "index"
    modules = ("ragserve.retrieval.faiss_index", "ragserve.documents.token_splitter")
    _SEPARATOR = b"\n--8<--\n"

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        import anyio

        from ragserve import Chunk, FaissIndex

        async def save(folder: Path, count: int) -> None:
            index = FaissIndex(_LettersEmbedder())  # type: ignore[arg-type]
            chunks = [Chunk(f"c{i}", "d", "One text." * i, i, {"page": i}) for i in range(count)]
            await index.add(chunks)
            await index.save(folder)

        seeds = []
        for count in (0, 3):
            folder = self._folder / f"seed-{count}"
            shutil.rmtree(folder, ignore_errors=True)
            anyio.run(save, folder, count)
            meta = json.loads((folder / "meta.json").read_bytes())
            parts = [b""]
            for kind in sorted(meta["files"]):
                entry = meta["files"][kind]
                parts.append((folder / entry["name"]).read_bytes())
                entry["name"] = f"{kind}-{'0' * 16}" + Path(entry["name"]).suffix
            parts[0] = json.dumps(meta).encode()
            seeds += [bytes([fix]) + self._SEPARATOR.join(parts) for fix in (0, 1)]
        return seeds

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        parts = data[1:].split(self._SEPARATOR)
        at = rng.randrange(len(parts))
        words = ("format", "embedder", "dimension", "count", "files", "chunks", "vectors", "name",
                 "blake2b", "id", "document_id", "text", "index", "metadata", "../x", "letters",
                 "meta.json", "heading", "page")  # fmt: skip
        if at == 0:
            parts[0] = mutate_json_text(rng, parts[0], words)
        elif at == 1 and rng.random() < 0.8:
            lines = parts[1].split(b"\n")
            line = rng.randrange(len(lines))
            lines[line] = mutate_json_text(rng, lines[line], words)
            parts[1] = b"\n".join(lines)
        else:
            parts[at] = mutate_bytes(rng, parts[at], head=rng.choice((40, None)))
        return bytes([rng.random() < 0.9]) + self._SEPARATOR.join(parts)

    def _feed(self, data: bytes) -> str:
        import anyio

        from ragserve import FaissIndex

        folder = self._folder / "index"
        folder.mkdir(exist_ok=True)
        meta, *contents = (data[1:] or b"{}").split(self._SEPARATOR)
        names = [f"chunks-{'0' * 16}.jsonl", f"vectors-{'0' * 16}.faiss"]
        for name, content in zip(names, contents, strict=False):
            (folder / name).write_bytes(content)
        if data[:1] == b"\1":
            meta = _with_digests(meta, contents)
        (folder / "meta.json").write_bytes(meta)

        async def use() -> str:
            index = await FaissIndex.open(folder, embedder=_LettersEmbedder())  # type: ignore[arg-type]
            found = await index.search("a text", top_k=2)
            return f"found {len(found)}"

        return anyio.run(use)


def _with_digests(meta: bytes, contents: Sequence[bytes]) -> bytes:
    """`meta.json` with the digests of these contents, as far as it has places for them."""
    try:
        value = json.loads(meta)
        for kind, content in zip(("chunks", "vectors"), contents, strict=False):
            if kind in value["files"]:
                digest = hashlib.blake2b(content, digest_size=16)
                value["files"][kind]["blake2b"] = digest.hexdigest()
        return json.dumps(value).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return meta


class _MemoryIO:
    """A pool of blocks that is an array."""

    block_bytes = 96
    layout = "memory"

    def __init__(self) -> None:
        import numpy as np

        self.pool = np.zeros((2, self.block_bytes), np.uint8)

    def mark(self) -> None:
        """Nothing is under way."""

    def allocate(self, num_rows: int) -> Any:
        """Memory that blocks pass through."""
        import numpy as np

        return np.empty((min(num_rows, 2), self.block_bytes), np.uint8)

    def read(self, blocks: Sequence[int], memory: Any, rows: Sequence[int], after: object) -> None:
        """See `BlockIO`."""
        memory[list(rows)] = self.pool[list(blocks)]

    def write(self, blocks: Sequence[int], memory: Any, rows: Sequence[int], after: object) -> None:
        """See `BlockIO`."""
        self.pool[list(blocks)] = memory[list(rows)]

    def close(self) -> None:
        """Nothing is held."""


class BlockTarget(_Folder):
    """A block's file in the folder of the disk tier: what is loaded is what was saved, or nothing.

    The first byte says what lies where the file should be: a file, mostly; else a folder, a named
    pipe, a link to a file or into nowhere, or nothing; or the folders above are other things.
    """

    name = "disk-tier"
    modules = ("ragserve.engine.offload.disk_tier", "ragserve.engine.offload.block_file")
    _KEY = bytes(range(32))
    _IDENTITY: ClassVar = {"format": "1", "weights": "ab" * 32}

    def seeds(self) -> list[bytes]:
        """See `Target.seeds`."""
        shutil.rmtree(self._folder, ignore_errors=True)
        tier, io_ = self._tier()
        io_.pool[0] = 7
        tier.save([self._KEY], [0], io_, None)
        (path,) = self._folder.glob("*/*/*.safetensors")
        whole = path.read_bytes()
        return [b"\0" + whole, b"\1", b"\2", b"\3" + whole, b"\4", b"\5", b"\6", b"\7"]

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """See `Target.mutate`."""
        kind = rng.choice((0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7))
        return bytes([kind]) + mutate_bytes(rng, data[1:], head=rng.choice((8, 300, None)))

    def _tier(self) -> tuple[Any, _MemoryIO]:
        from ragserve.engine.offload.disk_tier import DiskTier

        io_ = _MemoryIO()
        return DiskTier(self._folder, self._IDENTITY, 1 << 16, io_), io_

    def _feed(self, data: bytes) -> str:
        kind, content = data[0] if data else 0, data[1:]
        shutil.rmtree(self._folder, ignore_errors=True)
        tier, io_ = self._tier()
        (home,) = self._folder.iterdir()
        name = self._KEY.hex()
        path = home / name[:2] / f"{name}.safetensors"
        if kind == 5:
            path.parent.write_bytes(content)
        elif kind == 6:
            home.rmdir()
            home.write_bytes(content)
        elif kind == 7:
            home.rmdir()
            home.symlink_to(self._folder.parent)
        else:
            path.parent.mkdir()
            self._place(kind, path, content)
        if kind in (6, 7) or content[:1] == b"\1":
            tier, io_ = self._tier()  # that finds the folder so
        count = tier.load([self._KEY], [1], io_, None)
        if count and not (io_.pool[1] == 7).all():
            raise Violation("a block was loaded that is not what was saved")
        if not count and io_.pool.any():
            raise Violation("a block was written that was not loaded")
        io_.pool[0] = 7
        tier.save([self._KEY], [0], io_, None)
        again = tier.load([self._KEY], [1], io_, None)
        if again and not (io_.pool[1] == 7).all():
            raise Violation("a block is not what was just saved")
        tier.close()
        return f"{count} then {again}"

    def _place(self, kind: int, path: Path, content: bytes) -> None:
        if kind == 1:
            path.mkdir()
        elif kind == 2:
            os.mkfifo(path)
        elif kind == 3:
            other = self._folder / "other"
            other.write_bytes(content)
            path.symlink_to(other)
        elif kind == 4:
            path.symlink_to("nowhere")
        else:
            path.write_bytes(content)
