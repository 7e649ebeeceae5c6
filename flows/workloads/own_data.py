"""Data sets of one's own: a file of examples becomes a part to train on and one to be scored on.

Files are known by the SHA-256 of what is in them, so that a file that has changed is told from the
one that an experiment was planned with. Features are scaled by the training part alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dps.errors import ConfigurationError
from flows.quoting import listed, quoted
from flows.readers.columns import (
    MISSING,
    ColumnNames,
    is_number,
    read_csv,
    read_parquet_columns,
)
from flows.readers.examples import Examples
from flows.readers.svmlight import read_svmlight
from flows.readers.tables import read_npz
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
    """How rows are divided into those to train on and those to score weights on.

    Parameters
    ----------
    test
        What share of the rows scores weights; of each class the same share.
    seed
        Draws these rows.
    """

    test: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is made of examples.

    Parameters
    ----------
    standardise
        Whether each feature is moved and scaled to the mean 0 and standard deviation 1 that it has
        in the training part. One that is constant there is only moved.
    regression
        Whether targets are numbers to be predicted, instead of classes.
    standardise_target
        Whether such targets are moved and scaled like features.
    """

    standardise: bool = False
    regression: bool = False
    standardise_target: bool = False


@dataclass(frozen=True, slots=True)
class FileDataset:
    """Examples of a file of one's own.

    Parameters
    ----------
    format
        Of the file, and of the other one.
    file
        Has the rows.
    test_file
        Has the rows that score weights; None: they are drawn from the one file by `split`.
    split
        See `Split`.
    target
        The column or array of targets; svmlight has none, as its lines begin with them.
    features
        The columns of features, None for all others; for npz, one array.
    delimiter
        Between the cells of CSV.
    preparation
        See `Preparation`.
    dense
        Whether sparse rows are made dense.
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


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A data set that was loaded as a whole, with the `names` of its classes."""

    data: Dataset
    names: tuple[str, ...]

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
        return (
            f"{data.name}: {len(data.y_train):,} rows to train on, {len(data.y_test):,} to score, "
            f"{shape.features:,} {kind}, {self._targets_told()}"
        )

    def _targets_told(self) -> str:
        y = self.data.y_train
        if self.data.regression:
            return f"targets from {y.min():.4g} to {y.max():.4g} with the mean {y.mean():.4g}"
        counts = np.bincount(y, minlength=len(self.names)) / len(y)
        shares = (f"{quoted(n)} {share:.0%}" for n, share in zip(self.names, counts, strict=True))
        return f"{len(self.names):,} classes ({listed([*shares], MOST_TOLD)})"


def divided(
    place: str, train: Examples, test: Examples | None, split: Split, preparation: Preparation
) -> Loaded:
    """Return a data set of examples: classes numbered from 0, divided, scaled, in float32.

    Parameters
    ----------
    place
        What messages and the data set are named by.
    train
        All examples, or those to train on if there are others to `test` with.

    Raises
    ------
    ConfigurationError
        Targets are no classes, or there are too few rows; or data are sparse and to be moved.
    """
    wanted, names = preparation, None
    if wanted.regression:
        y = _numbers(place, train.y)
    else:
        names, y = _classes(place, train.y, 1 if test is not None else LEAST_TO_DIVIDE)
    x = train.x
    if test is None:
        scored = _any_drawn(place, y, split) if names is None else _drawn(y, split)
        x_train, y_train, x_test, y_test = x[~scored], y[~scored], x[scored], y[scored]
    else:
        x_train, y_train, x_test = x, y, test.x
        y_test = _numbers(place, test.y) if names is None else _numbered(place, test.y, names)
    if wanted.standardise:
        x_train, x_test = _standardised(place, x_train, x_test)
    scale = 1.0
    if names is None:
        scale = float(y_train.std()) if wanted.standardise_target else 1.0
        y_train, y_test = _targets(place, y_train, y_test, wanted.standardise_target)
    parts = _float32(place, x_train), y_train, _float32(place, x_test), y_test
    if names is None:
        return Loaded(Dataset(place, *parts, 1, regression=True, target_scale=scale), ())
    return Loaded(Dataset(place, *parts, len(names)), tuple(str(name) for name in names))


@dataclass(frozen=True, slots=True)
class FunctionDataset:
    """What a function of one's own returns: x and y, or x_train, y_train, x_test and y_test.

    Parameters
    ----------
    code
        The function.
    settings
        What it is given, by name, as JSON.
    split, preparation
        As for a `FileDataset`; four arrays are divided already.
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
    train = _examples(f"{place}, x and y", *found[:2])
    test = _examples(f"{place}, x_test and y_test", *found[2:]) if len(found) == 4 else None
    _same_width(place, train, test)
    return divided(place, train, test, source.split, source.preparation)


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
    train, test = examples_of(source), None
    if source.test_file is not None:
        source.test_file.check()
        test = _read(source, source.test_file, train.x.shape[1])
        _same_width(source.test_file.path, train, test)
    place = Path(source.file.path).name
    return divided(place, train, test, source.split, source.preparation)


def examples_of(source: FileDataset) -> Examples:
    """Return the examples of the file as it has them, but for those of another file.

    Raises
    ------
    ConfigurationError
        The file is missing, has changed, or cannot be read.
    """
    source.file.check()
    return _read(source, source.file, None)


def _read(source: FileDataset, file: KnownFile, width: int | None) -> Examples:
    path = Path(file.path)
    if source.format == "npz":
        array = source.features[0] if source.features else "x"
        found = read_npz(path, array, source.target)
    elif source.format == "svmlight":
        found = _svmlight(path, width)
    else:
        assert source.target is not None, "a table has a column of targets"
        names = ColumnNames(source.target, source.features)
        if source.format == "csv":
            found = read_csv(path, names, source.delimiter)
        else:
            found = read_parquet_columns(path, names)
    if source.dense and not isinstance(found.x, np.ndarray):
        return Examples(found.x.toarray(), found.y)
    return found


def _same_width(place: str, train: Examples, test: Examples | None) -> None:
    if test is not None and test.x.shape[1] != train.x.shape[1]:
        raise ConfigurationError(
            f"{place}: the test part has {test.x.shape[1]} features, the other {train.x.shape[1]}"
        )


def _examples(place: str, x: Any, y: Any) -> Examples:
    """What a function returned, if it is numbers, with a row for each target."""
    from scipy.sparse import csr_array, issparse

    rows = csr_array(x) if issparse(x) else np.asarray(x)
    if rows.ndim > 2 and 0 not in rows.shape:
        rows = rows.reshape(len(rows), -1)
    targets = np.asarray(y)
    if rows.ndim != 2 or targets.shape != rows.shape[:1] or 0 in rows.shape:
        raise ConfigurationError(
            f"{place}: the shapes are {list(rows.shape)} and {list(targets.shape)}, expected "
            "examples × features, one of each at least, and a target for each example"
        )
    if rows.dtype.kind not in "fiub" or targets.dtype.kind not in "fiubU":
        raise ConfigurationError(
            f"{place}: the dtypes are {rows.dtype} and {targets.dtype}, expected numbers, and "
            "numbers or texts"
        )
    values = rows if isinstance(rows, np.ndarray) else rows.data
    if not np.isfinite(values).all():
        raise ConfigurationError(f"{place}: x has NaN or infinity in it, expected numbers")
    if targets.dtype.kind in "fiub":
        targets = targets.astype(np.float64)
        if not np.isfinite(targets).all():
            raise ConfigurationError(f"{place}: y has NaN or infinity in it, expected numbers")
    return Examples(rows.astype(np.float64), targets)


def _svmlight(path: Path, width: int | None) -> Examples:
    from scipy.sparse import csr_array, vstack

    pieces = [*read_svmlight(path, width)]
    if not pieces:
        raise ConfigurationError(f"{path}: has no rows, expected one for each example")
    most = width or max(piece.x.shape[1] for piece in pieces)
    wide = [
        csr_array((p.x.data, p.x.indices, p.x.indptr), shape=(p.x.shape[0], most)) for p in pieces
    ]
    return Examples(
        csr_array(vstack(wide, format="csr")), np.concatenate([piece.y for piece in pieces])
    )


def _classes(place: str, y: Array, least: int) -> tuple[Array, Array]:
    """Return the classes in their order, and the number of that of each example.

    Each has `least` examples.
    """
    _are_classes(place, y)
    names, numbers, counts = np.unique(y, return_inverse=True, return_counts=True)
    shown = _shown(names)
    if len(names) < 2:
        raise ConfigurationError(
            f"{place}: all {len(y):,} rows are of the class {shown[0]}; expected two classes at "
            "least"
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
            f"{shown[few[0]]} has 1; expected {least} at least, one to train on and one "
            "to score: is it the column of the classes?"
        )
    return _integers(names), numbers.astype(np.int64)


def _are_classes(place: str, y: Array) -> None:
    """Refuse numbers and texts that are no classes."""
    if y.dtype.kind != "f":
        missing = np.flatnonzero(np.isin(y, [*MISSING]))
        if missing.size:
            raise ConfigurationError(
                f"{place}: the target is {quoted(str(y[missing[0]]))} in row {missing[0] + 1} of "
                "the examples, expected a class; leave such rows out, or fill them in"
            )
        return
    if (large := np.flatnonzero(np.abs(y) > LARGEST_CLASS)).size:
        raise ConfigurationError(
            f"{place}: the target is {y[large[0]]:.17g} in row {large[0] + 1} of the examples; "
            f"classes that are numbers are {LARGEST_CLASS:,} at most: is it the column of the "
            "classes?"
        )
    if (wrong := np.flatnonzero(y != np.round(y))).size:
        raise ConfigurationError(
            f"{place}: the target is {y[wrong[0]]:g} in row {wrong[0] + 1} of the examples; "
            "classes are whole numbers or texts. Are numbers to be predicted? Give task: regression"
        )


def _integers(names: Array) -> Array:
    return names.astype(np.int64) if names.dtype.kind == "f" else names


def _shown(names: Array) -> list[str]:
    return [quoted(name) for name in _integers(names).tolist()]


def _numbered(place: str, y: Array, names: Array) -> Array:
    """The numbers of classes of the training part, for examples of another file."""
    _are_classes(place, y)
    numbers = {name: number for number, name in enumerate(names.tolist())}
    try:
        return np.array([numbers[name] for name in _integers(y).tolist()], np.int64)
    except KeyError as error:
        raise ConfigurationError(
            f"{place}: the class {quoted(error.args[0])} is in the file of the test part only; "
            f"there are: {listed(_shown(names), MOST_TOLD)}"
        ) from error


def _drawn(y: Array, split: Split) -> Array:
    """Which rows score weights, as a mask: of each class its share, one at least left and taken."""
    count = max(1, round(split.test * len(y)))
    chosen = stratified(y, count, split.seed)
    # RandomState's streams are frozen for good (NEP 19), Generator's are not: the split is fixed.
    rng = np.random.RandomState(split.seed)
    sizes, taken = np.bincount(y), np.bincount(y[chosen], minlength=y.max() + 1)
    for number in np.flatnonzero((taken == 0) | (taken == sizes)):
        chosen[rng.choice(np.flatnonzero(y == number))] = taken[number] == 0
    return chosen


def _numbers(place: str, y: Array) -> Array:
    if y.dtype.kind != "f":
        row = next((n for n, text in enumerate(y.tolist()) if not is_number(text)), 0)
        raise ConfigurationError(
            f"{place}: the target is {quoted(str(y[row]))} in row {row + 1} of the examples; "
            "regression needs numbers"
        )
    return y


def _any_drawn(place: str, y: Array, split: Split) -> Array:
    """Which rows score weights, as a mask, whatever their targets are."""
    count = max(1, round(split.test * len(y)))
    if count >= len(y):
        raise ConfigurationError(f"{place}: too few rows: {len(y)}, and {count} are to be scored")
    chosen = np.zeros(len(y), bool)
    # RandomState's streams are frozen for good (NEP 19), Generator's are not: the split is fixed.
    chosen[np.random.RandomState(split.seed).permutation(len(y))[:count]] = True
    return chosen


def _targets(place: str, train: Array, test: Array, standardise: bool) -> tuple[Array, Array]:
    """Targets of both parts as float32, scaled by what the training part has."""
    if train.min() == train.max() or test.min() == test.max():
        part = "train on" if train.min() == train.max() else "score"
        raise ConfigurationError(
            f"{place}: the target is the same in all rows to {part}; there is nothing to predict"
        )
    if standardise:
        mean, deviation = train.mean(), train.std()
        train, test = (train - mean) / deviation, (test - mean) / deviation
    return _float32(place, train), _float32(place, test)


def _standardised(place: str, train: Any, test: Any) -> tuple[Array, Array]:
    """Both parts, moved and scaled by what the training part has."""
    if not isinstance(train, np.ndarray):
        raise ConfigurationError(
            f"{place}: standardise moves every 0 of sparse data, after which they are not sparse; "
            "leave it out, or give dense: true"
        )
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    # As in scikit-learn: what is constant up to rounding has no scale.
    constant = deviation <= 10 * np.finfo(np.float64).eps * np.abs(mean) * np.sqrt(len(train))
    deviation[constant | (deviation == 0)] = 1.0
    return (train - mean) / deviation, (test - mean) / deviation


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
