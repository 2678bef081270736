"""Counter-based random numbers: the same number for the same (seed, position), always.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3"
(SC 2011): a keyed bijection of 128-bit counters. There is no state to keep, to advance or to
restore, so a number depends neither on the batch it is drawn in nor on what was drawn before,
and a device kernel that computes the same few multiplications draws the same numbers.

Layout used here: the key is the seed's low and high 32 bits; the counter is the position's low
and high 32 bits, an index, and a purpose (0: uniform numbers, 1: seeds).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["derive_seed", "philox4x32", "uniform"]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10
_UNIFORM, _SEED = 0, 1


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 of many counters.

    :param counter: [4, n], 32-bit words, least significant first.
    :param key: [2, n], 32-bit words.
    :return: [4, n], 32-bit words (in 64-bit integers, like the arguments).
    """
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even = (product >> _32)[::-1] ^ odd ^ key
        odd = (product & _LOW)[::-1]
        key = (key + _WEYL) & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number strictly between 0 and 1 for each (seed, position).

    It is (k + 1/2) / 2^52, where k is the top 52 bits of the block's first word followed by its
    second: exact in float64, never 0 and never 1.

    :param seeds: n integers; the low 64 bits count.
    :param positions: n integers, at least 0, below 2^64.
    :return: [n].
    """
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[:2] = _words(positions)
    counter[3] = _UNIFORM
    words = philox4x32(counter, _words(seeds))
    top = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return np.asarray((top.astype(np.float64) + 0.5) * 2.0**-52)


def derive_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of several sequences that share one seed; the first keeps it.

    :param seed: an integer; the low 64 bits count.
    :param index: at least 0, below 2^32.
    """
    if index == 0:
        return seed
    counter = np.array([[0], [0], [index], [_SEED]], dtype=np.uint64)
    words = philox4x32(counter, _words([seed]))
    return int(words[0, 0]) | int(words[1, 0]) << 32


def _words(values: Sequence[int]) -> NDArray[np.uint64]:
    """[2, n]: the low and the high 32 bits of each value."""
    whole = np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], dtype=np.uint64)
    return np.stack([whole & _LOW, whole >> _32])
