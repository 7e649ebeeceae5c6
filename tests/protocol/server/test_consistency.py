"""BSP, SSP and ASP: what workers may read, whom they wait for, and whom they must not wait for."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import numpy as np
import pytest

from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.outage import Continue, Replay
from dps.core.rules.rule import Momentum
from dps.core.tables.spec import SparseSpec
from dps.core.updates import Operation, UpdateId
from dps.errors import Evicted
from dps.protocol import executor as offload
from dps.protocol.client.client import Client
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durability import NoDurability
from dps.protocol.messages import Evict, PullRows, Push
from dps.protocol.recovery import Recovery
from dps.sim.network import Weather
from tests.support.worlds import Setting, in_world, until

ROUNDS = 8
WORKERS = ("worker-0", "worker-1", "worker-2")
RULE = Momentum(0.05, 0.9)
START = np.random.default_rng(1).normal(size=40)
TARGETS = {name: np.random.default_rng(i).normal(size=40) for i, name in enumerate(WORKERS)}
ONES = {"w": np.ones(40)}


def gradient(worker: str, weights: np.ndarray) -> np.ndarray:
    return np.tanh(weights - TARGETS[worker]) * weights.sum()


def sequential(rounds: int) -> np.ndarray:
    """What BSP must come to: in each round all gradients are of the same weights."""
    values, slots = START, {"momentum": np.zeros_like(START)}
    for k in range(rounds):
        gradients = [gradient(worker, values) for worker in WORKERS]
        for i, each in enumerate(gradients):
            values, slots = RULE.step(values, each, slots, k * len(WORKERS) + i + 1, 1.0)
    return values


async def train(s: Setting, worker: str, client: Client, rounds: int) -> None:
    """Train with a random mix of the ways to read and write."""
    await client.pull()
    for _ in range(rounds):
        await asyncio.sleep(s.random.uniform(0, 0.02))
        both = s.random.random() < 0.5
        await client.push({"w": gradient(worker, client.weights()["w"])}, pull=both)
        if not both:
            await client.pull()


async def bulk_synchronous(s: Setting, lose: bool = False) -> np.ndarray:
    """Train with all workers from the start; the last weights that each of them has are equal."""
    entered = await asyncio.gather(*(s.enter(worker) for worker in WORKERS))
    jobs = [
        process.run(train(s, worker, client, ROUNDS))
        for worker, (process, client) in zip(WORKERS, entered, strict=True)
    ]
    if lose:
        await asyncio.sleep(s.random.uniform(0, 0.3))
        s.world.crash("server-0", back_after=s.random.uniform(0.01, 0.2))
    await s.all_of(*jobs, within=30.0)
    (weights,) = {client.weights()["w"].tobytes() for _, client in entered}
    return np.frombuffer(weights)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_bsp_is_the_sequential_computation_whatever_the_schedule(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        params = {"w": START}
        result = in_world(bulk_synchronous, seed=seed, params=params, rule=RULE, consistency=BSP())
        assert np.array_equal(result, sequential(ROUNDS)), seed


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_bsp_on_a_chain_is_the_same_when_a_head_is_lost(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        with patch.object(offload, "INLINE_BYTES", 0 if seed % 2 else 1 << 20):
            result = in_world(
                lambda s: bulk_synchronous(s, lose=True),
                seed=seed,
                params={"w": START},
                rule=RULE,
                consistency=BSP(),
                recovery=Recovery(Chain(2)),
            )
        assert np.array_equal(result, sequential(ROUNDS)), seed


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("lose", [False, True])
def test_ssp_lets_nobody_read_who_is_too_far_ahead(tau: int, lose: bool) -> None:
    async def scenario(s: Setting) -> None:
        leads = []

        async def run(worker: str, client: Client, pause: float) -> None:
            for k in range(10):
                await asyncio.sleep(s.random.uniform(0, pause))
                if s.random.random() < 0.5:
                    await client.push(ONES, pull=True)
                else:
                    await client.push(ONES)
                    await client.pull()
                # The slowest may have gone on since the read, but it never goes back.
                leads.extend([k + 1 - min(clocks.values()) for clocks in await s.clocks()])
            await client.leave("finished")

        entered = await asyncio.gather(*(s.enter(worker) for worker in WORKERS))
        jobs = [
            process.run(run(worker, client, pause))
            for worker, (process, client), pause in zip(
                WORKERS, entered, (0.005, 0.02, 0.1), strict=True
            )
        ]
        if lose:
            await asyncio.sleep(0.2)
            s.world.crash("server-0", back_after=0.1)
        await s.all_of(*jobs, within=30.0)
        assert max(leads) <= tau
        assert max(leads) > 0 or tau == 0

    for seed in range(8):
        in_world(scenario, seed=seed, consistency=SSP(tau), recovery=Recovery(Chain(2)))


def test_ssp_staleness_is_bounded() -> None:
    """A gradient misses at most what the others pushed since it may have been read."""
    tau, workers = 2, len(WORKERS)

    async def scenario(s: Setting) -> None:
        entered = await asyncio.gather(*(s.enter(worker) for worker in WORKERS))

        async def run(client: Client, pause: float) -> None:
            for _ in range(10):
                await client.pull()
                await asyncio.sleep(s.random.uniform(0, pause))
                await client.push(ONES)
            await client.leave("finished")

        pauses = (0.001, 0.01, 0.1)
        jobs = [p.run(run(c, pause)) for (p, c), pause in zip(entered, pauses, strict=True)]
        await s.all_of(*jobs, within=30.0)
        for host in s.world.hosts.values():
            host.flush()
        worst = max(max(e.staleness) for _, e in s.world.events if hasattr(e, "staleness"))
        assert 0 < worst <= (workers - 1) * (2 * tau + 1)

    for seed in range(10):
        in_world(scenario, seed=seed, consistency=SSP(tau))


def test_asp_never_waits_for_another_worker() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        process, client = await s.enter("worker-1")

        async def run() -> None:
            for _ in range(20):
                await client.push(ONES, pull=True)

        await s.all_of(process.run(run()), within=1.0)

    in_world(scenario, consistency=ASP())


@pytest.mark.parametrize("consistency", [BSP(), SSP(1)])
def test_the_others_wait_for_a_slow_worker(consistency: Consistency) -> None:
    async def scenario(s: Setting) -> None:
        _, slow = await s.enter("worker-0")
        process, client = await s.enter("worker-1")

        async def run() -> None:
            for _ in range(3):
                await client.push(ONES, pull=True)

        job = process.run(run())
        await asyncio.sleep(5.0)
        assert not job.done()
        for _ in range(2):
            await slow.push(ONES)
        if isinstance(consistency, BSP):
            await asyncio.gather(slow.push(ONES), job)
        await s.all_of(job, within=1.0)

    in_world(scenario, consistency=consistency)


async def keep_pushing(client: Client, count: int) -> None:
    for _ in range(count):
        await client.push(ONES, pull=True)


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [BSP(), SSP(0)])
@pytest.mark.parametrize("gone", ["left", "failed", "crashed"])
def test_a_worker_that_is_gone_holds_nobody_up(consistency: Consistency, gone: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        leaving, other = await s.enter("worker-1")
        job = process.run(keep_pushing(client, 10))
        ending = leaving.run(keep_pushing(other, 3))
        if gone == "crashed":
            await asyncio.sleep(s.random.uniform(0, 0.1))
            s.world.crash("worker-1")
        else:
            await ending
            await other.leave("finished" if gone == "left" else "failed")
        await s.all_of(job, within=2.0)

    for seed in range(20):
        in_world(scenario, seed=seed, consistency=consistency)


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [BSP(), SSP(0)])
def test_a_worker_that_dies_while_it_enters_holds_nobody_up(consistency: Consistency) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        job = process.run(keep_pushing(client, 10))
        entering, other = s.world.client("worker-1")
        entering.run(other.enter(entering.address, "worker-1"))
        await asyncio.sleep(s.random.uniform(0, 0.3))
        s.world.crash("worker-1")
        await s.all_of(job, within=10.0)

    slow = Weather(delays=(0.001, 0.1))  # its join may arrive when its loss is known already
    for seed in range(60):
        in_world(scenario, seed=seed, consistency=consistency, weather=slow)


@pytest.mark.parametrize("consistency", [BSP(), SSP(0), SSP(2)])
def test_a_worker_that_joins_starts_at_the_minimum(consistency: Consistency) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await process.run(keep_pushing(client, 10))
        joining, other = await s.enter("worker-1")
        assert await s.clocks() == [{"worker-0": 10, "worker-1": 10}] * 2
        jobs = process.run(keep_pushing(client, 5)), joining.run(keep_pushing(other, 5))
        await s.all_of(*jobs, within=2.0)

    in_world(scenario, consistency=consistency)


def test_a_worker_that_joins_while_a_shard_is_behind_starts_as_far_on_all() -> None:
    """There it knows nobody who is further: the one who is could not tell it yet."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.all_of(process.run(keep_pushing(client, 5)), within=3.0)
        s.network.cut("worker-0", "server-0")
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(1.0)
        assert await s.clocks() == [{"worker-0": 0}, {"worker-0": 5}]
        joining, other = await s.enter("worker-1")
        assert [clocks["worker-1"] for clocks in await s.clocks()] == [5, 5]
        await s.all_of(joining.run(keep_pushing(other, 2)), within=2.0)
        assert [clocks["worker-1"] for clocks in await s.clocks()] == [7, 7]

    in_world(scenario, consistency=SSP(9))


def test_a_shard_that_was_lost_is_told_how_far_each_worker_is() -> None:
    """Also by one that asks nothing of it for long; else the others would wait for that one."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        idle, other = await s.enter("worker-1")
        await s.all_of(
            process.run(keep_pushing(client, 9)), idle.run(keep_pushing(other, 9)), within=3.0
        )
        s.world.crash("server-0", back_after=0.1)
        await s.all_of(process.run(keep_pushing(client, 2)), within=3.0)
        assert await s.clocks() == [{"worker-0": 11, "worker-1": 9}] * 2

    in_world(scenario, consistency=SSP(2))


def test_a_round_waits_for_all_at_a_shard_that_was_lost_before_it() -> None:
    """Also if it hears of one worker by the update that this one was about to push."""

    async def scenario(s: Setting) -> None:
        first, slow = await s.enter("worker-0")
        second, quick = await s.enter("worker-1")
        await s.all_of(
            first.run(keep_pushing(slow, 3)), second.run(keep_pushing(quick, 3)), within=3.0
        )
        s.world.crash("server-0", back_after=0.1)
        pushing = second.run(quick.push(ONES))
        await asyncio.sleep(1.0)
        (state,) = await s.states()
        assert (state.version, state.clocks) == (0, {"worker-0": 3, "worker-1": 3})
        await s.all_of(first.run(slow.push(ONES)), pushing, within=1.0)

    in_world(scenario, shards=1, consistency=BSP())


def test_nobody_is_further_on_a_shard_that_has_gone_back_than_it_is() -> None:
    """Also when the state is of the time of others, who have all left since."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.all_of(process.run(keep_pushing(client, 4)), within=2.0)
        await process.run(client.leave("finished"))
        process, client = await s.enter("worker-1")
        idle, other = await s.enter("worker-2")
        await s.all_of(process.run(client.push(ONES)), within=1.0)
        s.world.crash("server-0", back_after=0.1)
        reading = process.run(client.pull())
        await asyncio.sleep(1.0)
        assert not reading.done()
        await s.all_of(idle.run(other.push(ONES)), within=1.0)
        await s.all_of(reading, within=1.0)

    saved = Recovery(Checkpoint(every=4, path="memory://gone-back"))
    in_world(scenario, shards=1, consistency=SSP(0), recovery=saved)


def test_a_shard_that_was_lost_is_told_of_what_was_in_a_mailbox_that_was_lost_too() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        await s.all_of(process.run(keep_pushing(client, 2)), within=2.0)
        s.world.crash("server-0", back_after=1.0)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.5)
        s.world.crash("mailbox-0")
        await asyncio.sleep(3.0)
        assert [state.version for state in await s.states()] == [2]
        assert await s.clocks() == [{"worker-0": 3, "worker-1": 0}]

    recovery = Recovery(SharedStore(), Continue())
    in_world(scenario, consistency=SSP(9), recovery=recovery, shards=1, extra=["mailbox-0"])


def test_a_shard_that_was_lost_is_told_of_what_the_worker_had_held_back() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        s.world.crash("server-0", back_after=0.5)
        await asyncio.sleep(0.1)
        await s.all_of(process.run(client.push(ONES)), within=0.3)
        await asyncio.sleep(1.0)
        assert [state.version for state in await s.states()] == [1]
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(1.0)
        assert [state.version for state in await s.states()] == [0]
        assert await s.clocks() == [{"worker-0": 1}]

    recovery = Recovery(NoDurability(), Continue(buffer="worker"))
    in_world(scenario, consistency=SSP(9), recovery=recovery, shards=1)


def test_what_a_replay_policy_leaves_out_counts_in_the_clock() -> None:
    async def scenario(s: Setting) -> None:
        entered = [await s.enter(worker) for worker in WORKERS[:2]]
        s.world.crash("server-0", back_after=0.5)
        await asyncio.sleep(0.1)
        for process, client in entered:
            await s.all_of(process.run(client.push(ONES)), within=0.5)
        await asyncio.sleep(1.0)
        assert [state.version for state in await s.states()] == [1]
        assert await s.clocks() == [{"worker-0": 1, "worker-1": 1}]

    policy = Replay("drop_older", drop_older_than=0)
    recovery = Recovery(SharedStore(), Continue(buffer="worker"), policy)
    in_world(scenario, consistency=SSP(9), recovery=recovery, shards=1)


def test_a_shard_that_was_lost_is_told_the_clock_that_a_newcomer_was_given() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.all_of(process.run(keep_pushing(client, 5)), within=2.0)
        await s.enter("worker-1")
        s.network.cut("worker-0", "server-0")
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(0.5)
        assert (await s.clocks())[0]["worker-1"] == 5

    in_world(scenario, consistency=SSP(9))


def test_a_worker_that_enters_again_goes_on_from_the_minimum() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        again, other = await s.enter("worker-1")
        jobs = process.run(keep_pushing(client, 4)), again.run(keep_pushing(other, 4))
        await s.all_of(*jobs, within=2.0)
        s.world.crash("worker-1")
        await s.all_of(process.run(keep_pushing(client, 3)), within=2.0)
        again, other = await s.enter("worker-1")
        assert other.incarnation == 2
        jobs = process.run(keep_pushing(client, 4)), again.run(keep_pushing(other, 4))
        await s.all_of(*jobs, within=2.0)
        assert await s.clocks() == [{"worker-0": 11, "worker-1": 11}] * 2

    in_world(scenario, consistency=SSP(1))


async def evict(s: Setting, worker: str) -> None:
    """Have all shards go on without a worker, as if it had not been heard of for a lease."""
    for view in (await s.world.complete()).views:
        await s.ask(view.chain[0], Evict(view.shard, view.epoch, (UpdateId(worker, 1, 0),)))


@pytest.mark.parametrize("consistency", [BSP(), SSP(2)])
@pytest.mark.parametrize("learns", ["from a push", "from rows"])
def test_what_was_read_before_entering_again_is_the_base_of_nothing(
    consistency: Consistency, learns: str
) -> None:
    """However the worker learns of it, and whatever it sends until it has read again."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        other_process, other = await s.enter("worker-1")
        await client.pull()
        await evict(s, "worker-0")
        await s.all_of(other_process.run(keep_pushing(other, 5)), within=2.0)
        if learns == "from a push":
            await s.all_of(process.run(client.push(ONES)), within=2.0)
        else:
            await s.all_of(process.run(client.pull_rows("rows", [1, 2])), within=2.0)
        assert client.incarnation == 2
        refused = client.dropped
        jobs = process.run(client.push(ONES)), other_process.run(keep_pushing(other, 1))
        await s.all_of(*jobs, within=2.0)
        assert client.dropped == refused + 1
        assert [state.version for state in await s.states()] == [6, 6]
        assert await s.clocks() == [{"worker-0": 6, "worker-1": 6}] * 2
        await s.all_of(process.run(client.pull()), within=2.0)
        jobs = process.run(client.push(ONES)), other_process.run(keep_pushing(other, 1))
        await s.all_of(*jobs, within=2.0)
        assert [state.version for state in await s.states()] == [8, 8]
        assert client.dropped == refused + 1

    in_world(scenario, consistency=consistency, tables=[SparseSpec("rows", 2, "float64")])


@pytest.mark.parametrize("consistency", [SSP(4), ASP()])
def test_what_was_computed_on_what_another_incarnation_read_is_dropped(
    consistency: Consistency,
) -> None:
    """Though the worker has read again by the time that it pushes: it has computed while it sent.

    Who never waits for others is not evicted, and may push whatever it has computed.
    """

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.pull()
        point = client.read_point()
        await process.run(client._enter())
        await client.pull()
        refused = consistency != ASP()
        await client.push(ONES, pull=True, computed_on=point)
        assert client.dropped == refused
        await client.push(ONES, computed_on=client.read_point())
        assert client.dropped == refused
        assert [state.version for state in await s.states()] == [2 - refused] * 2

    in_world(scenario, consistency=consistency)


def test_a_point_knows_what_its_weights_lack_and_how_much_more_may_be_computed() -> None:
    """Also where updates are buffered, and the last weights have to do."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await s.enter("worker-1")
        first = client.read_point()
        assert (first.slack, first.lacks(7)) == (None, 0)
        await client.pull()
        assert (client.read_point().slack, client.read_point().lacks(1)) == (3, 1)
        assert await client.push(ONES, pull=True) == 1
        assert (client.read_point().slack, client.read_point().lacks(1)) == (2, 0)
        s.world.crash("server-0", back_after=5.0)
        assert await process.run(client.push(ONES, pull=True)) == 2
        assert await process.run(client.push(ONES, pull=True)) == 3
        assert client.read_point().lacks(3) == 2
        assert client.read_point().slack == 0  # of the shard that is up, which has all three
        await s.world.complete()
        await process.run(client.pull())
        assert client.read_point().lacks(3) == 0

    recovery = Recovery(NoDurability(), Continue(limit=3, buffer="worker"))
    in_world(scenario, consistency=SSP(3), recovery=recovery)


def test_rows_that_arrive_after_entering_again_are_those_that_were_asked_for_before() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        host = s.world.view(1).chain[0]
        held = s.held_back(host, lambda message: isinstance(message, PullRows))
        reading = process.run(client.pull_rows("rows", range(20)))
        await asyncio.sleep(0.1)
        entering = process.run(client._enter())
        await until(lambda: client.incarnation == 2, within=0.1)
        held.set()
        await s.all_of(reading, entering, within=2.0)
        await client.push(ONES)
        assert client.dropped == 1

    in_world(scenario, consistency=BSP(), tables=[SparseSpec("rows", 2, "float64")])


def test_an_update_that_waits_for_its_round_is_refused_as_soon_as_its_worker_is_given_up() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        await s.enter("worker-1")
        (view,) = (await s.world.complete()).views
        gradient = Operation(
            "gradient", UpdateId("worker-0", 1, 1), gradient=np.ones(40).view(np.uint8)
        )
        waiting = asyncio.ensure_future(
            s.ask(view.chain[0], Push(0, view.epoch, gradient, False, patience=5.0), 10.0)
        )
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await evict(s, "worker-0")
        with pytest.raises(Evicted):
            await s.all_of(waiting, within=0.5)

    in_world(scenario, consistency=BSP(), shards=1)


def test_rows_that_were_read_before_entering_again_count_as_well() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.pull_rows("rows", [1])
        await evict(s, "worker-0")
        await s.all_of(process.run(client.pull_rows("rows", [2])), within=2.0)
        assert client.incarnation == 2
        await client.push(ONES)
        assert client.dropped == 1
        await client.pull_rows("rows", [1, 2])
        await client.push(ONES)
        assert client.dropped == 1
        assert [state.version for state in await s.states()] == [1, 1]

    in_world(scenario, consistency=BSP(), tables=[SparseSpec("rows", 2, "float64")])


def test_who_never_waits_for_others_goes_on_with_what_it_has_read() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.pull()
        await client._enter()
        await client.push(ONES)
        assert client.dropped == 0
        assert [state.version for state in await s.states()] == [1, 1]

    in_world(scenario, consistency=ASP())


def test_weights_of_before_entering_again_do_not_have_to_do_during_an_outage() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.pull()
        await evict(s, "worker-0")
        await client.push(ONES)
        assert client.incarnation == 2
        s.world.crash("server-0", back_after=2.0)
        reading = process.run(client.pull())
        await asyncio.sleep(1.0)
        assert not reading.done()
        await s.all_of(reading, within=3.0)
        await client.push(ONES)
        assert client.dropped == 1

    recovery = Recovery(NoDurability(), Continue(limit=3, buffer="worker"))
    in_world(scenario, consistency=SSP(2), recovery=recovery)
