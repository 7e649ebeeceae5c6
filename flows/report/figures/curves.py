"""Curves of a whole training, one strategy beside another: mean and band over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.events import EvaluationMissed, Killed, Rescaled, ResourceSampled, TrainingStarted
from flows.analysis.learning import evaluations
from flows.analysis.ledger import applied_rows
from flows.analysis.series import WINDOW_SECONDS, series
from flows.analysis.steps import Steps
from flows.records.record import Record
from flows.report.figures.bands import Band, Curve, band
from flows.report.figures.dataset import Subject, Trial, end, start, titled, whole
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import MUTED, legend_above, panel, percent_axis, strategy_keys

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]

RATE_SECONDS = 0.5
MOST_WINDOWS = 100_000  # of half a second: a training of 14 hours; of a longer one they are longer
SECONDS = "seconds since training started"
GRADIENTS = "gradients pushed"


@dataclass(frozen=True)
class Measure:
    """Something that changes in the course of a training.

    Attributes
    ----------
    name, title, note
        Of its figures.
    x, y
        What the axes show.
    points
        Returns a trial's values, in order of x; NaN where there is a gap.
    percent
        Whether the values are shares.
    timed
        Whether x is time: then a trial that was resumed is left out, and the note says so.
    """

    name: str
    title: str
    note: str
    x: str
    y: str
    points: Callable[[Record], Points]
    percent: bool = False
    timed: bool = True


def curves(subject: Subject, measure: Measure, condition: str) -> Drawing | None:
    """Draw one measure under one condition; None where no trial has a value."""
    trials = subject.under(condition)
    shown = [trial for trial in trials if whole(trial[0])] if measure.timed else trials
    drawn = [curve for trial in shown if len((curve := _curve(trial, measure)).x)]
    if not drawn:
        return None
    figure, axes = panel()
    names = [name for name in subject.strategies if any(c.strategy == name for c in drawn)]
    joined = {name: band([c for c in drawn if c.strategy == name]) for name in names}
    for name in names:
        _draw(axes, subject, [c for c in drawn if c.strategy == name], joined[name])
    if measure.percent:
        percent_axis(axes, measure.y)
    else:
        axes.set_ylabel(measure.y)
        axes.set_ylim(bottom=0)
    if measure.name == ACCURACY_BY_TIME.name:
        outage_bars(axes, subject, shown)
    if measure.timed:
        change_marks(axes, shown)
    axes.set_xlabel(measure.x)
    axes.set_xlim(left=0)
    legend_above(axes, strategy_keys(names, subject.looks))
    return Drawing(
        name=subject.name(measure.name, condition),
        title=titled(measure.title, condition),
        note=_note(subject, measure, condition, len(trials) - len(shown)),
        figure=figure,
        table=_table(measure, drawn, joined),
    )


def _curve(trial: Trial, measure: Measure) -> Curve:
    record, outcome = trial
    points = measure.points(record)
    x = np.array([x for x, _ in points], float)
    y = np.array([y for _, y in points], float)
    return Curve(outcome.identity.strategy, outcome.identity.seed, x, y).thinned()


def _draw(axes: Axes, subject: Subject, each: Sequence[Curve], joined: Band | None) -> None:
    look = subject.looks[each[0].strategy]
    alone = len(each) == 1
    for curve in each:
        width, alpha = (1.6, 1.0) if alone else (0.7, 0.55)
        axes.plot(
            curve.x, curve.y, color=look.colour, linewidth=width, alpha=alpha, linestyle=look.dashes
        )
        axes.plot(curve.x[-1:], curve.y[-1:], look.marker, color=look.colour, markersize=4.5)
    if joined is not None and not alone:
        axes.fill_between(
            joined.x, joined.low, joined.high, color=look.colour, alpha=0.16, linewidth=0
        )
        axes.plot(joined.x, joined.mean, color=look.colour, linewidth=1.8, linestyle=look.dashes)


def outage_bars(axes: Axes, subject: Subject, shown: Sequence[Trial]) -> None:
    """Draw a bar at the foot for each trial with a fault, for as long as the shard was down."""
    hit = [trial for trial in shown if trial[1].faults]
    hit.sort(key=lambda trial: subject.strategies.index(trial[1].identity.strategy), reverse=True)
    step = min(0.024, 0.3 / max(1, len(hit)))
    for row, (record, outcome) in enumerate(hit):
        colour = subject.looks[outcome.identity.strategy].colour
        for fault in outcome.faults:
            if fault.shard is None:
                continue
            until = fault.serving if fault.serving is not None else end(record)
            span = [fault.began - start(record), until - start(record)]
            height = [0.03 + step * row] * 2
            axes.plot(span, height, color=colour, linewidth=120 * step, solid_capstyle="butt")
            # So that an outage of milliseconds can be seen as well.
            axes.plot(span[0], height[0], "|", color=colour, markersize=170 * step)


def change_marks(axes: Axes, shown: Sequence[Trial]) -> None:
    """Mark when other numbers of servers and workers were wanted; say which, of one trial."""
    changing = [record for record, _ in shown if record.of(Rescaled)]
    for number, record in enumerate(changing):
        for change in record.of(Rescaled):
            at = change.t - start(record)
            axes.axvline(at, color=MUTED, linewidth=0.6, linestyle=":")
            wanted = ((change.servers, "server"), (change.workers, "worker"))
            told = ", ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in wanted if n is not None)
            if number == 0:
                axes.annotate(
                    told,
                    (at, 0.02),
                    xycoords=("data", "axes fraction"),
                    xytext=(2, 0),
                    textcoords="offset points",
                    rotation=90,
                    fontsize=8,
                    color=MUTED,
                )


def is_rescaled(subject: Subject, condition: str) -> bool:
    """Whether servers or workers come and go in a trial under a condition."""
    return any(record.of(Rescaled) for record, _ in subject.under(condition))


def _note(subject: Subject, measure: Measure, condition: str, resumed: int) -> str:
    note = measure.note
    if measure.name == ACCURACY_BY_TIME.name and subject.faulty(condition):
        note += " Bars at the foot, one per trial: from a fault until the shard served again."
    if measure.timed and is_rescaled(subject, condition):
        note += " Dotted: from then on other numbers of servers or workers were wanted."
    if resumed:
        verb = "was" if resumed == 1 else "were"
        note += (
            f" {resumed} of the trials {verb} resumed after an interruption, so that there is no "
            "whole course of time to show."
        )
    return note.strip()


def _table(measure: Measure, drawn: Sequence[Curve], joined: dict[str, Band | None]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name, found in joined.items():
        if found is not None:
            columns = (found.x, found.mean, found.low, found.high)
            rows += [(name, "mean", *map(float, row)) for row in zip(*columns, strict=True)]
        for curve in drawn:
            if curve.strategy == name:
                rows += [
                    (name, curve.seed, float(x), float(y), None, None)
                    for x, y in zip(curve.x, curve.y, strict=True)
                ]
    return Table(("strategy", "seed", measure.x, measure.y, "low", "high"), tuple(rows))


# -- what is measured --------------------------------------------------------------------------


def accuracy_points(record: Record, origin: float) -> Points:
    """Return times and accuracies, with a gap where an evaluation found a shard down."""
    points = [(event.t - origin, event.accuracy) for event in evaluations(record)]
    gaps = [(event.t - origin, float("nan")) for event in record.of(EvaluationMissed)]
    return sorted([*points, *gaps], key=lambda point: point[0])


def _accuracy_by_time(record: Record) -> Points:
    return [(t, value) for t, value in accuracy_points(record, start(record)) if t >= 0]


def _accuracy_by_gradients(record: Record) -> Points:
    steps = Steps(record)
    return [(steps.at(event.t), event.accuracy) for event in evaluations(record)]


def _loss_by_gradients(record: Record) -> Points:
    steps = Steps(record)
    return [(steps.at(event.t), event.loss) for event in evaluations(record)]


def _gradients(record: Record) -> Points:
    started = record.of(TrainingStarted)
    shards = started[0].shards if started else 1
    origin = start(record)
    times = sorted(row.t - origin for row in applied_rows(record) if row.head)
    return [(0.0, 0.0), *((t, number / shards) for number, t in enumerate(times, 1))]


def _rates(record: Record) -> Points:
    times, counts = np.array(_gradients(record)).T
    seconds = max(RATE_SECONDS, times[-1] / MOST_WINDOWS)
    edges = np.arange(0.0, times[-1], seconds)
    passed = np.interp(edges, times, counts)
    rates = np.diff(passed) / seconds
    return list(zip(map(float, edges[1:]), map(float, rates), strict=True))


def _staleness(record: Record) -> Points:
    origin = start(record)
    points: Points = []
    for point in series(record):
        if point.name == "staleness/p99" and point.t >= origin:
            t = point.t - origin
            if points and t - points[-1][0] > 2 * WINDOW_SECONDS:
                points.append((t, float("nan")))  # nothing was applied meanwhile
            points.append((t, point.value))
    return points


def _totals(
    value: Callable[[ResourceSampled], float], record: Record, gone: bool = False
) -> Points:
    """Sum samples up over all processes; `gone`: killed ones count no more."""
    origin, points = start(record), list[tuple[float, float]]()
    killed = {event.pid: event.t for event in record.of(Killed)} if gone else {}
    latest: defaultdict[tuple[str, int], float] = defaultdict(float)
    samples = record.of(ResourceSampled)
    for sample in sorted(samples, key=lambda sample: sample.t):
        latest[sample.node, sample.pid] = value(sample)
        for place in [place for place in latest if killed.get(place[1], sample.t) < sample.t]:
            del latest[place]
        if sample.t >= origin:
            points.append((sample.t - origin, sum(latest.values())))
    return points


ACCURACY_BY_TIME = Measure(
    "accuracy-time", "Accuracy over time", "", SECONDS, "test accuracy", _accuracy_by_time, True
)
ACCURACY_BY_GRADIENTS = Measure(
    "accuracy-gradients",
    "Accuracy against gradients",
    "Counted when a worker knows them to be safe, lost ones included: this leaves out how fast "
    "they came.",
    GRADIENTS,
    "test accuracy",
    _accuracy_by_gradients,
    percent=True,
    timed=False,
)
LOSS_BY_GRADIENTS = Measure(
    "loss-gradients",
    "Loss against gradients",
    "Loss on the test set.",
    GRADIENTS,
    "test loss",
    _loss_by_gradients,
    timed=False,
)
GRADIENTS_BY_TIME = Measure(
    "gradients-time",
    "Gradients processed",
    "Applied by the shards, mean over shards, ones that were lost later included. What was "
    "buffered in an outage is counted when it is applied.",
    SECONDS,
    "gradients applied",
    _gradients,
)
RATE_BY_TIME = Measure(
    "gradients-per-second-time",
    "Gradients per second",
    "Applied by the shards, mean over shards, in windows of half a second.",
    SECONDS,
    "gradients per second",
    _rates,
)
STALENESS_BY_TIME = Measure(
    "staleness-time",
    "Staleness over time",
    "99th percentile in windows of half a second.",
    SECONDS,
    "staleness in versions, p99",
    _staleness,
)
CPU_BY_TIME = Measure(
    "cpu-time",
    "Processor time",
    "Of all processes together, from their start on.",
    SECONDS,
    "CPU seconds",
    partial(_totals, lambda sample: sample.cpu_seconds),
)
MEMORY_BY_TIME = Measure(
    "memory-time",
    "Memory",
    "Largest resident set so far of each living process, summed up.",
    SECONDS,
    "MB",
    partial(_totals, lambda sample: sample.peak_bytes / 1e6, gone=True),
)
BYTES_BY_TIME = Measure(
    "bytes-time",
    "Bytes sent",
    "Messages of dps, all processes together.",
    SECONDS,
    "MB sent",
    partial(_totals, lambda sample: sum(sample.sent.values()) / 1e6),
)
