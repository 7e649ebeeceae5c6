"""Encoded gradients and weights in transit: lossless compression, decoding, and key caching.

Decoding raises `ShapeMismatch` if a payload differs from its description, or does not fit the
shard.

Key caching: if the receiver already has a list of indices, its digest is sent instead. Both ends
may forget lists at any time. A node that lacks the list refuses the operation, which is sent again
with the list, under the same number. Operations that go further, down a chain or to a mailbox,
always carry their lists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from threading import Lock

import numpy as np
from lz4 import block

from dps.core.blocks import ShardLayout
from dps.core.filters.encoding import (
    Section,
    as_halves,
    assembled,
    decoded,
    nbytes_of_keys,
    nbytes_of_values,
    patched,
    stretches,
    taken_apart,
)
from dps.core.updates import Operation
from dps.errors import KeysUnknown, ShapeMismatch
from dps.protocol.transport import Endpoint

Array = np.ndarray

WORTH = 64  # bytes: a shorter section would get longer
WORTH_CACHING = 64  # bytes: a shorter list is sent as it is
REMEMBERED = 256  # lists that a client expects a node to have
CACHE_BYTES = 1 << 26


def packed(op: Operation, lossless: Sequence[bool]) -> Operation:
    """Compress the sections of the `lossless` parts, where that makes them shorter."""
    if not any(lossless):
        return op
    sections = zip(taken_apart(op), lossless, strict=True)
    return assembled(op, [_packed(section) if wanted else section for section, wanted in sections])


def dense(layout: ShardLayout, op: Operation) -> Operation:
    """Return the operation with its gradient as numbers; entries that were not sent are 0."""
    return decoded(layout, _unpacked(layout, op)) if op.codec else op


def applicable(layout: ShardLayout, op: Operation) -> Operation:
    """Return the operation with its gradient in a form that a step takes."""
    return (as_halves(layout, op) or dense(layout, op)) if op.codec else op


def decoded_bytes(layout: ShardLayout, op: Operation) -> int:
    """Estimate the bytes of a decoded operation, and so how long decoding may take."""
    return layout.nbytes if op.codec else op.nbytes


def updated(layout: ShardLayout, copy: Array, sent: Operation) -> Array:
    """Return a worker's copy of a shard's weights, updated by the changes that were sent."""
    return patched(layout, copy, _unpacked(layout, sent))


def _packed(section: Section) -> Section:
    keys, values = _shorter(section.keys), _shorter(section.values)
    return _section(section, keys, values, (keys is not section.keys, values is not section.values))


def _shorter(section: Array) -> Array:
    if section.nbytes < WORTH:
        return section
    compressed = np.frombuffer(block.compress(section, store_size=False), np.uint8)
    return compressed if compressed.nbytes < section.nbytes else section


def _unpacked(layout: ShardLayout, op: Operation) -> Operation:
    if not any(part.packed_keys or part.packed_values for part in op.codec):
        return op
    chosen = stretches(layout, op.pieces)
    fits = len(chosen) == len(op.codec)
    if not (fits and all(p.entries <= s.size for p, s in zip(op.codec, chosen, strict=True))):
        raise ShapeMismatch(f"update {op.id}: its encoded gradient does not fit the shard")
    sections = []
    for stretch, section in zip(chosen, taken_apart(op), strict=True):
        part, keys, values = section.part, section.keys, section.values
        if part.packed_keys:
            nbytes = nbytes_of_keys(part.keys, stretch.size, part.entries)
            keys = _restored(op, keys, nbytes)
        if part.packed_values:
            nbytes = nbytes_of_values(part.values, stretch.dtype, stretch.size, part.entries)
            values = _restored(op, values, nbytes)
        sections.append(_section(section, keys, values, (False, False)))
    return assembled(op, sections)


def _section(old: Section, keys: Array, values: Array, are_packed: tuple[bool, bool]) -> Section:
    part = replace(old.part, key_bytes=keys.nbytes, value_bytes=values.nbytes)
    packed_keys, packed_values = are_packed
    part = replace(part, packed_keys=packed_keys, packed_values=packed_values)
    return Section(part, keys, values)


def _restored(op: Operation, section: Array, nbytes: int) -> Array:
    try:
        restored = block.decompress(section.tobytes(), uncompressed_size=nbytes)
    except block.LZ4BlockError as error:
        raise ShapeMismatch(
            f"update {op.id}: its gradient cannot be decompressed: {error}"
        ) from error
    return np.frombuffer(restored, np.uint8)


# -- key caching -----------------------------------------------------------------------------------
def _digest_of(keys: Array) -> str:
    """Return the digest of a list; "" if the list is too short to be cached."""
    return blake2b(keys.data, digest_size=16).hexdigest() if keys.nbytes >= WORTH_CACHING else ""


def without_lists(op: Operation, known: Collection[str]) -> tuple[Operation, tuple[str, ...]]:
    """Replace the lists whose digests are `known` to the receiver by their digests.

    Returns the operation to send, and the digests of its lists, "" for short ones.
    """
    sections = list(taken_apart(op))
    digests = tuple(_digest_of(section.keys) for section in sections)
    left_out = {digest for digest in digests if digest and digest in known}
    if not left_out:
        return op, digests
    short = [
        Section(replace(section.part, cached=digest), np.empty(0, np.uint8), section.values)
        if digest in left_out
        else section
        for section, digest in zip(sections, digests, strict=True)
    ]
    return assembled(op, short), digests


def with_lists(op: Operation, known: Mapping[str, Array]) -> tuple[Operation, dict[str, Array]]:
    """Undo `without_lists`; also return all lists of the operation, by their digests."""
    sections = [
        _filled(op, section, known.get(section.part.cached)) if section.part.cached else section
        for section in taken_apart(op)
    ]
    lists = {_digest_of(section.keys): section.keys.copy() for section in sections}
    return assembled(op, sections), lists


def _filled(op: Operation, section: Section, keys: Array | None) -> Section:
    if keys is None:
        raise KeysUnknown(f"update {op.id}: its list of indices is not known here; send it again")
    if keys.nbytes != section.part.key_bytes:
        raise ShapeMismatch(f"update {op.id}: its list of indices has another length")
    return Section(replace(section.part, cached=""), keys, section.values)


class KnownKeys:
    """The key lists of acknowledged operations, which a client expects a node to have."""

    def __init__(self) -> None:
        self.saved_bytes = 0  # the length of all lists that were not sent
        self._at: Endpoint | None = None
        self._known: OrderedDict[str, None] = OrderedDict()

    def shortened(self, op: Operation, to: Endpoint) -> Operation:
        """Return the operation without the lists that the node has."""
        if not op.codec or to != self._at or not self._known:
            return op
        return without_lists(op, self._known)[0]

    def acked(self, op: Operation, sent: Operation, by: Endpoint) -> None:
        """Note that a node has received an operation, as it was sent."""
        if not op.codec:
            return
        self.saved_bytes += sum(part.key_bytes for part in sent.codec if part.cached)
        if by != self._at:
            self._at = by
            self._known.clear()
        for section, was in zip(taken_apart(op), sent.codec, strict=True):
            if digest := was.cached or _digest_of(section.keys):
                self._known[digest] = None
                self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Expect the node to have no list."""
        self._known.clear()


class KeyLists:
    """The lists that a server node received last, of all shards and workers. Thread-safe."""

    def __init__(self) -> None:
        self._lists: OrderedDict[str, Array] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    def completed(self, op: Operation) -> Operation:
        """Return the operation with all its lists, and cache those that it carried.

        Raises `KeysUnknown` if a list is not cached (any more).
        """
        sections = [self._whole(op, section) for section in taken_apart(op)]
        return assembled(op, sections) if any(part.cached for part in op.codec) else op

    def _whole(self, op: Operation, section: Section) -> Section:
        cached = section.part.cached
        if not (digest := cached or _digest_of(section.keys)):
            return section
        with self._lock:
            keys = self._found(digest)
            if keys is None and not cached:
                # A view would keep the whole payload alive.
                self._lists[digest] = keys = section.keys.copy()
                self._nbytes += keys.nbytes
                while self._nbytes > CACHE_BYTES:
                    self._nbytes -= self._lists.popitem(last=False)[1].nbytes
        return _filled(op, section, keys) if cached else section

    def _found(self, digest: str) -> Array | None:
        if digest in self._lists:
            self._lists.move_to_end(digest)
        return self._lists.get(digest)
