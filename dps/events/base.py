"""What all events have in common: their root, their table of kinds, and their form as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all events; `t` is when it happened, in seconds since the Unix epoch."""

    kinds: ClassVar[dict[str, type[Event]]] = {}
    t: float


def recorded(cls: type[Event]) -> type[Event]:
    """Enter an event class in the table that `from_dict` reads by class name."""
    Event.kinds[cls.__name__] = cls
    return cls


Sink = Callable[[Event], None]


def to_dict(event: Event) -> dict[str, Any]:
    """Return the event as a JSON-ready dict with its class name under `event`.

    What it holds is not copied: long columns of numbers, most of the time.
    """
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {"event": type(event).__name__, **values}


def to_json(event: Event) -> str:
    """Return the event as one line of JSON (without the newline)."""
    return json.dumps(to_dict(event), separators=(",", ":"))


def from_dict(record: Mapping[str, Any]) -> Event:
    """Rebuild an event from `to_dict`; raises `KeyError` for an unknown kind of event."""
    fields = dict(record)
    cls: Callable[..., Event] = Event.kinds[fields.pop("event")]
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
