"""A user's examples as a data set: a part to train on and one to be scored on, in float32.

Features are scaled by the training part alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dps.errors import ConfigurationError
from flows.quoting import first_few, quoted
from flows.readers import Examples, paired
from flows.workloads.base import Array, Dataset
from flows.workloads.datasets import stratified

MIN_TO_DIVIDE = 2  # rows of a class: one to train on and one to score
LARGEST_CLASS = 2**53 - 1  # larger integers are not exact in float64


def returned(place: str, found: Any, regression: bool) -> tuple[Examples, Array | None]:
    """Check the return value of a user's function: x and y, or x and y of both parts.

    The second value is the mask of the scored rows, if the function splits the data.

    Raises `ConfigurationError` if the function returned an invalid value.
    """
    if not isinstance(found, tuple) or len(found) not in (2, 4):
        what = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise ConfigurationError(
            f"{place} returned {what}, expected the arrays (x, y), or (x_train, y_train, x_test, "
            "y_test)"
        )
    if len(found) == 2:
        return paired(place, found[0], found[1], ("x", "y"), regression), None
    from scipy.sparse import issparse, vstack

    train = paired(place, found[0], found[1], ("x_train", "y_train"), regression)
    test = paired(place, found[2], found[3], ("x_test", "y_test"), regression)
    if train.x.shape[1] != test.x.shape[1]:
        raise ConfigurationError(
            f"{place}: x_train has {train.x.shape[1]} features, x_test {test.x.shape[1]}"
        )
    if train.y.dtype.kind != test.y.dtype.kind:
        raise ConfigurationError(
            f"{place}: one of y_train and y_test has numbers, the other strings"
        )
    x = vstack([train.x, test.x], "csr") if issparse(train.x) else np.vstack([train.x, test.x])
    y = np.concatenate([train.y, test.y])
    return Examples(x, y), np.arange(len(y)) >= len(train.y)


def prepared(
    place: str,
    examples: Examples,
    scored: Array | None = None,
    *,
    test: float = 0.2,
    seed: int = 0,
    standardise: bool = False,
    regression: bool = False,
    standardise_target: bool = False,
) -> Dataset:
    """Return a data set of examples: split, scaled, in float32, with classes numbered from 0.

    Without a mask of the rows that are `scored`, a share `test` of the rows of each class is drawn.
    Features and targets are scaled to mean 0 and standard deviation 1 in the training part; a
    column that is constant there is only shifted. Raises `ConfigurationError` if targets are not
    valid classes, there are too few rows, or sparse data would be shifted.
    """
    y, names, scale = examples.y, examples.y[:0], 1.0
    if not regression:
        names, y = _classes(place, y, 1 if scored is not None else MIN_TO_DIVIDE)
    if scored is None:
        if len(y) < MIN_TO_DIVIDE:
            raise ConfigurationError(f"{place}: too few rows: {len(y)}, expected {MIN_TO_DIVIDE}")
        scored = _drawn(np.zeros(len(y), np.int64) if regression else y, test, seed)
    x_train, y_train = examples.x[~scored], y[~scored]
    x_test, y_test = examples.x[scored], y[scored]
    if regression:
        for what, targets in (("train on", y_train), ("score", y_test)):
            if targets.min() == targets.max():
                raise ConfigurationError(
                    f"{place}: the target is constant in all rows to {what}; expected at least two "
                    "values"
                )
    elif (new := np.setdiff1d(y_test, y_train)).size:
        one = quoted(names[new[0]].item())
        raise ConfigurationError(f"{place}: the class {one} occurs only in the test part")
    dense = isinstance(x_train, np.ndarray)
    if dense and np.isnan(examples.x).any():
        # Missing cells are filled with the mean of their column in the training part.
        means = np.nansum(x_train, axis=0) / np.maximum(np.isfinite(x_train).sum(axis=0), 1)
        x_train, x_test = (np.where(np.isnan(x), means, x) for x in (x_train, x_test))
    if standardise:
        if not dense:
            raise ConfigurationError(
                f"{place}: standardised data are not sparse; leave out standardise, or set dense: "
                "true"
            )
        x_train, x_test, _ = _standardised(x_train, x_test)
    if standardise_target:
        y_train, y_test, deviation = _standardised(y_train, y_test)
        scale = float(deviation)
    dtype = np.float32 if regression else np.int64
    try:
        with np.errstate(over="raise"):
            x_train, x_test = x_train.astype(np.float32), x_test.astype(np.float32)
            y_train, y_test = y_train.astype(dtype), y_test.astype(dtype)
    except FloatingPointError as error:
        raise ConfigurationError(
            f"{place}: a value is beyond {np.finfo(np.float32).max:g}, the limit of float32; scale "
            "it, or set standardise"
        ) from error
    return Dataset(
        place,
        x_train,
        y_train,
        x_test,
        y_test,
        1 if regression else len(names),
        regression,
        scale,
        tuple(map(str, names.tolist())),
        examples.note,
    )


def summary(data: Dataset) -> str:
    """Summarise a data set in a sentence."""
    y, shape = data.y_train, data.shape
    if data.regression:
        scaled = " standard deviations" if data.target_scale != 1.0 else ""
        targets = f"targets from {y.min():.4g} to {y.max():.4g}{scaled}, mean {y.mean():.4g}"
    else:
        shares = np.bincount(y, minlength=data.classes) / len(y)
        named = [f"{quoted(n)} {s:.0%}" for n, s in zip(data.class_names, shares, strict=True)]
        targets = f"{data.classes:,} classes ({first_few(named)})"
    kind = "sparse features" if shape.sparse else "features"
    note = f" ({data.note})" if data.note else ""
    return (
        f"{data.name}: {len(y):,} rows to train on, {len(data.y_test):,} to score, "
        f"{shape.features:,} {kind}{note}, {targets}"
    )


def _classes(place: str, y: Array, least: int) -> tuple[Array, Array]:
    """Return the sorted classes, each with `least` examples, and the number of each row's."""
    if y.dtype.kind == "f":
        wrong = np.flatnonzero((y != np.round(y)) | (np.abs(y) > LARGEST_CLASS))
        if wrong.size:
            raise ConfigurationError(
                f"{place}: the target is {y[wrong[0]]:.16g} in row {wrong[0] + 1} of the examples; "
                f"expected texts, or whole numbers of at most {LARGEST_CLASS:,}. To predict "
                "numbers, set task: regression"
            )
        y = y.astype(np.int64)
    names, numbers, counts = np.unique(y, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise ConfigurationError(
            f"{place}: all {len(y):,} rows have the class {quoted(names[0].item())}; expected "
            "at least two classes"
        )
    few = np.flatnonzero(counts < least)
    if len(few):
        raise ConfigurationError(
            f"{place}: too few rows of {'a class' if len(few) == 1 else f'{len(few)} classes'}: "
            f"{quoted(names[few[0]].item())} has 1; expected at least {least}, one to train on and "
            "one to score. Check that the target column holds classes"
        )
    return names, numbers.astype(np.int64)


def _drawn(y: Array, share: float, seed: int) -> Array:
    """Return the rows that score weights, as a mask: of each class a share, but not all or none."""
    chosen = stratified(y, max(1, round(share * len(y))), seed)
    rng = np.random.RandomState(seed)
    sizes, taken = np.bincount(y), np.bincount(y[chosen], minlength=y.max() + 1)
    for number in np.flatnonzero((taken == 0) | (taken == sizes)):
        chosen[rng.choice(np.flatnonzero(y == number))] = taken[number] == 0
    return chosen


def _standardised(train: Array, test: Array) -> tuple[Array, Array, Array]:
    """Return both parts, moved and scaled by the training part, and the scale."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    # As in scikit-learn: a feature that is constant up to rounding has no scale.
    constant = deviation <= 10 * np.finfo(np.float64).eps * np.abs(mean) * np.sqrt(len(train))
    scale = np.where(constant | (deviation == 0), 1.0, deviation)
    return (train - mean) / scale, (test - mean) / scale, scale
