"""The comparison of an experiment's strategies: per condition and metric, against a baseline.

Only valid trials enter, paired by their seed. All of it is exploratory: it shows where to look, and
its intervals and p-values are not corrected for how many there are. Verdicts are of claims alone
(`flows.analysis.statistics.claims`). What to compare by is kept beside the records, so that it can
be changed without running anything again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dps.errors import ConfigurationError
from dps.protocol.durabilities.presets import PRESETS
from flows.analysis.groups import conditions, strategies
from flows.analysis.left_out import why_unknown
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import (
    FEWEST_SEEDS,
    SIGNIFICANCE,
    Difference,
    Interval,
    interval,
    paired,
)
from flows.analysis.statistics.power import repeats_needed
from flows.config.base import ComparisonSection
from flows.config.errors import reading_kept, suggest
from flows.files import write_whole
from flows.metrics import BY_KEY

COMPARISON_FILE = "comparison.json"
LEAST_SHOWN = 0.001  # of a p-value

# By condition and strategy, what is known of the valid trials by seed; see `known`.
Trials = Mapping[int, Mapping[str, Any]]
Rows = Mapping[tuple[str, str], Trials]


# What the difference is, without a claim: the interval of 95% lies on one side of 0, or does not.
Reading = Literal["higher", "lower", "unclear", "too few seeds", "not comparable"]


@dataclass(frozen=True, slots=True)
class Uneven:
    """In how many of `seeds` a strategy and the baseline have a figure, where not in the same."""

    mine: int
    theirs: int
    seeds: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of one strategy under one condition, beside the baseline.

    Attributes
    ----------
    interval
        Of the strategy's own values; None where it has none, but the baseline has.
    uneven
        What makes a figure not comparable: for some seed, only one of the two came to have it, as
        with a target that was not reached. The seeds that are left are those in which a strategy
        did well, so there is neither difference nor test.
    difference
        Strategy minus baseline, seed by seed; None for the baseline itself, where no seed is
        valid for both, and where the figure is not comparable.
    reading
        What the difference is by itself; None for the baseline. It is no verdict: nothing is
        corrected for how many differences are looked at.
    repeats_needed
        Seeds that would show the difference seen, or the one that the configuration names, with a
        probability of 80%; None where that cannot be told.
    """

    metric: str
    condition: str
    strategy: str
    baseline: str
    interval: Interval | None
    uneven: Uneven | None
    difference: Difference | None
    reading: Reading | None
    repeats_needed: int | None

    @property
    def said(self) -> str:
        """The reading in words, with the reason where there is none."""
        uneven, found = self.uneven, self.difference
        if uneven is not None:
            return uneven_told(uneven)
        if found is not None and found.constant and not found.mean:
            return f"no difference in any of {found.n} seeds"
        if self.reading == "too few seeds" and found is not None and found.constant:
            return f"the same in all {found.n} seeds: too few to tell"
        return self.reading or ""

    @property
    def p(self) -> str:
        """The p-value of the difference by itself; nothing without a test."""
        found = self.difference
        return "" if found is None or found.p is None else p_text(found.p)


def uneven_told(uneven: Uneven) -> str:
    """Say why a figure is not comparable."""
    counts = f"{uneven.mine} of {uneven.seeds} seeds against {uneven.theirs}"
    return f"not comparable: a value in {counts} of {uneven.seeds}"


def p_text(p: float) -> str:
    """Return a p-value as readers expect it."""
    if p < LEAST_SHOWN:
        return f"<{LEAST_SHOWN:g}"
    return f"{p:.3f}" if p < 2 * SIGNIFICANCE else f"{p:.2f}"


def compared(
    outcomes: Sequence[Outcome], section: ComparisonSection, rng: np.random.Generator
) -> tuple[Compared, ...]:
    """Compare all strategies with the baseline, under each condition and by each metric.

    Rows come by condition, strategy and metric. A metric that no valid trial of a strategy has,
    nor of the baseline, such as the recovery time without a fault, has no row.

    Parameters
    ----------
    outcomes
        The trials of one experiment; those that are not valid are left out.
    section
        The baseline and the metrics.
    rng
        Draws the subsets by which counts of many seeds are judged.

    Raises
    ------
    ConfigurationError
        The experiment has no such strategy as the baseline.
    """
    baseline = baseline_of(outcomes, section)
    if baseline is None:
        return ()
    names = conditions(outcomes), strategies(outcomes)
    rows = rows_by(outcomes, lambda each: (each.identity.condition, each.identity.strategy))
    return compare_rows(rows, *names, baseline, section, rng)


def rows_by(outcomes: Iterable[Outcome], place: Callable[[Outcome], tuple[str, str]]) -> Rows:
    """Return what is known of the valid trials, each at its `place`: condition and strategy."""
    rows: defaultdict[tuple[str, str], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for outcome in outcomes:
        if outcome.valid and outcome.identity.seed is not None:
            rows[place(outcome)][outcome.identity.seed] = known(outcome)
    return rows


def compare_rows(
    rows: Rows,
    conditions: Sequence[str],
    strategies: Sequence[str],
    baseline: str,
    section: ComparisonSection,
    rng: np.random.Generator,
) -> tuple[Compared, ...]:
    """Compare strategies with one of them by rows of figures; see `compared`."""
    found = [
        _measured(rows, condition, strategy, baseline, metric, section, rng)
        for condition in conditions
        for strategy in strategies
        for metric in section.metrics
    ]
    return tuple(row for row in found if row is not None)


def baseline_of(outcomes: Sequence[Outcome], section: ComparisonSection) -> str | None:
    """Return the strategy that the others are compared with; None where there is no trial.

    Raises
    ------
    ConfigurationError
        The configuration names one that does not occur.
    """
    known = strategies(outcomes)
    if section.baseline is None or not known:
        unprotected = next(iter(PRESETS))
        return unprotected if unprotected in known else next(iter(known), None)
    if section.baseline not in known:
        raise ConfigurationError(
            f"comparison.baseline: no trial is of a strategy {section.baseline!r}; "
            f"{suggest(section.baseline, known)}"
        )
    return section.baseline


def known(outcome: Outcome) -> Mapping[str, Any]:
    """Return a trial's figures, without unknown ones (see `why_unknown`).

    None means that an event did not happen, such as reaching the target.
    """
    row = outcome.row()
    return {k: v for k, v in row.items() if v is not None or not why_unknown(outcome, k)}


def write_comparison(folder: Path, section: ComparisonSection) -> None:
    """Keep what the experiment in `folder` is compared by, as of its last run.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    text = section.model_dump_json(indent=1)
    write_whole(folder / COMPARISON_FILE, text, "what is compared by")


def read_comparison(folder: Path) -> ComparisonSection:
    """Return what the experiment in `folder` is compared by; the defaults if that was not kept.

    Raises
    ------
    ConfigurationError
        The file was changed by hand, and does not say what it should.
    """
    path = folder / COMPARISON_FILE
    if not path.exists():
        return ComparisonSection()
    with reading_kept(path):
        return ComparisonSection.model_validate(json.loads(path.read_text(encoding="utf-8")))


def values_of(trials: Trials, metric: str) -> dict[int, float]:
    """Return the finite values of a figure by seed."""
    found = {seed: row.get(metric) for seed, row in trials.items()}
    return {seed: float(v) for seed, v in found.items() if v is not None and isfinite(v)}


def uneven(trials: Trials, base: Trials, metric: str) -> Uneven | None:
    """Return in how many seeds each of two has a figure; None if it is in the same seeds."""
    shared = trials.keys() & base.keys()
    seeds = {seed for seed in shared if metric in trials[seed] and metric in base[seed]}
    mine, theirs = (seeds & values_of(each, metric).keys() for each in (trials, base))
    return None if mine == theirs else Uneven(len(mine), len(theirs), len(seeds))


# -- parts -------------------------------------------------------------------------------------


def _measured(
    rows: Rows,
    condition: str,
    strategy: str,
    baseline: str,
    metric: str,
    section: ComparisonSection,
    rng: np.random.Generator,
) -> Compared | None:
    """One row; None where there is no value."""
    trials, base = (rows.get((condition, name), {}) for name in (strategy, baseline))
    mine, gap = values_of(trials, metric), uneven(trials, base, metric)
    if not mine and gap is None:
        return None
    counts = BY_KEY[metric].unit == "count"
    spread = None
    if mine:
        spread = interval([mine[seed] for seed in sorted(mine)], rng, counts=counts)
    names = (metric, condition, strategy, baseline)
    if strategy == baseline:
        return Compared(*names, spread, gap, None, None, None)
    difference = None
    if gap is None:
        difference = paired(mine, values_of(base, metric), rng, counts)
    repeats = _repeats(difference, section.resolve.get(metric), counts)
    return Compared(*names, spread, gap, difference, _reading(gap, difference), repeats)


def _reading(gap: Uneven | None, found: Difference | None) -> Reading:
    if gap is not None:
        return "not comparable"
    if found is None or found.n < FEWEST_SEEDS or found.low is None:
        return "too few seeds"
    if not found.excludes_zero:
        return "unclear"
    return "higher" if found.mean > 0 else "lower"


def _repeats(found: Difference | None, resolve: float | None, counts: bool) -> int | None:
    if found is None or found.sd is None:
        return None
    return repeats_needed(found.sd, found.mean if resolve is None else resolve, exact=counts)
