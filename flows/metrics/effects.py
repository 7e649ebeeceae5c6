"""The effect of faults: differences between a trial and its control, the same trial without faults.

Both are compared over the same span, from the moment when the first fault took effect: of seconds
since the training began, of gradients pushed, or of money spent. Progress that both would have made
anyway is in none of the differences. Nothing is extrapolated: a span ends where the first of the
two trainings does, and lies within the evaluations of both.

The curve of a training is linear between two evaluations. While a shard is down, the model cannot
be read and evaluations are missing: the curve is level then, at the value of the remaining
model. If the next evaluation, after the return, is no lower than the last one before the fault,
that value is the last one, until the shard is served again. If it is lower, the curve has the value
of the next evaluation from the fault on. During the outage, the curve lacks what was learnt between
the last evaluation and the fault, and includes too early what was learnt between the return and the
next evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dps.events import EvaluationMissed
from flows.metrics.metric import Better, Metric, Unit, Value
from flows.metrics.trial import Trial

CONTROL = (
    "the trial of the same experiment with the same seed and settings, and an empty fault plan"
)
LEVEL = (
    "During an outage the curve is level; if accuracy is worse after it, it drops where the outage "
    "began. Linear interpolation between evaluations would understate the effect"
)
Axis = Literal["time", "gradients", "money"]


class Curve:
    """A figure over something that never goes back: straight between its points, at least one.

    Two points at the same place are a jump. There is no value outside of the points.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self.x, self.y = np.array(points, float).T

    def after(self, x: float) -> float:
        """Return the value at `x`, within the points; at a jump, the value after it."""
        return float(np.interp(x, self.x, self.y))

    def before(self, x: float) -> float:
        """Return the value at `x`; at a jump, the value before it."""
        return float(np.interp(-x, -self.x[::-1], self.y[::-1]))

    def area(self, start: float, end: float) -> float:
        """Return the area under the curve from `start` to `end`, both within the points."""
        inside = (start < self.x) & (self.x < end)
        places = np.array([start, *self.x[inside], end])
        return float(np.trapezoid([self.after(start), *self.y[inside], self.before(end)], places))


def accuracy_points(trial: Trial) -> list[tuple[float, float]]:
    """Return the curve of the score over time: evaluations, and level stretches of outages."""
    missed = [event.t for event in trial.record.of(EvaluationMissed)]
    points: list[tuple[float, float]] = []
    for found in trial.evaluations:
        if points and any(points[-1][0] < t < found.t for t in missed):
            since, last = points[-1]
            between = [o for o in trial.outages if o.began < found.t and o.serving > since]
            if between:
                lost = not trial.score.reaches(found.accuracy, last)
                began, serving = min(o.began for o in between), max(o.serving for o in between)
                moment = max(since, began) if lost else min(found.t, serving)
                points += [(moment, last), (moment, found.accuracy)]
        points.append((found.t, found.accuracy))
    return points


@dataclass(frozen=True, slots=True)
class Effects:
    """The effect of the faults of a trial, against its control: the metrics of `EFFECTS` by key.

    Without a usable control, `lacking` has the reason, for a trial that plans faults.
    """

    control: str | None = None
    lacking: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)


def effects(faulted: Trial, control: Trial) -> Effects:
    """Return the effect of the faults of a trial against its control.

    Where the plan struck nothing, it had no effect: all figures are 0.
    """
    points = [accuracy_points(trial) for trial in (faulted, control)]
    if faulted.span is None or control.span is None or not all(points):
        return Effects(lacking="the trial or its control has no evaluations")
    name = control.identity.trial
    if not faulted.faults:
        return Effects(name, values=dict.fromkeys(_DIFFERENCES, 0.0))
    (began, ended), (control_began, control_ended) = faulted.span, control.span
    values: dict[str, Value] = {
        "effect_training_seconds": (ended - began) - (control_ended - control_began),
        "effect_cost_usd": faulted.spending.total - control.spending.total,
    }
    struck = max(began, faulted.faults[0].began)
    mine, its = _places(faulted, began), _places(control, control_began)
    for axis in mine:
        places = mine[axis], its[axis]
        own, other = (
            Curve([(place(t), score) for t, score in each])
            for place, each in zip(places, points, strict=True)
        )
        start, end = mine[axis](struck), min(mine[axis](ended), its[axis](control_ended))
        if axis == "time" and start < end:
            mine_pushed, its_pushed = (
                trial.pushed_at(first + end) - trial.pushed_at(first + start)
                for trial, first in ((faulted, began), (control, control_began))
            )
            values["gradients_deficit"] = float(its_pushed - mine_pushed)
        if (found := difference(own, other, start, end)) is not None:
            span, values[f"effect_{axis}_mean"], values[f"effect_{axis}_end"] = found
            values |= {"effect_time_span": span} if axis == "time" else {}
    return Effects(name, values=values)


def _places(trial: Trial, began: float) -> dict[Axis, Callable[[float], float]]:
    """Return functions of time by axis: seconds since the start, gradients pushed, USD spent."""
    return {
        "time": lambda t: t - began,
        "gradients": lambda t: float(trial.pushed_at(t)),
        "money": trial.spending.at,
    }


def difference(
    faulted: Curve, control: Curve, start: float, end: float
) -> tuple[float, float, float] | None:
    """Return how much one curve differs from another on the common part of an interval.

    Returns
    -------
    span, mean, last
        The width of the common span, the mean difference over it, and the difference at its end.
        None if the curves have no common span, or a value in it is not finite.
    """
    start = max(start, faulted.x[0], control.x[0])
    end = min(end, faulted.x[-1], control.x[-1])
    if end <= start:
        return None
    with np.errstate(invalid="ignore"):  # values that are not finite are handled below
        area = faulted.area(start, end) - control.area(start, end)
        last = faulted.after(end) - control.after(end)
    if not (math.isfinite(area) and math.isfinite(last)):
        return None
    return float(end - start), float(area / (end - start)), last


# -- the metrics: all but the name of the control are differences ----------------------------

_AXES: dict[Axis, tuple[str, str]] = {
    "time": (
        "at the same times",
        "seconds since the training began, from the first fault to the end of the shorter training",
    ),
    "gradients": (
        "after the same number of gradients",
        "pushed gradients (lost ones included), from the first fault to the end of the training "
        "that ends first",
    ),
    "money": (
        "for the same cost",
        "USD spent until then (`cost_usd` of the training up to that moment), from the first fault "
        "to the end of the training that ends first. Nodes are billed by the second while "
        "they are up, so a lost node costs nothing until its replacement starts. Sent bytes are "
        "billed when they are sent, stored bytes evenly",
    ),
}
_DIFFERENCES: dict[str, tuple[str, Unit, str]] = {
    **{
        f"effect_{axis}_mean": (
            f"effect, same {axis}",
            "points",
            f"Accuracy minus that of the control {how}, mean over the span. Span: {span}. "
            f"{LEVEL}. Control: {CONTROL}.",
        )
        for axis, (how, span) in _AXES.items()
    },
    **{
        f"effect_{axis}_end": (
            f"effect at the end, same {axis}",
            "points",
            f"Accuracy minus that of the control {how}, at the end of the span.",
        )
        for axis, (how, _) in _AXES.items()
    },
    "effect_time_span": (
        "span of the effect",
        "s",
        "Length of the span of time of the effect.",
    ),
    "gradients_deficit": (
        "gradients not computed",
        "count",
        "Gradients that the control pushed in that span of time, minus those of the trial.",
    ),
    "effect_training_seconds": (
        "effect on the training's length",
        "s",
        "Time of the training minus that of the control.",
    ),
    "effect_cost_usd": ("effect on money", "USD", "Money on demand minus that of the control."),
}


def _metric(key: str, label: str, unit: Unit, text: str) -> Metric:
    better: Better = "higher" if unit == "points" else "lower"
    return Metric(
        key,
        label,
        unit,
        None if key == "effect_time_span" else better,
        text,
        lambda effects: effects.values.get(key),
        signed=key != "effect_time_span",
        of_score=unit == "points",
        of_effects=True,
    )


EFFECTS = [
    Metric(
        "control",
        "control",
        "",
        None,
        f"Trial with which the effect of the faults compares: {CONTROL}. Empty, as are effects, "
        "without such a trial, or if one of the two is not valid or was resumed.",
        lambda effects: effects.control,
        number=False,
        of_effects=True,
    ),
    *(_metric(key, *of) for key, of in _DIFFERENCES.items()),
]
