"""Sparse tables: their initial values, their rows in levels of sorted keys, and gradients of rows.

Initial values are a function of the seed, the key and the column alone, made of whole-number
arithmetic and one multiplication: every process on every machine computes the same bits.

A table is a log-structured merge tree in memory (O'Neil et al. 1996). A push adds a small level in
front of the others, and a level is merged with the next while that is less than twice as long. So a
push of k rows copies O(k log n) of n rows on average, and the table before it stays valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from dps.core.arguments import is_name, plain
from dps.core.ranges import Checked, NotNegative, Seed, described, integer_argument, refused
from dps.errors import ShapeMismatch

GROWTH = 2  # least ratio of the lengths of a level and the one before
KEYS = 1 << 63  # keys are below
ROW_DTYPES = ("float64", "float32")
PARTITION_BITS = 8
PARTITIONS = 1 << PARTITION_BITS  # the units in which keys are placed on shards

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_LANES = np.uint64(0x0000FFFF0000FFFF)
_PIECE = 1 << 16


def mix64(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each uint64, as a fresh array (splitmix64: Steele, Lea and Flood 2014)."""
    z = numbers + _GOLDEN
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


def partitions_of(keys: np.ndarray) -> np.ndarray:
    """The partition of each int64 key, from 0 to `PARTITIONS` - 1."""
    return (mix64(keys.view(np.uint64)) >> np.uint64(64 - PARTITION_BITS)).view(np.int64)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Rows of zeros.

    >>> Zeros().rows(np.array([5]), width=2, dtype="float64")
    array([[0., 0.]])
    """

    def rows(self, keys: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Return the initial rows of these keys."""
        return np.zeros((len(keys), width), dtype)


@dataclass(frozen=True, slots=True)
class Uniform(Checked):
    """Random numbers from [-limit, limit), the same for the same key.

    >>> bool(np.abs(Uniform(0.1).rows(np.array([5]), width=2, dtype="float64")).max() <= 0.1)
    True
    """

    limit: NotNegative
    seed: Seed = 0

    def rows(self, keys: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Return the initial rows of these keys."""
        drawn = _draws(self.seed, keys, width, 1)[0] >> np.uint64(11)
        return _scaled(drawn, float(1 << 52), self.limit / (1 << 52), dtype)


@dataclass(frozen=True, slots=True)
class Normal(Checked):
    """Random numbers of mean 0, the same for the same key.

    They are sums of twelve uniform numbers, at most six standard deviations, because logarithms and
    cosines would differ between machines.

    Parameters
    ----------
    std
        Standard deviation, 0 or above.
    seed
        Random seed.

    Examples
    --------
    >>> Normal(0.01).rows(np.array([5]), width=3, dtype="float32").shape
    (1, 3)
    """

    std: NotNegative
    seed: Seed = 0

    def rows(self, keys: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Return the initial rows of these keys."""
        # Each of three draws has four numbers of 16 bits, which are added in pairs.
        lanes = np.zeros((len(keys), width), np.uint64)
        for drawn in _draws(self.seed, keys, width, 3):
            lanes += drawn & _LANES
            lanes += (drawn >> np.uint64(16)) & _LANES
        total = (lanes & np.uint64(0xFFFFFFFF)) + (lanes >> np.uint64(32))
        mean, deviation = 12 * (_PIECE - 1) / 2, float(np.sqrt(_PIECE**2 - 1))
        return _scaled(total, mean, self.std / deviation, dtype)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Given:
    """Some rows exist from the start.

    Parameters
    ----------
    rows
        Array of shape (keys, width), of any floating-point type.
    keys
        Integers from 0 to 2⁶³ - 1, each once, in any order; None: 0, 1, 2, …
    otherwise
        The values of other rows before their first update.

    Examples
    --------
    >>> Given(np.zeros((2, 4)), keys=np.array([7, 3]), otherwise=Normal(0.01))
    Given(float64[2, 4])
    """

    rows: np.ndarray
    keys: np.ndarray | None = None
    otherwise: Zeros | Uniform | Normal = Zeros()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, np.ndarray):
            raise refused("Given: rows", self.rows, "an array (keys, width)")
        if not isinstance(self.otherwise, Zeros | Uniform | Normal):
            raise refused("Given: otherwise", self.otherwise, "Zeros(), Uniform or Normal")

    def __repr__(self) -> str:
        return f"Given({described(self.rows)})"


Initial = Zeros | Uniform | Normal | Given


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """A sparse table: int64 key → a row of `width` numbers, which exists from its first update on.

    Parameters
    ----------
    name
        The name for pushes and pulls.
    width
        Length of a row, at least 1.
    dtype
        "float32" or "float64".
    initial
        The values of a row before its first update: `Zeros()`, `Uniform(limit)` or `Normal(std)`.
        For rows that exist from the start, an array (keys, width) of the rows with keys 0, 1, 2, …,
        or `Given(rows, keys)`.

    Examples
    --------
    >>> SparseSpec("embedding", width=16, initial=Normal(0.01)).row_nbytes
    64
    """

    name: str
    width: int
    dtype: str = "float32"
    initial: Initial | np.ndarray = Zeros()

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise refused("SparseSpec: name", self.name, "a text")
        what, dtype = f"SparseSpec {self.name!r}", _dtype_name(self.dtype)
        width = integer_argument(f"{what}: width", self.width, 1, "numbers")
        if dtype not in ROW_DTYPES:
            raise refused(f"{what}: dtype", self.dtype, "'float32' or 'float64'")
        if isinstance(self.initial, np.ndarray):
            object.__setattr__(self, "initial", Given(self.initial))
        if not isinstance(self.initial, Initial):
            known = "Zeros(), Uniform(limit), Normal(std), an array of rows, or Given(rows, keys)"
            raise refused(f"{what}: initial", self.initial, known)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "dtype", dtype)

    @property
    def row_nbytes(self) -> int:
        """Size of one row in bytes."""
        return self.width * np.dtype(self.dtype).itemsize

    def initial_rows(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of these keys before their first update."""
        initial = self.initial
        assert isinstance(initial, Zeros | Uniform | Normal)
        return initial.rows(keys, self.width, self.dtype)


def _draws(seed: int, keys: np.ndarray, width: int, count: int) -> list[np.ndarray]:
    start = mix64(keys.view(np.uint64) ^ mix64(np.array([seed], np.uint64)))[:, None]
    steps = np.arange(width * count, dtype=np.uint64) * _GOLDEN
    return [mix64(start + steps[i * width : (i + 1) * width]) for i in range(count)]


def _scaled(numbers: np.ndarray, mean: float, scale: float, dtype: str) -> np.ndarray:
    # The numbers are below 2⁵³, so float64 holds them exactly.
    values = numbers.astype(np.float64)
    values -= mean
    values *= scale
    return values.astype(dtype, copy=False)


def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name if isinstance(dtype, str | type | np.dtype) else ""
    except (TypeError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class Level:
    """Some rows of a table: int64 keys, sorted, each once; values and slots (rows, width)."""

    keys: np.ndarray
    values: np.ndarray
    slots: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Size of keys, values and slots in bytes."""
        return self.keys.nbytes + self.values.nbytes + sum(s.nbytes for s in self.slots.values())


@dataclass(frozen=True, slots=True)
class SparseTable:
    """The rows of a sparse table on one shard, in levels, newest first. Immutable."""

    levels: tuple[Level, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all levels in bytes."""
        return sum(level.nbytes for level in self.levels)

    def between(self, start: int, stop: int, spec: SparseSpec) -> Level:
        """Return the existing rows with keys from `start` to below `stop`, without slots."""
        parts = []
        for level in self.levels if start < stop else ():
            # Either may be 2⁶³, which is no int64 and would be compared as a float.
            first, last = level.keys.searchsorted(start), level.keys.searchsorted(stop - 1, "right")
            if first < last:
                parts.append(Level(level.keys[first:last], level.values[first:last]))
        none = Level(np.empty(0, np.int64), np.empty((0, spec.width), spec.dtype))
        return reduce(merged, parts) if parts else none

    def rows(self, spec: SparseSpec, keys: np.ndarray, slots: tuple[str, ...] = ()) -> Level:
        """Return copies of the rows of int64 keys and some slots, or of their initial values."""
        left = np.arange(len(keys))  # indices of the keys that were not found yet
        matches: list[tuple[np.ndarray, Level, np.ndarray]] = []
        for level in self.levels:
            wanted = keys if len(left) == len(keys) else keys[left]
            at, hit = _places(level.keys, wanted)
            if hit.all():
                matches.append((left, level, at))
                left = left[:0]
                break
            if hit.any():
                matches.append((left[hit], level, at[hit]))
                left = left[~hit]
        if len(matches) == 1 and not len(left):
            _, level, at = matches[0]
            taken = {name: level.slots[name].take(at, 0) for name in slots}
            return Level(keys, level.values.take(at, 0), taken)
        if len(left) == len(keys):
            values = spec.initial_rows(keys)
        else:
            values = np.empty((len(keys), spec.width), spec.dtype)
            values[left] = spec.initial_rows(keys[left])
        state = {name: np.zeros_like(values) for name in slots}
        for where, level, at in matches:
            values[where] = level.values.take(at, 0)
            for name, slot in state.items():
                slot[where] = level.slots[name].take(at, 0)
        return Level(keys, values, state)

    def written(self, level: Level) -> SparseTable:
        """Return the table with these rows."""
        older = self.levels
        while older and len(older[0]) < GROWTH * len(level):
            level, older = merged(level, older[0]), older[1:]
        return SparseTable((level, *older))

    def copied(self, rows: int) -> int:
        """Return how many rows are copied, at most, to write a number of rows."""
        length = total = rows
        for level in self.levels:
            if len(level) >= GROWTH * length:
                break
            length += len(level)
            total += length
        return total

    def compacted(self) -> Level | None:
        """All rows as one level; None if there are none."""
        return reduce(merged, self.levels) if self.levels else None


EMPTY = SparseTable()


def merged(newer: Level, older: Level) -> Level:
    """Return the rows of both levels, the newer where both have one."""
    at = older.keys.searchsorted(newer.keys)
    inside = np.minimum(at, len(older) - 1)
    kept = np.ones(len(older), bool)
    kept[inside[older.keys[inside] == newer.keys]] = False
    if not kept.any():
        return newer
    before = np.concatenate(([0], np.cumsum(kept)))  # number of kept rows before each place
    places = before[at] + np.arange(len(newer))
    length = len(newer) + int(before[-1])
    is_older = np.ones(length, bool)
    is_older[places] = False
    source = np.zeros(length, np.intp)
    source[is_older] = np.flatnonzero(kept)

    def joined(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        out = np.empty((length, *new.shape[1:]), new.dtype)
        # Filling the places of the newer rows with any older row first saves a copy of these.
        old.take(source, 0, out=out, mode="clip")
        out[places] = new
        return out

    slots = {name: joined(slot, older.slots[name]) for name, slot in newer.slots.items()}
    return Level(joined(newer.keys, older.keys), joined(newer.values, older.values), slots)


def table_of(tables: Mapping[str, SparseTable], name: str) -> SparseTable:
    """Return a table, which is empty before its first push."""
    return tables.get(name, EMPTY)


def _places(present: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.searchsorted(present, wanted)
    np.minimum(at, len(present) - 1, out=at)
    return at, present[at] == wanted


@dataclass(frozen=True, slots=True)
class Rows:
    """The gradient (rows, width) of rows of a sparse table: int64 keys, sorted, each once."""

    table: str
    keys: np.ndarray
    gradient: np.ndarray

    @property
    def nbytes(self) -> int:
        """Size of keys and gradient in bytes."""
        return self.keys.nbytes + self.gradient.nbytes


def as_keys(table: str, keys: object) -> np.ndarray:
    """Return 1-D keys from 0 to 2⁶³ - 1 as int64, perhaps without a copy; refuse others."""
    what = f"keys of table {table!r}"
    try:
        array = plain(what, np.asanyarray(keys), ShapeMismatch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeMismatch(f"{what} are not an array of whole numbers: {error}") from error
    if array.ndim != 1:
        raise ShapeMismatch(f"{what} have {array.ndim} dimensions, expected one")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ShapeMismatch(f"{what} are {array.dtype}, expected whole numbers below 2⁶³")
    for key in (int(array.min()), int(array.max())):
        if not 0 <= key < KEYS:
            raise ShapeMismatch(f"{what}: {key}, expected 0 to 2⁶³ - 1")
    return array.astype(np.int64, copy=False)


def check_fit(spec: SparseSpec, keys: np.ndarray, gradient: object) -> None:
    """Refuse a gradient that is not one row for each key; raises `ShapeMismatch`."""
    shape, dtype = (len(keys), spec.width), np.dtype(spec.dtype)
    if not isinstance(gradient, np.ndarray) or (gradient.shape, gradient.dtype) != (shape, dtype):
        raise ShapeMismatch(
            f"the rows for table {spec.name!r} are {described(gradient)}, expected an array "
            f"{dtype}{list(shape)}: one for each key"
        )


def are_sorted(keys: np.ndarray) -> bool:
    """Whether keys are in order, each once."""
    return bool((keys[1:] > keys[:-1]).all())


def summed_by_key(keys: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys sorted, each once, and the sum of the gradients of each."""
    # The sum depends, to the last bit, only on the gradients of its key and their order.
    if are_sorted(keys):
        return keys, gradient
    order = keys.argsort(kind="stable")
    keys, gradient = keys[order], gradient.take(order, 0)
    is_first = np.concatenate(([True], keys[1:] != keys[:-1]))
    if is_first.all():
        return keys, gradient
    starts = np.flatnonzero(is_first)
    with np.errstate(over="ignore", invalid="ignore"):  # refused when it is applied
        return keys[starts], np.add.reduceat(gradient, starts, 0)


def added(a: Sequence[Rows], b: Sequence[Rows]) -> tuple[Rows, ...]:
    """Return the sum of two gradients."""
    total = {rows.table: rows for rows in a}
    for rows in b:
        first = total.get(rows.table)
        if first is None:
            total[rows.table] = rows
        else:
            keys = np.concatenate((first.keys, rows.keys))
            gradient = np.concatenate((first.gradient, rows.gradient))
            total[rows.table] = Rows(rows.table, *summed_by_key(keys, gradient))
    return tuple(total.values())
