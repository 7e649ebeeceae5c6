"""Linear regression by least squares, the convex workload for targets that are numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flows.workloads.base import Array, Arrays
from flows.workloads.losses import evaluate_regression, kept
from flows.workloads.ridge import Ridge

WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True, slots=True)
class LinearRegression(Ridge):
    """A weight per feature, and a bias; the loss is half the mean squared error."""

    name: ClassVar[str] = "linear"
    parameters: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the weight and of the bias."""
        return (self.shape.features,), (1,)

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients."""
        x = x.astype(self.dtype, copy=False)
        errors = self._predicted(params, x) - y.astype(self.dtype, copy=False)
        loss = 0.5 * float(np.mean(errors**2, dtype=np.float64))
        errors /= len(y)
        gradients = {WEIGHT: x.T @ errors, BIAS: errors.sum(keepdims=True)}
        return loss + self.penalise(params, gradients), gradients

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return a prediction for each example."""
        return self._predicted(params, x.astype(self.dtype, copy=False))

    def evaluate(
        self, params: Arrays, x: Any, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss, with its penalty, and R²."""
        predict = kept(lambda rows: self.predict(params, rows), predictions)
        loss, share = evaluate_regression(predict, x, y)
        return loss + self.penalty(params), share

    def _predicted(self, params: Arrays, x: Any) -> Array:
        found: Array = x @ params[WEIGHT]
        found += params[BIAS]
        return found
