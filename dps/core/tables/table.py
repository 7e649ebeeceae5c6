"""The rows of a sparse table, in immutable levels of sorted keys, and gradients of rows.

A table is a log-structured merge tree in memory (O'Neil et al. 1996). A push adds a small level in
front of the others, and a level is merged with the next while that is less than twice as long. So a
push of k rows copies O(k log n) of n rows on average, and the table before it stays valid.

A worker sorts the keys of a push and sums the gradients of repeated ones; a shard works on sorted,
distinct keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from dps.core.arguments import plain
from dps.core.tables.spec import SparseSpec
from dps.errors import ShapeMismatch

GROWTH = 2  # least ratio of the lengths of a level and the one before
KEYS = 1 << 63  # keys are below


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

    def between(self, start: int, stop: int) -> Level:
        """The rows with keys from `start` to below `stop`, without a copy."""
        cut = slice(0)
        if start < stop:
            # Either may be 2⁶³, which is no int64 and would be compared as a float.
            first, last = self.keys.searchsorted(start), self.keys.searchsorted(stop - 1, "right")
            cut = slice(int(first), int(last))
        slots = {name: slot[cut] for name, slot in self.slots.items()}
        return Level(self.keys[cut], self.values[cut], slots)


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
        bare = [Level(level.keys, level.values) for level in self.levels]
        cut = [part for level in bare if len(part := level.between(start, stop))]
        if not cut:
            return Level(np.empty(0, np.int64), np.empty((0, spec.width), spec.dtype))
        return reduce(merged, cut)

    def rows(self, spec: SparseSpec, keys: np.ndarray, slots: tuple[str, ...] = ()) -> Level:
        """Return the rows of these int64 keys and some slots, as fresh arrays.

        Missing rows have their initial values, and slots of zeros. The keys may be in any order,
        and repeated; sorted keys are faster.
        """
        left = np.arange(len(keys))  # indices of the keys that were not found yet
        found: list[tuple[np.ndarray, Level, np.ndarray]] = []
        for level in self.levels:
            wanted = keys if len(left) == len(keys) else keys[left]
            at, hit = _places(level.keys, wanted)
            if hit.all():
                found.append((left, level, at))
                left = left[:0]
                break
            if hit.any():
                found.append((left[hit], level, at[hit]))
                left = left[~hit]
        if len(found) == 1 and not len(left):
            _, level, at = found[0]
            taken = {name: level.slots[name].take(at, 0) for name in slots}
            return Level(keys, level.values.take(at, 0), taken)
        if len(left) == len(keys):
            values = spec.initial_rows(keys)
        else:
            values = np.empty((len(keys), spec.width), spec.dtype)
            values[left] = spec.initial_rows(keys[left])
        state = {name: np.zeros_like(values) for name in slots}
        for where, level, at in found:
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
    """Return the place of each wanted key among sorted ones, and whether it is there."""
    at = np.searchsorted(present, wanted)
    np.minimum(at, len(present) - 1, out=at)
    return at, present[at] == wanted


# -- gradients of rows -----------------------------------------------------------------------------


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
        raise ShapeMismatch(f"{what} are no array of whole numbers: {error}") from error
    if array.ndim != 1:
        raise ShapeMismatch(f"{what} have {array.ndim} dimensions, expected one")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ShapeMismatch(f"{what} are {array.dtype}, expected whole numbers below 2⁶³")
    for key in (int(array.min()), int(array.max())):
        if not 0 <= key < KEYS:
            raise ShapeMismatch(f"{what}: {key} is not from 0 to 2⁶³ - 1")
    return array.astype(np.int64, copy=False)


def check_fit(spec: SparseSpec, keys: np.ndarray, gradient: object) -> None:
    """Refuse a gradient that is not one row for each key; raises `ShapeMismatch`."""
    expected = f"{spec.dtype}{[len(keys), spec.width]}"
    if not isinstance(gradient, np.ndarray):
        raise ShapeMismatch(
            f"the rows for table {spec.name!r} are {type(gradient).__name__}, "
            f"expected an array {expected}"
        )
    if gradient.shape != (len(keys), spec.width) or gradient.dtype != np.dtype(spec.dtype):
        raise ShapeMismatch(
            f"the rows for table {spec.name!r} are {gradient.dtype}{list(gradient.shape)}, "
            f"expected {expected}: one for each key"
        )


def are_sorted(keys: np.ndarray) -> bool:
    """Whether keys are in order, each once."""
    return bool((keys[1:] > keys[:-1]).all())


def summed_by_key(keys: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys sorted, each once, and the sum of the gradients of each.

    The sum depends, to the last bit, only on the gradients of its key and their order.
    """
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
