"""The coordinator's place: inside Dask's scheduler process, where losses are known first."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dps.cluster.node.logs import drop_topic, logged
from dps.cluster.node.recorder import keep_recording, recorder_of, sample, topic
from dps.cluster.node.shutdown import leaving_topic
from dps.cluster.node.weak import weakly
from dps.cluster.platform import platform_of
from dps.cluster.scheduler.monitors import MonitorLinks
from dps.cluster.scheduler.overview import RECENT, overview_of
from dps.cluster.transport.calls import (
    COORDINATOR_PREFIX,
    ClusterTransport,
    Meter,
    answer,
    frozen,
    thawed,
)
from dps.events import Event, ResourceSampled
from dps.observe.sentences import sentence
from dps.observe.views import TrainingView
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.group import Group
from dps.protocol.messages import CloseGroup, Sighted


def node_topic(group: str) -> str:
    """The Dask topic on which addresses of nodes that join the cluster are sent."""
    return f"dps-nodes-{group}"


class CoordinatorPlugin(SchedulerPlugin):
    """Runs a group's `Coordinator` in the scheduler and tells it of nodes that are lost.

    Parameters
    ----------
    driver
        The id of the Dask client that the group belongs to, and ends with.
    """

    idempotent = True

    def __init__(self, group: Group, driver: str) -> None:
        self.name = COORDINATOR_PREFIX + group.name
        self._group = group
        self._driver = driver

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to coordinate; called by Dask in the scheduler's event loop."""
        self._scheduler = scheduler
        self._meter = Meter()
        self._platform = platform_of(scheduler)
        self._recorder = recorder_of(self._group, scheduler.log_event)
        self._transport = ClusterTransport(scheduler.rpc, self._meter)
        # What is sent for who looks from outside is none of what the group needs.
        self._looks = ClusterTransport(scheduler.rpc, Meter())
        self._recent: deque[tuple[float, str]] = deque(maxlen=RECENT)
        sink = logged(self._group, self._note)
        clock = self._platform.clock
        hear = self._sighted, self._failed
        self._monitors = self._platform.monitors(*hear) or MonitorLinks(*hear)
        means = self._transport, clock, sink, self._monitors
        self._coordinator = Coordinator(self._group, *means)
        every = self._group.timings.flush
        tasks = self._coordinator.tasks
        self._recording = keep_recording(tasks, self._recorder, every, self._sample)
        scheduler.handlers[self.name] = weakly(self.handle)

    async def close(self) -> None:
        """Stop coordinating; called by `take_out`, or by Dask when the scheduler ends."""
        self._scheduler.handlers.pop(self.name, None)
        self._recording.cancel()
        await self._monitors.close()
        await self._coordinator.close()
        self._recorder(self._sample())
        self._recorder.send()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Tell the driver that there is a new node; it decides what the node is for."""
        scheduler.log_event(node_topic(self._group.name), worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Tell the coordinator that a node is gone."""
        self._coordinator.tasks.start(self._coordinator.lose(worker, "scheduler"))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Close the group if its driver is gone and has not done so."""
        if client == self._driver:
            self._coordinator.tasks.start(self._end())

    async def handle(self, link: str, frames: list[bytes]) -> list[bytes]:
        """Carry out one message for the coordinator; called by whoever calls the scheduler."""
        return frozen(await answer(self._coordinator.handle, self._meter, link, thawed(frames)))

    async def _sighted(self, seen: Sighted) -> None:
        await self._coordinator.handle(seen)

    def _failed(self, error: Exception) -> None:
        self._coordinator.failed(error)

    async def overview(self) -> TrainingView:
        """Return the state of the group, for observers outside."""
        return await overview_of(
            self._group,
            self._coordinator,
            self._looks,
            self._scheduler,
            self._platform.clock.now(),
            self._recent,
        )

    def _note(self, event: Event) -> None:
        if text := sentence(event):
            self._recent.append((event.t, text))
        self._recorder(event)

    async def _end(self) -> None:
        await self._coordinator.handle(CloseGroup())
        await asyncio.sleep(self._group.timings.call)  # until its workers have heard of it
        await take_out(self.name, self._scheduler)
        await forget(self._group.name, self._scheduler)

    def _sample(self) -> ResourceSampled:
        return sample("scheduler", "scheduler", self._meter, platform=self._platform)


async def widen(places: dict[str, list[str]], dask_scheduler: Scheduler) -> None:
    """Let tasks run on these nodes, by their keys; those start that waited for one of them."""
    known = {key: nodes for key, nodes in places.items() if nodes and key in dask_scheduler.tasks}
    dask_scheduler.set_restrictions(known)
    waiting = [key for key in known if dask_scheduler.tasks[key].state == "no-worker"]
    dask_scheduler.transitions(dict.fromkeys(waiting, "processing"), stimulus_id="dps-widen")


async def forget(group: str, dask_scheduler: Scheduler) -> None:
    """Drop what the scheduler keeps of a group's events: Dask alone would never do so."""
    for name in (topic(group), node_topic(group), leaving_topic(group), drop_topic(group)):
        dask_scheduler._broker._topics.pop(name, None)


async def take_out(name: str, dask_scheduler: Scheduler) -> None:
    """Close a coordinator and unregister its plugin; Dask alone would leave it running."""
    plugin = dask_scheduler.plugins.get(name)
    if plugin is not None:
        await plugin.close()
        dask_scheduler.remove_plugin(name)
