"""Rows that a sparse table begins with: what is taken, and on which shard each of them is."""

from __future__ import annotations

import numpy as np
import pytest

from dps import Given, Momentum, SparseSpec, Uniform
from dps.core.blocks import Layout
from dps.core.tables.key_routing import checked_rows, dealt_out, separated
from dps.core.tables.table import EMPTY, partitions_of
from dps.errors import ConfigurationError, ShapeMismatch

ROWS = np.random.default_rng(0).normal(size=(100, 3))


def test_an_array_is_that_of_the_first_keys() -> None:
    spec = SparseSpec("t", 3, "float64", ROWS)
    bare, rows = separated([spec])
    level = rows["t"]
    np.testing.assert_array_equal(level.keys, np.arange(100))
    np.testing.assert_array_equal(level.values, ROWS)
    assert bare == (SparseSpec("t", 3, "float64"),)


def test_keys_may_be_given_in_any_order() -> None:
    keys = np.random.default_rng(1).permutation(100) * 10
    _, rows = separated([SparseSpec("t", 3, "float32", Given(ROWS, keys, Uniform(0.1)))])
    level = rows["t"]
    np.testing.assert_array_equal(level.keys, np.arange(100) * 10)
    np.testing.assert_array_equal(level.values, ROWS[keys.argsort()].astype(np.float32))


def test_every_row_is_on_the_shard_where_it_is_looked_for() -> None:
    spec = SparseSpec("t", 3, "float64")
    layout = Layout.of({}, 3, tables=[spec])
    shards = dealt_out(layout, {"t": checked_rows(spec, ROWS)}, Momentum(0.1))
    found = np.full_like(ROWS, np.nan)
    for shard, tables in enumerate(shards):
        level = tables.get("t", EMPTY).compacted()
        assert level is not None
        assert set(np.array(layout.homes)[partitions_of(level.keys)]) == {shard}
        assert not level.slots["momentum"].any()
        found[level.keys] = level.values
    np.testing.assert_array_equal(found, ROWS)


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (np.ones((4, 2)), None, r"have the shape \(4, 2\), expected \(keys, 3\)"),
        (np.ones(3), None, r"have the shape \(3,\)"),
        (np.ones((4, 3), np.int64), None, "are int64"),
        (np.full((4, 3), np.nan), None, "hold NaN"),
        (np.full((4, 3), 1e300), None, "beyond the range of float32"),
        (np.ones((2, 3)), [5, 5], "key 5 is repeated"),
        (np.ones((2, 3)), [5], "2 for 1 keys"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: np.ndarray, keys: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        checked_rows(SparseSpec("t", 3), rows, keys)
    with pytest.raises(ShapeMismatch, match="-1, expected 0"):
        checked_rows(SparseSpec("t", 3), np.ones((1, 3)), [-1])


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="an array of rows, or Given"):
        SparseSpec("t", 3, initial=[1.0])  # type: ignore[arg-type]
