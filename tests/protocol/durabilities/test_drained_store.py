"""A store that is drained: its states are elsewhere before it goes, whoever is lost meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from dps.core.outage import Continue, Outage, Wait
from dps.errors import CapacityError, NotServing
from dps.events import LossReported, Restored
from dps.protocol.client.client import Client
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.messages import Drain
from dps.protocol.recovery import Recovery
from dps.sim.process import Process
from dps.sim.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ONES = {"w": -np.ones(40)}
LEASE = TIMINGS.lease
ONE = Recovery(SharedStore(4))
STATELESS = Recovery(SharedStore(4), Continue())
AT_LEAST = 20  # messages of a drain, so that a sweep over all of them is one


def stores(s: Setting) -> list[str]:
    return [s.world.name_of(store) for store in s.world.table.stores]


def mailboxes(s: Setting) -> list[str]:
    return [s.world.name_of(box) for box in s.world.table.mailboxes]


def cut(s: Setting, one: str, other: str) -> None:
    s.network.cut(one, other)
    s.network.cut(other, one)


async def assert_versions(s: Setting, pushed: int) -> None:
    """Every shard has all that was pushed, each once, and no loss was reported."""
    assert [state.version for state in await s.states()] == [pushed] * 2
    assert not happened(s, LossReported)


async def with_another(s: Setting, store: str = "store-1") -> tuple[Process, Client]:
    """Have one more store than is wanted, and a worker."""
    await s.world.bring_up([store])
    return await s.enter("a")


async def drained(s: Setting) -> None:
    """Have `store-0` emptied, as the driver has it for a node that is told to leave."""
    store = s.world.endpoint("store-0")
    while True:
        try:
            await s.ask(COORDINATOR, Drain(store))
            break
        except (CapacityError, NotServing):  # somebody was lost before it began
            await asyncio.sleep(0.05)
    await emptied(s)


async def emptied(s: Setting) -> None:
    await until(lambda: s.world.table.complete and not s.world.table.leaving)


async def lost_at(s: Setting, moment: int, lost: Sequence[str]) -> bool:
    """Drain `store-0`, and crash nodes as the so-manyth message is sent since.

    Returns
    -------
    bool
        Whether that was before the drain was over.
    """
    sent, now = 0, asyncio.Event()

    def watch(what: str, source: str, target: str, message: str) -> None:
        nonlocal sent
        if what == "sent" and not message.startswith("Renew"):
            sent += 1
            if sent == moment:
                now.set()

    s.network.watchers.append(watch)
    due, over = asyncio.create_task(now.wait()), asyncio.create_task(drained(s))
    await asyncio.wait((due, over), return_when=asyncio.FIRST_COMPLETED)
    meanwhile = not over.done()
    for name in lost if meanwhile else ():
        s.world.crash(name, back_after=0.2)
    due.cancel()
    await s.all_of(over, within=20 * LEASE)
    return meanwhile


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "lost", "outage"),
    [
        (1, ["server-0"], Wait()),
        (1, ["server-0", "server-1"], Continue()),
        (1, ["store-1"], Wait()),
        (1, ["store-0"], Wait()),
        (2, ["server-0", "store-0"], Continue()),
        (2, ["server-0", "store-1"], Continue()),
        (2, ["server-0", "store-2"], Wait()),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else repr(value).partition("(")[0],
)
def test_whoever_is_lost_at_any_moment_of_it(number: int, lost: list[str], outage: Outage) -> None:
    """As many as the durability survives; when it is over, the same holds without the old store."""

    async def scenario(s: Setting) -> bool:
        process, client = await with_another(s, f"store-{number}")
        await client.push(ONES, pull=True)
        pushing = process.run(client.push(ONES))
        meanwhile = await lost_at(s, moment, lost)
        await s.all_of(pushing, process.run(client.push(ONES)), within=20 * LEASE)
        await assert_versions(s, 3)
        if s.world.process("store-0") is not None:
            s.world.crash("store-0")
        s.world.crash("server-0", back_after=0.1)
        s.world.crash("server-1", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=20 * LEASE)
        await assert_versions(s, 4)
        return meanwhile

    moment, recovery = 0, Recovery(SharedStore(4, stores=number), outage)
    meanwhile = True
    while meanwhile:
        moment += 1
        meanwhile = in_world(scenario, seed=moment, recovery=recovery)
    assert moment > AT_LEAST


def test_a_server_is_lost_while_it_fills_the_new_store() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES)
        s.network.cut("server-0", "store-1")
        await s.ask(COORDINATOR, Drain(s.world.endpoint("store-0")))
        await until(lambda: s.world.view(1).serving and not s.world.view(0).serving, LEASE)
        assert stores(s) == ["store-0", "store-1"]
        s.world.crash("server-0", back_after=0.1)
        s.network.heal()
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        restored = happened(s, Restored)[-1]
        assert (restored.shard, restored.source, restored.version) == (0, "store", 1)
        await s.all_of(emptied(s), within=4 * LEASE)
        assert stores(s) == mailboxes(s) == ["store-1"]
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
        assert stores(s) == mailboxes(s) == ["store-0"]
        assert s.world.table.leaving == (old,)
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        await s.world.bring_up(["store-2"])
        await s.all_of(emptied(s), within=4 * LEASE)
        assert stores(s) == mailboxes(s) == ["store-2"]
        await assert_versions(s, 3)

    in_world(scenario, recovery=ONE)


def test_a_new_store_that_falls_silent_is_not_waited_for() -> None:
    """The old one has all that it has."""

    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES)
        for other in ("server-0", "server-1", "scheduler"):
            cut(s, other, "store-1")
        await s.ask(COORDINATOR, Drain(s.world.endpoint("store-0")))
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        assert stores(s) == ["store-0"]
        s.network.heal()
        await s.all_of(emptied(s), within=8 * LEASE)
        assert stores(s) == ["store-1"]
        await assert_versions(s, 2)

    assert TIMINGS.last_copy > 8 * LEASE
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
        assert mailboxes(s) == ["store-0"]
        assert s.world.table.leaving
        await s.world.bring_up(["server-0"])
        await s.all_of(emptied(s), within=4 * LEASE)
        assert mailboxes(s) == ["store-1"]
        await assert_versions(s, 2)

    in_world(scenario, recovery=STATELESS)


def test_it_is_refused_where_there_is_no_other_node_for_a_store() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await with_another(s)
        await client.push(ONES)
        other = s.world.endpoint("store-1")
        s.world.crash("store-1")
        await until(lambda: s.world.has_ended(other), LEASE)
        with pytest.raises(CapacityError, match="no other node for a store"):
            await s.ask(COORDINATOR, Drain(s.world.endpoint("store-0")))
        assert not s.world.table.leaving
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(client.push(ONES)), within=4 * LEASE)
        await assert_versions(s, 2)

    in_world(scenario, recovery=ONE)
