"""The nodes of a group: their roles, and the actors that are made on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed import KilledWorker

from dps.cluster.driver import roles
from dps.cluster.driver.news import News
from dps.cluster.driver.runs import must_be_sent
from dps.cluster.names import HOSTING, Node, resource_in
from dps.cluster.node.actor import EvaluatorActor, HostActor, Score
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
    """An actor that the driver made; the future keeps it alive. `deadline` is for its calls."""

    node: Node
    endpoint: Endpoint
    future: Any
    client: distributed.Client
    deadline: float

    @classmethod
    def start(
        cls, client: distributed.Client, group: Group, node: Node, actor: type, *args: Any
    ) -> Hosted:
        """Begin to make an actor on a node, with the group, `args` and its key as arguments."""
        is_host = actor is HostActor
        kind = "host" if is_host else "evaluator"
        key = f"dps-{kind}-{group.name}-{platform_of(client).token()}"
        future = client.submit(
            actor,
            group,
            *args,
            key,
            key=key,
            actor=True,
            workers=[node.address],
            resources={node.resource: 1} if is_host and node.resource else None,
        )
        return cls(node, Endpoint(node.address, key), future, client, group.timings.call)

    @property
    def info(self) -> HostInfo:
        """The description of a host for the coordinator."""
        node = self.node
        return HostInfo(self.endpoint, node.name, node.role, node.home, node.machine)

    @property
    def is_lost(self) -> bool:
        """Whether the node's process has ended, even if another process has its address."""
        return bool(self.future.status == "error")

    async def call(self, method: str) -> None:
        """Call a method of the actor, unless it is lost, and wait for it until the deadline."""
        with suppress(OSError, TimeoutError, KeyError):
            async with asyncio.timeout(self.deadline):
                peer = self.client.rpc(self.endpoint.address)
                await peer.actor_execute(actor=self.endpoint.key, function=method, args=[])

    async def finish(self) -> None:
        """End the actor, unless it is lost, and release it."""
        await self.call("finish")
        self.release()

    def release(self) -> None:
        """Release the actor on its node; Dask logs an error for each request after that."""
        self.future.release()


class ShardHosts:
    """The nodes of a group, and the actors that it has on them. Used from the client's event loop.

    Parameters
    ----------
    seats
        Which Dask worker is which node, if their names and resources do not tell.
    on_adopted
        Called when a node has joined and has a role.

    Attributes
    ----------
    nodes
        The nodes of the cluster, each with its role.
    group
        The group. Its number of servers decides the role of a node without a resource.
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

    @property
    def hosts(self) -> list[Hosted]:
        """The hosts that were made and not released."""
        return list(self._hosts.values())

    @property
    def for_workers(self) -> list[Node]:
        """The nodes that run training functions."""
        return [node for node in self.nodes if node.role == "worker"]

    @property
    def seated(self) -> list[str] | None:
        """The Dask workers that are nodes, if others may use the rest of the cluster; None: all."""
        return self._seats.addresses if self._seats is not None else None

    async def assign(self, router: Router) -> None:
        """Give each node its role; raises `CapacityError` if there are too few.

        `router` reports hosts to the coordinator.
        """
        self._router = router
        workers = await self._workers()
        if self._seats is not None:
            self._seats.listen(self._seated)
        self._have_resources = any(resource_in(info) for info in workers.values())
        marked = self._marked(workers)
        self.nodes = roles.by_assignment(workers, self.group) if marked is None else marked
        roles.check(self.nodes, self.group)

    async def make_hosts(self, nodes: Sequence[Node]) -> None:
        """Make the host actors on those nodes that need one, and report them to the coordinator."""
        hosting = [node for node in nodes if node.role in HOSTING]
        if hosting:
            made = await asyncio.gather(*map(self._make_host, hosting))
            try:
                await self._router.ask(AddHosts(tuple(hosted.info for hosted in made)))
            finally:
                self._hosts |= {hosted.endpoint.address: hosted for hosted in made}

    async def evaluate(self, score: Score, every: float) -> None:
        """Make an evaluator; raises `CapacityError` if no node is left for one."""
        await self._evaluators.begin(score, every, self.nodes)

    async def node_joined(self, event: tuple[float, Any]) -> None:
        """Use a node that joined the cluster: the event names its address."""
        self._adopting.start(self._adopt(str(event[1])))

    async def close_to_workers(self, address: str) -> None:
        """Start nothing more on a node that holds nothing; its evaluators move elsewhere."""
        self.nodes = [n for n in self.nodes if n.address != address or n.role in HOSTING]
        await self._evaluators.leave(address, self.nodes)

    async def stop(self) -> None:
        """Ignore nodes that join from now on."""
        if self._seats is not None:
            self._seats.unlisten(self._seated)
        await self._adopting.close()

    async def finish_evaluators(self) -> None:
        """Make the evaluators score once more, and end."""
        alive = await self._workers()
        nodes = [node for node in self.nodes if node.address in alive]
        await self._evaluators.finish(nodes, alive)

    async def finish_hosts(self) -> None:
        """End the hosts; the group is of no use afterwards."""
        alive = await self._workers()
        present = [hosted for hosted in self.hosts if hosted.endpoint.address in alive]
        await asyncio.gather(*(hosted.call("finish") for hosted in present))

    def release_hosts(self) -> None:
        """Release the hosts, when no process sends them requests any more."""
        for hosted in self.hosts:
            hosted.release()
        self._hosts.clear()

    async def release(self, hosted: Hosted) -> None:
        """End a host that holds nothing any more; its node is no longer used for servers."""
        address = hosted.endpoint.address
        self._hosts.pop(address, None)  # two threads may drain one node
        self.nodes = [n for n in self.nodes if n.address != address or n.role not in HOSTING]
        await hosted.finish()

    def _seated(self, address: str) -> None:
        """Use a Dask worker that has become a node; called in any thread."""
        self._client.loop.add_callback(self.node_joined, (0.0, address))

    async def _make_host(self, node: Node) -> Hosted:
        hosted = Hosted.start(self._client, self.group, node, HostActor, node.name, node.role)
        await hosted.future
        return hosted

    async def _adopt(self, address: str) -> None:
        """Give a node that joined later its role, and make its host."""
        workers = await self._workers()
        if address not in workers or self._is_known(address):
            return
        self.nodes = [n for n in self.nodes if n.address in workers and n.address != address]
        marked = self._marked({address: workers[address]})
        if marked is None:
            marked = [roles.newcomer(address, workers, self.nodes, self.group)]
        self.nodes += marked
        await self._on_adopted()
        await self.make_hosts([node for node in self.nodes if node.address == address])
        self._evaluators.look(workers)
        await self._evaluators.place(self.nodes)

    def _marked(self, workers: roles.Workers) -> list[Node] | None:
        """Return the nodes by their seats or resources; None: roles are assigned."""
        if self._seats is not None:
            return roles.by_seats(workers, self._seats)
        return roles.by_resources(workers) if self._have_resources else None

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

    async def _workers(self) -> roles.Workers:
        described = await self._client.scheduler.identity(n_workers=-1)
        workers: roles.Workers = described["workers"]
        return workers


# -- evaluators ------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Evaluation:
    """An evaluator, and the role of its node; not `hosted`: it waits for a node."""

    score: Score
    every: float
    role: str
    hosted: Hosted | None = None


class Evaluators:
    """The evaluators of a group. Used from the client's event loop."""

    def __init__(self, client: distributed.Client, group: Group) -> None:
        self._client = client
        self._group = group
        self._evaluations: list[Evaluation] = []
        self._left: set[str] = set()

    async def begin(self, score: Score, every: float, nodes: Sequence[Node]) -> None:
        """Start one, and wait until it has read the weights that it scores first.

        Raises
        ------
        CapacityError
            None of the nodes is left for it.
        """
        node = _best(nodes, "evaluator") or _best(nodes, "worker")
        if node is None:
            raise CapacityError("no node is left for an evaluator; start more Dask workers")
        evaluation = Evaluation(score, every, node.role)
        await self._make(evaluation, node)
        self._evaluations.append(evaluation)
        if evaluation.hosted is not None:
            await evaluation.hosted.call("read")

    async def leave(self, address: str, nodes: Sequence[Node]) -> None:
        """Move those on a node elsewhere: to one of `nodes`, or to a later one."""
        self._left.add(address)
        for evaluation in self._evaluations:
            if evaluation.hosted is not None and evaluation.hosted.node.address == address:
                await self._end(evaluation)
        await self.place(nodes)

    async def place(self, nodes: Sequence[Node]) -> None:
        """Restart those that wait for a node, if there is one for them."""
        staying = [node for node in nodes if node.address not in self._left]
        for evaluation in self._evaluations:
            node = _best(staying, evaluation.role)
            if node is not None and evaluation.hosted is None:
                await self._make(evaluation, node)

    def look(self, alive: Collection[str]) -> None:
        """Note which nodes were lost; `alive` are the addresses of the others."""
        for evaluation in self._evaluations:
            hosted = evaluation.hosted
            if hosted is not None and (hosted.is_lost or hosted.node.address not in alive):
                evaluation.hosted = None

    async def finish(self, nodes: Sequence[Node], alive: Collection[str]) -> None:
        """Run a last evaluation on every evaluator and end them; call no other method afterwards.

        Evaluators that wait for a node use the free node of a worker, because training is over.
        """
        self.look(alive)
        for evaluation in self._evaluations:
            if evaluation.hosted is None:
                await self._make_last(evaluation, nodes)
        for evaluation in self._evaluations:
            await self._end(evaluation)

    async def _make_last(self, evaluation: Evaluation, nodes: Sequence[Node]) -> None:
        node = _best(nodes, evaluation.role) or _best(nodes, "worker")
        if node is None:
            logger.warning("there is no last score: no node is left for it")
            return
        try:
            async with asyncio.timeout(self._group.timings.call):
                await self._make(evaluation, node)
        except Exception as error:  # noqa: BLE001 (whatever is wrong there, the rest must end)
            logger.warning("there is no last score: %s: %s", type(error).__name__, error)

    async def _make(self, evaluation: Evaluation, node: Node) -> None:
        """Make one on a node; if the node is lost meanwhile, it waits for another one."""
        args = evaluation.score, evaluation.every, node.name
        with must_be_sent("score", "weights"):
            hosted = Hosted.start(self._client, self._group, node, EvaluatorActor, *args)
        evaluation.hosted = hosted
        try:
            await hosted.future
        except BaseException as error:
            hosted.release()
            if evaluation.hosted is hosted:
                evaluation.hosted = None
            if not isinstance(error, KilledWorker):
                raise
        if node.address in self._left:  # it had to leave meanwhile
            await self._end(evaluation)

    async def _end(self, evaluation: Evaluation) -> None:
        hosted, evaluation.hosted = evaluation.hosted, None
        if hosted is not None:
            await hosted.finish()


def _best(nodes: Sequence[Node], role: str) -> Node | None:
    """Return the last node of a role, because workers are started on the first ones."""
    return next((node for node in reversed(nodes) if node.role == role), None)
