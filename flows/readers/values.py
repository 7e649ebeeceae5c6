"""Cells of a column become numbers or labels, by the same rules for every format.

A column of texts that all are numbers is one of numbers, and one of True and False is boolean, as
in the CSV file that the same frame is written to. Numbers in other notations, such as 1,5 or 5%,
are refused: to guess what they mean is to be wrong in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.quoting import quoted

if TYPE_CHECKING:
    import pandas as pd

# "Na" is sodium, and "none" may be a class.
MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL")
TRUTH = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
# What people read as a number and float() refuses: 1,5 1.234,5 1 234 1_000 5% $3 (3) −5 0x1F 1d5
NOTATION = re.compile(
    r"""[-+−–(]?\s*(?:[$€£¥₹]|USD|EUR|GBP|CHF)?\s*[-+−–]?\s*
    (?:\d{1,3}(?:[.,'’\s]\d{3})+ | \d{1,2}(?:,\d{2})+,\d{3} | \d+(?:_\d+)* | (?=[.,]\d))
    (?:[.,]\d*)?(?:[ed][-+−]?\d+)?\s*(?:[%‰$€£¥₹)]|USD|EUR|GBP|CHF)?
    | 0x[0-9a-f]{1,16}""",
    re.VERBOSE | re.IGNORECASE,
)

Array = npt.NDArray[Any]
Place = Callable[[int], str]  # names a cell by its row


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of a file.

    Attributes
    ----------
    x
        One row for each example: a float64 array, or a `scipy.sparse.csr_array`.
    y
        Their targets: float64, or texts that name classes.
    note
        What was assumed about the file, for people; empty if nothing was.
    """

    x: Any
    y: Array
    note: str = ""


def numbers(column: pd.Series[Any], place: Place) -> Array:
    """Return a column as float64.

    Raises
    ------
    ConfigurationError
        A cell is missing or no finite number; the message has its `place`.
    """
    values = _parsed(_plain(column))
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise _refused(column, wrong[0], place, "a number")
    return values


def labels(column: pd.Series[Any], place: Place) -> Array:
    """Return a column of targets as float64 if each is a number, else as texts.

    Raises
    ------
    ConfigurationError
        A cell is missing, or is no number where most cells are; the message has its `place`.
    """
    cells = _plain(column)
    if cells.isna().any():
        row = int(cells.isna().to_numpy().argmax())
        raise _refused(column, row, place, "a class or a number")
    if cells.dtype == "boolean":
        return np.array(cells.astype(str).tolist())
    values = _parsed(cells)
    wrong = np.flatnonzero(~np.isfinite(values))
    if not len(wrong):
        return values
    if 2 * len(_texts(cells)) < len(cells):
        raise _refused(column, wrong[0], place, "a number, as in most rows")
    return np.array(cells.tolist())


def objection(column: pd.Series[Any]) -> str | None:
    """Return why a column holds no numbers, or None if no more of its cells are texts than not."""
    filled = _plain(column).dropna()
    texts = _texts(filled)
    if filled.empty:
        return "is empty" if len(column) else None
    return f"has no numbers, but {quoted(texts[0])}" if 2 * len(texts) > len(filled) else None


def _plain(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column as booleans, as numbers, or as texts without blanks around them."""
    import pandas as pd
    from pandas.api import types

    if isinstance(column.dtype, pd.CategoricalDtype):
        return _plain(pd.Series(column.cat.categories)).reindex(column.cat.codes)
    if types.is_bool_dtype(column):
        return column.astype("boolean")
    if types.is_numeric_dtype(column) and not types.is_complex_dtype(column):
        return column
    if types.is_object_dtype(column):
        column = column.map(_decoded)
    texts = column.astype("str").str.strip()
    texts = texts.mask(texts.isin(MISSING))
    truth = texts.map(TRUTH)
    return truth.astype("boolean") if truth.count() == texts.count() > 0 else texts


def _decoded(cell: Any) -> Any:
    return cell.decode("utf-8", "backslashreplace") if isinstance(cell, bytes) else cell


def _parsed(cells: pd.Series[Any]) -> Array:
    """Plain cells as float64, NaN where one is no number."""
    import pandas as pd

    return pd.to_numeric(cells, errors="coerce").to_numpy(np.float64, na_value=np.nan)


def _texts(cells: pd.Series[Any]) -> list[str]:
    """The plain cells, none of them missing, which are no number in any notation."""
    odd = cells[np.isnan(_parsed(cells))]
    return [text for text in odd.tolist() if not NOTATION.fullmatch(text)]


def _refused(column: pd.Series[Any], row: int, place: Place, expected: str) -> ConfigurationError:
    import pandas as pd

    cell = column.iloc[row]
    missing = pd.api.types.is_scalar(cell) and pd.isna(cell)
    text = "" if missing else str(_decoded(cell)).strip()
    if text in MISSING:
        advice = "leave such rows out, or fill them in"
    elif NOTATION.fullmatch(text):
        advice = "write it as 1234.5 (pandas.read_csv reads others, by decimal= and thousands=)"
    else:
        advice = "leave such rows out, or correct them"
    found = "missing" if missing else quoted(text) if text else "empty"
    return ConfigurationError(f"{place(row)} is {found}, expected {expected}; {advice}")
