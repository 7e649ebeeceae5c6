"""The data sets by name: scikit-learn's digits, which is always at hand, and Fashion-MNIST."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads import fashion_mnist
from flows.workloads.base import Array, Dataset, DatasetShape

Part = Literal["train", "test", "both"]


class DatasetSource(Protocol):
    """Where a data set comes from: what a class of one's own has to offer.

    Its fields are settings, and equal settings give equal data in every process.
    """

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data, known without loading them."""
        ...

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set; of a part that is not wanted, no rows.

        Raises `ConfigurationError` if that cannot be done; the message says what to do.
        """
        ...


SHAPES = {
    "digits": DatasetShape(features=64, classes=10),
    "fashion_mnist": fashion_mnist.SHAPE,
}

DIGITS_TRAIN_EXAMPLES = 1437
DIGITS_TEST_EXAMPLES = 360
DIGITS_SPLIT_SEED = 0


def load_dataset(
    kind: str,
    folder: str | None = None,
    part: Part = "both",
    sources: fashion_mnist.Sources | None = None,
    test_examples: int | None = None,
    pixels: fashion_mnist.Pixels = "symmetric",
) -> Dataset:
    """Load a data set, or the part of it that a process needs.

    Parameters
    ----------
    kind
        "digits": 1,437 + 360 images of 8 x 8, a fixed stratified split, pixels in [0, 1].
        "fashion_mnist": 60,000 + 10,000 images of 28 x 28, pixels in [-1, 1].
    folder
        Where the files of Fashion-MNIST are, if not in one of the usual places.
    part
        "train" or "test" leaves the other part empty (Fashion-MNIST's are 188 and 31 MB).
    sources
        The usual places.
    test_examples
        Keep the first so many of the test part only; None: all.
    pixels
        "symmetric" leaves Fashion-MNIST's pixels in [-1, 1], "unit" puts them in [0, 1].

    Raises
    ------
    ConfigurationError
        An unknown kind, or files that are missing or damaged; the message says what to do.
    """
    found = ensure_dataset(kind, folder, sources)
    train = _read(kind, found, "train", pixels) if part != "test" else _nothing(kind)
    x_test, y_test = _read(kind, found, "test", pixels) if part != "train" else _nothing(kind)
    kept = slice(test_examples)
    return Dataset(kind, *train, x_test[kept], y_test[kept], SHAPES[kind].classes)


def find_dataset(
    kind: str, folder: str | None = None, sources: fashion_mnist.Sources | None = None
) -> str | None:
    """Return where a data set lies on this machine, or None when it would have to be downloaded."""
    if kind not in SHAPES:
        raise ConfigurationError(f"dataset {kind!r} is unknown; there are: {', '.join(SHAPES)}")
    if kind == "digits":
        if folder is not None:
            raise ConfigurationError("dataset digits comes with scikit-learn: leave out its folder")
        return "scikit-learn"
    found = fashion_mnist.find(folder, sources or fashion_mnist.Sources())
    return None if found is None else str(found)


def ensure_dataset(
    kind: str, folder: str | None = None, sources: fashion_mnist.Sources | None = None
) -> str:
    """Return where a data set lies on this machine, after downloading it if there is no other way.

    Called once before many processes load it, it keeps each from downloading for itself.
    """
    found = find_dataset(kind, folder, sources)
    if found is None:
        return str(fashion_mnist.ensure(folder, sources or fashion_mnist.Sources()))
    return found


def _read(
    kind: str, found: str, part: Literal["train", "test"], pixels: fashion_mnist.Pixels
) -> tuple[Array, Array]:
    return _digits(part) if kind == "digits" else fashion_mnist.read(Path(found), part, pixels)


def _nothing(kind: str) -> tuple[Array, Array]:
    return np.empty((0, SHAPES[kind].features), np.float32), np.empty(0, np.int64)


def _digits(part: Literal["train", "test"]) -> tuple[Array, Array]:
    table = _digits_table()
    x, y = table[:, :-1] / 16, table[:, -1].astype(np.int64)
    test = stratified(y, DIGITS_TEST_EXAMPLES, DIGITS_SPLIT_SEED)
    rows = test if part == "test" else ~test
    return x[rows].astype(np.float32), y[rows]


def _digits_table() -> Array:
    """Return scikit-learn's digits as rows of 64 pixels, 0 to 16, and the class.

    Importing scikit-learn takes each process over a second, reading its file 20 ms.
    """
    spec = find_spec("sklearn")
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return np.column_stack([x, y])


def stratified(y: Array, count: int, seed: int) -> Array:
    """Choose `count` examples so that every class has its share, and return them as a mask."""
    # RandomState's streams are frozen for good (NEP 19), Generator's are not: the split is fixed.
    rng = np.random.RandomState(seed)
    sizes = np.bincount(y)
    shares = sizes * count / len(y)
    quotas = np.floor(shares).astype(int)
    quotas[np.argsort(quotas - shares, kind="stable")[: count - quotas.sum()]] += 1
    chosen = np.zeros(len(y), bool)
    for label, quota in enumerate(quotas):
        chosen[rng.permutation(np.flatnonzero(y == label))[:quota]] = True
    return chosen
