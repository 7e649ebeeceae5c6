"""The distribution of keys and rows of sparse tables to shards.

The hash of a key determines its partition, and the layout has the shard of each partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dps.core import ranges
from dps.core.arguments import as_gradient, plain
from dps.core.blocks import Layout, all_finite
from dps.core.rules.rule import UpdateRule, rule_for
from dps.core.tables.table import (
    KEYS,
    Given,
    Level,
    Rows,
    SparseSpec,
    SparseTable,
    are_sorted,
    as_keys,
    check_fit,
    partitions_of,
    summed_by_key,
)
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch

# Table → keys, and one row of a gradient for each.
Gradients = Mapping[str, tuple[object, object]]


def dealt(layout: Layout, gradients: Gradients, values: bool = True) -> dict[int, tuple[Rows, ...]]:
    """Return the rows of each shard, sorted by key and summed; they may be views of arguments."""
    parts: dict[int, list[Rows]] = {}
    for name, pushed in gradients.items():
        keys, gradient = _checked(layout.shards[0].table(name), pushed)
        order = None if are_sorted(keys) else keys.argsort()
        if order is not None and not are_sorted(keys[order]):
            keys, gradient = summed_by_key(keys, gradient)
            order = None
        if values and not all_finite(gradient):
            raise NonFiniteGradient(
                f"the rows for table {name!r} hold NaN or infinity, or the sum over a repeated key "
                "does; nothing of this update was applied"
            )
        keys, order, cuts = _by_shard(layout, keys, order)
        if order is not None:
            gradient = gradient.take(order, 0)
        for shard, cut in cuts.items():
            parts.setdefault(shard, []).append(Rows(name, keys[cut], gradient[cut]))
    return {shard: tuple(rows) for shard, rows in parts.items()}


def check_rows(layout: Layout, gradients: Gradients) -> None:
    """Refuse rows that do not fit their tables, as `dealt` does, without checking values."""
    for name, pushed in gradients.items():
        _checked(layout.shards[0].table(name), pushed)


@dataclass(frozen=True, slots=True)
class Question:
    """A request for `count` keys of a table, shard by shard."""

    spec: SparseSpec
    keys: dict[int, np.ndarray]  # of each shard, sorted, perhaps repeated
    where: dict[int, np.ndarray | slice]  # their places in the request
    count: int

    def answer(self, rows: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the shards' rows in the order of the request."""
        out = np.empty((self.count, self.spec.width), self.spec.dtype)
        for shard, where in self.where.items():
            out[where] = rows[shard]
        return out


def asked(layout: Layout, table: str, keys: object) -> Question:
    """Distribute keys to their shards; raises `ShapeMismatch` for an unknown table or bad keys."""
    spec = layout.shards[0].table(table)
    wanted = as_keys(table, keys)
    order = None if are_sorted(wanted) else wanted.argsort()  # sorted keys are faster for a shard
    ordered, order, cuts = _by_shard(layout, wanted, order)
    where = {shard: cut if order is None else order[cut] for shard, cut in cuts.items()}
    return Question(spec, {s: ordered[cut] for s, cut in cuts.items()}, where, len(wanted))


def as_range(start: object, stop: object) -> tuple[int, int]:
    """Return a range of keys as plain numbers; raises `ShapeMismatch` if it is invalid."""
    first, end = ranges.whole(start), ranges.whole(stop)
    if first is None or end is None or not 0 <= first <= end <= KEYS:
        raise ShapeMismatch(
            f"keys from {ranges.shown(start)} to {ranges.shown(stop)}: expected whole numbers, "
            "0 ≤ start ≤ stop ≤ 2⁶³"
        )
    return first, end


def _checked(spec: SparseSpec, pushed: tuple[object, object]) -> tuple[np.ndarray, np.ndarray]:
    what = f"the rows for table {spec.name!r}"
    if not isinstance(pushed, tuple) or len(pushed) != 2:
        expected = "a pair: keys, and an array with one row for each"
        raise ShapeMismatch(f"{what} are {type(pushed).__name__}, expected {expected}")
    keys = as_keys(spec.name, pushed[0])
    gradient = as_gradient(what, pushed[1], spec.dtype, ShapeMismatch)
    check_fit(spec, keys, gradient)
    assert isinstance(gradient, np.ndarray)
    return keys, gradient


def _by_shard(
    layout: Layout, keys: np.ndarray, order: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, dict[int, slice]]:
    """Return keys sorted by shard, then by `order`; their indices; and the slice of each shard."""
    ordered, shards = keys if order is None else keys[order], len(layout.shards)
    if shards == 1 or not len(keys):
        return ordered, order, {0: slice(0, len(keys))} if len(keys) else {}
    # With small numbers, sorting is counting.
    small = np.uint8 if shards <= 1 << 8 else np.uint16
    homes = np.array(layout.homes, small)[partitions_of(ordered)]
    ends = np.bincount(homes, minlength=shards).cumsum().tolist()
    cuts = {s: slice(a, b) for s, (a, b) in enumerate(pairwise([0, *ends])) if a < b}
    by_shard = homes.argsort(kind="stable")
    return ordered[by_shard], by_shard if order is None else order[by_shard], cuts


def separated(specs: Sequence[SparseSpec]) -> tuple[tuple[SparseSpec, ...], dict[str, Level]]:
    """Return tables without initial rows, which every task gets, and the initial rows by table."""
    bare, rows = [], {}
    for spec in specs:
        initial = spec.initial
        if isinstance(initial, Given):
            rows[spec.name] = checked_rows(spec, initial.rows, initial.keys)
            spec = replace(spec, initial=initial.otherwise)
        bare.append(spec)
    return tuple(bare), {name: level for name, level in rows.items() if len(level)}


def checked_rows(spec: SparseSpec, rows: object, keys: object = None) -> Level:
    """Return the initial rows of a table, sorted by key; refuse invalid rows and keys."""
    what = f"SparseSpec {spec.name!r}: initial rows"
    rows = plain(what, rows) if isinstance(rows, np.ndarray) else rows
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "f":
        kind = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        raise ConfigurationError(f"{what} are {kind}, expected an array of float32 or float64")
    if rows.ndim != 2 or rows.shape[1] != spec.width:
        raise ConfigurationError(
            f"{what} have the shape {rows.shape}, expected (keys, {spec.width})"
        )
    with np.errstate(over="ignore"):
        values = rows.astype(spec.dtype)
    if not all_finite(values):
        raise ConfigurationError(f"{what} hold NaN, or values beyond the range of {spec.dtype}")
    if keys is None:
        return Level(np.arange(len(rows)), values)
    numbers = as_keys(spec.name, keys)
    if len(numbers) != len(rows):
        raise ConfigurationError(f"{what}: {len(rows)} for {len(numbers)} keys")
    order = numbers.argsort(kind="stable")
    numbers = numbers[order]
    if not are_sorted(numbers):
        twice = int(numbers[1:][numbers[1:] == numbers[:-1]][0])
        raise ConfigurationError(f"{what}: key {twice} is repeated")
    return Level(numbers, values[order])


def dealt_out(
    layout: Layout, begun: Mapping[str, Level], rule: UpdateRule
) -> list[dict[str, SparseTable]]:
    """Return the tables of each shard; missing optimizer state is zero."""
    shards: list[dict[str, SparseTable]] = [{} for _ in layout.shards]
    homes = np.array(layout.homes, np.int64)
    for name, level in begun.items():
        home, slots = homes[partitions_of(level.keys)], rule_for(rule, name).slots
        for shard, tables in enumerate(shards):
            here = home == shard
            if here.any():
                values = level.values[here]
                zeros = {slot: np.zeros_like(values) for slot in slots}
                kept = {slot: level.slots[slot][here] for slot in slots if slot in level.slots}
                tables[name] = SparseTable((Level(level.keys[here], values, zeros | kept),))
    return shards
