"""Lossless compression of encoded gradients and weights, and decoding back to numbers.

Decoding raises `ShapeMismatch` if a payload is not what its description says, or does not fit the
shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from lz4 import block

from dps.core.blocks import ShardLayout
from dps.core.filters.encoding import (
    Section,
    assembled,
    decoded,
    nbytes_of_keys,
    nbytes_of_values,
    patched,
    stretches,
    taken_apart,
)
from dps.core.updates import Operation
from dps.errors import ShapeMismatch

Array = np.ndarray

WORTH = 64  # bytes: a shorter section would get longer


def packed(op: Operation, lossless: Sequence[bool]) -> Operation:
    """Compress the sections of the `lossless` parts, where that makes them shorter."""
    if not any(lossless):
        return op
    sections = zip(taken_apart(op), lossless, strict=True)
    return assembled(op, [_packed(section) if wanted else section for section, wanted in sections])


def dense(layout: ShardLayout, op: Operation) -> Operation:
    """Return the operation with its gradient as numbers; entries that were not sent are 0."""
    return decoded(layout, _unpacked(layout, op)) if op.codec else op


def decoded_bytes(layout: ShardLayout, op: Operation) -> int:
    """Estimate the bytes of an operation as numbers, and so how long decoding may take."""
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
            keys = _restored(op, keys, nbytes_of_keys(part, stretch.size))
        if part.packed_values:
            nbytes = nbytes_of_values(part, stretch.dtype, stretch.size)
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
        raise ShapeMismatch(f"update {op.id}: its gradient cannot be unpacked: {error}") from error
    return np.frombuffer(restored, np.uint8)
