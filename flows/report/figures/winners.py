"""Who wins where: maps over two numeric axes of the best strategy of each cell.

A cell is what two numbers have in common, such as an outage of 2 s with 8 workers. It is hatched
where the seeds do not resolve it: the 95% interval of the lead over the second best, seed by seed,
contains 0, or there are too few seeds for one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.core.names import STORE_ROLES, original, role_of
from dps.events import Killed, NodeJoined
from flows.analysis.statistics import FEWEST_SEEDS, ROUNDING, student_reach
from flows.config.profile import load_profile, shipped
from flows.metrics import BY_KEY, Metric
from flows.metrics.score import Score
from flows.report.figures.dataset import Subject
from flows.report.figures.figure import Drawing, Table, slugs
from flows.report.figures.numeric_axis import NumericAxis
from flows.report.figures.style import (
    HEIGHT,
    LABEL_LETTERS,
    REFERENCE,
    STRATEGY_COLOURS,
    Look,
    count_told,
    footnote,
    legend_above,
    line_key,
    look,
    looks,
    panel,
    patch_key,
    value_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTE = (
    "Means over seeds. Hatched: not resolved, for the 95% interval of the lead over the second, "
    "seed by seed and not corrected for the number of cells, contains 0, or there are fewer than "
    f"{FEWEST_SEEDS} seeds. Cells are at equal distances, not to scale."
)
HATCH = "/////"
EVEN = "equal"
ROW, FEWEST_ROWS = 0.27, 3  # inches that a row of cells is high; a panel is as high as so many
MARGIN = 0.65  # inches below the cells
LIGHT = "#fdfdfd"

Place = tuple[str, str]  # labels on the first and on the second axis
Seeds = Mapping[int | None, float]


@dataclass(frozen=True, slots=True)
class Measure:
    """What strategies are compared in, and the factor and unit that it is shown in.

    Of the best two of a cell none is called the best if they are equal in so many `digits`, where
    no claim says what the smallest difference of interest is.
    """

    key: str
    title: str
    unit: Callable[[float], tuple[float, str]]
    digits: int = 1


def _share(_: float) -> tuple[float, str]:
    return 100.0, "points"


def _seconds(_: float) -> tuple[float, str]:
    return 1.0, "s"


def _money(most: float) -> tuple[float, str]:
    return (1.0, "USD") if most >= 0.1 else (1e3, "10⁻³ USD") if most >= 1e-4 else (1e6, "10⁻⁶ USD")


MEASURES = (
    Measure("effect_time_mean", "effect on accuracy at equal times", _share),
    Measure("effect_money_mean", "effect on accuracy for equal money", _share),
    Measure("accuracy_final", "final accuracy", _share),
    Measure("target_seconds", "time to the target", _seconds),
    Measure("target_usd", "money to the target", _money, digits=2),
    Measure("cost_usd", "money", _money, digits=2),
)


@dataclass(frozen=True)
class Map:
    """What a measure is over two axes, by strategy.

    `others` are the labels of all further axes, and `note` is what a reader of the axes must know.
    `smallest` is the smallest difference of interest, as claims have it; None: no claim is about
    the measure. `nodes` has how many each strategy keeps beside workers and evaluator, where that
    is known, and `safe` says what is never lost.
    """

    x: NumericAxis
    y: NumericAxis
    measure: Measure
    others: tuple[str, ...]
    values: Mapping[str, Mapping[Place, Seeds]]
    score: Score
    note: str = ""
    smallest: float | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    safe: str = ""

    @property
    def metric(self) -> Metric:
        """The figure that is compared, by the name of what models are scored by."""
        return self.score.of(BY_KEY[self.measure.key])

    @property
    def higher_wins(self) -> bool:
        """Whether more of it is better."""
        return self.metric.better == "higher"

    def unit(self, most: float) -> tuple[float, str]:
        """What differences of up to `most` are multiplied by, and the unit as it follows a name."""
        of_score = BY_KEY[self.measure.key].of_score
        if of_score and not self.score.share:
            return 1.0, ""
        factor, unit = self.measure.unit(most)
        return factor, f", {unit}"

    @property
    def title(self) -> str:
        """What is compared."""
        return self.score.said(self.measure.title)

    @property
    def least(self) -> tuple[float, str]:
        """The difference from which on one is called the best, and that as a reader is told.

        It is 0 of a score without a unit, whose size is not known.
        """
        cells = [cell for each in self.values.values() for cell in each.values()]
        factor, unit = self.unit(max(abs(_mean(seeds)) for seeds in cells if seeds))
        if not unit:
            return 0.0, "do not differ"
        of_digits = 0.5 * math.pow(10, -self.measure.digits)
        least = of_digits if self.smallest is None else self.smallest * factor
        of = unit.removeprefix(", ")
        of = "point" if least == 1 and of == "points" else of
        return least / factor, f"are less than {least:g} {of} apart"

    @property
    def columns(self) -> tuple[str, ...]:
        """The labels on the first axis."""
        return tuple(self.x.values)

    @property
    def lines(self) -> tuple[str, ...]:
        """The labels on the second axis, from below."""
        return tuple(self.y.values)

    @property
    def name(self) -> str:
        """A part of names of files."""
        places = [axis.slug for axis in (self.x, self.y)]
        return "-".join([self.measure.key.replace("_", "-"), *places, *slugs(self.others).values()])

    @property
    def where(self) -> str:
        """What is the same in all of it, as it follows a title."""
        return "".join(f", {label}" for label in self.others)


@dataclass(frozen=True, slots=True)
class CellDifference:
    """Of two strategies in a cell: the mean over the seeds that both have; is it resolved?"""

    mean: float
    resolved: bool


def maps(
    subject: Subject, axes: Sequence[NumericAxis], smallest: Mapping[str, float] | None = None
) -> Iterator[Drawing]:
    """Draw who wins where for every two axes that vary by themselves.

    `smallest` are the smallest differences of interest, by metric.
    """
    for x, y in combinations(axes, 2):
        if y.key in x.others and x.key in y.others:
            for found in _maps(subject, x, y, smallest or {}):
                yield _winners(found)


def _maps(
    subject: Subject, x: NumericAxis, y: NumericAxis, smallest: Mapping[str, float]
) -> Iterator[Map]:
    """The maps over two axes: for each measure, and each combination of what else varies."""
    rest = [axis for axis in x.others if axis in y.others and axis not in (x.key, y.key)]
    if not rest:
        return
    by = "recovery" if "recovery" in rest else rest[0]
    rest.remove(by)
    note = _start_told(subject) if x.is_outage or y.is_outage else ""
    nodes = _nodes(subject) if by == "recovery" else {}
    safe = _safe_told(subject)
    for measure in MEASURES:
        values: dict[tuple[str, ...], dict[str, dict[Place, dict[int | None, float]]]] = {}
        for _, outcome in subject.trials:
            labels, value = outcome.identity.labels, outcome.row()[measure.key]
            if value is None:
                continue
            cells = values.setdefault(tuple(labels[axis] for axis in rest), {})
            cell = cells.setdefault(labels[by], defaultdict(dict))[labels[x.key], labels[y.key]]
            cell[outcome.identity.seed] = float(value)
        for others, found in values.items():
            known = {name: found[name] for name in subject.strategies if name in found} or found
            if len(known) > 1:
                yield Map(
                    *(x, y, measure, others, known, subject.score, note),
                    *(smallest.get(measure.key), nodes, safe),
                )


def _start_told(subject: Subject) -> str:
    """Say that a shard is missed for longer than nobody asks for a node: by the start of one."""
    profiles = {outcome.virtual for _, outcome in subject.trials}
    starts = {load_profile(name).start if name in shipped() else None for name in profiles}
    took = starts.pop() if len(starts) == 1 else None
    return f"; the start of a node comes on top{'' if took is None else f', {took:g} s'}"


def _nodes(subject: Subject) -> dict[str, int]:
    """How many nodes strategies keep beside workers and evaluator, where it is the same in all."""
    found = defaultdict[str, set[int]](set)
    for record, outcome in subject.trials:
        names = {original(each.node) for each in record.of(NodeJoined)}
        serving = [name for name in names if role_of(name) not in ("worker", "evaluator")]
        found[outcome.identity.strategy].add(len(serving))
    return {name: counts.pop() for name, counts in found.items() if len(counts) == 1}


def _safe_told(subject: Subject) -> str:
    """Say that the store never fails, where there are one and other nodes that do."""
    joined, killed = set[str](), set[str]()
    for record, _ in subject.trials:
        joined.update(role_of(each.node) for each in record.of(NodeJoined))
        killed.update(role_of(each.node) for each in record.of(Killed))
    stores = set(STORE_ROLES)
    return "; the store never fails" if killed and joined & stores and not killed & stores else ""


def difference(one: Seeds, other: Seeds) -> CellDifference | None:
    """Return one minus the other over the seeds that both have; None without any."""
    both = [seed for seed in one if seed in other]
    if not both:
        return None
    values = np.array([one[seed] - other[seed] for seed in both])
    if np.abs(values).max() <= ROUNDING * max(abs(one[seed]) for seed in both):
        return CellDifference(0.0, False)
    mean = float(values.mean())
    if len(both) < FEWEST_SEEDS:
        return CellDifference(mean, False)
    return CellDifference(mean, abs(mean) > float(student_reach(values[:, None])[0]))


# -- drawing -----------------------------------------------------------------------------------


def _winners(found: Map) -> Drawing:
    """Draw the best strategy of each cell; hatched where the second best may be as good."""
    strategies = list(found.values)
    by_name = _apart(looks(strategies), _best(found))
    figure, axes = _panel(found)
    rows, unresolved, counts = _draw_cells(axes, found, by_name)
    _hatch(axes, found, unresolved)
    won = [name for name in strategies if any(row[2] == name for row in rows)]
    looked = ((name, by_name[name]) for name in won)
    keys = [
        line_key(f"{name}{_nodes_told(found, name)}", own.colour, own.marker, "none")
        for name, own in looked
    ]
    even = any(row[2] == EVEN for row in rows)
    if even:
        keys.append(patch_key(EVEN, REFERENCE, 0.85))
    legend_above(figure, keys)
    told = f"; {EVEN}: the best two {found.least[1]}"
    footnote(
        figure,
        f"best {found.title}; {count_told(counts)} per cell; hatched: 95% t interval of its lead "
        f"over the second contains 0{told if even else ''}{found.safe}"
        f"{'; in brackets: serving nodes' if any(map(found.nodes.get, won)) else ''}{found.note}",
    )
    return Drawing(
        f"winners-{found.name}",
        f"Best {found.title}{found.where}",
        f"The best of {len(strategies)} strategies by {found.metric.label}.",
        figure,
        Table(
            (
                *(found.x.title, found.y.title, "best", "second", "strategy"),
                *(found.metric.label, "low", "high", "seeds"),
            ),
            tuple(rows),
        ),
        rows=True,
    )


def _draw_cells(
    axes: Axes, found: Map, by_name: Mapping[str, Look]
) -> tuple[list[tuple[Any, ...]], list[Place], list[int]]:
    """Mark each cell with its best; return rows for the table, unresolved cells and seeds."""
    rows, unresolved, counts = list[tuple[Any, ...]](), list[Place](), list[int]()
    for column in found.columns:
        for line in found.lines:
            place = column, line
            ranked = _ranked(found, place)
            if not ranked:
                continue
            best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
            seeds = found.values[best][place]
            lead = difference(seeds, found.values[second][place]) if second else None
            counts.append(len(seeds))
            if lead is None or not lead.resolved:
                unresolved.append(place)
            own = None if lead is not None and _even(found, lead) else by_name[best]
            at = found.columns.index(column), found.lines.index(line)
            axes.add_patch(_cell(at, facecolor=own.colour if own else REFERENCE, alpha=0.85))
            if own:
                axes.plot(at[0] + 0.5, at[1] + 0.5, own.marker, color=LIGHT, markersize=5)
            told = best if own else EVEN
            where = found.x.tick(column), found.y.tick(line)
            for name in ranked:
                rows.append((*where, told, second, name, *_interval(found, name, place)))
    return rows, unresolved, counts


def _best(found: Map) -> list[str]:
    """The strategies that have the best mean in some cell."""
    places = [(column, line) for column in found.columns for line in found.lines]
    first = {ranked[0] for place in places if (ranked := _ranked(found, place))}
    return [name for name in found.values if name in first]


def _apart(own: Mapping[str, Look], shown: Sequence[str]) -> dict[str, Look]:
    """The looks of strategies, in other colours where two that are shown would have the same."""
    spare = [look(place) for place in range(len(STRATEGY_COLOURS))]
    apart, taken = dict(own), set[str]()
    for name in shown:
        free = (each for each in (own[name], *spare) if each.colour not in taken)
        apart[name] = next(free, own[name])
        taken.add(apart[name].colour)
    return apart


def _nodes_told(found: Map, name: str) -> str:
    return f" ({found.nodes[name]})" if found.nodes.get(name) else ""


def _ranked(found: Map, place: Place) -> list[str]:
    """The strategies that have a value in a cell, the best first.

    Who has one for fewer seeds comes later: that of a target is missing where it was not reached.
    """
    known = [name for name, cells in found.values.items() if cells.get(place)]
    sign = -1 if found.higher_wins else 1
    cells = {name: found.values[name][place] for name in known}
    return sorted(known, key=lambda name: (-len(cells[name]), sign * _mean(cells[name])))


def _even(found: Map, lead: CellDifference) -> bool:
    """Whether the best is ahead of the second by nothing, in the digits that are told."""
    least, _ = found.least
    return lead.mean == 0 or abs(lead.mean) < least


def _mean(seeds: Seeds) -> float:
    return math.fsum(seeds.values()) / len(seeds)


def _interval(found: Map, name: str, place: Place) -> tuple[Any, ...]:
    """A strategy's mean in a cell, the bounds of its interval, and of how many seeds it is.

    There are no bounds of too few seeds, and none is where no value can be.
    """
    seeds = found.values[name][place]
    mean = _mean(seeds)
    if len(seeds) < FEWEST_SEEDS:
        return mean, None, None, len(seeds)
    reach = float(student_reach(np.array(list(seeds.values()))[:, None])[0])
    cut = found.metric.cut
    return mean, cut(mean - reach), cut(mean + reach), len(seeds)


def _panel(found: Map) -> tuple[Figure, Axes]:
    high = ROW * max(FEWEST_ROWS, len(found.lines))
    figure, axes = panel(height=MARGIN + high)
    axes.set_xticks(
        [i + 0.5 for i in range(len(found.columns))], [found.x.tick(c) for c in found.columns]
    )
    axes.set_yticks(
        [i + 0.5 for i in range(len(found.lines))], [found.y.tick(c) for c in found.lines]
    )
    axes.set_xlim(0, len(found.columns))
    axes.set_ylim(0, len(found.lines))
    axes.set_xlabel(found.x.title)
    value_label(axes, found.y.title, round(LABEL_LETTERS * high / (HEIGHT - MARGIN)))
    axes.grid(visible=False)
    return figure, axes


def _cell(at: tuple[int, int], **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(at, 1, 1, linewidth=0, **style)


def _hatch(axes: Axes, found: Map, places: Sequence[Place]) -> None:
    for column, line in places:
        at = found.columns.index(column), found.lines.index(line)
        axes.add_patch(_cell(at, fill=False, hatch=HATCH, edgecolor=LIGHT, alpha=0.55))
