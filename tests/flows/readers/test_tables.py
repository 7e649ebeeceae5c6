"""CSV and parquet tables with named columns: what is read, and what is said of what is wrong."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow.parquet import write_table

from dps.errors import ConfigurationError
from flows.readers.tables import (
    ColumnMissing,
    csv_delimiter,
    csv_table,
    parquet_table,
    read_tables,
)
from flows.readers.values import Examples, objection

ROWS = 20_000


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "a.csv"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def read_csv(path: Path, features: Any = None, delimiter: str = ",") -> Examples:
    return read_tables([csv_table(path, delimiter)], "y", features)[0]


def read_parquet(path: Path, target: str = "y", features: Any = None) -> Examples:
    return read_tables([parquet_table(path)], target, features)[0]


def test_all_other_columns_are_features(tmp_path: Path) -> None:
    found = read_csv(csv_file(tmp_path, 'a, y ,"b,c"\n1,0,2.5\n\n3,1,-4e2\n'))
    np.testing.assert_array_equal(found.x, [[1, 2.5], [3, -400]])
    np.testing.assert_array_equal(found.y, [0, 1])
    assert found.x.dtype == found.y.dtype == np.float64


def test_features_are_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "a;b;y\n1;x;0\n3;4;1\n")
    np.testing.assert_array_equal(read_csv(path, ["a"], ";").x, [[1], [3]])
    with pytest.raises(ConfigurationError, match=r"a\.csv, line 2: column 'b' is 'x', expected"):
        read_csv(path, ["b", "a"], ";")


def test_two_tables_have_the_features_of_the_first_in_its_order(tmp_path: Path) -> None:
    first = csv_table(csv_file(tmp_path, "index,a,b,y\n4,1,2,0\n9,3,4,1\n"))
    other = csv_table(csv_file(tmp_path, "y,b,a,index\n0,5,6,7\n1,7,8,7\n"))
    train, test = read_tables([first, other], "y")
    np.testing.assert_array_equal(train.x, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(test.x, [[6, 5], [8, 7]])


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffy,a\n1,2\n3,4\n",
        "y,a\r\n1,2\r\n\r\n3,4",
        "y,a\r1,2\r3,4\r",
        "y, a\n1, 2\n\n 3 ,4\n",
        '"y","a"\n"1","2"\n"3","4"\n',
        "a,y,\n2,1,\n4,3,\n",
    ],
    ids=["byte order mark", "CRLF", "CR", "blanks", "quoted", "a comma at each end"],
)
def test_csv_is_read_as_others_write_it(tmp_path: Path, text: str) -> None:
    found = read_csv(csv_file(tmp_path, text))
    assert (found.x.tolist(), found.y.tolist()) == ([[2], [4]], [1, 3])
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read_csv(tmp_path / "a.csv.gz").x.tolist() == [[2], [4]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a.csv, line 1: expected the names of the columns"),
        ("a,b\n1,2\n", "a.csv: there is no column 'y'; there are: 'a', 'b'"),
        ("y\n1\n", "no column besides 'y'"),
        ("a,a,y\n1,2,3\n", "more than one column is named 'a'"),
        ("a,y\n", "has no rows"),
        ("a,y\n1,2\n1,2,3\n", "line 3: 3 cells, but line 1 names 2 columns"),
        ("a,y\n1,2,3\n", "line 2: 3 cells, but line 1 names 2 columns"),
        ("a,t,y\n1,x,2\n1,x\n", "line 3: 2 cells, but line 1 names 3 columns"),
        ("a,y\n1,2\n,2\n", "line 3: column 'a' is empty, expected a number; leave such rows out"),
        ("a,y\ninf,2\n", "line 2: column 'a' is 'inf'"),
        ("a,y\n1,nan\n", "line 2: column 'y' is 'nan'"),
        ("a,y\n1,cat\n1,\n", "line 3: column 'y' is empty, expected a class or a number"),
        ("a,y\n1,cat\n1,NA\n", "line 3: column 'y' is 'NA', expected a class or a number"),
        ("a,y\n1,cat\n1,nan\n", "line 3: column 'y' is 'nan', expected a class or a number"),
        ("a,y\n1,cat\n\n1,?\n", "line 4: column 'y' is '?', expected a class or a number"),
        ('a,t,y\n1,"b\nc",2\n\nx,d,3\n', "line 5: column 'a' is 'x', expected a number"),
        ('a,y\n1,2\n1,"2\n1,2\n', "line 3: unexpected end of data: a quotation mark that opens"),
        ('t,y,a\n"b,1,2\n"c",1,2\n', "line 2: ',' expected after '\"': a quotation mark"),
        ('y,t\n1,2\n1,"abc\n1,"d"\n', "line 3: ',' expected after '\"': a quotation mark"),
        ("a,y\n1,2\n\n1,\udce9\n", r"line 4: '1,\\xe9' is not in UTF-8; save the file"),
        ("a,y\n\r\r,\r3,4", r"lines end in \r, \n or \r\n by turns"),
    ],
)
def test_what_is_wrong_is_said_with_line_and_column(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError) as error:
        read_csv(path)
    assert str(error.value).startswith(str(path))
    assert problem in str(error.value)


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    path = csv_file(tmp_path, f"a,t,y\n1,{'x' * 200_000},2\n")
    assert read_csv(path, ["a"]).x.tolist() == [[1]]


def test_lines_are_counted_in_a_long_file(tmp_path: Path) -> None:
    rows = ["1,2"] * ROWS
    rows[ROWS - 5] = "nan,2"
    with pytest.raises(ConfigurationError, match=rf"line {ROWS - 3}: column 'a' is 'nan'"):
        read_csv(csv_file(tmp_path, "\n".join(["a,y", *rows])))


def test_files_that_are_missing_or_in_utf_16_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("a,y\n1,é\n".encode("utf-16"))
    with pytest.raises(
        ConfigurationError, match=r"line 1: .* is not in UTF-8; save the file as CS"
    ):
        read_csv(tmp_path / "a.csv")
    with pytest.raises(ConfigurationError, match=r"cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")


def test_a_missing_column_is_told_in_another_process(tmp_path: Path) -> None:
    with pytest.raises(ColumnMissing) as error:
        read_csv(csv_file(tmp_path, "a,b\n1,2\n"))
    again = pickle.loads(pickle.dumps(error.value))  # noqa: S301 (our own)
    assert (str(again), again.key) == (str(error.value), "target")


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


def test_lines_that_end_in_carriage_returns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a;y\r1;0\r2;1\r")
    assert csv_delimiter(path) == ";"
    np.testing.assert_array_equal(read_tables([csv_table(path, ";")], "y")[0].x, [[1.0], [2.0]])


def test_a_column_of_texts_is_told_from_one_of_numbers_by_most_of_its_cells(tmp_path: Path) -> None:
    text = "a,b, c,d,e,f,g\n1,x,,1,inf,1,\n2,3,NA,x,1,y,NA\n?,y,4,2,1,z,\n,z,5,y,1,2020-01-01,?\n"
    frame = csv_table(csv_file(tmp_path, text)).frame
    found = {name: objection(frame[name]) for name in frame}
    assert found == {
        **dict.fromkeys("acde"),
        "b": "has no numbers, but 'x'",
        "f": "has no numbers, but 'y'",
        "g": "is empty",
    }


# -- parquet ---------------------------------------------------------------------------------------


def parquet(folder: Path, **columns: Any) -> Path:
    write_table(pyarrow.table(columns), folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def test_columns_of_parquet_are_read(tmp_path: Path) -> None:
    path = parquet(tmp_path, a=[1, 2, 3], y=["u", "v", "u"], b=[0.5, 1.5, 2.5], c=["t"] * 3)
    found = read_parquet(path, "y", ["b", "a"])
    np.testing.assert_array_equal(found.x, [[0.5, 1], [1.5, 2], [2.5, 3]])
    assert found.y.tolist() == ["u", "v", "u"]
    assert read_parquet(path, "a", ["b"]).y.tolist() == [1, 2, 3]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    write_table(pyarrow.table([[1.0], [2], [3]], names=["a", "a", "y"]), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"a\.parquet: more than one column is named 'a'"):
        read_parquet(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"a": [1], "b": [2]}, "there is no column 'y'; there are: 'a', 'b'"),
        ({"a": ["x"], "y": [2]}, "row 1: column 'a' is 'x', expected a number"),
        ({"a": [1.0, None], "y": [2, 3]}, "row 2: column 'a' is missing"),
        ({"a": [True, None], "y": [2, 3]}, "row 2: column 'a' is missing"),
        ({"a": [1, None], "y": [2, 3]}, "row 2: column 'a' is missing"),
        ({"a": [[1], [2]], "y": [2, 3]}, "row 1: column 'a' is '[1]', expected a number"),
        ({"a": [1, 2], "y": ["u", None]}, "row 2: column 'y' is missing, expected a class or a"),
        ({"a": [1, 2], "y": ["u", "nan"]}, "row 2: column 'y' is 'nan', expected a class or a"),
        ({"a": [1, 2], "y": [1.0, np.inf]}, "row 2: column 'y' is 'inf', expected a number"),
        ({"y": [1, 2, 3]}, "no column besides 'y': no features"),
    ],
)
def test_what_is_wrong_in_parquet_is_said(tmp_path: Path, columns: Any, problem: str) -> None:
    path = parquet(tmp_path, **columns)
    with pytest.raises(ConfigurationError) as error:
        read_parquet(path)
    assert problem in str(error.value)


def test_parquet_may_have_a_colon_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    FRAME.to_parquet(tmp_path / "at 12:30.parquet")
    Path("of 1:2.parquet").mkdir()
    FRAME.to_parquet(tmp_path / "of 1:2.parquet" / "part.0.parquet")
    for name in ("at 12:30.parquet", "of 1:2.parquet"):
        np.testing.assert_array_equal(read_parquet(Path(name)).x, FRAME[["a"]])


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    for name in ("a.parquet", "none.parquet"):
        with pytest.raises(ConfigurationError, match=rf"{name} cannot be read as parquet"):
            read_parquet(tmp_path / name)


# -- row labels ------------------------------------------------------------------------------------


FRAME = pd.DataFrame({"a": [3.0, 1.5, 2.0, 0.5], "y": [0, 0, 1, 1]}).sample(frac=1, random_state=0)


INDEXED = {
    "no name": FRAME,
    "reset": FRAME.reset_index(),
    "reset twice": FRAME.reset_index().reset_index(),
    "read from CSV": FRAME.reset_index(names="Unnamed: 0"),
    "read by Arrow": FRAME.reset_index(names="__index_level_0__"),
    "from R": FRAME.reset_index(names="rownames"),
    "by an id": FRAME.reset_index(names="ID"),
    "two levels": FRAME.set_index([FRAME.index, FRAME.index]),
}


@pytest.mark.parametrize("case", INDEXED)
def test_the_index_of_a_frame_is_no_feature(tmp_path: Path, case: str) -> None:
    frame = INDEXED[case]
    frame.to_csv(tmp_path / "a.csv")
    frame.to_parquet(tmp_path / "a.parquet")
    for table in (csv_table(tmp_path / "a.csv"), parquet_table(tmp_path / "a.parquet")):
        (found,) = read_tables([table], "y")
        np.testing.assert_array_equal(found.x, FRAME[["a"]])
        assert all(repr(name) in found.note for name in table.row_labels())


def test_an_index_that_is_named_is_read(tmp_path: Path) -> None:
    """By whoever names it: it may be the target, or tell something."""
    FRAME.set_index("y").to_parquet(tmp_path / "a.parquet")
    assert read_parquet(tmp_path / "a.parquet").y.tolist() == FRAME["y"].tolist()
    FRAME.rename_axis("id").to_parquet(tmp_path / "a.parquet")
    np.testing.assert_array_equal(read_parquet(tmp_path / "a.parquet").x, FRAME[["a"]])
    found = read_parquet(tmp_path / "a.parquet", "y", ["id", "a"])
    np.testing.assert_array_equal(found.x[:, 0], FRAME.index)


def test_a_feature_that_is_called_index_and_numbers_no_rows_is_read(tmp_path: Path) -> None:
    for values in ("1.5,2.5", "3,3"):
        first, second = values.split(",")
        path = csv_file(tmp_path, f"index,y\n{first},0\n{second},1\n")
        np.testing.assert_array_equal(read_csv(path).x, [[float(first)], [float(second)]])


# -- folders ---------------------------------------------------------------------------------------


def parts_of(frame: pd.DataFrame) -> list[pd.DataFrame]:
    return [frame.iloc[n : n + 1] for n in range(len(frame))]


MANY = pd.DataFrame({"a": np.arange(12) % 5 + 0.5, "y": np.arange(12) % 2})


def test_a_folder_that_dask_wrote_is_read_in_the_order_of_its_parts(tmp_path: Path) -> None:
    for name in ("parquet", "csv"):
        (tmp_path / name).mkdir()
    for number, part in enumerate(parts_of(MANY)):
        part = part.rename_axis("__null_dask_index__")
        part.to_parquet(tmp_path / "parquet" / f"part.{number}.parquet")
        part.rename_axis(None).to_csv(tmp_path / "csv" / f"{number}.part")
    for name in ("_metadata", "_common_metadata", ".part.0.parquet.crc"):
        (tmp_path / "parquet" / name).write_bytes(b"no examples")
    for table in (parquet_table(tmp_path / "parquet"), csv_table(tmp_path / "csv")):
        (found,) = read_tables([table], "y")
        np.testing.assert_array_equal(found.x, MANY[["a"]])
        np.testing.assert_array_equal(found.y, MANY["y"])


def test_partitions_of_a_folder_are_columns(tmp_path: Path) -> None:
    for value, rows in MANY.groupby("y"):
        folder = tmp_path / f"year=2020{value}" / f"y={value}"
        folder.mkdir(parents=True)
        rows[["a"]].to_parquet(folder / "part.0.parquet")
    found = read_parquet(tmp_path)
    assert (found.x[:, 1] == 20200 + found.y).all()
    assert parquet_table(folder / "part.0.parquet").names == ["a"], "its folders are none of a file"


def test_what_is_wrong_in_a_part_is_told_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no file whose name ends in \.part"):
        csv_table(tmp_path)
    (tmp_path / "0.part").write_text("a,y\n1,2\n")
    (tmp_path / "1.part").write_text("a,y\n1,2\nx,2\n")
    with pytest.raises(ConfigurationError, match=r"1\.part, line 3: column 'a' is 'x', expected"):
        read_csv(tmp_path)
    (tmp_path / "2.part").write_text("b,y\n1,2\n")
    with pytest.raises(ConfigurationError, match=r"2\.part: has other columns than the first"):
        read_csv(tmp_path)
    with pytest.raises(ConfigurationError, match=r"has no file whose name ends in \.parquet"):
        parquet_table(tmp_path)
