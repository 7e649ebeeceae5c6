"""The contracts of workloads and data sets, for each that dps has."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest

from flows.config.workload import DigitsSection, PatchesSection
from flows.workloads import (
    MLP,
    Array,
    DatasetShape,
    DatasetSource,
    ParityRegression,
    PatchDataset,
    Rica,
    SoftmaxRegression,
    Workload,
)
from flows.workloads.base import Predicts
from flows.workloads.losses import predicted
from tests.contracts.datasets import DatasetContract
from tests.contracts.workloads import Data, WorkloadContract, initial, trained
from tests.support.needs_torch import needs_torch

SHAPE = DatasetShape(features=12, classes=4)

PATCHES = PatchDataset(400, 6, 12)

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


class TestWorkloads(WorkloadContract):
    @pytest.fixture(params=[*WORKLOADS, pytest.param("torch", marks=needs_torch)], ids=str)
    def workload(self, request: pytest.FixtureRequest) -> Workload:
        if request.param == "torch":
            from tests.support.modules import perceptron

            return perceptron(SHAPE)
        chosen: Workload = request.param
        return chosen

    def test_an_evaluation_tells_what_is_predicted(self, workload: Predicts, data: Data) -> None:
        x, y = (np.concatenate([array] * 6) for array in data)  # more than one chunk
        params, parts = trained(workload, data, steps=3), list[Array]()
        assert workload.evaluate(params, x, y, parts) == workload.evaluate(params, x, y)
        expected = predicted(partial(workload.predict, params), x, y)
        np.testing.assert_array_equal(np.concatenate(parts), expected)

    def test_it_can_be_pickled(self, workload: Workload) -> None:
        assert pickle.loads(pickle.dumps(workload)) == workload  # noqa: S301


class TestRica(WorkloadContract):
    @pytest.fixture(params=["float32", "float64"])
    def workload(self, request: pytest.FixtureRequest) -> Workload:
        return Rica(PATCHES.shape, filters=20, dtype=request.param)

    @pytest.fixture
    def data(self, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
        patches = PATCHES.load("train")
        return patches.x_train, patches.y_train


class TestPatches(DatasetContract):
    @pytest.fixture
    def dataset(self) -> DatasetSource:
        return PatchesSection(kind="patches", count=300, size=5, components=12)


class TestDigits(DatasetContract):
    @pytest.fixture
    def dataset(self) -> DatasetSource:
        return DigitsSection(kind="digits", test_examples=100)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_parameters_have_the_dtype_asked_for(
    workload: MLP | SoftmaxRegression | ParityRegression,
) -> None:
    assert {str(array.dtype) for array in initial(workload).values()} == {workload.dtype}
