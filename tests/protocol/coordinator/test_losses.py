"""What is known of acknowledged updates that are lost: to workers, and to the coordinator."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dps.core.consistency import BSP, SSP, Consistency
from dps.core.functions import Changed
from dps.errors import TrainingStopped
from dps.events import LossReported, WorkerLeft
from dps.protocol.client.client import Client
from dps.protocol.messages import Evict, Push, StopTraining
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import NoDurability
from dps.recovery.strategy import Recovery
from tests.simulator.network import SimTransport
from tests.simulator.world import COORDINATOR
from tests.support.worlds import Setting, happened, in_world, until

ONES = {"w": -np.ones(40)}


async def loses(s: Setting, shard: int) -> None:
    """Crash the head of a shard, and wait until another one serves and all have said what."""
    view = s.world.view(shard)
    s.world.crash(s.world.name_of(view.chain[0]), back_after=0.1)
    await until(lambda: s.world.view(shard).epoch > view.epoch and s.world.view(shard).serving)
    await until(lambda: s.world.losses.is_settled)


def test_a_loss_is_counted_by_worker_and_told_to_each() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        for _ in range(5):
            await a.push(ONES)
        for _ in range(3):
            await b.push(ONES)
        await loses(s, 0)
        (loss,) = s.world.losses.reported
        assert (loss.shard, loss.updates, loss.exact) == (0, 8, True)
        assert loss.workers == {"a": 5, "b": 3}
        assert (loss.source, loss.version) == ("initial", 0)
        assert [x.workers for x in (*a.receipts.losses, *b.receipts.losses)] == [{"a": 5}, {"b": 3}]
        assert [event.updates for event in happened(s, LossReported)] == [8]
        await a.push(ONES)
        await loses(s, 0)
        assert [x.updates for x in s.world.losses.reported] == [8, 1]
        assert [x.updates for x in a.receipts.losses] == [5, 1]
        assert [x.updates for x in b.receipts.losses] == [3]

    in_world(scenario)


def test_a_worker_that_is_lost_with_the_shard_makes_it_a_lower_bound() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        await a.push(ONES)
        await b.push(ONES)
        await asyncio.sleep(1.0)  # its lease is renewed, and what it was told so far is known
        await b.push(ONES)
        s.world.crash("b")
        await loses(s, 0)
        await until(lambda: s.world.losses.reported)
        (loss,) = s.world.losses.reported
        assert loss.workers["a"] == 1
        assert loss.workers["b"] in (1, 2)
        assert not loss.exact
        assert "at least" in str(loss)

    in_world(scenario)


async def counted(s: Setting, since: int) -> None:
    """Wait until a shard has answered how many updates of a worker it has."""
    await until(lambda: any(line[4] == "Evict reply" for line in s.network.trace[since:]))


async def silenced(s: Setting, worker: str) -> None:
    """Cut a worker off from the scheduler until it is given up."""
    s.network.cut(worker, "scheduler")
    s.network.cut("scheduler", worker)
    await until(lambda: happened(s, WorkerLeft))


async def ended(s: Setting, worker: str) -> None:
    """Crash a worker, and wait until its monitor has reported that."""
    s.world.crash(worker)
    s.network.heal()
    before = len(s.network.trace)
    replies = 2 * len(s.world.monitors) + 1  # the second of some monitor is to a later report
    await until(
        lambda: [line[4] for line in s.network.trace[before:]].count("Sighted reply") > replies
    )


def test_updates_of_a_silent_worker_are_counted_when_it_has_ended() -> None:
    """Shards accept them under ASP, although the coordinator has given the worker up."""

    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        await silenced(s, "a")
        for _ in range(2):
            await process.run(a.push(ONES))
        before = len(s.network.trace)
        await ended(s, "a")
        await counted(s, before)
        await loses(s, 0)
        await until(lambda: s.world.losses.reported, within=5.0)
        (loss,) = s.world.losses.reported
        assert (loss.workers, loss.exact) == ({"a": 2}, True)
        assert [event.reason for event in happened(s, WorkerLeft)] == ["silent"]

    in_world(scenario, shards=1, watched=True)


def test_an_answer_of_before_the_end_of_a_silent_worker_is_not_its_last() -> None:
    asked: list[Any] = []

    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        await process.run(a.push(ONES))
        head = s.world.view(0).chain[0]
        early = s.held_back(head, lambda m: isinstance(m, Evict) and not asked.append(m))
        s.held_back(head, lambda m: any(m is each for each in asked[1:]))
        await silenced(s, "a")
        await until(lambda: asked)
        await process.run(a.push(ONES))
        await ended(s, "a")
        await until(lambda: len(asked) == 2)
        before = len(s.network.trace)
        early.set()
        await counted(s, before)
        s.world.crash(s.world.name_of(head), back_after=0.1)
        await until(lambda: s.world.losses.reported, within=5.0)
        (loss,) = s.world.losses.reported
        assert loss.updates == 2 or not loss.exact

    in_world(scenario, shards=1, watched=True)


@pytest.mark.parametrize("consistency", [BSP(), SSP(1)])
def test_a_worker_whose_updates_are_refused_has_no_more_to_report(consistency: Consistency) -> None:
    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        await process.run(a.push(ONES))
        await silenced(s, "a")
        await counted(s, 0)
        view = s.world.view(0)
        s.world.crash(s.world.name_of(view.chain[0]), back_after=1.0)
        await until(lambda: not s.world.view(0).serving)
        await ended(s, "a")
        await until(lambda: s.world.losses.reported, within=10.0)
        (loss,) = s.world.losses.reported
        assert (loss.workers, loss.exact) == ({"a": 1}, True)

    in_world(scenario, shards=1, servers=1, consistency=consistency, watched=True)


def test_what_a_caller_that_is_no_worker_had_changed_is_counted_too() -> None:
    """Nobody waits for it to say so, and nothing else would have it do so."""

    def one_more(arrays: object) -> Changed:
        ((name, part),) = arrays.items()  # type: ignore[attr-defined]
        return Changed({name: part.values + 1})

    async def scenario(s: Setting) -> None:
        process = s.network.process("caller")
        caller = Client(s.world.group, SimTransport(s.network, process))
        for _ in range(3):
            await process.run(caller.apply("one more", []))
        await loses(s, 0)
        await until(lambda: s.world.losses.reported, within=5.0)
        (loss,) = s.world.losses.reported
        assert loss.workers == {"driver/calls": 3}

    in_world(scenario, recovery=Recovery(NoDurability()), functions={"one more": one_more})


def test_a_worker_that_waits_for_a_shard_that_is_down_is_stopped_as_well() -> None:
    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        await a.push(ONES)
        for server in ("server-0", "server-1"):
            s.world.crash(server)
        await until(lambda: not any(view.serving for view in s.world.table.views))
        pushing = process.run(a.push(ONES))
        await a.router.newer(s.world.table.version - 1)
        ending = await s.ask(COORDINATOR, StopTraining(1, 5.0), 10.0)
        assert ending == ()
        with pytest.raises(TrainingStopped):
            await s.all_of(pushing, within=1.0)

    in_world(scenario)


def test_no_shard_waits_for_another_one_that_refuses_the_update() -> None:
    """Where shards go back together, one that has an update waits until all have it."""

    def left() -> list[str]:
        names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
        return [name for name in names if name.startswith("Client._to_all.")]

    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        s.held_back(s.world.view(1).chain[0], lambda m: isinstance(m, Push) and m.shard == 1)
        pushing = process.run(a.push(ONES))
        await until(lambda: len(left()) == 2)
        await s.ask(COORDINATOR, StopTraining(1, 5.0), 10.0)
        with pytest.raises(TrainingStopped):
            await pushing
        await until(lambda: not left(), within=1.0)

    saved = Recovery(Checkpoint(every=5, scope="all", path="memory://waits-for-all"))
    in_world(scenario, recovery=saved)


def test_what_a_worker_had_pushed_that_was_lost_before_is_counted_by_the_shard() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("a")
        _, b = await s.enter("b")
        for _ in range(4):
            await b.push(ONES)
        s.world.crash("b")
        await until(lambda: any(e.worker == "b" for e in happened(s, WorkerLeft)))
        await asyncio.sleep(0.5)
        await loses(s, 0)
        (loss,) = s.world.losses.reported
        assert (loss.workers, loss.exact) == ({"b": 4}, True)

    in_world(scenario)


def test_a_successor_that_has_joined_knows_what_the_process_before_it_was_told() -> None:
    async def scenario(s: Setting) -> None:
        _, first = await s.enter("a")
        for _ in range(5):
            await first.push(ONES)
        await first.close()
        await s.enter("a")
        await loses(s, 0)
        (loss,) = s.world.losses.reported
        assert (loss.updates, loss.exact) == (5, True)

    in_world(scenario)
