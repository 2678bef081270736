"""Text to ids: a tokenizer that many threads may use, and one rule for the BOS token.

Encoding takes one of a few clones of the tokenizer, so that threads do not meet inside one
(a tokenizer that is being reconfigured raises "Already borrowed" in whoever else uses it;
clones never are) and no more texts are encoded at a time than there are clones.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import logging
import operator
import queue
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import InvalidParamsError, ModelLoadError
from ..prompt import Plain, Prompt, PromptLike, Segment, TokenizedPrompt, check_text, plain_ranges
from .chat_template import ChatTemplate, Rendered
from .detokenizer import Detokenizer, Pieces
from .slices import SLICE_CHARACTERS, SLICE_IDS, slices
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

__all__ = ["Tokenizer"]

logger = logging.getLogger("ragserve")

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)

_MAX_GAPS = 100_000
"""Most numbers below the greatest id that have no token, beyond one for each token."""
_HOLE = "\U0010fffd"
"""Stands for a text of others where only what is around it is of interest: a private character."""

_TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eom|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endofturn|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<turn|>",
    }
)
"""Control tokens that end a turn in every chat format that has them."""


class Tokenizer:
    """A model's fast tokenizer and chat template. Thread-safe.

    Where the tokenizer adds a BOS token to text, text, chat messages and segments all begin
    with exactly one, whether or not they write it out. Token ids are used as they are.

    A control token that is written out in a text is one, unless the text is said to be *plain*:
    what a chat message holds is, and so are segments' `plain` characters. Control tokens are the
    tokenizer's special tokens, and those of its other added tokens that stand in brackets of any
    kind, like `<think>` and `[TOOL_CALLS]`.

    :param tokenizer: a fast `transformers` tokenizer; it is copied, and its own copy is used
        for its chat template only.
    :param num_clones: how many texts can be encoded at the same time; further callers wait.
    :param eos_token_ids: ids that end an answer, besides the tokenizer's own EOS token and those
        that end a turn in its chat template.
    :raises ModelLoadError: if it is not a fast tokenizer.
    :raises InvalidParamsError: if `num_clones` is less than 1.
    """

    def __init__(
        self, tokenizer: Any, *, num_clones: int = 2, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        if num_clones < 1:
            raise InvalidParamsError("num_clones", num_clones, "at least 1")
        if not getattr(tokenizer, "is_fast", False):
            raise ModelLoadError(
                f"{type(tokenizer).__name__} is not a fast tokenizer and only those are "
                "supported; save the model with a tokenizer.json"
            )
        _check_template(tokenizer.chat_template)
        self._hf = tokenizer
        self._check: Callable[[int], None] = _go_on
        _check_ids_are_dense(tokenizer.backend_tokenizer)
        definition = tokenizer.backend_tokenizer.to_str()
        # Look-ups only read, so they needn't wait until a clone is free.
        self._lookup = _clone(definition)
        added = self._lookup.get_added_tokens_decoder()
        self._control = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special or _BRACKETED.fullmatch(token.content)
        }
        unknown = tokenizer.unk_token_id
        # What the model knows no token for is unknown, whoever wrote it.
        self._speaking = frozenset(self._control) - {unknown}
        self._unknown = self._control.get(unknown, "")
        self._clones: queue.LifoQueue[Backend] = queue.LifoQueue()
        also = [token for i, token in added.items() if i in self._control and not token.special]
        for _ in range(num_clones):
            self._clones.put(_clone(definition, also))
        self._num_ids = 1 + max(self._lookup.get_vocab(with_added_tokens=True).values(), default=-1)
        self._num_known = self._num_ids
        self._pieces = {
            skip: Pieces(self._lookup, skip_special_tokens=skip) for skip in (False, True)
        }
        self._added_bos = self._find_added_bos()
        self._template = ChatTemplate(
            tokenizer.get_chat_template,
            tokenizer.special_tokens_map,
            has_word_tokens=any(map(_WORD.search, self._control.values())),
        )
        own = tokenizer.eos_token_id
        self._eos_token_ids = eos_token_ids | ({own} - {None}) | self._find_turn_ends()

    @classmethod
    def from_fast(cls, tokenizer: Any, num_clones: int = 2) -> Tokenizer:
        """Wrap a fast `transformers` tokenizer that is already in memory.

        :raises ModelLoadError: if it is not a fast tokenizer.
        """
        return cls(tokenizer, num_clones=num_clones)

    @classmethod
    def load(
        cls, folder: Path, *, num_clones: int = 2, trust_remote_code: bool = False
    ) -> Tokenizer:
        """Load from a model's folder; never from the network.

        EOS ids are the tokenizer's, those that `generation_config.json` and `config.json` name,
        and those with which the chat template ends a turn: chat models often end a turn with
        another token than a text.

        :raises ModelLoadError: if files are missing or broken, or there is no fast tokenizer.
        """
        if not folder.is_dir():
            raise ModelLoadError(f"{folder} is not a folder; give the folder of a model")
        if not any((folder / name).is_file() for name in _FILES):
            raise ModelLoadError(
                f"{folder} holds no tokenizer: none of {', '.join(_FILES)} is there; "
                "save the tokenizer into it with save_pretrained"
            )
        load_pretrained = _pretrained_loader(folder)
        try:
            tokenizer = load_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        # The libraries raise bare Exception too, for example from Rust's JSON parser.
        except Exception as error:
            raise ModelLoadError(f"cannot load the tokenizer in {folder}: {error}") from error
        eos_token_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            eos_token_ids |= _eos_token_ids(folder / name)
        return cls(tokenizer, num_clones=num_clones, eos_token_ids=frozenset(eos_token_ids))

    def __repr__(self) -> str:
        return f"<Tokenizer [{self.vocab_size} tokens | {self._clones.qsize()} clones free]>"

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: one more than the greatest."""
        return self._num_ids

    @property
    def bos_token_id(self) -> int | None:
        """The BOS token, whether or not encoding adds it."""
        token_id: int | None = self._hf.bos_token_id
        return token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return self._eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages are understood."""
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The Jinja text that lays out chat messages; of several, the default one."""
        template: str | dict[str, str] | None = self._hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts that encoding turns into a control token wherever they are written."""
        added = self._hf.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special)

    def check_model(self, vocab_size: int) -> None:
        """Take note of how many ids the model knows.

        A tokenizer may have more, as those have that tokens were added to; a prompt that has such
        an id in it is refused.

        :param vocab_size: rows of the model's embedding.
        """
        if self._num_ids > vocab_size:
            logger.warning(
                "the tokenizer has ids up to %d and the model's vocabulary has %d tokens; prompts "
                "with an id beyond that are refused",
                self._num_ids - 1,
                vocab_size,
            )
        self._num_known = min(self._num_ids, vocab_size)
        self._eos_token_ids = frozenset(i for i in self._eos_token_ids if i < vocab_size)

    def watched(self, check: Callable[[int], None]) -> Tokenizer:
        """The same tokenizer, which asks whether to go on with what takes long.

        :param check: called between two calls that cannot be interrupted, with the number of
            tokens that the text or prompt has so far; what it raises ends the encoding.
        """
        other = copy.copy(self)
        other._check = check
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, as the tokenizer gives them. Control tokens in it are recognised.

        Releases the GIL; waits while all clones are busy.

        :param add_special_tokens: whether to add what the tokenizer adds: BOS, mostly.
        :raises InvalidParamsError: if `text` is not a string of Unicode characters.
        """
        return self._encode(check_text("text", text), add_special_tokens=add_special_tokens)

    def encode_plain(self, text: str, plain: Plain = True) -> list[int]:
        """Ids of a text that others wrote, in whole or in part. No special tokens are added.

        Of a text that has no control tokens in its plain parts they are those of `encode`. A
        control token there is encoded like other text. So is one that reaches into a plain part,
        and one that a normalizer makes of other characters.

        :param plain: which characters others wrote.
        :raises InvalidParamsError: if `text` is not a string of Unicode characters, or `plain`
            are not ranges in it.
        """
        ranges = plain_ranges(check_text("text", text), plain)
        if not ranges:
            return self._encode(text)
        if ranges == ((0, len(text)),):
            return self._encode_as_text(text)
        own, offsets = _without(text, ranges)
        with self._clone() as clone:
            # As encode_batch_fast, but it tells where in the text each token is.
            (encoding,) = clone.encode_batch([own], add_special_tokens=False)
        meant = [
            (token_id, span)
            for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._speaking
        ]
        ids = self._encode(text)
        found = [token_id for token_id in ids if token_id in self._speaking]
        if found == [token_id for token_id, _ in meant] and not (
            self._unknown and any(self._unknown in text[start:end] for start, end in ranges)
        ):
            return ids
        # There are others than those that are meant: cut the text at these, and take the rest as
        # it is read.
        ids, done = [], 0
        for token_id, (start, end) in meant:
            ids += self._encode_as_text(text[done : offsets(start)])
            ids.append(token_id)
            done = offsets(end)
        return ids + self._encode_as_text(text[done:])

    def _encode_as_text(self, text: str) -> list[int]:
        """Ids of a text, none of them a control token's."""
        if not text:
            return []
        ids = self._encode(text, as_text=True)
        if self._speaking.isdisjoint(ids):
            return ids
        # A vocabulary that has control tokens among its words finds them without looking for
        # added tokens. There the text has to be broken up, in the form in which it is looked up.
        normalizer = self._lookup.normalizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        forms = {self._control[token_id] for token_id in self._speaking}
        if normalizer is not None:
            forms |= {normalizer.normalize_str(form) for form in forms}
        longest_first = sorted((f for f in forms if len(f) > 1), key=lambda f: (-len(f), f))
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        while longest_first and pattern.search(text):
            text = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        ids = self._encode(text, as_text=True)
        wrong = self._speaking.intersection(ids)
        if wrong:
            raise InvalidParamsError(
                "text", text, f"a text without {self._control[min(wrong)]!r}, a control token"
            )
        return ids

    def _encode(
        self, text: str, *, add_special_tokens: bool = False, as_text: bool = False
    ) -> list[int]:
        """Ids of a text; `as_text`: without looking for control tokens."""
        if len(text) > SLICE_CHARACTERS:
            return self._encode_slices(text, add_special_tokens=add_special_tokens, as_text=as_text)
        (ids,) = self._encode_batch([text], add_special_tokens, as_text=as_text)
        self._check(len(ids))
        return ids

    def _encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = False, *, as_text: bool = False
    ) -> list[list[int]]:
        with self._clone() as clone:
            clone.encode_special_tokens = as_text
            try:
                # Unlike encode(), this holds the GIL neither while encoding nor for offsets.
                return [
                    encoding.ids
                    for encoding in clone.encode_batch_fast(
                        texts, add_special_tokens=add_special_tokens
                    )
                ]
            finally:
                clone.encode_special_tokens = False

    def _encode_slices(self, text: str, *, add_special_tokens: bool, as_text: bool) -> list[int]:
        """Ids of a long text; other texts may be encoded between its slices."""
        before, after = self._special_ids() if add_special_tokens else ([], [])
        ids = before
        encode = partial(self._encode_batch, as_text=as_text)
        for part in slices(text, encode):
            ids += encode([part])[0]
            self._check(len(ids))
        return ids + after

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """What encoding adds before and after a text."""
        (plain,), (full,) = self._encode_batch(["a"]), self._encode_batch(["a"], True)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        return [], []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, exactly as a `Detokenizer` streams it after an empty prompt.

        So an incomplete character at the end is left out. Nothing is cleaned up.
        """
        stream = self._pieces[skip_special_tokens].stream(())
        return "".join(map(stream.add, token_ids)) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token is in UTF-8; of some that is no text on its own. Special tokens too."""
        piece = self._pieces[False][token_id]
        if not piece:  # a decoder that has no pieces, or an id without a token
            piece = self.decode([token_id], skip_special_tokens=False)
        return piece.encode() if isinstance(piece, str) else piece

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> Detokenizer:
        """A `Detokenizer` for one sequence that continues `prompt_token_ids`.

        :param stop: non-empty strings; the text ends at the first that is complete.
        :param include_stop_str_in_output: end the text after the stop string, not before it.
        :param min_tokens: look for stop strings only in the text after so many tokens.
        :raises InvalidParamsError: if a stop string is no string of Unicode characters.
        """
        for index, string in enumerate(stop):
            check_text(f"stop[{index}]", string)
        return Detokenizer(
            self._pieces[skip_special_tokens],
            prompt_token_ids,
            stop=StopStrings(stop) if stop else None,
            include_stop_str_in_output=include_stop_str_in_output,
            min_tokens=min_tokens,
        )

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as token ids, at the start of a text and after a space: these differ."""
        checked = [check_text(f"bad_words[{index}]", word) for index, word in enumerate(words)]
        forms = (form for word in checked for form in (word, " " + word.lstrip()))
        ids = (tuple(self._encode(form)) for form in forms)
        return tuple(dict.fromkeys(each for each in ids if max(each, default=0) < self._num_known))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Chat messages as the text that the model was trained on.

        :param add_generation_prompt: end with the opening of the assistant's turn.
        :param kwargs: passed on to the template, for example `tools`.
        :raises InvalidParamsError: if there is no template, or it refuses the messages.
        """
        return self._render(messages, add_generation_prompt=add_generation_prompt, **kwargs).text

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Rendered:
        if not (self.has_chat_template or kwargs.get("chat_template")):
            raise InvalidParamsError(
                "messages",
                messages,
                "this model has no chat template; pass text or a Prompt instead",
            )
        return self._template.render(messages, **kwargs)

    def tokenize(self, prompt: PromptLike | TokenizedPrompt) -> TokenizedPrompt:
        """Ids of whatever a caller may give as a prompt.

        Text gets the special tokens that the tokenizer adds; messages go through the chat
        template, and only the template's own control tokens are such; ids are used as they are.
        Each segment of a `Prompt` is tokenized on its own, without special tokens but BOS before
        the first; empty ones are dropped.

        :raises InvalidParamsError: if it is nothing of the kind, is empty, or holds an id that
            the tokenizer or the model doesn't have.
        """
        match prompt:
            case str():
                text = check_text("prompt", prompt)
                ids = self._encode(text, add_special_tokens=True)
                return self._one_segment(self._known(self._one_bos(ids)))
            case Prompt():
                return self._tokenize_segments(prompt)
            case TokenizedPrompt():
                return self._check_tokenized(prompt)
            case bytes() | bytearray():
                raise InvalidParamsError("prompt", prompt, "decode the bytes into a string first")
            case [Mapping(), *_]:
                rendered = self._render(cast("Sequence[Mapping[str, Any]]", prompt))
                self._check(0)
                ids = self.encode_plain(check_text("chat_template", rendered.text), rendered.plain)
                return self._one_segment(self._known(self._one_bos(ids)))
            case Sequence():
                return self._one_segment(self._check_ids(prompt))
            case _:
                raise InvalidParamsError(
                    "prompt", prompt, "text, token ids, chat messages or a Prompt"
                )

    def _tokenize_segments(self, prompt: Prompt) -> TokenizedPrompt:
        tokenized: list[tuple[Segment, list[int]]] = []
        num_tokens = 0
        for index, segment in enumerate(prompt.segments):
            ids = self._segment_ids(segment, index)
            num_tokens += len(ids)
            self._check(num_tokens)
            if ids:
                tokenized.append((segment, ids))
        if not tokenized:
            raise InvalidParamsError("prompt", prompt, "at least one segment that is not empty")
        first, ids = tokenized[0]
        tokenized[0] = first, self._one_bos(ids)
        return TokenizedPrompt(
            [token_id for _, ids in tokenized for token_id in ids],
            tuple(len(ids) for _, ids in tokenized),
            retentions=tuple(segment.retention for segment, _ in tokenized),
            kinds=tuple(segment.kind for segment, _ in tokenized),
            retention_seconds=tuple(segment.retention_seconds for segment, _ in tokenized),
        )

    def _segment_ids(self, segment: Segment, index: int) -> list[int]:
        if segment.text is not None:
            text = check_text(f"segments[{index}]", segment.text)
            return self._known(self.encode_plain(text, segment.plain))
        return self._check_ids(segment.token_ids or ())

    def _one_segment(self, token_ids: list[int]) -> TokenizedPrompt:
        if not token_ids:
            raise InvalidParamsError("prompt", token_ids, "at least one token")
        return TokenizedPrompt.of(token_ids)

    def _check_tokenized(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        if not prompt.token_ids:
            raise InvalidParamsError("prompt", prompt, "at least one token")
        self._check_ids(prompt.token_ids)
        lengths = prompt.segment_lengths
        if sum(lengths) != len(prompt.token_ids) or min(lengths) < 1:
            raise InvalidParamsError(
                "segment_lengths",
                lengths,
                f"positive lengths that sum to the prompt's {len(prompt.token_ids)} tokens",
            )
        for name, each in (
            ("retentions", prompt.retentions),
            ("kinds", prompt.kinds),
            ("retention_seconds", prompt.retention_seconds),
        ):
            if each and len(each) != len(lengths):
                raise InvalidParamsError(
                    name, each, f"one for each of the {len(lengths)} segments, or none"
                )
        return prompt

    def _check_ids(self, token_ids: Sequence[Any]) -> list[int]:
        checked: list[int] = []
        rest = iter(token_ids)
        # In slices: no other thread runs during a call, and one over all ids may take long.
        while some := list(itertools.islice(rest, SLICE_IDS)):
            checked += self._check_some_ids(some)
        return checked

    def _check_some_ids(self, token_ids: list[Any]) -> list[int]:
        try:
            checked = list(map(operator.index, token_ids))
        except TypeError as error:
            raise InvalidParamsError("token_ids", token_ids, "integers only") from error
        if bool in set(map(type, token_ids)):
            raise InvalidParamsError("token_ids", token_ids, "integers only")
        for token_id in (min(checked), max(checked)):
            if not 0 <= token_id < self._num_known:
                raise InvalidParamsError("token_id", token_id, f"0 to {self._num_known - 1}")
        return checked

    def _known(self, token_ids: list[int]) -> list[int]:
        """Ids that came from text: all of them the model's?"""
        most = max(token_ids, default=0) if self._num_known < self._num_ids else 0
        if most >= self._num_known:
            raise InvalidParamsError(
                "prompt",
                self._lookup.id_to_token(most),
                f"a text without this token: it has id {most}, and the model knows those "
                f"from 0 to {self._num_known - 1}",
            )
        return token_ids

    def _one_bos(self, token_ids: list[int]) -> list[int]:
        """With exactly one BOS at the beginning, if this is a tokenizer that adds one."""
        bos = self._added_bos
        if bos is None:
            return token_ids
        return [bos, *itertools.dropwhile(lambda token_id: token_id == bos, token_ids)]

    def _find_added_bos(self) -> int | None:
        """The id that encoding puts before a text, if it does."""
        plain = self.encode("a", add_special_tokens=False)
        special = self.encode("a")
        if not special or special[:1] == plain[:1]:
            return None
        known = self.bos_token_id
        return special[0] if known is None or special[0] == known else None

    def _find_turn_ends(self) -> frozenset[int]:
        """Ids with which the chat template ends the assistant's turn.

        They are what it writes after a message, and whatever is known to end a turn and stands
        both in the vocabulary and in the template.
        """
        if not self.has_chat_template:
            return frozenset()
        template = self._hf.chat_template
        sources = template.values() if isinstance(template, Mapping) else (template,)
        ends = {
            token_id
            for token_id, token in self._control.items()
            if token in _TURN_ENDS and any(token in source for source in sources)
        }
        if "<|return|>" in self._control.values():
            # Where an answer has several parts, this ends each of them.
            ends = {token_id for token_id in ends if self._control[token_id] != "<|end|>"}
        answer = "It is blue."
        messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
        try:
            text = self._template.render(messages, add_generation_prompt=False).text
        except InvalidParamsError as error:
            logger.debug("the chat template does not show how a turn ends: %s", error)
            return frozenset(ends)
        _, _, rest = text.rpartition(answer)
        rest = rest.lstrip() if rest != text else ""
        first = self._encode(rest)[:1]
        added = self._lookup.get_added_tokens_decoder()
        return frozenset(ends | {i for i in first if i in self._speaking and added[i].special})

    @contextmanager
    def _clone(self) -> Iterator[Backend]:
        clone = self._clones.get()
        try:
            yield clone
        finally:
            self._clones.put(clone)


def _go_on(num_tokens: int) -> None:
    """What a tokenizer that is not watched asks."""


# Brackets of any kind around a word, like <|im_end|>, <think> and [INST]. White space and single
# characters, which some vocabularies add too, say nothing to a model but what they are.
_BRACKETED = re.compile(r"(?s)[^\w\s].*\w.*[^\w\s]")
_WORD = re.compile(r"^\s*[\w-]+\s*$")


def _check_template(template: object) -> None:
    """Refuse what is no chat template, nor several by name.

    :raises ModelLoadError: if it is something else.
    """
    if template is None:
        return
    texts = template.values() if isinstance(template, Mapping) else (template,)
    for text in texts:
        if not isinstance(text, str):
            raise ModelLoadError(
                f"the tokenizer's chat_template is {type(text).__name__} and must be a string, or "
                "strings by name: correct tokenizer_config.json"
            )


def _check_ids_are_dense(backend: Backend) -> None:
    """Refuse a vocabulary with an id far beyond their number: copying it fills all gaps.

    :raises ModelLoadError: if it has one.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    greatest = max(vocabulary.values(), default=0)
    if greatest > 2 * len(vocabulary) + _MAX_GAPS:
        raise ModelLoadError(
            f"the tokenizer has {len(vocabulary)} tokens and one with id {greatest}; ids may leave "
            f"out at most {_MAX_GAPS} numbers: correct the file"
        )


def _clone(definition: str, as_text: Sequence[AddedToken] = ()) -> Backend:
    """A copy of a tokenizer.

    :param as_text: added tokens which are not found while `encode_special_tokens` is set, besides
        those that are special anyway.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    clone = Backend.from_str(definition)
    # A prompt is never cut or filled up silently, whatever the file says.
    clone.no_truncation()
    clone.no_padding()
    if as_text:
        # They have ids already, and keep them.
        clone.add_special_tokens(
            [
                AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=True,
                )
                for token in as_text
            ]
        )
    return clone


def _without(text: str, ranges: Sequence[tuple[int, int]]) -> tuple[str, Callable[[int], int]]:
    """`text` with one character for each range, and what an index in that is in `text`."""
    parts: list[str] = []
    shifts: list[tuple[int, int]] = [(0, 0)]  # from this index on, so much more
    done = length = 0
    for start, end in ranges:
        parts += text[done:start], _HOLE
        length += start - done + 1
        shifts.append((length, end - length))
        done = end
    own = "".join([*parts, text[done:]])

    def offset(index: int) -> int:
        return index + shifts[bisect.bisect_right(shifts, (index, len(text))) - 1][1]

    return own, offset


def _pretrained_loader(folder: Path) -> Callable[..., Any]:
    """`from_pretrained` of the class that the folder names.

    AutoTokenizer finds the same class, after most of a second spent on configuration classes of
    models.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        name = config.get("tokenizer_class")
    except (OSError, ValueError, AttributeError, RecursionError):
        name = None  # the library says what is wrong with it
    if name == "PreTrainedTokenizerFast" and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


def _eos_token_ids(config: Path) -> frozenset[int]:
    """EOS ids that a configuration file names, if it is there."""
    if not config.is_file():
        return frozenset()
    try:
        value = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        return frozenset(operator.index(token_id) for token_id in values)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"cannot read eos_token_id from {config}: {error}") from error
