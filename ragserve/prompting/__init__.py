"""From retrieved chunks to a prompt.

`PromptTemplate` makes a prompt of segments within a budget of tokens, `ordering` decides the order
of its documents, `SegmentTokens` remembers their token ids.

Knows documents, scored chunks and the engine's prompts. Pipelines stand above it.
"""

from __future__ import annotations

from .ordering import (
    ORDERS,
    DocumentOrder,
    DocumentTokens,
    Popularity,
    PrefixProbe,
    order_documents,
)
from .segment_tokens import PromptTokenizer, SegmentTokens, TokenizedSegment
from .template import BuiltPrompt, PromptTemplate

__all__ = [
    "BuiltPrompt",
    "DocumentOrder",
    "DocumentTokens",
    "ORDERS",
    "Popularity",
    "PrefixProbe",
    "PromptTemplate",
    "PromptTokenizer",
    "SegmentTokens",
    "TokenizedSegment",
    "order_documents",
]
