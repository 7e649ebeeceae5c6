"""The comparison of an experiment's strategies: per condition and metric, against a baseline.

Only valid trials enter, paired by their seed. The comparison is exploratory: its intervals and
p-values are not corrected for multiple comparisons. Only claims have verdicts
(`flows.statistics.claims`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from numpy.random import Generator
from pydantic import Field

from dps.errors import ConfigurationError
from dps.recovery.strategy import PRESETS
from flows.config.claims import ClaimSection
from flows.config.errors import reading_kept, suggest
from flows.config.sections import Section
from flows.config.settings import ComparisonSection
from flows.files import write_whole
from flows.metrics import BY_KEY
from flows.metrics.outcome import Outcome
from flows.statistics import MIN_SEEDS, SIGNIFICANCE, Difference, Interval, interval, paired
from flows.statistics.caveats import why_unknown
from flows.statistics.groups import conditions, strategies

QUESTIONS_FILE = "questions.json"
MIN_SHOWN = 0.001  # of a p-value

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
        Why a figure is not comparable: for some seed, only one of the two has a value, as with a
        target that was not reached. The remaining seeds are those in which a strategy did well, so
        there is no difference and no test.
    difference
        Strategy minus baseline, seed by seed; None for the baseline itself, where no seed is
        valid for both, and where the figure is not comparable.
    reading
        The result of this difference alone; None for the baseline. It is not a verdict: there is
        no correction for the number of differences.
    """

    metric: str
    condition: str
    strategy: str
    baseline: str
    interval: Interval | None
    uneven: Uneven | None
    difference: Difference | None
    reading: Reading | None

    @property
    def sentence(self) -> str:
        """The reading in words, or the reason why no comparison is possible."""
        return self.reading or "" if self.uneven is None else uneven_text(self.uneven)

    @property
    def p(self) -> str:
        """The p-value of the difference, not corrected; "" without a test."""
        gap = self.difference
        return "" if gap is None or gap.p is None else p_text(gap.p)


def uneven_text(uneven: Uneven) -> str:
    """Explain why a figure is not comparable."""
    counts = f"{uneven.mine} of {uneven.seeds} seeds against {uneven.theirs}"
    return f"not comparable: a value in {counts} of {uneven.seeds}"


def p_text(p: float) -> str:
    """Return a p-value as readers expect it."""
    if p < MIN_SHOWN:
        return f"<{MIN_SHOWN:g}"
    return f"{p:.3f}" if p < 2 * SIGNIFICANCE else f"{p:.2f}"


def compared(
    outcomes: Sequence[Outcome], section: ComparisonSection, rng: Generator
) -> tuple[Compared, ...]:
    """Compare all strategies with the baseline, under each condition and by each metric.

    Only valid trials enter. Rows come by condition, strategy and metric. A metric without a value
    in the trials of both strategy and baseline, such as the recovery time without a fault, has no
    row.
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
    rng: Generator,
) -> tuple[Compared, ...]:
    """Compare strategies with one of them by rows of figures; see `compared`."""
    compared = [
        _measured(rows, (metric, condition, strategy, baseline), section, rng)
        for condition in conditions
        for strategy in strategies
        for metric in section.metrics
    ]
    return tuple(row for row in compared if row is not None)


def baseline_of(outcomes: Sequence[Outcome], section: ComparisonSection) -> str | None:
    """Return the strategy that the others are compared with; None where there is no trial.

    Raises `ConfigurationError` if the configuration names one that does not occur.
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


class Questions(Section):
    """The claims and the comparison of an experiment, stored with its records at the last run."""

    claims: Annotated[tuple[ClaimSection, ...], Field(strict=False)] = ()
    comparison: ComparisonSection = ComparisonSection()


def write_questions(folder: Path, questions: Questions) -> None:
    """Store the questions of the experiment in `folder`; they may change without another run."""
    write_whole(folder / QUESTIONS_FILE, questions.model_dump_json(indent=1), "the claims")


def read_questions(folder: Path) -> Questions:
    """Return the questions of the experiment in `folder`, or the defaults if none are stored.

    Raises `ConfigurationError` if the file was changed by hand, and is invalid.
    """
    path = folder / QUESTIONS_FILE
    if not path.exists():
        return Questions()
    with reading_kept(path):
        return Questions.model_validate(json.loads(path.read_text(encoding="utf-8")))


def values_of(trials: Trials, metric: str) -> dict[int, float]:
    """Return the finite values of a figure by seed."""
    values = {seed: row.get(metric) for seed, row in trials.items()}
    return {seed: float(v) for seed, v in values.items() if v is not None and isfinite(v)}


def uneven(trials: Trials, base: Trials, metric: str) -> Uneven | None:
    """Return in how many seeds each of two has a figure; None if it is in the same seeds."""
    shared = trials.keys() & base.keys()
    seeds = {seed for seed in shared if metric in trials[seed] and metric in base[seed]}
    own, other = (seeds & values_of(each, metric).keys() for each in (trials, base))
    return None if own == other else Uneven(len(own), len(other), len(seeds))


def _measured(
    rows: Rows, place: tuple[str, str, str, str], section: ComparisonSection, rng: Generator
) -> Compared | None:
    """One row: metric, condition, strategy and baseline; None where there is no value."""
    metric, condition, strategy, baseline = place
    trials, base = (rows.get((condition, name), {}) for name in (strategy, baseline))
    own, gap = values_of(trials, metric), uneven(trials, base, metric)
    if not own and gap is None:
        return None
    counts = BY_KEY[metric].unit == "count"
    spread = interval([own[seed] for seed in sorted(own)], rng, counts=counts) if own else None
    if strategy == baseline:
        return Compared(*place, spread, gap, None, None)
    change = None if gap is not None else paired(own, values_of(base, metric), rng, counts)
    return Compared(*place, spread, gap, change, _reading(gap, change))


def _reading(gap: Uneven | None, difference: Difference | None) -> Reading:
    if gap is not None:
        return "not comparable"
    if difference is None or difference.n < MIN_SEEDS or difference.low is None:
        return "too few seeds"
    if not difference.excludes_zero:
        return "unclear"
    return "higher" if difference.mean > 0 else "lower"
