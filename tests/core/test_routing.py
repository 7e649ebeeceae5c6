"""Keys on shards: each lives on one, whatever is pushed comes out once, in the order asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.core.blocks import Layout
from dps.core.tables.key_routing import as_range, asked, dealt
from dps.core.tables.table import KEYS, PARTITIONS, SparseSpec, are_sorted, partitions_of
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch

TABLES = (SparseSpec("emb", 2), SparseSpec("bias", 1, "float64"))
some_keys = st.lists(st.integers(0, 40) | st.integers(0, KEYS - 1), max_size=30)


def layout(shards: int) -> Layout:
    return Layout.of({}, shards, tables=TABLES)


@given(some_keys, st.sampled_from([1, 2, 5]))
def test_each_key_is_pushed_to_one_shard_and_repeated_ones_are_summed(
    keys: list[int], shards: int
) -> None:
    gradient = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
    found = dealt(layout(shards), {"emb": (keys, gradient)})
    expected: dict[int, np.ndarray] = {}
    for key, row in zip(keys, gradient, strict=True):
        expected[key] = expected.get(key, 0) + row
    seen: dict[int, list[float]] = {}
    for (rows,) in found.values():
        assert rows.table == "emb"
        assert are_sorted(rows.keys)
        assert rows.gradient.dtype == np.float32
        seen |= dict(zip(rows.keys.tolist(), rows.gradient.tolist(), strict=True))
    assert seen == {key: row.tolist() for key, row in expected.items()}
    assert sum(len(rows.keys) for (rows,) in found.values()) == len(expected)


def test_the_sum_of_a_repeated_key_depends_on_its_own_gradients_alone() -> None:
    """To the last bit: sorting the keys leaves each key's gradients in the order given."""
    random = np.random.default_rng(0)
    keys = random.integers(0, 3, 300)
    gradient = random.standard_normal((300, 2)).astype(np.float32)
    (together,) = dealt(layout(1), {"emb": (keys, gradient)})[0]
    for key, row in zip(together.keys, together.gradient, strict=True):
        own = keys == key
        (alone,) = dealt(layout(1), {"emb": (keys[own], gradient[own])})[0]
        assert alone.gradient.tolist() == [row.tolist()]


@given(some_keys, st.sampled_from([1, 2, 5]))
def test_rows_come_back_in_the_order_asked_for(keys: list[int], shards: int) -> None:
    question = asked(layout(shards), "bias", keys)
    rows = {s: wanted.astype(np.float64)[:, None] for s, wanted in question.keys.items()}
    assert question.answer(rows)[:, 0].tolist() == [float(key) for key in keys]


@pytest.mark.parametrize("shards", [1, 3, 16])
def test_keys_are_spread_evenly(shards: int) -> None:
    where = layout(shards)
    of_shard = Counter(where.homes)
    assert sum(of_shard.values()) == PARTITIONS
    assert max(of_shard.values()) <= 1.1 * PARTITIONS / shards + 1
    for start in (0, 1 << 50):  # keys that follow one another are spread as well
        found = asked(where, "emb", np.arange(start, start + 20_000)).keys
        assert all(abs(len(k) * shards / 20_000 - 1) < 0.25 for k in found.values())


def test_keys_are_dealt_to_more_shards_than_a_byte_counts() -> None:
    where = Layout.of({"w": np.zeros(2000)}, 300, tables=TABLES)
    keys = np.arange(2000)
    found = dealt(where, {"bias": (keys, np.ones((2000, 1)))})
    homes = np.array(where.homes)[partitions_of(keys)]
    assert homes.max() > 255
    assert {s: rows[0].keys.tolist() for s, rows in found.items()} == {
        s: keys[homes == s].tolist() for s in sorted(set(homes.tolist()))
    }


def test_keys_of_any_whole_type_are_taken() -> None:
    ones = np.ones((2, 2), np.float32)
    for keys in ([3, KEYS - 1], np.array([3, KEYS - 1], np.uint64), (3, KEYS - 1)):
        ((rows,),) = dealt(layout(1), {"emb": (keys, ones)}).values()
        assert rows.keys.tolist() == [3, KEYS - 1]
        assert rows.keys.dtype == np.int64
    assert dealt(layout(1), {"emb": ([], ones[:0])}) == {}
    assert asked(layout(2), "emb", []).answer({}).shape == (0, 2)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([1.0, 2.0], "float64, expected whole numbers"),
        ([-1, 3], "-1, expected 0"),
        (np.array([1, KEYS], np.uint64), f"{KEYS}, expected 0"),
        ([[1, 2]], "2 dimensions"),
    ],
)
def test_what_is_no_key_is_refused(keys: object, said: str) -> None:
    with pytest.raises(ShapeMismatch, match=said):
        dealt(layout(2), {"emb": (keys, np.ones((2, 2), np.float32))})
    with pytest.raises(ShapeMismatch, match=said):
        asked(layout(2), "emb", keys)


@pytest.mark.parametrize(
    ("pushed", "said"),
    [
        (([1, 2], np.ones((2, 3), np.float32)), r"'emb' are float32\[2, 3\], expected .*\[2, 2\]"),
        (([1, 2], np.ones((3, 2), np.float32)), r"\[3, 2\], expected an array float32\[2, 2\]"),
        (([1, 2], np.ones((2, 2), int)), r"int64\[2, 2\], expected an array float32"),
        (([1], np.ma.masked_array([[1, 2]], [[0, 1]])), r"rows for table 'emb' is a masked array"),
        (([1, 2], [[1.0, 2.0]]), "are list, expected an array"),
        (np.ones((2, 2), np.float32), "expected a pair"),
    ],
)
def test_rows_that_do_not_fit_are_refused(pushed: object, said: str) -> None:
    with pytest.raises(ShapeMismatch, match=said):
        dealt(layout(2), {"emb": pushed})  # type: ignore[dict-item]


def test_an_unknown_table_is_named_and_so_are_those_that_there_are() -> None:
    with pytest.raises(ShapeMismatch, match="no sparse table is named 'x'; there are: emb, bias"):
        dealt(layout(2), {"x": ([1], np.ones((1, 2), np.float32))})
    with pytest.raises(ShapeMismatch, match="there are none"):
        asked(Layout.of({"w": np.zeros(3)}, 1), "x", [1])


def test_rows_that_are_not_finite_are_refused() -> None:
    bad = np.array([[1.0, np.nan]], np.float32)
    with pytest.raises(NonFiniteGradient, match="'emb' hold NaN"):
        dealt(layout(2), {"emb": ([1], bad)})
    assert dealt(layout(2), {"emb": ([1], bad)}, values=False)
    large = np.array([[3e38, 0], [0, 0], [3e38, 0]], np.float32)
    with pytest.raises(
        NonFiniteGradient, match="'emb' hold NaN or infinity, or the sum over a rep"
    ):
        dealt(layout(2), {"emb": ([1, 7, 1], large)})
    assert dealt(layout(2), {"emb": ([1, 7, 2], large)})


@pytest.mark.parametrize("bounds", [(-1, 3), (3, 2), (0, KEYS + 1), (0.0, 3), (None, 3)])
def test_what_is_no_range_is_refused(bounds: tuple[object, object]) -> None:
    with pytest.raises(ShapeMismatch, match="expected whole numbers, 0 ≤ start ≤ stop"):
        as_range(*bounds)


def test_tables_need_names_of_their_own() -> None:
    with pytest.raises(ConfigurationError, match="parameters or tables are named 'w'"):
        Layout.of({"w": np.zeros(3)}, 1, tables=[SparseSpec("w", 1)])
    with pytest.raises(ConfigurationError, match="parameters or tables are named 'a'"):
        Layout.of({}, 1, tables=[SparseSpec("a", 1), SparseSpec("a", 2)])
    with pytest.raises(ConfigurationError, match="holds str, expected SparseSpec"):
        Layout.of({}, 1, tables=["a"])  # type: ignore[list-item]


def test_with_tables_there_may_be_more_shards_than_elements() -> None:
    where = Layout.of({"w": np.zeros(1)}, 3, tables=TABLES)
    assert sorted(len(shard.pieces) for shard in where.shards) == [0, 0, 1]
    with pytest.raises(ConfigurationError, match="only 1 elements"):
        Layout.of({"w": np.zeros(1)}, 3)
    with pytest.raises(ConfigurationError, match="only 0 elements"):
        Layout.of({}, PARTITIONS + 1, tables=TABLES)
