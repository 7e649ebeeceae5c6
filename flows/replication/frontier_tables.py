"""The tables of docs/who-wins-when.md: each is made of the records of one experiment, in Markdown.

A `Study` is what was recorded of an experiment. `SECTIONS` has, by name, whose records a section of
the page is made of, and how. Means are over seeds, with half of the 95% interval by Student's t;
differences are taken seed by seed, with that interval. Neither is corrected for how many there are;
those of claims are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from flows.analysis.comparison import known
from flows.analysis.effects.difference import Effect
from flows.analysis.groups import strategies
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import FEWEST_SEEDS, interval, paired
from flows.analysis.statistics.claims import JudgedClaim, PlannedClaim, judge, planned
from flows.config.claims import ClaimSection
from flows.replication.claims import markdown_table
from flows.report.claims import effect, reason, title

Labels = Mapping[str, str]
Row = Mapping[str, Any]

FAULTS, OUTAGE = "faults", "faults.*.back_after"
WORKERS, HIDDEN, PROFILE = "training.workers", "workload.hidden", "cluster.profile"
QUIET: Labels = {FAULTS: "mtbf inf"}


@dataclass(frozen=True)
class Study:
    """What was recorded of an experiment.

    Attributes
    ----------
    outcomes
        Its trials, all that are planned; those that are not valid enter nothing but the counts.
    claims
        What was fixed beforehand.
    nodes
        For each strategy, how many nodes it keeps beside workers and evaluator.
    common
        By trial, what its faults did over the span that all strategies of its seed have in common.
    """

    outcomes: Sequence[Outcome]
    claims: Sequence[ClaimSection]
    nodes: Mapping[str, int]
    common: Mapping[str, Effect] = field(default_factory=dict)

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those of the experiment, in the order of its configuration."""
        return strategies(self.outcomes)

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of its trials, in order."""
        return sorted(
            {each.identity.seed for each in self.outcomes if each.identity.seed is not None}
        )

    @cached_property
    def judged(self) -> tuple[JudgedClaim, ...]:
        """Its claims with their verdicts."""
        return judge(self.outcomes, self.claims, np.random.default_rng(0))

    @cached_property
    def planned(self) -> tuple[PlannedClaim, ...]:
        """What this number of seeds resolves of each claim, going by how much they differ here."""
        return planned(self.claims, len(self.seeds), self.outcomes, np.random.default_rng(0))

    def values(self, strategy: str, labels: Labels, figure: Figure) -> dict[int, float]:
        """Return a figure by seed, of the valid trials that have it, in the units it is shown in.

        Raises
        ------
        ValueError
            There is no valid trial of that strategy and those labels.
        """
        rows = {
            each.identity.seed: {**known(each), **self._spans(each)}
            for each in self.outcomes
            if each.valid
            and each.identity.strategy == strategy
            and labels.items() <= each.identity.labels.items()
        }
        if not rows:
            raise ValueError(f"no valid trial of {strategy!r} with {dict(labels)}")
        found = {seed: figure.of(row) for seed, row in rows.items() if seed is not None}
        return {
            seed: v * figure.scale for seed, v in found.items() if v is not None and isfinite(v)
        }

    def _spans(self, trial: Outcome) -> Row:
        """How long the span is that the effect of its faults is of; and both for the common one."""
        own, common = trial.effects.time, self.common.get(trial.identity.trial)
        return {
            "own_span": own.span if own else None,
            "common_span": common.span if common else None,
            "common_mean": common.mean if common else None,
        }


@dataclass(frozen=True)
class Figure:
    """A figure of a trial: how it is found in the row of all its figures, and how it is shown."""

    of: Callable[[Row], float | None]
    scale: float = 1.0
    digits: int = 1


@dataclass(frozen=True)
class Column:
    """A figure under a condition."""

    heading: str
    figure: Figure
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes
    ----------
    experiment
        Whose records it is made of.
    columns
        Of a table with a row for each strategy, or for each pair.
    pairs
        Of strategies, by how much the first is above the second; without any, means are shown.
    contrasts
        Of columns, by how much each strategy is above under the first what it is under the second.
    of
        The strategies whose means or contrasts are shown, if not those of all.
    text
        What makes the section of the records, where it is no such table.
    parts
        Sections of the same experiment that it is made of instead, each with what it is said to be.
    """

    experiment: str
    columns: Sequence[Column] = ()
    pairs: Sequence[tuple[str, str]] = ()
    contrasts: Sequence[tuple[Column, Column]] = ()
    of: Sequence[str] = ()
    text: Callable[[Study], str] | None = None
    parts: Sequence[tuple[str, Section]] = ()

    def made(self, study: Study) -> str:
        """Return the section in Markdown."""
        if self.parts:
            return "\n\n".join(f"{said}\n\n{part.made(study)}" for said, part in self.parts)
        if self.text is not None:
            return self.text(study)
        if self.pairs:
            return differences(study, self.columns, self.pairs)
        if self.contrasts:
            return contrasts(study, self.contrasts, self.of or study.strategies)
        return table(study, self.columns, self.of or study.strategies)


def named(key: str, scale: float = 1.0, digits: int = 1) -> Figure:
    """Return the figure of that name in the records."""
    return Figure(lambda row: row.get(key), scale, digits)


def _fixed_term(row: Row) -> float | None:
    """Money for nodes alone that are rented for a fixed term, for all of the training."""
    total, moved, stored = (row[f"cost_{part}_usd"] for part in ("fixed", "moved", "stored"))
    return None if total is None else float(total - moved - stored)


def _fixed_term_to_target(row: Row) -> float | None:
    """The same until the target: they cost the same in each second, up or not."""
    whole, seconds, until = _fixed_term(row), row["training_seconds"], row["target_seconds"]
    return None if whole is None or until is None else whole / seconds * until


POINTS, FINAL = named("effect_time_mean", 100), named("accuracy_final", 100)
POINTS_FOR_MONEY = named("effect_money_mean", 100)
TARGET, COST = named("target_usd", 1000, 2), named("cost_usd", 1000, 2)
FIXED, TARGET_FIXED = Figure(_fixed_term, 1000, 2), Figure(_fixed_term_to_target, 1000, 2)
LOST, MET, LASTS = named("updates_lost", 1, 0), named("faults"), named("training_seconds")
OWN_SPAN, COMMON_SPAN = named("own_span"), named("common_span")
COMMON = named("common_mean", 100)
DOWN = named("downtime_seconds")


# -- cells and tables --------------------------------------------------------------------------


def number(value: float, digits: int) -> str:
    """Return a number with a real minus, and without one before zeros."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def mean_cell(values: Sequence[float], digits: int, seeds: int) -> str:
    """Return mean ± half of its 95% interval; in brackets the seeds, where these are not all."""
    few = "" if len(values) == seeds else f" ({len(values)})"
    if not values:
        return f"–{few}"
    found = interval(values, np.random.default_rng(0))
    text = number(found.mean, digits)
    if found.high is None or found.n < FEWEST_SEEDS:
        return text + few
    return f"{text} ±{number(found.high - found.mean, digits)}{few}"


def difference_cell(values: Mapping[int, float], others: Mapping[int, float], digits: int) -> str:
    """Return the mean difference over shared seeds, with its 95% interval."""
    if values.keys() != others.keys():
        return f"not comparable ({len(values)} and {len(others)} seeds)"
    found = paired(values, others, np.random.default_rng(0))
    if found is None:
        return "–"
    mean = number(found.mean, digits)
    if found.low is None or found.high is None:
        return mean
    return f"{mean} [{number(found.low, digits)}, {number(found.high, digits)}]"


def table(study: Study, columns: Sequence[Column], shown: Sequence[str]) -> str:
    """Return means of some strategies, each in a row, with the nodes that it keeps."""
    rows = []
    for strategy in shown:
        name = f"{strategy} ({study.nodes[strategy]})"
        cells = [
            mean_cell(
                list(study.values(strategy, each.labels, each.figure).values()),
                each.figure.digits,
                len(study.seeds),
            )
            for each in columns
        ]
        rows.append([name, *cells])
    return markdown_table(["strategy", *(each.heading for each in columns)], rows)


def differences(study: Study, columns: Sequence[Column], pairs: Sequence[tuple[str, str]]) -> str:
    """Return by how much the first of each pair is above the second."""
    rows = []
    for first, second in pairs:
        cells = [
            difference_cell(
                study.values(first, each.labels, each.figure),
                study.values(second, each.labels, each.figure),
                each.figure.digits,
            )
            for each in columns
        ]
        rows.append([f"{first} − {second}", *cells])
    return markdown_table(["pair", *(each.heading for each in columns)], rows)


def contrasts(study: Study, pairs: Sequence[tuple[Column, Column]], shown: Sequence[str]) -> str:
    """Return by how much some strategies are above under one condition what under another."""
    rows = []
    for first, second in pairs:
        cells = [
            difference_cell(
                study.values(strategy, first.labels, first.figure),
                study.values(strategy, second.labels, second.figure),
                first.figure.digits,
            )
            for strategy in shown
        ]
        rows.append([f"{first.heading} − {second.heading}", *cells])
    return markdown_table(["pair", *shown], rows)


def runs(study: Study) -> str:
    """Say how many trials and seeds there are, and how many of them are valid."""
    seeds, trials = study.seeds, study.outcomes
    whole = seeds == list(range(seeds[0], seeds[-1] + 1))
    which = f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))
    invalid = sum(not each.valid for each in trials)
    valid = "all valid" if not invalid else f"{invalid} of them not valid and left out"
    return f"**n = {len(seeds)} seeds** ({which}), {len(trials):,} trials, {valid}."


def claims(study: Study) -> str:
    """Return the claims with what was found of them, and what it takes to resolve each."""
    rows = [
        [title(each.claim), effect(each), f"{each.decision.verdict}: {reason(each)}", _power(plan)]
        for each, plan in zip(study.judged, study.planned, strict=True)
    ]
    headings = ["claim, fixed beforehand", "found", "verdict", "power; seeds for 80%"]
    return markdown_table(headings, rows)


def _power(plan: PlannedClaim) -> str:
    if plan.sd is None or plan.power is None:
        return "–"
    power = f"{plan.power:.0%}" if plan.power < 0.995 else ">99%"
    return f"{power}; {'over a million' if plan.needed is None else f'{plan.needed:,}'}"


# -- sections ----------------------------------------------------------------------------------

_CELLS: tuple[tuple[str, Labels], ...] = tuple(
    (f"{mtbf} / {outage}", {FAULTS: f"mtbf {mtbf}", OUTAGE: f"outage {outage}"})
    for mtbf in ("64", "24", "8")
    for outage in ("0.5", "2", "8")
)
_CELLS_AND_QUIET = (("no fault", QUIET), *_CELLS)
_SPARES = "checkpoint, warm"
_FRONTIER_PAIRS = (
    ("chain(2)", _SPARES),
    ("chain(3)", _SPARES),
    ("stateless", _SPARES),
    ("checkpoint, goes on", _SPARES),
    ("chain(2), goes on", "chain(2)"),
    ("chain(3)", "chain(2)"),
    ("stateless", "checkpoint, goes on"),
    ("checkpoint, goes on", "checkpoint, cold"),
    ("worker cache", "checkpoint, cold"),
)
_ALL_PAIRS = (
    ("stateless", "chain(2)"),
    ("chain(2), spares", "chain(3)"),
    ("chain(3)", _SPARES),
    ("chain(2), spares", _SPARES),
)
_ALL_CLAIMED = (
    ("stateless", _SPARES),
    ("chain(2)", _SPARES),
    ("chain(2), spares", "chain(3)"),
)
_LAYERS_PAIRS = (
    ("chain(2) + checkpoint", _SPARES),
    ("stateless + checkpoint", _SPARES),
    ("chain(2) + checkpoint", "chain(2)"),
    ("stateless + checkpoint", "stateless"),
)
_STORES_PAIRS = (
    ("two stores", "one store"),
    ("two stores", _SPARES),
    ("two stores + checkpoint", "one store + checkpoint"),
    ("two stores + checkpoint", _SPARES),
)
_EVERYWHERE_PAIRS = (("worker cache, warm", _SPARES), ("chain(2) + checkpoint", _SPARES))
_FOUR_EACH_PAIRS = (
    ("chain", "checkpoint"),
    ("stateless", "checkpoint"),
    ("worker cache", "checkpoint"),
)


def _at(cells: Sequence[tuple[str, Labels]], figure: Figure) -> list[Column]:
    return [Column(heading, figure, labels) for heading, labels in cells]


_EVERY_24: Labels = {FAULTS: "mtbf 24"}
_EVERY_8: Labels = {FAULTS: "mtbf 8"}
_RATES = (("24 s", _EVERY_24), ("8 s", _EVERY_8))
_ALL_COLUMNS = (
    Column("no fault: final accuracy", FINAL, QUIET),
    Column("24 s: points at equal times", POINTS, _EVERY_24),
    Column("final accuracy", FINAL, _EVERY_24),
    Column("8 s: points at equal times", POINTS, _EVERY_8),
    Column("final accuracy", FINAL, _EVERY_8),
    Column("updates lost, of 320", LOST, _EVERY_8),
)
_MONEY_COLUMNS = (
    Column("faults met", MET, _EVERY_8),
    Column("down, s", DOWN, _EVERY_8),
    Column("lasts, s", LASTS, _EVERY_8),
    Column("money, on demand", COST, _EVERY_8),
    Column("money, fixed term", FIXED, _EVERY_8),
)
_COMMON_COLUMNS = tuple(
    Column(f"{when}: {heading}", figure, labels)
    for when, labels in _RATES
    for heading, figure in (
        ("own span, s", OWN_SPAN),
        ("points over it", POINTS),
        ("common span, s", COMMON_SPAN),
        ("points over it", COMMON),
    )
)
_EVERYWHERE_COLUMNS = (
    *_ALL_COLUMNS,
    Column("faults met", MET, _EVERY_8),
    Column("lasts, s", LASTS, _EVERY_8),
)
_CROWDS = ("2", "8", "32")
_WIDTHS = ("32", "512", "2048")
_BY_WORKERS = tuple(
    (f"{mtbf} s; {crowd}", {FAULTS: f"mtbf {mtbf}", WORKERS: f"{crowd} workers"})
    for mtbf in ("24", "8")
    for crowd in _CROWDS
)
_BY_WORKERS_AND_QUIET = (
    *((f"no fault; {n}", {**QUIET, WORKERS: f"{n} workers"}) for n in _CROWDS),
    *_BY_WORKERS,
)
_BY_SIZE = tuple((width, {**_EVERY_8, HIDDEN: f"hidden {width}"}) for width in _WIDTHS)
_SIZE_COLUMNS = (
    *(
        Column(f"no fault: lasts, s; {width}", LASTS, {**QUIET, HIDDEN: f"hidden {width}"})
        for width in _WIDTHS
    ),
    *(Column(f"8 s: points; {width}", POINTS, labels) for width, labels in _BY_SIZE),
)
_SIZE_FINALS = tuple(
    Column(f"{when}; {width}", FINAL, {**labels, HIDDEN: f"hidden {width}"})
    for when, labels in (("no fault", QUIET), ("8 s", _EVERY_8))
    for width in _WIDTHS
)

_STRIKES: tuple[tuple[str, Labels], ...] = tuple(
    (label, {FAULTS: label})
    for label in (
        *("kill", "pause 2", "pause 12", "cut 12", "one-way cut 12"),
        *("slow link 12", "both servers", "all copies"),
    )
)
_STRUCK_BY_ALL = (_SPARES, "chain(2)", "stateless")
_STRIKES_PAIRS = (("chain(2)", _SPARES), ("stateless", _SPARES), ("stateless", "chain(2)"))
_STRIKES_CONTRASTED = (
    ("pause 2", "kill"),
    ("pause 12", "kill"),
    ("cut 12", "pause 12"),
    ("one-way cut 12", "cut 12"),
    ("all copies", "kill"),
)
_ALL, _LAYERS, _STORES, _STRUCK, _WORKERS, _SIZE, _EVERYWHERE, _MODEL, _PROFILE = (
    f"frontier-{name}"
    for name in (
        *("all", "layers", "stores", "faults", "workers", "size"),
        *("everywhere", "model", "profile"),
    )
)
OVER_COMMON_SPANS = (_ALL, _LAYERS)
_RECORDED = (
    "frontier",
    *(_ALL, _LAYERS, _STORES, _STRUCK, _WORKERS, _SIZE, _EVERYWHERE, _MODEL, _PROFILE),
    "explore",
)

_ALL_LOST = (
    ("all copies", ("chain(2)", "chain(2) + checkpoint")),
    ("server + store", ("stateless", "stateless + checkpoint")),
)
_BELOW_PARTS = tuple(
    (
        f"{label[:1].upper()}{label[1:]}:",
        Section(
            _STRUCK,
            tuple(
                Column(heading, figure, {FAULTS: label})
                for heading, figure in (
                    ("points at equal times", POINTS),
                    ("final accuracy", FINAL),
                    ("updates lost, of 320", LOST),
                    ("down, s", DOWN),
                )
            ),
            of=who,
        ),
    )
    for label, who in _ALL_LOST
)

_PAIRS_SAID = "By how many points at equal times the first of a pair is above the second:"
_WORKERS_PARTS = (
    (
        "Points that faults cost at equal times, by the mean time in seconds and the workers:",
        Section(_WORKERS, _at(_BY_WORKERS, POINTS)),
    ),
    (_PAIRS_SAID, Section(_WORKERS, _at(_BY_WORKERS, POINTS), _FOUR_EACH_PAIRS)),
    ("Final accuracy:", Section(_WORKERS, _at(_BY_WORKERS_AND_QUIET, FINAL))),
)
_SIZE_PARTS = (
    (
        "How long trainings last without a failure, and the points that failures cost at equal "
        "times, by hidden units:",
        Section(_SIZE, _SIZE_COLUMNS),
    ),
    (_PAIRS_SAID, Section(_SIZE, _at(_BY_SIZE, POINTS), _FOUR_EACH_PAIRS)),
    ("Final accuracy:", Section(_SIZE, _SIZE_FINALS)),
)

SECTIONS: dict[str, Section] = {
    **{f"{name}: runs": Section(name, text=runs) for name in _RECORDED},
    **{f"{name}: claims": Section(name, text=claims) for name in (*_RECORDED, "partial")},
    "frontier: points": Section("frontier", _at(_CELLS, POINTS)),
    "frontier: differences": Section("frontier", _at(_CELLS, POINTS), _FRONTIER_PAIRS),
    "frontier: points-for-money": Section("frontier", _at(_CELLS, POINTS_FOR_MONEY)),
    "frontier: final": Section("frontier", _at(_CELLS_AND_QUIET, FINAL)),
    "frontier: target": Section("frontier", _at(_CELLS_AND_QUIET, TARGET)),
    "frontier: target-fixed": Section("frontier", _at(_CELLS_AND_QUIET, TARGET_FIXED)),
    "frontier: money": Section("frontier", _at(_CELLS_AND_QUIET, COST)),
    "frontier: money-fixed": Section("frontier", _at(_CELLS_AND_QUIET, FIXED)),
    "frontier-all: points": Section(_ALL, _ALL_COLUMNS),
    "frontier-all: money": Section(_ALL, _MONEY_COLUMNS),
    "frontier-all: differences": Section(_ALL, _at(_RATES, POINTS), _ALL_PAIRS),
    "frontier-layers: points": Section(_LAYERS, _ALL_COLUMNS),
    "frontier-layers: money": Section(_LAYERS, _MONEY_COLUMNS),
    "frontier-layers: differences": Section(_LAYERS, _at(_RATES, POINTS), _LAYERS_PAIRS),
    "frontier-stores: points": Section(_STORES, _ALL_COLUMNS),
    "frontier-stores: money": Section(_STORES, _MONEY_COLUMNS),
    "frontier-stores: differences": Section(_STORES, _at(_RATES, POINTS), _STORES_PAIRS),
    "frontier-faults: points": Section(_STRUCK, _at(_STRIKES, POINTS), of=_STRUCK_BY_ALL),
    "frontier-faults: differences": Section(
        _STRUCK, _at(_STRIKES, POINTS), _STRIKES_PAIRS, of=_STRUCK_BY_ALL
    ),
    "frontier-faults: contrasts": Section(
        _STRUCK,
        contrasts=tuple(
            (Column(one, POINTS, {FAULTS: one}), Column(other, POINTS, {FAULTS: other}))
            for one, other in _STRIKES_CONTRASTED
        ),
        of=_STRUCK_BY_ALL,
    ),
    "frontier-faults: down": Section(_STRUCK, _at(_STRIKES, DOWN), of=_STRUCK_BY_ALL),
    "frontier-faults: lost": Section(_STRUCK, _at(_STRIKES, LOST), of=_STRUCK_BY_ALL),
    "frontier-faults: final": Section(
        _STRUCK, _at((("no fault", {FAULTS: "no fault"}), *_STRIKES), FINAL), of=_STRUCK_BY_ALL
    ),
    "frontier-faults: below": Section(_STRUCK, parts=_BELOW_PARTS),
    "frontier-all: common": Section(_ALL, _COMMON_COLUMNS),
    "frontier-all: common-differences": Section(_ALL, _at(_RATES, COMMON), _ALL_CLAIMED),
    "frontier-layers: common-differences": Section(_LAYERS, _at(_RATES, COMMON), _LAYERS_PAIRS),
    "frontier-everywhere: points": Section(_EVERYWHERE, _EVERYWHERE_COLUMNS),
    "frontier-everywhere: differences": Section(
        _EVERYWHERE, _at(_RATES, POINTS), _EVERYWHERE_PAIRS
    ),
    "frontier-model: quiet": Section(_MODEL, (Column("no fault: final accuracy", FINAL, QUIET),)),
    "frontier-model: 24 s": Section(
        _MODEL,
        (
            Column("24 s: points at equal times", POINTS, _EVERY_24),
            Column("final accuracy", FINAL, _EVERY_24),
        ),
        of=(_SPARES, "chain(2), spares", "chain(3)", "stateless"),
    ),
    "frontier-model: 8 s": Section(
        _MODEL,
        (
            Column("8 s: points at equal times", POINTS, _EVERY_8),
            Column("final accuracy", FINAL, _EVERY_8),
        ),
        of=(_SPARES, "chain(2)", "stateless"),
    ),
    "frontier-profile: points": Section(
        _PROFILE,
        tuple(
            Column(f"{profile}: {heading}", figure, {**_EVERY_8, PROFILE: profile})
            for profile in ("half", "double")
            for heading, figure in (("points at equal times", POINTS), ("final accuracy", FINAL))
        ),
    ),
    "frontier-workers: tables": Section(_WORKERS, parts=_WORKERS_PARTS),
    "frontier-size: tables": Section(_SIZE, parts=_SIZE_PARTS),
}
