"""The contracts of workloads and data sets, for each that dps has."""

from __future__ import annotations

import pickle

import pytest

from dps.testing.contracts import DatasetContract, WorkloadContract
from dps.testing.contracts.workloads import initial
from flows.config.workload import DigitsSection
from flows.workloads import (
    MLP,
    DatasetShape,
    DatasetSource,
    ParityRegression,
    SoftmaxRegression,
    Workload,
)
from tests.support.needs_torch import needs_torch

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


class TestWorkloads(WorkloadContract):
    @pytest.fixture(params=[*WORKLOADS, pytest.param("torch", marks=needs_torch)], ids=str)
    def workload(self, request: pytest.FixtureRequest) -> Workload:
        if request.param == "torch":
            from tests.support.modules import perceptron

            return perceptron(SHAPE)
        chosen: Workload = request.param
        return chosen

    def test_it_can_be_pickled(self, workload: Workload) -> None:
        assert pickle.loads(pickle.dumps(workload)) == workload  # noqa: S301


class TestDigits(DatasetContract):
    @pytest.fixture
    def dataset(self) -> DatasetSource:
        return DigitsSection(kind="digits", test_examples=100)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_parameters_have_the_dtype_asked_for(
    workload: MLP | SoftmaxRegression | ParityRegression,
) -> None:
    assert {str(array.dtype) for array in initial(workload).values()} == {workload.dtype}
