"""A model of one's own as a workload: a class that is given the shape of the data.

What it has to have is `initial`, `gradient` and `predict`; loss and score are computed from these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape
from flows.workloads.losses import EVALUATION_ROWS, r_squared
from flows.workloads.own_code import OwnCode, refusing

METHODS = ("initial", "gradient", "predict")


class Model(Protocol):
    """What a class of one's own has; it is called with the shape of the data, and its settings.

    Parameters are float32 or float64. None of the methods may write into what it is given.
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
        """Return scores, examples × classes; the class with the largest is what is predicted.

        For regression, return a prediction for each example, of one dimension or two.
        """
        ...


@dataclass(frozen=True)
class PythonModel:
    """A workload whose model is a class of one's own.

    Only its name travels: each process makes the model anew.

    Parameters
    ----------
    shape
        Of the data.
    code
        The class.
    settings
        What it is given besides the shape, by name, as JSON.
    """

    name: ClassVar[str] = "python"
    shape: DatasetShape
    code: OwnCode
    settings: str = "{}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the model behind: another process makes its own."""
        return PythonModel, (self.shape, self.code, self.settings)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of `initial`."""
        return tuple(self.initial(np.random.default_rng(0)))

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw initial parameters as the model does."""
        drawn: Arrays = dict(self.model.initial(rng))
        return {name: np.array(array) for name, array in drawn.items()}

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and copies of the model's gradients."""
        loss, gradients = self.model.gradient(params, x, y)
        return float(loss), {name: np.array(gradient) for name, gradient in gradients.items()}

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return the model's scores or predictions, examples × classes."""
        found = np.asarray(self.model.predict(params, x))
        return found[:, None] if self.shape.regression and found.ndim == 1 else found

    def evaluate(
        self, params: Arrays, x: Any, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss and the accuracy; for regression, R²."""
        if not len(y):
            raise ValueError("no examples to evaluate: was this part of the data set loaded?")
        loss, right, errors = 0.0, 0, []
        for start in range(0, len(y), EVALUATION_ROWS):
            rows, labels = x[start : start + EVALUATION_ROWS], y[start : start + EVALUATION_ROWS]
            mean, _ = self.model.gradient(params, rows, labels)
            loss += float(mean) * len(labels)
            predicted = self.predict(params, rows)
            if predictions is not None:
                predictions.append(predicted.copy())  # the model may return the same array again
            if self.shape.regression:
                errors.append(predicted[:, 0] - labels)
            else:
                right += int(np.count_nonzero(predicted.argmax(axis=1) == labels))
        share = r_squared(np.concatenate(errors), y) if errors else right / len(y)
        return loss / len(y), share

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
