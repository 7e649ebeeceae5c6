"""The training of a trial on its nodes: each worker's loop, the scoring, and what is emulated.

A worker that waits out the time of a heavier model leaves its core to others, so that a few cores
stand for many machines. All of it follows from the configuration, the seed and the worker's number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import islice, repeat
from random import Random
from statistics import fmean
from typing import cast

import numpy as np

from dps.cluster.node.pipeline import Pipeline
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import factor_at
from dps.virtual.profile import Gradient
from flows.config.experiment import TrialConfig
from flows.config.settings import TrainingSection
from flows.config.workload import DatasetSection, workload_of
from flows.workloads import Dataset, Workload, batches
from flows.workloads.base import Array, Part, Predictor, auc, rmse

Weights = Mapping[str, Array]

# What sets these draws apart from the worker's order of batches.
_DURATIONS = 1


def initial(config: TrialConfig) -> dict[str, np.ndarray]:
    """Return the values that the model starts from; they depend on the seed alone."""
    return workload_of(config).initial(np.random.default_rng([config.seed, 0]))


def warm_up(config: TrialConfig) -> None:
    """Load the data and compute a gradient, so that the first of the training is like others."""
    data, first = _data(config.dataset, "train"), slice(config.training.batch_size)
    workload_of(config).gradient(initial(config), data.x_train[first], data.y_train[first])


def train(
    config: TrialConfig,
    shares: Mapping[str, range],
    worker: Worker,
    leased: Iterable[Array] | None = None,
) -> bool:
    """Run one worker's loop, the same for every strategy: gradient, push and pull, report.

    `shares` are the spans of their updates that workers compute, unless batches are `leased`; one
    that is asked to leave does not compute the rest. The compute time that it reports is the
    gradient and the emulated rest of it; the time until the next gradient is spent waiting for the
    server, or for others. Up to `training.ahead` updates are under way. With local steps, an update
    takes several gradients, and the mean of their losses is reported.

    Returns whether it has seen that the shards have all updates, where batches are leased or
    workers stop together. The latter see it in their last weights, so each computes at most
    1 + `training.ahead` updates too many.
    """
    workload, training = workload_of(config), config.training
    data = _data(config.dataset, "train")
    share, number = shares[worker.name], int(worker.name.removeprefix("worker-"))
    rng = np.random.default_rng([config.seed, 1 + number])
    rows = part_of(training, data.y_train, number)
    order = batches(rng, len(rows), training.batch_size)
    times = durations(training, config.seed, number, config.cluster.gradient)
    deque(islice(zip(order, times, strict=True), share.start * training.local_steps), maxlen=0)
    goal = training.updates if config.stops_together else math.inf
    local = _LocalSteps(training, worker.frozen, share.start * training.local_steps)

    updates: Iterable[Iterable[Array]] = (islice(order, training.local_steps) for _ in share)
    if leased is not None:
        updates = (np.split(batch, training.local_steps) for batch in leased)

    def gradient(weights: Weights, batch: Array) -> tuple[float, Weights]:
        began = worker.now()
        batch = rows[batch]
        gradients = workload.gradient(dict(weights), data.x_train[batch], data.y_train[batch])
        spent = worker.now() - began
        worker.sleep(max(0.0, next(times) - spent))
        return gradients

    with Pipeline(worker, training.ahead) as pipeline:
        for chosen in updates:
            if worker.read_point is not None and worker.read_point.updates >= goal:
                return True
            if worker.leaving:
                return False
            began = worker.now()
            loss, change = local.change(pipeline.weights, chosen, gradient)
            computed = worker.now() - began
            pipeline.push_pull(change)
            worker.report(loss=loss, compute_seconds=computed)
    return leased is not None and not worker.leaving


class _LocalSteps:
    """Turns gradients into an update, by the worker's own rule if it has one.

    `before` is how many gradients of its share were computed by others.
    """

    def __init__(self, training: TrainingSection, frozen: Collection[str], before: int) -> None:
        self._frozen = frozen
        self._before = before
        self._rule = training.inner.build() if training.inner is not None else None
        self._slots: dict[str, Weights] = {}
        self._taken = 0

    def change(
        self,
        weights: Weights,
        batches: Iterable[Array],
        gradient: Callable[[Weights, Array], tuple[float, Weights]],
    ) -> tuple[float, Weights]:
        """Return a loss, and a gradient; or a mean loss, and the decrease of the weights."""
        if self._rule is None:
            (batch,) = batches
            return gradient(weights, batch)
        losses, now = [], weights
        for batch in batches:
            loss, gradients = gradient(now, batch)
            losses.append(loss)
            scale = factor_at(self._rule, self._before + self._taken)
            self._taken += 1
            stepped = gradients.keys() - self._frozen
            now = {**now, **{n: self._stepped(n, now[n], gradients[n], scale) for n in stepped}}
        return fmean(losses), {name: weights[name] - now[name] for name in now}

    def _stepped(self, name: str, values: Array, gradient: Array, scale: float) -> Array:
        assert self._rule is not None
        slots = self._slots.get(name) or {s: np.zeros_like(values) for s in self._rule.slots}
        gradient = gradient.astype(values.dtype, copy=False)
        values, self._slots[name] = self._rule.step(values, gradient, slots, self._taken, scale)
        return values


@lru_cache(maxsize=2)  # trials on virtual time have their workers and evaluator in one process
def _data(dataset: DatasetSection, part: Part) -> Dataset:
    return dataset.load(part)


class Scorer:
    """Scores weights on the test set, which it loads when it is first called.

    Where the objective is asked for, it loads all training data as well.
    """

    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self._objective = config.build_objective()

    def __call__(
        self, weights: Mapping[str, np.ndarray]
    ) -> tuple[float, float] | tuple[float, float, float, float]:
        """Return loss and score, and objective and stationarity if they are asked for."""
        params, data = dict(weights), self._data
        loss, score = self._loss_and_score(params)
        if self._objective is None:
            return loss, score
        return (loss, score, *self._objective.score(params, data.x_train, data.y_train))

    def _loss_and_score(self, params: dict[str, np.ndarray]) -> tuple[float, float]:
        metric, data = self._config.evaluation.metric, self._data
        if metric in ("auc", "rmse"):
            # Of a kind that predicts: the configuration was checked.
            predictor = cast(Predictor, self._workload)
            score_of = auc if metric == "auc" else rmse
            loss, score = predictor.evaluate(params, data.x_test, data.y_test, score_of)
            return loss, score * data.target_scale
        loss, score = self._workload.evaluate(params, data.x_test, data.y_test)
        return loss, loss if metric == "loss" else score

    @cached_property
    def _workload(self) -> Workload:
        return workload_of(self._config)

    @cached_property
    def _data(self) -> Dataset:
        return _data(self._config.dataset, "test" if self._objective is None else "both")


# -- emulation -----------------------------------------------------------------------------------


def durations(
    training: TrainingSection, seed: int, worker: int, gradient: Gradient | None = None
) -> Iterator[float]:
    """Return the least seconds of each gradient of a worker, without end.

    The same seed and worker always give the same. `gradient` is the time of computing on virtual
    time; None: the measured time counts.
    """
    straggling, seconds = training.straggling, training.compute_seconds
    least: Iterator[float] = repeat(seconds)
    if straggling is not None and worker in (straggling.workers or (worker,)):
        rng = np.random.default_rng([seed, 1 + worker, _DURATIONS])
        slow, share = seconds * straggling.factor, straggling.share
        least = (slow if rng.random() < share else seconds for _ in repeat(None))
    return least if gradient is None else map(max, least, gradient.draw(Random(f"{seed}/{worker}")))


def part_of(training: TrainingSection, classes: Array, worker: int) -> Array:
    """Return the rows of the training data from which a worker draws its batches, int64.

    They are all rows; or, `by_class`, one of `training.workers` parts of the rows in the order of
    their `classes`, whose sizes differ by at most one. A worker that joined later has the part of
    one of the first.
    """
    if training.partition == "shared":
        return np.arange(len(classes))
    order = np.argsort(classes, kind="stable")
    return np.array_split(order, training.workers)[worker % training.workers]
