"""Flat arrays: named arrays as views of one buffer, in which a shard's part is contiguous.

Gradients that are computed into them, and weights that are written into them, need no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dps.core.ranges import shown
from dps.errors import ShapeMismatch

# Makes an uninitialised array of a shape and a dtype.
Empty = Callable[[tuple[int, ...], str], np.ndarray]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `begin` to `end` of the buffer: one array."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of `nbytes` that is contiguous in three buffers.

    `begin` is its first byte in the flat buffer, `in_shard` in that of the shard, and `packed` in
    the shard's part of a gradient of the same arrays.
    """

    begin: int
    in_shard: int
    packed: int
    nbytes: int

    def followed_by(self, other: Extent) -> bool:
        """Whether both are one stretch."""
        steps = {
            other.begin - self.begin,
            other.in_shard - self.in_shard,
            other.packed - self.packed,
        }
        return steps == {self.nbytes}


@dataclass(frozen=True, slots=True)
class ShardExtents:
    """A shard's part of flat arrays: the indices of its pieces (empty: all), and their extents."""

    pieces: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return sum(extent.nbytes for extent in self.extents)


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """The places of arrays in a flat buffer, and each shard's part; `owner` is the `Layout`."""

    places: Mapping[str, Place]
    shards: tuple[ShardExtents, ...]
    owner: object

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return max((place.end for place in self.places.values()), default=0)

    def over(self, buffer: np.ndarray) -> FlatArrays:
        """Return the arrays over a buffer: 1-D, uint8, aligned to 8 bytes, of `nbytes`."""
        return FlatArrays(self, buffer)


class FlatArrays(Mapping[str, np.ndarray]):
    """Named arrays that are views of one uint8 `buffer`: write into them, do not replace them."""

    def __init__(self, layout: FlatLayout, buffer: np.ndarray) -> None:
        fits = isinstance(buffer, np.ndarray) and buffer.shape == (layout.nbytes,)
        if not fits or buffer.dtype != np.uint8:
            raise ShapeMismatch(
                f"buffer={shown(buffer)}, expected an array uint8[{layout.nbytes}], such as "
                "numpy.empty(layout.nbytes, 'uint8')"
            )
        self.layout = layout
        self.buffer = buffer
        self._arrays = {
            name: buffer[place.begin : place.end].view(place.dtype).reshape(place.shape)
            for name, place in layout.places.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def freeze(self) -> None:
        """Make them read-only."""
        for array in (self.buffer, *self._arrays.values()):
            array.flags.writeable = False

    def gathered(self, shard: int, empty: Empty) -> np.ndarray:
        """Return a shard's part as one uint8 buffer: a view if it is contiguous, else a copy."""
        part = self.layout.shards[shard]
        if len(part.extents) == 1:
            (only,) = part.extents
            return self.buffer[only.begin : only.begin + only.nbytes]
        out = empty((part.nbytes,), "uint8")
        for extent in part.extents:
            stretch = self.buffer[extent.begin : extent.begin + extent.nbytes]
            out[extent.packed : extent.packed + extent.nbytes] = stretch
        return out

    def take(self, shard: int, values: np.ndarray) -> None:
        """Write a shard's part, out of the buffer of the shard."""
        for extent in self.layout.shards[shard].extents:
            stretch = values[extent.in_shard : extent.in_shard + extent.nbytes]
            self.buffer[extent.begin : extent.begin + extent.nbytes] = stretch


def size_of(shape: tuple[int, ...], dtype: str) -> int:
    """Size of an array in bytes."""
    return math.prod(shape) * np.dtype(dtype).itemsize
