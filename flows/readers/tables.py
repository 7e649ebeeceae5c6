"""The examples in npz and parquet files: arrays or columns of numbers, and a label for each.

An npz file has the arrays ``x`` and ``y``; ``x`` may also be a sparse matrix with the arrays that
`scipy.sparse.save_npz` writes. Of a parquet file one column is the label, and the others, which
must be numbers, are the features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.examples import Examples
from flows.readers.npz import open_npz

LABELS = ("y", "label", "labels", "target")
ROWS = 1 << 16  # of a parquet file in memory at once

Array = npt.NDArray[Any]


def read_npz(path: Path, x: str = "x", y: str | None = None) -> Examples:
    """Read the examples of an npz file.

    Parameters
    ----------
    path
        The file.
    x
        The array of examples; of more than two dimensions, each example becomes a row.
    y
        The array of labels, which may be texts; None: the one named y, label, labels or target.

    Raises
    ------
    ConfigurationError
        The file cannot be read, an array is missing or does not fit, or a value is not finite.
    """
    arrays = open_npz(path, lambda names: names, "x=…, y=…")
    rows, labels = _matrix(path, arrays, x), _label(path, arrays, y)
    if 0 in rows.shape:
        raise ConfigurationError(
            f"{path}: x is {list(rows.shape)}: expected one example and one feature at least"
        )
    if rows.ndim > 2:
        rows = rows.reshape(len(rows), -1)
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise ConfigurationError(
            f"{path}: x is {list(rows.shape)} and y {list(labels.shape)}, expected a row of x for "
            "each value of y"
        )
    return Examples(rows, labels)


def read_parquet(path: Path, label: str | None = None, rows: int = ROWS) -> Iterator[Examples]:
    """Read the examples of a parquet file in pieces.

    Parameters
    ----------
    label
        The column of labels; None: the one that is named y, label, labels or target.

    Raises
    ------
    ConfigurationError
        The file cannot be read, there is no such column, or a value is no finite number; the
        message has its row, from 1, and its column. Or pyarrow is not installed.
    """
    with open_parquet(path) as file:
        wanted = _chosen(path, file.schema_arrow.names, label)
        first = 1
        for batch in file.iter_batches(batch_size=rows):
            yield _examples(path, batch, wanted, first)
            first += len(batch)


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a parquet file, as a `pyarrow.parquet.ParquetFile`.

    Raises
    ------
    ConfigurationError
        It cannot be opened, or reading it fails later on. Or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"{path}: reading parquet needs pyarrow; install it with: pip install pyarrow"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigurationError(f"{path} cannot be read as parquet: {error}") from error


def _matrix(path: Path, arrays: Mapping[str, Array], x: str) -> Any:
    if x in arrays:
        return _numbers(path, x, arrays[x])
    if not {"data", "indices", "indptr", "shape", "format"} <= arrays.keys():
        raise ConfigurationError(
            f"{path} has the arrays {', '.join(arrays)}, expected {x} and y, or a sparse matrix of "
            "scipy.sparse.save_npz and y"
        )
    # Not at the top: every process of a trial imports this package, for images.
    from scipy.sparse import csc_array, csr_array

    kind = arrays["format"].tolist()
    make = {"csr": csr_array, "csc": csc_array}.get(
        kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
    )
    if make is None:
        raise ConfigurationError(f"{path}: a sparse matrix of format {kind!r}, expected csr or csc")
    data = _numbers(path, "data", arrays["data"])
    try:
        found = make((data, arrays["indices"], arrays["indptr"]), shape=tuple(arrays["shape"]))
        found.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{path}: its sparse matrix is damaged: {error}") from error
    return found.tocsr()


def _label(path: Path, arrays: Mapping[str, Array], y: str | None) -> Array:
    found = [name for name in (LABELS if y is None else (y,)) if name in arrays]
    if not found:
        raise ConfigurationError(
            f"{path} has the arrays {', '.join(arrays)}, and none of them is named {y or 'y'}"
        )
    labels = arrays[found[0]]
    if y is not None and labels.dtype.kind == "U":
        return labels
    return _numbers(path, found[0], labels)


def _numbers(path: Path, name: str, array: Array) -> Array:
    if array.dtype.kind not in "fiub":
        raise ConfigurationError(f"{path}: {name} is of {array.dtype}, expected numbers")
    values = array.astype(np.float64)
    if not np.isfinite(values).all():
        at = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        raise ConfigurationError(f"{path}: {name}{at} is {values[tuple(at)]}, expected a number")
    return np.asarray(values)


def _chosen(path: Path, columns: list[str], label: str | None) -> str:
    named = [label] if label is not None else list(LABELS)
    found = [name for name in named if name in columns]
    if not found:
        raise ConfigurationError(
            f"{path} has no column {' or '.join(map(repr, named))}; there are: {', '.join(columns)}"
        )
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise ConfigurationError(f"{path} has more than one column {twice!r}; rename one of them")
    if len(columns) < 2:
        raise ConfigurationError(f"{path} has no column besides {found[0]!r}: no features")
    return found[0]


def _examples(path: Path, batch: Any, label: str, first: int) -> Examples:
    columns = {name: numbers_of(path, batch, name, first) for name in batch.schema.names}
    features = [values for name, values in columns.items() if name != label]
    return Examples(np.column_stack(features), columns[label])


def holds_numbers(kind: Any) -> bool:
    """Whether a column of this type of pyarrow holds numbers."""
    from pyarrow import types

    # Arrow would also make numbers of digits in text, and of times.
    numbers = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal
    return any(fits(kind) for fits in numbers)


def numbers_of(path: Path, batch: Any, name: str, first: int = 1) -> Array:
    """Return a column of a batch or table of pyarrow as float64; its rows count from `first`.

    Raises
    ------
    ConfigurationError
        It is of another type than numbers, or a value is no finite number.
    """
    from pyarrow import float64

    column = batch.column(name)
    if not holds_numbers(column.type):
        raise ConfigurationError(f"{path}: column {name!r} is of {column.type}, expected numbers")
    values = column.cast(float64(), safe=False).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise ConfigurationError(
            f"{path}, row {first + int(wrong[0])}, column {name!r}: "
            f"{column[int(wrong[0])].as_py()!r}, expected a number"
        )
    return np.asarray(values)
