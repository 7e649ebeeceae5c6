"""The states of a process, and what follows from each: dead, stopped, busy, unreachable."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps import BSP, Chain, Checkpoint, NoDurability, Recovery, SharedStore
from dps.core.consistency import SSP, Consistency
from dps.core.outage import Continue
from dps.events import Detected, WorkerLeft
from dps.sim.process import Process
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ONES = {"w": np.ones(40)}
CHAIN = Recovery(Chain(2))
LEASE, PATIENCE, STOPPED = TIMINGS.lease, TIMINGS.patience, TIMINGS.stopped
MOMENT = 0.5  # for a monitor to see something, and a coordinator to hear and act


async def members_of(s: Setting) -> list[Process]:
    """The processes of shard 0's replicas, from head to tail."""
    chain = (await s.world.complete()).views[0].chain
    return [s.process_at(member) for member in chain]


async def occupy(s: Setting, process: Process, seconds: float) -> None:
    s.network.pause(process, busy=True)
    await asyncio.sleep(seconds)
    s.network.resume(process)


@pytest.mark.parametrize(
    "recovery",
    [Recovery(), CHAIN, Recovery(SharedStore()), Recovery(Checkpoint(path="memory://b"))],
)
def test_a_server_that_is_busy_for_less_than_the_patience_costs_nothing(recovery: Recovery) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        head = (await members_of(s))[0]
        pushing = process.run(client.push(ONES))
        await occupy(s, head, 0.8 * PATIENCE)
        await s.all_of(pushing, within=2.0)
        assert happened(s, Detected) == []
        assert [state.version for state in await s.states()] == [2]
        assert (await members_of(s))[0] is head

    in_world(scenario, shards=1, recovery=recovery, extra=("spare-0",), watched=True)


def test_a_server_with_a_copy_that_is_busy_for_longer_is_replaced_when_its_lease_ends() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        head = (await members_of(s))[0]
        await occupy(s, head, PATIENCE + LEASE + MOMENT)
        (detected,) = happened(s, Detected)
        assert (detected.node, detected.by) == (head.name, "lease")
        assert [state.version for state in await s.states()] == [1]

    in_world(scenario, shards=1, recovery=CHAIN, extra=("spare-0",), watched=True)


def test_a_stopped_server_is_killed_long_before_its_lease_ends() -> None:
    async def scenario(s: Setting) -> None:
        head = (await members_of(s))[0]
        s.network.pause(head)
        await until(lambda: happened(s, Detected), STOPPED + MOMENT)
        assert not head.alive
        (detected,) = happened(s, Detected)
        assert detected.node == head.name

    in_world(scenario, shards=1, recovery=CHAIN, extra=("spare-0",), watched=True, lease=60.0)


@pytest.mark.parametrize("recovery", [Recovery(NoDurability()), CHAIN], ids=["none", "chain"])
@pytest.mark.parametrize("busy", [False, True], ids=["stopped", "busy"])
def test_the_last_copies_of_a_state_are_waited_for_as_long_as_they_live(
    recovery: Recovery, busy: bool
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        members = await members_of(s)
        for member in members:
            s.network.pause(member, busy=busy)
        await asyncio.sleep(3 * (PATIENCE + LEASE))
        for member in members:
            s.network.resume(member)
        assert [state.version for state in await s.states()] == [1]
        assert all(member.alive for member in members)

    in_world(
        scenario, shards=1, recovery=recovery, extra=("spare-0",), watched=True, last_copy=LEASE
    )


def test_a_stopped_store_that_nobody_can_replace_is_waited_for() -> None:
    """A node for mail keeps no states: to kill the store would take the shard down for good."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        store = s.world.process("store-0")
        assert store is not None
        s.network.pause(store)
        await asyncio.sleep(3 * LEASE)
        s.network.resume(store)
        assert store.alive
        await process.run(client.push(ONES))
        assert [state.version for state in await s.states()] == [2]

    recovery = Recovery(SharedStore(4), Continue())
    in_world(scenario, shards=1, recovery=recovery, extra=("mailbox-0",), watched=True)


def test_one_of_two_stopped_replicas_is_killed_when_the_other_runs_again() -> None:
    async def scenario(s: Setting) -> None:
        head, tail = await members_of(s)
        s.network.pause(head)
        s.network.pause(tail)
        await asyncio.sleep(STOPPED + MOMENT)
        assert head.alive
        assert tail.alive
        s.network.resume(tail)
        await until(lambda: not head.alive, MOMENT)

    in_world(scenario, shards=1, recovery=CHAIN, extra=("spare-0",), watched=True, lease=60.0)


def test_a_server_out_of_reach_with_its_monitor_is_given_up_when_its_lease_ends() -> None:
    async def scenario(s: Setting) -> None:
        head = (await members_of(s))[0]
        for name in (head.name, f"monitor of {head.name}"):
            s.network.cut(name, "scheduler")
            s.network.cut("scheduler", name)
        await until(lambda: happened(s, Detected), 2 * LEASE)
        (detected,) = happened(s, Detected)
        assert (detected.node, detected.by) == (head.name, "lease")

    in_world(scenario, shards=1, recovery=CHAIN, extra=("spare-0",), watched=True)


def test_a_stopped_spare_is_not_used_and_not_killed() -> None:
    async def scenario(s: Setting) -> None:
        await s.world.complete()
        spare = s.world.process("spare-0")
        assert spare is not None
        s.network.pause(spare)
        await asyncio.sleep(STOPPED + MOMENT)
        s.world.crash("server-0")
        await s.world.bring_up(["spare-1"])
        await until(lambda: s.world.endpoint("spare-1") in s.world.view(0).chain, MOMENT)
        assert spare.alive

    in_world(scenario, shards=1, recovery=CHAIN, extra=("spare-0",), watched=True, lease=60.0)


@pytest.mark.parametrize("consistency", [BSP(), SSP(1)], ids=repr)
def test_others_wait_for_a_busy_worker_and_not_for_a_stopped_one(consistency: Consistency) -> None:
    async def scenario(s: Setting) -> None:
        busy, slow = await s.enter("a")
        other, fast = await s.enter("b")
        s.network.pause(busy, busy=True)
        ahead = other.run(push_all(fast, 4))
        await asyncio.sleep(0.8 * PATIENCE)
        assert not ahead.done()
        assert happened(s, WorkerLeft) == []
        s.network.resume(busy)
        await s.all_of(ahead, busy.run(push_all(slow, 4)), within=5.0)
        assert (slow.dropped, fast.dropped) == (0, 0)
        s.network.pause(busy)
        await s.all_of(other.run(push_all(fast, 4)), within=STOPPED + 2 * MOMENT)
        (left,) = happened(s, WorkerLeft)
        assert (left.worker, left.reason) == ("a", "silent")

    in_world(scenario, shards=1, consistency=consistency, watched=True, lease=60.0, patience=600.0)


async def push_all(client: object, times: int) -> None:
    for _ in range(times):
        await client.push(ONES, pull=True)  # type: ignore[attr-defined]


def test_a_worker_waits_for_slow_ones_for_longer_than_for_a_shard_that_is_down() -> None:
    async def scenario(s: Setting) -> None:
        slowly, slow = await s.enter("a")
        other, fast = await s.enter("b")
        pushing = other.run(push_all(fast, 2))
        await asyncio.sleep(3 * UNAVAILABLE)
        assert not pushing.done()
        await s.all_of(pushing, slowly.run(push_all(slow, 2)), within=5.0)

    in_world(scenario, shards=1, consistency=BSP(), unavailable=UNAVAILABLE)


UNAVAILABLE = 3.0
