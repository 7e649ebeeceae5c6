"""Owns the figure of one trial by itself: accuracy over time, with its faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.analysis.outcome import Outcome
from flows.records.record import Record
from flows.report.figures.curves import SECONDS, accuracy_points
from flows.report.figures.dataset import start
from flows.report.figures.recovery import fault_keys, mark_fault
from flows.report.figures.style import legend_above, line_key, looks, panel, percent_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def trial_figure(record: Record, outcome: Outcome) -> Figure:
    """Draw one trial."""
    figure, axes = panel()
    strategy = outcome.identity.strategy
    look = looks([strategy])[strategy]
    points = accuracy_points(record, start(record))
    axes.plot([t for t, _ in points], [value for _, value in points], color=look.colour)
    for fault in outcome.faults:
        mark_fault(axes, fault, look, start(record))
    percent_axis(axes, "test accuracy")
    axes.set_xlabel(SECONDS)
    keys = [line_key("accuracy", look.colour), *(fault_keys(look) if outcome.faults else [])]
    legend_above(axes, keys)
    return figure
