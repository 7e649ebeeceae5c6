"""Every durability with every outage policy, and replay policies in turn: a crash, and promises.

Two workers push ones; one shard's server is lost and comes back. Whatever the combination, every
push returns, nothing enters twice, and no more is lost than the durability allows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import get_args

import numpy as np
import pytest

from dps.core.replay import Continue, Outage, Policy, Replay, Wait
from dps.errors import ConfigurationError
from dps.events import Replayed
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import Durability, NoDurability
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from dps.recovery.worker_cache import WorkerCache
from tests.support.worlds import Setting, in_world

PUSHES = 14
LIMIT = 3
ONES = {"w": np.ones(40)}
_numbers = count()

DURABILITIES: dict[str, Durability] = {
    "none": NoDurability(),
    "checkpoint, sync": Checkpoint(4, "sync"),
    "checkpoint, async": Checkpoint(4),
    "checkpoint, seconds": Checkpoint(seconds=0.2),
    "checkpoint, all": Checkpoint(4, scope="all"),
    "chain(1)": Chain(1),
    "chain(2)": Chain(2),
    "chain(3)": Chain(3),
    "shared_store": SharedStore(4),
    "worker_cache": WorkerCache(),
}
OUTAGES: dict[str, Outage] = {
    "wait": Wait(),
    "continue, worker": Continue(LIMIT, "worker"),
    "continue, mailbox": Continue(LIMIT, "mailbox"),
}
POLICIES: tuple[Policy, ...] = get_args(Policy)
REFUSED = {
    (
        "checkpoint, all",
        outage,
    ): "scope='all' cannot be combined with outage=continue: gradients buffered"
    for outage in ("continue, worker", "continue, mailbox")
}
WHOLE = ("sum", "each", "published")  # those that leave the gradients as they are
# Each durability and each policy meets each outage.
COMBINATIONS = [
    (durability, outage, POLICIES[(i + j) % len(POLICIES)])
    for i, durability in enumerate(DURABILITIES)
    for j, outage in enumerate(OUTAGES)
]


def may_lose(durability: str) -> float:
    """How many acked updates of one shard its loss may cost."""
    match DURABILITIES[durability]:
        case Checkpoint(every=every) if every is not None:
            return every
        case Chain(replicas) if replicas > 1:
            return 0
        case SharedStore():
            return 0
        case _:
            return float("inf")


def combined(durability: str, outage: str, policy: Policy) -> Recovery:
    chosen = DURABILITIES[durability]
    if isinstance(chosen, Checkpoint):
        path = f"memory://combinations-{next(_numbers)}"
        chosen = replace(chosen, path=path)
    return Recovery(chosen, OUTAGES[outage], Replay(policy, drop_older_than=5))


@pytest.mark.parametrize(("durability", "outage", "policy"), COMBINATIONS)
def test_a_combination_keeps_its_promise(durability: str, outage: str, policy: Policy) -> None:
    if (durability, outage) in REFUSED:
        with pytest.raises(ConfigurationError, match=REFUSED[durability, outage]):
            combined(durability, outage, policy)
        return
    recovery = combined(durability, outage, policy)
    together = durability == "checkpoint, all"
    outcomes: Counter[tuple[int, str]] = Counter()

    async def train(s: Setting, name: str) -> None:
        _, client = await s.enter(name, lambda *ack: outcomes.update([(ack[0], ack[3])]))
        for _ in range(PUSHES):
            await client.push(ONES, pull=True)
            await asyncio.sleep(s.random.uniform(0, 0.04))
        await client.leave("finished")
        await client.close()

    async def scenario(s: Setting) -> None:
        workers = [asyncio.create_task(train(s, f"worker-{i}")) for i in range(2)]
        await asyncio.sleep(0.15)
        s.world.crash("server-0", back_after=1.0)
        await s.all_of(*workers, within=20.0)
        lost, other = await s.states()
        replayed = [e for _, e in s.world.events if isinstance(e, Replayed)]
        dropped = sum(e.dropped for e in replayed)
        assert other.version == (lost.version if together else 2 * PUSHES)
        assert lost.version == sum(p.applied for p in lost.workers.values())
        assert 0 <= 2 * PUSHES - dropped - lost.version <= may_lose(durability)
        assert policy == "drop_older" or not dropped
        values = lost.values.view("float64")
        assert (values == values[0]).all()
        assert -lost.version <= values[0] <= 0
        if policy in WHOLE:
            assert values[0] == -lost.version
        # A chain of several is served again before anything has to be buffered, or soon after.
        buffered = outcomes[0, "buffered"]
        waits = outage == "wait" or recovery.durability.replicas > 1
        assert buffered <= 2 * LIMIT if waits else buffered == 2 * LIMIT
        assert outage != "wait" or not (buffered or replayed)

    in_world(scenario, seed=durability, recovery=recovery)
