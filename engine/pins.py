"""A prompt whose cached blocks stay."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Pin"]


class Pin:
    """Keeps the cached blocks of a prompt, a system prompt say. Made by `Engine.pin`.

    They go only when a request that runs needs all the rest of the pool, and are kept again once
    they are computed again.

    :ivar num_tokens: of the prompt.
    :ivar num_blocks: that it fills.
    """

    def __init__(self, num_tokens: int, num_blocks: int, release: Callable[[], None]) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self._release: Callable[[], None] | None = release

    def __repr__(self) -> str:
        state = "released" if self._release is None else "held"
        return f"<Pin [{self.num_tokens} tokens in {self.num_blocks} blocks, {state}]>"

    def release(self) -> None:
        """Let the blocks go like others. From any thread; idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()
