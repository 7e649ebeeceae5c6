"""The events of a group that is watched while it runs: kept in order, waited for, let go.

Trials write their events to files and read them afterwards (`flows.records.record`); benchmarks and
the soak decide by them what to do next.
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
    """Something did not happen within its time."""


class Watch:
    """The events so far. An event sink; thread-safe."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    @property
    def record(self) -> Record:
        """The events that are kept."""
        with self._news:
            return Record(tuple(self._events))

    def forget(self) -> None:
        """Let go of all events so far."""
        with self._news:
            self._events.clear()

    def until(self, found: Callable[[Record], T | None], what: str, seconds: float) -> T:
        """Return what `found` makes of the events, as soon as that is something.

        Raises
        ------
        TookTooLong
            It found nothing within `seconds`; the message names `what`.
        """
        until = time.monotonic() + seconds
        with self._news:
            while (result := found(Record(tuple(self._events)))) is None:
                left = until - time.monotonic()
                if left <= 0:
                    raise TookTooLong(f"{what}: not within {seconds:g} s")
                self._news.wait(left)
        return result


def eventually(holds: Callable[[], T], what: str, seconds: float) -> T:
    """Ask again and again until `holds()` is true; return what it returned.

    Raises
    ------
    TookTooLong
        It was not true within `seconds`; the message names `what`.
    """
    until = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > until:
            raise TookTooLong(f"{what}: still {found!r} after {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return found
