"""Text to ids: a tokenizer that many threads may use, and one rule for the BOS token.

Encoding takes one of a few clones of the tokenizer, so that threads do not meet inside one
(a tokenizer that is being reconfigured raises "Already borrowed" in whoever else uses it;
clones never are) and no more texts are encoded at a time than there are clones.
"""

from __future__ import annotations

import copy
import itertools
import json
import operator
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .detokenizer import Detokenizer, Pieces
from .errors import InvalidParamsError, ModelLoadError
from .prompt import Prompt, PromptLike, Segment, TokenizedPrompt
from .slices import SLICE_CHARACTERS, SLICE_IDS, slices
from .stop import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["Tokenizer"]

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


class Tokenizer:
    """A model's fast tokenizer and chat template. Thread-safe.

    Where the tokenizer adds a BOS token to text, text, chat messages and segments all begin
    with exactly one, whether or not they write it out. Token ids are used as they are.

    :param tokenizer: a fast `transformers` tokenizer; it is copied, and its own copy is used
        for its chat template only.
    :param num_clones: how many texts can be encoded at the same time; further callers wait.
    :param eos_token_ids: ids that end an answer, besides the tokenizer's own EOS token.
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
        self._hf = tokenizer
        self._check: Callable[[int], None] = _go_on
        clones = [_clone(tokenizer.backend_tokenizer) for _ in range(num_clones)]
        self._clones: queue.LifoQueue[Backend] = queue.LifoQueue()
        for clone in clones:
            self._clones.put(clone)
        # Look-ups only read, so they needn't wait until this one is free.
        self._lookup = clones[0]
        self._num_ids = 1 + max(self._lookup.get_vocab(with_added_tokens=True).values(), default=-1)
        self._pieces = {
            skip: Pieces(self._lookup, skip_special_tokens=skip) for skip in (False, True)
        }
        own = tokenizer.eos_token_id
        self._eos_token_ids = eos_token_ids if own is None else eos_token_ids | {own}
        self._added_bos = self._find_added_bos()

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

        EOS ids are the tokenizer's and those that `generation_config.json` and `config.json`
        name: chat models often end a turn with another token than a text.

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
        """Check that the model knows every id that this tokenizer produces.

        :param vocab_size: rows of the model's embedding.
        :raises ModelLoadError: if it doesn't.
        """
        if self._num_ids > vocab_size:
            raise ModelLoadError(
                f"the tokenizer doesn't match the model: its ids go up to {self._num_ids - 1} and "
                f"the model's vocabulary has {vocab_size} tokens; use the tokenizer that the "
                "model was trained with"
            )

    def watched(self, check: Callable[[int], None]) -> Tokenizer:
        """The same tokenizer, which asks whether to go on with what takes long.

        :param check: called between two calls that cannot be interrupted, with the number of
            tokens that the text or prompt has so far; what it raises ends the encoding.
        """
        other = copy.copy(self)
        other._check = check
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, as the tokenizer gives them. Special tokens in it are recognised.

        Releases the GIL; waits while all clones are busy.

        :param add_special_tokens: whether to add what the tokenizer adds: BOS, mostly.
        :raises InvalidParamsError: if `text` is not a string of Unicode characters.
        """
        if not isinstance(text, str):
            raise InvalidParamsError("text", text, "a string")
        if len(text) > SLICE_CHARACTERS:
            return self._encode_slices(text, add_special_tokens)
        (ids,) = self._encode_batch([text], add_special_tokens)
        self._check(len(ids))
        return ids

    def _encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> list[list[int]]:
        with self._clone() as clone:
            try:
                # Unlike encode(), this holds the GIL neither while encoding nor for offsets.
                encodings = clone.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            except TypeError as error:
                raise InvalidParamsError(
                    "text", texts[0], "a string without lone surrogates"
                ) from error
        return [encoding.ids for encoding in encodings]

    def _encode_slices(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a long text; other texts may be encoded between its slices."""
        before, after = self._special_ids() if add_special_tokens else ([], [])
        ids = before
        for part in slices(text, self._encode_batch):
            ids += self._encode_batch([part])[0]
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
        """
        return Detokenizer(
            self._pieces[skip_special_tokens],
            prompt_token_ids,
            stop=StopStrings(stop) if stop else None,
            include_stop_str_in_output=include_stop_str_in_output,
            min_tokens=min_tokens,
        )

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as token ids, at the start of a text and after a space: these differ."""
        forms = (form for word in words for form in (word, " " + word.lstrip()))
        ids = (tuple(self.encode(form, add_special_tokens=False)) for form in forms)
        return tuple(dict.fromkeys(ids))

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
        if not (self.has_chat_template or kwargs.get("chat_template")):
            raise InvalidParamsError(
                "messages",
                messages,
                "this model has no chat template; pass text or a Prompt instead",
            )
        from jinja2 import TemplateError

        try:
            text: str = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidParamsError(
                "messages", messages, f"the chat template refused them: {error}"
            ) from error
        return text

    def tokenize(self, prompt: PromptLike | TokenizedPrompt) -> TokenizedPrompt:
        """Ids of whatever a caller may give as a prompt.

        Text gets the special tokens that the tokenizer adds; messages go through the chat
        template; ids are used as they are. Each segment of a `Prompt` is tokenized on its
        own, without special tokens but BOS before the first; empty ones are dropped.

        :raises InvalidParamsError: if it is nothing of the kind, is empty, or holds an id that
            the tokenizer doesn't have.
        """
        match prompt:
            case str():
                return self._one_segment(self._one_bos(self.encode(prompt)))
            case Prompt():
                return self._tokenize_segments(prompt)
            case TokenizedPrompt():
                return self._check_tokenized(prompt)
            case bytes() | bytearray():
                raise InvalidParamsError("prompt", prompt, "decode the bytes into a string first")
            case [Mapping(), *_]:
                text = self.apply_chat_template(cast("Sequence[Mapping[str, Any]]", prompt))
                return self._one_segment(self._one_bos(self.encode(text, add_special_tokens=False)))
            case Sequence():
                return self._one_segment(self._check_ids(prompt))
            case _:
                raise InvalidParamsError(
                    "prompt", prompt, "text, token ids, chat messages or a Prompt"
                )

    def _tokenize_segments(self, prompt: Prompt) -> TokenizedPrompt:
        tokenized: list[tuple[Segment, list[int]]] = []
        num_tokens = 0
        for segment in prompt.segments:
            ids = self._segment_ids(segment)
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

    def _segment_ids(self, segment: Segment) -> list[int]:
        if segment.text is not None:
            return self.encode(segment.text, add_special_tokens=False)
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
            if not 0 <= token_id < self._num_ids:
                raise InvalidParamsError("token_id", token_id, f"0 to {self._num_ids - 1}")
        return checked

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

    @contextmanager
    def _clone(self) -> Iterator[Backend]:
        clone = self._clones.get()
        try:
            yield clone
        finally:
            self._clones.put(clone)


def _go_on(num_tokens: int) -> None:
    """What a tokenizer that is not watched asks."""


def _clone(backend: Backend) -> Backend:
    from tokenizers import Tokenizer as Backend

    clone = Backend.from_str(backend.to_str())
    # A prompt is never cut or filled up silently, whatever the file says.
    clone.no_truncation()
    clone.no_padding()
    return clone


def _pretrained_loader(folder: Path) -> Callable[..., Any]:
    """`from_pretrained` of the class that the folder names.

    AutoTokenizer finds the same class, after most of a second spent on configuration classes of
    models.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        name = config.get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        name = None
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
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"cannot read eos_token_id from {config}: {error}") from error
