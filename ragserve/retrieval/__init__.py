"""Finding the chunks that a question is about.

`Embedder` and `Retriever` say what a pipeline needs; `SentenceTransformerEmbedder` and
`FaissIndex` are what comes with ragserve. `index_files` writes a saved index and checks one that
is read.

Knows documents. Prompts, engines and spans stand above it.
"""

from __future__ import annotations

from .embedder import (
    Embedder,
    EmbedderClosedError,
    EmbeddingError,
    TextKind,
    Vectors,
    check_embedder,
    check_vectors,
    lone_surrogate,
)
from .faiss_index import DuplicateChunkError, FaissIndex, IndexMismatchError
from .index_files import IndexLoadError
from .retriever import (
    ChunkFilter,
    Query,
    Retriever,
    ScoredChunk,
    StagedRetriever,
    check_filter,
    check_retriever,
)
from .sentence_transformer import SentenceTransformerEmbedder

__all__ = [
    "ChunkFilter",
    "DuplicateChunkError",
    "Embedder",
    "EmbedderClosedError",
    "EmbeddingError",
    "FaissIndex",
    "IndexLoadError",
    "IndexMismatchError",
    "Query",
    "Retriever",
    "ScoredChunk",
    "SentenceTransformerEmbedder",
    "StagedRetriever",
    "TextKind",
    "Vectors",
    "check_embedder",
    "check_filter",
    "check_retriever",
    "check_vectors",
    "lone_surrogate",
]
