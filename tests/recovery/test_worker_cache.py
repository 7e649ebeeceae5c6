"""A lost shard is rebuilt from the freshest copy that workers hold: a state that existed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dps.core.rules.proximal import FTRL
from dps.core.rules.rule import SGD, Adam, UpdateRule
from dps.core.shard import ShardState
from dps.events import Event, Rebuilt, Restored
from dps.protocol.client.client import Client
from dps.protocol.messages import Weights
from dps.protocol.server.commit_log import CommitLog
from dps.recovery import worker_cache
from dps.recovery.strategy import Recovery
from dps.recovery.worker_cache import WorkerCache
from tests.simulator.network import Process
from tests.support.worlds import Setting, happened, in_world, same_state, until

ONES = {"w": np.ones(40)}
CACHE = Recovery(WorkerCache())
States = dict[tuple[int, int, int], ShardState]


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> States:
    """Every state that clients could read, by shard, epoch and version."""
    seen: States = {}
    become_visible = CommitLog.set_committed

    def note(self: CommitLog, state: ShardState) -> None:
        become_visible(self, state)
        seen[self._replica.shard, self._replica.epoch, state.version] = state

    monkeypatch.setattr(CommitLog, "set_committed", note)
    return seen


def events(s: Setting, kind: type[Event], shard: int = 0) -> list[Any]:
    return [event for event in happened(s, kind) if event.shard == shard]


async def enter(s: Setting, *names: str) -> list[tuple[Process, Client]]:
    return [await s.enter(name) for name in names]


async def back(s: Setting, name: str = "server-0") -> Rebuilt:
    """Lose a server and wait until its shard is rebuilt; return what was recorded."""
    before = len(events(s, Rebuilt))
    s.world.crash(name, back_after=0.1)
    await until(lambda: len(events(s, Rebuilt)) > before)
    rebuilt: Rebuilt = events(s, Rebuilt)[-1]
    return rebuilt


def test_the_freshest_copy_is_used_and_its_age_is_told() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await enter(s, "a", "b")
        for _ in range(3):
            await a.push(ONES)
        await a.pull()
        await b.push(ONES, pull=True)
        await asyncio.sleep(2.0)
        await a.push(ONES)  # nobody reads this one
        rebuilt = await back(s)
        assert (rebuilt.donor, rebuilt.version) == ("b/1", 4)
        assert 2.0 < rebuilt.age_seconds < 3.0
        assert events(s, Restored)[-1].source == "worker"
        lost, other = await s.states()
        assert (lost.version, other.version) == (4, 5)
        assert (lost.values.view("float64") == -4).all()
        await a.push(ONES, pull=True)
        await b.push(ONES)
        assert [state.version for state in await s.states()] == [6, 7]

    in_world(scenario, recovery=CACHE)


def at_start(state: ShardState) -> ShardState:
    """A state with the optimizer's part as it is at its start; without slots it has none."""
    if not state.slots:
        return state
    slots = {name: np.zeros_like(slot) for name, slot in state.slots.items()}
    return replace(state, slots=slots, steps=0)


@pytest.mark.parametrize("rule", [SGD(1.0), FTRL(l1=0.1)])
def test_a_rebuilt_state_is_one_that_existed(
    states: States, rule: UpdateRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ShardState] = []

    def note(copy: Weights, rule: UpdateRule) -> ShardState:
        made.append(rebuild_state(copy, rule))
        return made[-1]

    rebuild_state = worker_cache.rebuilt
    monkeypatch.setattr(worker_cache, "rebuilt", note)

    async def train(s: Setting, client: Client) -> None:
        for _ in range(12):
            await client.push(ONES, pull=s.random.random() < 0.5)
            await asyncio.sleep(s.random.uniform(0, 0.05))

    async def scenario(s: Setting) -> None:
        entered = await enter(s, "a", "b", "c")
        training = [process.run(train(s, client)) for process, client in entered]
        for _ in range(2):
            await asyncio.sleep(s.random.uniform(0.05, 0.2))
            assert (await back(s)).version == made[-1].version
        await s.all_of(*training, within=20.0)
        for state in await s.states():
            assert state.version == sum(p.applied for p in state.workers.values())
            if rule == SGD(1.0):
                assert (state.values.view("float64") == -state.version).all()

    for seed in range(3):
        states.clear()
        in_world(scenario, seed=seed, shards=1, recovery=CACHE, rule=rule)
        for state in made:
            assert state.slots.keys() == set(rule.slots)
            existed = [at_start(seen) for seen in states.values() if seen.version == state.version]
            assert any(same_state(state, seen) for seen in existed)
        assert made
        made.clear()


def test_after_a_rebuild_the_optimizer_takes_its_first_step_again() -> None:
    """Its slots are zero: with the steps of before, Adam would correct them by nothing."""

    async def scenario(s: Setting) -> None:
        ((_, client),) = await enter(s, "a")
        for _ in range(50):
            await client.push(ONES, pull=True)
        before = client.weights()["w"]
        assert (await back(s)).version == 50
        await client.push(ONES, pull=True)
        assert client.weights()["w"] - before == pytest.approx(-0.1, rel=1e-6)

    in_world(scenario, shards=1, recovery=CACHE, rule=Adam(0.1))


def test_if_the_donor_dies_the_next_one_is_asked() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await enter(s, "a", "b")
        await a.pull()
        await b.push(ONES, pull=True)
        s.network.slow("b", "server-0", 5.0)
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(0.5)
        assert not events(s, Rebuilt)
        s.world.crash("b")
        await until(lambda: events(s, Rebuilt))
        assert [(e.donor, e.version) for e in events(s, Rebuilt)] == [("a/1", 0)]

    in_world(scenario, shards=1, recovery=CACHE)


@pytest.mark.parametrize("workers", [(), ("a", "b")])
def test_without_any_copy_a_shard_restarts_from_its_initial_values(workers: tuple[str]) -> None:
    async def scenario(s: Setting) -> None:
        for _, client in await enter(s, *workers):
            await client.push(ONES)
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(1.0)
        assert not events(s, Rebuilt)
        assert events(s, Restored)[-1].source == "initial"
        assert [state.version for state in await s.states()] == [0]

    in_world(scenario, shards=1, recovery=CACHE)
