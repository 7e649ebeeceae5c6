"""Requests that are under way at once keep their order, while filters work beside the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
import pytest

import dps
from dps.core.blocks import Layout
from dps.core.consistency import ASP, SSP, Consistency
from dps.core.filters.chain import checked
from dps.core.filters.filter import Selection, Sending
from dps.core.functions import Part
from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient
from dps.events import WorkerLeft
from dps.protocol import executor
from dps.protocol.client.encoder import Encoder
from dps.protocol.client.parts import parts_of
from dps.protocol.client.read_point import ReadPoint, ShardRead
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group
from dps.protocol.recovery import Recovery
from dps.sim.world import COORDINATOR
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ENTRIES = 40
PUSHES = 12
WAIT_SECONDS = 30.0
FEW = {"*": [dps.TopK(0.1)]}


@pytest.fixture(autouse=True)
def always_beside() -> Iterator[None]:
    """Have even the smallest work done beside the loop, each time for another while."""
    with patch.object(executor, "INLINE_BYTES", 0):
        yield


def some(number: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(number).integers(-9, 10, ENTRIES).astype(float)}


def test_reads_and_calls_come_after_the_updates_that_were_pushed_before_them() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")

        async def pulled() -> float:
            await client.pull()
            return float(client.weights()["w"][0])

        async def called() -> float:
            (first,) = await client.apply("first", [])
            return float(first)

        requests, expected = [], []
        for number in range(PUSHES):
            await asyncio.sleep(s.random.uniform(0, 0.02))
            push = process.run(client.push({"w": np.full(ENTRIES, -1.0)}))
            requests += [process.run(pulled()), process.run(called())]
            expected += [number + 1.0] * 2
        assert await s.all_of(*requests, within=20) == expected
        await push

    def first(weights: Mapping[str, Part]) -> float:
        return float(weights["w"].values[0])

    in_world(
        scenario,
        params={"w": np.zeros(ENTRIES)},
        shards=1,
        filters={"*": [dps.Quantise("bf16")]},
        functions={"first": first},
    )


def test_an_update_of_one_shard_does_not_overtake_one_of_several() -> None:
    """Its number is higher, so the shard would take the other one for a duplicate."""
    outcomes: list[Outcome] = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a", lambda *told: outcomes.append(told[-1]))
        whole = {"w": np.ones(ENTRIES), "one": np.ones(1)}
        assert len(client.layout.shards_of(["one"])) == 1
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
        before = [client.withheld(shard)["w"].tobytes() for shard in range(2)]
        await process.run(client.leave("finished"))
        states = await s.states()
        found = s.world.group.layout.scatter({i: state.values for i, state in enumerate(states)})
        assert (found["w"] == -sum(some(n)["w"] for n in range(PUSHES))).all()
        return before

    async def one_by_one(s: Setting) -> list[bytes]:
        process, client = await s.enter("a")
        for number in range(PUSHES):
            await process.run(client.push(some(number)))
        return [client.withheld(shard)["w"].tobytes() for shard in range(2)]

    params = {"w": np.zeros(ENTRIES)}
    together = in_world(scenario, params=params, filters=FEW)
    assert order == [list(range(1, PUSHES + 2))] * 2
    assert together == in_world(one_by_one, params=params, filters=FEW)


def test_who_leaves_waits_for_what_is_still_filtered() -> None:
    """Its remainder is then what the last update has left."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        pushes = [process.run(client.push(some(number))) for number in range(3)]
        await s.all_of(process.run(client.leave("finished")), within=5)
        assert all(push.done() for push in pushes)
        (state,) = await s.states()
        assert (state.values.view(float) == -sum(some(n)["w"] for n in range(3))).all()

    in_world(scenario, params={"w": np.zeros(ENTRIES)}, shards=1, filters=FEW)


def test_a_push_that_is_given_up_while_it_is_filtered_has_never_been() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await process.run(client.push(some(0)))
        before, number = client.filtered, client.next_seq
        given_up = process.run(client.push(some(1)))
        behind = process.run(client.push(some(2)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert given_up.cancelled()
        assert (client.filtered, client.next_seq) == (before, number)
        assert await s.all_of(behind, within=5) == [number]
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


@pytest.mark.parametrize("consistency", [ASP(), SSP(3)], ids=str)
def test_a_worker_that_enters_again_does_so_between_its_requests(consistency: Consistency) -> None:
    """It is given up with several updates under way, some of them not filtered yet."""
    outcomes: dict[tuple[int, int], set[Outcome]] = {}

    def note(shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        outcomes.setdefault((update.incarnation, update.seq), set()).add(outcome)

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a", note)
        await process.run(client.pull())
        first = client.incarnation
        s.network.cut("server-0", "a")
        pushes = [process.run(client.push(some(n), pull=True)) for n in range(3)]
        await asyncio.sleep(0.01)
        s.network.pause(process)
        await until(lambda: happened(s, WorkerLeft))
        s.network.heal()
        s.network.resume(process)
        numbers = await s.all_of(*pushes, within=20)
        assert numbers == sorted(set(numbers))
        await process.run(client.pull())
        assert client.incarnation > first
        assert client.read_point().incarnations == {client.incarnation}
        (last,) = await s.all_of(process.run(client.push(some(9), pull=True)), within=5)
        assert outcomes[client.incarnation, last] == {"applied"}

    in_world(
        scenario,
        params={"w": np.zeros(ENTRIES)},
        consistency=consistency,
        filters={"*": [dps.Quantise("bf16")]},
    )


@dataclass(frozen=True)
class Waits(Selection):
    """Sends everything, once it is told to; notes whether it was."""

    goes_on: threading.Event = field(default_factory=threading.Event)
    told: list[bool] = field(default_factory=list)

    @property
    def feedback(self) -> bool:
        return True

    def selected(self, gradient: np.ndarray, sending: Sending) -> np.ndarray:
        self.told.append(self.goes_on.wait(WAIT_SECONDS))
        return np.arange(gradient.size) % 2 == sending.push % 2


def encoder_of(waits: Waits) -> tuple[Encoder, Layout]:
    layout = Layout.of({"w": np.zeros(ENTRIES)}, 1)
    group = Group("g", layout, dps.SGD(1.0), ASP(), Recovery(), COORDINATOR, TIMINGS)
    return Encoder(
        replace(group, filters=checked({"*": [waits]}, layout.names, group.rule))
    ), layout


async def encoded(encoder: Encoder, layout: Layout, number: int) -> Operation:
    operation = Operation("gradient", UpdateId("a", 1, number))
    parts = parts_of(layout, some(number), {}, np.empty, values=True)
    made = await encoder.operations(operation, parts.dense, ReadPoint((ShardRead(),)))
    return made(0)


def test_the_loop_goes_on_while_a_gradient_is_filtered() -> None:
    """It is what renews the worker's lease; the filter waits here until the loop has turned."""
    waits = Waits()
    encoder, layout = encoder_of(waits)

    async def main() -> None:
        work = asyncio.ensure_future(encoded(encoder, layout, 1))
        for _ in range(100):
            await asyncio.sleep(0)
        waits.goes_on.set()
        await work

    asyncio.run(main())
    assert waits.told == [True]


def test_a_thread_that_filters_for_nobody_any_more_changes_nothing() -> None:
    waits, plain = Waits(), Waits()
    plain.goes_on.set()
    (encoder, layout), (other, _) = encoder_of(waits), encoder_of(plain)

    async def main() -> None:
        work = asyncio.ensure_future(encoded(encoder, layout, 1))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        waits.goes_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())
    assert waits.told == [True]
    for number in (2, 3):
        found = asyncio.run(encoded(encoder, layout, number))
        expected = asyncio.run(encoded(other, layout, number))
        assert found.gradient is not None
        assert expected.gradient is not None
        assert found.gradient.tobytes() == expected.gradient.tobytes()
    assert encoder.state == other.state
