"""The progress of `dps run`: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from flows.config.trials import Trial
from flows.metrics.outcome import Outcome
from flows.monitor.estimate import TRACKING_SECONDS, Durations, about, trials_text
from flows.quoting import first_few

WARNING = "warning: "  # the beginning of such a line


class PlainView:
    """Shows an experiment as lines of text, below which a terminal has bars. A context manager."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._begun = time.monotonic()
        self._total = 0
        self._parallel = 1
        self._left: list[Trial] = []
        self._started: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._durations = Durations()
        self._warned: set[str] = set()

    def __enter__(self) -> PlainView:
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
        """Show what will be done; `skipped` are recorded already."""
        self._total = len(trials)
        self._parallel = parallel
        self._left = [trial for trial in trials if trial not in skipped]
        self._durations = durations or Durations()
        self.notify(f"{experiment}: {trials_text(len(trials))}, {len(self._left)} to run")
        if self._left:
            basis = "a guess" if not self._durations.known else "by those that have ended"
            at_once = f", {parallel} at once" if parallel > 1 else ""
            self.notify(f"about {about(self.left())} ({basis}){at_once}")
        if skipped:
            names = first_few([trial.name for trial in skipped])
            self.notify(f"recorded already, skipped: {names}")
        self._all = self._bars.add_task(
            experiment,
            total=len(trials),
            completed=len(skipped),
            unit="trials",
            state=self._remaining(),
        )

    def started(self, trial: Trial) -> None:
        """Show that a trial begins, with a bar."""
        self._started[trial.name] = time.monotonic()
        number = self._total - len(self._left) + len(self._started)
        self.notify(f"[{number}/{self._total}] {trial.name}")
        labels = "  " + " · ".join([*trial.labels.values(), f"seed {trial.seed}"])
        total = trial.config.training.updates
        bar = self._bars.add_task(labels, total=total, unit="updates", state="starting")
        self._tasks[trial.name] = bar

    def show_line(self, trial: Trial, line: str) -> None:
        """Show a line of a trial's story; the same warning of several trials only once."""
        if line.startswith(WARNING):
            if line in self._warned:
                return
            self._warned.add(line)
        self.notify(f"    {self._whose(trial)}{line}")

    def moved(self, trial: Trial, updates: int, state: str) -> None:
        """Move the bar of a trial."""
        self._bars.update(self._tasks[trial.name], completed=updates, state=state)
        self._bars.update(self._all, state=self._remaining())

    def ended(self, trial: Trial, outcome: Outcome) -> None:
        """Show how a trial ended, and remove its bar."""
        began = self._started.pop(trial.name)
        self._left = [other for other in self._left if other.name != trial.name]
        if outcome.status != "failed":
            self._durations.note(trial, time.monotonic() - began + TRACKING_SECONDS)
        spent = f"{timedelta(seconds=int(time.monotonic() - self._begun))} in all"
        left = f", {self._remaining()}" if self._left else ""
        self.notify(f"    {self._whose(trial)}{_ending(outcome)}; {spent}{left}")
        self._bars.remove_task(self._tasks.pop(trial.name))
        self._bars.update(self._all, advance=1, state=self._remaining())

    def left(self) -> float:
        """Return the estimated seconds until the last trial ends."""
        now = time.monotonic()
        running = [trial for trial in self._left if trial.name in self._started]
        run = [min(now - self._started[t.name], self._durations.of(t)) for t in running]
        all_of_them = self._durations.total(self._left, self._parallel)
        return max(0.0, all_of_them - sum(run) / self._parallel)

    def notify(self, line: str) -> None:
        """Write one line."""
        self._bars.console.print(Text(line), soft_wrap=True)

    def _remaining(self) -> str:
        return f"about {about(self.left())} left" if self._left else ""

    def _whose(self, trial: Trial) -> str:
        return f"{trial.name}: " if self._parallel > 1 else ""


def _ending(outcome: Outcome) -> str:
    if not outcome.valid:
        return f"{outcome.status}: {outcome.reason}"
    final = outcome.row()["accuracy_final"]
    score = "" if final is None else f", {outcome.score.name} {outcome.score.format(final)}"
    seconds = outcome.row()["training_seconds"]
    return f"valid{score}" + ("" if seconds is None else f", {seconds:.1f} s of training")
