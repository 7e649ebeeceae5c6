"""Arrays in npz files, as `numpy.savez` writes them; pickles are never loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.errors import ConfigurationError
from flows.readers.values import Array, Examples, labels, numbers

if TYPE_CHECKING:
    import pandas as pd

LABELS = ("y", "label", "labels", "target")
SPARSE = ("data", "indices", "indptr", "shape", "format")  # as scipy.sparse.save_npz names them


def open_npz(path: Path, names: Callable[[list[str]], Iterable[str]]) -> dict[str, Array]:
    """Read arrays of an npz file.

    Parameters
    ----------
    names
        Picks the arrays to read from the names of all that are there.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or something that is picked is no array.
    """
    arrays = {}
    name = None
    try:
        with path.open("rb") as raw, np.lib.npyio.NpzFile(raw, allow_pickle=False) as file:
            for name in names(file.files):
                arrays[name] = file[name]
                if not isinstance(arrays[name], np.ndarray):
                    raise ValueError(f"{name} is no array of numpy")
    except ConfigurationError:
        raise
    # For damage, zipfile, what unpacks and numpy raise a dozen kinds that nothing else unites.
    except Exception as error:
        if str(error).startswith("Object arrays"):
            raise ConfigurationError(
                f"{path}: {name} is of objects, which are stored as a pickle, and those are not "
                f"loaded; save {name}.astype(str) if they are texts, else {name}.astype(float)"
            ) from error
        raise ConfigurationError(
            f"{path} cannot be read as npz: {error or type(error).__name__}; "
            "write it with numpy.savez(path, name=array, …)"
        ) from error
    return arrays


def read_npz(path: Path, x: str = "x", y: str | None = None, regression: bool = False) -> Examples:
    """Read the examples of an npz file.

    Parameters
    ----------
    x
        The array of examples; of more than two dimensions, each example becomes a row. Without it,
        the sparse matrix with the arrays that `scipy.sparse.save_npz` writes.
    y
        The array of targets; None: the one named y, label, labels or target.
    regression
        Whether targets are numbers; texts may name classes otherwise.

    Raises
    ------
    ConfigurationError
        The file cannot be read, an array is missing or does not fit, or a value is not finite.
    """

    def chosen(there: list[str]) -> list[str]:
        matrix = [x] if x in there else [*SPARSE]
        target = [name for name in (LABELS if y is None else (y,)) if name in there][:1]
        if not {*matrix} <= {*there}:
            lacking = f"expected {x} and y, or a sparse matrix of scipy.sparse.save_npz and y"
        elif not target:
            lacking = f"and none of them is named {y or 'y'}"
        else:
            return target + matrix
        raise ConfigurationError(f"{path} has the arrays {', '.join(there)}, {lacking}")

    arrays = open_npz(path, chosen)
    name, targets = next(iter(arrays.items()))
    rows = finite(path, x, arrays[x]) if x in arrays else _sparse(path, arrays)
    return paired(str(path), rows, targets, (x, name), regression)


def paired(
    place: str, rows: Any, targets: Array, names: tuple[str, str], regression: bool
) -> Examples:
    """Return arrays as examples.

    Parameters
    ----------
    place
        Where they are from, for messages.
    rows
        float64, dense with any dimensions or a `csr_array`.
    targets
        One for each row: numbers, or unless it is a `regression` texts that name classes.
    names
        Of the two arrays.

    Raises
    ------
    ConfigurationError
        There is not a row for each target, or a target is missing or no finite number.
    """
    x, y = names
    if rows.ndim > 2 and 0 not in rows.shape:
        rows = rows.reshape(len(rows), -1)
    if rows.ndim != 2 or targets.shape != rows.shape[:1] or 0 in rows.shape:
        raise ConfigurationError(
            f"{place}: {x} is {list(rows.shape)} and {y} {list(targets.shape)}, expected one "
            f"example and one feature at least, and a value of {y} for each row of {x}"
        )
    read = numbers if regression else labels
    return Examples(rows, read(_column(targets), lambda row: f"{place}: {y}[{row}]"))


def finite(place: Path | str, name: str, array: Array) -> Array:
    """Return an array as float64; raises `ConfigurationError` unless it is of finite numbers."""

    def cell(number: int) -> str:
        return f"{place}: {name}{[*map(int, np.unravel_index(number, array.shape))]}"

    return numbers(_column(array.ravel()), cell).reshape(array.shape)


def _column(array: Array) -> pd.Series:
    import pandas as pd

    return pd.Series(array.astype(object) if array.dtype.kind in "SV" else array)


def _sparse(path: Path, arrays: Mapping[str, Array]) -> Any:
    # Not at the top: every process of a trial imports this package, for images.
    from scipy.sparse import csc_array, csr_array

    data = finite(path, "data", arrays["data"])
    try:
        make = {"csr": csr_array, "csc": csc_array}[str(arrays["format"].astype(str))]
        found = make((data, arrays["indices"], arrays["indptr"]), shape=tuple(arrays["shape"]))
        found.check_format(full_check=True)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: its sparse matrix is damaged, or neither csr nor csc: {error}"
        ) from error
    return found.tocsr()
