"""`dps status`: the state of the experiments of a directory, from their files alone.

It runs beside them, on any host that sees the files. That a trial runs follows from the note of the
process at work (`flows.records.owner`) and from its record, which has a beginning and no end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError
from dps.observe.views import TrainingView
from flows.config.errors import suggest
from flows.monitor.course import Course
from flows.monitor.estimate import about, trials_text
from flows.records.owner import Owner, owner_of
from flows.records.record import (
    EVENTS_FILE,
    RecordDamaged,
    command_of,
    read_end,
    read_trial,
    trial_names,
)
from flows.statistics.finished import RESULTS

if TYPE_CHECKING:
    from rich.console import Console

State = Literal[
    "valid", "invalid", "failed", "damaged", "running", "interrupted", "waiting", "missing"
]
DONE: tuple[State, ...] = ("valid", "invalid", "failed")
# Nodes report their resources every second: a trial that is silent longer may hang.
SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of one trial.

    Attributes
    ----------
    reason
        Why it is invalid, failed or damaged.
    heard
        Time at which its record last grew, by the clock of the file system.
    training
        The state of its training, if it is running.
    """

    trial: str
    state: State
    reason: str = ""
    heard: float | None = None
    training: TrainingView | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of an experiment.

    Attributes
    ----------
    owner
        The process at work on it; None: it does not run.
    command
        The command line that ran it last.
    """

    experiment: str
    trials: tuple[Standing, ...]
    owner: Owner | None
    command: str

    def count(self, *states: State) -> int:
        """Return how many trials are in one of these states."""
        return sum(trial.state in states for trial in self.trials)


def status_of(folder: Path) -> Status:
    """Read the state of the experiment in a folder.

    Raises `ConfigurationError` if the note of the process at work, or the list of trials, is
    damaged.
    """
    noted = owner_of(folder)  # read once: it may change in between
    owner = None if noted is not None and noted.has_ended else noted
    trials = tuple(_standing(folder / name, owner) for name in trial_names(folder))
    return Status(folder.name, trials, owner, command_of(folder))


def statuses(here: Path, experiment: str | None = None) -> list[Status]:
    """Return the state of one experiment, or of all experiments of a working directory.

    Running experiments come first.

    Raises `ConfigurationError` if there is no such experiment; the message lists the existing ones.
    """
    root = here / RESULTS
    known = sorted(path.name for path in root.glob("*") if path.is_dir())
    if experiment is not None and experiment not in known:
        there = suggest(experiment, known) if known else "nothing is recorded there"
        raise ConfigurationError(f"no experiment {experiment!r} in {root}; {there}")
    wanted = known if experiment is None else [experiment]
    return sorted((status_of(root / name) for name in wanted), key=lambda s: s.owner is None)


def running(here: Path, experiment: str | None = None) -> list[Status]:
    """Return the state of the running experiments of a working directory, or of this one.

    Raises `ConfigurationError` if no experiment is running, or not this one; the message reports
    their state.
    """
    found = statuses(here, experiment)
    at_work = [status for status in found if status.owner is not None]
    if not at_work:
        states = "; ".join(map(headline, found)) or "nothing is recorded there"
        raise ConfigurationError(
            f"no experiment is running in {here / RESULTS}; {states}"
            if experiment is None
            else states
        )
    return at_work


def _standing(folder: Path, owner: Owner | None) -> Standing:
    path, heard, training = folder / EVENTS_FILE, None, None
    state: State
    reason = ""
    try:
        heard = path.stat().st_mtime
        ended = read_end(path)
        before = owner is not None and heard < owner.since
        if ended is None:
            state = "interrupted" if owner is None else "waiting" if before else "running"
            reason = "interrupted before" if state == "waiting" else ""
            if state == "running":
                course = Course(folder.name)
                for event in read_trial(path).events:
                    course.take(event)
                training = course.view() if course.started is not None else None
        elif before and ended.status == "failed":
            state, reason = "waiting", "failed before"
        else:
            state = next(state for state in DONE if state == ended.status)
            reason = ended.reason
    except FileNotFoundError:
        state = "missing" if owner is None else "waiting"
    except (OSError, RecordDamaged) as error:  # such as a link to itself
        state, reason = "damaged", str(error)
    return Standing(folder.name, state, reason, heard, training)


# -- showing -----------------------------------------------------------------------------------


def show(statuses: Sequence[Status], console: Console) -> None:
    """Print the state of experiments, with a line for each trial of one that runs.

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
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for heading in ("#", "trial", "state", "for", "updates", ""):
            table.add_column(heading, justify="right" if heading in ("#", "updates") else "left")
        remarks = []
        for n, trial in enumerate(status.trials, 1):
            cells = ["", "", trial.reason]
            if (view := trial.training) is not None and trial.heard is not None:
                counts = f"{view.done}/{view.total or '?'}"
                cells = [about(view.seconds or 0.0), counts, "  ".join(view.remarks())]
                remarks += [f"{trial.trial}: {note}" for note in view.notes]
                if (silent := now - trial.heard) > SILENT_SECONDS:
                    remarks.append(f"{trial.trial}: nothing was heard of it for {about(silent)}")
            table.add_row(*map(Text, [str(n), trial.trial, trial.state, *cells]))
        console.print(table)
        for line in remarks:
            console.print(Text(line), soft_wrap=True)


def headline(status: Status) -> str:
    """Return a line with the counts of trials by status, and the process that runs them."""
    counts = Counter("done" if t.state in DONE else t.state for t in status.trials)
    shown = ("done", "running", "interrupted", "waiting", "missing", "damaged")
    told = ", ".join(f"{counts[s]} {s}" for s in shown if counts[s])
    who = "; it does not run"
    if status.owner is not None:
        idle = "" if counts["running"] else "; it is getting ready, or writes its report"
        who = f", by {status.owner}, since {_moment(status.owner.since)}{idle}"
    return f"{status.experiment}: {trials_text(len(status.trials))}: {told}{who}"


def _next_commands(status: Status) -> list[str]:
    """The commands that run missing, failed and invalid trials, if the experiment does not run."""
    if status.owner is not None:
        return []
    left = status.count("missing", "interrupted", "damaged", "failed")
    invalid = status.count("invalid")
    again = [f"{invalid} invalid: {status.command} --retry-invalid"] if invalid else []
    return [f"{left} missing or failed: {status.command}", *again] if left else again


def _moment(t: float) -> str:
    return datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M:%S")
