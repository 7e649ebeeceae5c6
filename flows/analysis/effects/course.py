"""The course of a training: its score over time, over gradients and over money.

A curve is straight between two evaluations. While a shard is down nobody can read the model, and
evaluations are missed: the curve is level then, at what is left of the model. Where the next
evaluation, after the return, is no lower than the last one before the fault, that is the last one,
until the shard is served again. Where it is lower, what was lost is lost from the fault on, and the
curve has the value of the next evaluation from there. What was learnt between the last evaluation
and the fault is missing from the curve meanwhile, and what was learnt between the return and the
next evaluation is in it too early.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dps.events import EvaluationMissed
from flows.analysis.effects.outages import Outage, outages
from flows.analysis.faults import FaultTimes, fault_times, training_span
from flows.analysis.learning import evaluations
from flows.analysis.prices import Prices
from flows.analysis.resources import Spending
from flows.analysis.steps import Steps
from flows.metrics.score import Score, score_of
from flows.records.record import Record


class Curve:
    """A figure over something that never goes back: straight between its points.

    Two points at the same place are a jump. There is no value outside of the points.

    Parameters
    ----------
    points
        Places and values, at least one, in the order of the places.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]

    @property
    def first(self) -> float:
        """Where it begins."""
        return self._xs[0]

    @property
    def last(self) -> float:
        """Where it ends."""
        return self._xs[-1]

    def at(self, x: float) -> float:
        """Return the value at a place within the points; at a jump, the one after it."""
        after = bisect_right(self._xs, x)
        if after == len(self._xs):
            return self._ys[-1]
        return self._between(after, x)

    def before(self, x: float) -> float:
        """Return the value at a place after the first; at a jump, the one before it."""
        after = next(i for i, place in enumerate(self._xs) if place >= x)
        return self._between(after, x) if after else self._ys[0]

    def area(self, start: float, end: float) -> float:
        """Return the area under it between two places within the points."""
        inside = [(x, y) for x, y in zip(self._xs, self._ys, strict=True) if start < x < end]
        points = [(start, self.at(start)), *inside, (end, self.before(end))]
        return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))

    def _between(self, after: int, x: float) -> float:
        x0, x1 = self._xs[after - 1], self._xs[after]
        y0, y1 = self._ys[after - 1], self._ys[after]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class Course:
    """One training, as its effect or that of its faults is told from it.

    Attributes
    ----------
    time, gradients, money
        The score over seconds since the start, gradients pushed, and USD spent.
    seconds, pushed, spent
        How far the training went in each of these.
    struck
        Where the first fault took effect in each of these; None: none did.
    gradients_by
        Gradients pushed within so many seconds from the start.
    """

    time: Curve
    gradients: Curve
    money: Curve
    seconds: float
    pushed: float
    spent: float
    struck: tuple[float, float, float] | None
    gradients_by: Callable[[float], int] = field(compare=False)


def course(record: Record, prices: Prices) -> Course | None:
    """Return the course of a training; None where it never began or nothing was evaluated."""
    span, faults = training_span(record), fault_times(record)
    points = accuracy_points(record, faults)
    if span is None or not points:
        return None
    start, end = span
    steps, spending = Steps(record), Spending(record, prices)
    struck = faults[0].began if faults else None
    return Course(
        time=Curve([(t - start, value) for t, value in points]),
        gradients=Curve([(float(steps.at(t)), value) for t, value in points]),
        money=Curve([(spending.at(t), value) for t, value in points]),
        seconds=end - start,
        pushed=float(steps.last),
        spent=spending.total,
        struck=None
        if struck is None
        else (max(0.0, struck - start), float(steps.at(struck)), spending.at(struck)),
        gradients_by=lambda seconds: steps.at(start + seconds),
    )


def accuracy_points(record: Record, faults: Sequence[FaultTimes]) -> list[tuple[float, float]]:
    """Return the curve of the score over time: evaluations, and level stretches of outages."""
    down, missed = outages(faults), [event.t for event in record.of(EvaluationMissed)]
    score, points = score_of(record.config), list[tuple[float, float]]()
    for found in evaluations(record):
        if points:
            points += _level(points[-1], (found.t, found.accuracy), down, missed, score)
        points.append((found.t, found.accuracy))
    return points


# -- parts -------------------------------------------------------------------------------------


def _level(
    last: tuple[float, float],
    following: tuple[float, float],
    down: Sequence[Outage],
    missed: Sequence[float],
    score: Score,
) -> list[tuple[float, float]]:
    """What lies between two evaluations, if there was an outage for which others were missed."""
    if not any(last[0] < t < following[0] for t in missed):
        return []
    between = [o for o in down if o.began < following[0] and o.serving > last[0]]
    if not between:
        return []
    lost = not score.reaches(following[1], last[1])
    moment = (
        max(last[0], min(o.began for o in between))
        if lost
        else min(following[0], max(o.serving for o in between))
    )
    return [(moment, last[1]), (moment, following[1])]
