"""Leased data: how it is divided, and that a shard applies each batch once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.core.leases import (
    Applied,
    Division,
    chosen,
    examples_of,
    has,
    in_all,
    lacking,
    with_batches,
    without_repeats,
)
from dps.core.replay import Replay, plan, summed
from dps.core.rules.rule import SGD
from dps.core.updates import Batch
from dps.errors import ConfigurationError
from dps.protocol import wire
from tests.support.builders import Model

MODEL = Model.of(w=np.zeros(3, np.float32))
RULE = SGD(1.0)


@given(
    st.integers(1, 40) | st.lists(st.integers(0, 9), min_size=1).filter(any),
    st.integers(1, 9),
    st.integers(1, 3),
    st.none() | st.integers(0, 9),
)
def test_the_batches_of_an_epoch_are_the_examples_once(
    data: int | list[int], size: int, epochs: int, seed: int | None
) -> None:
    sizes = [data] if isinstance(data, int) else data
    parts = () if isinstance(data, int) else tuple(data)
    division = Division(sum(sizes), size, epochs=epochs, shuffle=seed, partitions=parts)
    for epoch in range(epochs):
        batches = [*map(division.order(epoch).indices, range(division.batches))]
        found = [(part, row) for part, rows in batches for row in rows.tolist()]
        assert sorted(found) == [(part, row) for part, n in enumerate(sizes) for row in range(n)]
        smaller = [part for part, rows in batches if len(rows) < size]
        assert len(smaller) == len({*smaller})  # one of each partition
        if seed is None:
            assert found == sorted(found)


def test_each_epoch_has_another_order_which_depends_on_the_seed() -> None:
    def order(division: Division, epoch: int) -> list[tuple[int, int]]:
        batches = map(division.order(epoch).indices, range(division.batches))
        return [(part, row) for part, rows in batches for row in rows.tolist()]

    for parts in ((), (25, 25)):
        division = Division(50, 10, epochs=3, shuffle=1, partitions=parts)
        first, second = (order(division, epoch) for epoch in (0, 1))
        assert first != second
        assert first == order(replace(division, batch_size=5, epochs=1), 0)
        assert first != order(replace(division, shuffle=2), 0)


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=3), st.integers(1, 32))
def test_what_a_record_lacks_is_what_was_not_entered(there: list[set[int]], count: int) -> None:
    records = [with_batches({}, [Batch("e", n) for n in each]) for each in there]
    for record, each in zip(records, there, strict=True):
        assert [n for n in range(33) if has(record, Batch("e", n))] == sorted(each)
        assert not has(record, Batch("other", 0))
    everywhere = set.intersection(*there)
    runs = [*lacking(in_all(records).get("e", Applied()), count)]
    assert [n for run in runs for n in run] == [n for n in range(count) if n not in everywhere]
    assert all(one.stop < other.start for one, other in pairwise(runs))


def test_a_record_of_batches_in_order_stays_small() -> None:
    record = with_batches({}, [Batch("e", n) for n in range(10_000) if n != 9_990])
    assert record == {"e": Applied(9_990, b"\xfe\x03")}
    assert with_batches(record, [Batch("e", 9_990), Batch("e", 5)]) == {"e": Applied(10_000)}


def test_a_batch_that_is_computed_twice_is_applied_once_and_both_workers_advance() -> None:
    batch = Batch("a/0", 3)
    first = MODEL.gradient("a", 1, batch=batch)
    again = MODEL.gradient("b", 1, batch=batch)
    one, two = MODEL.apply_all(RULE, MODEL.state(RULE), [first, again])
    assert (one.state.version, two.state.version) == (1, 1)
    assert two.operation.kind == "tick"
    assert np.array_equal(one.state.values, two.state.values)
    assert {name: p.seq for name, p in two.state.workers.items()} == {"a": 1, "b": 1}
    assert {name: p.applied for name, p in two.state.workers.items()} == {"a": 1, "b": 0}
    other = MODEL.gradient("b", 2, batch=Batch("a/1", 3))
    assert MODEL.apply(RULE, two.state, other).state.version == 2


def test_a_tick_enters_its_batch_on_a_shard_that_the_update_does_not_change() -> None:
    tick = MODEL.gradient("a", 1)._replace(kind="tick", gradient=None, batch=Batch("a/0", 0))
    state = MODEL.apply(RULE, MODEL.state(RULE), tick).state
    assert has(state.batches, Batch("a/0", 0))
    late = MODEL.gradient("b", 1, batch=Batch("a/0", 0))
    assert MODEL.apply(RULE, state, late).state.version == 0


def test_updates_of_one_batch_are_not_summed() -> None:
    batches = [Batch("a/0", 0), Batch("a/0", 1), Batch("a/0", 1), Batch("a/0", 2)]
    record = with_batches({}, batches[:1])
    ops = [MODEL.gradient("abcd"[n], 1, batch=batch) for n, batch in enumerate(batches)]
    kinds = [op.kind for op in without_repeats(record, ops)]
    assert kinds == ["tick", "gradient", "tick", "gradient"]
    fresh = [op for op in without_repeats(record, ops) if op.kind == "gradient"]
    (total,) = summed(MODEL.layout.shards[0], fresh)
    state = MODEL.apply(RULE, replace(MODEL.state(RULE), batches=record), total).state
    assert state.batches == {"a/0": Applied(3)}
    assert state.version == 2


@pytest.mark.parametrize("policy", [Replay("drop_older", drop_older_than=0), Replay("sum")])
def test_a_batch_is_not_entered_if_its_only_update_was_dropped(policy: Replay) -> None:
    batch = Batch("a/0", 0)
    ops = [MODEL.gradient(name, 1, batch=batch) for name in "ab"]
    ops = [*without_repeats({}, ops)]
    todo = plan(policy, MODEL.layout.shards[0], 5, ops)
    state = MODEL.apply_all(RULE, MODEL.state(RULE), todo.operations)[-1].state
    assert has(state.batches, batch) == (state.version == 1) == (todo.dropped == 0)


def test_records_cross_the_wire() -> None:
    state = MODEL.apply(RULE, MODEL.state(RULE), MODEL.gradient("a", 1, batch=Batch("e", 9))).state
    assert (
        wire.decode(wire.encode(state)).batches == state.batches == {"e": Applied(0, b"\x00\x02")}
    )


def test_examples_are_chosen_in_the_form_of_the_data() -> None:
    x, names = np.arange(12).reshape(6, 2), list("abcdef")
    assert examples_of({"x": x, "names": names}) == 6
    found = chosen({"x": x, "names": names, "n": 6}, np.array([5, 0]))
    frame = chosen(pd.DataFrame({"y": range(3)}), np.array([2, 1]))
    assert frame["y"].tolist() == [2, 1]
    assert examples_of([np.zeros(2), np.zeros(3)]) == 2
    assert found["x"].tolist() == [[10, 11], [0, 1]]
    assert (found["names"], found["n"].tolist()) == (["f", "a"], [5, 0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros(3), [1]), r"the parts of data have \[3, 1\] examples"),
        (iter([]), "data is list_iterator, expected a number of examples, an array"),
        (np.float64(1.5), "data is float64, expected"),
        ("text", "data is str, expected"),
        (da.zeros(3), "data is Array, expected .*or a tuple of collections"),
    ],
)
def test_other_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        examples_of(data)
