"""Where ragserve keeps what it can make again: converted models, indexes of the demo."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

__all__ = [
    "RECORD",
    "cache_directory",
    "check_room",
    "is_made",
    "make_folder",
    "short_name",
    "sweep",
]

RECORD = "conversion.json"
"""Written into a folder that was made: what it was made from, and each file's size."""

_SCRATCH = ".ragserve-"
"""How folders begin that are being written. Each holds a lock of the process that writes it."""
_LOCK = "lock"
_LONGEST_NAME = 64


def cache_directory() -> Path:
    """The user's cache folder for ragserve; it need not exist yet.

    `RAGSERVE_CACHE` if set, else `ragserve` below `XDG_CACHE_HOME`, else `~/.cache/ragserve`.
    Everything in it may be deleted at any time.

    :raises OSError: if there is no home folder to find it in.
    """
    own = os.environ.get("RAGSERVE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG base directory specification: a relative path is invalid and must be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "ragserve"
    try:
        return Path.home() / ".cache" / "ragserve"
    except RuntimeError as error:
        raise FileNotFoundError(
            errno.ENOENT, "there is no home folder for the cache; set RAGSERVE_CACHE to a folder"
        ) from error


def short_name(name: str) -> str:
    """The beginning of a name, with room left below the 255 bytes of a file system for more."""
    return name.encode()[:_LONGEST_NAME].decode(errors="ignore")


def check_room(folder: Path, num_bytes: int) -> None:
    """Tell before, not after, gigabytes were written that a disk is too small.

    :raises OSError: if fewer bytes are free on the folder's disk.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"it takes {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free in {folder}; set "
            "RAGSERVE_CACHE to a folder with more room",
        )


def make_folder(target: Path, fingerprint: str, write: Callable[[Path], None]) -> Path:
    """Make a folder, or find that it was made before.

    It appears at once and whole: nothing half-written is ever left in it, whenever the process
    ends, and two processes that make it at the same time do not meet. What a process that was
    killed had written is removed by the next one that makes, or finds, a folder beside it.

    :param fingerprint: of what it is made from; a folder with another one is made anew.
    :param write: fills a new, empty folder.
    :returns: `target`.
    :raises OSError: if it cannot be written.
    """
    sweep(target.parent)
    if is_made(target, fingerprint):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, hence on the same file system: the rename below is atomic.
    with _scratch_folder(target.parent) as scratch:
        folder = scratch / "model"
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


def sweep(parent: Path) -> None:
    """Remove the scratch folders of processes that were killed while they wrote.

    A folder is removed only under its writer's lock, which the system keeps for as long as the
    writer lives. What cannot be locked, because it is written just now or because the file system
    has no locks, stays.
    """
    for path in parent.glob(f"{_SCRATCH}*/{_LOCK}"):
        # An error: its writer is alive, or another removes it at the same time.
        with contextlib.suppress(OSError), path.open("r+") as lock:
            _lock(lock)
            shutil.rmtree(path.parent)


@contextlib.contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder that `sweep` leaves alone until this process ends."""
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
    try:
        with (scratch / "unlocked").open("w") as lock:
            with contextlib.suppress(OSError):  # without locks, nothing is ever swept
                _lock(lock)
                # Found only from now on, so that no one locks it before its writer does.
                (scratch / "unlocked").rename(scratch / _LOCK)
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _lock(file: IO[str]) -> None:
    """Lock an open file, until it is closed or the process ends.

    :raises OSError: if another has it, or locks are not to be had.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOTSUP, "this system has no flock") from error
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
