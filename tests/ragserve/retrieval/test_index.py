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
from ragserve.engine import InvalidParamsError, QueueFullError
from ragserve.retrieval import (
    DuplicateChunkError,
    EmbeddingError,
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
    with pytest.raises(InvalidParamsError, match="max_queued_calls"):
        FaissIndex(HashEmbedder(), max_queued_calls=0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("items", "fix"),
    [
        ("x", r"\[Document\("),
        (b"x", r"\[Document\("),
        (Document, r"\[Document\("),
        (None, r"\[Document\("),
        ({"id": "text"}, r"\[Document\("),
        (Document("a", "text"), r"write \[document\]"),
        (Chunk("a", "d", "text"), r"write \[chunk\]"),
        ([Document], "the class Document"),
        (["x"], "item 0 is of type str"),
        ([Document("a", None)], r"'a' \(item 0\) has text of type NoneType"),  # type: ignore[arg-type]
        ([Document("a", b"x")], r"'a' \(item 0\) has text of type bytes"),  # type: ignore[arg-type]
        ([Document(5, "x")], "item 0 has id of type int"),  # type: ignore[arg-type]
        ([Document("a", "x", "m")], "metadata of type str"),  # type: ignore[arg-type]
    ],
)
async def test_what_cannot_be_added_says_what_can(items: Any, fix: str) -> None:
    index = FaissIndex(HashEmbedder())
    with pytest.raises(InvalidParamsError, match=fix):
        await index.add(items)
    assert len(index) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("splitter", [None, TokenSplitter(len, 50)], ids=["whole", "split"])
async def test_one_error_names_all_that_cannot_be_added(splitter: TokenSplitter | None) -> None:
    embedder = HashEmbedder()
    index = FaissIndex(embedder, splitter=splitter)
    documents = [Document(f"{i}.pdf", f"page {i}") for i in range(100)]
    documents[17] = Document("17.pdf", "secret \ud83d words")
    documents[40] = Document("40.pdf", 7)  # type: ignore[arg-type]
    documents[99] = Document("\udc00", "text")
    with pytest.raises(InvalidParamsError) as caught:
        await index.add(documents)
    message = str(caught.value)
    assert "'17.pdf' (item 17) has a lone surrogate in its text, character 7" in message
    assert "'40.pdf' (item 40) has text of type int" in message
    assert "(item 99) has a lone surrogate in its id" in message
    assert "nothing was added" in message
    assert "secret" not in message
    message.encode()  # it can be logged
    assert len(index) == 0
    assert embedder.kinds == []
    good = [document for i, document in enumerate(documents) if i not in (17, 40, 99)]
    assert await index.add(good) == 97


@pytest.mark.anyio
async def test_one_error_names_all_ids_that_are_twice() -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(3))
    with pytest.raises(DuplicateChunkError, match="'c0', 'c2', 'new'") as caught:
        await index.add([Chunk(name, "d", name) for name in ("c0", "x", "c2", "new", "new")])
    assert caught.value.chunk_ids == ("c0", "c2", "new")
    assert len(index) == 3
    with pytest.raises(DuplicateChunkError, match="and 80 more"):
        await index.add([*chunks(100, "many"), *chunks(100, "many")])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "query", [None, b"x", 5, {}, [["x"]], [1.0, "x"], np.ones((2, 16)), [float("nan")] * 16]
)
async def test_what_cannot_be_looked_for_says_what_can(query: Any) -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(3))
    with pytest.raises(InvalidParamsError, match="a text, or a vector of finite numbers"):
        await index.search(query)


@pytest.mark.anyio
async def test_arguments_of_a_search() -> None:
    index = FaissIndex(HashEmbedder())
    await index.add(chunks(3))
    for top_k in (2.0, True, 0, -1, "4", None):
        with pytest.raises(InvalidParamsError, match="top_k"):
            await index.search("query", top_k)  # type: ignore[arg-type]
    assert len(await index.search("query", 10**9)) == 3
    for keep in ({"year": 2024}, "year", Chunk):
        with pytest.raises(InvalidParamsError, match="a function of a chunk"):
            await index.search("query", filter=keep)  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match="a list of texts"):
        await index.search_many("query")
    with pytest.raises(InvalidParamsError, match="finite"):
        await index.search_many(np.full((2, 16), np.inf, np.float32))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        ([[1.0]], r"shape \(1, 1\) for 2 texts"),
        ([1.0, 2.0], r"shape \(2,\) for 2 texts"),
        ([[], []], r"shape \(2, 0\) for 2 texts"),
        ([[1.0, float("nan")], [1.0, 1.0]], "NaN in 1 of 2 vectors of dimension 2"),
        ([[1.0, float("inf")], [1.0, 1.0]], "infinity or NaN in 1 of 2"),
        ([["x"], ["y"]], "gave list for 2 texts"),
        (None, "for 2 texts"),
    ],
)
async def test_an_embedder_that_gives_no_vectors(vectors: Any, says: str) -> None:
    class Broken(HashEmbedder):
        async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
            return vectors

    index = FaissIndex(Broken())
    with pytest.raises(EmbeddingError, match=says):
        await index.add(chunks(2))
    assert len(index) == 0
    with pytest.raises(EmbeddingError, match=says):
        await index.search_many(["one", "two"])


@pytest.mark.anyio
async def test_an_index_is_made_of_an_embedder(tmp_path: Path) -> None:
    async def made() -> HashEmbedder:
        return HashEmbedder()

    forgotten = made()
    for embedder, fix in (
        (forgotten, "await"),
        (HashEmbedder, "not the class"),
        (None, "SentenceTransformerEmbedder"),
        ("all-MiniLM-L6-v2", "SentenceTransformerEmbedder"),
    ):
        with pytest.raises(InvalidParamsError, match=fix):
            FaissIndex(embedder)  # type: ignore[arg-type]
    forgotten.close()
    for path in (None, 5, "a\0b"):
        with pytest.raises(InvalidParamsError, match="path"):
            await FaissIndex.open(path, embedder=HashEmbedder())  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match="TokenSplitter"):
        FaissIndex(HashEmbedder(), splitter="gpt2")  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match=r"AutoTokenizer\.from_pretrained"):
        TokenSplitter("gpt2")  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_searches_that_wait_are_bounded_and_leave_when_cancelled() -> None:
    class Stuck(HashEmbedder):
        async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
            await anyio.sleep_forever()

    index = FaissIndex(Stuck(), max_queued_calls=3)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(index.search, "query")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(QueueFullError, match="max_queued_calls") as caught:
            await index.search("query")
        assert (caught.value.queued, caught.value.limit) == (3, 3)
        group.cancel_scope.cancel()
    index.embedder = HashEmbedder()
    assert await index.search("query") == []
