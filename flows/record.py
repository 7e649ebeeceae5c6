"""Owns the record of a trial: the JSON-lines file of its events, how it is written and read back.

Every figure in a table or report is computed from such a file and from nothing else, so a record
must survive an interruption: each event is one line, flushed at once, and a last line that was cut
short is noticed and left out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Event, TrialEnded, TrialStarted, from_dict, to_json
from flows.files import write_whole

EVENTS_FILE = "events.jsonl"
GRID_FILE = "grid.json"
EARLIER = "earlier"  # beside the trials: the records that others took the place of
FAILED_ATTEMPTS = "failed_attempts"  # among a trial's circumstances

E = TypeVar("E", bound=Event)


class EventWriter:
    """Writes events to a file, one line each; call it with an event, from any thread.

    An older record at `path` is replaced. Events that come after `close` are left out.

    Raises
    ------
    StoreUnavailable
        The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise self._unwritable(error) from error

    def __call__(self, event: Event) -> None:
        line = to_json(event) + "\n"
        with self._lock:
            if self._file.closed:
                return  # A late event from another thread: the record has its end already.
            try:
                self._file.write(line)
            except OSError as error:
                raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"the events cannot be written to {self._path}: {error.strerror or error}. "
            "Make the folder writable, or run in another one."
        )


@dataclass(frozen=True)
class Record:
    """The events of one trial in the order in which they were written.

    `torn` tells that the last line was cut short, as when the driver was killed while writing.
    """

    events: tuple[Event, ...]
    torn: bool = False

    @property
    def started(self) -> TrialStarted | None:
        """The event that opens the record, with the trial's settings."""
        return next(iter(self.of(TrialStarted)), None)

    @property
    def ended(self) -> TrialEnded | None:
        """The event that closes the record; None when the trial was interrupted."""
        return next(reversed(self.of(TrialEnded)), None)

    @property
    def config(self) -> dict[str, Any]:
        """The trial's whole configuration; empty where the record has no start."""
        config = self.started.settings.get("config") if self.started else None
        return config if isinstance(config, dict) else {}

    @property
    def failed_before(self) -> int:
        """How many attempts at this trial failed before this one."""
        settings = self.started.settings if self.started else {}
        return int(settings.get("circumstances", {}).get(FAILED_ATTEMPTS, 0))

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """Return the events of one class, in order."""
        return tuple(event for event in self.events if isinstance(event, kind))


def write_grid(folder: Path, trials: Iterable[str], order_seed: int) -> None:
    """Note which trials make up the experiment in `folder`, as of its last run, in their order.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    text = json.dumps({"order_seed": order_seed, "trials": list(trials)}, indent=1)
    write_whole(folder / GRID_FILE, text, "the list of trials")


def event_files(folder: Path) -> list[Path]:
    """The records of an experiment's trials, in the order of their names.

    Trials of an earlier configuration may lie in the same folder; they are not among them.

    Raises
    ------
    ConfigurationError
        What was noted by `write_grid` cannot be read.
    """
    found = sorted(folder.glob(f"*/{EVENTS_FILE}"))
    grid = folder / GRID_FILE
    if not grid.exists():
        return found
    names = _names_in(grid)
    return [path for path in found if path.parent.name in names]


def read_start(path: Path) -> TrialStarted | None:
    """Return the event that opens a record, without reading the rest; None if it is not whole.

    Raises
    ------
    ConfigurationError
        The record cannot be read, or is of another version of dps.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            line = next(lines, "")
    except OSError as error:
        raise _unreadable(path, error) from error
    event = _event(path, 1, line) if line.endswith("\n") else None
    return event if isinstance(event, TrialStarted) else None


def read_record(path: Path) -> Record:
    """Read a record written by `EventWriter`.

    Raises
    ------
    ConfigurationError
        There is no such file, or a line other than the last is not an event.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error) from error
    lines = text.split("\n")
    cut = lines.pop() != ""
    if cut:
        # The line after the last newline was never finished, even if it happens to be valid JSON.
        return Record(_parse(path, lines), torn=True)
    return Record(_parse(path, lines))


def _names_in(grid: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads(grid.read_text(encoding="utf-8"))["trials"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{grid} does not name the trials of the experiment ({type(error).__name__}: {error}). "
            "Run the experiment again: what is recorded is kept. Or remove the file: then every "
            "trial in the folder counts."
        ) from error


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{path}: no events to read: {error.strerror or error}")


def _parse(path: Path, lines: list[str]) -> tuple[Event, ...]:
    return tuple(_event(path, number, line) for number, line in enumerate(lines, 1))


def _event(path: Path, number: int, line: str) -> Event:
    try:
        return from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path}, line {number} is not an event of this version of dps "
            f"({type(error).__name__}: {error}). Remove the trial's folder and run it again."
        ) from error
