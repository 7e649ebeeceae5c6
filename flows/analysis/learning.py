"""What a trial did to the model: its score, loss and objective over the course of the training.

Everything is from the evaluator's snapshots. The course of a training is told against time, against
the gradients that workers had pushed, and against the samples in them; lost gradients count, for
they were work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dps.events import Evaluated
from flows.analysis.faults import FaultTimes, training_span
from flows.analysis.steps import Steps
from flows.metrics.score import Score, score_of
from flows.records.record import Record

LAST_EVALUATIONS = 3


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The score as the evaluator saw it: accuracy, or what the configuration names instead.

    None where there was no evaluation, and for a loss or an error that is not finite.

    Attributes
    ----------
    final
        Mean of the last 3 evaluations.
    best
        The best evaluation: of a score of which less is better, the lowest.
    before, before_mean
        Descriptions, as all that follows of a fault: for its effect see `flows.analysis.effects`.
        The last evaluation before the fault, and the mean of the last 3 before it.
    after
        The first evaluation after the shard served again.
    lowest_after
        The worst evaluation after the shard served again.
    regain_seconds
        From the fault to the first evaluation, after the shard served again, that is as good as
        `before`; None also when that was never reached.
    area_time, area_gradients
        Area under the curve of the score, divided by its width: the mean over the time of the
        training, and over the gradients pushed.
    """

    final: float | None
    best: float | None
    before: float | None
    before_mean: float | None
    after: float | None
    lowest_after: float | None
    regain_seconds: float | None
    area_time: float | None
    area_gradients: float | None

    @property
    def drop(self) -> float | None:
        """`before` minus `after`, what was learnt between the two included (then it is less)."""
        return None if self.before is None or self.after is None else self.before - self.after


@dataclass(frozen=True, slots=True)
class Loss:
    """Test loss: mean of the last 3 evaluations, and the lowest; None where it is not finite."""

    final: float | None
    lowest: float | None


@dataclass(frozen=True, slots=True)
class Target:
    """The score that the configuration names, and what it took to reach it.

    `seconds` run from the start of the training, `gradients` how many were pushed until then;
    both belong to the first evaluation that is as good as `accuracy`, None if there is none.
    """

    accuracy: float | None
    seconds: float | None
    gradients: int | None


@dataclass(frozen=True, slots=True)
class Objective:
    """The training problem as the evaluator saw it; None where it was not asked for, or not finite.

    Attributes
    ----------
    final, lowest
        The objective: mean of the last 3 evaluations, and the lowest.
    excess
        `final` minus the reference that the configuration names, as a fraction of that.
    stationarity, stationarity_lowest
        Norm of the proximal gradient mapping: mean of the last 3 evaluations, and the lowest.
    seconds, gradients
        From the start of the training to the first evaluation whose excess is at most the target
        of the configuration, and the gradients pushed until then.
    """

    final: float | None = None
    lowest: float | None = None
    excess: float | None = None
    stationarity: float | None = None
    stationarity_lowest: float | None = None
    seconds: float | None = None
    gradients: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One evaluation on the course of a training.

    Attributes
    ----------
    t, seconds
        When the snapshot was read, since the Unix epoch and since the start of the training.
    gradients, samples
        Those that workers had been told are safe until then, and the examples in them.
    held
        Updates in the snapshot, mean over the shards: less than `gradients` after a loss.
    """

    t: float
    seconds: float
    gradients: int
    samples: int
    held: float
    accuracy: float
    loss: float
    objective: float | None = None
    stationarity: float | None = None


def course(record: Record) -> list[Step]:
    """Return the evaluations of a trial in the order in which their snapshots were read."""
    span = training_span(record)
    scores = evaluations(record)
    start = span[0] if span else (scores[0].t if scores else 0.0)
    pushed = Steps(record)
    batch = int(record.config.get("training", {}).get("batch_size", 0))
    steps = []
    for score in scores:
        gradients = pushed.at(score.t)
        steps.append(
            Step(
                t=score.t,
                seconds=score.t - start,
                gradients=gradients,
                samples=gradients * batch,
                held=score.updates,
                accuracy=score.accuracy,
                loss=score.loss,
                objective=score.objective,
                stationarity=score.stationarity,
            )
        )
    return steps


def evaluations(record: Record) -> list[Evaluated]:
    """Return the evaluations in the order in which their snapshots were read."""
    return sorted(record.of(Evaluated), key=lambda event: event.t)


def accuracy(record: Record, fault: FaultTimes | None) -> Accuracy:
    """Return the score at the end, around a fault, and over the whole course.

    A fault that took no shard down has a before, but no after.
    """
    steps, pushed, score = course(record), Steps(record), score_of(record.config)
    values = [step.accuracy for step in steps]
    before = [step.accuracy for step in steps if fault and step.t < fault.began]
    serving = fault.serving if fault else None
    after = [step for step in steps if serving is not None and step.t >= serving]
    return Accuracy(
        final=_finite_mean(values[-LAST_EVALUATIONS:]),
        best=score.best(values),
        before=_finite_mean(before[-1:]),
        before_mean=_finite_mean(before[-LAST_EVALUATIONS:]),
        after=_finite_mean([step.accuracy for step in after[:1]]),
        lowest_after=score.worst(step.accuracy for step in after),
        regain_seconds=_regain(before, after, fault, score),
        area_time=_area_over_time(record, steps),
        area_gradients=_area([step.gradients for step in steps], values, pushed.first, pushed.last),
    )


def loss(record: Record) -> Loss:
    """Return the test loss at the end, and the lowest."""
    values = [score.loss for score in evaluations(record)]
    finite = [value for value in values if math.isfinite(value)]
    return Loss(final=_finite_mean(values[-LAST_EVALUATIONS:]), lowest=min(finite, default=None))


def rmse(record: Record) -> float | None:
    """Return the root of the mean squared error at the end, if that is the score or R² is.

    It follows from R², but for errors that are as large as those of the mean, or larger: R² is 0
    then, whatever they are.
    """
    score = score_of(record.config)
    if score.key == "rmse":
        return _finite_mean([step.accuracy for step in course(record)][-LAST_EVALUATIONS:])
    if score.key != "r2":
        return None
    deviation = record.config.get("dataset", {}).get("target_deviation")
    explained = _mean([step.accuracy for step in course(record)][-LAST_EVALUATIONS:])
    if deviation is None or explained is None or not 0 < explained <= 1:
        return None
    return float(deviation * math.sqrt(1 - explained))


def objective(record: Record) -> Objective:
    """Return what the evaluator saw of the training problem."""
    steps = course(record)
    values = [step.objective for step in steps if step.objective is not None]
    norms = [step.stationarity for step in steps if step.stationarity is not None]
    wanted = record.config.get("evaluation", {}).get("objective") or {}
    reference, at_most = wanted.get("reference"), wanted.get("target")
    final = _finite_mean(values[-LAST_EVALUATIONS:])
    reached = None
    if reference is not None and at_most is not None:
        bound = reference * (1 + at_most)
        near = (step for step in steps if step.objective is not None and step.objective <= bound)
        reached = next(near, None)
    return Objective(
        final=final,
        lowest=min(filter(math.isfinite, values), default=None),
        excess=None if final is None or not reference else final / reference - 1,
        stationarity=_finite_mean(norms[-LAST_EVALUATIONS:]),
        stationarity_lowest=min(filter(math.isfinite, norms), default=None),
        seconds=max(0.0, reached.seconds) if reached else None,
        gradients=reached.gradients if reached else None,
    )


def target(record: Record) -> Target:
    """Return what it took to reach the score that the configuration names, if it names one."""
    wanted = record.config.get("evaluation", {}).get("target")
    if wanted is None:
        return Target(None, None, None)
    score = score_of(record.config)
    reached = next((each for each in course(record) if score.reaches(each.accuracy, wanted)), None)
    if reached is None:
        return Target(wanted, None, None)
    return Target(wanted, max(0.0, reached.seconds), reached.gradients)


# -- parts -------------------------------------------------------------------------------------


def _area_over_time(record: Record, steps: Sequence[Step]) -> float | None:
    span = training_span(record)
    if span is None:
        return None
    return _area([step.t for step in steps], [step.accuracy for step in steps], *span)


def _area(at: Sequence[float], values: Sequence[float], start: float, end: float) -> float | None:
    """The mean of a curve from `start` to `end`, straight between its points, level beyond them."""
    if not values or end <= start:
        return None
    inside = [(x, y) for x, y in zip(at, values, strict=True) if start < x < end]
    edges = np.interp([start, end], at, values)
    xs = [start, *(x for x, _ in inside), end]
    ys = [edges[0], *(y for _, y in inside), edges[1]]
    mean = float(np.trapezoid(ys, xs) / (end - start))
    return mean if math.isfinite(mean) else None


def _regain(
    before: Sequence[float], after: Sequence[Step], fault: FaultTimes | None, score: Score
) -> float | None:
    if fault is None or not before:
        return None
    good = (step for step in after if score.reaches(step.accuracy, before[-1]))
    regained = (step.t - fault.began for step in good)
    return next(regained, None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite_mean(values: Sequence[float]) -> float | None:
    mean = _mean(values)
    return mean if mean is not None and math.isfinite(mean) else None
