"""What a caller may ask of sampling: `SamplingParams`, every value checked when it is made.

The names and meanings are vLLM's. No torch here: `import ragserve` reaches this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final, cast

from .errors import InvalidParamsError
from .prompt import check_text

__all__ = ["MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS: Final = 20
"""Most likeliest tokens a caller may ask the log-probabilities of."""

_MAX_N: Final = 128
_MAX_TOKENS: Final = 2**31 - 1
_MAX_IDS: Final = 2**18
"""Of token ids in a list or mapping: as many as the largest vocabularies have."""
_MAX_STRINGS: Final = 2**16
"""Both are looked at in some 10 ms. What an engine takes is bounded by its `RequestLimits`, which
are far below by default."""
_GREEDY_BELOW: Final = 1e-5
_INT64: Final = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Containers are copied to immutable ones, numbers become plain `int` and `float`; the
    caller's objects are never kept or changed. At most 262,144 token ids or
    65,536 strings each; how many an engine takes is a matter of its `RequestLimits`.

    :param n: choices to generate, 1 to 128; they share the prompt's blocks.
    :param temperature: divides the logits, 0 to 100. Below 1e-5: greedy, the likeliest token.
    :param top_p: keep the smallest set of likeliest tokens of at least this probability,
        above 0, up to 1 (off).
    :param top_k: keep this many likeliest tokens; 0 or -1: all (stored as 0).
    :param min_p: keep tokens at least this fraction as likely as the likeliest, 0 (off) to 1.
    :param repetition_penalty: above 0, up to 100; divides positive and multiplies negative
        logits of tokens in the prompt or output. 1: off.
    :param presence_penalty: -2 to 2, subtracted from the logits of tokens in the output.
    :param frequency_penalty: -2 to 2, subtracted once per occurrence in the output.
    :param seed: a 64-bit signed integer: same seed, same tokens. None: a fresh one each time.
    :param logit_bias: token id to a number, -100 to 100, added to its logit.
    :param allowed_token_ids: the only tokens that may be chosen. None: all.
    :param bad_words: strings that must not be generated.
    :param min_tokens: what would end the choice (end-of-sequence and `stop_token_ids`) is
        banned until this many tokens are out.
    :param max_tokens: most tokens to generate, 1 to 2^31 - 1. None: as many as fit the model.
    :param stop: strings that end the choice; one string will do. Stored as a tuple.
    :param stop_token_ids: token ids that end the choice. Stored as a tuple.
    :param ignore_eos: go on after an end-of-sequence token.
    :param include_stop_str_in_output: keep the stop string in the text.
    :param skip_special_tokens: leave special tokens out of the text.
    :param detokenize: make text of the tokens. False gives token ids only, and takes no `stop`.
    :param logprobs: log-probability of each generated token and of this many likeliest ones,
        0 to 20. None: none.
    :param prompt_logprobs: the same for the prompt's tokens.
    :raises InvalidParamsError: if a value has the wrong type or is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._store("n", _integer("n", self.n, 1, _MAX_N))
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            self._store(name, _number(name, getattr(self, name), low, high))
        for name, high in (("top_p", 1.0), ("repetition_penalty", 100.0)):
            self._store(name, _number(name, getattr(self, name), 0.0, high, open_low=True))
        self._store("top_k", max(0, _integer("top_k", self.top_k, -1, note="0 and -1: off")))
        self._store("min_tokens", _integer("min_tokens", self.min_tokens, 0, _MAX_TOKENS))
        for name, least, most in (
            ("seed", *_INT64),
            ("max_tokens", 1, _MAX_TOKENS),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None:
                self._store(name, _integer(name, value, least, most, note="or None"))
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParamsError(name, getattr(self, name), "True or False")
        self._store(
            "stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        )
        if self.stop and not self.detokenize:
            raise InvalidParamsError(
                "stop", self.stop, "None with detokenize=False: without text there are no strings"
            )
        self._store("bad_words", _strings("bad_words", self.bad_words))
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidParamsError("allowed_token_ids", (), "at least one id, or None")
            self._store("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._store("logit_bias", _bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParamsError(
                "min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}"
            )

    @classmethod
    def greedy(cls, **params: Any) -> SamplingParams:
        """Parameters that always choose the likeliest token.

        :param params: any others, by name.
        :raises InvalidParamsError: if one is out of its range.
        """
        return cls(temperature=0.0, **params)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen, without randomness."""
        return self.temperature < _GREEDY_BELOW

    def check_vocab(self, vocab_size: int) -> None:
        """Check the token ids, once the model is known.

        :param vocab_size: ids must be below it.
        :raises InvalidParamsError: naming the first id that is not.
        """
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise InvalidParamsError(
                        name, token_id, f"token ids are 0 to {vocab_size - 1} in this model"
                    )

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings cannot be pickled or deep-copied; their content can.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.logit_bias is not None:
            values["logit_bias"] = dict(self.logit_bias)
        return partial(type(self), **values), ()

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _integer(
    name: str, value: object, least: int, most: int | None = None, *, note: str = ""
) -> int:
    if (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and least <= int(value)
        and (most is None or int(value) <= most)
    ):
        return int(value)
    allowed = (
        f"an integer of at least {least}" if most is None else f"an integer, {least} to {most}"
    )
    raise InvalidParamsError(name, value, f"{allowed} ({note})" if note else allowed)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer beyond every range
            number = float(value)
    if low <= number <= high and not (open_low and number == low):
        return number
    bound = f"above {low:g}, up to {high:g}" if open_low else f"{low:g} to {high:g}"
    raise InvalidParamsError(name, value, f"a finite number, {bound}")


def _sequence(name: str, value: object, what: str, most: int) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise InvalidParamsError(name, value, f"a list or tuple of {what}, or None")
    _check_size(name, value, most)
    return tuple(value)


def _check_size(name: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise InvalidParamsError(name, f"{len(value)} items", f"at most {most} items")


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = []
    for item in _sequence(name, value, "strings", _MAX_STRINGS):
        if not isinstance(item, str) or not item:
            raise InvalidParamsError(name, item, "strings of at least one character")
        check_text(name, item)
        strings.append(item)
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    items = _sequence(name, value, "token ids", _MAX_IDS)
    # Mostly they are as they should be: two passes in C rather than a call for each.
    if set(map(type, items)) <= {int}:
        token_ids = cast("tuple[int, ...]", items)
        if min(token_ids, default=0) >= 0:
            return token_ids
    return tuple(_integer(name, item, 0, note="a token id") for item in items)


def _bias(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidParamsError("logit_bias", value, "a mapping of token ids to numbers, or None")
    _check_size("logit_bias", value, _MAX_IDS)
    return MappingProxyType(
        {
            _integer("logit_bias", token_id, 0, note="a token id"): _number(
                "logit_bias", bias, -100.0, 100.0
            )
            for token_id, bias in value.items()
        }
    )
