"""What was sent before: why a prompt's blocks are missing from the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..outputs import MissReason

__all__ = ["PromptHistory"]

_MAX_SEGMENTS = 1 << 16


class PromptHistory:
    """The segments that each namespace has sent, whatever stood before them.

    What it says to one namespace does not depend on what others have sent, but for how much that
    was: the segments that were not sent for longest are forgotten.
    """

    def __init__(self, max_segments: int = _MAX_SEGMENTS) -> None:
        self._max_segments = max_segments
        self._sent: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def note(self, digests: Iterable[bytes], namespace: str) -> None:
        """Segments were sent.

        :param digests: of their tokens alone.
        """
        for digest in digests:
            segment = namespace, digest
            self._sent[segment] = None
            self._sent.move_to_end(segment)
            if len(self._sent) > self._max_segments:
                self._sent.popitem(last=False)

    def why_missing(self, digest: bytes, namespace: str) -> MissReason:
        """Why a segment's blocks were never in the cache behind what stands before them now."""
        return "other_order" if (namespace, digest) in self._sent else "never_seen"
