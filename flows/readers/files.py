"""Which files a path stands for, and how they are opened: .gz is unpacked on the way."""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dps.errors import ConfigurationError
from dps.protocol.storage.regular import open_regular
from flows.quoting import quoted


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, plain or .gz.

    Raises
    ------
    ConfigurationError
        The file cannot be opened, or reading it fails later on.
    """
    try:
        with open_regular(path) as file:
            yield gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{path} cannot be read: {reason}") from error


def files_of(folder: Path) -> list[Path]:
    """Return the files below a folder, numbered names in the order of their numbers.

    Files and folders whose names begin with `_` or `.` hold no examples: Dask, Spark and Arrow
    keep metadata in them.
    """
    visible = (
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(p.startswith(("_", ".")) for p in path.relative_to(folder).parts)
    )
    return sorted(visible, key=_natural)


def _natural(path: Path) -> list[str | int]:
    """Sort key in which part.9 comes before part.10."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def shown(line: bytes) -> str:
    """Return a line as a message shows it."""
    return quoted(line.decode("utf-8", "backslashreplace").strip())


def first_wrong(parts: Sequence[bytes], read: Callable[[bytes], object]) -> int:
    """Return which of the parts of a text is the first that `read` fails with."""

    def fails(last: int) -> bool:
        try:
            read(b"".join(parts[: last + 1]))
        except (ValueError, OverflowError):
            return True
        return False

    return bisect_left(range(len(parts)), True, key=fails)
