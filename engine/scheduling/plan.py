"""What a step computes, and what it gave: data between the scheduler and a runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..outputs import TokenLogprob
from .request import Request

__all__ = ["SampledToken", "ScheduledChunk", "StepPlan", "StepResult"]


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + num_tokens` of one sequence, to be computed by this plan.

    :param num_samples: tokens that it gives: 0 if it ends before the sequence does, else 1; of
        several decode steps one each, every one computed in the step after.
    :param decode: whether it goes on from the token that the sequence's chunk before has sampled,
        whose id the host need not know yet. If not, the ids of all its tokens are known.
    """

    request: Request
    start: int
    num_tokens: int
    num_samples: int
    decode: bool

    @property
    def sample(self) -> bool:
        """Whether the chunk ends at the sequence's end, so that it gives a next token."""
        return self.num_samples > 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What is computed next: one step, or several of decoding. Blocks for all of it are held.

    :param chunks: at most one for each sequence; first those with one token to compute before
        they sample (decoding, or the last token of a prompt), then those of prompts.
    :param num_steps: more than 1 only if all chunks decode; each of them takes part in the first
        `num_samples` steps.
    :param released: requests that have lost their seat since the plan before, because they ended
        or were preempted. Their places are free for the newcomers among `chunks`; one of those
        may be a request that has lost its seat just now.
    """

    chunks: list[ScheduledChunk]
    num_steps: int = 1
    released: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this plan."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class SampledToken(NamedTuple):
    """A sampled token, and its log-probability if asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave.

    :param sampled: the token ids of each chunk: as many as its `num_samples`, or fewer if the
        last of them ends the answer, or something went wrong, or the answer had ended before.
    :param logprobs: by index of the chunk, one for each of its tokens, where asked for.
    :param prompt_logprobs: by index of the chunk, for the prompt tokens after each of its
        positions, where asked for.
    :param errors: by index of the chunk, what went wrong with that sequence alone, after the
        tokens that it gave.
    """

    sampled: list[Sequence[int]]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
