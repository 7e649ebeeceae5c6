"""Penalties: each proximal operator is where its problem is least, and its zeros are exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize, minimize_scalar

from dps.core.rules.penalties import L1, L2, ElasticNet, GroupL1, Penalty
from dps.errors import ConfigurationError

DTYPES = ("float32", "float64")
EPS = {dtype: float(np.finfo(dtype).eps) for dtype in DTYPES}

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


# -- the soft threshold --------------------------------------------------------------------------


@given(matrices(), thresholds)
def test_soft_threshold_is_its_formula_element_by_element(x: np.ndarray, threshold: float) -> None:
    found = shrunk(L1(1.0), x, threshold)
    for one, y in zip(x.flat, found.flat, strict=True):
        # In the array's own precision, in which a threshold of float32 is exact.
        expected = math.copysign(max(abs(one) - x.dtype.type(threshold), 0.0), one)
        assert y == expected


@given(matrices(), thresholds)
def test_soft_threshold_has_zeros_without_a_sign_just_where_it_should(
    x: np.ndarray, threshold: float
) -> None:
    found = shrunk(L1(1.0), x, threshold)
    assert ((found == 0) == (np.abs(x) <= threshold)).all()
    assert not np.signbit(found[found == 0]).any()


@given(matrices(), thresholds)
def test_soft_threshold_and_projection_make_up_the_whole(x: np.ndarray, threshold: float) -> None:
    """Moreau's decomposition: x less its proximal point is its projection onto the dual ball."""
    rest = x - shrunk(L1(1.0), x, threshold)
    np.testing.assert_allclose(rest, np.clip(x, -threshold, threshold), atol=32 * EPS[str(x.dtype)])


@given(matrices(), thresholds, thresholds)
def test_soft_thresholds_in_a_row_add_up(x: np.ndarray, a: float, b: float) -> None:
    twice = shrunk(L1(1.0), shrunk(L1(1.0), x, a), b)
    np.testing.assert_allclose(twice, shrunk(L1(1.0), x, a + b), atol=64 * EPS[str(x.dtype)])


# -- every penalty -------------------------------------------------------------------------------

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


@pytest.mark.parametrize("step", [0.1, 0.8, 3.0])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_proximal_operator_finds_what_a_minimiser_finds(penalty: Penalty, step: float) -> None:
    rows = np.random.default_rng(3).normal(0, 1.5, (6, 3))
    for x, found in zip(rows, shrunk(penalty, rows, step), strict=True):
        objective = problem(penalty, x, step)
        options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000, "maxfev": 4000}
        least = minimize(objective, x, method="Nelder-Mead", options=options)
        assert objective(found) <= least.fun + 1e-12
        np.testing.assert_allclose(found, least.x, atol=1e-3)  # it stops early beside a kink


@pytest.mark.parametrize("penalty", [L1(0.7), L2(0.7), ElasticNet(0.4, 0.9)], ids=str)
@given(x=numbers, step=st.floats(0.01, 4))
def test_proximal_operator_of_an_element_is_least(penalty: Penalty, x: float, step: float) -> None:
    found = shrunk(penalty, np.array([x]), step)
    objective = problem(penalty, np.array([x]), step)
    least = minimize_scalar(lambda y: objective(np.array([y])), bounds=(-17, 17), method="bounded")
    assert objective(found) <= least.fun + 1e-12


@given(matrices(), st.floats(0.01, 8))
def test_group_rows_meet_the_condition_of_the_least(x: np.ndarray, threshold: float) -> None:
    """Zero is in the subdifferential: λ·y/‖y‖ makes up for the way, or the way is short enough."""
    found = shrunk(GroupL1(1.0), x, threshold)
    for row, y in zip(x.astype(np.float64), found.astype(np.float64), strict=True):
        length = math.hypot(*row)
        if (y == 0).all():
            assert length <= threshold * (1 + 1e-6) + 1e-30
        else:
            way = threshold * y / math.hypot(*y)
            np.testing.assert_allclose(row - y, way, atol=64 * EPS[str(x.dtype)] * length)


@given(matrices(), st.floats(0, 8))
def test_group_of_one_element_is_the_soft_threshold(x: np.ndarray, threshold: float) -> None:
    column = x.reshape(-1, 1)
    np.testing.assert_allclose(
        shrunk(GroupL1(1.0), column, threshold),
        shrunk(L1(1.0), column, threshold),
        atol=64 * EPS[str(x.dtype)],
    )


@given(matrices(), matrices(), st.floats(0, 8), st.sampled_from(PENALTIES))
def test_proximal_operators_bring_no_two_points_apart(
    x: np.ndarray, y: np.ndarray, step: float, penalty: Penalty
) -> None:
    rows, columns = map(min, x.shape, y.shape)
    x, y = (a[:rows, :columns].astype(np.float64) for a in (x, y))
    before = np.linalg.norm(x - y)
    assert np.linalg.norm(shrunk(penalty, x, step) - shrunk(penalty, y, step)) <= before + 1e-9


@given(matrices(), st.sampled_from(PENALTIES))
def test_a_step_of_no_length_changes_nothing(x: np.ndarray, penalty: Penalty) -> None:
    x[0] = np.finfo(x.dtype).tiny  # the square of which is no more than zero
    assert (shrunk(penalty, x, 0.0) == x).all()


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


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (L1, "L1: strength"),
        (L2, "L2: strength"),
        (GroupL1, "GroupL1: strength"),
        (lambda x: ElasticNet(x, 0.1), "ElasticNet: l1"),
        (lambda x: ElasticNet(0.1, x), "ElasticNet: l2"),
    ],
)
def test_a_strength_that_is_negative_or_no_number_is_refused(
    make: Callable[[float], Penalty], field: str, wrong: float
) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}=.*expected a number, 0 or above"):
        make(wrong)
