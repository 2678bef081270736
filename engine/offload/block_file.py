"""One block of keys and values in one safetensors file.

    8 bytes     length of the header, little endian
    header      JSON: one tensor of bytes; identity, key and checksum as metadata; spaces
    data        the block's bytes, as the pool's backend lays them out

A file is intact exactly if its header is the one that would be written for this identity, this key
and the data that follows. So a header is compared, never parsed, and damage anywhere is found.

The checksum is CRC-32: it finds accidents, at several times the speed of BLAKE2 (which has no
instructions of its own in processors). Against forgery neither would help, without a secret: what
protects from others is that they cannot write into the folder.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import mmap
import os
import stat
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..cache.block_hash import BlockHash

__all__ = ["BlockFile", "BrokenBlockError"]

_ALIGNMENT = 64
_KEY_BYTES = 32
# Without O_NONBLOCK opening a named pipe would wait for its other end.
_READ_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_MADV_POPULATE_READ = 22
"""Linux 5.14; Python's `mmap` has no name for it."""


class BrokenBlockError(Exception):
    """A file is not what was written for this block; the message says how."""


class BlockFile:
    """Writes and reads blocks of one identity.

    :param identity: what must be the same for a block to be used again; part of every header.
    :param block_bytes: of one block.
    :ivar num_bytes: size of every file.
    """

    def __init__(self, identity: Mapping[str, str], block_bytes: int) -> None:
        self._identity = {f"identity.{name}": text for name, text in sorted(identity.items())}
        self._block_bytes = block_bytes
        self._header_bytes = len(self._header(bytes(_KEY_BYTES), 0))
        self.num_bytes = self._header_bytes + block_bytes

    def write(self, descriptor: int, key: BlockHash, data: NDArray[np.uint8]) -> None:
        """Write a block to an open, empty file.

        :param data: [block_bytes], contiguous.
        :raises OSError: if it cannot be written.
        """
        for view in (memoryview(self._header(key, zlib.crc32(data.data))), data.data):
            while view:
                view = view[os.write(descriptor, view) :]

    def read(self, path: Path, key: BlockHash, data: NDArray[np.uint8]) -> None:
        """Copy the block of a key from its file.

        What is checked is the copy, so that nothing can change between check and use.

        :param data: [block_bytes], contiguous; filled, with anything if this raises.
        :raises BrokenBlockError: if the file is not whole, or is that of another key or identity.
        :raises OSError: if it cannot be read: `FileNotFoundError` if it is not there.
        """
        with self._map(path) as mapped:
            _populate(mapped)
            header = mapped[: self._header_bytes]
            np.copyto(data, np.frombuffer(mapped, np.uint8, offset=self._header_bytes))
        if header != self._header(key, zlib.crc32(data.data)):
            raise BrokenBlockError("it is damaged, or belongs to another key or another model")

    def _map(self, path: Path) -> mmap.mmap:
        descriptor = os.open(path, _READ_FLAGS)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BrokenBlockError("it is no regular file")
            if status.st_size != self.num_bytes:
                raise BrokenBlockError(
                    f"it has {status.st_size} bytes and a block's file has {self.num_bytes}"
                )
            return mmap.mmap(descriptor, self.num_bytes, access=mmap.ACCESS_READ)
        except ValueError as error:  # shorter, all of a sudden
            raise BrokenBlockError(str(error)) from error
        finally:
            os.close(descriptor)

    def _header(self, key: BlockHash, checksum: int) -> bytes:
        metadata = {**self._identity, "key": key.hex(), "crc32": f"{checksum:08x}"}
        tensor = {
            "dtype": "U8",
            "shape": [self._block_bytes],
            "data_offsets": [0, self._block_bytes],
        }
        text = json.dumps({"__metadata__": metadata, "block": tensor}).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def _populate(mapped: mmap.mmap) -> None:
    """Read what is mapped into memory, so that an error of the disk is an exception.

    Where a page cannot be read when it is touched, the system ends the process (SIGBUS).

    :raises OSError: if it cannot be read.
    """
    if sys.platform != "linux":
        return  # no way to ask for it
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    # Not mapped.madvise: that holds the GIL while the disk reads.
    if _libc().madvise(address, len(mapped), _MADV_POPULATE_READ) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # an older kernel
            raise OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
