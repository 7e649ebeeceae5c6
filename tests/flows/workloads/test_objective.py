"""Objective and stationarity against scikit-learn's optimum, scipy and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

from dps.core.rules.penalties import L1, L2, ElasticNet, GroupL1, Penalty
from flows.config.experiment import load_experiment
from flows.workloads import (
    DatasetShape,
    Objective,
    ParityRegression,
    Rica,
    SoftmaxRegression,
    load_dataset,
)
from flows.workloads.objective import ROWS

RNG = np.random.default_rng(4)
Arrays = dict[str, np.ndarray]


def optimum(strength: float) -> Arrays:
    """The weights that scikit-learn finds for the digits, their bias penalised like the others."""
    from sklearn.linear_model import LogisticRegression

    digits = load_dataset("digits", part="train")
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
    digits = load_dataset("digits", part="train")
    workload = ParityRegression(digits.shape, "float64")
    return Objective(workload, L1(strength)), digits.x_train, digits.y_train


@pytest.mark.parametrize("config", ["problems-l1-workers", "problems-l1-delays"])
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


def test_the_mapping_is_the_step_that_scipy_finds() -> None:
    """The proximal step is the least of a model of F, here found element by element."""
    problem, x, y = logistic(0.02)
    step = 0.7
    params = {"weight": 0.05 * RNG.standard_normal(64), "bias": np.array([0.2])}
    params["weight"][::3] = 0
    squares = 0.0
    for name, values in params.items():
        for i, value in enumerate(values):
            slope = central_difference(problem, params, name, i, x, y)

            def model(u: float, v: float = float(value), g: float = slope) -> float:
                return g * (u - v) + (u - v) ** 2 / (2 * step) + 0.02 * abs(u)

            least = min(
                (minimize_scalar(model, bracket=(value - 1, value + 1), tol=1e-12).x, 0.0),
                key=model,
            )
            squares += ((value - least) / step) ** 2
    found = Objective(problem.workload, problem.penalty, step).score(params, x, y)[1]
    assert found == pytest.approx(np.sqrt(squares), rel=1e-4)


def central_difference(
    problem: Objective, params: Arrays, name: str, i: int, x: np.ndarray, y: np.ndarray
) -> float:
    """The slope of the loss alone."""
    smooth = Objective(problem.workload)
    values = []
    for change in (1e-5, -1e-5):
        moved = params[name].copy()
        moved[i] += change
        values.append(smooth.score({**params, name: moved}, x, y)[0])
    return (values[0] - values[1]) / 2e-5


def test_without_a_penalty_it_is_the_norm_of_the_gradient() -> None:
    x, y = RNG.normal(size=(50, 6)), RNG.integers(0, 3, 50)
    workload = SoftmaxRegression(DatasetShape(6, 3), dtype="float64")
    params = {name: RNG.normal(size=array.shape) for name, array in workload.initial(RNG).items()}
    loss, gradients = workload.gradient(params, x, y)
    length = np.linalg.norm(np.concatenate([g.ravel() for g in gradients.values()]))
    for step in (0.1, 3.0):
        assert Objective(workload, None, step).score(params, x, y) == pytest.approx((loss, length))


def test_it_is_of_all_examples_also_where_these_are_differentiated_in_parts() -> None:
    x, y = RNG.normal(size=(2 * ROWS + 7, 3)), RNG.integers(0, 2, 2 * ROWS + 7)
    workload = ParityRegression(DatasetShape(3, 2), "float64")
    params = {"weight": RNG.normal(size=3), "bias": np.zeros(1)}
    loss, gradients = workload.gradient(params, x, y)
    length = np.hypot(np.linalg.norm(gradients["weight"]), gradients["bias"][0])
    assert Objective(workload).score(params, x, y) == pytest.approx((loss, length))


def test_a_local_minimum_of_rica_is_stationary() -> None:
    x, y = RNG.normal(size=(80, 5)), np.zeros(80, np.int64)
    problem = Objective(Rica(DatasetShape(5, 1), 4, dtype="float64"))

    def flat(values: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradients = problem.workload.gradient({"filters": values.reshape(4, 5)}, x, y)
        return loss, gradients["filters"].ravel()

    start = RNG.normal(size=20)
    found = minimize(flat, start, jac=True, method="BFGS", options={"gtol": 1e-8})
    value, norm = problem.score({"filters": found.x.reshape(4, 5)}, x, y)
    assert value == pytest.approx(found.fun)
    assert norm < 1e-5
    assert problem.score({"filters": start.reshape(4, 5)}, x, y)[1] > 0.1


@pytest.mark.parametrize("penalty", [L1(0.3), L2(0.4), ElasticNet(0.2, 0.5), GroupL1(0.3)], ids=str)
def test_a_penalty_s_value_is_that_of_its_proximal_operator(penalty: Penalty) -> None:
    """The operator's result has the least value + distance² / 2γ: no point near it has less."""
    x, step = RNG.normal(size=(4, 3)), 0.8
    least = x.copy()
    penalty.shrink(least, step)

    def cost(point: np.ndarray) -> float:
        return penalty.value(point) + float(np.sum((point - x) ** 2)) / (2 * step)

    for size in (1e-3, 1e-1, 1.0):
        for _ in range(50):
            assert cost(least + size * RNG.normal(size=x.shape)) > cost(least)


def test_penalties_are_those_of_the_textbook() -> None:
    weights = np.array([[3.0, -4.0], [0.0, 2.0]])
    assert L1(0.5).value(weights) == pytest.approx(4.5)
    assert L2(0.5).value(weights) == pytest.approx(0.25 * 29)
    assert ElasticNet(0.5, 0.5).value(weights) == pytest.approx(4.5 + 0.25 * 29)
    assert GroupL1(0.5).value(weights) == pytest.approx(0.5 * 7)
