"""Accuracy through a fault: one strategy's trials on the time since the fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.analysis.faults import FaultTimes
from flows.analysis.groups import Group
from flows.analysis.learning import evaluations
from flows.analysis.outcome import Outcome
from flows.records.record import Record
from flows.report import sentences as words
from flows.report.figures.curves import SECONDS, accuracy_points
from flows.report.figures.dataset import Subject, Trial, end, start, titled, whole
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    INK,
    REFERENCE,
    Look,
    legend_above,
    line_key,
    looks,
    panel,
    patch_key,
    percent_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINCE = "seconds since the fault"


def trial_figure(record: Record, outcome: Outcome) -> Figure:
    """Draw one trial."""
    figure, axes = panel()
    strategy = outcome.identity.strategy
    look = looks([strategy])[strategy]
    points = accuracy_points(record, start(record))
    axes.plot(*_columns(points), color=look.colour)
    for fault in outcome.faults:
        mark_fault(axes, fault, look, start(record))
    percent_axis(axes, "test accuracy")
    axes.set_xlabel(SECONDS)
    keys = [line_key("accuracy", look.colour), *(fault_keys(look) if outcome.faults else [])]
    legend_above(axes, keys)
    return figure


def through_fault(subject: Subject, group: Group, reference: str | None) -> Drawing | None:
    """Draw one strategy's accuracy around its `first_loss`; None where no fault had any effect.

    The strategy's trials under the condition `reference` are drawn in grey, placed so that
    equal times since the start of training lie above one another.
    """
    hit = _hit(subject.under(group.condition, group.strategy))
    if not hit:
        return None
    figure, axes = panel(height=2.8)
    look = subject.looks[group.strategy]
    struck = sum(_origin(o) - start(r) for r, o in hit) / len(hit)
    rows: list[tuple[Any, ...]] = []
    for record, outcome in subject.under(reference, group.strategy):
        if whole(record):
            points = accuracy_points(record, start(record) + struck)
            axes.plot(*_columns(points), color=REFERENCE, linewidth=1.1)
            rows += [(reference, outcome.identity.seed, *point) for point in points]
    for record, outcome in hit:
        origin = _origin(outcome)
        points = accuracy_points(record, origin)
        axes.plot(*_columns(points), ".-", color=look.colour, linewidth=1.2, markersize=4)
        rows += [(group.condition, outcome.identity.seed, *point) for point in points]
        for fault in outcome.faults:
            mark_fault(axes, fault, look, origin)
    first, last = _span(subject, group.condition)
    percent_axis(axes, "test accuracy", _lowest(subject, group.condition, first, last))
    axes.set_xlabel(SINCE)
    axes.set_xlim(first, last)
    legend_above(axes, _keys(look, reference is not None))
    return Drawing(
        name=subject.name("through-fault", group.condition, group.strategy),
        title=titled(group.strategy, group.condition),
        note=words.moments(group),
        figure=figure,
        table=Table(("condition", "seed", SINCE, "test accuracy"), tuple(rows)),
        strategy=group.strategy,
    )


def mark_fault(axes: Axes, fault: FaultTimes, look: Look, origin: float) -> None:
    """Shade the outage; mark fault (solid), detection (dotted) and return of service (dashed)."""
    if fault.serving is not None:
        span = fault.began - origin, fault.serving - origin
        axes.axvspan(*span, facecolor=look.colour, alpha=0.10, linewidth=0)
    for moment, colour, dashes in (
        (fault.began, INK, "-"),
        (fault.detected, INK, (0, (1, 1.5))),
        (fault.serving, look.colour, (0, (4, 2))),
    ):
        if moment is not None:
            axes.axvline(moment - origin, color=colour, linewidth=1.1, linestyle=dashes)


def fault_keys(look: Look) -> list[Any]:
    """Return the legend's entries for what `mark_fault` draws."""
    return [
        line_key("fault", INK),
        line_key("detected", INK, dashes=(0, (1, 1.5))),
        line_key("serving again", look.colour, dashes=(0, (4, 2))),
        patch_key("shard down", look.colour, 0.15),
    ]


def _keys(look: Look, referred: bool) -> list[Any]:
    keys = [*fault_keys(look), line_key("accuracy", look.colour, ".")]
    return [*keys, line_key("without the fault", REFERENCE)] if referred else keys


def _hit(trials: Sequence[Trial]) -> list[Trial]:
    return [(record, outcome) for record, outcome in trials if outcome.faults]


def _origin(outcome: Outcome) -> float:
    """When the fault began that times count from: the first that a shard felt, else the first."""
    return (outcome.first_loss or outcome.faults[0]).began


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _span(subject: Subject, condition: str) -> tuple[float, float]:
    """Return the span, in seconds since the fault, that the panels of all strategies share."""
    hit = _hit(subject.under(condition))
    before = max(_origin(o) - start(r) for r, o in hit)
    after = max(end(r) - _origin(o) for r, o in hit)
    marks = [
        m
        for _, o in hit
        for m in ((o.first_loss or o.faults[0]).rto_seconds, o.accuracy.regain_seconds)
    ]
    marks += [o.faults[-1].began - _origin(o) for _, o in hit]
    longest = max((mark for mark in marks if mark is not None), default=after)
    return -min(before, 0.25 * longest + 0.75), min(after, 1.2 * longest + 0.5)


def _lowest(subject: Subject, condition: str, first: float, last: float) -> float:
    """Return where the accuracy axis starts, in steps of 10%, for all panels alike."""
    seen = [
        score.accuracy
        for record, outcome in _hit(subject.under(condition))
        for score in evaluations(record)
        if first <= score.t - _origin(outcome) <= last
    ]
    return max(0.0, math.floor(10 * min(seen, default=0.0) - 0.3) / 10)
