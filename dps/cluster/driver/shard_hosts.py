"""The nodes of a group: their roles, their hosts of shards, and how servers join and leave.

A node that has to leave is drained as soon as there is room for what it holds; its evaluator moves
to another node, and its workers see `leaving`. Then the node closes itself
(`dps.cluster.node.member`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.cluster.driver import roles
from dps.cluster.driver.actors import Evaluators, Hosted
from dps.cluster.driver.news import News
from dps.cluster.driver.setup import Options
from dps.cluster.names import HOSTING, Node, resource_in, topic
from dps.cluster.node.actor import HostActor
from dps.cluster.node.logs import is_logged
from dps.cluster.platform import platform_of, weakly
from dps.core.ranges import shown
from dps.errors import CapacityError, ConfigurationError, NotServing, ShardUnavailable
from dps.events import Event, NodeDrained, NodeLeaving, NodeLeft, log
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import AddHosts, Drain, HostInfo, Scale, Table
from dps.protocol.tasks import Tasks
from dps.recovery.strategy import as_servers

if TYPE_CHECKING:
    import distributed

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
# These errors end when another node has joined, or a shard has been restored.
PASSING = (CapacityError, NotServing, ShardUnavailable)


class ShardHosts:
    """The nodes of a group, and its actors on them. Used from the client's event loop."""

    def __init__(
        self,
        client: distributed.Client,
        router: Router,
        options: Options,
        news: News,
        on_adopted: Callable[[], Awaitable[None]],
    ) -> None:
        self.nodes: list[Node] = []
        self.leaving: set[str] = set()  # the names of nodes that leave or have left
        self.evaluators = Evaluators(client, router.group)
        self.router = router
        self._client = client
        self._group = router.group  # its number of servers decides the role of a new node
        self._seats = options.seats
        self._sink = options.on_event
        self._on_adopted = on_adopted  # called when a node has joined and has a role
        self._clock = platform_of(client).clock
        self._hosts: dict[str, Hosted] = {}
        self._departing: dict[str, list[Node]] = {}
        self._topics = topic("nodes", router.group.name), topic("leaving", router.group.name)
        self._adopting = Tasks(partial(news.failed, "a node that joined cannot be used"))
        self._emptying = Tasks(partial(news.failed, "a leaving node was not drained"))

    @property
    def for_workers(self) -> list[Node]:
        """The nodes that run training functions."""
        return [node for node in self.nodes if node.role == "worker"]

    @property
    def seated(self) -> list[str] | None:
        """The Dask workers that are nodes, if others may use the rest of the cluster; None: all."""
        return list(self._seats.specs) if self._seats is not None else None

    async def assign(self) -> None:
        """Give each node its role; raises `CapacityError` if there are too few."""
        workers = await self._workers()
        self._have_resources = any(resource_in(info) for info in workers.values())
        marked = self._marked(workers)
        self.nodes = roles.by_assignment(workers, self._group) if marked is None else marked
        roles.check(self.nodes, self._group)

    def open(self) -> None:
        """Listen to nodes that join and leave."""
        for name, handler in zip(self._topics, (self._joined, self._reported), strict=True):
            self._client.subscribe_topic(name, weakly(handler))
        if self._seats is not None:
            self._seats.listeners.append(self._seated)
            for address in set(self._seats.specs) - {node.address for node in self.nodes}:
                self._seated(address)  # it was seated after `assign`

    async def make_hosts(self, nodes: Sequence[Node]) -> None:
        """Make the host actors on those nodes that need one, and report them to the coordinator."""
        hosting = [node for node in nodes if node.role in HOSTING]
        if hosting:
            made = await asyncio.gather(*map(self._make_host, hosting))
            infos = tuple(
                HostInfo(each.endpoint, node.name, node.role, node.home, node.machine)
                for node, each in zip(hosting, made, strict=True)
            )
            try:
                await self.router.ask(AddHosts(infos))
            finally:
                self._hosts |= {hosted.endpoint.address: hosted for hosted in made}

    async def stop_moving(self) -> None:
        """Ignore nodes that leave from now on, and stop moving anything."""
        try:
            self._client.unsubscribe_topic(self._topics[1])
        finally:  # without a scheduler, unsubscribing fails
            await self._emptying.close()

    async def stop(self) -> None:
        """Ignore nodes that join from now on."""
        if self._seats is not None and self._seated in self._seats.listeners:
            self._seats.listeners.remove(self._seated)
        try:
            self._client.unsubscribe_topic(self._topics[0])
        finally:
            await self._adopting.close()

    async def finish_evaluators(self) -> None:
        """Make the evaluators score once more, and end."""
        alive = await self._workers()
        nodes = [node for node in self.nodes if node.address in alive]
        await self.evaluators.finish(nodes, alive)

    async def finish_hosts(self) -> None:
        """End the hosts; the group is of no use afterwards."""
        alive = await self._workers()
        present = [hosted for address, hosted in self._hosts.items() if address in alive]
        await asyncio.gather(*(hosted.call("finish") for hosted in present))

    def release_hosts(self) -> None:
        """Release the hosts, when no process sends them requests any more."""
        for hosted in self._hosts.values():
            hosted.future.release()
        self._hosts.clear()

    # -- nodes that join -----------------------------------------------------------------------

    def _seated(self, address: str) -> None:  # called in any thread
        self._client.loop.add_callback(self._joined, (0.0, address))

    async def _joined(self, event: tuple[float, Any]) -> None:
        self._adopting.start(self._adopt(str(event[1])))

    async def _make_host(self, node: Node) -> Hosted:
        hosted = Hosted.start(self._client, self._group, node, HostActor, node.name, node.role)
        await hosted.future
        return hosted

    async def _adopt(self, address: str) -> None:
        workers = await self._workers()
        if address not in workers or self._is_known(address):
            return
        self.nodes = [n for n in self.nodes if n.address in workers and n.address != address]
        marked = self._marked({address: workers[address]})
        if marked is None:
            marked = [roles.newcomer(address, workers, self.nodes, self._group)]
        self.nodes += marked
        await self._on_adopted()
        await self.make_hosts([node for node in self.nodes if node.address == address])
        self.evaluators.look(workers)
        await self.evaluators.place(self.nodes)

    def _marked(self, workers: roles.Workers) -> list[Node] | None:
        """Return the nodes by their seats or resources; None: roles are assigned."""
        is_marked = self._have_resources or self._seats is not None
        return roles.by_resources(workers, self._seats) if is_marked else None

    def _is_known(self, address: str) -> bool:
        here = [node.name for node in self.nodes if node.address == address]
        if address in self._hosts and self._hosts[address].is_lost:
            return False  # a nanny has restarted the node at the same address
        seat = self._seats.specs.get(address) if self._seats is not None else None
        return bool(here) and (seat is None or seat.name in here)

    async def _workers(self) -> roles.Workers:
        workers: roles.Workers
        workers = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        return workers

    # -- servers that are added and removed ----------------------------------------------------

    async def scale(self, servers: int) -> None:
        """Hold the shards on this many nodes: see `ParameterServer.scale`."""
        group = self._group
        servers = as_servers(servers, len(group.layout.shards), group.recovery)
        # Nodes that join a cluster without roles become servers while there are too few.
        self._group = replace(group, servers=servers)
        await self.router.ask(Scale(servers))
        await self._until(
            lambda table: table.complete and not table.leaving, f"servers={servers}: shards"
        )

    async def drain(self, node: str) -> None:
        """Move everything away from a node: see `ParameterServer.drain`."""
        hosts = {hosted.node.name: hosted for hosted in self._hosts.values()}
        hosted = hosts.get(node) if isinstance(node, str) else None
        if hosted is None:
            raise ConfigurationError(
                f"no node {shown(node)} holds shards or states; expected one of "
                f"{', '.join(sorted(hosts))}"
            )
        host = hosted.endpoint
        await self.router.ask(Drain(host))
        await self._until(lambda table: host not in table.leaving, f"{node}: its shards and states")
        self._hosts.pop(host.address, None)  # two threads may drain one node
        self.nodes = [n for n in self.nodes if n.address != host.address or n.role not in HOSTING]
        await hosted.finish()

    async def _until(self, holds: Callable[[Table], bool], what: str) -> None:
        limit = self._group.timings.unavailable
        try:
            async with asyncio.timeout(limit):
                table = await self.router.fetch()
                while not holds(table):
                    table = await self.router.newer(table.version)
        except TimeoutError:
            raise ShardUnavailable(
                f"{what} were not moved within {limit:g} s; they move as soon as all nodes answer "
                "and there are enough of them"
            ) from None

    async def _reported(self, event: tuple[float, Any]) -> None:
        """Receive the report of a node that has to leave, has left or was lost."""
        address, report = str(event[1]["address"]), str(event[1]["what"])
        if report == "lost":
            self.nodes = [n for n in self.nodes if n.address != address or n.role != "worker"]
        elif report == "left":
            for node in self._departing.pop(address, []):
                self._emit(NodeLeft(self._clock.now(), node.name))
        elif address not in self._departing:
            here = [node for node in self.nodes if node.address == address]
            self._departing[address] = here
            self.leaving |= {node.name for node in here}
            for node in here:
                self._emit(NodeLeaving(self._clock.now(), node.name, node.role, report))
            self._emptying.start(self._empty(address, here))

    async def _empty(self, address: str, nodes: list[Node]) -> None:
        began = self._clock.monotonic()
        self.nodes = [n for n in self.nodes if n.address != address or n.role in HOSTING]
        await self.evaluators.leave(address, self.nodes)
        for node in nodes:
            if node.role in HOSTING and await self._drained(node):
                seconds = self._clock.monotonic() - began
                self._emit(NodeDrained(self._clock.now(), node.name, seconds))

    async def _drained(self, node: Node) -> bool:
        """Drain a node as soon as the others have room; return whether it can be drained."""
        while not any(hosted.node == node for hosted in self._hosts.values()):
            await asyncio.sleep(AGAIN_SECONDS)  # its host is being made
        times = 0
        while True:
            try:
                await self.drain(node.name)
                return True
            except PASSING as error:
                times += 1
                if is_logged(times):
                    logger.info("%s is leaving and waits to be drained: %s", node.name, str(error))
                await asyncio.sleep(AGAIN_SECONDS)
            except ConfigurationError as error:
                logger.warning("%s is leaving and cannot be drained: %s", node.name, error)
                return False

    def _emit(self, event: Event) -> None:
        log(event, self._group.labels)
        if self._sink is not None:
            self._sink(event)
