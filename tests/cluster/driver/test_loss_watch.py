"""What the driver hears of losses, on simulated processes."""

from __future__ import annotations

import asyncio
import warnings

import numpy as np

from dps.cluster.driver.losses import LossWatch
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import GetLosses
from dps.sim.network import SimTransport
from dps.sim.world import COORDINATOR
from tests.support.worlds import Setting, in_world, until

ONES = {"w": np.ones(40)}


def test_a_loss_that_is_found_while_another_is_asked_for_is_not_missed() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        router = Router(s.world.group, SimTransport(s.network, s.network.process("driver-2")))
        watch = LossWatch(s.world.group)
        await router.table()
        watch.open(router)
        await client.push(ONES)
        held = s.held_back(COORDINATOR, lambda message: isinstance(message, GetLosses))
        for shard in (0, 1):
            s.world.crash(f"server-{shard}", back_after=0.1)
            await until(lambda n=shard: len(s.world.losses.found) > n, within=5.0)
        await until(lambda: all(view.serving for view in s.world.table.views))
        await asyncio.sleep(0.5)  # the last table has arrived
        held.set()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await until(lambda: len(watch.found) == 2, within=0.5)
        assert len(caught) == 2
        await router.close()

    in_world(scenario)


def test_what_the_table_has_not_told_yet_is_told_at_the_end() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        router = Router(s.world.group, SimTransport(s.network, s.network.process("driver-2")))
        watch = LossWatch(s.world.group)
        watch.open(router)  # it has not been asked for a table, and hears of none
        await client.push(ONES)
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: s.world.losses.found, within=5.0)
        assert watch.found == ()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await watch.close()
        assert watch.found == s.world.losses.found
        assert len(caught) == 1

    in_world(scenario)
