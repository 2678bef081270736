"""Questions on documents of which some are asked about far more often than others.

The documents are about 256 tokens each, with their number in front, of the text of Python's
language reference. A question gets a few different ones, drawn by Zipf's law, in an order that
has nothing to do with how popular they are: as relevance has not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["SYSTEM", "Question", "cut_documents", "draw_documents", "draw_questions"]

SYSTEM = (
    "You answer questions about the Python language from the numbered passages that follow, and "
    "from nothing else. Begin with the answer itself, in one sentence; then say why it is so, for "
    "somebody who programs but has never met this part of the language. After each statement give "
    "the number of the passage that it rests on. If two passages disagree, say that they do, and "
    "go by the one that is more exact. If none of them holds the answer, say that too, and do not "
    "guess. Show code only if it is shorter than the words for it."
)
"""About 128 tokens with a chat template around it."""

_TOKENS = 249
"""Of a document's text; its number in front takes some six more."""

_ASKED = (
    "What do the passages say about {a}, and where does {b} come in?",
    "Is {a} evaluated before {b}, and does it matter?",
    "Why would a program use {a} rather than {b}?",
    "What happens to {a} when {b} fails?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the numbers of the documents found for it, the most relevant first."""

    text: str
    documents: tuple[int, ...]


def cut_documents(count: int, encode: Callable[[str], list[int]]) -> list[str]:
    """Texts of about 249 tokens each, cut between words.

    :param encode: text to token ids, without special tokens.
    :raises ValueError: if there is not text enough.
    """
    from pydoc_data.topics import topics

    # What is long makes whole documents; of each topic the remainder is left out.
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))
    documents: list[str] = []
    for name in longest:
        documents.extend(_cut(" ".join(topics[name].split()), encode))
        if len(documents) >= count:
            return documents[:count]
    raise ValueError(
        f"{count} documents were asked for, and the language reference gives {len(documents)}; "
        "ask for fewer"
    )


def draw_documents(
    count: int, num_documents: int, zipf: float, seed: int, per_question: int = 4
) -> list[tuple[int, ...]]:
    """The documents of each question, without repetition in one.

    :param zipf: the document of rank r is drawn in proportion to r ** -zipf. Ranks have nothing
        to do with the documents' numbers.
    """
    rng = random.Random(f"{seed} {zipf} {num_documents}")
    by_rank = list(range(num_documents))
    rng.shuffle(by_rank)
    weights = [(rank + 1) ** -zipf for rank in range(num_documents)]
    drawn = []
    for _ in range(count):
        chosen: list[int] = []
        while len(chosen) < per_question:
            (number,) = rng.choices(by_rank, weights)
            if number not in chosen:
                chosen.append(number)
        rng.shuffle(chosen)
        drawn.append(tuple(chosen))
    return drawn


def draw_questions(
    count: int, documents: Sequence[str], zipf: float, seed: int, per_question: int = 4
) -> list[Question]:
    """Questions, no two of them alike."""
    rng = random.Random(f"{seed} questions")
    words = sorted({word for text in documents for word in re.findall(r"\b[a-z]{5,12}\b", text)})
    return [
        Question(
            f"{number}. " + rng.choice(_ASKED).format(a=rng.choice(words), b=rng.choice(words)),
            chosen,
        )
        for number, chosen in enumerate(
            draw_documents(count, len(documents), zipf, seed, per_question), 1
        )
    ]


def _cut(text: str, encode: Callable[[str], list[int]]) -> Iterator[str]:
    # Byte-level tokenizers split at spaces first, so the words' tokens add up.
    words: list[str] = []
    num_tokens = 0
    for word in text.split(" "):
        length = len(encode(f" {word}"))
        if num_tokens + length > _TOKENS:
            yield " ".join(words)
            words, num_tokens = [], 0
        words.append(word)
        num_tokens += length
