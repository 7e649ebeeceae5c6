"""Objective and stationarity against scikit-learn's optimum, scipy and finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from dps.core.rules.proximal import L1
from flows.config.experiment import load_experiment
from flows.workloads import Digits, Objective, ParityRegression

RNG = np.random.default_rng(4)
Arrays = dict[str, np.ndarray]


def optimum(strength: float) -> Arrays:
    """The weights that scikit-learn finds for the digits, their bias penalised like the others."""
    from sklearn.linear_model import LogisticRegression

    digits = Digits().load("train")
    ones = np.ones((len(digits.x_train), 1))
    model = LogisticRegression(
        l1_ratio=1,
        solver="liblinear",
        C=1 / (strength * len(ones)),
        fit_intercept=False,
        tol=1e-9,
        max_iter=100_000,
        random_state=0,
    )
    odd = digits.y_train % 2
    found = model.fit(np.hstack([digits.x_train.astype(float), ones]), odd).coef_[0]
    return {"weight": found[:-1], "bias": found[-1:]}


def logistic(strength: float) -> tuple[Objective, np.ndarray, np.ndarray]:
    digits = Digits().load("train")
    workload = ParityRegression(digits.shape, "float64")
    return Objective(workload, L1(strength)), digits.x_train, digits.y_train


@pytest.mark.parametrize("config", ["studies/problems-l1-workers", "studies/problems-l1-delays"])
def test_the_reference_of_packaged_experiments_is_the_optimum(config: str) -> None:
    experiment = load_experiment(config)
    wanted = experiment.evaluation.objective
    penalty = experiment.optimizer.build_penalty()
    assert wanted is not None
    assert isinstance(penalty, L1)
    problem, x, y = logistic(penalty.strength)
    value, norm = problem.score(optimum(penalty.strength), x, y)
    assert wanted.reference == pytest.approx(value, rel=1e-7)
    assert norm < 1e-6


@pytest.mark.parametrize("step", [0.01, 1.0, 20.0])
def test_stationarity_is_zero_at_an_optimum_and_not_beside_it(step: float) -> None:
    problem, x, y = logistic(0.02)
    problem = Objective(problem.workload, problem.penalty, step)
    best = optimum(0.02)
    value, norm = problem.score(best, x, y)
    assert norm < 1e-6
    beside = {name: array + 0.01 * RNG.standard_normal(array.shape) for name, array in best.items()}
    higher, away = problem.score(beside, x, y)
    assert higher > value
    assert away > 1e-3
