"""A member of a group on a node: what every actor and worker of a group needs from its process."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import get_worker

from dps.cluster.liveness import presence_of
from dps.cluster.names import KEY_PREFIX
from dps.cluster.node.recorder import Recorder, sample
from dps.cluster.node.shutdown import leave_of
from dps.cluster.platform import keep_memory, platform_of
from dps.cluster.transport.calls import ClusterTransport, Meter, links_of
from dps.cluster.transport.port import port_of
from dps.events import Connected, NodeJoined, ResourceSampled
from dps.protocol.tasks import Tasks, task_failed

if TYPE_CHECKING:
    import distributed

    from dps.protocol.group import Group

T = TypeVar("T")
LOOK_SECONDS = 0.5


class Member:
    """The transport, records and background tasks of one actor or worker.

    It is made in any thread of the node; its methods but `begin` belong to the node's event loop.
    """

    def __init__(self, group: Group, node: str, role: str, meter: Meter) -> None:
        self.dask_worker = get_worker()
        self.platform = platform_of(self.dask_worker)
        keep_memory(self.platform)
        self.clock = self.platform.clock
        self.node = node
        self.meter = meter
        self.recorder = Recorder(group, self.dask_worker.log_event)
        self.presence = presence_of(self.dask_worker)
        self.port = port_of(self.dask_worker)
        self.links = links_of(self.dask_worker)
        self.tasks = Tasks(lambda error: self.recorder(task_failed(self.clock, node, error)))
        self.stored: Callable[[], int] = lambda: 0  # the bytes that it stores for others
        self.flush: Callable[[], None] = lambda: None
        self._role = role
        self._group = group
        self.transport = ClusterTransport(
            self.dask_worker.rpc,
            meter,
            self.links,
            self.port if group.transport != "dask" else None,
            group.transport,
            lambda *peer: self.recorder(Connected(self.clock.now(), node, *peer)),
        )

    def begin(self, request: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the node's event loop; any thread may wait for the future."""
        return self.platform.begin(request, self.dask_worker.loop.asyncio_loop)

    def enter(self) -> None:
        """Use the node until `exit`: it is watched, and does not end, before that."""
        leave_of(self.dask_worker).enter(self._group.name)
        self.presence.enter(self._group.name)
        self.port.enter()
        process = self.platform.pid, self.platform.host, self.platform.started
        self.recorder(NodeJoined(self.clock.now(), self.node, self._role, *process))

    def record(self, flush: Callable[[], None]) -> None:
        """Send recorded events every `Timings.flush` seconds, after a call of `flush`."""
        every, self.flush = self._group.timings.flush, flush
        self.tasks.keep(partial(self.recorder.send_forever, every, self.measure, flush), every)

    def measure(self) -> ResourceSampled:
        """Measure what the process has used."""
        return sample(self.node, self._role, self.meter, self.platform, self.stored())

    async def exit(self) -> None:
        """End the background tasks, send the last events and stop using the node."""
        await self.tasks.close()
        self.flush()
        self.recorder(self.measure())
        self.recorder.send()
        self.port.exit()
        self.presence.exit(self._group.name)
        leave_of(self.dask_worker).exit(self._group.name)

    async def finish_when_released(self, key: str, finish: Callable[[], Awaitable[None]]) -> None:
        """Make an actor finish when no client holds its future, as when its driver was killed."""
        while key in self.dask_worker.state.tasks:
            await asyncio.sleep(LOOK_SECONDS)
        await finish()


# -- what a killed driver leaves on a Dask worker that outlives it ---------------------------------
# Its group ends by itself: the coordinator closes it, actors finish when they are released, and
# training functions with their next request. The next user of the Dask worker waits for that.


async def occupied(dask_worker: distributed.Worker) -> bool:
    """Whether anything of dps still runs on a Dask worker."""
    return any(str(key).startswith(KEY_PREFIX) for key in dask_worker.state.tasks)


async def tidy(dask_worker: distributed.Worker) -> None:
    """Revert faults that were never taken back: disturbed links, and no space for files."""
    links_of(dask_worker).lift_all()
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
