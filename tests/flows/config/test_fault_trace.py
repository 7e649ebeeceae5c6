"""Recorded failure traces: what a CSV file may say, and how mistakes in it are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.core.faults.plan import AtSeconds, Cut, DiskFull, Kill, Pause
from dps.errors import ConfigurationError
from flows.config.faults.trace import fault_of, read_trace

HEADER = "seconds,kind,target,duration\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def test_every_row_is_a_fault_that_lapses(trace: Path) -> None:
    rows = "2.5,kill,server-0,1\n3, pause ,worker-1,0.5\n\n4,kill,worker-0,\n5,cut,server-1,2\n"
    trace.write_text("\ufeff" + HEADER + rows + "1,disk_full,server-1,2\n", encoding="utf-8")
    assert tuple(map(fault_of, read_trace(trace))) == (
        Kill("server-0", AtSeconds(2.5, optional=True), 1.0),
        Pause("worker-1", AtSeconds(3.0, optional=True), 0.5),
        Kill("worker-0", AtSeconds(4.0, optional=True), None),
        Cut("server-1", AtSeconds(5.0, optional=True), 2.0),
        DiskFull("server-1", AtSeconds(1.0, optional=True), 2.0),
    )


def test_columns_may_come_in_any_order(trace: Path) -> None:
    trace.write_text("kind,target,duration,seconds\nkill,server-0,1,2\n")
    assert read_trace(trace) == ((2.0, "kill", "server-0", 1.0),)


def test_a_trace_that_has_changed_is_read_again(trace: Path) -> None:
    trace.write_text(HEADER + "1,kill,server-0,1\n")
    assert read_trace(trace) == read_trace(trace) == ((1.0, "kill", "server-0", 1.0),)
    trace.write_text(HEADER + "2,kill,server-0,1\n")
    assert read_trace(trace) == ((2.0, "kill", "server-0", 1.0),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "row 0 (line 1): the column 'seconds' is missing"),
        ("seconds,kind,target\n", "row 0 (line 1): the column 'duration' is missing"),
        ("seconds,kind,kind,target,duration\n", "the column 'kind' is there twice"),
        ("seconds,kind,targe,duration\n", "unknown column 'targe'; did you mean 'target'?"),
        (HEADER, "has no rows"),
        (HEADER + "1,kill,server-0,1\n\nsoon,kill,server-0,1\n", "row 2 (line 4), column 'sec"),
        (HEADER + "-1,kill,server-0,1\n", "expected a number of seconds from 0, got '-1'"),
        (HEADER + "nan,kill,server-0,1\n", "row 1 (line 2), column 'seconds'"),
        (HEADER + "1,kil,server-0,1\n", "column 'kind': unknown kind 'kil'; did you mean 'kill'?"),
        (HEADER + "1,kill,,1\n", "row 1 (line 2), column 'target': expected the name of a node"),
        (HEADER + "1,pause,server-0,\n", "column 'duration': expected a number of seconds"),
        (HEADER + "1,pause,server-0,0\n", "column 'duration': expected more than 0"),
        (HEADER + "1,kill,server-0\n1,kill\n", "row 2 (line 3), column 'target'"),
        (HEADER + "1,kill,server-0,1,2\n", "row 1 (line 2): has more than 4 cells"),
        (HEADER + '1,kill,"server-0,1\n', "is no CSV in UTF-8"),
    ],
)
def test_a_broken_trace_is_told_with_row_and_column(trace: Path, text: str, told: str) -> None:
    trace.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_trace(trace)
    assert str(trace) in str(caught.value)
    assert told in str(caught.value)


def test_what_is_no_text_is_refused(trace: Path) -> None:
    trace.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigurationError, match="no CSV in UTF-8"):
        read_trace(trace)
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_trace(trace.with_name("missing.csv"))
