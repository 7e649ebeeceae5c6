"""The lock of an experiment's folder, which also identifies the process that holds it.

It excludes other processes on this host, and shows every host that sees the files which process is
writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dps.errors import ConfigurationError, StoreUnavailable
from flows.files import open_own

LOCK_FILE = ".lock"
CLOCK_SECONDS = 2.0  # error of the system's start times of processes


@dataclass(frozen=True, slots=True)
class Owner:
    """A command that is writing to a folder.

    Attributes
    ----------
    host, pid, began
        Its host, its process, and the start time of the process, which distinguishes it from a
        later process with the same number.
    since
        Time at which it acquired the lock. Times are in seconds since the Unix epoch.
    """

    host: str
    pid: int
    began: float
    since: float

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended without releasing the lock, for example by a kill."""
        if self.host != socket.gethostname():
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
def exclusive(folder: Path) -> Iterator[None]:
    """Lock an experiment's folder, so that no two commands write to the same records.

    Raises `ConfigurationError` if another command holds the lock, and `StoreUnavailable` if the
    folder cannot be written to.
    """
    process = psutil.Process()
    me = Owner(socket.gethostname(), os.getpid(), process.create_time(), time.time())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_own(folder / LOCK_FILE, "ab", buffering=0)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)  # content left by a killed process
        lock.write(json.dumps(asdict(me)).encode())
    except BlockingIOError as error:
        lock.close()
        raise ConfigurationError(
            f"another `dps run` is writing to {folder}; wait for it to end"
        ) from error
    except OSError as error:
        raise StoreUnavailable(
            f"the results folder {folder} cannot be written: {error.strerror or error}. "
            "Make it writable, or run in another directory."
        ) from error
    with lock:
        try:
            yield
        finally:
            lock.truncate(0)


def owner_of(folder: Path) -> Owner | None:
    """Return the command that holds the lock of a folder or was killed holding it, or None.

    Raises `ConfigurationError` if the content of the lock cannot be read.
    """
    path = folder / LOCK_FILE
    try:
        written = path.read_bytes() if path.exists() else b""
        return Owner(**json.loads(written)) if written else None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path} does not name the process that writes here ({type(error).__name__}: {error}). "
            "If no `dps run` is writing, remove it."
        ) from error


def at_work(folder: Path) -> Owner | None:
    """Return the process at work in a folder, unless it is known to have ended."""
    owner = owner_of(folder)
    return None if owner is None or owner.has_ended else owner
