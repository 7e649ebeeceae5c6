"""Models that predict numbers, and what models are scored by, beside scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.linear_model import LinearRegression as Reference
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_squared_error, r2_score, roc_auc_score

from dps.errors import ConfigurationError
from flows.workloads import MLP, DatasetShape, LinearRegression, build_workload
from flows.workloads.losses import auc, evaluate_regression, r_squared
from tests.support.needs_torch import needs_torch

SHAPE = DatasetShape(6, 1, regression=True)
RNG = np.random.default_rng(4)
X = RNG.normal(size=(500, 6))
Y = X @ RNG.normal(size=6) + 3 + 0.5 * RNG.normal(size=500)


def descended(workload: Any, x: Any, y: Any, steps: int = 3000, rate: float = 0.1) -> Any:
    params = workload.initial(np.random.default_rng(0))
    for _ in range(steps):
        _, gradients = workload.gradient(params, x, y)
        params = {name: params[name] - rate * gradients[name] for name in params}
    return params


def assert_told(workload: Any, params: Any, x: Any, y: Any) -> None:
    """Make sure that an evaluation tells what is predicted, and has the same result as without."""
    parts: list[Any] = []
    assert workload.evaluate(params, x, y, parts) == workload.evaluate(params, x, y)
    np.testing.assert_array_equal(np.concatenate(parts), workload.predict(params, x))


@pytest.mark.parametrize("seed", range(20))
def test_auc_is_that_of_scikit_learn_also_with_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, 60)
    scores = np.round(rng.normal(size=60) + 0.7 * y, seed % 3)
    assert auc(scores, y) == pytest.approx(roc_auc_score(y, scores), abs=1e-12)


def test_auc_needs_both_classes_and_numbers() -> None:
    assert auc(np.zeros(10), np.arange(10) % 2) == 0.5
    assert auc(np.array([np.nan, 1.0]), np.array([0, 1])) == 0.0
    with pytest.raises(ValueError, match="both classes"):
        auc(np.arange(3.0), np.ones(3))


def test_r_squared_is_that_of_scikit_learn_and_not_below_0() -> None:
    y = Y.astype(np.float32)
    for noise in (0.1, 1.0, 2.0):
        predicted = y + noise * np.random.default_rng(0).normal(size=len(y))
        known = r2_score(y, predicted)
        assert known > 0
        assert r_squared(predicted - y, y) == pytest.approx(known, abs=1e-9)
    assert r2_score(y, y - 100) < 0
    assert r_squared(np.full(len(y), 100.0), y) == 0.0
    assert r_squared(np.full(len(y), np.nan), y) == 0.0


def test_the_loss_of_regression_is_half_the_mean_squared_error() -> None:
    x = np.concatenate([X] * 5)  # more than one chunk
    y = np.concatenate([Y] * 5)
    loss, share = evaluate_regression(lambda rows: rows[:, :1], x, y)
    assert loss == pytest.approx(mean_squared_error(y, x[:, 0]) / 2)
    assert share == pytest.approx(max(0.0, r2_score(y, x[:, 0])))
    with pytest.raises(ValueError, match="no examples"):
        evaluate_regression(lambda rows: rows, x[:0], y[:0])


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_least_squares_finds_what_scikit_learn_does(l2: float) -> None:
    workload = LinearRegression(SHAPE, l2=l2, dtype="float64")
    params = descended(workload, X, Y)
    known = (Ridge(alpha=l2 * len(Y)) if l2 else Reference()).fit(X, Y)
    np.testing.assert_allclose(params["weight"], known.coef_, atol=1e-9)
    assert params["bias"][0] == pytest.approx(known.intercept_)
    assert workload.evaluate(params, X, Y)[1] == pytest.approx(known.score(X, Y))
    penalty = l2 / 2 * float(known.coef_ @ known.coef_)
    squared = mean_squared_error(Y, known.predict(X))
    assert workload.evaluate(params, X, Y)[0] == pytest.approx(squared / 2 + penalty)


@pytest.mark.parametrize(
    "workload",
    [
        LinearRegression(SHAPE, dtype="float64"),
        LinearRegression(SHAPE, l2=0.2, dtype="float64"),
        MLP(SHAPE, hidden=(5, 4), dtype="float64"),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_loss(workload: Any) -> None:
    rng = np.random.default_rng(1)
    params = {n: a + 0.1 * rng.normal(size=a.shape) for n, a in workload.initial(rng).items()}
    loss, gradients = workload.gradient(params, X, Y)
    assert_told(workload, params, X, Y)
    assert workload.evaluate(params, X, Y)[0] == pytest.approx(loss)
    for name, array in params.items():
        for place in np.ndindex(array.shape):
            losses = []
            for step in (1e-6, -1e-6):
                moved = array.copy()
                moved[place] += step
                losses.append(workload.gradient({**params, name: moved}, X, Y)[0])
            assert gradients[name][place] == pytest.approx(
                (losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-7
            )


def test_a_perceptron_learns_what_no_line_can() -> None:
    x = np.random.default_rng(0).uniform(-2, 2, size=(400, 1)).astype(np.float32)
    y = np.abs(x[:, 0])
    shape = DatasetShape(1, 1, regression=True)
    line, bent = LinearRegression(shape), MLP(shape, hidden=(16,))
    assert line.evaluate(descended(line, x, y), x, y)[1] < 0.1
    assert bent.evaluate(descended(bent, x, y), x, y)[1] > 0.98


def test_sparse_rows_give_the_gradients_of_dense_ones() -> None:
    x = np.where(np.abs(X) > 1, X, 0).astype(np.float32)
    workload = LinearRegression(SHAPE, l2=0.1)
    params = {"weight": np.ones(6, np.float32), "bias": np.ones(1, np.float32)}
    (first, one), (second, other) = (
        workload.gradient(params, rows, Y) for rows in (x, csr_array(x))
    )
    assert first == pytest.approx(second)
    for name in one:
        assert one[name].dtype == other[name].dtype == np.float32
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="l2=-1"):
        build_workload("linear", SHAPE, l2=-1)
    with pytest.raises(ConfigurationError, match="float16"):
        build_workload("linear", SHAPE, dtype="float16")


@pytest.mark.parametrize("outputs", [pytest.param(n, marks=needs_torch) for n in ("rows", "flat")])
def test_a_module_of_torch_predicts_numbers(outputs: str) -> None:
    from torch import nn

    from flows.workloads.torch_module import TorchWorkload

    def factory(shape: DatasetShape) -> Any:
        layers = [nn.Linear(shape.features, 1), *([nn.Flatten(0)] if outputs == "flat" else [])]
        return nn.Sequential(*layers)

    workload = TorchWorkload(SHAPE, factory, nn.functional.mse_loss)
    x, y = X.astype(np.float32), Y.astype(np.float32)
    params = descended(workload, x, y, steps=300)
    known = Reference().fit(X, Y)
    np.testing.assert_allclose(params["0.weight"][0], known.coef_, atol=1e-3)
    loss, share = workload.evaluate(params, x, y)
    assert share == pytest.approx(known.score(X, Y), abs=1e-5)
    assert loss == pytest.approx(mean_squared_error(Y, known.predict(X)), rel=1e-4)
    assert workload.predict(params, x).shape == (500, 1)
    assert_told(workload, params, x, y)
