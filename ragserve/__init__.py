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
    from .documents.document import Chunk, Document
    from .documents.token_splitter import TokenSplitter
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
    from .observability.metrics import Metrics
    from .observability.prompt_reuse import PromptReuse
    from .pipeline.answer import Answer, Done, RagTimings, Retrieved, Source
    from .pipeline.answer_stream import AnswerStream
    from .pipeline.rag_pipeline import RagPipeline
    from .prompting.template import BuiltPrompt, PromptTemplate
    from .retrieval.embedder import Embedder, EmbedderClosedError, EmbeddingError
    from .retrieval.faiss_index import (
        DuplicateChunkError,
        FaissIndex,
        IndexLoadError,
        IndexMismatchError,
    )
    from .retrieval.retriever import Retriever, ScoredChunk, StagedRetriever
    from .retrieval.sentence_transformer import SentenceTransformerEmbedder

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
    "retrieval": (
        "DuplicateChunkError",
        "Embedder",
        "EmbedderClosedError",
        "EmbeddingError",
        "FaissIndex",
        "IndexLoadError",
        "IndexMismatchError",
        "Retriever",
        "ScoredChunk",
        "SentenceTransformerEmbedder",
        "StagedRetriever",
    ),
    "prompting": ("BuiltPrompt", "PromptTemplate"),
    "observability": ("Metrics", "PromptReuse"),
    "pipeline": (
        "Answer",
        "AnswerStream",
        "Done",
        "RagPipeline",
        "RagTimings",
        "Retrieved",
        "Source",
    ),
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
