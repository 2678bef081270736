"""What the cache once held or was asked for: how often a block was used, and why one is missing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .outputs import MissReason

__all__ = ["PromptHistory"]

_MAX_SEGMENTS = 1 << 16
_MAX_NAMESPACES = 8
"""Of one segment that are remembered: the latest."""


class PromptHistory:
    """The segments that were sent, by content and namespace, whatever stood before them.

    Bounded: the segments that were not sent for longest are forgotten.
    """

    def __init__(self, max_segments: int = _MAX_SEGMENTS) -> None:
        self._max_segments = max_segments
        self._namespaces_of: OrderedDict[bytes, OrderedDict[str, None]] = OrderedDict()

    def note(self, digests: Iterable[bytes], namespace: str) -> None:
        """Segments were sent.

        :param digests: of their tokens alone.
        """
        known = self._namespaces_of
        for digest in digests:
            namespaces = known.get(digest)
            if namespaces is None:
                known[digest] = OrderedDict({namespace: None})
                if len(known) > self._max_segments:
                    known.popitem(last=False)
                continue
            known.move_to_end(digest)
            namespaces[namespace] = None
            namespaces.move_to_end(namespace)
            if len(namespaces) > _MAX_NAMESPACES:
                namespaces.popitem(last=False)

    def why_missing(self, digest: bytes, namespace: str) -> MissReason:
        """Why a segment's blocks were never in the cache behind what stands before them now."""
        namespaces = self._namespaces_of.get(digest)
        if namespaces is None:
            return "never_seen"
        return "other_order" if namespace in namespaces else "other_namespace"
