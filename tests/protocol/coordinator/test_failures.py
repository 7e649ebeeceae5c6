"""Exceptions in the coordinator that nobody foresaw cost no state, and hold up no other shard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dps.core.consistency import BSP
from dps.core.replay import Continue
from dps.core.updates import Operation
from dps.errors import RemoteError
from dps.events import Detected, LossReported, TaskFailed, WorkerLeft
from dps.protocol.messages import RenewLease
from dps.protocol.server.replica import Replica
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.strategy import Recovery
from tests.simulator.network import Unforeseen
from tests.support.worlds import Setting, happened, in_world, until

ONES = {"w": np.ones(40)}


def coordinator(s: Setting) -> Any:
    return s.world._coordinator


def test_a_renewal_that_fails_costs_a_host_nothing() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await process.run(client.push(ONES))
        services = coordinator(s)._services
        renew = services[RenewLease]

        async def fail(message: RenewLease) -> None:
            services[RenewLease] = renew
            raise Unforeseen("once")

        services[RenewLease] = fail
        await until(lambda: happened(s, TaskFailed))
        await asyncio.sleep(s.world.group.timings.lease)
        assert not happened(s, Detected)
        assert not happened(s, LossReported)

    in_world(scenario, shards=1)


def test_a_shard_whose_controller_keeps_failing_holds_up_no_other() -> None:
    async def scenario(s: Setting) -> None:
        views = (await s.world.complete()).views
        first, second = coordinator(s).controllers

        async def fail() -> None:
            raise Unforeseen("always")

        restore = second._restore_on

        async def restore_slowly(host: Any) -> None:
            await asyncio.sleep(0.2)
            await restore(host)

        first._advance, second._restore_on = fail, restore_slowly
        first.wake()
        s.world.crash(s.world.name_of(views[1].chain[0]), back_after=0.1)
        await until(lambda: s.world.view(1).epoch > views[1].epoch and s.world.view(1).serving)
        await asyncio.sleep(10.0)
        assert len(happened(s, TaskFailed)) < 20

    in_world(scenario, shards=2, servers=2)


def test_a_worker_whose_buffered_gradients_cannot_be_replayed_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replica.replay

    async def failing(
        self: Replica, epoch: int, buffered: Sequence[Operation], late: bool = False
    ) -> None:
        if any(op.id.worker == "a" for op in buffered):
            raise RemoteError("a defect")
        await replay(self, epoch, buffered, late)

    monkeypatch.setattr(Replica, "replay", failing)

    async def scenario(s: Setting) -> None:
        (process, client), (other, neighbour) = await s.enter("a"), await s.enter("b")
        first = process.run(client.push(ONES, pull=True))
        await s.all_of(first, other.run(neighbour.push(ONES, pull=True)), within=5.0)
        s.world.crash("server-0", back_after=2.0)
        await asyncio.sleep(0.5)
        await client.push(ONES)
        await s.all_of(other.run(neighbour.push(ONES, pull=True)), within=10.0)
        assert [(e.worker, e.reason) for e in happened(s, WorkerLeft)] == [("a", "failed")]

    kept = Checkpoint(every=1, mode="sync", path="memory://failing")
    recovery = Recovery(kept, Continue(buffer="worker"))
    in_world(scenario, shards=1, recovery=recovery, consistency=BSP())
