"""The multilayer perceptron: dense layers with ReLU between them.

Its loss is the softmax cross-entropy, or half the mean squared error where targets are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape, check_dtype
from flows.workloads.losses import (
    cross_entropy_gradient,
    evaluate,
    evaluate_regression,
    kept,
    squared_gradient,
)


@dataclass(frozen=True, slots=True)
class MLP:
    """A classifier, or for regression one output, with any number of hidden layers.

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
            raise ConfigurationError(f"mlp: hidden={list(self.hidden)}, expected widths above 0")
        check_dtype(self.name, self.dtype)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of weights and biases, layer by layer."""
        return tuple(f(layer) for layer in range(self.layers) for f in (_weight, _bias))

    @property
    def layers(self) -> int:
        """Number of layers with weights."""
        return len(self.hidden) + 1

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw weights from N(0, 2 / inputs) (He et al. 2015); biases start at zero."""
        params: Arrays = {}
        widths = (self.shape.features, *self.hidden, self.shape.classes)
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            # Drawn in float64 whatever the dtype, so that both dtypes start from the same model.
            weight = rng.standard_normal((inputs, outputs))
            weight *= np.sqrt(2 / inputs)
            params[_weight(layer)] = weight.astype(self.dtype, copy=False)
            params[_bias(layer)] = np.zeros(outputs, self.dtype)
        return params

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients, by backpropagation."""
        inputs = self._forward(params, x)
        delta = inputs.pop()
        loss = (squared_gradient if self.shape.regression else cross_entropy_gradient)(delta, y)
        gradients: Arrays = {}
        for layer in reversed(range(self.layers)):
            gradients[_bias(layer)] = delta.sum(axis=0)
            gradients[_weight(layer)] = inputs[layer].T @ delta
            if layer:
                delta = delta @ params[_weight(layer)].T
                delta *= inputs[layer] > 0
        return loss, {name: gradients[name] for name in params}

    def evaluate(
        self, params: Arrays, x: Array, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss and the accuracy; for regression, R²."""
        score = evaluate_regression if self.shape.regression else evaluate
        return score(kept(lambda rows: self.predict(params, rows), predictions), x, y)

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the scores or predictions, examples × classes."""
        return self._forward(params, x)[-1]

    def _forward(self, params: Arrays, x: Array) -> list[Array]:
        """Return the input of every layer and, last, the logits."""
        values = [x.astype(self.dtype, copy=False)]
        for layer in range(self.layers):
            out = values[-1] @ params[_weight(layer)]
            out += params[_bias(layer)]
            if layer < self.layers - 1:
                np.maximum(out, 0, out=out)
            values.append(out)
        return values


def _weight(layer: int) -> str:
    return f"layer{layer}.weight"


def _bias(layer: int) -> str:
    return f"layer{layer}.bias"
