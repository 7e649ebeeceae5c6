"""What every durability does for a shard: begin, commit, restore, and fence earlier servers off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.core.tables.key_routing import Gradients
from dps.core.tables.row_gradients import KEYS
from dps.core.tables.spec import SparseSpec
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError
from dps.events import Restored
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durabilities.worker_cache import WorkerCache
from dps.protocol.durability import Durability, NoDurability
from dps.protocol.messages import Push
from dps.protocol.recovery import Recovery
from tests.support.worlds import Setting, in_world

ONES = {"w": np.ones(40)}
TABLE = SparseSpec("emb", 2, "float64")
ROWS = {"emb": (np.arange(50), np.ones((50, 2)))}
PUSHES = 12
_numbers = count()


def files(**choices: Any) -> Checkpoint:
    return Checkpoint(path=f"memory://durabilities-{next(_numbers)}", **choices)


# How each is made, and how many acked updates a loss may cost it.
DURABILITIES: dict[str, tuple[Callable[[], Durability], float]] = {
    "none": (NoDurability, float("inf")),
    "checkpoint, async": (lambda: files(every=5), 5),
    "checkpoint, sync": (lambda: files(every=5, mode="sync"), 5),
    "checkpoint, seconds": (lambda: files(seconds=0.1), float("inf")),
    "checkpoint, all": (lambda: files(every=5, scope="all"), 5),
    "chain": (lambda: Chain(2), 0),
    "shared_store": (lambda: SharedStore(4), 0),
    "worker_cache": (WorkerCache, float("inf")),
}


@pytest.fixture(params=DURABILITIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def carry_out(kind: str, scenario: Callable[[Setting], Any], seed: int = 0) -> None:
    make, _ = DURABILITIES[kind]
    tables = [TABLE] if rows(kind) else []
    in_world(scenario, seed=seed, shards=2, tables=tables, recovery=Recovery(make()))


def rows(kind: str) -> Gradients:
    """What is pushed with the dense gradient, where tables are kept."""
    return {} if kind == "worker_cache" else ROWS


def check_whole(state: ShardState, kind: str) -> None:
    """Each weight and each row counts the updates that are in the state."""
    assert (state.values.view("float64") == -state.version).all()
    if rows(kind) and state.version:
        held = state.tables["emb"].between(0, KEYS, TABLE)
        assert 10 < len(held) < 40
        assert (held.values == -state.version).all()


async def lose(s: Setting) -> None:
    """Lose the server of shard 0, and wait until it is served by all its replicas again."""
    before = (await s.world.complete()).views[0].epoch
    s.world.crash("server-0", back_after=0.1)
    while (await s.world.complete()).views[0].epoch == before:
        await asyncio.sleep(0.01)


def test_a_shard_that_is_lost_before_any_update_comes_back_as_it_was(kind: str) -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("a")
        await lose(s)
        state = (await s.states())[0]
        assert state.version == 0
        assert not state.values.any()

    carry_out(kind, scenario)


@pytest.mark.slow
def test_no_more_is_lost_than_promised_and_nothing_enters_twice(kind: str) -> None:
    _, may_lose = DURABILITIES[kind]

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for _ in range(s.random.randint(1, PUSHES)):
            await client.push(ONES, pull=s.random.random() < 0.5, rows=rows(kind))
        acked = client.next_seq - 1
        await lose(s)
        state = (await s.states())[0]
        assert 0 <= acked - state.version <= may_lose
        await s.all_of(process.run(client.push(ONES, rows=rows(kind))), within=10.0)
        after = (await s.states())[0]
        assert after.version == state.version + 1 == sum(p.applied for p in after.workers.values())
        check_whole(state, kind)
        check_whole(after, kind)

    for seed in range(8):
        carry_out(kind, scenario, seed)


def test_what_came_back_knows_which_updates_it_holds(kind: str) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(PUSHES):
            await client.push(ONES, pull=True, rows=rows(kind))
        await asyncio.sleep(1.0)
        await lose(s)
        view = (await s.world.complete()).views[0]
        state = (await s.states())[0]
        size = s.world.group.layout.shards[0].nbytes // 8
        for seq in range(1, state.version + 1):
            op = Operation("gradient", UpdateId("a", 1, seq), gradient=np.ones(size).view("uint8"))
            reply = await s.ask(view.chain[0], Push(0, view.epoch, op, False, 0.1))
            assert reply.outcome == "duplicate"
        after = (await s.states())[0]
        assert after.version == state.version
        check_whole(after, kind)

    carry_out(kind, scenario)


def test_requests_of_the_epoch_before_are_refused(kind: str) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        before = (await s.world.complete()).views[0]
        await lose(s)
        now = (await s.world.complete()).views[0]
        size = s.world.group.layout.shards[0].nbytes // 8
        op = Operation("gradient", UpdateId("a", 1, 99), gradient=np.ones(size).view("uint8"))
        version = (await s.states())[0].version
        with pytest.raises(DpsError, match="shard 0"):
            await s.ask(now.chain[0], Push(0, before.epoch, op, False, 0.1))
        assert (await s.states())[0].version == version

    carry_out(kind, scenario)


def test_where_it_came_back_from_is_recorded(kind: str) -> None:
    sources = {"none": "initial", "shared_store": "store", "worker_cache": "worker"}

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES, pull=True)
        await lose(s)
        restored = [e for _, e in s.world.events if isinstance(e, Restored) and e.shard == 0]
        if kind == "chain":
            assert len(restored) == 1, "it was never gone"
        else:
            assert restored[-1].source == sources.get(kind, "checkpoint")

    carry_out(kind, scenario)
