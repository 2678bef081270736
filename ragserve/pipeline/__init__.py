"""One question from embedding to answer.

`RagPipeline` holds what all answers share, `AnswerStream` is one answer on its way through the
stages, `PrefillAhead` has the engine compute the beginning of a prompt before it is known.

Stands on every other room but `web/`.
"""

from __future__ import annotations

from .answer import Answer, AnswerEvent, Done, RagTimings, Retrieved, Source
from .answer_stream import AnswerStream
from .rag_pipeline import RagPipeline

__all__ = [
    "Answer",
    "AnswerEvent",
    "AnswerStream",
    "Done",
    "RagPipeline",
    "RagTimings",
    "Retrieved",
    "Source",
]
