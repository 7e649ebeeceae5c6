"""Leases and fencing: who is given up, when, and that nobody is served by whoever was.

Also what happens to workers that are not heard of, and to the nodes that keep states and mail.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dps.core.consistency import BSP, SSP, Consistency
from dps.core.outage import Continue
from dps.core.shard import Step
from dps.core.updates import Operation, UpdateId
from dps.errors import LeaseExpired, StaleEpoch
from dps.events import (
    Decided,
    Detected,
    Event,
    LossReported,
    Restored,
    WorkerJoined,
    WorkerLeft,
)
from dps.protocol.client.client import Client
from dps.protocol.client.routing_table import Router
from dps.protocol.client.shard_client import Outcome
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durability import Durability
from dps.protocol.messages import (
    AddHosts,
    Configure,
    EnterWorker,
    ExitWorker,
    HostInfo,
    Install,
    Pull,
    Push,
    RenewLease,
    RenewWorker,
    Replicate,
    ReportLink,
    Restore,
    Statement,
    View,
)
from dps.protocol.recovery import Recovery, with_checkpoint_path
from dps.protocol.server.replica import Replica
from dps.protocol.transport import Endpoint
from dps.sim.network import SimTransport
from dps.sim.process import Process
from dps.sim.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ONES = {"w": np.ones(40)}
LEASE = TIMINGS.lease
NOTHING_SAID = Statement(0, (1,), ())
CHAIN = Recovery(Chain(2))


def cut_off(s: Setting, name: str, others: tuple[str, ...] = ("scheduler",)) -> None:
    """Lose whatever goes between a node and others."""
    for other in others:
        s.network.cut(name, other)
        s.network.cut(other, name)


async def view_of(s: Setting, shard: int = 0) -> View:
    return (await s.world.complete()).views[shard]


async def read(s: Setting, view: View, host: Endpoint) -> Any:
    return await s.ask(host, Pull(view.shard, view.epoch, "", 0, 0, 0.1))


# -- hosts -----------------------------------------------------------------------------------------


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


def test_a_host_renews_no_lease_by_what_it_sent_in_an_earlier_life() -> None:
    """It has nothing of what it held then; and what is sent in this life is not heard."""

    async def scenario(s: Setting) -> None:
        view = await view_of(s)
        tail = view.chain[-1]
        name = s.world.name_of(tail)
        cut_off(s, name)
        await until(lambda: happened(s, Detected), 2 * LEASE)
        s.network.heal()
        await until(lambda: s.world.table.complete, 4 * LEASE)
        life = s.world.hosts[tail.address]._life
        assert life == 1
        assert (await s.ask(COORDINATOR, RenewLease(tail, life))).granted
        cut_off(s, name)
        detected = len(happened(s, Detected))
        for _ in range(8):  # as if they had been under way all the while
            assert not (await s.ask(COORDINATOR, RenewLease(tail, life - 1))).granted
            await asyncio.sleep(LEASE / 4)
        assert len(happened(s, Detected)) > detected

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


def test_a_host_stops_before_it_is_replaced_though_its_clock_is_slow_and_the_others_fast() -> None:
    """As far as the failure model lets them differ: 5% each from the true time."""
    held: list[bool] = []

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        tail = (await view_of(s)).chain[1]
        name = s.world.name_of(tail)
        a_process(s, name).rate, a_process(s, "scheduler").rate = 0.95, 1.05
        await asyncio.sleep(2 * LEASE)
        assert not happened(s, Detected)

        def look(process: Process, event: Event) -> None:
            if isinstance(event, Detected):
                held.append(s.world.hosts[tail.address]._lease.held)

        s.world.watchers.append(look)
        cut_off(s, name)
        await until(lambda: held, 2 * LEASE)
        assert held == [False]

    in_world(scenario, recovery=CHAIN, shards=1)


@pytest.mark.parametrize("day", [86400.0, -86400.0])
def test_a_calendar_that_is_set_costs_nobody_a_lease_and_lengthens_none(day: float) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        view = await view_of(s)
        a_process(s, "scheduler").offset += day
        await asyncio.sleep(3 * LEASE)
        assert not happened(s, Detected)
        assert not happened(s, WorkerLeft)
        cut_off(s, s.world.name_of(view.chain[1]))
        cut_off(s, "worker-1")
        a_process(s, "scheduler").offset += day
        await s.all_of(process.run(client.push(ONES)), within=LEASE + 0.5)
        await until(lambda: happened(s, Detected) and happened(s, WorkerLeft), 2 * LEASE)

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_host_that_comes_back_starts_over_and_is_made_use_of() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        view = await view_of(s)
        cut_off(s, s.world.name_of(view.chain[0]))
        await until(lambda: happened(s, Detected), 2 * LEASE)
        s.network.heal()
        after = await view_of(s)
        assert set(after.chain) == set(view.chain)
        assert after.chain[0] == view.chain[1]
        assert [state.version for state in s.world.states(after)] == [1, 1]

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


def test_a_report_of_an_epoch_that_is_over_costs_nobody_a_replica() -> None:
    """Whoever reported it may have been the one that could not be reached."""

    async def scenario(s: Setting) -> None:
        view = await view_of(s)
        head, tail = view.chain
        await s.ask(COORDINATOR, ReportLink(0, view.epoch - 1, tail, 0.0))
        await s.ask(COORDINATOR, ReportLink(0, view.epoch, head, 0.0))  # which has no predecessor
        await asyncio.sleep(3 * LEASE)
        assert (await view_of(s)) == view
        await s.ask(COORDINATOR, ReportLink(0, view.epoch, tail, 0.0))
        await until(lambda: happened(s, Detected), 2 * LEASE)

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_new_replica_goes_to_another_machine_than_the_others() -> None:
    """Its name alone would put it on the machine of the head."""

    async def scenario(s: Setting) -> None:
        machines = {"server-0": "a", "replica-0-1": "b", "spare-0": "a", "spare-1": "b"}
        hosts = (
            HostInfo(s.world.endpoint(name), name, name.partition("-")[0], -1, machine)
            for name, machine in machines.items()
        )
        await s.ask(COORDINATOR, AddHosts(tuple(hosts)))
        s.world.crash("replica-0-1")
        await until(lambda: len(s.world.view(0).chain) == 1, LEASE)
        chain = (await view_of(s)).chain
        assert [s.world.name_of(member) for member in chain] == ["server-0", "spare-1"]

    in_world(scenario, recovery=CHAIN, shards=1, extra=("spare-0", "spare-1"))


def test_a_replica_that_its_predecessor_cannot_reach_is_left_out() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        head, tail = (s.world.name_of(member) for member in (await view_of(s)).chain)
        cut_off(s, head, (tail,))
        await s.all_of(process.run(client.push(ONES)), within=2 * TIMINGS.call + 2 * LEASE)

    in_world(scenario, recovery=CHAIN, shards=1)


@pytest.mark.parametrize("lease", [LEASE, 4 * TIMINGS.call])
def test_a_replica_that_answers_is_not_blamed_for_the_next_one_that_does_not(lease: float) -> None:
    """It says that its own successor does not acknowledge, for longer than a lease."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        view = await view_of(s)
        middle, tail = (s.world.name_of(member) for member in view.chain[1:])
        cut_off(s, middle, (tail,))
        await s.all_of(process.run(client.push(ONES)), within=5.0 + 2 * lease)
        chain = s.world.view(0).chain
        assert [s.world.name_of(member) for member in chain[:2]] == ["server-0", middle]
        assert s.world.hosts[view.chain[1].address]._life == 0, "it had to start over"

    in_world(scenario, recovery=Recovery(Chain(3)), shards=1, lease=lease)


def test_a_replica_that_is_at_work_for_longer_than_a_call_is_not_given_up() -> None:
    stepped = Replica._stepped

    async def at_length(self: Replica, op: Operation) -> Step:
        await asyncio.sleep(0.0 if self.is_head else 3 * TIMINGS.call)
        return await stepped(self, op)

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        with patch.object(Replica, "_stepped", at_length):
            await s.all_of(process.run(client.push(ONES)), within=4 * TIMINGS.call)
        assert not happened(s, Detected)

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_call_is_given_up_when_another_head_is_to_be_asked() -> None:
    """Though who was asked is in the chain still; a read there goes on."""

    async def scenario(s: Setting) -> None:
        table = await s.world.complete()
        (view,) = table.views
        head, tail = view.chain
        router = Router(s.world.group, SimTransport(s.network, s.network.process("asking")))
        behind = replace(view, epoch=view.epoch + 2, chain=(tail, head))
        async with asyncio.timeout(None) as push, asyncio.timeout(None) as read:
            with router.while_asked(view, head, push), router.while_asked(view, tail, read):
                router._keep(replace(table, version=table.version + 9, views=(behind,)))
                assert push.when() is not None
                assert read.when() is None
            push.reschedule(None)

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_newcomer_that_starts_over_while_it_is_added_is_not_counted_on() -> None:
    """It can be made use of again at once, but has nothing of the shard."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        view = await view_of(s)
        s.world.crash(s.world.name_of(view.chain[1]))
        await s.world.bring_up(["spare-0"])
        newcomer = s.world.endpoint("spare-0")
        held = s.held_back(newcomer, lambda message: isinstance(message, Configure))
        await until(lambda: s.world.hosts[newcomer.address].states())
        await asyncio.sleep(0.1)
        assert s.world.view(0).chain == view.chain[:1]
        s.world.hosts[newcomer.address]._start_over()
        await s.ask(COORDINATOR, RenewLease(newcomer, 1))
        held.set()
        await s.all_of(process.run(client.push(ONES)), within=5.0)
        after = await view_of(s)
        assert [state.version for state in s.world.states(after)] == [1, 1]

    in_world(scenario, recovery=CHAIN, shards=1)


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


def test_a_coordinator_that_stood_still_still_gives_up_who_is_gone() -> None:
    async def scenario(s: Setting) -> None:
        scheduler, view = a_process(s, "scheduler"), await view_of(s)
        s.network.pause(scheduler)
        cut_off(s, s.world.name_of(view.chain[0]))
        await asyncio.sleep(3 * LEASE)
        s.network.resume(scheduler)
        await until(lambda: happened(s, Detected), LEASE)

    in_world(scenario, recovery=CHAIN, shards=1)


# -- workers ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)])
def test_a_worker_that_dies_before_it_renews_anything_holds_nobody_up(
    consistency: Consistency,
) -> None:
    """Nor if its death shows in nothing but its silence: it has a lease from when it enters."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        entered = await s.ask(
            COORDINATOR, EnterWorker("silent", "sim://nobody", "node", "token", 0)
        )
        for view in (await s.world.complete()).views:
            join = Operation("join", UpdateId("silent", entered.incarnation, 0))
            await s.ask(view.chain[0], Push(view.shard, view.epoch, join, False, 0.1))

        async def run() -> None:
            for _ in range(3):
                await client.push(ONES, pull=True)

        await s.all_of(process.run(run()), within=LEASE + 1.0)
        assert [(e.worker, e.reason) for e in happened(s, WorkerLeft)] == [("silent", "silent")]

    in_world(scenario, consistency=consistency)


def test_a_worker_that_asks_twice_to_enter_enters_once() -> None:
    """It was not told that it had; a second start of it has another token."""

    async def scenario(s: Setting) -> None:
        enter = EnterWorker("worker-0", "sim://nobody", "node", "first", 0)
        first = await s.ask(COORDINATOR, enter)
        assert await s.ask(COORDINATOR, enter) == first
        again = await s.ask(COORDINATOR, replace(enter, token="second"))
        assert (first.incarnation, again.incarnation) == (1, 2)
        assert [event.incarnation for event in happened(s, WorkerJoined)] == [1, 2]

    in_world(scenario)


def test_what_an_earlier_incarnation_of_a_worker_says_is_not_of_the_present_one() -> None:
    async def scenario(s: Setting) -> None:
        enter = EnterWorker("worker-0", "sim://nobody", "node", "first", 0)
        for token in ("first", "second"):
            await s.ask(COORDINATOR, replace(enter, token=token))
        assert not (await s.ask(COORDINATOR, RenewWorker("worker-0", 1, NOTHING_SAID))).granted
        await s.ask(COORDINATOR, ExitWorker("worker-0", 1, "finished", False, NOTHING_SAID))
        assert (await s.ask(COORDINATOR, RenewWorker("worker-0", 2, NOTHING_SAID))).granted
        assert not happened(s, WorkerLeft)
        await s.ask(COORDINATOR, ExitWorker("worker-0", 2, "finished", False, NOTHING_SAID))
        assert not (await s.ask(COORDINATOR, RenewWorker("worker-0", 2, NOTHING_SAID))).granted
        assert [(e.incarnation, e.reason) for e in happened(s, WorkerLeft)] == [(2, "finished")]

    in_world(scenario)


def test_workers_of_a_group_that_is_resumed_go_on_after_their_last_incarnation() -> None:
    async def scenario(s: Setting) -> None:
        known, other = [(await s.enter(name))[1] for name in ("known", "new")]
        assert (known.incarnation, other.incarnation) == (8, 1)

    in_world(scenario, incarnations={"known": 7})


def test_a_shard_that_comes_to_rest_is_told_at_once_of_all_who_are_gone() -> None:
    workers = 30

    async def scenario(s: Setting) -> None:
        for i in range(workers):
            _, client = await s.enter(f"worker-{i}")
            await client.leave("finished")
        before = len(s.network.trace)
        s.world.crash("replica-0-1", back_after=0.1)
        await until(lambda: not s.world.table.complete, within=LEASE)
        await s.world.complete()
        await asyncio.sleep(LEASE)
        sent = [line[-1] for line in s.network.trace[before:] if line[1] == "sent"]
        assert 0 < sent.count("Evict") < workers
        assert await s.clocks() == [{}, {}]

    in_world(scenario, consistency=SSP(0), recovery=CHAIN)


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)])
def test_updates_of_some_arrays_hold_nobody_up(consistency: Consistency) -> None:
    """A worker's clock is the same on all shards, whatever its updates touch."""

    async def scenario(s: Setting) -> None:
        (one, first), (other, second) = await asyncio.gather(
            s.enter("worker-0"), s.enter("worker-1")
        )

        async def run(client: Client, name: str) -> None:
            for _ in range(5):
                await client.push({name: np.ones(1)}, pull=True)

        await s.all_of(one.run(run(first, "w")), other.run(run(second, "b")), within=2.0)
        assert [state.version for state in await s.states()] == [5, 5]
        assert await s.clocks() == [{"worker-0": 5, "worker-1": 5}] * 2

    params = {"w": np.zeros(1), "b": np.zeros(1)}
    in_world(scenario, consistency=consistency, params=params)


# -- who is asked for what -------------------------------------------------------------------------


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


def test_a_replica_that_is_behind_shows_nobody_less_than_it_has_seen() -> None:
    async def scenario(s: Setting) -> None:
        chain = (await view_of(s)).chain
        head, middle, tail = (s.world.name_of(member) for member in chain)
        s.network.slow(tail, middle, 0.2)  # it learns late of what is committed
        s.network.slow(middle, head, 0.2)
        _, client = await s.enter("worker-0")
        for _ in range(5):
            await client.push(ONES)
            tail_view = await read(s, await view_of(s), chain[-1])
            for host in chain:
                seen = Pull(0, (await view_of(s)).epoch, "", 0, tail_view.version, 0.5)
                assert (await s.ask(host, seen)).version >= tail_view.version

    in_world(scenario, recovery=Recovery(Chain(3, reads="any")), shards=1)


def test_a_client_sees_nothing_older_when_it_has_to_ask_another_replica() -> None:
    """The tail shows what it has; who comes before it learns later that this is committed."""
    name = next(n for n in map("reader-{}".format, range(99)) if zlib.crc32(n.encode()) % 6 == 2)

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        reading, reader = s.world.client(name)
        head, middle, tail = (s.world.name_of(member) for member in (await view_of(s)).chain)
        for late, early in ((tail, middle), (middle, head), (tail, head)):
            s.network.slow(late, early, 0.4)
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(0.1)
        await reading.run(reader.pull())
        assert reader.versions() == (1,)
        s.world.crash(middle)
        await until(lambda: len(s.world.view(0).chain) == 2 and s.world.view(0).serving)
        assert s.world.hosts[s.world.endpoint(head).address].replica(0).uncommitted == 1
        await reading.run(reader.pull())
        asked = [line[3] for line in s.network.trace if line[1:3] == ("sent", name)]
        assert asked[-1] == head
        assert reader.versions() == (1,)
        await pushing

    in_world(scenario, recovery=Recovery(Chain(3, reads="any")), shards=1)


@pytest.mark.parametrize("workers", [2, 4])
def test_updates_are_summed_before_they_go_down_the_chain(workers: int) -> None:
    rounds = 10

    async def scenario(s: Setting) -> None:
        entered = [await s.enter(f"worker-{i}") for i in range(workers)]

        async def run(client: Client) -> None:
            for _ in range(rounds):
                await client.push(ONES)

        await asyncio.gather(*(process.run(run(client)) for process, client in entered))
        states = s.world.states(await view_of(s))
        assert {state.version for state in states} == {workers * rounds}
        assert len({state.values.tobytes() for state in states}) == 1
        assert states[0].steps == (workers * rounds if aggregate == 1 else rounds)
        assert np.array_equal(states[0].values.view("float64"), np.full(40, -workers * rounds))

    for aggregate in (1, workers):
        recovery = Recovery(Chain(2, aggregate=aggregate, linger=1.0))
        in_world(scenario, recovery=recovery, shards=1)


def test_an_update_does_not_wait_long_for_others_to_be_summed_with() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        await s.all_of(process.run(client.push(ONES)), within=0.2)
        assert {state.version for state in await s.states()} == {1}

    in_world(scenario, recovery=Recovery(Chain(2, aggregate=2, linger=0.05)))


# -- the store and the mailbox ---------------------------------------------------------------------

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


@pytest.mark.parametrize("silent", [0.0, 3 * LEASE])
def test_what_came_from_the_store_before_that_was_lost_is_gone_on_with(silent: float) -> None:
    """The store is lost when the successor has the state, but does not serve it yet."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        answered = s.held_back(s.world.endpoint("spare-0"), lambda m: isinstance(m, Restore))
        s.world.crash("server-0")
        await until(lambda: len(happened(s, Restored)) == 2, LEASE)
        s.world.crash("store-0", back_after=0.1)
        if silent:
            cut_off(s, "spare-0")
            await asyncio.sleep(silent)
            s.network.heal()
        await until(lambda: bool(s.world.table.stores), LEASE)
        answered.set()
        await s.all_of(process.run(client.push(ONES)), within=4.0)
        again = happened(s, Restored)[-1]
        assert (again.node, again.source, again.version) == ("spare-0", "store", 1)
        assert {state.version for state in await s.states()} == {2}

    recovery = Recovery(SharedStore())
    in_world(scenario, recovery=recovery, shards=1, extra=("spare-0", "spare-1"))


def test_what_came_with_an_earlier_attempt_than_the_last_is_gone_on_with_too() -> None:
    """The host has the state, is asked to get it again, and cannot, for the store is lost."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        answered = s.held_back(s.world.endpoint("spare-0"), lambda m: isinstance(m, Restore))
        s.world.crash("server-0")
        await until(lambda: len(happened(s, Restored)) == 2, LEASE)
        cut_off(s, "spare-0", ("store-0",))
        decided = len(happened(s, Decided))
        await until(lambda: len(happened(s, Decided)) > decided, 2 * TIMINGS.copy)
        await asyncio.sleep(0.1)
        s.world.crash("store-0", back_after=0.1)
        answered.set()
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=4.0)
        assert happened(s, Restored)[-1].source == "store"
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1, extra=("spare-0",))


def test_with_server_and_store_lost_one_after_the_other_the_shard_starts_again() -> None:
    """Whoever was to get the state has come too late."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        cut_off(s, "spare-0", ("store-0",))
        s.world.crash("server-0")
        await until(lambda: happened(s, Decided)[-1].node == "spare-0", LEASE)
        await asyncio.sleep(0.1)
        s.world.crash("store-0", back_after=0.1)
        await asyncio.sleep(0.1)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=4.0)
        assert happened(s, Restored)[-1].source == "initial"

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1, extra=("spare-0",))


def test_a_store_lost_in_the_moment_before_a_shard_is_served_is_not_written_to_any_more() -> None:
    """The loss and the reply of the new server are read at once, and nothing is awaited between."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        coordinator = s.world._coordinator
        lost, admit = s.world.endpoint("store-0"), coordinator.admit_present

        async def admit_and_lose(view: View, host: Endpoint) -> None:
            await admit(view, host)
            if lost in coordinator.members:
                s.network.crash(s.world._nodes.pop("store-0"))
                await coordinator.members._end(lost.address, "test")

        with patch.object(coordinator, "admit_present", admit_and_lose):
            s.world.crash("server-0", back_after=0.1)
            await s.all_of(process.run(client.push(ONES)), within=2.0)
        assert s.world.table.stores == (s.world.endpoint("store-1"),)
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1, extra=("store-1",))


def test_a_shard_is_not_served_without_the_store_that_was_lost_in_the_moment_before() -> None:
    """There is no other one with which its server would enter a new epoch."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        coordinator, lost = s.world._coordinator, s.world.endpoint("store-0")
        (controller,) = coordinator._controllers
        configure = controller._configure

        async def configure_and_lose(view: View, kept: bool = False) -> None:
            await configure(view, kept)
            if lost in coordinator.members:
                s.network.crash(s.world._nodes.pop("store-0"))
                await coordinator.members._end(lost.address, "test")

        with patch.object(controller, "_configure", configure_and_lose):
            controller.unsettle()
            controller.wake()
            await until(lambda: lost not in coordinator.members, 1.0)
            await asyncio.sleep(0.1)
            assert not controller.view.serving
        await s.world.bring_up(["store-1"])
        await s.all_of(process.run(client.push(ONES)), within=2.0)
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1)


def test_states_and_mail_can_be_on_different_nodes() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        table = await s.world.complete()
        assert table.stores != table.mailboxes
        assert {line[3] for line in s.network.trace if line[4] == "PutState"} == {"store-0"}
        s.world.crash("server-0", back_after=1.0)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        assert {line[3] for line in s.network.trace if line[4] == "Deposit"} == {"mailbox-0"}
        await asyncio.sleep(1.5)
        assert {state.version for state in await s.states()} == {2}

    async def bring_mailbox(s: Setting) -> None:
        await s.world.bring_up(["mailbox-0"])

    in_world(scenario, recovery=STORED, meanwhile=bring_mailbox)


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


@pytest.mark.parametrize(
    ("durability", "lost"),
    [
        (SharedStore(), "store-0"),
        (SharedStore(), "spare-0"),
        (Checkpoint(every=100), "spare-0"),
        (Chain(3), "spare-0"),
    ],
    ids=str,
)
def test_mail_is_there_for_the_next_host_until_the_shard_is_served(
    tmp_path: Path, durability: Durability, lost: str
) -> None:
    """Whoever has applied it never serves, and another host begins with what it began with."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        mailbox = s.world.hosts[s.world.endpoint("mailbox-0").address]
        servers = [s.world.name_of(member) for member in (await view_of(s)).chain]
        for name in (*servers, "store-0"):
            s.world.crash(name)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        coming = asyncio.ensure_future(s.world.bring_up(["spare-0", "store-0"]))
        await asyncio.sleep(0)
        spare = s.world.endpoint("spare-0")
        answered = s.held_back(spare, lambda m: isinstance(m, Restore | Install))
        await coming
        states = s.world.hosts[spare.address].states
        await until(lambda: [state.version for state in states().values()] == [1], 2 * LEASE)
        await asyncio.sleep(0.1)  # it has done all that it was asked for
        assert not s.world.view(0).serving
        assert mailbox.stored_bytes
        s.world.crash(lost)
        await s.world.bring_up([*servers, *({"store-0"} & {lost})])
        await until(lambda: s.world.view(0).serving, 2 * LEASE)
        answered.set()
        assert {state.version for state in await s.states()} == {1}
        assert happened(s, Restored)[-1].node in servers
        await until(lambda: not mailbox.stored_bytes, LEASE)
        await asyncio.sleep(LEASE)  # what was restored may have had some of the mail
        assert [(loss.updates, loss.exact) for loss in happened(s, LossReported)] == [(1, False)]

    async def bring_mailbox(s: Setting) -> None:
        await s.world.bring_up(["mailbox-0"])

    stored = with_checkpoint_path(Recovery(durability, Continue()), str(tmp_path))
    in_world(scenario, recovery=stored, shards=1, meanwhile=bring_mailbox)


def test_mail_is_cleared_as_soon_as_the_mailbox_can_be_reached() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        mailbox = s.world.hosts[s.world.endpoint("mailbox-0").address]
        s.world.crash("server-0", back_after=0.2)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.1)
        s.network.cut("scheduler", "mailbox-0")
        assert {state.version for state in await s.states()} == {2}
        assert mailbox.stored_bytes
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        await until(lambda: not mailbox.stored_bytes, TIMINGS.call + LEASE)
        assert {state.version for state in await s.states()} == {3}

    async def bring_mailbox(s: Setting) -> None:
        await s.world.bring_up(["mailbox-0"])

    in_world(scenario, recovery=STORED, shards=1, meanwhile=bring_mailbox)


def test_under_ssp_a_worker_computes_no_further_than_its_bound_while_a_shard_is_down() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        await client.pull()
        s.world.crash("server-0", back_after=5.0)
        await asyncio.sleep(0.1)
        done = 0

        async def run() -> None:
            nonlocal done
            while True:
                await client.push(ONES, pull=True)
                done += 1

        running = process.run(run())
        await asyncio.sleep(2.0)
        running.cancel()
        assert done == 2  # and the third gradient may not be computed from the weights it has

    in_world(scenario, recovery=STORED, consistency=SSP(2))


def test_a_replicated_operation_of_another_epoch_is_refused() -> None:
    """It is not applied either: whoever sent it may have been replaced."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        view = await view_of(s)
        tail = s.world.hosts[view.chain[1].address].replica(0)
        before = tail.state
        update = Operation("gradient", UpdateId("worker-0", 1, 2), gradient=before.values)
        with pytest.raises(StaleEpoch, match=r"Replicate \(shard 0, epoch \d+\): shard 0 is in"):
            await s.ask(view.chain[1], Replicate(0, view.epoch - 1, before.index + 1, (update,)))
        assert tail.state is before

    in_world(scenario, recovery=CHAIN)
