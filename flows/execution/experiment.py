"""The flow behind `dps run`: expand, skip what is recorded, run the rest, track, report.

Trials run in drivers of their own (`flows.execution.drivers`), one after the other or several at
once. Their records are the truth; MLflow and the report are written from them, by this process
only, so both can be made again at any time, and an outage of MLflow's server loses nothing.
"""

from __future__ import annotations

import fcntl
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from dps.errors import ConfigurationError, StoreUnavailable
from flows.analysis.comparison import write_comparison
from flows.analysis.finished import (
    REPORT,
    RESULTS,
    Finished,
    finished,
    read_finished,
    with_effects,
)
from flows.analysis.groups import ranked
from flows.analysis.outcome import Outcome
from flows.analysis.prices import Prices, load_prices
from flows.analysis.statistics.claims import fixed, write_claims
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand, in_blocks, labels_in_order
from flows.config.workload import batch_objection
from flows.execution.attempt import (
    Again,
    Attempt,
    end_unfinished,
    prepare,
    prepare_again,
    set_aside,
    take_back,
)
from flows.execution.plan import recorded_in
from flows.files import open_own
from flows.monitor.estimate import Durations
from flows.monitor.progress import PlainView
from flows.records.owner import noted
from flows.records.record import EVENTS_FILE, write_configuration, write_grid
from flows.report.figures.figure import SCREEN
from flows.report.html import FIGURES, write_report
from flows.tracking.delivery import Delivery
from flows.tracking.tracker import Tracker

# How often a trial is attempted again within a run because its driver or scheduler was lost. What
# takes them a third time, such as a lack of memory or a defect, will hardly spare them a fourth
# time, and each attempt takes as long as the trial.
AGAIN = 2


class Runner(Protocol):
    """Runs attempts at trials, a number of them at once: `flows.execution.drivers.Drivers`."""

    parallel: int

    def warm_up(self, trials: Sequence[Trial]) -> None:
        """Begin to get ready for these trials, in this order, while others get ready as well."""

    def run(self, attempts: Iterator[Attempt], view: PlainView, again: Again) -> Iterable[Attempt]:
        """Run attempts; yield each when it is over and recorded.

        One whose driver or scheduler was lost is given to `again`, with the reason.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What `run_experiment` leaves behind: every trial of the grid, and a report.

    `tracked` tells that the tracking store has all of it, but for what it has `refused`: names of
    trials, or the report.
    """

    trials: tuple[Finished, ...]
    report: Path
    tracked: bool
    refused: tuple[str, ...] = ()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What came of the trials."""
        return tuple(done.outcome for done in self.trials)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The trials that ended in an error."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")


def run_experiment(
    experiment: ExperimentConfig,
    here: Path,
    view: PlainView,
    runner: Runner,
    store: str | None = None,
    *,
    trials: Sequence[Trial] | None = None,
    retry_invalid: bool = False,
    resume: bool = True,
    also_fixed: Mapping[str, int] = MappingProxyType({}),
    written: str = "",
    command: str = "",
) -> Ran:
    """Run the trials of an experiment that are not recorded yet, track all, and write the report.

    Parameters
    ----------
    experiment
        What to run.
    here
        The working directory: `results/` and `mlruns/` are in it.
    view
        Is told how it goes.
    runner
        Runs the trials.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    trials
        Those of the experiment, where it was expanded already.
    retry_invalid
        Run those again, too, whose faults did not happen as planned.
    resume
        Go on with a trial that was interrupted, or loses its driver or scheduler in this run, from
        its last complete checkpoint, if it wrote any. Without, it starts again, and so does one
        that was gone on with: such a record begins in the middle and cannot be compared with
        others.
    also_fixed
        What the record of each trial is to name beside the experiment's own claims, as `fixed` has
        those: claims by which others judge it.
    written
        The configuration as somebody has written it, to be kept beside the records; "": nobody has.
    command
        The command line that runs the experiment, without options for this run alone; "": there is
        none.

    Raises
    ------
    ConfigurationError
        The data are missing, or another `dps run` of the experiment is at work here.
    StoreUnavailable
        The results folder cannot be written, or the tracking store to begin with. If it fails
        later, the experiment goes on (see `flows.tracking.delivery`).
    """
    trials = expand(experiment) if trials is None else trials
    in_order = in_blocks(experiment, trials)
    folder = here / RESULTS / experiment.experiment
    with exclusive(folder):
        with view:
            for trial in trials:
                take_back(trial, folder / trial.name, view.say)
            durations = Durations()
            records = dict(recorded_in(folder, trials, durations))
            prices = load_prices()
            found = (
                (name, finished(folder / name / EVENTS_FILE, record, prices))
                for name, record in records.items()
            )
            known = {
                name: done
                for name, done in found
                if (done.outcome.valid or not retry_invalid) and (done.outcome.whole or resume)
            }
            recorded = [trial for trial in trials if trial.name in known]
            view.begin(experiment.experiment, trials, recorded, durations, runner.parallel)
            runner.warm_up([trial for trial in in_order if trial.name not in known])
            digests = dataset_digests(trials)
            connect = partial(Tracker, experiment.experiment, here, store)
            books = _Books(folder, trials, digests, prices, Delivery(connect, view.say))
            # What belongs to the experiment is noted when nothing can refuse it any more. Records
            # of other configurations go first: nobody must find them among the new ones, on the
            # way or after an interruption.
            for trial in trials:
                if trial.name not in known:
                    set_aside(trial, folder / trial.name, view.say)
            names = (trial.name for trial in in_order)
            labels = labels_in_order(trials)
            write_grid(folder, names, experiment.order_seed, labels, command)
            write_comparison(folder, experiment.comparison)
            write_claims(folder, experiment.claims)
            write_configuration(folder, written)
            for trial in recorded:
                books.enter(trial, known[trial.name])
            claimed = {**fixed(experiment.claims, len(experiment.seeds)), **also_fixed}
            to_run = _attempts(
                in_order, known, folder, view, experiment, claimed, runner.parallel, resume
            )
            for attempt in runner.run(to_run, view, _again(view, resume)):
                done = books.read(attempt.trial)
                view.ended(attempt.trial, done.outcome)
                books.enter(attempt.trial, done)
        ran = books.close()
        if not ran.tracked:
            view.say(
                "the tracking store does not have all of it; when it is back: "
                f"dps sync {experiment.experiment}"
            )
        if ran.refused:
            view.say(
                f"the tracking store has refused {', '.join(ran.refused)}; when it takes what it "
                f"named above, such as larger files: dps sync {experiment.experiment}"
            )
        return ran


class _Books:
    """What is made of the records: an entry in MLflow for each, and in the end the report."""

    def __init__(
        self,
        folder: Path,
        trials: Sequence[Trial],
        digests: Mapping[str, str],
        prices: Prices,
        delivery: Delivery,
    ) -> None:
        self._folder = folder
        self._trials = trials
        self._delivery = delivery
        self._prices = prices
        self._digests = digests
        self._entered: dict[str, Finished] = {}

    def read(self, trial: Trial) -> Finished:
        """Read what a trial that is over has left."""
        return read_finished(self._folder / trial.name / EVENTS_FILE, self._prices)

    def enter(self, trial: Trial, done: Finished) -> None:
        """Track a trial."""
        self._delivery.trial(done, self._digests[trial.config.dataset.model_dump_json()])
        self._entered[trial.name] = done

    def close(self) -> Ran:
        """Write the report, and track the experiment as a whole."""
        done = with_effects([self._entered[trial.name] for trial in self._trials], self._prices)
        labels = labels_in_order(self._trials)
        done = [replace(each, outcome=ranked(each.outcome, labels)) for each in done]
        page, figures = self._folder / REPORT, self._folder / FIGURES
        recorded = sorted(done, key=lambda each: each.events_file)
        # Files for print take seconds; who wants them runs `dps report`.
        report = write_report(
            self._folder, page, self._prices, figures, recorded=recorded, kinds=SCREEN
        )
        trials = [(each.record, each.outcome) for each in done]
        tracked = self._delivery.experiment(trials, report, figures)
        refused = tuple(self._delivery.refused)
        return Ran(tuple(done), report, tracked, refused)


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
            yield prepare(trial, folder / trial.name, circumstances, view.say, resume=resume)


def _again(view: PlainView, resume: bool) -> Again:
    """Return what says whether a trial is attempted again whose driver or scheduler was lost."""
    lost = Counter[str]()

    def again(attempt: Attempt, reason: str) -> Attempt | None:
        lost[attempt.trial.name] += 1
        if (times := lost[attempt.trial.name]) > AGAIN:
            end_unfinished(attempt, f"{reason}; it was lost {times} times in this run")
            return None
        return prepare_again(attempt, reason, view.say, resume=resume)

    return again


def dataset_digests(trials: Sequence[Trial]) -> dict[str, str]:
    """Load each data set once, so that missing or too few data are found before anything runs.

    The digests are found by the sections of the configurations, as JSON.

    Raises
    ------
    ConfigurationError
        Data are missing, or a trial's batches are larger.
    """
    trials_of: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        trials_of[trial.config.dataset.model_dump_json()].append(trial)
    digests = {}
    for key, those in trials_of.items():
        data = those[0].config.dataset.load()
        for trial in those:
            if unfit := batch_objection(trial.config.training, data.name, len(data.y_train)):
                raise ConfigurationError(f"{trial.name}: training.batch_size: {unfit}")
        digests[key] = data.digest
    return digests


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold an experiment's folder, so that no two commands write into the same records.

    A note in it says who does, for `dps status`.

    Raises
    ------
    ConfigurationError
        Another command holds it.
    StoreUnavailable
        It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_own(folder / ".lock", "a")
    except OSError as error:
        raise StoreUnavailable(
            f"the results folder {folder} cannot be written: {error.strerror or error}. "
            "Make it writable, or run in another directory."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another `dps run` or `dps resume` is writing to {folder}; wait for it to end"
            ) from error
        with noted(folder):
            yield
