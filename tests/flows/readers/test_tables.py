"""CSV and parquet tables: what is read, and the errors for a user's file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dps.errors import ConfigurationError
from flows.readers import Examples, read_csv, read_parquet, table_examples

FRAME = pd.DataFrame({"a": [3.0, 1.5, 2.0, 0.5], "y": [0, 0, 1, 1]}).sample(frac=1, random_state=0)


def written(folder: Path, text: str, name: str = "a.csv") -> Path:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder / name


def examples(path: Path, **keys: Any) -> Examples:
    table = read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
    return table_examples(table, **{"target": "y", **keys})


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffy,a\n1,2\n3,4\n",
        "y,a\r\n1,2\r\n\r\n3,4",
        "y, a\n1, 2\n\n 3 ,4\n",
        '"y","a"\n"1","2"\n"3","4"\n',
    ],
    ids=["byte order mark", "CRLF", "blanks", "quoted"],
)
def test_csv_is_read_as_others_write_it(tmp_path: Path, text: str) -> None:
    found = examples(written(tmp_path, text))
    assert (found.x.tolist(), found.y.tolist()) == ([[2], [4]], [1, 3])
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert examples(tmp_path / "a.csv.gz").x.tolist() == [[2], [4]]


def test_features_are_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "a;b;c;y\n1;x;7;u\n3;z;8;v\n")
    found = examples(path, features=("c", "a"))
    assert found.x.tolist() == [[7, 1], [8, 3]]
    assert found.y.tolist() == ["u", "v"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a.csv cannot be read: No columns to parse from file"),
        ("a,b\n1,2\n", "a.csv: no column 'y'; there are: 'a', 'b'"),
        ("a,a,y\n1,2,3\n", "several columns are named 'a'"),
        ("a ,a, y\n1,2,3\n", "several columns are named 'a'"),
        ("a,y\n", "has no rows"),
        ("a,y\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("a,y\n1,2,3\n1,2,3\n", "rows have more cells than the 2 names in line 1"),
        (
            "a,y\n1,2\n,2\n",
            "line 3: column 'a' is missing, expected a number; correct or remove such rows",
        ),
        ("a,y\ninf,2\n", "line 2: column 'a' is 'inf'"),
        ('a,y\n"1,5",0\n"2,5",1\n', "line 2: column 'a' is '1,5', expected a number"),
        ("a,y\n1,cat\n\n1,?\n", "line 4: column 'y' is missing, expected a class or a number"),
        ("a,y\n1,1\n2,1\n3,x\n", "line 4: column 'y' is 'x', expected a number, as in other rows"),
        ('a,t,y\n1,"b\nc",2\n\nx,d,3\n', "line 5: column 'a' is 'x', expected a number"),
        ('a,y\n1,2\n1,"2\n1,2\n', "EOF inside string"),
        ("a,y\n1,2\n\n1,\udce9\n", "a.csv, line 4: not valid UTF-8; save the file as CSV"),
    ],
)
def test_mistakes_are_reported_with_line_and_column(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        examples(written(tmp_path, text))
    assert problem in str(refused.value)
    assert str(tmp_path / "a.csv") in str(refused.value)


def test_files_that_are_missing_or_packed_wrongly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_csv(written(tmp_path, "a,y\n1,2\n", "a.csv.gz"))
    with pytest.raises(ConfigurationError, match="cannot be read as parquet"):
        read_parquet(written(tmp_path, "PAR1 and no more", "a.parquet"))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"features": ("b",), "one_hot": ("a",)}, "'a' is not a feature"),
        ({"dates": ("y",)}, "'y' is not a feature"),
        ({"one_hot": ("b",)}, "the first of 1,001 values; expected 1,000 at most"),
        ({"features": ("a",), "missing": "drop"}, "every row has a missing cell"),
    ],
)
def test_columns_that_cannot_be_used_so_are_refused(
    tmp_path: Path, columns: Any, problem: str
) -> None:
    rows = "".join(f",{n},0\n" for n in range(1001))
    with pytest.raises(ConfigurationError, match=problem):
        examples(written(tmp_path, f"a,b,y\n{rows}"), **{"features": ("b",), **columns})


def test_a_table_may_have_very_many_columns(tmp_path: Path) -> None:
    names = [f"column {n}" for n in range(12_000)]
    text = ",".join([*names, "y"]) + "\n" + ",".join("1" * 12_001)
    assert examples(written(tmp_path, text)).x.shape == (1, 12_000)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_divides_the_first_line_into_most_names(
    tmp_path: Path, delimiter: str
) -> None:
    text = delimiter.join(["a 1", "b 2", "y,z"]) + "\n" + delimiter.join("123")
    table = read_csv(written(tmp_path, text.replace(",z", "" if delimiter == "," else ",z")))
    assert table.frame.shape == (1, 3)


# -- missing cells, categories, dates --------------------------------------------------------------


def test_rows_with_missing_cells_are_dropped_or_kept_to_be_filled(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,y\n1,2,0\n,3,1\n5,NA,1\n7,8,0\n")
    dropped = examples(path, missing="drop")
    assert dropped.x.tolist() == [[1, 2], [7, 8]]
    assert dropped.note == "2 rows with missing cells skipped"
    np.testing.assert_array_equal(
        examples(path, missing="mean").x, [[1, 2], [np.nan, 3], [5, np.nan], [7, 8]]
    )
    path = written(tmp_path, "a,y\n,1\n1,1\nx,1\n")
    for missing in ("drop", "mean"):
        with pytest.raises(ConfigurationError, match="line 4: column 'a' is 'x', expected a num"):
            examples(path, missing=missing)


def test_categories_and_dates_become_numbers(tmp_path: Path) -> None:
    text = "plan,since,y\nred,1970-01-03,0\nblue,1970-01-02 12:00,1\nred,1971-01-01,1\n"
    found = examples(written(tmp_path, text), one_hot=("plan",), dates=("since",))
    assert found.x.tolist() == [[0, 1, 2], [1, 0, 1.5], [0, 1, 365]]
    for keys, problem in (
        ({"one_hot": ("nope",), "dates": ("since",)}, "no column 'nope'"),
        ({"dates": ("plan", "since")}, "line 2: column 'plan' is 'red', expected a date"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            examples(tmp_path / "a.csv", **keys)
    with pytest.raises(ConfigurationError, match="line 3: column 'plan' is missing"):
        examples(written(tmp_path, "plan,y\na,1\n?,2\n"), one_hot=("plan",))


def test_a_date_is_no_number_unless_it_is_named(tmp_path: Path) -> None:
    frame = FRAME.assign(when=pd.date_range("1970-01-02", periods=4))
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match="row 1: column 'when' is '1970-01-02 00:00:00'"):
        examples(tmp_path / "a.parquet")
    assert examples(tmp_path / "a.parquet", dates=("when",)).x[:, 1].tolist() == [1, 2, 3, 4]


# -- parquet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"a": ["x"], "y": [2]}, "row 1: column 'a' is 'x', expected a number"),
        ({"a": [1.0, None], "y": [2, 3]}, "row 2: column 'a' is missing"),
        ({"a": [1, 2], "y": [1.0, np.inf]}, "row 2: column 'y' is 'inf', expected a number"),
    ],
)
def test_mistakes_in_parquet_are_reported_with_row_and_column(
    tmp_path: Path, columns: Any, problem: str
) -> None:
    pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError) as refused:
        examples(tmp_path / "a.parquet")
    assert problem in str(refused.value)


def test_parquet_may_be_a_partitioned_folder_and_have_a_colon_in_its_name(tmp_path: Path) -> None:
    FRAME.to_parquet(tmp_path / "at 12:30.parquet")
    assert examples(tmp_path / "at 12:30.parquet").x.tolist() == FRAME[["a"]].to_numpy().tolist()
    FRAME.to_parquet(tmp_path / "parts.parquet", partition_cols=["y"])
    found = examples(tmp_path / "parts.parquet")
    expected = FRAME.sort_values("y", kind="stable")
    assert (found.x[:, 0].tolist(), found.y.tolist()) == (expected["a"].tolist(), [0, 0, 1, 1])


@pytest.mark.parametrize(
    "frame",
    [
        FRAME,
        FRAME.reset_index(),
        FRAME.reset_index(names="__index_level_0__"),
        FRAME.reset_index(names="rownames"),
        FRAME.reset_index(names="ID"),
    ],
    ids=["index", "reset", "Arrow", "R", "id"],
)
def test_row_numbers_are_no_feature(tmp_path: Path, frame: pd.DataFrame) -> None:
    frame.to_csv(tmp_path / "a.csv")
    frame.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        np.testing.assert_array_equal(examples(tmp_path / name).x, FRAME[["a"]])
