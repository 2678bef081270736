"""The operations for CPU."""

from __future__ import annotations

__all__: list[str] = []
