"""Gradients of rows: how keys and gradients that a user gives become what a shard applies.

On their way keys are sorted and the gradients of repeated ones summed, once, by whoever pushes; a
shard then works on sorted keys, each of which it meets once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dps.core.arguments import plain
from dps.core.tables.spec import SparseSpec
from dps.errors import ShapeMismatch

KEYS = 1 << 63  # keys are below


@dataclass(frozen=True, slots=True)
class Rows:
    """The gradient of some rows of a sparse table.

    Attributes
    ----------
    table
        The table's name.
    keys
        int64, (rows,), sorted, each once, at least one.
    gradient
        (rows, width), of the table's dtype.
    """

    table: str
    keys: np.ndarray
    gradient: np.ndarray

    @property
    def nbytes(self) -> int:
        """Size of keys and gradient in bytes."""
        return self.keys.nbytes + self.gradient.nbytes


def as_keys(table: str, keys: object) -> np.ndarray:
    """Return keys as an int64 array, which may be the one that was given.

    Raises
    ------
    ShapeMismatch
        They are no integers in one dimension, or not all from 0 to 2⁶³ - 1.
    """
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
    smallest, largest = int(array.min()), int(array.max())
    if smallest < 0 or largest >= KEYS:
        wrong = smallest if smallest < 0 else largest
        raise ShapeMismatch(f"{what}: {wrong} is not from 0 to 2⁶³ - 1")
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
    """Return the keys sorted, each once, and for each the sum of its gradients.

    What is in order already is returned as it is. The sum of a repeated key depends, to the last
    bit, on its own gradients and their order alone. NumPy adds the first of them to the sum of the
    others.
    """
    if are_sorted(keys):
        return keys, gradient
    order = keys.argsort(kind="stable")
    keys, gradient = keys[order], gradient.take(order, 0)
    is_first = np.concatenate(([True], keys[1:] != keys[:-1]))
    if is_first.all():
        return keys, gradient
    starts = np.flatnonzero(is_first)
    with np.errstate(over="ignore", invalid="ignore"):  # found, and named, when it is applied
        return keys[starts], np.add.reduceat(gradient, starts, 0)


def added(a: Sequence[Rows], b: Sequence[Rows]) -> tuple[Rows, ...]:
    """Return the sum of two gradients, in which a key that is in both has the sum of its rows."""
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


def times(some: Sequence[Rows], factor: float) -> tuple[Rows, ...]:
    """Return a gradient scaled by a factor."""
    return tuple(replace(rows, gradient=rows.gradient * factor) for rows in some)


def squares(some: Sequence[Rows]) -> float:
    """The square of a gradient's norm."""
    return sum(float(np.square(rows.gradient, dtype=np.float64).sum()) for rows in some)


def owned(some: Sequence[Rows]) -> tuple[Rows, ...]:
    """Return the same gradient in memory of its own."""
    return tuple(Rows(r.table, r.keys.copy(), r.gradient.copy()) for r in some)
