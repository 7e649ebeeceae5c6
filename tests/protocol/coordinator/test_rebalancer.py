"""Shards that move between hosts while workers push: who holds them, and what a loss costs."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from dps.errors import ConfigurationError
from dps.protocol.client.client import Client
from dps.protocol.messages import Drain, Install, Scale, Table
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.strategy import Recovery
from tests.simulator.disk import SCHEME, disk
from tests.simulator.network import Process
from tests.simulator.world import COORDINATOR
from tests.support.worlds import Setting, in_world, until

PARAMS = {f"w{i}": np.zeros(30 + i) for i in range(6)}
ONES = {name: -np.ones_like(values) for name, values in PARAMS.items()}


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
        await until(lambda: s.world.hosts[target.address].states())
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
            with pytest.raises(ConfigurationError, match="cannot move under"):
                await s.scaled(request)

    recovery = Recovery(Checkpoint(path=f"{SCHEME}://scaling/all", scope="all"))
    files = disk("scaling")
    try:
        in_world(scenario, params=PARAMS, shards=2, recovery=recovery)
    finally:
        files.erase()
