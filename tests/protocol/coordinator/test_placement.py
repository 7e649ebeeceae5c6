"""Shards that move between hosts while workers push: who holds them, and what a loss costs.

With a ring of servers, also what moves when one is lost, or comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from dps.core.placement import ConsistentHash, HashRing
from dps.errors import ConfigurationError
from dps.events import Moved, Restored
from dps.protocol.client.client import Client
from dps.protocol.messages import Drain, Install, Scale, Table
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.strategy import Recovery
from tests.simulator.disk import SCHEME, disk
from tests.simulator.network import Process
from tests.simulator.world import COORDINATOR
from tests.support.worlds import Setting, happened, in_world, until

PARAMS = {f"w{i}": np.zeros(30 + i) for i in range(6)}
ONES = {name: -np.ones_like(values) for name, values in PARAMS.items()}

SHARDS, SERVERS = 16, 4
ALL = tuple(f"server-{i}" for i in range(SERVERS))
RING = ConsistentHash(64)


def loads(s: Setting, table: Table) -> dict[str, int]:
    """How many replicas are on each node that has any."""
    return Counter(s.world.name_of(member) for view in table.views for member in view.chain)


class Pusher:
    """A worker that pushes without a pause until it is told to stop."""

    def __init__(self, process: Process, client: Client) -> None:
        self.pushed = 0
        self._client = client
        self._over = False
        self._task = process.run(self._push())

    async def _push(self) -> None:
        while not self._over:
            await self._client.push(ONES, pull=True)
            self.pushed += 1
        await self._client.leave("finished")

    async def stopped(self) -> int:
        self._over = True
        await self._task
        return self.pushed


def test_a_move_that_is_under_way_is_not_replaced_by_another() -> None:
    """Its newcomer would stay where it is: in a chain that is longer than wanted, for ever."""

    async def scenario(s: Setting) -> None:
        target = s.world.endpoint("spare-0")
        copied = s.held_back(target, lambda message: isinstance(message, Install))
        await s.ask(COORDINATOR, Scale(2))
        await until(lambda: s.world.hosts[target.address].replicas)
        draining = asyncio.ensure_future(s.scaled(Drain(target)))
        await asyncio.sleep(0.1)
        copied.set()
        (table,) = await s.all_of(draining, within=10.0)
        chains = [[s.world.name_of(host) for host in view.chain] for view in table.views]
        assert sorted(chains) == [["server-0"], ["spare-1"]]

    in_world(scenario, shards=2, servers=1, extra=("spare-0", "spare-1"))


def test_a_new_node_takes_the_place_of_one_that_was_lost() -> None:
    async def scenario(s: Setting) -> None:
        s.world.crash("server-1")
        table = await s.world.complete()
        while loads(s, table) != {"server-0": 3, "server-2": 3}:
            await asyncio.sleep(0.01)
            table = await s.world.complete()

    in_world(scenario, params=PARAMS, shards=6, servers=2, extra=("server-2",))


def test_shards_that_go_back_together_stay_where_they_are() -> None:
    async def scenario(s: Setting) -> None:
        for request in (Scale(2), Drain(s.world.endpoint("server-0"))):
            with pytest.raises(ConfigurationError, match="cannot move"):
                await s.scaled(request)

    recovery = Recovery(Checkpoint(path=f"{SCHEME}://scaling/all", scope="all"))
    files = disk("scaling")
    try:
        in_world(scenario, params=PARAMS, shards=2, recovery=recovery)
    finally:
        files.erase()


# -- a ring of servers -----------------------------------------------------------------------------


def on_ring(*servers: str, replicas: int = 1) -> dict[int, tuple[str, ...]]:
    """The servers that each shard is to be on, the owner first."""
    ring = HashRing.of(servers, RING.virtual_nodes)
    order = {shard: ring.successors(str(shard)) for shard in range(SHARDS)}
    return {shard: tuple(servers[i] for i in of[:replicas]) for shard, of in order.items()}


def chains(s: Setting, table: Table) -> dict[int, tuple[str, ...]]:
    """The nodes that each shard is on, from head to tail."""
    return {v.shard: tuple(s.world.name_of(member) for member in v.chain) for v in table.views}


def sets(of: Mapping[int, tuple[str, ...]]) -> dict[int, set[str]]:
    """The nodes of each shard, in whichever order."""
    return {shard: set(nodes) for shard, nodes in of.items()}


async def at_rest(s: Setting) -> Table:
    """Wait until all is served, and nothing is to be moved."""
    table = await s.world.complete()
    while table.leaving:
        await asyncio.sleep(0.01)
        table = await s.world.complete()
    return table


async def lost(s: Setting, name: str) -> Table:
    """Crash a node, and wait until all is at rest without it."""
    host = s.world.endpoint(name)
    s.world.crash(name)
    await until(lambda: all(host not in view.chain for view in s.world.table.views))
    return await at_rest(s)


@pytest.mark.parametrize(("name", "replicas"), [("server-2", 2), ("server-2-b", 1)])
def test_a_server_that_comes_back_gets_what_the_lost_one_had_and_nothing_else_moves(
    name: str, replicas: int
) -> None:
    async def scenario(s: Setting) -> None:
        before = chains(s, await at_rest(s))
        await lost(s, "server-2")
        seen = len(happened(s, Moved))
        await s.world.bring_up([name])
        host = s.world.endpoint(name)
        await until(lambda: any(host in view.chain for view in s.world.table.views))
        after = chains(s, await at_rest(s))
        as_before = {
            shard: {name if n == "server-2" else n for n in c} for shard, c in before.items()
        }
        assert sets(after) == as_before
        moved = [event.shard for event in happened(s, Moved)[seen:]]
        assert sorted(moved) == [shard for shard, chain in before.items() if "server-2" in chain]

    recovery = Recovery(Chain(replicas)) if replicas > 1 else Recovery()
    how = {"params": PARAMS, "shards": SHARDS, "servers": SERVERS, "placement": RING}
    in_world(scenario, recovery=recovery, **how)


def test_servers_that_are_added_and_drained_take_and_give_their_own_shards() -> None:
    async def scenario(s: Setting) -> None:
        worker = Pusher(*await s.enter("worker-0"))
        assert chains(s, await s.world.complete()) == on_ring(*ALL[:3])
        table = await s.scaled(Scale(4))
        assert chains(s, table) == on_ring(*ALL)
        added = [shard for shard, chain in on_ring(*ALL).items() if chain == ("server-3",)]
        assert sorted(event.shard for event in happened(s, Moved)) == added
        table = await s.scaled(Drain(s.world.endpoint("server-0")))
        assert chains(s, table) == on_ring(*ALL[1:])
        left = [shard for shard, chain in on_ring(*ALL).items() if chain == ("server-0",)]
        assert sorted(event.shard for event in happened(s, Moved)) == sorted([*added, *left])
        await worker.stopped()
        assert not [event for event in happened(s, Restored) if event.epoch > 1]

    how = {"params": PARAMS, "shards": SHARDS, "servers": 3, "placement": RING}
    in_world(scenario, extra=("server-3",), **how)
