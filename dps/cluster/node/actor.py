"""The Dask actor that hosts shards, or the state store, on one node.

Its methods are coroutines, so Dask runs them on the node's event loop; steps of the update rule on
large shards go to threads (`dps.protocol.executor`), so that heartbeats are not held up.
"""

from __future__ import annotations

import numpy as np

from dps.cluster.node.member import Member
from dps.cluster.node.metrics import publish
from dps.cluster.transport.calls import Meter, answer
from dps.core.shard import ShardState
from dps.protocol import wire
from dps.protocol.executor import Cores
from dps.protocol.group import Group
from dps.protocol.server.node import ServerNode
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint


class HostActor:
    """A `ShardServer` as a Dask actor; made by the driver, called by `ClusterTransport`."""

    def __init__(self, group: Group, node: str, role: str, key: str) -> None:
        self._group = group
        self._key = key
        self._finished = False
        self._member = member = Member(group, node, role, Meter())
        self._links, self._meter = member.links, member.meter
        self._cores = Cores()
        server_node = ServerNode(
            group=group,
            name=node,
            me=Endpoint(member.dask_worker.address, key),
            transport=member.transport,
            clock=member.clock,
            emit=member.recorder,
            each=self._cores.each,
            watched=lambda: member.presence.watched,
        )
        self._host = ShardServer(server_node)
        member.stored = lambda: self._host.stored_bytes
        labels = {**group.labels, "group": group.name, "node": node}
        self._withdraw_metrics = publish(member.dask_worker, labels, self._host.figures)
        member.dask_worker.loop.add_callback(self._start)

    async def handle(self, link: str, *frames: np.ndarray) -> wire.Frames:
        """Carry out one message; returns the frames of its reply, which may carry an error."""
        if self._links.disturbed:
            await self._links.passage("in")
        reply = await answer(self._host.handle, self._meter, link, list(frames))
        if self._links.disturbed:
            await self._links.passage("out")
        return reply

    def states(self) -> dict[int, ShardState]:
        """Return the state of each replica on this node, for checks."""
        return self._host.states()

    async def finish(self) -> None:
        """Stop serving and send the last events; the actor is of no use afterwards."""
        if self._finished:
            return
        self._finished = True
        self._withdraw_metrics()
        await self._member.tasks.close()
        await self._host.close()
        self._cores.close()
        self._member.port.withdraw(self._key)
        await self._member.exit()

    def _start(self) -> None:
        self._member.enter()
        self._member.port.serve(self._key, self.handle)
        self._member.tasks.start(self._begin())
        self._member.finish_when_released(self._key, self.finish)
        if self._group.recorded:
            self._member.record(self._host.flush)

    async def _begin(self) -> None:
        await self._member.presence.registered()
        self._host.start()
