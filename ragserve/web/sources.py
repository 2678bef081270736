"""What a response says of a document that its answer was given."""

from __future__ import annotations

from typing import Any

from ..documents.document import Chunk

__all__ = ["source_data"]


def source_data(
    number: int, chunk: Chunk, score: float | None = None, *, text: bool = True
) -> dict[str, Any]:
    """A source for JSON.

    :param number: what a citation like [1] means.
    :param score: None if it was not retrieved, but came with the question.
    :param text: whether the chunk's text is in it.
    """
    data: dict[str, Any] = {"number": number, "id": chunk.id, "document_id": chunk.document_id}
    if score is not None:
        data["score"] = score
    if (title := chunk.metadata.get("title")) is not None:
        data["title"] = title
    if text:
        data["text"] = chunk.text
    return data
