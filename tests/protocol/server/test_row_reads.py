"""Sparse tables over the protocol: pushed with the dense part, read by key, and never half."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from dps.core.consistency import BSP, SSP
from dps.core.replay import Continue
from dps.core.rules.rule import Adam
from dps.core.tables.key_routing import asked
from dps.core.tables.table import KEYS, Normal, SparseSpec
from dps.core.updates import UpdateId
from dps.protocol.messages import Pull, RowsAsked
from dps.recovery.chain import Chain
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.durability import NoDurability
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.network import Weather
from tests.support.worlds import Setting, in_world

SPEC = SparseSpec("emb", 2, "float64", Normal(1.0))
MANY = np.arange(0, 1000, 7)


def with_table(scenario: Any, **choices: Any) -> None:
    in_world(scenario, **{"params": {"w": np.zeros(40)}, "tables": [SPEC], **choices})


def ones(keys: Any) -> tuple[Any, np.ndarray]:
    return keys, np.ones((len(keys), 2))


def expected(keys: Any, pushed: dict[int, int]) -> np.ndarray:
    """The rows of these keys after so many pushes of ones to some of them."""
    start = SPEC.initial_rows(np.array(keys, np.int64))
    return start - np.array([[pushed.get(int(key), 0)] for key in keys])


def test_rows_are_made_on_first_push_and_read_in_the_order_asked_for() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push({}, rows={"emb": ones([5, 2, 5, KEYS - 1])})
        wanted = [2, KEYS - 1, 9, 5, 2]
        found = await client.pull_rows("emb", wanted)
        assert found == pytest.approx(expected(wanted, {2: 1, 5: 2, KEYS - 1: 1}))
        keys, rows = await client.pull_range("emb", 0, KEYS)
        assert keys.tolist() == [2, 5, KEYS - 1], "key 9 was only read"
        assert rows == pytest.approx(expected(keys, {2: 1, 5: 2, KEYS - 1: 1}))
        assert (await client.pull_range("emb", 3, 5))[0].tolist() == []
        assert (await client.pull_rows("emb", [])).shape == (0, 2)

    with_table(scenario, shards=3)


def test_only_shards_that_hold_a_key_get_the_update() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        (home,) = asked(s.world.group.layout, "emb", [5]).keys
        await client.push({}, rows={"emb": ones([5])})
        assert [state.version for state in await s.states()] == [int(i == home) for i in range(3)]

    with_table(scenario, shards=3)


def test_others_get_a_tick_where_clocks_count() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(3):
            await client.push({}, rows={"emb": ones([5])})
        assert await s.clocks() == [{"a": 3}] * 3
        assert sorted(state.version for state in await s.states()) == [0, 0, 3]

    with_table(scenario, shards=3, consistency=SSP(2))


@pytest.mark.parametrize("aggregate", [1, 3])
def test_rows_of_many_workers_count_exactly_in_rounds_and_when_aggregated(aggregate: int) -> None:
    async def scenario(s: Setting) -> None:
        names = "abc"
        clients = [await s.enter(name) for name in names]

        async def train(client: Any, start: int) -> None:
            for _ in range(10):
                await client.push({"w": np.ones(40)}, rows={"emb": ones(MANY[start:])})

        training = (p.run(train(c, i)) for i, (p, c) in enumerate(clients))
        await s.all_of(*training, within=60.0)
        rows = await clients[0][1].pull_rows("emb", MANY)
        pushed = {int(key): 10 * min(i + 1, 3) for i, key in enumerate(MANY)}
        assert rows == pytest.approx(expected(MANY, pushed))

    with_table(
        scenario,
        consistency=BSP() if aggregate == 1 else SSP(4),
        recovery=Recovery(Chain(2, aggregate=aggregate)),
        weather=Weather(duplicated=0.2),
    )


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_rows_that_were_buffered_during_an_outage_are_applied_once(buffer: Any) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push({"w": np.ones(40)}, pull=True, rows={"emb": ones(MANY)})
        s.world.crash("server-0", back_after=2.0)
        gradient = np.ones((len(MANY), 2))
        for _ in range(4):
            await client.push({"w": np.ones(40)}, pull=True, rows={"emb": (MANY, gradient)})
            gradient[:] = 1.0  # the caller's, to be used again
        began = asyncio.get_running_loop().time()
        rows = await client.pull_rows("emb", MANY)
        assert asyncio.get_running_loop().time() - began > 0.5, "a read of rows waits"
        assert rows == pytest.approx(expected(MANY, dict.fromkeys(MANY.tolist(), 5)))

    with_table(scenario, recovery=Recovery(SharedStore(), Continue(buffer=buffer)))


def test_the_store_is_sent_what_is_new_of_a_table() -> None:
    """And the whole of it when another store takes over."""

    def sent(s: Setting) -> list[str]:
        return [what for *_, what in s.network.trace if what in ("PutState", "PutSince")]

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(5):
            await client.push({"w": np.ones(40)}, rows={"emb": ones(MANY)})
        before = Counter(sent(s))
        assert before["PutSince"] >= 8
        s.world.crash("store-0", back_after=0.1)
        for _ in range(5):
            await client.push({"w": np.ones(40)}, rows={"emb": ones(MANY)})
        assert Counter(sent(s))["PutState"] > before["PutState"]
        s.world.crash("server-0", back_after=0.1)
        rows = await client.pull_rows("emb", MANY)
        assert rows == pytest.approx(expected(MANY, dict.fromkeys(MANY.tolist(), 10)))

    with_table(scenario, recovery=Recovery(SharedStore()))


def test_a_worker_that_is_too_far_ahead_waits_to_read_rows() -> None:
    async def scenario(s: Setting) -> None:
        (fast, a), (_, b) = await s.enter("a"), await s.enter("b")
        for _ in range(3):
            await a.push({}, rows={"emb": ones(MANY)})
        reading = fast.run(a.pull_rows("emb", MANY))
        await asyncio.sleep(3.0)
        assert not reading.done()
        for _ in range(2):
            await b.push({}, rows={"emb": ones(MANY)})
        await s.all_of(reading, within=5.0)

    with_table(scenario, consistency=SSP(1))


def test_rows_come_back_from_a_checkpoint_with_their_optimizer_state() -> None:
    states: list[Any] = []

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for i in range(9):
            other = (MANY[:3], np.ones((3, 1), np.float32))
            rows = {"emb": ones(MANY[i * 5 :]), "b.0.slot": other}
            await client.push({"w": np.ones(40)}, rows=rows)
        states.extend(await s.states())

    tables = [SPEC, SparseSpec("b.0.slot", 1)]
    in_world(scenario, tables=tables, rule=Adam(0.1), recovery=Recovery(NoDurability()))
    files = CheckpointFiles("memory://tables", 0, keep=2)
    files.write(1, states[0])
    found = files.read(files.published()[0])
    assert found.tables.keys() == states[0].tables.keys() == {"emb", "b.0.slot"}
    for name, table in states[0].tables.items():
        for a, b in zip(table.levels, found.tables[name].levels, strict=True):
            assert a.keys.tobytes() == b.keys.tobytes()
            assert a.values.tobytes() == b.values.tobytes()
            assert a.slots.keys() == b.slots.keys() == {"mean", "square"}
            assert all(a.slots[k].tobytes() == b.slots[k].tobytes() for k in a.slots)


def test_rows_are_shown_only_when_they_are_committed() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        head, tail = (s.world.name_of(host) for host in view.chain)
        s.network.slow(head, tail, 0.5)
        pushing = process.run(client.push({}, rows={"emb": ones(MANY)}))
        await asyncio.sleep(0.2)
        ask = Pull(0, view.epoch, UpdateId("", 0, 0), 0, 0.1, rows=RowsAsked("emb", MANY))
        read = await s.ask(view.chain[0], ask)
        applied = s.world.hosts[view.chain[0].address].replica(0).state.version
        assert (applied, read.version) == (1, 0)
        assert read.values == pytest.approx(expected(MANY, {}))
        await s.all_of(pushing, within=5.0)
        read = await s.ask(view.chain[0], ask)
        assert read.values == pytest.approx(expected(MANY, dict.fromkeys(MANY.tolist(), 1)))

    with_table(scenario, shards=1, recovery=Recovery(Chain(2, reads="any")))
