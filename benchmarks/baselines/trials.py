"""The trials of the comparison: the training of dps and of every baseline, and its result.

Both come from the same configuration: a baseline's task is made of that of dps without recovery.
The moment of the kill is drawn from the seed, the same for all systems, uniform over two intervals
between checkpoints, which all that write any write after the same gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.baselines.program import Ran, read_trace, run
from benchmarks.baselines.task import Task, snapshots
from dps.core.names import role_of
from dps.errors import DpsError
from flows.config.experiment import ExperimentConfig, TrialConfig
from flows.config.trials import Trial, expand
from flows.execution.training import Scorer
from flows.execution.trial import run_trial
from flows.metrics.learning import LAST_EVALUATIONS
from flows.metrics.prices import Prices, load_prices
from flows.metrics.trial import first_loss
from flows.records.record import EVENTS_FILE
from flows.statistics.finished import read_finished

DPS = {"none": "none", "checkpoint": "checkpoint", "chain(2)": "chain", "stateless": "stateless"}
SECONDS_PER_HOUR = 3600.0
# What sets the draw of the kill apart from what else is drawn from a seed.
_KILL = 19


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another system.

    Attributes
    ----------
    module
        Of its program, in this package.
    roles
        Its machines, each by what a node of dps that does the same is called.
    again
        Whether gradients that are lost are computed again.
    needs
        Packages to install, and how; None: none.
    """

    module: str
    roles: tuple[str, ...]
    again: bool
    needs: tuple[str, str] | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot be run here; None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs[0]) is not None:
            return None
        return f"not installed; in a clone of dps, {self.needs[1]} has it measured as well"


_SERVED = ("server", "worker", "worker")
_REPLICAS = ("worker", "worker")
BASELINES: Mapping[str, Baseline] = {
    "single process": Baseline("single_process", ("worker",), again=True),
    "Ray actors": Baseline(
        "ray_actors", _SERVED, again=False, needs=("ray", "pip install -e '.[bench]'")
    ),
    "torch RPC": Baseline(
        "torch_rpc", _SERVED, again=True, needs=("torch", "pip install -e '.[torch]'")
    ),
    "torchft": Baseline(
        "torchft_replicas", _REPLICAS, again=False, needs=("torchft", "pip install torchft")
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Common settings of the trials of all systems.

    Attributes
    ----------
    updates
        Gradients in all.
    compute_seconds
        Minimum seconds of a gradient.
    learning_rate
        Of the SGD.
    target
        Target of the test accuracy.
    every
        Those that write checkpoints write one after so many updates.
    first_kill
        The kill comes after so many gradients at the earliest, and `2 * every - 1` more at most.
    back_after
        Seconds for which the machine of the killed process is away.
    snapshot_seconds
        The weights are scored as they were so often.
    time_limit
        Seconds for a trial.
    """

    updates: int = 800
    compute_seconds: float = 0.01
    learning_rate: float = 0.02
    target: float = 0.9
    every: int = 100
    first_kill: int = 200
    back_after: float = 1.5
    snapshot_seconds: float = 0.1
    time_limit: float = 120.0

    def kill_at(self, seed: int) -> int:
        """Return the number of gradients before the kill in the trials of a seed."""
        rng = np.random.default_rng([seed, _KILL])
        return self.first_kill + int(rng.integers(2 * self.every))


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a trial.

    Attributes
    ----------
    killed
        Whether the server was killed, or it is the control.
    reason
        Why the trial is invalid; "": it is valid.
    target_seconds
        From the start of the training to the first snapshot that has the target accuracy; None:
        it was not reached.
    target_usd
        What its machines cost for so long, on demand.
    training_seconds
        From the start of the training to the last gradient that was applied.
    accuracy_final
        Mean of the last 3 snapshots, in [0, 1].
    kill_version
        How many gradients had been applied when the server was killed.
    lost
        Gradients that had been applied, and were not in the weights with which it went on.
    down_seconds
        From the kill to the next gradient that was applied.
    unfinished
        Why it was not done: it was ended at its time limit, or failed after the kill; "": it was.
        Such a trial counts: it says of the target whether it was reached by then.
    """

    system: str
    seed: int
    killed: bool
    reason: str = ""
    target_seconds: float | None = None
    target_usd: float | None = None
    training_seconds: float | None = None
    accuracy_final: float | None = None
    kill_version: int | None = None
    lost: int | None = None
    down_seconds: float | None = None
    unfinished: str = ""


def missing() -> dict[str, str]:
    """The baselines that cannot be run here, and why."""
    return {name: why for name, each in BASELINES.items() if (why := each.missing)}


def systems() -> list[str]:
    """The systems that can be run here."""
    return [*(f"dps, {name}" for name in DPS), *(n for n in BASELINES if n not in missing())]


def measure(system: str, seed: int, killed: bool, settings: Settings, folder: Path) -> Measured:
    """Run one trial, in a folder of its own that is empty; one that fails says why."""
    trials = trials_of(seed, settings)
    try:
        if system in BASELINES:
            config = trials["none", False].config
            return _of_baseline(system, config, killed, settings, folder)
        trial = trials[system.removeprefix("dps, "), killed]
        return _of_dps(system, trial, killed, folder)
    except DpsError as problem:
        return Measured(system, seed, killed, str(problem))


def trials_of(seed: int, settings: Settings) -> dict[tuple[str, bool], Trial]:
    """The trials of dps with a seed: by strategy, and whether a server is killed."""
    checkpoint = {"preset": "checkpoint", "durability": {"every": settings.every, "mode": "sync"}}
    kill = {
        "kind": "kill",
        "target": "server-0",
        "at_updates": settings.kill_at(seed),
        "back_after": settings.back_after,
    }
    experiment = ExperimentConfig.model_validate(
        {
            "experiment": "baselines",
            "workload": {"kind": "mlp", "hidden": [32]},
            "dataset": {"kind": "digits"},
            "training": {
                "workers": 2,
                "updates": settings.updates,
                "batch_size": 32,
                "compute_seconds": settings.compute_seconds,
            },
            "optimizer": {"kind": "sgd", "learning_rate": settings.learning_rate},
            "server": {"shards": 1, "spares": 0},
            "evaluation": {"every_seconds": settings.snapshot_seconds, "target": settings.target},
            "time_limit": settings.time_limit,
            "axes": {
                "recovery": {**DPS, "checkpoint": checkpoint},
                "faults": {"control": [], "kill": [kill]},
            },
            "seeds": [seed],
        }
    )
    found = expand(experiment)
    return {(t.labels["recovery"], t.labels["faults"] == "kill"): t for t in found}


# -- dps ---------------------------------------------------------------------------------------


def _of_dps(system: str, trial: Trial, killed: bool, folder: Path) -> Measured:
    folder.mkdir(parents=True, exist_ok=True)
    run_trial(trial, folder, lambda event: None)
    prices = load_prices()
    found = read_finished(folder / EVENTS_FILE, prices).outcome
    row, fault = found.row(), first_loss(found.faults)
    seconds = row["target_seconds"]
    wrong = "" if found.valid else f"{found.status}: {found.reason}"
    # What fails after its kill counts, as it does with the others.
    unfinished = wrong if killed and fault is not None and found.status == "failed" else ""
    reason = "" if unfinished else wrong
    if killed and found.valid and (fault is None or fault.first_applied is None):
        reason = "invalid: no gradient was applied after the kill"
    roles = [role_of(name) for name in trial.config.node_names]
    return Measured(
        system,
        trial.seed,
        killed,
        reason,
        target_seconds=seconds,
        target_usd=None if seconds is None else usd(roles, seconds, prices),
        training_seconds=None if unfinished else row["training_seconds"],
        accuracy_final=None if unfinished else row["accuracy_final"],
        kill_version=fault.updates if fault else None,
        lost=row["updates_lost"] if killed else None,
        down_seconds=fault.rto_seconds if fault else None,
        unfinished=unfinished,
    )


def usd(roles: Sequence[str], seconds: float, prices: Prices) -> float:
    """What machines cost for so long, on demand; they are paid while their process is away too."""
    return sum(prices.node_hour[role].usd for role in roles) * seconds / SECONDS_PER_HOUR


# -- a baseline --------------------------------------------------------------------------------


def _of_baseline(
    system: str, config: TrialConfig, killed: bool, settings: Settings, folder: Path
) -> Measured:
    baseline = BASELINES[system]
    task = task_of(config, settings, folder)
    task.write()
    kill_at = settings.kill_at(config.seed) if killed else None
    ran = run(f"{__package__}.{baseline.module}", task, kill_at)
    return judged(system, config, killed, ran, folder)


def task_of(config: TrialConfig, settings: Settings, folder: Path) -> Task:
    """What a baseline is told: the same as a trial of dps."""
    return Task(
        folder=str(folder.absolute()),
        seed=config.seed,
        workload=config.workload.model_dump(mode="json"),
        dataset=config.dataset.kind,
        workers=config.training.workers,
        updates=config.training.updates,
        batch_size=config.training.batch_size,
        compute_seconds=config.training.compute_seconds,
        learning_rate=settings.learning_rate,
        snapshot_seconds=config.evaluation.every_seconds,
        every=settings.every,
        back_after=settings.back_after,
        time_limit=config.time_limit,
    )


def judged(system: str, config: TrialConfig, killed: bool, ran: Ran, folder: Path) -> Measured:
    """Return what came of a baseline's trial, by its trace and its snapshots.

    One that was not done counts by what it had come to: to leave out who does not come back from a
    kill would flatter the system.
    """
    trace, kill, done = read_trace(folder), ran.kill, not ran.unfinished
    start = min((event["t"] for event in trace if event["event"] == "began"), default=None)
    applied = [event for event in trace if event["event"] == "applied"]
    if start is None or not applied:
        raise DpsError(f"{system}: no gradient was applied; {ran.unfinished}")
    reason, lost, down = "", None, None
    if kill is not None:
        # What the victim still applied between the line that was seen and the signal counts too.
        before = max(event["version"] for event in applied if event["pid"] == kill.pid)
        others = (event for event in applied if event["pid"] != kill.pid)
        after = next((event for event in others if event["t"] > kill.t), None)
        if not kill.gone:
            reason = f"invalid: process {kill.pid} was still there after the kill"
        elif after is None:
            reason = "invalid: no gradient was applied after the kill" if done else ""
        else:
            # A synchronous step applies several at once, so the next version may be a later one.
            lost, down = max(0, before - (after["version"] - 1)), after["t"] - kill.t
    elif killed:
        reason = "invalid: the server was not killed"
    score = Scorer(config)
    scores = [(t - start, score(weights)[1]) for t, weights in snapshots(folder)]
    wanted = config.evaluation.target
    reached = (t for t, accuracy in scores if wanted is not None and accuracy >= wanted)
    seconds = next(reached, None)
    roles = BASELINES[system].roles
    return Measured(
        system,
        config.seed,
        killed,
        reason,
        target_seconds=seconds,
        target_usd=None if seconds is None else usd(roles, seconds, load_prices()),
        training_seconds=applied[-1]["t"] - start if done else None,
        accuracy_final=fmean(a for _, a in scores[-LAST_EVALUATIONS:]) if done else None,
        kill_version=kill.version if kill else None,
        lost=lost,
        down_seconds=down,
        unfinished=ran.unfinished,
    )
