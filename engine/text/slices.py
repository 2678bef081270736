"""Long texts are encoded in slices, so that no call into the tokenizer takes long.

A call cannot be interrupted, and random Unicode takes some 3 s per million characters. A text is
cut where the characters around the cut have the same tokens with and without it: at the end of a
line or a word, or between two characters if there is no such end. So the ids of a text are those
that the tokenizer gives for all of it at once, but for runs of more than a slice without any
natural boundary, which may be divided otherwise; what the ids stand for is always the text itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["SLICE_CHARACTERS", "SLICE_IDS", "slices"]

SLICE_CHARACTERS = 32_768
"""Longest slice: at most some 0.1 s, and a list of ids that is made in a few milliseconds."""
SLICE_IDS = 16_384
"""Ids that are looked at in one call: some 0.5 ms, in which no other thread runs."""

_AROUND = 64
"""Characters on each side of a cut whose tokens are compared; few words are longer."""
_SEARCHED = 4096
"""Characters before the end of a slice in which a natural boundary is looked for."""
_TRIED = 8
"""Cuts of a kind that are tried."""

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def slices(text: str, encode: Encode) -> Iterator[str]:
    """Texts whose ids, joined, are those of `text`.

    :param encode: ids of each of several texts, without special tokens.
    """
    start = 0
    while len(text) - start > SLICE_CHARACTERS:
        end, following = _cut(text, start + SLICE_CHARACTERS, encode)
        yield text[start:end]
        start = following
    if start < len(text):
        yield text[start:]


def _cut(text: str, end: int, encode: Encode) -> tuple[int, int]:
    """Where a slice ends that is to end before `end`, and where the next one begins.

    If no cut will do, it ends behind `end`, or with the text.
    """
    while end < len(text):
        for left, right in _candidates(text, end):
            before, after = text[left - _AROUND : left], text[right : right + _AROUND]
            whole, first, second = encode([text[left - _AROUND : right + _AROUND], before, after])
            if [*first, *second] == [*whole]:
                return left, right
        end += SLICE_CHARACTERS
    return len(text), len(text)


def _candidates(text: str, end: int) -> Iterator[tuple[int, int]]:
    """Cuts before `end`, as where the one part ends and the other begins."""
    lowest = end - _SEARCHED
    for mark in ("\n", " "):
        place = end
        for _ in range(_TRIED):
            place = text.rfind(mark, lowest, place)
            if place < 0:
                break
            if mark == "\n":
                yield place + 1, place + 1
            else:
                yield place, place
                # Some tokenizers put the space before a text themselves.
                yield place, place + 1
    for place in range(end - 1, end - 1 - _TRIED, -1):
        yield place, place
