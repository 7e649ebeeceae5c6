"""Gradients against finite differences, and initial values."""

from __future__ import annotations

import numpy as np
import pytest

from flows.workloads import MLP, DatasetShape, ParityRegression, SoftmaxRegression, Workload

SHAPE = DatasetShape(features=6, classes=3)


@pytest.mark.parametrize(
    "workload",
    [
        MLP(DatasetShape(6, 1, regression=True), hidden=(5, 4), dtype="float64"),
        MLP(SHAPE, hidden=(5,), dtype="float64"),
        MLP(SHAPE, hidden=(8, 4, 7), dtype="float64"),
        SoftmaxRegression(SHAPE, dtype="float64"),
        ParityRegression(SHAPE, dtype="float64"),
    ],
    ids=str,
)
def test_gradients_equal_central_finite_differences(workload: Workload) -> None:
    rng = np.random.default_rng(11)
    x, y = rng.normal(size=(20, SHAPE.features)), rng.integers(0, SHAPE.classes, 20)
    params = {
        name: array + 0.1 * rng.normal(size=array.shape)
        for name, array in workload.initial(rng).items()
    }
    _, gradients = workload.gradient(params, x, y)

    def loss_with(name: str, index: int, change: float) -> float:
        changed = params[name].copy()
        changed.flat[index] += change
        return workload.gradient({**params, name: changed}, x, y)[0]

    step = 1e-6
    for name, gradient in gradients.items():
        differences = [
            (loss_with(name, i, step) - loss_with(name, i, -step)) / (2 * step)
            for i in range(gradient.size)
        ]
        np.testing.assert_allclose(gradient.ravel(), differences, rtol=1e-6, atol=1e-8)


def test_he_initialisation() -> None:
    workload = MLP(DatasetShape(features=400, classes=10), hidden=(300, 200))
    params = workload.initial(np.random.default_rng(0))
    assert {name: array.shape for name, array in params.items()} == {
        "layer0.weight": (400, 300),
        "layer0.bias": (300,),
        "layer1.weight": (300, 200),
        "layer1.bias": (200,),
        "layer2.weight": (200, 10),
        "layer2.bias": (10,),
    }
    for layer, inputs in enumerate((400, 300, 200)):
        weight = params[f"layer{layer}.weight"]
        assert weight.std() == pytest.approx(np.sqrt(2 / inputs), rel=0.05)
        assert weight.mean() == pytest.approx(0, abs=0.01)
        assert not params[f"layer{layer}.bias"].any()
