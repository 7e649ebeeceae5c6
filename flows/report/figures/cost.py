"""Money against accuracy: every trial, each strategy's mean with both intervals, the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flows.analysis.groups import Group
from flows.analysis.statistics import FEWEST_SEEDS, interval
from flows.metrics import BY_KEY
from flows.metrics.score import Score
from flows.report.figures.dataset import Subject, titled
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    INK,
    MUTED,
    REFERENCE,
    Look,
    count_told,
    footnote,
    legend_above,
    line_key,
    panel,
    percent_ticks,
    value_axis,
    value_label,
)

COST, ACCURACY, LEFT = "cost_usd", "accuracy_final", "effect_time_end"
Points = Mapping[int | None, tuple[float, float]]  # money in USD and what came of it, by seed
Limits = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Measure:
    """What money is set against: the name and title of the figure, and its vertical axis.

    It is the figure `key` of each trial, times `scale`, in a `unit`. No value is outside of
    `limits`.
    """

    name: str
    title: str
    note: str
    key: str
    y: str
    limits: Limits
    scale: float = 1.0
    unit: str = ""


FINAL = Measure(
    "cost-accuracy", "Cost against accuracy", "", ACCURACY, "final test accuracy", limits=(0.0, 1.0)
)
EFFECT = Measure(
    "cost-effect",
    "Cost against what the faults did",
    " The effect is the accuracy minus that of the same strategy and seed without the faults, "
    "when the first of the two trainings ended.",
    LEFT,
    "effect on accuracy at the end",
    limits=(-math.inf, math.inf),
    scale=100.0,
    unit="points",
)


def cost_accuracy(subject: Subject, condition: str) -> Drawing | None:
    """Draw money against final accuracy under one condition; None where either is missing."""
    return _drawing(subject, condition, FINAL)


def cost_effect(subject: Subject, condition: str) -> Drawing | None:
    """Draw money against what the faults had done by the end; None without controls."""
    return _drawing(subject, condition, EFFECT)


def _drawing(subject: Subject, condition: str, measure: Measure) -> Drawing | None:
    score = subject.score
    measure = _by_name(measure, score)
    found = {group.strategy: _points(group, measure) for group in subject.groups_under(condition)}
    points = {strategy: each for strategy, each in found.items() if each}
    if not points:
        return None
    figure, axes = panel()
    scale = _scale([cost for each in points.values() for cost, _ in each.values()])
    means = {strategy: _mean(each) for strategy, each in points.items()}
    best = front(list(means.values()), score.sign)
    if len(best) > 1:
        # A staircase: more is had only at the next one's cost.
        x, y = [scale * cost for cost, _ in best], [value for _, value in best]
        axes.plot(x, y, color=REFERENCE, linewidth=1.2, drawstyle="steps-post", zorder=1)
    reached = [
        value
        for strategy, each in points.items()
        for value in _draw(axes, each, scale, subject.looks[strategy], measure.limits)
    ]
    axes.set_xlabel(f"money for the training, {_unit(scale)}")
    value_label(axes, measure.y)
    axes.margins(x=0.1)
    if measure.key == ACCURACY:
        value_axis(axes, reached, *measure.limits, near=True)
        if score.share:
            percent_ticks(axes)
    else:
        axes.axhline(0, color=MUTED, linewidth=0.6, zorder=0)
        axes.margins(y=0.12)
    own = ((strategy, subject.looks[strategy]) for strategy in points)
    keys = [line_key(name, look.colour, look.marker, "none") for name, look in own]
    if len(best) > 1:
        keys.append(line_key("frontier", REFERENCE))
    legend_above(figure, keys)
    told = _interval_told([len(each) for each in points.values()])
    footnote(figure, told)
    note = (
        f"Large: mean over trials; small: each trial ({told}). Left and {_up(score)} is better; "
        f"the grey line, the frontier, joins the strategies that no other beats in both."
        f"{measure.note}"
    )
    return Drawing(
        subject.name(measure.name, condition),
        titled(measure.title, condition),
        note,
        figure,
        _table(points, best, measure, score),
    )


def front(points: Sequence[tuple[float, float]], sign: int = 1) -> list[tuple[float, float]]:
    """Return the points that no other beats: none costs as little and is as good or better.

    More is better of values times `sign`.
    """
    kept: list[tuple[float, float]] = []
    for cost, value in sorted(set(points), key=lambda point: (point[0], -sign * point[1])):
        if not kept or sign * value > sign * kept[-1][1]:
            kept.append((cost, value))
    return kept


def _by_name(measure: Measure, score: Score) -> Measure:
    """A measure by the name, and in the unit, of what models are scored by."""
    title, y, note = map(score.said, (measure.title, measure.y, measure.note))
    named = replace(measure, title=title, note=note)
    if not score.share:
        limits = (measure.limits[0], math.inf)
        return replace(named, y=y, limits=limits, scale=1.0, unit="")
    return replace(named, y=f"{y}, {measure.unit}" if measure.unit else y)


def _up(score: Score) -> str:
    return "up" if score.better == "higher" else "down"


def _draw(axes: Any, points: Points, scale: float, look: Look, limits: Limits) -> list[float]:
    """Draw trials, mean and intervals of one strategy; return the heights that these reach."""
    x = [scale * cost for cost, _ in points.values()]
    y = [value for _, value in points.values()]
    axes.plot(x, y, look.marker, color=look.colour, markersize=2.6, alpha=0.5, markeredgewidth=0)
    cost, value = _mean(points)
    up_down = _reach(y, limits)
    axes.errorbar(
        scale * cost,
        value,
        xerr=_reach(x, (0.0, math.inf)),
        yerr=up_down,
        fmt=look.marker,
        color=look.colour,
        markersize=6,
        elinewidth=1,
        capsize=2,
        markeredgecolor="white",
        markeredgewidth=0.6,
        ecolor=INK,
    )
    ends = [] if up_down is None else [value - up_down[0][0], value + up_down[1][0]]
    return [*y, *ends]


def _points(group: Group, measure: Measure) -> Points:
    rows = {trial.identity.seed: trial.row() for trial in group.trials}
    return {
        seed: (float(row[COST]), measure.scale * float(row[measure.key]))
        for seed, row in rows.items()
        if row[COST] is not None and row[measure.key] is not None
    }


def _mean(points: Points) -> tuple[float, float]:
    pairs = points.values()
    return sum(x for x, _ in pairs) / len(pairs), sum(y for _, y in pairs) / len(pairs)


def _reach(values: Sequence[float], limits: Limits) -> list[list[float]] | None:
    """How far the 95% interval of a mean goes down and up; None where it would say little."""
    if len(values) < FEWEST_SEEDS:
        return None
    found = interval(values, np.random.default_rng(0))
    if found.low is None or found.high is None:  # the same in all of a few seeds
        return None
    low, high = max(limits[0], found.low), min(limits[1], found.high)
    return [[max(0.0, found.mean - low)], [max(0.0, high - found.mean)]]


def _interval_told(counts: Sequence[int]) -> str:
    """What is said of the intervals: some are drawn, or the trials are too few for any."""
    if max(counts) < FEWEST_SEEDS:
        return f"{count_told(counts)}; a 95% interval would take {FEWEST_SEEDS} seeds at least"
    few = f", where there are {FEWEST_SEEDS} seeds" if min(counts) < FEWEST_SEEDS else ""
    return f"{count_told(counts)}; mean with its 95% interval on both axes{few}"


def _scale(costs: Sequence[float]) -> float:
    """What to multiply US dollars by for numbers that can be read."""
    most = max(costs)
    return 1.0 if most >= 0.1 else 100.0 if most >= 0.001 else 1e6


def _unit(scale: float) -> str:
    return {1.0: "USD", 100.0: "US cents", 1e6: "millionths of a USD"}[scale]


def _table(
    points: Mapping[str, Points],
    best: Sequence[tuple[float, float]],
    measure: Measure,
    score: Score,
) -> Table:
    rows: list[tuple[Any, ...]] = []
    for strategy, each in points.items():
        mean = _mean(each)
        rows.append((strategy, "mean", *mean, "yes" if mean in best else "no"))
        rows += [(strategy, seed, *pair, None) for seed, pair in each.items()]
    label = score.said(BY_KEY[ACCURACY].label) if measure.key == ACCURACY else measure.y
    return Table(
        ("strategy", "seed", f"{BY_KEY[COST].label}, USD", label, "on the front"), tuple(rows)
    )
