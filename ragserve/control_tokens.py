"""Texts of others, kept from speaking a model's control language."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["ControlTokens"]


class ControlTokens:
    """Makes plain text of the special tokens that a document or a question has written out.

    Each, like `<|im_end|>`, gets a space after its first character, and so is plain text to the
    tokenizer.

    :param special_tokens: texts that become a control token wherever they are written.
    """

    def __init__(self, special_tokens: Collection[str]) -> None:
        # A token of one character cannot be broken up, nor can white space; no chat format has
        # such. The longest first, so that a token which begins like another is seen whole.
        tokens = {token.strip() for token in special_tokens}
        tokens = {token for token in tokens if len(token) > 1}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None

    def neutralized(self, text: str) -> str:
        """`text` without any special token."""
        pattern = self._pattern
        # Again until there is none: a broken token can, in theory, make up another one.
        while pattern is not None and pattern.search(text):
            text = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return text
