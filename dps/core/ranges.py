"""The checks of the numbers that are given to update rules, filters, tables and the like.

A number that passes becomes a plain float or int: numpy's own would turn float32 arrays into
float64, and cannot cross the wire.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from dps.errors import ConfigurationError

LEAST = float(np.finfo(np.float32).tiny)


def whole(value: Any) -> int | None:
    """Return a whole number of any type as a plain int; None if it is none, as truth values are."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def not_negative(owner: object, *fields: str) -> None:
    """Refuse fields that are negative, infinite or no number."""
    for field in fields:
        _require(owner, field, lambda x: 0 <= x < math.inf, "a number, 0 or above")


def positive(owner: object, *fields: str) -> None:
    """Refuse fields that are not above 0, infinite or no number."""
    for field in fields:
        _require(owner, field, lambda x: 0 < x < math.inf, "a number above 0")


def visible(owner: object, *fields: str) -> None:
    """Refuse fields that are no numbers above 0 in float32: there they would vanish."""
    for field in fields:
        _require(owner, field, lambda x: LEAST <= x < math.inf, f"a number of {LEAST:.2g} or above")


def fraction(owner: object, *fields: str) -> None:
    """Refuse fields that are not in [0, 1)."""
    for field in fields:
        _require(owner, field, lambda x: 0 <= x < 1, "0 or more and below 1")


def seed(owner: object, field: str) -> None:
    """Refuse a field that is no whole number from 0 to 2⁶³ - 1."""
    value = getattr(owner, field)
    number = whole(value)
    if number is None or not 0 <= number < 1 << 63:
        raise ConfigurationError(
            f"{type(owner).__name__}: {field}={value!r}, expected a whole number from 0 to 2⁶³ - 1"
        )
    object.__setattr__(owner, field, number)


def argument_above_zero(name: str, value: Any) -> None:
    """Refuse an argument that is not above 0, infinite or no number, as truth values are."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < math.inf:
        raise ConfigurationError(f"{name}={value!r}, expected a number above 0")


def whole_argument(name: str, value: Any, least: int, of: str) -> None:
    """Refuse an argument that is no whole number from `least` on; `of` says what it counts."""
    number = whole(value)
    if number is None or number < least:
        raise ConfigurationError(f"{name}={value!r}, expected {least} or more {of}")


def _require(owner: object, field: str, holds: Callable[[float], bool], expected: str) -> None:
    value = getattr(owner, field)
    if not isinstance(value, Real) or not holds(float(value)):
        raise ConfigurationError(f"{type(owner).__name__}: {field}={value!r}, expected {expected}")
    object.__setattr__(owner, field, float(value))
