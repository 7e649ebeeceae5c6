"""The log of a trial: a file beside its record that a person or `grep` can read.

It is for reading only: figures are computed from the record alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from dps.events import Event, line_of
from flows.files import open_own

LOG_FILE = "trial.log"
FORMAT = "time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s"


class TrialLog:
    """Writes a line for every event of level INFO or above; an event sink, for any thread.

    Existing lines are kept: a resumed trial appends to the file. Events after `close` are dropped,
    and so are all events after one that could not be written: the record is authoritative, and is
    on the same disk. `labels` are added to each line.
    """

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S")
        self._formatter.converter = time.gmtime
        self._file = open_own(path, "ab", buffering=0)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if event.level < logging.INFO:
            return
        line = self._formatter.format(line_of(event, self._labels)) + "\n"
        with self._lock:
            if not self._file.closed:
                try:
                    self._file.write(line.encode(errors="replace"))
                except OSError:
                    self._file.close()

    def __enter__(self) -> TrialLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._file.close()
