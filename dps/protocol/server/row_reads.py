"""Reading rows of sparse tables: what is asked of a shard, and how a replica answers it."""

from __future__ import annotations

from functools import partial

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.core.tables.spec import SparseSpec
from dps.core.tables.table import SparseTable, table_of
from dps.protocol.executor import offload
from dps.protocol.group import Group
from dps.protocol.messages import (
    PullRows,
    RowsAsked,
    RowsRead,
    Weights,
)


async def read_rows(
    layout: ShardLayout, state: ShardState, asked: RowsAsked, at: float
) -> RowsRead:
    """Answer from a state, which is never changed, so that no push need wait."""
    spec = layout.table(asked.table)
    table = table_of(state.tables, asked.table)
    if isinstance(asked, PullRows):
        work = partial(table.values, spec, asked.keys)
        return RowsRead(state.version, at, None, await offload(work, _bytes_of(spec, asked.keys)))
    work_on_range = partial(_between, table, spec, asked.start, asked.stop)
    keys, values = await offload(work_on_range, table.nbytes)
    return RowsRead(state.version, at, keys, values)


def _bytes_of(spec: SparseSpec, keys: np.ndarray) -> int:
    return len(keys) * (spec.row_nbytes + keys.itemsize)


def _between(
    table: SparseTable, spec: SparseSpec, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    found = table.between(start, stop, spec)
    return found.keys, found.values


def weights(state: ShardState, epoch: int, at: float, slack: int, group: Group) -> Weights:
    """What a worker gets to read of a state, with what a copy has to be rebuilt from if need be."""
    metadata = group.recovery.durability.metadata(epoch, state)
    return Weights(state.version, at, slack, state.values, metadata)
