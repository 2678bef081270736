"""Safetensors files -> the model's memory, one tensor at a time."""

from __future__ import annotations

import errno
import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelLoadError
from .json_file import read_json_object

__all__ = ["DTYPES", "Checkpoint", "load_weights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_LONGEST_NAME = 255
"""Bytes of a file's name, on every file system there is."""
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_OTHERS = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPES = tuple(_DTYPES.values())
"""What weights may be stored in; others belong to quantized models."""
# Old checkpoints carry RoPE's frequencies, which follow from the config.
_HARMLESS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of a tensor.

    :ivar dtype: by its safetensors name: "F32", say.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a model folder, memory-mapped one at a time.

    They lie in `model.safetensors`, in the shards that an index lists, or in shards that are
    numbered (`model-00001-of-00003.safetensors`) and complete.

    :ivar tensors: name -> what its file's header says.
    :ivar files: the files, in the order of their names.
    :raises ModelLoadError: if there are no safetensors, a shard is missing, or a file is broken.
    """

    def __init__(self, folder: Path) -> None:
        single, index = folder / _SINGLE, folder / _INDEX
        if single.is_file():
            self.tensors = _read_header(single)
        elif index.is_file():
            self.tensors = _read_indexed(index)
        else:
            self.tensors = _read_numbered(folder)
        if not self.tensors:
            raise ModelLoadError(f"{folder}: its safetensors hold no tensors; fetch them again")
        self.files = sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def dtype(self) -> torch.dtype:
        """What its first tensor is stored in.

        :raises ModelLoadError: if that is none that weights may be stored in.
        """
        name, tensor = next(iter(self.tensors.items()))
        if tensor.dtype not in _DTYPES:
            raise _quantized(name, tensor)
        return _DTYPES[tensor.dtype]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with what a model needs, before there is memory for it.

        :param shapes: name -> shape; all must be there.
        :raises ModelLoadError: if a tensor is missing, or its shape or dtype is not the expected
            one.
        """
        missing = [name for name in shapes if name not in self.tensors]
        if missing:
            raise ModelLoadError(
                f"the checkpoint lacks {_some(missing)}, which config.json implies"
            )
        for name, shape in shapes.items():
            tensor = self.tensors[name]
            if tensor.shape != shape:
                raise ModelLoadError(
                    f"{tensor.file}: {name} has shape {list(tensor.shape)} and config.json "
                    f"implies {list(shape)}"
                )
            if tensor.dtype not in _DTYPES:
                raise _quantized(name, tensor)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, in the order of their files.

        A tensor is backed by the mapped file; copy what is to be kept.
        """
        for name in sorted(names, key=lambda name: self.tensors[name].file.name):
            path = self.tensors[name].file
            # Opened anew each time, because a mapping's pages count as ours until it is gone.
            with _open(path) as file:
                try:
                    tensor = file.get_tensor(name)
                # For a dtype that torch lacks it is one of the others.
                except (SafetensorError, RuntimeError, ValueError, AttributeError) as error:
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
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected |= {
        name: tuple(tensor.shape) for name, tensor in tied.items() if name in checkpoint.tensors
    }
    checkpoint.check(expected)
    unexpected = [
        name for name in checkpoint.tensors if name not in expected and not name.endswith(_HARMLESS)
    ]
    if unexpected:
        logging.getLogger("ragserve").warning(
            "the checkpoint has tensors that the model does not use: %s", _some(unexpected)
        )
    for name, source in checkpoint.read(tensors):
        tensors[name].copy_(source)
    for name, source in checkpoint.read(name for name in tied if name in checkpoint.tensors):
        if not torch.equal(source.to(tied[name]), tied[name]):
            raise ModelLoadError(
                f"{checkpoint.tensors[name].file}: {name} differs from the embedding that "
                "config.json ties it to; set tie_word_embeddings to false if the checkpoint is "
                "right"
            )


def _quantized(name: str, tensor: StoredTensor) -> ModelLoadError:
    return ModelLoadError(
        f"{tensor.file}: {name} is {_OTHERS.get(tensor.dtype, tensor.dtype)}, and weights as "
        f"{', '.join(_DTYPES)} are supported; quantized weights need the model's original files"
    )


def _open(path: Path) -> safe_open:
    try:
        # The library says that a file is missing, whatever keeps it from being opened.
        with path.open("rb"):
            pass
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except OSError as error:
        raise ModelLoadError(f"cannot open {path}: {error}") from error
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, RuntimeError, SafetensorError) as error:
        if f"os error {errno.ENOMEM}" in str(error) or f"({errno.ENOMEM})" in str(error):
            raise MemoryError(f"no memory is left to map {path}: {error}") from error
        raise ModelLoadError(
            f"{path} is truncated or not safetensors: {error}; fetch it again"
        ) from error


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with _open(path) as file:
        try:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: its header cannot be read: {error}") from error


def _read_indexed(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{index} is not an index of safetensors: it has no weight_map")
    folder = index.parent
    for shard in weight_map.values():
        # An index comes with the model: it must not make us read files elsewhere.
        if not _is_plain_name(shard):
            raise ModelLoadError(f"{index}: shard {reprlib.repr(shard)} is not a plain file name")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise ModelLoadError(f"{folder / shard} is missing; {index.name} lists it")
        shards[shard] = _read_header(folder / shard)
    tensors = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelLoadError(
                f"{folder / shard}: cannot read {reprlib.repr(name)}, which {index.name} says is "
                "there; fetch both again"
            )
        tensors[name] = shards[shard][name]
    return tensors


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.isprintable()
        and Path(name).name == name
        and name != ".."
        and 0 < len(name.encode()) <= _LONGEST_NAME
    )


def _read_numbered(folder: Path) -> dict[str, StoredTensor]:
    """Shards without an index: their names tell how many there are."""
    found = [match for path in folder.glob("*.safetensors") if (match := _SHARD.match(path.name))]
    series = sorted({(match[1], match[3]) for match in found})
    if not series:
        raise ModelLoadError(_why_none(folder))
    if len(series) > 1:
        raise ModelLoadError(
            f"{folder} has no {_INDEX} and shards of several series, "
            f"{_some([f'{stem}-*-of-{total}' for stem, total in series])}; keep one"
        )
    ((stem, total),) = series
    there = {match[2] for match in found}
    numbers = [f"{number:05}" for number in range(1, int(total) + 1)]
    missing = [
        f"{stem}-{number}-of-{total}.safetensors" for number in numbers if number not in there
    ]
    if missing or len(there) != len(numbers):
        raise ModelLoadError(
            f"{folder} holds {len(there)} of {int(total)} shards, and {_some(missing)} is missing"
            if missing
            else f"{folder} holds more shards than the {int(total)} that their names announce"
        )
    tensors: dict[str, StoredTensor] = {}
    for number in numbers:
        path = folder / f"{stem}-{number}-of-{total}.safetensors"
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise ModelLoadError(
                    f"{reprlib.repr(name)} is in both {tensors[name].file} and {path}; fetch them "
                    "again"
                )
            tensors[name] = tensor
    return tensors


def _why_none(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} has no {_SINGLE}, only {', '.join(pickles)}: pickles can run code when "
            "read and are refused; convert the model with save_pretrained()"
        )
    return (
        f"{folder} has neither {_SINGLE} nor {_INDEX}, nor shards like "
        "model-00001-of-00003.safetensors, nor one .gguf file"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(name if len(name) < 200 else reprlib.repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
