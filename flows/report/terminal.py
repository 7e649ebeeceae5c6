"""How a comparison is shown on the terminal: intervals, differences and what they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flows.analysis.comparison import Compared, before_correction
from flows.analysis.statistics import FEWEST_SEEDS, Difference, Interval
from flows.metrics import BY_KEY, NOT_APPLICABLE, Metric

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"better": "green", "worse": "red"}
LEGEND = (
    "Mean, and difference to {baseline} seed by seed, each with its 95% interval in brackets, that "
    "of a mean cut at 0 where a figure cannot be less; "
    f"intervals and verdicts from {FEWEST_SEEDS} seeds on. p: of the paired t-test by itself, and "
    "corrected (Holm) for the {tests} of these; verdicts go by the corrected one, at the 5% level. "
    "seeds: paired, and in brackets how many would show the difference seen, or the one "
    "configured, with a probability of 80%, at the level of that correction."
)


def print_verdicts(rows: Sequence[Compared], console: Console) -> None:
    """Print one table for each condition, with a line for every strategy and metric."""
    if not any(row.verdict for row in rows):
        return
    for condition in dict.fromkeys(row.condition for row in rows):
        console.print()
        if condition:
            console.print(Text(condition, style="bold underline"))
        console.print(_table([row for row in rows if row.condition == condition]))
    tests = max(row.tests for row in rows)
    console.print(Text(LEGEND.format(baseline=rows[0].baseline, tests=tests), style="dim"))
    if explained := before_correction(rows):
        console.print(Text(explained, style="dim"))


def figure_name(column: Metric) -> str:
    """Return a figure's heading with its unit."""
    return f"{column.label}, {column.shown_unit}" if column.shown_unit else column.label


def signed(column: Metric, value: float) -> str:
    """Return a difference with its sign."""
    text = column.text(value)
    return f"+{text}" if value > 0 else text


def _table(rows: Sequence[Compared]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading, justify in (
        ("figure", "left"),
        ("strategy", "left"),
        ("mean", "right"),
        ("difference", "right"),
        ("p, corrected", "right"),
        ("seeds", "right"),
        ("", "left"),
    ):
        table.add_column(Text(heading), justify=justify, overflow="fold")  # type: ignore[arg-type]
    shown, order = "", list(dict.fromkeys(row.metric for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row.metric)):
        column = BY_KEY[row.metric]
        name = "" if row.metric == shown else figure_name(column)
        shown = row.metric
        figures = (
            _mean(row, column),
            _difference(row, column),
            ", ".join(row.tested or ()),
            _seeds(row),
        )
        said = Text(row.said, style=STYLES.get(row.verdict or "", ""))
        table.add_row(*map(Text, (name, row.strategy, *figures)), said)
    return table


def _mean(row: Compared, column: Metric) -> str:
    found = row.interval
    if found is None:
        return NOT_APPLICABLE
    return column.text(found.mean) + _bounds(column, found, cut=True)


def _difference(row: Compared, column: Metric) -> str:
    found = row.difference
    if found is None:
        return "" if row.verdict is None else NOT_APPLICABLE
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
