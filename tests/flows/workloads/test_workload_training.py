"""Training on digits: softmax regression against scikit-learn's, and accuracy worth reporting."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from flows.workloads import Arrays, Dataset, Digits, ParityRegression, SoftmaxRegression

L2 = 0.01


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits().load()


@pytest.fixture(scope="module")
def ours(digits: Dataset) -> Arrays:
    """Full-batch gradient descent with Nesterov's momentum, until the gradient vanishes."""
    workload = SoftmaxRegression(digits.shape, dtype="float64")
    x = digits.x_train.astype(np.float64)
    params = ahead = workload.initial(np.random.default_rng(0))
    for _ in range(2000):
        _, gradients = workload.gradient(ahead, x, digits.y_train)
        gradients["layer0.weight"] += L2 * ahead["layer0.weight"]
        if max(np.abs(gradient).max() for gradient in gradients.values()) < 1e-8:
            return ahead
        new = {name: ahead[name] - 0.4 * gradients[name] for name in params}
        ahead = {name: new[name] + 0.97 * (new[name] - params[name]) for name in params}
        params = new
    raise AssertionError("gradient descent did not converge")


@pytest.fixture(scope="module")
def theirs(digits: Dataset) -> LogisticRegression:
    # Its loss is a sum over examples with weight C, ours a mean with weight 1 / L2.
    model = LogisticRegression(C=1 / (L2 * len(digits.y_train)), tol=1e-9, max_iter=10_000)
    return model.fit(digits.x_train.astype(np.float64), digits.y_train)


def test_weights_are_those_of_scikit_learn(ours: Arrays, theirs: LogisticRegression) -> None:
    np.testing.assert_allclose(ours["layer0.weight"], theirs.coef_.T, atol=1e-5)
    bias = ours["layer0.bias"] - ours["layer0.bias"].mean()  # only differences matter
    np.testing.assert_allclose(bias, theirs.intercept_ - theirs.intercept_.mean(), atol=1e-5)


def test_even_and_odd_are_told_apart_as_by_scikit_learn(digits: Dataset) -> None:
    workload = ParityRegression(digits.shape, dtype="float64")
    x, odd = digits.x_train.astype(np.float64), digits.y_train % 2
    model = LogisticRegression(C=1 / (L2 * len(odd)), tol=1e-10, max_iter=10_000).fit(x, odd)
    found = {"weight": model.coef_[0], "bias": model.intercept_}
    _, gradients = workload.gradient(found, x, digits.y_train)
    # At its optimum, the gradient of the loss is what its penalty on the weights balances.
    np.testing.assert_allclose(gradients["weight"], -L2 * found["weight"], atol=1e-6)
    np.testing.assert_allclose(gradients["bias"], 0, atol=1e-6)
    _, accuracy = workload.evaluate(found, digits.x_test, digits.y_test)
    assert accuracy == model.score(digits.x_test.astype(np.float64), digits.y_test % 2)
    assert accuracy > 0.85
