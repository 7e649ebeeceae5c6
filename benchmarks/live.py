"""Collect the events of a running group in memory, and wait for conditions on them.

Trials write their events to files and read them afterwards (`flows.records.record`). Benchmarks and
the soak (`tests/soak`) need the events during the run, to decide on the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dps.errors import DpsError
from dps.events import Event
from flows.records.record import Record

T = TypeVar("T")

POLL_SECONDS = 0.01


class TookTooLong(DpsError):
    """A condition was not met in time."""


class Watch:
    """Event sink that keeps all events in memory. Thread-safe."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Append an event."""
        with self._lock:
            self._events.append(event)

    @property
    def record(self) -> Record:
        """Record of the events so far."""
        with self._lock:
            return Record(tuple(self._events))

    def forget(self) -> None:
        """Discard all events so far."""
        with self._lock:
            self._events.clear()

    def until(self, found: Callable[[Record], T | None], what: str, seconds: float) -> T:
        """Wait until `found(record)` returns a value other than None, and return it.

        Raises
        ------
        TookTooLong
            No value within `seconds`. The message starts with `what`.
        """
        results: list[T] = []

        def look() -> bool:
            results.extend(each for each in [found(self.record)] if each is not None)
            return bool(results)

        eventually(look, what, seconds)
        return results[0]


def eventually(holds: Callable[[], T], what: str, seconds: float) -> T:
    """Poll `holds()` until it returns a true value, and return that value.

    Raises
    ------
    TookTooLong
        No true value within `seconds`. The message starts with `what`.
    """
    until = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > until:
            raise TookTooLong(f"{what}: still {found!r} after {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return found
