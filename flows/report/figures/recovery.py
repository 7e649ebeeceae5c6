"""The score through a fault: one strategy's trials on the time since the fault."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from flows.analysis.faults import FaultTimes
from flows.analysis.groups import Group
from flows.analysis.learning import evaluations
from flows.analysis.outcome import Outcome
from flows.metrics.score import Score
from flows.records.record import Record
from flows.report import sentences as words
from flows.report.figures.bands import Curve, band, told_of
from flows.report.figures.curves import SECONDS, accuracy_points, outages
from flows.report.figures.dataset import Subject, Trial, end, start, titled, whole
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    INK,
    REFERENCE,
    Key,
    Look,
    draw_line,
    draw_seed,
    footnote,
    legend_above,
    line_key,
    looks,
    panel,
    patch_key,
    percent_axis,
    strategy_keys,
    value_axis,
    value_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINCE = "seconds since the fault"
SCORE = "test accuracy"
WITHOUT = "without fault"
DETECTED, SERVING = (0, (1, 1.5)), (0, (4, 2))  # dashes
SHADE = 0.18
TRIAL_DOTS = 200  # per inch, of a trial's picture
Origin = Callable[[Trial], float]


def trial_figure(record: Record, outcome: Outcome) -> Figure:
    """Draw one trial."""
    figure, axes = panel()
    trial, strategy = (record, outcome), outcome.identity.strategy
    by_name = looks([strategy])
    points = accuracy_points(trial, start(record))
    draw_line(axes, *_columns(points), by_name[strategy])
    marked = mark_faults(axes, [trial], by_name[strategy], lambda each: start(each[0]))
    _score_axis(axes, outcome.score, [value for _, value in points], 0.0)
    axes.set_xlabel(SECONDS)
    legend_above(figure, [*strategy_keys([strategy], by_name), *marked])
    footnote(figure, told_of([1]))
    figure.set_dpi(TRIAL_DOTS)
    figure.set_facecolor("white")
    return figure


def through_fault(subject: Subject, group: Group, reference: str | None) -> Drawing | None:
    """Draw one strategy's score around its `first_loss`; None where no fault had any effect.

    The strategy's trials under the condition `reference` are drawn in grey, placed so that
    equal times since the start of training lie above one another.
    """
    hit = _hit(subject.under(group.condition, group.strategy))
    if not hit:
        return None
    figure, axes = panel()
    look = subject.looks[group.strategy]
    span = _span(subject, group.condition)
    struck = sum(_since(trial) - start(trial[0]) for trial in hit) / len(hit)
    quiet = [trial for trial in subject.under(reference, group.strategy) if whole(trial[0])]
    without = [(trial, accuracy_points(trial, start(trial[0]) + struck)) for trial in quiet]
    through = [(trial, accuracy_points(trial, _since(trial))) for trial in hit]
    _draw(axes, without, Look(REFERENCE, ""), span, subject.score.highest)
    _draw(axes, through, look, span, subject.score.highest)
    marked = mark_faults(axes, hit, look, _since)
    seen = _seen(subject, group.condition, reference, *span)
    _score_axis(axes, subject.score, seen, _lowest(seen))
    axes.set_xlabel(SINCE)
    axes.set_xlim(*span)
    keys = strategy_keys([group.strategy], subject.looks)
    if without:
        keys.append(line_key(WITHOUT, REFERENCE))
    legend_above(figure, [*keys, *marked])
    lines = "; upright lines: medians" if len(hit) > 1 else ""
    footnote(figure, told_of([len(hit), *([len(without)] if without else [])]) + lines)
    rows = [
        (condition, trial[1].identity.seed, *point)
        for condition, each in ((reference, without), (group.condition, through))
        for trial, points in each
        for point in points
    ]
    return Drawing(
        name=subject.name("through-fault", group.condition, group.strategy),
        title=titled(group.strategy, group.condition),
        note=words.moments(group),
        figure=figure,
        table=Table(("condition", "seed", SINCE, subject.score.said(SCORE)), tuple(rows)),
        strategy=group.strategy,
    )


def _draw(
    axes: Axes,
    trials: Sequence[tuple[Trial, Sequence[tuple[float, float]]]],
    look: Look,
    span: tuple[float, float],
    highest: float,
) -> None:
    """Draw each trial; of several also their mean with its band, as far as it can be seen."""
    if len(trials) == 1:
        draw_line(axes, *_columns(trials[0][1]), look)
        return
    seen = []
    for trial, points in trials:
        x, y = _columns(points)
        draw_seed(axes, x, y, look.colour)
        # What is just beyond the edges belongs to what is seen.
        inside = slice(max(0, bisect_left(x, span[0]) - 1), bisect_right(x, span[1]) + 1)
        seen.append(Curve("", trial[1].identity.seed, np.array(x)[inside], np.array(y)[inside]))
    if (joined := band(seen, 0.0, highest)) is not None:
        axes.fill_between(
            joined.x, joined.low, joined.high, color=look.colour, alpha=0.16, linewidth=0
        )
        draw_line(axes, joined.x, joined.mean, look)


def mark_faults(axes: Axes, trials: Sequence[Trial], look: Look, origin: Origin) -> list[Key]:
    """Shade every outage; mark the fault of each trial that times count from, and its recovery.

    Lines stand at the medians over trials: few lines, however many trials and faults there are.
    Other faults are marked above the axes. Returns what the legend says of it.
    """
    firsts = [(_first(trial[1]), origin(trial)) for trial in trials if trial[1].faults]
    if not firsts:
        return []
    down = [(a - origin(t), b - origin(t)) for t in trials for a, b in outages(t)]
    for span in down:
        alpha = 1 - (1 - SHADE) ** (1 / len(trials))  # of all together where all are down
        axes.axvspan(*span, facecolor=look.colour, alpha=alpha, linewidth=0, zorder=0)
    keys = []
    for name, moments, colour, dashes in (
        ("fault", [fault.began for fault, _ in firsts], INK, "-"),
        ("detected", [fault.detected for fault, _ in firsts], INK, DETECTED),
        ("serving again", [fault.serving for fault, _ in firsts], look.colour, SERVING),
    ):
        zeros = [zero for _, zero in firsts]
        times = [at - zero for at, zero in zip(moments, zeros, strict=True) if at is not None]
        if times:
            axes.axvline(median(times), color=colour, linewidth=0.9, linestyle=dashes, zorder=1)
            keys.append(line_key(name, colour, dashes=dashes))
    if down:
        keys.append(patch_key("down", look.colour, 0.25))
    others = [
        fault.began - origin(trial)
        for trial in trials
        for fault in trial[1].faults
        if fault is not _first(trial[1])
    ]
    if others:
        above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(others, [1.03] * len(others), "|", color=INK, markersize=4, **above)
        keys.append(line_key("other faults", INK, "|", "none"))
    return keys


def _hit(trials: Sequence[Trial]) -> list[Trial]:
    return [(record, outcome) for record, outcome in trials if outcome.faults]


def _first(outcome: Outcome) -> FaultTimes:
    """The fault that times count from: the first that a shard felt, else the first."""
    return outcome.first_loss or outcome.faults[0]


def _since(trial: Trial) -> float:
    """When the fault began that times count from."""
    return _first(trial[1]).began


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _span(subject: Subject, condition: str) -> tuple[float, float]:
    """Return the span, in seconds since the fault, that the panels of all strategies share."""
    hit = _hit(subject.under(condition))
    before = max(_since(trial) - start(trial[0]) for trial in hit)
    after = max(end(trial[0]) - _since(trial) for trial in hit)
    marks = [
        mark
        for _, outcome in hit
        for mark in (_first(outcome).rto_seconds, outcome.accuracy.regain_seconds)
    ]
    marks += [trial[1].faults[-1].began - _since(trial) for trial in hit]
    longest = max((mark for mark in marks if mark is not None), default=after)
    return -min(before, 0.25 * longest + 0.75), min(after, 1.2 * longest + 0.5)


def _seen(
    subject: Subject, condition: str, reference: str | None, first: float, last: float
) -> list[float]:
    """Every value within the span of the panels, which all strategies share."""
    hit = _hit(subject.under(condition))
    quiet = [trial for trial in subject.under(reference) if whole(trial[0])]
    struck = sum(_since(trial) - start(trial[0]) for trial in hit) / len(hit)
    origins = [(trial, _since(trial)) for trial in hit]
    if not subject.score.share:  # of shares, what is better than all that is shown has its place
        origins += [(trial, start(trial[0]) + struck) for trial in quiet]
    return [
        found.accuracy
        for trial, origin in origins
        for found in evaluations(trial[0])
        if first <= found.t - origin <= last
    ]


def _lowest(seen: Sequence[float]) -> float:
    """Return where an axis of shares starts, in steps of 10%."""
    return max(0.0, math.floor(10 * min(seen, default=0.0) - 0.3) / 10)


def _score_axis(axes: Axes, score: Score, seen: Sequence[float], lowest: float) -> None:
    """Show shares from `lowest` to 1; of other scores the values that there are."""
    if score.share:
        percent_axis(axes, score.said(SCORE), lowest)
    else:
        value_axis(axes, seen, near=True)
        value_label(axes, score.said(SCORE))
