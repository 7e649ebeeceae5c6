"""Data sets of one's own: a file of examples becomes a part to train on and one to be scored on.

Files are known by the SHA-256 of what is in them, so that a file that has changed is told from the
one that an experiment was planned with. Features are scaled by the training part alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dps.errors import ConfigurationError
from flows.quoting import listed, quoted
from flows.readers.npz import finite, paired, read_npz
from flows.readers.svmlight import ZeroBased, read_svmlight
from flows.readers.tables import csv_table, parquet_table, read_tables
from flows.readers.values import Examples
from flows.workloads.base import Array, Dataset, DatasetShape
from flows.workloads.datasets import Part, stratified
from flows.workloads.known_file import KnownFile
from flows.workloads.own_code import OwnCode, refusing

Format = Literal["npz", "csv", "parquet", "svmlight"]

MOST_CLASSES = 10_000
MOST_TOLD = 8  # classes
LARGEST_CLASS = 2**53 - 1  # beyond it, whole numbers of float64 are one that were two in a file
LEAST_TO_DIVIDE = 2  # rows of a class: one to train on and one to score


@dataclass(frozen=True, slots=True)
class Split:
    """Which rows score weights: of each class a share `test`, drawn from `seed`."""

    test: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is made of examples.

    Parameters
    ----------
    standardise, standardise_target
        Whether each feature, or the target, gets the mean 0 and standard deviation 1 of the
        training part. One that is constant there is only moved.
    regression
        Whether targets are numbers to be predicted, instead of classes.
    """

    standardise: bool = False
    regression: bool = False
    standardise_target: bool = False


@dataclass(frozen=True, slots=True)
class FileDataset:
    """Examples of a file of one's own; its fields are those of its section in a configuration.

    Parameters
    ----------
    file, test_file
        All rows, or those to train on and those that score weights.
    target
        The column or array of targets; svmlight has none, as its lines begin with them.
    features
        The columns of features, None for all others; for npz, one array.
    """

    format: Format
    file: KnownFile
    test_file: KnownFile | None = None
    split: Split = Split()
    target: str | None = None
    features: tuple[str, ...] | None = None
    delimiter: str = ","
    preparation: Preparation = Preparation()
    dense: bool = False
    zero_based: ZeroBased = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A data set that was loaded as a whole.

    Attributes
    ----------
    names
        Of its classes.
    note
        What was assumed about its file; see `Examples`.
    """

    data: Dataset
    names: tuple[str, ...]
    note: str = ""

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return self.data.shape

    def part(self, part: Part) -> Dataset:
        """Return it without the rows of a part that is not wanted."""
        data = self.data
        if part == "test":
            return replace(data, x_train=data.x_train[:0], y_train=data.y_train[:0])
        if part == "train":
            return replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])
        return data

    @property
    def target_deviation(self) -> float | None:
        """Of numbers to be predicted, the standard deviation in what is scored, before scaling."""
        data = self.data
        if not data.regression:
            return None
        return float(data.y_test.std(dtype=np.float64) * data.target_scale)

    def told(self) -> str:
        """Say how much there is."""
        data, shape = self.data, self.data.shape
        kind = "sparse features" if shape.sparse else "features"
        note = f" ({self.note})" if self.note else ""
        return (
            f"{data.name}: {len(data.y_train):,} rows to train on, {len(data.y_test):,} to score, "
            f"{shape.features:,} {kind}{note}, {self._targets_told()}"
        )

    def _targets_told(self) -> str:
        y = self.data.y_train
        if (deviation := self.data.target_scale) != 1.0:  # they were standardised
            return (
                f"targets from {y.min():.4g} to {y.max():.4g} standard deviations, of "
                f"{deviation:.4g} each, from their mean"
            )
        if self.data.regression:
            return f"targets from {y.min():.4g} to {y.max():.4g} with the mean {y.mean():.4g}"
        counts = np.bincount(y, minlength=len(self.names)) / len(y)
        shares = (f"{quoted(n)} {share:.0%}" for n, share in zip(self.names, counts, strict=True))
        return f"{len(self.names):,} classes ({listed([*shares], MOST_TOLD)})"


def divided(
    place: str, parts: Sequence[Examples], split: Split, preparation: Preparation
) -> Loaded:
    """Return a data set of examples: classes numbered from 0, divided, scaled, in float32.

    Parameters
    ----------
    place
        What messages and the data set are named by.
    parts
        All examples, or those to train on and those that score weights.

    Raises
    ------
    ConfigurationError
        Targets are no classes, or there are too few rows; or data are sparse and to be moved.
    """
    train, *others = parts
    regression, y = preparation.regression, train.y
    names = y[:0]
    if not regression:
        names, y = _classes(place, y, 1 if others else LEAST_TO_DIVIDE)
    if not others:
        scored = _drawn(place, np.zeros(len(y), np.int64) if regression else y, split)
        x_train, y_train, x_test, y_test = train.x[~scored], y[~scored], train.x[scored], y[scored]
    else:
        x_train, y_train, x_test, y_test = train.x, y, others[0].x, others[0].y
        y_test = y_test if regression else _numbered(place, y_test, names)
        if x_test.shape[1] != x_train.shape[1]:
            raise ConfigurationError(
                f"{place}: the test part has {x_test.shape[1]} features, the other "
                f"{x_train.shape[1]}"
            )
    if preparation.standardise:
        if not isinstance(x_train, np.ndarray):
            raise ConfigurationError(
                f"{place}: standardise moves every 0 of sparse data, after which they are not "
                "sparse; leave it out, or give dense: true"
            )
        x_train, x_test, _ = _standardised(x_train, x_test)
    scale: Any = 1.0
    if regression:
        _must_vary(place, y_train, y_test)
        if preparation.standardise_target:
            y_train, y_test, scale = _standardised(y_train, y_test)
        y_train, y_test = _float32(place, y_train), _float32(place, y_test)
    x_train, x_test = _float32(place, x_train), _float32(place, x_test)
    classes = 1 if regression else len(names)
    data = Dataset(place, x_train, y_train, x_test, y_test, classes, regression, float(scale))
    return Loaded(data, tuple(str(_plain(name)) for name in names.tolist()), train.note)


@dataclass(frozen=True, slots=True)
class FunctionDataset:
    """What a function of one's own returns: x and y, or x_train, y_train, x_test and y_test.

    The function is given `settings` by name, which are JSON.
    """

    code: OwnCode
    settings: str = "{}"
    split: Split = Split()
    preparation: Preparation = Preparation()


@lru_cache(maxsize=2)
def called(source: FunctionDataset) -> Loaded:
    """Return the data set that a function returns, as a whole.

    Raises
    ------
    ConfigurationError
        The function cannot be called, fails, or returns something else.
    """
    return call(source)


def call(source: FunctionDataset) -> Loaded:
    """Return what the function returns now; see `called`."""
    place, function = source.code.reference, source.code.load()
    with refusing(place, "failed"):
        found = function(**json.loads(source.settings))
    if not isinstance(found, tuple) or len(found) not in (2, 4):
        what = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise ConfigurationError(
            f"{place} returned {what}, expected the arrays (x, y), or (x_train, y_train, x_test, "
            "y_test)"
        )
    names = ("x", "y") if len(found) == 2 else ("x_train", "y_train", "x_test", "y_test")
    regression = source.preparation.regression
    parts = [
        _examples(place, found[n], found[n + 1], (names[n], names[n + 1]), regression)
        for n in range(0, len(found), 2)
    ]
    return divided(place, parts, source.split, source.preparation)


# -- parts -----------------------------------------------------------------------------------------


# The whole of what was read last: shape and parts are asked for one after the other.
@lru_cache(maxsize=2)
def loaded(source: FileDataset) -> Loaded:
    """Return the data set of a file as a whole.

    Raises
    ------
    ConfigurationError
        The file is missing, has changed, or something in it is wrong.
    """
    place = Path(source.file.path).name
    return divided(place, examples_of(source), source.split, source.preparation)


def examples_of(source: FileDataset) -> list[Examples]:
    """Return the examples of the file as it has them, and those of the other file if there is one.

    Raises
    ------
    ConfigurationError
        A file is missing, has changed, or cannot be read.
    """
    files = [source.file] if source.test_file is None else [source.file, source.test_file]
    for file in files:
        file.check()
    paths = [Path(file.path) for file in files]
    regression = source.preparation.regression
    if source.format == "svmlight":
        found = read_svmlight(paths, source.zero_based)
        return [replace(each, x=each.x.toarray()) for each in found] if source.dense else found
    if source.format == "npz":
        array = source.features[0] if source.features else "x"
        return [read_npz(path, array, source.target, regression) for path in paths]
    assert source.target is not None, "a table has a column of targets"
    csv = source.format == "csv"
    tables = [csv_table(path, source.delimiter) if csv else parquet_table(path) for path in paths]
    return read_tables(tables, source.target, source.features, regression)


def _examples(place: str, x: Any, y: Any, names: tuple[str, str], regression: bool) -> Examples:
    """What a function returned, if it is numbers, with a row for each target."""
    from scipy.sparse import csr_array, issparse

    if issparse(x):
        rows = csr_array(x)
        rows.data = finite(place, f"{names[0]}.data", rows.data)
    else:
        rows = finite(place, names[0], np.asarray(x))
    return paired(place, rows, np.asarray(y), names, regression)


def _classes(place: str, y: Array, least: int) -> tuple[Array, Array]:
    """Return the classes in their order, and the number of that of each example.

    Each has `least` examples.
    """
    if y.dtype.kind == "f":
        wrong = np.flatnonzero((y != np.round(y)) | (np.abs(y) > LARGEST_CLASS))
        if wrong.size:
            raise ConfigurationError(
                f"{place}: the target is {y[wrong[0]]:.16g} in row {wrong[0] + 1} of the examples; "
                f"classes are texts or whole numbers, of {LARGEST_CLASS:,} at most. Are numbers to "
                "be predicted? Give task: regression"
            )
    names, numbers, counts = np.unique(y, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise ConfigurationError(
            f"{place}: all {len(y):,} rows are of the class {_shown(names[0])}; expected two "
            "classes at least"
        )
    if len(names) > MOST_CLASSES:
        raise ConfigurationError(
            f"{place}: the target has {len(names):,} values; expected {MOST_CLASSES:,} classes at "
            "most: is it the column of the classes?"
        )
    few = np.flatnonzero(counts < least)
    if len(few):
        raise ConfigurationError(
            f"{place}: too few rows of {'a class' if len(few) == 1 else f'{len(few)} classes'}: "
            f"{_shown(names[few[0]])} has 1; expected {least} at least, one to train on and one "
            "to score: is it the column of the classes?"
        )
    return names, numbers.astype(np.int64)


def _plain(name: str | float) -> str | int | float:
    """A class as people write it: numbers of a column are floats."""
    return int(name) if isinstance(name, float) and name.is_integer() else name


def _shown(name: str | float) -> str:
    return quoted(_plain(name))


def _numbered(place: str, y: Array, names: Array) -> Array:
    """The numbers of classes of the training part, for examples of another file."""
    numbers = {name: number for number, name in enumerate(names.tolist())}
    try:
        return np.array([numbers[name] for name in y.tolist()], np.int64)
    except KeyError as error:
        raise ConfigurationError(
            f"{place}: the class {_shown(error.args[0])} is in the file of the test part only; "
            f"there are: {listed(map(_shown, names.tolist()), MOST_TOLD)}"
        ) from error


def _drawn(place: str, y: Array, split: Split) -> Array:
    """Which rows score weights, as a mask: of each class its share, one at least left and taken."""
    if len(y) < LEAST_TO_DIVIDE:
        raise ConfigurationError(f"{place}: too few rows: {len(y)}, expected {LEAST_TO_DIVIDE}")
    count = max(1, round(split.test * len(y)))
    chosen = stratified(y, count, split.seed)
    # RandomState's streams are frozen for good (NEP 19), Generator's are not: the split is fixed.
    rng = np.random.RandomState(split.seed)
    sizes, taken = np.bincount(y), np.bincount(y[chosen], minlength=y.max() + 1)
    for number in np.flatnonzero((taken == 0) | (taken == sizes)):
        chosen[rng.choice(np.flatnonzero(y == number))] = taken[number] == 0
    return chosen


def _must_vary(place: str, train: Array, test: Array) -> None:
    for what, targets in (("train on", train), ("score", test)):
        if targets.min() == targets.max():
            raise ConfigurationError(
                f"{place}: the target is the same in all rows to {what}; there is nothing to "
                "predict"
            )


def _standardised(train: Array, test: Array) -> tuple[Array, Array, Array]:
    """Both parts, moved and scaled by the training part, and the scale."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    # As in scikit-learn: what is constant up to rounding has no scale.
    constant = deviation <= 10 * np.finfo(np.float64).eps * np.abs(mean) * np.sqrt(len(train))
    scale = np.where(constant | (deviation == 0), 1.0, deviation)
    return (train - mean) / scale, (test - mean) / scale, scale


def _float32(place: str, x: Any) -> Any:
    with np.errstate(over="ignore"):
        small = x.astype(np.float32)
    values = small if isinstance(small, np.ndarray) else small.data
    if not np.isfinite(values).all():
        raise ConfigurationError(
            f"{place}: a value is beyond {np.finfo(np.float32).max:g}, the largest number of "
            "float32; scale it, or standardise"
        )
    return small
