"""How the exploratory comparison is shown on the terminal: means, differences and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flows.analysis.comparison import Compared
from flows.analysis.statistics import FEWEST_SEEDS, Difference, Interval
from flows.analysis.statistics.power import fewest_seeds
from flows.metrics import BY_KEY, NOT_APPLICABLE, Metric
from flows.metrics.score import ACCURACY, Score
from flows.report.claims import EXPLORATORY

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = (
    "Exploratory: mean, and difference to {baseline} seed by seed, each with its 95% interval in "
    f"brackets ({FEWEST_SEEDS} seeds at least, counts {{fewest}}), that of a mean cut at 0 where a "
    "figure cannot be less. p and intervals are not corrected for how many there are, so some of "
    "them exclude 0 by chance: where to look, no verdicts. seeds: paired, and in brackets how many "
    "would show the difference seen, or the one configured, with a probability of 80%."
)


def print_exploratory(rows: Sequence[Compared], console: Console, score: Score = ACCURACY) -> None:
    """Print one table for each condition, with a line for every strategy and metric.

    `score` is what models are scored by.
    """
    if not any(row.reading for row in rows):
        return
    for condition in dict.fromkeys(row.condition for row in rows):
        console.print()
        heading = f"{EXPLORATORY}: {condition}" if condition else EXPLORATORY
        console.print(Text(heading, style="bold underline"))
        console.print(_table([row for row in rows if row.condition == condition], score))
    told = LEGEND.format(baseline=rows[0].baseline, fewest=fewest_seeds(exact=True))
    console.print(Text(told, style="dim"))


def figure_name(column: Metric) -> str:
    """Return a figure's heading with its unit."""
    return f"{column.label}, {column.shown_unit}" if column.shown_unit else column.label


def signed(column: Metric, value: float) -> str:
    """Return a difference with its sign."""
    text = column.text(value)
    return f"+{text}" if value > 0 else text


def _table(rows: Sequence[Compared], score: Score) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading, justify in (
        ("figure", "left"),
        ("strategy", "left"),
        ("mean", "right"),
        ("difference", "right"),
        ("p", "right"),
        ("seeds", "right"),
        ("", "left"),
    ):
        table.add_column(Text(heading), justify=justify, overflow="fold")  # type: ignore[arg-type]
    shown, order = "", list(dict.fromkeys(row.metric for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row.metric)):
        column = score.of(BY_KEY[row.metric])
        name = "" if row.metric == shown else figure_name(column)
        shown = row.metric
        figures = (
            _mean(row, column),
            _difference(row, column),
            row.p,
            _seeds(row),
        )
        table.add_row(*map(Text, (name, row.strategy, *figures, row.said)))
    return table


def _mean(row: Compared, column: Metric) -> str:
    found = row.interval
    if found is None:
        return NOT_APPLICABLE
    return column.text(found.mean) + _bounds(column, found, cut=True)


def _difference(row: Compared, column: Metric) -> str:
    found = row.difference
    if found is None:
        return "" if row.reading is None else NOT_APPLICABLE
    return signed(column, found.mean) + _bounds(column, found)


def _bounds(column: Metric, found: Interval | Difference, cut: bool = False) -> str:
    # Of two seeds an interval is that wide that it only misleads.
    if found.low is None or found.high is None or found.n < FEWEST_SEEDS:
        return ""
    low, high = (column.cut(b) if cut else b for b in (found.low, found.high))
    return f" [{column.text(low)}, {column.text(high)}]"


def _seeds(row: Compared) -> str:
    if row.difference is None:
        return str(row.interval.n if row.interval else 0)
    needed = "" if row.repeats_needed is None else f" ({row.repeats_needed:,})"
    return f"{row.difference.n}{needed}"
