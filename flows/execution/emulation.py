"""What is emulated of many workers: how long a gradient takes, and whose data are whose.

A worker that waits out the time of a heavier model leaves its core to others, so that a few cores
stand for many machines. All of it follows from the configuration, the seed and the worker's number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from random import Random

import numpy as np

from dps.virtual.profile import Gradient
from flows.config.base import StragglingSection, TrainingSection
from flows.workloads.base import Array

# What sets these draws apart from the worker's order of batches.
_DURATIONS = 1


def durations(
    training: TrainingSection, seed: int, worker: int, gradient: Gradient | None = None
) -> Iterator[float]:
    """Return how many seconds each gradient of a worker takes at least, without end.

    Parameters
    ----------
    training
        `compute_seconds`, and which gradients are `straggling`.
    seed, worker
        Of the trial, and the worker's number: the same ones always give the same.
    gradient
        What computing takes where time is virtual; None: as long as it really does.
    """
    least = _least(training, seed, worker)
    return least if gradient is None else map(max, least, gradient.draw(Random(f"{seed}/{worker}")))


def _least(training: TrainingSection, seed: int, worker: int) -> Iterator[float]:
    straggling, seconds = training.straggling, training.compute_seconds
    if straggling is None or worker not in (straggling.workers or (worker,)):
        return repeat(seconds)
    rng = np.random.default_rng([seed, 1 + worker, _DURATIONS])
    return _straggling(seconds, straggling, rng)


def part_of(training: TrainingSection, classes: Array, worker: int) -> Array:
    """Return which rows of the training data a worker draws its batches from.

    Parameters
    ----------
    classes
        Of the examples, int64.
    worker
        Its number; one that took part later has the part of one of the first.

    Returns
    -------
    rows
        int64: all of them; or, by class, one of as many parts as there are workers, none of which
        is larger than another by more than one example.
    """
    if training.partition == "shared":
        return np.arange(len(classes))
    order = np.argsort(classes, kind="stable")
    return np.array_split(order, training.workers)[worker % training.workers]


def _straggling(
    seconds: float, straggling: StragglingSection, rng: np.random.Generator
) -> Iterator[float]:
    while True:
        yield seconds * straggling.factor if rng.random() < straggling.share else seconds
