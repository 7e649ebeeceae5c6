"""The wire format of messages: a JSON header and the arrays, without pickle.

A message is a frozen dataclass of plain values, tuples, dicts, arrays and other such dataclasses.
It is sent as a list of numpy arrays: first the header as bytes, then each array as it is, so that
large gradients are neither copied nor interpreted. A class must be registered with `message`, or by
an entry point of an installed package.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

import numpy as np

from dps import errors
from dps.core.shard import Progress, ShardState
from dps.core.tables.table import Level, Rows, SparseTable
from dps.core.updates import Call, Encoding, Operation, UpdateId
from dps.errors import ConfigurationError, DpsError
from dps.protocol.monitor import Sighting
from dps.protocol.transport import Endpoint, Watched

Frames = list[np.ndarray]

# The groups of entry points by which packages register classes.
GROUPS = ("dps.durabilities", "dps.filters", "dps.rules")

_TYPES: dict[str, type] = {}
# Functions that return a message's values in the order of its fields, by type.
_VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
_NBYTES = attrgetter("nbytes")
_PLAIN = (str, int, float, bool, type(None))
_EXACTLY_PLAIN = frozenset(_PLAIN)
# Made once: `json.dumps` makes an encoder for each call with other options than its defaults.
_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def message(cls: type) -> type:
    """Register a frozen dataclass or named tuple, so that it can be sent.

    >>> @message
    ... @dataclasses.dataclass(frozen=True)
    ... class Greeting:
    ...     text: str
    >>> decode(encode(Greeting("hello")))
    Greeting(text='hello')

    Raises
    ------
    ConfigurationError
        A class of this name is registered from another place.
    """
    known = _TYPES.get(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigurationError(
            f"{cls.__module__}.{cls.__qualname__} cannot be registered to cross the wire: "
            f"{known.__module__}.{known.__qualname__} has this name there; rename one of them"
        )
    _TYPES[cls.__name__] = cls
    _VALUES[cls] = tuple if issubclass(cls, tuple) else _values_of(cls)
    return cls


def _values_of(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in dataclasses.fields(cls)]
    get = attrgetter(*names) if names else lambda _: ()
    return get if len(names) != 1 else lambda value: (get(value),)


for _cls in (
    *(Endpoint, Watched, Sighting, UpdateId, Encoding, Call, Operation, Rows),
    *(Progress, ShardState, SparseTable, Level),
):
    message(_cls)


def encode(value: Any) -> Frames:
    """Return the frames of a message, or of a `DpsError` to raise at the other end."""
    arrays: Frames = []
    header = _JSON.encode(_plain(value, arrays)).encode()
    return [np.frombuffer(header, np.uint8), *arrays]


def decode(frames: Frames) -> Any:
    """Return the message of these frames, or raise the error that they hold."""
    value = _rebuilt(json.loads(frames[0].tobytes().decode()), frames)
    if isinstance(value, DpsError):
        raise value
    return value


def size(frames: Frames) -> int:
    """Return the number of bytes in the frames."""
    return sum(map(_NBYTES, frames))


def _plain(value: Any, arrays: Frames) -> Any:
    kind = type(value)
    if kind in _EXACTLY_PLAIN:
        return value
    values = _VALUES.get(kind)
    if values is not None:
        # Most values are plain, and a call for each would take longer than all the rest.
        parts = [v if type(v) in _EXACTLY_PLAIN else _plain(v, arrays) for v in values(value)]
        return {"@": kind.__name__, "v": parts}
    if kind is tuple or kind is list:  # a named tuple that is not registered is refused
        return [_plain(v, arrays) for v in value] if value else []
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays.append(value)
        return {"$": len(arrays)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {"%": [[_plain(k, arrays), _plain(v, arrays)] for k, v in value.items()]}
    if isinstance(value, DpsError):
        known = next(c for c in kind.__mro__ if getattr(errors, c.__name__, None) is c)
        return {"!": known.__name__, "v": str(value)}
    if kind in _registered(kind.__name__):
        message(kind)
        return _plain(value, arrays)
    raise TypeError(
        f"{kind.__name__} is not registered to cross the wire: decorate it with "
        "dps.protocol.wire.message, or install the package that has an entry point for it"
    )


def _rebuilt(value: Any, frames: Frames) -> Any:
    kind = type(value)  # JSON makes no subclasses
    if kind is list:
        return tuple([_rebuilt(v, frames) for v in value]) if value else ()
    if kind is not dict:
        return value
    if "@" in value:
        parts = [v if type(v) in _EXACTLY_PLAIN else _rebuilt(v, frames) for v in value["v"]]
        return _type(value["@"])(*parts)
    if "$" in value:
        return frames[value["$"]]
    if "%" in value:
        return {_rebuilt(k, frames): _rebuilt(v, frames) for k, v in value["%"]}
    cls = getattr(errors, str(value["!"]), None)
    if isinstance(cls, type) and issubclass(cls, DpsError):
        return cls(str(value["v"]))
    raise ConfigurationError(f"{value['!']!r} is no error of this version of dps: {value['v']}")


def _type(name: str) -> type:
    if name not in _TYPES:
        for cls in _registered(name):
            message(cls)
    if name not in _TYPES:
        raise ConfigurationError(
            f"{name} is not registered to cross the wire here: import the module that registers it"
        )
    return _TYPES[name]


def _registered(name: str) -> Iterator[type]:
    """Yield the classes of this name that dps or other installed packages register."""
    import_module("dps.public")  # by its name, because it imports this module
    if name in _TYPES:
        yield _TYPES[name]
    for point in (point for group in GROUPS for point in entry_points(group=group)):
        if point.attr == name:
            try:
                yield point.load()
            except Exception as error:
                raise ConfigurationError(
                    f"entry point {point.group}: {point.name} = {point.value} cannot be imported: "
                    f"{type(error).__name__}: {error}"
                ) from error
