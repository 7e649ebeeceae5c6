"""The record of a trial: the JSON-lines file of its events, how it is written and read back.

Every figure in a table or report is computed from such files alone, so a record must survive an
interruption: each event is one line, flushed at once, and a last line that was cut short is noticed
and left out. Damage must not change figures either: each line ends with its checksum, and every
value is checked when it is read.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

from dps.core.credentials import masked
from dps.core.ranges import in_a_line
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Event, from_dict, to_json
from dps.recovery.files import sealed, unsealed
from flows.files import open_own, write_whole
from flows.records.events import TrialEnded, TrialStarted

EVENTS_FILE = "events.jsonl"
GRID_FILE = "grid.json"
CONFIGURATION_FILE = "configuration.yaml"
EARLIER = "earlier"  # beside the trials: the records that were replaced by others
UNKNOWN_COMMAND = "dps run CONFIG"  # where nothing was noted
FAILED_ATTEMPTS = "failed_attempts"  # among a trial's circumstances

E = TypeVar("E", bound=Event)


class RecordDamaged(ConfigurationError):
    """The record of a trial was not written by this version of dps, or is damaged."""


class EventWriter:
    """Writes events to a file, one line each; call it with an event, from any thread.

    An older record at `path` is replaced. Events after `close` are dropped, as are all events after
    one that could not be written, because a record has no gaps.

    Raises `StoreUnavailable` if the file cannot be written.

    Attributes
    ----------
    failure
        Why an event could not be written; None: all were.
    """

    def __init__(self, path: Path) -> None:
        self.failure: StoreUnavailable | None = None
        self._path = path
        self._lock = threading.Lock()
        self._whole = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "its folder is a symbolic link")
            self._file = open_own(path, "wb", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def __call__(self, event: Event) -> None:
        """Record an event, unless the record has ended. Thread-safe."""
        with self._lock:
            # A late event from another thread: the record has its end already.
            if not self._file.closed and self.failure is None:
                self._write(event)

    def end(self, event: Event) -> None:
        """Write the last event, also if others before it could not be written, and close."""
        with self._lock:
            self._write(event)
        self.close()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._file.close()

    def _write(self, event: Event) -> None:
        try:
            self._whole = _append(self._file, self._whole, event)
        except OSError as error:
            self.failure = self._unwritable(error)
            raise self.failure from error

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"the events cannot be written to {self._path}: {error.strerror or error}. "
            "Make the folder writable, free space on its disk, or run in another folder."
        )


def _append(file: IO[bytes], whole: int, event: Event) -> int:
    """Append an event to a file of `whole` bytes at its end; return the new size in bytes.

    If the event cannot be written, the file keeps no part of it.
    """
    line = (sealed(_as_text(event)) + "\n").encode()
    left = memoryview(line)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(whole)
        file.seek(whole)
        raise
    return whole + len(line)


def end_record(path: Path, event: TrialEnded) -> None:
    """Append the end to a record that no process writes any more; keep all complete events.

    Raises `StoreUnavailable` if the file cannot be written.
    """
    try:
        with open_own(path, "r+b", buffering=0) as file:
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)  # drop an incomplete last line
            file.seek(whole)
            _append(file, whole, event)
    except OSError as error:
        raise StoreUnavailable(
            f"the failure cannot be recorded in {path}: {error.strerror or error}"
        ) from error


def without_secrets(event: Event) -> Event:
    """Return an event whose texts, such as reasons, show no password that an address holds.

    Settings stay as they are: they are read back, and were refused if they held one.
    """
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    shown: dict[str, Any] = {n: masked(v) for n, v in values.items() if isinstance(v, str)}
    return replace(event, **shown)


@dataclass(frozen=True)
class Record:
    """The events of one trial in the order in which they were written.

    `torn`: the last line was cut short, for example because the driver was killed while writing.
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
        return self.circumstances.get(FAILED_ATTEMPTS, 0)

    @property
    def circumstances(self) -> dict[str, int]:
        """The circumstances that its results do not depend on, as given when it began."""
        settings = self.started.settings if self.started else {}
        return dict(settings.get("circumstances", {}))

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """Return the events of one class, in order."""
        return self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> dict[type[Event], tuple[Any, ...]]:
        by_kind: dict[type[Event], list[Event]] = {}
        for event in self.events:
            by_kind.setdefault(type(event), []).append(event)
        return {kind: tuple(events) for kind, events in by_kind.items()}


def write_grid(
    folder: Path,
    trials: Iterable[str],
    order_seed: int,
    labels: Mapping[str, Sequence[str]] | None = None,
    command: str = "",
) -> None:
    """Note which trials make up the experiment in `folder`, as of its last run, in their order.

    `labels` are those of each axis, in the order of the configuration; `command` is the command
    line that ran them.
    """
    noted: dict[str, Any] = {"order_seed": order_seed, "trials": list(trials)}
    if labels:
        noted["labels"] = {axis: list(names) for axis, names in labels.items()}
    if command.isprintable() and command:
        noted["command"] = masked(command)
    text = json.dumps(noted, indent=1)
    write_whole(folder / GRID_FILE, sealed(text), "the list of trials")


def write_configuration(folder: Path, written: str) -> None:
    """Keep what was written to configure the experiment in `folder`, as of its last run.

    Without addresses' passwords; where nothing was written, nothing is kept.
    """
    path = folder / CONFIGURATION_FILE
    if written:
        write_whole(path, masked(written), "the configuration")
    else:
        path.unlink(missing_ok=True)


def read_configuration(folder: Path) -> str:
    """Return what was written to configure the experiment in `folder`; "" if that was not kept."""
    path = folder / CONFIGURATION_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def event_files(folder: Path) -> list[Path]:
    """Return the records of an experiment's trials, in the order of their names.

    Trials of an earlier configuration may lie in the same folder; they are not among them.

    Raises `ConfigurationError` if the note of `write_grid` cannot be read.
    """
    # Also a link that leads nowhere: it is a damaged record, not the lack of one.
    each = (trial / EVENTS_FILE for trial in folder.glob("*"))
    paths = sorted(path for path in each if os.path.lexists(path))
    names = _noted(folder).get("trials")
    return paths if names is None else [path for path in paths if path.parent.name in names]


def trial_names(folder: Path) -> tuple[str, ...]:
    """Return the trials of an experiment in the order in which they run, recorded or not."""
    names = _noted(folder).get("trials")
    return tuple(names or (path.parent.name for path in event_files(folder)))


def labels_of(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return the labels of each axis in the order of the configuration; nothing if not noted."""
    labels: dict[str, list[str]] = _noted(folder).get("labels", {})
    return labels


def command_of(folder: Path) -> str:
    """Return the command line that ran the experiment last, without options for one run."""
    return str(_noted(folder).get("command", UNKNOWN_COMMAND))


def _noted(folder: Path) -> dict[str, Any]:
    """Return what `write_grid` noted; nothing if it noted nothing."""
    grid = folder / GRID_FILE
    try:
        noted: dict[str, Any] = json.loads(unsealed(grid.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{grid} does not name the trials of the experiment ({type(error).__name__}: {error}). "
            "Run the experiment again, which keeps recorded trials, or remove the file to count "
            "every trial in the folder."
        ) from error
    return noted


class RecordReader:
    """Reads a record as it grows: each time what is new. Belongs to one thread.

    Attributes
    ----------
    torn
        Whether there is something after the last newline: the beginning of an event.
    """

    def __init__(self, path: Path, without: Collection[type[Event]] = ()) -> None:
        self.torn = False
        self._path = path
        self._skipped = tuple(f'{{"event":"{kind.__name__}"'.encode() for kind in without)
        self._place = 0
        self._lines = 0
        self._file = (0, 0)

    def read(self) -> tuple[tuple[Event, ...], bool]:
        """Return the events that are new, and whether it is another record than the last time.

        An incomplete last line is read when it is complete. Of events that the record is read
        `without`, which saves time, only the checksums are checked.

        Raises `ConfigurationError` if there is no such file, and `RecordDamaged` if a line is not
        an event.
        """
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                replaced = (about.st_dev, about.st_ino) != self._file or about.st_size < self._place
                if replaced:
                    self._file, self._place, self._lines = (about.st_dev, about.st_ino), 0, 0
                file.seek(self._place)
                *lines, rest = file.read().split(b"\n")
        except OSError as error:
            raise _unreadable(self._path, error) from error
        self.torn = rest != b""
        events: list[Event] = []
        for line in lines:
            self._place, self._lines = self._place + len(line) + 1, self._lines + 1
            text = _unsealed(self._path, self._lines, line)
            if not line.startswith(self._skipped):
                events.append(_event(self._path, self._lines, text))
        return tuple(events), replaced


def read_record(path: Path, without: Collection[type[Event]] = ()) -> Record:
    """Read a record written by `EventWriter`; kinds of events `without` which it may be read.

    Raises `ConfigurationError` if there is no such file, and `RecordDamaged` if a line other than
    the last is not an event.
    """
    reader = RecordReader(path, without)
    events, _ = reader.read()
    return Record(events, reader.torn)


def read_trial(path: Path, without: Collection[type[Event]] = ()) -> Record:
    """Read a record as `read_record` does, and make sure that it begins as that of a trial.

    One that holds nothing but an end is that of a trial that failed before it could begin.
    """
    record = read_record(path, without)
    if record.events:
        first = record.events[0]
        if not isinstance(first, TrialStarted) and record.events != (record.ended,):
            raise _damaged(path, 1, f"is {type(first).__name__}, expected the start of a trial")
    return record


def read_start(path: Path) -> TrialStarted | None:
    """Return the event that opens a record, without reading the rest; None if it is not whole."""
    try:
        with path.open("rb") as lines:
            line = next(lines, b"")
    except OSError as error:
        raise _unreadable(path, error) from error
    event = _event(path, 1, _unsealed(path, 1, line[:-1])) if line.endswith(b"\n") else None
    return event if isinstance(event, TrialStarted) else None


def read_end(path: Path) -> TrialEnded | None:
    """Return the event that closes a record; None if it has no end.

    Of all other events only the checksums are checked.
    """
    others = [kind for kind in Event.kinds.values() if kind is not TrialEnded]
    return read_record(path, without=others).ended


def _damaged(path: Path, line: int, why: str) -> RecordDamaged:
    return RecordDamaged(
        f"{path}, line {line} {why}. `dps run` keeps such a record under another name and reruns "
        "the trial."
    )


def _unreadable(path: Path, error: OSError) -> ConfigurationError | RecordDamaged:
    message = f"{path}: no events to read: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(message)
    return RecordDamaged(
        f"{message}. `dps run` keeps such a record under another name and reruns the trial."
    )


def _unsealed(path: Path, number: int, line: bytes) -> bytes:
    try:
        return unsealed(line)
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error


def _event(path: Path, number: int, text: bytes) -> Event:
    try:
        return from_dict(json.loads(text))
    except (ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {in_a_line(str(error))}"
        why_damaged = f"is not an event of this version of dps: {why}"
        raise _damaged(path, number, why_damaged) from error


def _as_text(event: Event) -> str:
    """An event as JSON; of what is no text in it, as bytes in a file's name, there are marks."""
    text = to_json(event)
    if "\\ud" not in text:
        return text
    whole = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
    return json.dumps(json.loads(whole), separators=(",", ":"))
