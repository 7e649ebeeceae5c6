"""Recorded failure traces: CSV files with a fault in each row, read and checked whole."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from dps.core.faults.expansion import MOST_FAULTS
from dps.core.faults.plan import AtSeconds, Cut, DiskFull, Fault, Kill, Pause
from dps.errors import ConfigurationError
from flows.config.errors import suggest
from flows.config.limits import LONGEST_NAME, MOST_TRACE_BYTES
from flows.files import read_bytes
from flows.quoting import quoted, shown, unseen

COLUMNS = ("seconds", "kind", "target", "duration")


class Row(NamedTuple):
    """One fault of a trace. `duration` is None for a kill of a node that is never replaced."""

    seconds: float
    kind: str
    target: str
    duration: float | None


def _lasting(cls: Callable[[str, AtSeconds, float], Fault]) -> Callable[[Row], Fault]:
    return lambda row: cls(row.target, AtSeconds(row.seconds, optional=True), row.duration or 0.0)


# What a row can say everything of that there is to say.
FAULTS: Mapping[str, Callable[[Row], Fault]] = {
    "kill": lambda row: Kill(row.target, AtSeconds(row.seconds, optional=True), row.duration),
    "pause": _lasting(Pause),
    "cut": _lasting(Cut),
    "disk_full": _lasting(DiskFull),
}


def read_trace(path: Path) -> tuple[Row, ...]:
    """Read a trace.

    Raises
    ------
    ConfigurationError
        It cannot be read, or a row is broken: the message names row, line and column.
    """
    name = shown(str(path), LONGEST_NAME)
    try:
        content = read_bytes(path, MOST_TRACE_BYTES)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot be read: {error.strerror or error}") from error
    read = _read(name, content)
    if isinstance(read, str):
        raise ConfigurationError(read)
    return read


# Every trial of a grid reads its traces, and a list of faults may name the same one many times.
@lru_cache(maxsize=16)
def _read(name: str, content: bytes) -> tuple[Row, ...] | str:
    """Return the rows, or what is wrong with one."""
    try:
        return _rows(name, content)
    except ConfigurationError as error:
        return str(error)


def _rows(name: str, content: bytes) -> tuple[Row, ...]:
    try:
        text = content.decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
        _check_columns(name, reader.fieldnames or ())
        rows = []
        for number, cells in enumerate(reader, 1):
            if number > MOST_FAULTS:
                raise ConfigurationError(f"{name}: expected {MOST_FAULTS:,} rows at most, got more")
            rows.append(_row(f"{name}, row {number} (line {reader.line_num})", cells))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name}: is no CSV in UTF-8: {error}") from error
    if not rows:
        raise ConfigurationError(f"{name}: has no rows; expected at least one fault")
    return tuple(rows)


def fault_of(row: Row) -> Fault:
    """Return the fault that a row stands for; it lapses if the training ends before."""
    return FAULTS[row.kind](row)


def _check_columns(place: str, found: object) -> None:
    names = list(found) if isinstance(found, list | tuple) else []
    for name in names:
        if name not in COLUMNS:
            raise ConfigurationError(
                f"{place}, row 0 (line 1): unknown column {quoted(name)}; "
                f"{suggest(str(name), COLUMNS)}"
            )
    for name in COLUMNS:
        if names.count(name) != 1:
            times = "is missing" if name not in names else "is there twice"
            raise ConfigurationError(
                f"{place}, row 0 (line 1): the column {name!r} {times}; expected the header "
                f"{','.join(COLUMNS)}"
            )


def _row(place: str, cells: Mapping[str | None, str | None]) -> Row:
    if None in cells:
        raise ConfigurationError(f"{place}: has more than {len(COLUMNS)} cells")
    text = {name: (cells[name] or "").strip() for name in COLUMNS}
    for_good = text["kind"] == "kill" and not text["duration"]
    row = Row(
        _number(place, "seconds", text["seconds"]),
        text["kind"],
        text["target"],
        None if for_good else _number(place, "duration", text["duration"]),
    )
    check_row(place, row)
    return row


def check_row(place: str, row: Row) -> None:
    """Refuse a row that stands for no fault; `place` says where it is.

    Raises
    ------
    ConfigurationError
        With the column that is wrong.
    """
    if row.kind not in FAULTS:
        _broken(place, "kind", f"unknown kind {quoted(row.kind)}; {suggest(row.kind, FAULTS)}")
    if not row.target:
        _broken(place, "target", "expected the name of a node, got nothing")
    if len(row.target) > LONGEST_NAME or (unseen(row.target)) is not None:
        _broken(place, "target", f"{quoted(row.target)} is the name of no node")
    for column, number in (("seconds", row.seconds), ("duration", row.duration)):
        if number is not None and not 0 <= number < math.inf:
            _broken(place, column, f"expected a number of seconds from 0, got {number:g}")
    if row.kind != "kill" and not row.duration:
        _broken(place, "duration", f"expected more than 0 seconds, got {row.duration or 0:g}")


def _number(place: str, column: str, text: str) -> float:
    try:
        number = float(text) if text.isascii() else math.nan
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        _broken(place, column, f"expected a number of seconds from 0, got {quoted(text)}")
    return number


def _broken(place: str, column: str, reason: str) -> NoReturn:
    raise ConfigurationError(f"{place}, column {column!r}: {reason}")
