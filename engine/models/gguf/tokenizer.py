"""A GGUF file's tokenizer metadata -> a `tokenizers.Tokenizer`.

GGUF stores the vocabulary and names the pre-tokenizer by a keyword; what a keyword stands for
is defined by llama.cpp (`src/llama-vocab.cpp`) and by the `tokenizer.json` of the model that it
was named after.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["build_tokenizer", "special_token_ids"]

_T = TypeVar("_T", str, int, float)

logger = logging.getLogger("ragserve")


class _Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How text is cut before merging. GPT-2's own pattern is built into tokenizers' ByteLevel.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_GPT2_KINDS = frozenset({"default", "gpt-2"})
_DIGIT_KINDS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_LLAMA3_KINDS = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2_KINDS = frozenset({"qwen2", "deepseek-r1-qwen"})

_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "eot_token": "tokenizer.ggml.eot_token_id",
    "eom_token": "tokenizer.ggml.eom_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


_NOT_NEEDED = frozenset({"unk_token", "pad_token"})


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of `bos_token`, `eos_token`, `eot_token`, `eom_token`, `unk_token`, `pad_token`, if set.

    An unknown or padding token outside the vocabulary, as some files name one, is left out: no
    prompt needs it.

    :raises ModelLoadError: if another one lies outside the vocabulary.
    """
    size = len(_tokens(metadata))
    ids = {name: metadata[key] for name, key in _SPECIAL.items() if key in metadata}
    for name, token_id in tuple(ids.items()):
        if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < size:
            continue
        if name in _NOT_NEEDED:
            del ids[name]
        else:
            raise ModelLoadError(f"{name} is id {token_id!r}, outside the {size} tokens")
    return ids


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the file's `tokenizer.ggml.*` entries describe.

    :raises UnsupportedModelError: for a tokenizer or pre-tokenizer not known here.
    :raises ModelLoadError: if entries are missing or contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata), True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r}; known are 'gpt2' (byte-level BPE) and "
            f"'llama' (SentencePiece BPE)"
        )
    _add_tokens(tokenizer, metadata)
    _add_template(tokenizer, metadata, add_bos)
    return tokenizer


def _list(metadata: Mapping[str, Any], name: str, kind: type[_T]) -> list[_T]:
    """The entry `tokenizer.ggml.{name}`, a list of `kind`; empty if there is none."""
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelLoadError(f"tokenizer.ggml.{name} is not a list of {kind.__name__}")
    return values


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _list(metadata, "tokens", str)
    if not tokens:
        raise ModelLoadError("the file has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _kinds(metadata: Mapping[str, Any]) -> list[int]:
    size = len(_tokens(metadata))
    kinds = _list(metadata, "token_type", int) or [int(_Kind.NORMAL)] * size
    if len(kinds) != size:
        raise ModelLoadError(f"{size} tokens but {len(kinds)} entries in tokenizer.ggml.token_type")
    return kinds


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(_tokens(metadata))}


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """GPT-2's scheme: every byte has a printable stand-in, merges are listed in the file.

    Also says whether this family starts a text with BOS when the file does not say.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = []
    for merge in _list(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    if not pairs:
        raise ModelLoadError("the file has no merges (tokenizer.ggml.merges)")
    kind = metadata.get("tokenizer.ggml.pre")
    if kind is None:
        logger.warning(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); using GPT-2's"
        )
        kind = "default"
    known = _GPT2_KINDS | _DIGIT_KINDS | _LLAMA3_KINDS | _QWEN2_KINDS
    if not isinstance(kind, str) or kind not in known:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {kind!r}; known are {', '.join(sorted(known))}"
        )

    try:
        model = models.BPE(
            _vocabulary(metadata),
            pairs,
            # Llama 3's tiktoken vocabulary: a whole word in it is taken without merging.
            ignore_merges=kind in _LLAMA3_KINDS,
        )
    except Exception as error:  # tokenizers raises bare Exception, e.g. for an unknown merge
        raise ModelLoadError(f"the merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()

    if kind in _GPT2_KINDS:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind in _DIGIT_KINDS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    else:
        pattern = Regex(_LLAMA3 if kind in _LLAMA3_KINDS else _QWEN2)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if kind in _QWEN2_KINDS:
            # As Qwen's own tokenizer.json has it.
            tokenizer.normalizer = normalizers.NFC()
    return tokenizer, kind in _LLAMA3_KINDS


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece BPE (Llama 2, Mistral): scores instead of merges, bytes as a fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = _tokens(metadata)
    unknown = special_token_ids(metadata).get("unk_token", 0)
    tokenizer = Tokenizer(
        models.BPE(
            _vocabulary(metadata),
            _merges_from_scores(metadata),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    underline = "▁"
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", underline)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(underline), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(underline, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, the best joined token first.

    SentencePiece always joins the neighbours whose joined token scores highest; the order of
    a merge list says the same.
    """
    tokens, kinds, vocabulary = _tokens(metadata), _kinds(metadata), _vocabulary(metadata)
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ModelLoadError(
            f"{len(tokens)} tokens but {len(scores)} entries in tokenizer.ggml.scores"
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind != _Kind.NORMAL:
            continue  # matched whole in the text, never built from pieces
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control and user-defined tokens are found in the text before anything is cut."""
    from tokenizers import AddedToken

    special: list[str | AddedToken] = []
    plain: list[str | AddedToken] = []
    for token, kind in zip(_tokens(metadata), _kinds(metadata), strict=True):
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _Kind.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """BOS before and EOS after a text, where the file or its family asks for them."""
    from tokenizers import processors

    tokens, ids = _tokens(metadata), special_token_ids(metadata)
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos) and ids.get("bos_token"),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False) and ids.get("eos_token"),
    }
    # An id may be 0, so ask for its type.
    used = {name: i for name, i in wanted.items() if i is not None and i is not False}
    if used:
        before, after = [n for n in used if n == "bos"], [n for n in used if n == "eos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[{"id": n, "ids": [i], "tokens": [tokens[i]]} for n, i in used.items()],
        )
