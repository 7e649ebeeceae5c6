"""Owns reading rows of sparse tables: what is asked of a shard, and how a replica answers it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.core.sparse import SparseSpec
from dps.core.tables import SparseTable, table_of
from dps.protocol.offload import offload
from dps.protocol.wire import message


@message
@dataclass(frozen=True, slots=True)
class PullRows:
    """Read rows of a table by their keys, int64 and sorted; else like `Pull`. Reply: RowsRead."""

    shard: int
    epoch: int
    worker: str
    incarnation: int
    seen: int
    patience: float
    table: str
    keys: np.ndarray


@message
@dataclass(frozen=True, slots=True)
class PullRange:
    """Read the rows that exist with keys from `start` to below `stop`; else like `PullRows`."""

    shard: int
    epoch: int
    worker: str
    incarnation: int
    seen: int
    patience: float
    table: str
    start: int
    stop: int


RowsAsked = PullRows | PullRange


@message
@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows of a table as they are at a shard's `version`, read at `at` (seconds since the epoch).

    The keys are those that were asked for, and not sent back, or those in the range, sorted.
    """

    version: int
    at: float
    keys: np.ndarray | None
    values: np.ndarray


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
