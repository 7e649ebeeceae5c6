"""How an operation's gradient of rows is checked, and changes a shard's sparse tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dps.core.blocks import ShardLayout, all_finite
from dps.core.rules.rule import UpdateRule, by_rows, rule_for
from dps.core.tables.row_gradients import Rows, are_sorted, check_fit
from dps.core.tables.spec import SparseSpec
from dps.core.tables.table import Level, SparseTable, table_of
from dps.core.updates import Operation
from dps.errors import NonFiniteGradient, ShapeMismatch


def check_rows(layout: ShardLayout, op: Operation) -> None:
    """Refuse rows of no table, of another width or dtype, or with NaN or infinity in them."""
    for rows in op.rows:
        spec = layout.table(rows.table)
        try:
            check_fit(spec, rows.keys, rows.gradient)
        except ShapeMismatch as error:
            raise ShapeMismatch(f"update {op.id}: {error}") from None
        if rows.keys.dtype != np.int64 or not are_sorted(rows.keys):
            raise ShapeMismatch(f"update {op.id}: keys of table {spec.name!r} are not in order")
        if not all_finite(rows.gradient):
            raise NonFiniteGradient(
                f"update {op.id}: the rows for table {spec.name!r} hold NaN or infinity; "
                "nothing of this update was applied"
            )


def stepped_tables(
    layout: ShardLayout,
    rule: UpdateRule,
    tables: Mapping[str, SparseTable],
    op: Operation,
    t: int,
    scale_of: Callable[[UpdateRule], float],
) -> dict[str, SparseTable]:
    """Return the tables after one step of the rule with the rows of an operation.

    `scale_of` says what the learning rate of a rule is multiplied by. Rows that are not there yet
    are made; all others stay as they are, also where the rule would have changed them with a
    gradient of zeros.
    """
    check_rows(layout, op)
    after = dict(tables)
    for rows in op.rows:
        if len(rows.keys):
            table, spec = table_of(tables, rows.table), layout.table(rows.table)
            own = rule_for(rule, rows.table)
            after[rows.table] = table.written(_stepped(spec, own, table, rows, t, scale_of(own)))
    return after


def written_bytes(layout: ShardLayout, tables: Mapping[str, SparseTable], op: Operation) -> int:
    """About how many bytes a step with the operation writes: what tells how long it may take."""
    dense = 0 if op.gradient is None else op.gradient.nbytes
    total = layout.nbytes if op.codec else dense
    for rows in op.rows:
        copied = table_of(tables, rows.table).copied(len(rows.keys))
        total += copied * layout.table(rows.table).row_nbytes
    return total


def _stepped(
    spec: SparseSpec, rule: UpdateRule, table: SparseTable, rows: Rows, t: int, scale: float
) -> Level:
    """The rows of these keys after the step."""
    now = table.rows(spec, rows.keys, rule.slots)
    shape = rows.gradient.shape if by_rows(rule) else (-1,)
    slots = {name: slot.reshape(shape) for name, slot in now.slots.items()}
    gradient = rows.gradient.reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):  # a diverging run shows in its results
        values, slots = rule.step(now.values.reshape(shape), gradient, slots, t, scale)
    full = rows.gradient.shape
    # The keys may lie in memory that holds a whole message: a table must not keep that.
    return Level(
        rows.keys.copy(),
        values.reshape(full),
        {name: slot.reshape(full) for name, slot in slots.items()},
    )
