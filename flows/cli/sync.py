"""`dps sync`: the tracking store gets what is recorded here and not in it, from records alone.

What is there whole stays as it is, and what is half written is replaced, so it may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dps.errors import ConfigurationError
from flows.analysis.finished import (
    REPORT,
    Finished,
    experiment_folder,
    read_experiment,
    recorded_experiments,
)
from flows.analysis.prices import load_prices
from flows.config.trials import Trial
from flows.execution.experiment import dataset_digests, exclusive
from flows.monitor.estimate import trials_told
from flows.records.record import grid_of
from flows.records.settings import trial_from
from flows.replication.ttf.emulation.settings import is_emulated
from flows.report.figures.figure import SCREEN
from flows.report.html import FIGURES, write_report
from flows.tracking.store import Refused
from flows.tracking.tracker import Tracker

Tell = Callable[[str], None]


def sync(
    names: Sequence[str], here: Path, store: str | None, say: Tell, warn: Tell = lambda _: None
) -> list[str]:
    """Deliver to the tracking store what is recorded in a working directory.

    Return the names of the experiments that are there.

    Parameters
    ----------
    names
        The experiments; none: all that are recorded, but for those that cannot be delivered now,
        of which `warn` is told.
    here
        The working directory, with `results/` and `mlruns/`.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    say
        Is told what was delivered.

    Raises
    ------
    ConfigurationError
        There is no such experiment, its data are missing, or a command is writing to it.
    StoreUnavailable
        The store cannot be used; what it has already stays, and the same again goes on from there.
    Refused
        The store is well, and does not take some of it; it has all the rest.
    """
    refused: list[Refused] = []
    there: list[str] = []
    for name in names or recorded_experiments(here):
        try:
            found = _sync_one(experiment_folder(name, here), here, store, say, warn)
            if found is not None:
                refused += found
                there.append(name)
        except ConfigurationError as error:
            if names:
                raise
            warn(f"{name} is left out: {error}")
    if refused:
        todo = "The rest is in the store. When it takes this, such as larger files: `dps sync`"
        raise Refused("\n".join([*map(str, refused), todo]))
    return there


def _sync_one(
    folder: Path, here: Path, store: str | None, say: Tell, warn: Tell
) -> list[Refused] | None:
    """Deliver one experiment; return what the store did not take, None if there is nothing."""
    name, refused = folder.name, list[Refused]()
    with exclusive(folder):
        left_out, prices = list[str](), load_prices()
        recorded = read_experiment(folder, prices, left_out.append)
        for said in left_out:
            warn(said)
        whole = [each for each in recorded if _counts(each)]
        if not whole:
            say(f"{name}: no trial that is over and belongs in the tracking store")
            return None
        found, trials = _known(whole, warn)
        digests = dataset_digests(trials)
        tracker = Tracker(name, here, store)
        for each, trial in zip(found, trials, strict=True):
            digest = digests[trial.config.dataset.model_dump_json()]
            try:
                tracker.track_trial(each.record, each.outcome, each.events_file, digest)
            except Refused as error:
                refused.append(error)
        there = len(found) - len(refused)
        say(f"{name}: {trials_told(tracker.written)} delivered, {there} in the store")
        missing = (grid_of(folder) or frozenset()) - {trial.name for trial in trials}
        if missing:
            # The experiment is not over: `dps run` ends it, in the store as well.
            say(f"{name}: {trials_told(len(missing))} not recorded yet: no report is delivered")
            return refused
        figures = folder / FIGURES
        report = write_report(
            folder,
            folder / REPORT,
            prices,
            figures,
            recorded=recorded,
            left_out=left_out,
            kinds=SCREEN,
        )
        try:
            trials_found = [(each.record, each.outcome) for each in found]
            tracker.track_experiment(trials_found, report, figures)
        except Refused as error:
            refused.append(error)
        return refused


def _counts(done: Finished) -> bool:
    """Whether a trial is one that `dps run` enters into the store: over, and no emulation."""
    record = done.record
    return None not in (record.started, record.ended) and not is_emulated(record.config)


def _known(whole: Sequence[Finished], warn: Tell) -> tuple[list[Finished], list[Trial]]:
    """Which of these can run here, and what was run; `warn` is told of the others.

    Raises
    ------
    ConfigurationError
        There is no such trial; it says why of the first one.
    """
    found, trials, unknown = list[Finished](), list[Trial](), list[tuple[str, ConfigurationError]]()
    for each in whole:
        assert each.record.started is not None
        try:
            trials.append(trial_from(each.record.started.settings, str(each.events_file)))
        except ConfigurationError as error:
            unknown.append((each.outcome.identity.trial, error))
        else:
            found.append(each)
    if not found:
        raise unknown[0][1]
    for trial, reason in unknown:
        warn(f"{trial} is left out: {reason}")
    return found, trials
