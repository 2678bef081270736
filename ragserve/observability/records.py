"""What is known of a request or an answer that has ended: the input of traces and statistics."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ragserve.engine import Completion, SamplingParams, Stream, Timeline, TokenizedPrompt

from ..prompting.template import BuiltPrompt
from ..retrieval.retriever import ScoredChunk

if TYPE_CHECKING:
    pass

__all__ = [
    "AheadOutcome",
    "AheadRecord",
    "AnswerRecord",
    "GenerationRecord",
    "STAGES",
    "error_type",
]

Stages: TypeAlias = list[tuple[str, int, int]]
"""`(stage, start, end)` of every stage that began, in order, without gaps."""
_CANCELLED: Final = "cancelled"


STAGES: Final = ("embedding", "retrieval", "context", "queue", "prefill", "decode")
_STAGES_BEFORE: Final = STAGES[:3]
_STAGES_OF_GENERATION: Final = STAGES[3:]


@dataclass(slots=True)
class GenerationRecord:
    """What is known of one request to the engine that has ended. Mostly made by `of`.

    Times are from `time.monotonic_ns`.
    """

    model: str
    params: SamplingParams
    started: int | None
    """None: it was never begun, and there is nothing to trace."""
    ended: int
    timeline: Timeline
    completion: Completion | None = None
    """What came of it, if only in part; None if the engine did not take it."""
    error: str | None = None
    """What kind of error ended it; "cancelled" if its caller left."""
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    """Text or chat messages, for traces that may have content; None is not known."""
    prompt_tokens: int | None = None
    """None is not known; then the completion's are used."""

    @classmethod
    def of(
        cls,
        stream: Stream,
        params: SamplingParams,
        *,
        model: str,
        error: BaseException | str | None = None,
        prompt: str | Sequence[Mapping[str, Any]] | None = None,
        prompt_tokens: int | None = None,
        started: int | None = None,
    ) -> GenerationRecord:
        """Write down how a stream has ended, after it was read to its end or closed.

        :param error: what ended it: an exception, an error type, or "cancelled" for a caller
            that left. It does not count if the answer was whole by then. None looks at the
            finish reasons.
        :param started: None is when the engine was asked.
        """
        kind = error_type(error) if isinstance(error, BaseException) else error
        completion = _completion(stream)
        if completion is not None:
            reasons = {choice.finish_reason for choice in completion.choices}
            broken = next((reason for reason in ("error", "abort") if reason in reasons), None)
            if kind is None or (kind == _CANCELLED and broken is None):
                kind = broken
        # A copy, for the engine may still write to it.
        timeline = replace(stream.timeline, chunks=list(stream.timeline.chunks))
        return cls(
            model=model,
            params=params,
            started=timeline.arrived if started is None else started,
            ended=timeline.finished or time.monotonic_ns(),
            timeline=timeline,
            completion=completion,
            error=kind,
            prompt=prompt,
            prompt_tokens=prompt_tokens,
        )

    def stages(self) -> Stages:
        """Its stages. A request that failed ends with the stage it failed in."""
        stamps = (self.timeline.first_scheduled, self.timeline.first_token, None)
        return _stages(_STAGES_OF_GENERATION, self.started, stamps, self.ended)


AheadOutcome: TypeAlias = Literal["used", "wrong", "unfinished", "skipped"]
"""used: the prompt began as guessed, and all of the guess was computed. unfinished: it was
stopped before that, by the prompt or by the answer's end. wrong: the prompt began otherwise.
skipped: nothing was to be computed, or could be."""


@dataclass(frozen=True, slots=True)
class AheadRecord:
    """What was computed of a guess before the prompt was known. Times from `time.monotonic_ns`.

    :param documents: in the guess, after the system prompt.
    :param prompt_tokens: of the guess.
    :param cached_tokens: of those, in the cache already.
    :param computed_tokens: of those, computed until it was done or stopped.
    :param found_tokens: of the computed ones, those that the answer found in the cache.
    :param chunks: how many steps worked on it.
    :param start: of the first step that did; None if none did.
    :param end: of the last one.
    """

    outcome: AheadOutcome
    documents: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    found_tokens: int
    chunks: int = 0
    start: int | None = None
    end: int | None = None

    @classmethod
    def of(
        cls,
        guess: TokenizedPrompt,
        timeline: Timeline,
        prompt: TokenizedPrompt | None,
        cached_tokens: int,
    ) -> AheadRecord:
        """Write down how a guess came out.

        :param timeline: of the request that computed it.
        :param prompt: the answer's own; None if it never came to be.
        :param cached_tokens: of that, found in the cache.
        """
        chunks, before = list(timeline.chunks), timeline.cached_tokens
        length, computed = len(guess.token_ids), sum(chunk.num_tokens for chunk in chunks)
        reached = min(before + computed, length)
        common = 0 if prompt is None else _common_tokens(guess, prompt)
        outcome: AheadOutcome
        if prompt is not None and common < length:
            outcome = "wrong"
        elif prompt is None or reached < length:
            outcome = "unfinished"
        else:
            outcome = "used" if computed else "skipped"
        return cls(
            outcome=outcome,
            documents=guess.kinds.count("document"),
            prompt_tokens=length,
            cached_tokens=before,
            computed_tokens=computed,
            found_tokens=max(0, min(reached, common, cached_tokens) - before),
            chunks=len(chunks),
            start=chunks[0].start if chunks else None,
            end=chunks[-1].end if chunks else None,
        )


def _common_tokens(one: TokenizedPrompt, other: TokenizedPrompt) -> int:
    """Tokens of the segments that two prompts both begin with."""
    common = 0
    ends = pairwise(accumulate(one.segment_lengths, initial=0))
    for (start, end), length in zip(ends, other.segment_lengths, strict=False):
        if end - start != length or one.token_ids[start:end] != other.token_ids[start:end]:
            break
        common = end
    return common


@dataclass(slots=True)
class AnswerRecord:
    """What is known of one answer. Times are from `time.monotonic_ns`; None did not happen.

    Stages share their boundaries, so that they cover the whole time from `started` to `ended`.
    """

    name: str
    question: str
    top_k: int
    params: SamplingParams
    model: str
    index: str
    embedding_model: str | None
    """None: the retriever takes text, and nothing is embedded."""
    dimension: int | None = None

    started: int | None = None
    embedded: int | None = None
    retrieved: int | None = None
    built: int | None = None
    """The prompt is ready and handed to the engine."""
    ended: int | None = None
    error: str | None = None
    """What kind of error ended it; "cancelled" if its caller left."""

    found: Sequence[ScoredChunk] = ()
    prompt: BuiltPrompt | None = None
    generation: GenerationRecord | None = None
    """The engine's part, when the answer had ended; begins where the prompt was ready."""
    ahead: Sequence[AheadRecord] | None = None
    """What was computed before the prompt was known, one guess after the other; None if that is
    switched off."""
    ahead_error: str | None = None
    """What kind of error kept guesses from being computed."""

    @property
    def ahead_outcome(self) -> AheadOutcome | None:
        """How the last guess came out; None if computing ahead is switched off."""
        if self.ahead is None:
            return None
        return self.ahead[-1].outcome if self.ahead else "skipped"

    @property
    def completion(self) -> Completion | None:
        """What the engine answered, if only in part."""
        return None if self.generation is None else self.generation.completion

    def stages(self) -> Stages:
        """Its stages. An answer that failed ends with the stage it failed in."""
        if self.ended is None:
            return []
        stamps = (self.embedded, self.retrieved, self.built)
        stages = _stages(_STAGES_BEFORE, self.started, stamps, self.ended)
        return stages if self.generation is None else stages + self.generation.stages()


def _stages(
    names: Sequence[str], start: int | None, stamps: Sequence[int | None], ended: int
) -> Stages:
    """Each stage from the end of the one before to its stamp, or if it has none, to the end."""
    stages: Stages = []
    if start is None:
        return stages
    last = max(start, ended)
    for name, stamp in zip(names, stamps, strict=True):
        end = last if stamp is None else min(max(start, stamp), last)
        stages.append((name, start, end))
        if stamp is None:
            break
        start = end
    return stages


def error_type(error: BaseException) -> str:
    """OpenTelemetry's `error.type` for an exception; "cancelled" for a cancellation."""
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit):
        return _CANCELLED  # asyncio's and trio's, which share no base class
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _completion(stream: Stream) -> Completion | None:
    """What has come of it; None while it runs."""
    try:
        return stream.completion
    except RuntimeError:
        return None
