"""Owns which nodes the evaluators of a group are on, also after theirs was lost or has left."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed import KilledWorker

from dps.cluster.evaluator import EvaluatorActor, Score
from dps.cluster.hosted import Hosted
from dps.cluster.roles import Node
from dps.errors import CapacityError
from dps.protocol.group import Group
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed


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
        self._changing = asyncio.Lock()  # one that is being made is neither running nor waiting

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
        async with self._changing:
            await self._make(Evaluation(score, every, node.role), node)
            for _, hosted in self._running[-1:]:
                await hosted.have(self._client, "read", self._group.timings.call)

    async def leave(self, address: str, nodes: Sequence[Node]) -> None:
        """Have those on a node end there and go on elsewhere: on one of `nodes`, or a later one."""
        self._left.add(address)
        async with self._changing:
            await self._end(address)
            await self._place(nodes)

    async def place(self, nodes: Sequence[Node]) -> None:
        """Have those go on that wait for a node, if any of these is for them."""
        async with self._changing:
            await self._place(nodes)

    def look(self, alive: Collection[str]) -> None:
        """Find out which nodes were lost; `alive` are the addresses of those that were not."""
        lost = {hosted.node.address for _, hosted in self._running} - set(alive)
        for address in lost:
            self._waiting += [evaluation for evaluation, _ in self._take_out(address)]

    async def finish(self, nodes: Sequence[Node]) -> None:
        """Have all of them score once more, and end; `nodes` are those that are there still.

        The training is over, so whoever waits for a node may do so on any.
        """
        async with self._changing:
            waiting, self._waiting = self._waiting, []
            for evaluation in waiting:
                node = _best(nodes, evaluation.role) or _best(nodes, "worker")
                if node is not None or nodes:
                    await self._make(evaluation, node or nodes[-1])
            running, self._running = self._running, []
            alive = {node.address for node in nodes}
            for _, hosted in running:
                if hosted.node.address in alive:
                    await hosted.finish(self._client, self._group.timings.call)
            self._waiting.clear()

    async def _end(self, address: str) -> None:
        for evaluation, hosted in self._take_out(address):
            await hosted.finish(self._client, self._group.timings.call)
            self._waiting.append(evaluation)

    async def _place(self, nodes: Sequence[Node]) -> None:
        for evaluation in list(self._waiting):
            node = _best(nodes, evaluation.role)
            if node is not None:
                self._waiting.remove(evaluation)
                await self._make(evaluation, node)

    def _take_out(self, address: str) -> list[tuple[Evaluation, Hosted]]:
        there = [each for each in self._running if each[1].node.address == address]
        self._running = [each for each in self._running if each not in there]
        return there

    async def _make(self, evaluation: Evaluation, node: Node) -> None:
        key = f"dps-evaluator-{self._group.name}-{uuid.uuid4().hex[:8]}"
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
            self._waiting.append(evaluation)  # until another node joins
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        endpoint = Endpoint(node.address, key)
        self._running.append((evaluation, Hosted(node, endpoint, future)))
        if node.address in self._left:  # it was told to leave meanwhile
            await self._end(node.address)


def _best(nodes: Sequence[Node], role: str) -> Node | None:
    """The last node of a role: workers are started on the first ones."""
    return next((node for node in reversed(nodes) if node.role == role), None)
