"""The smallest input with the same fault: halves, quarters, ... are left out while it stays."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["minimise"]


def minimise(
    data: bytes, fails: Callable[[bytes], bool], *, seconds: float = 10.0, runs: int = 400
) -> bytes:
    """Shorten an input by delta debugging (Zeller and Hildebrandt, 2002) on its bytes.

    :param fails: whether an input has the fault.
    :param seconds: the time for it; what was reached by then is returned. Likewise `runs`.
    """
    deadline = time.monotonic() + seconds
    pieces = 2
    while len(data) > 1 and runs > 0 and time.monotonic() < deadline:
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            shorter = data[:start] + data[start + size :]
            runs -= 1
            if runs <= 0 or time.monotonic() > deadline:
                return data
            if fails(shorter):
                data = shorter
                pieces = max(pieces - 1, 2)
                break
        else:
            if size == 1:
                return data
            pieces = min(pieces * 2, len(data))
    return data
