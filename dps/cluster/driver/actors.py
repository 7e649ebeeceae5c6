"""The actors that a driver makes on nodes: the hosts of shards, and evaluators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import KilledWorker

from dps.cluster.driver.runs import must_be_sent
from dps.cluster.names import Node
from dps.cluster.node.actor import EvaluatorActor, HostActor, Score
from dps.cluster.platform import platform_of
from dps.errors import CapacityError
from dps.protocol.group import Group
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
    """An actor that the driver made, kept alive by its future; `deadline` limits each call (s)."""

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
        resources = {node.resource: 1} if is_host and node.resource else None
        where = {"workers": [node.address], "resources": resources}
        future = client.submit(actor, group, *args, key, key=key, actor=True, **where)
        return cls(node, Endpoint(node.address, key), future, client, group.timings.call)

    @property
    def is_lost(self) -> bool:
        """Whether the node's process has ended, even if another process has its address."""
        return bool(self.future.status == "error")

    async def call(self, method: str) -> None:
        """Call a method of the actor and wait until the deadline; ignore an actor that is lost."""
        with suppress(OSError, TimeoutError, KeyError):
            async with asyncio.timeout(self.deadline):
                peer = self.client.rpc(self.endpoint.address)
                await peer.actor_execute(actor=self.endpoint.key, function=method, args=[])

    async def finish(self) -> None:
        """End the actor, unless it is lost, and release it on its node."""
        await self.call("finish")
        self.future.release()  # Dask logs an error for each later request to it


@dataclass(eq=False, slots=True)
class Evaluation:
    """An evaluator and the role of its node; `hosted` is None while it waits for a node."""

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
        self._left: set[str] = set()  # addresses of nodes that had to leave

    async def begin(self, score: Score, every: float, nodes: Sequence[Node]) -> None:
        """Start an evaluator, and wait until it has read its first snapshot."""
        node = _for("evaluator", nodes)
        evaluation = Evaluation(score, every, node.role)
        await self._make(evaluation, node)
        self._evaluations.append(evaluation)
        if evaluation.hosted is not None:
            await evaluation.hosted.call("read")

    async def leave(self, address: str, nodes: Sequence[Node]) -> None:
        """Move the evaluators on a node to one of `nodes`, or to a node that joins later."""
        self._left.add(address)
        for evaluation in self._evaluations:
            if evaluation.hosted is not None and evaluation.hosted.node.address == address:
                await _end(evaluation)
        await self.place(nodes)

    async def place(self, nodes: Sequence[Node]) -> None:
        """Restart the evaluators that wait for a node, if `nodes` has one for them."""
        staying = [node for node in nodes if node.address not in self._left]
        for evaluation in self._evaluations:
            node = _best(staying, evaluation.role)
            if node is not None and evaluation.hosted is None:
                await self._make(evaluation, node)

    def look(self, alive: Collection[str]) -> None:
        """Note which evaluators were lost; `alive` are the addresses of the nodes that are not."""
        for evaluation in self._evaluations:
            hosted = evaluation.hosted
            if hosted is not None and (hosted.is_lost or hosted.node.address not in alive):
                evaluation.hosted = None

    async def finish(self, nodes: Sequence[Node], alive: Collection[str]) -> None:
        """Run a last evaluation on every evaluator, and end them for good."""
        self.look(alive)
        for evaluation in self._evaluations:
            if evaluation.hosted is None:
                try:  # a node of workers is free as well, because training is over
                    async with asyncio.timeout(self._group.timings.call):
                        await self._make(evaluation, _for(evaluation.role, nodes))
                except Exception as error:  # noqa: BLE001 (the others must end after any error)
                    logger.warning(
                        "the last evaluation failed: %s: %s", type(error).__name__, error
                    )
        for evaluation in self._evaluations:
            await _end(evaluation)

    async def _make(self, evaluation: Evaluation, node: Node) -> None:
        """Make an evaluator on a node; if the node is lost during that, wait for another node."""
        args = evaluation.score, evaluation.every, node.name
        with must_be_sent("score", "weights"):
            hosted = Hosted.start(self._client, self._group, node, EvaluatorActor, *args)
        evaluation.hosted = hosted
        try:
            await hosted.future
        except BaseException as error:
            hosted.future.release()
            if evaluation.hosted is hosted:
                evaluation.hosted = None
            if not isinstance(error, KilledWorker):
                raise
        if node.address in self._left:  # it has left since it was chosen
            await _end(evaluation)


async def _end(evaluation: Evaluation) -> None:
    hosted, evaluation.hosted = evaluation.hosted, None
    if hosted is not None:
        await hosted.finish()


def _best(nodes: Sequence[Node], role: str) -> Node | None:
    # The last one, because workers are started on the first ones.
    return next((node for node in reversed(nodes) if node.role == role), None)


def _for(role: str, nodes: Sequence[Node]) -> Node:
    node = _best(nodes, role) or _best(nodes, "worker")
    if node is None:
        raise CapacityError("no node is left for an evaluator; start more Dask workers")
    return node
