"""The distributions of staleness: per strategy, before, during and after the faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flows.analysis.ledger import applied_rows
from flows.analysis.staleness import PERIODS, by_period
from flows.report.figures.dataset import Subject, Trial, titled
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    MUTED,
    count_told,
    footnote,
    hollow_key,
    legend_above,
    line_key,
    panel,
    row_axis,
)

SHARES = {"5%": 5, "25%": 25, "median": 50, "75%": 75, "99%": 99, "maximum": 100}
_TICKS = (0, 2, 4, 6, 8, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
LABEL = "staleness in versions"


def distributions(subject: Subject, condition: str) -> Drawing | None:
    """Draw the distribution of staleness under one condition; None where nothing was applied."""
    trials = subject.under(condition)
    rows = [
        (name, period, values)
        for name in subject.among(trials)
        for period, values in _periods(subject.under(condition, name)).items()
    ]
    if not rows:
        return None
    figure, axes = panel(height=0.62 + 0.15 * max(4, len(rows)))
    shown = [
        np.percentile(values, list(SHARES.values()), method="inverted_cdf") for *_, values in rows
    ]
    for place, ((name, _, _), (low, first, median, third, p99, most)) in enumerate(
        zip(rows, shown, strict=True)
    ):
        colour = subject.looks[name].colour
        axes.plot([low, p99], [place] * 2, color=colour, linewidth=1.2)
        axes.plot(
            [first, third],
            [place] * 2,
            color=colour,
            linewidth=4,
            solid_capstyle="butt",
            alpha=0.45,
        )
        axes.plot(median, place, "|", color=colour, markersize=7, markeredgewidth=1.6)
        axes.plot(most, place, "o", color=colour, markersize=3.5, fillstyle="none")
    colours = [subject.looks[name].colour for name, _, _ in rows]
    row_axis(axes, [f"{name} {period}".strip() for name, period, _ in rows], colours)
    _scale(axes, max(values[-1] for values in shown))
    keys = [
        line_key("median", MUTED, "|", "none"),
        line_key("middle half", MUTED),
        line_key("5% to 99%", MUTED),
        hollow_key("maximum", MUTED, "o"),
    ]
    keys[0].handle.set(markersize=7, markeredgewidth=1.6)
    keys[1].handle.set(linewidth=4, alpha=0.45)
    legend_above(figure, keys)
    trials_each = [len(subject.under(condition, name)) for name in subject.among(trials)]
    updates = count_told([len(values) for *_, values in rows], "update")
    footnote(figure, f"{count_told(trials_each, 'trial')}, {updates[4:]} per row; no interval")
    return Drawing(
        subject.name("staleness", condition),
        titled("Staleness of applied updates", condition),
        _note(subject.faulty(condition)),
        figure,
        Table(("strategy", "period", "updates", *SHARES), tuple(_table(rows, shown))),
        rows=True,
    )


def _periods(trials: Sequence[Trial]) -> dict[str, list[int]]:
    """Return staleness by period, of all trials together; "" is that of a trial without faults."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for record, outcome in trials:
        heads = [row for row in applied_rows(record) if row.head]
        for period, rows in by_period(heads, outcome.faults).items():
            found[period if outcome.faults else ""] += [row.staleness for row in rows]
    return {period: found[period] for period in ("", *PERIODS) if found[period]}


def _scale(axes: Any, most: float) -> None:
    """Linear up to 10, logarithmic above."""
    highest = max(5.0, 1.15 * most)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(-0.15, highest)
    axes.set_xticks([tick for tick in _TICKS if tick <= highest], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel(LABEL)


def _note(faulty: bool) -> str:
    note = (
        "Versions between the weights an update was computed from and the state it was applied to, "
        "all trials together. The scale is linear up to 10, logarithmic above."
    )
    if faulty:
        note += (
            " “During” holds what all shards applied since a fault from weights that were read "
            "before the shard served again, replayed updates included."
        )
    return note


def _table(
    rows: Sequence[tuple[str, str, Sequence[int]]], shown: Sequence[np.ndarray]
) -> Iterator[tuple[Any, ...]]:
    for (name, period, values), shares in zip(rows, shown, strict=True):
        yield (name, period or "whole training", len(values), *map(int, shares))
