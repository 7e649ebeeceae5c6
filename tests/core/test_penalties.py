"""Penalties: each proximal operator is where its problem is least, and its zeros are exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize

from dps.core.rules.proximal import L1, L2, ElasticNet, GroupL1, Penalty

DTYPES = ("float32", "float64")

dtypes = st.sampled_from(DTYPES)
thresholds = st.floats(0, 8, width=32)
numbers = st.floats(-16, 16, width=32)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=5))
    return draw(hnp.arrays(draw(dtypes), shape, elements=numbers))


def shrunk(penalty: Penalty, values: np.ndarray, step: float) -> np.ndarray:
    out = values.copy()
    penalty.shrink(out, step)
    assert (out.dtype, out.shape) == (values.dtype, values.shape)
    return out


@given(matrices(), thresholds)
def test_soft_threshold_is_its_formula_element_by_element(x: np.ndarray, threshold: float) -> None:
    found = shrunk(L1(1.0), x, threshold)
    for one, y in zip(x.flat, found.flat, strict=True):
        # In the array's own precision, in which a threshold of float32 is exact.
        expected = math.copysign(max(abs(one) - x.dtype.type(threshold), 0.0), one)
        assert y == expected
    assert not np.signbit(found[found == 0]).any(), "zeros have no sign"


PENALTIES: list[Penalty] = [L1(0.7), L2(0.7), ElasticNet(0.4, 0.9), GroupL1(0.7)]

# Written again here, row by row, in plain numbers.
VALUE: dict[type, Callable[..., float]] = {
    L1: lambda p, w: p.strength * sum(abs(x) for x in w),
    L2: lambda p, w: p.strength / 2 * sum(x * x for x in w),
    ElasticNet: lambda p, w: sum(p.l1 * abs(x) + p.l2 / 2 * x * x for x in w),
    GroupL1: lambda p, w: p.strength * math.sqrt(sum(x * x for x in w)),
}


def problem(penalty: Penalty, x: np.ndarray, step: float) -> Callable[[np.ndarray], float]:
    """What the proximal operator makes least."""

    def at(y: np.ndarray) -> float:
        distance = sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
        return VALUE[type(penalty)](penalty, y) + distance / (2 * step)

    return at


@pytest.mark.parametrize("step", [0.1, 3.0])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_proximal_operator_finds_what_a_minimiser_finds(penalty: Penalty, step: float) -> None:
    rows = np.random.default_rng(3).normal(0, 1.5, (6, 3))
    for x, found in zip(rows, shrunk(penalty, rows, step), strict=True):
        objective = problem(penalty, x, step)
        options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000, "maxfev": 4000}
        least = minimize(objective, x, method="Nelder-Mead", options=options)
        assert objective(found) <= least.fun + 1e-12
        np.testing.assert_allclose(found, least.x, atol=1e-3)  # it stops early beside a kink


@pytest.mark.parametrize("large", [1e30, 3e38])
def test_rows_whose_squares_overflow_float32_are_shortened_all_the_same(large: float) -> None:
    row = np.array([[0.6 * large, 0.8 * large]], np.float32)
    found = shrunk(GroupL1(1.0), row, 0.5 * large)
    np.testing.assert_allclose(found, [[0.3 * large, 0.4 * large]], rtol=1e-6)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_run_that_diverges_still_shows(penalty: Penalty) -> None:
    with np.errstate(all="ignore"):
        found = shrunk(penalty, np.array([[np.nan, 1.0], [np.inf, 1.0]]), 0.1)
    assert not np.isfinite(found[:, 0]).any()
