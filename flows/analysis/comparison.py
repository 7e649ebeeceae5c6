"""The comparison of an experiment's strategies: per condition and metric, against a baseline.

Only valid trials enter, paired by their seed. All comparisons of an experiment are one family: the
verdicts are corrected for how many they are. What to compare by is kept beside the records, so
that it can be changed without running anything again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from dps.errors import ConfigurationError
from dps.events.reading import in_a_line
from dps.protocol.durabilities.presets import PRESETS
from flows.analysis.groups import conditions, strategies
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import (
    SIGNIFICANCE,
    Difference,
    Interval,
    Verdict,
    corrected,
    interval,
    paired,
    repeats_needed,
    verdicts,
)
from flows.config.base import ComparisonSection
from flows.config.errors import key_of, sentence, suggest
from flows.files import write_whole
from flows.metrics import BY_KEY
from flows.metrics.metric import Better

COMPARISON_FILE = "comparison.json"
LEAST_SHOWN = 0.001  # of a p-value

# By condition and strategy, what is known of the valid trials by seed; see `known`.
Trials = Mapping[int, Mapping[str, Any]]
Rows = Mapping[tuple[str, str], Trials]


Judgement = Verdict | Literal["not comparable"]


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
    p
        Of that difference, corrected for all comparisons of the experiment; None without a test.
        By itself it is `difference.p`.
    tests
        For how many comparisons `p` is corrected.
    verdict
        What the difference shows; None for the baseline itself.
    repeats_needed
        Seeds that would show the difference seen, or the one that the configuration names, with a
        probability of 80%, whatever the other comparisons show; None where that cannot be told.
    """

    metric: str
    condition: str
    strategy: str
    baseline: str
    interval: Interval | None
    uneven: Uneven | None
    difference: Difference | None
    p: float | None
    tests: int
    verdict: Judgement | None
    repeats_needed: int | None

    @property
    def said(self) -> str:
        """The verdict in words, with the reason where the figures beside it seem to say more."""
        verdict, uneven, found = self.verdict or "", self.uneven, self.difference
        if uneven is not None:
            counts = f"{uneven.mine} of {uneven.seeds} seeds against {uneven.theirs}"
            return f"{verdict}: a value in {counts} of {uneven.seeds}"
        if found is None or found.p is None or not found.excludes_zero:
            return verdict
        if verdict == "too few seeds to tell":
            return f"the same in all {found.n} seeds: {verdict}"
        if verdict == "no difference shown":
            return f"{verdict} by the t-test, though the resampled interval excludes 0"
        return verdict

    @property
    def tested(self) -> tuple[str, str] | None:
        """The p-value by itself, and corrected; None without a test."""
        if self.difference is None or self.difference.p is None or self.p is None:
            return None
        return p_text(self.difference.p), p_text(self.p)


def p_text(p: float) -> str:
    """Return a p-value as readers expect it."""
    if p < LEAST_SHOWN:
        return f"<{LEAST_SHOWN:g}"
    return f"{p:.3f}" if p < 2 * SIGNIFICANCE else f"{p:.2f}"


def before_correction(rows: Sequence[Compared]) -> str:
    """Explain the verdict "only before correction", once for all; nothing where no row has it."""
    told = [row for row in rows if row.verdict == "only before correction"]
    if not told:
        return ""
    seeds = " or ".join(map(str, sorted({row.difference.n for row in told if row.difference})))
    return (
        f"“Only before correction”: by itself the difference is significant, and its interval "
        f"excludes 0; after the correction for {told[0].tests} comparisons, of {seeds} seeds each, "
        "it is not."
    )


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
        Draws the resamples of the intervals.

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
        _measured(rows, condition, strategy, baseline, metric, rng)
        for condition in conditions
        for strategy in strategies
        for metric in section.metrics
    ]
    return _judged([row for row in found if row is not None], section.resolve)


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
    """Return a trial's figures, without those that its record cannot tell.

    What is None came not to be, as a target that was not reached. In a record that begins in the
    middle of a training, that cannot be told from what it does not hold.
    """
    row = outcome.row()
    return row if outcome.whole else {k: v for k, v in row.items() if v is not None}


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
    try:
        return ComparisonSection.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = in_a_line(f"{key_of(first, {})}: {sentence(first)}")
        raise ConfigurationError(f"{path}: {why}. Remove it, or run again.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no JSON: {error}. Remove it, or run again.") from error


def values_of(trials: Trials, metric: str) -> dict[int, float]:
    """Return the finite values of a figure by seed."""
    found = {seed: row.get(metric) for seed, row in trials.items()}
    return {seed: float(v) for seed, v in found.items() if v is not None and isfinite(v)}


# -- parts -------------------------------------------------------------------------------------


def _uneven(trials: Trials, base: Trials, metric: str) -> Uneven | None:
    shared = trials.keys() & base.keys()
    seeds = {seed for seed in shared if metric in trials[seed] and metric in base[seed]}
    mine, theirs = (seeds & values_of(each, metric).keys() for each in (trials, base))
    return None if mine == theirs else Uneven(len(mine), len(theirs), len(seeds))


def _measured(
    rows: Rows,
    condition: str,
    strategy: str,
    baseline: str,
    metric: str,
    rng: np.random.Generator,
) -> Compared | None:
    """A row without what depends on the other rows; None where there is no value."""
    trials, base = (rows.get((condition, name), {}) for name in (strategy, baseline))
    mine, uneven = values_of(trials, metric), _uneven(trials, base, metric)
    if not mine and uneven is None:
        return None
    difference = None
    if strategy != baseline and uneven is None:
        difference = paired(mine, values_of(base, metric), rng)
    spread = interval([mine[seed] for seed in sorted(mine)], rng) if mine else None
    names = (metric, condition, strategy, baseline)
    return Compared(*names, spread, uneven, difference, None, 0, None, None)


def _judged(rows: Sequence[Compared], resolve: Mapping[str, float]) -> tuple[Compared, ...]:
    """Add to each row what it says in the light of all others."""
    own = [row for row in rows if row.strategy == row.baseline]
    others = [row for row in rows if row.strategy != row.baseline]
    differences = [row.difference for row in others]
    ps = corrected(differences)
    said = verdicts(differences, [_better(row.metric) for row in others])
    tests = sum(p is not None for p in ps)
    # What has too few seeds for a test yet will be one of the comparisons when it has enough.
    level = SIGNIFICANCE / max(1, sum(found is not None for found in differences))
    judged = [
        replace(
            row,
            p=p,
            tests=tests,
            verdict="not comparable" if row.uneven else verdict,
            repeats_needed=_repeats(row, resolve, level),
        )
        for row, p, verdict in zip(others, ps, said, strict=True)
    ]
    found = {(row.metric, row.condition, row.strategy): row for row in (*own, *judged)}
    return tuple(found[row.metric, row.condition, row.strategy] for row in rows)


def _better(metric: str) -> Better:
    better = BY_KEY[metric].better
    if better is None:
        raise ConfigurationError(f"comparison: of {metric!r} neither more nor less is better")
    return better


def _repeats(row: Compared, resolve: Mapping[str, float], level: float) -> int | None:
    difference = row.difference
    if difference is None or difference.sd is None:
        return None
    wanted = resolve.get(row.metric, difference.mean)
    return repeats_needed(difference.sd, wanted, level=level)
