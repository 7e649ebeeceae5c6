"""The ratings in npz, parquet and CSV files: who rated what, and how.

A file has a column (in npz an array) of users, one of items and one of ratings, and may have more.
Users and items are any whole numbers from 0 to 2⁶³ - 1, and stay what they are: they never become
floating-point numbers, which could not tell all of them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.npz import open_npz

USERS = ("user", "user_id", "userId")
ITEMS = ("item", "item_id", "itemId", "movieId")
VALUES = ("rating", "value")
DELIMITERS = {".csv": ",", ".tsv": "\t"}

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Columns = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Ratings:
    """What users gave items, one rating at each position.

    Attributes
    ----------
    users, items
        int64, from 0.
    values
        float64, finite.
    """

    users: Integers
    items: Integers
    values: Numbers

    def __len__(self) -> int:
        return len(self.values)

    def part(self, which: npt.NDArray[Any]) -> Ratings:
        """Some of them, by their positions or a mask."""
        return Ratings(self.users[which], self.items[which], self.values[which])


def read_ratings(path: Path) -> Ratings:
    """Read a file of ratings.

    Parameters
    ----------
    path
        .npz, .parquet, .csv or .tsv, the last two also with .gz, and with the columns' names in
        their first line. Which columns are read goes by their names: ``user``, ``user_id`` or
        ``userId``; ``item``, ``item_id``, ``itemId`` or ``movieId``; ``rating`` or ``value``.

    Raises
    ------
    ConfigurationError
        The file is of another kind or cannot be read, a column is missing, or something in it is
        no whole number or no finite rating; the message has its row, from 1. In CSV row 1 is the
        columns' names, and empty lines are no rows: pyarrow, who passes them over, counts so too.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    if path.suffix == ".npz":
        arrays = open_npz(path, partial(_chosen, path), "user=…, item=…, rating=…")
        return _ratings(path, arrays, 1)
    if path.suffix == ".parquet":
        return _ratings(path, _with_pyarrow(path, _parquet), 1)
    if kind in DELIMITERS:
        return _ratings(path, _with_pyarrow(path, _csv), 2)
    raise ConfigurationError(
        f"{path}: what kind of file it is does not show in its name; expected one that ends in "
        f".npz, .parquet, {' or '.join(DELIMITERS)}"
    )


def _with_pyarrow(path: Path, read: Callable[[Path], Columns]) -> Columns:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigurationError(
            f"{path}: reading it needs pyarrow; install it with: pip install pyarrow"
        ) from error
    try:
        return read(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _parquet(path: Path) -> Columns:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        chosen = _chosen(path, file.schema_arrow.names)
        table = file.read(columns=list(chosen))
    return {name: table.column(name) for name in chosen}


def _csv(path: Path) -> Columns:
    import pyarrow.csv

    whole = dict.fromkeys((*USERS, *ITEMS), pyarrow.int64())
    types = whole | dict.fromkeys(VALUES, pyarrow.float64())
    table = pyarrow.csv.read_csv(
        path,
        # Only a single thread knows the row in which something is wrong.
        read_options=pyarrow.csv.ReadOptions(use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=DELIMITERS[Path(path.name.removesuffix(".gz")).suffix]
        ),
        # Only what is empty is missing: "nan" is a number that is none, and told as such.
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, null_values=[""]),
    )
    return {name: table.column(name) for name in _chosen(path, table.column_names)}


def _chosen(path: Path, names: Iterable[str]) -> tuple[str, str, str]:
    """The names of the columns of users, items and ratings."""
    there = list(names)
    found = []
    for wanted in (USERS, ITEMS, VALUES):
        known = [name for name in wanted if there.count(name) == 1]
        if not known:
            raise ConfigurationError(
                f"{path} has no single column {' or '.join(map(repr, wanted))}; "
                f"there are: {', '.join(there)}"
            )
        found.append(known[0])
    return found[0], found[1], found[2]


def _ratings(path: Path, columns: Columns, first: int) -> Ratings:
    place = _Place(path, first)
    (user, users), (item, items), (value, values) = (
        (name, place.filled(name, column)) for name, column in columns.items()
    )
    if not users.shape == items.shape == values.shape or values.ndim != 1 or not len(values):
        raise ConfigurationError(
            f"{path}: {user} is {list(users.shape)}, {item} {list(items.shape)} and {value} "
            f"{list(values.shape)}, expected one of each for every rating, and at least one"
        )
    return Ratings(place.keys(user, users), place.keys(item, items), place.numbers(value, values))


@dataclass(frozen=True, slots=True)
class _Place:
    """Checks columns of a file, and says where something is wrong: `first` is their first row."""

    path: Path
    first: int

    def filled(self, name: str, column: Any) -> npt.NDArray[Any]:
        """A column of numpy or pyarrow as an array, if nothing is missing."""
        if isinstance(column, np.ndarray):
            return column
        missing = column.is_null().to_numpy()
        self._refuse(missing, name, column, "nothing")
        return np.asarray(column.to_numpy())

    def keys(self, name: str, values: npt.NDArray[Any]) -> Integers:
        if values.dtype.kind not in "iu":
            raise ConfigurationError(
                f"{self.path}: {name!r} is of {values.dtype}, expected whole numbers"
            )
        self._refuse((values < 0) | (values > np.iinfo(np.int64).max), name, values)
        return values.astype(np.int64, copy=False)

    def numbers(self, name: str, values: npt.NDArray[Any]) -> Numbers:
        if values.dtype.kind not in "fiu":
            raise ConfigurationError(
                f"{self.path}: {name!r} is of {values.dtype}, expected numbers"
            )
        numbers = values.astype(np.float64, copy=False)
        self._refuse(~np.isfinite(numbers), name, numbers)
        return numbers

    def _refuse(
        self, wrong: npt.NDArray[np.bool_], name: str, values: Any, what: str | None = None
    ) -> None:
        if wrong.any():
            at = int(wrong.argmax())
            raise ConfigurationError(
                f"{self.path}, row {self.first + at}, {name!r}: {what or values[at]}, "
                f"expected {'a finite number' if name in VALUES else 'from 0 to 2⁶³ - 1'}"
            )
