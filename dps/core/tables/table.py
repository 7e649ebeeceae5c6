"""The state of a sparse table: rows by key, in levels of sorted keys that are never changed.

A table is a log-structured merge tree without files (O'Neil et al. 1996): what a push writes is a
small new level in front of the older ones, and a level is merged with the next while that is less
than twice as long. So a push copies what it touches, and a logarithm of the table's length times
that on the average, never the whole of it; whoever holds the table before still has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from dps.core.tables.spec import SparseSpec

GROWTH = 2  # how many times longer than the level before it a level is at least


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
        """The rows with keys from `start` to below `stop`, which may be none; without a copy."""
        if start >= stop:
            return self._cut(slice(0))
        # Either may be 2⁶³, which is no int64: it would be compared as a float.
        first, last = self.keys.searchsorted(start), self.keys.searchsorted(stop - 1, "right")
        return self._cut(slice(int(first), int(last)))

    def _cut(self, cut: slice) -> Level:
        slots = {name: slot[cut] for name, slot in self.slots.items()}
        return Level(self.keys[cut], self.values[cut], slots)


@dataclass(frozen=True, slots=True)
class SparseTable:
    """The rows of a sparse table that lie on one shard. Never changed; thread-safe for that reason.

    Attributes
    ----------
    levels
        Newest first. Where several have a row of the same key, that in the newest counts.
    """

    levels: tuple[Level, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all levels in bytes."""
        return sum(level.nbytes for level in self.levels)

    def values(self, spec: SparseSpec, keys: np.ndarray) -> np.ndarray:
        """Return the rows of these keys, as a fresh array; what is not there reads as it begins.

        The keys are int64, 0 or above, in any order; it is quicker if they are sorted.
        """
        return self.rows(spec, keys).values

    def between(self, start: int, stop: int, spec: SparseSpec) -> Level:
        """Return the rows that exist with keys from `start` to below `stop`, without slots."""
        bare = [Level(level.keys, level.values) for level in self.levels]
        cut = [part for level in bare if len(part := level.between(start, stop))]
        if not cut:
            return Level(np.empty(0, np.int64), np.empty((0, spec.width), spec.dtype))
        return reduce(merged, cut)

    def rows(self, spec: SparseSpec, keys: np.ndarray, slots: tuple[str, ...] = ()) -> Level:
        """Return the rows of these keys, with these slots of theirs, as fresh arrays.

        Rows that are not there are as they begin, with slots of zeros. The keys may be in any
        order, and repeated; it is quicker if they are sorted.
        """
        left = np.arange(len(keys))  # which of the keys were not found yet
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
        return self._put_together(spec, keys, slots, found, left)

    def written(self, level: Level) -> SparseTable:
        """Return the table with these rows in it."""
        older = self.levels
        while older and len(older[0]) < GROWTH * len(level):
            level, older = merged(level, older[0]), older[1:]
        return SparseTable((level, *older))

    def copied(self, rows: int) -> int:
        """How many rows are copied at most when so many are written."""
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

    def _put_together(
        self,
        spec: SparseSpec,
        keys: np.ndarray,
        slots: tuple[str, ...],
        found: list[tuple[np.ndarray, Level, np.ndarray]],
        left: np.ndarray,
    ) -> Level:
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


EMPTY = SparseTable()


def merged(newer: Level, older: Level) -> Level:
    """Return the rows of both levels; where both have one, that of the newer."""
    at = older.keys.searchsorted(newer.keys)
    inside = np.minimum(at, len(older) - 1)
    kept = np.ones(len(older), bool)
    kept[inside[older.keys[inside] == newer.keys]] = False
    if not kept.any():
        return newer
    before = np.concatenate(([0], np.cumsum(kept)))  # how many are kept before each place
    places = before[at] + np.arange(len(newer))
    length = len(newer) + int(before[-1])
    is_older = np.ones(length, bool)
    is_older[places] = False
    source = np.zeros(length, np.intp)
    source[is_older] = np.flatnonzero(kept)

    def joined(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        out = np.empty((length, *new.shape[1:]), new.dtype)
        # Rows of the newer level are filled with any of the older first: it saves a copy of these.
        old.take(source, 0, out=out, mode="clip")
        out[places] = new
        return out

    slots = {name: joined(slot, older.slots[name]) for name, slot in newer.slots.items()}
    return Level(joined(newer.keys, older.keys), joined(newer.values, older.values), slots)


def table_of(tables: Mapping[str, SparseTable], name: str) -> SparseTable:
    """The table of that name; one without rows until it was first pushed to."""
    return tables.get(name, EMPTY)


def _places(present: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each wanted key is among the sorted ones that are present, and whether it is there."""
    at = np.searchsorted(present, wanted)
    np.minimum(at, len(present) - 1, out=at)
    return at, present[at] == wanted
