"""Filters and delay compensation in a whole group: rounds, sums, outages, and leaving in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import dps
from dps.core.consistency import BSP
from dps.core.replay import Continue
from dps.errors import NonFiniteGradient, ShapeMismatch
from dps.events import RolledBack, WorkerLeft
from dps.protocol.client.shard_client import Outcome
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.network import Process
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

PARAMS = {"w": np.zeros(300, np.float32), "b": np.zeros(20)}
FEW = {"*": [dps.TopK(0.1), dps.Quantise("bf16")]}


def gradients(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {n: random.integers(-9, 10, p.shape).astype(p.dtype) for n, p in PARAMS.items()}


async def weights(s: Setting) -> dict[str, np.ndarray]:
    states = await s.states()
    return s.world.group.layout.scatter({i: state.values for i, state in enumerate(states)})


async def given_up(s: Setting, process: Process) -> None:
    """Pause a worker until it is given up, and go on."""
    s.network.pause(process)
    await until(lambda: happened(s, WorkerLeft))
    await asyncio.sleep(0.1)
    s.network.resume(process)


@pytest.mark.parametrize(
    ("when", "outcomes"),
    [("before", ["applied"]), ("waiting", ["dropped", "applied"]), ("applied", ["duplicate"])],
)
def test_the_last_update_is_applied_once_though_its_worker_is_given_up(
    when: str, outcomes: list[Outcome]
) -> None:
    """Before it is sent; while it waits for its round; and after it, before it is told so."""
    told: dict[int, list[Outcome]] = {0: [], 1: []}
    count = 2 if when == "waiting" else 1

    async def scenario(s: Setting) -> None:
        of = gradients(np.random.default_rng(0))
        process, client = await s.enter("a", lambda shard, *ack: told[shard].append(ack[-1]))
        others = [await s.enter(f"b-{i}") for i in range(1, count)]
        entered = [(process, client), *others]
        await s.all_of(*(p.run(c.push(of)) for p, c in entered), within=5)
        for shard in told if when == "applied" else ():
            s.network.cut(f"server-{shard}", "a")
        if when == "before":
            await given_up(s, process)
            await asyncio.sleep(TIMINGS.lease)  # it is told so
        leaving = process.run(client.leave("finished"))
        if when != "before":
            await asyncio.sleep(0.1)
            await given_up(s, process)
        s.network.heal()
        await s.all_of(leaving, *(p.run(c.leave("finished")) for p, c in others), within=20)
        found = await weights(s)
        for name in PARAMS:
            assert (found[name] == -count * of[name]).all()
        assert told == {shard: ["applied", *outcomes] for shard in range(2)}

    in_world(scenario, params=PARAMS, consistency=BSP(), filters=FEW)


def test_gradients_that_were_buffered_are_decoded_and_corrected() -> None:
    """Three of 2 each from weights 0, summed when the weights are −2: 3·(2 + ¼·4·(−2 − 0)) = 0."""
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        of = {name: np.full_like(p, 2.0) for name, p in PARAMS.items()}
        process, client = await s.enter("a", lambda *told: outcomes.append(told[-1]))
        other, faster = await s.enter("b")
        await process.run(client.pull())
        await other.run(faster.push(of))
        for shard in range(2):
            s.world.crash(f"server-{shard}", back_after=1.0)
        await asyncio.sleep(0.2)
        for _ in range(3):
            await process.run(client.push(of))
        await process.run(client.leave("finished"))
        assert outcomes == ["buffered"] * 6
        found = await weights(s)
        for name in PARAMS:
            assert (found[name] == -2.0).all()

    in_world(
        scenario,
        params=PARAMS,
        rule=dps.DelayCompensated(dps.SGD(1.0), 0.25),
        recovery=Recovery(SharedStore(), Continue()),
        filters={"*": [dps.Quantise("bf16"), dps.Lossless()]},
    )


COMPENSATED = dps.DelayCompensated(dps.SGD(1.0), 0.25)
TWOS = {"w": np.full(300, 2.0, np.float32), "b": np.full(20, 2.0)}


def test_a_gradient_is_corrected_to_what_was_read_before_it_was_pushed() -> None:
    """Not to what was read since: both are of weights 0, so it ends at −2 − (2 + ¼·4·(−2)) = −2."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await process.run(client.pull())
        pushes = (process.run(client.push(TWOS, pull=True)) for _ in range(2))
        await s.all_of(*pushes, within=5)
        found = await weights(s)
        for name in PARAMS:
            assert (found[name] == -2.0).all()

    in_world(scenario, params=PARAMS, rule=COMPENSATED)


def test_a_gradient_is_corrected_to_the_same_weights_when_it_is_sent_again() -> None:
    """One shard applies it and shows the weights −2, then goes back to 0 with the one it lost."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await process.run(client.pull())
        s.world.crash("server-1")
        pushing = process.run(client.push(TWOS, pull=True))
        await until(lambda: client.versions()[0] >= 1)
        await s.world.bring_back_missing()
        await s.all_of(pushing, within=20)
        found = await weights(s)
        for name in PARAMS:
            assert (found[name] == -2.0).all()
        assert any(isinstance(event, RolledBack) for _, event in s.world.events)

    kept = Checkpoint(every=8, path="memory://corrected", scope="all")
    in_world(scenario, params=PARAMS, rule=COMPENSATED, recovery=Recovery(kept))


def test_what_is_refused_leaves_the_filters_as_they_were() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await process.run(client.push(gradients(np.random.default_rng(0))))
        before = client.filtered
        for wrong, error in (
            ({"w": np.full(300, np.nan, np.float32)}, NonFiniteGradient),
            ({"w": np.zeros(299, np.float32)}, ShapeMismatch),
            ({"v": np.zeros(300)}, ShapeMismatch),
        ):
            with pytest.raises(error):
                await process.run(client.push(wrong))
        assert client.filtered == before
        assert client._seq == 1
        await process.run(client.push(gradients(np.random.default_rng(0))))
        assert (await s.states())[0].version == 2

    in_world(scenario, params=PARAMS, shards=1, filters=FEW)


def test_what_is_too_large_for_one_shard_leaves_the_filters_of_all() -> None:
    """With what was withheld before; the gradient is filtered for one shard after the other."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        layout = s.world.group.layout
        shares = {i: np.full(of.nbytes // 4, i == 1) for i, of in enumerate(layout.shards)}
        there = layout.scatter({i: share.astype("f4").view("u1") for i, share in shares.items()})
        large = {"w": there["w"] * np.float32(2e38) + np.arange(40, dtype=np.float32)}
        await process.run(client.push(large))
        before = client.filtered
        withheld = [client.encoder._outboxes[i].withheld()["w"].copy() for i in range(2)]
        assert all(kept.any() for kept in withheld)
        with pytest.raises(NonFiniteGradient, match="'w' with earlier withheld"):
            await process.run(client.push(large))
        assert client.filtered == before
        for i, kept in enumerate(withheld):
            assert (client.encoder._outboxes[i].withheld()["w"] == kept).all()
        assert {state.version for state in await s.states()} == {1}

    params = {"w": np.zeros(40, np.float32)}
    in_world(scenario, params=params, filters={"*": [dps.TopK(0.1)]})
