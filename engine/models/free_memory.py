"""How much memory the host has left."""

from __future__ import annotations

import os

__all__ = ["available_memory"]


def available_memory() -> int:
    """Bytes of memory that could be taken now without swapping, as the system sees it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: what is free is the best that the standard library can tell
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
