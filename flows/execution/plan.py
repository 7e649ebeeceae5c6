"""The preview of an experiment: its trials, what they need, and the pilot of its claims.

Records of trials with the same labels and settings serve as a pilot, regardless of their seeds:
those of the experiment itself, of an earlier run, or of a few seeds on virtual time (`dps run
--virtual`). They show how much figures differ from seed to seed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dps.core.names import role_of
from dps.errors import ConfigurationError
from dps.events import Applied, Filtered, Reported, ResourceSampled
from dps.faults import FaultPlan
from flows.config.cluster import QueueSection
from flows.config.experiment import ExperimentConfig, TrialConfig
from flows.config.faults import late
from flows.config.own_data import OwnDataSection
from flows.config.trials import Trial, decisive_settings, flat
from flows.execution.attempt import nodes
from flows.execution.preflight import at_once_by_default
from flows.metrics.outcome import Outcome
from flows.metrics.prices import Prices
from flows.monitor.estimate import Durations, about, trials_text
from flows.quoting import first_few, listed, quoted
from flows.records.record import event_files
from flows.statistics.finished import RESULTS, Finished, experiment_folder, read_whole
from flows.workloads.own_data import summary

# Most of a record, and not needed to find out whether a trial is recorded.
BULK = (Applied, Filtered, Reported, ResourceSampled)
# Settings that, like labels, may differ between a pilot and the plan without affecting spread.
FREE = ("experiment", "seed", "time_limit", "cluster")
# Settings that are recorded but not decisive.
NO_MATTER = re.compile(r"(workload|dataset)\.path|dataset\.target_deviation|faults\.\d+\.csv")
FEW_FAULTS = 2  # that a cell of the table names
MAX_NAMED = 8  # trials or seeds in a line
MAX_ROWS = 100  # of the table of trials: rich takes a second for a thousand


def time_needed(trials: Sequence[Trial], durations: Durations) -> str:
    """Return how long trials will take, and the basis of the estimate."""
    if not trials:
        return "Nothing is left to run."
    learnt = f"going by {trials_text(durations.known, 'recorded ')}"
    basis = learnt if durations.known else "guessed from the settings and the load of this machine"
    seconds = durations.total(trials, at_once_by_default(trials))
    return f"Running time: about {about(seconds)}, {basis}."


def plan_table(trials: Sequence[Trial], recorded: Container[str]) -> Table:
    """Return one line per trial, of the first 100; `recorded` are those that a run would skip."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("#", "trial", *trials[0].labels, "seed", "fault plan", "nodes", "state"):
        numeric = heading in ("#", "seed", "nodes")
        table.add_column(Text(heading), justify="right" if numeric else "left")
    for number, trial in enumerate(trials[:MAX_ROWS], 1):
        state = "recorded" if trial.name in recorded else "to run"
        cells = [
            str(number),
            trial.name,
            *trial.labels.values(),
            str(trial.seed),
            _brief(trial.config.fault_plan),
        ]
        table.add_row(*map(Text, [*cells, str(len(trial.config.node_names)), state]))
    if (more := len(trials) - MAX_ROWS) > 0:
        table.add_row("", f"… and {more:,} more, which --json lists")
    return table


def nodes_needed(trials: Sequence[Trial]) -> str:
    """Return how many nodes the largest trial needs, by their roles."""
    names = max((trial.config.node_names for trial in trials), key=len)
    roles = Counter(role_of(name) for name in names)
    parts = ", ".join(f"{count} {role}" for role, count in roles.items())
    return f"Nodes needed at once: at most {len(names)} ({parts}), and a scheduler."


def queue_needs(trials: Sequence[Trial], durations: Durations) -> list[str]:
    """Return how many jobs and core-hours trials ask a queueing system for."""
    jobs, core_seconds = 0, 0.0
    for trial in trials:
        cluster = trial.config.cluster
        if isinstance(cluster, QueueSection):
            asked = nodes(trial.config)
            jobs += len(asked)
            core_seconds += cluster.cores_asked(asked) * durations.of(trial)
    return [f"Queue: {jobs:,} jobs, about {core_seconds / 3600:,.1f} core-hours."] if jobs else []


def data_lines(trials: Sequence[Trial]) -> list[str]:
    """Return summaries of the user's own data sets."""
    datasets = (trial.config.dataset for trial in trials)
    own = [summary(data.whole) for data in datasets if isinstance(data, OwnDataSection)]
    return [f"Data: {told}." for told in dict.fromkeys(own)]


def job_scripts(trial: Trial) -> str:
    """Return the job script of each group of a trial's nodes.

    Raises `ConfigurationError` if the trial does not run as jobs.
    """
    cluster = trial.config.cluster
    if not isinstance(cluster, QueueSection):
        raise ConfigurationError(
            f"--job-script: cluster.kind {cluster.kind} has no jobs; expected slurm, pbs, lsf or "
            "sge"
        )
    scripts = cluster.scripts(nodes(trial.config))
    return "\n".join(f"# -- {role} --\n{script}" for role, script in scripts.items())


def warnings(trials: Sequence[Trial]) -> list[str]:
    """Return warnings of faults after the end of the training, which make trials invalid."""
    affected: defaultdict[str, list[str]] = defaultdict(list)
    for trial in trials:
        config = trial.config
        for fault, end in late(config.fault_plan, config.training.updates, config.time_limit):
            text = f"the {fault.kind} of {fault.whom} {fault.when} never happens, because {end}"
            affected[text].append(trial.name)
    return [f"{text}; will be marked invalid: {', '.join(n)}" for text, n in affected.items()]


def fault_plans(trials: Sequence[Trial]) -> list[str]:
    """Return the faults one by one, with how long each lasts, for which the table has no room."""
    trials_of: defaultdict[FaultPlan, list[str]] = defaultdict(list)
    for trial in trials:
        if plan := trial.config.fault_plan:
            trials_of[plan].append(trial.name)
    lines = []
    for plan, names in trials_of.items():
        lines += [
            f"Faults of {listed(names, MAX_NAMED)}:",
            *(f"  {each}" for each in numbered(plan)),
        ]
    return lines


def numbered(plan: FaultPlan) -> list[str]:
    """Return every fault of a plan in words, with its number and for how long it lasts."""
    return [f"{number}: {fault.describe()}" for number, fault in enumerate(plan)]


def _brief(plan: FaultPlan) -> str:
    if len(plan) > FEW_FAULTS:
        return f"{len(plan)} faults"
    return ", ".join(map(str, plan)) or "–"


def find_pilot(
    named: str | None,
    experiment: ExperimentConfig,
    trials: Sequence[Trial],
    here: Path,
    prices: Prices,
    warn: Callable[[str], None],
) -> tuple[list[Outcome], str]:
    """Return the outcomes of a pilot, which shows how much seeds differ, and its name.

    The pilot is `named`: a folder of records, or an experiment that is recorded here. None: the
    experiment itself, which may have no records, and needs none without claims. Raises
    `ConfigurationError` if nothing of that name is recorded, or only trials of another
    configuration.
    """
    if named is None:
        name, folder = experiment.experiment, here / RESULTS / experiment.experiment
    else:
        name, folder = named, Path(named)
        if not (folder.is_dir() and any(folder.glob("*/events.jsonl"))):
            folder = experiment_folder(named, here)
    files = event_files(folder) if named is not None or experiment.claims else []
    recorded = [done for done in read_whole(files, prices, warn) if done.record.started]
    if unlike := _unlike(recorded, trials):
        if named is not None:
            raise ConfigurationError(f"--pilot {named}: {unlike}")
        warn(f"the records of {name} cannot serve as a pilot: {unlike}")
        return [], ""
    if not recorded:
        return [], ""
    outcomes = [
        # The name of an experiment may be that of a strategy.
        replace(each, identity=replace(each.identity, experiment=experiment.experiment))
        for each in (done.outcome for done in recorded)
    ]
    profiles = dict.fromkeys(each.virtual for each in outcomes if each.virtual)
    on = f" on virtual time (profile {' and '.join(profiles)})" if profiles else ""
    return outcomes, f"{name}{on}"


def _unlike(pilot: Sequence[Finished], trials: Sequence[Trial]) -> str:
    """Describe how trials of a pilot differ from planned ones with the same labels; "" if not."""
    planned = {frozenset(trial.labels.items()): trial.config for trial in reversed(trials)}
    for done in pilot:
        identity = done.outcome.identity
        labels = frozenset(identity.labels.items())
        if (config := planned.pop(labels, None)) is None:  # or another seed of the same labels
            continue
        if differing := _differing(done.record.config, config):
            return (
                f"its trial {identity.trial} has different settings, and perhaps another spread: "
                f"{first_few(differing)}. Name a run with the planned settings, such as a few "
                "seeds with `dps run --virtual`"
            )
    return ""


def _differing(recorded: Mapping[str, Any], planned: TrialConfig) -> list[str]:
    """Name settings with both values; if both run on virtual time, compare the profiles too."""
    decisive = {k: v for k, v in decisive_settings(planned).items() if k not in FREE}
    kept = {k: v for k, v in recorded.items() if k in decisive}
    if recorded.get("cluster", {}).get("kind") == planned.cluster.kind == "virtual":
        kept["cluster"] = {"profile": recorded["cluster"].get("profile")}
        decisive["cluster"] = {"profile": planned.cluster.profile}
    old, new = flat(kept), flat(decisive)
    return [
        f"{key} is {quoted(old.get(key))}, planned {quoted(new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not NO_MATTER.fullmatch(key)
    ]
