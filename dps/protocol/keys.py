"""Owns key caching: a list of indices that the shard's node has had before is sent by its digest.

The lists are soft state of both ends. A node that does not have the one that is meant says so, and
the operation is sent again with it, under the same number. What goes further, down a chain or to a
mailbox, always carries its lists.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from dps.core.codecs import Section, assembled, taken_apart
from dps.core.updates import Operation
from dps.errors import KeysUnknown, ShapeMismatch
from dps.protocol.transport import Endpoint

Array = np.ndarray

WORTH = 64  # bytes: a shorter list is sent as it is
CACHE_BYTES = 1 << 26
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
        digests = [_digest(section.keys) for section in sections]
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
            if section.keys.nbytes >= WORTH:
                digest = was.cached or _digest(section.keys)
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


class KeyLists:
    """The lists that a node has had last, of all shards and workers. Used from one event loop.

    A list is found by what is in it, so it does not matter whose it was.
    """

    def __init__(self) -> None:
        self._lists: OrderedDict[str, Array] = OrderedDict()
        self._nbytes = 0

    def completed(self, op: Operation) -> Operation:
        """Return the operation with all its lists, and keep those that it came with.

        Raises
        ------
        KeysUnknown
            A list is not here (any more).
        """
        if not op.codec:
            return op
        sections = [self._whole(op, section) for section in taken_apart(op)]
        if not any(part.cached for part in op.codec):
            return op
        return assembled(op, sections)

    def _whole(self, op: Operation, section: Section) -> Section:
        part = section.part
        if not part.cached:
            self._keep(section.keys)
            return section
        keys = self._found(part.cached)
        if keys is None:
            raise KeysUnknown(f"update {op.id}: its list of indices is not here; send it again")
        if keys.nbytes != part.key_bytes:
            raise ShapeMismatch(f"update {op.id}: its list of indices has another length")
        return Section(replace(part, cached=""), keys, section.values)

    def _found(self, digest: str) -> Array | None:
        if digest in self._lists:
            self._lists.move_to_end(digest)
        return self._lists.get(digest)

    def _keep(self, keys: Array) -> None:
        if keys.nbytes < WORTH:
            return
        digest = _digest(keys)
        if self._found(digest) is None:
            self._lists[digest] = keys.copy()  # else the whole payload would be kept
            self._nbytes += keys.nbytes
        while self._nbytes > CACHE_BYTES:
            _, oldest = self._lists.popitem(last=False)
            self._nbytes -= oldest.nbytes


def _digest(keys: Array) -> str:
    return blake2b(keys.data, digest_size=16).hexdigest()
