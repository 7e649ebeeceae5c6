"""The log of a trial: a file beside its record that a person or `grep` can read.

It tells what happened; figures are computed from the record alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dps.errors import StoreUnavailable
from dps.events import Event
from dps.events.lines import level_of, line_of
from flows.files import open_own

LOG_FILE = "trial.log"
FORMAT = "time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s"


class _UntilFull(logging.FileHandler):
    """Writes no more after an error, which Python's own would print with every line.

    Attributes
    ----------
    full
        Whether there was one.
    """

    full = False

    def _open(self) -> Any:
        return open_own(self.baseFilename, self.mode, encoding=self.encoding)

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record, if all before it were."""
        return not self.full and super().handle(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is Python's)
        """Give up; what is left in the buffer is dropped, or closing would try again."""
        self.full = True
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(OSError):
                stream.close()


class TrialLog:
    """Writes a line for every event that is of interest by itself; an event sink, for any thread.

    What is in the file already is kept: a trial that is resumed goes on with it. Events that come
    after `close` are left out, and so are all after one that could not be written: the record
    counts, and is on the same disk.

    Parameters
    ----------
    labels
        What each line says besides: which trial it is.

    Raises
    ------
    StoreUnavailable
        The file cannot be written.
    """

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._open = True
        formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        try:
            self._handler = _UntilFull(path, encoding="utf-8")
        except OSError as error:
            raise StoreUnavailable(
                f"the log cannot be written to {path}: {error.strerror or error}. "
                "Make the folder writable, or run in another one."
            ) from error
        self._handler.setFormatter(formatter)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if self._open and level_of(event) >= logging.INFO:
            self._handler.handle(line_of(event, self._labels))

    def __enter__(self) -> TrialLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open = False
        self._handler.close()
