"""Owns the figures of an experiment: one panel each, drawn from records, one colour per strategy.

Figures are drawn in the colours of a light page. `svg` turns these into CSS variables, so that a
page can redefine them for a dark one. Colours come from Okabe and Ito's palette, which readers
with colour-blindness can tell apart; every strategy has a marker of its own besides.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dps.core.recovery import PRESETS
from dps.events import EvaluationMissed
from flows.learning import evaluations
from flows.outcome import Outcome
from flows.record import Record
from flows.summary import Group, conditions, strategies, summarize
from flows.timeline import FaultTimes, training_span
from flows.usage import LINKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Trial = tuple[Record, Outcome]

INK, MUTED, GRID, REFERENCE = "#1c2127", "#5d6773", "#e3e7ec", "#a9b2bd"
STRATEGY_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#b4558d", "#c78a00", "#3a94cf", "#7a6a53")
STRATEGY_MARKERS = ("X", "s", "o", "D", "^", "v", "P")
PART_COLOURS = ("#2f3e50", "#cfd6de", "#7d92a8", "#d8a545")
CSS_COLOURS = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    REFERENCE: "reference",
    **{colour: f"strategy-{i}" for i, colour in enumerate(STRATEGY_COLOURS)},
    **{colour: f"part-{i}" for i, colour in enumerate(PART_COLOURS)},
}

WIDTH, HEIGHT = 5.4, 3.2  # inches; narrow enough for text of 10 points to be read on a telephone
SERVING_ROLES = ("server", "replica", "spare", "store")
_STALENESS_TICKS = (0, 2, 4, 6, 8, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
RECOVERY_PARTS = ("detect", "wait for a node", "restore", "first update")

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one strategy looks in every figure."""

    colour: str
    marker: str


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a look per strategy: presets have fixed ones, others take what is left in order."""
    order = list(dict.fromkeys([*PRESETS, *names]))
    return {
        name: Look(
            STRATEGY_COLOURS[order.index(name) % len(STRATEGY_COLOURS)],
            STRATEGY_MARKERS[order.index(name) % len(STRATEGY_MARKERS)],
        )
        for name in names
    }


class Gallery:
    """Draws the figures of one experiment; invalid and failed trials are left out of all."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        outcomes = [outcome for _, outcome in trials]
        self.trials = [trial for trial in trials if trial[1].valid]
        self.groups = [group for group in summarize(outcomes) if group.trials]
        self.strategies = strategies(outcomes)
        self.conditions = conditions([outcome for _, outcome in self.trials])
        self.looks = looks(self.strategies)

    def for_tracking(self) -> dict[str, Figure]:
        """Return the figures that stand for the whole experiment, each with a legend, by name."""
        figures = {
            f"accuracy_{condition or 'all'}".replace(" ", "_"): self.accuracy(condition, True)
            for condition in self.conditions
        }
        if any(group.faulty for group in self.groups):
            figures["recovery_time"] = self.recovery_time()
        return {**figures, "staleness": self.staleness()}

    # -- accuracy ------------------------------------------------------------------------------

    def accuracy(self, condition: str, legend: bool = False) -> Figure:
        """Draw accuracy against time under one condition, a line per trial.

        Bars at the foot, one per trial, show when the shard was down.
        """
        figure, axes = _panel()
        shown = self._trials(condition)
        for record, outcome in shown:
            look = self.looks[outcome.identity.strategy]
            times, values = _accuracy_points(record, _start(record))
            axes.plot(times, values, color=look.colour, linewidth=1.2, alpha=0.9)
            axes.plot(times[-1:], values[-1:], look.marker, color=look.colour, markersize=5)
        self._outage_bars(axes, shown)
        _percent_axis(axes)
        axes.set_xlabel("seconds since training started")
        axes.set_xlim(left=0)
        if legend:
            names = [n for n in self.strategies if n in {o.identity.strategy for _, o in shown}]
            handles = [_line(self.looks[name].colour, self.looks[name].marker) for name in names]
            _legend_above(axes, handles, names)
        return figure

    def _outage_bars(self, axes: Axes, shown: Sequence[Trial]) -> None:
        hit = [trial for trial in shown if trial[1].faults]
        hit.sort(key=lambda trial: self.strategies.index(trial[1].identity.strategy), reverse=True)
        step = min(0.024, 0.3 / max(1, len(hit)))
        for row, (record, outcome) in enumerate(hit):
            colour = self.looks[outcome.identity.strategy].colour
            for fault in outcome.faults:
                end = fault.serving if fault.serving is not None else _end(record)
                span = [fault.began - _start(record), end - _start(record)]
                axes.plot(
                    span,
                    [0.03 + step * row] * 2,
                    color=colour,
                    linewidth=120 * step,
                    solid_capstyle="butt",
                )
                # So that an outage of milliseconds can be seen as well.
                axes.plot(span[0], 0.03 + step * row, "|", color=colour, markersize=170 * step)

    def through_fault(self, strategy: str, condition: str, reference: str | None) -> Figure:
        """Draw one strategy's accuracy around its first fault, on the time since the fault.

        The strategy's trials under the condition `reference` are drawn in grey, placed so that
        equal times since the start of training lie above one another.
        """
        figure, axes = _panel(height=2.6)
        look = self.looks[strategy]
        hit = [t for t in self._trials(condition, strategy) if t[1].faults]
        struck = _mean([outcome.faults[0].began - _start(record) for record, outcome in hit])
        for record, _ in self._trials(reference, strategy):
            times, values = _accuracy_points(record, _start(record) + struck)
            axes.plot(times, values, color=REFERENCE, linewidth=1.1)
        for record, outcome in hit:
            origin = outcome.faults[0].began
            times, values = _accuracy_points(record, origin)
            axes.plot(times, values, ".-", color=look.colour, linewidth=1.2, markersize=4)
            for fault in outcome.faults:
                _mark_fault(axes, fault, look, origin)
        first, last = self._around_fault(condition)
        _percent_axis(axes, self._lowest_accuracy(condition, first, last))
        axes.set_xlabel("seconds since the fault")
        axes.set_xlim(first, last)
        return figure

    def _around_fault(self, condition: str) -> tuple[float, float]:
        """Return the span, in seconds since the fault, that the panels of all strategies share."""
        hit = [(r, o) for r, o in self._trials(condition) if o.faults]
        before = max(o.faults[0].began - _start(r) for r, o in hit)
        after = max(_end(r) - o.faults[0].began for r, o in hit)
        marks = [m for _, o in hit for m in (o.faults[0].rto_seconds, o.accuracy.regain_seconds)]
        longest = max((mark for mark in marks if mark is not None), default=after)
        return -min(before, 0.25 * longest + 0.75), min(after, 1.2 * longest + 0.5)

    def _lowest_accuracy(self, condition: str, first: float, last: float) -> float:
        """Return where the accuracy axis starts, in steps of 10%, for all panels alike."""
        seen = [
            score.accuracy
            for record, outcome in self._trials(condition)
            if outcome.faults
            for score in evaluations(record)
            if first <= score.t - outcome.faults[0].began <= last
        ]
        return max(0.0, math.floor(10 * min(seen, default=0.0) - 0.3) / 10)

    def _trials(self, condition: str | None, strategy: str | None = None) -> list[Trial]:
        return [
            (record, outcome)
            for record, outcome in self.trials
            if outcome.identity.condition == condition
            and strategy in (None, outcome.identity.strategy)
        ]

    # -- bars ----------------------------------------------------------------------------------

    def recovery_time(self) -> Figure:
        """Draw the parts of the recovery time, stacked: means over the trials with a fault."""

        def parts(group: Group) -> list[float]:
            detect, wait, restore, first = (
                _group_mean(group, f"{part}_seconds")
                for part in ("detect", "wait_capacity", "restore", "first_applied")
            )
            return [detect, wait, max(0.0, restore - wait), max(0.0, first)]

        groups = [group for group in self.groups if group.spread("rto_seconds")]
        return self._stacked_bars(groups, parts, RECOVERY_PARTS, "seconds since the fault", 2)

    def serving_cpu(self, condition: str) -> Figure:
        """Draw processor time of the nodes that serve, stacked by role: means over trials."""

        def parts(group: Group) -> list[float]:
            return [_group_mean(group, f"cpu_seconds_{role}") for role in SERVING_ROLES]

        groups = [group for group in self.groups if group.condition == condition]
        return self._stacked_bars(groups, parts, SERVING_ROLES, "CPU seconds", 2)

    def bytes_sent(self, condition: str) -> Figure:
        """Draw bytes sent, stacked by kind of link: means over trials."""

        def parts(group: Group) -> list[float]:
            return [_group_mean(group, f"sent_bytes_link_{link}") / 1e6 for link in LINKS]

        groups = [group for group in self.groups if group.condition == condition]
        return self._stacked_bars(groups, parts, LINKS, "MB sent", 1)

    def _stacked_bars(
        self,
        groups: Sequence[Group],
        parts_of: Callable[[Group], Sequence[float]],
        names: Sequence[str],
        label: str,
        digits: int,
    ) -> Figure:
        figure, axes = _panel(height=0.95 + 0.36 * max(2, len(groups)))
        for place, group in enumerate(groups):
            left = 0.0
            for part, colour in zip(parts_of(group), PART_COLOURS, strict=True):
                axes.barh(place, part, left=left, color=colour, height=0.6, linewidth=0)
                left += part
            axes.annotate(
                f"{left:.{digits}f}",
                (left, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=9,
            )
        self._group_axis(axes, groups, [float(place) for place in range(len(groups))])
        axes.set_xlabel(label)
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
        _legend_above(axes, [_swatch(colour) for colour in PART_COLOURS], names)
        return figure

    def staleness(self) -> Figure:
        """Draw median, p99 and maximum of staleness per strategy and condition."""
        groups = [
            group
            for strategy in self.strategies
            for group in self.groups
            if group.strategy == strategy and group.spread("staleness_max")
        ]
        figure, axes = _panel(height=0.95 + 0.25 * max(4, len(groups)))
        for place, group in enumerate(groups):
            colour = self.looks[group.strategy].colour
            median, p99, most = (
                _group_mean(group, f"staleness_{name}") for name in ("median", "p99", "max")
            )
            axes.plot([median, most], [place, place], color=colour, linewidth=1.2)
            axes.plot(median, place, "|", color=colour, markersize=9, markeredgewidth=2)
            axes.plot(p99, place, "o", color=colour, markersize=5)
            axes.plot(most, place, "o", color=colour, markersize=5, fillstyle="none")
        self._group_axis(axes, groups, [float(place) for place in range(len(groups))])
        axes.set_xscale("symlog", linthresh=10)
        most = max((_group_mean(group, "staleness_max") for group in groups), default=0.0)
        axes.set_xlim(0, max(5.0, 1.15 * most))
        axes.set_xticks(
            [tick for tick in _STALENESS_TICKS if tick <= max(5.0, 1.15 * most)], minor=False
        )
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("staleness in versions")
        marks = [_line(MUTED, "|", False), _line(MUTED, "o", False), _line(MUTED, "o", False, True)]
        _legend_above(axes, marks, ["median", "p99", "maximum"])
        return figure

    def _group_axis(self, axes: Axes, groups: Sequence[Group], places: Sequence[float]) -> None:
        several = len({group.condition for group in groups}) > 1
        names = [
            f"{group.strategy}, {group.condition}" if several else group.strategy
            for group in groups
        ]
        axes.set_yticks(places, names)
        for tick, group in zip(axes.get_yticklabels(), groups, strict=True):
            tick.set_color(self.looks[group.strategy].colour)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")


def trial_figure(record: Record, outcome: Outcome) -> Figure:
    """Draw one trial by itself: accuracy over time, with its faults."""
    figure, axes = _panel()
    strategy = outcome.identity.strategy
    look = looks([strategy])[strategy]
    times, values = _accuracy_points(record, _start(record))
    axes.plot(times, values, color=look.colour, linewidth=1.3, label="test accuracy")
    for fault in outcome.faults:
        _mark_fault(axes, fault, look, _start(record))
    _percent_axis(axes)
    axes.set_title(outcome.identity.trial or "trial", loc="left", fontsize=10)
    axes.set_xlabel("seconds since training started")
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(named.values(), named.keys(), loc="lower right", frameon=False, fontsize=9)
    return figure


def svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG for use inside a page; `name` keeps its ids apart from others'.

    Colours become CSS variables with the light page's colour as the default, and text takes the
    page's font.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
    for colour, variable in CSS_COLOURS.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    return text


# -- parts -------------------------------------------------------------------------------------


def _panel(height: float = HEIGHT) -> tuple[Figure, Axes]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height))
        return figure, figure.add_subplot()


def _accuracy_points(record: Record, origin: float) -> tuple[list[float], list[float]]:
    """Return times and accuracies, with a gap (NaN) where an evaluation found a shard down."""
    points = [(event.t - origin, event.accuracy) for event in evaluations(record)]
    gaps = [(event.t - origin, float("nan")) for event in record.of(EvaluationMissed)]
    ordered = sorted([*points, *gaps], key=lambda point: point[0])
    return [t for t, _ in ordered], [value for _, value in ordered]


def _mark_fault(axes: Axes, fault: FaultTimes, look: Look, origin: float) -> None:
    """Shade the outage; mark fault (solid), detection (dotted) and return of service (dashed)."""
    _shade_outage(axes, fault, look, origin)
    axes.axvline(fault.began - origin, color=INK, linewidth=1.1, label="fault")
    for moment, name, colour, dashes in (
        (fault.detected, "detected", INK, (0, (1, 1.5))),
        (fault.serving, "serving again", look.colour, (0, (4, 2))),
    ):
        if moment is not None:
            at = moment - origin
            axes.axvline(at, color=colour, linewidth=1.2, linestyle=dashes, label=name)


def _shade_outage(axes: Axes, fault: FaultTimes, look: Look, origin: float) -> None:
    if fault.serving is not None:
        start, end = fault.began - origin, fault.serving - origin
        axes.axvspan(start, end, facecolor=look.colour, alpha=0.10, linewidth=0)


def _percent_axis(axes: Axes, lowest: float = 0.0) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(lowest, 1.0 + 0.02 * (1.0 - lowest))
    axes.set_ylabel("test accuracy")


def _legend_above(axes: Axes, handles: Sequence[Any], names: Sequence[str]) -> None:
    axes.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(names),
        handlelength=1,
        handleheight=1,
        handletextpad=0.4,
        columnspacing=1.2,
        borderaxespad=0.2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def _line(colour: str, marker: str, joined: bool = True, hollow: bool = False) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.2,
        linestyle="-" if joined else "none",
        fillstyle="none" if hollow else "full",
    )


def _swatch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, linewidth=0)


def _group_mean(group: Group, key: str) -> float:
    spread = group.spread(key)
    return spread.mean if spread else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _start(record: Record) -> float:
    span = training_span(record)
    return span[0] if span else record.events[0].t


def _end(record: Record) -> float:
    span = training_span(record)
    return span[1] if span else record.events[-1].t
