"""Part (e), by design: the paper's claims judged by what failures did, against their controls.

The claims stand in the part's configuration, fixed before it runs, and are judged like those of any
experiment. Beside them are told the effects of all strategies, how flat the controls are in the
end, and a figure of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from dps.events import NodeJoined, TrainingStarted
from flows.analysis.finished import Finished
from flows.analysis.groups import Group, summarize
from flows.analysis.learning import evaluations
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import Interval, interval
from flows.analysis.statistics.claims import JudgedClaim, judge
from flows.analysis.virtual_time import told
from flows.config.claims import ClaimSection
from flows.replication.claims import markdown_table
from flows.replication.ttf.claims import SEEDS_ONLY
from flows.report import claims as words
from flows.report.figures import style
from flows.report.figures.figure import Drawing, Table, write_files

EFFECTS = "effects"  # a figure's name
EFFECT = "effect_time_mean"
NONE = "–"
SERVING = ("server", "replica", "spare", "store")
LAST_PART = 1 / 3  # of a training: what a control still gains in it is told


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a figure of `Outcome.row()` less others, told in `scale` of its unit."""

    heading: str
    key: str
    scale: float = 1.0
    digits: int = 1
    less: Sequence[str] = ()


EFFECT_COLUMNS = (
    Column("effect, points: same time", "effect_time_mean", 100, 2),
    Column("same gradients", "effect_gradients_mean", 100, 2),
    Column("same money", "effect_money_mean", 100, 2),
    Column("same time, at the end", "effect_time_end", 100, 2),
    Column("gradients not computed", "gradients_deficit"),
    Column("training longer by, s", "effect_training_seconds", 1, 2),
)
# Of the parts with kills at one phase: as much training, too, as that is what they all end with.
KILL_COLUMNS = (
    EFFECT_COLUMNS[0],
    EFFECT_COLUMNS[3],
    EFFECT_COLUMNS[1],
    Column("same gradients, at the end", "effect_gradients_end", 100, 2),
    *EFFECT_COLUMNS[4:],
)
COST_COLUMNS = (
    Column("down, s", "downtime_seconds", 1, 3),
    Column("acked, lost", "updates_lost"),
    Column("replayed", "updates_replayed"),
    Column("final, %", "accuracy_final", 100, 1),
    Column("s to target", "target_seconds", 1, 2),
    Column("per s", "gradients_per_second"),
    Column("idle, %", "idle_share", 100, 1),
    Column("mUSD, fixed term: all", "cost_fixed_usd", 1000, 3),
    Column("nodes", "cost_fixed_usd", 1000, 3, less=("cost_moved_usd", "cost_stored_usd")),
    Column("bytes moved", "cost_moved_usd", 1000, 3),
)


def sections(
    title: str,
    finished: Sequence[Finished],
    claims: Sequence[ClaimSection],
    folder: Path,
    figure: str = EFFECTS,
) -> list[str]:
    """Return the part as Markdown, and write its figure into `folder`.

    Parameters
    ----------
    title
        Of the part.
    finished
        Its trials, with the effects of their faults.
    claims
        What was claimed of them.
    folder
        Where the figure is written.
    figure
        Its name.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    outcomes = [each.outcome for each in finished]
    hit = [group for group in summarize(outcomes) if any(t.faults for t in group.trials)]
    parts = [f"### {title}", _circumstances(finished, outcomes)]
    if claims:
        judged = judge(outcomes, claims, np.random.default_rng(0))
        virtual = any(each.virtual for each in outcomes)
        parts += [claims_table(judged, virtual=virtual), words.legend(judged)]
    if hit:
        drawing = _drawing(figure, hit, _nodes(finished))
        write_files([drawing], folder, ("svg", "pdf", "png"))
        parts += [
            effects_table(EFFECT_COLUMNS, hit),
            "![Effect of the failures on accuracy over the same time, mean from the first on, with "
            f"95% intervals over seeds]({figure}.svg)",
        ]
    return [*parts, effects_table(COST_COLUMNS, summarize(outcomes))]


def claims_table(judged: Sequence[JudgedClaim], *, virtual: bool = False) -> str:
    """Return the claims with what was found and what it shows, as Markdown.

    On `virtual` time, all but scores and their differences is marked: it follows from times, and
    the profile's error is not in its interval.
    """
    rows = [
        [words.title(each.claim), words.effect(each) or NONE, _verdict(each, virtual)]
        for each in judged
    ]
    return markdown_table(["claim", "found", "verdict"], rows)


def effects_table(columns: Sequence[Column], groups: Sequence[Group]) -> str:
    """Return means over seeds with 95% intervals, a row for each strategy and condition."""
    headings = ["strategy", "condition", "trials", *(column.heading for column in columns)]
    rows = []
    for group in groups:
        cells = [_cell(group, column) for column in columns]
        rows.append([group.strategy, group.condition, str(len(group.trials)), *cells])
    return markdown_table(headings, rows)


def kills_table(outcomes: Sequence[Outcome]) -> str | None:
    """Return the effects of kills, as `effects_table` does; None where no trial has a control."""
    measured = [each for each in outcomes if each.row()[EFFECT] is not None]
    return effects_table(KILL_COLUMNS, summarize(measured)) if measured else None


def last_rise(finished: Sequence[Finished]) -> float | None:
    """Return what controls gain in the last third of their training; None without any.

    Each is the mean of its last three evaluations minus that of the three around two thirds of the
    time.
    """
    rises = []
    for each in finished:
        scores = evaluations(each.record)
        if not each.outcome.valid or each.outcome.faults or len(scores) < 12:
            continue
        middle = round(len(scores) * (1 - LAST_PART))
        values = [score.accuracy for score in scores]
        rises.append(fmean(values[-3:]) - fmean(values[middle - 1 : middle + 2]))
    return fmean(rises) if rises else None


# -- parts -------------------------------------------------------------------------------------


def _circumstances(finished: Sequence[Finished], outcomes: Sequence[Outcome]) -> str:
    left_out = [each for each in outcomes if not each.valid]
    time = told([each.virtual for each in outcomes])
    said = [f"Time: {time}." if time else ""]
    if left_out:
        named = ", ".join(each.identity.trial for each in left_out)
        said.append(f"Left out, {len(left_out)} of {len(outcomes)}: {named}.")
    rise = last_rise(finished)
    if rise is not None:
        said.append(f"In the last third of its training a control gains {100 * rise:.2f} points.")
    return " ".join(filter(None, said))


def _verdict(judged: JudgedClaim, virtual: bool) -> str:
    of_times = virtual and not judged.column.of_score
    model = SEEDS_ONLY if of_times else ""
    because = filter(None, (words.reason(judged), *words.warnings(judged), model))
    return f"**{judged.decision.verdict}**: {'; '.join(because)}"


def _cell(group: Group, column: Column) -> str:
    values = _values(group, column.key, column.less)
    if not values:
        return NONE
    found = _interval([column.scale * value for value in values])
    text = _number(found.mean, column.digits)
    if found.low is not None and found.high is not None and found.n > 2:
        text += f" [{_number(found.low, column.digits)}, {_number(found.high, column.digits)}]"
    missing = len(group.trials) - len(values)
    return f"{text} ({len(values)} of {len(group.trials)})" if missing else text


def _values(group: Group, key: str, less: Sequence[str] = ()) -> list[float]:
    rows = [trial.row() for trial in group.trials]
    return [
        float(row[key]) - sum(float(row[other]) for other in less)
        for row in rows
        if row[key] is not None
    ]


def _interval(values: Sequence[float]) -> Interval:
    return interval(values, np.random.default_rng(0))


def _told(counts: Sequence[int]) -> str:
    return (
        f"{style.count_told(counts)}. Mean effect with its 95% t interval. At the right: nodes of "
        "servers, replicas, spares and store."
    )


def _number(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return (text if text.strip("-0.") else text.lstrip("-")).replace("-", "−")


def _nodes(finished: Sequence[Finished]) -> dict[tuple[str, str], int]:
    """How many nodes hold weights or wait to, by strategy and condition, when training starts."""
    found = {}
    for each in finished:
        starts = [event.t for event in each.record.of(TrainingStarted)]
        joined = {
            event.node
            for event in each.record.of(NodeJoined)
            if starts and event.t <= starts[0] and event.role in SERVING
        }
        identity = each.outcome.identity
        found[identity.strategy, identity.condition] = len(joined)
    return found


def _drawing(name: str, groups: Sequence[Group], nodes: Mapping[tuple[str, str], int]) -> Drawing:
    """Draw the effect under each condition, a row for each strategy, with intervals over seeds.

    All conditions have one scale. At the right of each row is the number of its `nodes`.
    """
    conditions = list(dict.fromkeys(group.condition for group in groups))
    strategies = list(dict.fromkeys(group.strategy for group in groups))
    looks = style.looks(strategies)
    high, wide = -(-len(conditions) // 2), min(2, len(conditions))
    height = 0.2 + high * (0.5 + 0.15 * len(strategies))
    figure, axes = style.panels(high, wide, height, style.DOUBLE)
    places = [place for row in axes for place in row]
    for condition, place in zip(conditions, places, strict=False):
        place.axvline(0, color=style.MUTED, linewidth=0.8, zorder=1)
        for group in (each for each in groups if each.condition == condition):
            values = [100 * value for value in _values(group, EFFECT)]
            if not values:
                continue
            found, look = _interval(values), looks[group.strategy]
            reach = 0.0 if found.high is None else found.high - found.mean
            place.errorbar(
                found.mean,
                strategies.index(group.strategy),
                xerr=reach,
                fmt=look.marker,
                color=look.colour,
                markersize=4.5,
                elinewidth=1,
                capsize=2,
            )
            place.annotate(
                f"{nodes.get((group.strategy, condition), 0)}",
                (1.01, strategies.index(group.strategy)),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=style.SMALL,
                color=style.MUTED,
            )
        style.row_axis(place, strategies, [looks[name].colour for name in strategies])
        place.set_title(condition, fontsize=style.TYPE)
    shown = places[: len(conditions)]
    bounds = [bound for place in shown for bound in place.get_xlim()]
    for place in shown:
        place.set_xlim(min(bounds), max(bounds))
    for place in places[len(conditions) :]:
        place.set_visible(False)
    for place in (each for row in axes for each in row[1:]):
        place.tick_params(labelleft=False)
    for place in places[max(0, len(conditions) - wide) : len(conditions)]:
        place.set_xlabel("effect, points of accuracy")
    counts = [len(_values(group, EFFECT)) for group in groups]
    style.footnote(figure, _told(counts))
    rows = tuple(
        (group.condition, group.strategy, trial.identity.seed, trial.row()[EFFECT])
        for group in groups
        for trial in group.trials
    )
    table = Table(("condition", "strategy", "seed", EFFECT), rows)
    return Drawing(name, "Effect of the failures", "", figure, table, width="double", rows=True)
