"""Going on from checkpoints with another number of shards than wrote them.

Weights, optimizer state and rows of tables are put together from all shards and dealt out anew. A
shard's numbers (version, steps, how far each worker is) cannot be: each new shard has those of the
old one that lacks most updates, as the whole model has no more than that for certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from dps.core.blocks import Layout
from dps.core.rules.rule import by_rows, slots_by_name
from dps.core.shard import ShardState
from dps.core.tables.key_routing import dealt_out
from dps.core.tables.table import Level, merged
from dps.recovery.manifest import Saved


def resharded(saved: Saved, shards: int) -> Saved:
    """Return what was saved, on so many shards.

    Raises
    ------
    ConfigurationError
        The parameters cannot be divided into so many.
    """
    run, states = saved.run, saved.states
    names = run.rule.slots
    values = _whole(run.layout, [state.values for state in states])
    slots = {name: _whole(run.layout, [state.slots[name] for state in states]) for name in names}
    tables = run.layout.tables
    layout = Layout.of(values, shards, whole_rows=by_rows(run.rule), tables=tables)
    rows = dealt_out(layout, _rows(states), slots_by_name(run.rule))
    least = min(states, key=lambda state: state.version)
    made = tuple(
        replace(
            least,
            values=layout.gather(shard, values)[0].copy(),
            slots={name: layout.gather(shard, slots[name])[0].copy() for name in names},
            tables=rows[shard],
            results={},
        )
        for shard in range(shards)
    )
    return Saved(replace(run, layout=layout), made, saved.refused)


def _whole(layout: Layout, buffers: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose parts lie in these buffers, one for each shard."""
    return layout.scatter(dict(enumerate(buffers)))


def _rows(states: Sequence[ShardState]) -> dict[str, Level]:
    """The rows of each table, from all shards."""
    parts: dict[str, list[Level]] = {}
    for state in states:
        for name, table in state.tables.items():
            if (level := table.compacted()) is not None:
                parts.setdefault(name, []).append(level)
    return {name: reduce(merged, levels) for name, levels in parts.items()}
