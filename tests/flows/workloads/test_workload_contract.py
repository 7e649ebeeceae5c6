"""The contract that every workload keeps, run against each of them."""

from __future__ import annotations

import copy
import pickle
from itertools import islice

import numpy as np
import pytest

from flows.workloads import (
    MLP,
    Array,
    Arrays,
    DatasetShape,
    ParityRegression,
    SoftmaxRegression,
    Workload,
    batches,
)
from tests.support.needs_torch import needs_torch

Data = tuple[Array, Array]

SHAPE = DatasetShape(features=12, classes=4)

WORKLOADS: list[MLP | SoftmaxRegression | ParityRegression] = [
    MLP(SHAPE),
    MLP(SHAPE, hidden=(), dtype="float64"),
    MLP(SHAPE, hidden=(9, 1, 5)),
    MLP(SHAPE, hidden=(7,), dtype="float64"),
    SoftmaxRegression(SHAPE),
    SoftmaxRegression(SHAPE, l2=0.01, dtype="float64"),
    ParityRegression(SHAPE),
    ParityRegression(SHAPE, dtype="float64"),
]


@pytest.fixture(params=[*WORKLOADS, pytest.param("torch", marks=needs_torch)], ids=str)
def workload(request: pytest.FixtureRequest) -> Workload:
    if request.param == "torch":
        from tests.support.modules import perceptron

        return perceptron(SHAPE)
    chosen: Workload = request.param
    return chosen


@pytest.fixture(scope="module")
def data() -> Data:
    """Overlapping clouds of points, one for each class, wide enough apart to be learnt."""
    rng = np.random.default_rng(5)
    y = rng.integers(0, SHAPE.classes, 400)
    centres = rng.normal(size=(SHAPE.classes, SHAPE.features))
    x = centres[y] + 0.8 * rng.normal(size=(400, SHAPE.features))
    return x.astype(np.float32), y.astype(np.int64)


def initial(workload: Workload, seed: int = 0) -> Arrays:
    return workload.initial(np.random.default_rng(seed))


def specs(arrays: Arrays) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    return [(name, array.shape, array.dtype) for name, array in arrays.items()]


def trained(workload: Workload, data: Data, steps: int = 300) -> Arrays:
    x, y = data
    params = initial(workload)
    for rows in islice(batches(np.random.default_rng(0), len(y), 32), steps):
        _, gradients = workload.gradient(params, x[rows], y[rows])
        params = {name: params[name] - 0.1 * gradients[name] for name in params}
    return params


def test_gradients_have_the_names_shapes_and_dtypes_of_the_parameters(
    workload: Workload, data: Data
) -> None:
    params = initial(workload)
    loss, gradients = workload.gradient(params, *data)
    assert isinstance(loss, float)
    assert specs(gradients) == specs(params)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_parameters_have_the_dtype_asked_for(
    workload: MLP | SoftmaxRegression | ParityRegression,
) -> None:
    assert {str(array.dtype) for array in initial(workload).values()} == {workload.dtype}


def test_gradients_keep_the_dtype_when_examples_have_another(
    workload: Workload, data: Data
) -> None:
    x, y = data
    params = initial(workload)
    for dtype in ("float16", "float32", "float64"):
        _, gradients = workload.gradient(params, x.astype(dtype), y)
        assert specs(gradients) == specs(params)


def test_the_same_seed_gives_the_same_initial_values(workload: Workload) -> None:
    first, second = initial(workload, seed=3), initial(workload, seed=3)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        assert not np.shares_memory(first[name], second[name])


def test_equal_calls_give_equal_results(workload: Workload, data: Data) -> None:
    params = trained(workload, data, steps=3)
    (loss, first), (again, second) = (workload.gradient(params, *data) for _ in range(2))
    assert loss == again
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_nothing_given_is_written_into(workload: Workload, data: Data) -> None:
    x, y = (copy.copy(array) for array in data)
    params = trained(workload, data, steps=3)
    for array in (x, y, *params.values()):
        array.flags.writeable = False
    workload.gradient(params, x, y)
    workload.evaluate(params, x, y)


def test_gradients_share_no_memory_with_anything_else(workload: Workload, data: Data) -> None:
    params = initial(workload)
    _, first = workload.gradient(params, *data)
    _, second = workload.gradient(params, *data)
    arrays = [*first.values(), *second.values(), *params.values(), *data]
    for i, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in arrays[:i])


def test_loss_falls_and_accuracy_rises_under_sgd(workload: Workload, data: Data) -> None:
    before = workload.evaluate(initial(workload), *data)
    after = workload.evaluate(trained(workload, data), *data)
    assert after[0] < 0.8 * before[0]
    assert after[1] > before[1]


def test_evaluate_agrees_with_gradient_on_the_loss(workload: Workload, data: Data) -> None:
    params = trained(workload, data, steps=20)
    loss, _ = workload.gradient(params, *data)
    assert workload.evaluate(params, *data)[0] == pytest.approx(loss, rel=1e-5)


def test_accuracy_is_the_share_of_examples_that_are_right(workload: Workload, data: Data) -> None:
    x, y = data
    params = trained(workload, data, steps=20)
    _, accuracy = workload.evaluate(params, x, y)
    alone = [workload.evaluate(params, x[i : i + 1], y[i : i + 1])[1] for i in range(len(y))]
    assert set(alone) <= {0.0, 1.0}
    assert accuracy == pytest.approx(np.mean(alone))
    assert isinstance(accuracy, float)


def test_evaluating_in_chunks_changes_nothing(workload: Workload, data: Data) -> None:
    x, y = (np.concatenate([array] * 6) for array in data)  # more than one chunk
    params = trained(workload, data, steps=20)
    assert workload.evaluate(params, x, y) == pytest.approx(workload.evaluate(params, *data))


def test_the_mean_over_a_batch_is_the_mean_over_its_halves(workload: Workload, data: Data) -> None:
    x, y = data
    params = trained(workload, data, steps=20)
    half = len(y) // 2
    loss, whole = workload.gradient(params, x, y)
    halves = [workload.gradient(params, x[rows], y[rows]) for rows in np.split(np.arange(400), 2)]
    assert half * 2 == len(y)
    assert loss == pytest.approx(np.mean([part for part, _ in halves]), rel=1e-5)
    for name, gradient in whole.items():
        mean = (halves[0][1][name] + halves[1][1][name]) / 2
        np.testing.assert_allclose(gradient, mean, rtol=1e-3, atol=1e-6)


def test_huge_logits_give_finite_numbers(workload: Workload, data: Data) -> None:
    params = {name: 1e4 * array for name, array in trained(workload, data, steps=20).items()}
    loss, gradients = workload.gradient(params, *data)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_a_workload_travels_to_other_processes_and_is_equal_there(workload: Workload) -> None:
    assert pickle.loads(pickle.dumps(workload)) == workload  # noqa: S301


def test_no_examples_cannot_be_evaluated(workload: Workload, data: Data) -> None:
    x, y = data
    with pytest.raises(ValueError, match="no examples"):
        workload.evaluate(initial(workload), x[:0], y[:0])


def test_the_names_of_the_parameters_are_known_without_them(workload: Workload) -> None:
    assert workload.parameters == tuple(initial(workload))
