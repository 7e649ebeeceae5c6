"""The states of a process, and what follows from each: dead, stopped, busy, unreachable."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps import BSP, Chain, NoDurability, Recovery, SharedStore
from dps.events import Detected, WorkerLeft
from tests.simulator.network import Process
from tests.support.worlds import TIMINGS, Setting, happened, in_world

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


@pytest.mark.parametrize("recovery", [Recovery(), CHAIN, Recovery(SharedStore())])
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


@pytest.mark.parametrize(
    ("recovery", "busy"), [(Recovery(NoDurability()), True), (CHAIN, False)], ids=["none", "chain"]
)
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


def test_others_wait_for_a_busy_worker_and_not_for_a_stopped_one() -> None:
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

    in_world(scenario, shards=1, consistency=BSP(), watched=True, lease=60.0, patience=600.0)


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
