"""Durations that cannot work are refused where they are given."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from dps import Timings
from dps.errors import ConfigurationError


@pytest.mark.parametrize("wrong", [0, math.inf, math.nan, "2"], ids=repr)
def test_a_duration_that_is_no_number_above_0_is_refused(wrong: Any) -> None:
    for field in fields(Timings):
        said = f"Timings: {field.name}=.*expected a number above 0"
        with pytest.raises(ConfigurationError, match=said):
            Timings(**{field.name: wrong})


def test_a_request_may_not_be_held_for_longer_than_a_call() -> None:
    with pytest.raises(ConfigurationError, match="hold=2, expected less than call=1"):
        Timings(call=1.0)


def test_whole_numbers_of_seconds_will_do() -> None:
    assert Timings(lease=10) == Timings(lease=10.0)
