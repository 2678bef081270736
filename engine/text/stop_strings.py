"""Stop strings: where a text that arrives in parts has to end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into parts.

    Of several that end at the same character, the longest. An automaton over all of them
    (Aho & Corasick, "Efficient string matching", 1975): a state is the longest suffix of the
    text so far which begins some stop string, and each character costs O(1) amortized
    however many stop strings there are and however long. Immutable: `n` choices share one.

    :param stop: non-empty strings.
    """

    __slots__ = ("_depths", "_edges", "_fallbacks", "_matches")

    def __init__(self, stop: Iterable[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self._depths = [0]
        self._matches: list[str | None] = [None]
        for text in stop:
            state = 0
            for character in text:
                if character not in self._edges[state]:
                    self._edges[state][character] = len(self._edges)
                    self._edges.append({})
                    self._fallbacks.append(0)
                    self._depths.append(self._depths[state] + 1)
                    self._matches.append(None)
                state = self._edges[state][character]
            self._matches[state] = text
        # Breadth first: a fallback is shorter, hence finished before who needs it.
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._edges[state].items():
                fallback = self._next(self._fallbacks[state], character)
                self._fallbacks[child] = fallback
                if self._matches[child] is None:
                    self._matches[child] = self._matches[fallback]
                queue.append(child)

    def _next(self, state: int, character: str) -> int:
        while True:
            following = self._edges[state].get(character)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fallbacks[state]

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read `text` on from `state` (0 at the beginning).

        :return: the new state, how many characters of `text` were read, and the stop string
            that the last of them completed; if there is none, all of `text` was read.
        """
        root = self._edges[0]
        for position, character in enumerate(text, 1):
            # Most characters neither go on with a stop string nor begin one.
            state = self._next(state, character) if state else root.get(character, 0)
            if state and (match := self._matches[state]) is not None:
                return state, position, match
        return state, len(text), None

    def held(self, state: int) -> int:
        """Length of the longest suffix of what was read that may still become a stop string."""
        return self._depths[state]
