"""Owns the report of an experiment: one HTML file that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dps.errors import ConfigurationError, StoreUnavailable
from flows import words
from flows.columns import BY_KEY, COLUMNS, NOT_APPLICABLE, Column
from flows.figures import STRATEGY_COLOURS, Gallery, Trial, svg
from flows.outcome import Outcome, outcome
from flows.prices import Prices, load_prices
from flows.record import event_files, read_record
from flows.repeat import experiment_yaml, versions
from flows.summary import Group, summarize
from flows.words import Sentence

TEMPLATE = "report.jinja"

COMPARED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Accuracy",
        (
            "accuracy_final",
            "accuracy_best",
            "accuracy_before",
            "accuracy_after",
            "accuracy_drop",
            "regain_seconds",
        ),
    ),
    (
        "Recovery",
        (
            "detect_seconds",
            "restore_seconds",
            "wait_capacity_seconds",
            "first_applied_seconds",
            "rto_seconds",
        ),
    ),
    (
        "Updates, each on one shard",
        (
            "updates_attempted",
            "updates_acked",
            "updates_applied",
            "updates_lost",
            "updates_buffered",
            "updates_replayed",
            "updates_duplicates",
            "updates_applied_twice",
        ),
    ),
    (
        "Staleness",
        ("staleness_median", "staleness_p99", "staleness_max", "staleness_p99_seconds"),
    ),
    (
        "Time and resources",
        (
            "training_seconds",
            "updates_per_second",
            "cpu_seconds_all",
            "cpu_seconds_server",
            "cpu_seconds_replica",
            "cpu_seconds_store",
            "cpu_seconds_worker",
            "peak_bytes_all",
            "peak_bytes_server",
            "peak_bytes_replica",
            "peak_bytes_store",
            "peak_bytes_worker",
            "sent_bytes_all",
            "sent_bytes_server",
            "sent_bytes_replica",
            "sent_bytes_store",
            "sent_bytes_worker",
            "received_bytes_all",
            "checkpoint_written_bytes",
            "stored_bytes",
        ),
    ),
    ("Money", ("cost_nodes_usd", "cost_moved_usd", "cost_stored_usd", "cost_usd")),
)

PER_TRIAL = (
    "seed",
    "accuracy_final",
    "accuracy_before",
    "accuracy_after",
    "regain_seconds",
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
    "updates_per_second",
    "cpu_seconds_all",
    "peak_bytes_all",
    "sent_bytes_all",
    "cost_usd",
)

GLANCE: tuple[tuple[str, str], ...] = (
    ("rto_seconds", "until the next update was applied"),
    ("accuracy_drop", "drop in accuracy"),
    ("regain_seconds", "until the accuracy was back"),
    ("updates_lost", "acked updates lost"),
    ("updates_replayed", "gradients of the outage applied after it"),
    ("accuracy_final", "final accuracy"),
)

MUST_BE_ZERO = ("updates_applied_twice", "updates_replica_conflicts", "updates_audit_mismatches")


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure on the page; `title` and `note` are read with it."""

    title: str
    note: str
    svg: str
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in the comparison: the mean, and the range where there is one."""

    mean: str
    range: str


@dataclass(frozen=True, slots=True)
class Line:
    """One figure compared between the strategies."""

    column: Column
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures under one condition, strategies side by side."""

    condition: str
    strategies: tuple[str, ...]
    counts: tuple[int, ...]
    sections: tuple[tuple[str, tuple[Line, ...]], ...]


@dataclass(frozen=True, slots=True)
class Glance:
    """The few figures that most people come for, for one condition with a fault."""

    condition: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What is said in words about one condition."""

    condition: str
    opening: str
    sentences: tuple[Sentence, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that must be 0 in every trial, and the trials in which it is not."""

    column: Column
    broken: tuple[str, ...]


def write_report(folder: Path, output: Path, prices: Prices | None = None) -> Path:
    """Write the report of the experiment whose trials are in `folder`; return where it is.

    Parameters
    ----------
    folder
        Holds a folder with a record for each trial.
    output
        The HTML file; replaced as a whole.
    prices
        The price table; None: the one that comes with the package.

    Raises
    ------
    ConfigurationError
        There is no record in the folder, or one cannot be read.
    StoreUnavailable
        The report cannot be written.
    """
    prices = prices or load_prices()
    found = read_trials(folder, prices)
    if not found:
        raise ConfigurationError(
            f"{folder}: no trial has been recorded here. Run the experiment first: dps run CONFIG"
        )
    page = render(found, prices)
    unfinished = output.with_name(f".{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(output)
    except OSError as error:
        raise StoreUnavailable(
            f"the report cannot be written to {output}: {error.strerror or error}"
        ) from error
    return output


def read_trials(folder: Path, prices: Prices) -> list[Trial]:
    """Read the trials of an experiment, in the order in which they were started.

    A record that was cut off before its first event is left out.
    """
    records = [record for file in event_files(folder) if (record := read_record(file)).started]
    records.sort(key=lambda record: record.events[0].t)
    return [(record, outcome(record, prices)) for record in records]


def render(trials: Sequence[Trial], prices: Prices) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flows", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(**_content(trials, prices))


def _content(trials: Sequence[Trial], prices: Prices) -> dict[str, Any]:
    outcomes = [outcome for _, outcome in trials]
    records = [record for record, _ in trials]
    groups = [group for group in summarize(outcomes) if group.trials]
    gallery = Gallery(trials)
    return {
        "experiment": outcomes[0].identity.experiment or "experiment",
        "facts": _facts(trials),
        "glance": _glance(groups),
        "told": _told(groups),
        "caution": words.caution(groups),
        "left_out": [outcome for outcome in outcomes if not outcome.valid],
        "checks": _checks(outcomes),
        "strategies": gallery.strategies,
        "looks": gallery.looks,
        "colours": {colour: f"strategy-{i}" for i, colour in enumerate(STRATEGY_COLOURS)},
        "accuracy": list(_accuracy_pictures(gallery)),
        "through": list(_fault_pictures(gallery)),
        "bars": list(_bar_pictures(gallery)),
        "comparisons": [_comparison(groups, c) for c in reversed(gallery.conditions)],
        "trial_columns": [BY_KEY[key] for key in PER_TRIAL],
        "trials": [(outcome, _texts(outcome)) for outcome in _in_reading_order(outcomes)],
        "definitions": _definitions(),
        "yaml": experiment_yaml(records),
        "versions": versions(records),
        "prices": _price_rows(prices),
    }


# -- words ------------------------------------------------------------------------------------


def _facts(trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Return what a reader wants to know first, as names and values."""
    from datetime import UTC, datetime

    outcomes = [outcome for _, outcome in trials]
    config = trials[0][0].started.settings.get("config", {}) if trials[0][0].started else {}
    day = datetime.fromtimestamp(max(r.events[-1].t for r, _ in trials), UTC)
    training, server = config.get("training", {}), config.get("server", {})
    valid = sum(outcome.valid for outcome in outcomes)
    trials_text = f"{len(outcomes)}" + (
        "" if valid == len(outcomes) else f", {valid} of them valid"
    )
    seeds = sorted({o.identity.seed for o in outcomes if o.identity.seed is not None})
    workload, dataset = (config.get(k, {}).get("kind", "") for k in ("workload", "dataset"))
    facts = [
        ("trials", trials_text),
        ("seeds", ", ".join(map(str, seeds))),
        ("training", f"{workload} on {dataset}" if workload else ""),
        ("gradients", f"{training['updates']:,}" if "updates" in training else ""),
        ("workers · shards", f"{training.get('workers', '')} · {server.get('shards', '')}"),
        ("consistency", _kind(config.get("consistency", {}))),
        ("finished", day.strftime("%-d %B %Y, %H:%M UTC")),
    ]
    return [(name, value) for name, value in facts if value.strip(" ·")]


def _glance(groups: Sequence[Group]) -> list[Glance]:
    """Return one table per condition with a fault, with what being prepared costs without one."""
    tables = []
    for condition in dict.fromkeys(group.condition for group in groups if group.faulty):
        members = [group for group in groups if group.condition == condition]
        quiet = [_quiet(groups, group) for group in members]
        base = words.baseline_of([group for group in quiet if group])
        rows = [
            (group.strategy, (*(_glance_cell(group, key) for key, _ in GLANCE), _price(q, base)))
            for group, q in zip(members, quiet, strict=True)
        ]
        headings = [heading for _, heading in GLANCE]
        against = f"money without a fault, against {base.strategy}" if base else "money"
        tables.append(Glance(condition, (*headings, against), tuple(rows)))
    return tables


def _glance_cell(group: Group, key: str) -> Cell:
    column = BY_KEY[key]
    cell = _cell(column, group)
    unit = {"s": " s", "%": "%", "points": " points"}.get(column.unit, "")
    return Cell(cell.mean if cell.mean == NOT_APPLICABLE else cell.mean + unit, cell.range)


def _price(group: Group | None, base: Group | None) -> Cell:
    ratio = words.ratio(group, base, "cost_usd") if group and base else None
    return Cell(NOT_APPLICABLE if ratio is None else f"× {ratio:.2f}", "")


def _kind(section: dict[str, Any]) -> str:
    rest = [f"{key} {value}" for key, value in section.items() if key != "kind"]
    return " ".join([str(section.get("kind", "")).upper(), *rest])


def _told(groups: Sequence[Group]) -> list[Told]:
    told = []
    for condition in dict.fromkeys(group.condition for group in groups):
        members = [group for group in groups if group.condition == condition]
        if any(group.faulty for group in members):
            said = [words.through_fault(group, _quiet(groups, group)) for group in members]
            told.append(Told(condition, words.plan(members), tuple(said)))
        else:
            baseline = words.baseline_of(members)
            said = [words.without_fault(group, baseline) for group in members]
            told.append(Told(condition, "", tuple(said)))
    # What a fault does is what people come for; what it costs to be prepared comes next.
    return sorted(told, key=lambda part: not part.opening)


def _quiet(groups: Sequence[Group], group: Group) -> Group | None:
    """Return the same strategy without a fault, if there is exactly one such group."""
    same = [g for g in groups if g.strategy == group.strategy and not g.faulty]
    return same[0] if len(same) == 1 else None


def _checks(outcomes: Sequence[Outcome]) -> list[Check]:
    rows = [outcome.row() for outcome in outcomes]
    return [
        Check(BY_KEY[key], tuple(row["trial"] for row in rows if row[key])) for key in MUST_BE_ZERO
    ]


# -- figures ----------------------------------------------------------------------------------


def _accuracy_pictures(gallery: Gallery) -> Iterator[Picture]:
    for number, condition in enumerate(gallery.conditions):
        hit = any(g.faulty for g in gallery.groups if g.condition == condition)
        note = "A thin line per seed; the marker is where a trial ended."
        if hit:
            note += " Bars at the foot, one per trial: from the fault until the shard served again."
        figure = gallery.accuracy(condition)
        yield Picture(condition or "all trials", note, svg(figure, f"accuracy-{number}"))


def _fault_pictures(gallery: Gallery) -> Iterator[Picture]:
    quiet = [g.condition for g in gallery.groups if not g.faulty]
    reference = quiet[0] if len(set(quiet)) == 1 else None
    several = len({g.condition for g in gallery.groups if g.faulty}) > 1
    for number, group in enumerate(g for g in gallery.groups if g.faulty):
        figure = gallery.through_fault(group.strategy, group.condition, reference)
        title = f"{group.strategy}, {group.condition}" if several else group.strategy
        note = words.moments(group)
        yield Picture(title, note, svg(figure, f"through-{number}"), group.strategy)


def _bar_pictures(gallery: Gallery) -> Iterator[Picture]:
    if any(group.spread("rto_seconds") for group in gallery.groups):
        yield Picture(
            "Time to recover",
            "Mean over seeds. How long a fresh node takes to come is set by the fault plan, not by "
            "the strategy.",
            svg(gallery.recovery_time(), "recovery"),
        )
    yield Picture(
        "Staleness of applied gradients",
        "Versions between the weights a gradient came from and the state it was applied to; mean "
        "over seeds. The scale is linear up to 10, logarithmic above.",
        svg(gallery.staleness(), "staleness"),
    )
    for condition in gallery.conditions[:1]:
        under = f" ({condition})" if condition else ""
        yield Picture(
            f"Processor time of the serving nodes{under}",
            "Mean over seeds; from process start on.",
            svg(gallery.serving_cpu(condition), "cpu"),
        )
        yield Picture(
            f"Bytes sent, by kind of link{under}",
            "Mean over seeds; all nodes together.",
            svg(gallery.bytes_sent(condition), "sent"),
        )


# -- tables -----------------------------------------------------------------------------------


def _comparison(groups: Sequence[Group], condition: str) -> Comparison:
    members = [group for group in groups if group.condition == condition]
    sections = [
        (title, tuple(line for key in keys if (line := _line(BY_KEY[key], members))))
        for title, keys in COMPARED
    ]
    return Comparison(
        condition,
        strategies=tuple(group.strategy for group in members),
        counts=tuple(len(group.trials) for group in members),
        sections=tuple((title, lines) for title, lines in sections if lines),
    )


def _line(column: Column, groups: Sequence[Group]) -> Line | None:
    """Return a figure for all strategies; None where it applies to none of them."""
    if all(group.spread(column.key) is None for group in groups):
        return None
    return Line(column, tuple(_cell(column, group) for group in groups))


def _cell(column: Column, group: Group) -> Cell:
    spread = group.spread(column.key)
    if spread is None:
        return Cell(NOT_APPLICABLE, "")
    low, high = column.text(spread.low), column.text(spread.high)
    partly = "" if spread.count == len(group.trials) else f" ({spread.count} trials)"
    return Cell(column.text(spread.mean), ("" if low == high else f"{low} – {high}") + partly)


def _texts(outcome: Outcome) -> list[str]:
    row = outcome.row()
    return [BY_KEY[key].text(row[key]) for key in PER_TRIAL]


def _in_reading_order(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [
        outcome
        for group in summarize(outcomes)
        for outcome in sorted((*group.trials, *group.left_out), key=lambda o: o.identity.seed or 0)
    ]


def _definitions() -> list[Column]:
    shown = {key for _, keys in COMPARED for key in keys} | {*PER_TRIAL, *MUST_BE_ZERO, "status"}
    return [column for column in COLUMNS if column.key in shown]


def _price_rows(prices: Prices) -> list[tuple[str, str, str]]:
    rows = [
        (f"hour of a {role} node", f"{usd:g}", prices.sources.get(f"node_hour.{role}", ""))
        for role, usd in prices.node_hour.items()
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
