"""Broken, foreign and hostile saved indexes are refused; saves at once leave a whole one."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from ragserve.documents import Chunk
from ragserve.retrieval import FaissIndex, IndexLoadError

COUNT, DIMENSION = 5, 4


class Letters:
    model_name = "letters"
    dimension: int | None = DIMENSION

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        rows = [[1.0 + text.count(letter) for letter in "abcd"] for text in texts]
        vectors = np.array(rows, np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def saved(folder: Path) -> Path:
    index = FaissIndex(Letters())
    await index.add([Chunk(f"c{i}", "d", "abcd"[i % 4] * i, i) for i in range(COUNT)])
    await index.save(folder)
    return folder


def rewrite(folder: Path, kind: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file as somebody would who can write the folder: the checksum is right."""
    meta = json.loads((folder / "meta.json").read_text())
    file = folder / meta["files"][kind]["name"]
    file.write_bytes(change(file.read_bytes()))
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    meta["files"][kind]["blake2b"] = digest
    (folder / "meta.json").write_text(json.dumps(meta))


async def refused(folder: Path, match: str | None = None) -> None:
    with anyio.fail_after(60), pytest.raises(IndexLoadError, match=match) as caught:
        await FaissIndex.open(folder, embedder=Letters())
    assert str(folder) in str(caught.value)


NESTED = b"[" * 30_000


@pytest.mark.anyio
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        NESTED,
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"a": "' + b"x" * 200_000 + b'"}',
    ],
    ids=["empty", "null", "list", "object", "no UTF-8", "nested", "huge number", "huge"],
)
async def test_meta_that_is_no_meta(tmp_path: Path, content: bytes) -> None:
    await saved(tmp_path)
    (tmp_path / "meta.json").write_bytes(content)
    await refused(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("field", ["format", "embedder", "dimension", "count", "files"])
@pytest.mark.parametrize(
    "value", [None, True, -1, 1.5, 1 << 80, "x", [], {}, {"chunks": 1}], ids=repr
)
async def test_fields_of_meta_of_another_kind(tmp_path: Path, field: str, value: object) -> None:
    await saved(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, field: value}))
    await refused(tmp_path)
    del meta[field]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    await refused(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["chunks", "vectors"])
@pytest.mark.parametrize("entry", [None, [], {}, {"name": 5}, {"name": "x", "blake2b": "y"}])
async def test_entries_of_files_of_another_kind(tmp_path: Path, kind: str, entry: object) -> None:
    await saved(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["files"][kind] = entry
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    await refused(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "line",
    [
        NESTED,
        b"null",
        b"{}",
        b'"text"',
        b'{"id": {}, "document_id": "d", "text": "t", "index": 0, "metadata": {}}',
        b'{"id": "c", "document_id": [], "text": "t", "index": 0, "metadata": {}}',
        b'{"id": "c", "document_id": "d", "text": null, "index": 0, "metadata": {}}',
        b'{"id": "c", "document_id": "d", "text": "t", "index": true, "metadata": {}}',
        b'{"id": "c", "document_id": "d", "text": "t", "index": 0, "metadata": 1}',
        b'{"id": "c", "document_id": "d", "text": "t", "index": 0, "metadata": {}, "more": 1}',
    ],
)
async def test_lines_that_are_no_chunks(tmp_path: Path, line: bytes) -> None:
    await saved(tmp_path)
    rewrite(tmp_path, "chunks", lambda lines: b"\n".join([line, *lines.splitlines()[1:]]) + b"\n")
    await refused(tmp_path, "line 1")


@pytest.mark.anyio
async def test_chunks_that_are_too_many_too_few_or_twice(tmp_path: Path) -> None:
    await saved(tmp_path)
    rewrite(tmp_path, "chunks", lambda lines: lines + lines.splitlines()[0])
    await refused(tmp_path, "more lines")
    rewrite(tmp_path, "chunks", lambda lines: lines[: lines.index(b"\n") + 1])
    await refused(tmp_path, "1 lines")
    rewrite(tmp_path, "chunks", lambda line: line * COUNT)
    await refused(tmp_path, "another chunk's")


def header(at: int, layout: str, *values: object) -> Callable[[bytes], bytes]:
    """Write these values into FAISS's file at this place."""

    def change(data: bytes) -> bytes:
        new = bytearray(data)
        struct.pack_into(layout, new, at, *values)
        return bytes(new)

    return change


@pytest.mark.anyio
@pytest.mark.parametrize(
    "change",
    [
        header(0, "<4s", b"IwFl"),
        header(0, "<4s", b"\xff\xff\xff\xff"),
        header(4, "<i", 1 << 30),
        header(4, "<i", -DIMENSION),
        header(8, "<q", 1 << 60),
        header(8, "<q", COUNT - 1),
        header(32, "<?", False),
        header(33, "<i", 1),
        header(37, "<Q", 1 << 40),
        header(37, "<Q", (1 << 64) - 1),
        header(45, "<f", float("nan")),
        header(45, "<f", float("inf")),
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data + b"\0" * 4,
    ],
)
async def test_faiss_is_given_nothing_but_what_was_written_here(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    await saved(tmp_path)
    rewrite(tmp_path, "vectors", change)
    await refused(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["meta.json", "chunks", "vectors"])
async def test_a_pipe_or_folder_in_place_of_a_file_is_not_waited_for(
    tmp_path: Path, name: str
) -> None:
    await saved(tmp_path)
    (file,) = tmp_path.glob(f"{name}*")
    file.unlink()
    os.mkfifo(file)
    await refused(tmp_path)
    file.unlink()
    file.mkdir()
    await refused(tmp_path)


@pytest.mark.anyio
async def test_saves_at_once_leave_one_whole_index(tmp_path: Path) -> None:
    one, other = FaissIndex(Letters()), FaissIndex(Letters())
    await one.add([Chunk(f"one{i}", "d", "a" * i, i) for i in range(50)])
    await other.add([Chunk(f"other{i}", "d", "b" * i, i) for i in range(70)])
    async with anyio.create_task_group() as group:
        for index in (one, other, one, other, one, other):
            group.start_soon(index.save, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(await FaissIndex.open(tmp_path, embedder=Letters())) in (50, 70)


@pytest.mark.anyio
async def test_what_a_killed_save_left_is_swept(tmp_path: Path) -> None:
    for name in ("chunks-00.jsonl", "vectors-00.faiss", "meta-00.json"):
        (tmp_path / name).write_text("left")
    await saved(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert not [file for file in tmp_path.iterdir() if "-00." in file.name]
