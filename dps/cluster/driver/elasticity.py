"""How servers are added and removed, on the driver's side.

`scale` and `drain` ask the coordinator to move replicas of shards, states and mail while the
training continues. A node that has to leave is drained as soon as there is room for what it holds;
its evaluator moves to another node, and its workers see `leaving`. Then the node ends by itself
(`dps.cluster.node.member`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.cluster.driver.news import News
from dps.cluster.driver.shard_hosts import ShardHosts
from dps.cluster.names import HOSTING, topic
from dps.cluster.node.logs import is_logged
from dps.cluster.platform import platform_of, weakly
from dps.core.ranges import shown
from dps.errors import CapacityError, ConfigurationError, NotServing, ShardUnavailable
from dps.events import Event, NodeDrained, NodeLeaving, NodeLeft, Sink, log
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import Drain, Scale, Table
from dps.protocol.tasks import Tasks
from dps.recovery.strategy import as_servers

if TYPE_CHECKING:
    import distributed

    from dps.cluster.names import Node

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
# Over as soon as another node has joined, or a shard has been restored.
PASSING = (CapacityError, NotServing, ShardUnavailable)


class Elasticity:
    """Scales a group, and empties nodes. Used from the client's event loop.

    Parameters
    ----------
    sink
        Called with the events of nodes that leave; None: events are not recorded.
    news
        Receives what cannot be done.

    Attributes
    ----------
    leaving
        The names of all nodes that had to leave.
    """

    def __init__(
        self, client: distributed.Client, hosts: ShardHosts, sink: Sink | None, news: News
    ) -> None:
        self.leaving: set[str] = set()
        self._client = client
        self._hosts = hosts
        self._sink = sink
        self._clock = platform_of(client).clock
        self._topic = topic("leaving", hosts.group.name)
        self._departing: dict[str, list[Node]] = {}
        self._emptying = Tasks(partial(news.failed, "a node that is to leave was not emptied"))

    def open(self, router: Router) -> None:
        """Begin to listen to the nodes."""
        self._router = router
        self._client.subscribe_topic(self._topic, weakly(self._heard))

    async def close(self) -> None:
        """Stop listening, and moving things."""
        self._client.unsubscribe_topic(self._topic)
        await self._emptying.close()

    async def scale(self, servers: int) -> None:
        """Hold the shards on this many nodes: see `ParameterServer.scale`."""
        group = self._hosts.group
        servers = as_servers(servers, len(group.layout.shards), group.recovery)
        # Nodes that join a cluster without roles become servers as far as there are too few.
        self._hosts.group = replace(group, servers=servers)
        await self._router.ask(Scale(servers))
        await self._until(
            lambda table: table.complete and not table.leaving, f"servers={servers}: shards"
        )

    async def drain(self, node: str) -> None:
        """Move everything away from a node: see `ParameterServer.drain`."""
        hosts = {hosted.node.name: hosted for hosted in self._hosts.hosts}
        hosted = hosts.get(node) if isinstance(node, str) else None
        if hosted is None:
            raise ConfigurationError(
                f"there is no node {shown(node)} that holds shards or states; there are: "
                f"{', '.join(sorted(hosts))}"
            )
        host = hosted.endpoint
        await self._router.ask(Drain(host))
        await self._until(lambda table: host not in table.leaving, f"{node}: what it holds")
        await self._hosts.release(hosted)

    async def _until(self, holds: Callable[[Table], bool], what: str) -> None:
        limit = self._hosts.group.timings.unavailable
        try:
            async with asyncio.timeout(limit):
                table = await self._router.fetch()
                while not holds(table):
                    table = await self._router.newer(table.version)
        except TimeoutError:
            raise ShardUnavailable(
                f"{what} could not be moved within {limit:g} s; they will be when what is in the "
                "way is over: a node that does not answer, or too few nodes"
            ) from None

    async def _heard(self, event: tuple[float, Any]) -> None:
        address, report = str(event[1]["address"]), str(event[1]["what"])
        if report == "left":
            for node in self._departing.pop(address, []):
                self._emit(NodeLeft(self._clock.now(), node.name))
        elif address not in self._departing:
            here = [node for node in self._hosts.nodes if node.address == address]
            self._departing[address] = here
            self.leaving |= {node.name for node in here}
            for node in here:
                self._emit(NodeLeaving(self._clock.now(), node.name, node.role, report))
            self._emptying.start(self._empty(address, here))

    async def _empty(self, address: str, nodes: list[Node]) -> None:
        began = self._clock.monotonic()
        await self._hosts.close_to_workers(address)
        for node in nodes:
            if node.role in HOSTING and await self._drained(node):
                seconds = self._clock.monotonic() - began
                self._emit(NodeDrained(self._clock.now(), node.name, seconds))

    async def _drained(self, node: Node) -> bool:
        """Drain a node, however long it takes until there is room for what it holds."""
        while not any(hosted.node == node for hosted in self._hosts.hosts):
            await asyncio.sleep(AGAIN_SECONDS)  # its host is being made
        times = 0
        while True:
            try:
                await self.drain(node.name)
                return True
            except PASSING as error:
                times += 1
                if is_logged(times):
                    logger.info("%s is to leave, and waits: %s", node.name, str(error))
                await asyncio.sleep(AGAIN_SECONDS)
            except ConfigurationError as error:
                logger.warning("%s is to leave, but cannot be drained: %s", node.name, error)
                return False

    def _emit(self, event: Event) -> None:
        log(event, self._hosts.group.labels)
        if self._sink is not None:
            self._sink(event)
