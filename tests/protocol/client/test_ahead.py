"""Several updates of a worker under way at once: each is applied once, through failures."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import pytest

from dps.core.consistency import ASP, SSP, Consistency
from dps.core.replay import Continue, Replay
from dps.core.updates import UpdateId
from dps.protocol.client.shard_client import Outcome
from dps.recovery.chain import Chain
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.network import Weather
from tests.support.worlds import Setting, in_world

WORKERS = 3
PUSHES = 15
AHEAD = 2
CHAIN = Recovery(Chain(2))
STATELESS = Recovery(SharedStore(), Continue(limit=4, buffer="worker"), Replay("each"))


async def train_ahead(s: Setting, index: int) -> set[tuple[int, UpdateId]]:
    """Count up a row of one's own with updates that overlap; return those that were dropped."""
    dropped: set[tuple[int, UpdateId]] = set()

    def note(shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        if outcome == "dropped":
            dropped.add((shard, update))

    process, client = await s.enter(f"worker-{index}", note)

    async def loop() -> None:
        await client.pull()
        gradient = np.zeros((WORKERS, 20))
        gradient[index] = -1.0
        under_way: deque[asyncio.Task[int]] = deque()
        numbers = []
        for _ in range(PUSHES):
            point = client.read_point()
            await asyncio.sleep(s.random.uniform(0, 0.02))
            push = client.push({"w": gradient}, pull=True, computed_on=point)
            under_way.append(asyncio.ensure_future(push))
            while len(under_way) > AHEAD:
                numbers.append(await under_way.popleft())
        numbers += [await push for push in under_way]
        assert numbers == sorted(set(numbers))
        await client.leave("finished")

    await process.run(loop())
    return dropped


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("consistency", "recovery"), [(ASP(), CHAIN), (SSP(4), STATELESS)], ids=["chain", "stateless"]
)
def test_each_update_is_applied_once_through_losses_of_servers(
    consistency: Consistency, recovery: Recovery, seed: int
) -> None:
    async def lose(s: Setting) -> None:
        for _ in range(2):
            await asyncio.sleep(s.random.uniform(0.02, 0.2))
            await s.lose()

    async def scenario(s: Setting) -> None:
        losing = asyncio.ensure_future(lose(s))
        training = [train_ahead(s, index) for index in range(WORKERS)]
        dropped = await s.all_of(*training, within=120.0)
        await losing
        states = await s.states()
        found = s.world.group.layout.scatter({i: state.values for i, state in enumerate(states)})
        lost = [dict.fromkeys(range(2), 0) for _ in range(WORKERS)]
        for index, updates in enumerate(dropped):
            for shard, _ in updates or ():
                lost[index][shard] += 1
        for shard, layout in enumerate(s.world.group.layout.shards):
            rows = np.arange(found["w"].size).reshape(found["w"].shape) // 20
            for piece in layout.pieces:
                block = piece.block
                of_rows = rows.reshape(-1)[block.start : block.stop]
                values = found["w"].reshape(-1)[block.start : block.stop]
                expected = [PUSHES - lost[row][shard] for row in of_rows]
                assert values.tolist() == expected

    in_world(
        scenario,
        seed=seed,
        params={"w": np.zeros((WORKERS, 20))},
        consistency=consistency,
        recovery=recovery,
        weather=Weather(loss={"train": 0.05}, duplicated=0.05),
    )
