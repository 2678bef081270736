"""A saved index as files: what is written, and everything that is checked before it is believed.

A folder holds `meta.json`, which names the two others and their checksums; the chunks, a line of
JSON each; and FAISS's own file of the vectors. Whoever can write the folder can write checksums
too, so that nothing is taken for granted because they are right: FAISS is given a file only if its
header and its size are those of the one kind of index that is written here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np

from ragserve.engine import InvalidParamsError, RagserveError

from ..documents.document import Chunk

__all__ = ["IndexLoadError", "SavedIndex", "Snapshot", "read_index", "read_meta", "write_index"]

FORMAT: Final = 1
_MAX_META_BYTES: Final = 65_536
"""Ours has some 400."""
_NAMES: Final = {
    "chunks": re.compile(r"chunks-[0-9a-f]{16}\.jsonl"),
    "vectors": re.compile(r"vectors-[0-9a-f]{16}\.faiss"),
}
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_HEADER: Final = struct.Struct("<4siqqq?iQ")
"""Of FAISS's IndexFlatIP: kind, dimension, vectors, two that are unused, whether it is trained, the
metric, and how many numbers follow."""
_FLAT_INNER_PRODUCT: Final = b"IxFI"
_INNER_PRODUCT: Final = 0
_ROWS: Final = 65_536
"""Vectors looked at together."""
_UNLOCKABLE: Final = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


class IndexLoadError(RagserveError):
    """A saved index is missing, broken, or of another format."""


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """What `meta.json` says.

    :param embedder: name of the vectors' space.
    :param dimension: of a vector; None if there are none.
    :param count: of the chunks, and of the vectors.
    :param files: (name, checksum) of "chunks", and of "vectors" if there are any.
    """

    embedder: str
    dimension: int | None
    count: int
    files: dict[str, tuple[str, str]]


# -- writing ----------------------------------------------------------------------------------


Snapshot: TypeAlias = Callable[[Path], tuple[Sequence[Chunk], int | None]]
"""Writes FAISS's file, if there are vectors; gives the chunks, and the dimension."""


def write_index(folder: Path, embedder: str, snapshot: Snapshot) -> None:
    """Write new files beside the old ones; the new `meta.json` then names the new ones.

    Saves into one folder come one after the other, those of other processes too.

    :raises InvalidParamsError: if a chunk's metadata is not JSON.
    :raises OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _only_writer(folder):
        _write(folder, embedder, snapshot)


def _write(folder: Path, embedder: str, snapshot: Snapshot) -> None:
    token = secrets.token_hex(8)
    chunks_file = folder / f"chunks-{token}.jsonl"
    vectors_file = folder / f"vectors-{token}.faiss"
    meta_file = folder / f"meta-{token}.json"
    try:
        chunks, dimension = snapshot(vectors_file)
        files = {"chunks": chunks_file}
        if chunks:
            files["vectors"] = vectors_file
        with chunks_file.open("w", encoding="ascii") as stream:
            stream.writelines(_to_json(chunk) + "\n" for chunk in chunks)
        meta = {
            "format": FORMAT,
            "embedder": embedder,
            "dimension": dimension,
            "count": len(chunks),
            "files": {
                kind: {"name": file.name, "blake2b": _digest(file)} for kind, file in files.items()
            },
        }
        meta_file.write_text(json.dumps(meta, indent=1) + "\n", encoding="ascii")
        for file in (*files.values(), meta_file):
            _to_disk(file)
        meta_file.replace(folder / "meta.json")
    except BaseException:
        for file in (chunks_file, vectors_file, meta_file):
            file.unlink(missing_ok=True)
        raise
    # Those of the save before, and of one that was killed.
    for pattern in ("chunks-*.jsonl", "vectors-*.faiss", "meta-*.json"):
        for file in folder.glob(pattern):
            if token not in file.name:
                file.unlink(missing_ok=True)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Wait for other saves into the folder. The lock is the folder's own, and no file is left."""
    if sys.platform == "win32":
        yield  # which has no locks of folders
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems lock no folders. Then saves are whole by themselves, as
            # they are written beside each other, but they must not be at the same time.
            if error.errno not in _UNLOCKABLE:
                raise
        yield
    finally:
        os.close(descriptor)


def _to_json(chunk: Chunk) -> str:
    try:
        return json.dumps(
            {
                "id": chunk.id,
                "document_id": chunk.document_id,
                "text": chunk.text,
                "index": chunk.index,
                "metadata": dict(chunk.metadata),
            }
        )
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidParamsError(
            f"metadata of chunk {chunk.id!r}",
            f"<{type(chunk.metadata).__name__}>",
            f"what JSON can hold ({exc})",
        ) from exc


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _to_disk(file: Path) -> None:
    """See to it that a crash after the rename does not leave an empty file behind it."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


# -- reading ----------------------------------------------------------------------------------


def read_meta(folder: Path) -> SavedIndex:
    """What the folder's `meta.json` says, every field checked.

    :raises IndexLoadError: if there is none, it is broken, or of another format.
    """
    file = folder / "meta.json"
    try:
        if not file.is_file():  # a pipe would be waited for
            raise IndexLoadError(f"{folder} holds no index: there is no meta.json in it")
        with file.open("rb") as stream:
            content = stream.read(_MAX_META_BYTES + 1)
        if len(content) > _MAX_META_BYTES:
            raise _broken(file, f"it has more than {_MAX_META_BYTES} bytes")
        meta = json.loads(content)
    except (OSError, ValueError, RecursionError) as exc:
        raise _broken(file, str(exc)) from exc
    if not isinstance(meta, dict):
        raise _broken(file, f"it is a {type(meta).__name__}, not an object")
    version = meta.get("format")
    if isinstance(version, bool) or not isinstance(version, int):
        raise _broken(file, "its format is no integer")
    if version != FORMAT:
        raise IndexLoadError(
            f"{folder} is an index of another format than {FORMAT}, which this version reads "
            f"({str(version)[:20]}); build the index anew"
        )
    embedder, dimension, count = meta.get("embedder"), meta.get("dimension"), meta.get("count")
    if not isinstance(embedder, str):
        raise _broken(file, "its embedder is no string")
    if not _is_count(count):
        raise _broken(file, "its count is no integer from 0")
    if not count:
        dimension = None
    elif not dimension or not _is_count(dimension):
        raise _broken(file, "its dimension is no integer from 1")
    kinds = ("chunks", "vectors") if count else ("chunks",)
    return SavedIndex(embedder, dimension, count, _named_files(file, meta.get("files"), kinds))


def _named_files(file: Path, files: Any, kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    named: dict[str, tuple[str, str]] = {}
    for kind in kinds:
        entry = files.get(kind) if isinstance(files, dict) else None
        name, digest = (
            (entry.get("name"), entry.get("blake2b")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not _NAMES[kind].fullmatch(name):
            raise _broken(file, f"it names no file of {kind}")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise _broken(file, f"it has no checksum of {kind}")
        named[kind] = name, digest
    return named


def read_index(folder: Path, saved: SavedIndex) -> tuple[list[Chunk], Any]:
    """The chunks, and FAISS's index of their vectors: None if there are none.

    :raises IndexLoadError: if files are missing, changed, or do not fit each other.
    """
    try:
        for name, digest in saved.files.values():
            file = folder / name
            if not file.is_file():
                raise IndexLoadError(f"{file} is missing; save the index anew")
            if _digest(file) != digest:
                raise IndexLoadError(
                    f"{file} is truncated or was changed after it was saved; save the index anew"
                )
        chunks = _read_chunks(folder / saved.files["chunks"][0], saved.count)
        if not saved.count:
            return chunks, None
        file = folder / saved.files["vectors"][0]
        _check_vectors_file(file, saved.count, saved.dimension or 0)
        return chunks, _read_vectors(file, saved.dimension or 0)
    except (OSError, RuntimeError) as exc:  # FAISS's errors are the latter
        raise IndexLoadError(f"the index in {folder} cannot be read: {exc}") from exc


def _read_chunks(file: Path, count: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    ids: set[str] = set()
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if number > count:
                raise _broken(file, f"it has more lines than the {count} chunks of meta.json")
            try:
                chunk = _chunk(json.loads(line))
            except (ValueError, RecursionError) as exc:
                raise _broken(file, f"line {number}: {exc}") from exc
            if chunk.id in ids:
                raise _broken(file, f"line {number}: its id is another chunk's too")
            ids.add(chunk.id)
            chunks.append(chunk)
    if len(chunks) != count:
        raise _broken(file, f"it has {len(chunks)} lines, and meta.json tells of {count} chunks")
    return chunks


def _chunk(fields: Any) -> Chunk:
    """
    :raises ValueError: if a field is missing, of another type, or unknown.
    """
    types = {"id": str, "document_id": str, "text": str, "index": int, "metadata": dict}
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        raise ValueError(f"it is no object of {', '.join(types)}")
    for name, kind in types.items():
        if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
            raise ValueError(f"its {name} is no {kind.__name__}")
    return Chunk(**fields)


def _check_vectors_file(file: Path, count: int, dimension: int) -> None:
    """Check that FAISS will read what was written here: its header decides what FAISS allocates."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise _broken(file, f"it has {size} bytes, fewer than its header")
    kind, d, ntotal, _, _, trained, metric, numbers = _HEADER.unpack(header)
    if kind != _FLAT_INNER_PRODUCT or metric != _INNER_PRODUCT or not trained:
        raise _broken(file, f"it is no IndexFlatIP of FAISS ({kind!r}, metric {metric})")
    if (d, ntotal) != (dimension, count):
        raise _broken(
            file,
            f"it holds {ntotal} vectors of dimension {d}, and meta.json tells of {count} of "
            f"dimension {dimension}",
        )
    if numbers != count * dimension or size != _HEADER.size + 4 * count * dimension:
        raise _broken(
            file, f"it has {size} bytes, and {count} vectors of dimension {dimension} other many"
        )


def _read_vectors(file: Path, dimension: int) -> Any:
    import faiss

    vectors: Any = faiss.read_index(str(file))  # the stubs know no IndexFlat of it
    flat = faiss.rev_swig_ptr(vectors.get_xb(), vectors.ntotal * dimension)
    for start in range(0, len(flat), _ROWS * dimension):
        if not np.isfinite(flat[start : start + _ROWS * dimension]).all():
            raise _broken(file, "it holds infinity or NaN")
    return vectors


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _broken(file: Path, why: str) -> IndexLoadError:
    return IndexLoadError(f"{file} is broken ({why}); save the index anew")
