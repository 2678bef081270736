"""A pytest plugin for runs of the C kernels under a sanitizer; `fuzz/sanitize.py` loads it.

All memory that kernels touch then comes from the C allocator, whose blocks the address sanitizer
guards. With `RAGSERVE_SANITIZE_THREADS`, kernels run on that many threads of `fuzz/threads.c`.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence

import torch

from ragserve.kernels.cpu import native

__all__: list[str] = []


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Like `NativeOps.allocate_pool`, which takes pages that no sanitizer guards."""
    return torch.zeros(math.prod(shape), dtype=dtype).view(tuple(shape))


native.NativeOps.allocate_pool = staticmethod(_allocate)  # type: ignore[method-assign]

if (_threads := int(os.environ.get("RAGSERVE_SANITIZE_THREADS", "0"))) > 1:
    _library = ctypes.CDLL(str(native.library_path()))
    _fork = ctypes.cast(_library.fork_threads, ctypes.c_void_p).value
    native._find_fork = lambda: _fork
    torch.set_num_threads(1)  # torch's own operations run on threads that nobody follows
    torch.get_num_threads = lambda: _threads  # what kernels ask
    torch.set_num_threads = lambda count: None
