"""The counter workload's sparse table: rows that must say what the dense counters say.

Each shard holds a row for its counter and one for each cell, under keys that hash to it. An update
adds to them as it adds to the dense ones, so that a state in which the two differ is half of one.
"""

from __future__ import annotations

import numpy as np

from dps.core.blocks import Layout
from dps.core.shard import ShardState
from dps.core.tables.key_routing import asked
from dps.core.tables.spec import PARTITIONS, SparseSpec
from dps.core.tables.table import table_of
from dps.sim.violation import require

TABLE = SparseSpec("rows", 1, "float64")


def homes(shards: int) -> tuple[int, ...]:
    """The shard of each partition of keys."""
    return tuple(partition % shards for partition in range(PARTITIONS))


class RowKeys:
    """Under which keys the rows of each shard lie: its counter, then the cells."""

    def __init__(self, layout: Layout, cells: int) -> None:
        shards = len(layout.shards)
        enough = 4 * shards * (1 + cells) + 64
        found = asked(layout, TABLE.name, np.arange(enough)).keys
        self.of_shard = [found[shard][: 1 + cells] for shard in range(shards)]
        assert all(len(keys) == 1 + cells for keys in self.of_shard)
        self.all = np.concatenate(self.of_shard)

    def gradient(self, cell: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """What adds one to the counter and to a cell of every shard."""
        keys = np.concatenate([keys[[0, 1 + cell]] for keys in self.of_shard])
        return {TABLE.name: (keys, np.full((len(keys), 1), -1.0))}

    def by_shard(self, rows: np.ndarray) -> list[np.ndarray]:
        """The counter and cells of each shard, out of the rows of all keys."""
        cuts = np.cumsum([len(keys) for keys in self.of_shard])[:-1]
        return np.split(rows[:, 0], cuts)

    def cells(self, shard: int, state: ShardState) -> set[int]:
        """The cells whose updates are in the rows of a state."""
        rows = table_of(state.tables, TABLE.name).values(TABLE, self.of_shard[shard])[:, 0]
        return set(rows[1:].nonzero()[0].tolist())

    def check(
        self,
        what: str,
        shard: int,
        state: ShardState,
        dense: np.ndarray,
        in_parts: bool = False,
    ) -> None:
        """The rows in a state must be those of the updates that are in its weights.

        Where shards are restored `in_parts`, each may lack others.
        """
        table = table_of(state.tables, TABLE.name)
        rows = table.values(TABLE, self.of_shard[shard])[:, 0]
        if in_parts:
            twice = np.flatnonzero(rows[1:] > 1).tolist()
            require(not twice, "twice", f"{what}: applied to rows more than once: {twice}")
            return
        differ = np.flatnonzero(rows != dense).tolist()
        require(not differ, "rows", f"{what}: rows {differ} are not those of its updates")


def digest(state: ShardState) -> tuple[object, ...]:
    """What tells the rows of two states apart."""
    levels = ((name, table.compacted()) for name, table in sorted(state.tables.items()))
    return tuple((n, lv.keys.tobytes(), lv.values.tobytes()) for n, lv in levels if lv is not None)
