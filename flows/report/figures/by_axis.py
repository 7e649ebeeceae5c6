"""Figures against a numeric axis: what changes with a number that the experiment varies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flows.analysis.resources import busiest, cores_used
from flows.metrics import BY_KEY
from flows.metrics.score import Score
from flows.report.figures.bands import bounds, told_of
from flows.report.figures.dataset import Subject, Trial
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.numeric_axis import BETWEEN, NumericAxis
from flows.report.figures.style import (
    REFERENCE,
    Look,
    footnote,
    legend_above,
    line_key,
    look,
    looks,
    panel,
    percent_ticks,
    strategy_keys,
    value_axis,
    value_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE = (
    "Dots: each trial; line: mean over seeds, where every trial has a value; band: 95% interval of "
    "the mean (with two seeds: their range)."
)
EQUAL_DISTANCES = " Values are drawn at equal distances, not to scale."

Values = dict[int | None, float | None]  # by seed
Points = Mapping[tuple[str, str], Values]  # by line, and label on the axis
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Measure:
    """A figure of a trial, as it is drawn against an axis.

    Attributes
    ----------
    name, title, note
        Of its drawing.
    y
        What the vertical axis shows.
    value
        A trial's; None where it has none.
    percent
        Whether values are shares, and written in per cent.
    highest
        What no value can exceed. None is below 0.
    """

    name: str
    title: str
    note: str
    y: str
    value: Callable[[Trial], float | None]
    percent: bool = False
    highest: float = math.inf


def against(subject: Subject, axis: NumericAxis) -> Iterator[Drawing | None]:
    """Draw every measure against an axis; None where no trial has a value but 0."""
    workers = _counts_workers(subject, axis)
    updates = {record.config.get("training", {}).get("updates") for record, _ in subject.trials}
    for measure in MEASURES:
        if measure is ACCURACY and len(updates) > 1:
            continue  # it would show that more gradients help, and not what the axis does
        points = _points(subject, axis, measure)
        if measure is ACCURACY:
            yield _drawing(axis, _of(subject.score), points)
            continue
        if measure is RATE and workers:
            yield _drawing(axis, measure, points, _linear(points, axis))
            yield _drawing(axis, EFFICIENCY, _efficiency(points, axis))
        else:
            yield _drawing(axis, measure, points)


def _points(subject: Subject, axis: NumericAxis, measure: Measure) -> Points:
    points: defaultdict[tuple[str, str], Values] = defaultdict(dict)
    in_order = sorted(
        subject.trials, key=lambda each: subject.strategies.index(each[1].identity.strategy)
    )
    for trial in in_order:
        identity = trial[1].identity
        place = axis.line(identity.labels), identity.labels[axis.key]
        points[place][identity.seed] = measure.value(trial)
    return points


# -- workers -----------------------------------------------------------------------------------


def _of(score: Score) -> Measure:
    """The final accuracy, by the name of what models are scored by."""
    said = score.said
    return replace(
        ACCURACY,
        title=said(ACCURACY.title),
        note=said(ACCURACY.note),
        y=said(ACCURACY.y),
        percent=score.share,
        highest=score.highest,
    )


def _counts_workers(subject: Subject, axis: NumericAxis) -> bool:
    """Whether the numbers on an axis are those of the workers."""
    return all(
        record.config.get("training", {}).get("workers")
        == axis.values[outcome.identity.labels[axis.key]]
        for record, outcome in subject.trials
    )


def _linear(points: Points, axis: NumericAxis) -> dict[str, float]:
    """The rate at each label if it grew with the workers from the fewest of them on."""
    first = next(iter(axis.values))
    rates = [v for (_, label), seeds in points.items() if label == first for v in seeds.values()]
    known = [rate for rate in rates if rate is not None]
    if not known:
        return {}
    alone = sum(known) / len(known) / axis.values[first]
    return {label: alone * workers for label, workers in axis.values.items()}


def _efficiency(points: Points, axis: NumericAxis) -> Points:
    """The rate per worker, as a share of what it is with the fewest workers and the same seed."""
    first = next(iter(axis.values))

    def share(line: str, label: str, seed: int | None, rate: float | None) -> float | None:
        base = points.get((line, first), {}).get(seed)
        if rate is None or not base:
            return None
        return (rate / axis.values[label]) / (base / axis.values[first])

    return {
        (line, label): {seed: share(line, label, seed, rate) for seed, rate in seeds.items()}
        for (line, label), seeds in points.items()
    }


# -- drawing -----------------------------------------------------------------------------------


def _drawing(
    axis: NumericAxis, measure: Measure, points: Points, linear: Mapping[str, float] | None = None
) -> Drawing | None:
    if not any(value for seeds in points.values() for value in seeds.values()):
        return None
    figure, axes = panel()
    lines = list(dict.fromkeys(line for line, _ in points))
    by_line = _looks(lines)
    keys = strategy_keys(lines, by_line) if len(lines) > 1 else []
    rows: list[Row] = []
    if linear:
        places = [axis.places[label] for label in linear]
        axes.plot(places, list(linear.values()), "--", color=REFERENCE, linewidth=1)
        keys.append(line_key("linear", REFERENCE, dashes="--"))
        rows += [("linear", axis.tick(label), None, y, None, None) for label, y in linear.items()]
    for line in lines:
        rows += _draw_line(axes, axis, by_line[line], line, points, measure.highest)
    shown = [value for row in rows for value in row[3:] if value is not None]
    _scales(axes, axis, measure, shown, bool(linear))
    if keys:
        legend_above(figure, keys)
    footnote(figure, told_of([len(seeds) for seeds in points.values()]))
    return Drawing(
        f"{measure.name}-against-{axis.slug}",
        f"{measure.title} against {axis.name}",
        measure.note + ("" if axis.to_scale else EQUAL_DISTANCES),
        figure,
        Table(("line", axis.title, "seed", measure.y, "low", "high"), tuple(rows)),
    )


def _looks(lines: Sequence[str]) -> dict[str, Look]:
    """Return a look per line; of lines with several labels, the first has the colour.

    The others have marker and dashes.
    """
    parts = {line: line.partition(BETWEEN) for line in lines}
    firsts = looks(list(dict.fromkeys(first for first, _, _ in parts.values())))
    others = list(dict.fromkeys(rest for _, _, rest in parts.values()))
    if len(others) < 2:
        return looks(lines)
    return {
        line: replace(look(others.index(rest)), colour=firsts[first].colour)
        for line, (first, _, rest) in parts.items()
    }


def _draw_line(
    axes: Axes, axis: NumericAxis, own: Look, line: str, points: Points, highest: float
) -> Iterator[Row]:
    """Draw the dots, means and bands of one line; yield the numbers that are drawn."""
    x: list[float] = []
    means: list[tuple[float, float, float]] = []
    for label, place in axis.places.items():
        seeds, tick = points.get((line, label), {}), axis.tick(label)
        known = {seed: value for seed, value in seeds.items() if value is not None}
        axes.plot([place] * len(known), list(known.values()), own.marker, **_DOT, color=own.colour)
        yield from ((line, tick, seed, value, None, None) for seed, value in known.items())
        if seeds:
            x.append(place)
            means.append(_mean(list(seeds.values()), highest))
            yield (line, tick, "mean", *means[-1])
    mean, low, high = np.array(means).T
    axes.plot(
        x,
        mean,
        own.marker,
        linestyle=own.dashes,
        color=own.colour,
        linewidth=1.3,
        markersize=4,
        markeredgewidth=0.4,
        markeredgecolor="white",
    )
    axes.fill_between(x, low, high, color=own.colour, alpha=0.16, linewidth=0)


_DOT: dict[str, Any] = {"markersize": 2.4, "alpha": 0.45, "markeredgewidth": 0}


def _mean(values: Sequence[float | None], highest: float) -> tuple[float, float, float]:
    """Mean and bounds; NaN where a trial has no value: those that have one are the good ones.

    Bounds are cut at 0 and `highest`, beyond which no value can be.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return (float("nan"),) * 3
    column = np.array(known)[:, None]
    mean = column.mean(axis=0)
    low, high = bounds(column, mean)
    return float(mean[0]), max(0.0, float(low[0])), min(highest, float(high[0]))


def _scales(
    axes: Axes, axis: NumericAxis, measure: Measure, values: Sequence[float], linear: bool
) -> None:
    """Scale both axes; what is `linear` in a logarithmic axis stays a straight line."""
    if axis.doubles:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(axis.places.values()), [axis.tick(label) for label in axis.places])
    axes.set_xlabel(axis.title)
    value_label(axes, measure.y)
    if linear and axis.doubles and all(value > 0 for value in values):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        value_axis(axes, values, highest=measure.highest, near=measure.name == ACCURACY.name)
    if measure.percent:
        percent_ticks(axes)


# -- what is measured --------------------------------------------------------------------------


def _column(key: str, title: str, y: str, highest: float = math.inf) -> Measure:
    column = BY_KEY[key]

    def value(trial: Trial) -> float | None:
        found = trial[1].row()[key]
        return None if found is None else float(found)

    name = key.replace("_", "-")
    return Measure(name, title, column.definition, y, value, column.unit == "%", highest)


RATE = _column("gradients_together", "Pace", "gradients per second")
EFFICIENCY = Measure(
    "efficiency",
    "Efficiency",
    "Gradients per second and worker, as a share of those with the fewest workers and the same "
    "seed: 100% is linear.",
    "efficiency",
    RATE.value,
    percent=True,
)
ACCURACY = _column("accuracy_final", "Final accuracy", "test accuracy", 1.0)
MEASURES = (
    RATE,
    _column("idle_share", "Idle workers", "share of the workers' time", 1.0),
    _column("target_seconds", "Time to target", "seconds to the target"),
    _column("target_gradients", "Gradients to target", "gradients to the target"),
    _column("objective_target_seconds", "Time to the objective", "seconds to the objective"),
    _column(
        "objective_target_gradients", "Gradients to the objective", "gradients to the objective"
    ),
    _column("objective_excess", "Excess over the reference", "excess over the reference"),
    _column("stationarity_final", "Distance from stationarity", "norm of the gradient mapping"),
    _column("staleness_median", "Staleness, median", "staleness in versions, median"),
    _column("staleness_p99", "Staleness, p99", "staleness in versions, p99"),
    ACCURACY,
    _column("rto_seconds", "Recovery time", "seconds since the fault"),
    _column("updates_lost", "Lost updates", "updates lost"),
    Measure(
        "server-busy",
        "The busiest server",
        "Processor time of the server that used the most of it, per second of training. A server "
        "runs on one core for most of what it does, so that near 100% it is saturated.",
        "share of a core",
        lambda trial: busiest(trial[0]),
        percent=True,
    ),
    Measure(
        "cores-used",
        "Cores in use",
        "Processor time of all nodes together, per second of training. Near the number of cores "
        "it is the machine that is saturated, not the server.",
        "cores",
        lambda trial: cores_used(trial[0]),
    ),
)
