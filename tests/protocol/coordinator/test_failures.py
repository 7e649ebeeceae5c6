"""Exceptions in the coordinator that nobody foresaw cost no state, and hold up no other shard."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from dps.events import Detected, LossReported, TaskFailed
from dps.protocol.client.routing_table import Router
from dps.protocol.durabilities.chain import Chain
from dps.protocol.messages import RenewLease
from dps.protocol.recovery import Recovery
from dps.sim.network import SimTransport
from dps.sim.process import Unforeseen
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


def test_a_replica_that_is_excluded_stays_while_it_holds_its_lease() -> None:
    """Its head has ended, so it has the only copy; an exception must not take it out."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await process.run(client.push(ONES))
        head, tail = (await s.world.complete()).views[0].chain
        name = s.world.name_of(tail)
        s.network.cut(name, "scheduler")
        s.network.cut("scheduler", name)
        coordinator(s).members.exclude(tail)
        s.world.crash(s.world.name_of(head), back_after=0.1)
        await until(lambda: head not in s.world.view(0).chain)
        coordinator(s).failed(Unforeseen("anything"))
        await asyncio.sleep(0.5)
        s.network.heal()
        await until(lambda: s.world.view(0).serving)
        assert not happened(s, LossReported)

    in_world(scenario, shards=1, recovery=Recovery(Chain(2)), lease=2.0)


def test_a_shard_whose_controller_keeps_failing_holds_up_no_other() -> None:
    async def scenario(s: Setting) -> None:
        views = (await s.world.complete()).views
        first, second = coordinator(s)._controllers

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


def test_a_listener_of_the_table_may_leave_twice() -> None:
    async def scenario(s: Setting) -> None:
        router, heard = Router(s.world.group, SimTransport(s.network, s.network.process("x"))), []
        listener = heard.append
        router.listen(listener)
        router.unlisten(listener)
        router.unlisten(listener)
        assert await router.fetch() not in heard

    in_world(scenario, shards=1)
