"""Owns what a running experiment shows: live bars on a terminal, plain lines elsewhere.

Events of a trial arrive from another thread; `Progress` of rich locks for itself, and the plain
view writes one line at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dps.events import (
    Applied,
    CapacityRestored,
    CheckpointRefused,
    Detected,
    Disturbed,
    Evaluated,
    Event,
    FaultMissed,
    Killed,
    Paused,
    PhaseMet,
    Promoted,
    Rebuilt,
    Replayed,
    ReplicaAdded,
    Restored,
    Resumed,
    RolledBack,
    TrainingStarted,
    TrialResumed,
    Undisturbed,
    WorkerLeft,
)
from flows.grid import Trial
from flows.outcome import Outcome

SOURCES = {
    "initial": "initial values",
    "checkpoint": "a checkpoint",
    "store": "the store",
    "worker": "a worker's copy",
}


@dataclass
class Course:
    """How far a trial has come, gathered from its events one by one."""

    shards: int
    started: float | None = None
    accuracy: float | None = None
    versions: dict[int, int] = field(default_factory=dict)
    down: set[int] = field(default_factory=set)

    @property
    def updates(self) -> int:
        """Updates that every shard has applied."""
        return min(self.versions.values()) if len(self.versions) == self.shards else 0

    def take(self, event: Event) -> str | None:
        """Note an event; return a line to show if it is part of a fault's story."""
        match event:
            case TrainingStarted():
                self.started = event.t
            case Evaluated():
                self.accuracy = event.accuracy
            case Applied(head=True):
                self.versions[event.shard] = event.versions[-1]
            case Detected(serving=False):
                self.down.add(event.shard)
            case Restored() | Promoted():
                self.down.discard(event.shard)
                self.versions[event.shard] = event.version
        if self.started is None or event.t < self.started:  # how it came up is no news
            return None
        told = _told(event)
        return told and f"{event.t - self.started:6.2f} s  {told}"

    def text(self) -> str:
        """Return the state of the training in a few words."""
        accuracy = "" if self.accuracy is None else f"accuracy {self.accuracy:.1%}"
        return "  ".join([accuracy, *(f"shard {shard} is down" for shard in sorted(self.down))])


class PlainView:
    """Shows an experiment as lines of text; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begun = time.monotonic()
        self._total = 0
        self._number = 0
        self._course = Course(1)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def begin(self, experiment: str, trials: Sequence[Trial], skipped: Sequence[Trial]) -> None:
        """Say what will be done; `skipped` are recorded already."""
        self._total = len(trials)
        self._number = len(skipped)
        to_run = len(trials) - len(skipped)
        self.say(f"{experiment}: {len(trials)} trials, {to_run} of them to run")
        if skipped:
            names = ", ".join(trial.name for trial in skipped)
            self.say(f"recorded already, skipped: {names}")

    def trial_started(self, trial: Trial) -> None:
        """Say that a trial begins."""
        self._number += 1
        self._course = Course(trial.config.server.shards)
        self.say(f"[{self._number}/{self._total}] {trial.name}")

    def event(self, event: Event) -> None:
        """Take an event of the running trial, from any thread."""
        line = self._course.take(event)
        if line:
            self.say(f"    {line}")

    def trial_ended(self, outcome: Outcome) -> None:
        """Say how the trial ended."""
        self.say(f"    {_ending(outcome)}; {_clock(time.monotonic() - self._begun)} in all")

    def say(self, line: str) -> None:
        """Write one line."""
        self.console.print(Text(line), soft_wrap=True)


class LiveView(PlainView):
    """Shows bars for the experiment and the running trial, with the lines above them."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            transient=True,
        )

    def __enter__(self) -> LiveView:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, experiment: str, trials: Sequence[Trial], skipped: Sequence[Trial]) -> None:
        """Say what will be done, and show how much of it is done."""
        super().begin(experiment, trials, skipped)
        self._all = self._bars.add_task(
            experiment, total=len(trials), completed=len(skipped), unit="trials", state=""
        )

    def trial_started(self, trial: Trial) -> None:
        """Show a bar for the trial."""
        super().trial_started(trial)
        labels = [*trial.labels.values(), f"seed {trial.seed}"]
        updates = trial.config.training.updates
        self._one = self._bars.add_task(
            "  " + " · ".join(labels), total=updates, unit="updates", state="starting"
        )

    def event(self, event: Event) -> None:
        """Move the bar."""
        super().event(event)
        self._bars.update(self._one, completed=self._course.updates, state=self._course.text())

    def trial_ended(self, outcome: Outcome) -> None:
        """Take the bar away."""
        super().trial_ended(outcome)
        self._bars.remove_task(self._one)
        self._bars.advance(self._all)


def view_for(console: Console) -> PlainView:
    """Return the view that suits where the output goes."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def _told(event: Event) -> str | None:
    match event:
        case Killed():
            proof = "" if event.gone else ", but its process is still there"
            return f"{event.node} killed after {event.updates} updates{proof}"
        case Paused():
            proof = "" if event.stopped else ", but its process is not stopped"
            return f"{event.node} paused after {event.updates} updates{proof}"
        case Resumed():
            return f"{event.node} goes on" if event.running else f"{event.node} does not go on"
        case Disturbed():
            return f"{event.node} {event.kind} after {event.updates} updates: {event.evidence}"
        case Undisturbed():
            return f"{event.node} is disturbed no more: {event.evidence}"
        case PhaseMet():
            return f"it was struck during a {event.phase}: {event.evidence}"
        case FaultMissed():
            return f"the fault on {event.target} did not happen: {event.reason}"
        case Detected():
            left = "goes on with the replicas left" if event.serving else "is down"
            return f"{event.node} found lost by the {event.by}; shard {event.shard} {left}"
        case CapacityRestored():
            return f"{event.node} is up in the place of the lost node"
        case Promoted():
            return f"shard {event.shard} goes on at {event.node}, at version {event.version}"
        case Restored() if event.epoch > 1:
            return (
                f"shard {event.shard} restored from {SOURCES[event.source]} at {event.node}, "
                f"at version {event.version}"
            )
        case ReplicaAdded() if event.epoch > 1:
            return f"shard {event.shard} has a new replica at {event.node}"
        case Replayed():
            return f"shard {event.shard}: {event.count} buffered gradients applied"
        case TrialResumed():
            return f"goes on from update {event.updates}, from checkpoints in {event.path}"
        case Rebuilt():
            return (
                f"shard {event.shard}: the copy of {event.donor} was {event.age_seconds:.1f} s old"
            )
        case RolledBack():
            return f"all shards go back to cut {event.cut}, for shard {event.shard}"
        case CheckpointRefused():
            return f"shard {event.shard}: checkpoint refused: {event.reason}"
        case WorkerLeft() if event.reason != "finished":
            return f"{event.worker} {event.reason}"
    return None


def _ending(outcome: Outcome) -> str:
    if not outcome.valid:
        return f"{outcome.status}: {outcome.reason}"
    final = outcome.accuracy.final
    accuracy = "" if final is None else f", accuracy {final:.1%}"
    seconds = outcome.training_seconds
    return f"valid{accuracy}" + ("" if seconds is None else f", {seconds:.1f} s of training")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
