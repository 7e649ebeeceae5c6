"""How an event is read back from a file, which may hold anything: every value is checked here.

What reads records computes with what it finds in events without looking at it again, so a value of
another type, or one that no run of dps can have written, must not get beyond this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from reprlib import Repr
from typing import Any, get_args, get_origin, get_type_hints

from dps.core.names import NODE_ROLES, ROLES, STORE_ROLES
from dps.events.base import Event

LARGEST = (1 << 63) - 1  # of whole numbers, which count something
LARGEST_SETTING_BITS = 1000  # a seed may be any number; this one is still one as a float
LATEST = 253_000_000_000.0  # in the year 9987, in seconds since the Unix epoch: still a date
LONGEST_REASON = 300
DEEPEST = 40  # of what is nested in a trial's settings

# What the training computes, and what it may fail to compute. All other numbers are finite.
_MAY_BE_INFINITE = {
    "Evaluated": ("loss", "accuracy", "objective", "stationarity"),
    "Reported": ("values",),
    "Filtered": ("residual_norm",),
}
_MOMENTS = ("t", "times")
# Of whole numbers, if that is not 0.
_LOWEST = {("TrainingStarted", "shards"): 1, ("TrainingStarted", "workers"): 1}
_LOWEST |= {("Reported", "versions"): -1}
_NOTHING = type(None)
_WORDS = {
    ("TrialEnded", "status"): ("valid", "invalid", "failed"),
    ("Acked", "outcomes"): ("applied", "duplicate", "buffered", "dropped"),
    ("NodeJoined", "role"): (*NODE_ROLES, *STORE_ROLES),
    ("NodeLeaving", "role"): (*NODE_ROLES, *STORE_ROLES),
    ("ResourceSampled", "role"): ROLES,
}

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


class NotAnEvent(ValueError):
    """A text is no event that this version of dps has written; the message says why."""


def from_line(line: str) -> Event:
    """Return the event of a line of a record.

    Raises
    ------
    NotAnEvent
        The line is no JSON, or not of an event, or a value is of another type or out of its range.
    """
    try:
        found = json.loads(line)
    except RecursionError:
        raise NotAnEvent("it is nested too deeply") from None
    except ValueError as error:
        raise NotAnEvent(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise NotAnEvent(f"it is {quoted(found)}, expected an object")
    kind = found.pop("event", None)
    if not isinstance(kind, str) or kind not in Event.kinds:
        raise NotAnEvent(f"there is no event {quoted(kind)}")
    known = _fields(kind)
    if unknown := found.keys() - known.keys():
        raise NotAnEvent(f"{kind} has no {', '.join(map(quoted, sorted(unknown)))}")
    if missing := [name for name in known if known[name].needed and name not in found]:
        raise NotAnEvent(f"{kind} lacks {', '.join(missing)}")
    values = {name: _checked(known[name], value) for name, value in found.items()}
    _same_length(known, kind, values)
    cls: Callable[..., Event] = Event.kinds[kind]
    return cls(**values)


def quoted(value: object) -> str:
    """Return a value as a message quotes it: in one line, and not all of it if it is long."""
    return _short.repr(value)


def in_a_line(text: str) -> str:
    """Return a reason that may quote anything that a file holds, in a line that can be printed."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    if len(printable) <= LONGEST_REASON:
        return printable
    return f"{printable[: LONGEST_REASON - 1]}…"


def plain(value: object) -> bool:
    """Whether a text can be printed and written; other values are."""
    if not isinstance(value, str) or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:  # one half of a pair of surrogates
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Field:
    """What a field of an event may hold; `inner` is that of a mapping's values."""

    place: str
    column: bool
    mapping: bool
    inner: _Field | None
    needed: bool
    types: frozenset[type]
    lowest: float
    highest: float
    infinite: bool
    words: tuple[str, ...]

    def unfit(self, value: object, wanted: str) -> NotAnEvent:
        return NotAnEvent(f"{self.place} is {quoted(value)}, expected {wanted}")


@cache
def _fields(kind: str) -> dict[str, _Field]:
    cls = Event.kinds[kind]
    hints = get_type_hints(cls)
    return {
        each.name: _field(kind, each.name, hints[each.name], each.default is MISSING)
        for each in fields(cls)
    }


def _field(kind: str, name: str, hint: Any, needed: bool) -> _Field:
    column, mapping = get_origin(hint) is tuple, get_origin(hint) is dict
    inner = None
    if mapping and (of_values := get_args(hint)[1]) is not Any:
        inner = _field(kind, name, of_values, needed)
    only = get_args(hint)[0] if column else hint
    types = frozenset({str} if mapping else get_args(only) or {only})
    if float in types:
        types |= {int}
        lowest, highest = (0.0, LATEST) if name in _MOMENTS else (-LARGEST, LARGEST)
    else:
        lowest, highest = _LOWEST.get((kind, name), 0), LARGEST
    return _Field(
        place=f"{name} of {kind}",
        column=column,
        mapping=mapping,
        inner=inner,
        needed=needed,
        types=types,
        lowest=lowest,
        highest=highest,
        infinite=name in _MAY_BE_INFINITE.get(kind, ()),
        words=_WORDS.get((kind, name), ()),
    )


def _checked(field: _Field, value: Any) -> Any:
    if field.column:
        if type(value) is not list:
            raise field.unfit(value, "a list")
        _require(field, value)
        return tuple(value)
    if field.mapping:
        if type(value) is not dict:
            raise field.unfit(value, "an object")
        _require(field, list(value))
        if field.inner is None:
            _require_plain(field, value)
        else:
            _require(field.inner, list(value.values()))
    else:
        _require(field, [value])
    return value


def _require(field: _Field, values: list[Any]) -> None:
    """Make sure that all values are of a type, and that a run of dps can have written them."""
    types = set(map(type, values))
    if not types <= field.types:
        odd = next(value for value in values if type(value) not in field.types)
        names = sorted("nothing" if t is _NOTHING else t.__name__ for t in field.types)
        raise field.unfit(odd, " or ".join(names))
    if str in types:
        for text in set(values):
            if not plain(text):
                raise field.unfit(text, "text")
            if field.words and text not in field.words:
                raise field.unfit(text, " or ".join(field.words))
    elif float in types or int in types:
        for number in values:
            # Of NaN, neither is true.
            if number is None or field.lowest <= number <= field.highest:
                continue
            if field.infinite and type(number) is float:
                continue
            raise field.unfit(number, f"a number from {field.lowest:.15g} to {field.highest:.15g}")


def _require_plain(field: _Field, value: Any) -> None:
    """Make sure that nested settings are no deeper, and their numbers no larger, than real ones."""
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, int) and each.bit_length() > LARGEST_SETTING_BITS:
                raise field.unfit(each, "a number that is not as large")
            elif not plain(each):
                raise field.unfit(each, "text")
        if not inner:
            return
        level = inner
    raise NotAnEvent(f"{field.place} is nested too deeply")


def _same_length(known: dict[str, _Field], kind: str, values: dict[str, Any]) -> None:
    columns = {name: value for name, value in values.items() if type(value) is tuple}
    # One that has a default may be empty: where nothing is known.
    lengths = {name: len(v) for name, v in columns.items() if v or known[name].needed}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise NotAnEvent(f"{kind} has columns of different lengths: {told}")
