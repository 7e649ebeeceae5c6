"""Owns what a parameter server starts with: initial values, or what an earlier one has saved."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.cluster.choices import check_choices, check_tables, checked_recovery, shared_path
from dps.cluster.transport import COORDINATOR_PREFIX, SystemClock
from dps.core.blocks import Layout
from dps.core.consistency import Consistency
from dps.core.filters import Filter
from dps.core.rebalancing import as_servers
from dps.core.recovery import Checkpoint, Recovery
from dps.core.rules import UpdateRule, by_rows
from dps.core.shard import ShardState
from dps.core.sparse import SparseSpec
from dps.errors import ConfigurationError
from dps.protocol.compression import checked_filters
from dps.protocol.group import Group, Timings
from dps.protocol.storage.manifest import (
    Saved,
    about,
    describe,
    find_saved,
    must_be_known,
    write_run,
)
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed


@dataclass(frozen=True, slots=True)
class Start:
    """A group, its initial values by shard, or what it goes on from; and what is kept of it."""

    group: Group
    initial: tuple[np.ndarray, ...]
    saved: Saved | None
    about: Mapping[str, Any]

    @property
    def states(self) -> tuple[ShardState, ...]:
        """The state of each shard that was saved; none if it starts afresh."""
        return self.saved.states if self.saved is not None else ()

    async def leave_description(self) -> None:
        """Put beside the checkpoints what is needed to go on from them."""
        if isinstance(self.group.recovery.durability, Checkpoint):
            generation = self.saved.run.generation + 1 if self.saved is not None else 0
            run = describe(self.group, generation, SystemClock().now(), json.dumps(self.about))
            await asyncio.to_thread(write_run, run)


def afresh(
    client: distributed.Client,
    params: Mapping[str, np.ndarray],
    shards: int,
    optimizer: UpdateRule,
    consistency: Consistency,
    recovery: str | Recovery,
    timings: Timings,
    kept: Mapping[str, Any],
    tables: Sequence[SparseSpec] = (),
    filters: Mapping[str, Sequence[Filter]] | None = None,
    servers: int | None = None,
) -> Start:
    """Start from initial values; raises `ConfigurationError` if the choices cannot work."""
    name, coordinator = _place(client)
    check_choices(optimizer, consistency)
    chosen = checked_recovery(recovery)
    check_tables(tables, chosen)
    layout = Layout.of(params, shards, whole_rows=by_rows(optimizer), tables=tables)
    chains = checked_filters({} if filters is None else filters, layout.names, optimizer)
    if isinstance(chosen.durability, Checkpoint):
        must_be_known("optimizer", optimizer)
        must_be_known("filters", chains)
    if servers is not None:
        servers = as_servers(servers, len(layout.shards), chosen)
    initial = tuple(layout.gather(s, params)[0].copy() for s in range(len(layout.shards)))
    choices = optimizer, consistency, chosen, coordinator, timings
    group = Group(name, layout, *choices, filters=chains, servers=servers)
    return Start(group, initial, None, kept)


def from_path(client: distributed.Client, path: str, timings: Timings) -> Start:
    """Start from the newest checkpoints below a path; raises `StoreUnavailable` without any."""
    name, coordinator = _place(client)
    saved = find_saved(shared_path(path))
    run = saved.run
    group = Group(
        name,
        run.layout,
        run.rule,
        run.consistency,
        run.recovery,
        coordinator,
        timings,
        saved.incarnations,
        filters=run.filters,
        servers=run.servers,
    )
    return Start(group, (), saved, about(run))


def _place(client: distributed.Client) -> tuple[str, Endpoint]:
    """A name for the group, and where its coordinator will be."""
    if client.scheduler is None:
        raise ConfigurationError("the Dask client is closed; give one that is connected")
    name = uuid.uuid4().hex[:8]
    return name, Endpoint(client.scheduler.address, COORDINATOR_PREFIX + name)
