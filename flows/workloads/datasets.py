"""The built-in data sets: scikit-learn's digits, and Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from dps.core import ranges
from flows.workloads import fashion_mnist
from flows.workloads.base import Array, Dataset, DatasetShape, Part

DIGITS_TEST_EXAMPLES = 360
DIGITS_SPLIT_SEED = 0

Read = Callable[[Literal["train", "test"]], tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class Digits:
    """The 8 × 8 digits of scikit-learn: 1,437 + 360 images, pixels in [0, 1].

    The split is fixed, with the same share of each class in both parts.

    Parameters
    ----------
    test_examples
        Weights are scored on this number of the first examples of the test part; None: on all.
    """

    name: ClassVar[str] = "digits"
    shape: ClassVar[DatasetShape] = DatasetShape(features=64, classes=10)
    train_rows: ClassVar[int] = 1437
    test_examples: int | None = None

    def __post_init__(self) -> None:
        _check_test_examples(self, DIGITS_TEST_EXAMPLES)

    def find(self) -> str:
        """Return the location of the data set on this machine."""
        return "scikit-learn"

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        return _loaded(self, _digits, part)


@dataclass(frozen=True, slots=True)
class FashionMnist:
    """Fashion-MNIST: 60,000 + 10,000 images of 28 × 28 (188 and 31 MB in memory).

    Parameters
    ----------
    folder
        Folder of the files, if not the default.
    pixels
        Range of pixels: [-1, 1] ("symmetric") or [0, 1] ("unit").
    test_examples
        Weights are scored on this number of the first examples of the test part; None: on all.
    """

    name: ClassVar[str] = "fashion_mnist"
    shape: ClassVar[DatasetShape] = fashion_mnist.SHAPE
    folder: Path | None = None
    pixels: fashion_mnist.Pixels = "symmetric"
    test_examples: int | None = None

    def __post_init__(self) -> None:
        _check_test_examples(self, 10_000)

    @property
    def train_rows(self) -> int | None:
        """The number of training images; None if the files are not on this machine."""
        return fashion_mnist.train_rows(self.folder)

    def find(self) -> Path | None:
        """Return the location of the data set on this machine; None if not downloaded yet."""
        return fashion_mnist.find(self.folder)

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it; download it first if necessary.

        Raises `ConfigurationError` for missing or damaged files.
        """
        place = self.find() or fashion_mnist.download()
        return _loaded(self, lambda wanted: fashion_mnist.read(place, wanted, self.pixels), part)


DATASETS = {cls.name: cls for cls in (Digits, FashionMnist)}


def _check_test_examples(dataset: Digits | FashionMnist, most: int) -> None:
    number = dataset.test_examples
    if number is not None and not 1 <= number <= most:
        name = f"{type(dataset).__name__}: test_examples"
        raise ranges.refused(name, number, f"1 to {most:,} examples")


def _loaded(dataset: Digits | FashionMnist, read: Read, part: Part) -> Dataset:
    none = np.empty((0, dataset.shape.features), np.float32), np.empty(0, np.int64)
    x, y = read("train") if part != "test" else none
    x_test, y_test = read("test") if part != "train" else none
    kept = slice(dataset.test_examples)
    return Dataset(dataset.name, x, y, x_test[kept], y_test[kept], dataset.shape.classes)


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

    return np.column_stack(load_digits(return_X_y=True))


def stratified(y: Array, count: int, seed: int) -> Array:
    """Choose `count` examples so that every class has its share, and return them as a mask.

    Unlike `train_test_split` of scikit-learn, it takes classes of any size, and is fixed for good:
    RandomState's streams are frozen (NEP 19), Generator's are not.
    """
    rng = np.random.RandomState(seed)
    sizes = np.bincount(y)
    shares = sizes * count / len(y)
    quotas = np.floor(shares).astype(int)
    quotas[np.argsort(quotas - shares, kind="stable")[: count - quotas.sum()]] += 1
    chosen = np.zeros(len(y), bool)
    for label, quota in enumerate(quotas):
        chosen[rng.permutation(np.flatnonzero(y == label))[:quota]] = True
    return chosen
