"""Loading weights: files, dtypes, memory, and an error that names what is wrong."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragserve.engine.errors import ModelLoadError, UnsupportedModelError
from ragserve.engine.models.cast import cast
from ragserve.engine.models.config import ModelConfig
from ragserve.engine.models.decoder import DecoderModel
from ragserve.engine.models.load import load_model
from ragserve.engine.models.resolve import resolve_folder

CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype | None = None) -> DecoderModel:
    return load_model(folder, dtype=dtype, device=CPU)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def shard(folder: Path, num_shards: int) -> list[Path]:
    """Deal the tensors of a folder's single file round to several files with an index."""
    tensors = load_file(folder / SINGLE)
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[number::num_shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("model-*.safetensors"))


def assert_same_weights(one: DecoderModel, other: DecoderModel) -> None:
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_every_tensor_of_the_checkpoint_is_read(folder: Path) -> None:
    stored = load_file(folder / SINGLE)
    read = load(folder).tensors()
    assert read.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(read[name], tensor), name


def test_joined_layers_hold_their_parts_once(folder: Path) -> None:
    model = load(folder)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert attention.qkv.weight.shape == ((4 + 2 + 2) * 16, 64)
    assert mlp.gate_up.weight.shape == (2 * 96, 64)
    parts = model.tensors()
    joined = attention.qkv.weight.untyped_storage().data_ptr()
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert parts[name].untyped_storage().data_ptr() == joined


def test_sharded_equals_single(folder: Path) -> None:
    single = load(folder)
    assert len(shard(folder, 3)) == 3
    assert_same_weights(single, load(folder))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype(stored: torch.dtype, folder: Path) -> None:
    rewrite(folder, lambda ts: ts.update({name: t.to(stored) for name, t in ts.items()}))
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(stored).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))

    expected = load_file(folder / SINGLE)
    for dtype in (None, torch.float32, torch.bfloat16):
        model = load(folder, dtype)
        assert model.dtype == (dtype or stored)
        for name, tensor in model.tensors().items():
            assert torch.equal(tensor, expected[name].to(dtype or stored)), name
        assert model.cos_sin.dtype == model.dtype

    del config["dtype"]  # then the checkpoint itself tells
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).dtype == stored


def test_weights_outlive_their_file(folder: Path) -> None:
    model = load(folder)
    stored = load_file(folder / SINGLE)
    expected = {name: tensor.clone() for name, tensor in stored.items()}
    del stored
    with (folder / SINGLE).open("r+b") as file:
        file.truncate(0)
    for name, tensor in model.tensors().items():
        assert torch.equal(tensor, expected[name])


def test_tied_embeddings_share_storage(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("smollm2"), tmp_path / "model"))
    model = load(folder, torch.bfloat16)
    assert model.lm_head.data_ptr() == model.embedding.data_ptr()
    assert "lm_head.weight" not in model.tensors()

    # Some exporters write the tied tensor a second time.
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    rewrite(folder, lambda ts: ts.update({"lm_head.weight": embedding.clone()}))
    assert_same_weights(model, load(folder, torch.bfloat16))

    rewrite(folder, lambda ts: ts.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(folder)


def test_untied_embeddings_do_not(folder: Path) -> None:
    model = load(folder)
    assert model.lm_head.data_ptr() != model.embedding.data_ptr()


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.norm.weight", "model.layers.2.self_attn.k_proj.weight"],
)
def test_missing_tensor(name: str, folder: Path) -> None:
    rewrite(folder, lambda ts: ts.pop(name))
    with pytest.raises(ModelLoadError, match=name):
        load(folder)


def test_many_missing_tensors_are_summed_up(folder: Path) -> None:
    rewrite(folder, lambda ts: [ts.pop(name) for name in list(ts) if "layers.1" in name])
    with pytest.raises(ModelLoadError, match=r"layers\.1.* and 4 more"):
        load(folder)


def test_unexpected_shape(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda ts: ts.update({name: torch.zeros(95, 64)}))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight.*\[95, 64\].*\[96"):
        load(folder)


def test_unexpected_dtype(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda ts: ts.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight is torch\.int8"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_truncated_file(kept: int, folder: Path) -> None:
    raw = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(raw[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*truncated") as caught:
        load(folder)
    assert caught.value.__cause__ is not None


def test_not_safetensors(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    shard(folder, 3)[1].unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors is missing"):
        load(folder)


def test_truncated_shard(folder: Path) -> None:
    broken = shard(folder, 3)[1]
    broken.write_bytes(broken.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors"):
        load(folder)


def test_shard_without_its_tensor(folder: Path) -> None:
    first, second, _ = shard(folder, 3)
    shutil.copy(first, second)
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors: cannot read"):
        load(folder)


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": []}'])
def test_broken_index(index: str, folder: Path) -> None:
    shard(folder, 2)
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(folder)


def test_index_stays_in_its_folder(folder: Path) -> None:
    shutil.move(folder / SINGLE, folder.parent / "outside.safetensors")
    weight_map = {"model.norm.weight": "../outside.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match="not a plain file name"):
        load(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*pickles can run code"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_unexpected_tensors_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda ts: ts.update({inv_freq: torch.zeros(8)}))
    with caplog.at_level(logging.WARNING, logger="ragserve"):
        load(folder)
        assert not caplog.records
        name = "model.layers.0.self_attn.q_proj.bias"
        rewrite(folder, lambda ts: ts.update({name: torch.zeros(64)}))
        load(folder)
    assert [record.name for record in caplog.records] == ["ragserve"]
    assert name in caplog.text
    assert inv_freq not in caplog.text


def peak_and_current_kib() -> tuple[int, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]), int(status["VmRSS"].split()[0])


def blank_tensors(folder: Path) -> dict[str, Tensor]:
    model = DecoderModel(ModelConfig.from_folder(folder), dtype=torch.bfloat16, device=CPU)
    return {name: torch.ones_like(tensor) for name, tensor in model.tensors().items()}


def test_weights_are_never_twice_in_memory(folder: Path) -> None:
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("needs Linux's peak memory counter")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": 16, "hidden_size": 1024, "head_dim": 64, "intermediate_size": 2730}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 4}
    config |= {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(blank_tensors(folder), folder / SINGLE)
    size_kib = (folder / SINGLE).stat().st_size // 1024
    assert size_kib > 80_000

    reset.write_text("5")  # the peak starts over at what is resident now
    _, before = peak_and_current_kib()
    model = load(folder)
    peak, _ = peak_and_current_kib()
    assert model.dtype == torch.bfloat16
    # The weights, one tensor of the file, and some slack.
    assert peak - before < 1.25 * size_kib


def test_an_existing_folder_is_used_as_it_is(folder: Path) -> None:
    assert resolve_folder(folder) == folder
    assert resolve_folder(str(folder), revision="main") == folder


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "~/no-such-folder"])
def test_a_path_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    for model in (name, Path(name)):
        with pytest.raises(ModelLoadError, match=r"no-such-folder|no/such/folder"):
            resolve_folder(model)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_folder(folder / "config.json")


def test_the_hub_gives_weights_and_tokenizers_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    repository = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "modeling_custom.py",
        "README.md",
        "onnx/model.json",
        "original/model.safetensors",
    ]
    fetched: list[str] = []

    def download(model: str, **options: Any) -> str:
        assert (model, options.pop("revision")) == ("owner/name", "v1")
        fetched.extend(filter_repo_objects(repository, **options))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_folder("owner/name", revision="v1") == folder
    assert fetched == repository[:8]


def test_an_unreachable_hub_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelLoadError, match=r"owner/name.*'v1'.*no network") as caught:
        resolve_folder("owner/name", revision="v1")
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize("name", ["a/b/c", "no spaces allowed", ""])
def test_a_name_that_cannot_be_is_a_load_error(name: str) -> None:
    with pytest.raises(ModelLoadError):
        resolve_folder(name)


def test_a_narrower_copy_is_made_once_and_holds_the_same(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSERVE_CACHE", str(tmp_path))
    folder = tiny_model("qwen2")
    copy = cast(folder, torch.bfloat16)
    assert copy.parent.parent == tmp_path
    written = (copy / "model.safetensors").stat().st_mtime_ns
    assert cast(folder, torch.bfloat16) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == written
    kept = load_model(copy, dtype=torch.bfloat16, device=CPU).tensors()
    read = load_model(folder, dtype=torch.bfloat16, device=CPU).tensors()
    assert kept.keys() == read.keys()
    assert all(torch.equal(kept[name], read[name]) for name in read)
    assert (copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    # Neither a copy of a copy, nor a wider or an equally wide one.
    assert cast(copy, torch.bfloat16) == copy
    assert cast(copy, torch.float32) == copy
    assert cast(folder, torch.float32) == folder


def test_a_narrower_copy_is_made_anew_when_its_source_changes_or_it_is_damaged(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSERVE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    first = cast(folder, torch.bfloat16)
    whole = (first / "model.safetensors").read_bytes()
    (first / "model.safetensors").write_bytes(whole[:100])
    assert cast(folder, torch.bfloat16) == first
    assert (first / "model.safetensors").read_bytes() == whole
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert cast(folder, torch.bfloat16) != first


def test_without_room_for_a_narrower_copy_the_model_still_opens(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RAGSERVE_CACHE", str(tmp_path / "file"))
    assert cast(tiny_model("llama"), torch.bfloat16) == tiny_model("llama")
    assert "is not kept in bfloat16" in caplog.text


def test_a_model_that_cannot_be_run_is_refused_before_it_is_cast(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSERVE_CACHE", str(tmp_path / "cache"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Unheard"]}))
    with pytest.raises(UnsupportedModelError, match="Unheard"):
        cast(folder, torch.bfloat16)
    assert not (tmp_path / "cache").exists()
