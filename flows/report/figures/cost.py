"""Cost against accuracy: every trial, each strategy's mean, and the front of the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flows.analysis.groups import Group
from flows.analysis.statistics import FEWEST_SEEDS, interval
from flows.metrics import BY_KEY
from flows.report.figures.dataset import Subject, titled
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import INK, REFERENCE, legend_above, line_key, panel

COST, ACCURACY = "cost_usd", "accuracy_final"


def cost_accuracy(subject: Subject, condition: str) -> Drawing | None:
    """Draw money against final accuracy under one condition; None where either is missing."""
    groups = [g for g in subject.groups_under(condition) if g.spread(COST) and g.spread(ACCURACY)]
    if not groups:
        return None
    figure, axes = panel()
    scale = _scale([value for group in groups for value, _ in _pairs(group)])
    means = {group.strategy: _means(group) for group in groups}
    best = front(list(means.values()))
    if len(best) > 1:
        # A staircase: more accuracy is had only at the next one's cost.
        x, y = [scale * cost for cost, _ in best], [accuracy for _, accuracy in best]
        axes.plot(x, y, color=REFERENCE, linewidth=1.4, drawstyle="steps-post")
    for group in groups:
        _draw(axes, group, scale, subject)
    axes.set_xlabel(f"money for the training, {_unit(scale)}")
    axes.set_ylabel("final test accuracy")
    axes.margins(0.12)
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    own = ((group.strategy, subject.looks[group.strategy]) for group in groups)
    keys = [line_key(name, look.colour, look.marker, "none") for name, look in own]
    if len(best) > 1:
        keys.append(line_key("not beaten in both", REFERENCE))
    legend_above(axes, keys)
    return Drawing(
        subject.name("cost-accuracy", condition),
        titled("Cost against accuracy", condition),
        f"Large: mean over trials{_interval_told(groups)}; small: each trial. Left and up is "
        "better; the grey line joins the strategies that no other beats in both. Mind the scale: "
        "it does not start at 0.",
        figure,
        _table(groups, best),
    )


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats: none costs as little and is as accurate or more."""
    kept: list[tuple[float, float]] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not kept or accuracy > kept[-1][1]:
            kept.append((cost, accuracy))
    return kept


def _draw(axes: Any, group: Group, scale: float, subject: Subject) -> None:
    look = subject.looks[group.strategy]
    pairs = _pairs(group)
    x, y = [scale * cost for cost, _ in pairs], [accuracy for _, accuracy in pairs]
    axes.plot(x, y, look.marker, color=look.colour, markersize=3.5, alpha=0.5)
    cost, accuracy = _means(group)
    axes.errorbar(
        scale * cost,
        accuracy,
        xerr=_reach(x),
        yerr=_reach(y),
        fmt=look.marker,
        color=look.colour,
        markersize=8,
        elinewidth=1.2,
        markeredgecolor=INK,
        markeredgewidth=0.6,
    )


def _pairs(group: Group) -> list[tuple[float, float]]:
    rows = [trial.row() for trial in group.trials]
    return [
        (float(row[COST]), float(row[ACCURACY]))
        for row in rows
        if row[COST] is not None and row[ACCURACY] is not None
    ]


def _means(group: Group) -> tuple[float, float]:
    pairs = _pairs(group)
    return sum(x for x, _ in pairs) / len(pairs), sum(y for _, y in pairs) / len(pairs)


def _reach(values: Sequence[float]) -> list[list[float]] | None:
    """How far the 95% interval of a mean goes down and up; None where it would say little."""
    if len(values) < FEWEST_SEEDS:
        return None
    found = interval(values, np.random.default_rng(0))
    if found.low is None or found.high is None:  # the same in all of a few seeds
        return None
    return [[max(0.0, found.mean - found.low)], [max(0.0, found.high - found.mean)]]


def _interval_told(groups: Sequence[Group]) -> str:
    """What is said of the intervals: some are drawn, or the trials are too few for any."""
    counts = [len(_pairs(group)) for group in groups]
    if max(counts) < FEWEST_SEEDS:
        return f" (its 95% interval would take {FEWEST_SEEDS} seeds at least)"
    few = f", where there are {FEWEST_SEEDS} seeds" if min(counts) < FEWEST_SEEDS else ""
    return f", with its 95% interval{few}"


def _scale(costs: Sequence[float]) -> float:
    """What to multiply US dollars by for numbers that can be read."""
    most = max(costs)
    return 1.0 if most >= 0.1 else 100.0 if most >= 0.001 else 1e6


def _unit(scale: float) -> str:
    return {1.0: "USD", 100.0: "US cents", 1e6: "millionths of a USD"}[scale]


def _table(groups: Sequence[Group], best: Sequence[tuple[float, float]]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for group in groups:
        mean = _means(group)
        rows.append((group.strategy, "mean", *mean, "yes" if mean in best else "no"))
        for trial in group.trials:
            row = trial.row()
            rows.append((group.strategy, row["seed"], row[COST], row[ACCURACY], None))
    costs, accuracy = (BY_KEY[key].label for key in (COST, ACCURACY))
    return Table(("strategy", "seed", f"{costs}, USD", accuracy, "on the front"), tuple(rows))
