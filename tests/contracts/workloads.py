"""What every workload must do: pure arithmetic that fits its parameters, repeats, and learns."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
from distributed.protocol import deserialize, serialize

Array = np.ndarray
Arrays = dict[str, Array]
Data = tuple[Array, Array]

EXAMPLES = 400


class WorkloadContract:
    """The contract of workloads (`flows.workloads.Workload`), for data of its `shape`.

    Override the fixture `workload`; with `params`, for several of them. It is trained on clouds of
    points, which it must be able to learn.
    """

    @pytest.fixture
    def workload(self) -> Any:
        """The workload that is tested; it says the `shape` of its data."""
        raise NotImplementedError("override the fixture `workload` to return the one to be tested")

    @pytest.fixture
    def data(self, workload: Any) -> Data:
        """Examples and their classes; override it for data that the workload is made for."""
        return clouds(workload.shape.features, workload.shape.classes)

    def test_gradients_have_the_names_shapes_and_dtypes_of_the_parameters(
        self, workload: Any, data: Data
    ) -> None:
        params = initial(workload)
        loss, gradients = workload.gradient(params, *data)
        assert isinstance(loss, float)
        assert _specs(gradients) == _specs(params)

    def test_gradients_keep_the_dtype_when_examples_have_another(
        self, workload: Any, data: Data
    ) -> None:
        x, y = data
        params = initial(workload)
        for dtype in ("float16", "float32", "float64"):
            _, gradients = workload.gradient(params, x.astype(dtype), y)
            assert _specs(gradients) == _specs(params)

    def test_the_same_seed_gives_the_same_initial_values(self, workload: Any) -> None:
        first, second = initial(workload, seed=3), initial(workload, seed=3)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
            assert not np.shares_memory(first[name], second[name])

    def test_equal_calls_give_equal_results(self, workload: Any, data: Data) -> None:
        params = trained(workload, data, steps=3)
        (loss, first), (again, second) = (workload.gradient(params, *data) for _ in range(2))
        assert loss == again
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])

    def test_nothing_given_is_written_into(self, workload: Any, data: Data) -> None:
        x, y = (copy.copy(array) for array in data)
        params = trained(workload, data, steps=3)
        for array in (x, y, *params.values()):
            array.flags.writeable = False
        workload.gradient(params, x, y)
        workload.evaluate(params, x, y)

    def test_gradients_share_no_memory_with_anything_else(self, workload: Any, data: Data) -> None:
        params = initial(workload)
        _, first = workload.gradient(params, *data)
        _, second = workload.gradient(params, *data)
        arrays = [*first.values(), *second.values(), *params.values(), *data]
        for i, array in enumerate(arrays):
            assert not any(np.shares_memory(array, other) for other in arrays[:i])

    def test_loss_falls_and_accuracy_rises_under_sgd(self, workload: Any, data: Data) -> None:
        before = workload.evaluate(initial(workload), *data)
        after = workload.evaluate(trained(workload, data), *data)
        assert after[0] < 0.8 * before[0]
        assert after[1] > before[1]

    def test_evaluate_agrees_with_gradient_on_the_loss(self, workload: Any, data: Data) -> None:
        params = trained(workload, data, steps=20)
        loss, _ = workload.gradient(params, *data)
        assert workload.evaluate(params, *data)[0] == pytest.approx(loss, rel=1e-5)

    def test_accuracy_is_the_share_of_examples_that_are_right(
        self, workload: Any, data: Data
    ) -> None:
        x, y = data
        params = trained(workload, data, steps=20)
        _, accuracy = workload.evaluate(params, x, y)
        alone = [workload.evaluate(params, x[i : i + 1], y[i : i + 1])[1] for i in range(len(y))]
        assert set(alone) <= {0.0, 1.0}
        assert accuracy == pytest.approx(np.mean(alone))
        assert isinstance(accuracy, float)

    def test_evaluating_in_chunks_changes_nothing(self, workload: Any, data: Data) -> None:
        x, y = (np.concatenate([array] * 6) for array in data)  # more than one chunk
        params = trained(workload, data, steps=20)
        assert workload.evaluate(params, x, y) == pytest.approx(workload.evaluate(params, *data))

    def test_the_mean_over_a_batch_is_the_mean_over_its_halves(
        self, workload: Any, data: Data
    ) -> None:
        x, y = data
        params = trained(workload, data, steps=20)
        assert len(y) % 2 == 0
        loss, whole = workload.gradient(params, x, y)
        rows = np.split(np.arange(len(y)), 2)
        halves = [workload.gradient(params, x[half], y[half]) for half in rows]
        assert loss == pytest.approx(np.mean([part for part, _ in halves]), rel=1e-5)
        for name, gradient in whole.items():
            mean = (halves[0][1][name] + halves[1][1][name]) / 2
            np.testing.assert_allclose(gradient, mean, rtol=1e-3, atol=1e-6)

    def test_huge_logits_give_finite_numbers(self, workload: Any, data: Data) -> None:
        params = {name: 1e4 * array for name, array in trained(workload, data, steps=20).items()}
        loss, gradients = workload.gradient(params, *data)
        assert np.isfinite(loss)
        assert all(np.isfinite(gradient).all() for gradient in gradients.values())

    def test_a_workload_travels_to_other_processes_and_is_equal_there(self, workload: Any) -> None:
        assert deserialize(*serialize(workload)) == workload

    def test_no_examples_cannot_be_evaluated(self, workload: Any, data: Data) -> None:
        x, y = data
        with pytest.raises(ValueError, match="no examples"):
            workload.evaluate(initial(workload), x[:0], y[:0])

    def test_the_names_of_the_parameters_are_known_without_them(self, workload: Any) -> None:
        assert workload.parameters == tuple(initial(workload))

    def test_it_has_a_name(self, workload: Any) -> None:
        assert workload.name
        assert isinstance(workload.name, str)


@cache
def clouds(features: int, classes: int) -> Data:
    """Overlapping clouds of points, one for each class, wide enough apart to be learnt."""
    rng = np.random.default_rng(5)
    y = rng.integers(0, classes, EXAMPLES)
    centres = rng.normal(size=(classes, features))
    x = centres[y] + 0.8 * rng.normal(size=(EXAMPLES, features))
    return x.astype(np.float32), y.astype(np.int64)


def initial(workload: Any, seed: int = 0) -> Arrays:
    """The initial parameters of a workload."""
    params: Arrays = workload.initial(np.random.default_rng(seed))
    return params


def trained(workload: Any, data: Data, steps: int = 300) -> Arrays:
    """The parameters after some steps of SGD."""
    x, y = data
    params, rng, order = initial(workload), np.random.default_rng(0), np.empty(0, np.intp)
    for _ in range(steps):
        if len(order) < 32:
            order = rng.permutation(len(y))
        rows, order = order[:32], order[32:]
        _, gradients = workload.gradient(params, x[rows], y[rows])
        params = {name: params[name] - 0.1 * gradients[name] for name in params}
    return params


def _specs(arrays: Arrays) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    return [(name, array.shape, array.dtype) for name, array in arrays.items()]
