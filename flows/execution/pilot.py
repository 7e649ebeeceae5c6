"""The pilot of an experiment: trials that tell how much its figures differ from seed to seed.

Any records of trials with the same labels will do: those of an earlier run, of the experiment
itself, or of a few seeds on virtual time, which are run for it under a name of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dps.errors import ConfigurationError
from flows.analysis.effects.controls import Setup, setup
from flows.analysis.finished import RESULTS, experiment_folder, read_experiment
from flows.analysis.outcome import Identity, Outcome
from flows.analysis.prices import Prices
from flows.config.claims import ClaimSection
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, load_trials
from flows.config.yaml_document import Document
from flows.execution.drivers import Drivers
from flows.execution.experiment import run_experiment
from flows.execution.plan import at_once_by_default
from flows.metrics.effects import EFFECTS
from flows.monitor.progress import PlainView

VIRTUAL = "virtual"  # the pilot that is run for it
PROFILE = "laptop"
SEEDS = 10


def twin_name(experiment: str) -> str:
    """Return the name under which the virtual pilot of an experiment is recorded."""
    return f"{experiment}-pilot"


def find_pilot(
    named: str | None,
    experiment: ExperimentConfig,
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

    Raises
    ------
    ConfigurationError
        Nothing of that name is recorded.
    """
    if named is not None:
        folder = Path(named)
        if not (folder.is_dir() and any(folder.glob("*/events.jsonl"))):
            folder = experiment_folder(named, here)
        return _outcomes(folder, experiment, prices, warn), named
    for name in (experiment.experiment, twin_name(experiment.experiment)):
        folder = here / RESULTS / name
        if folder.is_dir() and (found := _outcomes(folder, experiment, prices, warn)):
            return found, name
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
) -> list[Outcome]:
    """Run a virtual pilot, but for what is recorded of it, and return its trials."""
    twin, trials = virtual_pilot(document, settings, experiment)
    with Drivers(at_once_by_default(trials)) as drivers:
        ran = run_experiment(twin, here, view, drivers, store, trials=trials)
    return [_as_of(outcome, experiment) for outcome in ran.outcomes]


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


def _outcomes(
    folder: Path, experiment: ExperimentConfig, prices: Prices, warn: Callable[[str], None]
) -> list[Outcome]:
    found = read_experiment(folder, prices, warn)
    return [_as_of(done.outcome, experiment) for done in found]


def _as_of(outcome: Outcome, experiment: ExperimentConfig) -> Outcome:
    """A trial of the pilot as if it were one of the experiment, whose name may be a strategy."""
    return replace(outcome, identity=replace(outcome.identity, experiment=experiment.experiment))
