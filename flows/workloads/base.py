"""Workloads and data sets, and the order in which examples are drawn."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Part = Literal["train", "test", "both"]
Score = Callable[[Array, Array], float]  # of predictions and targets

EVALUATION_ROWS = 1024  # keeps a chunk's activations in cache, and memory independent of the data


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """Properties of the data that a model needs: values per example, and number of classes.

    Attributes
    ----------
    sparse
        Whether examples are a `scipy.sparse.csr_array` instead of rows of numpy.
    regression
        Whether targets are numbers instead of classes; then `classes` is 1, the one value that is
        predicted.
    """

    features: int
    classes: int
    sparse: bool = False
    regression: bool = False


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples: one row of float32 each, and an int64 class from 0; or a float32 target.

    A part that was not loaded has no rows. Sparse rows are a `scipy.sparse.csr_array`. With a
    numeric target there is one class, `regression` is true, and one unit of the scaled target is
    `target_scale` in the original unit. A user's data have `class_names`, and a `note` with the
    assumptions about their file.
    """

    name: str
    x_train: Any
    y_train: Array
    x_test: Any
    y_test: Array
    classes: int
    regression: bool = False
    target_scale: float = 1.0
    class_names: tuple[str, ...] = ()
    note: str = ""

    @property
    def shape(self) -> DatasetShape:
        """Features and classes."""
        sparse = not isinstance(self.x_train, np.ndarray)
        return DatasetShape(self.x_train.shape[1], self.classes, sparse, self.regression)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the arrays that were loaded (0.1 to 0.5 s for the whole of Fashion-MNIST)."""
        sha = hashlib.sha256()
        for part in (self.x_train, self.y_train, self.x_test, self.y_test):
            names = ("data", "indices", "indptr")
            arrays = [part] if isinstance(part, np.ndarray) else [getattr(part, n) for n in names]
            for array in arrays:
                sha.update(f"{array.dtype}{array.shape}".encode())
                sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()


class DatasetSource(Protocol):
    """Where a data set comes from: the interface of a user's own class.

    Its fields are settings, and equal settings give equal data in every process.
    """

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data, known without loading them."""
        ...

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set; a part that is not requested has no rows.

        Raises `ConfigurationError` if that cannot be done; the message describes the remedy.
        """
        ...


class Workload(Protocol):
    """A model with its loss, as pure functions of named arrays.

    None of the methods writes into its arguments, and every array returned is fresh: the caller may
    keep it, change it or send it later. Implementations are immutable, so they are thread-safe.
    """

    @property
    def name(self) -> str:
        """The workload's name, as in a configuration."""
        ...

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of `initial`."""
        ...

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw initial parameters; the same state of `rng` gives the same values."""
        ...

    def gradient(self, params: Arrays, x: Any, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over a batch, and its gradient for every parameter.

        Gradients have the names, shapes and dtypes of the parameters.
        """
        ...

    def evaluate(self, params: Arrays, x: Any, y: Array) -> tuple[float, float]:
        """Return the mean loss and the accuracy, in [0, 1], over one or more examples."""
        ...


class Predictor:
    """A workload with predictions, so that any score can be computed from them."""

    shape: DatasetShape

    @abstractmethod
    def predict(self, params: Arrays, x: Any) -> Array:
        """Return scores, examples × classes; for regression a prediction for each, examples × 1."""

    @abstractmethod
    def mean_loss(self, params: Arrays, x: Any, y: Array, predictions: Array) -> float:
        """Return the mean loss over examples, given what is predicted for them."""

    def targets(self, y: Array) -> Array:
        """Return the targets of predictions, given those of the data."""
        return y

    def evaluate(
        self, params: Arrays, x: Any, y: Array, score: Score | None = None
    ) -> tuple[float, float]:
        """Return the mean loss, and a score: by default the accuracy, or for regression R²."""
        if not len(y):
            raise ValueError("no examples to evaluate: load the test part of the data set")
        starts = range(0, len(y), EVALUATION_ROWS)
        # A copy of each: a user's model may return the same array again.
        parts = [np.array(self.predict(params, x[s : s + EVALUATION_ROWS])) for s in starts]
        predictions = np.concatenate(parts)
        score = score or (r_squared if self.shape.regression else accuracy)
        return self.mean_loss(params, x, y, predictions), score(predictions, self.targets(y))


def accuracy(predictions: Array, y: Array) -> float:
    """Return the share of examples whose class has the largest score."""
    return float(np.mean(predictions.argmax(axis=1) == y))


def r_squared(predictions: Array, y: Array) -> float:
    """Return the share of the variance of `y` that is explained, 0 where errors are larger."""
    targets = y.astype(np.float64)
    unexplained = np.sum((predictions.reshape(len(y)).astype(np.float64) - targets) ** 2)
    variance = np.sum((targets - targets.mean()) ** 2)
    if not variance or not unexplained < variance:  # also where it is not finite
        return 0.0
    return float(1 - unexplained / variance)


def rmse(predictions: Array, y: Array) -> float:
    """Return the root of the mean squared error."""
    errors = predictions.reshape(len(y)).astype(np.float64) - y
    return float(np.sqrt(np.mean(errors**2)))


def auc(predictions: Array, y: Array) -> float:
    """Return the area under the ROC curve of two classes; 0 where scores are not finite.

    Raises `ValueError` if examples are all of one class.
    """
    from sklearn.metrics import roc_auc_score

    scores = predictions[:, 1] - predictions[:, 0]
    if y.min() == y.max():
        raise ValueError("AUC needs examples of both classes")
    return float(roc_auc_score(y, scores)) if np.isfinite(scores).all() else 0.0


def batches(rng: np.random.Generator, n: int, batch_size: int) -> Iterator[Array]:
    """Yield indices of random batches of exactly `batch_size` of `n` examples, without end.

    Every epoch is a new shuffle; the examples that do not fill a last batch sit that epoch out.
    """
    if not 1 <= batch_size <= n:
        raise ConfigurationError(f"batch_size={batch_size}, expected 1 to {n} (all examples)")
    while True:
        order = rng.permutation(n)
        for start in range(0, n - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
