"""Flat arrays: named arrays as views of one buffer, laid out so that a shard's part is one stretch.

Who computes into such arrays, or has weights written into them, saves a copy of each: where one
shard holds everything, its buffer is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dps.core.ranges import shown
from dps.errors import ShapeMismatch

# Makes an array of a shape and a dtype that is not filled.
Empty = Callable[[tuple[int, ...], str], np.ndarray]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array is in the buffer, in bytes, and what it looks like there."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of `nbytes` that lies in one piece everywhere.

    `begin` is its first byte in the flat buffer, `in_shard` in the shard's own, `packed` in that of
    a gradient, which holds the arrays of the flat buffer alone.
    """

    begin: int
    in_shard: int
    packed: int
    nbytes: int

    def followed_by(self, other: Extent) -> bool:
        """Whether both are one stretch."""
        step = other.begin - self.begin
        return (
            step == self.nbytes == other.in_shard - self.in_shard
            and other.packed - self.packed == step
        )


@dataclass(frozen=True, slots=True)
class ShardExtents:
    """A shard's part of flat arrays: which of its pieces (empty: all), and where they are."""

    pieces: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return sum(extent.nbytes for extent in self.extents)


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Where arrays are in a flat buffer of `nbytes`, and which parts of it belong to which shard.

    Attributes
    ----------
    owner
        The `Layout` that made it.
    """

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
    """Named arrays that are views of one `buffer`: to be written into, not replaced.

    Attributes
    ----------
    layout
        Where each is in the buffer.
    buffer
        uint8. The arrays of one dtype lie together, in the order of their names here.
    """

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
        """Return one of the arrays."""
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        """Return their names, as they lie in the buffer."""
        return iter(self._arrays)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._arrays)

    def freeze(self) -> None:
        """Have nobody write into them any more: they are looked at where they are."""
        for array in (self.buffer, *self._arrays.values()):
            array.flags.writeable = False

    def gathered(self, shard: int, empty: Empty) -> np.ndarray:
        """Return a shard's part as one uint8 buffer: a view if it is one stretch, else a copy."""
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
        """Write a shard's part, of the whole buffer of the shard."""
        for extent in self.layout.shards[shard].extents:
            stretch = values[extent.in_shard : extent.in_shard + extent.nbytes]
            self.buffer[extent.begin : extent.begin + extent.nbytes] = stretch


def size_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array."""
    return math.prod(shape) * np.dtype(dtype).itemsize
