"""Ratings from npz, parquet and CSV files: keys stay exact, and errors name the place."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dps.errors import ConfigurationError
from flows.readers.ratings import read_ratings

FAR = 2**53 + 1  # is no float64
USERS, ITEMS, VALUES = [FAR, 7, 2**63 - 1], [0, FAR, 3], [4.5, 1.0, 3.0]


def npz(folder: Path, **columns: Any) -> Path:
    np.savez(folder / "a.npz", **{name: np.array(values) for name, values in columns.items()})
    return folder / "a.npz"


def parquet(folder: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def csv(folder: Path, **columns: Any) -> Path:
    lines = [columns, *zip(*columns.values(), strict=True)]
    text = "".join(",".join("" if v is None else str(v) for v in line) + "\n" for line in lines)
    (folder / "a.csv").write_text(text)
    return folder / "a.csv"


@pytest.mark.parametrize("write", [npz, parquet, csv])
def test_keys_stay_what_they_are(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path, userId=USERS, movieId=ITEMS, rating=VALUES, timestamp=[1, 2, 3])
    found = read_ratings(path)
    assert found.users.tolist() == USERS
    assert found.items.tolist() == ITEMS
    assert found.values.tolist() == VALUES
    assert (found.users.dtype, found.values.dtype) == (np.int64, np.float64)
    assert found.part(np.array([2])).users.tolist() == [2**63 - 1]


def test_tabs_and_packed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"value\tuser\titem\n2\t5\t6\n"))
    found = read_ratings(path)
    assert (found.users[0], found.items[0], found.values[0]) == (5, 6, 2)


@pytest.mark.parametrize(
    ("write", "columns", "problem"),
    [
        (npz, {"user": USERS, "item": ITEMS}, "no single column 'rating' or 'value'; there are"),
        (csv, {"user": [1, "x"], "item": [1, 2], "rating": [1, 2]}, "line 3: column 'user' is 'x'"),
        (
            csv,
            {"user": [1, None], "item": [1, 2], "rating": [1, 2]},
            "line 3: column 'user' is empty",
        ),
        (
            csv,
            {"user": [1, 2], "item": [1, -2], "rating": [1, 2]},
            "line 3: column 'item' is -2, expected from 0",
        ),
        (
            csv,
            {"user": [1, 2], "item": [1, 2], "rating": [1, "inf"]},
            "line 3: column 'rating' is 'inf'",
        ),
        (
            csv,
            {"user": [1, 2], "item": [1, 2], "rating": [1, "nan"]},
            "line 3: column 'rating' is 'nan', exp",
        ),
        (
            csv,
            {"user": [1, 2], "item": [1, 2], "rating": [1, None]},
            "line 3: column 'rating' is empty",
        ),
        (csv, {"a": [1]}, "no single column 'user' or .*; there are: a"),
        (
            parquet,
            {"user": [1, None], "item": [1, 2], "rating": [1, 2]},
            "row 2: column 'user' is missing",
        ),
        (
            parquet,
            {"user": [1.0], "item": [1], "rating": [1]},
            "column 'user' has fractions, expected wh",
        ),
        (
            parquet,
            {"user": ["a"], "item": [1], "rating": [1]},
            "column 'user' is 'a', expected a number",
        ),
        (
            npz,
            {"user": [2**63], "item": [1], "rating": [1]},
            "row 1: column 'user' is 9223372036854775808",
        ),
        (npz, {"user": [1], "item": [1], "rating": ["b"]}, "row 1: column 'rating' is 'b'"),
        (npz, {"user": [1, 2], "item": [1], "rating": [1]}, r"user is \[2\], item is \[1\]"),
        (npz, {"user": [1], "item": [1], "rating": [{}]}, "rating is of objects"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, write: Callable[..., Path], columns: Any, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"a\.\w+.*{problem}"):
        read_ratings(write(tmp_path, **columns))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "", "a.csv, line 1: expected the names"),
        ("a.csv", "user,item,rating\n", "a.csv: has no ratings, expected one"),
        ("a.csv", "user,item,rating\n1,2\n", "a.csv, line 2: 2 cells, but"),
        (
            "a.csv",
            "user,item,rating\n\n\n1,2,3\n\n1,2,inf\n",
            "a.csv, line 6: column 'rating' is 'inf'",
        ),
        ("a.csv", "user,item,rating\n\n\n1,2,3\n\n1,2,x\n", "line 6: column 'rating' is 'x'"),
        ("a.csv", "user,user,item,rating\n1,1,2,3\n", "no single column 'user'"),
        ("a.parquet", "nothing", "a.parquet cannot be read"),
        ("a.npz", "nothing", "a.npz cannot be read as npz"),
        ("a.dat", "1 2 3", "expected one that ends in .npz, .parquet, .csv or .tsv"),
        ("b.gz", "1 2 3", "expected one that ends in .npz, .parquet, .csv or .tsv"),
    ],
)
def test_files_that_are_none_are_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        read_ratings(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"nowhere\.npz cannot be read"):
        read_ratings(tmp_path / "nowhere.npz")
