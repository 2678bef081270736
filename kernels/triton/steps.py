"""The state of running sequences on the device, and the kernels that begin a step.

Each running sequence has a *seat*: one row of three persistent tables. The host writes a seat
when the sequence joins or gets blocks; afterwards the device advances it by itself (`sampling`
writes the token, `prepare_decode` turns it into the next step's inputs), so that one captured
graph can be replayed many times without the host.

    buffer | seats [n + 1, 32] | block tables [n + 1, m] | block starts [n + 1, m + 1] | step |

Everything is int32 and lies in one buffer, so that one `scatter` carries all that changes. The
last seat belongs to nobody: rows that only fill up a batch point to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "BAN_STOPS",
    "BIASED",
    "EDITS",
    "FREQUENCY",
    "MAX_STOPS",
    "MIN_P",
    "MIN_TOKENS",
    "NUM_LOGPROBS",
    "NUM_OUTPUT",
    "NUM_STOPS",
    "POSITION",
    "PRESENCE",
    "REMAINING",
    "REPETITION",
    "SEAT_WIDTH",
    "SEED_HIGH",
    "SEED_LOW",
    "STOPS",
    "TAIL_BLOCK",
    "TAIL_START",
    "TEMPERATURE",
    "TOKEN",
    "TOP_K",
    "TOP_P",
    "SeatState",
    "embed_step",
    "pack_segments",
    "prepare_decode",
    "scatter",
    "seat_line",
    "seat_state",
]

SEAT_WIDTH = tl.constexpr(32)
"""int32 columns of a seat: 128 bytes, one cache line."""
MAX_STOPS: Final = 8
"""Most stop tokens that a seat holds."""

# Columns of a seat: constants for kernels, an index for NumPy; torch wants their `.value`.
TOKEN = tl.constexpr(0)  # the last token: the next one to be computed
POSITION = tl.constexpr(1)  # of that token
REMAINING = tl.constexpr(2)  # tokens it may still sample; 0: inactive
NUM_OUTPUT = tl.constexpr(3)  # tokens sampled so far
TAIL_BLOCK = tl.constexpr(4)  # index, in the block table, of the block that begins ...
TAIL_START = tl.constexpr(5)  # ... at this position; from there on blocks have no holes
SEED_LOW = tl.constexpr(6)
SEED_HIGH = tl.constexpr(7)
TEMPERATURE = tl.constexpr(8)  # float32; 0: greedy
TOP_K = tl.constexpr(9)  # 0: off
TOP_P = tl.constexpr(10)  # float32; 1: off
MIN_P = tl.constexpr(11)  # float32; 0: off
EDITS = tl.constexpr(12)  # row of the edit tables; -1: the logits are not edited
REPETITION = tl.constexpr(13)  # float32
PRESENCE = tl.constexpr(14)  # float32
FREQUENCY = tl.constexpr(15)  # float32
MIN_TOKENS = tl.constexpr(16)  # stop tokens end the sequence from this many tokens on
NUM_LOGPROBS = tl.constexpr(17)  # -1: none; 0: the chosen token's
NUM_STOPS = tl.constexpr(18)
STOPS = tl.constexpr(19)  # the first of MAX_STOPS columns, padded with -1
BIASED = tl.constexpr(27)  # whether the edit row's bias counts
BAN_STOPS = tl.constexpr(28)  # whether stop tokens are banned before MIN_TOKENS

_GREEDY_BELOW: Final = 1e-5
_INT32_MAX: Final = 2**31 - 1

# Launch parameters: elements per program and iteration, and warps.
_SCATTER_BLOCK: Final = 1024
_EMBED_BLOCK: Final = 2048
_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class SeatState:
    """Views of one flat buffer on the device.

    :param buffer: all of it, flat.
    :param seats: [num_seats + 1, SEAT_WIDTH].
    :param block_tables: [num_seats + 1, max_blocks], blocks of the pool in order.
    :param block_starts: [num_seats + 1, max_blocks + 1], position of each block's first token.
    :param step: [1], which of several steps in a row this is: the line of their outputs.
    """

    buffer: Tensor
    seats: Tensor
    block_tables: Tensor
    block_starts: Tensor
    step: Tensor

    def seat_offset(self, seat: int) -> int:
        """Where the line of a seat begins in the buffer."""
        return seat * int(SEAT_WIDTH)

    def table_offset(self, seat: int, block: int = 0) -> int:
        """Where the `block`-th entry of a seat's block table is in the buffer."""
        return self.seats.numel() + seat * self.block_tables.shape[1] + block

    def starts_offset(self, seat: int, block: int = 0) -> int:
        """Where the `block`-th entry of a seat's block starts is in the buffer."""
        before = self.seats.numel() + self.block_tables.numel()
        return before + seat * self.block_starts.shape[1] + block

    @property
    def step_offset(self) -> int:
        """Where `step` is in the buffer."""
        return self.buffer.numel() - 1


def seat_state(num_seats: int, max_blocks: int, device: torch.device | str) -> SeatState:
    """Allocate the state; every seat is inactive.

    :param num_seats: sequences that can run at once; the padding seat has this index.
    :param max_blocks: most blocks of one sequence.
    """
    rows = num_seats + 1
    shapes = [(rows, int(SEAT_WIDTH)), (rows, max_blocks), (rows, max_blocks + 1), (1,)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    views = (part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True))
    return SeatState(buffer, *views)


def seat_line(
    *,
    token: int,
    position: int,
    remaining: int,
    tail_block: int,
    tail_start: int,
    seed: int,
    num_output: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    edits: int = -1,
    biased: bool = False,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    min_tokens: int = 0,
    ban_stops: bool = True,
    num_logprobs: int = -1,
    stops: Sequence[int] = (),
) -> NDArray[np.int32]:
    """One sequence's line of `SeatState.seats`.

    The sampling parameters are those of `SamplingParams`.

    :param token: the last token, computed next; anything while the prompt is computed.
    :param position: of that token.
    :param remaining: tokens it may still sample, at least 1 for the seat to be active.
    :param tail_block: index in the block table of the block that begins at `tail_start`; from
        there on every block is filled before the next.
    :param seed: the sequence's own; the low 64 bits count.
    :param num_output: tokens sampled so far.
    :param edits: the row of the edit tables that is this sequence's own; -1: none.
    :param biased: whether the bias of that row counts; False: it may hold anything.
    :param ban_stops: whether `stops` are banned before `min_tokens`; False: they may come, and
        do not end the sequence (where nothing else is allowed).
    :param num_logprobs: -1: none; otherwise of the chosen token and of this many likeliest.
    :param stops: tokens that end the sequence.
    :return: [SEAT_WIDTH].
    :raises ValueError: if there are more than `MAX_STOPS` stops, or if there is something to
        edit and no row for it.
    """
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop tokens; a seat holds {MAX_STOPS}")
    bans = ban_stops and len(stops) > 0 and num_output < min_tokens
    penalties = repetition != 1.0 or presence != 0.0 or frequency != 0.0
    if edits < 0 and (biased or bans or penalties):
        raise ValueError(
            "a bias, penalties and min_tokens with stops need a row of the edit tables"
        )
    line = np.zeros(int(SEAT_WIDTH), dtype=np.int32)
    words, floats = line.view(np.uint32), line.view(np.float32)
    line[TOKEN], line[POSITION], line[REMAINING] = token, position, remaining
    line[NUM_OUTPUT], line[TAIL_BLOCK], line[TAIL_START] = num_output, tail_block, tail_start
    words[SEED_LOW], words[SEED_HIGH] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    # What is greedy is decided here, before float32 rounds it.
    floats[TEMPERATURE] = 0.0 if temperature < _GREEDY_BELOW else temperature
    line[TOP_K], floats[TOP_P], floats[MIN_P] = min(top_k, _INT32_MAX), top_p, min_p
    line[EDITS], line[BIASED], line[BAN_STOPS] = edits, biased, ban_stops
    floats[REPETITION], floats[PRESENCE], floats[FREQUENCY] = repetition, presence, frequency
    line[MIN_TOKENS], line[NUM_LOGPROBS] = min(min_tokens, _INT32_MAX), num_logprobs
    line[NUM_STOPS] = len(stops)
    line[STOPS.value : STOPS.value + MAX_STOPS] = -1
    line[STOPS.value : STOPS.value + len(stops)] = stops
    return line


def pack_segments(segments: Sequence[tuple[int, NDArray[np.int32]]]) -> NDArray[np.int32]:
    """One staging array of all that `scatter` is to write.

    :param segments: (destination, values): offset in the buffer, and a flat array. They must
        not overlap.
    :return: n triples (destination, source offset, length), then the payload.
    """
    header = np.empty((len(segments), 3), dtype=np.int32)
    header[:, 0] = [destination for destination, _ in segments]
    header[:, 2] = [len(values) for _, values in segments]
    ends = header[:, 2].cumsum()
    header[:, 1] = header.size + ends - header[:, 2]
    return np.concatenate([header.ravel(), *(values for _, values in segments)], dtype=np.int32)


def scatter(buffer: Tensor, staging: Tensor, num_segments: int) -> None:
    """Write ranges of values into `buffer`.

    :param buffer: int32, flat; changed.
    :param staging: int32, on the same device: what `pack_segments` made.
    :param num_segments: how many segments that are.
    """
    if num_segments > 0:
        _scatter_kernel[(num_segments,)](buffer, staging, BLOCK=_SCATTER_BLOCK, num_warps=_WARPS)


def prepare_decode(
    state: SeatState,
    rows: Tensor,
    embedding: Tensor,
    *,
    block_size: int,
    positions: Tensor,
    kv_slots: Tensor,
    seq_lens: Tensor,
    block_counts: Tensor,
    hidden: Tensor,
) -> None:
    """Turn each seat's last token into the inputs of a decode step, and count the step.

    A row whose seat is inactive gets position 0, no slot (-1), length 0, no blocks, and a hidden
    state that is finite. `seq_lens` is also the position of the token that is sampled next.

    :param state: read; `state.step` grows by one.
    :param rows: [B] int32, the seat of each row.
    :param embedding: [vocab, hidden_size].
    :param block_size: tokens per block of the pool.
    :param positions: [B] int32, written.
    :param kv_slots: [B] int64, written: block * block_size + offset.
    :param seq_lens: [B] int32, written: tokens, this one included.
    :param block_counts: [B] int32, written: blocks in use.
    :param hidden: [B, hidden_size], the embedding's dtype; written.
    """
    size = embedding.shape[1]
    _prepare_decode_kernel[(rows.shape[0],)](
        state.seats,
        state.block_tables,
        state.step,
        rows,
        embedding,
        positions,
        kv_slots,
        seq_lens,
        block_counts,
        hidden,
        MAX_BLOCKS=state.block_tables.shape[1],
        BLOCK_SIZE=block_size,
        SIZE=size,
        BLOCK=min(_EMBED_BLOCK, triton.next_power_of_2(size)),
        num_warps=_WARPS,
    )


def embed_step(seats: Tensor, token_ids: Tensor, embedding: Tensor, hidden: Tensor) -> None:
    """Embed tokens, some of which only the device knows.

    :param seats: [num_seats + 1, SEAT_WIDTH].
    :param token_ids: [T] int32; -(seat + 1) stands for the last token of that seat.
    :param embedding: [vocab, hidden_size].
    :param hidden: [T, hidden_size], the embedding's dtype; written.
    """
    size = embedding.shape[1]
    _embed_kernel[(token_ids.shape[0],)](
        seats,
        token_ids,
        embedding,
        hidden,
        SIZE=size,
        BLOCK=min(_EMBED_BLOCK, triton.next_power_of_2(size)),
        num_warps=_WARPS,
    )


# The arrays that the host sends may begin anywhere; that must not compile a kernel anew.
@triton.jit(do_not_specialize_on_alignment=["staging"])
def _scatter_kernel(buffer, staging, BLOCK: tl.constexpr):
    header = staging + tl.program_id(0) * 3
    destination = tl.load(header)
    source = tl.load(header + 1)
    length = tl.load(header + 2)
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < length
        values = tl.load(staging + source + offsets, mask=inside)
        tl.store(buffer + destination + offsets, values, mask=inside)


@triton.jit
def _copy_row(source, destination, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.static_range(0, SIZE, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < SIZE
        tl.store(destination + offsets, tl.load(source + offsets, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _prepare_decode_kernel(
    seats,
    block_tables,
    step,
    rows,
    embedding,
    positions,
    kv_slots,
    seq_lens,
    block_counts,
    hidden,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row == 0:
        tl.store(step, tl.load(step) + 1)
    seat = tl.load(rows + row).to(tl.int64)
    line = seats + seat * SEAT_WIDTH
    active = tl.load(line + REMAINING) > 0
    position = tl.load(line + POSITION)
    past_tail = position - tl.load(line + TAIL_START)
    block = tl.load(line + TAIL_BLOCK) + past_tail // BLOCK_SIZE
    # Of an inactive seat everything may be stale, so nothing of it is used as an address.
    block_id = tl.load(block_tables + seat * MAX_BLOCKS + block, mask=active, other=0)
    slot = block_id.to(tl.int64) * BLOCK_SIZE + past_tail % BLOCK_SIZE
    tl.store(positions + row, tl.where(active, position, 0))
    tl.store(kv_slots + row, tl.where(active, slot, -1))
    tl.store(seq_lens + row, tl.where(active, position + 1, 0))
    tl.store(block_counts + row, tl.where(active, block + 1, 0))
    token = tl.where(active, tl.load(line + TOKEN), 0).to(tl.int64)
    _copy_row(embedding + token * SIZE, hidden + row.to(tl.int64) * SIZE, SIZE, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _embed_kernel(seats, token_ids, embedding, hidden, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + row)
    on_device = token < 0
    seat = (-token - 1).to(tl.int64)
    token = tl.load(seats + seat * SEAT_WIDTH + TOKEN, mask=on_device, other=0) + tl.where(
        on_device, 0, token
    )
    _copy_row(embedding + token.to(tl.int64) * SIZE, hidden + row * SIZE, SIZE, BLOCK)
