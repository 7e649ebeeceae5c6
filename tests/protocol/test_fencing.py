"""What comes late, twice or out of order changes nothing, and what is the only copy is kept."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps.core.recovery import Chain, Recovery
from dps.errors import StaleEpoch
from dps.protocol.messages import Configure, Extend
from tests.protocol.test_membership import view_of
from tests.protocol.worlds import Setting, in_world

ONES = {"w": np.ones(40)}
CHAIN = Recovery(Chain(2))


def test_a_replica_never_goes_back_to_an_earlier_epoch() -> None:
    """Also if both came while it was busy, the later one first."""

    async def scenario(s: Setting) -> None:
        view = await view_of(s)
        head = view.chain[0]
        replica = s.world.hosts[head.address].replica(0)
        first = Configure(0, view.epoch + 1, view.chain, head)
        second = Configure(0, view.epoch + 2, view.chain, head)
        async with replica._lock:
            later = asyncio.create_task(s.ask(head, second))
            await asyncio.sleep(0.1)
            earlier = asyncio.create_task(s.ask(head, first))
            await asyncio.sleep(0.1)
        await later
        with pytest.raises(StaleEpoch, match=r"Configure \(shard 0, epoch \d+\): shard 0 is in"):
            await earlier
        assert replica.epoch == view.epoch + 2

    in_world(scenario, recovery=CHAIN, shards=1)


def test_a_configuration_that_comes_twice_does_not_undo_what_came_since() -> None:
    """A chain that is being extended counts on the newcomer already."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        view = await view_of(s)
        await s.world.bring_up(["spare-0"])
        tail, spare = view.chain[-1], s.world.endpoint("spare-0")
        await s.ask(tail, Extend(0, view.epoch, spare))
        await s.ask(tail, Configure(0, view.epoch, view.chain, tail))
        await client.push(ONES)
        newcomer = s.world.hosts[spare.address].replica(0)
        assert newcomer.state.version == 1

    in_world(scenario, recovery=CHAIN, shards=1)
