"""The record of a trial: the JSON-lines file of its events, how it is written and read back.

Every figure in a table or report is computed from such a file and from nothing else, so a record
must survive an interruption: each event is one line, flushed at once, and a last line that was cut
short is noticed and left out. Nor may damage make other figures of it: each line ends with its
checksum, and every value is checked when it is read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from dps.core.checksum import sealed, unsealed
from dps.core.credentials import masked
from dps.errors import ConfigurationError, RecordDamaged, StoreUnavailable
from dps.events import Event, TrialEnded, TrialStarted, to_json
from dps.events.reading import from_line, quoted
from dps.protocol.storage.regular import open_regular
from flows.files import open_own, write_whole
from flows.metrics.score import SCORES
from flows.quoting import unseen

EVENTS_FILE = "events.jsonl"
GRID_FILE = "grid.json"
CONFIGURATION_FILE = "configuration.yaml"
RESERVE_FILE = ".reserve"  # beside a record that is being written: room for its end
RESERVE_BYTES = 1 << 14
EARLIER = "earlier"  # beside the trials: the records that others took the place of
UNKNOWN_COMMAND = "dps run CONFIG"  # where nothing was noted
FAILED_ATTEMPTS = "failed_attempts"  # among a trial's circumstances

# What is computed with, and of which type it must be; a damaged record may hold anything.
_SETTINGS: dict[tuple[str, ...], tuple[type, ...]] = {
    ("trial",): (str,),
    ("experiment",): (str,),
    ("labels",): (dict,),
    ("labels", "*"): (str,),
    ("seed",): (int, type(None)),
    ("digest",): (str,),
    ("circumstances",): (dict,),
    ("circumstances", "*"): (int,),
    ("config",): (dict,),
    ("config", "cluster"): (dict,),
    ("config", "cluster", "kind"): (str,),
    ("config", "cluster", "profile"): (str,),
    ("config", "training"): (dict,),
    ("config", "training", "workers"): (int,),
    ("config", "training", "updates"): (int,),
    ("config", "training", "batch_size"): (int,),
    ("config", "server"): (dict,),
    ("config", "server", "shards"): (int,),
    ("config", "workload"): (dict,),
    ("config", "workload", "kind"): (str,),
    ("config", "dataset"): (dict,),
    ("config", "dataset", "kind"): (str,),
    ("config", "dataset", "target_deviation"): (int, float, type(None)),
    ("config", "consistency"): (dict,),
    ("config", "consistency", "kind"): (str,),
    ("config", "recovery"): (dict, str),
    ("config", "recovery", "name"): (str,),
    ("config", "recovery", "durability"): (dict,),
    ("config", "recovery", "durability", "keep"): (int,),
    ("config", "recovery", "durability", "below"): (dict, type(None)),
    ("config", "recovery", "durability", "below", "keep"): (int,),
    ("config", "faults"): (list,),
    ("config", "faults", "*"): (dict,),
    ("config", "faults", "*", "kind"): (str,),
    ("config", "evaluation"): (dict,),
    ("config", "evaluation", "metric"): (str, type(None)),
    ("config", "evaluation", "target"): (int, float, type(None)),
    ("config", "evaluation", "objective"): (dict, type(None)),
    ("config", "evaluation", "objective", "*"): (int, float, type(None)),
}

_LONGEST_NAME = 500  # of trials, experiments and labels: no configuration can give a longer one
_FOLDER = re.compile(r"[^./][^/]{0,254}")

E = TypeVar("E", bound=Event)


class EventWriter:
    """Writes events to a file, one line each; call it with an event, from any thread.

    An older record at `path` is replaced. Events that come after `close` are left out, and so are
    those that come after one could not be written: a record has no gaps. Some space is kept for
    its last one, which says so.

    Attributes
    ----------
    failure
        Why an event could not be written; None: all were.

    Raises
    ------
    StoreUnavailable
        The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.failure: StoreUnavailable | None = None
        self._path = path
        self._reserve = path.with_name(RESERVE_FILE)
        self._lock = threading.Lock()
        self._whole = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "its folder is a link, which may lead anywhere")
            with open_own(self._reserve, "wb") as reserve:
                reserve.write(bytes(RESERVE_BYTES))
            self._file = open_own(path, "wb", buffering=0)
        except OSError as error:
            with suppress(OSError):
                self._reserve.unlink()
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
            self._reserve.unlink(missing_ok=True)
            self._write(event)
        self.close()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._file.close()
            self._reserve.unlink(missing_ok=True)

    def _write(self, event: Event) -> None:
        left = memoryview((sealed(_as_text(event)) + "\n").encode())
        whole = self._whole + len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._whole)  # no line is there in part
            self._file.seek(self._whole)
            self.failure = self._unwritable(error)
            raise self.failure from error
        self._whole = whole

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"the events cannot be written to {self._path}: {error.strerror or error}. "
            "Make the folder writable, or room on its disk, or run in another one."
        )


def end_record(path: Path, event: TrialEnded) -> None:
    """Put an end to a record that nobody writes any more; what is in it stays.

    The room that its writer kept for that is given up, for it may have been killed.

    Raises
    ------
    StoreUnavailable
        The file cannot be written.
    """
    try:
        path.with_name(RESERVE_FILE).unlink(missing_ok=True)
        with open_own(path, "r+b") as file:
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)  # without a last line that was cut short
            file.seek(0, os.SEEK_END)
            file.write((sealed(_as_text(event)) + "\n").encode())
    except OSError as error:
        raise StoreUnavailable(
            f"that it has failed cannot be written to {path}: {error.strerror or error}"
        ) from error


def without_secrets(event: Event) -> Event:
    """Return an event whose texts, such as reasons, show no password that an address holds.

    Settings stay as they are: they are read back, and were refused if they held one.
    """
    values = ((field.name, getattr(event, field.name)) for field in fields(event))
    texts = {name: (value, masked(value)) for name, value in values if isinstance(value, str)}
    changed: dict[str, Any] = {
        name: shown for name, (value, shown) in texts.items() if shown != value
    }
    return replace(event, **changed) if changed else event


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
        return self.circumstances.get(FAILED_ATTEMPTS, 0)

    @property
    def circumstances(self) -> dict[str, int]:
        """What the trial does not depend on, as it was told when it began."""
        settings = self.started.settings if self.started else {}
        return dict(settings.get("circumstances", {}))

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """Return the events of one class, in order."""
        return self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> dict[type[Event], tuple[Any, ...]]:
        found: dict[type[Event], list[Event]] = {}
        for event in self.events:
            found.setdefault(type(event), []).append(event)
        return {kind: tuple(events) for kind, events in found.items()}


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

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
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

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
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
    """The records of an experiment's trials, in the order of their names.

    Trials of an earlier configuration may lie in the same folder; they are not among them.

    Raises
    ------
    ConfigurationError
        What was noted by `write_grid` cannot be read.
    """
    # Also a link that leads nowhere: it is a damaged record, not the lack of one.
    each = (trial / EVENTS_FILE for trial in folder.glob("*"))
    found = sorted(path for path in each if os.path.lexists(path))
    names = grid_of(folder)
    return found if names is None else [path for path in found if path.parent.name in names]


def grid_of(folder: Path) -> frozenset[str] | None:
    """The names of the trials that make up an experiment, as of its last run; None: not noted.

    Raises
    ------
    ConfigurationError
        What was noted by `write_grid` cannot be read.
    """
    grid = folder / GRID_FILE
    return frozenset(_names_in(grid)) if grid.exists() else None


def trial_names(folder: Path) -> tuple[str, ...]:
    """The trials of an experiment in the order in which they run, recorded or not.

    Raises
    ------
    ConfigurationError
        What was noted by `write_grid` cannot be read.
    """
    grid = folder / GRID_FILE
    if grid.exists():
        return _names_in(grid)
    return tuple(path.parent.name for path in event_files(folder))


def labels_of(folder: Path) -> Mapping[str, Sequence[str]]:
    """The labels of each axis in the order of the configuration; nothing if that was not noted.

    Raises
    ------
    ConfigurationError
        What was noted by `write_grid` cannot be read.
    """
    grid = folder / GRID_FILE
    return _noted_in(grid).get("labels", {}) if grid.exists() else {}


def command_of(folder: Path) -> str:
    """The command line that ran the experiment last, without options for one run.

    Raises
    ------
    ConfigurationError
        What was noted by `write_grid` cannot be read.
    """
    grid = folder / GRID_FILE
    noted = _noted_in(grid) if grid.exists() else {}
    return str(noted.get("command", UNKNOWN_COMMAND))


def read_start(path: Path) -> TrialStarted | None:
    """Return the event that opens a record, without reading the rest; None if it is not whole.

    Raises
    ------
    ConfigurationError
        The record cannot be read.
    RecordDamaged
        Its first line is not an event of this version of dps.
    """
    try:
        with open_regular(path) as lines:
            line = next(lines, b"")
    except OSError as error:
        raise _unreadable(path, error) from error
    event = _event(path, 1, line[:-1])[0] if line.endswith(b"\n") else None
    return event if isinstance(event, TrialStarted) else None


def read_end(path: Path) -> TrialEnded | None:
    """Return the event that closes a record; None if it has no end.

    Of the other lines only the checksums are looked at, where they have any.

    Raises
    ------
    ConfigurationError
        The record cannot be read.
    RecordDamaged
        A line does not match its checksum, or is not an event.
    """
    lines = _lines(path)[:-1]
    if not all(_unsealed(path, number, line)[1] for number, line in enumerate(lines, 1)):
        return read_trial(path).ended
    opening = to_json(TrialEnded(0.0, "", "")).partition(",")[0].encode()
    ends = (n for n in range(len(lines), 0, -1) if lines[n - 1].startswith(opening))
    last = next(ends, None)
    event = _event(path, last, lines[last - 1])[0] if last is not None else None
    return event if isinstance(event, TrialEnded) else None


def read_record(path: Path, without: Collection[type[Event]] = ()) -> Record:
    """Read a record written by `EventWriter`; kinds of events `without` which it may be read.

    Of these, which save time, only the checksums are looked at.

    Raises
    ------
    ConfigurationError
        There is no such file.
    RecordDamaged
        A line other than the last is not an event.
    """
    *lines, rest = _lines(path)
    # What is after the last newline was never finished, even if it happens to be valid JSON.
    return Record(_parse(path, lines, without), torn=rest != b"")


class RecordReader:
    """Reads a record as it grows: each time what is new. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._lines = 0
        self._file = (0, 0)

    def read(self) -> tuple[tuple[Event, ...], bool]:
        """Return the events that are new, and whether it is another record than the last time.

        What is after the last newline is read when the rest of it is there.

        Raises
        ------
        ConfigurationError
            The record cannot be read.
        RecordDamaged
            A line is not an event.
        """
        try:
            with open_regular(self._path) as file:
                about = os.fstat(file.fileno())
                anew = (about.st_dev, about.st_ino) != self._file or about.st_size < self._place
                if anew:
                    self._file, self._place, self._lines = (about.st_dev, about.st_ino), 0, 0
                file.seek(self._place)
                *lines, _rest = (file.read() or b"").split(b"\n")
        except OSError as error:
            raise _unreadable(self._path, error) from error
        first, self._lines = self._lines + 1, self._lines + len(lines)
        self._place += sum(len(line) + 1 for line in lines)
        found = (_event(self._path, number, line)[0] for number, line in enumerate(lines, first))
        return tuple(found), anew


def read_trial(path: Path, without: Collection[type[Event]] = ()) -> Record:
    """Read a record as `read_record` does, and make sure that it begins as that of a trial.

    One that holds nothing but an end is that of a trial that failed before it could begin.

    Raises
    ------
    ConfigurationError
        There is no such file.
    RecordDamaged
        A line is not an event, the first one starts no trial, or its settings are of other types.
    """
    record = read_record(path, without)
    if record.events:
        first = record.events[0]
        if isinstance(first, TrialEnded) and len(record.events) == 1:
            return record  # it failed before its start could be written
        if not isinstance(first, TrialStarted):
            raise _damaged(path, 1, f"is not the start of a trial, but {type(first).__name__}")
        _check_settings(path, first.settings)
    return record


def is_folder_name(name: object) -> bool:
    """Whether a folder in another one can have this name, as that of an experiment or a trial."""
    return isinstance(name, str) and name.isprintable() and bool(_FOLDER.fullmatch(name))


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    for keys, types in _SETTINGS.items():
        for place, value in _found(settings, keys):
            if type(value) not in types:
                wanted = " or ".join(kind.__name__ for kind in types if kind is not type(None))
                said = f"has {quoted(value)} as {'.'.join(place)}, not of type {wanted}"
                raise _damaged(path, 1, said)
            if types == (int,) and value < 0:
                raise _damaged(path, 1, f"has {value} as {'.'.join(place)}, expected 0 or more")
    for place, score in _found(settings, ("config", "evaluation", "metric")):
        if score not in (None, *SCORES):
            said = f"has {quoted(score)} as {'.'.join(place)}, expected one of {', '.join(SCORES)}"
            raise _damaged(path, 1, said)
    names = {key: settings.get(key, "") for key in ("trial", "experiment", "digest")}
    for key, name in {**names, **settings.get("labels", {})}.items():
        # No stricter than what a configuration may say, or its trials would never be whole.
        if unseen(name) is not None:
            raise _damaged(path, 1, f"has {quoted(name)} as {key}, which cannot be printed")
        if len(name) > _LONGEST_NAME:
            said = f"has {quoted(name)} as {key}, expected {_LONGEST_NAME} characters at most"
            raise _damaged(path, 1, said)


def _found(settings: Any, keys: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value at a place of `_SETTINGS`, if it is there, with its own place."""
    if not keys:
        yield (), settings
        return
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(settings, dict):  # of another type it may be, where there is nothing to look for
        entries = settings.items()
    elif isinstance(settings, list):
        entries = enumerate(settings)
    for key, value in entries:
        if keys[0] in ("*", key):
            for place, found in _found(value, keys[1:]):
                yield (str(key), *place), found


def _damaged(path: Path, line: int, why: str) -> RecordDamaged:
    return RecordDamaged(
        f"{path}, line {line} {why}. `dps run` sets such a record aside and runs the trial again."
    )


def _names_in(grid: Path) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_noted_in(grid)["trials"]))


def _noted_in(grid: Path) -> dict[str, Any]:
    try:
        with open_regular(grid) as file:
            found = json.loads(unsealed(file.read())[0])
        if not isinstance(found, dict) or not isinstance(found.get("trials"), list):
            raise ValueError("it has no list of trials")
        # Such as what is left of a checksum whose own key was damaged.
        if unknown := found.keys() - {"order_seed", "trials", "labels", "command"}:
            raise ValueError(f"it has an unknown key {quoted(min(unknown))}")
        for name in found["trials"]:
            if not is_folder_name(name):
                raise ValueError(f"{quoted(name)} is no name of a trial")
        if not _are_labels(found.get("labels", {})):
            raise ValueError("its labels are no lists of names, one for each axis")
        command = found.get("command", "")
        if not (isinstance(command, str) and command.isprintable()):
            raise ValueError(f"{quoted(command)} is no command line")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{grid} does not name the trials of the experiment ({type(error).__name__}: {error}). "
            "Run the experiment again: what is recorded is kept. Or remove the file: then every "
            "trial in the folder counts."
        ) from error
    return found


def _are_labels(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in found.values()
    )


def _unreadable(path: Path, error: OSError) -> ConfigurationError | RecordDamaged:
    """What is raised for a record that is not there, or is there and cannot be read."""
    told = f"{path}: no events to read: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(told)
    return RecordDamaged(f"{told}. `dps run` sets such a record aside and runs the trial again.")


def _parse(
    path: Path, lines: Sequence[bytes], without: Collection[type[Event]] = ()
) -> tuple[Event, ...]:
    """The events of whole lines: all of them have a checksum, or none, as if changed by hand."""
    events, had = list[Event](), False
    passed_over = tuple(f'{{"event":"{kind.__name__}"'.encode() for kind in without)
    for number, line in enumerate(lines, 1):
        if line.startswith(passed_over):
            had |= _unsealed(path, number, line)[1]
            continue
        event, has = _event(path, number, line)
        if had and not has:
            raise _damaged(path, number, "is without the checksum that the lines before it have")
        events.append(event)
        had = has
    return tuple(events)


def _event(path: Path, number: int, line: bytes) -> tuple[Event, bool]:
    """The event of a line, and whether that has a checksum."""
    text, has = _unsealed(path, number, line)
    try:
        return from_line(text.decode()), has
    except ValueError as error:
        said = f"is not an event of this version of dps: {error}"
        raise _damaged(path, number, said) from error


def _unsealed(path: Path, number: int, line: bytes) -> tuple[bytes, bool]:
    try:
        return unsealed(line)
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error


def _lines(path: Path) -> list[bytes]:
    """The lines of a record, of which the last is one that was cut short, or empty."""
    try:
        with open_regular(path) as file:
            return (file.read() or b"").split(b"\n")
    except OSError as error:
        raise _unreadable(path, error) from error


def _as_text(event: Event) -> str:
    """An event as JSON; of what is no text in it, as bytes in a file's name, there are marks."""
    text = to_json(event)
    if "\\ud" not in text:
        return text
    whole = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
    return json.dumps(json.loads(whole), separators=(",", ":"))
