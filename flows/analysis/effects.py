"""The effect of faults: what a trial with faults differs by from its control, the same without.

Both are looked at over the same span, from where the first fault took effect: of seconds since the
training began, of gradients pushed, or of money spent. What both would have learnt anyway is in
neither of the differences. Nothing is said beyond what both have: a span ends where the first of
the two trainings does, and lies within the evaluations of both.

A curve is straight between two evaluations. While a shard is down nobody can read the model, and
evaluations are missed: from the last one before until the shard is served again the curve is level,
for that is what is left of the model to use; from there on it has the value of the next one. What
was learnt between the last evaluation and the fault is missing from the curve meanwhile, and what
was learnt between the return and the next evaluation is in it too early.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dps.events import EvaluationMissed
from flows.analysis.faults import FaultTimes, fault_times, training_span
from flows.analysis.learning import evaluations
from flows.analysis.outages import Outage, outages
from flows.analysis.prices import Prices
from flows.analysis.resources import Spending
from flows.analysis.steps import Steps
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
        Test accuracy over seconds since the start, gradients pushed, and USD spent.
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


@dataclass(frozen=True, slots=True)
class Difference:
    """Accuracy of a trial with faults minus that of its control, over one span.

    Attributes
    ----------
    span
        The width of the span: seconds, gradients or USD.
    mean
        The mean over the span.
    end
        At its end.
    """

    span: float
    mean: float
    end: float

    @property
    def area(self) -> float:
        """The area between the two curves, negative where that with faults is lower."""
        return self.mean * self.span


@dataclass(frozen=True, slots=True)
class Effects:
    """What the faults of a trial did, against its control; None where that cannot be told.

    Attributes
    ----------
    control
        The name of the control; None: there is none.
    time, gradients, money
        The difference in accuracy over the same seconds, gradients and money.
    deficit
        Gradients that the control pushed in the seconds of the span, and the trial did not.
    seconds, cost
        By how much longer the training took, and how much more it cost, in s and USD.
    """

    control: str | None = None
    time: Difference | None = None
    gradients: Difference | None = None
    money: Difference | None = None
    deficit: float | None = None
    seconds: float | None = None
    cost: float | None = None


UNKNOWN = Effects()
_NONE = Difference(0.0, 0.0, 0.0)


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
    """Return the curve of accuracy over time: evaluations, and level stretches of outages."""
    down, missed = outages(faults), [event.t for event in record.of(EvaluationMissed)]
    points: list[tuple[float, float]] = []
    for score in evaluations(record):
        if points:
            points += _level(points[-1], (score.t, score.accuracy), down, missed)
        points.append((score.t, score.accuracy))
    return points


def effects(faulted: Course, control: Course, name: str) -> Effects:
    """Return the effect of the faults of a trial against its control, which has the `name`.

    Where the plan struck nothing, it had no effect: all figures are 0.
    """
    if faulted.struck is None:
        return Effects(name, _NONE, _NONE, _NONE, 0.0, 0.0, 0.0)
    seconds, gradients, money = faulted.struck
    until = min(faulted.seconds, control.seconds)
    return Effects(
        control=name,
        time=difference(faulted.time, control.time, seconds, until),
        gradients=difference(
            faulted.gradients, control.gradients, gradients, min(faulted.pushed, control.pushed)
        ),
        money=difference(faulted.money, control.money, money, min(faulted.spent, control.spent)),
        deficit=_pushed(control, seconds, until) - _pushed(faulted, seconds, until)
        if seconds < until
        else None,
        seconds=faulted.seconds - control.seconds,
        cost=faulted.spent - control.spent,
    )


def difference(faulted: Curve, control: Curve, start: float, end: float) -> Difference | None:
    """Return what one curve differs by from another between two places, as far as both go.

    None where they have no span in common there.
    """
    start = max(start, faulted.first, control.first)
    end = min(end, faulted.last, control.last)
    if end <= start:
        return None
    area = faulted.area(start, end) - control.area(start, end)
    return Difference(end - start, area / (end - start), faulted.at(end) - control.at(end))


# -- parts -------------------------------------------------------------------------------------


def _level(
    last: tuple[float, float],
    following: tuple[float, float],
    down: Sequence[Outage],
    missed: Sequence[float],
) -> list[tuple[float, float]]:
    """What lies between two evaluations, if there was an outage for which others were missed."""
    if not any(last[0] < t < following[0] for t in missed):
        return []
    back = [o.serving for o in down if o.began < following[0] and o.serving > last[0]]
    if not back:
        return []
    serving = min(max(back), following[0])
    return [(serving, last[1]), (serving, following[1])]


def _pushed(course: Course, since: float, until: float) -> float:
    return float(course.gradients_by(until) - course.gradients_by(since))
