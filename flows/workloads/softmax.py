"""Softmax (multinomial logistic) regression, the convex workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flows.workloads.base import Array, Arrays
from flows.workloads.mlp import MLP
from flows.workloads.ridge import Ridge

WEIGHT, BIAS = "layer0.weight", "layer0.bias"


@dataclass(frozen=True, slots=True)
class SoftmaxRegression(Ridge):
    """A linear classifier with softmax cross-entropy, starting from zeros."""

    name: ClassVar[str] = "softmax"
    parameters: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the weight and of the bias."""
        return (self.shape.features, self.shape.classes), (self.shape.classes,)

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients."""
        loss, gradients = self._layer.gradient(params, x, y)
        return loss + self.penalise(params, gradients), gradients

    def evaluate(
        self, params: Arrays, x: Array, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss, with its penalty, and the accuracy."""
        loss, accuracy = self._layer.evaluate(params, x, y, predictions)
        return loss + self.penalty(params), accuracy

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the scores, examples × classes."""
        return self._layer.predict(params, x)

    @property
    def _layer(self) -> MLP:
        return MLP(self.shape, (), self.dtype)
