"""Lists of keys that a client has sent already, and sends by their digest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np

from dps.core.filters.encoding import Section, assembled, taken_apart
from dps.core.updates import Operation
from dps.protocol.key_cache import digest_of, is_cached
from dps.protocol.transport import Endpoint

REMEMBERED = 256


class KnownKeys:
    """What a client knows of the lists that a node has: those in what the node acknowledged.

    Used from one event loop.

    Attributes
    ----------
    saved_bytes
        Length of all lists that were left out of what was acknowledged.
    """

    def __init__(self) -> None:
        self.saved_bytes = 0
        self._at: Endpoint | None = None
        self._known: OrderedDict[str, None] = OrderedDict()

    def shortened(self, op: Operation, to: Endpoint) -> Operation:
        """Return the operation without the lists that the node has."""
        if not op.codec or to != self._at or not self._known:
            return op
        sections = list(taken_apart(op))
        digests = [digest_of(section.keys) for section in sections]
        if not any(digest in self._known for digest in digests):
            return op
        return assembled(op, [self._short(s, d) for s, d in zip(sections, digests, strict=True)])

    def acked(self, op: Operation, sent: Operation, by: Endpoint) -> None:
        """Take note that a node has had this operation, as it was sent to it."""
        if not op.codec:
            return
        self.saved_bytes += sum(part.key_bytes for part in sent.codec if part.cached)
        if by != self._at:
            self._at = by
            self._known.clear()
        for section, was in zip(taken_apart(op), sent.codec, strict=True):
            if is_cached(section.keys):
                digest = was.cached or digest_of(section.keys)
                self._known[digest] = None
                self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Count on no list any more."""
        self._known.clear()

    def _short(self, section: Section, digest: str) -> Section:
        if digest not in self._known:
            return section
        part = replace(section.part, cached=digest)
        return Section(part, np.empty(0, np.uint8), section.values)
