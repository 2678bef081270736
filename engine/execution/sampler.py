"""Logits to tokens: one `Sampler` call per step, for all sequences that are due a token.

The order is vLLM's. From the model's untouched logits: log-probabilities. Then, on a copy of
the rows that ask for it:

1. `allowed_token_ids`, `bad_words`, `min_tokens` ban tokens;
2. `logit_bias` is added;
3. repetition (prompt and output), frequency and presence (output) penalties;
4. temperature; or, if greedy, the likeliest token, the lowest id among equals;
5. `min_p`, `top_k`, `top_p`, each on what the one before left;
6. the token at which the probabilities, summed in order of token id, first exceed u.

u is a pure function of the sequence's seed and of the number of tokens it has so far
(`kernels.philox`), and each row is worked on by itself: what is chosen depends neither on the
other rows nor on preemption.

Each filter is a threshold on the probability, so tokens that tie with the last one kept are
kept too; the result does not depend on how a sort orders equals, and needs none.

A token that is banned, filtered out or of probability zero is never chosen. Where bans would
leave nothing (`allowed_token_ids` holds only stop tokens before `min_tokens`, say),
`allowed_token_ids` wins and the bans wait.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ragserve.kernels import philox

from ..outputs import TokenLogprob
from ..sampling_params import SamplingParams
from ..scheduling.plan import SampledToken

__all__ = [
    "InvalidLogitsError",
    "Sampler",
    "SamplingState",
]

_LARGEST = torch.finfo(torch.float32).max
_LOGPROB_ROWS = 8
"""Rows of prompt log-probabilities worked on at once: the temporaries stay in the cache."""


class InvalidLogitsError(RuntimeError):
    """Some rows of logits hold NaN or +inf, or nothing that could be chosen.

    The other rows are fine: sampling them again without these gives what it would have given.

    :ivar rows: indices of those rows.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the logits of row {', '.join(map(str, rows))} hold NaN or +inf, or -inf for every "
            "allowed token: the weights are damaged, or the model overflows in its dtype; "
            "try float32 or bfloat16"
        )
        self.rows = tuple(rows)


@dataclass(slots=True)
class SamplingState:
    """What sampling has to know of one sequence.

    :param params: the request's parameters; token ids are below the vocabulary's size.
    :param seed: the sequence's own.
    :param output_token_ids: the tokens so far, kept by the scheduler; it only ever grows.
    :param eos_token_ids: the model's end-of-sequence tokens.
    :param bad_word_ids: `params.bad_words`, tokenized.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    _bad_words: _BadWords = field(init=False, repr=False, compare=False)
    _has_edits: bool = field(init=False, repr=False, compare=False)
    _ending: frozenset[int] = field(init=False, repr=False, compare=False)
    _allowed: Tensor | None = field(init=False, repr=False, compare=False, default=None)
    _bias: tuple[Tensor, Tensor] | None = field(init=False, repr=False, compare=False, default=None)
    _history: _History | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        params = self.params
        self._ending = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self._ending |= self.eos_token_ids
        self._bad_words = _BadWords(self.bad_word_ids)
        self._has_edits = bool(
            params.allowed_token_ids is not None
            or params.logit_bias
            or self.bad_word_ids
            or params.min_tokens
            or self._has_penalties
        )

    @property
    def _has_penalties(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def _banned(self) -> frozenset[int]:
        """Tokens that must not come next, by `min_tokens` and `bad_words`."""
        output = self.output_token_ids
        banned = self._bad_words.next(output)
        return banned | self._ending if len(output) < self.params.min_tokens else banned

    def _edit(self, row: Tensor) -> None:
        """Apply bans, bias and penalties to the sequence's logits [vocab], in place."""
        params = self.params
        if params.allowed_token_ids is not None:
            if self._allowed is None:
                self._allowed = _ids(sorted(set(params.allowed_token_ids)), row)
            kept = row[self._allowed]
            row.fill_(-math.inf)
            row[self._allowed] = kept
        # Ids beyond the row can come from a tokenizer that knows more than the model.
        banned = {token_id for token_id in self._banned() if token_id < len(row)}
        if banned and not self._leaves_nothing(banned, len(row)):
            row[_ids(banned, row)] = -math.inf
        if params.logit_bias:
            if self._bias is None:
                values = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
                self._bias = _ids(params.logit_bias, row), values.to(row.device)
            row.index_add_(0, *self._bias)
        if self._has_penalties:
            self._penalize(row)

    def _leaves_nothing(self, banned: Set[int], vocab_size: int) -> bool:
        allowed = self.params.allowed_token_ids
        if allowed is None:
            return len(banned) >= vocab_size
        return all(token_id in banned for token_id in allowed)

    def _penalize(self, row: Tensor) -> None:
        params = self.params
        if self._history is None:
            repeats = params.repetition_penalty != 1.0
            self._history = _History(self.prompt_token_ids if repeats else (), len(row))
        self._history.extend(self.output_token_ids)
        if not self._history.token_ids:
            return
        ids = torch.from_numpy(np.array(self._history.token_ids)).to(row.device)
        counts = torch.from_numpy(np.array(self._history.counts)).to(row.device)
        values = row[ids]
        penalty = params.repetition_penalty
        if penalty != 1.0:
            values = torch.where(values > 0, values / penalty, values * penalty)
            # A tiny penalty may overflow; an infinity would turn into NaN later.
            values.clamp_(max=_LARGEST)
        values -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
        row[ids] = values


class _BadWords:
    """Words that must not be completed, by the token before their last one.

    Of any number of words only those are looked at that go on from the sequence's last token.
    """

    __slots__ = ("_after", "_always")

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        always: list[int] = []
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) == 1:
                always.append(word[0])
            elif word:
                self._after.setdefault(word[-2], []).append(word)
        self._always = frozenset(always)

    def next(self, output: list[int]) -> frozenset[int]:
        """The tokens that would complete a word after `output`."""
        words = self._after.get(output[-1]) if output else None
        if not words:
            return self._always
        completed = [word[-1] for word in words if tuple(output[1 - len(word) :]) == word[:-1]]
        return self._always.union(completed)


class _History:
    """The distinct tokens of a sequence, and how often each is in the output.

    Each step adds its tokens and copies two small arrays; nothing is counted twice.
    """

    __slots__ = ("_counted", "_slots", "_vocab_size", "counts", "token_ids")

    def __init__(self, prompt_token_ids: Iterable[int], vocab_size: int) -> None:
        distinct = [t for t in dict.fromkeys(prompt_token_ids) if t < vocab_size]
        self.token_ids = array("q", distinct)
        self.counts = array("f", bytes(4 * len(distinct)))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._counted = 0

    def extend(self, output_token_ids: list[int]) -> None:
        """Count the output tokens that are new since the last call."""
        for token_id in output_token_ids[self._counted :]:
            slot = self._slots.setdefault(token_id, len(self.token_ids))
            if slot == len(self.token_ids):
                self.token_ids.append(token_id)
                self.counts.append(0.0)
            self.counts[slot] += 1.0
        self._counted = len(output_token_ids)


class Sampler:
    """Chooses the next token of many sequences.

    It keeps no state: what a sequence needs is in its `SamplingState`.

    :param vocab_size: width of the model's logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Choose one token for each row.

        The states' `output_token_ids` are read, not extended.

        :param logits: [n, vocab] float32; not modified.
        :param states: n, in the order of the rows.
        :raises InvalidLogitsError: naming the rows with NaN or +inf, or with nothing left to
            choose.
        """
        self._check(logits, len(states))
        if not states:
            return []
        logits = logits.detach()
        token_ids, largest = _argmax(logits)
        broken = [i for i, value in enumerate(largest) if not math.isfinite(value)]
        random = [i for i, state in enumerate(states) if not state.params.is_greedy]
        uniforms: dict[int, float] = {}
        if random:
            numbers = philox.uniform(
                [states[i].seed for i in random],
                [len(states[i].output_token_ids) for i in random],
            )
            uniforms = dict(zip(random, numbers.tolist(), strict=True))
        for i, state in enumerate(states):
            if not math.isfinite(largest[i]) or not (state._has_edits or i in uniforms):
                continue
            row = logits[i]
            if state._has_edits:
                row = row.clone()
                state._edit(row)
                (token_ids[i],), (largest[i],) = _argmax(row[None])
                if not math.isfinite(largest[i]):
                    broken.append(i)
                    continue
            if i in uniforms:
                # From the largest down, so that no temperature can overflow upwards.
                scaled = (row - largest[i]).div_(state.params.temperature)
                token_ids[i] = _draw(scaled, state.params, uniforms[i])
        self._refuse(sorted(broken))

        result = []
        for i, (token_id, state) in enumerate(zip(token_ids, states, strict=True)):
            logprob = None
            if (width := state.params.logprobs) is not None:
                (logprob,) = _logprobs(logits[i : i + 1], [token_id], width)
            result.append(SampledToken(token_id, logprob))
        return result

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], k: int
    ) -> list[TokenLogprob]:
        """Log-probabilities of tokens that are given, not chosen.

        :param logits: [m, vocab] float32; not modified.
        :param target_ids: m: for each row the token that follows it in the prompt.
        :param k: how many of the likeliest tokens to add.
        :raises InvalidLogitsError: naming the rows with NaN or +inf.
        """
        self._check(logits, len(target_ids))
        logits = logits.detach()
        result: list[TokenLogprob] = []
        for start in range(0, len(target_ids), _LOGPROB_ROWS):
            rows = logits[start : start + _LOGPROB_ROWS]
            largest = rows.amax(-1).tolist()
            self._refuse(start + i for i, value in enumerate(largest) if not math.isfinite(value))
            targets = target_ids[start : start + _LOGPROB_ROWS]
            result += _logprobs(rows, targets, k)
        return result

    def _check(self, logits: Tensor, rows: int) -> None:
        if logits.shape != (rows, self._vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)} and should be torch.float32 "
                f"{(rows, self._vocab_size)}: one row per sequence"
            )

    @staticmethod
    def _refuse(rows: Iterable[int]) -> None:
        rows = list(rows)
        if rows:
            raise InvalidLogitsError(rows)


def _argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """Index (the first among equals) and value of each row's largest; NaN is the largest."""
    if logits.device.type == "cpu":
        # NumPy's is vectorized: about 20 times as fast as torch's on a CPU.
        rows = logits.numpy()
        first = rows.argmax(-1)
        return first.tolist(), rows[np.arange(len(rows)), first].tolist()
    values, indices = logits.max(-1)
    # Token ids are exact in float64: one transfer for both.
    values, indices = torch.stack([values.double(), indices.double()]).tolist()
    return [int(index) for index in indices], values


def _draw(scaled: Tensor, params: SamplingParams, uniform: float) -> int:
    """Filter a row and choose by inverse transform.

    :param scaled: [vocab], logits over temperature, the largest 0; overwritten.
    :param uniform: strictly between 0 and 1.
    """
    ids: Tensor | None = None
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scaled):
        floor = max(floor, scaled.topk(params.top_k, sorted=False).values.min().item())
    if floor > -math.inf:
        ids = _nonzero(scaled >= floor)
        scaled = scaled[ids]
    weights = scaled.exp_()
    if params.top_p < 1.0:
        # Tokens below (1 - top_p) / count cannot reach 1 - top_p together, so all of them are
        # outside; only the few others have to be sorted.
        total = weights.sum(dtype=torch.float64).item()
        kept = _nonzero(weights >= (1.0 - params.top_p) * total / len(weights))
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
        ordered = _descending(weights)
        mass = ordered.cumsum(0, dtype=torch.float64)
        last = min(int(torch.searchsorted(mass, params.top_p * total)), len(mass) - 1)
        weights.masked_fill_(weights < ordered[last], 0.0)
    mass = weights.cumsum(0, dtype=torch.float64)
    # uniform is at most 1 - 2^-53, so the product rounds to less than the last sum; and the first
    # sum above it is one that just grew, which it never does at a token of weight zero.
    index = int(torch.searchsorted(mass, uniform * mass[-1], right=True))
    return index if ids is None else int(ids[index])


def _logprobs(logits: Tensor, token_ids: Sequence[int], width: int) -> list[TokenLogprob]:
    """Log-probability and rank of one token per row, and of the `width` likeliest."""
    norms = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, _ids(token_ids, logits)[:, None])
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    values = (chosen - norms)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if width > 0:
        # One more than asked for, to see whether the last place is shared.
        best = logits.topk(min(width + 1, logits.shape[1]))
        rows = zip(logits, best.values, best.indices, norms, strict=True)
        tops = [_top(*row, width) for row in rows]
    return [TokenLogprob(*one) for one in zip(token_ids, values, ranks, tops, strict=True)]


def _top(
    row: Tensor, values: Tensor, ids: Tensor, norm: Tensor, width: int
) -> tuple[tuple[int, float], ...]:
    """The `width` likeliest of a row, best first, equals in order of id."""
    likeliest = values.tolist()
    if width < len(likeliest) and likeliest[width - 1] == likeliest[width]:
        # topk takes any of the equals that compete for the last places; take the first.
        ids = _nonzero(row >= likeliest[width - 1])
        values = row[ids]
    pairs = zip(ids.tolist(), values.tolist(), (values - norm).tolist(), strict=True)
    ranked = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return tuple((token_id, logprob) for token_id, _, logprob in ranked[:width])


def _nonzero(mask: Tensor) -> Tensor:
    """Indices [k] at which a mask [n] is true, in order."""
    if mask.device.type == "cpu":
        # About 6 times as fast as torch's on a CPU.
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def _descending(values: Tensor) -> Tensor:
    """The values [k], largest first."""
    if values.device.type == "cpu":
        # About 4 times as fast as torch's on a CPU.
        return torch.from_numpy(np.sort(values.numpy())[::-1].copy())
    return values.sort(descending=True).values


def _ids(token_ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)
