"""What comes late, twice or out of order changes nothing, and what is the only copy is kept."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.outage import Continue
from dps.core.shard import ShardState, initial_state
from dps.core.updates import Operation, UpdateId
from dps.errors import Evicted, LeaseExpired, NotServing, StaleEpoch
from dps.events import Detected, Restored
from dps.protocol import executor as offload
from dps.protocol.client.shard_client import Outcome
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.lease import Leases
from dps.protocol.messages import (
    AddHosts,
    Configure,
    Evict,
    Extend,
    HostInfo,
    Install,
    Keepers,
    Pull,
    Push,
    Release,
    RenewLease,
    ReplayBuffered,
    Replicate,
    ReportFailure,
    ReportLink,
    Restore,
    TakeMail,
    Waiting,
)
from dps.protocol.recovery import Recovery
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.storage.checkpoint_schedule import Checkpoints
from dps.protocol.transport import Endpoint
from dps.sim.network import SimTransport
from dps.sim.process import SimClock, here
from dps.sim.world import COORDINATOR
from tests.protocol.coordinator.test_membership import STORED, cut_off, view_of
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

LEASE = TIMINGS.lease
ONES = {"w": np.ones(40)}
CHAIN = Recovery(Chain(2))


def test_a_replica_never_goes_back_to_an_earlier_epoch() -> None:
    """Also if both came while it was busy, the later one first."""

    async def scenario(s: Setting) -> None:
        view = await view_of(s)
        head = view.chain[0]
        member = s.world.hosts[head.address].replica(0)
        first = Configure(0, view.epoch + 1, view.chain, head)
        second = Configure(0, view.epoch + 2, view.chain, head)
        async with member.lock:
            later = asyncio.create_task(s.ask(head, second))
            await asyncio.sleep(0.1)
            earlier = asyncio.create_task(s.ask(head, first))
            await asyncio.sleep(0.1)
        await later
        with pytest.raises(StaleEpoch, match=r"Configure \(shard 0, epoch \d+\): shard 0 is in"):
            await earlier
        assert member.epoch == view.epoch + 2

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_configuration_that_comes_twice_does_not_undo_what_came_since() -> None:
    """A chain that is being extended counts on the newcomer already."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        view = await view_of(s)
        await s.world.bring_up(["spare-0"])
        tail, spare = view.chain[-1], s.world.endpoint("spare-0")
        await s.ask(tail, Extend(0, view.epoch, spare, Keepers()))
        await s.ask(tail, Configure(0, view.epoch, view.chain, tail))
        await client.push(ONES)
        newcomer = s.world.hosts[spare.address].replica(0)
        assert newcomer.state.version == 1

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_newcomer_with_an_earlier_copy_is_not_taken_to_have_the_later_one() -> None:
    """A request to extend the chain comes twice, and more is committed between the two copies."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        view = await view_of(s)
        await s.world.bring_up(["spare-0"])
        tail, spare = view.chain[-1], s.world.endpoint("spare-0")
        copied = s.held_back(spare, lambda m: isinstance(m, Install) and not m.state.version)
        extending = asyncio.create_task(s.ask(tail, Extend(0, view.epoch, spare, Keepers())))
        await until(lambda: s.world.hosts[spare.address].states())
        await client.push(ONES)
        with pytest.raises(NotServing, match="spare-0 holds an earlier copy of shard 0"):
            await s.ask(tail, Extend(0, view.epoch, spare, Keepers()))
        copied.set()
        await extending
        await client.push(ONES)
        newcomer = s.world.hosts[spare.address].replica(0)
        assert newcomer.state.version == 2

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_replica_that_has_come_back_is_not_released() -> None:
    """The request to forget it may come late: the others may have been lost meanwhile."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        view = await view_of(s)
        (host,) = view.chain
        await s.ask(host, Release(0, view.epoch - 1))
        assert s.world.hosts[host.address].states()[0].version == 1
        await client.push(ONES, pull=True)
        assert client.versions() == (2,)
        state = (await s.states())[0]
        await s.ask(host, Release(0, view.epoch))
        assert not s.world.hosts[host.address].states()
        with pytest.raises(StaleEpoch, match=f"gave shard 0 up after epoch {view.epoch}"):
            await s.ask(host, Install(0, view.epoch, (host,), state, "initial"))

    in_world(scenario, shards=1)


@pytest.mark.parametrize("consistency", [ASP(), SSP(1)])
def test_an_update_of_an_incarnation_that_was_replaced_is_not_acked_as_applied(
    consistency: Consistency,
) -> None:
    """Its number is one of those that the state has, but of another incarnation."""
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        process, old = await s.enter("worker-0", lambda *ack: outcomes.append(ack[-1]))
        _, new = await s.enter("worker-0")
        assert (old.incarnation, new.incarnation) == (1, 2)
        await new.push(ONES)
        await s.all_of(process.run(old.push(ONES)), within=2.0)
        assert outcomes == ["dropped"]
        assert old.incarnation == 3
        assert {state.version for state in await s.states()} == {1}

    in_world(scenario, shards=1, consistency=consistency)


def test_a_push_of_a_worker_that_is_evicted_meanwhile_is_acked_without_weights() -> None:
    """Its update is applied, but what it may read it is told when it has entered again."""

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        await s.enter("worker-1")
        view = await view_of(s)
        (head,) = view.chain
        update = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(320, np.uint8))
        waiting = asyncio.create_task(s.ask(head, Push(0, view.epoch, update, True, 0.9)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await s.ask(head, Evict(0, view.epoch, (UpdateId("worker-0", 1, 0),)))
        reply = await waiting
        assert (reply.outcome, reply.version, reply.weights) == ("applied", 1, None)

    in_world(scenario, consistency=SSP(0), shards=1)


def test_an_update_that_waits_for_its_round_is_refused_when_its_worker_is_replaced() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        await s.enter("worker-1")
        view = await view_of(s)
        (head,) = view.chain
        update = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(320, np.uint8))
        waiting = asyncio.create_task(s.ask(head, Push(0, view.epoch, update, False, 0.9)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        join = Operation("join", UpdateId("worker-0", 2, 0))
        await s.ask(head, Push(0, view.epoch, join, False, 0.1))
        with pytest.raises(Evicted, match=r"worker-0 \(incarnation 1\)"):
            await waiting
        assert (await s.states())[0].version == 0

    in_world(scenario, shards=1, consistency=BSP())


def test_what_an_evicted_worker_buffered_is_refused() -> None:
    """Nobody waited for it: by now it may be older than the consistency model allows."""

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        (head,) = view.chain
        update = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(320, np.uint8))
        await s.ask(head, Evict(0, view.epoch, (UpdateId("worker-0", 1, 0),)))
        with pytest.raises(Evicted, match=r"worker-0 \(incarnation 1\)"):
            await s.ask(head, ReplayBuffered(0, view.epoch, (update,)))
        assert (await s.states())[0].version == 0

    in_world(scenario, shards=1, consistency=SSP(1))


def test_what_was_buffered_is_not_acked_before_the_tail_has_it() -> None:
    """Whoever kept it forgets it then."""

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        head, tail = view.chain
        names = s.world.name_of(head), s.world.name_of(tail)
        update = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(320, np.uint8))
        s.network.cut(*names)
        acked = asyncio.create_task(s.ask(head, ReplayBuffered(0, view.epoch, (update,)), 5.0))
        await asyncio.sleep(LEASE)
        assert [state.version for state in s.world.states(view)] == [1, 0]
        assert not acked.done()
        s.network.mend(*names)
        await acked
        assert [state.version for state in s.world.states(view)] == [1, 1]

    in_world(scenario, recovery=CHAIN, shards=1, lease=2.0, last_copy=30.0)


def test_a_push_is_not_acked_by_a_head_that_has_left_its_epoch_meanwhile() -> None:
    """It may have been taken back, and what it commits from then on is nobody's."""

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        head, tail = view.chain
        s.network.cut(s.world.name_of(head), s.world.name_of(tail))
        update = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(320, np.uint8))
        waiting = asyncio.create_task(s.ask(head, Push(0, view.epoch, update, False, 0.9)))
        await asyncio.sleep(0.1)
        await s.ask(head, Configure(0, view.epoch + 1, (head,), head))
        assert s.world.hosts[head.address].replica(0).uncommitted == 0
        with pytest.raises(StaleEpoch, match=r"Push of worker-0/1/1 \(shard 0, epoch \d+\)"):
            await waiting

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_newcomer_shows_nothing_that_is_not_committed() -> None:
    """It is given that, too, but could not tell it from what the store has."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        view = await view_of(s)
        spare, store = s.world.endpoint("spare-0"), s.world.process("store-0")
        assert store is not None
        s.network.pause(store)
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(0.1)
        keepers = Keepers((s.world.endpoint("store-0"),))
        await s.ask(view.chain[0], Extend(0, view.epoch, spare, keepers))
        newcomer = s.world.hosts[spare.address].replica(0)
        assert newcomer.state.version == 2
        assert (await s.ask(spare, Pull(0, view.epoch, "", 0, 0, 0.1))).version == 1
        assert newcomer.uncommitted == 1
        s.network.resume(store)
        await s.all_of(pushing, within=3.0)
        assert (await s.ask(spare, Pull(0, view.epoch, "", 0, 2, 0.1))).version == 2

    recovery = Recovery(SharedStore(every=4))
    in_world(scenario, shards=1, recovery=recovery, extra=("spare-0",))


def test_a_newcomer_shows_what_was_committed_while_it_was_given_the_state() -> None:
    """Whoever has read that before is not to wait until the newcomer has it in the store again."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        view, spare = await view_of(s), s.world.endpoint("spare-0")
        (head,), newcomer = view.chain, s.world.hosts[spare.address]
        copied = s.held_back(spare, lambda m: isinstance(m, Install))
        keepers = Keepers((s.world.endpoint("store-0"),))
        extending = asyncio.create_task(s.ask(head, Extend(0, view.epoch, spare, keepers)))
        await until(newcomer.states, 1.0)
        await client.push(ONES)
        store = s.world.process("store-0")
        assert store is not None
        s.network.pause(store)
        pushing = process.run(client.push(ONES))
        await until(lambda: s.world.hosts[head.address].replica(0).uncommitted == 1, 1.0)
        copied.set()
        await extending
        assert newcomer.replica(0).state.version == 3
        assert (await s.ask(spare, Pull(0, view.epoch, "", 0, 0, 0.1))).version == 2
        s.network.resume(store)
        await s.all_of(pushing, within=3.0)

    recovery = Recovery(SharedStore(every=4))
    in_world(scenario, shards=1, recovery=recovery, extra=("spare-0",))


def test_what_is_under_way_to_the_store_is_not_committed_without_a_newcomer() -> None:
    """From the moment on at which the newcomer is the successor."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        view, spare = await view_of(s), s.world.endpoint("spare-0")
        (head,) = view.chain
        store = s.world.process("store-0")
        assert store is not None
        s.network.pause(store)
        pushing = process.run(client.push(ONES))
        await until(lambda: s.world.hosts[head.address].replica(0).uncommitted == 1, 1.0)
        passed_on = s.held_back(spare, lambda m: isinstance(m, Replicate))
        keepers = Keepers((s.world.endpoint("store-0"),))
        extending = asyncio.create_task(s.ask(head, Extend(0, view.epoch, spare, keepers)))
        newcomer = s.world.hosts[spare.address]
        await until(lambda: newcomer.states() and newcomer.replica(0).state.version == 2, 1.0)
        s.network.resume(store)
        await asyncio.sleep(0.1)
        assert s.world.hosts[head.address].replica(0).uncommitted == 1
        passed_on.set()
        await extending
        await s.all_of(pushing, within=3.0)
        assert s.world.hosts[head.address].replica(0).uncommitted == 0

    recovery = Recovery(SharedStore(every=4))
    in_world(scenario, shards=1, recovery=recovery, extra=("spare-0",))


def test_a_host_that_is_wrongly_taken_for_ended_stops_serving() -> None:
    """Its port refuses connections, but it lives, and asks for its lease as before."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        view = await view_of(s)
        head = view.chain[0]

        async def refused(self: SimTransport, address: str) -> bool:
            return address == head.address

        with patch.object(SimTransport, "gone", refused):
            s.world.suspect(s.world.name_of(head))
            await until(lambda: happened(s, Detected), LEASE / 2)
        await s.all_of(process.run(client.push(ONES)), within=1.0)
        await asyncio.sleep(LEASE)
        with pytest.raises((LeaseExpired, NotServing)):
            await s.ask(head, Pull(0, view.epoch, "", 0, 0, 0.1))

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_lease_that_was_granted_to_an_earlier_life_does_not_count() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        tail = view.chain[1]
        host = s.world.hosts[tail.address]
        granted: list[RenewLease] = []

        def is_first(m: Any) -> bool:
            first = isinstance(m, RenewLease) and m.host == tail and not granted
            granted.extend([m] * first)
            return first

        late = s.held_back(COORDINATOR, is_first)
        s.held_back(COORDINATOR, lambda m: isinstance(m, RenewLease) and m.life == 1)
        await until(lambda: granted, LEASE)
        await s.ask(COORDINATOR, ReportLink(0, view.epoch, tail, 0.0))
        await until(lambda: host._life == 1, LEASE)
        late.set()
        await asyncio.sleep(0.05)
        assert not host._lease.held
        with pytest.raises(LeaseExpired):
            await s.ask(tail, Pull(0, view.epoch, "", 0, 0, 0.1))

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_host_that_started_over_does_not_serve_in_an_epoch_that_it_has_left() -> None:
    """A request that made it the head may come twice, the second time much later."""

    async def scenario(s: Setting) -> None:
        view = await view_of(s)
        (host,) = view.chain
        cut_off(s, s.world.name_of(host))
        await until(lambda: happened(s, Detected), 2 * LEASE)
        s.network.heal()
        again = s.world.hosts[host.address]
        await until(lambda: again._life == 1 and again._lease.held, LEASE)
        state = initial_state(np.zeros(320, np.uint8), s.world.group.rule)
        with pytest.raises(StaleEpoch, match=r"Install \(shard 0, epoch \d+\): "):
            await s.ask(host, Install(0, view.epoch, (host,), state, "initial"))

    async def bring_a_spare(s: Setting) -> None:
        await s.world.bring_up(["spare-0"])

    in_world(scenario, shards=1, meanwhile=bring_a_spare, last_copy=0.01)


def test_a_replica_that_is_left_out_stays_if_it_is_the_last() -> None:
    """It is told to start over when it renews; by then the others may be lost."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        view = await view_of(s)
        head, tail = view.chain
        cut_off(s, s.world.name_of(tail))
        await s.ask(COORDINATOR, ReportLink(0, view.epoch, tail, 0.0))
        s.world.crash(s.world.name_of(head), back_after=LEASE)
        await asyncio.sleep(LEASE / 2)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=3.0)
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_server_is_waited_for_when_the_store_is_lost() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        (server,) = (await view_of(s)).chain
        s.world.crash("store-0", back_after=3 * LEASE)
        cut_off(s, s.world.name_of(server))
        await asyncio.sleep(4 * LEASE)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=3.0)
        assert {state.version for state in await s.states()} == {2}

    async def bring_a_spare(s: Setting) -> None:
        await s.world.bring_up(["spare-0"])

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1, meanwhile=bring_a_spare)


def test_a_store_that_started_over_is_not_taken_for_one_that_has_the_state() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        (server,) = (await view_of(s)).chain
        cut_off(s, "store-0")
        await until(lambda: not s.world.table.stores, 4 * LEASE)
        s.world.crash(s.world.name_of(server), back_after=0.1)
        await asyncio.sleep(LEASE)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=5.0)
        assert happened(s, Restored)[-1].source == "initial"

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1, last_copy=LEASE)


def test_who_is_out_of_the_chain_commits_nothing_more() -> None:
    """Though its successor, which is not out yet, acknowledges what it was sent before."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        view = await view_of(s)
        head, tail = view.chain
        member = s.world.hosts[head.address].replica(0)
        s.network.slow(s.world.name_of(tail), s.world.name_of(head), 0.4)
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(0.05)
        out = Configure(0, view.epoch + 1, (tail,), head)
        async with member.lock:
            leaving = asyncio.create_task(s.ask(head, out))
            await asyncio.sleep(0.05)  # it passes on what is not acknowledged once more
        await leaving
        await asyncio.sleep(TIMINGS.call)
        assert s.world.hosts[tail.address].replica(0).state.version == 1
        assert member.uncommitted == 1
        pushing.cancel()

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_restoration_that_was_begun_in_an_earlier_life_comes_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host was given up meanwhile, and another one has the shard."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        slow = asyncio.Event()
        first = s.world.hosts[s.world.endpoint("spare-0").address]

        async def in_thread(self: Checkpoints, work: Any) -> Any:
            done = work()
            if isinstance(done, ShardState) and here.get() is s.world.process("spare-0"):
                await slow.wait()
            return done

        monkeypatch.setattr(Checkpoints, "_in_thread", in_thread)
        s.world.crash("server-0")
        await asyncio.sleep(0.2)
        cut_off(s, "spare-0")
        view = await view_of(s)
        assert s.world.name_of(view.chain[0]) == "spare-1"
        s.network.heal()
        await until(lambda: first._life == 1 and first._lease.held, 3 * LEASE)
        slow.set()
        await asyncio.sleep(LEASE)
        assert not first.states()
        await client.push(ONES, pull=True)
        assert client.versions() == (2,)

    recovery = Recovery(Checkpoint(every=1, mode="sync", path="memory://earlier-life"))
    in_world(scenario, recovery=recovery, shards=1, extra=("spare-0", "spare-1"))


def test_a_table_that_was_overtaken_does_not_replace_a_newer_one() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        before = await client.router.table()
        late = s.held_back(COORDINATOR, lambda m: isinstance(m, ReportFailure))
        process.do(lambda: client.router.report(s.world.endpoint("server-1")))
        await asyncio.sleep(0.1)
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: client.router._table.views[0].epoch > before.views[0].epoch, 2.0)
        after = await s.world.complete()
        await process.run(client.router.newer(after.version - 1))
        late.set()
        await asyncio.sleep(0.1)
        assert (await client.router.table()).views == after.views

    in_world(scenario)


def test_a_keeper_that_started_over_has_nothing_that_it_was_given_before() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        keeper = s.world.hosts[s.world.endpoint("store-0").address]
        s.world.crash("server-0")
        await asyncio.sleep(0.1)
        states = keeper.stored_bytes
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        assert keeper.stored_bytes > states > 0  # with a gradient in the mailbox
        cut_off(s, "store-0")
        await until(lambda: not s.world.table.stores, 6 * LEASE)
        s.network.heal()
        await until(lambda: keeper._life == 1, 2 * LEASE)
        assert keeper.stored_bytes == 0

    in_world(scenario, recovery=STORED, shards=1, last_copy=LEASE)


def test_a_lease_that_is_renewed_at_the_last_moment_goes_on() -> None:
    """Whoever deals with one holder lets others be heard of."""
    over: list[str] = []

    async def scenario(s: Setting) -> None:
        process = s.network.process("watcher")
        leases = Leases[str](TIMINGS, SimClock(process))

        async def on_over(holder: str) -> None:
            over.append(holder)
            leases.end(holder)
            await asyncio.sleep(0.1)

        leases.grant("a")
        leases.grant("b")
        watching = asyncio.create_task(leases.watch(on_over))
        await until(lambda: over, 2 * LEASE)
        leases.grant("b")
        await asyncio.sleep(LEASE / 2)
        assert over == ["a"]
        watching.cancel()

    in_world(scenario)


def test_mail_is_not_left_behind_when_another_node_keeps_it() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        s.world.crash(s.world.name_of((await view_of(s)).chain[0]), back_after=1.0)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        await s.world.bring_up(["mailbox-0"])
        await s.world.complete()
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, recovery=STORED, shards=1)


def test_a_mailbox_that_comes_while_a_shard_is_restored_is_closed_too() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        s.world.crash("store-0")
        await s.world.complete()
        s.network.slow("server-0", "driver", 1.0)
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(0.5)  # the new server holds the state and has asked for its mail
        await s.world.bring_up(["store-0"])
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        await s.world.complete()
        assert {state.version for state in await s.states()} == {1}

    in_world(scenario, recovery=Recovery(outage=Continue()), shards=1)


@pytest.mark.parametrize("kind", [Install, Restore, Configure])
def test_a_request_of_an_earlier_epoch_does_not_say_who_keeps_states(kind: type) -> None:
    """It was overtaken on its way: the store that it names may be gone, or have been replaced."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        view, (state,) = await view_of(s), await s.states()
        head, epoch = view.chain[0], view.epoch - 1
        earlier = {
            Install: Install(0, epoch, view.chain, state, "initial"),
            Restore: Restore(0, epoch, head, Keepers()),
            Configure: Configure(0, epoch, view.chain, head),
        }
        with pytest.raises(StaleEpoch):
            await s.ask(head, earlier[kind])
        await s.all_of(process.run(client.push(ONES)), within=TIMINGS.call)

    in_world(scenario, recovery=Recovery(SharedStore()), shards=1)


def test_a_shard_is_served_though_the_mailbox_is_lost_while_it_is_asked() -> None:
    """The epoch is the same: it is said once more who keeps mail, which is nobody now."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        s.held_back(s.world.endpoint("store-0"), lambda m: isinstance(m, TakeMail))
        epoch = (await view_of(s)).epoch
        s.world.crash("server-0")
        await until(lambda: s.world.view(0).epoch > epoch, LEASE)
        await asyncio.sleep(0.1)
        assert not s.world.view(0).serving
        s.world.crash("store-0")
        await until(lambda: s.world.view(0).serving, 2 * LEASE)
        await s.all_of(process.run(client.push(ONES)), within=TIMINGS.call)

    recovery = Recovery(Chain(2), Continue())
    in_world(scenario, recovery=recovery, shards=1)


def test_a_host_at_an_address_that_was_used_before_is_made_use_of() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = await view_of(s)
        process = s.world.process(s.world.name_of(view.chain[0]))
        assert process is not None
        s.world.crash(process.name)
        await asyncio.sleep(0.2)
        process.alive = True  # another host in another process, at the same address
        me = Endpoint(process.address, "again")
        host = process.do(
            lambda: ShardServer(
                s.world.group,
                "again",
                me,
                SimTransport(s.network, process),
                SimClock(process),
                lambda event: None,
            )
        )
        process.services[me.key] = host.handle
        process.do(host.start)
        s.world.hosts[process.address] = host
        await s.ask(COORDINATOR, AddHosts((HostInfo(me, "again", "server", 0),)))
        async with asyncio.timeout(5.0):
            assert (await view_of(s)).chain == (me,)

    in_world(scenario, shards=1)


def test_a_worker_that_is_evicted_while_it_waits_is_shown_nothing() -> None:
    """It would count as one that is not bounded by anybody's clock."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await s.enter("worker-1")
        await client.push(ONES)
        view = await view_of(s)
        (head,) = view.chain
        reading = asyncio.create_task(s.ask(head, Pull(0, view.epoch, "worker-0", 1, 0, 0.5)))
        await asyncio.sleep(0.1)
        await s.ask(head, Evict(0, view.epoch, (UpdateId("worker-0", 1, 0),)))
        with pytest.raises(Evicted, match=r"Pull \(shard 0, epoch \d+\): worker-0"):
            await reading

    in_world(scenario, consistency=SSP(0), shards=1)


def test_a_head_that_is_out_answers_nobody_whom_it_has_kept_waiting() -> None:
    """It has committed the update, and waits for others before it may show the weights."""

    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        await s.enter("worker-1")
        await s.world.bring_up(["spare-0"])
        view, spare = await view_of(s), s.world.endpoint("spare-0")
        (head,) = view.chain
        op = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(320, np.uint8))
        pushing = asyncio.create_task(s.ask(head, Push(0, view.epoch, op, True, 0.5)))
        await until(lambda: s.world.hosts[head.address].replica(0).state.version == 1)
        await s.ask(head, Configure(0, view.epoch + 1, (spare,), head))
        with pytest.raises(StaleEpoch, match=r"Push of worker-0/1/1 \(shard 0, epoch \d+\)"):
            await pushing

    in_world(scenario, consistency=SSP(0), shards=1)


def test_an_update_that_was_applied_does_not_count_as_dropped() -> None:
    """Though its worker is evicted before it has read the weights after it."""
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0", lambda *ack: outcomes.append(ack[-1]))
        await s.enter("worker-1")
        pushing = process.run(client.push(ONES, pull=True))
        await asyncio.sleep(2 * TIMINGS.patience)
        view = await view_of(s)
        await s.ask(view.chain[0], Evict(0, view.epoch, (UpdateId("worker-0", 1, 0),)))
        await s.all_of(pushing, within=2.0)
        assert (outcomes, client.dropped, client.incarnation) == (["applied"], 0, 2)

    in_world(scenario, consistency=SSP(0), shards=1)


def test_a_head_that_has_no_room_for_an_update_says_so_in_time() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        view = await view_of(s)
        store = s.world.process("store-0")
        assert store is not None
        s.network.pause(store)
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(0.1)
        op = Operation("gradient", UpdateId("worker-1", 1, 1), gradient=np.zeros(320, np.uint8))
        reply = await s.ask(view.chain[0], Push(0, view.epoch, op, False, 0.1), deadline=0.2)
        assert reply == Waiting()
        s.network.resume(store)
        await s.all_of(pushing, within=1.0)

    in_world(scenario, recovery=Recovery(SharedStore(every=1)), shards=1)


def test_no_more_updates_share_a_write_than_were_allowed() -> None:
    async def scenario(s: Setting) -> None:
        entered = [await s.enter(f"worker-{i}") for i in range(6)]
        (server,) = (await view_of(s)).chain
        commits, most = s.world.hosts[server.address].replica(0)._commits, 0
        add = commits.add

        def count(state: ShardState, op: Operation) -> None:
            nonlocal most
            add(state, op)
            most = max(most, commits.in_flight)

        commits.add = count  # type: ignore[method-assign]
        await s.all_of(*(process.run(client.push(ONES)) for process, client in entered), within=3.0)
        assert most == 2

    with patch.object(offload, "INLINE_BYTES", 0):
        in_world(scenario, recovery=Recovery(SharedStore(every=2)), shards=1)
