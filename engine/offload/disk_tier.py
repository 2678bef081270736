"""Blocks kept on a disk: a file each, that outlives the process and is shared by several.

    <folder>/<hash of the identity>/<first byte of the key>/<key>.safetensors

The folder's content is bounded, whichever processes and models it comes from: the files unused for
longest go. A file is written under another name and renamed, so under its own name it is whole,
whenever a process ends. (After a loss of power it may not be; its checksum tells.)

A file's time of modification is when it was last used. The blocks of one prompt are given times a
nanosecond apart, the first the latest, so that a prompt is shortened from its end.

What it keeps tells what documents and questions say: only their owner can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..cache.block_hash import BlockHash
from ..errors import DiskCacheError
from .block_file import BlockFile, BrokenBlockError
from .tiers import BlockIO, TierName, TierStatistics

__all__ = ["DiskTier"]

_logger = logging.getLogger("ragserve")

_SUFFIX = ".safetensors"
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_FIRST_BYTE = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f-]+\.tmp")

_STAGED_BYTES = 8 << 20
"""Memory that blocks pass through."""
_ABANDONED_SECONDS = 3600
"""A temporary file this old is left from a process that has ended."""
_LOOK_SECONDS = 10.0
"""After this, or `_LOOK_TIMES` as long as looking takes, what others wrote is looked at again."""
_LOOK_TIMES = 100
_SLACK = 16
"""Making room frees this part of the bound more than is needed: it has to look at every file."""
_PAUSE_SECONDS = 60.0
"""After a failure nothing is saved for this long."""
_WEIGHT = 0.2
"""Of the last load in the moving average."""


class DiskTier:
    """A `BlockStore` in a folder.

    An error of the file system is never raised: it is logged once, and the tier goes on with what
    still works.

    :param folder: made if it is not there. Other files in it are left alone.
    :param identity: what must be the same for a block to be used again (see `kv_identity`); the
        layout of blocks is added to it.
    :param capacity_bytes: bound of the folder, all identities together. With several processes
        each may be a sixteenth beyond it until it looks again.
    :param io: of the pool that blocks come from and go to.
    """

    name: TierName = "disk"

    def __init__(
        self,
        folder: str | Path,
        identity: Mapping[str, str],
        capacity_bytes: int,
        io: BlockIO,
    ) -> None:
        identity = {**identity, "layout": io.layout}
        name = hashlib.blake2b(
            json.dumps(identity, sort_keys=True).encode(), digest_size=16
        ).hexdigest()
        self._folder = Path(folder).expanduser()
        self._home = self._folder / name
        self._capacity = capacity_bytes
        self._file = BlockFile(identity, io.block_bytes)
        slack = capacity_bytes // _SLACK // self._file.num_bytes
        self._slack = slack * self._file.num_bytes
        self._fitting = capacity_bytes // self._file.num_bytes - slack  # blocks that may stay
        self._memory = io.allocate(max(1, _STAGED_BYTES // io.block_bytes))
        self._known: set[BlockHash] = set()
        self._refused: set[BlockHash] = set()  # broken, and could not be deleted
        self._used = 0  # bytes in the folder, as last seen
        self._unseen = 0  # bytes written since
        self._next_look = 0.0
        self._paused_until = 0.0
        self._warned = False
        self._saved = self._loaded = self._evicted = self._rejected = 0
        self._seconds_per_block: float | None = None
        self._usable = self._open()

    def __repr__(self) -> str:
        used = f"{self._used / 2**20:.0f}/{self._capacity / 2**20:.0f} MiB of the folder used"
        return f"<DiskTier {self._home} [{len(self._known)} blocks, {used}]>"

    def __contains__(self, key: BlockHash) -> bool:
        """See `BlockStore.__contains__`; what others wrote since this last looked is not in it."""
        return key in self._known

    def save(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> None:
        """See `BlockStore.save`. Of more blocks than the bound allows the first are kept."""
        if not self._usable:
            return
        self._look()
        now = time.time_ns()
        missing = [
            (key, block, now - index)
            for index, (key, block) in enumerate(zip(keys, blocks, strict=True))
            if index < self._fitting and not self._touch(key, now - index)
        ]
        for start in range(0, len(missing), len(self._memory)):
            if time.monotonic() < self._paused_until:
                return
            group = missing[start : start + len(self._memory)]
            rows = range(len(group))
            io.read([block for _, block, _ in group], self._memory, rows, after)
            try:
                self._make_room(len(group) * self._file.num_bytes)
                for row, (key, _, used_at) in zip(rows, group, strict=True):
                    self._write(key, row, used_at)
            except OSError as error:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
                self._warn(
                    "cannot save to the disk cache %s: %s; the engine goes on without saving, and "
                    f"tries again every {_PAUSE_SECONDS:.0f} s",
                    error,
                )

    def load(
        self, keys: Sequence[BlockHash], blocks: Sequence[int], io: BlockIO, after: object
    ) -> int:
        """See `BlockStore.load`."""
        if not self._usable:
            return 0
        started, now, done = time.monotonic(), time.time_ns(), 0
        while done < len(keys):
            group = keys[done : done + len(self._memory)]
            count = 0
            while count < len(group) and self._read(group[count], count):
                count += 1
            if count:
                io.write(blocks[done : done + count], self._memory, range(count), after)
            for index in range(done, done + count):
                self._touch(keys[index], now - index)
            done += count
            if count < len(group):
                break
        if done:
            self._loaded += done
            seconds = (time.monotonic() - started) / done
            if self._seconds_per_block is not None:
                seconds = _WEIGHT * seconds + (1 - _WEIGHT) * self._seconds_per_block
            self._seconds_per_block = seconds
        self._look()
        return done

    def statistics(self) -> TierStatistics:
        """See `BlockStore.statistics`; blocks and bytes are those of this identity."""
        blocks = len(self._known)
        return TierStatistics(
            blocks=blocks,
            bytes=blocks * self._file.num_bytes,
            capacity_bytes=self._capacity,
            saved=self._saved,
            loaded=self._loaded,
            evicted=self._evicted,
            rejected=self._rejected,
            seconds_per_block=self._seconds_per_block,
        )

    def clear(self) -> None:
        """See `BlockStore.clear`: the files of this identity are removed, whoever wrote them."""
        self._known = set()
        left, failure = 0, None
        for folder in _folders(self._home, _FIRST_BYTE):
            for entry in _files(folder.path, _BLOCK):
                try:
                    os.unlink(entry.path)
                except FileNotFoundError:
                    pass  # another process makes room
                except OSError as error:
                    left, failure = left + 1, error
                    self._refused.add(bytes.fromhex(entry.name.removesuffix(_SUFFIX)))
        self._next_look = 0.0
        self._look()
        if failure is not None:
            raise DiskCacheError(
                f"{left} blocks of the disk cache {self._home} cannot be removed: {failure}; "
                "this engine does not use them any more, but others may: remove the folder"
            )

    def close(self) -> None:
        """Hold nothing any more; the files stay."""
        self._usable = False
        self._known = set()
        self._memory = self._memory[:0]

    # ---- the folder ----

    def _open(self) -> bool:
        """Whether blocks can be served at all."""
        try:
            self._make_home()
        except OSError as error:
            self._warn("cannot use the disk cache %s: %s; the engine goes on without it", error)
            return False
        if self._capacity < self._file.num_bytes:
            self._warn(
                "the disk cache %s keeps nothing: %s",
                f"its bound of {self._capacity} bytes is below the {self._file.num_bytes} bytes of "
                "a block",
            )
        self._tidy()
        self._look()
        return True

    def _make_home(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._home.mkdir(mode=0o700)
        status = self._home.lstat()
        # The folder above may be anybody's, a link, or on another disk. From here on it is ours.
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{self._home} is no folder, or a link to one")
        if hasattr(os, "geteuid"):
            if status.st_uid != os.geteuid():
                raise PermissionError(f"{self._home} belongs to user {status.st_uid}")
            if stat.S_IMODE(status.st_mode) & 0o077:
                self._home.chmod(0o700)

    def _tidy(self) -> None:
        """Remove what processes that have ended left behind, of whatever identity."""
        oldest = time.time() - _ABANDONED_SECONDS
        for home in _folders(self._folder, _IDENTITY):
            for folder in _folders(home.path, _FIRST_BYTE):
                for entry in _files(folder.path, _TEMPORARY):
                    with contextlib.suppress(OSError):  # gone already, or not ours
                        if entry.stat(follow_symlinks=False).st_mtime < oldest:
                            os.unlink(entry.path)
                if home.name != self._home.name:
                    with contextlib.suppress(OSError):  # not empty
                        os.rmdir(folder.path)
            if home.name != self._home.name:
                with contextlib.suppress(OSError):
                    os.rmdir(home.path)

    def _look(self) -> None:
        """See what is there, by its names, if it is time to: others write and delete too."""
        started = time.monotonic()
        if started < self._next_look and self._unseen <= self._capacity // _SLACK:
            return
        known: set[BlockHash] = set()
        used = 0
        for home in _folders(self._folder, _IDENTITY):
            own = home.name == self._home.name
            size = self._file.num_bytes if own else None
            for folder in _folders(home.path, _FIRST_BYTE):
                for entry in _files(folder.path, _BLOCK):
                    if own:
                        known.add(bytes.fromhex(entry.name.removesuffix(_SUFFIX)))
                    if size is None:  # files of one identity are all alike in size
                        size = _size(entry)
                    used += size
        self._known = known - self._refused
        self._used, self._unseen = used, 0
        took = time.monotonic() - started
        self._next_look = started + max(_LOOK_SECONDS, _LOOK_TIMES * took)

    def _make_room(self, size: int) -> None:
        """Delete files, those unused for longest first, until `size` bytes more are in the bound.

        :raises OSError: if that cannot be done.
        """
        if self._used + size <= self._capacity:
            return
        found = []
        for home in _folders(self._folder, _IDENTITY):
            for folder in _folders(home.path, _FIRST_BYTE):
                for entry in _files(folder.path, _BLOCK):
                    with contextlib.suppress(FileNotFoundError):  # another process was faster
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        found.sort()
        self._used = sum(size for _, size, _ in found)
        self._unseen = 0
        most = max(self._capacity - size - self._slack, 0)
        failure: OSError | None = None
        for _, freed, path in found:
            if self._used <= most:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass  # another process makes room too
            except OSError as error:
                failure = error
                continue
            else:
                self._evicted += 1
            self._used -= freed
            if Path(path).parent.parent == self._home:
                self._known.discard(bytes.fromhex(Path(path).stem))
        if self._used + size > self._capacity:
            raise failure or OSError(f"{self._capacity} bytes are too few for {size} more")

    # ---- one file ----

    def _path(self, key: BlockHash) -> Path:
        name = key.hex()
        return self._home / name[:2] / (name + _SUFFIX)

    def _touch(self, key: BlockHash, used_at: int) -> bool:
        """Note that a block is used; whether it is there."""
        if key in self._refused:
            return False
        try:
            os.utime(self._path(key), ns=(used_at, used_at))
        except FileNotFoundError:
            self._known.discard(key)
            return False
        except OSError:
            return key in self._known  # a folder that is only read: its files do not age
        self._known.add(key)
        return True

    def _write(self, key: BlockHash, row: int, used_at: int) -> None:
        path = self._path(key)
        temporary = path.with_name(f".{key.hex()}.{os.getpid():x}-{secrets.token_hex(4)}.tmp")
        descriptor = self._create(temporary)
        try:
            try:
                self._file.write(descriptor, key, self._memory[row])
            finally:
                os.close(descriptor)
            os.utime(temporary, ns=(used_at, used_at))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._refused.discard(key)
        self._known.add(key)
        self._used += self._file.num_bytes
        self._unseen += self._file.num_bytes
        self._saved += 1

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
            flags |= getattr(os, name, 0)
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # the first of its folder, or somebody has removed it
            self._make_home()
            path.parent.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _read(self, key: BlockHash, row: int) -> bool:
        """Whether the block was there and intact, and is in the row now."""
        path = self._path(key)
        try:
            self._file.read(path, key, self._memory[row])
        except FileNotFoundError:
            self._known.discard(key)
            return False
        except (BrokenBlockError, OSError) as error:
            self._known.discard(key)
            self._rejected += 1
            try:
                if isinstance(error, OSError):
                    raise  # it may be whole, and only not readable for us
                os.unlink(path)
            except OSError:
                self._refused.add(key)
            _logger.warning(
                "%s of the disk cache is not used: %s; its tokens are computed again", path, error
            )
            return False
        return True

    def _warn(self, message: str, reason: object) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(message, self._folder, reason)


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []  # removed meanwhile, or another user's


def _folders(path: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    for entry in _entries(path):
        if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry


def _files(path: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    for entry in _entries(path):
        if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            yield entry


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
