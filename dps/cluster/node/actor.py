"""The Dask actor that hosts shards, or the state store, on one node.

Its methods are coroutines, so Dask runs them on the node's event loop; steps of the update rule on
large shards go to threads (`dps.protocol.executor`), so that heartbeats are not held up.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from distributed import get_worker

from dps.cluster.node.cleanup import finish_when_let_go
from dps.cluster.node.connecting import transport_of
from dps.cluster.node.metrics import publish
from dps.cluster.node.presence import presence_of
from dps.cluster.node.recorder import (
    joined,
    keep_recording,
    recorded_tasks,
    recorder_of,
    sample,
)
from dps.cluster.node.shutdown import leave_of
from dps.cluster.platform import keep_memory, platform_of
from dps.cluster.transport.calls import Meter, answer
from dps.cluster.transport.links import links_of
from dps.cluster.transport.port import port_of
from dps.core.shard import ShardState
from dps.events import ResourceSampled
from dps.protocol import wire
from dps.protocol.executor import Cores
from dps.protocol.group import Group
from dps.protocol.server.node import ServerNode
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint


class HostActor:
    """A `ShardServer` as a Dask actor; made by the driver, called by `ClusterTransport`."""

    def __init__(self, group: Group, node: str, role: str, key: str) -> None:
        dask_worker = get_worker()
        self._platform = platform = platform_of(dask_worker)
        keep_memory(platform)
        clock = platform.clock
        self._dask_worker = dask_worker
        self._key = key
        self._finished = False
        self._node = node
        self._role = role
        self._flush_seconds = group.timings.flush
        self._meter = Meter()
        self._recorder = recorder_of(group, dask_worker.log_event)
        self._links = links_of(dask_worker)
        self._group = group.name
        transport = transport_of(dask_worker, group, node, self._meter, self._recorder)
        me = Endpoint(dask_worker.address, key)
        self._cores = Cores()
        presence = self._presence = presence_of(dask_worker)
        server_node = ServerNode(
            group=group,
            name=node,
            me=me,
            transport=transport,
            clock=clock,
            emit=self._recorder,
            each=self._cores.each,
            watched=lambda: presence.watched,
        )
        self._host = ShardServer(server_node)
        labels = {**group.labels, "group": group.name, "node": node}
        self._withdraw_metrics = publish(dask_worker, labels, self._host.figures)
        self._tasks = recorded_tasks(self._recorder, clock, node)
        self._recorder(joined(node, role, platform))
        dask_worker.loop.add_callback(self._start)

    async def handle(self, link: str, *frames: np.ndarray) -> wire.Frames:
        """Carry out one message; returns the frames of its reply, which may carry an error."""
        if self._links.disturbed:
            carry_out = partial(answer, self._host.handle, self._meter, link)
            return await self._links.carry_out(carry_out, list(frames))
        return await answer(self._host.handle, self._meter, link, list(frames))

    def states(self) -> dict[int, ShardState]:
        """The state of each replica on this node, for checks."""
        return self._host.states()

    async def finish(self) -> None:
        """Stop serving and send the last events; the actor is of no use afterwards."""
        if self._finished:
            return
        self._finished = True
        self._withdraw_metrics()
        await self._tasks.close()
        await self._host.close()
        self._cores.close()
        self._recorder(self._sample())
        self._recorder.send()
        port = port_of(self._dask_worker)
        port.withdraw(self._key)
        port.exit()
        self._presence.exit(self._group)
        leave_of(self._dask_worker).exit(self._group)

    def _start(self) -> None:
        leave_of(self._dask_worker).enter(self._group)
        self._presence.enter(self._group)
        port = port_of(self._dask_worker)
        port.enter()
        port.serve(self._key, self.handle)
        self._tasks.start(self._begin())
        self._tasks.start(finish_when_let_go(self._dask_worker, self._key, self.finish))
        every, host = self._flush_seconds, self._host
        keep_recording(self._tasks, self._recorder, every, self._sample, host.flush)

    async def _begin(self) -> None:
        await self._presence.registered()
        self._host.start()

    def _sample(self) -> ResourceSampled:
        stored = self._host.stored_bytes
        return sample(self._node, self._role, self._meter, stored, self._platform)
