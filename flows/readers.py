"""Readers of a user's file of examples: tables (CSV, parquet), npz and svmlight.

pandas, numpy and scikit-learn read the files. Each reader checks that features and targets are
finite numbers (or classes), and names the file and the line, row or array that is wrong. Numbers in
other notations, such as 1,5 or 5%, are refused: a guess could be wrong unnoticed.

One column of a table is the target, others are features. A column that numbers the rows, such as
the index of a pandas frame, is no feature unless it is named: in rows sorted by class, it reveals
the class.
"""

from __future__ import annotations

import csv
import gzip
import re
import warnings
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.quoting import listed, meant, quoted

# Functions import pandas, scipy and scikit-learn: every process of a trial imports this module.
if TYPE_CHECKING:
    import pandas as pd

# Fewer than the defaults of pandas: "None" may be a class.
MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL")
DELIMITERS = ",;\t|"
MAX_NAMED = 24  # columns in a message
MAX_CATEGORIES = 1000  # in a one-hot column; each becomes a feature
UNNAMED = re.compile(r"(Unnamed: \d+|__index_level_\d+__|__null_dask_index__)?")
NUMBERED = re.compile(r"index|idx|id|level_\d+|row_?(names?|numbers?|nr|ids?)", re.IGNORECASE)

Array = npt.NDArray[Any]
Place = Callable[[int], str]  # names a cell by the number of its row


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of a file.

    Attributes
    ----------
    x
        One row for each example: a float64 array, or a `scipy.sparse.csr_array`. NaN where a cell
        is missing and is to be filled.
    y
        Their targets: float64, or texts that name classes.
    note
        Assumptions about the file, for the user; empty if there are none.
    """

    x: Any
    y: Array
    note: str = ""


class ColumnUnfit(ConfigurationError):
    """A column is missing or does not fit its use; `key` is the setting that names it."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table as it is in a file.

    Attributes
    ----------
    path
        The file or folder.
    frame
        The columns; the index of the frame numbers the rows of the file.
    delimiter
        Between the cells of CSV; None: the table is parquet.
    """

    path: Path
    frame: pd.DataFrame
    delimiter: str | None = None

    def place(self, name: str) -> Place:
        """Return a function that names a cell of a column, by line in CSV, otherwise by row."""
        return lambda row: f"{self.path}, {self._row(self.frame.index[row])}: column {name!r}"

    def _row(self, row: int) -> str:
        if self.delimiter is None:
            return f"row {row + 1}"
        with _opened(self.path) as file:
            lines = csv.reader(file, delimiter=self.delimiter, skipinitialspace=True)
            filled = (lines.line_num for cells in lines if len(cells) > 1 or "".join(cells).strip())
            return f"line {next(line for number, line in enumerate(filled) if number > row)}"


def read_csv(path: Path) -> Table:
    """Read CSV in UTF-8 whose first line names the columns, plain or .gz.

    The delimiter is the one of comma, semicolon, tab and bar that occurs most in the first line.

    Raises `ConfigurationError` if the file cannot be read or is not CSV; the message includes the
    line.
    """
    import pandas as pd

    try:
        with _opened(path, "replace") as file:
            first = file.readline()
        delimiter = max(DELIMITERS, key=re.sub('"[^"]*"', "", first).count)
        header = pd.read_csv(
            StringIO(first), sep=delimiter, header=None, dtype=str, keep_default_na=False
        )
        names = header.iloc[0].str.strip().tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more cells than names
            frame = pd.read_csv(
                path,
                sep=delimiter,
                encoding="utf-8-sig",
                skipinitialspace=True,
                keep_default_na=False,
                na_values=MISSING,
                index_col=False,
                low_memory=False,
            )
    except UnicodeDecodeError as error:
        with _opened(path, "replace") as file:
            line = next(
                number for number, text in enumerate(file, 1) if "\N{REPLACEMENT CHARACTER}" in text
            )
        raise ConfigurationError(
            f"{path}, line {line}: not valid UTF-8; save the file as CSV in UTF-8"
        ) from error
    except pd.errors.ParserWarning as error:
        raise ConfigurationError(
            f"{path}: rows have more cells than the {len(names)} names in line 1"
        ) from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _unreadable(path, error) from error
    return Table(path, _named(path, frame, names), delimiter)


def read_parquet(path: Path) -> Table:
    """Read a parquet file, or a folder of them, partitioned or not.

    Raises `ConfigurationError` if the file or folder cannot be read.
    """
    import pandas as pd

    try:
        frame = pd.read_parquet(path.absolute())  # Arrow parses a name with a colon as a URI
    except Exception as error:  # pyarrow's errors for damaged files have no common base
        raise ConfigurationError(f"{path} cannot be read as parquet: {error}") from error
    frame = frame.reset_index(drop=True)
    return Table(path, _named(path, frame, [str(name).strip() for name in frame.columns]))


def _named(path: Path, frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Return the frame with these column names; raise if a name is repeated."""
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise ConfigurationError(
            f"{path}: several columns are named {twice[0]!r}; rename all but one"
        )
    named = (name or f"Unnamed: {number}" for number, name in enumerate(names))
    return frame.set_axis([*named], axis="columns")


def table_examples(
    table: Table,
    target: str,
    features: Sequence[str] | None = None,
    missing: Literal["refuse", "drop", "mean"] = "refuse",
    one_hot: Sequence[str] = (),
    dates: Sequence[str] = (),
    regression: bool = False,
) -> Examples:
    """Return the examples of a table.

    Raises `ConfigurationError` if a column is missing, or a cell is no finite number; the message
    has its place.

    Parameters
    ----------
    target
        The column of targets.
    features
        The columns of features, in this order; None: all but the target and row labels.
    missing
        What happens to missing cells: refuse the file, drop the row, or fill them with the mean of
        their column in the training part.
    one_hot
        Columns of which each value becomes a feature that is 0 or 1.
    dates
        Columns of dates, which become days since 1970.
    regression
        Whether targets are numbers; otherwise texts may name classes.
    """
    import pandas as pd

    path, there, notes = table.path, [*table.frame.columns], list[str]()
    if features is None:
        left_out = [name for name in row_labels(table.frame) if name != target]
        features = [name for name in there if name not in {target, *left_out}]
        if left_out:
            notes.append(f"without {listed(map(quoted, left_out), MAX_NAMED)}")
    used = {"target": [target], "features": features, "one_hot": one_hot, "dates": dates}
    for key, name in ((key, name) for key, names in used.items() for name in names):
        if name not in there:
            known = f"there are: {listed(map(quoted, there), MAX_NAMED)}"
            if question := meant(name, there):
                known = f"{question} T{known[1:]}"
            raise ColumnUnfit(f"{path}: no column {quoted(name)}; {known}", key)
        if key in ("one_hot", "dates") and name not in features:
            raise ColumnUnfit(f"{path}: {quoted(name)} is not a feature", key)
    if not features or table.frame.empty:
        lacking = "rows" if features else f"column except {target!r}"
        raise ConfigurationError(f"{path} has no {lacking}, so no model can be trained on it")
    frame = table.frame[[*features, target]]
    if missing == "drop":
        frame = frame.dropna()
        if dropped := len(table.frame) - len(frame):
            notes.append(f"{dropped:,} rows with missing cells skipped")
        if frame.empty:
            raise ConfigurationError(f"{path}: every row has a missing cell; no row remains")
    table = Table(path, frame, table.delimiter)
    columns = []
    for name in features:
        cells, place, fill = frame[name], table.place(name), missing == "mean"
        if name in one_hot:
            _checked(cells, np.where(cells.isna(), np.nan, 0), place, "a category", fill)
            if (count := cells.nunique()) > MAX_CATEGORIES:
                raise ColumnUnfit(
                    f"{place(0)} is the first of {count:,} values; expected {MAX_CATEGORIES:,} "
                    "at most",
                    "one_hot",
                )
            columns.append(pd.get_dummies(cells).to_numpy(np.float64))
        elif name in dates:
            days = pd.to_datetime(cells, errors="coerce", format="mixed", utc=True)
            since = (days - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
            values = since.to_numpy(np.float64)
            columns.append(_checked(cells, values, place, "a date like 2026-01-31", fill))
        else:
            columns.append(numbers(cells, place, fill))
    read = numbers if regression else labels
    y = read(frame[target], table.place(target))
    return Examples(np.column_stack(columns), y, ", ".join(notes))


def row_labels(frame: pd.DataFrame) -> list[str]:
    """Return the names of columns that only number the rows."""
    whole = [name for name in frame.columns if frame[name].dtype.kind in "iu"]
    numbered = {name for name in whole if NUMBERED.fullmatch(name) and frame[name].is_unique}
    return [name for name in frame.columns if name in numbered or UNNAMED.fullmatch(name)]


def numbers(column: pd.Series[Any], place: Place, missing: bool = False) -> Array:
    """Return a column as float64; with `missing`, missing cells become NaN.

    Raises `ConfigurationError` if a cell is missing or not a finite number; the message includes
    its `place`.
    """
    return _checked(column, as_numbers(column), place, "a number", missing)


def labels(column: pd.Series[Any], place: Place) -> Array:
    """Return a target column as float64 if all cells are numbers, otherwise as strings.

    Raises `ConfigurationError` if a cell is missing, or is not a number although most are; the
    message includes its `place`.
    """
    if column.dtype.kind in "biuf":
        return _checked(column, as_numbers(column), place, "a number, as in other rows")
    texts = column.map(str).str.strip()
    if (absent := texts.isin(MISSING)).any():  # also in arrays of strings
        column = column.astype(object).mask(absent)
    values = as_numbers(column)
    wrong = ~np.isfinite(values)
    if 2 * wrong.sum() < len(values) or looks_like_numbers(texts):
        return _checked(column, values, place, "a number, as in other rows")
    _checked(column, np.where(column.isna(), np.nan, 0), place, "a class or a number")
    return np.array(texts.tolist())


def as_numbers(column: pd.Series[Any]) -> Array:
    """Return a column as float64; a cell that is missing or not a number becomes NaN."""
    import pandas as pd

    if column.dtype.kind in "mMc":  # pandas would convert a date to nanoseconds
        return np.full(len(column), np.nan)
    cells = column.astype(object) if isinstance(column.dtype, pd.CategoricalDtype) else column
    return pd.to_numeric(cells, errors="coerce").to_numpy(np.float64, na_value=np.nan)


def looks_like_numbers(texts: pd.Series[Any]) -> bool:
    """Return whether all strings look like numbers in some notation, such as 1,5 or 5%."""
    return bool(texts.str.fullmatch(r"[-+$€£]?\d[\d.,'%$€£\s]*").all())


def _checked(
    column: pd.Series[Any], values: Array, place: Place, expected: str, missing: bool = False
) -> Array:
    """Return the values; raise if one is not finite, except missing cells if `missing` is true."""
    absent = column.isna().to_numpy()
    bad = ~np.isfinite(values) & ~(absent & missing)
    if bad.any():
        row = int(bad.argmax())
        got = "missing" if absent[row] else quoted(str(column.iloc[row]).strip())
        raise ConfigurationError(
            f"{place(row)} is {got}, expected {expected}; correct or remove such rows"
        )
    return values


def _opened(path: Path, errors: str = "strict") -> IO[str]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    return cast(IO[str], opened(path, "rt", encoding="utf-8-sig", errors=errors, newline=""))


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or str(error).strip()
    return ConfigurationError(f"{path} cannot be read: {reason}")


# -- arrays ----------------------------------------------------------------------------------------


def read_npz(path: Path, x: str = "x", y: str = "y", regression: bool = False) -> Examples:
    """Read the examples of an npz file, as `numpy.savez` writes it; pickles are not loaded.

    `x` and `y` name the arrays of examples and of targets. With more than two dimensions, each
    example is flattened to a row. Raises `ConfigurationError` if the file cannot be read, an array
    is missing or does not fit, or a value is not finite.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            there = file.files
            loaded = {name: file[name] for name in (x, y) if name in there}
    # For damaged files, zipfile, zlib and numpy raise a dozen types without a common base.
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{path} cannot be read as npz: {reason}; write it with numpy.savez(path, x=…, y=…), "
            "with strings as array.astype(str)"
        ) from error
    for name in (x, y):
        if name not in loaded:
            raise ConfigurationError(f"{path} has the arrays {', '.join(there)}, but no {name!r}")
    return paired(str(path), loaded[x], loaded[y], (x, y), regression)


def paired(place: str, x: Any, y: Any, names: tuple[str, str], regression: bool) -> Examples:
    """Return arrays as examples: `x` is dense with any dimensions, or a sparse matrix.

    Without `regression`, texts in `y` may name classes. Messages have the `place` and the `names`
    of both arrays. Raises `ConfigurationError` if the numbers of rows and targets differ, or a
    value is not a finite number.
    """
    from scipy.sparse import csr_array, issparse

    if issparse(x):
        rows = csr_array(x)
        rows.data = _finite(place, f"{names[0]}.data", rows.data)
    else:
        rows = _finite(place, names[0], np.asarray(x))
        if rows.ndim > 2 and rows.size:
            rows = rows.reshape(len(rows), -1)
    targets = np.asarray(y)
    if rows.ndim != 2 or targets.shape != rows.shape[:1] or 0 in rows.shape:
        raise ConfigurationError(
            f"{place}: {names[0]} is {list(rows.shape)} and {names[1]} {list(targets.shape)}, "
            f"expected at least one example and one feature, and a value of {names[1]} for each "
            f"row of {names[0]}"
        )
    read = numbers if regression else labels
    return Examples(rows, read(_column(targets), lambda row: f"{place}: {names[1]}[{row}]"))


def _finite(place: str, name: str, array: Array) -> Array:
    """Return an array as float64; raise `ConfigurationError` unless all numbers are finite."""

    def cell(number: int) -> str:
        return f"{place}: {name}{[*map(int, np.unravel_index(number, array.shape))]}"

    return numbers(_column(array.ravel()), cell).reshape(array.shape)


def _column(array: Array) -> pd.Series[Any]:
    import pandas as pd

    if array.dtype.kind == "S":
        array = np.strings.decode(array, "utf-8", "backslashreplace")
    return pd.Series(array.astype(object) if array.dtype.kind in "UV" else array)


# -- svmlight --------------------------------------------------------------------------------------


def read_svmlight(path: Path) -> Examples:
    """Read an svmlight (libsvm) file, plain or .gz; `x` is a `csr_array`.

    Indices start at 0 if one of them is 0, otherwise at 1.

    Raises `ConfigurationError` if the file cannot be read or has no examples, or a line is invalid;
    the message includes the line number.
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    try:
        examples = _parsed(content)
    except (ValueError, OverflowError) as error:
        lines = content.splitlines(keepends=True)

        def fails(last: int) -> bool:
            try:
                _parsed(b"".join(lines[: last + 1]))
            except (ValueError, OverflowError):
                return True
            return False

        number = bisect_left(range(len(lines) - 1), True, key=fails)
        line = quoted(lines[number].decode("utf-8", "backslashreplace").strip())
        raise ConfigurationError(
            f"{path}, line {number + 1}: {line}, expected a number and then pairs such as 7:0.5, "
            f"whose indices increase: {error}"
        ) from error
    if not examples.x.nnz:
        raise ConfigurationError(f"{path}: expected at least one example with a feature")
    return examples


def _parsed(content: bytes) -> Examples:
    """Parse examples; raise `ValueError` or `OverflowError` if a line is invalid."""
    from scipy.sparse import csr_array
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(BytesIO(content), zero_based="auto")
    if not np.isfinite(x.data).all() or not np.isfinite(y).all():
        raise ValueError("a number is not finite")
    # Use 32-bit indices if they suffice, as scikit-learn's models expect.
    index = np.int32 if max(x.nnz, *x.shape) < 2**31 else np.int64
    arrays = x.data, x.indices.astype(index), x.indptr.astype(index)
    return Examples(csr_array(arrays, shape=x.shape), y)
