"""Who is alive: the states of a process and what follows from each, leases, and fencing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dps import BSP, Chain, NoDurability, Recovery, SharedStore
from dps.core.consistency import SSP, Consistency
from dps.core.replay import Continue
from dps.core.updates import UpdateId
from dps.errors import LeaseExpired, StaleEpoch
from dps.events import Detected, Restored, WorkerJoined, WorkerLeft
from dps.protocol.client.shard_client import Outcome
from dps.protocol.messages import Pull, View
from dps.protocol.transport import Endpoint
from tests.simulator.network import Process
from tests.simulator.schedules.strategies import TIMINGS
from tests.support.worlds import Setting, happened, in_world, until

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


def cut_off(s: Setting, name: str, others: tuple[str, ...] = ("scheduler",)) -> None:
    """Lose whatever goes between a node and others."""
    for other in others:
        s.network.cut(name, other)
        s.network.cut(other, name)


async def view_of(s: Setting, shard: int = 0) -> View:
    return (await s.world.complete()).views[shard]


async def read(s: Setting, view: View, host: Endpoint) -> Any:
    return await s.ask(host, Pull(view.shard, view.epoch, UpdateId("", 0, 0), 0, 0.1))


@pytest.mark.parametrize("position", [0, -1])
def test_a_host_that_the_coordinator_cannot_hear_is_replaced_within_a_lease(position: int) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        view = await view_of(s)
        cut_off(s, s.world.name_of(view.chain[position]))
        await asyncio.sleep(LEASE + 0.2)
        await s.all_of(process.run(client.push(ONES, pull=True)), within=0.2)
        (detected,) = happened(s, Detected)
        assert (detected.by, detected.serving) == ("lease", True)

    in_world(scenario, recovery=CHAIN, shards=1)


def a_process(s: Setting, name: str) -> Process:
    process = s.world.process(name)
    assert process is not None
    return process


@pytest.mark.parametrize("day", [0.0, 86400.0, -86400.0])
def test_a_host_whose_lease_is_over_refuses_everything_before_another_serves(day: float) -> None:
    """Also if its calendar is set to another day."""

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        tail = view.chain[1]
        cut_off(s, s.world.name_of(tail))
        a_process(s, s.world.name_of(tail)).offset += day
        answered = True
        while not happened(s, Detected):
            try:
                await read(s, view, tail)
                assert answered, "it answers again"
            except LeaseExpired:
                answered = False
            except StaleEpoch:
                pytest.fail("it has heard of another epoch")
            await asyncio.sleep(0.01)
        assert not answered
        with pytest.raises(LeaseExpired, match=r"Pull \(shard 0, epoch \d+\): the lease of"):
            await read(s, view, tail)

    in_world(scenario, recovery=CHAIN, shards=1)


def test_the_last_replica_of_a_chain_is_waited_for() -> None:
    """What it holds is nowhere else, and it may live."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        view = await view_of(s)
        s.world.crash(s.world.name_of(view.chain[0]))
        cut_off(s, s.world.name_of(view.chain[1]))
        await asyncio.sleep(3 * LEASE)
        assert [event.serving for event in happened(s, Detected)] == [True, False]
        push = process.run(client.push(ONES))
        s.network.heal()
        await s.all_of(push, within=1.0)
        assert {state.version for state in s.world.states(await view_of(s))} == {2}

    async def bring_a_spare(s: Setting) -> None:
        await s.world.bring_up(["spare-0"])

    in_world(scenario, recovery=CHAIN, shards=1, meanwhile=bring_a_spare)


def test_the_last_replica_of_a_chain_is_given_up_in_the_end() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        cut_off(s, s.world.name_of(view.chain[0]))
        await until(lambda: len(happened(s, Restored)) == 2, 3.0 + 2 * LEASE)
        assert happened(s, Restored)[-1].source == "initial"

    async def bring_a_spare(s: Setting) -> None:
        await s.world.bring_up(["spare-0"])

    recovery = Recovery(Chain(1))
    in_world(scenario, recovery=recovery, shards=1, meanwhile=bring_a_spare, last_copy=3.0)


def test_a_coordinator_that_stood_still_gives_nobody_up() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        view = await view_of(s)
        scheduler = a_process(s, "scheduler")
        for _ in range(5):
            s.network.pause(scheduler)
            await asyncio.sleep(3 * LEASE)
            s.network.resume(scheduler)
            await asyncio.sleep(LEASE)
        assert not happened(s, Detected)
        assert not happened(s, WorkerLeft)
        assert (await view_of(s)) == view
        await client.push(ONES)

    in_world(scenario, recovery=CHAIN)


def test_a_worker_that_was_given_up_enters_again_when_it_pushes() -> None:
    """Under ASP no shard refuses its pushes, and it may never pull."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        cut_off(s, "worker-0")
        await until(lambda: happened(s, WorkerLeft))
        s.network.heal()

        async def run() -> None:
            while client.incarnation == 1:
                await client.push(ONES, pull=True)

        await s.all_of(process.run(run()), within=5.0)
        joined = [(e.worker, e.incarnation) for e in happened(s, WorkerJoined)]
        assert joined == [("worker-0", 1), ("worker-0", 2)]

    in_world(scenario)


def test_a_worker_that_was_given_up_does_not_wait_for_a_shard_to_enter_again() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await process.run(client.push(ONES, pull=True))
        cut_off(s, "worker-0")
        await until(lambda: happened(s, WorkerLeft))
        s.world.crash("server-0", back_after=8.0)
        s.network.heal()
        await until(lambda: client._given_up)
        await until(lambda: not (s.world.view(0).serving and s.world.view(1).serving))
        await s.all_of(process.run(client.push(ONES, pull=True)), within=1.0)

    in_world(scenario, servers=1, shards=2, recovery=Recovery(NoDurability(), outage=Continue()))


@pytest.mark.parametrize("consistency", [BSP(), SSP(1)])
def test_a_worker_that_is_not_heard_of_holds_the_others_up_for_a_lease(
    consistency: Consistency,
) -> None:
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        _, silent = await s.enter("worker-0", lambda *ack: outcomes.append(ack[-1]))
        process, client = await s.enter("worker-1")
        cut_off(s, "worker-0")

        async def run() -> None:
            for _ in range(5):
                await client.push(ONES, pull=True)

        await s.all_of(process.run(run()), within=LEASE + 1.0)
        assert [event.worker for event in happened(s, WorkerLeft)] == ["worker-0"]
        s.network.heal()
        # What it computed before is too stale: it is dropped, and the worker takes part again.
        other = process.run(client.push(ONES, pull=True))
        await s.all_of(silent.push(ONES, pull=True), within=1.0)
        assert set(outcomes) == {"dropped"}
        assert silent.versions() == client.versions()
        await s.all_of(silent.push(ONES), client.push(ONES), other, within=2.0)
        assert "applied" in outcomes
        joined = [(e.worker, e.incarnation) for e in happened(s, WorkerJoined)]
        assert joined[-1] == ("worker-0", 2)

    in_world(scenario, consistency=consistency)


@pytest.mark.parametrize(("reads", "asked"), [("tail", 1), ("any", 3)])
def test_pulls_go_to_the_tail_or_to_any_replica(reads: Any, asked: int) -> None:
    async def scenario(s: Setting) -> None:
        for i in range(8):
            process, client = await s.enter(f"worker-{i}")
            await client.push(ONES)
            await process.run(client.pull())
            assert client.versions() == (i + 1,)
        chain = [s.world.name_of(member) for member in (await view_of(s)).chain]
        served = {line[3] for line in s.network.trace if line[4] == "Pull"}
        assert len(served) == asked
        assert reads == "any" or served == {chain[-1]}

    in_world(scenario, recovery=Recovery(Chain(3, reads=reads)), shards=1)


def test_an_update_does_not_wait_long_for_others_to_be_summed_with() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        await s.all_of(process.run(client.push(ONES)), within=0.2)
        assert {state.version for state in await s.states()} == {1}

    in_world(scenario, recovery=Recovery(Chain(2, aggregate=2, linger=0.05)))


STORED = Recovery(SharedStore(), Continue())


def test_a_lost_store_is_replaced_and_filled_by_the_live_servers() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        s.world.crash("store-0", back_after=0.5)
        await s.all_of(process.run(client.push(ONES)), within=2.0)
        await s.world.complete()
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES, pull=True)), within=2.0)
        assert {state.version for state in await s.states()} == {3}

    in_world(scenario, recovery=Recovery(SharedStore()))


def test_with_server_and_store_lost_the_shard_starts_again_and_says_so() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        s.world.crash("store-0", back_after=0.5)
        s.world.crash("server-0", back_after=0.5)
        await s.all_of(process.run(client.push(ONES)), within=4.0)
        await until(lambda: len(happened(s, Restored)) == 3, 4.0)
        (again,) = [e for e in happened(s, Restored) if e.epoch > 2]
        assert (again.shard, again.source, again.version) == (0, "initial", 0)

    in_world(scenario, recovery=STORED)


def test_the_loss_of_a_mailbox_costs_only_what_is_in_it() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        s.world.crash("server-0", back_after=2.0)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        s.world.crash("mailbox-0", back_after=0.5)
        await asyncio.sleep(3.0)
        await s.all_of(process.run(client.push(ONES)), within=1.0)
        assert [state.version for state in await s.states()] == [2, 3]

    async def bring_mailbox(s: Setting) -> None:
        await s.world.bring_up(["mailbox-0"])

    in_world(scenario, recovery=STORED, meanwhile=bring_mailbox)
