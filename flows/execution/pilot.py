"""The pilot of an experiment: trials that tell how much its figures differ from seed to seed.

Any records of trials with the same labels and settings will do, whatever their seeds: those of an
earlier run, of the experiment itself, or of a few seeds on virtual time, which are run for it under
a name of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dps.errors import ConfigurationError, RecordDamaged
from dps.events import TrialStarted
from flows.analysis.effects.controls import Setup, setup
from flows.analysis.finished import RESULTS, damaged, experiment_folder, read_outcomes
from flows.analysis.outcome import Identity, Outcome
from flows.analysis.prices import Prices
from flows.config.claims import ClaimSection
from flows.config.experiment import ExperimentConfig, TrialConfig
from flows.config.trials import Trial, decisive_settings, flat, load_trials
from flows.config.yaml_document import Document
from flows.execution.plan import at_once_by_default
from flows.metrics.effects import EFFECTS
from flows.monitor.progress import PlainView
from flows.quoting import first_few, quoted
from flows.records.record import event_files, read_start
from flows.records.settings import settings, trial_from

VIRTUAL = "virtual"  # the pilot that is run for it
PROFILE = "laptop"
SEEDS = 10
# What may differ between a pilot and what is planned, besides labels.
FREE = ("experiment", "seed", "time_limit")
K = TypeVar("K")


def twin_name(experiment: str) -> str:
    """Return the name under which the virtual pilot of an experiment is recorded."""
    return f"{experiment}-pilot"


def find_pilot(
    named: str | None,
    experiment: ExperimentConfig,
    trials: Sequence[Trial],
    here: Path,
    prices: Prices,
    warn: Callable[[str], None],
) -> tuple[list[Outcome], str]:
    """Return the trials of a pilot, and what it is to be called.

    Parameters
    ----------
    named
        A folder of records, or an experiment that is recorded here; None: the experiment itself,
        or else a virtual pilot of it that was run before. Without either, or without claims to
        plan, there are no trials.
    experiment, trials
        What is planned.
    here
        The working directory.
    prices
        What figures of money are computed by.
    warn
        Receives a message for each record that cannot be used.

    Raises
    ------
    ConfigurationError
        Nothing of that name is recorded, or only trials of another configuration.
    """
    if named is not None:
        folder = Path(named)
        if not (folder.is_dir() and any(folder.glob("*/events.jsonl"))):
            folder = experiment_folder(named, here)
        started = _started(folder, warn)
        if unlike := _unlike(started, trials):
            raise ConfigurationError(f"--pilot {named}: {unlike}")
        return _read(started, experiment, named, prices, warn)
    for name in (experiment.experiment, twin_name(experiment.experiment)):
        started = _started(here / RESULTS / name, warn) if experiment.claims else {}
        if started and (unlike := _unlike(started, trials)):
            warn(f"the records of {name} cannot serve as a pilot: {unlike}")
        elif started:
            return _read(started, experiment, name, prices, warn)
    return [], ""


def virtual_pilot(
    document: Document, overrides: Sequence[str], experiment: ExperimentConfig
) -> tuple[ExperimentConfig, tuple[Trial, ...]]:
    """Return a few seeds of an experiment on virtual time, none of them planned for itself.

    The trials are those that its claims are about, and their controls; without claims, all.

    Raises
    ------
    ConfigurationError
        It varies what its nodes are, or cannot be on virtual time.
    """
    for axis in experiment.axes:
        if axis.partition(".")[0] == "cluster":
            raise ConfigurationError(
                f"--pilot {VIRTUAL}: the axis '{axis}' varies the nodes, which a virtual pilot "
                "sets; name an earlier run instead"
            )
    first = max(experiment.seeds) + 1
    changes = {
        "experiment": twin_name(experiment.experiment),
        "seeds": list(range(first, first + SEEDS)),
        "claims": [],
        "comparison": {},
    }
    if experiment.cluster.kind != VIRTUAL:
        changes["cluster"] = {"kind": VIRTUAL, "profile": PROFILE}
    written = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    twin, trials = load_trials(document, [*overrides, *written])
    if experiment.claims:
        setups = {trial.name: setup(settings(trial, {})) for trial in trials}
        telling = {*_telling(setups, experiment.claims)}
        trials = tuple(trial for trial in trials if trial.name in telling)
    return twin, trials


def run_pilot(
    document: Document,
    overrides: Sequence[str],
    experiment: ExperimentConfig,
    here: Path,
    view: PlainView,
    store: str | None,
) -> tuple[list[Outcome], str]:
    """Run a virtual pilot, but for what is recorded of it; return its trials, and what it is."""
    # Here: `dps plan` mostly runs nothing, and need not wait for what runs, tracks and reports.
    from flows.execution.drivers import Drivers
    from flows.execution.experiment import run_experiment

    twin, trials = virtual_pilot(document, overrides, experiment)
    with Drivers(at_once_by_default(trials)) as drivers:
        ran = run_experiment(twin, here, view, drivers, store, trials=trials)
    return _as_of_experiment(ran.outcomes, experiment, "a pilot")


# -- parts -------------------------------------------------------------------------------------


def _telling(trials: Mapping[K, Setup], claims: Sequence[ClaimSection]) -> list[K]:
    """The trials that claims are about and, for the effects of faults, the controls of these."""
    effects = [claim for claim in claims if claim.column in EFFECTS]
    controlled = {each.but_for_faults for each in trials.values() if _is_about(effects, each)}
    return [
        key
        for key, each in trials.items()
        if _is_about(claims, each) or (not each.plans_faults and each.but_for_faults in controlled)
    ]


def _is_about(claims: Sequence[ClaimSection], trial: Setup) -> bool:
    """Whether a trial is on a side of any claim."""
    labels = dict(trial.labels)
    # Without axes the experiment is the strategy, and its pilot has another name.
    strategy = Identity("", "", labels, None, "").strategy if labels else None
    return any(claim.side_of(strategy or claim.strategy, labels) is not None for claim in claims)


def _started(folder: Path, warn: Callable[[str], None]) -> dict[Path, TrialStarted]:
    """The start of each record in a folder; damaged ones are left out with a warning."""
    started = {}
    for path in event_files(folder):
        try:
            start = read_start(path)
        except RecordDamaged as error:
            warn(damaged(path, error))
            continue
        if start is not None:
            started[path] = start
    return started


def _read(
    started: Mapping[Path, TrialStarted],
    experiment: ExperimentConfig,
    name: str,
    prices: Prices,
    warn: Callable[[str], None],
) -> tuple[list[Outcome], str]:
    """Read those of the recorded trials that the claims are about."""
    setups = {path: setup(start.settings) for path, start in started.items()}
    files = _telling(setups, experiment.claims)
    return _as_of_experiment(read_outcomes(files, prices, warn), experiment, name)


def _unlike(pilot: Mapping[Path, TrialStarted], trials: Sequence[Trial]) -> str:
    """Say in what trials of a pilot differ from planned ones with the same labels; "": nothing."""
    planned = {tuple(trial.labels.items()): trial.config for trial in reversed(trials)}
    for path, start in pilot.items():
        labels = tuple(setup(start.settings).labels.items())
        if (config := planned.pop(labels, None)) is None:  # or of another seed: they are alike
            continue
        own = trial_from(start.settings, str(path))
        if differing := _differing(own.config, config):
            return (
                f"its trial {own.name} has another configuration: {first_few(differing)}. Its "
                "spread may be another as well. Name a run with these settings, or run a few "
                f"seeds with --pilot {VIRTUAL}"
            )
    return ""


def _differing(pilot: TrialConfig, planned: TrialConfig) -> list[str]:
    """Name settings with both values; the cluster counts where both are on virtual time."""
    both_virtual = pilot.cluster.kind == planned.cluster.kind == VIRTUAL
    free = FREE if both_virtual else (*FREE, "cluster")
    theirs, ours = (
        flat({key: v for key, v in decisive_settings(each).items() if key not in free})
        for each in (pilot, planned)
    )
    return [
        f"{key} is {quoted(theirs.get(key))} there and {quoted(ours.get(key))} here"
        for key in dict.fromkeys([*theirs, *ours])
        if theirs.get(key) != ours.get(key)
    ]


def _as_of_experiment(
    pilot: Sequence[Outcome], experiment: ExperimentConfig, name: str
) -> tuple[list[Outcome], str]:
    """Trials of a pilot as if they were of the experiment, whose name may be a strategy."""
    outcomes = [
        replace(each, identity=replace(each.identity, experiment=experiment.experiment))
        for each in pilot
    ]
    profiles = dict.fromkeys(each.virtual for each in outcomes if each.virtual)
    on = f" on virtual time (profile {' and '.join(profiles)})" if profiles else ""
    return outcomes, f"{name}{on}"
