"""The pilot of an experiment: trials that tell how much its figures differ from seed to seed.

Any records of trials with the same labels and settings will do, whatever their seeds: those of an
earlier run, of the experiment itself, or of a few seeds on virtual time, which are run for it under
a name of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dps.errors import ConfigurationError
from flows.analysis.effects.controls import Setup, setup
from flows.analysis.finished import RESULTS, Finished, experiment_folder, read_experiment
from flows.analysis.outcome import Identity, Outcome
from flows.analysis.prices import Prices
from flows.config.claims import ClaimSection
from flows.config.experiment import ExperimentConfig, TrialConfig
from flows.config.trials import Trial, decisive_settings, flat, load_trials
from flows.config.yaml_document import Document
from flows.execution.drivers import Drivers
from flows.execution.experiment import run_experiment
from flows.execution.plan import at_once_by_default
from flows.metrics.effects import EFFECTS
from flows.monitor.progress import PlainView
from flows.quoting import quoted
from flows.records.settings import trial_from

VIRTUAL = "virtual"  # the pilot that is run for it
PROFILE = "laptop"
SEEDS = 10
# What may differ between a pilot and what is planned, besides labels.
FREE = ("experiment", "seed", "time_limit")
MOST_NAMED = 4  # settings


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
        or else a virtual pilot of it that was run before; without either there are no trials.
    experiment, trials
        What is planned.
    here
        The working directory.
    prices
        What figures of money are computed by.
    warn
        Is told of records that cannot be used.

    Raises
    ------
    ConfigurationError
        Nothing of that name is recorded, or only trials of another configuration.
    """
    if named is not None:
        folder = Path(named)
        if not (folder.is_dir() and any(folder.glob("*/events.jsonl"))):
            folder = experiment_folder(named, here)
        pilot = read_experiment(folder, prices, warn)
        if unlike := _unlike(pilot, trials):
            raise ConfigurationError(f"--pilot {named}: {unlike}")
        return _as_of_experiment(pilot, experiment, named)
    for name in (experiment.experiment, twin_name(experiment.experiment)):
        folder = here / RESULTS / name
        pilot = read_experiment(folder, prices, warn) if folder.is_dir() else []
        if pilot and (unlike := _unlike(pilot, trials)):
            warn(f"what is recorded as {name} is no pilot for this: {unlike}")
        elif pilot:
            return _as_of_experiment(pilot, experiment, name)
    return [], ""


def virtual_pilot(
    document: Document, settings: Sequence[str], experiment: ExperimentConfig
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
    twin, trials = load_trials(document, [*settings, *written])
    return twin, _telling(trials, experiment.claims) if experiment.claims else trials


def run_pilot(
    document: Document,
    settings: Sequence[str],
    experiment: ExperimentConfig,
    here: Path,
    view: PlainView,
    store: str | None,
) -> tuple[list[Outcome], str]:
    """Run a virtual pilot, but for what is recorded of it; return its trials, and what it is."""
    twin, trials = virtual_pilot(document, settings, experiment)
    with Drivers(at_once_by_default(trials)) as drivers:
        ran = run_experiment(twin, here, view, drivers, store, trials=trials)
    return _as_of_experiment(ran.trials, experiment, "a pilot")


# -- parts -------------------------------------------------------------------------------------


def _telling(trials: Sequence[Trial], claims: Sequence[ClaimSection]) -> tuple[Trial, ...]:
    """The trials that claims are about and, for the effects of faults, the controls of these."""
    about = {trial.name for trial in trials if any(_is_about(claim, trial) for claim in claims)}
    setups = {trial.name: _setup(trial) for trial in trials}
    effects = [claim for claim in claims if claim.column in EFFECTS]
    told_beside = {
        setups[trial.name].but_for_faults
        for trial in trials
        if any(_is_about(claim, trial) for claim in effects)
    }
    controls = {
        name
        for name, each in setups.items()
        if not each.plans_faults and each.but_for_faults in told_beside
    }
    return tuple(trial for trial in trials if trial.name in about | controls)


def _setup(trial: Trial) -> Setup:
    config = trial.config.model_dump(mode="json")
    return setup({"config": config, "experiment": trial.experiment, "seed": trial.seed})


def _is_about(claim: ClaimSection, trial: Trial) -> bool:
    who = Identity(trial.name, trial.experiment, trial.labels, trial.seed, trial.digest)
    # Without axes the experiment is the strategy, and its pilot has another name.
    strategy = who.strategy if trial.labels else claim.strategy
    return claim.side_of(strategy, trial.labels) is not None


def _unlike(pilot: Sequence[Finished], trials: Sequence[Trial]) -> str:
    """Say in what trials of a pilot differ from planned ones with the same labels; "": nothing."""
    planned = {tuple(trial.labels.items()): trial.config for trial in reversed(trials)}
    for done in pilot:
        if done.record.started is None:
            continue
        own = trial_from(done.record.started.settings, str(done.events_file))
        config = planned.pop(tuple(own.labels.items()), None)  # of one seed: the others are alike
        if config is not None and (differing := _differing(own.config, config)):
            more = len(differing) - MOST_NAMED
            told = "; ".join([*differing[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
            return (
                f"its trial {own.name} has another configuration: {told}. Such trials may differ "
                "by more or less from seed to seed. Name a run with these settings, or run a few "
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
    pilot: Sequence[Finished], experiment: ExperimentConfig, name: str
) -> tuple[list[Outcome], str]:
    """Trials of a pilot as if they were of the experiment, whose name may be a strategy."""
    outcomes = [
        replace(each, identity=replace(each.identity, experiment=experiment.experiment))
        for each in (done.outcome for done in pilot)
    ]
    profiles = dict.fromkeys(each.virtual for each in outcomes if each.virtual)
    on = f" on virtual time (profile {' and '.join(profiles)})" if profiles else ""
    return outcomes, f"{name}{on}"
