"""The multilayer perceptron, softmax regression (one without hidden layers), logistic regression.

The loss is the cross-entropy, or half the mean squared error where targets are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from dps.core import ranges
from flows.workloads.base import Array, Arrays, DatasetShape, Predictor


@dataclass(frozen=True)
class MLP(Predictor):
    """Dense layers with ReLU between them: a classifier, or for regression one output.

    Parameters
    ----------
    shape
        Of the data.
    hidden
        Width of each hidden layer, from the input on.
    dtype
        Of the parameters and of all arithmetic: float32 or float64.
    """

    name: ClassVar[str] = "mlp"
    shape: DatasetShape
    hidden: Sequence[int] = (32,)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if any(width < 1 for width in self.hidden):
            raise ranges.refused("hidden", list(self.hidden), "widths of 1 or more")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of weights and biases, layer by layer."""
        layers = range(len(self.hidden) + 1)
        return tuple(name for layer in layers for name in _names(layer))

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw weights from N(0, 2 / inputs) (He et al. 2015); biases start at zero."""
        params: Arrays = {}
        widths = (self.shape.features, *self.hidden, self.shape.classes)
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            weight, bias = _names(layer)
            # Drawn in float64 for every dtype, so that both dtypes start from the same model.
            drawn = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
            params[weight] = drawn.astype(self.dtype)
            params[bias] = np.zeros(outputs, self.dtype)
        return params

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients, by backpropagation."""
        inputs = self._forward(params, x)
        loss, delta = self._loss(inputs.pop(), y)
        gradients: Arrays = {}
        for layer in reversed(range(len(self.hidden) + 1)):
            weight, bias = _names(layer)
            gradients[bias] = delta.sum(axis=0)
            gradients[weight] = inputs[layer].T @ delta
            if layer:
                delta = delta @ params[weight].T
                delta *= inputs[layer] > 0
        return loss, {name: gradients[name] for name in params}

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return the scores or predictions, examples × classes."""
        predictions: Array = self._forward(params, x)[-1]
        return predictions

    def mean_loss(self, params: Arrays, x: Any, y: Array, predictions: Array) -> float:
        """Return the mean loss over examples."""
        return self._loss(predictions.copy(), y)[0]

    def _forward(self, params: Arrays, x: Any) -> list[Any]:
        """Return the input of every layer and, last, the predictions."""
        values = [x.astype(self.dtype, copy=False)]
        for layer in range(len(self.hidden) + 1):
            weight, bias = _names(layer)
            out = values[-1] @ params[weight]
            out += params[bias]
            if layer < len(self.hidden):
                np.maximum(out, 0, out=out)
            values.append(out)
        return values

    def _loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """Return the mean loss, and its gradient for the predictions, which are overwritten."""
        if self.shape.regression:
            out -= y.astype(out.dtype, copy=False).reshape(out.shape)
            loss = 0.5 * float(np.mean(out**2, dtype=np.float64))
        else:
            rows = np.arange(len(y))
            out -= out.max(axis=1, keepdims=True)
            of_class = out[rows, y]
            np.exp(out, out=out)
            total = out.sum(axis=1)
            out /= total[:, None]
            loss = float((np.log(total) - of_class).mean(dtype=np.float64))
            out[rows, y] -= 1
        out /= len(y)
        return loss, out


@dataclass(frozen=True)
class SoftmaxRegression(MLP):
    """A linear classifier with softmax cross-entropy, starting from zeros: a convex problem."""

    name: ClassVar[str] = "softmax"
    hidden: Sequence[int] = field(default=(), init=False, repr=False)

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return zeros: the problem is convex, so there is no symmetry to break."""
        return {name: np.zeros_like(array) for name, array in super().initial(rng).items()}


def _names(layer: int) -> tuple[str, str]:
    return f"layer{layer}.weight", f"layer{layer}.bias"


WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True)
class ParityRegression(Predictor):
    """Logistic regression that distinguishes odd classes from even ones (Pampari and Patel).

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

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return zeros: the problem is convex, so there is no symmetry to break."""
        return {WEIGHT: np.zeros(self.shape.features, self.dtype), BIAS: np.zeros(1, self.dtype)}

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean logistic loss over the batch, and the gradients."""
        x, odd = x.astype(self.dtype, copy=False), self.targets(y)
        scores = x @ params[WEIGHT] + params[BIAS]
        # exp(-log(1 + exp(-s))) is the sigmoid without overflow on either side.
        delta = np.exp(-np.logaddexp(0, -scores)) - odd
        delta /= len(y)
        gradients = {WEIGHT: x.T @ delta, BIAS: delta.sum(keepdims=True)}
        return _logistic_loss(scores, odd), gradients

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return the scores of the even and of the odd classes, examples × 2."""
        scores = x.astype(self.dtype, copy=False) @ params[WEIGHT] + params[BIAS]
        return np.column_stack([np.zeros_like(scores), scores])

    def mean_loss(self, params: Arrays, x: Any, y: Array, predictions: Array) -> float:
        """Return the mean logistic loss over examples."""
        return _logistic_loss(predictions[:, 1], self.targets(y))

    def targets(self, y: Array) -> Array:
        """Return 1 for odd classes, 0 for even ones."""
        return (y % 2).astype(self.dtype)


def _logistic_loss(scores: Array, odd: Array) -> float:
    losses = np.logaddexp(0, scores) - odd * scores
    return float(losses.mean(dtype=np.float64))
