"""What a request gives back: deltas while it runs, a completion at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .prompt import SegmentKind

__all__ = [
    "Choice",
    "Completion",
    "Delta",
    "FinishReason",
    "MissReason",
    "ReuseSource",
    "SegmentReuse",
    "Timings",
    "TokenLogprob",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

MissReason: TypeAlias = Literal[
    "never_seen", "evicted", "other_order", "shorter_than_block", "not_cached"
]
"""Why prompt tokens were not in the cache.

never_seen: they were not sent in this namespace, or so long ago that it is forgotten; whether they
were in another is not said. evicted: they were there, and made room. other_order: they were sent
behind something else, for what is cached is found only behind the same tokens. shorter_than_block:
the tail that fills no block, or the one token that is always computed. not_cached: prefix caching
is off, or log-probabilities of the prompt were asked for."""

ReuseSource: TypeAlias = Literal["device", "host", "disk"]
"""Where cached tokens came from: the pool itself, or a tier behind it."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and of the likeliest ones in its place.

    Natural logarithms of the model's own distribution, before temperature, penalties and
    filters.

    :param rank: 1 for the likeliest token of the vocabulary.
    :param top: the `logprobs` likeliest `(token_id, logprob)`, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # not frozen: one is made for every token, and that takes five times as long
class Delta:
    """What is new since the last one, of one choice. Several tokens may be joined in one.

    :param text: new text; empty while a character or a possible stop string is incomplete.
    :param token_ids: the new tokens.
    :param index: which of the request's `n` choices.
    :param finish_reason: set on the choice's last delta.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` of the `prompt_tokens` were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class SegmentReuse:
    """What of one segment of a prompt was found in the cache, and why not more.

    :param tokens: of the segment; the first `cached_tokens` of them were not computed.
    :param source: the slowest place that some of them came from; None if there were none.
    :param miss: why the first of the others was not there; None if there were none.
    """

    kind: SegmentKind
    tokens: int
    cached_tokens: int
    source: ReuseSource | None = None
    miss: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished continuation.

    :param stop_reason: the stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a request spent in each stage; they sum to `total`.

    queue runs from arrival (before tokenizing) to the first step that worked on it, prefill
    from there to the first token, decode from there to the last. For `n` > 1: of the choice
    that ended last.
    """

    queue: float
    prefill: float
    decode: float
    total: float
    tokenize: float = 0.0
    """Part of `queue`: tokenizing the prompt."""
    time_to_first_token: float | None = None
    """Arrival to first token; None if there was none."""
    time_per_output_token: float | None = None
    """(end - first token) / (tokens - 1); None for fewer than two tokens."""
    prefill_chunks: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The finished answer to one request."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = field(default=None, repr=False)
    """One per prompt token (the first has none), if asked for."""
    reuse: tuple[SegmentReuse, ...] = ()
    """What of each of the prompt's segments was cached; none of a request that was never
    started."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason
