"""Three deterministic workloads, as token ids, from the text of Python's language reference.

    rag      64 requests: a system prompt of about 128 tokens shared by all, 3 of 40 documents of
             about 200 tokens drawn with Zipf(1.1) popularity, a question; 64 output tokens
    noshare  32 requests: 512 tokens each, nothing in common; 64 output tokens
    decode   32 requests: 32 tokens each; 256 output tokens

Pieces are tokenized apart and joined as ids, so what is shared is shared to the token. All
are to be run greedily, with end-of-sequence tokens ignored.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WORKLOADS", "BenchRequest", "build_workload", "read_workload"]

WORKLOADS = ("rag", "noshare", "decode")

_NUM_DOCUMENTS, _DOCUMENT_TOKENS, _SYSTEM_TOKENS = 40, 200, 128
_SYSTEM = (
    "You answer questions about the Python language. Use the numbered passages below and nothing "
    "else. State the answer first, in one sentence, and then explain it for a reader who writes "
    "programs but does not know this corner of the language. Name the passage that each statement "
    "rests on. Where passages contradict each other, say so and prefer the more specific one. "
    "Where they do not hold the answer, say that plainly and suggest a term to look up. Quote "
    "code only where it is shorter than describing it, and never invent a function, an option or "
    "a version. Do not repeat the question. Do not apologise. The passages come next, in the "
    "order in which they were found, each with its number before it."
)
_QUESTIONS = (
    "What is the difference between {a} and {b}, and when would you choose the first of them?",
    "How does {a} behave when {b} is involved, and what does a program see if it goes wrong?",
    "Explain what the passages say about {a}, with an example that also uses {b}.",
)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload."""

    id: int
    prompt: tuple[int, ...]
    output_tokens: int


def read_workload(path: Path) -> list[BenchRequest]:
    """Read a workload from JSON: a list of `{"id", "prompt": [token ids], "n_out"}`."""
    return [
        BenchRequest(int(entry["id"]), tuple(entry["prompt"]), int(entry["n_out"]))
        for entry in json.loads(path.read_text())
    ]


def build_workload(name: str, encode: Encode) -> list[BenchRequest]:
    """Build a workload with a model's tokenizer; the same every time.

    :param name: one of `WORKLOADS`.
    :param encode: text to token ids, without special tokens.
    """
    from pydoc_data.topics import topics

    texts = _prose(topics)
    rng = random.Random(f"ragserve {name}")
    if name == "rag":
        return _rag(texts, encode, rng)
    if name == "noshare":
        return _unshared(texts, encode, rng, count=32, length=512, output_tokens=64)
    if name == "decode":
        return _unshared(texts, encode, rng, count=32, length=32, output_tokens=256)
    raise ValueError(f"{name!r} is no workload; there are {', '.join(WORKLOADS)}")


def _prose(topics: Mapping[str, str]) -> list[str]:
    """The longest topics, each as one line, in alphabetical order."""
    longest = sorted(topics, key=lambda name: -len(topics[name]))[:_NUM_DOCUMENTS]
    return [" ".join(topics[name].split()) for name in sorted(longest)]


def _words(texts: list[str]) -> list[str]:
    return sorted({word for text in texts for word in re.findall(r"[a-z]{5,12}", text)})


def _rag(texts: list[str], encode: Encode, rng: random.Random) -> list[BenchRequest]:
    system = encode(_SYSTEM)[:_SYSTEM_TOKENS]
    documents = [
        encode(f"\n[{number}] ") + encode(text)[:_DOCUMENT_TOKENS]
        for number, text in enumerate(texts, 1)
    ]
    popularity = [1 / (rank + 1) ** 1.1 for rank in range(len(documents))]
    rng.shuffle(documents)
    words = _words(texts)
    requests = []
    for index in range(64):
        chosen: list[int] = []
        while len(chosen) < 3:
            (rank,) = rng.choices(range(len(documents)), popularity)
            if rank not in chosen:
                chosen.append(rank)
        question = rng.choice(_QUESTIONS).format(a=rng.choice(words), b=rng.choice(words))
        prompt = [*system, *(t for rank in chosen for t in documents[rank])]
        prompt += encode(f"\nQuestion: {question}\nAnswer:")
        requests.append(BenchRequest(index, tuple(prompt), 64))
    return requests


def _unshared(
    texts: list[str],
    encode: Encode,
    rng: random.Random,
    *,
    count: int,
    length: int,
    output_tokens: int,
) -> list[BenchRequest]:
    words = _words(texts)
    requests = []
    for index in range(count):
        # Different first words, so that not even the first block is shared.
        prompt = encode(f"{rng.choice(words).title()} {index} {rng.choice(words)}: ")
        while len(prompt) < length:
            text = rng.choice(texts)
            start = rng.randrange(max(1, len(text) - 400))
            prompt += encode(text[start : start + 400])
        requests.append(BenchRequest(index, tuple(prompt[:length]), output_tokens))
    return requests
