"""The preview of an experiment: its trials in order, what is recorded, and what they need."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from dps.core.faults.plan import FaultPlan
from dps.core.names import role_of
from dps.errors import ConfigurationError
from dps.events import Applied, Event, Filtered, Reported, ResourceSampled
from dps.protocol.executor import available_cores
from flows.analysis.finished import whole_record
from flows.config.cluster import QueueSection
from flows.config.experiment import ExperimentConfig
from flows.config.faults.text import brief, full, late_line
from flows.config.own_data import OwnDataSection
from flows.config.trials import Trial
from flows.monitor.estimate import Durations, about, seconds_of, trials_told
from flows.quoting import listed, quoted
from flows.records.record import Record

MANY = 1000
# Most of a record, and not needed to find out whether a trial is recorded.
BULK = (Applied, Filtered, Reported, ResourceSampled)
SERVING_ROLES = ("server", "replica", "spare", "store")
MOST_NAMED = 8  # trials or seeds in a line
MOST_ROWS = 100  # of the table of trials: rich takes a second for a thousand


def confirm_many(trials: int) -> None:
    """Have a very large grid confirmed, where there is somebody to ask.

    Raises
    ------
    ConfigurationError
        It is not wanted, or nobody can be asked.
    """
    if trials <= MANY:
        return
    told = f"the grid has {trials:,} trials"
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"{told}, which may be a mistake: give --yes if it is none, or vary less, so that "
            f"{MANY:,} or fewer are left"
        )
    if not typer.confirm(f"{told}. Go on?", err=True):
        raise ConfigurationError(f"{told}; nothing was done")


def recorded_in(
    folder: Path,
    trials: Sequence[Trial],
    durations: Durations,
    without: Collection[type[Event]] = (),
) -> Iterator[tuple[str, Record]]:
    """Yield what is recorded in a folder, by trial; `durations` learn how long such trials take.

    Records are read `without` events of some kinds.
    """
    for trial in trials:
        record = whole_record(trial, folder, without)
        if record is not None:
            if trial.config.cluster.kind != "virtual":  # whose records know nothing of real time
                durations.note(trial, seconds_of(record))
            yield trial.name, record


def at_once_by_default(trials: Sequence[Trial]) -> int:
    """Return how many trials run at once if nobody says it: those that disturb no other."""
    if any(trial.config.cluster.shares_cores for trial in trials):
        return 1
    return available_cores()


def time_needed(trials: Sequence[Trial], durations: Durations) -> str:
    """Say how long trials will take, and what this is known from."""
    if not trials:
        return "Nothing is left to run."
    learnt = f"going by {trials_told(durations.known, 'recorded ')}"
    basis = learnt if durations.known else "guessed from the settings, for a quiet machine"
    seconds = durations.total(trials, at_once_by_default(trials))
    return f"About {about(seconds)} of running, {basis}."


def order_told(experiment: ExperimentConfig) -> str:
    """Say how the order of the trials has come about."""
    seeds = listed(map(str, experiment.seeds), MOST_NAMED)
    blocks = f"a block for each of the seeds {seeds}, shuffled within"
    if len(experiment.seeds) == 1:
        blocks = f"one block, of seed {seeds}, shuffled"
    return f"Order: {blocks} (order_seed {experiment.order_seed})."


def plan_table(trials: Sequence[Trial], recorded: Container[str]) -> Table:
    """Return one line per trial, of the first 100; `recorded` are those that a run would skip."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("#", "trial", *trials[0].labels, "seed", "fault plan", "nodes", "state"):
        numeric = heading in ("#", "seed", "nodes")
        table.add_column(Text(heading), justify="right" if numeric else "left")
    for number, trial in enumerate(trials[:MOST_ROWS], 1):
        state = "recorded" if trial.name in recorded else "to run"
        cells = [
            str(number),
            trial.name,
            *trial.labels.values(),
            str(trial.seed),
            brief(trial.config.build_faults()),
        ]
        table.add_row(*map(Text, [*cells, str(len(trial.config.node_names)), state]))
    if (more := len(trials) - MOST_ROWS) > 0:
        table.add_row("", f"… and {more:,} more, which --json lists")
    return table


def nodes_needed(trials: Sequence[Trial]) -> str:
    """Say how many nodes the largest trial needs, by what they are."""
    names = max((trial.config.node_names for trial in trials), key=len)
    roles = Counter(role_of(name) for name in names)
    parts = ", ".join(f"{count} {role}" for role, count in roles.items())
    return f"Nodes needed at once, at most: {len(names)} ({parts}), and a scheduler."


def data_told(trials: Sequence[Trial]) -> list[str]:
    """Say what is in the data sets that are the user's own."""
    told: dict[str, None] = {}
    for trial in trials:
        if isinstance(trial.config.dataset, OwnDataSection):
            told[f"Data: {trial.config.dataset.whole.told()}."] = None
    return [*told]


def budgets_told(trials: Sequence[Trial]) -> list[str]:
    """Say how each strategy uses the nodes that it has a budget of."""
    used: dict[str, None] = {}
    for trial in trials:
        config = trial.config
        if config.budget is None:
            continue
        strategy = trial.labels.get("recovery", config.recovery.name)
        roles = Counter(role_of(n) for n in config.node_names if role_of(n) in SERVING_ROLES)
        parts = ", ".join(f"{count} {role}" for role, count in roles.items())
        used[f"  {config.budget.nodes} for {strategy}: {parts}"] = None
    return ["Budget of nodes for servers, replicas, spares and store:", *used] if used else []


def job_scripts(trial: Trial) -> str:
    """Return the job script of each group of a trial's nodes.

    Raises
    ------
    ConfigurationError
        It does not run as jobs.
    """
    cluster = trial.config.cluster
    if not isinstance(cluster, QueueSection):
        raise ConfigurationError(
            f"--job-script: there are no jobs with cluster: {{kind: {cluster.kind}}}; expected "
            "slurm, pbs, lsf or sge"
        )
    from flows.execution.trial import nodes

    scripts = cluster.scripts(nodes(trial.config))
    return "\n".join(f"# -- {role} --\n{script}" for role, script in scripts.items())


def warnings(trials: Sequence[Trial]) -> list[str]:
    """Return what will make trials invalid: faults that come after the end of the training."""
    affected: defaultdict[str, list[str]] = defaultdict(list)
    for trial in trials:
        for fault, end in trial.config.late_faults:
            late = f"{late_line(fault)}, for {end}"
            affected[late].append(trial.name)
    return [f"{late}; will be marked invalid: {', '.join(n)}" for late, n in affected.items()]


def claims_without_faults(experiment: ExperimentConfig, trials: Sequence[Trial]) -> list[str]:
    """Return which claims are of what only faults do, under a condition without any."""
    found: list[str] = []
    for number, claim in enumerate(experiment.claims):
        if not claim.column.of_faults:
            continue
        for strategy, condition in claim.sides:
            of_side = [trial for trial in trials if _is_of(trial, strategy, condition)]
            if of_side and not any(trial.config.build_faults() for trial in of_side):
                under = ", ".join(f"{axis} {quoted(label)}" for axis, label in condition.items())
                found.append(
                    f"claims.{number}: {claim.metric} is of faults, and {strategy}"
                    f"{f' with {under}' if under else ''} has none: it will never have a value; "
                    "expected another condition or figure"
                )
                break
    return found


def fault_plans(trials: Sequence[Trial]) -> list[str]:
    """Return the faults one by one, with how long each lasts, for which the table has no room."""
    trials_of: defaultdict[FaultPlan, list[str]] = defaultdict(list)
    for trial in trials:
        if plan := trial.config.build_faults():
            trials_of[plan].append(trial.name)
    lines = []
    for plan, names in trials_of.items():
        lines += [f"Faults of {listed(names, MOST_NAMED)}:", *(f"  {each}" for each in full(plan))]
    return lines


def _is_of(trial: Trial, strategy: str, condition: Mapping[str, str]) -> bool:
    """Whether it is a trial of a strategy under a condition, which names every other axis."""
    rest = {label for axis, label in trial.labels.items() if axis not in condition}
    return rest <= {strategy} and condition.items() <= trial.labels.items()
