"""The units of a shard's state, which partial checkpoints write separately, and their reassembly.

A unit is a block of the shard's buffer, or the rows of a table whose keys hash to one page, with
the optimizer state of the same elements. Everything else (the number of updates, the dedupe table,
the results of calls) goes into every part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.core.tables.table import Level, SparseTable, mix64

PAGES = 64  # of the rows of each table on a shard

# The arrays of a unit: `values`, `slot.<name>`, and of rows `keys`.
Unit = dict[str, np.ndarray]


def units_of(layout: ShardLayout, state: ShardState) -> dict[str, Unit]:
    """Return every unit of a state by its name, which holds its place; nothing is copied."""
    units = {}
    for piece in layout.pieces:
        units[f"block.{piece.offset}.{piece.block.dtype}"] = {
            "values": piece.view(state.values),
            **{f"slot.{name}": piece.view(slot) for name, slot in state.slots.items()},
        }
    for number, name in numbered_tables(layout, state):
        pages = _pages(state.tables[name])
        units |= {f"table.{number}.{page}": unit for page, unit in pages}
    return units


def numbered_tables(layout: ShardLayout, state: ShardState) -> list[tuple[int, str]]:
    """The tables of a state, each with its number in the layout."""
    return [(i, spec.name) for i, spec in enumerate(layout.tables) if spec.name in state.tables]


def _pages(table: SparseTable) -> Iterator[tuple[int, Unit]]:
    rows = table.compacted()
    if rows is None:
        return
    page = mix64(rows.keys.view(np.uint64)) % np.uint64(PAGES)
    for number in np.unique(page):
        chosen = page == number
        slots = {f"slot.{name}": slot[chosen] for name, slot in rows.slots.items()}
        yield int(number), {"keys": rows.keys[chosen], "values": rows.values[chosen], **slots}


def nbytes_of(unit: Unit) -> int:
    """The size of all arrays of a unit."""
    return sum(array.nbytes for array in unit.values())


def distance(unit: Unit, saved: Unit) -> float:
    """Return the squared distance of a unit's weights from a saved copy of it.

    Rows that are not in the copy count as if they had been zeros.
    """
    values = unit["values"].astype(np.float64)
    if "keys" in unit:
        at = unit["keys"].searchsorted(saved["keys"])  # rows are never taken away
        values[at] -= saved["values"]
    else:
        values -= saved["values"]
    return float(np.vdot(values, values))


def put_together(
    manifest: Mapping[str, Any], units: Mapping[str, Unit]
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, SparseTable]]:
    """Return the weights, slots and tables that units make; raises `LookupError` if one is gone."""
    values = np.zeros(manifest["size"], np.uint8)
    slots = {name: np.zeros_like(values) for name in manifest["slots"]}
    rows: dict[int, list[Unit]] = {}
    for name, unit in units.items():
        kind, place, _ = name.split(".")
        if kind == "table":
            rows.setdefault(int(place), []).append(unit)
            continue
        begin, end = int(place), int(place) + unit["values"].nbytes
        values[begin:end] = unit["values"].view(np.uint8)
        for slot, buffer in slots.items():
            buffer[begin:end] = unit[f"slot.{slot}"].view(np.uint8)
    tables = {
        name: SparseTable((_level(rows[number]),) if number in rows else ())
        for number, name in manifest["tables"]
    }
    return values, slots, tables


def _level(pages: list[Unit]) -> Level:
    joined = {name: np.concatenate([page[name] for page in pages]) for name in pages[0]}
    order = np.argsort(joined["keys"], kind="stable")
    slots = {n.removeprefix("slot."): a[order] for n, a in joined.items() if n.startswith("slot.")}
    return Level(joined["keys"][order], joined["values"][order], slots)
