"""The paper's three kinds of figures, drawn from records, and its own curves beside them.

Accuracy against time for one and for two kills, means over seeds with dashed lines at kill and
recovery; CPU, memory and gradients processed against time. The published curves come from a CSV
that the user points to.
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
from flows.analysis.learning import evaluations
from flows.config.limits import MOST_CURVE_BYTES
from flows.files import read_bytes
from flows.replication.ttf.measures import delivered, strategy_of
from flows.report.figures import bands
from flows.report.figures.dataset import end, start
from flows.report.figures.style import looks

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
_STYLE: Any = {"axes.spines.right": False, "axes.spines.top": False}

Curve = tuple[list[float], list[float]]
Shown = tuple[Finished, str]  # with its label


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of accuracy against time: curves by label, and moments for dashed lines."""

    title: str
    curves: Sequence[tuple[str, Curve]]
    moments: Sequence[float] = ()


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
    return Panel("published", chosen, (30.0, 50.0))


# -- ours --------------------------------------------------------------------------------------


def accuracy_panel(title: str, shown: Iterable[Shown]) -> Panel:
    """Return accuracy against seconds since the training started, a curve for each trial.

    The moments are the medians over the trials of each kill, and of each recovery.
    """
    curves, moments = [], defaultdict[tuple[int, str], list[float]](list)
    for done, label in shown:
        began = start(done.record)
        scores = evaluations(done.record)
        curves.append((label, ([s.t - began for s in scores], [s.accuracy for s in scores])))
        for number, fault in enumerate(fault_times(done.record)):
            moments[number, "kill"].append(fault.began - began)
            if fault.serving is not None:
                moments[number, "recovery"].append(fault.serving - began)
    return Panel(title, curves, [median(values) for values in moments.values()])


def accuracy_figure(panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side: thin each trial, thick the mean of each label with its band."""
    figure, axes = _figure(1, len(panels))
    for panel, place in zip(panels, axes[0], strict=True):
        for moment in panel.moments:
            place.axvline(moment, color="#8793a1", linewidth=0.8, linestyle="--", zorder=0)
        for label in dict.fromkeys(label for label, _ in panel.curves):
            _mean(place, label, [curve for name, curve in panel.curves if name == label])
        place.set_title(panel.title, fontsize=10)
        place.set_xlabel("seconds")
        place.set_ylim(0, 1)
    axes[0][0].set_ylabel("test accuracy")
    _legend(figure, [label for panel in panels for label, _ in panel.curves])
    return figure


def use_figure(columns: Sequence[tuple[str, Sequence[Shown]]]) -> Figure:
    """Draw CPU, memory and gradients processed against time, a column for each study."""
    rows: Sequence[tuple[str, Callable[[Finished], Curve]]] = (
        ("CPU, % of a core", _cpu),
        ("peak memory, MB", _memory),
        ("gradients processed", _gradients),
    )
    figure, axes = _figure(len(rows), len(columns))
    for across, (title, shown) in enumerate(columns):
        axes[0][across].set_title(title, fontsize=10)
        axes[-1][across].set_xlabel("seconds")
        for down, (_, curve) in enumerate(rows):
            for done, label in shown:
                times, values = curve(done)
                axes[down][across].plot(times, values, **_line(label))
    for down, (name, _) in enumerate(rows):
        axes[down][0].set_ylabel(name)
    _legend(figure, [label for _, shown in columns for _, label in shown])
    return figure


# -- parts -------------------------------------------------------------------------------------


def _mean(place: Axes, label: str, curves: Sequence[Curve]) -> None:
    line = _line(label)
    if len(curves) == 1:
        place.plot(*curves[0], **line)
        return
    for times, values in curves:
        place.plot(times, values, **{**line, "linewidth": 0.5, "alpha": 0.3})
    seeds = [bands.Curve(label, None, np.asarray(x), np.asarray(y)) for x, y in curves]
    if (found := bands.band(seeds)) is not None:
        place.plot(found.x, found.mean, **{**line, "linewidth": 1.8})
        place.fill_between(found.x, found.low, found.high, color=line["color"], alpha=0.15, lw=0)


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
    began, latest, times, values = start(done.record), dict[int, int](), [], []
    for sample in sorted(done.record.of(ResourceSampled), key=lambda s: s.t):
        latest[sample.pid] = sample.peak_bytes
        times.append(sample.t - began)
        values.append(sum(latest.values()) / MEGABYTE)
    return times, values


def _samples(done: Finished) -> dict[int, list[ResourceSampled]]:
    found: defaultdict[int, list[ResourceSampled]] = defaultdict(list)
    for sample in done.record.of(ResourceSampled):
        found[sample.pid].append(sample)
    return {pid: sorted(mine, key=lambda s: s.t) for pid, mine in found.items()}


def _line(label: str) -> dict[str, Any]:
    strategy = strategy_of(label)
    return {
        "color": looks([strategy])[strategy].colour,
        "linestyle": ":" if label.startswith("async ") else "-",
        "linewidth": 1.0,
        "alpha": 0.85,
    }


def _legend(figure: Figure, labels: Iterable[str]) -> None:
    from matplotlib.lines import Line2D

    names = sorted(set(labels))
    handles = [Line2D([], [], **_line(name)) for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=6, fontsize=9, frameon=False)


def _figure(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2 * columns, 0.6 + 2.6 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes.tolist()
