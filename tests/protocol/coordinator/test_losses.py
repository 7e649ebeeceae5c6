"""What is known of acknowledged updates that are lost: to workers, and to the coordinator."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps.core.functions import Changed
from dps.core.outage import Continue
from dps.errors import TrainingStopped
from dps.events import LossReported, WorkerJoined, WorkerLeft
from dps.protocol.client.client import Client
from dps.protocol.client.receipts import Receipts
from dps.protocol.coordinator.losses import Losses
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durabilities.worker_cache import WorkerCache
from dps.protocol.durability import NoDurability
from dps.protocol.messages import (
    Account,
    Brought,
    EnterWorker,
    Evict,
    ExitWorker,
    Push,
    RenewWorker,
    Restoration,
    Statement,
    StopTraining,
)
from dps.protocol.recovery import Recovery, with_checkpoint_path
from dps.sim.network import SimTransport
from dps.sim.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

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
        (loss,) = s.world.losses.found
        assert (loss.shard, loss.updates, loss.exact) == (0, 8, True)
        assert loss.workers == {"a": 5, "b": 3}
        assert (loss.source, loss.version) == ("initial", 0)
        assert [x.workers for x in (*a.losses, *b.losses)] == [{"a": 5}, {"b": 3}]
        assert [event.updates for event in happened(s, LossReported)] == [8]
        await a.push(ONES)
        await loses(s, 0)
        assert [x.updates for x in s.world.losses.found] == [8, 1]
        assert [x.updates for x in a.losses] == [5, 1]
        assert [x.updates for x in b.losses] == [3]

    in_world(scenario)


def test_what_workers_that_have_left_had_pushed_is_counted() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        for client in (a, b):
            for _ in range(4):
                await client.push(ONES)
            await client.leave("finished" if client is a else "failed")
        await loses(s, 1)
        (loss,) = s.world.losses.found
        assert (loss.workers, loss.exact) == ({"a": 4, "b": 4}, True)

    in_world(scenario)


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
        (loss,) = s.world.losses.found
        assert (loss.workers, loss.exact) == ({"b": 4}, True)

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
        await until(lambda: s.world.losses.found)
        (loss,) = s.world.losses.found
        assert loss.workers["a"] == 1
        assert loss.workers["b"] in (1, 2)
        assert not loss.exact
        assert "at least" in str(loss)

    in_world(scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recovery", "lost", "source"),
    [
        (Recovery(Checkpoint(every=4)), range(5), "checkpoint"),
        (Recovery(Checkpoint(every=4, scope="all")), range(5), "checkpoint"),
        (Recovery(WorkerCache()), range(9, 10), "worker"),
        (Recovery(SharedStore(every=4)), range(1), ""),
        (Recovery(SharedStore(every=4), Continue()), range(1), ""),
    ],
    ids=str,
)
def test_as_much_is_reported_as_is_gone(recovery: Recovery, lost: range, source: str) -> None:
    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        await a.pull()
        for _ in range(9):
            await a.push(ONES)
        await loses(s, 0)
        await a.pull()
        for shard, state in enumerate(await s.states()):
            found = [loss for loss in s.world.losses.found if loss.shard == shard]
            gone = 9 - state.version
            assert shard or gone in lost
            assert sum(loss.updates for loss in found) == gone
            assert sum(x.updates for x in a.losses if x.shard == shard) == gone
            assert {loss.source for loss in found} <= {source}
            assert all(loss.version == state.version for loss in found)

    in_world(scenario, recovery=with_checkpoint_path(recovery, "memory://losses"))


def test_what_comes_back_with_an_older_copy_makes_up_for_nothing_lost_since() -> None:
    """As many updates of the worker are there as before, but others."""

    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        await b.push(ONES, pull=True)
        for _ in range(5):
            await a.push(ONES)
        await a.pull()
        s.network.cut("a", "scheduler")  # it offers nothing, and is not given up for it yet
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: s.world.losses.restorations and s.world.view(0).serving)
        s.network.heal()
        for _ in range(5):
            await a.push(ONES)
        assert [x.updates for x in a.losses] == [5]
        await loses(s, 0)
        assert [state.version for state in await s.states()] == [6]
        await a.push(ONES)
        assert [(x.updates, x.exact) for x in s.world.losses.found] == [(5, True), (5, True)]
        assert [x.updates for x in a.losses] == [5, 5]

    in_world(scenario, shards=1, recovery=Recovery(WorkerCache()), lease=30.0)


def test_a_chain_loses_nothing_with_its_head_and_all_with_the_last_of_it() -> None:
    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        for _ in range(6):
            await a.push(ONES)
        await loses(s, 0)
        await s.world.complete()
        await a.push(ONES)
        assert s.world.losses.found == ()
        for host in s.world.view(0).chain:
            s.world.crash(s.world.name_of(host), back_after=0.5)
        await until(lambda: s.world.losses.found)
        (loss,) = s.world.losses.found
        assert (loss.updates, loss.exact, loss.source) == (7, True, "initial")

    in_world(scenario, recovery=Recovery(Chain(2)))


def test_calls_that_changed_something_count() -> None:
    def one_more(arrays: object) -> Changed:
        ((name, part),) = arrays.items()  # type: ignore[attr-defined]
        return Changed({name: part.values + 1})

    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        for _ in range(3):
            await a.apply("one more", [])
        await loses(s, 0)
        (loss,) = s.world.losses.found
        assert loss.workers == {"a/calls": 3}
        assert [x.updates for x in a.losses] == [3]

    in_world(scenario, recovery=Recovery(NoDurability()), functions={"one more": one_more})


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
        await until(lambda: s.world.losses.found, within=5.0)
        (loss,) = s.world.losses.found
        assert loss.workers == {"driver/calls": 3}

    in_world(scenario, recovery=Recovery(NoDurability()), functions={"one more": one_more})


@pytest.mark.parametrize("leaves", [False, True])
def test_what_a_worker_says_of_a_loss_is_known_to_all_when_it_is_answered(leaves: bool) -> None:
    """It says so once, and whoever started it may ask as soon as it has left."""

    async def scenario(s: Setting) -> None:
        await s.ask(COORDINATOR, EnterWorker("a", "sim://a/0", "a", "token", stops=0))
        view = s.world.view(0)
        s.world.crash(s.world.name_of(view.chain[0]), back_after=0.1)
        await until(lambda: s.world.view(0).epoch > view.epoch and s.world.view(0).serving)
        before = s.world.table
        said = Statement(before.version, (1,), (Account(0, "a", view.epoch, 4, 1),))
        leave = ExitWorker("a", 1, "finished", False, said)
        await s.ask(COORDINATOR, leave if leaves else RenewWorker("a", 1, said))
        (loss,) = s.world.losses.found
        assert (loss.workers, loss.exact) == ({"a": 4}, True)
        assert [event.updates for event in happened(s, LossReported)] == [4]
        now = s.world.table
        assert (now.version > before.version, now.losses > before.losses) == (True, True)

    in_world(scenario)


def test_what_a_shard_had_of_a_lost_worker_is_told_though_it_has_gone_back_since() -> None:
    """It says so when it is asked to wait for that one no more; the reply may come late."""

    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        for client in (a, b, b):
            await client.push(ONES)
        view = s.world.view(1)
        released = s.held_back(
            view.chain[0], lambda m: isinstance(m, Evict) and m.epoch == view.epoch
        )
        s.world.crash("b")
        await until(lambda: "b" not in s.world.states(view)[0].clocks)
        await loses(s, 0)
        await until(lambda: s.world.view(1).epoch > view.epoch and s.world.view(1).serving)
        await until(lambda: s.world.losses.is_settled)
        assert [x.exact for x in s.world.losses.found if x.shard == 1] == [False]
        released.set()
        await asyncio.sleep(TIMINGS.lease / 4)
        told = [event for event in happened(s, LossReported) if event.shard == 1]
        assert [(e.updates, e.exact) for e in told[-1:]] == [(3, True)]

    saved = Recovery(Checkpoint(every=100, scope="all", path="memory://told-late"))
    in_world(scenario, recovery=saved)


def test_a_stop_that_comes_again_after_a_later_one_takes_nothing_back() -> None:
    async def scenario(s: Setting) -> None:
        for number in (1, 2, 1):
            await s.ask(COORDINATOR, StopTraining(number, 0.1))
        with pytest.raises(TrainingStopped):
            await s.ask(COORDINATOR, EnterWorker("a", "sim://a/0", "a", "token", stops=1))
        entered = await s.ask(COORDINATOR, EnterWorker("a", "sim://a/0", "a", "token", stops=2))
        assert entered.incarnation == 1

    in_world(scenario)


def test_a_stopped_worker_pushes_no_more_and_one_started_later_does() -> None:
    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        await a.push(ONES)
        ending = await s.ask(COORDINATOR, StopTraining(1, 5.0), 10.0)
        assert ending.left == ()
        assert [e.reason for e in happened(s, WorkerLeft)] == ["stopped"]
        for request in (a.push(ONES), a.pull()):
            with pytest.raises(TrainingStopped):
                await process.run(request)
        assert [state.version for state in await s.states()] == [1, 1]
        late, b = s.world.client("b")
        with pytest.raises(TrainingStopped):
            await late.run(b.enter(late.address, "b"))

    in_world(scenario)


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
        assert ending.left == ()
        with pytest.raises(TrainingStopped):
            await s.all_of(pushing, within=1.0)

    in_world(scenario)


def under_way(s: Setting) -> asyncio.Event:
    """Have shard 1 keep its replies to pushes to itself until the event is set."""
    head = s.world.view(1).chain[0]
    return s.held_back(head, lambda m: isinstance(m, Push) and m.shard == 1)


def test_no_shard_waits_for_another_one_that_will_not_have_it() -> None:
    """Where shards go back together, one that has an update waits until all have it."""

    def left() -> list[str]:
        names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
        return [name for name in names if name.startswith("together.")]

    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        under_way(s)
        pushing = process.run(a.push(ONES))
        await until(lambda: len(left()) == 2)
        await s.ask(COORDINATOR, StopTraining(1, 5.0), 10.0)
        with pytest.raises(TrainingStopped):
            await pushing
        await until(lambda: not left(), within=1.0)

    saved = Recovery(Checkpoint(every=5, scope="all", path="memory://waits-for-all"))
    in_world(scenario, recovery=saved)


def test_a_worker_leaves_when_nothing_of_it_is_under_way_any_more() -> None:
    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        under_way(s)
        pushing = process.run(a.push(ONES))
        await until(lambda: s.world.states(s.world.view(1))[0].version == 1)
        a._is_cancelled = lambda: True
        with pytest.raises(TrainingStopped):
            await process.run(a.pull())
        await s.all_of(process.run(a.leave("failed")), within=5.0)
        assert pushing.done()
        with pytest.raises(TrainingStopped):
            await pushing
        assert [e.reason for e in happened(s, WorkerLeft)] == ["stopped"]

    in_world(scenario)


def test_a_worker_that_has_ended_does_not_enter_again() -> None:
    async def scenario(s: Setting) -> None:
        process, a = await s.enter("a")
        a._is_cancelled = lambda: True
        for _ in range(2):
            with pytest.raises(TrainingStopped):
                await process.run(a.pull())
            await until(lambda: a._given_up)  # it has asked whether anybody still counts on it
        assert [e.incarnation for e in happened(s, WorkerJoined)] == [1]

    in_world(scenario)


# -- the two sides by themselves -------------------------------------------------------------------


def restoration(number: int, epoch: int, **applied: int) -> Restoration:
    return Restoration(0, epoch, number, 1.0, "checkpoint", 0, applied, certain=True)


def test_a_reply_that_the_table_has_overtaken_counts_for_the_time_before() -> None:
    told: list[int] = []
    receipts = Receipts(together=False, on_loss=lambda loss: told.append(loss.updates))
    receipts.acked(Account(0, "a", 1, 4, 1))
    assert receipts.heard([restoration(1, 3, a=2)])
    receipts.acked(Account(0, "a", 1, 5, 1))
    assert told == [2, 3]
    assert not receipts.heard([restoration(1, 3, a=2)])
    receipts.acked(Account(0, "a", 3, 3, 1))
    assert set(receipts.accounts) == {
        Account(0, "a", 1, 4, 1),
        Account(0, "a", 1, 5, 1),
        Account(0, "a", 3, 3, 1),
    }


def test_what_goes_back_before_all_shards_have_it_is_no_loss() -> None:
    receipts = Receipts(together=True, on_loss=lambda loss: pytest.fail(str(loss)))
    receipts.acked(Account(0, "a", 1, 1, 1))
    receipts.heard([restoration(1, 3)])
    receipts.acked(Account(0, "a", 3, 1, 1))  # it was sent again
    receipts.all_acked()
    assert receipts.accounts == (Account(0, "a", 3, 1, 1),)


def test_a_restoration_that_nobody_heard_of_makes_it_a_lower_bound() -> None:
    receipts = Receipts(together=False, on_loss=lambda loss: None)
    receipts.acked(Account(0, "a", 1, 8, 1))
    receipts.heard([restoration(2, 5, a=7)])  # mail may have been applied in between
    (loss,) = receipts.losses
    assert (loss.updates, loss.exact) == (1, False)


def test_each_restoration_is_charged_with_what_it_cost() -> None:
    losses = Losses(1, calls=False)
    of_five = Brought("checkpoint", 5, {"a": 5})
    assert losses.restored(0, 3, of_five, 1.0, certain=True, after=4, active={"a": 1}) == []
    of_two = Brought("checkpoint", 2, {"a": 2})
    assert losses.restored(0, 5, of_two, 2.0, certain=True, after=6, active={"a": 1}) == []
    # The worker has heard of the second one only.
    statement = Statement(7, (1,), (Account(0, "a", 1, 8, 1),))
    assert [loss.updates for loss in losses.stated("a", 1, statement)] == [3, 3]
    assert losses.is_settled
    late = Statement(7, (1,), (Account(0, "a", 1, 9, 1),))
    assert [(loss.epoch, loss.updates) for loss in losses.stated("a", 1, late)] == [(3, 4)]


def test_a_copy_from_before_a_restoration_lacks_all_that_was_acked_after_it() -> None:
    losses = Losses(1, calls=False)

    def restored(epoch: int, applied: int, based_on: int) -> None:
        copy = Brought("worker", applied, {"a": applied}, based_on)
        losses.restored(0, epoch, copy, 1.0, certain=True, after=epoch, active={"a": 1})

    restored(3, 5, based_on=1)
    losses.stated("a", 1, Statement(4, (1,), (Account(0, "a", 1, 8, 1), Account(0, "a", 3, 7, 1))))
    restored(5, 8, based_on=1)
    losses.stated("a", 1, Statement(6, (1,), ()))
    restored(7, 9, based_on=5)  # it was read after the last one, and has an update more
    losses.stated("a", 1, Statement(8, (1,), (Account(0, "a", 5, 10, 1),)))
    assert [loss.workers for loss in losses.found] == [{"a": 3}, {"a": 2}, {"a": 1}]


def test_who_knows_only_the_table_of_before_has_not_answered() -> None:
    """What it is told before it hears of the restoration is still to come."""
    losses = Losses(1, calls=False)
    of_five = Brought("checkpoint", 5, {"a": 5})
    losses.restored(0, 3, of_five, 1.0, certain=True, after=4, active={"a": 1})
    assert losses.stated("a", 1, Statement(4, (1,), (Account(0, "a", 1, 7, 1),))) == []
    assert not losses.is_settled
    (loss,) = losses.stated("a", 1, Statement(5, (1,), (Account(0, "a", 1, 8, 1),)))
    assert (loss.updates, loss.exact) == (3, True)


def test_another_process_of_the_same_name_cannot_speak_for_the_one_before() -> None:
    losses = Losses(1, calls=False)
    losses.stated("a", 1, Statement(1, (1,), (Account(0, "a", 1, 8, 1),)))
    losses.restored(0, 3, Brought("initial", 0, {}), 1.0, certain=True, after=4, active={"a": 1})
    (loss,) = losses.stated("a", 2, Statement(9, (2,), ()))
    assert (loss.updates, loss.exact) == (8, False)


def test_what_a_replaced_process_was_told_is_known_once_its_successor_is_told_more() -> None:
    losses = Losses(1, calls=True)
    losses.left("a", 1)
    losses.stated("a", 2, Statement(2, (2,), (Account(0, "a", 1, 9, 2),)))
    losses.has(0, 1, 1, {"a/calls": 0})
    losses.restored(0, 3, Brought("initial", 0, {}), 1.0, certain=True, after=4, active={"a": 2})
    (loss,) = losses.stated("a", 2, Statement(5, (2,), (Account(0, "a", 1, 9, 2),)))
    assert (loss.updates, loss.exact) == (9, True)


def test_a_shard_that_goes_before_a_successor_joins_leaves_a_lower_bound() -> None:
    async def scenario(s: Setting) -> None:
        _, first = await s.enter("a")
        for _ in range(5):
            await first.push(ONES)
        await first.close()
        s.network.cut("a", s.world.name_of(s.world.view(0).chain[0]))
        entering = asyncio.create_task(s.enter("a"))
        await until(lambda: len(happened(s, WorkerJoined)) == 2)
        await loses(s, 0)
        s.network.heal()
        await entering
        (loss,) = s.world.losses.found
        assert not loss.exact

    in_world(scenario)


def test_a_successor_that_has_joined_knows_what_the_process_before_it_was_told() -> None:
    async def scenario(s: Setting) -> None:
        _, first = await s.enter("a")
        for _ in range(5):
            await first.push(ONES)
        await first.close()
        await s.enter("a")
        await loses(s, 0)
        (loss,) = s.world.losses.found
        assert (loss.updates, loss.exact) == (5, True)

    in_world(scenario)


def test_of_two_processes_of_a_name_each_speaks_for_its_own_incarnations() -> None:
    losses = Losses(1, calls=False)
    losses.left("a", 2)  # of the other process, which had entered in between
    losses.restored(0, 3, Brought("initial", 0, {}), 1.0, certain=True, after=4, active={"a": 3})
    (loss,) = losses.stated("a", 3, Statement(5, (1, 3), (Account(0, "a", 1, 4, 1),)))
    assert (loss.updates, loss.exact) == (4, False)


def test_the_later_of_two_processes_that_were_lost_cannot_speak_for_the_one_before() -> None:
    losses = Losses(1, calls=False)
    losses.left("a", 1)  # another process has taken the name
    losses.left("a", 2)  # which was not heard of for a while
    losses.restored(0, 3, Brought("initial", 0, {}), 1.0, certain=True, after=4, active={"b": 1})
    losses.stated("b", 1, Statement(5, (1,), (Account(0, "b", 1, 2, 1),)))
    losses.stated("a", 2, Statement(5, (2,), ()))
    assert [(loss.updates, loss.exact) for loss in losses.found] == [(2, False)]
    losses.stated("a", 1, Statement(5, (1,), (Account(0, "a", 1, 1, 1),)))
    assert [(loss.updates, loss.exact) for loss in losses.found] == [(3, True)]


def test_a_late_account_of_a_lost_process_itself_does_not_say_what_it_was_told_last() -> None:
    """It was on its way when the process was lost, which may have been told of more since."""
    losses = Losses(1, calls=False)
    losses.left("a", 1)
    losses.stated("b", 1, Statement(1, (1,), (Account(0, "a", 1, 3, 1),)))
    losses.restored(0, 3, Brought("initial", 0, {}), 1.0, certain=True, after=4, active={})
    assert [(loss.updates, loss.exact) for loss in losses.found] == [(3, False)]
    losses.stated("b", 1, Statement(5, (1,), (Account(0, "a", 1, 4, 1),)))
    assert [(loss.updates, loss.exact) for loss in losses.found] == [(4, False)]
    losses.stated("a", 2, Statement(5, (2,), (Account(0, "a", 1, 5, 2),)))  # its successor knows
    assert [(loss.updates, loss.exact) for loss in losses.found] == [(5, True)]
