"""The layout of a model: arrays cut into blocks, and blocks placed on shards.

A `Layout` gathers gradients into one byte buffer per shard, and scatters weights out of them. It
also places the keys of sparse tables, by partitions (see `dps.core.tables.key_routing`). It is
plain, immutable data that every process holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dps.core.arguments import is_name, plain
from dps.core.flat import Empty, Extent, FlatArrays, FlatLayout, Place, ShardExtents, size_of
from dps.core.placement import place
from dps.core.ranges import listed, shown, whole_argument
from dps.core.tables.spec import PARTITIONS, SparseSpec
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch

Arrays = Mapping[str, np.ndarray]
# A shard's part of some arrays, and the indices of its pieces; empty: all of them.
Gathered = tuple[np.ndarray, tuple[int, ...]]

DTYPES = ("float64", "float32")  # widest first, so that every block in a buffer is aligned
ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for dtype in DTYPES}
DEFAULT_BLOCK_BYTES = 1 << 18
BLOCKS_PER_SHARD = 10


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
    def row(self) -> int:
        """Number of elements with the same first index."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `start` to `stop` of the flattened array `name`.

    `row` is the size of a row of the array if the block holds whole rows, else 0.
    """

    name: str
    start: int
    stop: int
    dtype: str
    row: int = 0

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
        of_dtypes = (
            ([p for p in self.pieces if p.block.dtype == dtype], dtype) for dtype in DTYPES
        )
        return tuple((some[0].offset, some[-1].end, dtype) for some, dtype in of_dtypes if some)

    @cached_property
    def held(self) -> frozenset[str]:
        """Names of the arrays that have blocks here."""
        return frozenset(piece.block.name for piece in self.pieces)

    @cached_property
    def extents(self) -> tuple[Block, ...]:
        """The blocks in order, with contiguous ones joined."""
        return joined([piece.block for piece in self.pieces])

    @cached_property
    def _tables(self) -> dict[str, SparseSpec]:
        return {spec.name: spec for spec in self.tables}

    def table(self, name: str) -> SparseSpec:
        """The sparse table of a name; raises `ShapeMismatch` if there is none."""
        spec = self._tables.get(name) if isinstance(name, str) else None
        if spec is None:
            known = f"there are: {listed(self._tables)}" if self.tables else "there are none"
            raise ShapeMismatch(f"no sparse table is named {shown(name)}; {known}")
        return spec

    def taken(self, buffer: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
        """Return some pieces of a buffer, one after the other; the buffer itself if empty."""
        if not pieces:
            return buffer
        chosen = [self.pieces[i] for i in pieces]
        return np.concatenate([buffer[piece.offset : piece.end] for piece in chosen])

    def name_at(self, byte: int) -> str:
        """Return the name of the array at a byte of the buffer."""
        return next(p.block.name for p in self.pieces if p.offset <= byte < p.end)


@dataclass(frozen=True)
class Layout:
    """The placement of a model's arrays and sparse tables on shards. Immutable.

    `homes` has the shard of each partition of keys, if there are tables.
    """

    arrays: tuple[ArraySpec, ...]
    shards: tuple[ShardLayout, ...]
    homes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        params: Arrays,
        shards: int,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        whole_rows: bool = False,
        tables: Sequence[SparseSpec] = (),
    ) -> Layout:
        """Cut `params` into blocks of at most `block_bytes` and place them on `shards` shards.

        Each shard gets at least about ten blocks, which keeps the shards within 10% of their mean.
        With `whole_rows` a block holds whole rows of an array, at least one.

        Raises
        ------
        ConfigurationError
            Neither arrays nor tables, an array that is empty or neither float32 nor float64, a
            name that is no text or is used twice, or more shards than elements or rows.
        """
        if not isinstance(params, Mapping):
            raise ConfigurationError(
                f"params is {type(params).__name__}, expected a mapping of names to arrays, such "
                "as dps.torch.parameters makes of a module, or dps.tree.parameters of a tree"
            )
        arrays = tuple(_spec(name, array) for name, array in params.items())
        if not arrays and not tables:
            raise ConfigurationError("params is empty: give at least one named array, or a table")
        shards = whole_argument("shards", shards, 1, "shards")
        taken = {spec.name for spec in arrays}
        for table in tables:
            if not isinstance(table, SparseSpec):
                kind = type(table).__name__
                raise ConfigurationError(
                    f"tables holds {kind}, expected SparseSpec(name, width, …)"
                )
            if table.name in taken:
                raise ConfigurationError(f"the name {table.name!r} is used twice, once for a table")
            taken.add(table.name)
        total = sum(a.size * ITEM_BYTES[a.dtype] for a in arrays)
        limit = min(block_bytes, total // (BLOCKS_PER_SHARD * shards))
        blocks = list(_cut(arrays, limit, whole_rows))
        if len(blocks) < shards:  # long rows of one array left the others in one piece
            blocks = list(_cut(arrays, 0, whole_rows))
        if len(blocks) < shards and not (tables and shards <= PARTITIONS):
            unit = "rows, which the optimizer needs whole" if whole_rows else "elements"
            raise ConfigurationError(
                f"shards={shards}, but the parameters have only {len(blocks)} {unit}"
            )
        homes = place({block.key: block.nbytes for block in blocks}, shards)
        members: list[list[Block]] = [[] for _ in range(shards)]
        for block in blocks:
            members[homes[block.key]].append(block)
        laid_out = tuple(_lay_out(shard, tuple(tables)) for shard in members)
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
    def _touched(self) -> dict[str, frozenset[int]]:
        """For each array, the shards that hold some of it."""
        shards = range(len(self.shards))
        return {n: frozenset(s for s in shards if n in self.shards[s].held) for n in self.names}

    def shards_of(self, names: Iterable[str]) -> list[int]:
        """The shards that hold some of the named arrays, in order."""
        return sorted(frozenset[int]().union(*(self._touched[name] for name in names)))

    def _unknown(self, name: object) -> ShapeMismatch:
        known = listed(self.names)
        return ShapeMismatch(f"no parameter is named {shown(name)}; there are: {known}")

    def check(self, arrays: Arrays, values: bool = True) -> None:
        """Refuse arrays that do not fit the parameters; check their values only if `values`.

        Raises
        ------
        ShapeMismatch
            An unknown name, or another shape or dtype than the parameter's.
        NonFiniteGradient
            An array holds NaN or infinity.
        """
        for name, array in arrays.items():
            spec = self.names.get(name)
            if spec is None:
                raise self._unknown(name)
            if not isinstance(array, np.ndarray):
                hint = "; leave out what has no gradient, and it stays" if array is None else ""
                raise ShapeMismatch(f"{name!r} is {type(array).__name__}, expected an array{hint}")
            if array.shape != spec.shape or array.dtype != np.dtype(spec.dtype):
                raise ShapeMismatch(
                    f"array {name!r} is {array.dtype}{list(array.shape)}, "
                    f"expected {spec.dtype}{list(spec.shape)}"
                )
            if values and not all_finite(array):
                raise NonFiniteGradient(
                    f"array {name!r} holds NaN or infinity; nothing of this update was applied"
                )

    def require(self, described: Mapping[str, str], whose: str, source: str) -> None:
        """Refuse arrays, described as in "float32[2, 3]", that are not among the parameters."""
        for name, wanted in described.items():
            spec = self.names.get(name)
            found = "nothing of that name" if spec is None else f"{spec.dtype}{list(spec.shape)}"
            if found != wanted:
                raise ConfigurationError(
                    f"{whose} has {name!r}, {wanted}, and the parameter server {found}; start it "
                    f"from {source}"
                )

    def gather(self, shard: int, arrays: Arrays, empty: Empty = np.empty) -> Gathered:
        """Return a shard's part of `arrays` as one uint8 buffer, and the indices of its pieces.

        The buffer is a view if one array or flat arrays have the pieces in this order, else a copy
        in memory of `empty`. No indices mean all pieces.
        """
        if isinstance(arrays, FlatArrays) and arrays.layout.owner is self:
            return arrays.gathered(shard, empty), arrays.layout.shards[shard].pieces
        layout = self.shards[shard]
        blocks, chosen = layout.extents, tuple[int, ...]()
        if not layout.held <= arrays.keys():
            present = [i for i, p in enumerate(layout.pieces) if p.block.name in arrays]
            blocks, chosen = joined([layout.pieces[i].block for i in present]), tuple(present)
        if len(blocks) == 1:
            flat = np.ascontiguousarray(arrays[blocks[0].name]).reshape(-1)
            return flat[blocks[0].start : blocks[0].stop].view(np.uint8), chosen
        sizes = [block.nbytes for block in blocks]
        buffer = empty((sum(sizes),), "uint8")
        # Once per array: flattening copies an array that is not contiguous.
        flat_arrays = {name: arrays[name].reshape(-1) for name in {b.name for b in blocks}}
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            part = buffer[at : at + size].view(block.dtype)
            part[:] = flat_arrays[block.name][block.start : block.stop]
            at += size
        return buffer, chosen

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
                begin, end = end, end + size_of(spec.shape, spec.dtype)
                places[spec.name] = Place(begin, end, spec.shape, spec.dtype)
        parts = tuple(_extents(shard, places) for shard in self.shards)
        return FlatLayout(places, parts, self)

    def scatter_into(self, buffers: Mapping[int, np.ndarray], out: FlatArrays) -> None:
        """Write the shards' buffers into flat arrays of this layout."""
        if out.layout.owner is not self:
            raise ShapeMismatch("these flat arrays were laid out for other parameters")
        for shard, buffer in buffers.items():
            out.take(shard, buffer)

    def scatter(
        self, buffers: Mapping[int, np.ndarray], frozen: bool = True
    ) -> dict[str, np.ndarray]:
        """Return the shards' buffers as named arrays, read-only if `frozen`.

        An array that lies in one piece is a view of a buffer; others are copies. An array appears
        only if all shards that hold some of it are in `buffers`.
        """
        out = {}
        for spec in self.arrays:
            if self._touched[spec.name] <= buffers.keys():
                flat = self._whole(spec, buffers)
                if frozen:
                    flat.flags.writeable = False
                out[spec.name] = flat.reshape(spec.shape)
        return out

    def _whole(self, spec: ArraySpec, buffers: Mapping[int, np.ndarray]) -> np.ndarray:
        places = self._places[spec.name]
        if len(places) == 1:
            shard, begin, end, _ = places[0]
            return buffers[shard][begin:end].view(spec.dtype)
        flat = np.empty(spec.size, spec.dtype)
        for shard, begin, end, start in places:
            part = buffers[shard][begin:end].view(spec.dtype)
            flat[start : start + part.size] = part
        return flat

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """The parts of each array: shard, first byte, end byte, first element."""
        places: dict[str, list[tuple[int, int, int, int]]] = {a.name: [] for a in self.arrays}
        for shard, layout in enumerate(self.shards):
            previous: Block | None = None
            for piece in layout.pieces:
                found = places[piece.block.name]
                if previous is not None and len(joined([previous, piece.block])) == 1:
                    _, begin, _, start = found.pop()
                else:
                    begin, start = piece.offset, piece.block.start
                found.append((shard, begin, piece.end, start))
                previous = piece.block
        return places


def _extents(shard: ShardLayout, places: Mapping[str, Place]) -> ShardExtents:
    present = [i for i, piece in enumerate(shard.pieces) if piece.block.name in places]
    found: list[Extent] = []
    packed = 0
    for piece in (shard.pieces[i] for i in present):
        block = piece.block
        begin = places[block.name].begin + block.start * ITEM_BYTES[block.dtype]
        new = Extent(begin, piece.offset, packed, block.nbytes)
        if found and found[-1].followed_by(new):
            last = found.pop()
            new = Extent(last.begin, last.in_shard, last.packed, last.nbytes + new.nbytes)
        found.append(new)
        packed += block.nbytes
    every = len(present) == len(shard.pieces)
    return ShardExtents(() if every else tuple(present), tuple(found))


def joined(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the blocks in order, with contiguous ones joined."""
    found: list[Block] = []
    for block in blocks:
        if found and found[-1].name == block.name and found[-1].stop == block.start:
            block = replace(block, start=found.pop().start)
        found.append(block)
    return tuple(found)


def all_finite(array: np.ndarray) -> bool:
    """Whether the array holds neither NaN nor infinity."""
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
            f"params[{name!r}] is {type(array).__name__}, expected an array of numpy; "
            "dps.torch.parameters makes them of a module, dps.tree.parameters of other arrays"
        )
    array = plain(f"params[{name!r}]", array)
    dtype = str(array.dtype)
    if dtype not in DTYPES:
        raise ConfigurationError(f"params[{name!r}] is {dtype}, expected float32 or float64")
    if array.size == 0:
        raise ConfigurationError(
            f"params[{name!r}] is empty, {list(array.shape)}: nothing in it can be trained. "
            "Leave it out, and make it in the training function"
        )
    if not all_finite(array):
        raise ConfigurationError(f"params[{name!r}] holds NaN or infinity")
    return ArraySpec(name, tuple(array.shape), dtype)


def _cut(arrays: Iterable[ArraySpec], limit_bytes: int, whole_rows: bool) -> Iterable[Block]:
    for array in arrays:
        row = array.row if whole_rows else 0
        unit = row or 1
        length = unit * max(1, limit_bytes // (unit * ITEM_BYTES[array.dtype]))
        for start in range(0, array.size, length):
            yield Block(array.name, start, min(start + length, array.size), array.dtype, row)


def _lay_out(blocks: list[Block], tables: tuple[SparseSpec, ...]) -> ShardLayout:
    pieces, offset = [], 0
    for block in sorted(blocks, key=lambda b: DTYPES.index(b.dtype)):
        pieces.append(Piece(block, offset))
        offset += block.nbytes
    return ShardLayout(tuple(pieces), tables)
