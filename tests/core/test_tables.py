"""Sparse tables: what they hold is what a plain dictionary of rows would, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.core.blocks import Layout, ShardLayout
from dps.core.rules.proximal import GroupL1, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, UpdateRule
from dps.core.shard import StateMachine, initial_state
from dps.core.tables.table import EMPTY, KEYS, Level, Normal, Rows, SparseSpec, SparseTable, Uniform
from dps.core.updates import Operation, UpdateId

SPEC = SparseSpec("emb", 3, initial=Normal(0.5, seed=7))
LAYOUT = Layout.of({}, 1, tables=[SPEC]).shards[0]
RULES = [SGD(0.1), AdaGrad(0.5), Adam(0.1), Proximal(0.1, GroupL1(0.01))]

keys = st.integers(0, 30) | st.sampled_from([KEYS - 1, KEYS - 2, 1 << 40])
limits = keys | st.sampled_from([0, KEYS])
key_sets = st.sets(keys, min_size=1, max_size=12)


def rows_of(wanted: Iterable[int], seed: int = 0) -> Rows:
    """A gradient for these keys, all different."""
    ordered = np.array(sorted(wanted), np.int64)
    random = np.random.default_rng(seed)
    return Rows("emb", ordered, random.normal(size=(len(ordered), 3)).astype(np.float32))


def pushed(
    table: SparseTable, rows: Rows, rule: UpdateRule, t: int = 1, layout: ShardLayout = LAYOUT
) -> SparseTable:
    op = Operation("gradient", UpdateId("a", 1, t), rows=(rows,))
    state = initial_state(np.zeros(layout.nbytes, np.uint8), rule)
    state = replace(state, steps=t - 1, tables={"emb": table})
    return StateMachine(layout, rule).apply(state, op).state.tables["emb"]


class Dictionary:
    """The same with a dictionary, row by row."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        self.rows: dict[int, np.ndarray] = {}
        self.slots: dict[int, dict[str, np.ndarray]] = {}

    def read(self, key: int) -> np.ndarray:
        return self.rows.get(key, SPEC.initial_rows(np.array([key], np.int64))[0])

    def push(self, rows: Rows, t: int) -> None:
        for key, gradient in zip(rows.keys.tolist(), rows.gradient, strict=True):
            zeros = {name: np.zeros_like(gradient)[None] for name in self.rule.slots}
            slots = self.slots.get(key, zeros)
            new, self.slots[key] = self.rule.step(
                self.read(key)[None], gradient[None], slots, t, 1.0
            )
            self.rows[key] = new[0]


@given(st.lists(key_sets, max_size=12), st.lists(keys, max_size=10), st.sampled_from(RULES))
def test_a_table_holds_what_a_dictionary_would(
    pushes: list[set[int]], asked: list[int], rule: UpdateRule
) -> None:
    table, model = EMPTY, Dictionary(rule)
    for t, wanted in enumerate(pushes, 1):
        rows = rows_of(wanted, t)
        table = pushed(table, rows, rule, t)
        model.push(rows, t)
    found = table.rows(SPEC, np.array(asked, np.int64)).values
    assert found.dtype == np.float32
    assert [row.tobytes() for row in found] == [model.read(key).tobytes() for key in asked]
    every = table.between(0, KEYS, SPEC)
    assert every.keys.tolist() == sorted(model.rows)
    assert all(
        row.tobytes() == model.rows[k].tobytes() for k, row in zip(*both(every), strict=True)
    )


@given(st.lists(key_sets, max_size=8), limits, limits)
def test_a_range_is_what_exists_in_it(pushes: list[set[int]], a: int, b: int) -> None:
    table, (start, stop) = EMPTY, sorted((a, b))
    for wanted in pushes:
        table = pushed(table, rows_of(wanted), SGD(0.1))
    there = sorted(k for k in set().union(*pushes) if start <= k < stop)
    found = table.between(start, stop, SPEC)
    assert found.keys.tolist() == there
    assert found.values.tobytes() == table.rows(SPEC, np.array(there, np.int64)).values.tobytes()


def both(level: Level) -> tuple[list[int], list[np.ndarray]]:
    return level.keys.tolist(), list(level.values)


def test_a_table_that_somebody_holds_does_not_change() -> None:
    before = pushed(EMPTY, rows_of(range(100)), Adam(0.1))
    held = [(level.keys.copy(), level.values.copy()) for level in before.levels]
    after = before
    for t in range(20):
        after = pushed(after, rows_of(range(t, 100, 7), t), Adam(0.1), t + 1)
    for level, (of_keys, of_values) in zip(before.levels, held, strict=True):
        assert np.array_equal(level.keys, of_keys)
        assert np.array_equal(level.values, of_values)


def test_a_push_copies_a_logarithm_of_the_table_on_the_average() -> None:
    random, table, copied, pushes, size = np.random.default_rng(0), EMPTY, 0, 500, 20
    for _ in range(pushes):
        rows = rows_of(random.integers(0, KEYS - 1, size).tolist())
        copied += table.copied(size)
        table = pushed(table, rows, SGD(0.1))
        lengths = [len(level) for level in table.levels]
        assert all(older >= 2 * newer for newer, older in pairwise(lengths))
    assert copied <= pushes * size * (1 + math.log2(pushes))
    assert len(table.levels) <= 1 + math.log2(pushes)


def test_pushes_of_the_same_keys_do_not_pile_up() -> None:
    table = EMPTY
    for t in range(10):
        table = pushed(table, rows_of(range(50)), SGD(0.1), t + 1)
    assert [len(level) for level in table.levels] == [50]


def test_a_table_does_not_hold_on_to_the_message_that_it_came_with() -> None:
    message = np.zeros(1 << 10, np.int64)
    message[:3] = [1, 2, 3]
    rows = Rows("emb", message[:3], np.ones((3, 3), np.float32))
    (level,) = pushed(EMPTY, rows, SGD(0.1)).levels
    assert not np.shares_memory(level.keys, message)


@pytest.mark.parametrize("initial", [Normal(2.0, 5), Uniform(2.0, 5)])
def test_initial_rows_depend_on_the_key_alone(initial: Normal | Uniform) -> None:
    some = np.array([5, 0, KEYS - 1, 5], np.int64)
    rows = initial.rows(some, 4, "float32")
    assert rows[0].tobytes() == rows[3].tobytes() != rows[1].tobytes()
    for i, key in enumerate(some):
        assert rows[i].tobytes() == initial.rows(np.array([key]), 4, "float32")[0].tobytes()
    assert rows.dtype == np.float32
    other = type(initial)(2.0, 6).rows(some, 4, "float32")
    assert not (other == rows).any()


def test_initial_values_are_distributed_as_they_say() -> None:
    from scipy import stats

    many = np.arange(20_000, dtype=np.int64)
    normal = Normal(2.0, 1).rows(many, 5, "float64")
    assert stats.kstest(normal.reshape(-1), stats.norm(0, 2).cdf).statistic < 0.006
    assert abs(np.corrcoef(normal.T) - np.eye(5)).max() < 0.03
    uniform = Uniform(3.0, 1).rows(many, 5, "float64")
    assert stats.kstest(uniform.reshape(-1), stats.uniform(-3, 6).cdf).pvalue > 0.01
    assert abs(np.corrcoef(uniform[:-1, 0], uniform[1:, 0])[0, 1]) < 0.03
