"""The state of the groups of a scheduler, for observers outside such as `dps top`.

Looking changes nothing: the coordinator reports what it knows, and the head of each shard is asked
once per look, for a second at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from distributed import Scheduler

from dps.cluster.node.recorder import topic
from dps.cluster.transport.calls import COORDINATOR_PREFIX
from dps.core.functions import CALLS
from dps.errors import DpsError
from dps.observe.views import Listing, ShardView, TrainingView, WorkerView
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.group import Group
from dps.protocol.messages import Describe, Description, GetTable, Table, View
from dps.protocol.transport import Transport

LOOK_SECONDS = 1.0  # a slower shard is shown without its version
RECENT = 10  # events that are kept of each group
BATCHES = 200  # of the last reports of workers, at most, that are searched


class _OfGroup(Protocol):
    """A plugin of a group, `dps.cluster.scheduler.plugin.CoordinatorPlugin`."""

    async def overview(self) -> TrainingView: ...


async def overviews(dask_scheduler: Scheduler) -> list[TrainingView]:
    """Return the state of each group of a scheduler; `Client.run_on_scheduler` calls it."""
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
    recent: Iterable[tuple[float, str]],
) -> TrainingView:
    """Return the state of one group at a moment; rates take two of them (`Pace.rated`)."""
    table: Table = await coordinator.handle(GetTable(-1, 0.0))
    answers = await asyncio.gather(*(_described(view, transport) for view in table.views))
    node = coordinator.members.node
    shards = Listing(
        _shard(view, answer, [node(host) or host.address for host in view.chain], group.replicas)
        for view, answer in zip(table.views, answers, strict=True)
    )
    workers = _workers(group, coordinator, scheduler, [answer for answer in answers if answer])
    lost = sum(loss.updates for loss in coordinator.losses.found)
    happened = tuple(recent)
    return TrainingView(
        group.name, "running", now, None, None, shards, workers, lost, recent=happened
    )


# -- parts -----------------------------------------------------------------------------------------


async def _described(view: View, transport: Transport) -> Description | None:
    if not view.serving:
        return None
    try:
        answer: Description = await transport.call(
            view.chain[0], Describe(view.shard, view.epoch), LOOK_SECONDS
        )
    except (DpsError, TimeoutError):
        return None
    return answer


def _shard(view: View, answer: Description | None, nodes: list[str], wanted: int) -> ShardView:
    replicas = tuple(nodes) if view.serving else ()
    node, address = (replicas[0], view.chain[0].address) if replicas else ("", "")
    version, nbytes = (answer.version, answer.nbytes) if answer else (None, 0)
    shard = view.shard, node, replicas, version, view.epoch, nbytes, address, wanted
    return ShardView(*shard, staleness=staleness(answer))


def staleness(answer: Description | None) -> float | None:
    """Return the versions that the updates of a shard's head missed on average."""
    return answer.missed / answer.updates if answer and answer.updates else None


def _workers(
    group: Group, coordinator: Coordinator, scheduler: Scheduler, answers: list[Description]
) -> Listing[WorkerView]:
    applied = most(each.applied for each in answers)
    clocks = most(each.clocks for each in answers)
    losses = _last_losses(scheduler.get_events(topic(group.name)))
    return Listing(
        WorkerView(
            name,
            "running" if active else "ended",
            applied.get(name, 0),
            clocks.get(name),
            None,
            {"loss": losses[name]} if name in losses else {},
            str(scheduler.workers[address].name) if address in scheduler.workers else "",
        )
        for name, (address, active) in coordinator.workers.items()
    )


def most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest count of each worker over the shards; those of calls are left out."""
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            if not name.endswith(CALLS):
                found[name] = max(count, found.get(name, 0))
    return found


def _last_losses(batches: Any) -> dict[str, float]:
    """The last loss that each worker reported, of what the scheduler keeps."""
    found: dict[str, float] = {}
    for _, batch in reversed(batches[-BATCHES:]):
        for event in reversed(batch):
            if event["event"] == "Reported" and event["name"] == "loss" and event["values"]:
                found.setdefault(event["worker"], event["values"][-1])
    return found
