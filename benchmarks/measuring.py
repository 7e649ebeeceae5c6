"""`make bench-measuring`: what it costs to be measured, in gradients per second.

The training of the demo runs repeatedly on one cluster, in turn with everything recorded and
evaluated as in a trial, and without both. The order alternates, so that other work on the machine
slows both. The ratio within a round is reported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.node.worker import Worker
from dps.events import Sink
from flows.config.experiment import TrialConfig, load_experiment
from flows.execution.attempt import nodes
from flows.execution.training import Scorer, initial, train
from flows.execution.workers import shares_of
from flows.records.record import EVENTS_FILE, EventWriter
from flows.statistics import Interval, interval

ROUNDS = 20
UPDATES = 400
WARM_UP = 1
TARGET = 0.98
PATIENCE = 120.0
PRELOAD = ("dps.cluster.driver.parameter_server", "flows.execution.training", __name__)

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Round:
    """Gradients per second of two turns, one measured and one not."""

    measured: float
    alone: float

    @property
    def ratio(self) -> float:
        """Gradients per second with measurements, as a share of those without."""
        return self.measured / self.alone


def measuring(notify: Notify, rounds: int = ROUNDS, updates: int = UPDATES) -> list[Round]:
    """Take turns, measured and not; return the rounds but the first, in which caches fill."""
    config = demo(updates)
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as folder,
        LocalCluster(nodes(config), PRELOAD) as cluster,
    ):
        turn = partial(_turn, config, cluster, Path(folder))
        for number in range(WARM_UP + rounds):
            rates = {measured: turn(measured) for measured in _order(number)}
            if number >= WARM_UP:
                found.append(Round(rates[True], rates[False]))
                notify(f"round {number + 1 - WARM_UP} of {rounds}: {found[-1].ratio:.3f}")
    return found


def table(rounds: Sequence[Round]) -> str:
    """The rounds as text."""
    ratio = interval([r.ratio for r in rounds], np.random.default_rng(0))
    measured = np.mean([r.measured for r in rounds])
    alone = np.mean([r.alone for r in rounds])
    return "\n".join(
        [
            "gradients per second of the demo's training, 2 workers and 2 shards, mean of "
            f"{len(rounds)} rounds",
            "",
            f"recorded and evaluated every 0.25 s  {measured:>8.1f}",
            f"neither                              {alone:>8.1f}",
            f"ratio                                {_text(ratio):>8}",
            f"target                               ≥ {TARGET:g} {verdict(ratio)}",
        ]
    )


def verdict(ratio: Interval) -> str:
    """Return whether the target is met; unknown if the interval contains it."""
    low = ratio.mean if ratio.low is None else ratio.low
    high = ratio.mean if ratio.high is None else ratio.high
    if low >= TARGET:
        return "met"
    return "missed" if high < TARGET else "not resolved: more rounds are needed"


def demo(updates: int) -> TrialConfig:
    """The demo's training without faults and without recovery, this long."""
    chosen = [f"training.updates={updates}", "axes={}", "seeds=[0]"]
    ((_, config),) = load_experiment("demo", chosen).trial_configs()
    return config


def timed(config: TrialConfig, worker: Worker) -> float:
    """Train as in a trial; return how long it took."""
    began = time.perf_counter()
    train(config, shares_of(config.training.updates, config.training.workers, {}), worker)
    return time.perf_counter() - began


# -- parts -------------------------------------------------------------------------------------


def _order(number: int) -> tuple[bool, bool]:
    return (True, False) if number % 2 else (False, True)


def _turn(config: TrialConfig, cluster: LocalCluster, folder: Path, measured: bool) -> float:
    if not measured:
        return _rate(config, cluster, None)
    with EventWriter(folder / EVENTS_FILE) as write:
        return _rate(config, cluster, write)


def _rate(config: TrialConfig, cluster: LocalCluster, record: Sink | None) -> float:
    with ParameterServer(
        cluster.client,
        initial(config),
        shards=config.server.shards,
        optimizer=config.optimizer.build(),
        on_event=record,
    ) as ps:
        if record is not None:
            ps.evaluate(Scorer(config), config.evaluation.every_seconds)
        futures = ps.run(partial(timed, config), workers=config.training.workers)
        seconds: list[float] = [future.result(PATIENCE) for future in futures]
    return config.training.updates / max(seconds)


def _text(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.3f}"
    return f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
