"""The ratings in npz, parquet and CSV files: who rated what, and how.

A file has a column (in npz an array) of users, one of items and one of ratings, and may have more.
Users and items are any whole numbers from 0 to 2⁶³ - 1, and stay what they are: they never become
floating-point numbers, which could not tell all of them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.npz import open_npz
from flows.readers.tables import Table, csv_table, parquet_table
from flows.readers.values import numbers

USERS = ("user", "user_id", "userId")
ITEMS = ("item", "item_id", "itemId", "movieId")
VALUES = ("rating", "value")
DELIMITERS = {".csv": ",", ".tsv": "\t"}

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


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
        no whole number or no finite rating; the message has its place.
    """
    table = _table(path)
    user, item, value = _chosen(path, table.names)
    if table.frame.empty:
        raise ConfigurationError(f"{path}: has no ratings, expected one at least")
    return Ratings(_keys(table, user), _keys(table, item), numbers(*table.column(value)))


def _table(path: Path) -> Table:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind in DELIMITERS:
        return csv_table(path, DELIMITERS[kind])
    if path.suffix == ".parquet":
        return parquet_table(path)
    if path.suffix != ".npz":
        raise ConfigurationError(
            f"{path}: what kind of file it is does not show in its name; expected one that ends in "
            f".npz, .parquet, {' or '.join(DELIMITERS)}"
        )
    import pandas as pd

    arrays = open_npz(path, partial(_chosen, path))
    shapes = [array.shape for array in arrays.values()]
    if len({*shapes}) > 1 or len(shapes[0]) != 1:
        told = ", ".join(f"{name} is {[*array.shape]}" for name, array in arrays.items())
        raise ConfigurationError(f"{path}: {told}; expected one of each for every rating")
    return Table(path, pd.DataFrame(arrays), lambda row: f"{path}, row {row + 1}")


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


def _keys(table: Table, name: str) -> Integers:
    column, place = table.column(name)
    if column.dtype.kind not in "iu":
        numbers(column, place)  # knows the cell, if one of them is none
        raise ConfigurationError(
            f"{table.path}: column {name!r} has fractions, expected whole numbers"
        )
    wrong = (column < 0) | (column > np.iinfo(np.int64).max)
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise ConfigurationError(f"{place(row)} is {column.iloc[row]}, expected from 0 to 2⁶³ - 1")
    return column.to_numpy(np.int64)
