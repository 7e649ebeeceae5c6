"""How nodes leave, on the driver's side: what is on a node that is to leave is moved away.

Replicas of shards, states and mail go to other nodes while the training goes on (`drain`), as soon
as there is room for them; an evaluator goes on elsewhere; workers see `leaving`, and are given
nothing more there. Then the node ends by itself (`dps.cluster.node.shutdown`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.cluster.driver.news import News
from dps.cluster.names import HOSTING
from dps.cluster.node.logs import is_told
from dps.cluster.node.shutdown import leaving_topic
from dps.cluster.node.weak import weakly
from dps.cluster.platform import platform_of
from dps.errors import CapacityError, ConfigurationError, NotServing, ShardUnavailable
from dps.events import Event, NodeDrained, NodeLeaving, NodeLeft, Sink, log
from dps.protocol.tasks import Tasks

if TYPE_CHECKING:
    import distributed

    from dps.cluster.driver.shard_hosts import ShardHosts
    from dps.cluster.names import Node

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
# What is over as soon as another node has joined, or a shard has been restored.
PASSING = (CapacityError, NotServing, ShardUnavailable)


class Drainer:
    """Empties nodes that are told to leave. Used from the client's event loop.

    Parameters
    ----------
    drain
        Moves away what a node of this name holds.
    sink
        Called with the events of nodes that leave; None: nobody wants them.
    news
        Told of a node that cannot be emptied.

    Attributes
    ----------
    names
        The names of all nodes that were told to leave.
    """

    def __init__(
        self,
        client: distributed.Client,
        hosting: ShardHosts,
        drain: Callable[[str], Awaitable[None]],
        sink: Sink | None,
        news: News,
    ) -> None:
        self._client = client
        self._shard_hosts = hosting
        self._drain = drain
        self._sink = sink
        self._clock = platform_of(client).clock
        self._leaving: dict[str, list[Node]] = {}
        self.names: set[str] = set()
        self._emptying = Tasks(partial(news.failed, "a node that is to leave was not emptied"))

    @property
    def _topic(self) -> str:
        return leaving_topic(self._shard_hosts.group.name)

    def open(self) -> None:
        """Begin to listen to the nodes."""
        self._client.subscribe_topic(self._topic, weakly(self._told))

    async def close(self) -> None:
        """Stop listening, and moving things."""
        self._client.unsubscribe_topic(self._topic)
        await self._emptying.close()

    async def _told(self, event: tuple[float, Any]) -> None:
        address, what = str(event[1]["address"]), str(event[1]["what"])
        if what == "left":
            for node in self._leaving.pop(address, []):
                self._emit(NodeLeft(self._clock.now(), node.name))
        elif address not in self._leaving:
            here = [node for node in self._shard_hosts.nodes if node.address == address]
            self._leaving[address] = here
            self.names |= {node.name for node in here}
            for node in here:
                self._emit(NodeLeaving(self._clock.now(), node.name, node.role, what))
            self._emptying.start(self._empty(address, here))

    async def _empty(self, address: str, nodes: list[Node]) -> None:
        began = self._clock.monotonic()
        await self._shard_hosts.close_to_workers(address)
        for node in nodes:
            if node.role in HOSTING and await self._drained(node):
                seconds = self._clock.monotonic() - began
                self._emit(NodeDrained(self._clock.now(), node.name, seconds))

    async def _drained(self, node: Node) -> bool:
        """Drain a node, however long it takes until there is room for what it has."""
        while not any(hosted.node == node for hosted in self._shard_hosts.hosts):
            await asyncio.sleep(AGAIN_SECONDS)  # its host is being made
        times = 0
        while True:
            try:
                await self._drain(node.name)
                return True
            except PASSING as error:
                times += 1
                if is_told(times):
                    logger.info("%s is to leave, and waits: %s", node.name, str(error))
                await asyncio.sleep(AGAIN_SECONDS)
            except ConfigurationError as error:
                logger.warning("%s is to leave, but cannot be drained: %s", node.name, error)
                return False

    def _emit(self, event: Event) -> None:
        log(event, self._shard_hosts.group.labels)
        if self._sink is not None:
            self._sink(event)
