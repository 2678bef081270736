"""Documents, and the chunks that they are cut into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragserve.engine import InvalidParamsError, check_text

__all__ = ["DOCUMENT_FORMAT", "Chunk", "Document", "check_document"]

DOCUMENT_FORMAT = "\n\n[{number}] {text}"
"""How a document stands in a prompt, if nothing else is said. A splitter counts tokens by it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be found again.

    :param id: unique within an index.
    :param metadata: anything JSON can hold; every chunk of the document carries it.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document: what is embedded, retrieved and put into a prompt.

    :param id: unique within an index.
    :param document_id: id of the `Document` it was cut from.
    :param index: its place in the document, from 0.
    """

    id: str
    document_id: str
    text: str
    index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


def check_document(document: Document) -> None:
    """Check that a document is one: a `Document` with strings that can be encoded.

    :raises InvalidParamsError: if it isn't, or its id, its text or a string in its metadata has a
        lone surrogate in it; names the document.
    """
    if not isinstance(document, Document):
        raise InvalidParamsError("document", document, 'a Document, like Document("1", "text")')
    check_text("document id", document.id)
    check_text(f"text of document {document.id!r}", document.text)
    if not isinstance(document.metadata, Mapping):
        raise InvalidParamsError(
            f"metadata of document {document.id!r}", document.metadata, "a mapping"
        )
    for key, value in document.metadata.items():
        check_text(f"metadata of document {document.id!r}", key)
        if isinstance(value, str):
            check_text(f"metadata[{key!r}] of document {document.id!r}", value)
