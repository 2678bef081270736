"""Long texts are encoded in slices: the same ids, and calls of bounded size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ragserve.engine import Tokenizer
from ragserve.engine.text.slices import SLICE_CHARACTERS, slices

TEXT = "\n".join(topics.values())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Backend:
    """As Llama 3, Qwen, SmolLM: pre-tokenized by a regular expression, with BOS and EOS."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT[:20_000]], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return backend


def one_word() -> Backend:
    """As Llama 2: no pre-tokenizer, and a space is put before every text."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *BYTES], show_progress=False
    )
    backend.train_from_iterator(TEXT[:20_000].split("\n"), trainer)
    return backend


def unigram() -> Backend:
    """As T5: the likeliest pieces of words that begin with a space."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator(TEXT[:20_000].split("\n"), trainer)
    return backend


@pytest.fixture(scope="module", params=[byte_level, one_word, unigram], ids=lambda f: f.__name__)
def backend(request: pytest.FixtureRequest) -> Any:
    # Written down and read again, as a tokenizer's clones are: pieces that are equally likely may
    # change places by that.
    return Backend.from_str(request.param().to_str())


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_long_text_has_the_ids_that_it_has_in_one_call(
    backend: Backend, add_special_tokens: bool
) -> None:
    tokenizer = Tokenizer.from_fast(PreTrainedTokenizerFast(tokenizer_object=backend))
    chance = random.Random(1)
    words = " ".join(chance.choices(TEXT.split(), k=20_000))
    for text in (TEXT[:150_000], words, "x = 1\n" * 20_000):
        assert len(text) > 2 * SLICE_CHARACTERS
        whole = backend.encode(text, add_special_tokens=add_special_tokens).ids
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == whole


DEGENERATE: dict[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "spaces": lambda n: " " * n,
    "random": lambda n: "".join(random.Random(2).choices("ab天空🙂é", k=n)),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_ids_stand_for_the_text_where_it_has_no_boundaries(backend: Backend, name: str) -> None:
    text = DEGENERATE[name](100_000)
    tokenizer = Tokenizer.from_fast(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = backend.encode(text, add_special_tokens=False).ids
    # What it stands for is the same; so, all but exactly, is how many ids it takes.
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    assert abs(len(ids) - len(whole)) <= 10 * (100_000 // SLICE_CHARACTERS)


def test_no_call_is_longer_than_a_slice() -> None:
    sizes: list[int] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        sizes.extend(map(len, texts))
        return [[*text.encode()] for text in texts]

    for text in (TEXT[:150_000], "a" * 150_000, "", "a" * SLICE_CHARACTERS):
        parts = [*slices(text, encode)]
        assert "".join(parts) == text
        assert max(map(len, parts), default=0) <= SLICE_CHARACTERS
    assert max(sizes) <= 128


def test_a_text_is_cut_nowhere_if_every_cut_changes_it() -> None:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[len(text)] for text in texts]

    text = "a b\n" * 25_000
    assert [*slices(text, encode)] == [text]


def test_a_watched_tokenizer_is_asked_between_slices() -> None:
    tokenizer = Tokenizer.from_fast(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    asked: list[int] = []

    def check(num_tokens: int) -> None:
        asked.append(num_tokens)
        if len(asked) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        tokenizer.watched(check).encode(TEXT)
    assert 0 < asked[0] < asked[1] <= 2 * SLICE_CHARACTERS
    assert len(asked) == 2
    # The other one is not watched, and all its clones are there.
    assert len(tokenizer.encode("hello", add_special_tokens=False)) > 0
    assert "2 clones free" in repr(tokenizer)
