"""Owns the client: how a worker, an evaluator or a driver pushes to and pulls from the shards.

It has one lane for each shard (`dps.protocol.lane`), numbers a worker's updates, and keeps the
worker a member of the group: it renews its lease, and enters again if it was given up.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dps.core.blocks import Arrays
from dps.core.consistency import ASP
from dps.core.functions import pack, unpack
from dps.core.recovery import WorkerCache
from dps.core.updates import Call, Operation, UpdateId
from dps.errors import (
    NotServing,
    TransportError,
)
from dps.protocol.calls import CALLS, DRIVER, all_succeeded, known_function
from dps.protocol.cuts import applies, together
from dps.protocol.group import Group
from dps.protocol.lane import Lane, OnAck, Outcome
from dps.protocol.lease import RENEWALS, repeat_forever
from dps.protocol.messages import (
    EnterWorker,
    ExitWorker,
    RenewWorker,
)
from dps.protocol.rebuild import Copies, donor_name
from dps.protocol.router import Router
from dps.protocol.transport import Transport


class Client:
    """Pushes to and pulls from all shards. Used from one event loop.

    Parameters
    ----------
    worker
        The name under which updates are pushed; "" for a client that pushes none.
    incarnation
        That of a client which is no worker, and calls functions.
    """

    def __init__(
        self,
        group: Group,
        transport: Transport,
        worker: str = "",
        on_ack: OnAck | None = None,
        incarnation: int = 0,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.router = Router(group, transport)
        self._group = group
        self._transport = transport
        self._copies: Copies | None = None
        self._seq = 0
        self._calls = 0
        self._home = ("", "")
        self._entered = asyncio.Event()
        self._entered.set()
        self._given_up = False
        self._renewing: asyncio.Task[None] | None = None
        self._dropped: set[tuple[int, int]] = set()
        self._on_ack = on_ack or _ignore
        self._lanes = [
            Lane(shard, group, transport, self.router, self._acked)
            for shard in range(len(group.layout.shards))
        ]

    async def enter(self, address: str, node: str) -> None:
        """Take part in the training under this client's name."""
        self._home = (address, node)
        await self._enter()

    async def _enter(self) -> None:
        """Begin a new incarnation of the worker. Other requests wait until all shards know it."""
        self._entered.clear()
        try:
            request = EnterWorker(self.worker, *self._home, uuid.uuid4().hex)
            reply = await self.router.ask(request)
            self.incarnation, self._given_up = reply.incarnation, False
            await self._offer_copies()
            if self._renewing is None:
                every = self._group.timings.lease / RENEWALS
                self._renewing = asyncio.create_task(repeat_forever(every, self._renew))
            join = Operation("join", UpdateId(self.worker, self.incarnation, 0))
            for lane in self._lanes:
                lane.evicted = False
            await self._to_all({s: partial(lane.push, join, False) for s, lane in self._numbered})
            self._seq = max(lane.clock for lane in self._lanes)
            await self._catch_up()
        finally:
            self._entered.set()

    async def _catch_up(self) -> None:
        """Begin with the same clock on all shards: some may be a round behind the others."""
        tick = Operation("tick", UpdateId(self.worker, self.incarnation, self._seq))
        behind = [lane for lane in self._lanes if self._ticks and lane.clock < self._seq]
        await asyncio.gather(*(lane.push(tick, pull=False) for lane in behind))

    async def _entered_again(self) -> bool:
        """Enter again if the worker was given up meanwhile; return whether it was."""
        if not self._given_up and not any(lane.evicted for lane in self._lanes):
            return False
        if self._entered.is_set():
            await self._enter()
        return True

    async def _renew(self) -> None:
        request = RenewWorker(self.worker, self.incarnation)
        incarnation, deadline = self.incarnation, self._group.timings.lease
        try:
            reply = await self.router.ask_once(request, deadline)
        except (TransportError, NotServing):
            return  # the next one is on its way
        if not reply.granted and incarnation == self.incarnation:
            self._given_up = True

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
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._copies is not None:
            await self._copies.close()
        await self._all_lanes(lambda lane: lane.close())
        await self.router.close()

    async def push(self, gradients: Arrays, pull: bool = False) -> None:
        """Push gradients of some or all arrays.

        With `pull`, the weights are read in the same round trip and then found by `weights`. A
        worker that was not heard of for a lease or more may find its gradients refused as too
        stale; they are dropped and counted, and it takes part again.

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
        await self._entered.wait()
        self._seq += 1
        operation = Operation("gradient", UpdateId(self.worker, self.incarnation, self._seq))

        async def send(shard: int) -> None:
            gradient, pieces = layout.gather(shard, gradients)
            op = replace(operation, gradient=gradient, pieces=pieces)
            await self._lanes[shard].push(op, pull)

        jobs: dict[int, Callable[[], Awaitable[None]]] = {}
        for shard, lane in self._numbered:
            if shard in touched:
                jobs[shard] = partial(send, shard)
            elif self._ticks:
                jobs[shard] = partial(lane.push, replace(operation, kind="tick"), pull)
            elif pull:
                jobs[shard] = partial(lane.pull, self._reader)
        await self._to_all(jobs)
        if any(lane.evicted for lane in self._lanes) and await self._entered_again() and pull:
            await self.pull()

    @property
    def dropped(self) -> int:
        """How many of this client's updates were refused as too stale, on one shard or more."""
        return len(self._dropped)

    @property
    def next_seq(self) -> int:
        """The number that the next update will have, if the worker need not enter again."""
        return self._seq + 1

    async def pull(self) -> None:
        """Read all weights; they are then found by `weights`."""
        await self._entered_again()
        await self._entered.wait()
        await self._all_lanes(lambda lane: lane.pull(self._reader))
        if await self._entered_again():
            await self.pull()

    async def apply(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """Have a function run on every shard, once on each; return the results, shard by shard.

        Raises
        ------
        ConfigurationError
            There is no such function, or an argument cannot be sent. No shard has been asked.
        FunctionFailed
            It failed on some shards, which it left as they were.
        ShardUnavailable
            A shard stayed down for too long.
        """
        call = Call(known_function(self._group.functions, function), pack(arguments))
        await self._entered.wait()
        self._calls += 1
        # Calls have numbers of their own: under BSP they are part of no round.
        number = UpdateId(f"{self.worker or DRIVER}{CALLS}", self.incarnation, self._calls)
        op = Operation("apply", number, call=call)
        came = await asyncio.gather(*(ln.call(op) for ln in self._lanes), return_exceptions=True)
        return [unpack(result) for result in all_succeeded(came)]

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

    @property
    def _reader(self) -> UpdateId:
        return UpdateId(self.worker, self.incarnation, 0)

    @property
    def _ticks(self) -> bool:
        """Whether a worker's clock must be the same on all shards, whatever its updates touch."""
        return not isinstance(self._group.consistency, ASP) or applies(self._group)

    @property
    def _numbered(self) -> Iterable[tuple[int, Lane]]:
        return enumerate(self._lanes)

    async def _to_all(self, jobs: Mapping[int, Callable[[], Awaitable[None]]]) -> None:
        """Send something to several shards, and wait until all have it."""
        if applies(self._group):
            await together(
                jobs,
                self.router,
                acked_in=lambda shard: self._lanes[shard].acked_in,
                refused=lambda: any(lane.evicted for lane in self._lanes),
            )
        else:
            await asyncio.gather(*(job() for job in jobs.values()))

    def _acked(self, shard: int, seq: int, version: int, outcome: Outcome) -> None:
        if outcome == "dropped":
            self._dropped.add((self.incarnation, seq))
        self._on_ack(shard, seq, version, outcome)

    async def _all_lanes(self, request: Callable[[Lane], Awaitable[None]]) -> None:
        await asyncio.gather(*(request(lane) for lane in self._lanes))


def _ignore(shard: int, seq: int, version: int, outcome: Outcome) -> None:
    pass
