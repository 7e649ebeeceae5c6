"""Gradients against finite differences, initial values, and hyperparameters that cannot work."""

from __future__ import annotations

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import (
    MLP,
    SHAPES,
    DatasetShape,
    ParityRegression,
    Rica,
    SoftmaxRegression,
    Workload,
    build_workload,
    load_dataset,
)

SHAPE = DatasetShape(features=6, classes=3)


@pytest.mark.parametrize(
    "workload",
    [
        MLP(SHAPE, hidden=(), dtype="float64"),
        MLP(SHAPE, hidden=(5,), dtype="float64"),
        MLP(SHAPE, hidden=(8, 4, 7), dtype="float64"),
        SoftmaxRegression(SHAPE, dtype="float64"),
        SoftmaxRegression(SHAPE, l2=0.3, dtype="float64"),
        ParityRegression(SHAPE, dtype="float64"),
        Rica(SHAPE, filters=4, dtype="float64"),
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


def test_float32_gradients_are_those_of_float64_rounded() -> None:
    digits = load_dataset("digits")
    single, double = (MLP(digits.shape, (32,), dtype) for dtype in ("float32", "float64"))
    params = double.initial(np.random.default_rng(0))
    rounded = {name: array.astype(np.float32) for name, array in params.items()}
    x, y = digits.x_train[:32], digits.y_train[:32]
    _, exact = double.gradient(params, x, y)
    _, found = single.gradient(rounded, x, y)
    for name, gradient in exact.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-6)


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


def test_another_seed_gives_another_perceptron() -> None:
    first, second = (MLP(SHAPE).initial(np.random.default_rng(seed)) for seed in (0, 1))
    assert not np.array_equal(first["layer0.weight"], second["layer0.weight"])


def test_both_dtypes_start_from_the_same_perceptron() -> None:
    single, double = (
        MLP(SHAPE, dtype=dtype).initial(np.random.default_rng(0))
        for dtype in ("float32", "float64")
    )
    for name, array in double.items():
        np.testing.assert_array_equal(single[name], array.astype(np.float32))


def test_workloads_are_built_by_name() -> None:
    assert build_workload("mlp", SHAPES["digits"], hidden=[16, 8]) == MLP(
        DatasetShape(64, 10), (16, 8)
    )
    assert build_workload("softmax", SHAPES["fashion_mnist"], l2=0.5) == SoftmaxRegression(
        DatasetShape(784, 10), 0.5
    )


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("mpl", {}, "workload 'mpl' is unknown; did you mean 'mlp'?"),
        (
            "transformer",
            {},
            "'transformer' is unknown; there are: mlp, softmax, logistic, linear, rica",
        ),
        ("mlp", {"hiden": [3]}, "workload mlp has no 'hiden'; did you mean 'hidden'?"),
        ("mlp", {"hidden": [3, 0]}, r"hidden=\[3, 0\], expected widths above 0"),
        ("mlp", {"dtype": "int8"}, "dtype=int8, expected float32 or float64"),
        ("softmax", {"l2": -1.0}, "l2=-1.0, expected 0 or more"),
        ("logistic", {"dtype": "float16"}, "dtype=float16, expected float32 or float64"),
        ("rica", {"filters": 0}, "filters=0, expected 1 or more"),
        ("rica", {"sparsity": -0.1}, "sparsity=-0.1, expected 0 or more"),
        ("softmax", {"dtype": "float16"}, "dtype=float16, expected float32 or float64"),
    ],
)
def test_what_cannot_work_is_refused(kind: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        build_workload(kind, SHAPE, **settings)
