"""Which nodes the evaluators of a group are on, also after theirs was lost or has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed import KilledWorker

from dps.cluster.driver.hosted import Hosted
from dps.cluster.driver.training_function import must_be_sent
from dps.cluster.names import Node
from dps.cluster.node.evaluator import EvaluatorActor, Score
from dps.cluster.platform import platform_of
from dps.errors import CapacityError
from dps.protocol.group import Group
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed


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
        """Have all of them score once more, and end. Nobody may call the others meanwhile.

        Those that wait for a node do so on that of a worker, if it is free: the training is over.
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
