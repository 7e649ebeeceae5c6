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
from functools import cache, partial
from numbers import Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

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
    for field in dataclasses.fields(choice):
        value = getattr(choice, field.name)
        if field.default is dataclasses.MISSING:
            arguments.append(brief(value))
        elif value != field.default:
            arguments.append(f"{field.name}={brief(value)}")
    return f"{type(choice).__name__}({', '.join(arguments)})"


def in_a_line(text: str) -> str:
    """Return a text, which may quote a file, in one printable line."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    fits = len(printable) <= LONGEST_REASON
    return printable if fits else f"{printable[: LONGEST_REASON - 1]}…"


def refused(name: str, value: object, expected: str) -> ConfigurationError:
    """Return the error for an invalid argument."""
    return ConfigurationError(f"{name}={shown(value)}, expected {expected}")


def described(value: object) -> str:
    """Return dtype and shape of an array, as in "float32[2, 3]", or the type of another value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


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


# Returns a value in the form that it is kept in; refuses others, under a name.
Check = Callable[[str, Any], Any]


def number(expected: str, holds: Callable[[float], bool]) -> Check:
    """Return a check of a number; `expected` is for messages."""

    def check(name: str, value: Any) -> float:
        number = real(value)
        if number is None or not holds(number):
            raise refused(name, value, expected)
        return number

    return check


def whole_from(least: int, of: str) -> Check:
    """Return a check of `integer_argument`."""
    return lambda name, value: integer_argument(name, value, least, of)


argument_above_zero = number("a number above 0", lambda x: 0 < x < math.inf)
NotNegative = Annotated[float, number("a number, 0 or above", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, argument_above_zero]
# Above 0 in float32 as well.
Visible = Annotated[
    float, number(f"a number of {LEAST:.2g} or above", lambda x: LEAST <= x < math.inf)
]
Fraction = Annotated[float, number("at least 0 and below 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, number("a number above 0, at most 1", lambda x: 0 < x <= 1)]
AboveOne = Annotated[float, number("more than 1", lambda x: 1 < x < math.inf)]
Seed = Annotated[int, whole_from(0, "numbers below 2⁶³")]


class Checked:
    """Base of dataclasses whose fields have the types above, or are one of several texts."""

    __slots__ = ()

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for field, (optional, check) in _checks(cls).items():
            value = getattr(self, field)
            if not (optional and value is None):
                checked = check(f"{cls.__name__}: {field}", value)
                object.__setattr__(self, field, checked)


@cache
def _checks(cls: type) -> dict[str, tuple[bool, Check]]:
    """Return the check of each field, and whether it may be None."""
    # A field that a subclass redeclares as a plain `int`, for another default, is still checked.
    base = cls.__mro__[1]
    by_field = {} if base is object else dict(_checks(base))
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # a type that only type checkers import, in a class of another package
        return by_field
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        optional = type(None) in kinds
        if len(kinds) - optional > 1:
            continue  # a class whose field may be of several types does its own check
        for kind in kinds:
            checks = getattr(kind, "__metadata__", ())
            if get_origin(kind) is Literal:
                checks = (partial(one_of, known=get_args(kind)),)
            for check in filter(callable, checks):
                by_field[field.name] = optional, check
    return by_field


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Return an argument; refuse one that is none of the known texts."""
    if not isinstance(value, str) or value not in known:
        *others, last = map(repr, known)
        raise refused(name, value, f"{', '.join(others)} or {last}" if others else last)
    return value


def integer_argument(name: str, value: Any, least: int, of: str) -> int:
    """Return an argument as an int; refuse one that is no integer from `least` on."""
    number = whole(value)
    if number is None or not least <= number < 1 << 63:
        raise refused(name, value, f"{least} or more whole {of}")
    return number
