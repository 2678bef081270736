"""The Triton sampler and the state on the device, against `engine.sampler` and NumPy.

    TRITON_INTERPRET=1 python -P -m pytest tests/kernels/test_triton_sampling.py

Without the variable they run on a GPU, if there is one, and then with real vocabularies too.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragserve.engine.execution.sampler import InvalidLogitsError, Sampler, SamplingState
from ragserve.engine.sampling_params import SamplingParams
from ragserve.kernels import philox

triton = pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
if not (ON_GPU or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402

from ragserve.kernels.triton import sampling, steps  # noqa: E402

# In the interpreter, NumPy warns of infinities that are meant.
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
EXAMPLES = 40 if ON_GPU else 7
NAN, INF = math.nan, math.inf


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# --- Seats ------------------------------------------------------------------------------------


def line(**fields):
    base = {"token": 3, "position": 7, "remaining": 5, "tail_block": 0, "tail_start": 0, "seed": 0}
    return steps.seat_line(**{**base, **fields})


def test_a_seat_holds_what_it_is_given():
    made = line(seed=-2, temperature=0.7, top_k=10**12, top_p=0.9, stops=[4, 5], num_logprobs=2)
    assert made.shape == (steps.SEAT_WIDTH,)
    assert made.dtype == np.int32
    assert [made[c] for c in (steps.TOKEN, steps.POSITION, steps.REMAINING)] == [3, 7, 5]
    assert made[steps.SEED_LOW] == -2
    assert made[steps.SEED_HIGH] == -1
    floats = made.view(np.float32)
    assert floats[steps.TEMPERATURE] == np.float32(0.7)
    assert floats[steps.TOP_P] == np.float32(0.9)
    assert floats[steps.REPETITION] == 1.0
    assert made[steps.TOP_K] == 2**31 - 1
    assert made[steps.STOPS.value :][:8].tolist() == [4, 5] + [-1] * 6
    assert made[steps.NUM_STOPS] == 2
    assert line(temperature=0.99e-5)[steps.TEMPERATURE] == 0
    assert line(temperature=1e-5)[steps.TEMPERATURE] != 0


def test_a_seat_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="9 stop tokens; a seat holds 8"):
        line(stops=range(9))
    for fields in (
        {"biased": True},
        {"repetition": 1.1},
        {"presence": 0.1},
        {"frequency": 0.1},
        {"min_tokens": 2, "stops": [1]},
    ):
        with pytest.raises(ValueError, match="need a row"):
            line(**fields)
        line(**fields, edits=0)
    line(min_tokens=2)
    line(min_tokens=2, stops=[1], num_output=2)
    line(min_tokens=2, stops=[1], ban_stops=False)


def test_the_views_tile_the_buffer():
    state = steps.seat_state(3, 5, DEVICE)
    state.buffer.copy_(torch.arange(state.buffer.numel()))
    assert state.seats[2, 0] == state.seat_offset(2)
    assert state.block_tables[2, 3] == state.table_offset(2, 3)
    assert state.block_starts[3, 5] == state.starts_offset(3, 5)
    assert state.step[0] == state.step_offset
    assert state.block_starts[3, 5] + 1 == state.step[0]
    assert (state.seats.shape, state.block_tables.shape) == ((4, 32), (4, 5))


@given(st.lists(st.integers(0, 2500), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(deadline=None, derandomize=True, max_examples=EXAMPLES)
def test_scatter_writes_ranges_and_nothing_else(lengths, seed):
    generator = np.random.default_rng(seed)
    expected = generator.integers(-(2**31), 2**31, 16_000, dtype=np.int32)
    buffer = torch.from_numpy(expected.copy()).to(DEVICE)
    segments, at = [], 0
    for length in lengths:
        at += int(generator.integers(0, 50))
        segments.append((at, generator.integers(-9, 9, length, dtype=np.int32)))
        expected[at : at + length] = segments[-1][1]
        at += length
    order = generator.permutation(len(segments))
    staging = steps.pack_segments([segments[i] for i in order])
    assert staging.dtype == np.int32
    assert len(staging) == 3 * len(segments) + sum(lengths)
    steps.scatter(buffer, torch.from_numpy(staging).to(DEVICE), len(segments))
    assert (buffer.cpu().numpy() == expected).all()


def test_scatter_of_nothing():
    assert steps.pack_segments([]).shape == (0,)
    buffer = torch.arange(4, dtype=torch.int32, device=DEVICE)
    steps.scatter(buffer, torch.zeros(0, dtype=torch.int32, device=DEVICE), 0)
    assert buffer.tolist() == [0, 1, 2, 3]


@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 32]), st.sampled_from([24, 2500]))
@settings(deadline=None, derandomize=True, max_examples=EXAMPLES)
def test_prepare_decode_turns_seats_into_inputs(seed, block_size, hidden_size):
    generator = np.random.default_rng(seed)
    state = steps.seat_state(6, 9, DEVICE)
    # What no seat owns holds anything.
    state.buffer.random_(-(2**31), 2**31 - 1)
    state.step.fill_(-1)
    tables = generator.permutation(7 * 9).reshape(7, 9).astype(np.int32)
    state.block_tables.copy_(torch.from_numpy(tables))
    embedding = torch.randn(50, hidden_size, device=DEVICE)
    expected = {}
    for seat in range(7):
        state.seats[seat, steps.REMAINING.value] = int(generator.integers(-3, 1))
        if seat in (1, 3, 4):
            tail_block, tail_start = int(generator.integers(0, 4)), int(generator.integers(0, 90))
            offset = int(generator.integers(0, 5 * block_size))
            position, token = tail_start + offset, int(generator.integers(0, 50))
            made = line(
                token=token, position=position, tail_block=tail_block, tail_start=tail_start
            )
            state.seats[seat] = torch.from_numpy(made)
            block = tail_block + offset // block_size
            slot = int(tables[seat, block]) * block_size + offset % block_size
            expected[seat] = (position, slot, position + 1, block + 1, token)
    rows = [3, 6, 1, 0, 4, 6]
    out = {
        "positions": ints(*[-9] * 6),
        "kv_slots": torch.full((6,), -9, dtype=torch.int64, device=DEVICE),
        "seq_lens": ints(*[-9] * 6),
        "block_counts": ints(*[-9] * 6),
        "hidden": torch.full((6, hidden_size), NAN, device=DEVICE),
    }
    before = state.buffer.clone()
    for _ in range(2):
        steps.prepare_decode(state, ints(*rows), embedding, block_size=block_size, **out)
    want = [expected.get(seat, (0, -1, 0, 0, 0)) for seat in rows]
    found = zip(*(out[name].tolist() for name in list(out)[:4]), strict=True)
    assert list(found) == [one[:4] for one in want]
    assert torch.equal(out["hidden"], embedding[[one[4] for one in want]])
    assert state.step.item() == 1
    assert torch.equal(state.buffer[:-1], before[:-1])


def test_embed_step_takes_tokens_from_the_host_and_from_seats():
    state = steps.seat_state(4, 3, DEVICE)
    state.seats[:, steps.TOKEN.value] = ints(10, 11, 12, 13, 14)
    embedding = torch.randn(20, 70, device=DEVICE)
    hidden = torch.empty(5, 70, device=DEVICE)
    steps.embed_step(state.seats, ints(3, -1, 0, -4, 19), embedding, hidden)
    assert torch.equal(hidden, embedding[[3, 10, 0, 13, 19]])


# --- Random numbers ---------------------------------------------------------------------------


@triton.jit
def uniform_kernel(seeds, positions, out):
    i = tl.program_id(0)
    low, high = tl.load(seeds + 2 * i), tl.load(seeds + 2 * i + 1)
    tl.store(out + i, sampling._uniform(low, high, tl.load(positions + i)))


def test_the_device_draws_the_numbers_of_the_host():
    seeds = [0, -1, 1, 2**63 - 1, -(2**63), *np.random.default_rng(0).integers(-9, 2**62, 20)]
    positions = [0, 2**31 - 1, *range(len(seeds) - 2)]
    words = torch.tensor([int(seed) for seed in seeds]).view(torch.int32).to(DEVICE)
    out = torch.zeros(len(seeds), dtype=torch.float64, device=DEVICE)
    uniform_kernel[(len(seeds),)](words, ints(*positions), out)
    assert out.tolist() == philox.uniform([int(seed) for seed in seeds], positions).tolist()


@functools.cache
def extreme_seeds():
    """Seeds of which the first number is very close to 0 and to 1."""
    numbers = philox.uniform(range(200_000), [0] * 200_000)
    assert numbers.min() < 3e-5
    assert numbers.max() > 1 - 3e-5
    return int(numbers.argmin()), int(numbers.argmax())


# --- The sampler ------------------------------------------------------------------------------


def state(*, seed=0, prompt=(), output=(), eos=(), bad=(), **fields):
    params = SamplingParams(**fields)
    return SamplingState(params, seed, list(prompt), list(output), frozenset(eos), tuple(bad))


class Rig:
    """Seats for sequences, in some order, and what the host does for them.

    `None` instead of a sequence is a row that fills up the batch.
    """

    def __init__(self, vocab, sequences, *, seats=None, remaining=100, max_steps=8):
        self.vocab = vocab
        self.sequences = sequences
        self.seats = seats or list(range(len(sequences)))
        count = len(sequences)
        self.state = steps.seat_state(max(self.seats) + 1, 4, DEVICE)
        self.padding = max(self.seats) + 1
        self.workspace = sampling.sampler_workspace(count + 1, vocab, count, max_steps, DEVICE)
        for name in ("edited", "tops", "masses", "out_logprobs", "kept"):
            getattr(self.workspace, name).fill_(NAN)
        self.workspace.bias.fill_(NAN)
        for i, (seat, sequence) in enumerate(zip(self.seats, sequences, strict=True)):
            if sequence is not None:
                made = self.join(count - 1 - i, sequence, remaining)
                self.state.seats[seat] = torch.from_numpy(made)

    def join(self, row, sequence, remaining):
        params = sequence.params
        ending = sorted(sequence._ending)
        waiting = sequence._leaves_nothing(set(ending), self.vocab)
        bans = [word[0] for word in sequence.bad_word_ids if len(word) == 1]
        bias = torch.zeros(self.vocab)
        if params.allowed_token_ids is not None:
            bias.fill_(-INF)
            bias[list(params.allowed_token_ids)] = 0.0
        bias[bans] = -INF
        for token_id, value in (params.logit_bias or {}).items():
            bias[token_id] += value
        biased = bool(params.allowed_token_ids is not None or bans or params.logit_bias)
        if biased:
            self.workspace.bias[row] = bias
        counts = torch.zeros(self.vocab, dtype=torch.int32)
        for token_id in sequence.output_token_ids:
            counts[token_id] += 1
        counts[list(sequence.prompt_token_ids)] |= sampling.PROMPT_BIT
        self.workspace.counts[row] = counts
        return line(
            remaining=remaining,
            seed=sequence.seed,
            num_output=len(sequence.output_token_ids),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            edits=row if sequence._has_edits else -1,
            biased=biased,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            min_tokens=params.min_tokens,
            ban_stops=not waiting,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            stops=ending,
        )

    def sample(self, logits, step=0, positions=None):
        """One step; the tokens, or the codes instead of them."""
        self.state.step.fill_(step)
        count = len(self.sequences)
        rows = [
            self.padding if sequence is None else seat
            for seat, sequence in zip(self.seats, self.sequences, strict=True)
        ]
        self.workspace.listing.fill_(-1)
        self.workspace.out_tokens.fill_(-9)
        sampling.sample(
            logits,
            rows=ints(*rows),
            next_positions=ints(*(positions or [8] * count)),
            seats=self.state.seats,
            step=self.state.step,
            workspace=self.workspace,
        )
        assert self.state.step.item() == step
        assert (self.workspace.out_tokens[step, count:] == -9).all()
        return self.workspace.out_tokens[step, :count].tolist()

    def seat(self, i):
        return self.state.seats[self.seats[i]].tolist()


def as_logits(values, dtype=torch.float32):
    return torch.as_tensor(np.asarray(values), dtype=torch.float32).to(dtype).to(DEVICE)


def edited(row, sequence):
    """The sequence's logits in float32, edited as `engine.sampler` edits them."""
    row = row.float().cpu().clone()
    if sequence._has_edits:
        sequence._edit(row)
    return row.numpy()


def kept_weights(row, params, slack):
    """Weights in float64 that the filters leave; `slack` moves every threshold a little."""
    scaled = (row.astype(np.float64) - float(row.max())) / params.temperature
    floor = math.log(params.min_p) if params.min_p > 0 else -INF
    if 0 < params.top_k < len(row):
        floor = max(floor, np.sort(scaled)[-params.top_k])
    width = abs(slack) * (1 + np.abs(scaled).clip(max=100))
    floor_of = floor - math.copysign(1.0, slack) * width
    weights = np.where(scaled >= floor_of, np.exp(scaled), 0.0)
    if params.top_p < 1.0:
        mass = np.cumsum(np.sort(weights)[::-1])
        last = np.searchsorted(mass, params.top_p * mass[-1] * (1 + slack))
        least = np.sort(weights)[::-1][min(last, len(row) - 1)]
        # Equals are kept together; those that rounding may make equal only if more may be kept.
        weights = np.where(weights >= least * (1 - max(slack, 0.0)), weights, 0.0)
    return weights


def acceptable(row, sequence, token_id):
    """Whether a token is right up to rounding: u is within 1e-5 of its share of the interval,
    for the filters' thresholds as they are or moved a little.
    """
    row = edited(row, sequence)
    if sequence.params.is_greedy:
        return token_id == row.argmax()
    (uniform,) = philox.uniform([sequence.seed], [len(sequence.output_token_ids)])
    for slack in (0.0, 1e-6, -1e-6):
        weights = kept_weights(row, sequence.params, slack)
        ends = np.cumsum(weights / weights.sum())
        begin = ends[token_id] - weights[token_id] / weights.sum()
        if weights[token_id] > 0 and begin - 1e-5 <= uniform <= ends[token_id] + 1e-5:
            return True
    return False


def check_step(rig, logits, step=0):
    """Sample, compare with the CPU's sampler, and let the sequences grow. The tokens."""
    live = [i for i, one in enumerate(rig.sequences) if one is not None]
    live = [i for i in live if rig.seat(i)[steps.REMAINING.value] > 0]
    tokens = rig.sample(logits, step)
    cpu = logits.float().cpu()
    expected = Sampler(rig.vocab)(cpu[live], [rig.sequences[i] for i in live])
    assert all(token == -1 for i, token in enumerate(tokens) if i not in live)
    for i, reference in zip(live, expected, strict=True):
        sequence, token_id = rig.sequences[i], tokens[i]
        if token_id != reference.token_id:
            assert acceptable(cpu[i], sequence, token_id), (i, token_id, reference, sequence)
        if sequence.params.logprobs is not None:
            check_logprobs(rig, step, i, cpu[i], token_id)
        sequence.output_token_ids.append(token_id)
    return tokens


def check_logprobs(rig, step, i, row, token_id):
    width = rig.sequences[i].params.logprobs
    (expected,) = Sampler(rig.vocab).prompt_logprobs(row[None], [token_id], width)
    logprobs = rig.workspace.out_logprobs[step, i].tolist()
    ids = rig.workspace.out_ids[step, i].tolist()
    assert ids[0] == expected.rank
    assert logprobs[0] == pytest.approx(expected.logprob, abs=1e-4)
    size = min(width, rig.vocab)
    assert ids[1 : 1 + width] == [t for t, _ in expected.top] + [-1] * (width - size)
    assert logprobs[1 : 1 + size] == pytest.approx([p for _, p in expected.top], abs=1e-4)


@dataclass(frozen=True)
class Case:
    vocab: int
    kind: str
    seed: int
    sequences: tuple
    dtype: torch.dtype

    def logits(self):
        generator = np.random.default_rng(self.seed)
        while True:
            shape = (len(self.sequences), self.vocab)
            values = generator.normal(size=shape) * 3
            if self.kind == "ties":
                values = np.round(values)
            elif self.kind == "peaked":
                values *= 4
            elif self.kind == "flat":
                values *= 0.05
            elif self.kind == "extreme":
                values[generator.random(shape) < 0.3] = -INF
                values[generator.random(shape) < 0.1] = -1e30
                values[:, 0] = 5.0
            yield as_logits(values, self.dtype)


@st.composite
def cases(draw):
    vocab = draw(st.sampled_from([3, 64, 128, 300, 1000, 5000, 9001]))
    tokens = st.integers(0, vocab - 1)

    def maybe(strategy, off):
        return draw(st.one_of(st.just(off), strategy))

    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        edits = draw(st.booleans())
        few = st.lists(tokens, max_size=2)
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.5, 100.0])),
            top_p=maybe(st.floats(1e-9, 1.0), 1.0),
            top_k=maybe(st.one_of(st.integers(1, 60), st.integers(1, vocab + 3)), 0),
            min_p=maybe(st.floats(0, 1), 0.0),
            repetition_penalty=maybe(st.floats(0.1, 3), 1.0) if edits else 1.0,
            presence_penalty=maybe(st.floats(-2, 2), 0.0) if edits else 0.0,
            frequency_penalty=maybe(st.floats(-2, 2), 0.0) if edits else 0.0,
            logit_bias=maybe(st.dictionaries(tokens, st.floats(-100, 100), max_size=4), None)
            if edits
            else None,
            # Token 0 is one that every kind of logits can say.
            allowed_token_ids=maybe(few.map(lambda ids: [0, *ids]), None) if edits else None,
            min_tokens=draw(st.integers(0, 4)),
            stop_token_ids=draw(few),
            logprobs=maybe(st.integers(0, 20), None),
        )
        one = SamplingState(
            params,
            draw(st.integers(-(2**63), 2**63 - 1)),
            draw(st.lists(tokens, max_size=10)),
            draw(st.lists(tokens, max_size=10)),
            draw(st.frozensets(tokens, max_size=2)),
        )
        sequences.append(one)
    sequences.insert(draw(st.integers(0, len(sequences))), None)
    kind = draw(st.sampled_from(["normal", "ties", "peaked", "flat", "extreme"]))
    dtype = draw(st.sampled_from(DTYPES))
    return Case(vocab, kind, draw(st.integers(0, 2**32 - 1)), tuple(sequences), dtype)


@given(cases())
@settings(deadline=None, derandomize=True, max_examples=2 * EXAMPLES)
def test_tokens_and_logprobs_are_those_of_the_cpu_over_several_steps(case):
    rig = Rig(case.vocab, list(case.sequences), seats=[*range(len(case.sequences), 0, -1)])
    for step, logits in zip(range(2), case.logits(), strict=False):
        untouched = logits.clone()
        check_step(rig, logits, step)
        assert torch.equal(logits, untouched)


@given(cases())
@settings(deadline=None, derandomize=True, max_examples=EXAMPLES)
def test_a_row_depends_neither_on_its_batch_nor_on_its_place(case):
    logits = next(case.logits())
    sequences = list(case.sequences)
    count = len(sequences)
    together = Rig(case.vocab, sequences).sample(logits)
    reverse = Rig(case.vocab, sequences[::-1], seats=[*range(3, count + 3)])
    assert reverse.sample(logits.flip(0).contiguous())[::-1] == together
    i = sequences.index(None) - 1
    if i >= 0:
        assert Rig(case.vocab, [sequences[i]]).sample(logits[i : i + 1]) == [together[i]]


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "temperature": 0.6},
    {"top_k": 100},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("kind", ["normal", "ties", "peaked", "flat"])
@pytest.mark.parametrize("vocab", [129, 9001, *([20_000] if ON_GPU else [])])
def test_the_filters_keep_what_they_should(vocab, kind):
    sequences = tuple(state(seed=i, **fields) for i, fields in enumerate(FILTERS))
    case = Case(vocab, kind, vocab, sequences, torch.float32)
    logits = next(case.logits())
    rig = Rig(vocab, list(sequences))
    check_step(rig, logits)
    for i, sequence in enumerate(sequences):
        weights = kept_weights(logits[i].cpu().numpy(), sequence.params, 0.0)
        expected = np.add.reduceat(weights, range(0, vocab, sampling._GROUP))
        listing, kept = (t[i].cpu().numpy() for t in (rig.workspace.listing, rig.workspace.kept))
        found = np.zeros_like(expected)
        found[listing[np.isfinite(kept)]] = kept[np.isfinite(kept)]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7), sequence.params


def test_greedy_takes_the_first_of_equals():
    logits = as_logits(np.zeros((3, 700)))
    logits[0, [200, 260, 699]] = 4.0
    logits[1, [699]] = 4.0
    sequences = [state(temperature=0) for _ in range(3)]
    assert Rig(700, sequences).sample(logits) == [200, 699, 0]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 2}])
def test_ties_at_the_threshold_are_kept(fields):
    logits = as_logits(np.full((20, 300), -1.0))
    logits[:, [5, 140, 290]] = 2.0
    sequences = [state(seed=i, **fields) for i in range(20)]
    assert set(Rig(300, sequences).sample(logits)) == {5, 140, 290}


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-6}])
def test_no_uniform_reaches_a_token_of_no_probability(fields):
    for total in (3, 1000):
        logits = as_logits(np.full((4, total + 304), -1e30))
        logits[2:, :] = -INF
        logits[:, 150 : 150 + total] = 0.1
        sequences = [state(seed=seed, **fields) for seed in extreme_seeds() * 2]
        low, high, *others = Rig(total + 304, sequences).sample(logits)
        assert [low, high] == others == [150, 149 + total]


def test_distribution():
    count, rounds = (2000, 4) if ON_GPU else (70, 2)
    row = np.linspace(1.0, -1.2, 12)[np.random.default_rng(5).permutation(12)]
    logits = as_logits(np.tile(row, (count, 1)))
    rig = Rig(12, [state(seed=i) for i in range(count)])
    tokens = [token for step in range(rounds) for token in rig.sample(logits, step)]
    expected = np.exp(row) / np.exp(row).sum() * count * rounds
    chi_square = ((np.bincount(tokens, minlength=12) - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # 11 degrees, p = 0.001


# --- Seats move on ----------------------------------------------------------------------------


def test_a_seat_advances_until_nothing_remains():
    rig = Rig(50, [state(seed=1), state(seed=2, repetition_penalty=1.5)], remaining=2)
    logits = as_logits(np.random.default_rng(0).normal(size=(2, 50)))
    before = rig.state.seats.clone()
    for step in range(3):
        tokens = rig.sample(logits, step, positions=[30 + step, 40 + step])
        if step == 2:
            assert tokens == [-1, -1]
        else:
            for i in range(2):
                assert rig.seat(i)[:4] == [tokens[i], 30 + 10 * i + step, 1 - step, 1 + step]
                counted = rig.workspace.counts[1 - i]
                assert counted.sum() == i * (step + 1)
                assert counted[tokens[i]] >= i
    assert rig.seat(0)[3] == 2
    assert torch.equal(rig.state.seats[:, 4:], before[:, 4:])


def test_rows_that_are_not_due_change_nothing():
    rig = Rig(50, [state(seed=i, frequency_penalty=1.0) for i in range(3)])
    before, counts = rig.state.buffer.clone(), rig.workspace.counts.clone()
    logits = as_logits(np.full((3, 50), NAN))
    assert rig.sample(logits, positions=[0, -1, 0]) == [-1, -1, -1]
    assert torch.equal(rig.state.buffer, before)
    assert torch.equal(rig.workspace.counts, counts)


def test_stop_tokens_end_a_sequence_from_min_tokens_on():
    logits = as_logits([[0.0, 9.0, 5.0, 1.0]] * 4)
    rig = Rig(
        4,
        [
            state(temperature=0, stop_token_ids=[1]),
            state(temperature=0, stop_token_ids=[1], eos=[2], min_tokens=2),
            state(temperature=0, eos=[1], ignore_eos=True),
            state(temperature=0, eos=[1, 2], allowed_token_ids=[1], min_tokens=2),
        ],
    )
    assert [rig.sample(logits, step) for step in range(3)] == [
        [1, 3, 1, 1],
        [-1, 3, 1, 1],
        [-1, 1, 1, -1],
    ]
    assert [rig.seat(i)[2] for i in range(4)] == [0, 0, 97, 0]
    assert [rig.seat(i)[3] for i in range(4)] == [1, 3, 3, 2]


def test_penalties_follow_a_growing_output():
    fields = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    prompt = [1, 2, 2, 40]
    sequences = [state(temperature=t, seed=3, prompt=prompt, **fields) for t in (0.0, 0.0, 0.5)]
    sequences[1].output_token_ids += [5, 5, 6]
    rig = Rig(200, sequences)
    generator = np.random.default_rng(0)
    for step in range(8):
        check_step(rig, as_logits(generator.normal(size=(3, 200))), step)
    assert len(set(sequences[0].output_token_ids)) > 3


def test_a_tiny_repetition_penalty_does_not_overflow():
    sequences = [state(temperature=t, repetition_penalty=1e-40, prompt=[0]) for t in (0.0, 1.0)]
    assert check_step(Rig(2, sequences), as_logits([[1.0, 2.0]] * 2)) == [0, 0]


def test_bans_hold_whatever_else_is_asked_for():
    logits = as_logits(np.tile(np.arange(300, dtype=np.float32), (3, 1)))
    sequences = [
        state(temperature=0, bad=[(299,), (298,)]),
        state(temperature=0, logit_bias={299: -1.5, 298: 50.0, 4: 100.0}, bad=[(298,)]),
        state(temperature=5.0, allowed_token_ids=[3, 290], logit_bias={3: 100.0, 299: 100.0}),
    ]
    rig = Rig(300, sequences)
    tokens = check_step(rig, logits)
    assert tokens[:2] == [297, 299]
    assert tokens[2] in (3, 290)


# --- What must not go wrong -------------------------------------------------------------------


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"allowed_token_ids": [0]}])
def test_broken_rows_are_told_and_spare_the_others(broken, fields):
    logits = as_logits(np.zeros((5, 400)))
    logits[1, 333] = broken
    logits[2] = -INF
    logits[4, 0] = -INF
    sequences = [state(seed=i, logprobs=1, **fields) for i in range(5)]
    rig = Rig(400, sequences)
    with pytest.raises(InvalidLogitsError) as caught:
        Sampler(400)(logits.cpu(), sequences)
    tokens = rig.sample(logits)
    assert tuple(i for i, token in enumerate(tokens) if token == -2) == caught.value.rows
    good = [i for i, token in enumerate(tokens) if token >= 0]
    for i in good:
        assert acceptable(logits[i], sequences[i], tokens[i])
    assert [rig.seat(i)[2] for i in range(5)] == [0 if t == -2 else 99 for t in tokens]
    assert [rig.seat(i)[3] for i in range(5)] == [0 if t == -2 else 1 for t in tokens]


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("vocab", [21, 300])
def test_logprobs_when_many_compete_for_the_last_place(vocab, k):
    values = np.random.default_rng(vocab).integers(0, 3, size=(3, vocab)).astype(np.float32)
    values[1, 2:] = -INF
    fields = [{"temperature": 0}, {}, {"logit_bias": {5: 50.0}}]
    check_step(Rig(vocab, [state(logprobs=k, **f) for f in fields]), as_logits(values))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [50_257, 152_064])
def test_real_vocabularies(vocab, dtype):
    fields = [
        {"temperature": 0},
        {},
        *FILTERS,
        {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 20},
        {"temperature": 1.3, "presence_penalty": 1.0, "logit_bias": {5: 4.0}, "logprobs": 5},
        {"repetition_penalty": 1.2, "min_tokens": 3, "stop_token_ids": [200], "top_p": 0.95},
    ]
    sequences = [state(seed=i, prompt=range(i), **fields[i % len(fields)]) for i in range(64)]
    rig = Rig(vocab, sequences)
    for step, scale in enumerate((1.0, 2.5, 0.1, 6.0)):
        noise = torch.randn(64, vocab, generator=torch.Generator().manual_seed(step))
        check_step(rig, as_logits(noise * scale, dtype), step)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_captured_graph_goes_on_by_itself():
    vocab, count = 32_000, 8
    sequences = [state(seed=i, **FILTERS[i]) for i in range(count)]
    logits = as_logits(np.random.default_rng(1).normal(size=(count, vocab)) * 3, torch.bfloat16)
    expected = Rig(vocab, [replace(one) for one in sequences])
    rows = [expected.sample(logits, step) for step in range(4)]
    rig = Rig(vocab, sequences)
    embedding = torch.randn(vocab, 64, device=DEVICE)
    out = {name: ints(*[0] * count) for name in ("positions", "seq_lens", "block_counts")}
    out["kv_slots"] = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    out["hidden"] = torch.zeros(count, 64, device=DEVICE)
    batch = ints(*range(count))

    def run():
        steps.prepare_decode(rig.state, batch, embedding, block_size=16, **out)
        sampling.sample(
            logits,
            rows=batch,
            next_positions=out["seq_lens"],
            seats=rig.state.seats,
            step=rig.state.step,
            workspace=rig.workspace,
        )

    saved = rig.state.buffer.clone()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    rig.state.buffer.copy_(saved)
    rig.state.step.fill_(-1)
    for _ in range(4):
        graph.replay()
    assert rig.workspace.out_tokens[:4, :count].tolist() == rows
    assert torch.equal(out["hidden"], embedding[rows[2]])
    assert [rig.seat(i)[1] for i in range(count)] == [11] * count
