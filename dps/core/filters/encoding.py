"""The form in which filtered gradients travel: which entries, how their values are written.

A gradient is encoded array by array. What is written of one array on one shard is an `Encoding`
and, in the operation's payload, two sections: the indices of the entries that are sent, and their
values.
Decoding depends on nothing else, so replicas that decode the same bytes stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.updates import Encoding, Operation
from dps.errors import ShapeMismatch

Array = np.ndarray
Values = Literal["raw", "bf16", "int8"]
Random = Callable[[], np.random.Generator]

KEYS = ("", "bits", "uint16", "uint32")
VALUES = ("raw", "bf16", "int8")
BUCKET = 1024  # entries that share a scale in int8
LEVELS = 127
BF16_MAX = float(np.array(0x7F7F0000, np.uint32).view(np.float32))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where the gradient of one array lies.

    Attributes
    ----------
    name, dtype, size
        The array, and how many of its elements the shard holds.
    begin, end
        Bytes of a dense gradient.
    """

    name: str
    dtype: str
    size: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a payload with its two sections."""

    part: Encoding
    keys: Array
    values: Array


def stretches(layout: ShardLayout, pieces: Sequence[int]) -> tuple[Stretch, ...]:
    """Where each array lies in a dense gradient of these pieces (empty: all)."""
    found: list[Stretch] = []
    at = 0
    for piece in [layout.pieces[i] for i in pieces] if pieces else layout.pieces:
        block, end = piece.block, at + piece.block.nbytes
        size = block.stop - block.start
        if found and found[-1].name == block.name:
            last = found[-1]
            found[-1] = replace(last, size=last.size + size, end=end)
        else:
            found.append(Stretch(block.name, block.dtype, size, at, end))
        at = end
    return tuple(found)


def encoded(accumulated: Array, selected: Array | None, values: Values, random: Random) -> Section:
    """Write the selected entries of one array (None: all), in whichever form is the shorter.

    Parameters
    ----------
    accumulated
        1-D, float32 or float64.
    selected
        A mask of the entries to be sent.
    random
        Makes the generator that rounds to int8.
    """
    size = accumulated.size
    entries = size if selected is None else int(np.count_nonzero(selected))
    kind = _shortest_keys(size, entries)
    dense = selected is None or _keys_nbytes(kind, size, entries) >= _value_nbytes(
        values, accumulated.dtype, size
    ) - _value_nbytes(values, accumulated.dtype, entries)
    if dense:
        sent = accumulated if selected is None else np.where(selected, accumulated, 0)
        keys, kind, entries = np.empty(0, np.uint8), "", -1
    else:
        assert selected is not None
        sent = accumulated[selected]
        keys = _written_keys(kind, selected)
    body = _written_values(values, sent, random)
    return Section(Encoding(entries, kind, values, keys.nbytes, body.nbytes), keys, body)


def assembled(op: Operation, sections: Sequence[Section]) -> Operation:
    """Return the operation with these sections as its payload."""
    buffers = [buffer for section in sections for buffer in (section.keys, section.values)]
    payload = np.concatenate(buffers) if buffers else np.empty(0, np.uint8)
    return replace(op, gradient=payload, codec=tuple(section.part for section in sections))


def taken_apart(op: Operation) -> Iterator[Section]:
    """Yield the sections of an encoded operation; raises `ShapeMismatch` if they are not there."""
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
    """Return the operation with its gradient as dense as it was; entries not sent are 0.

    Raises
    ------
    ShapeMismatch
        The payload is not what its description says, or does not fit the shard.
    """
    if not op.codec:
        return op
    chosen = stretches(layout, op.pieces)
    _require(op, len(chosen) == len(op.codec))
    gradient = np.zeros(chosen[-1].end, np.uint8)
    for stretch, section in zip(chosen, taken_apart(op), strict=True):
        _fill(op, gradient[stretch.begin : stretch.end].view(stretch.dtype), section)
    return replace(op, gradient=gradient, codec=())


def patched(layout: ShardLayout, buffer: Array, op: Operation) -> Array:
    """Return a shard's buffer with what is sent of each array in its place: a new one.

    Entries that are sent as they are replace those of the buffer, others are added to them. Both
    ends do this with the same bytes, so that they hold the same bits.

    Raises
    ------
    ShapeMismatch
        The payload is not what its description says, or does not fit the shard.
    """
    chosen = stretches(layout, ())
    _require(op, len(chosen) == len(op.codec) and buffer.nbytes == layout.nbytes)
    new = buffer.copy()
    for stretch, section in zip(chosen, taken_apart(op), strict=True):
        part = new[stretch.begin : stretch.end].view(stretch.dtype)
        if section.part.values == "raw":
            _fill(op, part, section)
        else:
            change = np.zeros_like(part)
            _fill(op, change, section)
            part += change
    return new


def values_of(section: Section, dtype: str, size: int) -> Array:
    """The values in a section as they will be at the shard."""
    part = section.part
    entries = size if part.entries < 0 else part.entries
    if part.values == "bf16":
        wide = section.values.view(np.uint16).astype(np.uint32) << 16
        found: Array = wide.view(np.float32).astype(dtype)
    elif part.values == "int8":
        ends = -(-entries // BUCKET) * np.dtype(dtype).itemsize
        scales = section.values[:ends].view(dtype)
        found = section.values[ends:].view(np.int8).astype(dtype)
        found *= np.repeat(scales, BUCKET)[: found.size]
    else:
        found = section.values.view(dtype)
    return found


def nbytes_of_keys(part: Encoding, size: int) -> int:
    """How long the indices of a part are, before they are compressed."""
    return _keys_nbytes(part.keys, size, max(0, part.entries))


def nbytes_of_values(part: Encoding, dtype: str, size: int) -> int:
    """How long the values of a part are, before they are compressed."""
    entries = size if part.entries < 0 else part.entries
    return _value_nbytes(part.values, np.dtype(dtype), entries)


def _fill(op: Operation, out: Array, section: Section) -> None:
    part, size = section.part, out.size
    _require(op, part.entries <= size)
    _require(op, not (part.cached or part.packed_keys or part.packed_values))
    _require(op, section.keys.nbytes == nbytes_of_keys(part, size))
    _require(op, section.values.nbytes == nbytes_of_values(part, str(out.dtype), size))
    values = values_of(section, str(out.dtype), size)
    if part.entries < 0:
        out[:] = values
        return
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
        raise ShapeMismatch(f"update {op.id}: its encoded gradient is not what it says it is")


# -- indices ---------------------------------------------------------------------------------------


def _shortest_keys(size: int, entries: int) -> str:
    if not entries:
        return ""
    listed = "uint16" if size <= 1 << 16 else "uint32"
    return min((listed, "bits"), key=lambda kind: _keys_nbytes(kind, size, entries))


def _keys_nbytes(kind: str, size: int, entries: int) -> int:
    if kind == "bits":
        return -(-size // 8)
    return entries * np.dtype(kind).itemsize if kind else 0


def _written_keys(kind: str, selected: Array) -> Array:
    if kind == "bits":
        return np.packbits(selected)
    if not kind:
        return np.empty(0, np.uint8)
    return np.flatnonzero(selected).astype(kind).view(np.uint8)


# -- values ----------------------------------------------------------------------------------------


def _value_nbytes(values: str, dtype: np.dtype[np.generic], entries: int) -> int:
    if values == "bf16":
        return 2 * entries
    if values == "int8":
        return entries + -(-entries // BUCKET) * dtype.itemsize
    return entries * dtype.itemsize


def _written_values(values: Values, sent: Array, random: Random) -> Array:
    if values == "bf16":
        return _bf16(sent)
    if values == "int8":
        return _int8(sent, random())
    return np.ascontiguousarray(sent).view(np.uint8)


def _bf16(sent: Array) -> Array:
    """The upper halves of float32 numbers, rounded to nearest, ties to even."""
    single = np.clip(sent, -BF16_MAX, BF16_MAX).astype(np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper: Array = rounded.astype(np.uint16)
    return upper.view(np.uint8)


def _int8(sent: Array, random: np.random.Generator) -> Array:
    """A scale for each bucket, and whole numbers of it, rounded up or down at random, unbiased."""
    buckets = -(-sent.size // BUCKET)
    padded = np.zeros((buckets, BUCKET), sent.dtype)
    padded.reshape(-1)[: sent.size] = sent
    scales = np.abs(padded).max(axis=1, initial=0) / LEVELS
    steps = np.divide(padded, scales[:, None], out=np.zeros_like(padded), where=scales[:, None] > 0)
    whole = np.floor(steps)
    steps -= whole
    whole += random.random(steps.shape, dtype=np.float32) < steps
    whole = np.clip(whole, -LEVELS, LEVELS).astype(np.int8).reshape(-1)[: sent.size]
    return np.concatenate([scales.astype(sent.dtype).view(np.uint8), whole.view(np.uint8)])
