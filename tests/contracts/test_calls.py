"""What every durability does for functions: each call counts once, and its result is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from dps.core.functions import Changed, Part, pack, unpack
from dps.core.updates import Call, Operation, UpdateId
from dps.protocol.messages import Push
from dps.recovery.strategy import Recovery
from tests.contracts.test_durabilities import DURABILITIES
from tests.support.worlds import Setting, in_world

CALLS = 6
KINDS = [kind for kind in DURABILITIES if not DURABILITIES[kind][0]().refusal("functions")]


def grow(arrays: Mapping[str, Part], by: float) -> Changed:
    """Add to every weight; return the first."""
    (part,) = arrays.values()
    values = part.values + by
    return Changed({"w": values}, values[0])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def carry_out(kind: str, scenario: Callable[[Setting], Any], seed: int = 0) -> None:
    recovery = Recovery(DURABILITIES[kind][0]())
    in_world(scenario, seed=seed, shards=2, recovery=recovery, functions={"grow": grow})


def test_no_more_calls_are_lost_than_promised_and_none_counts_twice(kind: str) -> None:
    _, may_lose, _ = DURABILITIES[kind]

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        made = s.random.randint(1, CALLS)
        for n in range(1, made + 1):
            assert await client.apply("grow", [1.0]) == [n, n]
            await client.pull()
        await s.lose()
        lost, other = await s.states()
        assert 0 <= made - lost.version <= may_lose
        assert other.version == made
        (came,) = await s.all_of(process.run(client.apply("grow", [1.0])), within=10.0)
        assert came == [lost.version + 1, made + 1]
        for state, n in zip(await s.states(), came, strict=True):
            assert (state.values.view("float64") == n).all()
            assert state.version == n == sum(p.applied for p in state.workers.values())

    for seed in range(4):
        carry_out(kind, scenario, seed)


def test_a_call_that_is_sent_again_after_a_loss_has_the_same_result(kind: str) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.apply("grow", [1.0])
        await client.pull()
        if s.world.group.recovery.durability.writes_checkpoints:
            for _ in range(5):  # for the call to be in a checkpoint that is complete
                await client.push({"w": np.zeros(40)})
        await asyncio.sleep(1.0)
        await s.lose()
        view, before = (await s.world.complete()).views[0], (await s.states())[0]
        call = Call("grow", pack([1.0]))
        op = Operation("apply", UpdateId("a/calls", 1, 1), call=call)
        reply = await s.ask(view.chain[0], Push(0, view.epoch, op, False, 0.1))
        assert unpack(reply.result) == 1.0
        assert reply.outcome == ("applied" if kind == "none" else "duplicate")
        after = (await s.states())[0]
        assert (after.values.view("float64") == 1).all()
        assert after.version == before.version + (kind == "none")

    carry_out(kind, scenario)
