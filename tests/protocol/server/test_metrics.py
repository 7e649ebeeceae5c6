"""The numbers of a replica that serves: what it has applied, how stale, and what is pending."""

from __future__ import annotations

import asyncio

import numpy as np

from dps.core.shard import AppliedUpdate
from dps.core.updates import UpdateId
from dps.protocol.durabilities.chain import Chain
from dps.protocol.recovery import Recovery
from dps.protocol.server.metrics import STALENESS_BOUNDS, ReplicaMetrics, Tally
from tests.support.worlds import Setting, in_world

ONES = {"w": np.ones(40)}


def figures(s: Setting) -> list[ReplicaMetrics]:
    """Those of the head and of the tail of the only shard."""
    view = s.world.view(0)
    return [found for member in view.chain for found in s.world.hosts[member.address].figures()]


def test_updates_are_counted_on_every_replica_and_pending_ones_on_the_head() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        for _ in range(3):
            await process.run(client.push(ONES, pull=True))
        head, tail = figures(s)
        assert (head.head, tail.head) == (True, False)
        for each in (head, tail):
            assert (each.shard, each.epoch) == (0, s.world.view(0).epoch)
            assert (each.version, each.updates) == (3, 3)
            assert (each.waiting, each.uncommitted, each.duplicates) == (0, 0, 0)
            assert sum(each.staleness) == 3

        replica = s.world.process("replica-0-1")
        assert replica is not None
        s.network.pause(replica)
        pushed = process.run(client.push(ONES))
        await asyncio.sleep(0.05)
        head, _ = figures(s)
        assert (head.updates, head.waiting, head.uncommitted) == (4, 1, 1)
        s.network.resume(replica)
        await pushed
        head, tail = figures(s)
        assert (head.waiting, head.uncommitted, tail.updates) == (0, 0, 4)

    in_world(scenario, shards=1, recovery=Recovery(Chain(2)))


def test_staleness_is_counted_by_bounds() -> None:
    tally = Tally()
    for staleness in (0, 1, 3, 4, 5, 1000):
        tally.add([AppliedUpdate(UpdateId("w", 1, 1), 1, staleness, 0.0, False)])
    at_most = dict(zip((*STALENESS_BOUNDS, None), tally.staleness, strict=True))
    assert {bound: n for bound, n in at_most.items() if n} == {0: 1, 1: 1, 4: 2, 8: 1, None: 1}
    assert (tally.updates, tally.staleness_sum) == (6, 1013)
