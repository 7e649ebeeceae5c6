"""Checks of numbers and choices in arguments and fields, and how messages show values.

A valid number becomes a plain float or int: numpy's scalars would turn float32 arrays into float64,
and cannot cross the wire.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import reprlib
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import numpy as np

from dps.errors import ConfigurationError

LEAST = float(np.finfo(np.float32).tiny)
NAMED = 12
LONGEST_REASON = 300

_BRIEF = reprlib.Repr()
_BRIEF.maxother = _BRIEF.maxstring = _BRIEF.maxlong = 100


def shown(value: object) -> str:
    """Return a value in one short line, for messages."""
    return " ".join(_BRIEF.repr(value).split())


def brief(choice: Any) -> str:
    """Return the `repr` of a value, without fields that have their default."""
    if not dataclasses.is_dataclass(choice) or isinstance(choice, type):
        return repr(choice)
    arguments = []
    positional = True
    for field in dataclasses.fields(choice):
        value = getattr(choice, field.name)
        required = field.default is dataclasses.MISSING
        if required and positional:
            arguments.append(brief(value))
        elif required or value != field.default:
            arguments.append(f"{field.name}={brief(value)}")
        positional = positional and required
    return f"{type(choice).__name__}({', '.join(arguments)})"


def in_a_line(text: str) -> str:
    """Return a text, which may quote a file, in one printable line."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    fits = len(printable) <= LONGEST_REASON
    return printable if fits else f"{printable[: LONGEST_REASON - 1]}…"


def refused(name: str, value: object, expected: str) -> ConfigurationError:
    """Return the error for an invalid argument."""
    return ConfigurationError(f"{name}={shown(value)}, expected {expected}")


def listed(names: Iterable[str]) -> str:
    """Return a list of names for messages: the first dozen, and their number."""
    known = list(names)
    more = f", … ({len(known):,} in all)" if len(known) > NAMED else ""
    return ", ".join(map(str, known[:NAMED])) + more


def whole(value: Any) -> int | None:
    """Return an integer of any type as a plain int; None for other values, such as bools."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """Return a number of any type as a plain float; None for other values, such as bools."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


Check = Callable[..., None]  # of an object and the names of its fields


def _numbers(expected: str, holds: Callable[[float], bool]) -> Check:
    def check(owner: object, *fields: str) -> None:
        for field in fields:
            value = getattr(owner, field)
            number = real(value)
            if number is None or not holds(number):
                raise refused(f"{_name(owner)}: {field}", value, expected)
            object.__setattr__(owner, field, number)

    return check


not_negative = _numbers("a number, 0 or above", lambda x: 0 <= x < math.inf)
positive = _numbers("a number above 0", lambda x: 0 < x < math.inf)
# Above 0 in float32 as well.
visible = _numbers(f"a number of {LEAST:.2g} or above", lambda x: LEAST <= x < math.inf)
fraction = _numbers("0 or more and below 1", lambda x: 0 <= x < 1)
share = _numbers("a number above 0, at most 1", lambda x: 0 < x <= 1)


def count(owner: object, field: str, least: int, of: str) -> None:
    """Refuse a field that is no integer from `least` on; `of` is the unit."""
    number = whole_argument(f"{_name(owner)}: {field}", getattr(owner, field), least, of)
    object.__setattr__(owner, field, number)


def seed(owner: object, field: str) -> None:
    """Refuse a field that is no integer from 0 to 2⁶³ - 1."""
    count(owner, field, 0, "numbers below 2⁶³")


def choice(owner: object, field: str, *known: str) -> None:
    """Refuse a field that is none of the known texts."""
    one_of(f"{_name(owner)}: {field}", getattr(owner, field), known)


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse an argument that is none of the known texts."""
    if not isinstance(value, str) or value not in known:
        *others, last = map(repr, known)
        raise refused(name, value, f"{', '.join(others)} or {last}" if others else last)


def argument_above_zero(name: str, value: Any) -> float:
    """Return an argument as a float; refuse one that is not above 0, infinite or no number."""
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise refused(name, value, "a number above 0")
    return number


def whole_argument(name: str, value: Any, least: int, of: str) -> int:
    """Return an argument as an int; refuse one that is no integer from `least` on."""
    number = whole(value)
    if number is None or not least <= number < 1 << 63:
        raise refused(name, value, f"{least} or more whole {of}")
    return number


def _name(owner: object) -> str:
    return type(owner).__name__
