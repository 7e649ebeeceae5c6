"""What clients are promised: no update twice, bounded buffers, bounded waiting; and membership.

Under random faults all of it is tried by `tests/simulator/test_schedules.py`.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dps.core.consistency import BSP
from dps.core.replay import Continue
from dps.errors import DpsError, ShardUnavailable
from dps.events import Replayed, WorkerLeft
from dps.protocol.client.shard_client import Outcome
from dps.protocol.messages import Configure, Replicate
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.layered import Layered
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.disk import SCHEME
from tests.support.worlds import Setting, in_world, until

ONES = {"w": np.ones(40)}


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


def test_a_worker_goes_on_in_every_outage() -> None:
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

    recovery = Recovery(SharedStore(), Continue(limit=3, buffer="mailbox"))
    in_world(scenario, recovery=recovery)


def test_a_worker_ends_only_when_what_it_buffered_is_applied() -> None:
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

    recovery = Recovery(SharedStore(), Continue(limit=3, buffer="worker"))
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


@pytest.mark.parametrize("recovery", [Recovery(), Recovery(SharedStore(), Continue())])
def test_a_node_may_be_lost_while_the_group_comes_up(recovery: Recovery) -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")

    async def lose_one(s: Setting) -> None:
        await asyncio.sleep(s.random.uniform(0, 0.05))
        s.world.crash("server-0", back_after=0.1)

    for seed in range(5):
        in_world(scenario, seed=seed, recovery=recovery, meanwhile=lose_one)


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


def test_a_worker_that_fails_leaves_when_none_of_its_requests_is_pending() -> None:
    """An ack that comes after its statement would be missing in the count of a loss."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        before = len(s.network.trace)
        push = process.run(client.push(ONES))  # BSP waits for the other worker
        await until(lambda: any(line[4] == "Push" for line in s.network.trace[before:]), 5.0)
        assert not push.done()
        await s.all_of(process.run(client.leave("failed")), within=10.0)
        assert push.done()
        assert isinstance(push.exception(), DpsError)

    in_world(scenario, consistency=BSP())


def test_a_head_that_is_left_alone_shows_all_that_the_tail_has_shown() -> None:
    """The tail has committed an update, and its reply to the head is lost with it."""
    shown: list[tuple[int, int]] = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        head, tail = s.world.view(0).chain

        def note(m: object) -> bool:
            replica = s.world.hosts[head.address].replica(0)
            if isinstance(m, Configure):
                shown.append((replica._commits.committed.version, replica.state.version))
            return False

        s.held_back(tail, lambda m: isinstance(m, Replicate))
        s.held_back(head, note)
        pushing = process.run(client.push(ONES))
        await until(lambda: s.world.hosts[tail.address].replica(0).state.version == 1)
        s.world.crash(s.world.name_of(tail))
        await s.all_of(pushing, within=10.0)
        assert shown[0] == (1, 1)

    layers = Layered(Chain(2), Checkpoint(every=100, path=f"{SCHEME}://x"))
    in_world(scenario, shards=1, recovery=Recovery(layers))
