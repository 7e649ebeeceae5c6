"""The tables of a report: at a glance, the statistics, all figures compared, every trial.

They are made as values here; `report.jinja` has their markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.analysis.comparison import Compared
from flows.analysis.groups import Group, summarize
from flows.analysis.outcome import Outcome
from flows.analysis.prices import Prices
from flows.analysis.statistics import Interval
from flows.metrics import BY_KEY, COLUMNS, NOT_APPLICABLE, Metric
from flows.metrics.metric import LINKS
from flows.metrics.resources import OF_LINKS
from flows.metrics.score import ACCURACY, Score
from flows.report import sentences as words

SHOWN_ROLES = ("all", "server", "replica", "store", "worker")
BY_LINK = tuple(f"sent_bytes_{role}_{link}" for role in OF_LINKS for link in LINKS)
COMPARED: Mapping[str, Sequence[str]] = {
    "Effect of the faults, against the control of the same seed": (
        "effect_time_mean",
        "effect_gradients_mean",
        "effect_money_mean",
        "effect_time_end",
        "effect_gradients_end",
        "effect_money_end",
        "effect_time_area",
        "effect_time_span",
        "gradients_deficit",
        "effect_training_seconds",
        "effect_cost_usd",
    ),
    "All faults of a trial": (
        "faults",
        "faults_skipped",
        "outages",
        "outages_unrecovered",
        "downtime_seconds",
        "downtime_shard_seconds",
        "recovery_median_seconds",
        "recovery_max_seconds",
    ),
    "Accuracy": (
        "accuracy_final",
        "accuracy_best",
        "accuracy_area_time",
        "accuracy_area_gradients",
        "target_seconds",
        "target_gradients",
        "target_usd",
        "loss_final",
        "rmse_final",
        "objective_final",
        "objective_excess",
        "objective_target_seconds",
        "objective_target_gradients",
        "stationarity_final",
    ),
    "Recovery from the first fault": (
        "detect_seconds",
        "restore_seconds",
        "wait_capacity_seconds",
        "first_applied_seconds",
        "rto_seconds",
    ),
    "Updates, each on one shard": (
        "updates_attempted",
        "updates_acked",
        "updates_applied",
        "updates_lost",
        "updates_lost_per_fault",
        "updates_buffered",
        "updates_replayed",
        "updates_dropped",
        "updates_duplicates",
        "updates_applied_twice",
    ),
    "Staleness": (
        "staleness_median",
        "staleness_p99",
        "staleness_max",
        "staleness_p99_seconds",
        "staleness_before_p99",
        "staleness_during_p99",
        "staleness_after_p99",
    ),
    "Time and resources": (
        "training_seconds",
        "gradients_per_second",
        "gradients_together",
        "gradients_steady",
        "goodput",
        "idle_share",
        "load_average",
        *(
            f"{used}_{role}"
            for used in ("cpu_seconds", "peak_bytes", "sent_bytes")
            for role in SHOWN_ROLES
        ),
        *BY_LINK,
        "received_bytes_all",
        "checkpoint_written_bytes",
        "stored_bytes",
    ),
    "Money": (
        "cost_nodes_usd",
        "cost_moved_usd",
        "cost_stored_usd",
        "cost_usd",
        "cost_spot_usd",
        "cost_fixed_usd",
        "cost_per_point_usd",
    ),
    "Around the first fault: description, not an effect": (
        "accuracy_before",
        "accuracy_after",
        "accuracy_drop",
        "regain_seconds",
    ),
}

PER_TRIAL = (
    "seed",
    "accuracy_final",
    "control",
    "effect_time_mean",
    "effect_gradients_mean",
    "effect_money_mean",
    "gradients_deficit",
    "faults",
    "outages",
    "downtime_seconds",
    "detect_seconds",
    "restore_seconds",
    "rto_seconds",
    "recovered_from",
    "updates_acked",
    "updates_applied",
    "updates_lost",
    "updates_replayed",
    "updates_duplicates",
    "updates_applied_twice",
    "staleness_median",
    "staleness_p99",
    "staleness_max",
    "gradients_per_second",
    "cpu_seconds_all",
    "peak_bytes_all",
    "sent_bytes_all",
    "cost_usd",
)

# Of the conditions with faults, and of an experiment without any; None: the metric's own name.
GLANCE: Mapping[str, str | None] = {
    "effect_time_mean": None,
    "effect_money_mean": None,
    "downtime_seconds": None,
    "gradients_deficit": None,
    "updates_lost": "updates lost",
    "accuracy_final": None,
    "cost_usd": "money, with the fault",
}
GLANCE_WITHOUT_FAULTS: Mapping[str, str | None] = {
    "accuracy_final": None,
    "training_seconds": None,
    "gradients_per_second": None,
    "cpu_seconds_all": None,
    "sent_bytes_all": None,
    "cost_usd": None,
}
UNITS = {"s": " s", "%": "%", "points": " points", "MB": " MB", "USD": " USD", "per second": "/s"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in the comparison: the mean, and the range where there is one."""

    mean: str
    range: str


@dataclass(frozen=True, slots=True)
class Line:
    """One figure compared between the strategies."""

    column: Metric
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class FigureTable:
    """All figures under one condition, strategies side by side.

    `zeros` are those that are 0 for every strategy, which have no line.
    """

    condition: str
    strategies: tuple[str, ...]
    counts: tuple[int, ...]
    sections: tuple[tuple[str, tuple[Line, ...]], ...]
    zeros: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class Glance:
    """The few figures that most people come for, for one condition with a fault."""

    condition: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One metric of one strategy in the exploratory statistics, as it is shown."""

    mean: str
    interval: str
    difference: str
    tested: str
    reading: str
    repeats: str


@dataclass(frozen=True, slots=True)
class Statistics:
    """The metrics of strategies under one condition, side by side; None where there is none."""

    condition: str
    baseline: str
    strategies: tuple[str, ...]
    rows: tuple[tuple[Metric, tuple[ComparedCell | None, ...]], ...]


def statistics(rows: Sequence[Compared], score: Score = ACCURACY) -> list[Statistics]:
    """Return a table for each condition; none where there are too few seeds for any test."""
    if not any(row.p for row in rows):
        return []
    tables = []
    for condition in dict.fromkeys(row.condition for row in rows):
        members = [row for row in rows if row.condition == condition]
        names = tuple(dict.fromkeys(row.strategy for row in members))
        metrics = dict.fromkeys(row.metric for row in members)
        found = {(row.metric, row.strategy): _compared(row, score) for row in members}
        lines = tuple(
            (score.of(BY_KEY[metric]), tuple(found.get((metric, name)) for name in names))
            for metric in metrics
        )
        tables.append(Statistics(condition, members[0].baseline, names, lines))
    return tables


def _compared(row: Compared, score: Score) -> ComparedCell:
    column, own = score.of(BY_KEY[row.metric]), row.interval
    return ComparedCell(
        mean=column.text(own.mean if own else None),
        interval=_interval(column, own) if own else "",
        difference=_difference(column, row),
        tested=f"p {row.p}" if row.p else "",
        reading=row.said,
        repeats=_repeats(row),
    )


def _repeats(row: Compared) -> str:
    """How many seeds it takes, where it is more than there are and the difference is unclear."""
    needed, difference = row.repeats_needed, row.difference
    shown = row.reading in ("higher", "lower")
    if shown or needed is None or difference is None or needed <= difference.n:
        return ""
    return f"{needed:,}"


def _difference(column: Metric, row: Compared) -> str:
    found = row.difference
    if found is None:
        return ""
    bounds = _bounds(column, found.low, found.high)
    mean = column.text(found.mean)
    if not mean.strip("−0."):
        mean = mean.lstrip("−")
    elif found.mean > 0:
        mean = f"+{mean}"
    return f"{mean} ({bounds})" if bounds else mean


def _interval(column: Metric, own: Interval) -> str:
    if own.low is None or own.high is None:
        return ""
    return _bounds(column, column.cut(own.low), column.cut(own.high))


def _bounds(column: Metric, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{column.text(low)} to {column.text(high)}"


def glance(groups: Sequence[Group], baseline: str | None = None) -> list[Glance]:
    """Return one table per condition with a fault, with what being prepared costs without one.

    Without any faults, there is one for each condition. Money is told against the `baseline`; None:
    against the strategy that keeps nothing.
    """
    faulty = [group.condition for group in groups if group.faulty]
    conditions = dict.fromkeys(faulty or [group.condition for group in groups])
    keys = GLANCE if faulty else GLANCE_WITHOUT_FAULTS
    return [
        _glance([group for group in groups if group.condition == condition], groups, keys, baseline)
        for condition in conditions
    ]


def _glance(
    members: Sequence[Group],
    groups: Sequence[Group],
    keys: Mapping[str, str | None],
    baseline: str | None,
) -> Glance:
    quiet = [words.quiet(groups, group) if group.faulty else group for group in members]
    known = [group for group in quiet if group]
    base = words.baseline_of(known, baseline) or words.baseline_of(known)
    columns = [
        (heading or BY_KEY[key].label, [_glance_cell(group, key) for group in members])
        for key, heading in keys.items()
    ]
    if base is not None and len(members) > 1:
        when = "money without a fault" if members[0].faulty else "money"
        columns.append(
            (
                f"{when}, {base.strategy}\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}1",
                [_price(group, base) for group in quiet],
            )
        )
    told = [(heading, cells) for heading, cells in columns if _tells(cells)]
    rows = [(m.strategy, tuple(cells[i] for _, cells in told)) for i, m in enumerate(members)]
    said = score_of_groups(members).said
    return Glance(members[0].condition, tuple(said(heading) for heading, _ in told), tuple(rows))


def _tells(cells: Sequence[Cell]) -> bool:
    """Whether a column applies to any strategy: no shard goes down by a fault that only delays."""
    return any(cell.mean != NOT_APPLICABLE for cell in cells)


def _glance_cell(group: Group, key: str) -> Cell:
    column = score_of_groups([group]).of(BY_KEY[key])
    cell = _cell(column, group)
    unit = UNITS.get(column.unit, "")
    return Cell(cell.mean if cell.mean == NOT_APPLICABLE else cell.mean + unit, cell.range)


def _price(group: Group | None, base: Group) -> Cell:
    ratio = words.ratio(group, base, "cost_usd") if group else None
    return Cell(NOT_APPLICABLE if ratio is None else f"{ratio.mean:.2f}", "")


def figure_table(groups: Sequence[Group], condition: str) -> FigureTable:
    """Return every figure under a condition."""
    members = [group for group in groups if group.condition == condition]
    score = score_of_groups(members)
    known = [BY_KEY[key] for keys in COMPARED.values() for key in keys if key not in score.same_as]
    zeros = tuple(column for column in known if _is_zero(column, members))
    sections = [
        (
            score.said(title),
            tuple(
                _line(score.of(BY_KEY[key]), members)
                for key in keys
                if key not in score.same_as and _applies(key, members)
            ),
        )
        for title, keys in COMPARED.items()
    ]
    return FigureTable(
        condition,
        strategies=tuple(group.strategy for group in members),
        counts=tuple(len(group.trials) for group in members),
        sections=tuple((title, lines) for title, lines in sections if lines),
        # Most roles send over some links only.
        zeros=tuple(column for column in zeros if column.key not in BY_LINK),
    )


def score_of_groups(groups: Sequence[Group]) -> Score:
    """Return what the trials of some groups are scored by."""
    every = (each for group in groups for each in (*group.trials, *group.left_out))
    return next((each.score for each in every), ACCURACY)


def _applies(key: str, groups: Sequence[Group]) -> bool:
    """Whether a figure is worth a line: some strategy has it, and it is not 0 for all."""
    known = any(group.spread(key) for group in groups)
    return known and not _is_zero(BY_KEY[key], groups)


def _is_zero(column: Metric, groups: Sequence[Group]) -> bool:
    found = [spread for group in groups if (spread := group.spread(column.key))]
    return bool(found) and not any(spread.low or spread.high for spread in found)


def _line(column: Metric, groups: Sequence[Group]) -> Line:
    """Return a figure for all strategies."""
    return Line(column, tuple(_cell(column, group) for group in groups))


def _cell(column: Metric, group: Group) -> Cell:
    spread = group.spread(column.key)
    if spread is None:
        return Cell(NOT_APPLICABLE, "")
    low, high = column.text(spread.low), column.text(spread.high)
    partly = "" if spread.count == len(group.trials) else f" ({spread.count} trials)"
    return Cell(column.text(spread.mean), ("" if low == high else f"{low} – {high}") + partly)


def texts(outcome: Outcome) -> list[str]:
    """Return the figures of `PER_TRIAL` of one trial."""
    row = outcome.row()
    return [outcome.score.of(BY_KEY[key]).text(row[key]) for key in PER_TRIAL]


def in_reading_order(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the trials by condition, strategy and seed."""
    return [
        outcome
        for group in summarize(outcomes)
        for outcome in sorted((*group.trials, *group.left_out), key=lambda o: o.identity.seed or 0)
    ]


def definitions(score: Score = ACCURACY) -> list[Metric]:
    """Return the figures that the tables show, to be explained, of models with a score."""
    shown = {key for keys in COMPARED.values() for key in keys} | {
        *PER_TRIAL,
        *words.MUST_BE_ZERO,
        "status",
    }
    told = shown - score.same_as
    return [score.of(column) for column in COLUMNS if column.key in told]


def price_rows(prices: Prices) -> list[tuple[str, str, str]]:
    """Return what is paid for, its price, and where that is from."""
    ways = {"node_hour": "on demand", "spot_hour": "spot", "fixed_hour": "for a fixed term"}
    rows = [
        (f"hour of a {role} node, {how}", f"{usd:g}", prices.sources.get(f"{way}.{role}", ""))
        for way, how in ways.items()
        for role, usd in getattr(prices, way).items()
    ]
    return [
        *rows,
        ("GB moved", f"{prices.gb_moved:g}", prices.sources.get("gb_moved", "")),
        (
            "GB stored for a month",
            f"{prices.gb_month_stored:g}",
            prices.sources.get("gb_month_stored", ""),
        ),
    ]
