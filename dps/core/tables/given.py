"""Rows that a sparse table begins with: checked, and dealt out to the shards that hold them.

They are part of the first state of each shard, not of what a table is: that goes with every task,
and must stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dps.core.arguments import plain
from dps.core.blocks import Layout, all_finite
from dps.core.tables.row_gradients import are_sorted, as_keys
from dps.core.tables.spec import Given, SparseSpec, partitions_of
from dps.core.tables.table import Level, SparseTable
from dps.errors import ConfigurationError

Begun = Mapping[str, Level]  # by table, the rows that it begins with


def without_rows(specs: Sequence[SparseSpec]) -> tuple[SparseSpec, ...]:
    """Return what tables are, without the rows that they begin with."""
    return tuple(
        replace(spec, initial=spec.initial.otherwise) if isinstance(spec.initial, Given) else spec
        for spec in specs
    )


def checked_rows(spec: SparseSpec, rows: object, keys: object = None) -> Level:
    """Return rows that a table is to begin with, sorted by key.

    Raises
    ------
    ConfigurationError
        They are no floating-point array (keys, width), hold NaN or infinity, or the keys are none,
        or repeated.
    """
    what = f"SparseSpec {spec.name!r}: initial rows"
    if isinstance(rows, np.ndarray):
        rows = plain(what, rows)
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
        raise ConfigurationError(f"{what} hold NaN, or what is infinite in {spec.dtype}")
    if keys is None:
        return Level(np.arange(len(rows)), values)
    numbers = as_keys(spec.name, keys)
    if len(numbers) != len(rows):
        raise ConfigurationError(f"{what}: {len(rows)} for {len(numbers)} keys")
    order = numbers.argsort(kind="stable")
    numbers = numbers[order]
    if not are_sorted(numbers):
        twice = int(numbers[1:][numbers[1:] == numbers[:-1]][0])
        raise ConfigurationError(f"{what}: key {twice} is there twice")
    return Level(numbers, values[order])


def dealt_out(
    layout: Layout, begun: Begun, slots_of: Callable[[str], Sequence[str]]
) -> list[dict[str, SparseTable]]:
    """Return for each shard its tables, with optimizer state of zeros where there is none.

    `slots_of` says which optimizer state the table of a name has.
    """
    shards: list[dict[str, SparseTable]] = [{} for _ in layout.shards]
    homes = np.array(layout.homes, np.int64)
    for name, level in begun.items():
        home, slots = homes[partitions_of(level.keys)], slots_of(name)
        for shard, tables in enumerate(shards):
            here = home == shard
            if here.any():
                values = level.values[here]
                zeros = {slot: np.zeros_like(values) for slot in slots}
                kept = {slot: level.slots[slot][here] for slot in slots if slot in level.slots}
                tables[name] = SparseTable((Level(level.keys[here], values, zeros | kept),))
    return shards
