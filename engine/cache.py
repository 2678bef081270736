"""Where ragserve keeps what it can make again: converted models, indexes of the demo."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """The user's cache folder for ragserve; it need not exist yet.

    `RAGSERVE_CACHE` if set, else `ragserve` below `XDG_CACHE_HOME`, else `~/.cache/ragserve`.
    Everything in it may be deleted at any time.
    """
    own = os.environ.get("RAGSERVE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG base directory specification: a relative path is invalid and must be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "ragserve"
    return Path.home() / ".cache" / "ragserve"
