"""Documents, and cutting them into chunks.

`Document` is what a user has, `Chunk` what is retrieved; `TokenSplitter` cuts one into the other
so that chunks fill KV blocks.

Knows text and token counts. Embedding, search and prompts stand above it.
"""

from __future__ import annotations

from .document import Chunk, Document, check_document
from .token_splitter import DocumentTemplate, TokenCounter, TokenEncoder, TokenSplitter

__all__ = [
    "Chunk",
    "Document",
    "DocumentTemplate",
    "TokenCounter",
    "TokenEncoder",
    "TokenSplitter",
    "check_document",
]
