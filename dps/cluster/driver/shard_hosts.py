"""The nodes of a group: their roles, and the hosts that are made on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed import KilledWorker

from dps.cluster.driver import roles
from dps.cluster.driver.news import News
from dps.cluster.driver.training_function import must_be_sent
from dps.cluster.names import HOSTING, Node, resource_in
from dps.cluster.node.actor import HostActor
from dps.cluster.node.evaluator import EvaluatorActor, Score
from dps.cluster.platform import platform_of
from dps.errors import CapacityError
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import AddHosts, HostInfo
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed

    from dps.cluster.backends.assignment import NodeAssignment


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
        """Whether the node's process has ended, even if another process has its address."""
        return bool(self.future.status == "error")

    async def finish(self, client: distributed.Client, deadline: float) -> None:
        """Have the actor end, and its node forget it; one that was lost before has ended."""
        await self.end(client, deadline)
        self.release()

    async def end(self, client: distributed.Client, deadline: float) -> None:
        """Have the actor end; it is there, and refuses what it is asked for, until `release`."""
        await self.have(client, "finish", deadline)

    def release(self) -> None:
        """Release the actor on its node; Dask logs an error for each request after that."""
        self.future.release()

    async def have(self, client: distributed.Client, function: str, deadline: float) -> None:
        """Have the actor do something, and wait for it; not if it is lost, nor for longer."""
        with suppress(OSError, TimeoutError, KeyError):
            async with asyncio.timeout(deadline):
                peer = client.rpc(self.endpoint.address)
                await peer.actor_execute(actor=self.endpoint.key, function=function, args=[])


class ShardHosts:
    """The nodes of a group, and the actors that it has on them. Used from the client's event loop.

    `on_adopted` is called when a node has joined and has a role; `news` are told of one that cannot
    be used.

    Attributes
    ----------
    nodes
        The nodes of the cluster, each with its role.
    group
        The group. How many servers it is to have tells what becomes of nodes without a role.
    seats
        Which Dask worker is which node, if their names and resources do not tell.
    """

    def __init__(
        self,
        client: distributed.Client,
        group: Group,
        seats: NodeAssignment | None,
        on_adopted: Callable[[], Awaitable[None]],
        news: News,
    ) -> None:
        self.nodes: list[Node] = []
        self._client = client
        self._seats = seats
        self._on_adopted = on_adopted
        self.group = group
        self._hosts: dict[str, Hosted] = {}
        self._evaluators = Evaluators(client, group)
        self._adopting = Tasks(partial(news.failed, "a node that joined is not used"))

    async def assign(self, router: Router) -> None:
        """Give each node its role; raises `CapacityError` if there are too few.

        The coordinator is told of hosts by `router`.
        """
        self._router = router
        workers = await self._workers()
        self._assigned = any(resource_in(info) for info in workers.values())
        if self._seats is not None:
            self.nodes = roles.by_seats(workers, self._seats)
            self._seats.listen(self._seated)
        elif self._assigned:
            self.nodes = roles.by_resources(workers)
        else:
            self.nodes = roles.by_assignment(workers, self.group)
        roles.check(self.nodes, self.group)

    async def make_hosts(self, nodes: Sequence[Node]) -> None:
        """Make the host actors on those nodes that are to have one; the coordinator gets them."""
        hosting = [node for node in nodes if node.role in HOSTING]
        if hosting:
            made = await asyncio.gather(*(self._make_host(node) for node in hosting))
            try:
                await self._router.ask(AddHosts(tuple(hosted.info for hosted in made)))
            finally:
                self._hosts |= {hosted.endpoint.address: hosted for hosted in made}

    async def evaluate(self, score: Score, every: float) -> None:
        """Make an evaluator; raises `CapacityError` if no node is left for one."""
        await self._evaluators.begin(score, every, self.nodes)

    async def node_joined(self, event: tuple[float, Any]) -> None:
        """Have a node taken in that joined the cluster: the event names its address."""
        self._adopting.start(self._adopt(str(event[1])))

    async def close_to_workers(self, address: str) -> None:
        """Start nothing more on a node that holds nothing; evaluators there go on elsewhere."""
        kept = HOSTING
        self.nodes = [n for n in self.nodes if n.address != address or n.role in kept]
        await self._evaluators.leave(address, self.nodes)

    async def stop(self) -> None:
        """Take no further nodes in."""
        if self._seats is not None:
            self._seats.unlisten(self._seated)
        await self._adopting.close()

    async def finish_evaluators(self) -> None:
        """Have the evaluators score once more, and end."""
        alive = await self._workers()
        nodes = [node for node in self.nodes if node.address in alive]
        await self._evaluators.finish(nodes, alive)

    async def finish_hosts(self) -> None:
        """End the hosts; the group is of no use afterwards."""
        alive = await self._workers()
        present = [hosted for hosted in self.hosts if hosted.endpoint.address in alive]
        await asyncio.gather(
            *(hosted.end(self._client, self.group.timings.call) for hosted in present)
        )

    def release_hosts(self) -> None:
        """Have nodes forget the hosts, to whom nobody sends anything any more."""
        for hosted in self.hosts:
            hosted.release()
        self._hosts.clear()

    @property
    def seated(self) -> list[str] | None:
        """The Dask workers that are nodes, if some of the cluster may be others'; None: all are."""
        return self._seats.addresses if self._seats is not None else None

    @property
    def hosts(self) -> list[Hosted]:
        """The hosts that were made and not released."""
        return list(self._hosts.values())

    async def release(self, hosted: Hosted) -> None:
        """End a host that holds nothing any more; its node is used no more."""
        address = hosted.endpoint.address
        self._hosts.pop(address, None)  # two threads may drain one node
        self.nodes = [
            node for node in self.nodes if node.address != address or node.role not in HOSTING
        ]
        await hosted.finish(self._client, self.group.timings.call)

    def _seated(self, address: str) -> None:
        """Have a Dask worker taken in that has become a node; called in any thread."""
        self._client.loop.add_callback(self.node_joined, (0.0, address))

    async def _make_host(self, node: Node) -> Hosted:
        key = f"dps-host-{self.group.name}-{platform_of(self._client).token()}"
        future = self._client.submit(
            HostActor,
            self.group,
            node.name,
            node.role,
            key,
            key=key,
            actor=True,
            workers=[node.address],
            resources={node.resource: 1} if node.resource else None,
        )
        await future
        return Hosted(node, Endpoint(node.address, key), future)

    async def _adopt(self, address: str) -> None:
        """Give a node that joined later its role, and make its host."""
        workers = await self._workers()
        if address not in workers or self._is_known(address):
            return
        self.nodes = [n for n in self.nodes if n.address in workers and n.address != address]
        if self._seats is not None:
            self.nodes += roles.by_seats({address: workers[address]}, self._seats)
        elif self._assigned:
            self.nodes += roles.by_resources({address: workers[address]})
        else:
            self.nodes.append(roles.newcomer(address, workers, self.nodes, self.group))
        await self._on_adopted()
        await self.make_hosts([node for node in self.nodes if node.address == address])
        self._evaluators.look(workers)
        await self._evaluators.place(self.nodes)

    def _is_known(self, address: str) -> bool:
        """Whether a Dask worker is a node of the group already, and not one in a lost one's place.

        Its nanny may start a lost one again at the same address; Dask has lost its actor then.
        """
        here = [node.name for node in self.nodes if node.address == address]
        if address in self._hosts and self._hosts[address].is_lost:
            return False
        if not here or self._seats is None:
            return bool(here)
        seat = self._seats.of(address)
        return seat is None or seat.name in here

    async def _workers(self) -> Mapping[str, Mapping[str, Any]]:
        """The cluster's Dask workers by address, as its scheduler describes them."""
        workers: Mapping[str, Mapping[str, Any]]
        workers = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        return workers


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluator is to do, and the role of the node that it is on."""

    score: Score
    every: float
    role: str


class Evaluators:
    """The evaluators of a group. Used from the client's event loop."""

    def __init__(self, client: distributed.Client, group: Group) -> None:
        self._client = client
        self._group = group
        self._running: list[tuple[Evaluation, Hosted]] = []
        self._waiting: list[Evaluation] = []
        self._left: set[str] = set()

    async def begin(self, score: Score, every: float, nodes: Sequence[Node]) -> None:
        """Have one more, and wait until it has read the weights that it scores first.

        Raises
        ------
        CapacityError
            None of the nodes is left for it.
        """
        node = _best(nodes, "evaluator") or _best(nodes, "worker")
        if node is None:
            raise CapacityError("no node is left for an evaluator; start more Dask workers")
        hosted = await self._make(Evaluation(score, every, node.role), node)
        if hosted is not None:
            await hosted.have(self._client, "read", self._group.timings.call)

    async def leave(self, address: str, nodes: Sequence[Node]) -> None:
        """Have those on a node end there and go on elsewhere: on one of `nodes`, or a later one."""
        self._left.add(address)
        await self._end(address)
        await self.place(nodes)

    async def place(self, nodes: Sequence[Node]) -> None:
        """Have those go on that wait for a node, if any of these is for them."""
        staying = [node for node in nodes if node.address not in self._left]
        for evaluation in list(self._waiting):
            node = _best(staying, evaluation.role)
            if node is not None and evaluation in self._waiting:
                self._waiting.remove(evaluation)
                await self._make(evaluation, node)

    def look(self, alive: Collection[str]) -> None:
        """Find out which nodes were lost; `alive` are the addresses of those that were not."""
        running = [hosted for _, hosted in self._running]
        lost = {h.node.address for h in running if h.is_lost or h.node.address not in alive}
        for address in lost:
            self._waiting += [evaluation for evaluation, _ in self._take_out(address)]

    async def finish(self, nodes: Sequence[Node], alive: Collection[str]) -> None:
        """Run a last evaluation on every evaluator and end them; call no other method afterwards.

        Evaluators that wait for a node use the free node of a worker, because training is over.
        """
        self.look(alive)
        waiting, self._waiting = self._waiting, []
        for evaluation in waiting:
            node = _best(nodes, evaluation.role) or _best(nodes, "worker")
            if node is None:
                logger.warning("there is no last score: no node is left for it")
                continue
            try:
                async with asyncio.timeout(self._group.timings.call):
                    await self._make(evaluation, node)
            except Exception as error:  # noqa: BLE001 (whatever is wrong there, the rest must end)
                logger.warning("there is no last score: %s: %s", type(error).__name__, error)
        self._waiting.clear()
        running, self._running = self._running, []
        for _, hosted in running:
            if hosted.node.address in alive:
                await hosted.finish(self._client, self._group.timings.call)

    async def _end(self, address: str) -> None:
        taken = self._take_out(address)
        self._waiting += [evaluation for evaluation, _ in taken]
        for _, hosted in taken:
            await hosted.finish(self._client, self._group.timings.call)

    def _take_out(self, address: str) -> list[tuple[Evaluation, Hosted]]:
        there = [each for each in self._running if each[1].node.address == address]
        self._running = [each for each in self._running if each not in there]
        return there

    async def _make(self, evaluation: Evaluation, node: Node) -> Hosted | None:
        """Make one on a node; None: it waits for another one, as that was lost."""
        key = f"dps-evaluator-{self._group.name}-{platform_of(self._client).token()}"
        with must_be_sent("score", "weights"):
            future = self._client.submit(
                EvaluatorActor,
                self._group,
                evaluation.score,
                evaluation.every,
                node.name,
                key,
                key=key,
                actor=True,
                workers=[node.address],
            )
        try:
            await future
        except (KilledWorker, asyncio.CancelledError) as error:
            future.release()
            self._waiting.append(evaluation)  # until another node joins
            if isinstance(error, asyncio.CancelledError):
                raise
            return None
        hosted = Hosted(node, Endpoint(node.address, key), future)
        self._running.append((evaluation, hosted))
        if node.address in self._left:  # it was told to leave meanwhile
            await self._end(node.address)
        return hosted


def _best(nodes: Sequence[Node], role: str) -> Node | None:
    """The last node of a role: workers are started on the first ones."""
    return next((node for node in reversed(nodes) if node.role == role), None)
