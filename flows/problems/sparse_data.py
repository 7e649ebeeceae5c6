"""Owns the examples of two classes that L1-logistic regression is shown on, each in pieces.

Every row is an example's features and, in the last column, a 1 for the intercept, all times the
example's label, −1 or +1: the loss of an example is then log(1 + exp(−row·w)). A worker makes or
reads its own share, piece by piece; nobody ever holds all of the data.
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

from dps.errors import ConfigurationError
from flows.readers import read_examples

STRIDE = 0x9E3779B1  # a prime: no two ranks meet in one column
WEIGHTS = 200

Array = npt.NDArray[np.float64]


class Source(Protocol):
    """Where examples come from. Implementations can be pickled.

    `features` counts the intercept's column; `examples` is the number of all workers' together.
    """

    @property
    def features(self) -> int: ...

    @property
    def examples(self) -> int: ...

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield the pieces of one of `workers` shares: float64, examples × features."""
        ...


@dataclass(frozen=True, slots=True)
class Digits:
    """Scikit-learn's digits, odd ones against even ones; features have mean 0 and variance 1."""

    @property
    def features(self) -> int:
        return 62  # three of the 64 pixels are the same in all images; the intercept

    @property
    def examples(self) -> int:
        return 1797

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield every `workers`-th example."""
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x[:, x.std(axis=0) > 0]
        x = (x - x.mean(axis=0)) / x.std(axis=0)
        yield _signed(csr_array(x), np.where(y % 2, 1.0, -1.0))[index::workers]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Examples with few features out of many, drawn piece by piece from a seed.

    How common features are falls as 1/rank, as with words. Values are normal with variance
    1/`nonzeros`; the label is drawn from a logistic model with 200 weights that are not zero.

    Parameters
    ----------
    examples, features
        How many; the intercept's column comes on top of the features.
    seed
        Of all draws.
    nonzeros
        Features of an example; those that are drawn twice are summed.
    piece
        Examples drawn at once.
    """

    examples: int
    columns: int
    seed: int = 0
    nonzeros: int = 20
    piece: int = 1 << 16

    @property
    def features(self) -> int:
        return self.columns + 1

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield every `workers`-th piece; no piece depends on another."""
        truth = self._truth()
        for start in range(index * self.piece, self.examples, workers * self.piece):
            count = min(self.piece, self.examples - start)
            rng = np.random.default_rng([self.seed, start])
            rank = np.exp(rng.random(count * self.nonzeros) * np.log(self.columns))
            value = rng.standard_normal(len(rank)) / np.sqrt(self.nonzeros)
            ends = np.arange(count + 1, dtype=np.int32) * self.nonzeros
            column = self._column(rank.astype(np.int64) - 1).astype(np.int32)
            x = csr_array((value, column, ends), shape=(count, self.columns))
            x.sum_duplicates()
            chance = expit(x @ truth)
            yield _signed(x, np.where(rng.random(count) < chance, 1.0, -1.0))

    def _truth(self) -> Array:
        """The weights that labels are drawn with: those of some of the most common features."""
        rng = np.random.default_rng(self.seed)
        truth = np.zeros(self.columns)
        chosen = self._column(np.arange(min(WEIGHTS, self.columns), dtype=np.int64))
        truth[chosen] = 4 * rng.standard_normal(len(chosen))
        return truth

    def _column(self, rank: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the features stand that are so common: anywhere, so that blocks are alike."""
        return rank * STRIDE % self.columns


@dataclass(frozen=True, slots=True)
class File:
    """The examples of a file, as `survey` found them; of two labels the larger one is +1."""

    path: Path
    features: int
    examples: int
    low: float
    high: float

    def share(self, index: int, workers: int) -> Iterator[csr_array]:
        """Yield every `workers`-th example of each piece of the file."""
        for piece in read_examples(self.path):
            x = csr_array(piece.x)
            x.resize(x.shape[0], self.features - 1)
            yield _signed(x, np.where(piece.y == self.high, 1.0, -1.0))[index::workers]


def survey(path: Path) -> File:
    """Read a file once, keeping nothing of it but what must be known before it is shared out.

    Raises
    ------
    ConfigurationError
        There is something wrong in it, or its labels are not of two kinds.
    """
    features = examples = 0
    labels: set[float] = set()
    for piece in read_examples(path):
        features = max(features, piece.x.shape[1])
        examples += len(piece.y)
        labels |= set(np.unique(piece.y).tolist())
        if len(labels) > 2:
            break
    if len(labels) != 2:
        shown = ", ".join(f"{label:g}" for label in sorted(labels)) or "none"
        raise ConfigurationError(
            f"{path}: expected labels of two kinds, such as -1 and 1; found: {shown}"
        )
    return File(path, features + 1, examples, min(labels), max(labels))


def _signed(x: csr_array, label: Array) -> csr_array:
    """Add the intercept's column, and multiply each row by its label."""
    ones = csr_array(np.ones((x.shape[0], 1)))
    return csr_array(diags_array(label) @ hstack([x, ones], format="csr"))
