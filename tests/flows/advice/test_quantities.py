"""Sizes and durations as they are typed, and what is said of those that are none."""

from __future__ import annotations

import pytest

from dps.errors import ConfigurationError
from flows.advice.quantities import duration_text, parse_duration, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("400MB", 400e6), ("1.5 GiB", 1.5 * 2**30), ("10kB", 1e4), ("10KB", 1e4), ("3B", 3)],
)
def test_a_size_has_a_unit(text: str, nbytes: float) -> None:
    assert parse_size(text, "--model") == nbytes


@pytest.mark.parametrize(
    "text", ["400", "", "MB", "-1MB", "0MB", "4 00MB", "400mb", "1e400MB", "x", "400MBit"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--model .*: expected a size .*400MB"):
        parse_size(text, "--model")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.2", 0.2), ("200ms", 0.2), ("60s", 60), ("40min", 2400), ("40m", 2400), ("6h", 21600)],
)
def test_a_duration_is_in_seconds_unless_it_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text, "--mtbf") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "-5s", "six hours", "6 hours", "1e999", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--mtbf .*: expected a time .*6h"):
        parse_duration(text, "--mtbf")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.02, "20 ms"), (1.5, "1.5 s"), (2400, "40 min"), (21600, "6 h"), (3e5, "3.47 d")],
)
def test_a_duration_is_told_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_size_is_told_in_the_unit_that_suits_it() -> None:
    assert [size_text(n) for n in (12, 4e8, 1.5e9)] == ["12 B", "400 MB", "1.5 GB"]
