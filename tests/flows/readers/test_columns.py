"""CSV and parquet tables with named columns: what is read, and what is said of what is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.readers.columns import (
    ROWS,
    ColumnNames,
    csv_columns,
    csv_delimiter,
    parquet_columns,
    read_csv,
    read_parquet_columns,
)

NAMES = ColumnNames("y")


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "a.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_other_columns_are_features(tmp_path: Path) -> None:
    found = read_csv(csv_file(tmp_path, 'a, y ,"b,c"\n1,0,2.5\n\n3,1,-4e2\n'), NAMES)
    np.testing.assert_array_equal(found.x, [[1, 2.5], [3, -400]])
    np.testing.assert_array_equal(found.y, [0, 1])
    assert found.x.dtype == found.y.dtype == np.float64


def test_features_are_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "a;b;y\n1;x;0\n3;4;1\n")
    found = read_csv(path, ColumnNames("y", ("a",)), ";")
    np.testing.assert_array_equal(found.x, [[1], [3]])
    with pytest.raises(ConfigurationError, match=r"a\.csv, line 2: column 'b' is 'x', expected"):
        read_csv(path, ColumnNames("y", ("b", "a")), ";")


def test_targets_may_be_texts(tmp_path: Path) -> None:
    found = read_csv(csv_file(tmp_path, "a,y\n1,cat\n2, dog\n"), NAMES)
    assert found.y.tolist() == ["cat", "dog"]
    found = read_csv(csv_file(tmp_path, "a,y\n1,1_0\n2,10\n3,Na\n"), NAMES)
    assert found.y.tolist() == ["1_0", "10", "Na"]
    found = read_csv(csv_file(tmp_path, "a,y\n1,1_0\n2,10\n"), NAMES)
    assert found.y.tolist() == ["1_0", "10"]


def test_a_packed_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress("\ufeffy,a\n1,2\n".encode()))
    assert read_csv(tmp_path / "a.csv.gz", NAMES).x.tolist() == [[2]]


def test_lines_are_counted_over_more_rows_than_are_converted_at_once(tmp_path: Path) -> None:
    rows = ["1,2"] * (ROWS + 5)
    found = read_csv(csv_file(tmp_path, "\n".join(["a,y", *rows])), NAMES)
    assert found.x.shape == (ROWS + 5, 1)
    rows[ROWS + 2] = "nan,2"
    with pytest.raises(ConfigurationError, match=rf"line {ROWS + 4}: column 'a' is 'nan'"):
        read_csv(csv_file(tmp_path, "\n".join(["a,y", *rows])), NAMES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: expected the names of the columns"),
        ("a,b\n1,2\n", "line 1: there is no column 'y'; there are: 'a', 'b'"),
        ("y\n1\n", "no column besides 'y'"),
        ("a,a,y\n1,2,3\n", "more than one column is named 'a'"),
        ("a,y\n", "has no rows"),
        ("a,y\n1,2\n1,2,3\n", "line 3: 3 cells, but line 1 names 2 columns"),
        ("a,y\n1,2\n,2\n", "line 3: column 'a' is empty, expected a number"),
        ("a,y\ninf,2\n", "line 2: column 'a' is 'inf'"),
        ("a,y\n1,nan\n", "line 2: column 'y' is 'nan'"),
        ("a,y\n1,cat\n1,\n", "line 3: column 'y' is empty, expected a class or a number"),
        ("a,y\n1,2\n1_000,2\n", "line 3: column 'a' is '1_000', expected a number"),
        ("a,y\n1,cat\n1,NA\n", "line 3: column 'y' is 'NA', expected a class or a number"),
        ("a,y\n1,cat\n1,nan\n", "line 3: column 'y' is 'nan', expected a class or a number"),
        ('a,y\n1,"2\n', "is no CSV in UTF-8"),
    ],
)
def test_what_is_wrong_is_said_with_line_and_column(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"a\.csv.*{problem}"):
        read_csv(csv_file(tmp_path, text), NAMES)


def test_other_encodings_and_files_that_are_missing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("a,y\n1,é\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="is no CSV in UTF-8"):
        read_csv(tmp_path / "a.csv", NAMES)
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*No such file"):
        read_csv(tmp_path / "none.csv", NAMES)


# -- parquet ---------------------------------------------------------------------------------------


def parquet(folder: Path, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def test_columns_of_parquet_are_read(tmp_path: Path) -> None:
    path = parquet(tmp_path, a=[1, 2, 3], y=["u", "v", "u"], b=[0.5, 1.5, 2.5], c=["t"] * 3)
    found = read_parquet_columns(path, ColumnNames("y", ("b", "a")))
    np.testing.assert_array_equal(found.x, [[0.5, 1], [1.5, 2], [2.5, 3]])
    assert found.y.tolist() == ["u", "v", "u"]
    found = read_parquet_columns(path, ColumnNames("a", ("b",)))
    assert found.y.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"a": [1], "b": [2]}, "there is no column 'y'; there are: 'a', 'b'"),
        ({"a": ["x"], "y": [2]}, "column 'a' is of string, expected numbers"),
        ({"a": [1.0, None], "y": [2, 3]}, "row 2, column 'a'"),
        ({"a": [1, 2], "y": ["u", None]}, "row 2, column 'y': nothing is there"),
        ({"a": [1, 2], "y": ["u", "nan"]}, "row 2, column 'y': is 'nan', expected a class"),
    ],
)
def test_what_is_wrong_in_parquet_is_said(tmp_path: Path, columns: Any, problem: str) -> None:
    path = parquet(tmp_path, **columns)
    with pytest.raises(ConfigurationError, match=problem):
        read_parquet_columns(path, NAMES)


# -- which columns there are -----------------------------------------------------------------------


def test_a_column_of_texts_is_told_from_one_of_numbers_by_most_of_its_cells(tmp_path: Path) -> None:
    text = "a,b, c,d,e\n1,x,,1,inf\n2,3,NA,x,1\n?,y,4,2,1\n,z,5,y,1\n"
    found = csv_columns(csv_file(tmp_path, text))
    assert found == {"a": None, "b": "x", "c": None, "d": None, "e": None}


def test_later_rows_are_not_looked_at(tmp_path: Path) -> None:
    rows = ["1"] * ROWS + ["x"] * (2 * ROWS)
    assert csv_columns(csv_file(tmp_path, "\n".join(["a", *rows]))) == {"a": None}
    assert csv_columns(csv_file(tmp_path, "\n".join(["a", *rows[::-1]]))) == {"a": "x"}


def test_columns_of_a_file_without_rows_or_names(tmp_path: Path) -> None:
    assert csv_columns(csv_file(tmp_path, "a;b\n"), ";") == {"a": None, "b": None}
    with pytest.raises(ConfigurationError, match="line 1: expected the names of the columns"):
        csv_columns(csv_file(tmp_path, ""))


@pytest.mark.parametrize(
    ("header", "delimiter"),
    [
        ("a,b", ","),
        ("a", ","),
        ("", ","),
        ("a;b,c;d", ";"),
        ('"a, b";"c"', ";"),
        ('"a;b;c",d', ","),
        ("a\tb c\td", "\t"),
        ("a|b", "|"),
    ],
)
def test_the_delimiter_parts_the_first_line_into_most_names(
    tmp_path: Path, header: str, delimiter: str
) -> None:
    path = csv_file(tmp_path, f"{header}\n1,2,3,4;5\n")
    assert csv_delimiter(path) == delimiter


def test_columns_of_parquet_are_told_by_their_types(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    columns = {"a": [1, 2], "b": ["1", "2"], "c": [0.5, None], "d": [True, False]}
    write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert parquet_columns(tmp_path / "a.parquet") == {
        "a": None,
        "b": "string",
        "c": None,
        "d": None,
    }
