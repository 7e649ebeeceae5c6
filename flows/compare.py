"""Owns the flow behind `dps run`: expand, skip what is recorded, run the rest, track, report.

Trials run one after the other, each in fresh processes (`flows.trial`). Their records are the
truth; MLflow and the report are written from them, so both can be made again at any time.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dps.errors import ConfigurationError, StoreUnavailable
from flows.comparisons import write_comparison
from flows.config import ExperimentConfig
from flows.grid import Trial, expand
from flows.outcome import Outcome
from flows.prices import load_prices
from flows.progress import PlainView
from flows.record import EVENTS_FILE, write_grid
from flows.report import FIGURES, write_report
from flows.results import REPORT, RESULTS, Finished, is_recorded, read_finished
from flows.resume import interrupted, keep_record
from flows.tracking import Tracker
from flows.workloads import load_dataset

RunTrial = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` leaves behind: an outcome for every trial of the grid, and a report."""

    outcomes: tuple[Outcome, ...]
    report: Path

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The trials that ended in an error."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")


def compare(
    experiment: ExperimentConfig,
    here: Path,
    view: PlainView,
    run: RunTrial,
    store: str | None = None,
) -> Comparison:
    """Run the trials of an experiment that are not recorded yet, track all, and write the report.

    Parameters
    ----------
    experiment
        What to run.
    here
        The working directory: `results/` and `mlruns/` are in it.
    view
        Is told how it goes.
    run
        Runs one trial: `flows.trial.run_trial`. One that was interrupted goes on from its last
        complete checkpoint, if it writes any.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.

    Raises
    ------
    ConfigurationError
        The data are missing, or another `dps run` of the experiment is at work here.
    StoreUnavailable
        The results folder or the tracking store cannot be written.
    """
    trials = expand(experiment)
    prices = load_prices()
    folder = here / RESULTS / experiment.experiment
    with _exclusive(folder):
        write_grid(folder, (trial.name for trial in trials))
        write_comparison(folder, experiment.comparison)
        recorded = [trial for trial in trials if is_recorded(trial, folder)]
        finished: list[Finished] = []
        with view:
            view.begin(experiment.experiment, trials, recorded)
            digests = _dataset_digests(trials)
            tracker = Tracker(experiment.experiment, here, store)
            for trial in trials:
                events_file = folder / trial.name / EVENTS_FILE
                new = trial not in recorded
                if new:
                    view.trial_started(trial)
                    _run_or_resume(run, trial, folder / trial.name, view)
                done = read_finished(events_file, prices)
                if new:
                    view.trial_ended(done.outcome)
                dataset = digests[trial.config.dataset.model_dump_json()]
                tracker.track_trial(done.record, done.outcome, events_file, dataset)
                finished.append(done)
        figures = folder / FIGURES
        report = write_report(folder, folder / REPORT, figures=figures)
        tracker.track_experiment(
            [(done.record, done.outcome) for done in finished], report, figures
        )
    return Comparison(tuple(done.outcome for done in finished), report)


def _run_or_resume(run: RunTrial, trial: Trial, folder: Path, view: PlainView) -> None:
    path = interrupted(trial, folder)
    if path is not None:
        keep_record(folder)
        run(trial, folder, view.event, path)
        return
    if (folder / EVENTS_FILE).exists():
        view.say("    an earlier attempt left nothing to go on from: it starts again")
    # What an interrupted attempt left, checkpoints too, must not reach this one.
    shutil.rmtree(folder, ignore_errors=True)
    run(trial, folder, view.event)


def _dataset_digests(trials: Sequence[Trial]) -> dict[str, str]:
    """Load each data set once, so that missing data are found before anything runs."""
    sections = {trial.config.dataset.model_dump_json(): trial.config.dataset for trial in trials}
    return {key: load_dataset(**section.model_dump()).digest for key, section in sections.items()}


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold an experiment's folder, so that two runs cannot write into the same records."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
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
                f"another `dps run` is writing to {folder}; wait for it to end"
            ) from error
        yield
