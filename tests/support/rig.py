"""An engine core that a test steps itself, whatever runner it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ragserve.engine import SamplingParams
from ragserve.engine.config import EngineConfig
from ragserve.engine.outputs import TokenLogprob
from ragserve.engine.prompt import Retention, TokenizedPrompt
from ragserve.engine.runtime.core import EngineCore
from ragserve.engine.scheduling.request import Request

__all__ = ["Answer", "EngineRig", "make_prompt"]

VOCAB_SIZE = 384


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens of the tiny models' vocabulary, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


@dataclass
class Answer:
    """What became of one choice of a request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: Exception | None = None


class EngineRig:
    """Requests in, answers out, step by step.

    :param num_tokens: of an answer whose parameters do not say.
    """

    def __init__(self, core: EngineCore, config: EngineConfig, *, num_tokens: int) -> None:
        self.core = core
        self.config = config
        self._num_tokens = num_tokens
        self._count = 0

    def add(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        segments: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Queue a request; one answer per choice."""
        params = params or SamplingParams.greedy(ignore_eos=True)
        lengths = tuple(segments or (len(token_ids),))
        prompt = TokenizedPrompt(list(token_ids), lengths, (Retention.ANSWER,) * len(lengths))
        self._count += 1
        answers: list[Answer] = []
        for index in range(params.n):
            request = Request(
                f"request {self._count}",
                prompt,
                params,
                block_size=self.config.block_size,
                max_tokens=params.max_tokens or self._num_tokens,
                seed=params.seed or 0,
                index=index,
                leader=answers[0].request if answers else None,
                **options,
            )
            answers.append(Answer(request))
        for answer in answers:
            self.core.add(answer.request)
        return answers

    def step(self, answers: Iterable[Answer]) -> None:
        """One step; what it gave goes to the answers."""
        by_request = {id(answer.request): answer for answer in answers}
        for update in self.core.step():
            answer = by_request[id(update.request)]
            answer.token_ids.extend(update.delta.token_ids)
            answer.logprobs.extend(update.delta.logprobs or ())
            answer.error = answer.error or update.error

    def finish(self, answers: list[Answer]) -> list[list[int]]:
        """Step until all have ended; all memory must be accounted for then."""
        for _ in range(10_000):
            if not self.core.scheduler.has_requests:
                break
            self.step(answers)
        assert all(answer.request.finish_reason is not None for answer in answers)
        self.core.check_integrity()
        statistics = self.core.pool.statistics()
        assert statistics.free + statistics.cached == statistics.total
        return [answer.token_ids for answer in answers]

    def generate_all(self, prompts: Iterable[Sequence[int]], *, apart: int = 0) -> list[list[int]]:
        """Several requests, each arriving `apart` steps after the one before."""
        answers: list[Answer] = []
        for token_ids in prompts:
            answers += self.add(token_ids)
            for _ in range(apart):
                self.step(answers)
        return self.finish(answers)
