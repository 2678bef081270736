"""Retrieval-augmented generation inside your own process, one trace per answer.

    import ragserve as rs

    async with rs.Engine.open("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        async with engine.stream(question) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)

Names are imported when they are first used, so `import ragserve` is fast and needs none of
torch, transformers, faiss, sentence-transformers or OpenTelemetry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .documents import Chunk, Document, TokenSplitter
    from .embedding import (
        Embedder,
        EmbedderClosedError,
        EmbeddingError,
        SentenceTransformerEmbedder,
    )
    from .engine import (
        LLM,
        Choice,
        Completion,
        Delta,
        DiskCacheError,
        Distribution,
        Engine,
        EngineClosedError,
        EngineConfig,
        EngineDeadError,
        EventLoopError,
        FinishReason,
        Health,
        InternalError,
        InvalidParamsError,
        ModelLoadError,
        OutOfMemoryError,
        Pin,
        Prompt,
        PromptTooLongError,
        QueueFullError,
        QueueTimeoutError,
        RagserveError,
        RequestLimits,
        Retention,
        SamplingParams,
        Segment,
        SegmentReuse,
        Statistics,
        Stream,
        Timings,
        TokenLogprob,
        UnsupportedModelError,
        Usage,
    )
    from .index import (
        DuplicateChunkError,
        FaissIndex,
        IndexLoadError,
        IndexMismatchError,
        Retriever,
        ScoredChunk,
        StagedRetriever,
    )
    from .metrics import Metrics
    from .pipeline import Answer, AnswerStream, Done, RagPipeline, RagTimings, Retrieved, Source
    from .prompting import BuiltPrompt, PromptTemplate
    from .reuse import PromptReuse

__all__ = [
    "__version__",
    # the engine
    "Engine",
    "EngineConfig",
    "RequestLimits",
    "LLM",
    "SamplingParams",
    "Stream",
    "Pin",
    "Prompt",
    "Retention",
    "Segment",
    "SegmentReuse",
    "Delta",
    "Distribution",
    "Choice",
    "Completion",
    "FinishReason",
    "Health",
    "Metrics",
    "Statistics",
    "Timings",
    "TokenLogprob",
    "Usage",
    # retrieval-augmented generation
    "Answer",
    "AnswerStream",
    "BuiltPrompt",
    "Chunk",
    "Document",
    "Done",
    "Embedder",
    "FaissIndex",
    "PromptReuse",
    "PromptTemplate",
    "RagPipeline",
    "RagTimings",
    "Retrieved",
    "Retriever",
    "ScoredChunk",
    "SentenceTransformerEmbedder",
    "Source",
    "StagedRetriever",
    "TokenSplitter",
    # errors
    "RagserveError",
    "DiskCacheError",
    "DuplicateChunkError",
    "EmbedderClosedError",
    "EmbeddingError",
    "EngineClosedError",
    "EngineDeadError",
    "EventLoopError",
    "IndexLoadError",
    "IndexMismatchError",
    "InternalError",
    "InvalidParamsError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "QueueFullError",
    "QueueTimeoutError",
    "UnsupportedModelError",
]

_HOME = {
    "documents": ("Chunk", "Document", "TokenSplitter"),
    "embedding": (
        "Embedder",
        "EmbedderClosedError",
        "EmbeddingError",
        "SentenceTransformerEmbedder",
    ),
    "index": (
        "DuplicateChunkError",
        "FaissIndex",
        "IndexLoadError",
        "IndexMismatchError",
        "Retriever",
        "ScoredChunk",
        "StagedRetriever",
    ),
    "metrics": ("Metrics",),
    "pipeline": (
        "Answer",
        "AnswerStream",
        "Done",
        "RagPipeline",
        "RagTimings",
        "Retrieved",
        "Source",
    ),
    "prompting": ("BuiltPrompt", "PromptTemplate"),
    "reuse": ("PromptReuse",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_OF.get(name, 'engine')}", __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
