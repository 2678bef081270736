"""A prompt whose cached blocks stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..cache.block_hash import BlockHash
from ..errors import InvalidParamsError
from .core import EngineCore

__all__ = ["Pin", "PinnedBlocks"]


class PinnedBlocks:
    """The engine thread's side of a pin: `take` and `release` run there, in the order of calls.

    So blocks are released if they were taken, whatever the caller has come to know of it.

    :param keys: of the blocks.
    """

    def __init__(self, keys: Sequence[BlockHash]) -> None:
        self._keys = keys
        self._taken = False

    def take(self, core: EngineCore) -> None:
        """Pin the blocks.

        :raises InvalidParamsError: if more than half of the pool would be pinned.
        """
        pool, wanted = core.pool, len(self._keys)
        limit = pool.num_blocks // 2
        if pool.num_pinned + wanted > limit:
            raise InvalidParamsError(
                "pin",
                wanted,
                f"{limit - pool.num_pinned} blocks: half of the pool's {pool.num_blocks} may be "
                f"pinned, and {pool.num_pinned} are; release other pins, or raise kv_cache_bytes",
            )
        pool.pin(self._keys)
        self._taken = True

    def release(self, core: EngineCore) -> None:
        """Let them go like others, if they were taken. Idempotent."""
        if self._taken:
            self._taken = False
            core.pool.unpin(self._keys)


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
