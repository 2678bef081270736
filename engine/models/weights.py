"""Safetensors files -> the model's memory, one tensor at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelLoadError

__all__ = ["DTYPES", "Checkpoint", "load_weights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What weights may be stored in; others belong to quantized models."""
# Old checkpoints carry RoPE's frequencies, which follow from the config.
_HARMLESS = ("rotary_emb.inv_freq",)


class Checkpoint:
    """The tensors of a model folder, memory-mapped one at a time.

    :ivar files: tensor name -> the file that holds it.
    :raises ModelLoadError: if there are no safetensors, a shard of the index is missing, or a
        file is broken.
    """

    def __init__(self, folder: Path) -> None:
        single, index = folder / _SINGLE, folder / _INDEX
        if single.is_file():
            self.files = dict.fromkeys(_names(single), single)
        elif index.is_file():
            self.files = _read_index(index)
        else:
            raise ModelLoadError(_why_none(folder))

    @property
    def dtype(self) -> torch.dtype:
        """What its first tensor is stored in."""
        _, tensor = next(self.read(list(self.files)[:1]))
        return tensor.dtype

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, in the order of their files.

        A tensor is backed by the mapped file; copy what is to be kept.
        """
        for name in sorted(names, key=lambda name: self.files[name].name):
            path = self.files[name]
            # Opened anew each time, because a mapping's pages count as ours until it is gone.
            with _open(path) as file:
                try:
                    tensor = file.get_tensor(name)
                except SafetensorError as error:
                    raise ModelLoadError(f"{path}: cannot read {name}: {error}") from error
            yield name, tensor
            del tensor


def load_weights(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], tied: Mapping[str, Tensor]
) -> None:
    """Copy a checkpoint into the model's memory, converting each tensor once.

    :param tensors: name -> memory to fill; all must be in the checkpoint.
    :param tied: name -> memory filled under another name; the checkpoint may have it too,
        and then with the same values.
    :raises ModelLoadError: if a tensor is missing, or its shape or dtype is not the expected
        one, or a tied one differs.
    """
    missing = [name for name in tensors if name not in checkpoint.files]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_some(missing)}, which config.json implies")
    unexpected = [
        name
        for name in checkpoint.files
        if name not in tensors and name not in tied and not name.endswith(_HARMLESS)
    ]
    if unexpected:
        logging.getLogger("ragserve").warning(
            "the checkpoint has tensors that the model does not use: %s", _some(unexpected)
        )
    for name, source in checkpoint.read(tensors):
        _check(checkpoint.files[name], name, source, tensors[name])
        tensors[name].copy_(source)
    for name, source in checkpoint.read(name for name in tied if name in checkpoint.files):
        _check(checkpoint.files[name], name, source, tied[name])
        if not torch.equal(source.to(tied[name]), tied[name]):
            raise ModelLoadError(
                f"{checkpoint.files[name]}: {name} differs from the embedding that config.json "
                "ties it to; set tie_word_embeddings to false if the checkpoint is right"
            )


def _check(path: Path, name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise ModelLoadError(
            f"{path}: {name} has shape {list(source.shape)} and config.json implies "
            f"{list(target.shape)}"
        )
    if source.dtype not in DTYPES:
        raise ModelLoadError(
            f"{path}: {name} is {source.dtype}; quantized weights need the model's original files"
        )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not safetensors: {error}; "
            "fetch it again"
        ) from error


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = {name: str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not an index of safetensors: {error!r}") from error
    for shard in set(shards.values()):
        # An index comes with the model: it must not make us read files elsewhere.
        if Path(shard).name != shard:
            raise ModelLoadError(f"{path}: shard {shard!r} is not a plain file name")
        if not (path.parent / shard).is_file():
            raise ModelLoadError(f"{path.parent / shard} is missing; {path.name} lists it")
    return {name: path.parent / shard for name, shard in shards.items()}


def _why_none(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} has no {_SINGLE}, only {', '.join(pickles)}: pickles can run code when "
            "read and are refused; convert the model with save_pretrained()"
        )
    return f"{folder} has neither {_SINGLE} nor {_INDEX}"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
