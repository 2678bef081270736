"""Model files from anywhere: odd but valid ones open, all others are a typed error, soon."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from ragserve.engine import LLM, SamplingParams
from ragserve.engine.config import EngineConfig
from ragserve.engine.errors import (
    ModelLoadError,
    OutOfMemoryError,
    RagserveError,
    UnsupportedModelError,
)
from ragserve.engine.models.cast import cast
from ragserve.engine.models.config import ModelConfig
from ragserve.engine.models.conversion_cache import make_folder
from ragserve.engine.models.decoder import DecoderModel
from ragserve.engine.models.gguf.convert import convert
from ragserve.engine.models.gguf.reader import GGUFFile
from ragserve.engine.models.load import load_model
from ragserve.engine.models.resolve import resolve_folder
from ragserve.engine.runtime.loading import PretrainedModel
from ragserve.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEP = "[" * 200_000

# ---- a GGUF file, byte by byte

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
TOKENS = ["<|end|>", "<|user|>", *"abcdefgh", "ab"]
HIDDEN, INNER, HEADS, LAYERS, ROWS = 16, 24, 2, 2, 12


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def u32(value: int) -> tuple[int, bytes]:
    return U32, struct.pack("<I", value)


def entries() -> dict[str, tuple[int, bytes]]:
    return {
        "general.architecture": (STRING, string("llama")),
        "llama.block_count": u32(LAYERS),
        "llama.context_length": u32(64),
        "llama.embedding_length": u32(HIDDEN),
        "llama.feed_forward_length": u32(INNER),
        "llama.attention.head_count": u32(HEADS),
        "llama.attention.head_count_kv": u32(HEADS),
        "llama.attention.layer_norm_rms_epsilon": (F32, struct.pack("<f", 1e-5)),
        "tokenizer.ggml.model": (STRING, string("gpt2")),
        "tokenizer.ggml.pre": (STRING, string("gpt-2")),
        "tokenizer.ggml.tokens": (ARRAY, array(STRING, [string(token) for token in TOKENS])),
        "tokenizer.ggml.token_type": (
            ARRAY,
            array(I32, [struct.pack("<i", 3 if t.startswith("<|") else 1) for t in TOKENS]),
        ),
        "tokenizer.ggml.merges": (ARRAY, array(STRING, [string("a b")])),
        "tokenizer.ggml.eos_token_id": u32(0),
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Rows first."""
    result: dict[str, tuple[int, ...]] = {"token_embd.weight": (ROWS, HIDDEN)}
    for i in range(LAYERS):
        result |= {f"blk.{i}.attn_{n}.weight": (HIDDEN, HIDDEN) for n in ("q", "k", "v", "output")}
        result |= {f"blk.{i}.ffn_{n}.weight": (INNER, HIDDEN) for n in ("gate", "up")}
        result |= {f"blk.{i}.ffn_down.weight": (HIDDEN, INNER)}
        result |= {f"blk.{i}.{n}_norm.weight": (HIDDEN,) for n in ("attn", "ffn")}
    return result | {"output_norm.weight": (HIDDEN,)}


class Record:
    """A row of the table of tensors; a test changes what it likes."""

    def __init__(self, name: str, shape: tuple[int, ...], offset: int) -> None:
        self.name: str | bytes = name
        self.dims = list(shape[::-1])
        self.num_dims: int | None = None
        self.kind = 0
        self.offset = offset

    def packed(self) -> bytes:
        dims = len(self.dims) if self.num_dims is None else self.num_dims
        return (
            string(self.name)
            + struct.pack("<I", dims)
            + b"".join(struct.pack("<Q", dim) for dim in self.dims)
            + struct.pack("<IQ", self.kind, self.offset)
        )


def gguf(
    path: Path,
    *,
    change: Callable[[dict[str, tuple[int, bytes]]], Any] = lambda _: None,
    table: Callable[[list[Record]], Any] = lambda _: None,
    header: bytes | None = None,
    alignment: int = 32,
) -> Path:
    """A small Llama whose weights count upwards, so that each differs from all others."""
    metadata = entries()
    change(metadata)
    records, data = [], b""
    for name, shape in shapes().items():
        data += b"\0" * (-len(data) % alignment)
        records.append(Record(name, shape, len(data)))
        size = torch.Size(shape).numel()
        first = len(data) // 4
        data += (torch.arange(first, first + size, dtype=torch.float32) / 4096).numpy().tobytes()
    table(records)
    head = header or b"GGUF" + struct.pack("<IQQ", 3, len(records), len(metadata))
    for key, (kind, value) in metadata.items():
        head += string(key) + struct.pack("<I", kind) + value
    head += b"".join(record.packed() for record in records)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def opened(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """The weights, by way of the conversion."""
    folder = convert(path, out)
    return load_model(folder, dtype=None, device=CPU).tensors()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAGSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def test_the_file_made_here_is_a_model(tmp_path: Path) -> None:
    weights = opened(gguf(tmp_path / "m.gguf"), tmp_path / "out")
    embedding = weights["model.embed_tokens.weight"].flatten()
    assert torch.equal(embedding, torch.arange(ROWS * HIDDEN) / 4096)


def swap_offsets(table: list[Record]) -> None:
    # Of the same shape: nothing but the order tells.
    table[1].offset, table[2].offset = table[2].offset, table[1].offset


def set_record(index: int, **values: Any) -> Callable[[list[Record]], None]:
    def change(table: list[Record]) -> None:
        for name, value in values.items():
            setattr(table[index], name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_record(1, offset=0),  # the embedding's bytes
        set_record(1, offset=ROWS * HIDDEN * 4 + 4),  # unaligned
        set_record(1, offset=ROWS * HIDDEN * 4 - 32),  # overlaps
        set_record(1, offset=2**64 - 64),  # before the data, if one adds in 64 bits
        set_record(1, offset=2**63),
        set_record(-1, offset=1 << 20),  # beyond the end
        swap_offsets,
        set_record(2, name="blk.0.attn_q.weight"),
        set_record(1, dims=[HIDDEN, 0]),
        set_record(1, dims=[2**64 - HIDDEN, HIDDEN]),
        set_record(1, dims=[2**63, 2]),  # 2**64 elements, which are none in 64 bits
        set_record(1, dims=[2**32, 2**32]),
        set_record(1, dims=[HIDDEN] * 5),
        set_record(1, dims=[]),
        set_record(1, num_dims=2**32 - 1),
        set_record(1, dims=[HIDDEN * HIDDEN]),  # as many elements, another shape
        set_record(1, dims=[HIDDEN // 2, HIDDEN * 2]),
        set_record(1, kind=1),  # float16: half the bytes
        set_record(1, kind=8),  # Q8_0, whose blocks are 32 wide
        set_record(1, kind=4),  # a number that no type has any more
        set_record(1, kind=2**32 - 1),
        set_record(1, name=b"\xff\xfe"),
        lambda table: table.pop(),
        lambda table: table.reverse(),
    ],
)
def test_a_table_of_tensors_that_lies_is_an_error_and_never_other_weights(
    tmp_path: Path, change: Callable[[list[Record]], Any]
) -> None:
    path = gguf(tmp_path / "m.gguf", table=change)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=r"m\.gguf"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def entry(key: str, kind: int, value: bytes) -> Callable[[dict[str, tuple[int, bytes]]], None]:
    def change(metadata: dict[str, tuple[int, bytes]]) -> None:
        metadata[key] = kind, value

    return change


@pytest.mark.parametrize(
    "change",
    [
        entry("general.alignment", *u32(0)),
        entry("general.alignment", *u32(48)),
        entry("general.alignment", *u32(1 << 31)),
        entry("general.alignment", STRING, string("32")),
        entry("x", ARRAY, array(U32, [], count=2**62)),
        entry("x", ARRAY, array(U32, [], count=2**64 - 1)),
        entry("x", ARRAY, array(STRING, [], count=10**7)),
        entry("x", ARRAY, array(ARRAY, [array(ARRAY, [])])),
        entry("x", ARRAY, array(77, [])),
        entry("x", 77, b""),
        entry("x", STRING, struct.pack("<Q", 2**63)),
        entry("x", STRING, string(b"\xff")),
        entry("general.architecture", *u32(7)),
        entry("general.architecture", ARRAY, array(U32, [])),
        entry("llama.block_count", *u32(0)),
        entry("llama.block_count", *u32(2**32 - 1)),
        entry("llama.block_count", U64, struct.pack("<Q", 2**64 - 1)),
        entry("llama.block_count", BOOL, b"\1"),
        entry("llama.embedding_length", *u32(0)),
        entry("llama.embedding_length", U64, struct.pack("<Q", 2**63)),
        entry("llama.attention.head_count", *u32(0)),
        entry("llama.attention.head_count", *u32(2**31)),
        entry("llama.attention.head_count_kv", *u32(0)),
        entry("llama.attention.head_count_kv", *u32(3)),
        entry("llama.attention.key_length", U64, struct.pack("<Q", 2**64 - 2)),
        entry("llama.context_length", *u32(0)),
        entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", float("nan"))),
        entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", -1.0)),
        entry("llama.attention.layer_norm_rms_epsilon", 12, struct.pack("<d", 1e308)),
        entry("llama.rope.freq_base", F32, struct.pack("<f", float("inf"))),
        entry("llama.rope.freq_base", F32, struct.pack("<f", 0.0)),
        entry("tokenizer.ggml.tokens", *u32(3)),
        entry("tokenizer.ggml.tokens", ARRAY, array(STRING, [])),
        entry("split.count", ARRAY, array(U32, [])),
    ],
)
def test_metadata_that_lie_are_an_error(
    tmp_path: Path, change: Callable[[dict[str, tuple[int, bytes]]], Any]
) -> None:
    path = gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        convert(path, tmp_path / "out")
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"GGUF",
        b"GGML" + struct.pack("<IQQ", 3, 21, 14),
        b"GGUF" + struct.pack("<IQQ", 0, 21, 14),
        b"GGUF" + struct.pack("<IQQ", 1, 21, 14),
        b"GGUF" + struct.pack("<IQQ", 4, 21, 14),
        b"GGUF" + struct.pack(">IQQ", 3, 21, 14),
        b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 14),
        b"GGUF" + struct.pack("<IQQ", 3, 21, 2**64 - 1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 14),
        b"GGUF" + struct.pack("<IQQ", 3, 21, 13),
    ],
)
def test_a_header_that_lies_is_an_error(tmp_path: Path, header: bytes) -> None:
    path = gguf(tmp_path / "m.gguf", header=header)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=r"m\.gguf"):
        convert(path, tmp_path / "out")


def per_layer(*values: int) -> tuple[int, bytes]:
    return ARRAY, array(U32, [struct.pack("<I", value) for value in values])


@pytest.mark.parametrize(
    ("change", "alignment"),
    [
        (entry("llama.attention.head_count_kv", *per_layer(HEADS, HEADS)), 32),
        (entry("llama.feed_forward_length", *per_layer(INNER, INNER)), 32),
        (entry("general.alignment", *u32(4096)), 4096),
        (entry("general.alignment", *u32(8)), 8),
        (entry("llama.context_length", U64, struct.pack("<Q", 64)), 32),
        (entry("anything.else", ARRAY, array(BOOL, [b"\1", b"\0"])), 32),
    ],
)
def test_odd_but_valid_files_are_the_same_model(
    tmp_path: Path, change: Callable[[dict[str, tuple[int, bytes]]], Any], alignment: int
) -> None:
    plain = (
        opened(gguf(tmp_path / "p.gguf", alignment=alignment), tmp_path / "plain")
        if (alignment == 32)
        else None
    )
    odd = opened(gguf(tmp_path / "m.gguf", change=change, alignment=alignment), tmp_path / "odd")
    embedding = odd["model.embed_tokens.weight"].flatten()
    assert torch.equal(embedding, torch.arange(ROWS * HIDDEN) / 4096)
    if plain is not None:
        assert all(torch.equal(odd[name], plain[name]) for name in plain)


def test_layers_that_differ_are_not_supported(tmp_path: Path) -> None:
    change = entry("llama.attention.head_count_kv", *per_layer(HEADS, 1))
    with pytest.raises(UnsupportedModelError, match="layers that differ"):
        convert(gguf(tmp_path / "m.gguf", change=change), tmp_path / "out")


def test_arrays_have_a_limit_together(tmp_path: Path) -> None:
    items = array(0, [bytes(3 << 19)], count=3 << 19)

    def change(metadata: dict[str, tuple[int, bytes]]) -> None:
        metadata |= {"x": (ARRAY, items), "y": (ARRAY, items)}

    with pytest.raises(ModelLoadError, match="more than 2097152 items"):
        GGUFFile(gguf(tmp_path / "m.gguf", change=change))


def test_a_gguf_file_with_any_byte_changed_opens_rightly_or_is_an_error(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    expected = {name: (t.kind, t.shape, t.offset) for name, t in GGUFFile(path).tensors.items()}
    places = {(t.kind, t.offset, t.num_bytes) for t in GGUFFile(path).tensors.values()}
    header_size = min(offset for _, _, offset in expected.values())
    rng = random.Random(11)
    bad = tmp_path / "bad.gguf"
    errors = 0
    for _ in range(1000):
        data = bytearray(whole)
        where = rng.randrange(header_size)
        match rng.randrange(4):
            case 0:
                data[where] ^= 1 << rng.randrange(8)
            case 1:
                data[where : where + 8] = rng.randbytes(8)
            case 2:
                data[where : where + 8] = struct.pack(
                    "<Q", rng.choice([0, 2**31, 2**63, 2**64 - 1])
                )
            case 3:
                del data[where : where + rng.randint(1, 64)]
        bad.write_bytes(data)
        try:
            tensors = GGUFFile(bad).tensors
        except (ModelLoadError, UnsupportedModelError):
            errors += 1
            continue
        # The bytes of a tensor are found where they were, under whatever name.
        assert {(t.kind, t.offset, t.num_bytes) for t in tensors.values()} <= places
    assert errors > 200


def test_a_gguf_file_with_changed_fields_is_converted_whole_or_not_at_all(tmp_path: Path) -> None:
    rng = random.Random(5)
    numbers = [0, 1, 3, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    for round_ in range(150):

        def change(metadata: dict[str, tuple[int, bytes]]) -> None:
            key = rng.choice(list(metadata))
            match rng.randrange(5):
                case 0:
                    metadata[key] = U64, struct.pack("<Q", rng.choice(numbers))
                case 1:
                    metadata[key] = 12, struct.pack("<d", rng.choice([0.0, -1.0, 1e308, 1e-300]))
                case 2:
                    metadata[key] = STRING, string(rng.choice(["", "x" * 5000, "\0", "gpt2"]))
                case 3:
                    del metadata[key]
                case 4:
                    metadata[key] = ARRAY, array(I32, [struct.pack("<i", -1)] * rng.randrange(3))

        out = tmp_path / f"out{round_}"
        try:
            convert(gguf(tmp_path / "m.gguf", change=change), out)
        except (ModelLoadError, UnsupportedModelError):
            assert not out.exists()
        else:
            load_model(out, dtype=None, device=CPU)


# ---- config.json and its neighbours


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, '{"a": ' + "9" * 10_000 + "}", "\0", ""])
def test_a_json_file_that_is_none(folder: Path, name: str, text: str) -> None:
    if name == INDEX:
        (folder / SINGLE).unlink()
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load_model(folder, dtype=None, device=CPU)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_file_that_is_nested_too_deeply(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a":' * 100_000)
    with pytest.raises(ModelLoadError):
        PretrainedModel(folder).load(EngineConfig(max_model_len=16))


def test_json_files_that_are_no_files_or_endless(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ModelLoadError, match="is not a file"):
        ModelConfig.from_folder(folder)
    with (folder / "config.json").open("w") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ModelLoadError, match="more than 33554432 bytes"):
        ModelConfig.from_folder(folder)


NUMBERS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
]


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "value",
    ["4", -1, 0, 2**64, 10**12, 10**400, float("nan"), float("inf"), 1e308, True, [], {}, [1]],
    ids=lambda value: str(value)[:10],
)
def test_config_numbers_that_cannot_be(folder: Path, key: str, value: Any) -> None:
    edit_config(folder, **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        load_model(folder, dtype=None, device=CPU)


@pytest.mark.parametrize("key", [key for key in NUMBERS if key != "rms_norm_eps"])
def test_config_numbers_that_the_weights_contradict_take_no_memory(
    folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.device] = []
    init = DecoderModel.__init__

    def count(self: DecoderModel, *args: Any, device: torch.device, **options: Any) -> None:
        made.append(device)
        init(self, *args, device=device, **options)

    monkeypatch.setattr(DecoderModel, "__init__", count)
    edit_config(folder, **{key: {"num_hidden_layers": 4096, "head_dim": 1 << 14}.get(key, 1 << 28)})
    with pytest.raises((ModelLoadError, OutOfMemoryError)):
        load_model(folder, dtype=None, device=CPU)
    assert all(device.type == "meta" for device in made)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": True},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": {"LlamaForCausalLM": 1}},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": ["x" * 100_000]},
        {"hidden_act": ["silu"]},
        {"dtype": ["float32"]},
        {"dtype": {"a": 1}},
        {"rope_parameters": {"rope_type": ["default"]}},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}},
        {"rope_parameters": {"rope_theta": 1e-300}},
        {"rope_parameters": {"rope_theta": 10**400}},
        {"rope_parameters": [1]},
        {"eos_token_id": [[1]]},
        {"eos_token_id": "1"},
        {"tie_word_embeddings": "yes"},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_config_values_that_cannot_be(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_theta", None)
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        load_model(folder, dtype=None, device=CPU)
    assert len(str(caught.value)) < 1000


def test_a_context_beyond_memory_says_which_option_helps(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=1 << 28, head_dim=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    with pytest.raises(OutOfMemoryError, match="lower max_model_len"):
        load_model(folder, dtype=None, device=CPU)
    load_model(folder, dtype=None, device=CPU, max_model_len=64)


# ---- safetensors


def split(folder: Path, num_shards: int) -> list[Path]:
    """The tensors in numbered shards, without an index."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    paths = []
    for number in range(num_shards):
        paths.append(folder / f"model-{number + 1:05}-of-{num_shards:05}.safetensors")
        save_file(dict(list(tensors.items())[number::num_shards]), paths[-1])
    return paths


def test_shards_without_an_index_are_the_model(folder: Path) -> None:
    whole = load_model(folder, dtype=None, device=CPU).tensors()
    split(folder, 3)
    read = load_model(folder, dtype=None, device=CPU).tensors()
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    cast_read = load_model(cast(folder, torch.bfloat16), dtype=torch.bfloat16, device=CPU).tensors()
    assert all(torch.equal(cast_read[name], whole[name].bfloat16()) for name in whole)


def test_a_shard_that_is_missing_without_an_index_is_named(folder: Path) -> None:
    split(folder, 3)[1].unlink()
    with pytest.raises(ModelLoadError, match=r"2 of 3.*model-00002-of-00003\.safetensors"):
        load_model(folder, dtype=None, device=CPU)


def test_shards_of_two_series_or_with_one_tensor_twice_are_refused(folder: Path) -> None:
    first, second = split(folder, 2)
    other = folder / "other-00001-of-00001.safetensors"
    shutil.copy(first, other)
    with pytest.raises(ModelLoadError, match="several series"):
        load_model(folder, dtype=None, device=CPU)
    other.unlink()
    shutil.copy(first, second)
    with pytest.raises(ModelLoadError, match="is in both"):
        load_model(folder, dtype=None, device=CPU)


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "x" * 5000,
        "a\0b.safetensors",
        "sub/x.safetensors",
        7,
        None,
        ["model.safetensors"],
        {"a": 1},
        "\ud800.safetensors",
    ],
    ids=lambda shard: ascii(shard)[:12],
)
def test_an_index_names_files_of_its_folder_only(folder: Path, shard: Any) -> None:
    (folder / SINGLE).rename(folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ModelLoadError, match="plain file name") as caught:
        load_model(folder, dtype=None, device=CPU)
    assert len(str(caught.value)) < 1000


def test_files_may_be_links_as_the_hubs_cache_has_them(folder: Path) -> None:
    blob = folder.parent / "blob"
    (folder / SINGLE).rename(blob)
    (folder / SINGLE).symlink_to(blob)
    load_model(folder, dtype=None, device=CPU)


def header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = (folder / SINGLE).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    values = json.loads(raw[8 : 8 + size])
    change(values)
    text = json.dumps(values).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def test_a_safetensors_file_with_anything_changed_is_right_or_an_error(folder: Path) -> None:
    whole = (folder / SINGLE).read_bytes()
    expected = load_model(folder, dtype=None, device=CPU).tensors()
    size = int.from_bytes(whole[:8], "little")
    rng = random.Random(3)
    opened = 0
    for round_ in range(250):
        data = bytearray(whole)
        where = rng.randrange(8 if round_ % 4 == 0 else 8 + size)
        match rng.randrange(3):
            case 0:
                data[where] ^= 1 << rng.randrange(8)
            case 1:
                data[where : where + 3] = rng.randbytes(3)
            case 2:
                del data[where : where + rng.randint(1, 64)]
        (folder / SINGLE).write_bytes(data)
        try:
            read = load_model(folder, dtype=None, device=CPU).tensors()
        except ModelLoadError:
            continue
        opened += 1
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert opened < 125


@pytest.mark.parametrize("length", [0, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be(folder: Path, length: int) -> None:
    raw = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(length.to_bytes(8, "little") + raw[8:])
    with pytest.raises(ModelLoadError, match="truncated or not safetensors"):
        load_model(folder, dtype=None, device=CPU)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "F16"},
        {"dtype": "F8_E8M0"},
        {"dtype": "F99"},
        {"shape": [64, 63]},
        {"shape": [2**62, 2**62]},
        {"shape": [-64, -64]},
        {"data_offsets": [0, 4]},
        {"data_offsets": [2**63, 2**63 + 4]},
        {"data_offsets": [4, 0]},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself(folder: Path, values: dict[str, Any]) -> None:
    header(folder, lambda tensors: tensors["model.norm.weight"].update(values))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_model(folder, dtype=None, device=CPU)


# ---- where a model is


def test_a_gguf_file_is_found_wherever_it_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    first = resolve_folder(gguf(alone / "m.gguf"))
    assert resolve_folder(alone) == first
    upper = tmp_path / "X.GGUF"
    shutil.copy(alone / "m.gguf", upper)
    monkeypatch.setenv("HOME", str(tmp_path))
    without_ending = tmp_path / ("blob" * 50)
    shutil.copy(upper, without_ending)
    for name in (upper, str(upper), "~/X.GGUF", "~/alone", str(without_ending)):
        assert (resolve_folder(name) / SINGLE).read_bytes() == (first / SINGLE).read_bytes()
    loaded = PretrainedModel("~/X.GGUF").load(EngineConfig(max_model_len=16))
    assert loaded.name == "X"
    loaded.close()


def test_a_folder_of_safetensors_stays_that_beside_a_gguf_file(folder: Path) -> None:
    gguf(folder / "m.gguf")
    assert resolve_folder(folder) == folder


def test_several_gguf_files_are_a_question(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf")
    gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        resolve_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["", "/no/such", "no-such.gguf", "~/no-such.gguf", "a\0b", "/" + "x" * 5000, "/dev/zero"],
)
def test_what_is_not_there_is_told_without_torch(name: str) -> None:
    for model in (name, Path(name)):
        with pytest.raises(ModelLoadError) as caught:
            PretrainedModel(model).load(EngineConfig())
        assert len(str(caught.value)) < 500


def test_pickles_say_why_not_and_what_to_do(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"can run code.*save_pretrained"):
        PretrainedModel(folder).load(EngineConfig())


def test_nothing_of_a_folder_is_ever_imported(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w').close()\nclass Own: pass\n"
    for name in ("modeling_own.py", "tokenization_own.py", "configuration_own.py", "__init__.py"):
        (folder / name).write_text(code)
    auto_map = {
        "AutoConfig": "configuration_own.Own",
        "AutoModelForCausalLM": "modeling_own.Own",
        "AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"],
    }
    edit_config(folder, auto_map=auto_map, trust_remote_code=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for tokenizer_class in (
        "PreTrainedTokenizerFast",
        "Own",
        "OwnTokenizer",
        "tokenization_own.Own",
        "os.system",
        "subprocess",
        None,
        7,
    ):
        hostile = {"auto_map": auto_map, "tokenizer_class": tokenizer_class}
        text = json.dumps(settings | hostile | {"trust_remote_code": True})
        (folder / "tokenizer_config.json").write_text(text)
        with contextlib.suppress(ModelLoadError):
            Tokenizer.load(folder)
        assert not trace.exists()
    load_model(folder, dtype=None, device=CPU)
    assert not trace.exists()
    assert not any("own" in name.split(".")[-1].split("_") for name in sys.modules)


# ---- what runs out


def test_a_disk_that_is_full_is_told_or_gone_without(
    folder: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert cast(folder, torch.bfloat16) == folder
    assert "1000" in caplog.text or "0.0 GB are free" in caplog.text
    with pytest.raises(ModelLoadError, match="set RAGSERVE_CACHE to a folder with more room"):
        convert(gguf(tmp_path / "m.gguf"))
    assert list((cache / "models").iterdir()) == []


def test_a_disk_that_fills_while_it_is_written(
    folder: Path, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    path = gguf(tmp_path / "m.gguf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert cast(folder, torch.bfloat16) == folder
        with pytest.raises(ModelLoadError, match="too large"):
            convert(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "is not kept in bfloat16" in caplog.text
    assert list((cache / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written(
    folder: Path, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    loaded = PretrainedModel(folder).load(EngineConfig(dtype="bfloat16", max_model_len=64))
    loaded.close()
    assert "is not kept in bfloat16" in caplog.text
    with pytest.raises(ModelLoadError, match="cannot convert"):
        convert(gguf(tmp_path / "m.gguf"))


def test_without_a_home_folder_the_cache_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGSERVE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: exec("raise RuntimeError('no home')"))
    with pytest.raises(ModelLoadError, match="RAGSERVE_CACHE"):
        convert(gguf(tmp_path / "m.gguf"))


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[], Any]]:
    """Call it and no file can be opened any more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def exhaust() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))

    yield exhaust
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_file_descriptors(
    folder: Path, tmp_path: Path, cache: Path, no_descriptors: Callable[[], Any]
) -> None:
    path = gguf(tmp_path / "m.gguf")
    no_descriptors()
    for model in (folder, path):
        for load in (
            lambda model: PretrainedModel(model).load(EngineConfig(max_model_len=16)),
            lambda model: (
                load_model(model, dtype=None, device=CPU) if model.is_dir() else convert(model)
            ),
        ):
            with pytest.raises(ModelLoadError, match="Too many open files"):
                load(model)


LIMITED = """
import resource, sys, torch
from ragserve.engine.config import EngineConfig
from ragserve.engine.errors import OutOfMemoryError
from ragserve.engine.runtime.loading import PretrainedModel
import ragserve.engine.models.load, ragserve.engine.models.free_memory
import ragserve.engine.cpu.runner, transformers

source = PretrainedModel(sys.argv[1])
source.load(EngineConfig(max_model_len=64, kv_cache_bytes=1 << 20)).close()
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), -1))
try:
    source.load(EngineConfig(max_model_len=64, kv_cache_bytes=1 << 30))
except OutOfMemoryError as error:
    print("typed:", error)
"""


def test_a_limit_of_address_space_is_an_out_of_memory_error(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LIMITED, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "typed: no memory is left to open" in done.stdout, done.stderr


@pytest.mark.parametrize("kv_cache_bytes", [1, 1000, 20_000])
def test_a_pool_that_is_too_small_never_advises_less_than_two_tokens(
    folder: Path, kv_cache_bytes: int
) -> None:
    for block_size in (1, 16):
        config = EngineConfig(kv_cache_bytes=kv_cache_bytes, block_size=block_size, dtype="float32")
        with pytest.raises(OutOfMemoryError, match="raise kv_cache_bytes to that") as caught:
            PretrainedModel(folder).load(config)
        advice = str(caught.value).rpartition("max_model_len to ")[2]
        if advice.isdigit():
            assert 2 <= int(advice) < 2048
            small = EngineConfig(
                kv_cache_bytes=kv_cache_bytes,
                block_size=block_size,
                dtype="float32",
                max_model_len=int(advice),
            )
            PretrainedModel(folder).load(small).close()


# ---- what is left behind


KILLED = """
import os, pathlib, signal, sys
from ragserve.engine.models.conversion_cache import make_folder

def write(folder):
    (folder / "weights").write_bytes(bytes(1000))
    print("writing", flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()

make_folder(pathlib.Path(sys.argv[1]), "1", write)
"""


def test_what_a_killed_process_had_written_is_swept_and_what_a_live_one_writes_is_not(
    tmp_path: Path, cache: Path
) -> None:
    models = cache / "models"

    def start(name: str, what: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", KILLED, str(models / name), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start("dead", "die") as dead:
        assert dead.wait(60) == -signal.SIGKILL
    (scratch,) = models.iterdir()
    with start("live", "wait") as live:
        assert live.stdout is not None
        assert live.stdout.readline() == "writing\n"
        # The live one has swept the other's already.
        (kept,) = models.iterdir()
        assert kept != scratch
        folder = convert(gguf(tmp_path / "m.gguf"))
        assert {kept, folder} == set(models.iterdir())
        live.communicate("")
        assert live.returncode == 0
    assert {models / "live", folder} == set(models.iterdir())


def test_a_conversion_that_is_found_sweeps_too(tmp_path: Path, cache: Path) -> None:
    path = gguf(tmp_path / "m.gguf")
    folder = convert(path)
    left = folder.parent / ".ragserve-left"
    left.mkdir()
    (left / "lock").touch()
    no_lock = folder.parent / ".ragserve-other"
    no_lock.mkdir()
    with (left / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert convert(path) == folder
        assert left.exists()
    assert convert(path) == folder
    assert not left.exists()
    assert no_lock.exists()  # whoever made it: it says of no one that he has died


def test_a_file_system_without_locks_is_written_and_never_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = tmp_path / ".ragserve-left"
    left.mkdir()
    (left / "lock").touch()
    made = make_folder(tmp_path / "made", "1", lambda folder: (folder / "x").touch())
    assert {path.name for path in tmp_path.iterdir()} == {made.name, left.name}


def test_a_narrower_copy_follows_its_config(folder: Path, cache: Path) -> None:
    first = cast(folder, torch.bfloat16)
    edit_config(folder, rms_norm_eps=0.5)
    assert ModelConfig.from_folder(cast(folder, torch.bfloat16)).rms_norm_eps == 0.5
    assert ModelConfig.from_folder(first).rms_norm_eps != 0.5


def held() -> tuple[set[str], int, set[str], list[str]]:
    gc.collect()
    process = psutil.Process()
    maps = {m.path for m in process.memory_maps(grouped=True) if "safetensors" in m.path}
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("ragserve"))
    return {f.path for f in process.open_files()}, process.num_fds(), maps, threads


@pytest.mark.parametrize("stage", ["weights", "tokenizer", "kv", "backend", "runner", "engine"])
def test_an_open_that_fails_leaves_nothing(
    folder: Path, cache: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 64}
    with LLM(folder, **options) as llm:  # what is made once is there now
        llm.generate("a", SamplingParams(max_tokens=1))
    if stage == "weights":
        monkeypatch.setattr("ragserve.engine.models.load.load_weights", fail)
    elif stage == "tokenizer":
        monkeypatch.setattr(Tokenizer, "load", fail)
    elif stage == "kv":
        options["kv_cache_bytes"] = 1
    elif stage == "backend":
        monkeypatch.setattr("ragserve.engine.cpu.backend.make_backend", fail)
    elif stage == "runner":
        monkeypatch.setattr("ragserve.engine.cpu.runner.ModelRunner.__init__", fail)
    else:
        monkeypatch.setattr("ragserve.engine.engine.Driver", fail)
    before = held()
    for _ in range(3):
        with pytest.raises(OSError if stage == "engine" else RagserveError):
            LLM(folder, **options)
    assert held() == before
    assert [path.name for path in (cache / "models").iterdir() if path.name[0] == "."] == []
