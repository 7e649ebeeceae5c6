"""The paper's three kinds of figures, drawn from records, and what was published beside them.

Accuracy against time for one and for two kills, means over seeds with upright lines at kill and
recovery; CPU, memory and gradients processed against time. The published curves come from a CSV
that the user points to; without it the published numbers are drawn.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.errors import ConfigurationError
from dps.events import ResourceSampled
from flows.analysis.faults import fault_times
from flows.analysis.finished import Finished
from flows.analysis.processes import Process, process_of
from flows.config.limits import MOST_CURVE_BYTES
from flows.files import read_bytes
from flows.replication.ttf.measures import delivered, strategy_of
from flows.report.figures import bands, style
from flows.report.figures.curves import accuracy_points
from flows.report.figures.dataset import end, start

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED_LABELS = {
    "SYNC_CHECKPOINTING": "sync checkpoint",
    "ASYNC_CHECKPOINTING": "async checkpoint",
    "SYNC_CHAIN_REPLICATION": "sync chain",
    "ASYNC_CHAIN_REPLICATION": "async chain",
    "ASYNC_RELAXED_CONSISTENCY": "stateless",
}
# The recording whose protocol the paper describes.
RECORDING = "kill30_recover20"
COLUMNS = ("recording", "configuration", "kills", "seconds_since_first_evaluation", "accuracy")
MEGABYTE = 1e6
_MOMENTS: Mapping[str, Mapping[str, Any]] = {
    "kill": {"linestyle": "-"},
    "recovery": {"linestyle": (0, (4, 2))},
}
ASYNC = (0, (1.2, 1))  # dashes

Curve = tuple[list[float], list[float]]
Shown = tuple[Finished, str]  # with its label


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of accuracy against time: curves by label, and moments for upright lines.

    With `ticks` the horizontal axis is not time, but has these at 0, 1, …
    """

    title: str
    curves: Sequence[tuple[str, Curve]]
    moments: Sequence[tuple[str, float]] = ()
    ticks: Sequence[str] = ()


# -- the published curves ----------------------------------------------------------------------


def read_published(path: Path) -> dict[tuple[str, int], Curve]:
    """Read the published accuracy recordings: curves by configuration and number of kills.

    Parameters
    ----------
    path
        A CSV with the columns recording, configuration, kills, seconds_since_first_evaluation and
        accuracy; others are not used. Of the recordings, "kill30_recover20" is taken.

    Raises
    ------
    ConfigurationError
        There is no such file, a column is missing, a row cannot be read, or none is of that
        recording.
    """
    curves: defaultdict[tuple[str, int], Curve] = defaultdict(lambda: ([], []))
    try:
        text = read_bytes(path, MOST_CURVE_BYTES).decode("utf-8")
        with io.StringIO(text, newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise ConfigurationError(
                    f"{path}: no column {missing[0]!r}; expected {', '.join(COLUMNS)}"
                )
            for number, row in enumerate(rows, 2):
                if row["recording"] == RECORDING:
                    _take(curves, row, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path}: the published curves cannot be read: {error}") from error
    if not curves:
        raise ConfigurationError(
            f"{path}: no row of the recording {RECORDING!r}, the one that is drawn; expected its "
            "name in the column 'recording'"
        )
    return dict(curves)


def _take(curves: dict[tuple[str, int], Curve], row: Mapping[str, str], place: str) -> None:
    if row["configuration"] not in PUBLISHED_LABELS:
        raise ConfigurationError(
            f"{place}: configuration {row['configuration']!r}; expected one of "
            f"{', '.join(PUBLISHED_LABELS)}"
        )
    label = PUBLISHED_LABELS[row["configuration"]]
    try:
        seconds, accuracy = float(row[COLUMNS[3]]), float(row["accuracy"])
        times, values = curves[label, int(row["kills"])]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{place}: expected numbers: {error}") from error
    times.append(seconds)
    values.append(accuracy)


def published_panel(curves: Mapping[tuple[str, int], Curve], kills: int) -> Panel:
    """Return the published curves for so many kills; lines stand where the protocol kills first."""
    chosen = [(label, curve) for (label, k), curve in curves.items() if k == kills]
    return Panel("published", chosen, (("kill", 30.0), ("recovery", 50.0)))


def recorded_panel(recorded: Mapping[tuple[str, int], tuple[str, str]], kills: int) -> Panel | None:
    """Return what the paper's authors recorded for so many kills, where there are no curves.

    Parameters
    ----------
    recorded
        By configuration and number of kills: accuracy before and after each kill, as in
        ".370→.108; .445→.475", and at the end.
    """
    curves: list[tuple[str, Curve]] = []
    for (label, k), (changes, last) in recorded.items():
        if k == kills:
            pairs = [pair.split("→") for pair in changes.split("; ")]
            values = [*(float(value) for pair in pairs for value in pair), float(last)]
            curves.append((label, (list(map(float, range(len(values)))), values)))
    if not curves:
        return None
    ticks = [f"{when} kill {n + 1}" for n in range(kills) for when in ("before", "after")]
    return Panel("published", curves, ticks=(*ticks, "165–175 s"))


# -- ours --------------------------------------------------------------------------------------


def accuracy_panel(title: str, shown: Iterable[Shown]) -> Panel:
    """Return accuracy against seconds since the training started, a curve for each trial.

    Curves have a gap where a shard was down. The moments are the medians over the trials of each
    kill, and of each recovery.
    """
    curves, moments = [], defaultdict[tuple[int, str], list[float]](list)
    for done, label in shown:
        began = start(done.record)
        points = accuracy_points((done.record, done.outcome), began)
        curves.append((label, ([x for x, _ in points], [y for _, y in points])))
        for number, fault in enumerate(fault_times(done.record)):
            moments[number, "kill"].append(fault.began - began)
            if fault.serving is not None:
                moments[number, "recovery"].append(fault.serving - began)
    medians = [(what, median(values)) for (_, what), values in moments.items()]
    return Panel(title, curves, medians)


def accuracy_figure(panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side: thin each trial, thick the mean of each label with its band."""
    labels = sorted({label for panel in panels for label, _ in panel.curves})
    figure, (axes,) = style.panels(1, len(panels), style.HEIGHT + 0.3, style.DOUBLE, sharey=True)
    for panel, place in zip(panels, axes, strict=True):
        for what, moment in panel.moments:
            place.axvline(moment, color=style.MUTED, linewidth=0.8, zorder=0, **_MOMENTS[what])
        for label in dict.fromkeys(label for label, _ in panel.curves):
            found = [curve for name, curve in panel.curves if name == label]
            _mean(place, label, found, labels.index(label))
        place.set_title(panel.title, fontsize=style.TYPE)
        if panel.ticks:
            place.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=90)
        else:
            place.set_xlabel("seconds")
    style.value_axis(axes[0], [0.0, 1.0], highest=1.0)
    style.percent_ticks(axes[0])
    axes[0].set_ylabel("test accuracy")
    keys = [style.line_key(label, *_look(label)) for label in labels]
    seen = {what for panel in panels for what, _ in panel.moments}
    keys += [
        style.line_key(f"{what}, median", style.MUTED, "", dashes["linestyle"])
        for what, dashes in _MOMENTS.items()
        if what in seen
    ]
    style.legend_above(figure, keys)
    style.footnote(figure, _told(panels))
    return figure


def _told(panels: Sequence[Panel]) -> str:
    """Say of each panel how many trials there are of each label, and what bands are."""
    counts = [
        sorted({len([c for name, c in panel.curves if name == label]) for label, _ in panel.curves})
        for panel in panels
    ]
    said = "; ".join(
        f"{panel.title}: {style.count_told(each, 'trial')}"
        for panel, each in zip(panels, counts, strict=True)
    )
    return f"{said}. Line: mean, band: 95% t interval of the mean (of two: range)."


def use_figure(columns: Sequence[tuple[str, Sequence[Shown]]]) -> Figure:
    """Draw CPU, memory and gradients processed against time, a column for each study.

    Memory is left out where no trial has any: nodes on virtual time have none of their own.
    """
    rows: Sequence[tuple[str, Callable[[Finished], Curve]]] = (
        ("CPU, % of a core", _cpu),
        ("peak memory, MB", _memory),
        ("gradients processed", _gradients),
    )
    if not any(any(_memory(done)[1]) for _, shown in columns for done, _ in shown):
        rows = [(name, curve) for name, curve in rows if curve is not _memory]
    height = 0.5 + 1.3 * len(rows)
    figure, axes = style.panels(len(rows), len(columns), height, style.DOUBLE)
    labels = sorted({label for _, shown in columns for _, label in shown})
    for across, (title, shown) in enumerate(columns):
        axes[0][across].set_title(title, fontsize=style.TYPE)
        axes[-1][across].set_xlabel("seconds")
        longest = max(end(done.record) - start(done.record) for done, _ in shown)
        for down, (_, curve) in enumerate(rows):
            for done, label in shown:
                look = style.Look(*_look(label))
                style.draw_line(axes[down][across], *curve(done), look, labels.index(label), 1.0)
            axes[down][across].set_ylim(bottom=0)
            axes[down][across].set_xlim(0, 1.02 * longest)
    for down, (name, _) in enumerate(rows):
        axes[down][0].set_ylabel(name)
    style.legend_above(figure, [style.line_key(label, *_look(label)) for label in labels])
    style.footnote(figure, "n = 1 seed: no interval")
    return figure


# -- parts -------------------------------------------------------------------------------------


def _mean(place: Axes, label: str, curves: Sequence[Curve], order: int) -> None:
    look = style.Look(*_look(label))
    if len(curves) == 1:
        style.draw_line(place, *curves[0], look, order, 1.0)
        return
    for times, values in curves:
        style.draw_seed(place, times, values, look.colour)
    seeds = [bands.Curve(label, None, np.asarray(x), np.asarray(y)) for x, y in curves]
    if (found := bands.band(seeds, 0.0, 1.0)) is not None:
        style.draw_line(place, found.x, found.mean, look, order)
        place.fill_between(found.x, found.low, found.high, color=look.colour, alpha=0.15, lw=0)


def _gradients(done: Finished) -> Curve:
    times, counts = delivered(done.record)
    return times, [float(count) for count in counts]


def _cpu(done: Finished) -> Curve:
    """CPU of all processes together, between samples of each, on a grid of seconds."""
    began = start(done.record)
    seconds = end(done.record) - began
    edges = np.arange(0.0, seconds, max(0.5, seconds / 40))
    used = np.zeros(len(edges))  # also of a trial that was over before anything was sampled
    for mine in _samples(done).values():
        used += np.interp(edges, [s.t - began for s in mine], [s.cpu_seconds for s in mine])
    rate = 100 * np.diff(used) / np.diff(edges) if len(edges) > 1 else np.zeros(0)
    return edges[1:].tolist(), np.asarray(rate).tolist()


def _memory(done: Finished) -> Curve:
    """Largest resident sets so far of all processes that had been started."""
    began, latest, times, values = start(done.record), dict[Process, int](), [], []
    for sample in sorted(done.record.of(ResourceSampled), key=lambda s: s.t):
        latest[process_of(sample)] = sample.peak_bytes
        times.append(sample.t - began)
        values.append(sum(latest.values()) / MEGABYTE)
    return times, values


def _samples(done: Finished) -> dict[Process, list[ResourceSampled]]:
    samples_of: defaultdict[Process, list[ResourceSampled]] = defaultdict(list)
    for sample in sorted(done.record.of(ResourceSampled), key=lambda s: s.t):
        samples_of[process_of(sample)].append(sample)
    return samples_of


def _look(label: str) -> tuple[str, str, Any]:
    """Colour, marker and dashes of a strategy; asynchronous ones of two have dots."""
    strategy = strategy_of(label)
    look = style.looks([strategy])[strategy]
    return look.colour, look.marker, ASYNC if label.startswith("async ") else look.dashes
