"""What clients are promised: no update twice, bounded buffers, bounded waiting; and membership.

Under random faults all of it is tried by `tests/sim/test_schedules.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from dps.core.outage import Continue, Replay
from dps.core.shard import initial_state
from dps.core.updates import Operation, UpdateId
from dps.errors import DeadlineExceeded, NonFiniteGradient, ShardUnavailable, StaleEpoch
from dps.events import Applied, Detected, Promoted, Replayed, Restored, WorkerLeft
from dps.protocol.client.shard_client import Outcome
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.messages import (
    Brought,
    Evict,
    Extend,
    Install,
    Keepers,
    Push,
    PutState,
    ReplayBuffered,
    Seeded,
)
from dps.protocol.recovery import Recovery
from dps.protocol.transport import Endpoint
from dps.sim.network import Weather
from dps.sim.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, in_world, until

ONES = {"w": np.ones(40)}


# -- exactly once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recovery", [Recovery(Chain(2)), Recovery(SharedStore())])
def test_an_update_whose_reply_was_lost_is_sent_again_and_refused(recovery: Recovery) -> None:
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0", lambda *ack: outcomes.append(ack[-1]))
        s.network.cut("server-0", "worker-0")
        push = process.run(client.push(ONES))
        await asyncio.sleep(0.1)
        assert [state.version for state in await s.states()] == [1, 1]
        s.network.heal()
        await s.all_of(push, within=5.0)
        assert [state.version for state in await s.states()] == [1, 1]
        assert sorted(outcomes) == ["applied", "duplicate"]

    in_world(scenario, recovery=recovery)


def test_a_deposit_whose_reply_was_lost_is_applied_once() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=5.0)
        await asyncio.sleep(0.2)
        s.network.cut("store-0", "worker-0")
        push = process.run(client.push(ONES))
        await asyncio.sleep(2.5)
        s.network.heal()
        await s.all_of(push, within=2.0)
        await asyncio.sleep(5.0)
        assert [state.version for state in await s.states()] == [1, 1]

    in_world(scenario, recovery=Recovery(SharedStore(), Continue()), unavailable=60.0)


# -- refusals --------------------------------------------------------------------------------------


def test_a_client_refuses_nan_before_any_shard_gets_anything() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        wrong = {"w": np.ones(40), "b": np.array([1.0, np.nan])}
        with pytest.raises(NonFiniteGradient, match="'b'"):
            await client.push(wrong)
        assert [state.version for state in await s.states()] == [0, 0]
        await client.push({"w": np.ones(40), "b": np.ones(2)})
        assert {state.version for state in await s.states()} <= {0, 1}

    in_world(scenario, params={"w": np.zeros(40), "b": np.zeros(2)})


@pytest.mark.parametrize("recovery", [Recovery(), Recovery(Chain(2))])
def test_a_shard_refuses_nan_with_the_name_of_the_array(recovery: Recovery) -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = (await s.world.complete()).views[0]
        size = s.world.group.layout.shards[0].nbytes // 8
        wrong = np.full(size, np.nan).view(np.uint8)
        op = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=wrong)
        with pytest.raises(NonFiniteGradient, match="'w'"):
            await s.ask(view.chain[0], Push(0, view.epoch, op, False, 0.1))
        before = (await s.states())[0]
        assert before.version == 0
        right = replace(op, gradient=np.ones(size).view(np.uint8))
        reply = await s.ask(view.chain[0], Push(0, view.epoch, right, False, 0.1))
        assert reply.outcome == "applied"

    in_world(scenario, recovery=recovery)


def test_requests_of_another_epoch_are_refused() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        view = (await s.world.complete()).views[0]
        size = s.world.group.layout.shards[0].nbytes
        op = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(size, np.uint8))
        for epoch in (view.epoch - 1, view.epoch + 1):
            for request in (
                Push(0, epoch, op, False, 0.1),
                ReplayBuffered(0, epoch, (op,)),
                ReplayBuffered(0, epoch, ()),
                Evict(0, epoch, (UpdateId("worker-0", 1, 0),)),
            ):
                with pytest.raises(StaleEpoch, match="shard 0"):
                    await s.ask(view.chain[0], request)
        assert (await s.states())[0].version == 0

    in_world(scenario, recovery=Recovery(Chain(2)))


def test_a_repeated_install_does_not_take_a_shard_back() -> None:
    """The driver installs again when it was not told that it had; training may have begun."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        view = (await s.world.complete()).views[0]
        initial = initial_state((await s.states())[0].values, s.world.group.rule)
        await client.push(ONES)
        install = Install(0, view.epoch, (view.chain[0],), initial, "initial")
        await s.ask(view.chain[0], install)
        await client.push(ONES)
        assert (await s.states())[0].version == 2

    in_world(scenario)


# -- while a shard is down -------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_a_worker_goes_on_until_its_buffer_is_full(buffer: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        s.world.crash("server-0", back_after=5.0)
        await asyncio.sleep(0.1)

        async def run() -> float:
            for _ in range(3):
                await client.push(ONES, pull=True)
            return asyncio.get_running_loop().time()

        began = asyncio.get_running_loop().time()
        assert await process.run(run()) - began < 1.0
        assert await process.run(run()) - began > 4.0
        assert [state.version for state in await s.states()] == [7, 7]
        replayed = [e for _, e in s.world.events if isinstance(e, Replayed) and e.count]
        assert [(e.shard, e.count) for e in replayed] == [(0, 3)]

    recovery = Recovery(SharedStore(), Continue(limit=3, buffer=buffer))  # type: ignore[arg-type]
    in_world(scenario, recovery=recovery)


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_a_worker_goes_on_in_every_outage(buffer: str) -> None:
    """What it buffered in the one before takes no room any more."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        for outage in range(1, 4):
            s.world.crash("server-0", back_after=2.0)
            await asyncio.sleep(0.1)
            for _ in range(3):
                await s.all_of(process.run(client.push(ONES)), within=0.5)
            await asyncio.sleep(3.0)
            await process.run(client.push(ONES))
            assert [state.version for state in await s.states()] == [4 * outage] * 2

    recovery = Recovery(SharedStore(), Continue(limit=3, buffer=buffer))  # type: ignore[arg-type]
    in_world(scenario, recovery=recovery)


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_a_worker_ends_only_when_what_it_buffered_is_applied(buffer: str) -> None:
    """Who reads the weights when all workers have ended must not miss it."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=2.0)
        await asyncio.sleep(0.1)
        for _ in range(3):
            await s.all_of(process.run(client.push(ONES)), within=0.5)
        assert not (await client.router.table()).complete
        await s.all_of(process.run(client.leave("finished")), within=10.0)
        table = await client.router.table()
        assert [s.world.states(view)[0].version for view in table.views] == [3, 3]

    recovery = Recovery(SharedStore(), Continue(limit=3, buffer=buffer))  # type: ignore[arg-type]
    in_world(scenario, recovery=recovery)


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_a_gradient_that_is_buffered_is_the_one_that_was_pushed(buffer: str) -> None:
    """A worker may compute the next one in the same array."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=2.0)
        await asyncio.sleep(0.1)
        gradient = np.zeros(40)
        for value in (1.0, 2.0, 3.0):
            gradient[:] = value
            await s.all_of(process.run(client.push({"w": gradient})), within=0.5)
        gradient[:] = 100.0
        await asyncio.sleep(3.0)
        (state,) = await s.states()
        assert (state.values.view("float64") == -6.0).all()

    recovery = Recovery(SharedStore(), Continue(limit=3, buffer=buffer))  # type: ignore[arg-type]
    in_world(scenario, recovery=recovery, shards=1)


def test_what_a_worker_buffered_is_applied_as_soon_as_the_shard_is_back() -> None:
    """Even if it has nothing more to push for long: others may wait for it."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=1.0)
        await asyncio.sleep(0.1)
        for _ in range(2):
            await s.all_of(process.run(client.push(ONES)), within=0.5)
        await asyncio.sleep(2.0)
        assert [state.version for state in await s.states()] == [2, 2]
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        assert [state.version for state in await s.states()] == [3, 3]

    in_world(scenario, recovery=Recovery(outage=Continue(buffer="worker")))


def test_what_a_worker_buffered_is_in_the_weights_that_it_reads_next() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=1.0)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        await s.all_of(process.run(client.pull()), within=3.0)  # it waits: none were read before
        assert client.versions() == (1, 1)
        np.testing.assert_array_equal(client.weights()["w"], -1.0)

    in_world(scenario, recovery=Recovery(outage=Continue(buffer="worker")))


def test_a_worker_that_finishes_leaves_nothing_in_its_buffer() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=3.0)
        await asyncio.sleep(0.1)

        async def run() -> None:
            await client.push(ONES)
            await client.leave("finished")

        await s.all_of(process.run(run()), within=5.0)
        assert [state.version for state in await s.states()] == [1, 1]

    recovery = Recovery(Chain(1), Continue(buffer="worker"))
    in_world(scenario, recovery=recovery)


@pytest.mark.parametrize("request_kind", ["push", "pull"])
def test_a_client_gives_up_at_its_deadline_and_names_the_shard(request_kind: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0")
        began = asyncio.get_running_loop().time()
        with pytest.raises(ShardUnavailable, match=rf"{request_kind}.* shard 0 \(epoch \d+\)"):
            await process.run(client.push(ONES) if request_kind == "push" else client.pull())
        assert asyncio.get_running_loop().time() - began == pytest.approx(30.0)

    in_world(scenario)


# -- membership ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_epochs_only_grow_and_each_has_one_head() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")

        async def push_forever() -> None:
            while True:
                await client.push(ONES)

        pushing = process.run(push_forever())
        for _ in range(5):
            table = await s.world.complete()
            s.world.crash(s.world.name_of(table.views[0].chain[0]), back_after=0.05)
            await asyncio.sleep(0.3)
        pushing.cancel()
        await s.world.complete()
        for host in s.world.hosts.values():
            host.flush()
        changes = (Detected, Promoted, Restored)
        epochs = [e.epoch for _, e in s.world.events if isinstance(e, changes) and e.shard == 0]
        assert epochs == sorted(epochs)
        assert max(epochs) > 5
        rows = [e for _, e in s.world.events if isinstance(e, Applied) and e.head and e.shard == 0]
        heads = {(e.epoch, e.node) for e in rows}
        assert len(heads) == len({epoch for epoch, _ in heads})

    in_world(scenario, recovery=Recovery(Chain(2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recovery",
    [
        Recovery(),
        Recovery(Checkpoint(path="memory://bring-up")),
        Recovery(Chain(2)),
        Recovery(SharedStore(), Continue()),
    ],
)
def test_a_node_may_be_lost_while_the_group_comes_up(recovery: Recovery) -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")

    async def lose_one(s: Setting) -> None:
        await asyncio.sleep(s.random.uniform(0, 0.05))
        s.world.crash("server-0", back_after=0.1)

    for seed in range(25):
        in_world(scenario, seed=seed, recovery=recovery, meanwhile=lose_one)


def test_that_initial_values_were_installed_before_does_not_serve_a_shard_now() -> None:
    """The driver says so again if it was not told that it was heard."""

    async def scenario(s: Setting) -> None:
        before = (await s.world.complete()).views[0]
        s.network.slow("driver", "server-0", 1.0)
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: s.world.table.seeds, 1.0)
        await s.ask(COORDINATOR, Seeded(0, before.epoch, Brought("initial", 0, {})))
        await asyncio.sleep(0.2)
        assert s.world.table.seeds
        assert not s.world.view(0).serving
        s.network.slow("driver", "server-0", 0.001)
        await s.world.complete()

    in_world(scenario, shards=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recovery",
    [Recovery(), Recovery(Checkpoint(path="memory://found-out")), Recovery(Chain(2))],
)
def test_a_node_whose_loss_is_known_before_it_is_added_does_no_harm(recovery: Recovery) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0")
        adding = asyncio.create_task(s.world.bring_up(["server-0"]))
        await asyncio.sleep(0)
        s.world.crash("server-0")
        await adding
        await s.world.bring_up(["server-0"])
        await s.all_of(process.run(client.push(ONES)), s.world.complete(), within=10.0)

    slow = Weather(delays=(0.05, 0.1))
    for seed in range(5):
        in_world(scenario, seed=seed, recovery=recovery, weather=slow)


def test_a_copy_to_a_newcomer_is_whole_though_another_copy_fails_meanwhile() -> None:
    """The operations that come during the one copy must outlive the end of the other."""

    async def scenario(s: Setting) -> None:
        await s.world.bring_up(["spare-0", "spare-1"])
        _, client = await s.enter("worker-0")
        view = (await s.world.complete()).views[0]
        first, second = (s.world.endpoint(name) for name in ("spare-0", "spare-1"))
        s.network.cut("server-0", "spare-0")
        s.network.slow("server-0", "spare-1", 0.6)

        async def extend(host: Endpoint) -> None:
            await s.ask(view.chain[0], Extend(0, view.epoch, host, Keepers()), 2 * TIMINGS.copy)

        failing = asyncio.create_task(extend(first))
        await asyncio.sleep(TIMINGS.copy - 0.1)
        copying = asyncio.create_task(extend(second))
        for _ in range(5):
            await client.push(ONES)
        await copying
        with pytest.raises(DeadlineExceeded):
            await failing
        await client.push(ONES)
        states = [s.world.hosts[e.address].replica(0).state for e in (view.chain[0], second)]
        assert states[0].version == 6
        assert [state.version for state in states] == [6, 6]

    in_world(scenario)


def test_a_loss_during_a_long_copy_is_dealt_with_at_once() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.network.slow("replica-0-1", "replica-0-2", 10.0)
        s.world.crash("replica-0-2", back_after=0.0)
        await asyncio.sleep(0.3)
        s.world.crash("server-0")
        await s.all_of(process.run(client.push(ONES)), within=0.5)

    in_world(scenario, recovery=Recovery(Chain(3)), copy=60.0)


def test_a_worker_that_cannot_empty_its_buffer_leaves_all_the_same() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0")
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=1.0)
        with pytest.raises(ShardUnavailable):
            await process.run(client.leave("finished"))
        assert any(isinstance(event, WorkerLeft) for _, event in s.world.events)

    in_world(scenario, recovery=Recovery(outage=Continue(buffer="worker")))


def test_workers_go_on_when_the_server_is_lost_again_while_it_comes_back() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES, pull=True)
        s.world.crash("server-0", back_after=0.2)
        s.network.slow("store-0", "server-0", 0.2)
        while sum("TakeMail" in line for line in s.network.trace) < 2:  # the first was at the start
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        s.world.crash("server-0")  # when the store has closed the mailbox for it
        await asyncio.sleep(0.1)
        for _ in range(3):
            await s.all_of(process.run(client.push(ONES, pull=True)), within=1.0)

    in_world(scenario, recovery=Recovery(SharedStore(), Continue()), shards=1)


@pytest.mark.slow
def test_mail_of_a_later_outage_is_not_cleared_with_that_of_an_earlier_one() -> None:
    """The head replays the mail of one outage when the tail is lost and the next outage begins."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0")
        s.network.slow("scheduler", "replica-0-1", 0.4)  # time for a deposit
        s.network.cut("replica-0-1", "replica-0-2")  # its replay does not become durable
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.2)
        await asyncio.sleep(1.5)
        s.world.crash("replica-0-2")
        s.network.heal()
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        await s.world.bring_up(["server-0", "replica-0-2"])
        assert [state.version for state in await s.states()] == [2]

    for seed in range(20):
        in_world(
            scenario,
            seed=seed,
            shards=1,
            recovery=Recovery(Chain(3), Continue(), Replay("each")),
            weather=Weather(delays=(0.002, 0.02)),
        )


# -- the store -------------------------------------------------------------------------------------


def test_an_older_state_that_arrives_late_does_not_replace_a_newer_one() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        view = (await s.world.complete()).views[0]
        old = (await s.states())[0]
        await client.push(ONES)
        new = (await s.states())[0]
        (store,) = (await s.world.complete()).stores
        await s.ask(store, PutState(0, view.epoch, new))
        await s.ask(store, PutState(0, view.epoch, old))
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(0.5)
        assert (await s.states())[0].version == 1

    in_world(scenario, recovery=Recovery(SharedStore()))
