"""Owns the log of a trial: a file beside its record that a person or `grep` can read.

It tells what happened; figures are computed from the record alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from dps.errors import StoreUnavailable
from dps.events import Event
from dps.events.lines import level_of, line_of

LOG_FILE = "trial.log"
FORMAT = "time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s"


class TrialLog:
    """Writes a line for every event that is of interest by itself; an event sink, for any thread.

    What is in the file already is kept: a trial that is resumed goes on with it. Events that come
    after `close` are left out.

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
            self._handler = logging.FileHandler(path, encoding="utf-8")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        self._handler.close()
