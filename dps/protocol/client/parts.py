"""What an update carries, checked, clipped and taken apart: its part for each shard.

That goes through all of the gradients, so a worker does it in the training's own thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dps.core.blocks import Arrays, Gathered, Layout
from dps.core.filters.encoding import stretches
from dps.core.flat import Empty
from dps.core.rules.per_array import frozen
from dps.core.rules.rule import UpdateRule
from dps.core.rules.wrappers import Clipped, clipping_of
from dps.core.tables.key_routing import Gradients, check_rows, dealt
from dps.core.tables.row_gradients import Rows


@dataclass(frozen=True, slots=True)
class Parts:
    """One update, shard by shard.

    Attributes
    ----------
    dense
        For each shard that holds some of the arrays, its part of their gradients.
    rows
        For each shard that holds some of the rows, those of each table.
    """

    dense: Mapping[int, Gathered]
    rows: Mapping[int, tuple[Rows, ...]]

    @property
    def touched(self) -> set[int]:
        """The shards that the update touches."""
        return {*self.dense, *self.rows}


def prepared(
    layout: Layout,
    rule: UpdateRule,
    gradients: Arrays,
    rows: Gradients,
    empty: Empty,
    values: bool,
) -> Parts:
    """Return the parts of what is sent: without what the rule does not train, clipped if it says.

    Parameters and errors are those of `parts_of`.
    """
    if still := frozen(rule, [*gradients, *rows]):
        layout.check(gradients, values=False)
        check_rows(layout, {name: each for name, each in rows.items() if name in still})
        gradients = {name: array for name, array in gradients.items() if name not in still}
        rows = {name: each for name, each in rows.items() if name not in still}
    parts = parts_of(layout, gradients, rows, empty, values)
    clipping = clipping_of(rule)
    return parts if clipping is None else clipped(layout, parts, clipping, empty)


def parts_of(
    layout: Layout, gradients: Arrays, rows: Gradients, empty: Empty, values: bool
) -> Parts:
    """Check gradients and take them apart; look at their values only if `values`.

    What lies in one piece stays where it is. For the rest `empty` makes the memory. Parts are
    read-only, so that they can be sent as they lie.

    Raises
    ------
    ShapeMismatch, NonFiniteGradient
        They do not fit, or hold NaN or infinity.
    """
    layout.check(gradients, values)
    dense = {shard: layout.gather(shard, gradients, empty) for shard in layout.shards_of(gradients)}
    for buffer, _ in dense.values():
        buffer.flags.writeable = False
    return Parts(dense, dealt(layout, rows, values))


def clipped(layout: Layout, parts: Parts, clipping: Clipped, empty: Empty) -> Parts:
    """Return an update that is clipped as a whole; what is clipped lies in memory of its own."""
    before = _arrays(layout, parts)
    made: list[Parts] = []

    def fresh() -> list[np.ndarray]:
        made.append(_like(parts, empty))
        return _arrays(layout, made[0])

    if clipping.clipped(before, fresh) is before:
        return parts
    for buffer, _ in made[0].dense.values():
        buffer.flags.writeable = False
    return made[0]


def _arrays(layout: Layout, parts: Parts) -> list[np.ndarray]:
    """All that is in the parts, array by array, without a copy."""
    dense = [
        buffer[stretch.begin : stretch.end].view(stretch.dtype)
        for shard, (buffer, pieces) in parts.dense.items()
        for stretch in stretches(layout.shards[shard], pieces)
    ]
    return [*dense, *(rows.gradient for tables in parts.rows.values() for rows in tables)]


def _like(parts: Parts, empty: Empty) -> Parts:
    """Parts of the same form, not filled."""
    dense = {s: (empty(buffer.shape, "uint8"), at) for s, (buffer, at) in parts.dense.items()}
    rows = {
        s: tuple(replace(each, gradient=np.empty_like(each.gradient)) for each in tables)
        for s, tables in parts.rows.items()
    }
    return Parts(dense, rows)
