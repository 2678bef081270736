"""Splitting documents: nothing lost, nothing reordered, nothing too long."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragserve.documents import Chunk, Document, TokenSplitter
from ragserve.engine import InvalidParamsError


def count_words(text: str) -> int:
    """A token per word and punctuation mark; CJK characters one each."""
    return len(re.findall(r"[一-鿿]|[^\W一-鿿]+|[^\w\s]|\n\n", text))


def count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def count_superadditively(text: str) -> int:
    """Joining costs: the count of two stretches is more than the sum of theirs."""
    return len(text) + text.count(" ") * 3


COUNTERS = [count_words, count_bytes, count_superadditively]

TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "One. ",
                "Two words! ",
                "e.g. this ",
                "第一句。",
                "第二句！",
                "“引用。”",
                "\n\n",
                "\n",
                "  ",
            ]
        ),
        st.text(max_size=30),
        st.text(alphabet="ab .\n", max_size=80),
    ),
    max_size=25,
).map("".join)


def without_space(text: str) -> str:
    return "".join(text.split())


@settings(deadline=None, max_examples=300)
@given(text=TEXT, limit=st.integers(8, 40), count=st.sampled_from(COUNTERS))
def test_chunks_joined_are_the_text(text: str, limit: int, count: Callable[[str], int]) -> None:
    chunks = TokenSplitter(count, limit).split_text(text)
    position = 0
    for chunk in chunks:
        assert chunk == chunk.strip() != ""
        assert count(chunk) <= limit
        found = text.index(chunk, position)
        assert text[position:found].strip() == ""  # only white space is dropped
        position = found + len(chunk)
    assert text[position:].strip() == ""


@settings(deadline=None, max_examples=300)
@given(
    text=TEXT,
    limit=st.integers(8, 40),
    overlap=st.integers(0, 7),
    count=st.sampled_from(COUNTERS),
)
def test_overlap_repeats_only_what_came_before(
    text: str, limit: int, overlap: int, count: Callable[[str], int]
) -> None:
    chunks = TokenSplitter(count, limit, overlap).split_text(text)
    whole = without_space(text)
    # Where a text repeats itself, one cannot tell what of a chunk is new: these are the lengths of
    # `whole` that the chunks so far may have covered, each of them with something new in it.
    covered = {0}
    for chunk in chunks:
        assert count(chunk) <= limit
        plain = without_space(chunk)
        covered = {
            start + len(plain)
            for done in covered
            for start in range(max(0, done + 1 - len(plain)), done + 1)
            if whole.startswith(plain, start)
        }
    assert len(whole) in covered


def test_keeps_paragraphs_then_sentences() -> None:
    text = "First one here. Second one here.\n\nThird one here. Fourth one here. Fifth one here."
    split = TokenSplitter(count_words, 9).split_text
    assert split(text) == [
        "First one here. Second one here.",
        "Third one here. Fourth one here.",
        "Fifth one here.",
    ]


def test_chinese_sentences_end_without_space() -> None:
    text = "今天天气很好。我们去公园吧！你想去吗？“当然想去。”他说；大家都笑了。"
    chunks = TokenSplitter(len, 10).split_text(text)
    assert chunks == [
        "今天天气很好。",
        "我们去公园吧！",
        "你想去吗？",
        "“当然想去。”他说；",
        "大家都笑了。",
    ]


def test_an_abbreviation_or_a_number_does_not_end_a_sentence() -> None:
    text = "Use e.g. version 3.11 of it. Then stop."
    assert TokenSplitter(len, 30).split_text(text) == ["Use e.g. version 3.11 of it.", "Then stop."]


def test_long_sentence_is_cut_at_lines_then_words_then_characters() -> None:
    assert TokenSplitter(len, 12).split_text("alpha beta\ngamma delta") == [
        "alpha beta",
        "gamma delta",
    ]
    assert TokenSplitter(len, 8).split_text("alpha beta gamma") == ["alpha", "beta", "gamma"]
    word = "x" * 1000
    chunks = TokenSplitter(len, 7).split_text(word)
    assert "".join(chunks) == word
    assert max(map(len, chunks)) <= 7


def test_overlap_takes_whole_sentences() -> None:
    text = "Aaa bbb. Ccc ddd. Eee fff. Ggg hhh."
    assert TokenSplitter(count_words, 6, 3).split_text(text) == [
        "Aaa bbb. Ccc ddd.",
        "Ccc ddd. Eee fff.",
        "Eee fff. Ggg hhh.",
    ]


def test_split_gives_ids_indices_and_metadata() -> None:
    document = Document("d", "Aaa bbb. Ccc ddd.", {"source": "here"})
    assert TokenSplitter(count_words, 3).split(document) == [
        Chunk("d#0", "d", "Aaa bbb.", 0, {"source": "here"}),
        Chunk("d#1", "d", "Ccc ddd.", 1, {"source": "here"}),
    ]
    assert TokenSplitter(count_words, 3).split(Document("blank", " \n ")) == []
    assert len(TokenSplitter(count_words, 3).split_many([document, document])) == 4


def test_counts_with_anything_that_encodes() -> None:
    class Encoder:
        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

    assert TokenSplitter(Encoder(), 5).split_text("aaa bbb") == ["aaa", "bbb"]


@pytest.mark.parametrize(
    ("tokenizer", "limit", "overlap", "parameter"),
    [
        (len, 0, 0, "chunk_tokens"),
        (len, 4, 4, "overlap_tokens"),
        (len, 4, -1, "overlap_tokens"),
        (object(), 4, 0, "tokenizer"),
    ],
)
def test_bad_parameters(tokenizer: object, limit: int, overlap: int, parameter: str) -> None:
    with pytest.raises(InvalidParamsError) as caught:
        TokenSplitter(tokenizer, limit, overlap)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


def test_limit_below_one_character_is_refused() -> None:
    with pytest.raises(InvalidParamsError, match="at least 4"):
        TokenSplitter(count_bytes, 3).split_text("🙂")
