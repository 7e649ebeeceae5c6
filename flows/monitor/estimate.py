"""Estimates of how long trials take: learnt from finished trials, otherwise guessed.

A guess is made from the configuration and the load of this machine. Once trials of the experiment
have ended, guesses for the others are corrected by the error of the guesses for these.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean, median

from dps.protocol.executor import available_cores
from flows.config.experiment import TrialConfig
from flows.config.trials import Trial
from flows.records.record import Record

Key = tuple[tuple[str, str], ...]

HERE = ("local", "virtual")  # kinds of clusters on this machine
START_SECONDS = 1.5
NODE_SECONDS = 0.15
GRADIENT_SECONDS = 0.005  # a small model, and a push and a pull of it
FAULT_SECONDS = 1.5
TRACKING_SECONDS = 1.0
# On virtual time, a trial takes what its messages take to compute: an update of one shard, so long.
VIRTUAL_UPDATE_SECONDS = 0.0007


class Durations:
    """How long trials take, by the labels that they have; seeds do not matter."""

    def __init__(self) -> None:
        self._seen: defaultdict[Key, list[float]] = defaultdict(list)
        self._off: list[float] = []

    @property
    def known(self) -> int:
        """How many trials it has been learnt from."""
        return len(self._off)

    def note(self, trial: Trial, seconds: float) -> None:
        """Learn from a trial that took this number of seconds of real time."""
        self._seen[_key(trial.labels)].append(seconds)
        self._off.append(seconds / guess(trial.config))

    def of(self, trial: Trial) -> float:
        """Seconds that a trial takes."""
        seen = self._seen.get(_key(trial.labels))
        if seen:
            return mean(seen)
        busy = slowdown() if trial.config.cluster.kind in HERE else 1.0
        return guess(trial.config) * (median(self._off) if self._off else busy)

    def total(self, trials: Iterable[Trial], parallel: int) -> float:
        """Seconds that trials take in all, with `parallel` of them at once."""
        each = [self.of(trial) for trial in trials]
        return max(sum(each) / parallel, max(each, default=0.0))


def slowdown() -> float:
    """Return the number of processes that want a core of this machine, per core; at least 1."""
    return max(1.0, (1 + os.getloadavg()[0]) / available_cores())


def guess(config: TrialConfig) -> float:
    """Seconds of real time that a trial takes on a quiet machine, by its configuration alone."""
    training = config.training
    if config.cluster.kind == "virtual":
        return training.updates * config.server.shards * VIRTUAL_UPDATE_SECONDS + TRACKING_SECONDS
    gradient = training.local_steps * max(training.compute_seconds, GRADIENT_SECONDS)
    if training.straggling is not None:
        gradient *= 1 + training.straggling.share * (training.straggling.factor - 1)
    train = training.updates * gradient / training.workers
    faults = len(config.faults) * FAULT_SECONDS
    start = START_SECONDS + NODE_SECONDS * len(config.node_names)
    return start + min(train + faults, config.time_limit) + TRACKING_SECONDS


def seconds_of(record: Record) -> float:
    """Seconds that a recorded trial took, with what `dps run` does after it."""
    return record.events[-1].t - record.events[0].t + TRACKING_SECONDS


def trials_text(count: int, kind: str = "") -> str:
    """Return a number of trials in words, such as "1 trial"."""
    return f"{count} {kind}trial{'' if count == 1 else 's'}"


def about(seconds: float) -> str:
    """Format a duration with the precision of an estimate: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _key(labels: Mapping[str, str]) -> Key:
    return tuple(sorted(labels.items()))
