"""What a running experiment shows: live bars on a terminal, plain lines elsewhere.

A `Follower` makes of a trial's events what is to be shown; it may sit in another process than the
view. Where trials run at once, each line says which trial it is from.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
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
    FaultSkipped,
    Killed,
    Moved,
    NodeDrained,
    NodeLeaving,
    NodeLeft,
    Paused,
    PhaseMet,
    Promoted,
    Rebuilt,
    Replayed,
    ReplicaAdded,
    Rescaled,
    Restored,
    Resumed,
    RolledBack,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
    Undisturbed,
    WorkerLeft,
)
from dps.observe.sentences import sentence
from flows.analysis.outcome import Outcome
from flows.config.faults.text import WAYS
from flows.config.trials import Trial
from flows.metrics.score import ACCURACY, Score, score_of
from flows.monitor.estimate import TRACKING_SECONDS, Durations, about, trials_told

HOLD_SECONDS = 0.3  # for which a line is held: what other nodes saw before may arrive after it
WARNING = "warning: "  # how such a line begins
MOVE_SECONDS = 0.25  # between two looks at how far a trial has come: not to disturb it

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
    score: Score = ACCURACY

    @property
    def updates(self) -> int:
        """Updates that every shard has applied."""
        return min(self.versions.values()) if len(self.versions) == self.shards else 0

    def take(self, event: Event) -> str | None:
        """Note an event; return a line to show if it is part of a fault's story."""
        match event:
            case TrialStarted():
                self.score = score_of(event.settings.get("config", {}))
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
        said = told(event)
        return said and f"{event.t - self.started:6.2f} s  {said}"

    def text(self) -> str:
        """Return the state of the training in a few words."""
        value, score = self.accuracy, self.score
        told = "" if value is None else f"{score.name} {score.text(value)}"
        return "  ".join([told, *(f"shard {shard} is down" for shard in sorted(self.down))])


class Follower:
    """Makes of the events of one trial what a view shows. An event sink, for any thread.

    Parameters
    ----------
    shards
        How many the trial has.
    told
        Is called with every line to show.
    moved
        Is called with the updates so far and the state of the training, not more often than needed.
    """

    def __init__(
        self, shards: int, told: Callable[[str], None], moved: Callable[[int, str], None]
    ) -> None:
        self._course = Course(shards)
        self.told = told
        self._moved = moved
        self._next = 0.0
        self._held: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take an event; the lines come in the order of their moments, the last with the end."""
        with self._lock:
            line = self._course.take(event)
            if line:
                self._held.append((event.t, line))
            self._release(math.inf if isinstance(event, TrialEnded) else event.t - HOLD_SECONDS)
        now = time.monotonic()
        if line or now >= self._next:
            self._next = now + MOVE_SECONDS
            self._moved(self._course.updates, self._course.text())

    def _release(self, until: float) -> None:
        self._held.sort(key=lambda held: held[0])
        while self._held and self._held[0][0] <= until:
            self.told(self._held.pop(0)[1])


class PlainView:
    """Shows an experiment as lines of text; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begun = time.monotonic()
        self._total = 0
        self._parallel = 1
        self._left: list[Trial] = []
        self._started: dict[str, float] = {}
        self._durations = Durations()
        self._warned: set[str] = set()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def begin(
        self,
        experiment: str,
        trials: Sequence[Trial],
        skipped: Sequence[Trial],
        durations: Durations | None = None,
        parallel: int = 1,
    ) -> None:
        """Say what will be done; `skipped` are recorded already."""
        self._total = len(trials)
        self._parallel = parallel
        self._left = [trial for trial in trials if trial not in skipped]
        self._durations = durations or Durations()
        self.say(f"{experiment}: {trials_told(len(trials))}, {len(self._left)} to run")
        if self._left:
            basis = "a guess" if not self._durations.known else "by those that have ended"
            at_once = f", {parallel} at once" if parallel > 1 else ""
            self.say(f"about {about(self.left())} ({basis}){at_once}")
        if skipped:
            names = ", ".join(trial.name for trial in skipped)
            self.say(f"recorded already, skipped: {names}")

    def started(self, trial: Trial) -> None:
        """Say that a trial begins."""
        self._started[trial.name] = time.monotonic()
        number = self._total - len(self._left) + len(self._started)
        self.say(f"[{number}/{self._total}] {trial.name}")

    def told(self, trial: Trial, line: str) -> None:
        """Show a line of a trial's story; the same warning of several trials only once."""
        if line.startswith(WARNING):
            if line in self._warned:
                return
            self._warned.add(line)
        self.say(f"    {self._whose(trial)}{line}")

    def moved(self, trial: Trial, updates: int, state: str) -> None:
        """Show how far a trial has come."""

    def ended(self, trial: Trial, outcome: Outcome) -> None:
        """Say how a trial ended."""
        began = self._started.pop(trial.name)
        self._left = [other for other in self._left if other.name != trial.name]
        if outcome.status != "failed":
            self._durations.note(trial, time.monotonic() - began + TRACKING_SECONDS)
        spent = f"{_clock(time.monotonic() - self._begun)} in all"
        left = f", about {about(self.left())} left" if self._left else ""
        self.say(f"    {self._whose(trial)}{_ending(outcome)}; {spent}{left}")

    def left(self) -> float:
        """Seconds until the last trial ends, as far as can be told."""
        now = time.monotonic()
        all_of_them = self._durations.total(self._left, self._parallel)
        run = [min(now - t, self._durations.of(trial)) for trial, t in self._running()]
        return max(0.0, all_of_them - sum(run) / self._parallel)

    def say(self, line: str) -> None:
        """Write one line."""
        self.console.print(Text(line), soft_wrap=True)

    def _running(self) -> list[tuple[Trial, float]]:
        begun = self._started
        return [(trial, begun[trial.name]) for trial in self._left if trial.name in begun]

    def _whose(self, trial: Trial) -> str:
        return f"{trial.name}: " if self._parallel > 1 else ""


class LiveView(PlainView):
    """Shows bars for the experiment and the running trials, with the lines above them."""

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
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LiveView:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()

    def begin(
        self,
        experiment: str,
        trials: Sequence[Trial],
        skipped: Sequence[Trial],
        durations: Durations | None = None,
        parallel: int = 1,
    ) -> None:
        """Say what will be done, and show how much of it is done."""
        super().begin(experiment, trials, skipped, durations, parallel)
        self._all = self._bars.add_task(
            experiment,
            total=len(trials),
            completed=len(skipped),
            unit="trials",
            state=self._remaining(),
        )

    def started(self, trial: Trial) -> None:
        """Show a bar for the trial."""
        super().started(trial)
        labels = [*trial.labels.values(), f"seed {trial.seed}"]
        updates = trial.config.training.updates
        self._tasks[trial.name] = self._bars.add_task(
            "  " + " · ".join(labels), total=updates, unit="updates", state="starting"
        )

    def moved(self, trial: Trial, updates: int, state: str) -> None:
        """Move the bar."""
        self._bars.update(self._tasks[trial.name], completed=updates, state=state)
        self._bars.update(self._all, state=self._remaining())

    def ended(self, trial: Trial, outcome: Outcome) -> None:
        """Take the bar away."""
        super().ended(trial, outcome)
        self._bars.remove_task(self._tasks.pop(trial.name))
        self._bars.update(self._all, advance=1, state=self._remaining())

    def _remaining(self) -> str:
        return f"about {about(self.left())} left" if self._left else ""


def view_for(console: Console) -> PlainView:
    """Return the view that suits where the output goes."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def told(event: Event) -> str | None:
    """Return an event as a line to show; None: it is no part of a fault's story."""
    match event:
        case Killed():
            proof = "" if event.gone else ", but its process is still there"
            seen = f" ({event.evidence})" if event.evidence else ""
            how = WAYS.get(event.by, "killed")
            return f"{event.node} {how} after {event.updates} updates{proof}{seen}"
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
        case FaultSkipped():
            return f"a fault on {event.target} was left out: {event.reason}"
        case Detected() | Moved() | RolledBack() | WorkerLeft():
            return sentence(event)
        case CapacityRestored():
            return f"{event.node} is up in the place of the lost node"
        case Promoted():
            return f"shard {event.shard} goes on at {event.node}, at version {event.version}"
        case Restored() if event.epoch > 1:
            source = SOURCES.get(event.source, event.source)  # durabilities may have their own
            return (
                f"shard {event.shard} restored from {source} at {event.node}, "
                f"at version {event.version}"
            )
        case ReplicaAdded() if event.epoch > 1:
            return f"shard {event.shard} has a new replica at {event.node}"
        case Rescaled():
            wanted = {"servers": event.servers, "workers": event.workers}
            said = ", ".join(f"{what}: {n}" for what, n in wanted.items() if n is not None)
            return f"after {event.updates} updates, wanted from now on: {said}"
        case NodeLeaving():
            why = "its time is nearly over" if event.why == "lifetime" else "it was sent SIGTERM"
            return f"{event.node} is to leave: {why}"
        case NodeDrained():
            return f"{event.node} was emptied in {event.seconds:.1f} s"
        case NodeLeft():
            return f"{event.node} left, and nothing was lost"
        case Replayed():
            return f"shard {event.shard}: {event.count} buffered updates applied"
        case TrialResumed():
            return f"goes on from update {event.updates}, from checkpoints in {event.path}"
        case Rebuilt():
            return (
                f"shard {event.shard}: the copy of {event.donor} was {event.age_seconds:.1f} s old"
            )
        case CheckpointRefused():
            return f"shard {event.shard}: a damaged checkpoint is passed over: {event.reason}"
    return None


def _ending(outcome: Outcome) -> str:
    if not outcome.valid:
        return f"{outcome.status}: {outcome.reason}"
    final = outcome.accuracy.final
    score = "" if final is None else f", {outcome.score.name} {outcome.score.text(final)}"
    seconds = outcome.row()["training_seconds"]
    return f"valid{score}" + ("" if seconds is None else f", {seconds:.1f} s of training")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
