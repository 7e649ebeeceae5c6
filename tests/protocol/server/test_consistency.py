"""BSP, SSP and ASP: what workers may read, whom they wait for, and whom they must not wait for."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import numpy as np
import pytest

from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.rules.rule import Momentum
from dps.core.updates import UpdateId
from dps.protocol import executor as offload
from dps.protocol.client.client import Client
from dps.protocol.client.shard_client import Outcome
from dps.protocol.messages import Evict
from dps.recovery.chain import Chain
from dps.recovery.strategy import Recovery
from tests.protocol.coordinator.test_liveness import view_of
from tests.simulator.schedules.strategies import TIMINGS
from tests.support.worlds import Setting, in_world

ROUNDS = 8
WORKERS = ("worker-0", "worker-1", "worker-2")
RULE = Momentum(0.05, 0.9)
START = np.random.default_rng(1).normal(size=40)
TARGETS = {name: np.random.default_rng(i).normal(size=40) for i, name in enumerate(WORKERS)}
ONES = {"w": np.ones(40)}


def gradient(worker: str, weights: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.tanh(weights - TARGETS[worker]) * weights.sum()
    return found


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


def test_bsp_is_the_sequential_computation_whatever_the_schedule() -> None:
    for seed in range(6):
        params = {"w": START}
        result = in_world(bulk_synchronous, seed=seed, params=params, rule=RULE, consistency=BSP())
        assert np.array_equal(result, sequential(ROUNDS)), seed


def test_bsp_on_a_chain_is_the_same_when_a_head_is_lost() -> None:
    for seed in range(6):
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


@pytest.mark.parametrize(("tau", "lose"), [(0, True), (1, False), (3, True)])
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


def test_asp_never_waits_for_another_worker() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("worker-0")
        process, client = await s.enter("worker-1")

        async def run() -> None:
            for _ in range(20):
                await client.push(ONES, pull=True)

        await s.all_of(process.run(run()), within=1.0)

    in_world(scenario, consistency=ASP())


async def keep_pushing(client: Client, count: int) -> None:
    for _ in range(count):
        await client.push(ONES, pull=True)


@pytest.mark.parametrize(
    ("consistency", "gone"), [(BSP(), "left"), (SSP(0), "failed"), (BSP(), "crashed")]
)
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

    for seed in range(5):
        in_world(scenario, seed=seed, consistency=consistency)


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


def test_an_update_that_was_applied_does_not_count_as_dropped() -> None:
    """Though its worker is evicted before it has read the weights after it."""
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0", lambda *ack: outcomes.append(ack[-1]))
        await s.enter("worker-1")
        pushing = process.run(client.push(ONES, pull=True))
        await asyncio.sleep(2 * TIMINGS.patience)
        view = await view_of(s)
        await s.ask(view.chain[0], Evict(0, view.epoch, (UpdateId("worker-0", 1, 0),)))
        await s.all_of(pushing, within=2.0)
        assert (outcomes, client.dropped, client.incarnation) == (["applied"], 0, 2)

    in_world(scenario, consistency=SSP(0), shards=1)
