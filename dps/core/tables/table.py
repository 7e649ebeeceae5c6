"""The state of a sparse table: rows by key, in immutable levels of sorted keys.

A table is a log-structured merge tree in memory (O'Neil et al. 1996). A push adds a small level in
front of the others, and a level is merged with the next while that is less than twice as long. So a
push of k rows copies O(k log n) of n rows on average, and the table before it stays valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from dps.core.tables.spec import SparseSpec

GROWTH = 2  # least ratio of the lengths of a level and the one before


@dataclass(frozen=True, slots=True)
class Level:
    """Some rows of a table.

    Attributes
    ----------
    keys
        int64, (rows,), sorted, each once, at least one.
    values
        (rows, width).
    slots
        Optimizer state, each an array like `values`.
    """

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

    def values(self, spec: SparseSpec, keys: np.ndarray) -> np.ndarray:
        """Return the rows of int64 keys, in any order, as a fresh array."""
        return self.rows(spec, keys).values

    def between(self, start: int, stop: int, spec: SparseSpec) -> Level:
        """Return the existing rows with keys from `start` to below `stop`, without slots."""
        bare = [Level(level.keys, level.values) for level in self.levels]
        cut = [part for level in bare if len(part := level.between(start, stop))]
        if not cut:
            return Level(np.empty(0, np.int64), np.empty((0, spec.width), spec.dtype))
        return reduce(merged, cut)

    def rows(self, spec: SparseSpec, keys: np.ndarray, slots: tuple[str, ...] = ()) -> Level:
        """Return the rows of these keys and some slots, as fresh arrays.

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
    """Return the rows of both levels; where both have one, that of the newer."""
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
