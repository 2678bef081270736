"""Who sits where on the device: the host's side of the per-sequence state that stays there.

A sequence that runs has a *seat*: a line with its next token, position and sampling parameters,
and a line of the block tables. The device moves a seat on by itself from token to token; the host
writes to it only when a sequence comes or gets a block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragserve.kernels import philox
from ragserve.kernels import triton as ops

from ..scheduling.request import Request
from .stream import Staging

__all__ = ["Seats", "samples_on_host"]


def samples_on_host(request: Request) -> bool:
    """Whether a request asks for what the device's sampler cannot do by itself."""
    params = request.params
    if any(len(word) > 1 for word in request.bad_word_ids):
        return True  # which token is banned depends on the tokens before
    if params.min_tokens == 0:
        return False
    if len(request.stop_token_ids) > ops.MAX_STOPS:
        return True  # all of them have to be banned at first, and a seat holds only so many
    # With few tokens allowed the bans may leave none, and then have to wait.
    return params.allowed_token_ids is not None


class Seats:
    """Seats of the sequences that run.

    :param num_seats: most sequences at a time.
    :param max_blocks: most blocks of a sequence.
    :param workspace: holds the edit tables; a seat's row has the seat's number.
    :ivar state: the tensors; their last seat belongs to nobody, for padding.
    :ivar tenures: of each seat, a number of its own for every sequence that has had it.
    """

    def __init__(
        self,
        num_seats: int,
        max_blocks: int,
        workspace: ops.SamplerWorkspace,
        staging: Staging,
        device: torch.device,
    ) -> None:
        self.num_seats = num_seats
        self.state = ops.seat_state(num_seats, max_blocks, device)
        self.tables: NDArray[np.int32] = np.zeros((num_seats + 1, max_blocks), dtype=np.int32)
        self.starts: NDArray[np.int32] = np.zeros((num_seats + 1, max_blocks + 1), dtype=np.int32)
        """The host's copies of the block tables, by seat."""
        self._workspace = workspace
        self._staging = staging
        self._free = list(range(num_seats - 1, -1, -1))
        self._seats: dict[Request, int] = {}
        self._num_blocks = [0] * num_seats
        self.tenures = [0] * num_seats
        self._num_tenures = 0
        self._updates: list[tuple[int, NDArray[np.int32]]] = []

    def release(self, requests: list[Request]) -> None:
        """Free the seats of those that have one."""
        for request in requests:
            seat = self._seats.pop(request, None)
            if seat is not None:
                self._free.append(seat)

    def seat(self, request: Request) -> int:
        """The request's seat, with all its blocks in the table; a newcomer gets one."""
        seat = self._seats.get(request)
        if seat is None:
            seat = self._seats[request] = self._free.pop()
            self._num_blocks[seat] = 0
            self._num_tenures += 1
            self.tenures[seat] = self._num_tenures
            self._join(seat, request)
        known = self._num_blocks[seat]
        if len(request.blocks) > known:
            new = np.array(request.blocks[known:], dtype=np.int32)
            self.tables[seat, known : len(request.blocks)] = new
            self._updates.append((self.state.table_offset(seat, known), new))
            self._num_blocks[seat] = len(request.blocks)
        return seat

    def set_step(self, value: int) -> None:
        """Set the line of the output that is written next."""
        self._updates.append((self.state.step_offset, np.array([value], dtype=np.int32)))

    def flush(self) -> None:
        """Bring the device up to date, in the stream's order."""
        if self._updates:
            staged = self._staging.upload(ops.pack_segments(self._updates))
            ops.scatter(self.state.buffer, staged, len(self._updates))
            self._updates = []

    def _join(self, seat: int, request: Request) -> None:
        layout = request.layout
        tail = layout.num_blocks(request.num_prompt_tokens) - 1
        most = layout.num_blocks(request.num_prompt_tokens + request.max_tokens)
        starts = self.starts[seat, : most + 1]
        starts[:] = layout.starts(most + 1)
        self._updates.append((self.state.starts_offset(seat), starts.copy()))
        params = request.params
        bias, counts = self._edits(request)
        if bias is not None:
            self._set_row(self._workspace.bias, seat, bias, torch.float32)
        if counts is not None:
            self._set_row(self._workspace.counts, seat, counts, torch.int32)
        stops = sorted(request.stop_token_ids)
        needs_ban = params.min_tokens > 0 and bool(stops) and not request.samples_on_host
        edits = bias is not None or counts is not None or needs_ban
        line = ops.seat_line(
            token=0,
            position=0,
            remaining=request.max_tokens - len(request.output_token_ids),
            num_output=len(request.output_token_ids),
            tail_block=tail,
            tail_start=layout.start(tail),
            seed=philox.derive_seed(request.seed, request.index),
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            edits=seat if edits else -1,
            biased=bias is not None,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            min_tokens=params.min_tokens if needs_ban else 0,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            # More than fit are left to the host, which looks at each token anyway.
            stops=stops if len(stops) <= ops.MAX_STOPS else (),
        )
        self._updates.append((self.state.seat_offset(seat), line))

    def _edits(
        self, request: Request
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None]:
        """What is added to a sequence's logits, and how often each token was there."""
        params = request.params
        if request.samples_on_host:
            return None, None
        vocab_size = self._workspace.bias.shape[1]
        bias: NDArray[np.float32] | None = None
        banned = [word[0] for word in request.bad_word_ids if word[0] < vocab_size]
        if params.allowed_token_ids is not None or params.logit_bias or banned:
            bias = np.zeros(vocab_size, dtype=np.float32)
            allowed = params.allowed_token_ids
            if allowed is not None:
                bias[:] = -np.inf
                bias[list(allowed)] = 0.0
            # Bans that would leave nothing to choose wait.
            if banned and not set(banned).issuperset(allowed or range(vocab_size)):
                bias[banned] = -np.inf
            for token_id, value in (params.logit_bias or {}).items():
                bias[token_id] += value
        counts: NDArray[np.int32] | None = None
        if (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        ):
            output = np.array(request.output_token_ids, dtype=np.int64)
            counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
            counts[request.prompt_token_ids] |= np.int32(ops.PROMPT_BIT)
        return bias, counts

    def _set_row(
        self, table: Tensor, row: int, values: NDArray[np.float32 | np.int32], dtype: torch.dtype
    ) -> None:
        staged = self._staging.upload(values.view(np.int32))
        table[row].copy_(staged.view(dtype))
