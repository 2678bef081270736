"""Sampling: parameters and their ranges, each processor, the random numbers, log-probabilities."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ragserve.engine.errors import InvalidParamsError
from ragserve.engine.execution.sampler import InvalidLogitsError, Sampler, SamplingState
from ragserve.engine.sampling_params import SamplingParams
from ragserve.kernels import philox

NAN, INF = math.nan, math.inf


def state(params=None, *, seed=0, prompt=(), output=(), eos=(), bad=(), **fields):
    params = params or SamplingParams(**fields)
    return SamplingState(params, seed, list(prompt), list(output), frozenset(eos), tuple(bad))


def sample(logits, *states):
    rows = torch.tensor(logits, dtype=torch.float32).reshape(len(states), -1)
    return Sampler(rows.shape[1])(rows, states)


def pick(logits, one):
    return sample(logits, one)[0].token_id


# --- SamplingParams -------------------------------------------------------------------------


def test_defaults_are_valid_and_sample():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert params.stop == params.stop_token_ids == params.bad_words == ()
    assert params.max_tokens is None
    assert not params.is_greedy


VALID = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-9, 2, 100.0, np.float32(0.5)],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 10**9, np.int64(5)],
    "min_p": [0, 0.0, 0.5, 1],
    "repetition_penalty": [1e-6, 1, 2.0, 100],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "logit_bias": [None, {}, {0: 100, 7: -100.0}],
    "allowed_token_ids": [None, [0], (1, 1, 2), range(3)],
    "bad_words": [None, [], ["a", " "]],
    "min_tokens": [0, 5],
    "max_tokens": [None, 1, 10**6],
    "stop": [None, "x", [], ["a", "b"], ("c",)],
    "stop_token_ids": [None, [], [0, 5]],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
}
NO_NUMBER = [True, None, "1", NAN, INF, -INF, [1.0], 1j]
NO_INTEGER = [True, "1", 1.0, NAN, [1]]
INVALID = {
    "n": [*NO_INTEGER, None, 0, -1, 129],
    "temperature": [*NO_NUMBER, -1e-9, 100.1, 10**400],
    "top_p": [*NO_NUMBER, 0, -0.1, 1.0001],
    "top_k": [*NO_INTEGER, None, -2],
    "min_p": [*NO_NUMBER, -0.1, 1.1],
    "repetition_penalty": [*NO_NUMBER, 0, -1, 100.5],
    "presence_penalty": [*NO_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NO_NUMBER, -2.1, 2.1],
    "seed": [*NO_INTEGER, 2**63, -(2**63) - 1],
    "logit_bias": [[1], "1", {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1: NAN}, {1: 101}, {1: None}],
    "allowed_token_ids": [[], 1, "12", b"12", {1}, [-1], [True], [1.0], ["1"]],
    "bad_words": ["word", [""], [1], {"a"}, 1, ["\ud83d"], ["a"] * 65_537],
    "min_tokens": [*NO_INTEGER, None, -1, 2**31],
    "max_tokens": [*NO_INTEGER, 0, -1, 2**31],
    "stop": ["", [""], ["a", ""], [1], 1, b"x", {"a"}, "a\udc80", ["a"] * 65_537],
    "stop_token_ids": [1, "1", [-1], [None], [True], {1}, [0] * 262_145],
    "ignore_eos": [1, 0, None, "true"],
    "include_stop_str_in_output": [1, None],
    "skip_special_tokens": [0, None],
    "detokenize": [0, None],
    "logprobs": [*NO_INTEGER, -1, 21],
    "prompt_logprobs": [*NO_INTEGER, -1, 21],
}


def test_every_parameter_has_its_range_tested():
    assert list(VALID) == list(INVALID) == list(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in VALID.items() for v in vs])
def test_accepts(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in INVALID.items() for v in vs])
def test_refuses(name, value):
    with pytest.raises(InvalidParamsError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert caught.value.allowed in str(caught.value)


def test_messages_hold_value_and_range():
    with pytest.raises(InvalidParamsError, match=r"temperature=-1 .* 0 to 100"):
        SamplingParams(temperature=-1)
    with pytest.raises(InvalidParamsError, match=r"top_p=0 .* above 0, up to 1"):
        SamplingParams(top_p=0)
    with pytest.raises(InvalidParamsError, match=r"logprobs=21 .* 0 to 20"):
        SamplingParams(logprobs=21)


def test_min_tokens_within_max_tokens():
    SamplingParams(min_tokens=3, max_tokens=3)
    with pytest.raises(InvalidParamsError, match="at most max_tokens, 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_stop_strings_need_text():
    SamplingParams(stop_token_ids=[5], detokenize=False)
    with pytest.raises(InvalidParamsError, match="detokenize=False") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.parameter == "stop"


def test_numbers_become_plain():
    params = SamplingParams(temperature=np.float64(1), top_k=np.int64(3), top_p=1)
    assert type(params.temperature) is type(params.top_p) is float
    assert type(params.top_k) is int
    assert SamplingParams(top_k=-1).top_k == 0


def test_containers_are_copied_and_immutable():
    bias, allowed, bad, stop, stop_ids = {1: 2.0}, [1, 2], ["a"], ["b"], [3]
    params = SamplingParams(
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_words=bad,
        stop=stop,
        stop_token_ids=stop_ids,
    )
    assert (bias, allowed, bad, stop, stop_ids) == ({1: 2.0}, [1, 2], ["a"], ["b"], [3])
    bias[5] = 1.0
    for container in (allowed, stop_ids):
        container.append(9)
    for container in (bad, stop):
        container.append("z")
    assert params.logit_bias == {1: 2.0}
    assert isinstance(params.logit_bias, MappingProxyType)
    assert (params.allowed_token_ids, params.bad_words) == ((1, 2), ("a",))
    assert (params.stop, params.stop_token_ids) == (("b",), (3,))
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


def test_one_stop_string_is_a_tuple_of_one():
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_copies():
    params = SamplingParams(n=2, logit_bias={1: 2.0}, stop="x", seed=3)
    for copied in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), replace(params)):
        assert copied == params
    assert replace(params, n=1).logit_bias == {1: 2.0}
    with pytest.raises(InvalidParamsError):
        replace(params, n=0)


def test_greedy():
    assert SamplingParams.greedy(max_tokens=3) == SamplingParams(temperature=0, max_tokens=3)
    assert SamplingParams(temperature=0.9e-5).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert SamplingParams.greedy(n=3).n == 3


@pytest.mark.parametrize(
    "field", [{"logit_bias": {10: 1.0}}, {"allowed_token_ids": [1, 10]}, {"stop_token_ids": [10]}]
)
def test_check_vocab(field):
    params = SamplingParams(**field)
    params.check_vocab(11)
    with pytest.raises(InvalidParamsError, match="0 to 9") as caught:
        params.check_vocab(10)
    assert caught.value.parameter == next(iter(field))
    assert caught.value.value == 10


def test_params_need_no_torch():
    code = "import sys, ragserve.engine.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


# --- Philox ---------------------------------------------------------------------------------

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123, tests/kat_vectors, "philox4x32 10": counter, key, result
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_philox_known_answers_alone_and_together():
    counters, keys, results = (
        np.array(column, dtype=np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True)
    )
    assert (philox.philox4x32(counters, keys) == results).all()
    for i in range(3):
        block = philox.philox4x32(counters[:, i : i + 1], keys[:, i : i + 1])
        assert (block == results[:, i : i + 1]).all()


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(deadline=None, derandomize=True)
def test_uniform_is_the_documented_function(seed, position):
    words = philox.philox4x32(
        np.array([[position & ONES], [position >> 32], [0], [0]], dtype=np.uint64),
        np.array([[seed & ONES], [(seed >> 32) & ONES]], dtype=np.uint64),
    )
    k = ((int(words[0, 0]) << 32) | int(words[1, 0])) >> 12
    (number,) = philox.uniform([seed], [position])
    assert number == (2 * k + 1) / 2**53
    assert 0.0 < number < 1.0


def test_uniform_extremes_stay_inside(monkeypatch):
    for word in (0, ONES):
        block = np.full((4, 1), word, dtype=np.uint64)
        monkeypatch.setattr(philox, "philox4x32", lambda counter, key, block=block: block)
        assert 0.0 < philox.uniform([0], [0])[0] < 1.0


def test_uniform_is_uniform_over_positions_and_over_seeds():
    for numbers in (
        philox.uniform([7] * 10_000, range(10_000)),
        philox.uniform(range(10_000), [3] * 10_000),
    ):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 500) ** 2 / 500).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04


def test_choices_of_one_seed_differ():
    seeds = [philox.derive_seed(7, index) for index in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [philox.derive_seed(7, index) for index in range(100)]


# --- One processor at a time ----------------------------------------------------------------


def test_greedy_takes_the_first_of_equals():
    assert pick([1.0, 3.0, 3.0, 2.0], state(temperature=0)) == 1


def test_allowed_token_ids():
    assert pick([5, 4, 3, 2], state(temperature=0, allowed_token_ids=[3, 2, 2])) == 2


@pytest.mark.parametrize(
    ("output", "expected"), [([], 0), ([1], 0), ([1, 2], 1), ([2, 1, 2], 1), ([2, 1], 0)]
)
def test_bad_words_ban_their_last_token_after_the_others(output, expected):
    one = state(temperature=0, prompt=[1, 2], output=output, bad=[(1, 2, 0)])
    assert pick([5, 4, 3], one) == expected


def test_bad_word_of_one_token_is_always_banned():
    assert pick([5, 4, 3], state(temperature=0, bad=[(0,), (), (99,), (1, 99)])) == 1


def test_an_integer_too_long_to_be_written_out_is_refused():
    with pytest.raises(InvalidParamsError, match="max_tokens=<int>"):
        SamplingParams(max_tokens=10**5000)


class _Word(tuple[int, ...]):
    """Counts how often it is compared with a sequence."""

    compared = 0

    def __getitem__(self, index):
        if isinstance(index, slice):
            _Word.compared += 1
        return super().__getitem__(index)


def test_only_bad_words_that_go_on_from_the_last_token_are_looked_at():
    words = [_Word((1, token_id, 0)) for token_id in range(2, 20_002)]
    one = state(temperature=0, output=[1, 5], bad=words)
    _Word.compared = 0
    assert pick([5, 4, 3], one) == 1
    assert _Word.compared == 1


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=3).map(tuple), max_size=5),
    st.lists(st.integers(0, 2), max_size=4),
)
def test_bad_words_ban_what_would_complete_one(words, output):
    one = state(temperature=0, output=output, bad=words)
    tokens = tuple(output)
    banned = {
        word[-1]
        for word in words
        if word and len(word) <= len(tokens) + 1 and (*tokens, word[-1])[-len(word) :] == word
    }
    logits = [3.0, 2.0, 1.0]
    left = [token_id for token_id in range(3) if token_id not in banned]
    assert pick(logits, one) == (left[0] if left else 0)


@pytest.mark.parametrize(("output", "expected"), [([], 2), ([3], 2), ([3, 3], 0)])
def test_min_tokens_bans_what_would_end(output, expected):
    one = state(temperature=0, min_tokens=2, stop_token_ids=[1], eos=[0], output=output)
    assert pick([5, 4, 3, 0], one) == expected


def test_min_tokens_lets_an_ignored_eos_pass():
    one = state(temperature=0, min_tokens=2, stop_token_ids=[1], eos=[0], ignore_eos=True)
    assert pick([5, 6, 3], one) == 0


def test_allowed_tokens_win_over_bans_that_leave_nothing():
    one = state(temperature=0, min_tokens=2, eos=[1], allowed_token_ids=[1])
    assert pick([5, 4, 3], one) == 1
    assert pick([5, 4], state(temperature=0, bad=[(0,), (1,)])) == 0


def test_logit_bias_adds_and_does_not_unban():
    assert pick([5, 4, 3], state(temperature=0, logit_bias={2: 2.5, 1: 1.25})) == 2
    one = state(temperature=0, logit_bias={2: 100}, allowed_token_ids=[0, 1])
    assert pick([5, 4, 3], one) == 0


def test_penalties():
    def chosen(**fields):
        return pick([4.0, 3.0, -1.0], state(temperature=0, **fields))

    assert chosen(repetition_penalty=2.0) == 0
    assert chosen(repetition_penalty=2.0, prompt=[0]) == 1
    assert chosen(repetition_penalty=2.0, output=[0]) == 1
    assert chosen(presence_penalty=2.0, prompt=[0]) == 0
    assert chosen(presence_penalty=2.0, output=[0]) == 1
    assert chosen(presence_penalty=0.9, output=[0, 0]) == 0
    assert chosen(frequency_penalty=0.9, output=[0]) == 0
    assert chosen(frequency_penalty=0.9, output=[0, 0]) == 1
    assert pick([-1.0, -1.5], state(temperature=0, repetition_penalty=2.0, prompt=[0])) == 1
    assert pick([1.0, 2.0], state(temperature=0, repetition_penalty=1e-40, prompt=[0])) == 0


def test_penalties_follow_a_growing_output():
    generator = np.random.default_rng(0)
    fields = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    kept = state(temperature=0, prompt=[1, 2, 2, 40], **fields)
    for _ in range(60):
        logits = generator.normal(size=20)
        fresh = state(temperature=0, prompt=[1, 2, 2, 40], output=kept.output_token_ids, **fields)
        token_id = pick(logits, kept)
        assert token_id == pick(logits, fresh)
        kept.output_token_ids += [token_id] * int(generator.integers(1, 3))


def seen(logits, count=200, **fields):
    """The tokens that come out over many positions."""
    one = state(**fields)
    result = set()
    for _ in range(count):
        result.add(pick(logits, one))
        one.output_token_ids.append(0)
    return result


def test_filters_keep_what_they_should():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert seen(logits) == {0, 1, 2, 3}
    assert seen(logits, top_k=2) == {0, 1}
    assert seen(logits, top_k=3) == {0, 1, 2}
    assert seen(logits, top_k=4) == seen(logits, top_k=100) == {0, 1, 2, 3}
    assert seen(logits, top_p=0.65) == {0, 1}
    assert seen(logits, top_p=0.71) == {0, 1, 2}
    assert seen(logits, top_p=1e-12) == {0}
    assert seen(logits, min_p=0.7) == {0, 1}
    assert seen(logits, min_p=1.0) == {0}
    assert seen(logits, temperature=1e-5) == {0}
    # top_p is of what top_k leaves: 0.4 / 0.7 < 0.6, and alone 0.4 + 0.3 + 0.2 would be needed.
    assert seen(logits, top_k=2, top_p=0.56) == {0}
    assert seen(logits, top_k=2, top_p=0.8) == {0, 1}
    # ... and min_p is of the tempered distribution.
    assert seen(logits, temperature=0.5, min_p=0.7) == {0}


def test_filters_keep_ties():
    assert seen([2.0, 1.0, 2.0, 1.0], top_k=1) == {0, 2}
    assert seen([2.0, 1.0, 2.0, 1.0], top_k=3) == {0, 1, 2, 3}
    assert seen([2.0, 2.0, 0.0], top_p=1e-6) == {0, 1}
    assert seen([2.0, 2.0, 0.0], min_p=1.0) == {0, 1}


@pytest.mark.parametrize("uniform", [2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-6}])
def test_no_uniform_reaches_a_token_of_no_probability(monkeypatch, uniform, fields):
    monkeypatch.setattr(philox, "uniform", lambda seeds, positions: np.full(len(seeds), uniform))
    for total in (3, 7, 1000, 4097):
        logits = np.full(total + 4, -1e30)
        logits[2 : total + 2] = 0.1
        assert 2 <= pick(logits, state(**fields)) < total + 2
        logits[:2] = logits[total + 2 :] = -INF
        assert 2 <= pick(logits, state(**fields)) < total + 2


def test_the_first_sum_above_the_uniform_number_chooses(monkeypatch):
    monkeypatch.setattr(philox, "uniform", lambda seeds, positions: np.full(len(seeds), 0.5))
    assert pick([0.0, -INF, 0.0, -INF], state()) == 2
    assert pick([-INF, 0.0, -INF, 0.0], state(top_p=0.99)) == 3


# --- All together, against a brute force of another make -------------------------------------


def reference(logits, one):
    """Plain Python, float64: {token: probability}, or None where rounding could decide."""
    params, output, vocab = one.params, one.output_token_ids, len(logits)
    x = {t: float(np.float32(value)) for t, value in enumerate(logits)}
    if params.allowed_token_ids is not None:
        x = {t: v for t, v in x.items() if t in params.allowed_token_ids}
    banned = set()
    for word in one.bad_word_ids:
        if (
            tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
            and len(word) <= len(output) + 1
        ):
            banned.add(word[-1])
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
        banned |= set() if params.ignore_eos else one.eos_token_ids
    if set(x) - banned:
        x = {t: v for t, v in x.items() if t not in banned}
    for t in x:
        x[t] += (params.logit_bias or {}).get(t, 0.0)
        if t in output or t in one.prompt_token_ids:
            x[t] *= 1 / params.repetition_penalty if x[t] > 0 else params.repetition_penalty
        x[t] -= output.count(t) * params.frequency_penalty
        x[t] -= params.presence_penalty if t in output else 0.0
    assert set(x) <= set(range(vocab))
    best = max(x.values())
    eps = 1e-5 * max(1.0, *(abs(v) for v in x.values()))
    if params.is_greedy:
        close = [t for t in x if x[t] > best - eps]
        if len({x[t] for t in close}) > 1:
            return None
        return {min(close): 1.0}
    x = {t: (v - best) / params.temperature for t, v in x.items()}
    eps = eps / params.temperature + 1e-6

    def cut(floor):
        if any(0 < abs(v - floor) < eps for v in x.values()):
            return None
        return {t: v for t, v in x.items() if v >= floor}

    if params.min_p > 0:
        if any(abs(v - math.log(params.min_p)) < eps for v in x.values()) and params.min_p < 1:
            return None
        x = cut(math.log(params.min_p))
    if x is not None and 0 < params.top_k < len(x):
        x = cut(sorted(x.values(), reverse=True)[params.top_k - 1])
    if x is not None and params.top_p < 1:
        total = sum(math.exp(v) for v in x.values())
        mass = 0.0
        for value in sorted(x.values(), reverse=True):
            mass += math.exp(value) / total
            if abs(mass - params.top_p) < 1e-5:
                return None
            if mass > params.top_p:
                x = cut(value)
                break
    if x is None:
        return None
    total = sum(math.exp(v) for v in x.values())
    return {t: math.exp(x[t]) / total for t in sorted(x)}


@st.composite
def cases(draw):
    vocab = draw(st.integers(2, 40))
    tokens = st.integers(0, vocab - 1)
    value = draw(
        st.sampled_from(
            [
                st.integers(-8, 8).map(lambda v: v / 2),  # many ties
                st.floats(-20, 20, width=32),
                st.sampled_from([0.0, -1e30, 1e4, -1e4, 1.0, 80.0]),
            ]
        )
    )
    logits = draw(st.lists(value, min_size=vocab, max_size=vocab))

    def maybe(strategy, off):
        return draw(st.one_of(st.just(off), strategy))

    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.5, 100.0])),
        top_p=maybe(st.floats(1e-9, 1.0), 1.0),
        top_k=maybe(st.integers(1, vocab + 3), 0),
        min_p=maybe(st.floats(0, 1), 0.0),
        repetition_penalty=maybe(st.floats(0.1, 3), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        logit_bias=maybe(st.dictionaries(tokens, st.floats(-100, 100), max_size=4), None),
        allowed_token_ids=maybe(st.lists(tokens, min_size=1), None),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(st.lists(tokens, max_size=2)),
        ignore_eos=draw(st.booleans()),
        logprobs=maybe(st.integers(0, 20), None),
    )
    words = st.lists(tokens, min_size=1, max_size=3).map(tuple)
    one = SamplingState(
        params,
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(st.lists(tokens, max_size=10)),
        draw(st.lists(tokens, max_size=10)),
        draw(st.frozensets(tokens, max_size=2)),
        tuple(draw(st.lists(words, max_size=3))),
    )
    return logits, one


@given(cases())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_everything_combined_against_brute_force(case):
    logits, one = case
    prompt, output = list(one.prompt_token_ids), list(one.output_token_ids)
    expected = reference(logits, one)
    token_id = pick(logits, one)
    assert (prompt, output) == (one.prompt_token_ids, one.output_token_ids)
    assume(expected is not None)
    assert token_id in expected
    if not one.params.is_greedy:
        (uniform,) = philox.uniform([one.seed], [len(output)])
        below = sum(p for t, p in expected.items() if t < token_id)
        assert below - 1e-4 <= uniform <= below + expected[token_id] + 1e-4


@given(st.lists(cases(), min_size=1, max_size=6))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_row_does_not_depend_on_its_batch(batch):
    vocab = max(len(logits) for logits, _ in batch)
    rows = [logits + [-50.0] * (vocab - len(logits)) for logits, _ in batch]
    states = [one for _, one in batch]
    together = sample(rows, *states)
    again = sample(rows[::-1], *states[::-1])[::-1]
    alone = [sample(row, replace_state(one))[0] for row, one in zip(rows, states, strict=True)]
    assert [t.token_id for t in together] == [t.token_id for t in again]
    assert [t.token_id for t in together] == [t.token_id for t in alone]


def replace_state(one):
    """The same sequence with nothing remembered, as after a restart."""
    return SamplingState(
        one.params,
        one.seed,
        one.prompt_token_ids,
        list(one.output_token_ids),
        one.eos_token_ids,
        one.bad_word_ids,
    )


MIXED = [
    {"temperature": 0},
    {},
    {"temperature": 0.6, "top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.95, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.3, "presence_penalty": 1.0, "logit_bias": {5: 4.0}, "logprobs": 0},
    {"allowed_token_ids": range(100, 900), "min_tokens": 3, "stop_token_ids": [200]},
]


def test_thirty_three_different_rows_equal_each_alone():
    vocab = 5003
    logits = torch.randn(33, vocab, generator=torch.Generator().manual_seed(1)) * 3
    untouched = logits.clone()
    sampler = Sampler(vocab)
    states = [
        state(**MIXED[i % len(MIXED)], seed=i, prompt=range(i), output=[], bad=[(i, 7)])
        for i in range(33)
    ]
    alone = [replace_state(one) for one in states]
    for _ in range(5):
        together = sampler(logits, states)
        for i, one in enumerate(alone):
            (token,) = sampler(logits[i : i + 1], [replace_state(one)])
            assert token.token_id == together[i].token_id
            one.output_token_ids.append(token.token_id)
            states[i].output_token_ids.append(token.token_id)
    assert torch.equal(logits, untouched)
    assert len({tuple(one.output_token_ids) for one in states}) > 25


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 12),
        ({"temperature": 0.5}, 12),
        ({"top_k": 6}, 6),
        ({"top_p": 0.8}, None),
        ({"min_p": 0.2}, None),
    ],
)
def test_distribution(fields, kept):
    logits = np.linspace(1.0, -1.2, 12)[np.random.default_rng(5).permutation(12)]
    expected = reference(logits, state(**fields))
    assert expected is not None
    assert kept is None or len(expected) == kept
    total = 6000
    rows = torch.tensor(logits, dtype=torch.float32).repeat(total // 4, 1)
    counts = Counter()
    for position in range(4):
        states = [state(**fields, seed=i, output=[0] * position) for i in range(total // 4)]
        counts.update(token.token_id for token in Sampler(12)(rows, states))
    assert set(counts) == set(expected)
    chi_square = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in expected.items())
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


def test_large_vocabulary_top_p_equals_a_full_sort():
    vocab = 20_000
    generator = np.random.default_rng(2)
    for scale in (0.01, 1.0, 4.0):
        logits = (generator.normal(size=vocab) * scale).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        shifted = logits.astype(np.float64) - logits.max()
        mass = np.cumsum(np.exp(shifted[order]))
        kept = np.sort(order[: np.searchsorted(mass, 0.9 * mass[-1]) + 1])
        cdf = np.cumsum(np.exp(shifted[kept]))
        for seed in range(20):
            (uniform,) = philox.uniform([seed], [0])
            exact = np.searchsorted(cdf, uniform * cdf[-1], side="right")
            found = np.searchsorted(kept, pick(logits, state(top_p=0.9, seed=seed)))
            assert abs(found - exact) <= 1


# --- Log-probabilities ------------------------------------------------------------------------


def test_logprobs_are_of_the_untouched_distribution():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 4
    fields = {"temperature": 2.0, "top_k": 5, "logit_bias": {3: 50.0}, "repetition_penalty": 2.0}
    states = [state(**fields, logprobs=k, seed=i) for i, k in enumerate((0, 1, 20, None))]
    expected = logits.double().log_softmax(-1)
    tokens = Sampler(50)(logits, states)
    assert tokens[3].logprob is None
    for i, width in enumerate((0, 1, 20)):
        token_id, logprob = tokens[i]
        assert logprob is not None
        assert logprob.token_id == token_id == 3
        assert logprob.logprob == pytest.approx(expected[i, token_id].item(), abs=1e-5)
        assert logprob.rank == 1 + int((logits[i] > logits[i, token_id]).sum())
        best = expected[i].topk(width)
        assert [t for t, _ in logprob.top] == best.indices.tolist()
        assert [p for _, p in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(0, 20), st.integers(0, 29)
)
@settings(deadline=None, derandomize=True)
def test_logprobs_of_equals_come_in_order_of_id(values, k, target):
    target %= len(values)
    logits = torch.tensor([values], dtype=torch.float32)
    (found,) = Sampler(len(values)).prompt_logprobs(logits, [target], k)
    expected = logits[0].log_softmax(-1).tolist()
    ranked = sorted(range(len(values)), key=lambda t: (-values[t], t))[:k]
    assert [t for t, _ in found.top] == ranked
    assert [p for _, p in found.top] == pytest.approx([expected[t] for t in ranked], abs=1e-5)
    assert found.rank == 1 + sum(v > values[target] for v in values)
    assert found.logprob == pytest.approx(expected[target], abs=1e-5)


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("vocab", [21, 30, 100, 300, 5000])
def test_logprobs_when_many_compete_for_the_last_place(vocab, k):
    values = np.random.default_rng(vocab).integers(0, 3, size=vocab)
    logits = torch.tensor(values[None], dtype=torch.float32)
    (found,) = Sampler(vocab).prompt_logprobs(logits, [0], k)
    assert [t for t, _ in found.top] == np.argsort(-values, kind="stable")[:k].tolist()


def test_the_greedy_token_leads_its_logprobs():
    one = state(temperature=0, logprobs=2)
    token_id, logprob = sample([1.0, 2.0, 2.0, 2.0], one)[0]
    assert logprob is not None
    assert token_id == 1
    assert [t for t, _ in logprob.top] == [1, 2]
    assert logprob.rank == 1


def test_prompt_logprobs_of_many_rows():
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(3))
    untouched = logits.clone()
    targets = [i % 40 for i in range(150)]
    found = Sampler(40).prompt_logprobs(logits, targets, 2)
    expected = logits.log_softmax(-1)
    assert [p.token_id for p in found] == targets
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(expected[i, targets[i]].item(), abs=1e-5)
        assert [t for t, _ in one.top] == expected[i].topk(2).indices.tolist()
    assert torch.equal(logits, untouched)
    assert Sampler(40).prompt_logprobs(logits[:0], [], 5) == []


# --- What must not go wrong -------------------------------------------------------------------


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"allowed_token_ids": [0]}])
def test_broken_logits_name_their_rows_and_spare_the_others(broken, fields):
    logits = torch.zeros(4, 6)
    logits[1, 3] = broken
    logits[2] = -INF
    states = [state(**fields, seed=i) for i in range(4)]
    with pytest.raises(InvalidLogitsError, match="row 1, 2 ") as caught:
        Sampler(6)(logits, states)
    assert caught.value.rows == (1, 2)
    assert isinstance(caught.value, RuntimeError)
    assert len(Sampler(6)(logits[[0, 3]], [states[0], states[3]])) == 2
    with pytest.raises(InvalidLogitsError, match="row 1, 2 "):
        Sampler(6).prompt_logprobs(logits, [0] * 4, 1)


def test_nothing_allowed_that_the_model_can_say():
    with pytest.raises(InvalidLogitsError) as caught:
        sample([[0.0, -INF], [0.0, -INF]], state(allowed_token_ids=[1]), state(temperature=0))
    assert caught.value.rows == (0,)


def test_all_that_is_wrong_is_named_at_once():
    rows = [[0.0, -INF], [NAN, 0.0], [0.0, 0.0]]
    with pytest.raises(InvalidLogitsError) as caught:
        sample(rows, state(allowed_token_ids=[1]), state(temperature=0), state())
    assert caught.value.rows == (0, 1)


def test_no_rows():
    assert Sampler(7)(torch.zeros(0, 7), []) == []


def test_wrong_shape_or_dtype_is_refused():
    for logits in (torch.zeros(1, 6), torch.zeros(2, 7), torch.zeros(1, 7, dtype=torch.float64)):
        with pytest.raises(ValueError, match="one row per sequence"):
            Sampler(7)(logits, [state()])


def test_works_on_views_and_inside_inference_mode():
    whole = torch.randn(6, 40, requires_grad=True)
    view = whole[::2, 3:33]
    fields = [{"temperature": 0}, {"top_p": 0.9}, {"repetition_penalty": 1.5, "logprobs": 2}]
    states = [state(**field, prompt=[1]) for field in fields]
    expected = Sampler(30)(view.detach().contiguous(), states)
    assert Sampler(30)(view, states) == expected
    with torch.inference_mode():
        assert Sampler(30)(view, states) == expected
    assert Sampler(30)(view, states) == expected
