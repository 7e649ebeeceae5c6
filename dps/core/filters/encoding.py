"""The encoding of filtered gradients: which entries are sent, and how their values are written.

Each array on a shard has an `Encoding` and, in the payload of the operation, two buffers: the
indices of the entries that are sent, and their values. Decoding depends only on these, so
replicas that decode the same bytes stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dps.core.blocks import Empty, ShardLayout
from dps.core.updates import Encoding, Operation
from dps.errors import ShapeMismatch

Array = np.ndarray
Values = Literal["raw", "bf16", "int8"]
Random = Callable[[], np.random.Generator]  # called for the rounding to int8

KEYS = ("", "bits", "uint16", "uint32")
VALUES = ("raw", "bf16", "int8")
BUCKET = 1024  # entries that share a scale in int8
LEVELS = 127
BF16_MAX = float(np.array(0x7F7F0000, np.uint32).view(np.float32))
BLOCK = 1 << 16  # entries that are rounded at a time, so that the steps' results stay in the cache


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `begin` to `end` of a dense gradient: the elements of one array on the shard."""

    name: str
    dtype: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.end - self.begin) // np.dtype(self.dtype).itemsize

    def view(self, buffer: Array) -> Array:
        """The elements in a gradient, without a copy."""
        return buffer[self.begin : self.end].view(self.dtype)


@dataclass(frozen=True, slots=True)
class Section:
    """An encoding with its two buffers in the payload."""

    part: Encoding
    keys: Array
    values: Array


def stretches(layout: ShardLayout, pieces: Sequence[int]) -> tuple[Stretch, ...]:
    """Return where each array lies in a dense gradient of these pieces (empty: all)."""
    by_array: dict[str, Stretch] = {}  # the pieces of an array follow one another
    for piece, where in layout.packed(pieces):
        block = piece.block
        first = by_array.get(block.name)
        begin = where.start if first is None else first.begin
        by_array[block.name] = Stretch(block.name, block.dtype, begin, where.stop)
    return tuple(by_array.values())


def encoded(accumulated: Array, selected: Array | None, values: Values, random: Random) -> Section:
    """Encode the entries of a 1-D array under a mask (None: all), in the shortest form."""
    size = accumulated.size
    entries = size if selected is None else int(np.count_nonzero(selected))
    kind, keys = form_of_keys(size, entries, accumulated.dtype, values), np.empty(0, np.uint8)
    if kind is None:
        entries = -1
        sent = accumulated if selected is None else np.where(selected, accumulated, 0)
    else:
        assert selected is not None
        sent = np.compress(selected, accumulated)  # several times as fast as `[selected]`
        if kind == "bits":
            keys = np.packbits(selected)
        elif kind:
            keys = np.flatnonzero(selected).astype(kind).view(np.uint8)
    match values:
        case "bf16":
            body = _bf16(sent)
        case "int8":
            body = _int8(sent, random())
        case "raw":
            body = np.ascontiguousarray(sent).view(np.uint8)
    return Section(Encoding(entries, kind or "", values, keys.nbytes, body.nbytes), keys, body)


def form_of_keys(size: int, entries: int, dtype: np.dtype[Any] | str, values: Values) -> str | None:
    """Return the form of indices that makes an encoding short; None: it is shorter without them."""
    kinds = ("uint16" if size <= 1 << 16 else "uint32", "bits") if entries else ("",)
    kind = min(kinds, key=lambda kind: nbytes_of_keys(kind, size, entries))
    whole, part = (nbytes_of_values(values, dtype, size, n) for n in (size, entries))
    return None if nbytes_of_keys(kind, size, entries) >= whole - part else kind


def assembled(op: Operation, sections: Sequence[Section]) -> Operation:
    """Return the operation with these sections as its payload."""
    codec = tuple(section.part for section in sections)
    return op._replace(gradient=payload_of(sections), codec=codec)


def payload_of(sections: Sequence[Section], empty: Empty = np.empty) -> Array:
    """Return the buffers of sections as one, read-only, in memory of `empty`."""
    buffers = [buffer for section in sections for buffer in (section.keys, section.values)]
    payload = empty((sum(buffer.nbytes for buffer in buffers),), "uint8")
    if buffers:
        np.concatenate(buffers, out=payload)
    payload.flags.writeable = False
    return payload


def taken_apart(op: Operation) -> Iterator[Section]:
    """Yield the sections of an encoded operation; refuse one that is malformed."""
    payload = np.empty(0, np.uint8) if op.gradient is None else op.gradient
    at = 0
    for part in op.codec:
        keys_at, values_at = at, at + (0 if part.cached else part.key_bytes)
        at = values_at + part.value_bytes
        _require(op, part.keys in KEYS and part.values in VALUES and part.entries >= -1)
        _require(op, part.key_bytes >= 0 <= part.value_bytes and at <= payload.nbytes)
        yield Section(part, payload[keys_at:values_at], payload[values_at:at])
    _require(op, at == payload.nbytes)


def decoded(layout: ShardLayout, op: Operation) -> Operation:
    """Return the operation with a dense gradient, with 0 for entries that were not sent."""
    if not op.codec:
        return op
    chosen = stretches(layout, op.pieces)
    _require(op, len(chosen) == len(op.codec))
    gradient = np.zeros(chosen[-1].end, np.uint8)
    for stretch, section in zip(chosen, taken_apart(op), strict=True):
        _fill(op, stretch.view(gradient), section)
    return op._replace(gradient=gradient, codec=())


def as_halves(layout: ShardLayout, op: Operation) -> Operation | None:
    """Return the operation with the upper halves of a whole float32 gradient, as uint16.

    None: it is not encoded so, or has weights to be compared with. A step widens the halves chunk
    by chunk, which takes half the time of decoding them first.
    """
    chosen, payload = stretches(layout, op.pieces), op.gradient
    whole = [Encoding(-1, "", "bf16", 0, 2 * stretch.size) for stretch in chosen]
    if op.base is not None or list(op.codec) != whole or {s.dtype for s in chosen} != {"float32"}:
        return None
    if payload is None or 2 * payload.nbytes != chosen[-1].end:
        return None
    return op._replace(gradient=payload.view(np.uint16), codec=())


def patched(layout: ShardLayout, buffer: Array, op: Operation) -> Array:
    """Return a new buffer: raw entries of an operation replace its own, others are added."""
    chosen = stretches(layout, ())
    _require(op, len(chosen) == len(op.codec) and buffer.nbytes == layout.nbytes)
    new = buffer.copy()
    for stretch, section in zip(chosen, taken_apart(op), strict=True):
        part = stretch.view(new)
        if section.part.values == "raw":
            _fill(op, part, section)
        else:
            change = np.zeros_like(part)
            _fill(op, change, section)
            part += change
    return new


def values_of(section: Section, dtype: str, size: int, out: Array | None = None) -> Array:
    """Return the values of a section as the shard decodes them, in `out` if that is given."""
    part, form = section.part, section.part.values
    entries = size if part.entries < 0 else part.entries
    ends = -(-entries // BUCKET) * np.dtype(dtype).itemsize if form == "int8" else 0
    scales, rest = section.values[:ends].view(dtype), section.values[ends:]
    numbers: Array = rest.view({"bf16": np.uint16, "int8": np.int8}.get(form, dtype))
    if form == "raw" and out is None:
        return numbers
    out = np.empty(entries, dtype) if out is None else out
    for at in range(0, entries, BLOCK):
        few, block = numbers[at : at + BLOCK], out[at : at + BLOCK]
        block[:] = widened(few) if form == "bf16" else few
        if form == "int8":
            block *= np.repeat(scales[at // BUCKET : (at + BLOCK) // BUCKET], BUCKET)[: few.size]
    return out


def widened(halves: Array) -> Array:
    """Return the float32 numbers of these upper halves."""
    wide: Array = np.left_shift(halves, 16, dtype=np.uint32)
    return wide.view(np.float32)


def nbytes_of_keys(kind: str, size: int, entries: int) -> int:
    """Return the size of indices of a kind before compression."""
    if kind == "bits":
        return -(-size // 8)
    return max(0, entries) * np.dtype(kind).itemsize if kind else 0


def nbytes_of_values(values: str, dtype: np.dtype[Any] | str, size: int, entries: int) -> int:
    """Return the size of values in a form before compression; -1 `entries` are all."""
    entries, itemsize = size if entries < 0 else entries, np.dtype(dtype).itemsize
    if values == "bf16":
        return 2 * entries
    if values == "int8":
        return entries + -(-entries // BUCKET) * itemsize
    return entries * itemsize


def _fill(op: Operation, out: Array, section: Section) -> None:
    part, size = section.part, out.size
    _require(op, part.entries <= size)
    _require(op, not (part.cached or part.packed_keys or part.packed_values))
    _require(op, section.keys.nbytes == nbytes_of_keys(part.keys, size, part.entries))
    _require(
        op, section.values.nbytes == nbytes_of_values(part.values, out.dtype, size, part.entries)
    )
    if part.entries < 0:
        values_of(section, str(out.dtype), size, out)
        return
    values = values_of(section, str(out.dtype), size)
    if part.keys == "bits":
        indices = np.flatnonzero(np.unpackbits(section.keys, count=size))
    else:
        indices = section.keys.view(part.keys or "uint8")
        rising = bool((indices[1:] > indices[:-1]).all())
        _require(op, rising and (not indices.size or int(indices[-1]) < size))
    _require(op, indices.size == values.size)
    out[indices] = values


def _require(op: Operation, holds: bool) -> None:
    if not holds:
        raise ShapeMismatch(f"update {op.id}: its encoded gradient is malformed")


def _bf16(sent: Array) -> Array:
    # The upper halves of float32 numbers, rounded to nearest, ties to even.
    upper = np.empty(sent.size, np.uint16)
    for at in range(0, sent.size, BLOCK):
        single = np.clip(sent[at : at + BLOCK], -BF16_MAX, BF16_MAX).astype(np.float32, copy=False)
        bits = single.view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        upper[at : at + BLOCK] = bits >> 16
    return upper.view(np.uint8)


def _int8(sent: Array, random: np.random.Generator) -> Array:
    # A scale for each bucket, and integer multiples of it: stochastic rounding, unbiased.
    buckets = -(-sent.size // BUCKET)
    scales, whole = np.empty(buckets, sent.dtype), np.empty(buckets * BUCKET, np.int8)
    for at in range(0, sent.size, BLOCK):
        block = sent[at : at + BLOCK]
        steps = np.zeros((-(-block.size // BUCKET), BUCKET), sent.dtype)
        steps.reshape(-1)[: block.size] = block
        scale = np.abs(steps).max(axis=1, keepdims=True) / LEVELS
        scales[at // BUCKET :][: scale.size] = scale[:, 0]
        np.divide(steps, scale, out=steps, where=scale > 0)
        below = np.floor(steps)
        below += random.random(steps.shape, dtype=np.float32) < steps - below
        whole[at : at + steps.size] = np.clip(below, -LEVELS, LEVELS).reshape(-1)
    return np.concatenate([scales.view(np.uint8), whole[: sent.size].view(np.uint8)])
