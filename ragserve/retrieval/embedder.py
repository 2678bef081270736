"""What an embedder is: texts in, vectors out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ragserve.engine import InvalidParamsError, RagserveError

__all__ = [
    "Embedder",
    "EmbedderClosedError",
    "EmbeddingError",
    "TextKind",
    "Vectors",
    "check_embedder",
    "check_vectors",
    "lone_surrogate",
]

Vectors: TypeAlias = NDArray[np.float32]
"""`[n, dimension]` float32; each row of length 1 (or 0, where the model gave zeros)."""

TextKind: TypeAlias = Literal["query", "document"]
"""What a text is. Some models put a different prompt before each."""


class EmbeddingError(RagserveError):
    """The model's answer is not one finite vector a text, all of one dimension."""


class EmbedderClosedError(RagserveError):
    """The embedder is closed and takes no more texts."""


class Embedder(Protocol):
    """Turns texts into vectors whose inner product is their similarity."""

    @property
    def model_name(self) -> str:
        """Names the vectors' space: an index built in one is not searched in another."""

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None while it is not known."""

    async def embed(self, texts: Sequence[str], *, kind: TextKind = "document") -> Vectors:
        """One vector a text: float32, `[len(texts), dimension]`, each of length 1."""


def check_embedder(embedder: object) -> None:
    """Check that something is an `Embedder`.

    :raises InvalidParamsError: if it lacks one of its parts; names it, and what is one.
    """
    allowed = "an Embedder, like SentenceTransformerEmbedder(...)"
    if inspect.isawaitable(embedder):
        raise InvalidParamsError("embedder", embedder, f"{allowed}: write `await` before it")
    if isinstance(embedder, type):
        raise InvalidParamsError("embedder", embedder, f"{allowed}, not the class")
    if not callable(getattr(embedder, "embed", None)):
        raise InvalidParamsError("embedder", embedder, f"{allowed}: it has no embed(texts, kind=)")
    if not isinstance(getattr(embedder, "model_name", None), str):
        raise InvalidParamsError("embedder", embedder, f"{allowed}: it has no model_name")
    if not hasattr(embedder, "dimension"):
        raise InvalidParamsError("embedder", embedder, f"{allowed}: it has no dimension")


def check_vectors(vectors: object, count: int, name: str) -> Vectors:
    """What an embedder gave for `count` texts, as float32.

    :param name: of the embedder, for the error.
    :raises EmbeddingError: if it is not one finite vector a text.
    """
    expected = f"expected [{count}, dimension] of finite numbers"
    try:
        array: Vectors = np.asarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise EmbeddingError(
            f"{name} gave {type(vectors).__name__} for {count} texts; {expected}"
        ) from error
    if array.ndim != 2 or len(array) != count or not array.shape[1]:
        raise EmbeddingError(
            f"{name} gave an array of shape {array.shape} for {count} texts; {expected}"
        )
    if not np.isfinite(array).all():
        rows = int((~np.isfinite(array)).any(axis=1).sum())
        raise EmbeddingError(
            f"{name} gave infinity or NaN in {rows} of {count} vectors of dimension "
            f"{array.shape[1]}; {expected}"
        )
    return array


def lone_surrogate(text: str) -> int | None:
    """Where the first half of a character stands, as in the text of some PDF files, that no encoder
    takes; None if there is none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
