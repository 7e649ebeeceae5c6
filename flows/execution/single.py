"""Running one trial by itself, in this process, as `dps resume` and `dps replay` do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dps.core.faults.plan import FaultPlan
from flows.analysis.finished import read_finished
from flows.analysis.outcome import Outcome
from flows.analysis.prices import load_prices
from flows.config.trials import Trial
from flows.execution.trial import run_trial
from flows.monitor.progress import Follower, PlainView
from flows.records.record import EVENTS_FILE


def run_alone(
    trial: Trial,
    folder: Path,
    view: PlainView,
    path: str | None = None,
    plan: FaultPlan | None = None,
    circumstances: Mapping[str, int] | None = None,
) -> Outcome:
    """Run a trial while `view`, which is open, shows it; record it in `folder`; read what came out.

    Parameters
    ----------
    path, plan, circumstances
        As for `flows.execution.trial.run_trial`: checkpoints to go on from, the faults if they are
        given, and how it is run.

    Raises
    ------
    ConfigurationError
        The record cannot be read, or no price is known for what ran.
    """
    view.begin(trial.experiment, [trial], [])
    view.started(trial)
    told, moved = partial(view.told, trial), partial(view.moved, trial)
    follower = Follower(trial.config.server.shards, told, moved)
    run_trial(trial, folder, follower, path, circumstances, told, plan)
    outcome = read_finished(folder / EVENTS_FILE, load_prices()).outcome
    view.ended(trial, outcome)
    return outcome
