"""Atomic writes of result files: whole or not at all, with a clear message on failure.

A folder that cannot be written after hours of running must not end in a traceback.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from dps.errors import StoreUnavailable

NO_HOME = "/nonexistent"  # the home directory of users without one, as in Debian


def write_whole(path: Path, contents: str | bytes, what: str) -> None:
    """Write a file, and make its folder; an older file is replaced as a whole.

    Whenever the process is killed, the file is complete or unchanged. Text is written as UTF-8.
    Raises `StoreUnavailable`, whose message names the file by `what` ("the report"), if it cannot
    be written.
    """
    unfinished = scratch_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()  # on a full disk it would hold what room is left
        raise StoreUnavailable(
            f"{what} cannot be written to {path}: {error.strerror or error}. Make the folder "
            "writable and repeat the command; it keeps all records."
        ) from error


def scratch_path(path: Path) -> Path:
    """Return the path for a file that is not complete yet; its name is unpredictable.

    Under a predictable name, another user with access to the folder could place a link there.
    """
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.part"


def open_own(path: str | Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file as `open` does, but do not follow a link in its place.

    A pipe without a reader is refused, not waited for.
    """
    refused = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, mode, opener=lambda at, flags: os.open(at, flags | refused, 0o666), **options)


def first_free(path_of: Callable[[int], Path], start: int = 1) -> Path:
    """Return the first of some numbered paths at which there is nothing yet."""
    return next(path for n in count(start) if not (path := path_of(n)).exists())
