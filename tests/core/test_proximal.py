"""Proximal descent: it ends where scikit-learn's solvers end, also when gradients are late."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import ElasticNet as SklearnElasticNet
from sklearn.linear_model import Lasso, LogisticRegression, MultiTaskLasso, Ridge

from dps.core import shard as shard_module
from dps.core.blocks import Layout
from dps.core.rules.proximal import L1, L2, DelayedProximal, ElasticNet, GroupL1, Penalty, Proximal
from dps.core.rules.rule import UpdateRule
from dps.core.shard import StateMachine, initial_state
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError
from tests.support.builders import Model

RANDOM = np.random.default_rng(11)
X = RANDOM.standard_normal((80, 9)) @ (np.eye(9) + 0.1 * RANDOM.standard_normal((9, 9)))
TRUTH = np.array([2.0, -1.5, 1.0, 0, 0, 0, 0.5, 0, 0])
Y = X @ TRUTH + 0.3 * RANDOM.standard_normal(80)
MANY_Y = X @ np.outer(TRUTH, [1.0, -2.0, 0.5, 1.0]) + 0.3 * RANDOM.standard_normal((80, 4))
CURVATURE = float(np.linalg.eigvalsh(X.T @ X / len(X)).max())

Gradient = Callable[[np.ndarray], np.ndarray]


def least_squares(w: np.ndarray) -> np.ndarray:
    """The gradient of half the mean squared error."""
    return X.T @ (X @ w - (Y if w.ndim == 1 else MANY_Y)) / len(X)


def logistic(w: np.ndarray) -> np.ndarray:
    """The gradient of the mean logistic loss, of which side of the plane Y is positive."""
    signs = np.where(Y > 0, 1.0, -1.0)
    return -X.T @ (signs / (1 + np.exp(signs * (X @ w)))) / len(X)


def trained(
    rule: UpdateRule, start: np.ndarray, gradient: Gradient, steps: int, delay: int = 0
) -> np.ndarray:
    """The weights after some steps of a shard, on gradients that have missed `delay` updates."""
    model = Model.by_rows(w=start)
    state = model.state(rule, w=start)
    read = [start] * (delay + 1)
    for seq in range(1, steps + 1):
        op = model.gradient("a", seq, of={"w": gradient(read[-1 - delay])})
        state = model.apply(rule, state, op).state
        read = [*read[-delay - 1 :], model.arrays(state.values)["w"]]
    return read[-1]


EXACT = {"fit_intercept": False, "tol": 1e-13, "max_iter": 100_000}


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.01, 2.0])
@pytest.mark.parametrize(
    ("penalty", "sklearn"),
    [
        (lambda s: L1(s), lambda s: Lasso(alpha=s, **EXACT)),
        (lambda s: L2(s), lambda s: Ridge(alpha=s * len(X), fit_intercept=False)),
        (
            lambda s: ElasticNet(0.3 * s, 0.7 * s),
            lambda s: SklearnElasticNet(alpha=s, l1_ratio=0.3, **EXACT),
        ),
    ],
    ids=["L1", "L2", "ElasticNet"],
)
def test_least_squares_end_where_scikit_learn_ends(
    penalty: Callable[[float], Penalty], sklearn: Callable[[float], Any], strength: float
) -> None:
    expected = sklearn(strength).fit(X, Y).coef_
    found = trained(Proximal(1 / CURVATURE, penalty(strength)), np.ones(9), least_squares, 1500)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert ((found == 0) == (expected == 0)).all()


@pytest.mark.parametrize("strength", [0.1])
def test_sparse_logistic_regression_ends_where_scikit_learn_ends(strength: float) -> None:
    model = LogisticRegression(
        l1_ratio=1, C=1 / (strength * len(X)), solver="saga", random_state=0, **EXACT
    )
    (expected,) = model.fit(X, Y > 0).coef_
    found = trained(Proximal(4 / CURVATURE, L1(strength)), np.zeros(9), logistic, 3000)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert ((found == 0) == (expected == 0)).all()
    assert 0 < (found == 0).sum() < 9


@pytest.mark.parametrize("strength", [0.05, 0.5])
def test_groups_end_where_scikit_learn_ends(strength: float) -> None:
    """A group is a feature: a row of features × tasks."""
    expected = MultiTaskLasso(alpha=strength, **EXACT).fit(X, MANY_Y).coef_.T
    rule = Proximal(1 / CURVATURE, GroupL1(strength))
    found = trained(rule, np.ones((9, 4)), least_squares, 1500)
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert ((found == 0).all(axis=1) == (expected == 0).all(axis=1)).all()


GROUPED = Proximal(0.5, GroupL1(0.3))
PARAMS = {
    "w": RANDOM.standard_normal((23, 7)).astype(np.float32),
    "deep": RANDOM.standard_normal((5, 3, 2)),
    "b": RANDOM.standard_normal(11).astype(np.float32),
    "temperature": np.array(0.2),
}
GRADIENTS = {name: np.asarray(0.1 * p, p.dtype) for name, p in PARAMS.items()}


def in_shards(rule: UpdateRule, layout: Layout, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The parameters after one push of gradients of some arrays."""
    pushed = {name: GRADIENTS[name] for name in names}
    buffers = {}
    for index, shard in enumerate(layout.shards):
        state = initial_state(layout.gather(index, PARAMS)[0].copy(), rule)
        if index in layout.shards_of(pushed):
            buffer, pieces = layout.gather(index, pushed)
            op = Operation("gradient", UpdateId("a", 1, 1), pieces=pieces, gradient=buffer)
            state = StateMachine(shard, rule).apply(state, op).state
        buffers[index] = state.values
    return layout.scatter(buffers)


@pytest.mark.parametrize(("names", "chunk"), [(tuple(PARAMS), 100), (("deep", "b"), 1 << 19)])
@given(shards=st.integers(1, 6), block_bytes=st.sampled_from([1, 40, 300, 1 << 18]))
@settings(max_examples=10)
def test_groups_are_the_same_however_the_parameters_are_placed(
    names: tuple[str, ...], chunk: int, shards: int, block_bytes: int
) -> None:
    layout = Layout.of(PARAMS, shards, block_bytes, whole_rows=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "CHUNK_BYTES", chunk)
        found = in_shards(GROUPED, layout, names)
    for name, values in PARAMS.items():
        if name not in names:
            assert found[name].tobytes() == values.tobytes()
            continue
        rows = values.reshape(values.shape[0] if values.ndim else 1, -1)
        moved = rows - np.asarray(0.5 * GRADIENTS[name].reshape(rows.shape), rows.dtype)
        for row, new in zip(moved, found[name].reshape(rows.shape), strict=True):
            if values.ndim < 2:
                expected = np.sign(row) * np.maximum(np.abs(row) - 0.15, 0)
            else:
                expected = row * max(0.0, 1 - 0.15 / math.hypot(*row.tolist()))
            np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-7)
    whole = in_shards(GROUPED, Layout.of(PARAMS, 1, whole_rows=True), names)
    assert all(found[name].tobytes() == whole[name].tobytes() for name in PARAMS)


def test_rows_that_blocks_may_cut_are_refused() -> None:
    model = Model.of(w=np.zeros((4, 3)))
    with pytest.raises(ConfigurationError, match="whole rows, but blocks of 'w' may split them"):
        model.apply(GROUPED, model.state(GROUPED), model.gradient("a", 1))


@pytest.mark.parametrize("penalty", [L1(0.3), GroupL1(0.3)])
def test_steps_are_those_of_proximal_descent_at_that_rate(penalty: Penalty) -> None:
    rule = DelayedProximal(CURVATURE, CURVATURE, 3, penalty)
    same = Proximal(rule.learning_rate, penalty)
    values, gradient = X[:8].copy(), X[8:16].copy()
    for scale in (1.0, 0.1):
        found, slots = rule.step(values, gradient, {}, 1, scale)
        assert slots == {}
        assert found.tobytes() == same.step(values, gradient, {}, 1, scale)[0].tobytes()


@pytest.mark.parametrize("tau", [0, 4])
def test_it_ends_where_it_should_though_every_gradient_is_late(tau: int) -> None:
    expected = Lasso(alpha=0.3, **EXACT).fit(X, Y).coef_
    rule = DelayedProximal(CURVATURE, CURVATURE, tau, L1(0.3))
    found = trained(rule, np.ones(9), least_squares, 1000 * (1 + tau), delay=tau)
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert ((found == 0) == (expected == 0)).all()


def test_the_delay_is_what_the_step_size_has_to_take_into_account() -> None:
    careless = DelayedProximal(CURVATURE, CURVATURE, 0, L1(0.3))
    found = trained(careless, np.ones(9), least_squares, 300, delay=4)
    assert np.abs(found).max() > 1e6
