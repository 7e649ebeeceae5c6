"""Owns recorded failure traces: CSV files with a fault in each row, read and checked whole."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from dps.core.faults import AtSeconds, Cut, DiskFull, Fault, Kill, Pause
from dps.errors import ConfigurationError
from flows.complaints import suggest

COLUMNS = ("seconds", "kind", "target", "duration")


class Row(NamedTuple):
    """One fault of a trace. `duration` is None for a kill of a node that is never replaced."""

    seconds: float
    kind: str
    target: str
    duration: float | None


def _lasting(cls: Callable[[str, AtSeconds, float], Fault]) -> Callable[[Row], Fault]:
    return lambda row: cls(row.target, AtSeconds(row.seconds, lapses=True), row.duration or 0.0)


# What a row can say everything of that there is to say.
FAULTS: Mapping[str, Callable[[Row], Fault]] = {
    "kill": lambda row: Kill(row.target, AtSeconds(row.seconds, lapses=True), row.duration),
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
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True, strict=True)
            _check_columns(path, reader.fieldnames or ())
            rows = [
                _row(f"{path}, row {number} (line {reader.line_num})", cells)
                for number, cells in enumerate(reader, 1)
            ]
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: is no CSV in UTF-8: {error}") from error
    if not rows:
        raise ConfigurationError(f"{path}: has no rows; expected at least one fault")
    return tuple(rows)


def fault_of(row: Row) -> Fault:
    """Return the fault that a row stands for; it lapses if the training ends before."""
    return FAULTS[row.kind](row)


def _check_columns(path: Path, found: object) -> None:
    names = list(found) if isinstance(found, list | tuple) else []
    for name in names:
        if name not in COLUMNS:
            raise ConfigurationError(
                f"{path}, row 0 (line 1): unknown column {name!r}; {suggest(str(name), COLUMNS)}"
            )
    for name in COLUMNS:
        if names.count(name) != 1:
            times = "is missing" if name not in names else "is there twice"
            raise ConfigurationError(
                f"{path}, row 0 (line 1): the column {name!r} {times}; expected the header "
                f"{','.join(COLUMNS)}"
            )


def _row(place: str, cells: Mapping[str | None, str | None]) -> Row:
    if None in cells:
        raise ConfigurationError(f"{place}: has more than {len(COLUMNS)} cells")
    text = {name: (cells[name] or "").strip() for name in COLUMNS}
    if text["kind"] not in FAULTS:
        _broken(place, "kind", f"unknown kind {text['kind']!r}; {suggest(text['kind'], FAULTS)}")
    if not text["target"]:
        _broken(place, "target", "expected the name of a node, got nothing")
    return Row(
        _number(place, "seconds", text["seconds"]),
        text["kind"],
        text["target"],
        _duration(place, text["kind"], text["duration"]),
    )


def _duration(place: str, kind: str, text: str) -> float | None:
    if not text and kind == "kill":
        return None
    duration = _number(place, "duration", text)
    if duration == 0 and kind != "kill":
        _broken(place, "duration", "expected more than 0 seconds, got '0'")
    return duration


def _number(place: str, column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        _broken(place, column, f"expected a number of seconds from 0, got {text!r}")
    return number


def _broken(place: str, column: str, reason: str) -> NoReturn:
    raise ConfigurationError(f"{place}, column {column!r}: {reason}")
