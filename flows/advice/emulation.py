"""A training of any size as a small one on virtual time: with as much less to move, as slowly.

The model is a perceptron of some ten thousand weights, and the profile is changed in proportion: a
byte of it takes as long as so many bytes of the real model would. Latencies, starts and detection
stay what they are. A failure is one kill; how rare failures are is not simulated, but computed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dps.errors import DpsError
from dps.virtual.profile import Profile
from flows.advice.situation import CONTINUE_LIMIT, Layout, Situation, Strategy

if TYPE_CHECKING:
    from flows.analysis.outcome import Outcome
    from flows.analysis.prices import Prices

# Of a hidden layer for each shard: more than 32 KB of weights, beside which a header is nothing.
HIDDEN = 128
FEATURES, CLASSES = 64, 10  # of the digits, which every installation has
BYTES_OF_WEIGHT = 4

# Workers give a shard up after two minutes: longer outages are computed from shorter ones.
LONGEST_OUTAGE = 60.0
MOST_BETWEEN = 200  # updates between two checkpoints; longer intervals are computed likewise
STEADY_EVERY = 25  # the same, in the trial that tells what a write holds up
TIME_LIMIT = 1e5  # virtual seconds
EVALUATE = 20.0


@dataclass(frozen=True, slots=True)
class Job:
    """One trial: a strategy with an interval of checkpoints, a seed, and who is killed when.

    Attributes
    ----------
    every
        Updates between two checkpoints at most, if there are any.
    updates
        Gradients in all.
    kill
        A node's name, and after how many updates it is killed; None: nobody is.
    """

    strategy: Strategy
    every: int
    seed: int
    updates: int
    kill: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a trial came to.

    Attributes
    ----------
    seconds
        Until all gradients were in the shards.
    rate
        Gradients a second while nothing was wrong.
    idle
        The share of their time that workers wait.
    lost
        Acked or buffered updates that were lost, of a shard.
    stale
        Gradients that were buffered and applied afterwards.
    down
        Seconds in which a shard was not served.
    failure
        Why the training ended early; "": it did not.
    """

    seconds: float
    rate: float
    idle: float
    lost: float
    stale: float
    down: float
    failure: str = ""


def simulated_outage(situation: Situation) -> float:
    """How long outages are in trials."""
    return min(situation.outage, LONGEST_OUTAGE)


def begin(situation: Situation) -> int:
    """After how many updates the first kill may come: every worker is at it."""
    return 2 * situation.workers + 8


def updates(situation: Situation, strategy: Strategy, every: int) -> int:
    """How many gradients a trial has: enough for what a kill leaves to be over at its end."""
    after = 4 * situation.workers + 16
    if strategy.buffers:
        meanwhile = simulated_outage(situation) / situation.gradient
        after += round(situation.workers * min(CONTINUE_LIMIT, meanwhile + 1))
    return begin(situation) + every + after


def layout(situation: Situation, strategy: Strategy) -> Layout:
    """Return the nodes of a strategy."""
    from flows.config.experiment import TrialConfig

    job = Job(strategy, MOST_BETWEEN, 0, MOST_BETWEEN)
    return Layout(TrialConfig.model_validate(configured(situation, job, "laptop")).node_names)


def scaled(profile: Profile, ratio: float) -> Profile:
    """Return a profile by which a byte takes as long as `ratio` bytes do by this one."""
    link, service, disk = profile.link, profile.service, profile.disk
    return replace(
        profile,
        name="scaled",
        link=replace(link, bandwidth=link.bandwidth / ratio),
        service=replace(service, byte=service.byte * ratio, update=service.update * ratio),
        disk=replace(disk, bandwidth=disk.bandwidth / ratio),
    )


def weights(servers: int) -> int:
    """How many weights the small model has."""
    hidden = HIDDEN * servers
    return (FEATURES + 1) * hidden + (hidden + 1) * CLASSES


def simulate(situation: Situation, job: Job, folder: str) -> Measured:
    """Run one trial in a folder of its own below `folder`, and remove that.

    Raises
    ------
    DpsError
        The kill did not have its effect.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        outcome = ran(configured(situation, job, scaled_profile(situation, here)), here)
    if outcome.status == "invalid":
        raise DpsError(f"{job.strategy.label}: {outcome.reason}")
    if outcome.status == "failed":
        return Measured(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, outcome.reason)
    row = outcome.row()
    return Measured(
        seconds=row["training_seconds"],
        rate=row["gradients_together"],
        idle=row["idle_share"],
        lost=row["updates_lost"],
        stale=row["updates_replayed"],
        down=row["downtime_seconds"],
    )


def ran(config: Mapping[str, Any], folder: Path) -> Outcome:
    """Run the trial of a configuration, recorded in a folder, and return what came out."""
    from flows.analysis.finished import read_finished
    from flows.config.experiment import TrialConfig
    from flows.config.trials import Trial, digest
    from flows.execution.trial import run_trial
    from flows.records.record import EVENTS_FILE

    built = TrialConfig.model_validate(config)
    trial = Trial("trial", "advice", {}, built.seed, built, digest(built))
    run_trial(trial, folder, lambda event: None)
    return read_finished(folder / EVENTS_FILE, _prices()).outcome


def scaled_profile(situation: Situation, folder: Path) -> str:
    """Write the profile of the small model into a folder; return its path."""
    import yaml

    ratio = situation.nbytes / (BYTES_OF_WEIGHT * weights(situation.servers))
    costs = asdict(scaled(situation.profile, ratio))
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump({"sources": ["scaled by dps advise"], **costs}), "utf-8")
    return str(path)


def configured(situation: Situation, job: Job, profile: str) -> dict[str, Any]:
    """Return the configuration of a trial; `profile` is the path of what costs time in it."""
    return {
        "experiment": "advice",
        "workload": {"kind": "mlp", "hidden": [HIDDEN * situation.servers]},
        "dataset": {"kind": "digits", "test_examples": 1},
        "training": {
            "workers": situation.workers,
            "updates": job.updates,
            "batch_size": 1,
            "compute_seconds": situation.gradient,
            "stop": "together",  # what is lost is computed again
        },
        "optimizer": {"kind": "sgd", "learning_rate": 0.001},
        "server": {
            "shards": situation.servers,
            "spares": job.strategy.spares,
            "lease": situation.lease,
        },
        "recovery": job.strategy.section(job.every),
        "faults": _faults(situation, job),
        "evaluation": {"every_seconds": EVALUATE},
        "cluster": {"kind": "virtual", "profile": profile},
        "seed": job.seed,
        "time_limit": TIME_LIMIT,
    }


# -- parts -------------------------------------------------------------------------------------


@cache  # a process runs many trials
def _prices() -> Prices:
    from flows.analysis.prices import load_prices

    return load_prices()


def _faults(situation: Situation, job: Job) -> Sequence[Mapping[str, Any]]:
    if job.kill is None:
        return []
    target, moment = job.kill
    back = simulated_outage(situation)
    return [{"kind": "kill", "target": target, "at_updates": moment, "back_after": back}]
