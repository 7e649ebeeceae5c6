"""Linear regression by least squares, the convex workload for targets that are numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape, check_dtype
from flows.workloads.losses import evaluate_regression

WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True, slots=True)
class LinearRegression:
    """A weight per feature, and a bias; the loss is half the mean squared error.

    Parameters
    ----------
    shape
        Of the data.
    l2
        The loss has l2/2 times the sum of squared weights (not of the bias) added to it.
    dtype
        Of the parameters and of all arithmetic: float32 or float64.
    """

    name: ClassVar[str] = "linear"
    parameters: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)
    shape: DatasetShape
    l2: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.l2 < float("inf"):
            raise ConfigurationError(f"linear: l2={self.l2}, expected 0 or more")
        check_dtype(self.name, self.dtype)

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return zeros: the problem is convex, so there is no symmetry to break."""
        return {WEIGHT: np.zeros(self.shape.features, self.dtype), BIAS: np.zeros(1, self.dtype)}

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients."""
        x = x.astype(self.dtype, copy=False)
        errors = self._predicted(params, x) - y.astype(self.dtype, copy=False)
        loss = 0.5 * float(np.mean(errors**2, dtype=np.float64))
        errors /= len(y)
        gradients = {WEIGHT: x.T @ errors, BIAS: errors.sum(keepdims=True)}
        if self.l2:
            gradients[WEIGHT] += self.l2 * params[WEIGHT]
        return loss + self._penalty(params), gradients

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return a prediction for each example."""
        return self._predicted(params, x.astype(self.dtype, copy=False))

    def evaluate(self, params: Arrays, x: Any, y: Array) -> tuple[float, float]:
        """Return the mean loss, with its penalty, and R²."""
        loss, share = evaluate_regression(lambda rows: self.predict(params, rows), x, y)
        return loss + self._penalty(params), share

    def _predicted(self, params: Arrays, x: Any) -> Array:
        found: Array = x @ params[WEIGHT]
        found += params[BIAS]
        return found

    def _penalty(self, params: Arrays) -> float:
        weight = params[WEIGHT]
        return self.l2 / 2 * float(weight @ weight) if self.l2 else 0.0
