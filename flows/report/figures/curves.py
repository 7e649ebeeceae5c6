"""Curves of a whole training, one strategy beside another: mean and band over seeds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.events import EvaluationMissed, Rescaled, ResourceSampled, TrainingStarted
from flows.analysis.learning import evaluations
from flows.analysis.ledger import applied_rows
from flows.analysis.processes import Process, deaths, process_of
from flows.analysis.series import WINDOW_SECONDS, series
from flows.analysis.steps import Steps
from flows.metrics.score import Score
from flows.report.figures.bands import Band, Curve, band, told_of
from flows.report.figures.dataset import Subject, Trial, end, start, titled, whole
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    DOUBLE,
    MUTED,
    REFERENCE,
    SINGLE,
    SMALL,
    Key,
    Look,
    draw_line,
    draw_seed,
    footnote,
    legend_above,
    line_key,
    panel,
    patch_key,
    percent_ticks,
    strategy_keys,
    value_axis,
    value_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]

RATE_SECONDS = 0.5
CHANGES_HEIGHT = 0.3  # inches above the axes: two rows, in which changes are named by turns
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
    of_score
        Whether values are of what models are scored by, as named and written by that.
    highest
        What no value can exceed. None is below 0.
    timed
        Whether x is time: then a trial that was resumed is left out, and the note says so.
    """

    name: str
    title: str
    note: str
    x: str
    y: str
    points: Callable[[Trial], Points]
    of_score: bool = False
    highest: float = inf
    timed: bool = True


def curves(subject: Subject, measure: Measure, condition: str) -> Drawing | None:
    """Draw one measure under one condition; None where no trial has a value."""
    measure, score = _by_name(measure, subject.score), subject.score
    trials = subject.under(condition)
    shown = [trial for trial in trials if whole(trial[0])] if measure.timed else trials
    drawn = [curve for trial in shown if len((curve := _curve(trial, measure)).x)]
    if not drawn:
        return None
    marked = measure.timed and is_rescaled(subject, condition)
    figure, axes = panel(width=DOUBLE if marked else SINGLE)
    names = [name for name in subject.strategies if any(c.strategy == name for c in drawn)]
    by_name = {name: [c for c in drawn if c.strategy == name] for name in names}
    joined = {name: band(by_name[name], 0.0, measure.highest) for name in names}
    for place, name in enumerate(names):
        _draw(axes, subject.looks[name], by_name[name], joined[name], place)
    value_label(axes, measure.y)
    value_axis(axes, _shown(drawn, joined), highest=measure.highest, near=measure.of_score)
    if measure.of_score and score.share:
        percent_ticks(axes)
    axes.set_xlabel(measure.x)
    axes.set_xlim(left=0)
    keys = strategy_keys(names, subject.looks)
    if measure.name == ACCURACY_BY_TIME.name:
        keys += outage_strip(axes, subject, shown)
    if measure.timed:
        keys += change_marks(axes, shown)
    legend_above(figure, keys)
    footnote(figure, told_of([len(each) for each in by_name.values()]))
    return Drawing(
        name=subject.name(measure.name, condition),
        title=titled(measure.title, condition),
        note=_note(subject, measure, condition, len(trials) - len(shown)),
        figure=figure,
        table=_table(measure, drawn, joined),
    )


def _by_name(measure: Measure, score: Score) -> Measure:
    """A measure by the name of what models are scored by, and within its bounds."""
    title, y, note = map(score.said, (measure.title, measure.y, measure.note))
    highest = score.highest if measure.of_score else measure.highest
    return replace(measure, title=title, y=y, note=note, highest=highest)


def _curve(trial: Trial, measure: Measure) -> Curve:
    outcome = trial[1]
    points = measure.points(trial)
    x = np.array([x for x, _ in points], float)
    y = np.array([y for _, y in points], float)
    return Curve(outcome.identity.strategy, outcome.identity.seed, x, y).thinned()


def _draw(axes: Axes, look: Look, each: Sequence[Curve], joined: Band | None, place: int) -> None:
    if len(each) == 1:
        draw_line(axes, each[0].x, each[0].y, look, place)
        return
    for curve in each:
        draw_seed(axes, curve.x, curve.y, look.colour)
    if joined is not None:
        axes.fill_between(
            joined.x, joined.low, joined.high, color=look.colour, alpha=0.16, linewidth=0
        )
        draw_line(axes, joined.x, joined.mean, look, place)


def _shown(drawn: Sequence[Curve], joined: Mapping[str, Band | None]) -> Iterator[float]:
    """Every value that has to be on the axis."""
    for curve in drawn:
        yield from map(float, curve.y)
    for found in joined.values():
        if found is not None:
            yield from map(float, (*found.low, *found.high))


def outage_strip(axes: Axes, subject: Subject, shown: Sequence[Trial]) -> list[Key]:
    """Draw above the axes when shards were down: a row for each strategy, its trials laid over.

    Returns what the legend says of it.
    """
    names = [
        name
        for name in subject.strategies
        if any(outages(trial) for trial in shown if trial[1].identity.strategy == name)
    ]
    for row, name in enumerate(reversed(names)):
        colour = subject.looks[name].colour
        mine = [trial for trial in shown if trial[1].identity.strategy == name]
        height = 1.03 + 0.045 * row
        for record, outcome in mine:
            for began, until in outages((record, outcome)):
                span = [began - start(record), until - start(record)]
                strip: dict[str, Any] = {
                    "color": colour,
                    "transform": axes.get_xaxis_transform(),
                    "clip_on": False,
                    "alpha": max(0.3, 1 / len(mine)),
                }
                axes.plot(span, [height] * 2, linewidth=2.6, solid_capstyle="butt", **strip)
                # So that an outage of milliseconds can be seen as well.
                axes.plot(span[0], height, "|", markersize=3.4, markeredgewidth=0.8, **strip)
    if not names:
        return []
    key = line_key("above: a shard is down", MUTED)
    key.handle.set(linewidth=2.6)
    return [key]


def outages(trial: Trial) -> list[tuple[float, float]]:
    """Return from when to when shards were not served because of each fault of a trial."""
    record, outcome = trial
    return [
        (fault.began, fault.serving if fault.serving is not None else end(record))
        for fault in outcome.faults
        if fault.shard is not None
    ]


def change_marks(axes: Axes, shown: Sequence[Trial]) -> list[Key]:
    """Mark when other numbers of servers and workers were wanted: the median, and the range.

    Each change is marked once, and says what was wanted. Returns what the legend says of it.
    """
    changes: defaultdict[tuple[int, int | None, int | None], list[float]] = defaultdict(list)
    for record, _ in shown:
        for number, change in enumerate(record.of(Rescaled)):
            changes[number, change.servers, change.workers].append(change.t - start(record))
    for place, ((_, servers, workers), times) in enumerate(changes.items()):
        axes.axvspan(min(times), max(times), facecolor=REFERENCE, alpha=0.3, linewidth=0, zorder=0)
        axes.axvline(median(times), color=MUTED, linewidth=0.6, linestyle=":", zorder=0)
        wanted = ((servers, "server"), (workers, "worker"))
        axes.annotate(
            ", ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in wanted if n is not None),
            (median(times), 1.02 + 0.07 * (place % 2)),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=SMALL,
            color=MUTED,
        )
    if not changes:
        return []
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(figure.get_figheight() + CHANGES_HEIGHT)
    return [patch_key("change wanted, all trials", REFERENCE, 0.5)]


def is_rescaled(subject: Subject, condition: str) -> bool:
    """Whether servers or workers come and go in a trial under a condition."""
    return any(record.of(Rescaled) for record, _ in subject.under(condition))


def _note(subject: Subject, measure: Measure, condition: str, resumed: int) -> str:
    note = measure.note
    if measure.name == ACCURACY_BY_TIME.name and subject.faulty(condition):
        note += (
            " Bars above: from a fault until the shard served again, the trials of a strategy laid "
            "over one another. Lines have a gap there."
        )
    if measure.timed and is_rescaled(subject, condition):
        note += (
            " Dotted: the median over trials of when other numbers of servers or workers were "
            "wanted, and which; shaded: from the first trial to the last."
        )
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


def accuracy_points(trial: Trial, origin: float) -> Points:
    """Return times and values of the score, with a gap where a shard was down.

    There is a gap wherever an evaluation found a shard down, and between any two evaluations with
    an outage between them, so that no line is drawn where nothing can be known.
    """
    record, _ = trial
    scores = [(event.t - origin, event.accuracy) for event in evaluations(record)]
    missed = [event.t - origin for event in record.of(EvaluationMissed)]
    down = [(began - origin, until - origin) for began, until in outages(trial)]
    times = sorted(t for t, _ in scores)
    for began, until in down:
        if bisect_right(times, began) == bisect_left(times, until):
            missed.append((began + until) / 2)
    gaps = [(t, float("nan")) for t in missed]
    return sorted([*scores, *gaps], key=lambda point: point[0])


def _accuracy_by_time(trial: Trial) -> Points:
    return [(t, value) for t, value in accuracy_points(trial, start(trial[0])) if t >= 0]


def _accuracy_by_gradients(trial: Trial) -> Points:
    record, _ = trial
    steps = Steps(record)
    return [(steps.at(event.t), event.accuracy) for event in evaluations(record)]


def _loss_by_gradients(trial: Trial) -> Points:
    record, _ = trial
    steps = Steps(record)
    return [(steps.at(event.t), event.loss) for event in evaluations(record)]


def _gradients(trial: Trial) -> Points:
    record, _ = trial
    started = record.of(TrainingStarted)
    shards = started[0].shards if started else 1
    origin = start(record)
    times = sorted(row.t - origin for row in applied_rows(record) if row.head)
    return [(0.0, 0.0), *((t, number / shards) for number, t in enumerate(times, 1))]


def _rates(trial: Trial) -> Points:
    times, counts = np.array(_gradients(trial)).T
    seconds = max(RATE_SECONDS, times[-1] / MOST_WINDOWS)
    edges = np.arange(0.0, times[-1], seconds)
    passed = np.interp(edges, times, counts)
    rates = np.diff(passed) / seconds
    return list(zip(map(float, edges[1:]), map(float, rates), strict=True))


def _staleness(trial: Trial) -> Points:
    record, _ = trial
    origin = start(record)
    points: Points = []
    for point in series(record):
        if point.name == "staleness/p99" and point.t >= origin:
            t = point.t - origin
            if points and t - points[-1][0] > 2 * WINDOW_SECONDS:
                points.append((t, float("nan")))  # nothing was applied meanwhile
            points.append((t, point.value))
    return points


def _totals(value: Callable[[ResourceSampled], float], trial: Trial, gone: bool = False) -> Points:
    """Sum samples up over all processes; `gone`: those that have ended count no more."""
    record, _ = trial
    origin, points = start(record), list[tuple[float, float]]()
    died = deaths(record) if gone else {}
    latest: dict[Process, float] = {}
    samples = record.of(ResourceSampled)
    for sample in sorted(samples, key=lambda sample: sample.t):
        latest[process_of(sample)] = value(sample)
        for process in [each for each in latest if died.get(each, sample.t) < sample.t]:
            del latest[process]
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
    of_score=True,
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
    "Updates applied",
    "By the shards, mean over shards, ones that were lost later included. What was "
    "buffered in an outage is counted when it is applied.",
    SECONDS,
    "updates applied, mean over shards",
    _gradients,
)
RATE_BY_TIME = Measure(
    "gradients-per-second-time",
    "Updates per second",
    "Applied by a shard, mean over shards, in windows of half a second.",
    SECONDS,
    "updates per second and shard",
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
