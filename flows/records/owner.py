"""The note of who is at work in an experiment's folder: `.running.json`, for others to read.

The lock on the folder keeps others out on this host; the note says who holds it, on every host that
sees the files.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dps.errors import ConfigurationError
from dps.events.reading import LATEST, quoted
from dps.protocol.storage.regular import open_regular
from flows.files import write_whole

NOTE = ".running.json"
LARGEST_PID = (1 << 31) - 1
CLOCK_SECONDS = 2.0  # by which the system's account of when a process began may be off


@dataclass(frozen=True, slots=True)
class Owner:
    """A command that is at work in a folder.

    Attributes
    ----------
    host, pid, began
        Where it runs, its process, and when that began, which tells it from a later one of the same
        number.
    since
        When it came to hold the folder. Times are in seconds since the Unix epoch.
    """

    host: str
    pid: int
    began: float
    since: float

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host, so that it is known whether it lives."""
        return self.host == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be gone, though its note is there: it was killed."""
        if not self.is_here:
            return False
        try:
            process = psutil.Process(self.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE
            return not alive or abs(process.create_time() - self.began) > CLOCK_SECONDS
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Leave a note in a folder while this process is at work there; its lock must be held.

    Raises
    ------
    StoreUnavailable
        The note cannot be written.
    """
    process = psutil.Process()
    me = Owner(socket.gethostname(), os.getpid(), process.create_time(), time.time())
    write_whole(folder / NOTE, json.dumps(asdict(me)), "the note of who is at work")
    try:
        yield
    finally:
        (folder / NOTE).unlink(missing_ok=True)


def owner_of(folder: Path) -> Owner | None:
    """Return who is at work in a folder, or was when it was killed; None: nobody.

    Raises
    ------
    ConfigurationError
        There is a note that cannot be read.
    """
    path = folder / NOTE
    try:
        with open_regular(path) as note:
            return _owner(json.loads(note.read()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} does not say who is at work here ({type(error).__name__}: {error}). If nobody "
            "is, remove it."
        ) from error


def at_work(folder: Path) -> Owner | None:
    """Return the process at work in a folder, unless it is known to have ended.

    Raises
    ------
    ConfigurationError
        There is a note that cannot be read.
    """
    owner = owner_of(folder)
    return None if owner is None or owner.has_ended else owner


def _owner(said: Any) -> Owner:
    owner = Owner(**said)
    if not isinstance(owner.host, str) or not owner.host.isprintable():
        raise ValueError(f"host is {quoted(owner.host)}, expected a name")
    if type(owner.pid) is not int or not 0 < owner.pid <= LARGEST_PID:
        raise ValueError(f"pid is {quoted(owner.pid)}, expected a number from 1 to {LARGEST_PID}")
    for name, moment in (("began", owner.began), ("since", owner.since)):
        if type(moment) not in (int, float) or not 0 <= moment <= LATEST:
            raise ValueError(f"{name} is {quoted(moment)}, expected seconds since 1970")
    return owner
