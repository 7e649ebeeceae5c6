"""States and mail in stores: of two, the loss of either loses nothing acked; one may be drained."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps.core.replay import Continue
from dps.errors import ShardUnavailable
from dps.events import Failover, LossReported, Restored
from dps.protocol.client.client import Client
from dps.protocol.messages import Drain
from dps.recovery.durability import NoDurability
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.network import Process
from tests.simulator.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ONES = {"w": np.ones(40)}
LEASE = TIMINGS.lease
ONE = Recovery(SharedStore(4))
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


def test_acks_go_on_when_the_server_cannot_reach_one_of_its_stores() -> None:
    """And the store is used again as soon as it can, which nobody who pushes has to wait for."""

    async def scenario(s: Setting) -> None:
        away, left = "store-0", "store-1"
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


def test_a_worker_that_cannot_reach_one_mailbox_buffers_in_the_other() -> None:
    async def scenario(s: Setting) -> None:
        away, left = "store-1", "store-0"
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


async def assert_versions(s: Setting, pushed: int) -> None:
    """Every shard has all that was pushed, each once, and no loss was reported."""
    assert [state.version for state in await s.states()] == [pushed] * 2
    assert not happened(s, LossReported)


async def with_another(s: Setting, store: str = "store-1") -> tuple[Process, Client]:
    """Have one more store than is wanted, and a worker."""
    await s.world.bring_up([store])
    return await s.enter("a")


async def emptied(s: Setting) -> None:
    await until(lambda: s.world.table.complete and not s.world.table.leaving)


def test_a_server_is_lost_while_it_fills_the_new_store() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES)
        s.network.cut("server-0", "store-1")
        await s.ask(COORDINATOR, Drain(s.world.endpoint("store-0")))
        await until(lambda: s.world.view(1).serving and not s.world.view(0).serving, LEASE)
        assert list(kept(s)) == ["store-0", "store-1"]
        s.world.crash("server-0", back_after=0.1)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        restored = happened(s, Restored)[-1]
        assert (restored.shard, restored.source, restored.version) == (0, "store", 1)
        await s.all_of(emptied(s), within=4 * LEASE)
        assert list(kept(s)) == list(mail(s)) == ["store-1"]
        await assert_versions(s, 2)

    in_world(scenario, recovery=ONE)


def test_with_the_new_store_lost_the_old_one_keeps_the_states_until_there_is_another() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES)
        cut(s, "server-0", "store-1")
        old = s.world.endpoint("store-0")
        await s.ask(COORDINATOR, Drain(old))
        await until(lambda: s.world.view(1).serving and not s.world.view(0).serving, LEASE)
        s.world.crash("store-1")
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert list(kept(s)) == list(mail(s)) == ["store-0"]
        assert s.world.table.leaving == (old,)
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        await s.world.bring_up(["store-2"])
        await s.all_of(emptied(s), within=4 * LEASE)
        assert list(kept(s)) == list(mail(s)) == ["store-2"]
        await assert_versions(s, 3)

    in_world(scenario, recovery=ONE)


def test_mail_stays_where_it_is_until_every_shard_is_served() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES, pull=True)
        cut(s, "server-0", "store-1")
        await s.ask(COORDINATOR, Drain(s.world.endpoint("store-0")))
        await until(lambda: s.world.view(1).serving and not s.world.view(0).serving, LEASE)
        s.world.crash("server-0")
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=2 * LEASE)
        await asyncio.sleep(2 * LEASE)
        assert list(mail(s)) == ["store-0"]
        assert s.world.table.leaving
        await s.world.bring_up(["server-0"])
        await s.all_of(emptied(s), within=4 * LEASE)
        assert list(mail(s)) == ["store-1"]
        await assert_versions(s, 2)

    in_world(scenario, recovery=Recovery(ONE.durability, Continue()))


def test_no_store_of_the_next_epoch_acks_updates_of_this_one() -> None:
    """The coordinator does not know yet that they could be restored from it."""

    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES)
        view, lost = s.world.view(0), s.world.table.stores[0]
        server = s.world.hosts[view.chain[0].address]
        replica = server.replica(0)
        s.world.crash(s.world.name_of(lost))
        pushing = asyncio.ensure_future(process.run(client.push(ONES)))
        await until(lambda: replica.uncommitted == 1, TIMINGS.call)
        async with replica.lock:  # as while a large operation is applied
            await until(lambda: server._keepers[0][0] > replica.epoch, 4 * LEASE)
            await until(lambda: "is in epoch 2" in replica._commits.failure, LEASE)
            assert replica.uncommitted == 1
            assert kept(s) == {"store-1": -1}
        await s.all_of(pushing, within=4 * LEASE)
        assert set(kept(s).values()) == {2}

    in_world(scenario, shards=1, recovery=ONE)


def test_shard_unavailable_names_the_store_that_does_not_answer() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        s.world.crash("store-0")
        with pytest.raises(ShardUnavailable, match="the connection to store-0 was refused or lost"):
            await process.run(client.push(ONES))  # it is applied, and leaves no room

    in_world(scenario, shards=1, recovery=Recovery(SharedStore(1)))


def test_the_cause_of_a_failover_is_no_store_that_only_buffers_gradients() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        await s.lose()
        await until(lambda: happened(s, Failover), 8 * LEASE)
        (failover,) = happened(s, Failover)
        assert failover.cause == "its server was lost, and its state was not kept elsewhere"

    in_world(scenario, shards=1, recovery=Recovery(NoDurability(), Continue()))
