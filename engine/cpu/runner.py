"""A plan becomes tensors, a forward pass, sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ragserve import kernels

from ..execution.sampler import InvalidLogitsError, Sampler
from ..execution.sampler_inputs import prompt_targets, sampling_state
from ..scheduling.plan import StepPlan, StepResult
from ..scheduling.request import Request
from .backend import Backend
from .block_io import CPUBlockIO

__all__ = ["ModelRunner"]


class ModelRunner:
    """Plans to sampled tokens, over a backend. Used by one thread.

    It computes in that thread, so it never works ahead: see `Runner`.

    :param backend: weights and KV pool; block numbers of plans index it.
    :param num_threads: CPU threads of a step, in the thread that calls `launch`.
    :ivar block_io: copies blocks of the pool; None if it is not in the host's memory.
    :ivar sharing: from when on attention reads once what decoding sequences have in common; None:
        never. Changes the speed only.
    """

    depth = 1
    max_decode_steps = 1

    def __init__(self, backend: Backend, *, num_threads: int) -> None:
        self._backend: Backend | None = backend
        self.sharing: kernels.Sharing | None = backend.sharing
        self._num_threads: int | None = num_threads
        self._sampler = Sampler(backend.config.vocab_size)
        on_host = backend.pools[0].device.type == "cpu"
        self.block_io = CPUBlockIO(backend) if on_host else None

    def close(self) -> None:
        """Drop the weights and the KV pool."""
        self._backend = None
        if self.block_io is not None:
            self.block_io.close()

    def samples_on_host(self, request: Request) -> bool:
        """See `Runner`: with one plan at a time, every token is there when the next is due."""
        return False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Compute a step's tokens, store their KV, sample where a chunk asks for it."""
        result = self._execute(plan)
        return lambda: result

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        backend = self._backend
        if backend is None:
            raise RuntimeError("the runner is closed")
        if self._num_threads is not None:
            # OpenMP's thread count belongs to the calling thread: the application keeps its own.
            torch.set_num_threads(self._num_threads)
            self._num_threads = None
        batch = _paged_batch(plan, backend.block_size, self.sharing)
        token_ids = torch.tensor(
            [t for c in plan.chunks for t in c.request.tokens(c.start, c.end)], dtype=torch.int64
        )
        hidden = backend.forward(token_ids, batch)
        result = StepResult([()] * len(plan.chunks))
        self._sample(backend, plan, batch, hidden, result)
        self._prompt_logprobs(backend, plan, hidden, result)
        return result

    def _sample(
        self,
        backend: Backend,
        plan: StepPlan,
        batch: kernels.PagedBatch,
        hidden: torch.Tensor,
        result: StepResult,
    ) -> None:
        chosen = [index for index, chunk in enumerate(plan.chunks) if chunk.sample]
        if not chosen:
            return
        rows = torch.tensor([batch.query_starts[index + 1] - 1 for index in chosen])
        logits = backend.logits(hidden[rows])
        states = [sampling_state(plan.chunks[index].request) for index in chosen]
        try:
            tokens = self._sampler(logits, states)
        except InvalidLogitsError as error:
            # The broken rows fail; the others are sampled again, with the same outcome.
            for row in error.rows:
                result.errors[chosen[row]] = InvalidLogitsError([row])
            good = [row for row in range(len(chosen)) if chosen[row] not in result.errors]
            chosen = [chosen[row] for row in good]
            tokens = self._sampler(logits[good], [states[row] for row in good]) if good else []
        for index, token in zip(chosen, tokens, strict=True):
            result.sampled[index] = (token.token_id,)
            if token.logprob is not None:
                result.logprobs[index] = [token.logprob]

    def _prompt_logprobs(
        self, backend: Backend, plan: StepPlan, hidden: torch.Tensor, result: StepResult
    ) -> None:
        offset = 0
        for index, chunk in enumerate(plan.chunks):
            targets = prompt_targets(chunk)
            if targets:
                logits = backend.logits(hidden[offset : offset + len(targets)])
                try:
                    result.prompt_logprobs[index] = self._sampler.prompt_logprobs(
                        logits, targets, chunk.request.params.prompt_logprobs or 0
                    )
                except InvalidLogitsError as error:
                    result.errors[index] = error
            offset += chunk.num_tokens


def _shared_runs(
    plan: StepPlan, block_size: int, sharing: kernels.Sharing | None
) -> list[kernels.SharedRun]:
    """What the sequences that compute one token hold in common of the blocks before it."""
    if sharing is None:
        return []
    return sharing.runs(
        [c.request.blocks for c in plan.chunks],
        [c.request.layout.num_complete(c.start) if c.num_tokens == 1 else 0 for c in plan.chunks],
        block_size,
    )


def _paged_batch(
    plan: StepPlan, block_size: int, sharing: kernels.Sharing | None
) -> kernels.PagedBatch:
    chunks = plan.chunks
    counts = [c.request.layout.num_blocks(c.end) for c in chunks]
    tables = np.zeros((len(chunks), max(counts)), dtype=np.int64)
    starts = np.empty((len(chunks), max(counts) + 1), dtype=np.int64)
    query_starts = [0]
    positions, slots = [], []
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.request.blocks[:count]
        starts[row, :count] = chunk.request.layout.starts(count)
        starts[row, count:] = chunk.end
        query_starts.append(query_starts[-1] + chunk.num_tokens)
        at = np.arange(chunk.start, chunk.end)
        block = np.searchsorted(starts[row, :count], at, side="right") - 1
        positions.append(at)
        slots.append(tables[row, block] * block_size + at - starts[row, block])
    return kernels.PagedBatch(
        query_starts=query_starts,
        seq_lens=[c.end for c in chunks],
        block_tables=torch.from_numpy(tables),
        block_starts=torch.from_numpy(starts),
        slots=torch.from_numpy(np.concatenate(slots)),
        positions=torch.from_numpy(np.concatenate(positions)),
        shared_runs=_shared_runs(plan, block_size, sharing),
    )
