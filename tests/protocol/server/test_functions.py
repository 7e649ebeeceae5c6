"""Calls of functions: their place among pushes and rounds, and what happens when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dps.core.consistency import BSP, SSP, Consistency
from dps.core.functions import Changed, Part
from dps.core.outage import Continue
from dps.errors import ConfigurationError, Evicted, FunctionFailed
from dps.events import WorkerLeft
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durability import NoDurability
from dps.protocol.recovery import Recovery
from dps.protocol.storage.manifest import Saved, describe
from dps.sim.checks.audit import settled
from dps.sim.network import Weather
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

    for seed in range(5):
        in_world(scenario, seed=seed, recovery=CHAIN, functions=FUNCTIONS)


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
        assert text.endswith(f"it was carried out on shard {first}.")
        states = await s.states()
        assert (states[first].values.view("float64") == 1).all()
        assert (states[1 - first].values.view("float64") == -1).all()
        await client.push(ONES)  # both go on
        assert [state.version for state in await s.states()] == [3 - first, 2 + first]

    in_world(scenario, recovery=CHAIN, functions=FUNCTIONS)


def test_what_is_not_registered_or_cannot_be_sent_is_refused_before_anything_is_sent() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        before = [state.index for state in await s.states()]
        with pytest.raises(ConfigurationError, match="'totl'; did you mean 'total'"):
            await client.apply("totl", [])
        for given, said in (
            ([{1}], "'returned': set is neither"),
            ([1, 2], "too many"),
            ([], "value"),
        ):
            with pytest.raises(ConfigurationError, match=said):
                await client.apply("returned", given)
        assert [state.index for state in await s.states()] == before

    in_world(scenario, functions=FUNCTIONS)


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


@pytest.mark.slow
def test_a_call_is_carried_out_once_though_messages_are_lost_and_doubled() -> None:
    runs: list[int] = []

    def count(arrays: Parts) -> Changed:
        part = arrays["w"]
        runs.append(part.spans[0][0])
        return Changed({"w": part.values + 1}, float(part.values[0]) + 1)

    async def scenario(s: Setting) -> None:
        (_, one), (_, other) = await s.enter("a"), await s.enter("b")
        for _ in range(6):
            await s.all_of(one.apply("count", []), other.apply("count", []), within=30.0)
        for state in await s.states():
            assert (state.values.view("float64") == 12).all()

    weather = Weather(loss={"train": 0.2, "replicate": 0.1}, duplicated=0.3)
    for seed in range(10):
        runs.clear()
        in_world(scenario, seed=seed, recovery=CHAIN, weather=weather, functions={"count": count})
        assert len(runs) == 2 * 12, "no head was lost, so each ran once on each shard"


def test_who_was_replaced_under_its_name_is_told_so_when_it_calls() -> None:
    async def scenario(s: Setting) -> None:
        _, before = await s.enter("a")
        _, after = await s.enter("a")
        assert sum(await after.apply("total", [])) == 0
        with pytest.raises(Evicted, match=r"a/calls \(incarnation 1\) .* later incarnation"):
            await s.all_of(before.apply("total", []), within=2.0)
        assert sum(await after.apply("total", [])) == 0

    in_world(scenario, functions=FUNCTIONS)


def test_who_calls_is_no_worker_of_a_run_that_is_gone_on_from() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        await client.apply("total", [])
        states = tuple(await s.states())
        assert all("a/calls" in state.workers for state in states)
        assert Saved(describe(s.world.group, 0, 0.0, ""), states).incarnations == {"a": 1}

    in_world(scenario, functions=FUNCTIONS)


def test_a_call_that_a_checkpoint_knows_alone_counts_for_the_incarnation_of_its_worker() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        await client.apply("total", [])
        state, *others = await s.states()
        later = replace(state.workers["a/calls"], incarnation=2)
        called = {**state.workers, "a/calls": later, "driver/calls": later}
        states = (replace(state, workers=called), *others)
        assert Saved(describe(s.world.group, 0, 0.0, ""), states).incarnations == {"a": 2}

    in_world(scenario, functions=FUNCTIONS)


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
