"""Tables with named columns, CSV and parquet: some columns are features, and one is the target.

Features must be numbers. The target may be text, where it names the classes of examples.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.quoting import meant, quoted
from flows.readers.examples import Examples
from flows.readers.lines import shown
from flows.readers.tables import holds_numbers, numbers_of, open_parquet

DELIMITERS = ",;\t|"
ROWS = 1 << 14  # of a CSV file that are converted at once
MOST_NAMED = 24  # columns in a message
# How others write a value that is missing; "Na" is sodium, and "none" may be a class.
MISSING = frozenset(("", "NA", "N/A", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL"))

Array = npt.NDArray[Any]


class ColumnMissing(ConfigurationError):
    """A column that is named is not there; `key` tells as what it is named: target, features."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[type[ColumnMissing], tuple[str, str]]:
        return type(self), (str(self), self.key)


@dataclass(frozen=True, slots=True)
class ColumnNames:
    """Which columns are read.

    Attributes
    ----------
    target
        The column of targets.
    features
        The columns of features, in this order; None: all the others.
    """

    target: str
    features: tuple[str, ...] | None = None

    def chosen(self, place: str, found: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of features among those that were `found`, the target apart.

        Raises
        ------
        ColumnMissing
            A column is missing.
        ConfigurationError
            A column is there more than once, or there are no features.
        """
        named = f"there are: {', '.join(map(repr, found[:MOST_NAMED]))}"
        named += f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        features = self.features
        if features is None:
            features = tuple(name for name in found if name != self.target)
        for name in (self.target, *features):
            if name not in found:
                question = meant(name, found)
                known = f"{question} T{named[1:]}" if question else named
                raise ColumnMissing(
                    f"{place}: there is no column {quoted(name)}; {known}",
                    "target" if name == self.target else "features",
                )
            if found.count(name) > 1:
                raise ConfigurationError(
                    f"{place}: more than one column is named {name!r}; rename one of them"
                )
        if not features:
            raise ConfigurationError(f"{place}: no column besides {self.target!r}: no features")
        return features


def read_csv(path: Path, names: ColumnNames, delimiter: str = ",") -> Examples:
    """Read the examples of a CSV file in UTF-8, whose first line names its columns.

    Parameters
    ----------
    path
        The file, plain or .gz.
    names
        Which columns are what.
    delimiter
        The character between cells.

    Returns
    -------
    examples
        `x` is float64; `y` is float64 if each target is a number, else texts.

    Raises
    ------
    ConfigurationError
        The file cannot be read, lacks a column, or a cell is no finite number, or missing; the
        message has its line and its column.
    """
    with _opened(path) as file:
        reader = _cells(file, delimiter)
        header = _header(path, reader)
        features = names.chosen(f"{path}, line 1", header)
        columns = [header.index(name) for name in features]
        target = header.index(names.target)
        parts = []
        targets: list[str] = []
        lines: list[int] = []
        for cells, at in _pieces(path, reader, len(header)):
            parts.append(_converted(path, cells, at, columns, header))
            targets += (row[target].strip() for row in cells)
            lines += at
    if not targets:
        raise ConfigurationError(f"{path}: has no rows, expected one for each example")
    return Examples(np.concatenate(parts), _targets(path, targets, lines, names.target))


def read_parquet_columns(path: Path, names: ColumnNames) -> Examples:
    """Read the examples of a parquet file; needs pyarrow.

    Returns
    -------
    examples
        `x` is float64; `y` is float64 if the target has a type of numbers, else texts.

    Raises
    ------
    ConfigurationError
        The file cannot be read, lacks a column, or a value is no finite number; the message has its
        row, from 1, and its column. Or pyarrow is not installed.
    """
    with open_parquet(path) as file:
        features = names.chosen(str(path), file.schema_arrow.names)
        table = file.read(columns=[*features, names.target])
    if not len(table):
        raise ConfigurationError(f"{path}: has no rows, expected one for each example")
    x = np.column_stack([numbers_of(path, table, name) for name in features])
    return Examples(x, _parquet_target(path, table, names.target))


def csv_delimiter(path: Path) -> str:
    """Return the delimiter that parts the first line of a CSV file into the most names.

    Raises
    ------
    ConfigurationError
        The file cannot be read.
    """
    with _opened(path) as file:
        first = file.readline()
        return max(DELIMITERS, key=lambda each: len(next(csv.reader([first], delimiter=each), [])))


def csv_columns(path: Path, delimiter: str = ",") -> dict[str, str | None]:
    """Return the columns of a CSV file in their order: for each None, or a text that is in it.

    Of a column of numbers it is None, also if some of its cells are none. Only the first `ROWS`
    rows are looked at.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or has no line of names.
    """
    with _opened(path) as file:
        reader = _cells(file, delimiter)
        header = _header(path, reader)
        rows, _ = next(_pieces(path, reader, len(header)), ([], []))
    return {name: _text_in([row[n] for row in rows]) for n, name in enumerate(header)}


def parquet_columns(path: Path) -> dict[str, str | None]:
    """Return the columns of a parquet file: for each None if it is of numbers, else its type.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or pyarrow is not installed.
    """
    with open_parquet(path) as file:
        return {
            each.name: None if holds_numbers(each.type) else str(each.type)
            for each in file.schema_arrow
        }


# -- CSV -------------------------------------------------------------------------------------------


def _cells(file: IO[str], delimiter: str) -> Any:
    return csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)


def _header(path: Path, reader: Any) -> list[str]:
    header = [name.strip() for name in next(reader, [])]
    if not header:
        raise ConfigurationError(f"{path}, line 1: expected the names of the columns")
    return header


def _text_in(cells: Sequence[str]) -> str | None:
    """A text among the cells of a column, if more of them are texts than numbers."""
    filled = [cell for cell in map(str.strip, cells) if cell not in MISSING]
    texts = [cell for cell in filled if not is_number(cell)]
    return texts[0] if 2 * len(texts) > len(filled) else None


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield io.TextIOWrapper(file, "utf-8-sig", newline="")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no CSV in UTF-8: {error}") from error


def _pieces(path: Path, reader: Any, width: int) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Yield rows with their line numbers; empty lines are left out."""
    while piece := [(row, reader.line_num) for row in islice(reader, ROWS)]:
        kept = [(row, line) for row, line in piece if row]
        for row, line in kept:
            if len(row) != width:
                raise ConfigurationError(
                    f"{path}, line {line}: {len(row)} cells, but line 1 names {width} columns"
                )
        if kept:
            yield [row for row, _ in kept], [line for _, line in kept]


def _converted(
    path: Path, rows: Sequence[list[str]], lines: list[int], columns: list[int], header: list[str]
) -> Array:
    """The features of some rows as float64."""
    pick = itemgetter(*columns) if len(columns) > 1 else lambda row: (row[columns[0]],)
    try:
        values = np.array([[*map(float, pick(row))] for row in rows])
    except ValueError:
        values = None
    # Python takes 1_000 for 1000, and nobody else does.
    underlined = any("_" in " ".join(pick(row)) for row in rows)
    if values is not None and not underlined and np.isfinite(values).all():
        return values
    for row, line in zip(rows, lines, strict=True):
        for column in columns:
            if not is_number(row[column]):
                raise _no_number(path, line, header[column], row[column])
    raise AssertionError("one of the cells is no finite number")


def _targets(path: Path, cells: list[str], lines: list[int], name: str) -> Array:
    try:
        values = None if any("_" in cell for cell in cells) else np.array([*map(float, cells)])
    except ValueError:
        values = None
    if values is None:
        for cell, line in zip(cells, lines, strict=True):
            if cell in MISSING:
                raise _no_number(path, line, name, cell, "a class or a number")
        return np.array(cells)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise _no_number(path, lines[wrong[0]], name, cells[wrong[0]])
    return values


def is_number(cell: str) -> bool:
    """Whether a text is a finite number, without underscores between its digits."""
    try:
        return "_" not in cell and math.isfinite(float(cell))
    except ValueError:
        return False


def _no_number(
    path: Path, line: int, column: str, cell: str, expected: str = "a number"
) -> ConfigurationError:
    found = "is empty" if not cell.strip() else f"is {shown(cell.encode())}"
    return ConfigurationError(
        f"{path}, line {line}: column {column!r} {found}, expected {expected}; leave such rows "
        "out, or fill them in"
    )


# -- parquet ---------------------------------------------------------------------------------------


def _parquet_target(path: Path, table: Any, name: str) -> Array:
    from pyarrow import types

    column = table.column(name)
    kind = getattr(column.type, "value_type", column.type)  # of a dictionary, what it is of
    if not (types.is_string(kind) or types.is_large_string(kind)):
        return numbers_of(path, table, name)
    values = column.to_pylist()
    missing = (n for n, value in enumerate(values) if value is None or value in MISSING)
    if (first := next(missing, None)) is not None:
        found = f"is {values[first]!r}" if values[first] else "nothing is there"
        raise ConfigurationError(
            f"{path}, row {first + 1}, column {name!r}: {found}, expected a class; leave such "
            "rows out, or fill them in"
        )
    return np.array(values)
