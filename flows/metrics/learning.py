"""Metrics of the model: its score, loss and objective, from the evaluator's snapshots.

The effects of faults on them are in `flows.metrics.effects`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dps.events import Evaluated
from flows.metrics.metric import Section
from flows.metrics.trial import Trial

LAST_EVALUATIONS = 3
ACCURACY = Section()


def _last_mean(values: Sequence[float | None]) -> float | None:
    """The mean of the last 3 values; None without any, and where one is not finite."""
    last = [value for value in values if value is not None][-LAST_EVALUATIONS:]
    mean = sum(last) / len(last) if last else math.nan
    return mean if math.isfinite(mean) else None


def _scores(trial: Trial) -> list[float]:
    return [event.accuracy for event in trial.evaluations]


@ACCURACY.metric("final accuracy", "%", "higher", of_score=True, whole=False)
def accuracy_final(trial: Trial) -> float | None:
    """Test accuracy: mean of the last 3 evaluations."""
    return _last_mean(_scores(trial))


@ACCURACY.metric("best", "%", "higher", of_score=True)
def accuracy_best(trial: Trial) -> float | None:
    """Best evaluation of the trial."""
    return trial.score.best(_scores(trial))


# -- the target ------------------------------------------------------------------------------


def _target_reached(trial: Trial) -> Evaluated | None:
    if (wanted := target_accuracy(trial)) is None:
        return None
    return next((e for e in trial.evaluations if trial.score.reaches(e.accuracy, wanted)), None)


def _since_start(trial: Trial, event: Evaluated | None) -> float | None:
    if event is None:
        return None
    start = trial.span[0] if trial.span else trial.evaluations[0].t
    return max(0.0, event.t - start)


@ACCURACY.metric("target", "%", of_score=True, whole=False)
def target_accuracy(trial: Trial) -> float | None:
    """The accuracy that `evaluation.target` names."""
    target: float | None = trial.record.config.get("evaluation", {}).get("target")
    return target


@ACCURACY.metric("time to target", "s", "lower")
def target_seconds(trial: Trial) -> float | None:
    """From the start of the training to the first evaluation that is as good as the target; empty
    when never reached, and without a target.
    """
    return _since_start(trial, _target_reached(trial))


@ACCURACY.metric("gradients to target", "count", "lower")
def target_gradients(trial: Trial) -> int | None:
    """Gradients pushed until the first evaluation that is as good as the target."""
    reached = _target_reached(trial)
    return None if reached is None else trial.pushed_at(reached.t)


@ACCURACY.metric("money to target", "USD", "lower")
def target_usd(trial: Trial) -> float | None:
    """Money spent until the first evaluation that is as good as the target, on demand, as if the
    training had ended then.
    """
    reached = _target_reached(trial)
    if reached is None or trial.span is None:
        return None
    return trial.spending.at(max(trial.span[0], reached.t))


# -- loss and objective ----------------------------------------------------------------------


@ACCURACY.metric("final loss", "", "lower", whole=False)
def loss_final(trial: Trial) -> float | None:
    """Test loss: mean of the last 3 evaluations; empty where one is not finite."""
    return _last_mean([event.loss for event in trial.evaluations])


@ACCURACY.metric("final objective", "", "lower", whole=False)
def objective_final(trial: Trial) -> float | None:
    """Mean loss over all training data, with the penalty of the update rule: mean of the last 3
    evaluations; empty where one is not finite, and without `evaluation.objective`.
    """
    return _last_mean([event.objective for event in trial.evaluations])


def _wanted(trial: Trial) -> tuple[float | None, float | None]:
    """The reference of the objective, and by how much it may be exceeded."""
    wanted = trial.record.config.get("evaluation", {}).get("objective") or {}
    return wanted.get("reference"), wanted.get("target")


def _objective_reached(trial: Trial) -> Evaluated | None:
    reference, at_most = _wanted(trial)
    if reference is None or at_most is None:
        return None
    bound = reference * (1 + at_most)
    near = (e for e in trial.evaluations if e.objective is not None and e.objective <= bound)
    return next(near, None)


@ACCURACY.metric("excess over the reference", "%", "lower", signed=True, whole=False)
def objective_excess(trial: Trial) -> float | None:
    """Final objective minus `evaluation.objective.reference`, in per cent of that."""
    final, (reference, _) = objective_final(trial), _wanted(trial)
    return None if final is None or not reference else final / reference - 1


@ACCURACY.metric("time to the objective", "s", "lower")
def objective_target_seconds(trial: Trial) -> float | None:
    """From the start of the training to the first evaluation whose objective exceeds the reference
    by `evaluation.objective.target` at most; empty when never reached.
    """
    return _since_start(trial, _objective_reached(trial))


@ACCURACY.metric("gradients to the objective", "count", "lower")
def objective_target_gradients(trial: Trial) -> int | None:
    """Gradients pushed until the first evaluation whose objective exceeds the reference by
    `evaluation.objective.target` at most.
    """
    reached = _objective_reached(trial)
    return None if reached is None else trial.pushed_at(reached.t)


@ACCURACY.metric("distance from stationarity", "", "lower", whole=False)
def stationarity_final(trial: Trial) -> float | None:
    """Norm of the proximal gradient mapping over all training data, which is 0 if and only if the
    weights are stationary: mean of the last 3 evaluations; empty without
    `evaluation.objective`.
    """
    return _last_mean([event.stationarity for event in trial.evaluations])
