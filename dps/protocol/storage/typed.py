"""Whether a value read from a file is of the type that its place is annotated with, all through.

Messages between nodes are not looked at like this: they come from the same version of dps, over a
connection that is trusted. A file may be damaged, or be of another version.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def misfit(value: Any, hint: Any, place: str) -> str | None:
    """Say where a value, or something in it, is not of its type; None: all of it is.

    Parameters
    ----------
    value
        Dataclasses, tuples, dicts and plain values in each other.
    hint
        The type as annotated. Of a protocol, its attributes must be there.
    place
        What the value is called.
    """
    return next(_misfits(value, hint, place), None)


def _misfits(value: Any, hint: Any, place: str) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if all(misfit(value, each, place) for each in args):
            fitting = (each for each in args if dataclasses.is_dataclass(each))
            own = next((each for each in fitting if type(value) is each), None)
            yield from (_unfit(value, hint, place),) if own is None else _misfits(value, own, place)
    elif origin is Literal:
        if value not in args:
            yield _unfit(value, " or ".join(map(repr, args)), place)
    elif origin is tuple and type(value) is tuple:
        wanted = (args[0],) * len(value) if args[-1] is Ellipsis else args
        if len(wanted) != len(value):
            yield f"{place} has {len(value)} entries, expected {len(wanted)}"
        for number, (each, kind) in enumerate(zip(value, wanted, strict=False)):
            yield from _misfits(each, kind, f"{place}[{number}]")
    elif origin is dict and type(value) is dict:
        for key, each in value.items():
            yield from _misfits(key, args[0], f"a key of {place}")
            yield from _misfits(each, args[1], f"{place}[{key!r:.40}]")
    elif getattr(hint, "_is_protocol", False):
        if not dataclasses.is_dataclass(value) or not _has_all(value, hint):
            yield _unfit(value, hint.__name__, place)
        else:
            yield from _misfits(value, type(value), place)
    elif dataclasses.is_dataclass(hint) and type(value) is hint:
        cls: Any = hint
        for name, kind in _fields(cls).items():
            yield from _misfits(getattr(value, name), kind, f"{place}.{name}")
    elif _derives(value, hint):
        yield from _misfits(value, type(value), place)
    elif type(value) is not hint and not (hint is float and type(value) is int):
        yield _unfit(value, hint, place)


def _derives(value: object, hint: Any) -> bool:
    """Whether a value is a dataclass that derives from a class that is none."""
    is_base = isinstance(hint, type) and not dataclasses.is_dataclass(hint)
    return is_base and dataclasses.is_dataclass(value) and isinstance(value, hint)


@cache
def _fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _has_all(value: object, protocol: type) -> bool:
    names = [name for name in vars(protocol) if not name.startswith("_")]
    return all(hasattr(value, name) for name in names)


def _unfit(value: object, hint: Any, place: str) -> str:
    wanted = hint.__name__ if isinstance(hint, type) else hint
    said = repr(value)
    said = said if len(said) <= 60 else f"{said[:59]}…"
    return f"{place} is {said}, expected {wanted}"
