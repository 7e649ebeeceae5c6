"""Checks of a user's model on one batch before anything runs: shapes, repeatability, gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dps.core.blocks import Layout
from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape, Predictor, Workload
from flows.workloads.own_code import refusing
from flows.workloads.python_model import PythonModel

AWAY = 0.01  # distance from the initial values, which may lie on a kink
STEPS = (1e-5, 1e-6, 1e-7)  # sizes of the differences; one of them has to agree
TOLERANCE = 1e-4  # as a share of the larger value, or of a ten-thousandth of the loss


def check_model(workload: Workload, name: str, x: Any, y: Array) -> str:
    """Check a model on one batch, and return a one-line summary of the check.

    Raises `ConfigurationError`, with the `name` of the model, if it fails, does not fit the data,
    writes into its arguments, has a loss that is not finite, or gives another gradient for the same
    batch; or the gradient of a user's model is not that of its loss.
    """
    with refusing(name, "cannot draw its initial parameters"):
        params, again = (workload.initial(np.random.default_rng(1)) for _ in range(2))
    try:
        Layout.of(params, 1)
    except ConfigurationError as error:  # servers do not accept these arrays
        raise ConfigurationError(f"{name}: initial: {error}") from error
    if not _same(params, again):
        raise ConfigurationError(
            f"{name}: initial returns different values for the same seed; use only the random "
            "generator that it receives"
        )
    for array in (*params.values(), x if isinstance(x, np.ndarray) else x.data, y):
        array.flags.writeable = False
    first, second = (_gradient(workload, name, params, x, y) for _ in range(2))
    if first[0] != second[0] or not _same(first[1], second[1]):
        raise ConfigurationError(
            f"{name}: gradient returns different results for the same parameters and batch; it "
            "must depend on these only"
        )
    if isinstance(workload, Predictor):
        with refusing(name, "cannot predict"):
            predicted = workload.predict(dict(params), x)
        expected = [x.shape[0], workload.shape.classes]
        numeric = predicted.dtype.kind in "fiu" and np.isfinite(predicted).all()
        if [*predicted.shape] != expected or not numeric:
            raise ConfigurationError(
                f"{name} predicts {predicted.dtype}{list(predicted.shape)} for a batch, expected "
                f"finite scores {expected}: one per example and class, or one prediction each"
            )
    line = f"{len(params)} arrays, {sum(array.size for array in params.values()):,} parameters"
    if isinstance(workload, PythonModel):
        line += f"; {_compare(workload, name, params, x, y)}"
    return f"{name}: {line}"


def example_batch(shape: DatasetShape, rows: int) -> tuple[Array, Array]:
    """Return random examples of a shape, where no data need be loaded to check a model."""
    rng = np.random.default_rng(0)
    x = rng.random((rows, shape.features)).astype(np.float32)
    return x, rng.integers(0, shape.classes, rows)


def _same(first: Arrays, second: Arrays) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(array, second[name]) for name, array in first.items()
    )


def _gradient(
    workload: Workload, name: str, params: Arrays, x: Any, y: Array
) -> tuple[float, Arrays]:
    """Return the loss and gradients that fit their parameters; raise if they do not."""
    batch = f"x of shape {x.shape} and classes up to {y.max()}"
    with refusing(name, f"cannot compute a gradient for {batch}"):
        loss, gradients = workload.gradient(dict(params), x, y)
        loss, gradients = float(loss), dict(gradients)
    if not math.isfinite(loss):
        raise ConfigurationError(
            f"{name}: the loss for {batch} is {loss}, expected a finite number"
        )
    if gradients.keys() != params.keys():
        raise ConfigurationError(
            f"{name}: the gradients are named {', '.join(map(repr, gradients))}, expected the "
            f"names of the parameters: {', '.join(map(repr, params))}"
        )
    for key, array in params.items():
        gradient = gradients[key]
        if gradient.shape != array.shape or gradient.dtype != array.dtype:
            raise ConfigurationError(
                f"{name}: the gradient of {key!r} is {gradient.dtype}{list(gradient.shape)}, "
                f"expected {array.dtype}{list(array.shape)}, as its parameter"
            )
        if not np.isfinite(gradient).all():
            raise ConfigurationError(f"{name}: the gradient of {key!r} holds NaN or infinity")
    return loss, gradients


def _compare(workload: Workload, name: str, params: Arrays, x: Any, y: Array) -> str:
    """Compare the gradient with differences of the loss along random directions, in float64."""
    rng, batch = np.random.default_rng(2), x.astype(np.float64)
    point = {
        key: array.astype(np.float64) + AWAY * rng.standard_normal(array.shape)
        for key, array in params.items()
    }
    try:
        _, gradients = _gradient(workload, name, point, batch, y)
    except ConfigurationError:
        return "gradient not compared with the loss: the model does not support float64"
    worst = 0.0
    for key, array in point.items():
        direction = rng.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)
        slope = float(np.sum(gradients[key] * direction))
        errors = []
        for step in STEPS:
            moved = ({**point, key: array + s * direction} for s in (step, -step))
            up, down = (_gradient(workload, name, each, batch, y)[0] for each in moved)
            seen = (up - down) / (2 * step)
            scale = max(abs(slope), abs(seen), 1e-4 * max(abs(up), abs(down)), 1e-12)
            errors.append((abs(slope - seen) / scale, seen))
        error, seen = min(errors)
        worst = max(worst, error)
        if not error <= TOLERANCE:
            raise ConfigurationError(
                f"{name}: the gradient of {key!r} is {slope:.6g} along a random direction, but "
                f"the loss changes by {seen:.6g}; expected a difference of at most {TOLERANCE:.2%}"
            )
    return f"gradient and differences of the loss agree to {worst:.0e}"
