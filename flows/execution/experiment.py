"""The flow behind `dps run`: expand, skip recorded trials, run the rest, track, report.

Trials run in separate driver processes (`flows.execution.drivers`), one after the other or several
at once. Their records are the source of truth. Only this process writes MLflow and the report, from
the records: both can be rewritten at any time, and an outage of MLflow's server loses nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dps.errors import DpsError
from dps.observe.tracking import beside, store_errors
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand, in_blocks
from flows.execution.attempt import Again, Attempt, end_unfinished, prepare, set_aside, take_back
from flows.execution.preflight import check_datasets, recorded_in
from flows.metrics.outcome import Outcome
from flows.metrics.prices import Prices, load_prices
from flows.monitor.estimate import Durations
from flows.monitor.progress import PlainView
from flows.records.owner import exclusive
from flows.records.record import EVENTS_FILE, write_configuration, write_grid
from flows.report.html import write_report
from flows.statistics.claims import fixed
from flows.statistics.comparison import Questions, write_questions
from flows.statistics.finished import (
    REPORT,
    RESULTS,
    Finished,
    finished,
    read_finished,
    with_effects,
)
from flows.tracking.store import Refused, check_default, default_uri, prepare_mlflow
from flows.tracking.tracker import Delivered, Tracker, deliver

if TYPE_CHECKING:
    from flows.execution.drivers import Drivers

# How often a trial is attempted again within a run because its driver or scheduler was lost. What
# takes them a third time, such as a lack of memory or a defect, will hardly spare them a fourth
# time, and each attempt takes as long as the trial.
AGAIN = 2
NICE = 10  # of what opens the tracking store beside a trial: a tenth of the weight of a process


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of `run_experiment`: every trial of the grid, and a report.

    `tracked`: the tracking store has all of it, except what it has `refused`: names of trials, or
    the report.
    """

    trials: tuple[Finished, ...]
    report: Path
    tracked: bool
    refused: tuple[str, ...] = ()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of the trials."""
        return tuple(done.outcome for done in self.trials)


def run_experiment(
    experiment: ExperimentConfig,
    here: Path,
    view: PlainView,
    runner: Drivers,
    store: str | None = None,
    *,
    trials: Sequence[Trial] | None = None,
    retry_invalid: bool = False,
    resume: bool = True,
    written: str = "",
    command: str = "",
) -> Ran:
    """Run the trials of an experiment that are not recorded yet, track all, and write the report.

    Raises `ConfigurationError` if the data are missing, or another `dps run` of the experiment is
    at work here, and `StoreUnavailable` if the results folder cannot be written, or the tracking
    store when the run begins. If the store fails later, the experiment continues, and what the
    store lacks is written at the end.

    Parameters
    ----------
    here
        The working directory: `results/` and `mlruns/` are in it.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    trials
        Those of the experiment, where it was expanded already.
    retry_invalid
        Also repeat trials whose faults did not happen as planned.
    resume
        Resume a trial that was interrupted, or loses its driver or scheduler in this run, from its
        last complete checkpoint, if it wrote any. Otherwise it starts again, and so does one that
        was resumed before: such a record begins in the middle and cannot be compared with others.
    written, command
        The configuration as the user wrote it, and the command line without options for this run
        alone, to be kept beside the records; "": there is none.
    """
    trials = expand(experiment) if trials is None else trials
    in_order = in_blocks(experiment, trials)
    folder = here / RESULTS / experiment.experiment
    with exclusive(folder):
        with view:
            for trial in trials:
                take_back(trial, folder / trial.name, view.notify)
            durations = Durations()
            prices, known = load_prices(), dict[str, Finished]()
            for name, record in recorded_in(folder, trials, durations):
                done = finished(folder / name / EVENTS_FILE, record, prices)
                if (done.outcome.valid or not retry_invalid) and (done.outcome.whole or resume):
                    known[name] = done
            recorded = [trial for trial in trials if trial.name in known]
            view.begin(experiment.experiment, trials, recorded, durations, runner.parallel)
            check_datasets(trials)
            runner.start([trial for trial in in_order if trial.name not in known])
            books = _Books(folder, here, store, view.notify)
            # Files of the experiment are written after all checks have passed. Records of other
            # configurations are moved aside first, so that they never appear among the new ones,
            # even after an interruption.
            for trial in trials:
                if trial.name not in known:
                    set_aside(trial, folder / trial.name, view.notify)
            names = (trial.name for trial in in_order)
            labels = {axis: list(values) for axis, values in experiment.axes.items()}
            write_grid(folder, names, experiment.order_seed, labels, command)
            asked = Questions(claims=experiment.claims, comparison=experiment.comparison)
            write_questions(folder, asked)
            write_configuration(folder, written)
            claimed = fixed(experiment.claims, len(experiment.seeds))
            ended, before = dict(known), [*known.values()]
            to_run = _attempts(
                in_order, known, folder, view, experiment, claimed, runner.parallel, resume
            )
            for attempt in runner.run(to_run, view, _again(view, resume)):
                events_file = folder / attempt.trial.name / EVENTS_FILE
                done = read_finished(events_file, prices)
                view.ended(attempt.trial, done.outcome)
                for each in (*before, done):  # the former may be missing after an interruption
                    books.enter(each)
                before.clear()
                ended[attempt.trial.name] = done
        ran = books.close([ended[trial.name] for trial in trials], prices)
        if not ran.tracked:
            view.notify(
                "the tracking store lacks some trials; when it is available again, run dps sync "
                f"{experiment.experiment}"
            )
        if ran.refused:
            view.notify(
                f"the tracking store has refused {', '.join(ran.refused)}; remove the cause above, "
                f"such as a limit of file sizes, then run dps sync {experiment.experiment}"
            )
        return ran


class _Books:
    """Writes each record to MLflow as a run, and the report at the end.

    The default store opens while the first trial runs. A store that the user names opens before any
    trial starts, because its address may be wrong.
    """

    def __init__(
        self, folder: Path, here: Path, store: str | None, notify: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._place = here, store
        self._notify = notify
        # None after its first failure: the trials continue, and everything is written at the end.
        self._tracker: Tracker | Future[Tracker] | None
        if store is None:
            check_default(here)
            prepare_mlflow()  # in this thread, which changes the environment for drivers too
            self._tracker = beside(self._open_beside)
        else:
            self._tracker = self._open()

    def _open(self) -> Tracker:
        return Tracker(self._folder.name, *self._place)

    def _open_beside(self) -> Tracker:
        if sys.platform == "linux":  # where a thread has a priority: the trial comes first
            thread = os.PRIO_PROCESS, threading.get_native_id()
            os.setpriority(*thread, max(NICE, os.getpriority(*thread)))
        with store_errors(default_uri(self._place[0])):
            return self._open()

    def _opened(self) -> Tracker | None:
        if isinstance(self._tracker, Future):
            self._tracker = self._tracker.result()
        return self._tracker

    def enter(self, done: Finished) -> None:
        try:
            if (tracker := self._opened()) is not None:
                tracker.track_trial(done)
        except Refused:
            pass  # until the end, where it is reported
        except DpsError as error:
            self._tracker = None
            self._notify(f"{error} The trials continue; their runs are written at the end.")

    def close(self, found: Sequence[Finished], prices: Prices) -> Ran:
        """Write the report, and upload what the tracking store is missing."""
        done = with_effects(found, prices)
        recorded = sorted(done, key=lambda each: each.events_file)
        report = write_report(self._folder, self._folder / REPORT, prices, recorded=recorded)
        delivered: Delivered | None = None
        try:
            self._opened()
            delivered = deliver(self._folder, *self._place, done, True, self._notify)
        except DpsError as error:
            if self._tracker is not None:
                self._notify(str(error))
        refused = delivered.refused if delivered else ()
        return Ran(tuple(done), report, delivered is not None, refused)


def _attempts(
    trials: Sequence[Trial],
    known: Container[str],
    folder: Path,
    view: PlainView,
    experiment: ExperimentConfig,
    claimed: Mapping[str, int],
    parallel: int,
    resume: bool,
) -> Iterator[Attempt]:
    """Yield an attempt at each trial that is not recorded, in order, when it is to begin."""
    for position, trial in enumerate(trials, 1):
        if trial.name not in known:
            view.started(trial)
            circumstances = {
                "position": position,
                "order_seed": experiment.order_seed,
                "parallel": parallel if trial.config.cluster.shares_cores else 1,
                **claimed,
            }
            yield prepare(trial, folder / trial.name, circumstances, view.notify, resume=resume)


def _again(view: PlainView, resume: bool) -> Again:
    """Return the function that prepares another attempt after a loss, unless there were enough."""
    losses = Counter[str]()

    def again(lost: Attempt, reason: str) -> Attempt | None:
        trial = lost.trial
        losses[trial.name] += 1
        if (times := losses[trial.name]) > AGAIN:
            end_unfinished(lost, f"{reason}; {times} losses in this run")
            return None
        kept = lost.circumstances
        return prepare(trial, lost.folder, kept, view.notify, resume=resume, lost=reason)

    return again
