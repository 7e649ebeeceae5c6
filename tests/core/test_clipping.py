"""Clipping: by one norm over everything that is pushed, and nothing that is given is written to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.rules.rule import SGD, UpdateRule
from dps.core.rules.wrappers import Clipped, norm_of
from dps.core.tables.table import SparseSpec
from dps.errors import NonFiniteGradient
from dps.protocol.client.encoder import Parts, split

Array = np.ndarray

RANDOM = np.random.default_rng(1)
PUSH = {"w": RANDOM.standard_normal((40, 5)).astype(np.float32), "b": RANDOM.standard_normal(7)}
ROWS = (np.array([3, 1, 3]), RANDOM.standard_normal((3, 2)))
SPEC = SparseSpec("emb", 2, "float64")


def clipped(rule: Clipped, parts: Sequence[Array]) -> Sequence[Array]:
    return rule.clipped(parts, lambda: [np.empty_like(part) for part in parts])


def sent(rule: UpdateRule, shards: int) -> Parts:
    layout = Layout.of(PUSH, shards, tables=[SPEC])
    return split(layout, rule, PUSH, {"emb": ROWS})


def together(parts: Parts, shards: int) -> tuple[dict[str, Array], dict[int, Array]]:
    layout = Layout.of(PUSH, shards, tables=[SPEC])
    dense = layout.scatter({shard: buffer for shard, (buffer, _) in parts.dense.items()})
    rows = [each for tables in parts.rows.values() for each in tables]
    return dense, {
        int(k): g for each in rows for k, g in zip(each.keys, each.gradient, strict=True)
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_arrays_and_rows_are_clipped_by_the_norm_of_all(shards: int) -> None:
    before = [array.tobytes() for array in (*PUSH.values(), *ROWS)]
    repeated = ROWS[1][0] + ROWS[1][2]
    everything = [*PUSH.values(), repeated, ROWS[1][1]]
    norm = math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in everything))
    dense, rows = together(sent(Clipped(SGD(0.1), norm=2.0), shards), shards)
    for name, array in PUSH.items():
        assert dense[name].dtype == array.dtype
        np.testing.assert_allclose(dense[name], array * (2.0 / norm), rtol=1e-6)
    np.testing.assert_allclose(rows[3], repeated * 2.0 / norm, rtol=1e-6)
    np.testing.assert_allclose(rows[1], ROWS[1][1] * 2.0 / norm, rtol=1e-6)
    assert [array.tobytes() for array in (*PUSH.values(), *ROWS)] == before


@pytest.mark.parametrize("shards", [1, 3])
def test_a_gradient_that_is_small_enough_is_sent_as_it_lies(shards: int) -> None:
    as_it_is, found = (
        sent(SGD(0.1), shards),
        sent(Clipped(SGD(0.1), norm=100, value=10), shards),
    )
    for shard, (buffer, pieces) in as_it_is.dense.items():
        assert found.dense[shard][0].tobytes() == buffer.tobytes()
        assert found.dense[shard][1] == pieces
        assert np.shares_memory(found.dense[shard][0], buffer) == any(
            np.shares_memory(buffer, array) for array in PUSH.values()
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 200_001])
def test_a_norm_is_exact_whatever_the_size(size: int, dtype: str) -> None:
    array = np.random.default_rng(size).standard_normal(size).astype(dtype)
    expected = math.sqrt(math.fsum(float(x) ** 2 for x in array))
    assert norm_of([array]) == pytest.approx(expected, rel=1e-13)


def test_squares_that_are_too_large_are_no_obstacle() -> None:
    parts = [np.array([3e200, 4e200]), np.zeros(0), np.array([1e38], np.float32)]
    assert norm_of(parts) == pytest.approx(5e200)
    found = clipped(Clipped(SGD(0.1), norm=1.0), parts)
    np.testing.assert_allclose(found[0], [0.6, 0.8])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", [Clipped(SGD(0.1), norm=1), Clipped(SGD(0.1), value=1)], ids=str)
def test_what_is_not_finite_is_not_made_to_look_fine(rule: Clipped, wrong: float) -> None:
    parts = [np.array([1.0, 5.0]), np.array([wrong, 2.0])]
    assert clipped(rule, parts) is parts
    layout = Layout.of(PUSH, 2)
    push = {**PUSH, "b": np.full(7, wrong)}
    with pytest.raises(NonFiniteGradient, match="'b' holds NaN or infinity"):
        split(layout, rule, push)
