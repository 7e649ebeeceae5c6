"""The layout of a model: arrays cut into blocks, blocks on shards, and arrays in one flat buffer.

A `Layout` is immutable data that every process holds. It gathers gradients into one byte buffer
per shard, and scatters weights out of them. In flat arrays, which are views of one buffer, a
shard's part is contiguous: gradients that are computed into them need no copy.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from dps.core.arguments import is_name, plain
from dps.core.placement import place
from dps.core.ranges import described, integer_argument, listed, shown
from dps.core.tables.table import PARTITIONS, SparseSpec
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch

Arrays = Mapping[str, np.ndarray]
# A shard's part of some arrays, and the indices of its pieces; empty: all of them.
Gathered = tuple[np.ndarray, tuple[int, ...]]
# Makes an uninitialised array of a shape and a dtype.
Empty = Callable[[tuple[int, ...], str], np.ndarray]

DTYPES = ("float64", "float32")  # widest first, so that every block in a buffer is aligned
ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for dtype in DTYPES}
DEFAULT_BLOCK_BYTES = 1 << 18
BLOCKS_PER_SHARD = 10  # at least about, which keeps the shards within 10% of their mean


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, shape and dtype of one parameter array."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `start` to `stop` of the flattened array `name`."""

    name: str
    start: int
    stop: int
    dtype: str
    row: int = 0  # size of a row of the array if the block holds whole rows

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return (self.stop - self.start) * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The key for placement: the same in every run of the same model."""
        return f"{self.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A block and its first byte in the shard's buffer."""

    block: Block
    offset: int

    @property
    def end(self) -> int:
        """The byte after the last one in the shard's buffer."""
        return self.offset + self.block.nbytes

    def view(self, buffer: np.ndarray) -> np.ndarray:
        """The elements of the block in a buffer of the shard, without a copy."""
        return buffer[self.offset : self.end].view(self.block.dtype)


@dataclass(frozen=True)
class ShardLayout:
    """The pieces of one shard's buffer, in order and by dtype, and the sparse tables."""

    pieces: tuple[Piece, ...]
    tables: tuple[SparseSpec, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Size of the shard's buffer in bytes, without tables."""
        return sum(piece.block.nbytes for piece in self.pieces)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, str], ...]:
        """Stretches of one dtype as (first byte, end byte, dtype)."""
        alike = ([p for p in self.pieces if p.block.dtype == dtype] for dtype in DTYPES)
        return tuple((p[0].offset, p[-1].end, p[0].block.dtype) for p in alike if p)

    @cached_property
    def held(self) -> frozenset[str]:
        """Names of the arrays that have blocks here."""
        return frozenset(piece.block.name for piece in self.pieces)

    @cached_property
    def joined(self) -> tuple[Piece, ...]:
        """The pieces in order, with contiguous blocks of an array joined."""
        return joined(self.pieces)

    def table(self, name: str) -> SparseSpec:
        """The sparse table of a name; raises `ShapeMismatch` if there is none."""
        spec = next((s for s in self.tables if isinstance(name, str) and s.name == name), None)
        if spec is None:
            names = listed(spec.name for spec in self.tables)
            known = f"there are: {names}" if names else "there are none"
            raise ShapeMismatch(f"no sparse table is named {shown(name)}; {known}")
        return spec

    def packed(self, indices: Sequence[int]) -> Iterator[tuple[Piece, slice]]:
        """Yield some pieces (empty: all), and the bytes of each in a gradient of these pieces."""
        at = 0
        for piece in [self.pieces[i] for i in indices] if indices else self.pieces:
            begin, at = at, at + piece.block.nbytes
            yield piece, slice(begin, at)

    def taken(self, buffer: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
        """Return some pieces of a buffer, one after the other; the buffer itself if empty."""
        if not pieces:
            return buffer
        chosen = [self.pieces[i] for i in pieces]
        return np.concatenate([buffer[piece.offset : piece.end] for piece in chosen])


@dataclass(frozen=True)
class Layout:
    """The placement of a model's arrays and sparse tables on shards. Immutable."""

    arrays: tuple[ArraySpec, ...]
    shards: tuple[ShardLayout, ...]
    homes: tuple[int, ...] = ()  # the shard of each partition of keys, if there are tables

    @classmethod
    def of(
        cls,
        params: Arrays,
        shards: int,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        whole_rows: bool = False,
        tables: Sequence[SparseSpec] = (),
    ) -> Layout:
        """Cut `params` into blocks of at most `block_bytes` and place them on `shards` shards."""
        if not isinstance(params, Mapping):
            raise ConfigurationError(
                f"params is {type(params).__name__}, expected a mapping of names to arrays, such "
                "as dps.torch.parameters makes of a module, or dps.tree.parameters of a tree"
            )
        arrays = tuple(_spec(name, array) for name, array in params.items())
        if not arrays and not tables:
            raise ConfigurationError("params is empty: give at least one named array, or a table")
        shards = integer_argument("shards", shards, 1, "shards")
        taken = {spec.name for spec in arrays}
        for table in tables:
            if not isinstance(table, SparseSpec):
                kind = type(table).__name__
                raise ConfigurationError(
                    f"tables holds {kind}, expected SparseSpec(name, width, …)"
                )
            if table.name in taken:
                raise ConfigurationError(f"two parameters or tables are named {table.name!r}")
            taken.add(table.name)
        limit = min(block_bytes, sum(a.nbytes for a in arrays) // (BLOCKS_PER_SHARD * shards))
        blocks = list(_cut(arrays, limit, whole_rows))
        if len(blocks) < shards:  # long rows of one array left the others in one piece
            blocks = list(_cut(arrays, 0, whole_rows))
        if len(blocks) < shards and not (tables and shards <= PARTITIONS):
            unit = "rows, which the optimizer must not split" if whole_rows else "elements"
            raise ConfigurationError(
                f"shards={shards}, but the parameters have only {len(blocks)} {unit}"
            )
        homes = place({block.key: block.nbytes for block in blocks}, shards)
        members: list[list[Block]] = [[] for _ in range(shards)]
        for block in blocks:
            members[homes[block.key]].append(block)
        laid_out = tuple(ShardLayout(_pieces(shard), tuple(tables)) for shard in members)
        partitions = {f"partition-{number}": 1 for number in range(PARTITIONS if tables else 0)}
        homes = place(partitions, shards)
        return cls(arrays, laid_out, tuple(homes[name] for name in partitions))

    @property
    def tables(self) -> tuple[SparseSpec, ...]:
        """The sparse tables."""
        return self.shards[0].tables

    @cached_property
    def names(self) -> dict[str, ArraySpec]:
        """The specification of each array, by its name."""
        return {spec.name: spec for spec in self.arrays}

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, Piece]]]:
        places: dict[str, list[tuple[int, Piece]]] = {name: [] for name in self.names}
        for shard, layout in enumerate(self.shards):
            for piece in layout.joined:
                places[piece.block.name].append((shard, piece))
        return places

    @cached_property
    def _touched(self) -> dict[str, frozenset[int]]:
        return {n: frozenset(shard for shard, _ in parts) for n, parts in self._places.items()}

    def shards_of(self, names: Iterable[str]) -> list[int]:
        """The shards that hold some of the named arrays, in order."""
        return sorted(frozenset[int]().union(*(self._touched[name] for name in names)))

    def _unknown(self, name: object) -> ShapeMismatch:
        known = listed(self.names)
        return ShapeMismatch(f"no parameter is named {shown(name)}; there are: {known}")

    def check(self, arrays: Arrays, values: bool = True) -> None:
        """Refuse arrays that do not fit the parameters; check their values only if `values`."""
        for name, array in arrays.items():
            spec = self.names.get(name)
            if spec is None:
                raise self._unknown(name)
            is_array = isinstance(array, np.ndarray)
            if not is_array or array.shape != spec.shape or array.dtype != np.dtype(spec.dtype):
                hint = "; leave out arrays without a gradient to keep them" if array is None else ""
                given, wanted = described(array), f"{spec.dtype}{list(spec.shape)}"
                raise ShapeMismatch(f"{name!r} is {given}, expected an array {wanted}{hint}")
            if values and not all_finite(array):
                raise NonFiniteGradient(
                    f"array {name!r} holds NaN or infinity; nothing of this update was applied"
                )

    def require(self, described: Mapping[str, str], whose: str, source: str) -> None:
        """Refuse arrays, described as in "float32[2, 3]", that are not among the parameters."""
        for name, wanted in described.items():
            spec = self.names.get(name)
            served = "nothing of this name" if spec is None else f"{spec.dtype}{list(spec.shape)}"
            if served != wanted:
                raise ConfigurationError(
                    f"{whose} has {name!r}, {wanted}, but the parameter server has {served}; start "
                    f"the server from {source}"
                )

    def gather(self, shard: int, arrays: Arrays, empty: Empty = np.empty) -> Gathered:
        """Return a shard's part of `arrays` as one uint8 buffer, and the indices of its pieces.

        The buffer is a view if one array or flat arrays have the pieces in this order, otherwise a
        copy in memory of `empty`. No indices mean all pieces.
        """
        if isinstance(arrays, FlatArrays) and arrays.layout.owner is self:
            return arrays.gathered(shard, empty), arrays.layout.pieces[shard]
        layout = self.shards[shard]
        pieces, chosen = layout.joined, tuple[int, ...]()
        if not layout.held <= arrays.keys():
            chosen = tuple(i for i, p in enumerate(layout.pieces) if p.block.name in arrays)
            pieces = joined([layout.pieces[i] for i in chosen])
        blocks = [piece.block for piece in pieces]
        dtypes = {block.name: block.dtype for block in blocks}
        # Once per array: flattening copies an array that is not contiguous.
        flat = {n: np.ascontiguousarray(arrays[n], t).reshape(-1) for n, t in dtypes.items()}
        parts = [flat[b.name][b.start : b.stop].view(np.uint8) for b in blocks]
        if len(parts) == 1:
            return parts[0], chosen
        buffer = empty((sum(part.nbytes for part in parts),), "uint8")
        return (np.concatenate(parts, out=buffer) if parts else buffer), chosen

    def flat(self, names: Iterable[str] | None = None) -> FlatLayout:
        """Return a layout of arrays (None: all) in one flat buffer; refuse unknown names."""
        if names is not None and not isinstance(names, Iterable):
            raise ShapeMismatch(f"names={shown(names)}, expected a list of names of parameters")
        chosen = self.names.keys() if names is None else set(names)
        if unknown := chosen - self.names.keys():
            raise self._unknown(min(unknown, key=str))
        places, end = {}, 0
        for spec in sorted(self.arrays, key=lambda spec: DTYPES.index(spec.dtype)):
            if spec.name in chosen:
                begin, end = end, end + spec.nbytes
                places[spec.name] = slice(begin, end), spec
        pieces, extents = zip(*(_flat_part(shard, places) for shard in self.shards), strict=True)
        return FlatLayout(places, pieces, extents, end, self)

    def scatter(
        self, buffers: Mapping[int, np.ndarray], frozen: bool = True
    ) -> dict[str, np.ndarray]:
        """Return the shards' buffers as named arrays, read-only if `frozen`.

        An array that lies in one piece is a view of a buffer; others are copies. An array appears
        only if all shards that hold some of it are in `buffers`.
        """
        out = {}
        for spec in self.arrays:
            if not self._touched[spec.name] <= buffers.keys():
                continue
            (shard, piece), *others = self._places[spec.name]
            if others:
                flat = np.empty(spec.size, spec.dtype)
                for shard, piece in self._places[spec.name]:
                    flat[piece.block.start : piece.block.stop] = piece.view(buffers[shard])
            else:
                flat = piece.view(buffers[shard])
            if frozen:
                flat.flags.writeable = False
            out[spec.name] = flat.reshape(spec.shape)
        return out


class Extent(NamedTuple):
    """A stretch of `nbytes` that is contiguous in three buffers."""

    begin: int  # its first byte in the flat buffer
    in_shard: int  # in the buffer of the shard
    packed: int  # in the shard's part of a gradient of the same arrays
    nbytes: int


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """The places of arrays in a flat buffer of `nbytes`, and each shard's part of it."""

    places: Mapping[str, tuple[slice, ArraySpec]]
    pieces: tuple[tuple[int, ...], ...]  # of each shard; empty: all
    extents: tuple[tuple[Extent, ...], ...]
    nbytes: int
    owner: Layout

    def over(self, buffer: np.ndarray) -> FlatArrays:
        """Return the arrays over a buffer: 1-D, uint8, aligned to 8 bytes, of `nbytes`."""
        return FlatArrays(self, buffer)


class Named(Mapping[str, Any]):
    """Named arrays, or tensors on a device."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Destination(Named):
    """Named arrays, or tensors on a device, that weights are written into."""

    def __init__(self, layout: FlatLayout, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.layout = layout

    @abstractmethod
    def fill(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Write the weights from the buffers of the shards, which never change."""

    def expect(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Prepare for `fill` with these buffers, which may come later. Thread-safe."""


class FlatArrays(Destination):
    """Named arrays that are views of one uint8 `buffer`: write into them, do not replace them."""

    def __init__(self, layout: FlatLayout, buffer: np.ndarray) -> None:
        fits = isinstance(buffer, np.ndarray) and buffer.shape == (layout.nbytes,)
        if not fits or buffer.dtype != np.uint8:
            raise ShapeMismatch(
                f"buffer={shown(buffer)}, expected an array uint8[{layout.nbytes}], such as "
                "numpy.empty(layout.nbytes, 'uint8')"
            )
        self.buffer = buffer
        arrays = {
            name: buffer[where].view(spec.dtype).reshape(spec.shape)
            for name, (where, spec) in layout.places.items()
        }
        super().__init__(layout, arrays)

    def freeze(self) -> None:
        """Make them read-only."""
        for array in (self.buffer, *self._arrays.values()):
            array.flags.writeable = False

    def fill(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Write the weights from the buffers of the shards."""
        for shard, buffer in buffers.items():
            for begin, in_shard, _, nbytes in self.layout.extents[shard]:
                self.buffer[begin : begin + nbytes] = buffer[in_shard : in_shard + nbytes]

    def gathered(self, shard: int, empty: Empty) -> np.ndarray:
        """Return a shard's part as one uint8 buffer: a view if contiguous, otherwise a copy."""
        extents = self.layout.extents[shard]
        if len(extents) == 1:
            return self.buffer[extents[0].begin : extents[0].begin + extents[0].nbytes]
        out = empty((sum(extent.nbytes for extent in extents),), "uint8")
        for begin, _, packed, nbytes in extents:
            out[packed : packed + nbytes] = self.buffer[begin : begin + nbytes]
        return out


def _flat_part(
    shard: ShardLayout, places: Mapping[str, tuple[slice, ArraySpec]]
) -> tuple[tuple[int, ...], tuple[Extent, ...]]:
    present = tuple(i for i, piece in enumerate(shard.pieces) if piece.block.name in places)
    extents: list[Extent] = []
    for piece, where in shard.packed(present) if present else ():
        block = piece.block
        begin = places[block.name][0].start + block.start * ITEM_BYTES[block.dtype]
        new = Extent(begin, piece.offset, where.start, block.nbytes)
        last = extents[-1] if extents else None
        if last is not None and new[:3] == tuple(first + last.nbytes for first in last[:3]):
            extents[-1] = last._replace(nbytes=last.nbytes + new.nbytes)
        else:
            extents.append(new)
    return () if len(present) == len(shard.pieces) else present, tuple(extents)


def all_finite(array: np.ndarray) -> bool:
    """Whether all elements of the array are finite."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        # The dot product needs no temporary array, but may overflow.
        return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())


def _spec(name: str, array: np.ndarray) -> ArraySpec:
    if not is_name(name):
        raise ConfigurationError(
            f"params has an array under the name {shown(name)}, expected a text, such as "
            "'layer1.bias'"
        )
    if not isinstance(array, np.ndarray):
        raise ConfigurationError(
            f"params[{name!r}] is {type(array).__name__}, expected a numpy array; "
            "dps.torch.parameters converts a module, dps.tree.parameters other arrays"
        )
    array = plain(f"params[{name!r}]", array)
    dtype = str(array.dtype)
    if dtype not in DTYPES:
        raise ConfigurationError(f"params[{name!r}] is {dtype}, expected float32 or float64")
    if array.size == 0:
        raise ConfigurationError(
            f"params[{name!r}] is empty, {list(array.shape)}, and cannot be trained; create it "
            "in the training function instead"
        )
    if not all_finite(array):
        raise ConfigurationError(f"params[{name!r}] holds NaN or infinity")
    return ArraySpec(name, tuple(array.shape), dtype)


def _cut(arrays: Iterable[ArraySpec], limit_bytes: int, whole_rows: bool) -> Iterable[Block]:
    for array in arrays:
        row = math.prod(array.shape[1:]) if whole_rows else 0
        unit = row or 1
        length = unit * max(1, limit_bytes // (unit * ITEM_BYTES[array.dtype]))
        for start in range(0, array.size, length):
            yield Block(array.name, start, min(start + length, array.size), array.dtype, row)


def _pieces(blocks: list[Block]) -> tuple[Piece, ...]:
    ordered = sorted(blocks, key=lambda b: DTYPES.index(b.dtype))
    return tuple(map(Piece, ordered, accumulate((b.nbytes for b in ordered), initial=0)))


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return pieces in the same order, with contiguous blocks of an array joined."""
    cut: list[Piece] = []
    for piece in pieces:
        last, block = cut[-1] if cut else None, piece.block
        if last and last.block.name == block.name and last.block.stop == block.start:
            piece = Piece(replace(block, start=last.block.start), cut.pop().offset)
        cut.append(piece)
    return tuple(cut)
