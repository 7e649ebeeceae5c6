"""The effect of faults: what a trial with faults differs by from its control, the same without.

Both are looked at over the same span, from where the first fault took effect: of seconds since the
training began, of gradients pushed, or of money spent. What both would have learnt anyway is in
none of the differences. Nothing is said beyond what both have: a span ends where the first of the
two trainings does, and lies within the evaluations of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.analysis.effects.course import Course, Curve


@dataclass(frozen=True, slots=True)
class Effect:
    """The score of a trial with faults minus that of its control, over one span.

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
        The name of the control; None: there is none that can be used.
    lacking
        Why there is none, for a trial that plans faults.
    time, gradients, money
        The difference in the score over the same seconds, gradients and money.
    deficit
        Gradients that the control pushed in the seconds of the span, and the trial did not.
    seconds, cost
        By how much longer the training took, and how much more it cost, in s and USD.
    """

    control: str | None = None
    time: Effect | None = None
    gradients: Effect | None = None
    money: Effect | None = None
    deficit: float | None = None
    seconds: float | None = None
    cost: float | None = None
    lacking: str = ""


UNKNOWN = Effects()
_NONE = Effect(0.0, 0.0, 0.0)


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


def difference(faulted: Curve, control: Curve, start: float, end: float) -> Effect | None:
    """Return what one curve differs by from another between two places, as far as both go.

    None where they have no span in common there, or a value in it is not finite.
    """
    start = max(start, faulted.first, control.first)
    end = min(end, faulted.last, control.last)
    if end <= start:
        return None
    area = faulted.area(start, end) - control.area(start, end)
    last = faulted.at(end) - control.at(end)
    if not (math.isfinite(area) and math.isfinite(last)):
        return None
    return Effect(end - start, area / (end - start), last)


# -- parts -------------------------------------------------------------------------------------


def _pushed(course: Course, since: float, until: float) -> float:
    return float(course.gradients_by(until) - course.gradients_by(since))
