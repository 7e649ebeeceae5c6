"""Cells become the same numbers and labels in every format, or are refused with their place."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dps.errors import ConfigurationError
from flows.readers.npz import read_npz
from flows.readers.tables import csv_table, parquet_table, read_tables
from flows.readers.values import Examples

# Two different values of each kind of column, and what they are as labels.
KINDS: dict[str, tuple[list[Any], list[Any]]] = {
    "whole numbers": ([3, 1], [3, 1]),
    "negative": ([-1, 1], [-1, 1]),
    "0.0 and 1.0": ([0.0, 1.0], [0, 1]),
    "all digits": ([0.1234567890123456, 1e-300], [0.1234567890123456, 1e-300]),
    "booleans": ([True, False], ["True", "False"]),
    "text": (["u", "v"], ["u", "v"]),
    "yes and no": (["yes", "no"], ["yes", "no"]),
    "numbers as texts": (["1e5", " 2 "], [1e5, 2]),
    "TRUE and FALSE": (["TRUE", "FALSE"], ["True", "False"]),
    "blanks": ([" a ", "b"], ["a", "b"]),
    "dates": ([date(2020, 1, 1), date(2020, 1, 2)], ["2020-01-01", "2020-01-02"]),
    "times": ([*pd.to_datetime(["2020-01-01", "2021-02-03"])], ["2020-01-01", "2021-02-03"]),
    "durations": ([timedelta(days=1), timedelta(days=2)], ["1 days", "2 days"]),
    "decimals": ([Decimal("0.25"), Decimal("3.00")], [0.25, 3]),
    "addresses": (["10.20.30.40", "10.20.30.41"], ["10.20.30.40", "10.20.30.41"]),
    "short dates": (["31.12.20", "1/2/20"], ["31.12.20", "1/2/20"]),
    "ranges": (["1-2", "3-4"], ["1-2", "3-4"]),
    "ranks": (["1st", "2nd"], ["1st", "2nd"]),
    "an element": (["Na", "none"], ["Na", "none"]),
}


def written(folder: Path, frame: pd.DataFrame) -> list[Examples]:
    """Read a frame as CSV, as parquet, and as arrays; the target is y, the only feature x."""
    frame.to_csv(folder / "a.csv", index=False)
    frame.to_parquet(folder / "a.parquet")
    y = frame["y"].to_numpy()
    if y.dtype.kind in "OmM":
        y = np.array(pd.read_csv(folder / "a.csv", dtype=str)["y"])
    np.savez(folder / "a.npz", x=frame[["x"]], y=y.astype(str) if y.dtype == object else y)
    tables = csv_table(folder / "a.csv"), parquet_table(folder / "a.parquet")
    return [*(read_tables([each], "y")[0] for each in tables), read_npz(folder / "a.npz")]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_the_same_in_every_format(tmp_path: Path, kind: str) -> None:
    cells, labels = KINDS[kind]
    frame = pd.DataFrame({"x": [1.5, 2.5, 3.5, 4.5], "y": cells * 2})
    for found in written(tmp_path, frame):
        np.testing.assert_array_equal(found.x, frame[["x"]])
        assert found.y.tolist() == labels * 2
    if kind == "durations":  # Arrow forgets what they are in categories
        return
    categories = frame.assign(y=frame["y"].astype("category"))
    categories.to_parquet(tmp_path / "b.parquet")
    assert read_tables([parquet_table(tmp_path / "b.parquet")], "y")[0].y.tolist() == labels * 2


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_same_in_every_format(tmp_path: Path, kind: str) -> None:
    cells, labels = KINDS[kind]
    frame = pd.DataFrame({"x": cells * 2, "y": [0, 1, 0, 1]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    numbers = {"True": 1.0, "False": 0.0}
    wanted = [numbers.get(label, label) for label in labels * 2]
    for table in (csv_table(tmp_path / "a.csv"), parquet_table(tmp_path / "a.parquet")):
        if all(isinstance(value, int | float) for value in wanted):
            assert read_tables([table], "y")[0].x[:, 0].tolist() == wanted
            continue
        with pytest.raises(
            ConfigurationError, match=rf"(line 2|row 1): column 'x' is '{wanted[0]}"
        ):
            read_tables([table], "y")


@pytest.mark.parametrize(
    "cell",
    [
        *("1,5", "1,234.5", "1.234,5", "1 234", "1\xa0234", "1'234", "12,34,567", "1_000"),
        *("5%", "5 %", "$3", "3 €", "EUR 3", "(3)", "−5", "0x1F", "1d5", "+ 5", "٣", ",5"),
    ],
)
def test_numbers_in_another_notation_are_neither_labels_nor_left_out(
    tmp_path: Path, cell: str
) -> None:
    frame = pd.DataFrame({"x": [1, 2, 3], "y": ["2", "1.5", cell]})
    for other in (frame, frame.assign(y=[cell] * 3), frame.rename(columns={"x": "y", "y": "x"})):
        other.to_csv(tmp_path / "a.csv", index=False)
        table = csv_table(tmp_path / "a.csv")
        with pytest.raises(ConfigurationError) as error:
            read_tables([table], "y")
        assert f"is {cell!r}, expected a number" in str(error.value)
        assert f"line {4 if other['y'][0] != cell else 2}: column" in str(error.value)
        assert "write it as 1234.5" in str(error.value)


def test_one_text_among_numbers_is_no_class(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": range(4), "y": ["1", "2", "unknown", "3"]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(ConfigurationError, match="line 4: column 'y' is 'unknown', expected a num"):
        read_tables([csv_table(tmp_path / "a.csv")], "y")
    frame["y"] = ["a1", "b", "2", "b"]
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert read_tables([csv_table(tmp_path / "a.csv")], "y")[0].y.tolist() == ["a1", "b", "2", "b"]


def test_a_number_to_be_predicted_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,yes\n2,no\n")
    with pytest.raises(ConfigurationError, match="line 2: column 'y' is 'yes', expected a number"):
        read_tables([csv_table(tmp_path / "a.csv")], "y", regression=True)
    (tmp_path / "a.csv").write_text("x,y\n1,True\n2,False\n")
    (found,) = read_tables([csv_table(tmp_path / "a.csv")], "y", regression=True)
    assert found.y.tolist() == [1, 0]
