"""How it stands with the groups of a scheduler, for who looks at them from outside, as `dps top`.

Nothing of a training is changed or held up: the coordinator says what it knows, and the head of
each shard is asked as often as somebody looks, for a second at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributed import Scheduler

from dps.cluster.node.recorder import topic
from dps.cluster.transport.calls import COORDINATOR_PREFIX
from dps.errors import DpsError
from dps.events import (
    Detected,
    Event,
    Failover,
    LossReported,
    Moved,
    RolledBack,
    WorkerLeft,
)
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.functions import CALLS
from dps.protocol.group import Group
from dps.protocol.messages import Describe, Description, GetTable, Table, View
from dps.protocol.transport import Transport

LOOK_SECONDS = 1.0  # a shard that takes longer is shown without its version
RECENT = 50  # events that are kept of each group
BATCHES = 200  # of what workers have reported last, at most, that are looked through
# What the coordinator records of losses and of what is done about them.
NEWS = (Detected, Failover, LossReported, Moved, RolledBack, WorkerLeft)


@dataclass(frozen=True, slots=True)
class ShardState:
    """How it stands with a shard; None: it has not answered.

    Attributes
    ----------
    replicas
        Nodes, the head first; none if nobody serves it.
    updates, missed
        Updates that the head has applied since it came to its node, and the versions that these had
        missed in all.
    """

    shard: int
    epoch: int
    replicas: tuple[str, ...]
    version: int | None
    updates: int | None
    missed: int | None

    @property
    def status(self) -> str:
        """Whether it is "serving", "starting" (it never served until now) or "down"."""
        if self.replicas:
            return "serving"
        return "down" if self.epoch > 1 else "starting"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How it stands with a worker.

    Attributes
    ----------
    active
        Whether it takes part.
    clock
        Its clock, which the consistency model compares; None: no shard knows it.
    updates
        How many of its gradients are applied, on the shard that has most of them.
    loss
        The last that it has reported, if it reports any.
    """

    worker: str
    node: str
    active: bool
    clock: int | None
    updates: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A group at a moment `t`, by the scheduler's clock, in seconds since the Unix epoch.

    `lost` are the acknowledged updates that shards have lost; `recent` the last losses, moves and
    recoveries, oldest first.
    """

    group: str
    t: float
    shards: tuple[ShardState, ...]
    workers: tuple[WorkerState, ...]
    lost: int
    recent: tuple[Event, ...] = field(default=())


class _OfGroup(Protocol):
    """A plugin of a group, `dps.cluster.scheduler.plugin.CoordinatorPlugin`."""

    async def overview(self) -> GroupOverview: ...


async def overviews(dask_scheduler: Scheduler) -> list[GroupOverview]:
    """Return how it stands with each group of a scheduler; `Client.run_on_scheduler` calls it."""
    plugins: Iterable[_OfGroup] = [
        plugin
        for name, plugin in dask_scheduler.plugins.items()
        if name.startswith(COORDINATOR_PREFIX)
    ]
    return list(await asyncio.gather(*(plugin.overview() for plugin in plugins)))


async def overview_of(
    group: Group,
    coordinator: Coordinator,
    transport: Transport,
    scheduler: Scheduler,
    now: float,
    recent: Iterable[Event],
) -> GroupOverview:
    """Return how it stands with one group."""
    table: Table = await coordinator.handle(GetTable(-1, 0.0))
    found = await asyncio.gather(*(_described(view, transport) for view in table.views))
    node = coordinator.members.node
    shards = tuple(
        ShardState(
            view.shard,
            view.epoch,
            tuple(node(host) or host.address for host in view.chain) if view.serving else (),
            said.version if said else None,
            said.updates if said else None,
            said.missed if said else None,
        )
        for view, said in zip(table.views, found, strict=True)
    )
    lost = sum(loss.updates for loss in coordinator.losses.found)
    workers = _workers(group, coordinator, scheduler, [said for said in found if said])
    return GroupOverview(group.name, now, shards, workers, lost, tuple(recent))


def is_news(event: Event) -> bool:
    """Whether an event is kept for who looks: what was lost, and what was done about it."""
    if isinstance(event, WorkerLeft):
        return event.reason != "finished"
    return isinstance(event, NEWS)


# -- parts -----------------------------------------------------------------------------------------


async def _described(view: View, transport: Transport) -> Description | None:
    if not view.serving:
        return None
    try:
        said: Description = await transport.call(
            view.chain[0], Describe(view.shard, view.epoch), LOOK_SECONDS
        )
    except (DpsError, TimeoutError):
        return None
    return said


def _workers(
    group: Group, coordinator: Coordinator, scheduler: Scheduler, said: list[Description]
) -> tuple[WorkerState, ...]:
    applied = _most(each.applied for each in said)
    clocks = _most(each.clocks for each in said)
    losses = _last_losses(scheduler.get_events(topic(group.name)))
    return tuple(
        WorkerState(
            name,
            str(scheduler.workers[address].name) if address in scheduler.workers else "",
            active,
            clocks.get(name),
            applied.get(name, 0),
            losses.get(name),
        )
        for name, (address, active) in coordinator.workers.items()
    )


def _most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            if not name.endswith(CALLS):
                found[name] = max(count, found.get(name, 0))
    return found


def _last_losses(batches: Any) -> dict[str, float]:
    """The last loss that each worker has reported, of what the scheduler keeps."""
    found: dict[str, float] = {}
    for _, batch in reversed(batches[-BATCHES:]):
        for event in reversed(batch):
            if event["event"] == "Reported" and event["name"] == "loss" and event["values"]:
                found.setdefault(event["worker"], event["values"][-1])
    return found
