"""Key caching: a list of indices that the shard's node has had before is sent by its digest.

The lists are soft state of both ends. A node that does not have the one that is meant says so, and
the operation is sent again with it, under the same number. What goes further, down a chain or to a
mailbox, always carries its lists.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from dps.core.filters.encoding import Section, assembled, taken_apart
from dps.core.updates import Operation
from dps.protocol.transport import Endpoint

Array = np.ndarray

WORTH = 64  # bytes: a shorter list is sent as it is
REMEMBERED = 256  # lists that a client takes a node to have


def is_cached(keys: Array) -> bool:
    """Whether a list is long enough to be sent by its digest."""
    return keys.nbytes >= WORTH


def digest_of(keys: Array) -> str:
    """What a list is called by those who have it."""
    return blake2b(keys.data, digest_size=16).hexdigest()


class KnownKeys:
    """The lists that a client takes a node to have: those of acknowledged operations.

    Used from one event loop.

    Attributes
    ----------
    saved_bytes
        Length of all lists that were left out of acknowledged operations.
    """

    def __init__(self) -> None:
        self.saved_bytes = 0
        self._at: Endpoint | None = None
        self._known: OrderedDict[str, None] = OrderedDict()

    def shortened(self, op: Operation, to: Endpoint) -> Operation:
        """Return the operation without the lists that the node has."""
        if not op.codec or to != self._at or not self._known:
            return op
        sections = [self._short(section) for section in taken_apart(op)]
        return assembled(op, sections) if any(s.part.cached for s in sections) else op

    def acked(self, op: Operation, sent: Operation, by: Endpoint) -> None:
        """Note that a node has received an operation, as it was sent."""
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
        """Take the node to have no list."""
        self._known.clear()

    def _short(self, section: Section) -> Section:
        digest = digest_of(section.keys)
        if digest not in self._known:
            return section
        part = replace(section.part, cached=digest)
        return Section(part, np.empty(0, np.uint8), section.values)
