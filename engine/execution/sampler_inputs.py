"""What the sampler needs to know of a request, on every device."""

from __future__ import annotations

from ragserve import kernels

from ..scheduling.plan import ScheduledChunk
from ..scheduling.request import Request
from .sampler import SamplingState

__all__ = ["prompt_targets", "sampling_state"]


def prompt_targets(chunk: ScheduledChunk) -> list[int]:
    """The prompt tokens that follow the chunk's positions, if their log-probability is wanted."""
    request = chunk.request
    if request.params.prompt_logprobs is None or request.index > 0:
        return []
    return request.prompt_token_ids[chunk.start + 1 : chunk.end + 1]


def sampling_state(request: Request) -> SamplingState:
    """What the sampler knows of a request; made once."""
    state = request.sampler_state
    if not isinstance(state, SamplingState):
        state = request.sampler_state = SamplingState(
            params=request.params,
            seed=kernels.philox.derive_seed(request.seed, request.index),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            eos_token_ids=request.eos_token_ids,
            bad_word_ids=request.bad_word_ids,
        )
    return state
