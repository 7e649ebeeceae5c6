"""States and mail in two stores: the loss of either ends nothing, and loses nothing acked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps.core.outage import Continue
from dps.core.updates import Operation, UpdateId
from dps.errors import CapacityError, ConfigurationError, MailboxClosed, StaleEpoch
from dps.events import LossReported, Replayed, Restored
from dps.protocol.durabilities.layered import Layered
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.messages import Deposit, Drain, PutState, ReportLink, TakeMail
from dps.protocol.recovery import Recovery
from dps.protocol.storage.state_store import Mailboxes
from dps.sim.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ONES = {"w": np.ones(40)}
LEASE = TIMINGS.lease
TWO = Recovery(SharedStore(4, stores=2))
STATELESS = Recovery(SharedStore(4, stores=2), Continue())


def kept(s: Setting, shard: int = 0) -> dict[str, int]:
    """The version of a shard's state in each store that is used, by the store's name."""
    found = {}
    for store in s.world.table.stores:
        held = s.world.hosts[store.address]._states._states.get(shard)
        found[s.world.name_of(store)] = held[1].version if held is not None else -1
    return found


def mail(s: Setting) -> dict[str, int]:
    """How many gradients for shard 0 are in each mailbox that is used, by its node's name."""
    boxes = s.world.table.mailboxes
    found = {s.world.name_of(b): s.world.hosts[b.address]._mailboxes._mail for b in boxes}
    return {name: len(mail.get(0, ())) for name, mail in found.items()}


def cut(s: Setting, one: str, other: str) -> None:
    s.network.cut(one, other)
    s.network.cut(other, one)


@pytest.mark.parametrize("wrong", [0, -1])
def test_there_is_a_store_at_least(wrong: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"SharedStore: stores={wrong}, expected 1 or more whole nodes"
    ):
        SharedStore(stores=wrong)


def test_what_others_ask_of_it() -> None:
    for durability in (SharedStore(stores=2), Layered(SharedStore(stores=2))):
        assert (durability.stores, durability.replicas, durability.needs_store) == (2, 1, True)
        assert Recovery(durability).stores == 2
    assert Recovery(SharedStore()).stores == 1
    assert Recovery(outage=Continue(buffer="mailbox")).stores == 1
    assert Recovery().stores == 0


def test_an_ack_waits_for_both_stores() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        assert kept(s) == {"store-0": 1, "store-1": 1}
        cut(s, "store-1", "server-0")
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(LEASE)
        assert not pushing.done()
        assert kept(s) == {"store-0": 2, "store-1": 1}
        s.network.heal()
        await s.all_of(pushing, within=2 * TIMINGS.copy)
        assert kept(s) == {"store-0": 2, "store-1": 2}

    in_world(scenario, shards=1, recovery=TWO)


@pytest.mark.parametrize("lost", ["store-0", "store-1"])
def test_when_one_is_lost_acks_go_on_with_the_other(lost: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        restored = len(happened(s, Restored))
        s.world.crash(lost)
        await s.all_of(process.run(client.push(ONES)), within=2 * LEASE)
        assert list(kept(s).values()) == [2]
        assert lost not in kept(s)
        await s.world.bring_up([lost])
        await s.all_of(process.run(client.push(ONES)), within=2 * LEASE)
        assert sorted(kept(s)) == ["store-0", "store-1"]
        assert set(kept(s).values()) == {3}
        assert len(happened(s, Restored)) == restored

    in_world(scenario, recovery=TWO)


@pytest.mark.parametrize("lost", ["store-0", "store-1"])
def test_a_store_and_the_server_are_lost_at_once(lost: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash(lost)
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        restored = happened(s, Restored)[-1]
        assert (restored.shard, restored.source, restored.version) == (0, "store", 1)
        assert {state.version for state in await s.states()} == {2}
        assert not happened(s, LossReported)

    in_world(scenario, recovery=TWO)


def test_one_store_after_the_other_is_lost_when_the_new_one_has_a_copy() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        for number in range(2):
            s.world.crash(f"store-{number}")
            await s.world.bring_up([f"store-{number + 2}"])
            await until(lambda: len(kept(s)) == 2 and s.world.table.complete, 2 * LEASE)
            assert set(kept(s).values()) == {1}
        s.world.crash("store-2")
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert happened(s, Restored)[-1].source == "store"
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, shards=1, recovery=TWO)


def test_a_new_store_that_has_no_copy_yet_is_not_restored_from() -> None:
    """The server is lost while it fills the new one: the state is where it was before."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("store-0")
        await s.all_of(process.run(client.push(ONES)), within=2 * LEASE)
        cut(s, "store-2", "server-0")
        await s.world.bring_up(["store-2"])
        await asyncio.sleep(LEASE)
        assert not s.world.view(0).serving
        assert kept(s) == {"store-1": 2, "store-2": -1}
        s.world.crash("server-0", back_after=0.1)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert happened(s, Restored)[-1].version == 2
        assert kept(s) == {"store-1": 3, "store-2": 3}

    in_world(scenario, shards=1, recovery=TWO)


def test_a_silent_store_is_not_waited_for_when_the_other_has_what_it_has() -> None:
    """With one, it would be for `last_copy`: it is the only copy of a shard that is down."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("server-0", back_after=2 * LEASE)
        cut(s, "store-0", "scheduler")
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert happened(s, Restored)[-1].version == 1
        assert list(kept(s)) == ["store-1"]

    assert TIMINGS.last_copy > 4 * LEASE
    in_world(scenario, shards=1, recovery=TWO)


def test_a_silent_store_is_not_waited_for_while_a_new_one_is_filled_by_a_server_that_lives() -> (
    None
):
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("store-1")
        await s.all_of(process.run(client.push(ONES)), within=2 * LEASE)
        cut(s, "store-2", "server-0")
        await s.world.bring_up(["store-2"])
        await until(lambda: not s.world.view(0).serving, LEASE)
        s.network.pause(s.process_at(s.world.endpoint("store-0")))
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert kept(s) == {"store-2": 3}

    assert TIMINGS.last_copy > 4 * LEASE
    in_world(scenario, shards=1, recovery=TWO)


@pytest.mark.parametrize("survivor", ["store-0", "store-1"])
def test_stores_that_fall_silent_at_once_are_both_waited_for(survivor: str) -> None:
    """Else the first to be judged is given up for the other one, which may have ended."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("server-0")
        await until(lambda: not s.world.view(0).serving, LEASE)
        buffering = process.run(client.push(ONES))
        await until(lambda: sum(mail(s).values()) == 2, LEASE)
        for store in ("store-0", "store-1"):
            cut(s, store, "scheduler")
        await asyncio.sleep(2 * LEASE)
        s.network.heal()
        [lost] = {"store-0", "store-1"} - {survivor}
        s.world.crash(lost)
        await s.world.bring_up(["server-0"])
        await s.all_of(buffering, within=4 * LEASE)
        assert {state.version for state in await s.states()} == {2}
        assert not happened(s, LossReported)

    in_world(scenario, shards=1, recovery=STATELESS)


def test_the_last_store_is_waited_for() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("store-1")
        await s.all_of(process.run(client.push(ONES)), within=2 * LEASE)
        s.world.crash("server-0")
        await s.world.bring_up(["store-2"])
        cut(s, "store-0", "scheduler")
        await asyncio.sleep(4 * LEASE)
        assert "store-0" in kept(s)
        s.network.heal()
        await s.world.bring_up(["server-0"])
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert {state.version for state in await s.states()} == {3}

    in_world(scenario, shards=1, recovery=TWO)


def test_with_both_lost_the_servers_that_live_fill_new_ones() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("store-0", back_after=0.3)
        s.world.crash("store-1", back_after=0.5)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        await until(lambda: len(kept(s)) == 2 and s.world.table.complete, 4 * LEASE)
        assert set(kept(s).values()) == {2}

    in_world(scenario, shards=1, recovery=TWO)


# -- mail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["store-0", "store-1"])
def test_mail_outlives_a_store_while_no_server_is_there(lost: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES, pull=True)
        s.world.crash("server-0")
        s.world.crash("server-1")
        await until(lambda: not any(view.serving for view in s.world.table.views), LEASE)
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        assert mail(s) == {"store-0": 1, "store-1": 1}
        s.world.crash(lost)
        await until(lambda: lost not in mail(s), 2 * LEASE)
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        assert list(mail(s).values()) == [2]
        await s.world.bring_up(["server-0", "server-1"])
        assert [state.version for state in await s.states()] == [3, 3]
        assert {e.count for e in happened(s, Replayed) if e.count} == {2}
        assert not happened(s, LossReported)

    in_world(scenario, recovery=STATELESS)


def test_a_new_store_takes_mail_only_when_every_shard_is_served_again() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES, pull=True)
        s.world.crash("server-0")
        s.world.crash("store-0")
        await until(lambda: list(mail(s)) == ["store-1"], 2 * LEASE)
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        await s.world.bring_up(["store-2"])
        assert list(kept(s)) == ["store-1", "store-2"]
        assert mail(s) == {"store-1": 1}
        await s.world.bring_up(["server-0"])
        await until(lambda: list(mail(s)) == ["store-1", "store-2"], 2 * LEASE)
        assert [state.version for state in await s.states()] == [2]
        s.world.crash("server-0")
        s.world.crash("store-1")
        await until(lambda: list(mail(s)) == ["store-2"], 2 * LEASE)
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        await s.world.bring_up(["server-0"])
        assert [state.version for state in await s.states()] == [3]

    in_world(scenario, shards=1, recovery=STATELESS)


def test_what_only_one_mailbox_has_enters_once() -> None:
    """It was not acked: the worker sends it again, or another one does what it was for."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES, pull=True)
        s.world.crash("server-0")
        await until(lambda: not s.world.view(0).serving, LEASE)
        cut(s, "store-1", "a")
        pushing = process.run(client.push(ONES))
        await until(lambda: mail(s) == {"store-0": 1, "store-1": 0}, LEASE)
        await s.world.bring_up(["server-0"])
        s.network.heal()
        await s.all_of(pushing, within=4 * TIMINGS.call)
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        assert [state.version for state in await s.states()] == [3]

    in_world(scenario, shards=1, recovery=STATELESS)


def test_a_store_that_starts_over_takes_no_mail_of_an_outage_that_is_over() -> None:
    """A worker with an old table would leave it where nobody looks any more."""
    gradient = Operation("gradient", UpdateId("a", 1, 1), gradient=np.zeros(320, np.uint8))
    boxes = Mailboxes()
    boxes.take(TakeMail(0, 7))
    boxes.clear_all()
    with pytest.raises(MailboxClosed):
        boxes.deposit(Deposit(0, 7, gradient))
    boxes.deposit(Deposit(0, 8, gradient))


# -- draining ----------------------------------------------------------------------------------


def test_a_store_is_drained_when_another_one_can_take_its_place() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        drain = Drain(s.world.endpoint("store-0"))
        with pytest.raises(CapacityError, match="no other node for a store"):
            await s.ask(COORDINATOR, drain)
        await s.world.bring_up(["store-2"])
        await s.scaled(drain)
        assert list(kept(s)) == ["store-1", "store-2"]
        s.world.crash("store-0")
        s.world.crash("store-1")
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert {state.version for state in await s.states()} == {2}

    in_world(scenario, shards=1, recovery=TWO)


def test_a_server_of_an_earlier_epoch_can_change_neither_store() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        epoch = s.world.view(0).epoch
        state = (await s.states())[0]
        await s.lose()
        for store in s.world.table.stores:
            with pytest.raises(StaleEpoch):
                await s.ask(store, PutState(0, epoch, state))

    in_world(scenario, shards=1, recovery=TWO)


# -- cut off, though the coordinator hears everybody ---------------------------------------------

BOTH = pytest.mark.parametrize(
    ("away", "left"), [("store-0", "store-1"), ("store-1", "store-0")], ids=["first", "second"]
)


@BOTH
def test_acks_go_on_when_the_server_cannot_reach_one_of_its_stores(away: str, left: str) -> None:
    """And the store is used again as soon as it can, which nobody who pushes has to wait for."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        restored = len(happened(s, Restored))
        cut(s, away, "server-0")
        await s.all_of(process.run(client.push(ONES)), within=6 * LEASE)
        assert kept(s) == {left: 2, away: 1}
        for _ in range(10):  # whether it can be reached is tried now and then, without a pause
            await s.all_of(process.run(client.push(ONES)), within=LEASE / 2)
            await asyncio.sleep(LEASE / 2)
        assert not s.world.table.complete
        s.network.heal()
        await until(lambda: s.world.table.complete, 6 * LEASE)
        assert kept(s) == {left: 12, away: 12}
        assert len(happened(s, Restored)) == restored
        assert not happened(s, LossReported)

    in_world(scenario, shards=1, recovery=TWO)


def test_each_shard_goes_on_without_the_store_that_its_own_server_cannot_reach() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        cut(s, "store-0", "server-0")
        cut(s, "store-1", "server-1")
        await s.all_of(process.run(client.push(ONES)), within=6 * LEASE)
        assert kept(s, 0) == {"store-0": 1, "store-1": 2}
        assert kept(s, 1) == {"store-0": 2, "store-1": 1}

    in_world(scenario, recovery=TWO)


@BOTH
def test_a_shard_is_restored_from_the_store_that_can_be_reached(away: str, left: str) -> None:
    """Also when there is no other host for it, and nobody could report the store before."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        cut(s, away, "server-0")
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=8 * LEASE)
        restored = happened(s, Restored)[-1]
        assert (restored.source, restored.version) == ("store", 1)
        assert kept(s)[left] == 2
        assert not happened(s, LossReported)

    in_world(scenario, shards=1, recovery=TWO)


def test_the_last_store_that_has_the_state_is_waited_for() -> None:
    """The other one is in reach again, but was not when the last updates were acked."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        cut(s, "store-1", "server-0")
        await s.all_of(process.run(client.push(ONES)), within=6 * LEASE)
        cut(s, "store-0", "server-0")
        s.world.crash("server-0", back_after=0.1)
        s.network.mend("store-1", "server-0")
        s.network.mend("server-0", "store-1")
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(20 * LEASE)
        assert not pushing.done()
        assert kept(s) == {"store-0": 2, "store-1": 1}
        s.network.heal()
        await s.all_of(pushing, within=2 * TIMINGS.copy)
        assert {state.version for state in await s.states()} == {3}
        assert not happened(s, LossReported)

    in_world(scenario, shards=1, recovery=TWO)


def test_both_stores_out_of_reach_are_waited_for() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        for store in ("store-0", "store-1"):
            cut(s, store, "server-0")
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(10 * LEASE)
        assert not pushing.done()
        s.network.heal()
        await s.all_of(pushing, within=2 * TIMINGS.copy)
        await until(lambda: s.world.table.complete, 6 * LEASE)
        assert kept(s) == {"store-0": 2, "store-1": 2}

    in_world(scenario, shards=1, recovery=TWO)


def test_a_report_of_an_epoch_that_is_over_takes_no_store_away() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("a")
        view, store = s.world.view(0), s.world.endpoint("store-0")
        await s.ask(COORDINATOR, ReportLink(0, view.epoch - 1, store, 0.0))
        assert s.world.view(0) == view
        await s.ask(COORDINATOR, ReportLink(0, view.epoch, store, 0.0))
        assert s.world.view(0).epoch > view.epoch

    in_world(scenario, shards=1, recovery=TWO)


@BOTH
def test_mail_is_taken_from_the_mailbox_that_can_be_reached(away: str, left: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES, pull=True)
        s.world.crash("server-0", back_after=4 * LEASE)
        await until(lambda: not s.world.view(0).serving, LEASE)
        await s.all_of(process.run(client.push(ONES)), within=LEASE)
        cut(s, away, "server-0")
        await until(lambda: s.world.view(0).serving, 16 * LEASE)
        assert s.world.states(s.world.view(0))[0].version == 2
        await s.all_of(process.run(client.push(ONES)), within=6 * LEASE)
        assert s.world.states(s.world.view(0))[0].version == 3
        assert not happened(s, LossReported)

    in_world(scenario, shards=1, recovery=STATELESS)


@BOTH
def test_a_worker_that_cannot_reach_one_mailbox_buffers_in_the_other(away: str, left: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES, pull=True)
        s.world.crash("server-0")
        await until(lambda: not s.world.view(0).serving, LEASE)
        cut(s, away, "a")
        await s.all_of(process.run(client.push(ONES)), within=4 * TIMINGS.call)
        assert mail(s) == {left: 1}
        await s.world.bring_up(["server-0"])
        await s.all_of(process.run(client.push(ONES)), within=8 * LEASE)
        assert {state.version for state in await s.states()} == {3}
        await until(lambda: len(mail(s)) == 2, 6 * LEASE)

    in_world(scenario, shards=1, recovery=STATELESS)
