"""Requests that are under way at once keep their order, while filters work beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

import dps
from dps.core.updates import UpdateId
from dps.errors import NonFiniteGradient
from dps.protocol import executor
from dps.protocol.client.shard_client import Outcome
from tests.support.worlds import Setting, in_world

ENTRIES = 40
PUSHES = 12
FEW = {"*": [dps.TopK(0.1)]}


@pytest.fixture(autouse=True)
def always_beside() -> Iterator[None]:
    """Have even the smallest work done beside the loop, each time for another while."""
    with patch.object(executor, "INLINE_BYTES", 0):
        yield


def some(number: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(number).integers(-9, 10, ENTRIES).astype(float)}


def test_an_update_of_one_shard_does_not_overtake_one_of_several() -> None:
    """Its number is higher, so the shard would take the other one for a duplicate."""
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a", lambda *told: outcomes.append(told[-1]))
        whole = {"w": np.ones(ENTRIES), "one": np.ones(1)}
        assert len(client.group.layout.shards_of(["one"])) == 1
        pushes = [process.run(client.push(of)) for of in (whole, {"one": np.ones(1)}) * PUSHES]
        await s.all_of(*pushes, within=20)
        assert outcomes == ["applied"] * (3 * PUSHES)

    in_world(scenario, params={"w": np.zeros(ENTRIES), "one": np.zeros(1)})


def test_updates_are_filtered_once_and_in_the_order_in_which_they_were_pushed() -> None:
    """What one withholds is in the next; at the end, nothing is missing or there twice."""
    order: list[list[int]] = [[], []]

    async def scenario(s: Setting) -> list[bytes]:
        def note(shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
            order[shard].append(update.seq)

        process, client = await s.enter("a", note)
        pushes = [process.run(client.push(some(n), pull=n % 3 == 0)) for n in range(PUSHES)]
        assert await s.all_of(*pushes, within=20) == list(range(1, PUSHES + 1))
        before = [client.encoder._outboxes[shard].withheld()["w"].tobytes() for shard in range(2)]
        await process.run(client.leave("finished"))
        states = await s.states()
        found = s.world.group.layout.scatter({i: state.values for i, state in enumerate(states)})
        assert (found["w"] == -sum(some(n)["w"] for n in range(PUSHES))).all()
        return before

    async def one_by_one(s: Setting) -> list[bytes]:
        process, client = await s.enter("a")
        for number in range(PUSHES):
            await process.run(client.push(some(number)))
        return [client.encoder._outboxes[shard].withheld()["w"].tobytes() for shard in range(2)]

    params = {"w": np.zeros(ENTRIES)}
    together = in_world(scenario, params=params, filters=FEW)
    assert order == [list(range(1, PUSHES + 2))] * 2
    assert together == in_world(one_by_one, params=params, filters=FEW)


def test_a_push_that_is_given_up_while_it_is_filtered_has_never_been() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await process.run(client.push(some(0)))
        before, number = client.filtered, client._seq
        given_up = process.run(client.push(some(1)))
        behind = process.run(client.push(some(2)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert given_up.cancelled()
        assert (client.filtered, client._seq) == (before, number)
        assert await s.all_of(behind, within=5) == [number + 1]
        await process.run(client.leave("finished"))
        (state,) = await s.states()
        assert (state.values.view(float) == -(some(0)["w"] + some(2)["w"])).all()

    in_world(scenario, params={"w": np.zeros(ENTRIES)}, shards=1, filters=FEW)


def test_what_is_refused_by_the_filters_lets_the_next_one_pass() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        large = {"w": np.full(ENTRIES, 1.5e308)}
        pushes = [process.run(client.push(of)) for of in (large, large, some(0))]
        first, second, third = await asyncio.gather(*pushes, return_exceptions=True)
        assert isinstance(second, NonFiniteGradient)
        assert (first, third) == (1, 2)

    in_world(scenario, params={"w": np.zeros(ENTRIES)}, shards=1, filters=FEW)
