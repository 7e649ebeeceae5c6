"""A model of the user's own as a workload: a class that is given the shape of the data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import EVALUATION_ROWS, Array, Arrays, DatasetShape, Predictor
from flows.workloads.own_code import OwnCode, refusing

METHODS = ("initial", "gradient", "predict")


class Model(Protocol):
    """The interface of a user's model, whose class is called with a data shape and settings.

    Parameters are float32 or float64. None of the methods may write into its arguments.
    """

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw initial parameters; the same state of `rng` gives the same values."""
        ...

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over a batch, and its gradient for every parameter.

        `x` is float32, examples × features (a `scipy.sparse.csr_array` if the data are sparse), `y`
        are int64 classes, or for regression float32 targets. Gradients have the names, shapes and
        dtypes of the parameters.
        """
        ...

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return scores, examples × classes; the class with the largest is the prediction.

        For regression, return a prediction for each example, of one dimension or two.
        """
        ...


@dataclass(frozen=True)
class PythonModel(Predictor):
    """A workload whose model is a user's class; `settings` are JSON.

    Only its name is pickled: each process creates its own model.
    """

    name: ClassVar[str] = "python"
    shape: DatasetShape
    code: OwnCode
    settings: str = "{}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the model out: another process makes its own."""
        return PythonModel, (self.shape, self.code, self.settings)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of `initial`."""
        return tuple(self.initial(np.random.default_rng(0)))

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw initial parameters as the model does."""
        return {name: np.array(array) for name, array in self.model.initial(rng).items()}

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and copies of the model's gradients."""
        loss, gradients = self.model.gradient(params, x, y)
        return float(loss), {name: np.array(gradient) for name, gradient in gradients.items()}

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return the model's scores or predictions, examples × classes."""
        predicted = np.asarray(self.model.predict(params, x))
        return predicted[:, None] if self.shape.regression and predicted.ndim == 1 else predicted

    def mean_loss(self, params: Arrays, x: Any, y: Array, predictions: Array) -> float:
        """Return the mean loss over examples, which the model computes with its gradient."""
        total = 0.0
        for start in range(0, len(y), EVALUATION_ROWS):
            part = slice(start, start + EVALUATION_ROWS)
            total += float(self.model.gradient(params, x[part], y[part])[0]) * len(y[part])
        return total / len(y)

    @cached_property
    def model(self) -> Model:
        """The model; raises `ConfigurationError` if its class cannot make it."""
        make = self.code.load()
        with refusing(self.code.reference, "cannot be made"):
            made: Model = make(self.shape, **json.loads(self.settings))
        for method in METHODS:
            if not callable(getattr(made, method, None)):
                raise ConfigurationError(
                    f"{self.code.reference} has no method {method!r}; it needs {', '.join(METHODS)}"
                )
        return made
