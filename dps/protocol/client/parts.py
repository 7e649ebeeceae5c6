"""What an update carries, checked and taken apart: its part for each shard.

That goes through all of the gradients, so a worker does it in the training's own thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dps.core.blocks import Arrays, Gathered, Layout
from dps.core.flat import Empty
from dps.core.tables.key_routing import Gradients, dealt
from dps.core.tables.row_gradients import Rows
from dps.protocol.executor import INLINE_BYTES


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


def parts_of(
    layout: Layout, gradients: Arrays, rows: Gradients, empty: Empty, values: bool
) -> Parts:
    """Check gradients and take them apart; look at their values only if `values`.

    Small ones may stay where they are. `empty` makes the memory for large ones, which is read-only
    afterwards, so that it can be sent as it lies.

    Raises
    ------
    ShapeMismatch, NonFiniteGradient
        They do not fit, or hold NaN or infinity.
    """
    layout.check(gradients, values)
    large = sum(array.nbytes for array in gradients.values()) >= INLINE_BYTES
    made = empty if large else np.empty
    dense = {shard: layout.gather(shard, gradients, made) for shard in layout.shards_of(gradients)}
    for buffer, _ in dense.values() if large else ():
        buffer.flags.writeable = False
    return Parts(dense, dealt(layout, rows, values))
