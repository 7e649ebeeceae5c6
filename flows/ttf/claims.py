"""Owns the paper's five claims: what each means in numbers, and when it holds.

Each claim is two statements about a difference, measured seed by seed. A statement says which way
the difference is to go and which size would matter to anybody:

- it *holds* if the 95% interval lies wholly on the claimed side of 0, also after Holm's correction
  for all statements of the study;
- it *does not hold* if the interval excludes even the smallest difference that matters;
- else it is *not resolved*.

A claim of sameness holds if the interval lies within the margin, and fails if it lies outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from flows.claims import Verdict
from flows.statistics import FEWEST_SEEDS, SIGNIFICANCE, Difference, corrected, paired
from flows.ttf.measures import Measured, by_seed, ratios

BASES = ("checkpoint", "chain")
POINT = 0.01  # a percentage point of accuracy
SHARE = 0.02  # of time or of pace
SAME_COST = 0.10

CLAIMS = {
    1: "Stateless keeps converging through a failure and gains accuracy across it (up to 10 "
    "points; 15 in the text)",
    2: "Checkpoint and chain converge, but are set back by restarting from old state",
    3: "Continuing during downtime improves hardware utilisation",
    4: "Stateless costs about the same under fixed instance pricing",
    5: "Checkpointing needs about 10% more time to 70% accuracy after two kills",
}

Values = dict[int, float]


@dataclass(frozen=True, slots=True)
class Statement:
    """One difference that a claim is about.

    `of` returns its value for each seed. `margin` is the smallest difference that matters; with
    `same`, the largest that does not.
    """

    claim: int
    text: str
    of: Callable[[Sequence[Measured]], Values]
    margin: float
    unit: Literal["points", "%"]
    same: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """A statement with what was found; `difference` is None where no seed could tell."""

    statement: Statement
    difference: Difference | None
    verdict: Verdict

    def effect(self) -> str:
        """Return the mean difference and its interval as text."""
        found = self.difference
        if found is None:
            return "–"
        unit = " points" if self.statement.unit == "points" else "%"
        bounds = ""
        if found.low is not None and found.high is not None:
            bounds = f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        return f"{100 * found.mean:+.1f}{bounds}{unit}, n={found.n}"


# -- what is measured --------------------------------------------------------------------------


def _select(
    trials: Iterable[Measured], strategies: Sequence[str], kills: Sequence[int]
) -> list[Measured]:
    return [t for t in trials if t.strategy in strategies and t.kills in kills]


def _change(trials: Sequence[Measured], *strategies: str) -> Values:
    parts = []
    for strategy in strategies:
        hit = [t for t in _select(trials, [strategy], (1, 2)) if t.changes]
        parts.append(by_seed(hit, lambda t: fmean(c.points for c in t.changes)))
    return _mean(parts)


def _minus(values: Values, base: Values) -> Values:
    return {seed: values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())}


def _kept_pace(trials: Sequence[Measured], *strategies: str) -> Values:
    """Pace with kills over pace without, of the same strategy and seed."""

    def pace(trial: Measured) -> float:
        return trial.pace

    parts = []
    for strategy in strategies:
        hit = by_seed(_select(trials, [strategy], (1, 2)), pace)
        parts.append(ratios(hit, by_seed(_select(trials, [strategy], (0,)), pace)))
    return _mean(parts)


def _idle(trials: Sequence[Measured], *strategies: str) -> Values:
    parts = [
        by_seed(
            [t for t in _select(trials, [name], (1, 2)) if t.idle is not None],
            lambda t: t.idle or 0.0,
        )
        for name in strategies
    ]
    return _mean(parts)


def _mean(parts: Sequence[Values]) -> Values:
    """Mean over strategies, each with the same weight, for the seeds that all have."""
    shared = set.intersection(*(set(part) for part in parts))
    return {seed: fmean(part[seed] for part in parts) for seed in sorted(shared)}


def _cost(trials: Sequence[Measured], base: str) -> Values:
    def usd(trial: Measured) -> float:
        return trial.fixed_usd

    hit = (1, 2)
    return ratios(
        by_seed(_select(trials, ["stateless"], hit), usd),
        by_seed(_select(trials, [base], hit), usd),
    )


def _to_target(trials: Sequence[Measured], base: str, kills: int) -> Values:
    def seconds(trial: Measured) -> float:
        return trial.to_target

    mine, others = _select(trials, ["checkpoint"], (2,)), _select(trials, [base], (kills,))
    # Where none got there, both have the length of the trial, which says nothing.
    told = {t.seed for t in mine if t.reached} | {t.seed for t in others if t.reached}
    found = ratios(by_seed(mine, seconds), by_seed(others, seconds))
    return {seed: value for seed, value in found.items() if seed in told}


STATEMENTS = (
    Statement(
        1,
        "stateless: first accuracy after a kill minus mean of the last 3 before",
        lambda trials: _change(trials, "stateless"),
        POINT,
        "points",
    ),
    Statement(
        1,
        "the same, minus that of checkpoint and chain",
        lambda trials: _minus(_change(trials, "stateless"), _change(trials, *BASES)),
        POINT,
        "points",
    ),
    Statement(
        2,
        "checkpoint: accuracy lost across a kill",
        lambda trials: {s: -v for s, v in _change(trials, "checkpoint").items()},
        POINT,
        "points",
    ),
    Statement(
        2,
        "chain: accuracy lost across a kill",
        lambda trials: {s: -v for s, v in _change(trials, "chain").items()},
        POINT,
        "points",
    ),
    Statement(
        3,
        "share of its own pace without kills that stateless keeps, minus that of the others",
        lambda trials: _minus(_kept_pace(trials, "stateless"), _kept_pace(trials, *BASES)),
        SHARE,
        "points",
    ),
    Statement(
        3,
        "idle share of workers' time with kills: checkpoint and chain minus stateless",
        lambda trials: _minus(_idle(trials, *BASES), _idle(trials, "stateless")),
        SHARE,
        "points",
    ),
    Statement(
        4,
        "price of stateless over checkpoint, minus 1",
        lambda trials: _cost(trials, "checkpoint"),
        SAME_COST,
        "%",
        same=True,
    ),
    Statement(
        4,
        "price of stateless over chain, minus 1",
        lambda trials: _cost(trials, "chain"),
        SAME_COST,
        "%",
        same=True,
    ),
    Statement(
        5,
        "time to the target of checkpoint over stateless, two kills each, minus 1",
        lambda trials: _to_target(trials, "stateless", 2),
        SHARE,
        "%",
    ),
    Statement(
        5,
        "time to the target of checkpoint with two kills over without any, minus 1",
        lambda trials: _to_target(trials, "checkpoint", 0),
        SHARE,
        "%",
    ),
)


# -- judging -----------------------------------------------------------------------------------


def judge(trials: Sequence[Measured]) -> tuple[Judged, ...]:
    """Judge every statement on the trials of one study."""
    rng = np.random.default_rng(0)  # resampling only: the same records give the same intervals
    found = [_difference(statement.of(trials), rng) for statement in STATEMENTS]
    ps = corrected([d if not s.same else None for s, d in zip(STATEMENTS, found, strict=True)])
    return tuple(
        Judged(statement, difference, verdict(statement, difference, p))
        for statement, difference, p in zip(STATEMENTS, found, ps, strict=True)
    )


def verdict(statement: Statement, found: Difference | None, p: float | None) -> Verdict:
    """Say whether a statement holds; `p` is corrected for all statements of the study."""
    if found is None or found.low is None or found.high is None or found.n < FEWEST_SEEDS:
        return "not resolved"
    margin = statement.margin
    if statement.same:
        if -margin <= found.low and found.high <= margin:
            return "holds"
        return "does not hold" if found.low > margin or found.high < -margin else "not resolved"
    if found.high < margin:
        return "does not hold"
    if found.low > 0 and p is not None and p < SIGNIFICANCE:
        return "holds"
    return "not resolved"


def _difference(values: Values, rng: np.random.Generator) -> Difference | None:
    return paired(values, dict.fromkeys(values, 0.0), rng)
