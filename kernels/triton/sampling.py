"""Sampling on the device: logits in, tokens out, and each sequence's seat moved on by one.

What is chosen is what `engine.sampler` chooses; its docstring defines the semantics. The
vocabulary is never sorted. It is cut into groups of consecutive tokens, and two kernels share
the work:

1. Many programs per row edit the logits and reduce each group to its largest value and its
   probability mass.
2. One program per row works on those few numbers first. Greedy: the first group with the
   largest value, then the first token in it. Otherwise the groups bound each filter's threshold
   from below, only groups that reach the bound are read again, and the exact threshold is found
   among their values by bisection. Then the token is drawn: first its group, then its place.

A filter is a threshold on the scaled logit (logit - largest) / temperature, so equals are kept
or dropped together. Every row is worked on by itself and in the same order whatever else is in
the batch; random numbers are a function of the sequence's seed and of its number of tokens
(`kernels.philox`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .steps import (
    BAN_STOPS,
    BIASED,
    EDITS,
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    NUM_LOGPROBS,
    NUM_OUTPUT,
    NUM_STOPS,
    POSITION,
    PRESENCE,
    REMAINING,
    REPETITION,
    SEAT_WIDTH,
    SEED_HIGH,
    SEED_LOW,
    STOPS,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
)
from .steps import MAX_STOPS as _MAX_STOPS

__all__ = ["BROKEN", "INACTIVE", "PROMPT_BIT", "SamplerWorkspace", "sample", "sampler_workspace"]

PROMPT_BIT: Final = 1 << 30
"""In `SamplerWorkspace.counts`: the token is in the prompt. The bits below count the output."""
INACTIVE = tl.constexpr(-1)
"""Instead of a token: the row had nothing to sample."""
BROKEN = tl.constexpr(-2)
"""Instead of a token: the logits hold NaN or +inf, or nothing that could be chosen."""

_WIDTH: Final = 21
"""Columns of the log-probabilities: the chosen token and up to 20 likeliest."""

# Launch parameters. A group is what a row is reduced to in the first kernel and read by in the
# second; tiles are in groups. The second kernel has one program for a whole row, hence the many
# warps. Which token is drawn may depend, within rounding, on the group's size only.
_GROUP: Final = 128
_FIRST_TILE, _FIRST_WARPS = 32, 8
_SECOND_TILE, _SECOND_WARPS = 64, 16

_LOG2E = tl.constexpr(1.4426950408889634)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_COUNT_BITS = tl.constexpr(PROMPT_BIT - 1)
_STOPS = tl.constexpr(_MAX_STOPS)
_BOUND_ROUNDS = tl.constexpr(12)
_BOUND_DEPTH = tl.constexpr(1000.0)
_NO_MASS_BELOW = tl.constexpr(-110.0)
_UNIFORM_STEP = tl.constexpr(2.0**-52)


@dataclass(frozen=True, slots=True)
class SamplerWorkspace:
    """What `sample` writes, and the tables that edit logits.

    E sequences at a time may have a row of the edit tables; the host writes the row when such a
    sequence joins. K steps of B rows fit into the outputs, V is the vocabulary's size.

    :param bias: [E, V] float32, added to the logits; -inf bans. Read where the seat says so.
    :param counts: [E, V] int32, how often each token is in the output, and `PROMPT_BIT` if it
        is in the prompt. The device counts what it samples.
    :param out_tokens: [K, B] int32: the token, `INACTIVE` or `BROKEN`.
    :param out_logprobs: [K, B, 21] float32: the chosen token's, then the likeliest ones'. Only
        what the seat asks for is written.
    :param out_ids: [K, B, 21] int32: the chosen token's rank, then the likeliest tokens, equals
        in order of id; -1 where the vocabulary has no more.
    :param edited: [E, V] float32, the edited logits of the step.
    :param tops: [2, B, G] float32, largest value of each group; first edited, then raw. As long
        as a step lasts, like the following.
    :param masses: [2, B, G] float32, sum of exp((x - top) / temperature) of each group; for raw
        logits without a temperature.
    :param listing: [B, G] int32, groups worth reading.
    :param kept: [B, G] float32, mass that the filters leave of those.
    """

    bias: Tensor
    counts: Tensor
    out_tokens: Tensor
    out_logprobs: Tensor
    out_ids: Tensor
    edited: Tensor
    tops: Tensor
    masses: Tensor
    listing: Tensor
    kept: Tensor


def sampler_workspace(
    max_batch: int,
    vocab_size: int,
    num_edit_rows: int,
    max_steps: int,
    device: torch.device | str,
) -> SamplerWorkspace:
    """Allocate all memory that sampling needs: mostly 12 bytes per edit row and token.

    :param max_batch: most rows of one step.
    :param vocab_size: width of the logits.
    :param num_edit_rows: sequences whose logits can be edited at the same time.
    :param max_steps: most steps whose outputs the host fetches together.
    """
    groups = triton.cdiv(vocab_size, _GROUP)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    table, row = (num_edit_rows, vocab_size), (max_batch, groups)
    return SamplerWorkspace(
        bias=torch.zeros(table, dtype=torch.float32, device=device),
        counts=torch.zeros(table, dtype=torch.int32, device=device),
        out_tokens=empty(max_steps, max_batch, dtype=torch.int32),
        out_logprobs=empty(max_steps, max_batch, _WIDTH, dtype=torch.float32),
        out_ids=empty(max_steps, max_batch, _WIDTH, dtype=torch.int32),
        edited=empty(*table, dtype=torch.float32),
        tops=empty(2, *row, dtype=torch.float32),
        masses=empty(2, *row, dtype=torch.float32),
        listing=empty(*row, dtype=torch.int32),
        kept=empty(*row, dtype=torch.float32),
    )


def sample(
    logits: Tensor,
    *,
    rows: Tensor,
    next_positions: Tensor,
    seats: Tensor,
    step: Tensor,
    workspace: SamplerWorkspace,
) -> None:
    """Sample one token per row, and advance its seat.

    The token goes to line `step` of the workspace's outputs and into the seat, which then has
    one token more, one less to go (none after a stop token), and is at the next position. A row
    whose seat is inactive changes nothing; where the logits are broken the seat ends.

    No seat may appear twice, the padding seat excepted.

    :param logits: [B, V], any float dtype, rows contiguous; not modified.
    :param rows: [B] int32, the seat of each row.
    :param next_positions: [B] int32, the position that the sampled token has in its sequence;
        0 or less: the row samples nothing (a prompt that is not complete yet).
    :param seats: [num_seats + 1, SEAT_WIDTH] int32, changed.
    :param step: [1] int32, line of the outputs, below the workspace's K; not changed.
    :param workspace: for at least B rows and of the same vocabulary; changed.
    """
    batch, vocab_size = logits.shape
    groups = workspace.tops.shape[2]
    sizes = {"V": vocab_size, "STRIDE": logits.stride(0), "GROUPS": groups, "GROUP": _GROUP}
    shared = (
        logits,
        workspace.edited,
        rows,
        next_positions,
        seats,
        workspace.tops,
        workspace.masses,
    )
    raw_offset = workspace.tops.stride(0)
    # Without fused multiply-add, edits are rounded as in `engine.sampler`.
    _reduce_kernel[(batch, triton.cdiv(groups, _FIRST_TILE))](
        *shared,
        workspace.bias,
        workspace.counts,
        RAW=raw_offset,
        TILE=_FIRST_TILE,
        num_warps=_FIRST_WARPS,
        enable_fp_fusion=False,
        **sizes,
    )
    _choose_kernel[(batch,)](
        *shared,
        workspace.counts,
        step,
        workspace.out_tokens,
        workspace.out_logprobs,
        workspace.out_ids,
        workspace.listing,
        workspace.kept,
        RAW=raw_offset,
        OUT_STRIDE=workspace.out_tokens.shape[1],
        OUT_WIDTH=_WIDTH,
        PADDED=triton.next_power_of_2(groups),
        TILE=_SECOND_TILE,
        num_warps=_SECOND_WARPS,
        **sizes,
    )


# --- First kernel: edit, and reduce to groups ---------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["rows", "next_positions"])
def _reduce_kernel(
    logits,
    edited,
    rows,
    next_positions,
    seats,
    tops,
    masses,
    bias,
    counts,
    RAW: tl.constexpr,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = seats + tl.load(rows + row).to(tl.int64) * SEAT_WIDTH
    if (tl.load(line + REMAINING) > 0) & (tl.load(next_positions + row) > 0):
        groups = tl.program_id(1) * TILE + tl.arange(0, TILE)
        ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = ids < V
        x = tl.load(logits + row * STRIDE + ids, mask=inside, other=-_INFINITY).to(tl.float32)
        # NaN counts as +inf from here on: a row whose largest value is not finite is broken.
        broken = (x != x) | (x == _INFINITY)
        x = tl.where(broken, _INFINITY, x)
        out = row * GROUPS + groups
        exists = groups < GROUPS
        if tl.load(line + NUM_LOGPROBS) >= 0:
            # -inf is worth the least finite value here, so that every token has a place.
            raw = tl.where(inside, tl.maximum(x, -_LARGEST), -_INFINITY)
            top = tl.max(raw, axis=1)
            tl.store(tops + RAW + out, top, mask=exists)
            tl.store(masses + RAW + out, _mass(raw, top, 1.0), mask=exists)
        edits = tl.load(line + EDITS).to(tl.int64)
        if edits >= 0:
            x = _edit(x, line, bias + edits * V, counts + edits * V, ids, inside)
            x = tl.where(broken | (x != x), _INFINITY, x)
            tl.store(edited + edits * V + ids, x, mask=inside)
        top = tl.max(x, axis=1)
        tl.store(tops + out, top, mask=exists)
        temperature = _float(line + TEMPERATURE)
        if temperature > 0.0:
            tl.store(masses + out, _mass(x, top, 1.0 / temperature), mask=exists)


@triton.jit
def _mass(x, top, scale):
    """Sum of exp((x - top) * scale) of each group, a row of x."""
    base = tl.where(top > -_INFINITY, top, 0.0)
    return tl.sum(tl.exp2((x - base[:, None]) * (scale * _LOG2E)), axis=1)


@triton.jit
def _edit(x, line, bias, counts, ids, inside):
    """Logits after bans, bias and penalties."""
    if tl.load(line + BIASED) != 0:
        x += tl.load(bias + ids, mask=inside, other=0.0)
    repetition = _float(line + REPETITION)
    presence = _float(line + PRESENCE)
    frequency = _float(line + FREQUENCY)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        history = tl.load(counts + ids, mask=inside, other=0)
        count = (history & _COUNT_BITS).to(tl.float32)
        # A tiny penalty may overflow; an infinity would turn into NaN later.
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(history != 0, tl.minimum(repeated, _LARGEST), x)
        x -= count * frequency + tl.where(count > 0.0, presence, 0.0)
    if (tl.load(line + BAN_STOPS) != 0) & (tl.load(line + NUM_OUTPUT) < tl.load(line + MIN_TOKENS)):
        for i in range(tl.load(line + NUM_STOPS)):
            x = tl.where(ids == tl.load(line + STOPS + i), -_INFINITY, x)
    return x


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


# --- Second kernel: choose, and advance -------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["rows", "next_positions"])
def _choose_kernel(
    logits,
    edited,
    rows,
    next_positions,
    seats,
    tops,
    masses,
    counts,
    step,
    out_tokens,
    out_logprobs,
    out_ids,
    listing,
    kept,
    RAW: tl.constexpr,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = seats + tl.load(rows + row).to(tl.int64) * SEAT_WIDTH
    position = tl.load(next_positions + row)
    remaining = tl.load(line + REMAINING)
    output = tl.load(step).to(tl.int64) * OUT_STRIDE + row
    token = INACTIVE + tl.zeros([], tl.int32)
    if (remaining > 0) & (position > 0):
        edits = tl.load(line + EDITS).to(tl.int64)
        num_output = tl.load(line + NUM_OUTPUT)
        min_tokens = tl.load(line + MIN_TOKENS)
        num_stops = tl.load(line + NUM_STOPS)
        num_logprobs = tl.load(line + NUM_LOGPROBS)
        temperature = _float(line + TEMPERATURE)
        columns = tl.arange(0, _STOPS)
        stops = tl.load(line + STOPS + columns, mask=columns < num_stops, other=-1)

        logits += row * STRIDE
        edited += tl.maximum(edits, 0) * V
        tops += row * GROUPS
        masses += row * GROUPS
        listing += row * GROUPS
        kept += row * GROUPS
        groups = tl.arange(0, PADDED)
        best = tl.load(tops + groups, mask=groups < GROUPS, other=-_INFINITY)
        largest = tl.max(best)
        if (largest == _INFINITY) | (largest == -_INFINITY):
            token = BROKEN + tl.zeros([], tl.int32)
        elif temperature > 0.0:
            mass = tl.load(masses + groups, mask=groups < GROUPS, other=0.0)
            seed_low = tl.load(line + SEED_LOW)
            seed_high = tl.load(line + SEED_HIGH)
            token = _draw(
                logits,
                edited,
                edits,
                best,
                mass,
                largest,
                1.0 / temperature,
                tl.load(line + TOP_K),
                _float(line + TOP_P),
                _float(line + MIN_P),
                _uniform(seed_low, seed_high, num_output),
                listing,
                kept,
                V,
                GROUPS,
                GROUP,
                PADDED,
                TILE,
            )
        else:
            group = tl.min(tl.where(best == largest, groups, PADDED))
            ids = group * GROUP + tl.arange(0, GROUP)
            x = _load(logits, edited, edits, ids, ids < V)
            token = tl.min(tl.where(x == largest, ids, V))

        # Every warp has read the seat before one of them changes it.
        tl.debug_barrier()
        if token >= 0:
            if num_logprobs >= 0:
                best = tl.load(tops + RAW + groups, mask=groups < GROUPS, other=-_INFINITY)
                mass = tl.load(masses + RAW + groups, mask=groups < GROUPS, other=0.0)
                _logprobs(
                    logits,
                    token,
                    best,
                    mass,
                    num_logprobs,
                    out_logprobs + output * OUT_WIDTH,
                    out_ids + output * OUT_WIDTH,
                    listing,
                    V,
                    GROUPS,
                    GROUP,
                    PADDED,
                    TILE,
                )
            if edits >= 0:
                count = counts + edits * V + token
                tl.store(count, tl.load(count) + 1)
            stopped = (tl.sum((stops == token).to(tl.int32)) > 0) & (num_output + 1 >= min_tokens)
            tl.store(line + TOKEN, token)
            tl.store(line + POSITION, position)
            tl.store(line + REMAINING, tl.where(stopped, 0, remaining - 1))
            tl.store(line + NUM_OUTPUT, num_output + 1)
        else:
            tl.store(line + REMAINING, 0)
    tl.store(out_tokens + output, token)


@triton.jit
def _load(logits, edited, edits, ids, inside):
    """Logits of tokens, edited where the sequence has edits; -inf outside the vocabulary."""
    row = tl.broadcast_to(edits, ids.shape)
    raw = tl.load(logits + ids, mask=inside & (row < 0), other=-_INFINITY).to(tl.float32)
    return tl.maximum(raw, tl.load(edited + ids, mask=inside & (row >= 0), other=-_INFINITY))


@triton.jit
def _load_scaled(source, ids, inside):
    logits, edited, edits, largest, scale = source
    return (_load(logits, edited, edits, ids, inside) - largest) * scale


@triton.jit
def _draw(
    logits,
    edited,
    edits,
    best,
    mass,
    largest,
    scale,
    top_k,
    top_p,
    min_p,
    uniform,
    listing,
    kept,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Filter, then choose by inverse transform. From here on values are scaled: (logit -
    largest) * scale, so 0 is the largest and exp(value) the weight, relative to it.
    """
    source = (logits, edited, edits, largest, scale)
    groups = tl.arange(0, PADDED)
    best = (best - largest) * scale
    mass *= tl.exp2(best * _LOG2E)
    floor = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -_INFINITY)
    filters_k = (top_k > 0) & (top_k < V)
    filtered = (min_p > 0.0) | filters_k | (top_p < 1.0)
    if filtered:
        total = tl.sum(mass)
        bound = floor
        if filters_k:
            bound = _bound(best, mass, False, top_k.to(tl.float32), floor, GROUP)
        listed = _list(listing, (best >= bound) & (groups < GROUPS), groups)
        if filters_k:
            floor = _threshold(
                source,
                listing,
                listed,
                False,
                top_k.to(tl.float32),
                tl.maximum(bound, -_LARGEST),
                V,
                GROUP,
                TILE,
            )
        if top_p < 1.0:
            if floor > -_INFINITY:
                total, _, _ = _measure(
                    source,
                    listing,
                    listed,
                    True,
                    floor,
                    V,
                    GROUP,
                    TILE,
                )
            target = total * top_p
            bound = _bound(best, mass, True, target, floor, GROUP)
            listed = _list(listing, (best >= bound) & (groups < GROUPS), groups)
            floor = _threshold(
                source,
                listing,
                listed,
                True,
                target,
                bound,
                V,
                GROUP,
                TILE,
            )
        for start in range(0, listed, TILE):
            value, inside, at = _listed(source, listing, listed, start, V, GROUP, TILE)
            weight = tl.where(inside & (value >= floor), tl.exp2(value * _LOG2E), 0.0)
            tl.store(kept + at, tl.sum(weight, axis=1), mask=at < listed)
        tl.debug_barrier()
        mass = tl.load(kept + groups, mask=groups < listed, other=0.0)

    # The group in which the sum of weights, in order of token id, first exceeds the target.
    ends = tl.cumsum(mass.to(tl.float64))
    target = tl.max(ends) * uniform
    at = _first_above(ends, mass, target, groups, PADDED)
    target -= tl.sum(tl.where(groups == at, ends - mass, 0.0))
    group = at
    if filtered:
        group = tl.load(listing + at)
    lanes = tl.arange(0, GROUP)
    ids = group * GROUP + lanes
    value = _load_scaled(source, ids, ids < V)
    weight = tl.where(value >= floor, tl.exp2(value * _LOG2E), 0.0)
    ends = tl.cumsum(weight.to(tl.float64))
    return group * GROUP + _first_above(ends, weight, target, lanes, GROUP)


@triton.jit
def _first_above(ends, weights, target, index, SIZE: tl.constexpr):
    """The first index with a weight whose sum is above the target; rounding may leave none, and
    then the last index with a weight. One without weight is never taken.
    """
    first = tl.min(tl.where((weights > 0.0) & (ends > target), index, SIZE))
    return tl.where(first < SIZE, first, tl.max(tl.where(weights > 0.0, index, 0)))


@triton.jit
def _bound(best, mass, BY_MASS: tl.constexpr, target, floor, GROUP: tl.constexpr):
    """A lower bound of `_threshold`'s result, from the groups alone; at least `floor`.

    A group whose best token reaches a value holds at least that token. By mass it holds all but
    its tokens below the value, and each of those at most GROUP - 1 weighs less than exp(value).
    """
    if BY_MASS:
        low = tl.maximum(floor, _NO_MASS_BELOW)
    else:
        deepest = tl.min(tl.where(best > -_INFINITY, best, 0.0))
        low = tl.maximum(floor, tl.maximum(deepest, -_BOUND_DEPTH))
        low = tl.where(tl.sum((best >= low).to(tl.float32)) >= target, low, floor)
    high = tl.zeros([], tl.float32)
    for _ in range(_BOUND_ROUNDS):
        middle = (low + high) * 0.5
        if BY_MASS:
            below = tl.exp2(middle * _LOG2E) * (GROUP - 1)
            share = tl.maximum(mass - below, tl.exp2(best * _LOG2E))
        else:
            share = tl.full(best.shape, 1.0, tl.float32)
        reached = tl.sum(tl.where(best >= middle, share, 0.0)) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _list(listing, wanted, groups):
    """Write the wanted groups' indices to `listing`, in order; their number."""
    # Other warps may still read what was listed before, and must see what is listed now.
    tl.debug_barrier()
    places = tl.cumsum(wanted.to(tl.int32))
    tl.store(listing + places - 1, groups, mask=wanted)
    tl.debug_barrier()
    return tl.max(places)


@triton.jit
def _listed(
    source,
    listing,
    listed,
    start,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scaled values of the listed groups from `start` on; whether each exists; places."""
    at = start + tl.arange(0, TILE)
    group = tl.load(listing + at, mask=at < listed, other=0)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (ids < V) & (at < listed)[:, None]
    return _load_scaled(source, ids, inside), inside, at


@triton.jit
def _measure(
    source,
    listing,
    listed,
    BY_MASS: tl.constexpr,
    pivot,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Number or mass of listed values at or above the pivot, the least of those, and the
    largest below.
    """
    measure = tl.zeros([TILE, GROUP], tl.float32)
    above = tl.full([TILE, GROUP], _INFINITY, tl.float32)
    below = tl.full([TILE, GROUP], -_INFINITY, tl.float32)
    for start in range(0, listed, TILE):
        value, inside, _ = _listed(source, listing, listed, start, V, GROUP, TILE)
        reached = inside & (value >= pivot)
        if BY_MASS:
            measure += tl.where(reached, tl.exp2(value * _LOG2E), 0.0)
        else:
            measure += reached.to(tl.float32)
        above = tl.minimum(above, tl.where(reached, value, _INFINITY))
        below = tl.maximum(below, tl.where(reached, -_INFINITY, value))
    return tl.sum(measure), tl.min(above), tl.max(below)


@triton.jit
def _threshold(
    source,
    listing,
    listed,
    BY_MASS: tl.constexpr,
    target,
    low,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest listed value such that those at or above it reach the target, by number or by
    mass; `low` if no larger one does.

    Bisection of the values' range. Both ends move on to values that exist, so it ends as soon
    as none is left between them.
    """
    high = tl.zeros([], tl.float32)
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        measure, above, below = _measure(
            source,
            listing,
            listed,
            BY_MASS,
            middle,
            V,
            GROUP,
            TILE,
        )
        enough = measure >= target
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
    return low


@triton.jit
def _uniform(seed_low, seed_high, position):
    """`kernels.philox.uniform` of one seed and position, in float64."""
    key_0 = _word(seed_low)
    key_1 = _word(seed_high)
    even_0 = _word(position)
    odd_0 = even_0 * 0
    even_1 = odd_0
    odd_1 = odd_0
    for _ in tl.static_range(10):
        product_0 = even_0 * 0xD2511F53
        product_1 = even_1 * 0xCD9E8D57
        even_0 = (product_1 >> 32) ^ odd_0 ^ key_0
        even_1 = (product_0 >> 32) ^ odd_1 ^ key_1
        odd_0 = product_1 & 0xFFFFFFFF
        odd_1 = product_0 & 0xFFFFFFFF
        key_0 = (key_0 + 0x9E3779B9) & 0xFFFFFFFF
        key_1 = (key_1 + 0xBB67AE85) & 0xFFFFFFFF
    # 52 bits: exact as a signed integer, whose conversion every device has.
    top = ((even_0 << 20) | (odd_0 >> 12)).to(tl.int64)
    return (top.to(tl.float64) + 0.5) * _UNIFORM_STEP


@triton.jit
def _word(value):
    return value.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _logprobs(
    logits,
    token,
    best,
    mass,
    num_logprobs,
    out_logprobs,
    out_ids,
    listing,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Log-probability and rank of the token, and of the likeliest ones, from raw logits."""
    groups = tl.arange(0, PADDED)
    lanes = tl.arange(0, GROUP)
    largest = tl.max(best)
    log_total = tl.log(tl.sum(mass * tl.exp2((best - largest) * _LOG2E)))
    chosen = tl.load(logits + token).to(tl.float32)
    listed = _list(listing, (best > chosen) & (groups < GROUPS), groups)
    higher = tl.zeros([TILE, GROUP], tl.int32)
    for start in range(0, listed, TILE):
        at = start + tl.arange(0, TILE)
        group = tl.load(listing + at, mask=at < listed, other=0)
        ids = group[:, None] * GROUP + lanes[None, :]
        inside = (ids < V) & (at < listed)[:, None]
        x = tl.load(logits + ids, mask=inside, other=-_INFINITY).to(tl.float32)
        higher += (x > chosen).to(tl.int32)
    tl.store(out_logprobs, chosen - largest - log_total)
    tl.store(out_ids, 1 + tl.sum(higher))
    # One after the other: from the first of the groups whose best is best, take the first such
    # token, and replace the group's best by its next. All that precedes the last one taken, by
    # value and then by id, has been taken.
    last = tl.full([], _INFINITY, tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for place in range(num_logprobs):
        value = tl.max(best)
        group = tl.min(tl.where(best == value, groups, PADDED))
        ids = group * GROUP + lanes
        x = tl.load(logits + ids, mask=ids < V, other=-_INFINITY).to(tl.float32)
        x = tl.where(ids < V, tl.maximum(x, -_LARGEST), -_INFINITY)
        x = tl.where((x < last) | ((x == last) & (ids > last_id)), x, -_INFINITY)
        last_id = tl.min(tl.where(x == value, ids, V))
        last = value
        logprob = tl.where(value > -_LARGEST, value - largest - log_total, -_INFINITY)
        tl.store(out_logprobs + 1 + place, logprob)
        tl.store(out_ids + 1 + place, tl.where(value > -_INFINITY, last_id, -1))
        rest = tl.where((x < value) | (ids > last_id), x, -_INFINITY)
        best = tl.where(groups == group, tl.max(rest), best)
