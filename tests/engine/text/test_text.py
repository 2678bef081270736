"""Tokenizing by every entry, and ids to text: characters, spaces and stop strings in pieces."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ragserve.engine.errors import InvalidParamsError, ModelLoadError
from ragserve.engine.prompt import Prompt, Retention, Segment, TokenizedPrompt
from ragserve.engine.text.detokenizer import Detokenizer
from ragserve.engine.text.stop_strings import StopStrings
from ragserve.engine.text.tokenizer import Tokenizer

FAMILY = "👩\u200d👩\u200d👧\u200d👦"
TEXTS = [
    "Why is the sky blue? Because the air scatters blue light more than red light.",
    "The sky at night is dark, and the stars are bright.  Two spaces;\n\nnew paragraph.",
    "ทำไมท้องฟ้าถึงเป็นสีฟ้า เพราะอากาศกระเจิงแสงสีน้ำเงิน",
    "天空为什么是蓝色的？因为空气散射蓝光。",
    f"Emoji: {FAMILY} 👍🏽 🇹🇭 é e\u0301 naïve — “quotes”",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'nobody' %}"
    "{{ raise_exception('unknown role') }}{% endif %}[{{ m.role }}] {{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2


def _wrap(backend: Backend, **kwargs: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        **kwargs,
    )


def _add_bos(backend: Backend) -> None:
    backend.post_processor = processors.Sequence(
        [
            backend.post_processor or processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)]),
        ]
    )


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    # Added tokens bypass the byte alphabet: with a space, with other letters, and special.
    backend.add_tokens([AddedToken("<two words>"), AddedToken("<天空>")])
    backend.add_special_tokens([AddedToken("<|tool|>", special=True)])
    return backend


def _sentencepiece(decoder: decoders.Decoder) -> Backend:
    """As Llama 2: `▁` for spaces, characters that are not in the vocabulary as bytes."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS[:2] * 4, BpeTrainer(vocab_size=150, show_progress=False))
    definition = json.loads(trained.to_str())["model"]
    pieces = sorted(definition["vocab"], key=definition["vocab"].get)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    if "▁" not in tokens:
        tokens.append("▁")
    backend = Backend(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in definition["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoder
    return backend


_REPLACE = decoders.Replace("▁", " ")
LLAMA = decoders.Sequence(
    [_REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([_REPLACE, decoders.ByteFallback(), decoders.Fuse()])
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
SENTENCEPIECE = {"llama": LLAMA, "gemma": GEMMA, "metaspace": METASPACE}

BACKENDS = {"byte_level": _byte_level()} | {
    name: _sentencepiece(decoder) for name, decoder in SENTENCEPIECE.items()
}
TOKENIZERS = {
    name: Tokenizer.from_fast(_wrap(backend, chat_template=CHAT_TEMPLATE))
    for name, backend in BACKENDS.items()
}
BYTE_LEVEL, LLAMA_LIKE = TOKENIZERS["byte_level"], TOKENIZERS["llama"]


def _with_bos(name: str, **kwargs: Any) -> Tokenizer:
    backend = Backend.from_str(BACKENDS[name].to_str())
    _add_bos(backend)
    return Tokenizer.from_fast(_wrap(backend, chat_template=CHAT_TEMPLATE, **kwargs))


BOS_TOKENIZERS = {name: _with_bos(name) for name in ("byte_level", "llama")}


# --- Ids to text -----------------------------------------------------------------------------


TO_BYTE = {character: byte for byte, character in bytes_to_unicode().items()}
ADDED = BACKENDS["byte_level"].get_added_tokens_decoder()


def _chunks(data: st.DataObject, ids: Sequence[int]) -> Iterator[Sequence[int]]:
    position = 0
    while position < len(ids):
        size = data.draw(st.integers(1, 4))
        yield ids[position : position + size]
        position += size


def _bytes_of(ids: Sequence[int], skip_special_tokens: bool) -> bytes:
    """Byte-level tokens by definition, with no part of the code under test."""
    result = b""
    for token_id in ids:
        if token_id in ADDED:
            if not (ADDED[token_id].special and skip_special_tokens):
                result += ADDED[token_id].content.encode()
        elif (token := BACKENDS["byte_level"].id_to_token(token_id)) is not None:
            result += bytes(TO_BYTE[character] for character in token)
    return result


def _is_incomplete(data: bytes) -> bool:
    """Whether more bytes would make this one character."""
    for fill in (b"\x80", b"\xbf"):  # the least and the greatest byte that can follow
        for length in (1, 2, 3):
            try:
                if len((data + fill * length).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                pass
    return False


def _complete_text(data: bytes) -> str:
    """The text without an incomplete character at its end.

    (Python's incremental decoder is no oracle: it also waits for the third byte of a surrogate.)
    """
    ends = (len(data) - length for length in (1, 2, 3) if length <= len(data))
    end = next((end for end in ends if _is_incomplete(data[end:])), len(data))
    return data[:end].decode(errors="replace")


byte_level_ids = st.lists(
    st.one_of(
        st.integers(0, BYTE_LEVEL.vocab_size + 3),  # models have more rows than tokens
        st.integers(3, 258),  # single bytes: mostly wrong ones
        st.sampled_from([0xF0, 0x9F, 0x91, 0xA9, 0xE2, 0x80, 0x8D, 0xED, 0xA0]).map(
            lambda byte: BACKENDS["byte_level"].token_to_id(bytes_to_unicode()[byte])
        ),
    ),
    max_size=24,
)


@given(ids=byte_level_ids, skip=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=250)
def test_byte_level_any_ids_cut_anywhere(ids: list[int], skip: bool, data: st.DataObject) -> None:
    raw = _bytes_of(ids, skip)
    # The oracle is the library's own decoder, but for an incomplete end.
    assert BACKENDS["byte_level"].decode(ids, skip_special_tokens=skip) == raw.decode(
        errors="replace"
    )
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == _complete_text(raw)

    cut = data.draw(st.integers(0, len(ids)))
    prompt_text = _complete_text(_bytes_of(ids[:cut], skip))
    detokenizer = BYTE_LEVEL.detokenizer(ids[:cut], skip_special_tokens=skip)
    shown = ""
    for chunk in _chunks(data, ids[cut:]):
        shown += detokenizer.push(chunk)
        seen = ids[: cut + detokenizer.num_tokens]
        # Neither more nor less than what is certain.
        assert prompt_text + shown == _complete_text(_bytes_of(seen, skip))
    assert detokenizer.finish() == ""
    assert detokenizer.text == shown
    assert detokenizer.num_tokens == len(ids) - cut


def _sentencepiece_units() -> st.SearchStrategy[list[list[int]]]:
    """Tokens in groups, none of which ends inside a character.

    The library's ByteFallback spoils a whole run of byte tokens for one wrong byte, so wrong
    bytes stand between other tokens here.
    """
    backend = BACKENDS["llama"]

    def in_bytes(text: str) -> list[int]:
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        assert None not in ids
        return ids

    plain = st.integers(259, backend.get_vocab_size() - 1).map(lambda token_id: [token_id])
    mark = st.just([backend.token_to_id("▁")])
    special = st.sampled_from([[BOS], [EOS], [backend.get_vocab_size() + 1]])
    character = st.text("é你ท👩\u200d\n a", min_size=1, max_size=4).map(in_bytes)
    wrong = st.tuples(plain, st.integers(0x80, 0xFF), plain).map(
        lambda parts: [*parts[0], 3 + parts[1], *parts[2]]
    )
    return st.lists(st.one_of(plain, mark, special, character, wrong), max_size=10)


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(units=_sentencepiece_units(), skip=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=100)
def test_sentencepiece_like_cut_anywhere(
    name: str, units: list[list[int]], skip: bool, data: st.DataObject
) -> None:
    ids = [token_id for unit in units for token_id in unit]
    reference = BACKENDS[name].decode(ids, skip_special_tokens=skip)
    assert TOKENIZERS[name].decode(ids, skip_special_tokens=skip) == reference

    cut = data.draw(st.integers(0, len(ids)))
    prompt_text = TOKENIZERS[name].decode(ids[:cut], skip_special_tokens=skip)
    detokenizer = TOKENIZERS[name].detokenizer(ids[:cut], skip_special_tokens=skip)
    shown = "".join(map(detokenizer.push, _chunks(data, ids[cut:])))
    assert prompt_text + shown + detokenizer.finish() == reference


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text("aeb คำ你好👩👧\u200d\n🏽", max_size=30), data=st.data())
@settings(deadline=None, max_examples=100)
def test_valid_text_streams_without_replacement_characters(
    name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(f"a{text}", add_special_tokens=False)
    cut, end = sorted((data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, len(ids)))))
    detokenizer = tokenizer.detokenizer(ids[:cut])
    shown = [detokenizer.push([token_id]) for token_id in ids[cut:end]]
    shown.append(detokenizer.finish())
    assert "\ufffd" not in "".join(shown)
    whole = tokenizer.decode(ids)
    assert whole.strip(" ") == f"a{text}".strip(" ")
    assert whole.startswith(tokenizer.decode(ids[:cut]) + "".join(shown))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompt_ends_inside_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        alphabet = bytes_to_unicode()
        face = [BACKENDS[name].token_to_id(alphabet[byte]) for byte in "🥝".encode()]
    else:
        face = [BACKENDS[name].token_to_id(f"<0x{byte:02X}>") for byte in "🥝".encode()]
    word = tokenizer.encode("sky", add_special_tokens=False)
    for cut in range(5):
        detokenizer = tokenizer.detokenizer(word + face[:cut])
        texts = [detokenizer.push([token_id]) for token_id in face[cut:]]
        assert texts == [""] * (3 - cut) + ["🥝"] * (cut < 4)
        assert tokenizer.decode(word + face[:cut]) == tokenizer.decode(word) + "🥝" * (cut == 4)
    # The end of generation comes too early for the character.
    detokenizer = tokenizer.detokenizer(word)
    assert detokenizer.push(face[:3]) + detokenizer.finish() == detokenizer.text == ""


def test_wrong_bytes_do_not_take_back_what_was_shown() -> None:
    """Where the library's ByteFallback would spoil the valid characters in the run as well."""
    ids = [3 + byte for byte in "你".encode() + b"\xe4\xbd" + "好".encode()]
    detokenizer = LLAMA_LIKE.detokenizer([])
    texts = [detokenizer.push([token_id]) for token_id in ids]
    assert texts == ["", "", "你", "", "", "\ufffd\ufffd", "", "好"]
    assert LLAMA_LIKE.decode(ids) == "你\ufffd\ufffd好"


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_leading_spaces(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the sky", add_special_tokens=False)
    sky = tokenizer.encode("sky", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the sky"
    assert tokenizer.decode(sky) == "sky"
    assert tokenizer.detokenizer(ids).push(sky) == " sky"
    assert tokenizer.detokenizer([BOS]).push(sky) == "sky"
    assert tokenizer.detokenizer([*ids, EOS, BOS]).push(sky) == " sky"
    assert tokenizer.detokenizer([BOS], skip_special_tokens=False).push(sky) == " sky"
    mark = BACKENDS[name].token_to_id("▁")
    assert tokenizer.detokenizer([mark]).push(sky) == " sky"
    assert tokenizer.detokenizer([]).push([mark, *sky]) == " sky"


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = BYTE_LEVEL.encode("blue<|tool|> sky</s>")
    assert BYTE_LEVEL.detokenizer([]).push(ids) == BYTE_LEVEL.decode(ids) == "blue sky"
    shown = BYTE_LEVEL.detokenizer([], skip_special_tokens=False).push(ids)
    assert shown == BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "blue<|tool|> sky</s>"


def _words(decoder: decoders.Decoder | None) -> tuple[Backend, Tokenizer]:
    words = [*SPECIAL, "the", "sky", "##s", "is", ".", "blue", "\ufffd"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if decoder is not None:
        backend.decoder = decoder
    return backend, Tokenizer.from_fast(_wrap(backend))


WORDS = {
    "none": _words(None),
    "word_piece": _words(decoders.WordPiece()),
    "regex": _words(decoders.Replace(Regex("s+"), "z")),
}


@pytest.mark.parametrize("name", WORDS)
@given(ids=st.lists(st.integers(0, 8), max_size=16), data=st.data())
@settings(deadline=None, max_examples=100)
def test_other_decoders(name: str, ids: list[int], data: st.DataObject) -> None:
    backend, tokenizer = WORDS[name]
    reference = backend.decode(ids)
    assert tokenizer.decode(ids) == reference
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = tokenizer.detokenizer(ids[:cut])
    shown = [detokenizer.push([token_id]) for token_id in ids[cut:]]
    assert backend.decode(ids[:cut]) + "".join(shown) + detokenizer.finish() == reference


# --- Stop strings ----------------------------------------------------------------------------


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """End of the first stop string that is complete, and the longest that ends there."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


def _held(text: str, stop: Sequence[str]) -> str:
    """Longest suffix of the text that is a proper prefix of a stop string."""
    suffixes = (text[start:] for start in range(len(text)))
    beginnings = {string[:length] for string in stop for length in range(1, len(string))}
    return next((suffix for suffix in suffixes if suffix in beginnings), "")


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=250)
def test_stop_automaton(text: str, stop: list[str]) -> None:
    automaton = StopStrings(stop)
    state, length, match = automaton.scan(0, text)
    expected = _first_stop(text, stop)
    assert (length, match) == (expected or (len(text), None))
    if expected is None:
        assert automaton.held(state) == len(_held(text, stop))


def _check_stops(
    tokenizer: Tokenizer,
    prompt: list[int],
    ids: list[int],
    stop: list[str],
    include: bool,
    data: st.DataObject,
) -> None:
    """Whatever the chunks: what is shown after each, compared with a search in the whole text."""

    def text_of(length: int) -> str:
        return tokenizer.detokenizer(prompt).push(ids[:length])

    detokenizer = tokenizer.detokenizer(prompt, stop=stop, include_stop_str_in_output=include)
    shown, length = "", 0
    for chunk in _chunks(data, ids):
        shown += detokenizer.push(chunk)
        length += len(chunk)
        text = text_of(length)
        found = _first_stop(text, stop)
        if found is None:
            assert detokenizer.stop_reason is None
            assert detokenizer.num_tokens == length
            assert shown + _held(text, stop) == text
            continue
        end, string = found
        assert detokenizer.stop_reason == string
        assert shown == text[: end if include else end - len(string)]
        completed = next(n for n in range(length + 1) if len(text_of(n)) >= end)
        assert detokenizer.num_tokens == completed
        assert detokenizer.push([3, 4]) == detokenizer.finish() == ""
        assert detokenizer.num_tokens == completed
        break
    else:
        shown += detokenizer.finish()
        assert shown == text_of(len(ids))
    assert detokenizer.text == shown
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["byte_level", "llama"])
@given(ids=byte_level_ids, include=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=200)
def test_stop_strings_in_any_ids(
    name: str, ids: list[int], include: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    cut = data.draw(st.integers(0, len(ids) // 2))
    text = tokenizer.detokenizer(ids[:cut]).push(ids[cut:])
    stop = []
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        part = text[start : start + data.draw(st.integers(0, 6))]
        stop.append(part + data.draw(st.sampled_from(["", "", "e", "☃"])) or "the")
    _check_stops(tokenizer, ids[:cut], ids[cut:], stop, include, data)


@given(
    text=st.text("the sk\n天空", max_size=30),
    stop=st.lists(st.text("the sk\n天空", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_stop_strings_in_text(
    text: str, stop: list[str], include: bool, data: st.DataObject
) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    _check_stops(BYTE_LEVEL, [], ids, stop, include, data)


def _push_each(detokenizer: Detokenizer, text: str) -> list[str]:
    ids = [BACKENDS["byte_level"].token_to_id(character) for character in text]
    return [detokenizer.push([token_id]) for token_id in ids]


def test_stop_string_is_held_back_and_released() -> None:
    detokenizer = BYTE_LEVEL.detokenizer([], stop=["END", "Enough"])
    assert _push_each(detokenizer, "aENoEn") == ["a", "", "", "ENo", "", ""]
    assert detokenizer.finish() == "En"
    assert detokenizer.text == "aENoEn"
    assert detokenizer.stop_reason is None


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aEND")])
def test_stop_string_over_tokens(include: bool, text: str) -> None:
    detokenizer = BYTE_LEVEL.detokenizer([], stop=["END"], include_stop_str_in_output=include)
    assert "".join(_push_each(detokenizer, "aENDb")) == detokenizer.text == text
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("END", 4)


def test_overlapping_stop_strings_first_complete_wins() -> None:
    detokenizer = BYTE_LEVEL.detokenizer([], stop=["abcd", "bc", "abc"])
    assert "".join(_push_each(detokenizer, "xabcd")) == "x"
    assert detokenizer.stop_reason == "abc"
    detokenizer = BYTE_LEVEL.detokenizer([], stop=["abcd", "bc"])
    assert "".join(_push_each(detokenizer, "xabcd")) == "xa"
    assert detokenizer.stop_reason == "bc"


def test_stop_string_does_not_begin_in_the_prompt() -> None:
    prompt = BYTE_LEVEL.encode("EN")
    detokenizer = BYTE_LEVEL.detokenizer(prompt, stop=["END"])
    assert _push_each(detokenizer, "D.") == ["D", "."]


# --- Text to ids -----------------------------------------------------------------------------


def test_sixteen_threads_encode_at_once() -> None:
    tokenizer = BOS_TOKENIZERS["byte_level"]
    expected = {text: tokenizer.encode(text) for text in TEXTS}
    barrier = threading.Barrier(16)
    failures: list[object] = []

    def work(place: int) -> None:
        try:
            barrier.wait()
            for turn in range(200):
                text = TEXTS[(place + turn) % len(TEXTS)]
                special = (place + turn) % 2 == 0
                ids = tokenizer.encode(text, add_special_tokens=special)
                if ids != expected[text][not special :] or tokenizer.decode(ids) != text:
                    failures.append((place, turn, ids))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(place,)) for place in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert "2 clones free" in repr(tokenizer)


@pytest.mark.parametrize("name", BOS_TOKENIZERS)
@pytest.mark.parametrize(
    "prompt",
    [
        "sky",
        "<s>sky",
        "<s><s>sky",
        "",
        [{"role": "user", "content": "sky"}],
        Prompt((Segment("sky"), Segment(" blue", kind="question"))),
        Prompt((Segment("<s>sky"), Segment(" blue"))),
        Prompt((Segment(""), Segment("<s>"), Segment("sky"))),
        Prompt((Segment(token_ids=(BOS, 9)), Segment("sky"))),
        Prompt((Segment(token_ids=(9,)), Segment("sky"))),
    ],
    ids=lambda prompt: str(prompt)[:40],
)
def test_exactly_one_bos_through_every_entry(name: str, prompt: Any) -> None:
    tokenized = BOS_TOKENIZERS[name].tokenize(prompt)
    assert tokenized.token_ids[0] == BOS
    assert tokenized.token_ids.count(BOS) == 1
    assert sum(tokenized.segment_lengths) == len(tokenized.token_ids)


@pytest.mark.parametrize("name", BOS_TOKENIZERS)
def test_chat_template_without_bos_gets_one(name: str) -> None:
    backend = Backend.from_str(BACKENDS[name].to_str())
    _add_bos(backend)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_fast(_wrap(backend, chat_template=template))
    ids = tokenizer.tokenize([{"role": "user", "content": "sky"}]).token_ids
    assert ids == tokenizer.tokenize("sky").token_ids
    assert ids.count(BOS) == 1


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    assert BYTE_LEVEL.bos_token_id == BOS
    assert BOS not in BYTE_LEVEL.tokenize("sky").token_ids
    assert BOS not in BYTE_LEVEL.tokenize(Prompt((Segment("sky"),))).token_ids
    # What is written out stays.
    assert BYTE_LEVEL.tokenize("<s>sky").token_ids[0] == BOS
    messages = [{"role": "user", "content": "sky"}]
    assert BYTE_LEVEL.tokenize(messages).token_ids.count(BOS) == 1


def test_token_ids_are_used_as_they_are() -> None:
    tokenizer = BOS_TOKENIZERS["llama"]
    for ids in ([7, 8, 9], (BOS, BOS, 5), range(3, 6), [tokenizer.vocab_size - 1]):
        assert tokenizer.tokenize(ids) == TokenizedPrompt.of(ids)


def test_segments_are_tokenized_each_on_its_own() -> None:
    tokenizer = BOS_TOKENIZERS["byte_level"]
    parts = ["The sk", "", "y is<|tool|>", "blue"]
    kinds = ("system", "document", "document", "question")
    segments = tuple(Segment(text, kind) for text, kind in zip(parts, kinds, strict=True))
    tokenized = tokenizer.tokenize(Prompt(segments))
    own = [tokenizer.encode(text, add_special_tokens=False) for text in parts if text]
    own[0] = [BOS, *own[0]]
    assert tokenized.token_ids == [token_id for ids in own for token_id in ids]
    assert tokenized.segment_lengths == tuple(map(len, own))
    assert tokenized.kinds == ("system", "document", "question")
    assert tokenized.retentions == (None, None, None)
    assert BACKENDS["byte_level"].token_to_id("<|tool|>") in tokenized.token_ids
    assert tokenizer.decode(tokenized.token_ids) == "The sky isblue"


def test_tokenized_prompts_pass_through() -> None:
    prompt = TokenizedPrompt([3, 4, 5], (2, 1), (Retention.SYSTEM, Retention.ANSWER))
    assert BYTE_LEVEL.tokenize(prompt) is prompt
    filled = BYTE_LEVEL.tokenize(TokenizedPrompt([3, 4, 5], (2, 1)))
    assert filled.retentions == ()


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "Why?"}]
    tokenizer = BOS_TOKENIZERS["byte_level"]
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(messages) == "<s>[user] Why?</s>[assistant]"
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert text == "<s>[user] Why?</s>"
    expected = tokenizer.encode("<s>[user] Why?</s>[assistant]", add_special_tokens=False)
    assert tokenizer.tokenize(messages).token_ids == expected


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [True],
        [1.5],
        ["sky"],
        [-1],
        [10**6],
        b"sky",
        7,
        None,
        "a\ud800",
        Prompt((Segment(""), Segment(""))),
        Prompt((Segment(token_ids=()),)),
        Prompt((Segment("sky"), Segment(token_ids=(10**6,)))),
        TokenizedPrompt([], ()),
        TokenizedPrompt([10**6], (1,)),
        TokenizedPrompt([3, 4], (1,)),
        TokenizedPrompt([3, 4], (2, 0)),
        TokenizedPrompt([3, 4], ()),
        TokenizedPrompt([3, 4], (1, 1), (Retention.ANSWER,)),
        [{"role": "nobody", "content": "sky"}],
        [{"role": "user", "content": "sky"}, "sky"],
    ],
    ids=repr,
)
def test_invalid_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidParamsError):
        BYTE_LEVEL.tokenize(prompt)


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        ("prompt", lambda bad: BYTE_LEVEL.tokenize(bad)),
        ("text", lambda bad: BYTE_LEVEL.encode(bad)),
        ("text", lambda bad: BYTE_LEVEL.encode_plain(bad)),
        ("segments[1]", lambda bad: BYTE_LEVEL.tokenize(Prompt((Segment("a"), Segment(bad))))),
        ("stop[1]", lambda bad: BYTE_LEVEL.detokenizer([], stop=["a", bad])),
        ("bad_words[1]", lambda bad: BYTE_LEVEL.bad_word_ids(["a", bad])),
    ],
)
def test_half_a_character_names_where_it_stands(parameter: str, call: Any) -> None:
    with pytest.raises(InvalidParamsError, match="character 3 is one") as caught:
        call("sky\ud83d")
    assert caught.value.parameter == parameter


def test_a_text_is_a_string() -> None:
    with pytest.raises(InvalidParamsError, match="a string"):
        Segment(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match=r"bad_words\[0\]"):
        BYTE_LEVEL.bad_word_ids([7])  # type: ignore[list-item]


def test_work_can_be_ended_between_its_pieces() -> None:
    class Ended(Exception):
        pass

    seen: list[int] = []

    def check(num_tokens: int) -> None:
        seen.append(num_tokens)
        if num_tokens > 2:
            raise Ended

    prompt = Prompt(tuple(map(Segment, ["a", "b", "c", "d"])))
    with pytest.raises(Ended):
        BYTE_LEVEL.watched(check).tokenize(prompt)
    assert max(seen) == 3
    assert len(BYTE_LEVEL.tokenize(prompt).token_ids) == 4


def test_messages_without_a_template() -> None:
    _, tokenizer = WORDS["none"]
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidParamsError, match="no chat template; pass text or a Prompt"):
        tokenizer.tokenize([{"role": "user", "content": "sky"}])


# --- Loading ---------------------------------------------------------------------------------


def test_load(tmp_path: Path) -> None:
    backend = Backend.from_str(BACKENDS["byte_level"].to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="</s>", pad_id=EOS)
    _wrap(backend, chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    tokenizer = Tokenizer.load(tmp_path, num_clones=1)
    assert tokenizer.eos_token_ids == {EOS, 7, 8, 9}
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.has_chat_template
    assert tokenizer.vocab_size == backend.get_vocab_size()
    for text in TEXTS:  # neither truncated nor padded
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_wrapping_leaves_the_original_alone() -> None:
    hf = _wrap(Backend.from_str(BACKENDS["byte_level"].to_str()))
    hf.backend_tokenizer.enable_truncation(4)
    assert len(Tokenizer.from_fast(hf).encode(TEXTS[0])) > 4
    assert hf.backend_tokenizer.truncation is not None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a folder"),
        ({}, "holds no tokenizer: none of tokenizer.json"),
        ({"config.json": '{"model_type": "llama"}'}, "holds no tokenizer"),
        ({"tokenizer.json": "{"}, "cannot load the tokenizer"),
    ],
)
def test_load_errors(tmp_path: Path, files: dict[str, str] | None, message: str) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", "[1]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "null"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("tokenizer_config.json", '{"eos_token": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": true}'),
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": [[1]]}'),
        ("generation_config.json", "\ufeff"),
    ],
)
def test_files_of_the_wrong_shape_are_refused(tmp_path: Path, name: str, content: str) -> None:
    _wrap(BACKENDS["byte_level"]).save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=re.escape(str(tmp_path))):
        Tokenizer.load(tmp_path)


def test_an_id_far_beyond_the_others_is_refused(tmp_path: Path) -> None:
    _wrap(BACKENDS["byte_level"]).save_pretrained(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["model"]["vocab"]["far"] = 2_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelLoadError, match="one with id 2000000000"):
        Tokenizer.load(tmp_path)


def test_a_broken_chat_template_does_not_keep_a_model_from_opening(tmp_path: Path) -> None:
    _wrap(BACKENDS["byte_level"], chat_template="{% for").save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.tokenize("sky").token_ids
    with pytest.raises(InvalidParamsError, match="TemplateSyntaxError"):
        tokenizer.tokenize([{"role": "user", "content": "sky"}])


def test_broken_eos_is_refused(tmp_path: Path) -> None:
    _wrap(BACKENDS["byte_level"]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        Tokenizer.load(tmp_path)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelLoadError, match="Slow is not a fast tokenizer"):
        Tokenizer.from_fast(Slow())


def test_at_least_one_clone() -> None:
    with pytest.raises(InvalidParamsError, match="num_clones=0"):
        Tokenizer.from_fast(_wrap(BACKENDS["byte_level"]), 0)


def test_ids_that_the_model_lacks_are_refused_when_they_are_used() -> None:
    tokenizer = _with_bos("byte_level")
    tool = tokenizer.vocab_size - 1
    tokenizer.check_model(tokenizer.vocab_size)
    assert tokenizer.tokenize("a<|tool|>").token_ids[-1] == tool
    tokenizer.check_model(tokenizer.vocab_size - 1)
    assert tokenizer.tokenize("a").token_ids[0] == BOS
    assert tokenizer.bad_word_ids(["a<|tool|>", "a"]) == tokenizer.bad_word_ids(["a"])
    prompts = (
        "a<|tool|>",
        [tool],
        Prompt((Segment("a"), Segment("<|tool|>"))),
        TokenizedPrompt.of([tool]),
    )
    for prompt in prompts:
        with pytest.raises(InvalidParamsError, match=f"0 to {tool - 1}"):
            tokenizer.tokenize(prompt)
