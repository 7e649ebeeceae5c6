"""Gradients of rows of sparse tables.

A worker sorts the keys of a push and sums the gradients of repeated ones; a shard works on sorted,
distinct keys.
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


def times(some: Sequence[Rows], factor: float) -> tuple[Rows, ...]:
    """Return a gradient scaled by a factor."""
    return tuple(replace(rows, gradient=rows.gradient * factor) for rows in some)


def squares(some: Sequence[Rows]) -> float:
    """The square of a gradient's norm."""
    return sum(float(np.square(rows.gradient, dtype=np.float64).sum()) for rows in some)


def owned(some: Sequence[Rows]) -> tuple[Rows, ...]:
    """Return a copy of a gradient."""
    return tuple(Rows(r.table, r.keys.copy(), r.gradient.copy()) for r in some)
