"""The look at a model before anything runs: does it fit the data, and is its gradient one.

It computes a gradient on one batch and compares it with differences of the loss, in float64 where
the model goes along with that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import DTYPES, Array, Arrays, DatasetShape, Workload
from flows.workloads.own_code import refusing
from flows.workloads.python_model import PythonModel

DIRECTIONS = 3  # random ones, for each array
AWAY = 0.01  # how far from its initial values, which may lie on a kink, a model is looked at


@dataclass(frozen=True, slots=True)
class Precision:
    """How closely gradients and differences of the loss must agree.

    Attributes
    ----------
    steps
        Lengths of the steps that the loss is compared over; one of them has to do.
    tolerance
        Of the difference, as a share of the larger, or of `floor` if that is larger.
    floor
        As a share of the loss.
    """

    steps: tuple[float, ...]
    tolerance: float
    floor: float


PRECISIONS = {
    "float64": Precision((1e-5, 1e-6, 1e-7), 1e-4, 1e-4),
    "float32": Precision((3e-2, 1e-2, 3e-3), 0.05, 1e-2),
}


def check_model(workload: Workload, name: str, x: Any, y: Array) -> str:
    """Check a model on one batch, and say what was checked.

    Parameters
    ----------
    name
        What messages call it.
    x, y
        The batch.

    Raises
    ------
    ConfigurationError
        It fails, does not fit the data, writes into what it is given, has a loss that is not
        finite, or gives another gradient for the same batch; or, of a model of one's own, the
        gradient is none of its loss.
    """
    params = _initial(workload, name)
    _protect(params, x, y)
    first = _gradient(workload, name, params, x, y)
    second = _gradient(workload, name, params, x, y)
    _fits(name, params, first[1])
    if first[0] != second[0] or any(not _same(first[1][n], second[1][n]) for n in params):
        raise ConfigurationError(
            f"{name}: gradient gives another result for the same parameters and batch when it is "
            "called again; it must depend on nothing else"
        )
    _scores(workload, name, params, x)
    told = f"{len(params)} arrays, {sum(array.size for array in params.values()):,} parameters"
    if isinstance(workload, PythonModel):
        told += f"; {_differences(workload, name, params, x, y)}"
    return f"{name}: {told}"


def example_batch(shape: DatasetShape, rows: int) -> tuple[Array, Array]:
    """Return random examples of a shape, where no data need be loaded to check a model."""
    rng = np.random.default_rng(0)
    x = rng.random((rows, shape.features)).astype(np.float32)
    return x, rng.integers(0, shape.classes, rows)


# -- parts -----------------------------------------------------------------------------------------


def _initial(workload: Workload, name: str) -> Arrays:
    with refusing(name, "cannot draw its initial parameters"):
        first, second = (workload.initial(np.random.default_rng(1)) for _ in range(2))
    if not first:
        raise ConfigurationError(f"{name}: initial gives no parameters")
    for key, array in first.items():
        if not isinstance(key, str) or not key:
            raise ConfigurationError(f"{name}: initial names an array {key!r}, expected a text")
        if array.dtype not in DTYPES or not array.size:
            raise ConfigurationError(
                f"{name}: the initial {key!r} is {array.dtype}{list(array.shape)}, expected "
                f"{' or '.join(DTYPES)}, and one element at least"
            )
        if not np.isfinite(array).all():
            raise ConfigurationError(f"{name}: the initial {key!r} has NaN or infinity in it")
    if first.keys() != second.keys() or any(not _same(first[n], second[n]) for n in first):
        raise ConfigurationError(
            f"{name}: initial gives other values for the same seed; draw from the generator that "
            "it is given, and from nothing else"
        )
    return first


def _protect(params: Arrays, x: Any, y: Array) -> None:
    for array in (*params.values(), x if isinstance(x, np.ndarray) else x.data, y):
        array.flags.writeable = False


def _gradient(
    workload: Workload, name: str, params: Arrays, x: Any, y: Array
) -> tuple[float, Arrays]:
    batch = f"x of shape {x.shape} and classes up to {y.max()}"
    with refusing(name, f"cannot compute a gradient for {batch}"):
        loss, gradients = workload.gradient(dict(params), x, y)
        found = float(loss), dict(gradients)
    if not math.isfinite(found[0]):
        raise ConfigurationError(
            f"{name}: the loss for {batch} is {found[0]}, expected a finite number"
        )
    return found


def _fits(name: str, params: Arrays, gradients: Arrays) -> None:
    if gradients.keys() != params.keys():
        raise ConfigurationError(
            f"{name}: the gradients are named {', '.join(map(repr, gradients))}, the parameters "
            f"{', '.join(map(repr, params))}"
        )
    for key, array in params.items():
        found = gradients[key]
        if found.shape != array.shape or found.dtype != array.dtype:
            raise ConfigurationError(
                f"{name}: the gradient of {key!r} is {found.dtype}{list(found.shape)}, expected "
                f"that of its parameter, {array.dtype}{list(array.shape)}"
            )
        if not np.isfinite(found).all():
            raise ConfigurationError(f"{name}: the gradient of {key!r} has NaN or infinity in it")


def _scores(workload: Any, name: str, params: Arrays, x: Any) -> None:
    """Check what a model predicts, if it says so."""
    if not hasattr(workload, "predict"):
        return
    with refusing(name, "cannot predict"):
        found = workload.predict(dict(params), x)
    expected = (x.shape[0], workload.shape.classes)
    if workload.shape.regression:
        what = "a prediction for each example"
    else:
        what = "a row for each example, with a score for each class"
    if found.shape != expected or found.dtype.kind not in "fiu" or not np.isfinite(found).all():
        raise ConfigurationError(
            f"{name}: it predicts {found.dtype}{list(found.shape)} for a batch, expected finite "
            f"scores {list(expected)}: {what}"
        )


def _differences(workload: PythonModel, name: str, params: Arrays, x: Any, y: Array) -> str:
    """Compare the gradient with differences of the loss along random directions."""
    rng = np.random.default_rng(2)
    wide = {key: array.astype(np.float64) for key, array in params.items()}
    for array in wide.values():
        array += AWAY * rng.standard_normal(array.shape)
    wide_x = x.astype(np.float64)
    dtype = "float64"
    try:
        gradients = _fitting(workload, name, wide, wide_x, y)
    except ConfigurationError:  # it does not go along: what is said tells so
        dtype, wide_x = "float32", x
        wide = {key: array.astype(params[key].dtype) for key, array in wide.items()}
        gradients = _fitting(workload, name, wide, x, y)
    precision, worst = PRECISIONS[dtype], 0.0
    for key, array in wide.items():
        for _ in range(DIRECTIONS):
            drawn = rng.standard_normal(array.shape)
            direction = drawn / np.linalg.norm(drawn)
            said = float(np.sum(gradients[key].astype(np.float64) * direction))
            error, seen = min(
                _error(workload, name, wide, key, direction, step, said, precision, wide_x, y)
                for step in precision.steps
            )
            worst = max(worst, error)
            if not error <= precision.tolerance:
                raise ConfigurationError(
                    f"{name}: the gradient of {key!r} is not that of the loss: along a random "
                    f"direction it says {said:.6g}, and the loss changes by {seen:.6g} (in "
                    f"{dtype}; they may differ by {precision.tolerance:.2%})"
                )
    return f"its gradient agrees with differences of its loss to {worst:.0e} ({dtype})"


def _fitting(workload: Workload, name: str, params: Arrays, x: Any, y: Array) -> Arrays:
    """Return gradients that fit their parameters; raise `ConfigurationError` if they do not."""
    _, gradients = _gradient(workload, name, params, x, y)
    _fits(name, params, gradients)
    return gradients


def _error(
    workload: PythonModel,
    name: str,
    params: Arrays,
    key: str,
    direction: Array,
    step: float,
    said: float,
    precision: Precision,
    x: Any,
    y: Array,
) -> tuple[float, float]:
    """How far a directional derivative is from a central difference, and that difference."""
    losses = []
    for sign in (1, -1):
        moved = (params[key] + sign * step * direction).astype(params[key].dtype)
        losses.append(_gradient(workload, name, {**params, key: moved}, x, y)[0])
    seen = (losses[0] - losses[1]) / (2 * step)
    scale = max(abs(said), abs(seen), precision.floor * max(map(abs, losses)), 1e-12)
    return abs(said - seen) / scale, seen


def _same(first: Array, second: Array) -> bool:
    return bool(np.array_equal(first, second))
