"""Consistent cuts: all shards go back together, to states that hold the same updates."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import count
from typing import Any

import fsspec
import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.events import CheckpointRefused, CutTaken, Event, Restored, RolledBack
from dps.protocol.client.client import Client
from dps.recovery.checkpoint import Checkpoint, CutPersistence
from dps.recovery.strategy import Recovery
from tests.support.worlds import Setting, in_world

ONES = {"w": np.ones(40)}
SHARDS = 3
_numbers = count()


class Record:
    """The states that were written and restored, by cut and shard."""

    def __init__(self) -> None:
        self.written: defaultdict[int, dict[int, ShardState]] = defaultdict(dict)
        self.restored: list[tuple[int, int, ShardState]] = []

    def clear(self) -> None:
        self.written.clear()
        self.restored.clear()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    record = Record()
    write, restore = CutPersistence.write_cut, CutPersistence.restore

    async def note_write(self: CutPersistence, epoch: int, cut: int, state: ShardState) -> None:
        await write(self, epoch, cut, state)
        record.written[cut][self._shard] = state

    async def note_restore(self: CutPersistence, epoch: int, cut: int) -> ShardState:
        state = await restore(self, epoch, cut)
        record.restored.append((cut, self._shard, state))
        return state

    monkeypatch.setattr(CutPersistence, "write_cut", note_write)
    monkeypatch.setattr(CutPersistence, "restore", note_restore)
    return record


def together(every: int | None = 8, **choices: Any) -> Recovery:
    path = f"memory://cuts-{next(_numbers)}"
    return Recovery(Checkpoint(every=every, path=path, scope="all", **choices))


def events(s: Setting, kind: type[Event]) -> list[Any]:
    return [e for _, e in s.world.events if isinstance(e, kind)]


def updates(state: ShardState) -> dict[str, tuple[int, int]]:
    """Which updates are in a state: each worker's, up to its clock."""
    return {name: (p.incarnation, p.clock) for name, p in state.workers.items()}


def assert_alike(states: dict[int, ShardState]) -> None:
    assert states.keys() == set(range(SHARDS))
    reached = [updates(state) for state in states.values()]
    for reach in reached:  # one that was given up, or enters again, is no part of a cut
        for name in list(reach):
            if not all(name in s.workers and s.workers[name].active for s in states.values()):
                del reach[name]
    assert all(reach == reached[0] for reach in reached)


def assert_exact(states: list[ShardState]) -> None:
    for state in states:
        assert state.version == sum(p.applied for p in state.workers.values())
        assert (state.values.view("float64") == -state.version).all()


async def train(s: Setting, name: str, pushes: int = 25) -> tuple[list[float], Client]:
    """Push, and return when each push was acked."""
    process, client = await s.enter(name)
    acked = []

    async def work() -> None:
        for _ in range(pushes):
            await client.push(ONES, pull=s.random.random() < 0.3)
            acked.append(asyncio.get_running_loop().time())
            await asyncio.sleep(s.random.uniform(0, 0.03))

    await process.run(work())
    await client.leave("finished")
    return acked, client


async def restorations(s: Setting, before: int) -> list[Restored]:
    """Wait until every shard has been restored once more."""
    while len(events(s, Restored)) < before + SHARDS:
        await asyncio.sleep(0.001)
    await s.world.complete()
    return events(s, Restored)[before:]


def test_after_a_loss_all_shards_go_back_to_the_same_updates(record: Record) -> None:
    every, restored_versions = 8, []

    async def scenario(s: Setting) -> None:
        training = [asyncio.create_task(train(s, f"worker-{i}")) for i in range(3)]
        await asyncio.sleep(s.random.uniform(0.1, 0.6))
        crashed, before = asyncio.get_running_loop().time(), len(events(s, Restored))
        states = [s.world.hosts[v.chain[0].address].replica(v.shard) for v in await views(s)]
        had = [replica.state.version for replica in states]
        s.world.crash(f"server-{s.random.randrange(SHARDS)}", back_after=0.05)
        back = await restorations(s, before)
        assert len({e.version for e in back}) == 1
        restored_versions.append(back[0].version)
        assert events(s, RolledBack)
        trained = await s.all_of(*training, within=60.0)
        acked = sum(at <= crashed for times, _ in trained for at in times)
        assert acked - back[0].version <= every
        assert max(had) >= back[0].version
        assert_exact(await s.states())

    for seed in range(4):
        record.clear()
        in_world(
            scenario,
            seed=seed,
            shards=SHARDS,
            recovery=together(every, mode="sync" if seed % 3 == 0 else "async"),
        )
        for cut, states in record.written.items():
            if len(states) == SHARDS:
                assert_alike(states), cut
        (cut,) = {cut for cut, _, _ in record.restored}
        assert_alike({shard: state for _, shard, state in record.restored})
    assert max(restored_versions) > every


async def views(s: Setting) -> Any:
    return (await s.world.complete()).views


def damage(path: str, cut: int, shard: int) -> None:
    fs, root = fsspec.url_to_fs(path)
    (data,) = [
        p for p in fs.find(root) if p.endswith(f"c{cut:06d}.safetensors") and f"d-{shard}/" in p
    ]
    fs.pipe_file(data, fs.cat_file(data)[:-1] + b"?")


def test_a_damaged_file_makes_all_shards_use_the_cut_before(record: Record) -> None:
    recovery = together(6, keep=3)
    path = recovery.durability.path  # type: ignore[union-attr]

    async def scenario(s: Setting) -> None:
        await asyncio.gather(*(train(s, f"worker-{i}") for i in range(2)))
        await asyncio.sleep(1.0)
        *_, earlier, newest = [e.cut for e in events(s, CutTaken)]
        damage(path, newest, shard=1)
        before = len(events(s, Restored))
        s.world.crash("server-0", back_after=0.05)
        await restorations(s, before)
        while events(s, RolledBack)[-1].cut != earlier:
            await asyncio.sleep(0.001)
        states = dict(enumerate(await s.states()))
        assert_alike(states)
        for shard, state in states.items():
            assert state.version == record.written[earlier][shard].version
        assert [(e.shard, e.path.endswith(f"c{newest:06d}.json")) for e in refused(s)] == [
            (1, True)
        ]
        assert events(s, RolledBack)[-1].cut == earlier
        await train(s, "worker-9", 20)
        assert len({state.version for state in await s.states()}) == 1
        assert max(e.cut for e in events(s, CutTaken)) > newest

    in_world(scenario, shards=SHARDS, recovery=recovery)


def refused(s: Setting) -> list[CheckpointRefused]:
    return events(s, CheckpointRefused)


@pytest.mark.parametrize("choices", [{"every": 6}, {"every": None, "seconds": 0.5}])
def test_acks_wait_for_cuts_that_cannot_be_completed(choices: dict[str, Any]) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        acked: list[int] = []

        async def push() -> None:
            while True:
                acked.append(await client.push(ONES))
                await asyncio.sleep(0.1)

        s.network.cut("scheduler", "server-1")  # it can neither be held, nor told of the end
        s.network.cut("server-1", "scheduler")
        pushing = process.run(push())
        await asyncio.sleep(0.4)
        assert not events(s, CutTaken)
        assert len(acked) <= 6
        s.network.heal()
        await asyncio.sleep(6.0)
        assert len(acked) > 12
        assert events(s, CutTaken)
        pushing.cancel()

    in_world(scenario, shards=SHARDS, recovery=together(**choices), lease=30.0)
