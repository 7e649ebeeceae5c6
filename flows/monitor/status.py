"""`dps status`: how far the experiments of a directory are, from their files alone.

So it runs beside them, and on any host that sees the files. It asks no process of theirs; that a
trial is running is told by the note of who is at work (`flows.records.owner`) and by its record,
which has a beginning and no end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError, RecordDamaged
from dps.events import DashboardServed
from flows.analysis.finished import RESULTS, Finished
from flows.analysis.outcome import Outcome
from flows.config.errors import suggest
from flows.monitor.estimate import about, trials_told
from flows.monitor.progress import Course
from flows.records.owner import Owner, at_work, owner_of
from flows.records.record import (
    EVENTS_FILE,
    Record,
    command_of,
    read_end,
    read_trial,
    trial_names,
)

if TYPE_CHECKING:
    from rich.console import Console

State = Literal[
    "valid", "invalid", "failed", "damaged", "running", "interrupted", "waiting", "missing"
]
RUNNING: State = "running"
DONE: tuple[State, ...] = ("valid", "invalid", "failed")
ENDS: Mapping[str, State] = {"valid": "valid", "invalid": "invalid", "failed": "failed"}
# Nodes report what they use every second, so a trial that is silent for so long may be none.
SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Going:
    """How far a trial is that has begun and not ended.

    It has applied `updates` `of` so many. `heard` is when the last of it was written, by the clock
    of the file system; `told` is its state in a few words.
    """

    since: float
    heard: float
    updates: int
    of: int | None
    told: str
    dashboard: str | None


@dataclass(frozen=True, slots=True)
class Standing:
    """How it stands with one trial; one that is done says what was wrong with it, if anything."""

    trial: str
    state: State
    reason: str = ""
    going: Going | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How it stands with an experiment.

    Attributes
    ----------
    owner
        Who is at work on it; None: it does not run.
    killed
        Who was at work on it, and was killed.
    command
        The command line that ran it last.
    """

    experiment: str
    trials: tuple[Standing, ...]
    owner: Owner | None
    killed: Owner | None
    command: str

    def count(self, *states: State) -> int:
        """How many trials are in one of these states."""
        return sum(trial.state in states for trial in self.trials)


def status_of(folder: Path) -> Status:
    """Read how it stands with the experiment in a folder.

    Raises
    ------
    ConfigurationError
        The note of who is at work, or the list of trials, is damaged; the message says which.
    """
    noted = owner_of(folder)  # read once: it may change in between
    ended = noted is not None and noted.has_ended
    owner, killed = (None, noted) if ended else (noted, None)
    trials = tuple(_standing(folder / name, owner) for name in trial_names(folder))
    return Status(folder.name, trials, owner, killed, command_of(folder))


def statuses(here: Path, experiment: str | None = None) -> list[Status]:
    """Return how it stands with the experiment, or with all of a working directory.

    Those that run come first.

    Raises
    ------
    ConfigurationError
        There is none, or not this one; the message says what there is instead.
    """
    root = here / RESULTS
    known = sorted(path.name for path in root.glob("*") if path.is_dir())
    if experiment is not None and experiment not in known:
        there = suggest(experiment, known) if known else "nothing is recorded there"
        raise ConfigurationError(f"no experiment {experiment!r} in {root}; {there}")
    if not known:
        raise ConfigurationError(
            f"no experiment is running or recorded in {root}. `dps run CONFIG` starts one; one "
            "that runs elsewhere is seen from the directory in which it was started"
        )
    wanted = known if experiment is None else [experiment]
    return sorted((status_of(root / name) for name in wanted), key=lambda s: s.owner is None)


def running(here: Path, experiment: str | None = None) -> list[Status]:
    """Return how it stands with the experiment, or with all of a working directory, that run.

    Raises
    ------
    ConfigurationError
        None does, or not this one; the message says what there is instead.
    """
    found = statuses(here, experiment)
    at_work = [status for status in found if status.owner is not None]
    if not at_work:
        raise ConfigurationError(
            f"no experiment is running in {here / RESULTS}; {'; '.join(map(headline, found))}"
            if experiment is None
            else headline(found[0])
        )
    return at_work


def under_way(folder: Path, recorded: Iterable[Finished]) -> list[Standing]:
    """Those of the trials of an experiment, as their records were read, that are running."""
    if (owner := at_work(folder)) is None:
        return []
    records = {each.events_file.parent.name: each.record for each in recorded}
    names = (name for name in trial_names(folder) if name in records)
    told = (_standing(folder / name, owner, records[name]) for name in names)
    return [standing for standing in told if standing.going is not None]


def as_it_stands(result: Outcome, running: Container[str]) -> Outcome:
    """Return what came of a trial; one that is running has not failed, though it has no end."""
    if result.identity.trial not in running:
        return result
    return replace(result, status=RUNNING, reason="")


def going_of(record: Record, heard: float) -> Going | None:
    """Return how far a trial is by its record; None if that has no beginning yet."""
    if record.started is None:
        return None
    server, training = (record.config.get(section, {}) for section in ("server", "training"))
    course = Course(server.get("shards", 1))
    for event in record.events:
        course.take(event)
    served = record.of(DashboardServed)
    return Going(
        since=record.started.t,
        heard=heard,
        updates=course.updates,
        of=training.get("updates"),
        told=course.text() if course.started is not None else "starting",
        dashboard=served[-1].address if served else None,
    )


def _standing(folder: Path, owner: Owner | None, record: Record | None = None) -> Standing:
    """How it stands with the trial in a folder; its record is read if it was not yet."""
    path = folder / EVENTS_FILE
    try:
        heard = path.stat().st_mtime
        ended = read_end(path) if record is None else record.ended
        before = owner is not None and heard < owner.since
        if ended is not None:
            if before and ended.status == "failed":
                return Standing(folder.name, "waiting", "failed before")
            return Standing(folder.name, ENDS[ended.status], ended.reason)
        if owner is None:
            return Standing(folder.name, "interrupted")
        if before:
            return Standing(folder.name, "waiting", "interrupted before")
        return Standing(folder.name, "running", going=going_of(record or read_trial(path), heard))
    except FileNotFoundError:
        return Standing(folder.name, "missing" if owner is None else "waiting")
    except OSError as error:  # such as a link to itself
        return Standing(folder.name, "damaged", f"{path}: {error.strerror or error}")
    except RecordDamaged as error:
        return Standing(folder.name, "damaged", str(error))


# -- showing -----------------------------------------------------------------------------------


def show(statuses: Sequence[Status], console: Console) -> None:
    """Print how it stands with experiments, with a line for each trial of one that runs.

    Of a single one there are lines for its trials in any case.
    """
    now = time.time()
    for number, status in enumerate(statuses):
        detailed = status.owner is not None or len(statuses) == 1
        if number and detailed:
            console.print()
        console.print(Text(headline(status)), soft_wrap=True)
        for line in _next_commands(status):
            console.print(Text(f"  {line}"), soft_wrap=True)
        if not detailed:
            continue
        console.print(as_table(status, now))
        for trial in status.trials:
            for line in _remarks(trial, now):
                console.print(Text(f"{trial.trial}: {line}"), soft_wrap=True)


def headline(status: Status) -> str:
    """Return a line with the counts of trials by status, and the process that runs them."""
    counts = Counter("done" if t.state in DONE else t.state for t in status.trials)
    shown = ("done", "running", "interrupted", "waiting", "missing", "damaged")
    told = ", ".join(f"{counts[s]} {s}" for s in shown if counts[s])
    who = "; it does not run"
    if status.owner is not None:
        idle = "" if counts["running"] else "; it is getting ready, or writes its report"
        who = f", by {status.owner}, since {_moment(status.owner.since)}{idle}"
    elif status.killed is not None:
        who += f": {status.killed} was at work on it, and was killed"
    return f"{status.experiment}: {trials_told(len(status.trials))}: {told}{who}"


def _next_commands(status: Status) -> list[str]:
    """The commands that run missing, failed and invalid trials, if the experiment does not run."""
    if status.owner is not None:
        return []
    left = status.count("missing", "interrupted", "damaged", "failed")
    invalid = status.count("invalid")
    again = [f"{invalid} invalid: {status.command} --retry-invalid"] if invalid else []
    return [f"{left} missing or failed: {status.command}", *again] if left else again


def as_table(status: Status, now: float) -> Table:
    """Return one line for each trial, in the order in which they run."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("#", "trial", "state", "since", "updates", ""):
        table.add_column(heading, justify="right" if heading in ("#", "updates") else "left")
    for number, trial in enumerate(status.trials, 1):
        going, cells = trial.going, ["", "", trial.reason]
        if going is not None:
            since = f"{_moment(going.since)} ({about(now - going.since)})"
            cells = [since, f"{going.updates}/{going.of or '?'}", going.told]
        table.add_row(*map(Text, [str(number), trial.trial, trial.state, *cells]))
    return table


def _remarks(trial: Standing, now: float) -> list[str]:
    if trial.going is None:
        return []
    lines = []
    if now - trial.going.heard > SILENT_SECONDS:
        lines.append(f"nothing was heard of it for {about(now - trial.going.heard)}")
    if trial.going.dashboard is not None:
        lines.append(f"Dask dashboard: {trial.going.dashboard}")
    return lines


def _moment(t: float) -> str:
    return datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M:%S")
