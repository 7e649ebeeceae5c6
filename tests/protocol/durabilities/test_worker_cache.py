"""A lost shard is rebuilt from the freshest copy that workers hold: a state that existed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dps.core.outage import Continue
from dps.core.rules.ftrl import FTRL
from dps.core.rules.rule import SGD, Adam, UpdateRule
from dps.core.shard import ShardState
from dps.events import Event, Rebuilt, Restored
from dps.protocol.client.client import Client
from dps.protocol.durabilities import worker_cache
from dps.protocol.durabilities.worker_cache import Copies, CopyOffers, Offer, Wanted, WorkerCache
from dps.protocol.durability import CoordinatorContext
from dps.protocol.messages import Done, Install, Keepers, Seed, Weights
from dps.protocol.recovery import Recovery
from dps.protocol.server.commit_log import CommitLog
from dps.sim.network import Process, Weather
from dps.sim.process import SimClock
from tests.support.worlds import TIMINGS, Setting, happened, in_world, same_state, until

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
        seen[self._shard, self.epoch, state.version] = state

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


@pytest.mark.slow
@pytest.mark.parametrize("rule", [SGD(1.0), Adam(0.1), FTRL(l1=0.1)])
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

    for seed in range(15):
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


def test_a_copy_of_a_later_epoch_is_fresher_whatever_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was read before a rollback is of a history that nobody goes on from."""
    offered: list[tuple[int, str, int]] = []
    take = CopyOffers.take

    async def note(self: CopyOffers, offer: Offer) -> None:
        offered.append((offer.epoch, offer.donor, offer.version))
        await take(self, offer)

    monkeypatch.setattr(CopyOffers, "take", note)

    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await enter(s, "a", "b")
        await b.push(ONES, pull=True)
        for _ in range(5):
            await a.push(ONES)
        await a.pull()
        s.network.cut("a", "scheduler")  # it offers nothing, and is not given up for it yet
        assert (await back(s)).version == 1
        s.network.heal()
        await asyncio.sleep(2 * TIMINGS.call)  # it hears of new tables again
        await b.push(ONES, pull=True)
        rebuilt = await back(s)
        assert (rebuilt.donor, rebuilt.version) == ("b/1", 2)
        assert {(rebuilt.epoch, "a/1", 6), (rebuilt.epoch, "b/1", 2)} <= set(offered)

    in_world(scenario, shards=1, recovery=CACHE, lease=30.0)


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


def test_if_the_donor_cannot_reach_the_host_the_next_one_is_asked() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await enter(s, "a", "b")
        await a.push(ONES, pull=True)
        await b.push(ONES, pull=True)
        s.network.cut("b", "server-0")
        rebuilt = await back(s)
        assert (rebuilt.donor, rebuilt.version) == ("a/1", 1)

    in_world(scenario, shards=1, recovery=CACHE)


def test_a_worker_that_is_slow_to_answer_is_waited_for_if_nobody_else_holds_a_copy() -> None:
    async def scenario(s: Setting) -> None:
        _, (_, b) = await enter(s, "a", "b")
        await b.push(ONES, pull=True)
        s.network.slow("b", "scheduler", 0.5)
        rebuilt = await back(s)
        assert (rebuilt.donor, rebuilt.version) == ("b/1", 1)

    in_world(scenario, shards=1, recovery=CACHE, lease=5.0)


@pytest.mark.parametrize("workers", [(), ("a",), ("a", "b")])
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


def test_no_copy_is_wanted_of_a_shard_that_was_never_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Wanted] = []
    ask = CopyOffers.ask

    def note(self: CopyOffers, wanted: Wanted) -> None:
        asked.append(wanted)
        ask(self, wanted)

    monkeypatch.setattr(CopyOffers, "ask", note)

    async def scenario(s: Setting) -> None:
        ((_, a),) = await enter(s, "a")
        await a.pull()
        assert not asked
        await back(s)
        assert {wanted.shard for wanted in asked} == {0}

    in_world(scenario, recovery=CACHE)


def test_two_shards_are_rebuilt_at_the_same_time() -> None:
    async def scenario(s: Setting) -> None:
        ((_, a),) = await enter(s, "a")
        await a.push(ONES, pull=True)
        s.world.crash("server-0", back_after=0.1)
        s.world.crash("server-1", back_after=0.1)
        await until(lambda: events(s, Rebuilt, 0) and events(s, Rebuilt, 1))
        assert [state.version for state in await s.states()] == [1, 1]

    in_world(scenario, recovery=CACHE)


def test_a_worker_offers_its_copy_once_however_many_tables_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it installs is the copy that it offered, whatever it has read since."""
    offered: list[tuple[int, int, str]] = []
    take = CopyOffers.take

    async def note(self: CopyOffers, offer: Offer) -> Done:
        offered.append((offer.shard, offer.epoch, offer.donor))
        return await take(self, offer)

    monkeypatch.setattr(CopyOffers, "take", note)

    async def scenario(s: Setting) -> None:
        (_, a), _ = await enter(s, "a", "b")
        await a.push(ONES, pull=True)
        s.network.slow("a", "server-0", 2.0)  # it is long until the shard is there again
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(0.5)
        await enter(s, "c")
        await until(lambda: events(s, Rebuilt))
        assert sorted(donor for _, _, donor in offered) == ["a/1", "b/1", "c/1"]

    in_world(scenario, shards=1, recovery=CACHE)


def test_a_worker_that_enters_during_the_outage_answers_too() -> None:
    async def scenario(s: Setting) -> None:
        s.world.crash("server-0", back_after=1.0)
        process, client = s.world.client("late")
        entering = process.run(client.enter(process.address, "late"))
        await s.all_of(entering, within=10.0)
        assert events(s, Restored)[-1].source == "initial"

    in_world(scenario, shards=1, recovery=CACHE)


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_what_was_buffered_follows_on_the_copy(buffer: Any) -> None:
    async def scenario(s: Setting) -> None:
        process, client = (await enter(s, "a"))[0]
        await client.push(ONES, pull=True)
        s.world.crash("server-0", back_after=0.5)
        await asyncio.sleep(0.2)
        for _ in range(3):
            await process.run(client.push(ONES))
        while (await s.states())[0].version < 4:
            await asyncio.sleep(0.01)
        assert events(s, Rebuilt)[-1].version == 1
        assert ((await s.states())[0].values.view("float64") == -4).all()

    recovery = Recovery(WorkerCache(), Continue(4, buffer))
    in_world(scenario, shards=1, recovery=recovery)


def test_only_this_durability_sends_more_than_the_weights() -> None:
    async def scenario(s: Setting) -> None:
        ((_, client),) = await enter(s, "a")
        await client.pull()
        assert all(
            shard_client.base is not None and shard_client.base.metadata is None
            for shard_client in client._shard_clients
        )

    in_world(scenario)


@pytest.mark.slow
def test_nothing_is_lost_or_applied_twice_though_messages_are() -> None:
    lost = {"control": 0.05, "train": 0.05, "replicate": 0.3}
    weather = Weather((0.001, 0.02), lost)

    async def train(client: Client) -> None:
        for _ in range(10):
            await client.push(ONES, pull=True)

    async def scenario(s: Setting) -> None:
        training = [process.run(train(client)) for process, client in await enter(s, "a", "b")]
        await asyncio.sleep(0.3)
        await back(s)
        await s.all_of(*training, within=60.0)
        state = (await s.states())[0]
        assert state.version == sum(p.applied for p in state.workers.values())
        assert (state.values.view("float64") == -state.version).all()

    for seed in range(15):
        in_world(scenario, seed=seed, shards=1, recovery=CACHE, weather=weather)


def test_an_offer_for_an_earlier_loss_takes_the_place_of_none() -> None:
    async def nothing() -> None: ...

    async def scenario(s: Setting) -> None:
        host = s.world.endpoint("server-0")
        clock = SimClock(s.network.process("tester"))
        offers = CopyOffers(CoordinatorContext(lambda: {"a/1"}, nothing, clock, [].append))
        offers.ask(Wanted(0, 7, host))
        present = Offer(0, 7, "a/1", 5, 3, 0.0, 0)
        await offers.take(present)
        await offers.take(Offer(0, 6, "a/1", 4, 9, 0.0, 0))  # it was on its way for long
        assert await offers.best(0) == present

    in_world(scenario)


def test_a_copy_is_installed_once_however_many_tables_ask_for_it() -> None:
    async def scenario(s: Setting) -> None:
        ((_, client),) = await enter(s, "a")
        await client.push(ONES, pull=True)
        table = await s.world.complete()
        view = table.views[0]
        epoch, host = view.epoch + 1, view.chain[0]
        seed = Seed(0, epoch, host, Keepers(), "a/1")
        assert isinstance(client._part, Copies)
        for version in range(3):
            again = replace(table, version=version, wanted=(Wanted(0, epoch, host),), seeds=(seed,))
            client._part._heard(again)
        await asyncio.sleep(TIMINGS.call)
        sent = [t for t in s.network.trace if t[1:] == ("sent", "a", "server-0", "Install")]
        assert len(sent) == 1

    in_world(scenario, recovery=CACHE)


def test_a_copy_that_was_offered_to_another_host_since_is_not_installed() -> None:
    """Or two hosts would serve the shard in the later epoch."""

    async def scenario(s: Setting) -> None:
        ((_, client),) = await enter(s, "a")
        await client.push(ONES, pull=True)
        table = await s.world.complete()
        view, other = table.views
        first, second = view.chain[0], other.chain[0]
        wanted = [Wanted(0, view.epoch + 1, first), Wanted(0, view.epoch + 2, second)]
        seed = Seed(0, view.epoch + 1, first, Keepers(), "a/1")
        assert isinstance(client._part, Copies)
        client._part._heard(replace(table, wanted=(wanted[0],), seeds=(seed,)))
        client._part._heard(replace(table, wanted=(wanted[1],), seeds=()))
        await asyncio.sleep(TIMINGS.copy)
        assert s.world.hosts[first.address].replica(0).epoch == view.epoch

    in_world(scenario, recovery=CACHE)


def test_an_offer_that_nobody_wants_any_more_is_passed_over() -> None:
    async def scenario(s: Setting) -> None:
        table = await s.world.complete()
        await s.ask(s.world.group.coordinator, Offer(0, table.views[0].epoch, "a/1", 1, 9, 0.0, 0))
        assert (await s.world.complete()).wanted == ()
        install = Install(0, 0, table.views[0].chain, (await s.states())[0], "worker")
        with pytest.raises(Exception, match="epoch"):
            await s.ask(table.views[0].chain[0], install)

    in_world(scenario, recovery=CACHE)
