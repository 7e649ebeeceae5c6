"""Owns the client: how a worker, an evaluator or a driver pushes to and pulls from the shards.

For each shard the client keeps one lane, in which its requests follow one another: updates of a
worker reach a shard in order, so the shard can tell a duplicate by its number alone. A lane sends
again what was not acknowledged, finds the new server by itself, and follows the group's outage
policy while there is none. Nothing waits past its deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from dps.core.blocks import Arrays
from dps.core.recovery import Continue, WorkerCache
from dps.core.shard import check_gradient
from dps.core.updates import Operation, UpdateId
from dps.errors import (
    MailboxClosed,
    NotServing,
    ShardUnavailable,
    StaleEpoch,
    StoreUnavailable,
    TransportError,
)
from dps.protocol.group import Group
from dps.protocol.messages import (
    Deposit,
    EnterWorker,
    ExitWorker,
    Pull,
    Push,
    Pushed,
    ReplayBuffered,
    View,
    Waiting,
    Weights,
)
from dps.protocol.rebuild import Copies, donor_name
from dps.protocol.router import Router
from dps.protocol.transport import Transport

Outcome = Literal["applied", "duplicate", "buffered"]
OnAck = Callable[[int, int, int, Outcome], None]


class Lane:
    """One client's requests to one shard, one after the other. Used from one event loop."""

    def __init__(
        self, shard: int, group: Group, transport: Transport, router: Router, on_ack: OnAck
    ) -> None:
        self._shard = shard
        self._group = group
        self._transport = transport
        self._router = router
        self._on_ack = on_ack
        self._turn = asyncio.Lock()
        self._base: Weights | None = None
        self._held: list[Operation] = []
        self._draining: asyncio.Task[None] | None = None
        self._deposited = 0
        self._clock = 0

    @property
    def clock(self) -> int:
        """The worker's clock on this shard when the last push was acknowledged."""
        return self._clock

    @property
    def base(self) -> Weights | None:
        """The weights that were read last."""
        return self._base

    async def push(self, op: Operation, pull: bool) -> None:
        """Bring an operation to the shard, or to a buffer if the outage policy says so."""
        async with self._turn:
            if op.kind == "gradient" and self._base is not None:
                op = replace(op, based_on=self._base.version, based_at=self._base.at)
            await self._deliver(op, pull)

    async def pull(self, worker: str) -> None:
        """Read the weights; during an outage the last ones may have to do."""
        async with self._turn:
            await self._read(worker)

    async def drain(self) -> None:
        """Wait until the gradients that are buffered in this worker are applied."""
        async with self._turn:
            if self._held:
                await self._until_served("drain", self._flush_held)

    async def close(self) -> None:
        """Forget what is buffered in this worker."""
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)

    # -- one request ---------------------------------------------------------------------------

    async def _deliver(self, op: Operation, pull: bool) -> None:
        """Push until it is acknowledged, buffered, or too late."""
        replies: list[Pushed] = []

        async def attempt(view: View) -> bool:
            await self._flush_held(view)
            patience = self._group.timings.patience
            reply = await self._ask(view, Push(view.shard, view.epoch, op, pull, patience))
            if isinstance(reply, Waiting):
                return False
            replies.append(reply)
            return True

        buffer = None if op.kind != "gradient" else self._buffering(op)
        await self._until_served(f"push of {op.id}", attempt, buffer)
        for reply in replies:
            self._acked(op, reply)
            if pull and reply.weights is None:
                await self._read(op.id.worker)

    def _acked(self, op: Operation, reply: Pushed) -> None:
        self._deposited = 0
        self._clock = reply.clock
        if reply.weights is not None:
            self._base = reply.weights
        if op.kind == "gradient":
            outcome: Outcome = "duplicate" if reply.outcome == "duplicate" else "applied"
            self._on_ack(self._shard, op.id.seq, reply.version, outcome)

    async def _read(self, worker: str) -> None:
        async def keep_last(view: View) -> bool:
            return self._base is not None

        keep = isinstance(self._group.recovery.outage, Continue) and worker
        await self._until_served("pull", self._pull_as(worker), keep_last if keep else None)

    def _pull_as(self, worker: str) -> Callable[[View], Awaitable[bool]]:
        async def attempt(view: View) -> bool:
            patience = self._group.timings.patience
            reply = await self._ask(view, Pull(view.shard, view.epoch, worker, patience))
            if isinstance(reply, Weights):
                self._base = reply
            return isinstance(reply, Weights)

        return attempt

    async def _ask(self, view: View, request: Any) -> Any:
        deadline = self._group.timings.call + self._group.timings.patience
        return await self._transport.call(view.chain[0], request, deadline, "train")

    # -- outages -------------------------------------------------------------------------------

    async def _until_served(
        self,
        what: str,
        attempt: Callable[[View], Awaitable[bool]],
        meanwhile: Callable[[View], Awaitable[bool]] | None = None,
    ) -> None:
        """Repeat `attempt` until it succeeds; while the shard is down, try `meanwhile` instead.

        Raises
        ------
        ShardUnavailable
            The shard stayed down for longer than the group's `unavailable` seconds.
        """
        limit = self._group.timings.unavailable
        view = await self._router.view(self._shard)
        try:
            async with asyncio.timeout(limit):
                while not await self._attempt(view, attempt, meanwhile or _never):
                    view = await self._router.view(self._shard)
        except TimeoutError:
            raise ShardUnavailable(
                f"{what}: shard {self._shard} (epoch {view.epoch}) was not served for {limit:g} s"
            ) from None

    async def _attempt(
        self,
        view: View,
        attempt: Callable[[View], Awaitable[bool]],
        meanwhile: Callable[[View], Awaitable[bool]],
    ) -> bool:
        """Try once; return False when it is time to try again with the view that is then known."""
        try:
            if not view.serving:
                return await meanwhile(view) or await self._until_replaced(view)
            async with asyncio.timeout(None) as scope:
                with self._router.while_head(view, scope):
                    return await attempt(view)
        except TimeoutError:
            return False
        except TransportError:
            if view.serving:
                self._router.report(view.chain[0])
            return await self._until_replaced(view, self._group.timings.retry)
        except (StaleEpoch, NotServing, MailboxClosed):
            return await self._until_replaced(view, self._group.timings.retry)

    async def _until_replaced(self, view: View, patience: float = math.inf) -> Literal[False]:
        """Wait until the table says something else of the shard, or for `patience` seconds."""
        until = asyncio.get_running_loop().time() + patience
        while (table := await self._router.table()).views[self._shard] == view:
            try:
                async with asyncio.timeout_at(until):
                    await self._router.newer(table.version)
            except TimeoutError:
                break
        return False

    def _buffering(self, op: Operation) -> Callable[[View], Awaitable[bool]] | None:
        """What to do with a gradient while the shard is down; None: keep trying to push it."""
        outage = self._group.recovery.outage
        if not isinstance(outage, Continue):
            return None

        # No shard sees it now, and a bad one in a buffer would keep the shard from coming back.
        check = partial(check_gradient, self._group.layout.shards[self._shard], op)

        async def keep(view: View) -> bool:
            if len(self._held) >= outage.limit:
                return False
            check()
            assert op.gradient is not None
            self._held.append(replace(op, gradient=op.gradient.copy()))  # it may be the caller's
            if self._draining is None or self._draining.done():
                self._draining = asyncio.create_task(self._drain_when_served())
            self._on_ack(self._shard, op.id.seq, 0, "buffered")
            return True

        async def deposit(view: View) -> bool:
            if self._deposited >= outage.limit:
                return False
            check()
            store = (await self._router.table()).store
            if store is None:
                raise StoreUnavailable(f"shard {self._shard}: there is no mailbox to deposit in")
            request = Deposit(self._shard, view.epoch, op)
            await self._transport.call(store, request, self._group.timings.call, "store")
            self._deposited += 1
            self._on_ack(self._shard, op.id.seq, 0, "buffered")
            return True

        return keep if outage.buffer == "worker" else deposit

    async def _drain_when_served(self) -> None:
        """Others may wait for what is held here, though this worker pushes nothing for long."""
        while self._held:
            view = await self._router.view(self._shard)
            if view.serving:
                async with self._turn:
                    await self._attempt(view, self._flush_held, _never)
            else:
                await self._until_replaced(view)

    async def _flush_held(self, view: View) -> bool:
        """Have the gradients applied that were held back here; they come before newer ones."""
        if self._held:
            request = ReplayBuffered(self._shard, view.epoch, tuple(self._held))
            deadline = self._group.timings.copy
            await self._transport.call(view.chain[0], request, deadline, "train")
            self._held.clear()
        return True


async def _never(view: View) -> bool:
    return False


class Client:
    """Pushes to and pulls from all shards. Used from one event loop.

    Parameters
    ----------
    worker
        The name under which updates are pushed; "" for a client that only reads.
    """

    def __init__(
        self, group: Group, transport: Transport, worker: str = "", on_ack: OnAck | None = None
    ) -> None:
        self.worker = worker
        self.incarnation = 0
        self.router = Router(group, transport)
        self._group = group
        self._transport = transport
        self._copies: Copies | None = None
        self._seq = 0
        self._lanes = [
            Lane(shard, group, transport, self.router, on_ack or _ignore)
            for shard in range(len(group.layout.shards))
        ]

    async def enter(self, address: str, node: str) -> None:
        """Take part in the training under this client's name."""
        request = EnterWorker(self.worker, address, node)
        reply = await self.router.ask(request)
        self.incarnation = reply.incarnation
        await self._offer_copies()
        await self._all_lanes(lambda lane: lane.push(self._operation("join"), pull=False))
        self._seq = max(lane.clock for lane in self._lanes)

    async def leave(self, reason: str) -> None:
        """Take part no longer; what is still buffered here is applied first."""
        try:
            if reason == "finished":
                await self._all_lanes(lambda lane: lane.drain())
        finally:
            request = ExitWorker(self.worker, self.incarnation, reason)
            await self.router.ask(request)

    async def close(self) -> None:
        """End the client's tasks; it is of no use afterwards."""
        if self._copies is not None:
            await self._copies.close()
        await self._all_lanes(lambda lane: lane.close())
        await self.router.close()

    async def push(self, gradients: Arrays, pull: bool = False) -> int:
        """Push gradients of some or all arrays; return the number of the update.

        With `pull`, the weights are read in the same round trip and then found by `weights`.

        Raises
        ------
        ShapeMismatch, NonFiniteGradient
            The gradients do not fit, or hold NaN or infinity. No shard has been sent anything.
        ShardUnavailable
            A shard stayed down for too long.
        """
        layout = self._group.layout
        # What one shard refuses must not be applied by another; a single one checks for itself.
        layout.check(gradients, values=len(layout.shards) > 1)
        touched = layout.shards_of(gradients)
        self._seq += 1
        operation = self._operation("gradient")

        async def send(shard: int) -> None:
            gradient, pieces = layout.gather(shard, gradients)
            op = replace(operation, gradient=gradient, pieces=pieces)
            await self._lanes[shard].push(op, pull)

        jobs = [send(shard) for shard in touched]
        if pull:
            untouched = set(range(len(self._lanes))) - set(touched)
            jobs += [self._lanes[shard].pull(self.worker) for shard in sorted(untouched)]
        await asyncio.gather(*jobs)
        return operation.id.seq

    async def pull(self) -> None:
        """Read all weights; they are then found by `weights`."""
        await self._all_lanes(lambda lane: lane.pull(self.worker))

    def weights(self) -> dict[str, np.ndarray]:
        """The weights that were read last, as read-only arrays."""
        return self._group.layout.scatter(
            {s: lane.base.values for s, lane in enumerate(self._lanes) if lane.base is not None}
        )

    def versions(self) -> tuple[int, ...]:
        """The version of each shard's weights that were read last; -1 where none were."""
        return tuple(lane.base.version if lane.base else -1 for lane in self._lanes)

    async def _offer_copies(self) -> None:
        """Have what this worker reads used to rebuild a lost shard, if that is how it survives."""
        if self._copies is not None:
            await self._copies.close()
        if isinstance(self._group.recovery.durability, WorkerCache):
            donor = donor_name(self.worker, self.incarnation)
            lanes = self._lanes
            self._copies = Copies(
                self._group, self._transport, self.router, donor, lambda s: lanes[s].base
            )

    def _operation(self, kind: Literal["gradient", "join"]) -> Operation:
        return Operation(kind, UpdateId(self.worker, self.incarnation, self._seq))

    async def _all_lanes(self, request: Callable[[Lane], Awaitable[None]]) -> None:
        await asyncio.gather(*(request(lane) for lane in self._lanes))


def _ignore(shard: int, seq: int, version: int, outcome: Outcome) -> None:
    pass
