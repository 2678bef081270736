"""What of an answer's prompt was found in the cache, and why not more: for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ragserve.engine import MissReason, SegmentReuse

__all__ = ["PromptReuse"]

_WHY: Final[dict[MissReason, str]] = {
    "never_seen": "not sent before",
    "evicted": "was cached, and made room for others",
    "other_order": "sent before, but behind other text",
    "shorter_than_block": "fills no block, or is the token that is always computed",
    "not_cached": "not looked for: no prefix cache, or log-probabilities were asked for",
}


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """What of each part of a prompt was not computed again. `str` is a line, `table` a table.

    :param segments: one for each segment of the prompt, as the engine has them; empty if the
        engine never started the request.
    :param chunk_ids: of the documents, in the order of the prompt.
    """

    segments: tuple[SegmentReuse, ...]
    chunk_ids: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def cached_tokens(self) -> int:
        """Of those, found in the cache."""
        return sum(segment.cached_tokens for segment in self.segments)

    @property
    def ratio(self) -> float:
        """Share of the prompt that was found, 0 to 1."""
        return self.cached_tokens / max(1, self.tokens)

    @property
    def misses(self) -> dict[MissReason, int]:
        """Tokens that had to be computed, by the reason."""
        misses: dict[MissReason, int] = {}
        for segment in self.segments:
            if segment.miss is not None:
                missing = segment.tokens - segment.cached_tokens
                misses[segment.miss] = misses.get(segment.miss, 0) + missing
        return misses

    def __str__(self) -> str:
        if not self.segments:
            return "unknown: the engine had not started the request"
        parts = []
        for name, segment in zip(self._names(), self.segments, strict=True):
            tier = None if segment.source == "device" else segment.source
            notes = ", ".join(filter(None, (tier, segment.miss)))
            note = f" ({notes})" if notes else ""
            parts.append(f"{name} {segment.cached_tokens}/{segment.tokens}{note}")
        return f"{self.cached_tokens} of {self.tokens} prompt tokens reused: {', '.join(parts)}"

    def table(self) -> str:
        """A line for each segment: its tokens, those reused, where from, and why not more."""
        rows = [("segment", "tokens", "reused", "from", "why not more")]
        ids = iter(self.chunk_ids if self._has_all_documents() else ())
        for name, segment in zip(self._names(), self.segments, strict=True):
            chunk_id = next(ids, "") if segment.kind == "document" else ""
            rows.append(
                (
                    f"{name} {chunk_id}".rstrip(),
                    str(segment.tokens),
                    str(segment.cached_tokens),
                    segment.source or "",
                    "" if segment.miss is None else _WHY[segment.miss],
                )
            )
        rows.append(("all", str(self.tokens), str(self.cached_tokens), f"{self.ratio:.0%}", ""))
        wide, _, _, source, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(
            f"{name:<{wide}}  {tokens:>6}  {cached:>6}  {where:<{source}}  {why}".rstrip()
            for name, tokens, cached, where, why in rows
        )

    def _has_all_documents(self) -> bool:
        """Whether every chunk has its segment: one whose text is empty has none."""
        documents = sum(segment.kind == "document" for segment in self.segments)
        return documents == len(self.chunk_ids)

    def _names(self) -> Iterator[str]:
        """What each segment is called: documents as in citations."""
        numbered = self._has_all_documents()
        number = 0
        for segment in self.segments:
            if segment.kind == "document" and numbered:
                number += 1
                yield f"[{number}]"
            else:
                yield segment.kind
