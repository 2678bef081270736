"""A GGUF file's header, read within bounds: metadata as plain values, tensors by name.

A file of unknown origin must neither take long nor give other weights than its writer meant. So
every count is compared with the size of the file before anything of that size is read or made,
and tensors must lie as llama.cpp requires: in the order of their table, each aligned, each right
behind the one before.

Format: the GGUF specification of ggml (docs/gguf.md).
"""

from __future__ import annotations

import math
import os
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType

__all__ = ["MAGIC", "GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# Beyond real files (a vocabulary of 262,000 tokens has a header of 16 MB and 1.3 million items),
# and read in about a second.
_MAX_HEADER_BYTES = 1 << 28
_MAX_ENTRIES = 1 << 16
"""Metadata entries, and tensors."""
_MAX_ITEMS = 1 << 21
"""Items of all arrays together."""
_MAX_DIMENSIONS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    :ivar shape: rows first, as in Hugging Face (GGUF lists the fastest dimension first).
    :ivar offset: of its first byte in the file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file whose header is whole and whose tensors lie within it, apart from each other.

    :ivar metadata: key -> int, float, bool, str, or a list of one of these.
    :ivar tensors: name -> place.
    :raises ModelLoadError: if the file is truncated or inconsistent, or the `gguf` library is
        absent.
    :raises UnsupportedModelError: if it is of another version, byte order or tensor type.
    :raises OSError: if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            header = _Header(path, file)
            num_tensors = header.count("tensors")
            num_entries = header.count("metadata entries")
            self.metadata = _read_metadata(header, num_entries)
            self.tensors = _read_tensors(header, num_tensors, _alignment(path, self.metadata))

    def read(self, tensor: GGUFTensor) -> np.ndarray[Any, Any]:
        """A tensor's bytes, `[num_bytes]` uint8.

        :raises ModelLoadError: if the file has become shorter.
        """
        import numpy as np

        data = np.fromfile(self.path, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if len(data) != tensor.num_bytes:
            raise ModelLoadError(f"{self.path} has become shorter while it was read")
        return data


class _Header:
    """Takes one value after the other, and never more than the file holds."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file_size = os.fstat(file.fileno()).st_size
        self.position = 0
        self._limit = min(self.file_size, _MAX_HEADER_BYTES)
        self._file = file
        self._items_left = _MAX_ITEMS
        if self.file_size < len(MAGIC) or self.take(len(MAGIC)) != MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with {MAGIC!r}")
        version = self.scalar("I")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{path} was written for the other byte order")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{path} has version {version} of GGUF; known are "
                f"{', '.join(map(str, _VERSIONS))}; convert the model anew with llama.cpp"
            )

    def broken(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is not a whole GGUF file: {why}; fetch it again")

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        end = self.position + num_bytes
        if end > self._limit:
            if end <= self.file_size:
                raise self.broken(f"its header has more than {_MAX_HEADER_BYTES} bytes")
            raise self.broken(
                f"at byte {self.position} it announces {num_bytes} more, and its size is "
                f"{self.file_size}"
            )
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.broken("it has become shorter while it was read")
        self.position = end
        return data

    def scalar(self, code: str) -> Any:
        """A number, by its letter in `struct`."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str) -> int:
        """How many follow of what takes several bytes each."""
        count: int = self.scalar("Q")
        if count > min(_MAX_ENTRIES, self.file_size):
            raise self.broken(f"it announces {count} {what}, and at most {_MAX_ENTRIES} are read")
        return count

    def string(self) -> str:
        """A length and as many bytes of UTF-8."""
        data = self.take(_LENGTH.unpack(self.take(_LENGTH.size))[0])
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"a string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        """A metadata value of this type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise self.broken(f"type {kind} before byte {self.position} does not exist")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _ARRAY:
            raise UnsupportedModelError(f"{self.path} has an array of arrays among its metadata")
        if kind != _STRING and kind not in _SCALARS:
            raise self.broken(f"array type {kind} before byte {self.position} does not exist")
        code = _SCALARS.get(kind, "Q")  # a string has at least the 8 bytes of its length
        if count > (self.file_size - self.position) // struct.calcsize("<" + code):
            raise self.broken(
                f"at byte {self.position} it announces an array of {count} items, and its size "
                f"is {self.file_size}"
            )
        self._items_left -= count
        if self._items_left < 0:
            raise self.broken(f"its arrays have more than {_MAX_ITEMS} items")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        layout = f"<{count}{code}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))


def _read_metadata(header: _Header, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = header.string()
        if key in metadata:
            raise header.broken(f"its key {reprlib.repr(key)} stands there twice")
        metadata[key] = header.value(header.scalar("I"))
    return metadata


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0:
        return int(alignment)
    raise ModelLoadError(
        f"{path}: general.alignment is {reprlib.repr(alignment)}, expected a power of two"
    )


def _read_tensors(header: _Header, count: int, alignment: int) -> dict[str, GGUFTensor]:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ModelLoadError(
            "reading a GGUF file needs the gguf library: pip install 'ragserve[gguf]'"
        ) from error
    table: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int, int]] = {}
    end = 0  # of the tensors so far, counted from the first one's beginning
    for _ in range(count):
        name = header.string()
        shown = reprlib.repr(name)
        if name in table:
            raise header.broken(f"its tensor {shown} stands there twice")
        num_dimensions = header.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise header.broken(
                f"tensor {shown} has {num_dimensions} dimensions, and at most {_MAX_DIMENSIONS} "
                "exist"
            )
        shape = tuple(header.scalar("Q") for _ in range(num_dimensions))[::-1]
        number, offset = header.scalar("I"), header.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(
                f"{header.path}: tensor {shown} is quantized as type {number}, which the installed "
                "gguf library does not know; a newer one may: pip install -U gguf"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block or 0 in shape:
            raise header.broken(
                f"tensor {shown} has shape {shape}, and rows of {kind.name} are multiples of "
                f"{block}, at least one of them"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        expected = end + -end % alignment
        if offset != expected:
            raise header.broken(
                f"tensor {shown} is said to lie at {offset}, and {expected} is where the one "
                f"before it ends, aligned to {alignment}"
            )
        end = offset + num_bytes
        if end > header.file_size:
            raise header.broken(
                f"tensor {shown} of {num_bytes} bytes goes beyond its end at {header.file_size}"
            )
        table[name] = kind, shape, offset, num_bytes
    start = header.position + -header.position % alignment
    if table and start + end > header.file_size:
        raise header.broken(
            f"its tensors end at byte {start + end}, and its size is {header.file_size}"
        )
    return {
        name: GGUFTensor(name, kind, shape, start + offset, num_bytes)
        for name, (kind, shape, offset, num_bytes) in table.items()
    }
