"""The figures of a report. Each answers one question, and has its data as a table.

- What did the faults do to the training, and how did it recover? `accuracy_over_time`
- How much did each strategy lose by them? `effects`
- How long did recovery take, and which part of it? `recovery`
- How old were the gradients? `staleness`
- What does the accuracy cost? `cost`
- How does it depend on a setting? `sensitivity`
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.events import Applied, EvaluationMissed
from flows.metrics import faults
from flows.metrics.trial import evaluations
from flows.report import style
from flows.report.study import Study, Trial, end, start
from flows.report.style import BAD, INK, MUTED, PART_COLOURS, Look
from flows.statistics import MIN_SEEDS, Interval, interval, student_reach
from flows.statistics.groups import numbers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECONDS = "seconds since training started"
INTERVAL = f"95% interval of the mean from {MIN_SEEDS} seeds on"
POINTS = 121  # of a mean curve
MAX_CONDITIONS = 6  # with separate figures
MAX_PANELS = 12
MAX_ROWS = 48
MIN_LABELS = 3  # of an axis that a figure is drawn along
CONTROL = Look(MUTED, dashes="--")
RECOVERY_PARTS = ("detect", "wait for a node", "restore", "first update")


@dataclass(frozen=True)
class Drawing:
    """A figure with its data; its files have its `name`, and its heading is a `question`."""

    name: str
    question: str
    note: str
    figure: Figure
    data: pd.DataFrame

    @property
    def wide(self) -> bool:
        """Whether it takes two columns of a page."""
        return self.figure.get_figwidth() > style.SINGLE


def draw(study: Study) -> list[Drawing]:
    """Return the figures of an experiment; the one that its report opens with comes first."""
    if not study.trials:
        return []
    import matplotlib

    # The lead comes first; hundreds of conditions would make too many figures to read.
    order = sorted(study.shown, key=lambda condition: condition != study.lead)[:MAX_CONDITIONS]
    with matplotlib.rc_context(fname=style.STYLE):
        drawn = [
            *(accuracy_over_time(study, condition) for condition in order[:1]),
            effects(study),
            recovery(study),
            *(cost(study, condition) for condition in order),
            *(sensitivity(study, axis) for axis in _axes(study)),
            *(accuracy_over_time(study, condition) for condition in order[1:]),
            *(staleness(study, condition) for condition in order),
        ]
    return [drawing for drawing in drawn if drawing is not None]


def _name(study: Study, kind: str, *parts: str) -> str:
    slugs = style.slugs([*study.conditions, *study.strategies])
    return "-".join([kind, *(slugs[part] for part in parts if slugs[part])])


def _under(condition: str) -> str:
    return f" ({condition})" if condition else ""


def _mean(values: Sequence[float], counts: bool = False) -> Interval:
    """Return the mean with its interval, which is drawn from a few seeds on."""
    found = interval(values, np.random.default_rng(0), counts=counts)
    return found if found.n >= MIN_SEEDS else Interval(found.mean, None, None, found.n)


def _frame(rows: Sequence[tuple[Any, ...]], *columns: str) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(columns))


def _score_axis(study: Study, axes: Axes) -> None:
    axes.set_ylabel(study.score.reworded("test accuracy"))
    if study.score.share:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")


# -- accuracy over time ------------------------------------------------------------------------


def accuracy_over_time(study: Study, condition: str) -> Drawing | None:
    """Draw the score over time: a panel for each strategy with its control, outages shaded."""
    trials = [trial for trial in study.under(condition) if trial[1].whole]
    each = {
        name: [trial for trial in trials if trial[1].identity.strategy == name]
        for name in study.strategies
    }
    names = [name for name in each if each[name]][:MAX_PANELS]
    if not names:
        return None
    looks, rows = style.looks(study.strategies), list[tuple[Any, ...]]()
    keys, columns = list[Any](), min(len(names), 4)
    height = style.HEIGHT if columns == 1 else 1.75
    figure, axes = style.panels(math.ceil(len(names) / columns), columns, height, shared=True)
    for place, (name, own) in enumerate(zip(names, axes, strict=False)):
        if columns > 1:
            own.set_title(name, color=looks[name].colour)
        _shade_outages(own, each[name])
        controls = [trial for trial in study.controls(each[name]) if trial[1].whole]
        for drawn, look, label in ((controls, CONTROL, "control"), (each[name], looks[name], "")):
            rows += _curves(study, own, drawn, look, (name, label or condition))
        own.set_xlim(left=0)
        if not place % columns:
            _score_axis(study, own)
        if place >= len(names) - columns:
            own.xaxis.set_tick_params(labelbottom=True)
    for unused in axes[len(names) :]:
        unused.set_visible(False)
    figure.supxlabel(SECONDS)
    if faulty := condition in study.faulty:
        keys = [
            style.key("with the faults", Look(INK)),
            style.key("control: same seeds without", CONTROL),
            style.area_key("a shard is down", BAD, 0.3),
        ]
    counts = style.count_text(len(each[name]) for name in names)
    style.explain(figure, keys, f"{counts}; thin: each; thick: mean; band: {INTERVAL}")
    return Drawing(
        _name(study, "accuracy-time", condition),
        study.score.reworded(
            f"How did accuracy develop{' through the faults' * faulty}{_under(condition)}?"
        ),
        "Gaps: a shard was down, so that nothing could be evaluated." if faulty else "",
        figure,
        _frame(rows, "strategy", "condition", "seed", SECONDS, study.score.name, "low", "high"),
    )


def _curves(
    study: Study, axes: Axes, trials: Sequence[Trial], look: Look, names: tuple[str, str]
) -> Iterator[tuple[Any, ...]]:
    """Draw the curves of some trials, and their mean with its interval.

    Yields the numbers after `names`, which are the strategy and the condition.
    """
    curves = list[np.ndarray]()
    for trial in trials:
        if points := accuracy_points(trial):
            curves.append(np.array(points).T)
            yield from ((*names, trial[1].identity.seed, *point, None, None) for point in points)
    if not curves:
        return
    for curve in curves if look is not CONTROL and len(curves) > 1 else ():
        axes.plot(*curve, color=look.colour, linewidth=0.5, alpha=0.45)
    first, last = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
    if last <= first:  # there is no time that all have
        return
    x = np.linspace(first, last, POINTS)
    values = np.vstack([np.interp(x, *curve) for curve in curves])
    mean = values.mean(axis=0)
    if look is not CONTROL and len(curves) >= MIN_SEEDS:
        reach = student_reach(values)
        low, high = np.maximum(mean - reach, 0.0), np.minimum(mean + reach, study.score.highest)
        axes.fill_between(x, low, high, color=look.colour, alpha=0.16, linewidth=0)
        yield from ((*names, "mean", *row) for row in zip(x, mean, low, high, strict=True))
    axes.plot(x, mean, color=look.colour, linestyle="--" if look is CONTROL else "-")


def accuracy_points(trial: Trial) -> list[tuple[float, float]]:
    """Return times and values of the score, with a gap (NaN) wherever a shard was down."""
    record, _ = trial
    zero = start(record)
    scores = [(event.t - zero, event.accuracy) for event in evaluations(record)]
    gaps = [event.t - zero for event in record.of(EvaluationMissed)]
    times = sorted(t for t, _ in scores)
    for began, until in outages(trial):
        if bisect_right(times, began - zero) == bisect_left(times, until - zero):
            gaps.append((began + until) / 2 - zero)
    points = sorted([*scores, *((t, math.nan) for t in gaps)], key=lambda point: point[0])
    return [point for point in points if point[0] >= 0]


def outages(trial: Trial) -> list[tuple[float, float]]:
    """Return from when to when a shard was not served because of faults."""
    record, outcome = trial
    return [(each.began, min(each.serving, end(record))) for each in faults.outages(outcome.faults)]


def _shade_outages(axes: Axes, trials: Sequence[Trial]) -> None:
    for trial in trials:
        zero = start(trial[0])
        for began, until in outages(trial):
            axes.axvspan(
                began - zero, until - zero, color=BAD, alpha=0.3 / len(trials), linewidth=0
            )
        for fault in trial[1].faults:
            axes.axvline(fault.began - zero, color=BAD, alpha=0.5, linewidth=0.5, zorder=0)


# -- effect, recovery, staleness ---------------------------------------------------------------


def effects(study: Study) -> Drawing | None:
    """Draw what faults did to the score, by strategy; without faults, the final score."""
    shown = {"effect_time_mean": "on average since the fault", "effect_time_end": "at the end"}
    faulty = bool(study.faulty) and study.valid["effect_time_mean"].notna().any()
    if not faulty:
        shown = {"accuracy_final": "mean"}
    rows = _groups(study, next(iter(shown)))
    if not rows:
        return None
    figure, (axes,) = style.panels(height=0.7 + 0.24 * max(2, len(rows)))
    looks, data = style.looks(study.strategies), list[tuple[Any, ...]]()
    scale = 100.0 if study.score.share else 1.0
    for place, (condition, strategy, group) in enumerate(rows):
        for index, (key, label) in enumerate(shown.items()):
            values = [scale * value for value in group[key].dropna()]
            found, height = _mean(values), place + 0.2 * index - 0.1 * (len(shown) - 1)
            colour = looks[strategy].colour
            axes.plot(values, [height] * len(values), "|", color=colour, alpha=0.5)
            _error_bar(axes, looks[strategy], found, height, hollow=index > 0)
            data.append((condition, strategy, label, found.mean, found.low, found.high, found.n))
    label = study.score.reworded("effect on accuracy" if faulty else "final test accuracy")
    unit = (", points" if faulty else ", %") if study.score.share else ""
    axes.set_xlabel(f"{label}{unit}")
    keys = list[Any]()
    if faulty:
        axes.axvline(0, color=MUTED, linewidth=0.8, zorder=0)
        dot = Look(MUTED, "o", "none")
        keys = [style.key(text, dot, hollow=text == "at the end") for text in shown.values()]
    _name_rows(study, axes, rows)
    counts = style.count_text(row[-1] for row in data)
    style.explain(figure, keys, f"{counts}; marks: each; bar: {INTERVAL}")
    return Drawing(
        "effects",
        "How much did each strategy lose by the faults?"
        if faulty
        else study.score.reworded("Which strategy reached which accuracy?"),
        study.score.reworded(
            "Accuracy minus that of the control, which is the trial of the same seed without the "
            "faults, at the same times."
        )
        if faulty
        else "",
        figure,
        _frame(data, "condition", "strategy", "effect", axes.get_xlabel(), "low", "high", "n"),
    )


def _groups(study: Study, key: str) -> list[tuple[str, str, pd.DataFrame]]:
    """Return the rows with a figure for each shown condition and strategy, not too many."""
    frame = study.valid.dropna(subset=[key])
    groups = dict(iter(frame.groupby(["condition", "strategy"], sort=False)))
    places = ((condition, name) for condition in study.shown for name in study.strategies)
    return [(*place, groups[place]) for place in places if place in groups][:MAX_ROWS]


def _name_rows(study: Study, axes: Axes, rows: Sequence[tuple[str, str, Any]]) -> None:
    several = len({condition for condition, *_ in rows}) > 1
    names = [f"{name}, {condition}" if several else name for condition, name, _ in rows]
    looks = style.looks(study.strategies)
    style.row_axis(axes, names, [looks[name].colour for _, name, _ in rows])


def _error_bar(
    axes: Axes, look: Look, x: Interval, y: Interval | float, hollow: bool = False
) -> None:
    """Draw a mean with its interval, on one axis or on both."""
    axes.errorbar(
        x.mean,
        y.mean if isinstance(y, Interval) else y,
        xerr=_reach([x]),
        yerr=_reach([y]) if isinstance(y, Interval) else None,
        fmt=look.marker,
        color=look.colour,
        fillstyle="none" if hollow else "full",
        markersize=5.5,
        elinewidth=0.8,
    )


def _reach(found: Sequence[Interval], scale: float = 1.0) -> np.ndarray:
    """Return how far intervals go down and up from their means; 0 where there is none."""
    bounds = [
        (f.mean if f.low is None else f.low, f.mean, f.mean if f.high is None else f.high)
        for f in found
    ]
    return np.asarray(scale * np.diff(np.reshape(bounds, (-1, 3)), axis=1).T)


def recovery(study: Study) -> Drawing | None:
    """Draw the parts of recovery times, stacked, with a mark for each outage."""
    rows = _groups(study, "rto_seconds")
    if not rows:
        return None
    figure, (axes,) = style.panels(height=0.7 + 0.24 * max(2, len(rows)))
    looks, data = style.looks(study.strategies), list[tuple[Any, ...]]()
    for place, (condition, strategy, group) in enumerate(rows):
        columns = [f"{part}_seconds" for part in ("detect", "wait_capacity", "restore")]
        detect, wait, restore, first = group[[*columns, "first_applied_seconds"]].mean()
        parts = (detect, wait, max(0.0, restore - wait), max(0.0, first))
        for name, part, colour, left in zip(
            RECOVERY_PARTS, parts, PART_COLOURS, np.cumsum((0.0, *parts[:-1])), strict=True
        ):
            axes.barh(place, part, left=left, color=colour, height=0.6)
            data.append((condition, strategy, name, part))
        hits = (fault for _, o in study.under(condition, strategy) for fault in o.faults)
        each = [fault.rto_seconds for fault in hits if fault.rto_seconds is not None]
        dots = axes.plot(each, [place] * len(each), "o", color=looks[strategy].colour, markersize=3)
        dots[0].set_markeredgecolor("white")
        data += [(condition, strategy, "each outage", value) for value in each]
        text, at = study.text("rto_seconds", sum(parts)), (max([sum(parts), *each]), place)
        axes.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=7)
    _name_rows(study, axes, rows)
    axes.set_xlabel("seconds since the fault")
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    counts = style.count_text((len(group) for *_, group in rows), "trial")
    keys = [style.area_key(*key) for key in zip(RECOVERY_PARTS, PART_COLOURS, strict=True)]
    note = f"{counts} per bar; bars: means of first outages; dots: each outage"
    style.explain(figure, keys, note)
    return Drawing(
        "recovery-time",
        "How long did recovery take?",
        "From the fault to the shard's next update. The fault plan, not the strategy, sets how "
        "long a fresh node takes to come.",
        figure,
        _frame(data, "condition", "strategy", "part", "seconds since the fault"),
    )


def staleness(study: Study, condition: str) -> Drawing | None:
    """Draw the distribution of staleness by strategy."""
    import pandas as pd

    values = {
        name: [
            age
            for record, _ in study.under(condition, name)
            for batch in record.of(Applied)
            for age in (batch.staleness if batch.head else ())
        ]
        for name in study.strategies
    }
    values = {name: ages for name, ages in values.items() if ages}
    highest = max((max(ages) for ages in values.values()), default=0)
    if highest <= 1:
        return None  # by construction, as with one worker or synchronous training
    figure, (axes,) = style.panels(height=0.7 + 0.24 * max(2, len(values)))
    axes.boxplot(
        list(values.values()),
        positions=range(len(values)),
        orientation="horizontal",
        widths=0.6,
        whis=(5, 99),
        showfliers=False,
        medianprops={"color": INK, "linewidth": 2.5},
        manage_ticks=False,
    )
    looks = style.looks(study.strategies)
    style.row_axis(axes, list(values), [looks[name].colour for name in values])
    axes.set_xscale("symlog", linthresh=10)
    ticks = [t for t in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if t <= highest]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("staleness in versions")
    counts = style.count_text((len(study.under(condition, name)) for name in values), "trial")
    note = "box: middle half, with the median; whiskers: 5% to 99%"
    style.explain(figure, [], f"{counts} per row; {note}; logarithmic above 10")
    described = (pd.Series(values[name], name=name) for name in values)
    data = pd.DataFrame([ages.describe([0.05, 0.25, 0.5, 0.75, 0.99]) for ages in described])
    return Drawing(
        _name(study, "staleness", condition),
        f"How old were the weights that gradients came from{_under(condition)}?",
        "Versions between the weights that an update was computed from and those it was applied "
        "to.",
        figure,
        data.rename_axis("strategy").reset_index(),
    )


# -- cost --------------------------------------------------------------------------------------


def cost(study: Study, condition: str) -> Drawing | None:
    """Draw money against the final score, each strategy beside its control."""
    known = study.valid.dropna(subset=["cost_usd", "accuracy_final"])
    frame = known[known["condition"] == condition]
    if frame.empty:
        return None
    figure, (axes,) = style.panels()
    looks, data = style.looks(study.strategies), list[tuple[Any, ...]]()
    for strategy, group in frame.groupby("strategy", sort=False):
        look, line = looks[str(strategy)], list[tuple[float, float]]()
        controls = known[known["trial"].isin(group["control"].dropna())]
        for name, rows in (("control", controls), (condition, group)):
            if len(rows):
                money, score = (_mean(list(rows[key])) for key in ("cost_usd", "accuracy_final"))
                shown = _mean(list(study.money[0] * rows["cost_usd"]))
                _error_bar(axes, look, shown, score, rows is controls)
                line.append((shown.mean, score.mean))
                bounds = ((each.mean, each.low, each.high) for each in (money, score))
                data.append((strategy, name, *chain.from_iterable(bounds)))
        axes.plot(*zip(*line, strict=True), color=look.colour, linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"money for the training, {study.unit('cost_usd')}")
    axes.locator_params("x", nbins=5)
    _score_axis(study, axes)
    axes.margins(x=0.12, y=0.12)
    names = [name for name in study.strategies if name in set(frame["strategy"])]
    keys = [style.key(name, Look(looks[name].colour, looks[name].marker, "none")) for name in names]
    if faulty := condition in study.faulty:
        keys.append(style.key("control", Look(MUTED, "o", "none"), hollow=True))
    counts = style.count_text(frame.groupby("strategy").size())
    style.explain(figure, keys, f"{counts}; bars: {INTERVAL}")
    better = "up" if study.score.better == "higher" else "down"
    return Drawing(
        _name(study, "cost-accuracy", condition),
        study.score.reworded(f"Cost of accuracy{_under(condition)}?"),
        f"Left and {better} is better."
        + " A dotted line leads from a strategy without the faults to the same with them." * faulty,
        figure,
        _frame(
            data,
            *("strategy", "condition", "money, USD", "money low", "money high"),
            *(study.score.name, "low", "high"),
        ),
    )


# -- sensitivity -------------------------------------------------------------------------------


def _axes(study: Study) -> list[str]:
    """Return the axes that figures are drawn along: of several that vary together, the first."""
    trials = [outcome.identity.labels for outcome in study.outcomes if outcome.valid]
    found = list[str]()
    for axis in trials[0] if trials else ():
        labels = {each.get(axis) for each in trials}
        strategy_axis = "recovery" if "recovery" in trials[0] else next(iter(trials[0]))
        named = axis == strategy_axis and numbers([str(label) for label in labels]) is None
        follows = any(
            len({(each.get(axis), each.get(other)) for each in trials}) == len(labels)
            for other in found
        )
        if len(labels) >= MIN_LABELS and not named and not follows:
            found.append(axis)
    return found


def sensitivity(study: Study, axis: str) -> Drawing | None:
    """Draw how the compared metrics depend on an axis: lines along numbers, points along names."""
    labels = [outcome.identity.labels for outcome in study.outcomes if outcome.valid]
    frame = study.valid.assign(
        at=[each.get(axis, "") for each in labels],
        line=[" · ".join(each[key] for key in each if key != axis) for each in labels],
    )
    keys = [
        key
        for key in study.section.metrics
        if frame[key].notna().any() and frame[key].nunique() > 1
    ][:MAX_CONDITIONS]
    if not keys:
        return None
    names = list[str](frame["at"].unique())
    values, lines = numbers(names), list(frame["line"].unique())
    if values:
        values = {label: values[label] for label in sorted(names, key=values.__getitem__)}
    places = {label: float(n) for n, label in enumerate(values or names)}
    ticks = [f"{value:g}".replace("inf", "∞") for value in (values or {}).values()] or [*places]
    columns = min(2, len(keys))
    figure, panels = style.panels(math.ceil(len(keys) / columns), columns, 1.9)
    looks, data = style.looks(lines), list[tuple[Any, ...]]()
    for key, own in zip(keys, panels, strict=False):
        scale = _scale(study, key)
        for number, line in enumerate(lines):
            seeds = dict(iter(frame[frame["line"] == line].groupby("at")[key]))
            # Trials that have a value, as of a target, are the good ones where others have none.
            means = {
                label: _of_metric(study, key, list(seeds[label]))
                for label in places
                if label in seeds and seeds[label].notna().all()
            }
            aside = 0.0 if values else 0.5 * (number + 0.5) / len(lines) - 0.25
            own.errorbar(
                [places[label] + aside for label in means],
                [scale * found.mean for found in means.values()],
                yerr=_reach(list(means.values()), scale),
                fmt=looks[line].marker,
                linestyle=looks[line].dashes if values else "none",
                color=looks[line].colour,
                elinewidth=0.8,
            )
            data += [
                (key, line, label, found.mean, found.low, found.high, found.n)
                for label, found in means.items()
            ]
        own.set_xticks([*places.values()], ticks)
        own.set_xlabel(axis.replace(".*", "").rpartition(".")[2].replace("_", " "))
        own.set_title(study.label(key))
    for unused in panels[len(keys) :]:
        unused.set_visible(False)
    legend = [style.key(line, looks[line]) for line in lines[:MAX_ROWS]]
    counts = style.count_text(row[-1] for row in data)
    style.explain(figure, legend if len(lines) > 1 else [], f"{counts}; bar: {INTERVAL}")
    return Drawing(
        f"along-{axis.replace('.*', '').replace('.', '-')}",
        f"How does it depend on {axis.replace('.*', '')}?",
        "Values are drawn at equal distances." if values else "",
        figure,
        _frame(data, "metric", "line", axis, "mean", "low", "high", "n"),
    )


def _of_metric(study: Study, key: str, values: Sequence[float]) -> Interval:
    """Return the mean of a metric; its interval ends at 0 where values cannot be less."""
    metric = study.metric(key)
    found = _mean(values, counts=metric.unit == "count")
    low = None if found.low is None else metric.cut(found.low)
    return Interval(found.mean, low, found.high, found.n)


def _scale(study: Study, key: str) -> float:
    scales = {"%": 100.0, "points": 100.0, "MB": 1e-6, "USD": study.money[0]}
    return scales.get(study.metric(key).unit, 1.0)
