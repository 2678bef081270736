"""The index: exact search, additions all or nothing, files that are whole or refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from ragserve.documents import Chunk, Document, TokenSplitter
from ragserve.engine import InvalidParamsError
from ragserve.index import (
    DuplicateChunkError,
    FaissIndex,
    IndexLoadError,
    IndexMismatchError,
)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class HashEmbedder:
    """Random directions, seeded by the text."""

    def __init__(self, dimension: int = 16, model_name: str = "hash") -> None:
        self.model_name = model_name
        self.dimension: int | None = dimension
        self.kinds: list[str] = []

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        await anyio.lowlevel.checkpoint()
        self.kinds.append(kind)
        vectors = np.empty((len(texts), self.dimension or 0), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            row[:] = np.random.default_rng(list(text.encode())).normal(size=self.dimension)
            row /= np.linalg.norm(row)
        return vectors


def chunks(count: int, prefix: str = "c") -> list[Chunk]:
    return [
        Chunk(f"{prefix}{i}", "d", f"text {prefix}{i}", i, {"even": i % 2 == 0})
        for i in range(count)
    ]


@pytest.mark.anyio
async def test_search_finds_what_brute_force_finds() -> None:
    embedder = HashEmbedder()
    index = FaissIndex(embedder)
    items = chunks(50)
    assert await index.add(items) == len(index) == 50
    queries = [f"query {i}" for i in range(5)]
    found = await index.search_many(queries, 7)
    assert set(embedder.kinds) == {"document", "query"}
    scores = (await embedder.embed(queries)) @ (await embedder.embed([c.text for c in items])).T
    for row, hits in zip(scores, found, strict=True):
        best = np.argsort(-row)[:7]
        assert [hit.chunk for hit in hits] == [items[i] for i in best]
        np.testing.assert_allclose([hit.score for hit in hits], row[best], rtol=1e-5)
    one = await index.search(queries[0], 7)
    assert [hit.chunk for hit in one] == [hit.chunk for hit in found[0]]
    vector = (await embedder.embed(["text c3"]))[0]
    (best_hit,) = await index.retrieve(vector, top_k=1)
    assert best_hit.chunk.id == "c3"
    assert best_hit.score == pytest.approx(1.0, abs=1e-5)


@pytest.mark.anyio
async def test_filter_and_more_wanted_than_there_is() -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(10))
    found = await index.search("query", 8, filter=lambda chunk: chunk.metadata["even"])
    assert len(found) == 5
    assert all(hit.chunk.metadata["even"] for hit in found)
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    assert await index.search("query", 8, filter=lambda chunk: False) == []
    assert len(await index.search("query", 100)) == 10


@pytest.mark.anyio
async def test_empty_index(tmp_path: Path) -> None:
    index = FaissIndex(HashEmbedder())
    assert await index.search("query") == []
    assert await index.search_many([]) == []
    assert await index.add([]) == 0
    await index.save(tmp_path / "kb")
    again = await FaissIndex.open(tmp_path / "kb", embedder=HashEmbedder())
    assert len(again) == 0
    assert await again.search("query") == []


@pytest.mark.anyio
async def test_documents_are_split_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    index = FaissIndex(HashEmbedder(), splitter=TokenSplitter(len, 5))
    added = await index.add(
        [Document("a", "one two three", {"k": 1}), *chunks(300)],
        progress=lambda done, total: told.append((done, total)),
    )
    assert added == len(index) == 303
    assert told[-1] == (303, 303)
    assert len(told) > 1
    assert told == sorted(told)
    whole = FaissIndex(HashEmbedder())
    await whole.add([Document("a", "one two three")])
    assert (await whole.search("x", 1))[0].chunk == Chunk("a#0", "a", "one two three")


@pytest.mark.anyio
async def test_an_addition_is_all_or_nothing() -> None:
    class Failing(HashEmbedder):
        async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
            if any("c299" in text for text in texts):
                raise ValueError("no")
            return await super().embed(texts, kind=kind)

    index = FaissIndex(Failing())
    with pytest.raises(ValueError, match="no"):
        await index.add(chunks(300))
    assert len(index) == 0
    with anyio.CancelScope() as scope:
        await index.add(chunks(290), progress=lambda done, total: scope.cancel())
    assert scope.cancelled_caught
    assert len(index) == 0
    await index.add(chunks(10))  # the ids are free again
    with pytest.raises(DuplicateChunkError) as caught:
        await index.add([*chunks(3, "new"), *chunks(1)])
    assert caught.value.chunk_id == "c0"
    with pytest.raises(DuplicateChunkError):
        await index.add([Chunk("twice", "d", "a"), Chunk("twice", "d", "b")])
    assert len(index) == 10


@pytest.mark.anyio
async def test_searches_and_additions_at_once() -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(20))

    async def search() -> None:
        for _ in range(30):
            (hit, *_rest) = await index.search("text c7", 3)
            assert hit.chunk.id == "c7"

    async def add(prefix: str) -> None:
        for i in range(5):
            await index.add(chunks(20, f"{prefix}{i}-"))

    async with anyio.create_task_group() as group:
        for prefix in "ab":
            group.start_soon(search)
            group.start_soon(add, prefix)
    assert len(index) == 220


def test_serves_several_event_loops() -> None:
    index = FaissIndex(HashEmbedder())

    async def use(prefix: str) -> None:
        await index.add(chunks(10, prefix))
        assert (await index.search(f"text {prefix}4", 1))[0].chunk.id == f"{prefix}4"

    threads = [
        threading.Thread(target=asyncio.run, args=(use("a"),)),
        threading.Thread(target=trio.run, args=(use, "b")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(use("c"))
    assert len(index) == 30


@pytest.mark.anyio
async def test_saved_and_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kb"
    index = FaissIndex(HashEmbedder())
    await index.add([Chunk("1", "d", "Größe\n\u2028 🙂", 0, {"a": [1, None]}), *chunks(5)])
    await index.save(folder)
    again = await FaissIndex.open(folder, embedder=HashEmbedder())
    assert again.name == "kb"
    assert await again.search("text c2", 6) == await index.search("text c2", 6)
    with pytest.raises(DuplicateChunkError):
        await again.add(chunks(1))
    # Saving over it replaces it, and leaves nothing behind.
    await again.add(chunks(3, "more"))
    await again.save(folder)
    assert len(list(folder.iterdir())) == 3
    assert len(await FaissIndex.open(folder, embedder=HashEmbedder())) == 9


@pytest.mark.anyio
async def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(3))
    await index.save(tmp_path)
    before = sorted(file.name for file in tmp_path.iterdir())
    await index.add([Chunk("bad", "d", "text", 0, {"not json": object()})])
    with pytest.raises(InvalidParamsError, match="bad"):
        await index.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert len(await FaissIndex.open(tmp_path, embedder=HashEmbedder())) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["meta", "chunks", "vectors"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
async def test_broken_files_are_refused(tmp_path: Path, kind: str, damage: str) -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(5))
    await index.save(tmp_path)
    (file,) = tmp_path.glob(f"{kind}*")
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.write_bytes(b"\xff" + data[1:])
    with pytest.raises(IndexLoadError, match=str(tmp_path)):
        await FaissIndex.open(tmp_path, embedder=HashEmbedder())


@pytest.mark.anyio
async def test_another_embedder_or_format_is_refused(tmp_path: Path) -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(5))
    await index.save(tmp_path)
    with pytest.raises(IndexMismatchError, match="other"):
        await FaissIndex.open(tmp_path, embedder=HashEmbedder(model_name="other"))
    with pytest.raises(IndexMismatchError, match="8"):
        await FaissIndex.open(tmp_path, embedder=HashEmbedder(dimension=8))
    lazy = HashEmbedder(dimension=8)
    opened = await FaissIndex.open(tmp_path, embedder=HashEmbedder())
    opened.embedder = lazy
    with pytest.raises(IndexMismatchError, match="8"):
        await opened.search("query")
    with pytest.raises(IndexMismatchError, match="8"):
        await opened.add(chunks(1, "new"))
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(IndexLoadError, match="99"):
        await FaissIndex.open(tmp_path, embedder=HashEmbedder())
    with pytest.raises(IndexLoadError, match="no index"):
        await FaissIndex.open(tmp_path / "nowhere", embedder=HashEmbedder())


@pytest.mark.anyio
async def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(2))
    await index.save(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["files"]["chunks"]["name"] = "../" + meta["files"]["chunks"]["name"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(IndexLoadError):
        await FaissIndex.open(tmp_path, embedder=HashEmbedder())


@pytest.mark.anyio
async def test_bad_parameters() -> None:
    index = FaissIndex(HashEmbedder())
    with pytest.raises(InvalidParamsError):
        await index.search("query", 0)
