"""The contracts of workloads and data sets, for each that dps has."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from flows.workloads import (
    MLP,
    DatasetShape,
    DatasetSource,
    Digits,
    ParityRegression,
    SoftmaxRegression,
    Workload,
)
from flows.workloads.base import Predictor
from tests.contracts.datasets import DatasetContract
from tests.contracts.workloads import Data, WorkloadContract, trained
from tests.support.needs_torch import needs_torch

SHAPE = DatasetShape(features=12, classes=4)

WORKLOADS: list[MLP | SoftmaxRegression | ParityRegression] = [
    MLP(SHAPE),
    MLP(SHAPE, hidden=(), dtype="float64"),
    MLP(SHAPE, hidden=(9, 1, 5)),
    MLP(SHAPE, hidden=(7,), dtype="float64"),
    SoftmaxRegression(SHAPE),
    SoftmaxRegression(SHAPE, dtype="float64"),
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

    def test_scores_are_of_what_is_predicted(self, workload: Predictor, data: Data) -> None:
        x, y = (np.concatenate([array] * 6) for array in data)  # more than one chunk
        params = trained(workload, data, steps=3)
        seen: list[np.ndarray] = []

        def score(predictions: np.ndarray, targets: np.ndarray) -> float:
            seen.append(predictions)
            return 0.5

        assert workload.evaluate(params, x, y, score)[1] == 0.5
        np.testing.assert_allclose(seen[0], workload.predict(params, x), rtol=1e-5, atol=1e-6)

    def test_it_can_be_pickled(self, workload: Workload) -> None:
        assert pickle.loads(pickle.dumps(workload)) == workload  # noqa: S301


class TestDigits(DatasetContract):
    @pytest.fixture
    def dataset(self) -> DatasetSource:
        return Digits(test_examples=100)
