"""Softmax (multinomial logistic) regression, the convex workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape, check_dtype
from flows.workloads.mlp import MLP

WEIGHT, BIAS = "layer0.weight", "layer0.bias"


@dataclass(frozen=True, slots=True)
class SoftmaxRegression:
    """A linear classifier with softmax cross-entropy, starting from zeros.

    Parameters
    ----------
    shape
        Of the data.
    l2
        The loss has l2/2 times the sum of squared weights (not biases) added to it.
    dtype
        Of the parameters and of all arithmetic: float32 or float64.
    """

    name: ClassVar[str] = "softmax"
    parameters: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)
    shape: DatasetShape
    l2: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.l2 < float("inf"):
            raise ConfigurationError(f"softmax: l2={self.l2}, expected 0 or more")
        check_dtype(self.name, self.dtype)

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return zeros: the problem is convex, so there is no symmetry to break."""
        return {
            WEIGHT: np.zeros((self.shape.features, self.shape.classes), self.dtype),
            BIAS: np.zeros(self.shape.classes, self.dtype),
        }

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients."""
        loss, gradients = self._layer.gradient(params, x, y)
        if self.l2:
            gradients[WEIGHT] += self.l2 * params[WEIGHT]
        return loss + self._penalty(params), gradients

    def evaluate(self, params: Arrays, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss, with its penalty, and the accuracy."""
        loss, accuracy = self._layer.evaluate(params, x, y)
        return loss + self._penalty(params), accuracy

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the scores, examples × classes."""
        return self._layer.predict(params, x)

    @property
    def _layer(self) -> MLP:
        return MLP(self.shape, (), self.dtype)

    def _penalty(self, params: Arrays) -> float:
        weight = params[WEIGHT].reshape(-1)
        return self.l2 / 2 * float(weight @ weight) if self.l2 else 0.0
