"""What the driver knows of an actor that it has made on a node."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dps.cluster.names import Node
from dps.protocol.messages import HostInfo
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed


@dataclass(frozen=True, slots=True)
class Hosted:
    """An actor that the driver made; the future keeps it alive."""

    node: Node
    endpoint: Endpoint
    future: Any

    @property
    def info(self) -> HostInfo:
        """What the coordinator is to know of a host."""
        node = self.node
        return HostInfo(self.endpoint, node.name, node.role, node.home, node.machine)

    @property
    def is_lost(self) -> bool:
        """Whether the node's process has ended, though another one may have its address."""
        return bool(self.future.status == "error")

    async def finish(self, client: distributed.Client, deadline: float) -> None:
        """Have the actor end, and its node forget it; one that was lost before has ended."""
        await self.end(client, deadline)
        self.release()

    async def end(self, client: distributed.Client, deadline: float) -> None:
        """Have the actor end; it is there, and refuses what it is asked for, until `release`."""
        await self.have(client, "finish", deadline)

    def release(self) -> None:
        """Have its node forget the actor: Dask logs an error for each request that comes later."""
        self.future.release()

    async def have(self, client: distributed.Client, function: str, deadline: float) -> None:
        """Have the actor do something, and wait for it; not if it is lost, nor for longer."""
        with suppress(OSError, TimeoutError, KeyError):
            async with asyncio.timeout(deadline):
                peer = client.rpc(self.endpoint.address)
                await peer.actor_execute(actor=self.endpoint.key, function=function, args=[])
