"""What every workload and data set looks like, and the order in which examples are drawn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

DTYPES = ("float32", "float64")


def check_dtype(workload: str, dtype: str) -> None:
    """Refuse a dtype that parameters cannot have."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"{workload}: dtype={dtype}, expected {' or '.join(DTYPES)}")


class Workload(Protocol):
    """A model with its loss, as pure functions of named arrays.

    None of the methods writes into what it is given, and every array returned is fresh: the caller
    may keep it, change it or send it later. Implementations are immutable, so they are thread-safe.
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

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over a batch, and its gradient for every parameter.

        Gradients have the names, shapes and dtypes of the parameters.
        """
        ...

    def evaluate(self, params: Arrays, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss and the accuracy, in [0, 1], over one or more examples."""
        ...


class Predicts(Workload, Protocol):
    """A workload that says what it predicts, so that any score can be computed from that."""

    def predict(self, params: Arrays, x: Any) -> Array:
        """Return scores, examples × classes; for regression a prediction for each, examples × 1."""
        ...

    def evaluate(
        self, params: Arrays, x: Any, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss, and the accuracy, or for regression R².

        What `predict` returns for these examples is appended to `predictions`, in parts: it is
        computed for the loss already.
        """
        ...


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """All that a model needs to know of its data: values per example, and number of classes.

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

    A part that was not loaded has no rows. Sparse rows are a `scipy.sparse.csr_array`. With targets
    that are numbers there is one class, and `regression` is true; one unit of them was
    `target_scale` before they were scaled.
    """

    name: str
    x_train: Any
    y_train: Array
    x_test: Any
    y_test: Array
    classes: int
    regression: bool = False
    target_scale: float = 1.0

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
            for array in _dense_arrays(part):
                sha.update(f"{array.dtype}{array.shape}".encode())
                sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()


def _dense_arrays(part: Any) -> tuple[Array, ...]:
    """An array, or those that a sparse one is made of."""
    return (part,) if isinstance(part, np.ndarray) else (part.data, part.indices, part.indptr)


def side_of_images(shape: DatasetShape) -> int:
    """Return the side of the images that the workload `cnn` takes, in pixels.

    Raises
    ------
    ConfigurationError
        The examples are no such images.
    """
    side = math.isqrt(shape.features)
    if side * side != shape.features or side % 4:
        raise ConfigurationError(
            f"cnn: images of {shape.features} pixels, expected squares with sides that are "
            "multiples of 4"
        )
    return side


def batches(rng: np.random.Generator, n: int, batch_size: int) -> Iterator[Array]:
    """Yield indices of random batches of exactly `batch_size` of `n` examples, without end.

    Every epoch is a new shuffle; the examples that do not fill a last batch sit that epoch out.

    Raises
    ------
    ConfigurationError
        The batch is empty, or larger than the data set.
    """
    if not 1 <= batch_size <= n:
        raise ConfigurationError(f"batch_size={batch_size}, expected 1 to {n} (all examples)")
    return _shuffled(rng, n, batch_size)


def _shuffled(rng: np.random.Generator, n: int, batch_size: int) -> Iterator[Array]:
    while True:
        order = rng.permutation(n)
        for start in range(0, n - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
