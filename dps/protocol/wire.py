"""The wire format of messages: a header in MessagePack and the arrays, without pickle.

A message is a frozen dataclass of plain values, tuples, dicts, arrays and other such dataclasses.
It is sent as a list of numpy arrays: first the header as bytes, then each array as it is, so that
large gradients are not copied or interpreted. A class must be registered with `message`, or by
an entry point of an installed package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from dps import errors
from dps.core.leases import Applied
from dps.core.shard import Progress, ShardState
from dps.core.tables.table import Level, Rows, SparseTable
from dps.core.updates import Batch, Call, Encoding, Operation, UpdateId
from dps.errors import ConfigurationError, DpsError
from dps.protocol.monitor import Sighting
from dps.protocol.transport import Endpoint, Watched

Frames = list[np.ndarray]

# The groups of entry points by which packages register classes.
GROUPS = ("dps.durabilities", "dps.filters", "dps.rules")

_TYPES: dict[str, type] = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, DpsError)
}
# The key of a map that represents an array (the number of its frame) or an object (the name of its
# class, and the values of its fields). Maps of users must not contain this key.
MARK = "\0"
# Functions that return a message's values in the order of its fields, by type.
_VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
_NBYTES = attrgetter("nbytes")
_BASES: tuple[type[Any], ...] = (int, float, dict)  # subclasses are sent as plain values


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
            f"{known.__module__}.{known.__qualname__} uses its name; rename one of them"
        )
    _TYPES[cls.__name__] = cls
    _VALUES[cls] = tuple if issubclass(cls, tuple) else _values_of(cls)
    return cls


def _values_of(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in dataclasses.fields(cls)]
    get = attrgetter(*names) if names else lambda _: ()
    return get if len(names) != 1 else lambda value: (get(value),)


for _cls in (
    *(Endpoint, Watched, Sighting, UpdateId, Batch, Encoding, Call, Operation, Rows),
    *(Applied, Progress, ShardState, SparseTable, Level),
):
    message(_cls)


def encode(value: Any) -> Frames:
    """Return the frames of a message, or of a `DpsError` to raise at the other end."""
    arrays: Frames = []
    # Strict, because a tuple must not be sent in the place of a named one.
    header = msgpack.packb(
        value, default=partial(_parts, arrays), strict_types=True, unicode_errors="surrogatepass"
    )
    return [np.frombuffer(header, np.uint8), *arrays]


def decode(frames: Frames) -> Any:
    """Return the message of these frames, or raise the error that they hold."""
    value = msgpack.unpackb(
        frames[0].data,
        object_hook=partial(_rebuilt, frames),
        use_list=False,
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )
    if isinstance(value, DpsError):
        raise value
    return value


def size(frames: Frames) -> int:
    """Return the number of bytes in the frames."""
    return sum(map(_NBYTES, frames))


def _parts(arrays: Frames, value: Any) -> Any:
    """Return what stands for a value that MessagePack does not know."""
    kind = type(value)
    values = _VALUES.get(kind)
    if values is not None:
        return {MARK: [kind.__name__, *values(value)]}
    if kind is tuple:
        return list(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays.append(value)
        return {MARK: len(arrays)}
    if isinstance(value, str):
        return str.__str__(value)  # of an Enum, its value
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    if isinstance(value, DpsError):
        known = next(c for c in kind.__mro__ if getattr(errors, c.__name__, None) is c)
        return {MARK: [known.__name__, str(value)]}
    if kind in _registered(kind.__name__):
        message(kind)
        return _parts(arrays, value)
    raise TypeError(
        f"{kind.__name__} is not registered to cross the wire: decorate it with "
        "dps.protocol.wire.message, or install the package that has an entry point for it"
    )


def _rebuilt(frames: Frames, value: dict[Any, Any]) -> Any:
    """Return what a map stands for, whose parts are whole."""
    if MARK not in value:
        return value
    parts = value[MARK]
    return frames[parts] if type(parts) is int else _type(parts[0])(*parts[1:])


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
