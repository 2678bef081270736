"""Where ragserve keeps what it can make again: converted models, indexes of the demo."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["RECORD", "cache_directory", "is_made", "make_folder"]

RECORD = "conversion.json"
"""Written into a folder that was made: what it was made from, and each file's size."""


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


def make_folder(target: Path, fingerprint: str, write: Callable[[Path], None]) -> Path:
    """Make a folder, or find that it was made before.

    It appears at once and whole: nothing half-written is ever left in it, whenever the process
    ends, and two processes that make it at the same time do not meet.

    :param fingerprint: of what it is made from; a folder with another one is made anew.
    :param write: fills a new, empty folder.
    :returns: `target`.
    :raises OSError: if it cannot be written.
    """
    if is_made(target, fingerprint):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, hence on the same file system: the rename below is atomic.
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
    ) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write(folder)
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        record = json.dumps({"fingerprint": fingerprint, "files": sizes}, indent=2)
        (folder / RECORD).write_text(record + "\n", "utf-8")
        _move(folder, target, fingerprint)
    return target


def is_made(folder: Path, fingerprint: str) -> bool:
    """Whether the folder was made from this, and all its files are still there."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        return record["fingerprint"] == fingerprint and all(
            (folder / name).stat().st_size == size for name, size in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, incomplete, or someone else's file of that name


def _move(folder: Path, target: Path, fingerprint: str) -> None:
    """Put the finished folder in place; another process may have done so meanwhile."""
    try:
        folder.rename(target)
    except OSError:
        if is_made(target, fingerprint):
            return
        if not target.is_dir():
            raise
        shutil.rmtree(target)  # an earlier one, since damaged
        folder.rename(target)
