"""Models that predict numbers, and the scores of models, beside scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.metrics import (
    accuracy_score,
    mean_squared_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)

from flows.workloads import MLP, DatasetShape
from flows.workloads.base import accuracy, auc, r_squared, rmse
from tests.support.needs_torch import needs_torch

SHAPE = DatasetShape(6, 1, regression=True)
RNG = np.random.default_rng(4)
X = RNG.normal(size=(500, 6))
Y = X @ RNG.normal(size=6) + 3 + 0.5 * RNG.normal(size=500)
KNOWN = LinearRegression().fit(X, Y)


def descended(workload: Any, x: Any, y: Any, steps: int = 3000, rate: float = 0.1) -> Any:
    params = workload.initial(np.random.default_rng(0))
    for _ in range(steps):
        _, gradients = workload.gradient(params, x, y)
        params = {name: params[name] - rate * gradients[name] for name in params}
    return params


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_classes_are_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, 60)
    scores = np.round(rng.normal(size=60) + 0.7 * y, seed)  # with ties
    both = np.column_stack([np.zeros(60), scores])
    assert auc(both, y) == pytest.approx(roc_auc_score(y, scores), abs=1e-12)
    assert accuracy(both, y) == accuracy_score(y, scores > 0)


def test_auc_needs_both_classes_and_is_0_where_scores_are_not_finite() -> None:
    assert auc(np.array([[0, np.nan], [0, 1]]), np.array([0, 1])) == 0.0
    with pytest.raises(ValueError, match="both classes"):
        auc(np.zeros((3, 2)), np.ones(3))


def test_scores_of_numbers_are_those_of_scikit_learn_and_not_below_0() -> None:
    y = Y.astype(np.float32)
    for noise in (0.1, 1.0, 2.0):
        predicted = y[:, None] + noise * np.random.default_rng(0).normal(size=(len(y), 1))
        assert r_squared(predicted, y) == pytest.approx(r2_score(y, predicted), abs=1e-9)
        assert rmse(predicted, y) == pytest.approx(root_mean_squared_error(y, predicted))
    assert r_squared(y - 100, y) == 0.0
    assert r_squared(np.full(len(y), np.nan), y) == 0.0


def test_without_hidden_layers_it_finds_the_least_squares_of_scikit_learn() -> None:
    workload = MLP(SHAPE, hidden=(), dtype="float64")
    params = descended(workload, X, Y)
    np.testing.assert_allclose(params["layer0.weight"][:, 0], KNOWN.coef_, atol=1e-9)
    assert params["layer0.bias"][0] == pytest.approx(KNOWN.intercept_)
    loss, share = workload.evaluate(params, X, Y)
    assert share == pytest.approx(KNOWN.score(X, Y))
    assert loss == pytest.approx(mean_squared_error(Y, KNOWN.predict(X)) / 2)
    many = workload.evaluate(params, np.concatenate([X] * 5), np.concatenate([Y] * 5))  # chunks
    assert many == pytest.approx((loss, share))


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
    np.testing.assert_allclose(params["0.weight"][0], KNOWN.coef_, atol=1e-3)
    loss, share = workload.evaluate(params, x, y)
    assert share == pytest.approx(KNOWN.score(X, Y), abs=1e-5)
    assert loss == pytest.approx(mean_squared_error(Y, KNOWN.predict(X)), rel=1e-4)
    assert workload.predict(params, x).shape == (500, 1)
