"""The coordinator of a group inside Dask's scheduler process, where lost nodes are known first."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any, get_args

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dps.cluster.heads import ask_head, shard_view
from dps.cluster.liveness import MonitorLinks
from dps.cluster.names import Topic, topic
from dps.cluster.node.logs import Recorder, logged, sample
from dps.cluster.platform import platform_of, weakly
from dps.cluster.transport.calls import (
    COORDINATOR_PREFIX,
    ClusterTransport,
    Meter,
    answer,
    frozen,
    thawed,
)
from dps.core.functions import most
from dps.events import Event, ResourceSampled
from dps.observe.views import Listing, TrainingView, WorkerView, sentence
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.group import Group
from dps.protocol.messages import CloseGroup, Description, GetTable, Table
from dps.protocol.transport import Endpoint

LOOK_SECONDS = 1.0  # a slower shard is shown without its version
RECENT = 10  # events that are kept of each group
BATCHES = 200  # of events, at most, that are searched for losses


class CoordinatorPlugin(SchedulerPlugin):
    """Runs a group's `Coordinator` in the scheduler and reports lost nodes to it."""

    idempotent = True
    _coordinator: Coordinator

    def __init__(self, group: Group, driver: str) -> None:
        self.name = COORDINATOR_PREFIX + group.name
        self._group = group
        self._driver = driver  # the id of a Dask client, with which the group ends

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to coordinate; called by Dask in the scheduler's event loop."""
        self._scheduler = scheduler
        self._meter = Meter()
        self._platform = platform_of(scheduler)
        self._recorder = Recorder(self._group, scheduler.log_event)
        transport = ClusterTransport(scheduler.rpc, self._meter)
        # The traffic of observers is not counted as that of the group.
        self._looks = ClusterTransport(scheduler.rpc, Meter())
        self._recent: deque[tuple[float, str]] = deque(maxlen=RECENT)
        # The coordinator is made below.
        listeners = (
            lambda seen: self._coordinator.handle(seen),
            lambda error: self._coordinator.failed(error),
        )
        self._monitors = self._platform.monitors(*listeners) or MonitorLinks(*listeners)
        sink = logged(self._group, self._note)
        self._coordinator = Coordinator(
            self._group, transport, self._platform.clock, sink, self._monitors
        )
        if self._group.recorded:
            every = self._group.timings.flush
            record = partial(self._recorder.send_forever, every, self._sample)
            self._coordinator.tasks.keep(record, every)
        scheduler.handlers[self.name] = weakly(self.handle)

    async def close(self) -> None:
        """Stop coordinating; called by `take_out`, or by Dask when the scheduler ends."""
        self._scheduler.handlers.pop(self.name, None)
        await self._monitors.close()
        await self._coordinator.tasks.close()
        self._recorder(self._sample())
        self._recorder.send()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Report a new node to the driver, which decides what the node is for."""
        scheduler.log_event(topic("nodes", self._group.name), worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Report a lost node to the coordinator and to the driver."""
        report = {"address": worker, "what": "lost"}
        scheduler.log_event(topic("leaving", self._group.name), report)
        self._coordinator.tasks.start(self._coordinator.lose(worker, "scheduler"))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Close the group if its driver has ended without closing it."""
        if client == self._driver:
            self._coordinator.tasks.start(self._end())

    async def handle(self, link: str, frames: list[bytes]) -> list[bytes]:
        """Carry out one message to the coordinator."""
        return frozen(await answer(self._coordinator.handle, self._meter, link, thawed(frames)))

    async def overview(self) -> TrainingView:
        """Return the state of the group, for observers; rates follow from two overviews."""
        table: Table = await self._coordinator.handle(GetTable(-1, 0.0))
        asked = (ask_head(view, self._looks, LOOK_SECONDS) for view in table.views)
        answers = await asyncio.gather(*asked)
        shards = map(partial(shard_view, self._group, name_of=self._name_of), table.views, answers)
        return TrainingView(
            self._group.name,
            "running",
            self._platform.clock.now(),
            None,
            shards=Listing(shards),
            workers=self._workers([answer for answer in answers if answer]),
            lost=sum(loss.updates for loss in self._coordinator.losses.reported),
            recent=tuple(self._recent),
        )

    def _name_of(self, host: Endpoint) -> str:
        return self._coordinator.members.node(host) or host.address

    def _workers(self, answers: list[Description]) -> Listing[WorkerView]:
        applied = most(each.applied for each in answers)
        clocks = most(each.clocks for each in answers)
        losses = _last_losses(self._scheduler.get_events(topic("events", self._group.name)))
        nodes = self._scheduler.workers
        return Listing(
            WorkerView(
                name,
                "running" if active else "ended",
                applied.get(name, 0),
                clocks.get(name),
                None,
                {"loss": losses[name]} if name in losses else {},
                str(nodes[address].name) if address in nodes else "",
            )
            for name, (address, active) in self._coordinator.workers.places.items()
        )

    def _note(self, event: Event) -> None:
        if text := sentence(event):
            self._recent.append((event.t, text))
        self._recorder(event)

    async def _end(self) -> None:
        await self._coordinator.handle(CloseGroup())
        await asyncio.sleep(self._group.timings.call)  # until its workers know
        await take_out(self.name, self._scheduler)
        await forget(self._group.name, self._scheduler)

    def _sample(self) -> ResourceSampled:
        return sample("scheduler", "scheduler", self._meter, self._platform)


# -- what clients run in the scheduler -------------------------------------------------------------


async def overviews(dask_scheduler: Scheduler) -> list[TrainingView]:
    """Return the state of each group of a scheduler, as for `dps top`. This changes nothing."""
    plugins = [p for p in dask_scheduler.plugins.values() if isinstance(p, CoordinatorPlugin)]
    return list(await asyncio.gather(*(plugin.overview() for plugin in plugins)))


async def widen(places: dict[str, list[str]], dask_scheduler: Scheduler) -> None:
    """Allow tasks, by their keys, to run on these nodes, and start those that wait for a node."""
    known = {key: nodes for key, nodes in places.items() if nodes and key in dask_scheduler.tasks}
    dask_scheduler.set_restrictions(known)
    waiting = [key for key in known if dask_scheduler.tasks[key].state == "no-worker"]
    dask_scheduler.transitions(dict.fromkeys(waiting, "processing"), stimulus_id="dps-widen")


async def forget(group: str, dask_scheduler: Scheduler) -> None:
    """Drop the events of a group that the scheduler keeps: Dask alone would never do so."""
    for kind in get_args(Topic):
        dask_scheduler._broker._topics.pop(topic(kind, group), None)


async def take_out(name: str, dask_scheduler: Scheduler) -> None:
    """Close a coordinator and unregister its plugin; Dask alone would leave it running."""
    plugin = dask_scheduler.plugins.get(name)
    if plugin is not None:
        await plugin.close()
        dask_scheduler.remove_plugin(name)


def _last_losses(batches: Any) -> dict[str, float]:
    """Return the last loss that each worker reported, from the batches that Dask keeps."""
    losses: dict[str, float] = {}
    for _, batch in reversed(batches[-BATCHES:]):
        for event in reversed(batch):
            if event["event"] == "Reported" and event["name"] == "loss" and event["values"]:
                losses.setdefault(event["worker"], event["values"][-1])
    return losses
