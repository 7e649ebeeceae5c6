"""Sparse tables over the protocol: pushed with the dense part, read by key, and never half."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from dps.core.consistency import BSP, SSP
from dps.core.outage import Continue
from dps.core.rules.rule import SGD, Adam
from dps.core.rules.staleness import StalenessAware
from dps.core.tables.key_routing import asked
from dps.core.tables.row_gradients import KEYS
from dps.core.tables.spec import Normal, SparseSpec
from dps.core.updates import UpdateId
from dps.errors import NonFiniteGradient, ShapeMismatch, StaleEpoch
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durability import NoDurability
from dps.protocol.messages import Configure, Evict, Pull, PullRange, PullRows
from dps.protocol.recovery import Recovery
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.sim.network import Weather
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


def test_rows_that_are_buffered_are_those_that_were_pushed() -> None:
    """A worker may compute the next ones in the same arrays."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        s.world.crash("server-0", back_after=2.0)
        await asyncio.sleep(0.1)
        keys, gradient = np.array([3, 5]), np.ones((2, 2))
        await s.all_of(process.run(client.push({}, rows={"emb": (keys, gradient)})), within=0.5)
        keys[:], gradient[:] = [7, 9], 100.0
        await asyncio.sleep(3.0)
        assert await client.pull_rows("emb", [3, 5]) == pytest.approx(
            expected([3, 5], {3: 1, 5: 1})
        )
        assert (await client.pull_range("emb", 0, KEYS))[0].tolist() == [3, 5]

    with_table(scenario, shards=1, recovery=Recovery(outage=Continue(buffer="worker")))


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


def test_a_model_may_have_tables_alone() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push({}, pull=True, rows={"emb": ones(MANY)})
        assert client.weights() == {}
        assert (await client.pull_range("emb", 0, KEYS))[0].tolist() == MANY.tolist()

    with_table(scenario, params={}, shards=4)


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


@pytest.mark.parametrize("shards", [1, 2])
def test_bad_rows_are_refused_and_nothing_of_the_update_is_applied(shards: int) -> None:
    nan = np.full((2, 2), np.nan)
    bad: list[tuple[type[Exception], str, Any]] = [
        (ShapeMismatch, "no sparse table is named 'x'", {"x": ones([1])}),
        (ShapeMismatch, "-1 is not from 0", {"emb": ones([1, -1])}),
        (ShapeMismatch, "float64, expected whole", {"emb": ones([1.5])}),
        (ShapeMismatch, r"expected float64\[2, 2\]", {"emb": ([1, 2], np.ones((2, 3)))}),
        (NonFiniteGradient, "'emb' hold NaN", {"emb": ([1, 2], nan)}),
        (NonFiniteGradient, "'emb' hold NaN", {"emb": ([1, 1], np.full((2, 2), 1e308))}),
    ]

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for kind, said, rows in bad:
            with pytest.raises(kind, match=said):
                await client.push({"w": np.ones(40)}, rows=rows)
        with pytest.raises(NonFiniteGradient, match="'w'"):
            await client.push({"w": np.full(40, np.nan)}, rows={"emb": ones(MANY)})
        assert all(state.version == 0 and not state.tables for state in await s.states())
        with pytest.raises(ShapeMismatch, match="-1 is not from 0"):
            await client.pull_rows("emb", [-1])
        with pytest.raises(ShapeMismatch, match="0 ≤ start ≤ stop"):
            await client.pull_range("emb", 3, 1)
        with pytest.raises(ShapeMismatch, match="no sparse table"):
            await client.pull_range("w", 0, 3)
        await client.push({"w": np.ones(40)}, rows={"emb": ones(MANY)})
        assert all(state.version == 1 for state in await s.states())

    with_table(scenario, shards=shards)


def test_what_was_read_of_rows_is_what_a_gradient_is_based_on() -> None:
    """One that has missed two updates takes half a step."""

    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        for _ in range(4):
            await a.pull_rows("emb", MANY)
            await a.push({}, rows={"emb": ones(MANY)})
        await b.pull_rows("emb", MANY)
        await b.push({}, rows={"emb": ones(MANY)})
        rows = await b.pull_rows("emb", MANY)
        assert rows == pytest.approx(expected(MANY, dict.fromkeys(MANY.tolist(), 5)))
        await a.push({}, rows={"emb": ones(MANY)})
        assert await b.pull_rows("emb", MANY) == pytest.approx(rows - 1 / 2)

    with_table(scenario, rule=StalenessAware(SGD(1.0)))


def test_replicas_hold_the_same_rows_and_optimizer_state() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for i in range(12):
            keys = MANY[s.random.randrange(50) :: 3]
            await client.push({"w": np.ones(40)}, rows={"emb": ones(keys)})
            if i == 6:
                s.world.crash("server-0", back_after=0.1)
        table = await s.world.complete()
        for view in table.views:
            first, *others = (state.tables["emb"] for state in s.world.states(view))
            assert first.levels[0].slots.keys() == {"mean", "square"}
            for other in others:
                for a, b in zip(first.levels, other.levels, strict=True):
                    assert a.keys.tobytes() == b.keys.tobytes()
                    assert a.values.tobytes() == b.values.tobytes()
                    assert all(a.slots[k].tobytes() == b.slots[k].tobytes() for k in a.slots)

    with_table(scenario, rule=Adam(0.1), recovery=Recovery(Chain(2)))


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


def test_a_worker_that_was_given_up_enters_again_before_it_reads_rows() -> None:
    async def scenario(s: Setting) -> None:
        (_, a), (_, b) = await s.enter("a"), await s.enter("b")
        await a.push({}, rows={"emb": ones(MANY)})
        await b.push({}, rows={"emb": ones(MANY)})
        for view in (await s.world.complete()).views:
            await s.ask(view.chain[0], Evict(view.shard, view.epoch, (UpdateId("a", 1, 0),)))
        rows = await a.pull_rows("emb", MANY)
        assert rows == pytest.approx(expected(MANY, dict.fromkeys(MANY.tolist(), 2)))
        assert a.incarnation == 2

    with_table(scenario, consistency=SSP(3))


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


@pytest.mark.parametrize(
    "asked_for",
    [
        Pull,
        partial(PullRows, table="emb", keys=MANY),
        partial(PullRange, table="emb", start=0, stop=9),
    ],
    ids=["weights", "rows", "range"],
)
def test_a_read_is_not_answered_by_who_has_left_the_epoch_meanwhile(asked_for: Any) -> None:
    async def scenario(s: Setting) -> None:
        (_, a), _ = await s.enter("a"), await s.enter("b")
        for _ in range(3):
            await a.push({}, rows={"emb": ones(MANY)})
        (view,) = (await s.world.complete()).views
        (head,) = view.chain
        read = s.ask(head, asked_for(0, view.epoch, "a", 1, 0, 0.3))  # it is too far ahead
        reading = asyncio.ensure_future(read)
        await asyncio.sleep(0.1)
        await s.ask(head, Configure(0, view.epoch + 1, view.chain, head))
        with pytest.raises(StaleEpoch):
            await reading

    with_table(scenario, shards=1, consistency=SSP(1))


def test_rows_are_shown_only_when_they_are_committed() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        head, tail = (s.world.name_of(host) for host in view.chain)
        s.network.slow(head, tail, 0.5)
        pushing = process.run(client.push({}, rows={"emb": ones(MANY)}))
        await asyncio.sleep(0.2)
        ask = PullRows(0, view.epoch, "", 0, 0, 0.1, "emb", MANY)
        read = await s.ask(view.chain[0], ask)
        applied = s.world.hosts[view.chain[0].address].replica(0).state.version
        assert (applied, read.version) == (1, 0)
        assert read.values == pytest.approx(expected(MANY, {}))
        await s.all_of(pushing, within=5.0)
        read = await s.ask(view.chain[0], ask)
        assert read.values == pytest.approx(expected(MANY, dict.fromkeys(MANY.tolist(), 1)))

    with_table(scenario, shards=1, recovery=Recovery(Chain(2, reads="any")))


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
    found = files.read(files.found()[0])
    assert found.tables.keys() == states[0].tables.keys() == {"emb", "b.0.slot"}
    for name, table in states[0].tables.items():
        for a, b in zip(table.levels, found.tables[name].levels, strict=True):
            assert a.keys.tobytes() == b.keys.tobytes()
            assert a.values.tobytes() == b.values.tobytes()
            assert a.slots.keys() == b.slots.keys() == {"mean", "square"}
            assert all(a.slots[k].tobytes() == b.slots[k].tobytes() for k in a.slots)
