"""Tables with named columns: CSV and parquet, as files or as the folders that Dask writes.

One column is the target, and others are features. What numbers the rows, such as the index of a
pandas frame, is no feature unless it is named: where rows were sorted by class, it tells the class.
"""

from __future__ import annotations

import csv
import io
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dps.errors import ConfigurationError
from flows.quoting import listed, meant, quoted
from flows.readers.files import files_of, first_wrong, opened, shown
from flows.readers.values import Examples, Place, labels, numbers

if TYPE_CHECKING:
    import pandas as pd

DELIMITERS = ",;\t|"
# What the files of a folder end in.
PARTS = {"csv": ".part", "parquet": ".parquet"}
MOST_NAMED = 24  # columns in a message
# What pandas, Dask and Arrow call an index that has no name; CSV has an empty name.
UNNAMED = re.compile(r"(Unnamed: \d+|__index_level_\d+__|__null_dask_index__)?")
# What others call row numbers, which these are if each is there once.
NUMBERED = re.compile(r"index|idx|id|level_\d+|row_?(names?|numbers?|nr|ids?)", re.IGNORECASE)


class ColumnMissing(ConfigurationError):
    """A column is missing; `key` is the setting that names it, target or features."""

    key = ""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table as it is in a file.

    Attributes
    ----------
    path
        The file or folder.
    frame
        The columns, with a row for each example.
    place
        Names a row, for messages: by its line in CSV.
    index
        Columns that are the index of a pandas frame.
    """

    path: Path
    frame: pd.DataFrame
    place: Place
    index: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Of the columns, in their order."""
        return [*self.frame.columns]

    def column(self, name: str) -> tuple[pd.Series, Place]:
        """Return a column, and what names its cells."""
        return self.frame[name], lambda row: f"{self.place(row)}: column {name!r}"

    def row_labels(self) -> dict[str, str]:
        """The columns that number or name the rows, each with what shows it."""
        found = {name: self._label(name) for name in self.names}
        return {name: reason for name, reason in found.items() if reason}

    def _label(self, name: str) -> str | None:
        if name in self.index:
            return "is the index of the pandas frame"
        if UNNAMED.fullmatch(name):
            return "has no name: the numbers of the rows?"
        if NUMBERED.fullmatch(name) and self.names.count(name) == 1:
            column = self.frame[name]
            if column.is_unique and column.dtype.kind in "iu":
                return "numbers the rows"
        return None


def read_tables(
    tables: Sequence[Table],
    target: str,
    features: Sequence[str] | None = None,
    regression: bool = False,
) -> list[Examples]:
    """Return the examples of tables that have the same features.

    Parameters
    ----------
    target
        The column of targets: numbers, or unless it is a `regression` texts that name classes.
    features
        The columns of features, in this order; None: all columns of the first table but the target
        and row labels.

    Raises
    ------
    ConfigurationError
        A column is missing or there twice, or a cell is no finite number; the message has its
        place.
    """
    first, note = tables[0], ""
    if features is None:
        labelled = first.row_labels().keys() - {target}
        features = [name for name in first.names if name not in {target, *labelled}]
        note = f"without {listed(map(quoted, sorted(labelled)), MOST_NAMED)}" if labelled else ""
    found = []
    for table in tables:
        require(table, [target], "target")
        require(table, features, "features")
        if not features:
            raise ConfigurationError(f"{table.path}: no column besides {target!r}: no features")
        if table.frame.empty:
            raise ConfigurationError(f"{table.path}: has no rows, expected one for each example")
        x = np.column_stack([numbers(*table.column(name)) for name in features])
        y = (numbers if regression else labels)(*table.column(target))
        found.append(Examples(x, y, note))
    return found


def require(table: Table, names: Iterable[str], key: str) -> None:
    """Raise `ConfigurationError` unless each of these columns is there, once."""
    for name in names:
        if name not in table.names:
            there = f"there are: {listed(map(quoted, table.names), MOST_NAMED)}"
            question = meant(name, table.names)
            known = f"{question} T{there[1:]}" if question else there
            missing = ColumnMissing(f"{table.path}: there is no column {quoted(name)}; {known}")
            missing.key = key
            raise missing
        if table.names.count(name) > 1:
            raise ConfigurationError(
                f"{table.path}: more than one column is named {name!r}; rename one of them"
            )


# -- CSV -------------------------------------------------------------------------------------------


def csv_delimiter(path: Path) -> str:
    """Return the delimiter that parts the first line of a CSV file into the most names."""
    with opened(_parts(path, "csv")[0]) as file:
        first = file.readline().decode("utf-8-sig", "replace").partition("\r")[0]
    return max(DELIMITERS, key=lambda each: len(next(csv.reader([first], delimiter=each), [])))


def csv_table(path: Path, delimiter: str = ",") -> Table:
    """Read CSV in UTF-8 whose first line names the columns, plain or .gz, or a folder of *.part.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or is no CSV; the message has the line.
    """
    import pandas as pd

    frames: list[pd.DataFrame] = []
    lines = []
    for file in _parts(path, "csv"):
        frame, of_rows = _csv(file, delimiter)
        if frames and [*frame.columns] != [*frames[0].columns]:
            raise ConfigurationError(f"{file}: has other columns than the first file of {path}")
        frames.append(frame)
        lines.append((file, of_rows))

    def place(row: int) -> str:
        places = (f"{file}, line {line}" for file, of_rows in lines for line in of_rows)
        return next(islice(places, row, None))

    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    return Table(path, frame, place)


def _csv(path: Path, delimiter: str) -> tuple[pd.DataFrame, Sequence[int]]:
    """The cells of a file, and the line of each row.

    The csv module knows the lines and refuses what pandas reads in its own way, such as a quotation
    mark that swallows rows; pandas knows the types, and is fast.
    """
    import pandas as pd

    try:
        with opened(path) as file:
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
            header, lines = _lines(path, text, delimiter)
    except UnicodeDecodeError as error:
        with opened(path) as file:
            undecoded = file.readlines()
        number = first_wrong(undecoded, bytes.decode)
        raise ConfigurationError(
            f"{path}, line {number + 1}: {shown(undecoded[number])} is not in UTF-8; save the file "
            "as CSV in UTF-8"
        ) from error
    if not lines:
        return pd.DataFrame(columns=header), lines
    with opened(path) as file:
        frame = pd.read_csv(
            file,
            sep=delimiter,
            encoding="utf-8-sig",
            header=0,
            names=range(len(header)),
            index_col=False,
            keep_default_na=False,  # a text is what it is
            skipinitialspace=True,
            low_memory=False,  # would type a column piece by piece
        )
    if len(frame) != len(lines):  # a lone \r is more to pandas than the end of a line
        raise ConfigurationError(rf"{path}: lines end in \r, \n or \r\n by turns; use one of them")
    frame.columns = pd.Index(header)
    return frame, lines


def _lines(path: Path, file: io.TextIOWrapper, delimiter: str) -> tuple[list[str], Sequence[int]]:
    """The names of the columns, and the line of each row; blank lines are passed over."""
    limit = csv.field_size_limit(2**31 - 1)  # a cell may hold a document; pandas has no limit
    reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
    lines, line = array("q"), 0
    try:
        header = [name.strip() for name in next(reader, [])]
        if not any(header):
            raise ConfigurationError(f"{path}, line 1: expected the names of the columns")
        line = reader.line_num
        for row in reader:
            line = reader.line_num
            if row and len(row) != len(header):
                raise ConfigurationError(
                    f"{path}, line {line}: {len(row)} cells, but line 1 names {len(header)} columns"
                )
            if row:
                lines.append(line)
    except csv.Error as error:
        raise ConfigurationError(
            f"{path}, line {line + 1}: {error}: a quotation mark that opens a cell there is not "
            "closed, or one inside the cell is not doubled"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return header, lines


# -- parquet ---------------------------------------------------------------------------------------


def parquet_table(path: Path) -> Table:
    """Read a parquet file, or a folder of them, partitioned or not.

    Raises
    ------
    ConfigurationError
        It cannot be read.
    """
    import pyarrow
    from pyarrow.dataset import dataset
    from pyarrow.parquet import ParquetFile

    place = path.absolute()  # Arrow takes a name with a colon for an address
    files = [*map(str, _parts(place, "parquet"))]
    try:
        if path.is_dir():
            found = dataset(files, partitioning="hive", partition_base_dir=str(place)).to_table()
        else:
            found = ParquetFile(place).read()
        frame = found.to_pandas()
    except (OSError, ValueError, TypeError, pyarrow.ArrowException) as error:
        raise ConfigurationError(f"{path} cannot be read as parquet: {error}") from error
    index = [name for name in frame.index.names if name not in (None, "__null_dask_index__")]
    frame = frame.reset_index(index, allow_duplicates=True).reset_index(drop=True)
    frame.columns = [str(name).strip() for name in frame.columns]
    named = frozenset(str(name).strip() for name in index)
    return Table(path, frame, lambda row: f"{path}, row {row + 1}", named)


def _parts(path: Path, kind: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for file in files_of(path) if file.name.endswith(PARTS[kind])]
    if not found:
        raise ConfigurationError(f"{path}: has no file whose name ends in {PARTS[kind]}")
    return found
