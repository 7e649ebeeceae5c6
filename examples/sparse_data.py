"""The data sets of L1-logistic regression: examples of two classes, in pieces.

A row has an example's features and perhaps a constant for the intercept, multiplied with the
example's label, −1 or +1. So the loss of an example is log(1 + exp(−row·w)). A worker generates its
share piece by piece, or reads a file and keeps its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, diags_array, hstack
from scipy.special import expit

from dps import ConfigurationError
from flows.readers import Examples, read_npz, read_svmlight

STRIDE = 0x9E3779B1  # a prime: no two ranks meet in one column
WEIGHTS = 200
OFFSET = 100.0
MAX_SHOWN = 3  # labels in a message

Array = npt.NDArray[np.float64]


class Source(Protocol):
    """Source of examples. Implementations can be pickled.

    `features` counts the intercept's column as well, and `examples` those of all workers together.
    """

    @property
    def features(self) -> int:
        """Number of columns, the intercept's among them."""
        ...

    @property
    def examples(self) -> int:
        """Number of examples of all workers together."""
        ...

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield the pieces of one of `workers` shares: float64, examples × features."""
        ...


@dataclass(frozen=True, slots=True)
class Digits:
    """Scikit-learn's digits, odd ones against even ones; features have mean 0 and variance 1."""

    @property
    def features(self) -> int:
        """Number of columns, the intercept's among them."""
        return 62  # three of the 64 pixels are the same in all images; the intercept

    @property
    def examples(self) -> int:
        """Number of examples of all workers together."""
        return 1797

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield every `workers`-th example."""
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x[:, x.std(axis=0) > 0]
        x = (x - x.mean(axis=0)) / x.std(axis=0)
        yield _signed(csr_array(x), np.where(y % 2, 1.0, -1.0), constant=1.0)[index::workers]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Examples with few features out of many, drawn piece by piece from a seed.

    How common a feature is falls with its rank as 1/(rank + 100), as that of words does (the law of
    Zipf and Mandelbrot). Values are standard normal; labels are drawn from a logistic model in
    which the 200 most common features have weights. There is no intercept.

    Parameters
    ----------
    examples, features
        Numbers of examples and features.
    seed
        Random seed.
    nonzeros
        Features of an example; those that are drawn twice are summed.
    piece
        Examples drawn at once.
    """

    examples: int
    features: int
    seed: int = 0
    nonzeros: int = 20
    piece: int = 1 << 16

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield every `workers`-th piece; no piece depends on another."""
        truth = self._truth()
        for start in range(index * self.piece, self.examples, workers * self.piece):
            count = min(self.piece, self.examples - start)
            rng = np.random.default_rng([self.seed, start])
            chance = rng.random(count * self.nonzeros)
            rank = OFFSET * np.expm1(chance * np.log1p(self.features / OFFSET))
            column = self._column(rank.astype(np.int64)).astype(np.int32)
            ends = np.arange(count + 1, dtype=np.int32) * self.nonzeros
            value = rng.standard_normal(len(rank))
            x = csr_array((value, column, ends), shape=(count, self.features))
            x.sum_duplicates()
            positive = rng.random(count) < expit(x @ truth)
            yield _signed(x, np.where(positive, 1.0, -1.0))

    def _truth(self) -> Array:
        """Return the weights of the logistic model of the labels."""
        rng = np.random.default_rng(self.seed)
        truth = np.zeros(self.features)
        chosen = self._column(np.arange(min(WEIGHTS, self.features), dtype=np.int64))
        truth[chosen] = 1.5 * rng.standard_normal(len(chosen))
        return truth

    def _column(self, rank: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the columns of features of these ranks, from 0, spread evenly over the blocks."""
        return rank * STRIDE % self.features


@dataclass(frozen=True, slots=True)
class File:
    """The examples of a file, as `survey` found them; of two labels the larger one is +1.

    The intercept's column has a `constant` equal to the largest root mean square of a feature. With
    another scale, it alone would limit the step size.
    """

    path: Path
    features: int
    examples: int
    high: float
    constant: float

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield every `workers`-th example of the file."""
        found = _read(self.path)
        x = csr_array(found.x)
        label = np.where(found.y == self.high, 1.0, -1.0)
        yield _signed(x, label, self.constant)[index::workers]


def survey(path: Path) -> File:
    """Read a file once, and return the properties that all workers need.

    Raises `ConfigurationError` if the file is invalid, or its labels do not have two values.
    """
    found = _read(path)
    labels = np.unique(found.y).tolist()
    if len(labels) != 2:
        shown = ", ".join(f"{label:g}" for label in labels[:MAX_SHOWN])
        raise ConfigurationError(
            f"{path}: expected labels of two kinds, such as -1 and 1; found: {shown}"
        )
    squares = np.asarray((csr_array(found.x) ** 2).sum(axis=0))
    largest = float(np.sqrt(squares.max() / len(found.y)))
    return File(path, len(squares) + 1, len(found.y), max(labels), largest or 1.0)


def _read(path: Path) -> Examples:
    """Read an npz file, or one of svmlight."""
    if path.suffix == ".npz":
        return read_npz(path, regression=True)
    return read_svmlight(path)


def _signed(x: csr_array, label: Array, constant: float = 0.0) -> csr_array:
    """Add the intercept's column, if it has a constant, and multiply each row by its label."""
    if constant:
        x = hstack([x, csr_array(np.full((x.shape[0], 1), constant))], format="csr")
    return csr_array(diags_array(label) @ x)
