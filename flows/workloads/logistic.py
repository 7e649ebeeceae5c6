"""Logistic regression on the parity of the class, the workload of Pampari and Patel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flows.workloads.base import Array, Arrays, DatasetShape, check_dtype

WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True, slots=True)
class ParityRegression:
    """Tells examples of odd classes from those of even ones: a weight per feature, and a bias.

    Parameters
    ----------
    shape
        Of the data.
    dtype
        Of the parameters and of all arithmetic: float32 or float64.
    """

    name: ClassVar[str] = "logistic"
    parameters: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)
    shape: DatasetShape
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_dtype(self.name, self.dtype)

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return zeros: the problem is convex, so there is no symmetry to break."""
        return {WEIGHT: np.zeros(self.shape.features, self.dtype), BIAS: np.zeros(1, self.dtype)}

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean logistic loss over the batch, and the gradients."""
        x, odd = x.astype(self.dtype, copy=False), self._odd(y)
        scores = _scores(params, x)
        # exp(-log(1 + exp(-s))) is the sigmoid without overflow on either side.
        delta = np.exp(-np.logaddexp(0, -scores)) - odd
        delta /= len(y)
        gradients = {WEIGHT: x.T @ delta, BIAS: delta.sum(keepdims=True)}
        return float(_losses(scores, odd).mean(dtype=np.float64)), gradients

    def evaluate(
        self, params: Arrays, x: Array, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss, and the accuracy of telling odd from even."""
        if not len(y):
            raise ValueError("no examples to evaluate: was this part of the data set loaded?")
        scores, odd = _scores(params, x.astype(self.dtype, copy=False)), self._odd(y)
        loss = float(_losses(scores, odd).mean(dtype=np.float64))
        if predictions is not None:
            predictions.append(_of_classes(scores))
        return loss, float(((scores > 0) == (odd > 0)).mean())

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the scores of the even and of the odd classes, examples × 2."""
        return _of_classes(_scores(params, x.astype(self.dtype, copy=False)))

    def _odd(self, y: Array) -> Array:
        return (y % 2).astype(self.dtype)


def _scores(params: Arrays, x: Array) -> Array:
    scores: Array = x @ params[WEIGHT]
    scores += params[BIAS]
    return scores


def _of_classes(scores: Array) -> Array:
    """The scores of the even and of the odd classes, examples × 2."""
    return np.column_stack([np.zeros_like(scores), scores])


def _losses(scores: Array, odd: Array) -> Array:
    losses: Array = np.logaddexp(0, scores) - odd * scores
    return losses
