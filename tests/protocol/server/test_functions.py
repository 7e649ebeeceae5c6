"""Calls of functions: their place among pushes and rounds, and what happens when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dps.core.consistency import BSP, SSP, Consistency
from dps.core.functions import Changed, Part
from dps.core.replay import Continue
from dps.errors import FunctionFailed
from dps.events import WorkerLeft
from dps.recovery.chain import Chain
from dps.recovery.durability import NoDurability
from dps.recovery.strategy import Recovery
from tests.simulator.checks.audit import settled
from tests.support.worlds import Setting, happened, in_world, until

Parts = Mapping[str, Part]
ONES = {"w": np.ones(40)}
CHAIN = Recovery(Chain(2))


def total(arrays: Parts) -> float:
    return float(arrays["w"].values.sum())


def negate_on_first(arrays: Parts) -> Changed:
    """Fails on every shard but the one with the first element."""
    part = arrays["w"]
    if part.spans[0][0] > 0:
        raise ValueError(f"not the first: {part.spans[0][0]}")
    return Changed({"w": -part.values})


def returned(arrays: Parts, value: Any) -> Any:
    return value


FUNCTIONS: dict[str, Any] = {
    "total": total,
    "negate on first": negate_on_first,
    "returned": returned,
}


def test_a_call_sees_what_its_worker_has_pushed_before() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for n in range(1, 4):
            pushing = asyncio.ensure_future(client.push(ONES))
            await asyncio.sleep(0)  # it has begun, and nothing more
            assert sum(await client.apply("total", [])) == -40 * n
            await pushing

    for seed in range(2):
        in_world(scenario, seed=seed, recovery=CHAIN, functions=FUNCTIONS)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_later_push_does_not_overtake_a_call(shards: int) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        calling, pushing = process.run(client.apply("total", [])), process.run(client.push(ONES))
        results, _ = await s.all_of(calling, pushing, within=5.0)
        assert sum(results) == 0

    in_world(scenario, shards=shards, recovery=CHAIN, functions=FUNCTIONS)


@pytest.mark.parametrize("model", [BSP(), SSP(0)], ids=str)
def test_a_call_waits_for_no_round_and_moves_no_clock_on(model: Consistency) -> None:
    async def scenario(s: Setting) -> None:
        (_, one), (_, other) = await s.enter("a"), await s.enter("b")
        for _ in range(3):
            assert sum(await one.apply("total", [])) == 0
        assert await s.clocks() == [{"a": 0, "b": 0}] * 2
        await s.all_of(one.push(ONES), other.push(ONES), within=5.0)
        assert sum(await other.apply("total", [])) == -80
        assert await s.clocks() == [{"a": 1, "b": 1}] * 2

    in_world(scenario, consistency=model, recovery=CHAIN, functions=FUNCTIONS)


def test_a_function_that_fails_on_one_shard_changes_the_others_and_says_so() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        with pytest.raises(FunctionFailed) as failed:
            await client.apply("negate on first", [])
        table = s.world.group.layout.shards
        (first,) = (i for i, t in enumerate(table) if any(p.block.start == 0 for p in t.pieces))
        text = str(failed.value)
        assert f"(shard {1 - first}, epoch" in text
        assert "ValueError: not the first: " in text
        assert text.endswith(f"It was applied on shard {first}.")
        states = await s.states()
        assert (states[first].values.view("float64") == 1).all()
        assert (states[1 - first].values.view("float64") == -1).all()
        await client.push(ONES)  # both go on
        assert [state.version for state in await s.states()] == [3 - first, 2 + first]

    in_world(scenario, recovery=CHAIN, functions=FUNCTIONS)


def test_a_call_to_a_shard_that_is_down_waits_and_comes_after_what_was_held_back() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.pull()
        s.world.crash("server-0", back_after=2.0)
        await asyncio.sleep(0.5)
        await client.push(ONES)
        (came,) = await s.all_of(process.run(client.apply("total", [])), within=10.0)
        assert sum(came) == -40

    recovery = Recovery(NoDurability(), Continue(buffer="worker"))
    in_world(scenario, recovery=recovery, functions=FUNCTIONS)


def test_results_go_with_their_callers_and_stay_for_one_that_is_only_silent() -> None:
    async def scenario(s: Setting) -> None:
        silent, paused = await s.enter("silent")
        await silent.run(paused.apply("total", []))
        s.network.pause(silent)
        for i in range(3):
            process, client = await s.enter(f"worker-{i}")
            await process.run(client.apply("total", []))
            await process.run(client.leave("finished" if i else "failed"))
        await until(lambda: any(event.was_lost for event in happened(s, WorkerLeft)))
        table = await settled(s.world, 5.0)
        for state in (state for view in table.views for state in s.world.states(view)):
            assert state.results.keys() == {"silent/calls"}
            assert state.workers["worker-0/calls"].seq == 1, "it would not run again"
        s.network.resume(silent)
        assert sum(await silent.run(paused.apply("total", []))) == 0

    in_world(scenario, recovery=CHAIN, functions=FUNCTIONS)
