"""The claims of an experiment, judged together by its trials, and what more seeds would resolve.

The records themselves show whether a claim was fixed beforehand: each lists, under its checksums,
the claims that existed when its trial began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from flows.config.claims import ClaimSection
from flows.metrics import Metric
from flows.metrics.outcome import Outcome
from flows.metrics.score import ACCURACY, Score
from flows.statistics import SIGNIFICANCE, Difference, paired
from flows.statistics.caveats import why_unknown
from flows.statistics.comparison import Uneven, known, uneven, values_of
from flows.statistics.decisions import Decision, Region, decide, equivalent, less, more
from flows.statistics.power import power_of_claim, seeds_needed

PLANNED_SEEDS = "seeds"  # among a trial's circumstances
FIXED = "claim-"  # and before the digest of each claim

_REGIONS = {"less": less, "more": more, "equivalent": equivalent}

# How the mean difference lies to the smallest of interest: beyond it, on this side of it, or both.
Size = Literal["beyond", "within", "open"]


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """One claim, and the evidence of its trials.

    Attributes
    ----------
    difference
        Of its figure, seed by seed; None if no seed has one, or the figure is not comparable.
    uneven
        Why it is not comparable: for some seed, only one of the two has a value of the figure.
    decision
        What the tests show, corrected for all `claims`, of which this is the number.
    needed
        Seeds that would show a difference of the smallest size of interest, or for an equivalence
        none at all, with a probability of 80%; None where that is unknown.
    late
        How many of the `trials` that it is judged by had begun before the claim was fixed.
    planned
        How many seeds were planned when these trials began; several numbers if they grew.
    unusable
        Trials whose seed does not count, each with the reason.
    """

    claim: ClaimSection
    difference: Difference | None
    uneven: Uneven | None
    decision: Decision
    claims: int
    needed: int | None
    late: int
    trials: int
    planned: tuple[int, ...]
    score: Score = ACCURACY
    unusable: tuple[str, ...] = ()

    @property
    def column(self) -> Metric:
        """The metric of its figure, by the name and in the unit of the score."""
        return self.score.of(self.claim.column)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval of the difference, at the level at which the claim was judged."""
        gap = self.difference
        return None if gap is None else gap.bounds(self.decision.confidence)

    @property
    def size(self) -> Size:
        """Where the interval lies to the smallest difference of interest."""
        if self.bounds is None:
            return "open"
        (low, high), smallest = self.bounds, self.claim.smallest
        if low >= smallest or high <= -smallest:
            return "beyond"
        return "within" if -smallest < low and high < smallest else "open"


@dataclass(frozen=True, slots=True)
class PlannedClaim:
    """The power of a number of seeds for a claim, by the standard deviation `sd` in a pilot.

    Attributes
    ----------
    level
        Level at which it is planned: 5%, divided by the number of claims.
    power
        Probability that it is found to hold with the planned seeds, if the difference is the
        smallest of interest, or for an equivalence, 0; None without a pilot.
    needed
        Seeds for a probability of 80%; None without a pilot, or if a million would not do.
    """

    claim: ClaimSection
    sd: float | None
    pilot_seeds: int
    level: float
    power: float | None
    needed: int | None
    score: Score = ACCURACY


def fixed(claims: Sequence[ClaimSection], seeds: int) -> dict[str, int]:
    """Return the entries of a trial's record for the claims that exist when it begins."""
    return {PLANNED_SEEDS: seeds, **{FIXED + claim.digest: 1 for claim in claims}}


def region_of(claim: ClaimSection) -> Region:
    """Return where the difference has to lie for a claim to hold, and where for it not to."""
    return _REGIONS[claim.direction](claim.smallest)


def is_count(claim: ClaimSection) -> bool:
    """Whether its figure is counted, so that it is judged by the sign-flip test."""
    return claim.column.unit == "count"


def judge(
    outcomes: Sequence[Outcome], claims: Sequence[ClaimSection], rng: np.random.Generator
) -> tuple[JudgedClaim, ...]:
    """Judge all claims of an experiment together; only valid trials enter.

    Each claim counts for the correction, even without trials to judge it by.
    """
    evidence = [_evidence(claim, outcomes, rng) for claim in claims]
    decisions = decide([(each.difference, region_of(each.claim)) for each in evidence])
    level = SIGNIFICANCE / max(1, len(claims))
    judged = []
    for claim, each, decision in zip(claims, evidence, decisions, strict=True):
        circumstances = [outcome.circumstances for outcome in each.used]
        seeds = {known[PLANNED_SEEDS] for known in circumstances if PLANNED_SEEDS in known}
        judged.append(
            JudgedClaim(
                claim=each.claim,
                difference=each.difference,
                uneven=each.uneven,
                decision=decision,
                claims=len(claims),
                needed=_needed(each.claim, each.difference, level),
                late=sum(FIXED + claim.digest not in known for known in circumstances),
                trials=len(each.used),
                planned=tuple(sorted(seeds)),
                score=outcomes[0].score if outcomes else ACCURACY,
                unusable=each.unusable,
            )
        )
    return tuple(judged)


def planned(
    claims: Sequence[ClaimSection],
    seeds: int,
    pilot: Sequence[Outcome],
    rng: np.random.Generator,
    score: Score = ACCURACY,
) -> tuple[PlannedClaim, ...]:
    """Compute what a number of seeds can resolve of each claim, from the spread in a pilot.

    `score` is the score of the models.
    """
    level = SIGNIFICANCE / max(1, len(claims))
    plans = []
    for claim in claims:
        evidence = _evidence(claim, pilot, rng)
        claim, difference = evidence.claim, evidence.difference
        sd = None if difference is None else difference.sd
        power = None if sd is None else _power(claim, sd, level, seeds)
        needed = _needed(claim, difference, level)
        seen = difference.n if difference else 0
        plans.append(PlannedClaim(claim, sd, seen, level, power, needed, score))
    return tuple(plans)


class _Evidence(NamedTuple):
    """A claim, of which a relative `smallest` is resolved, and what is known of its difference."""

    claim: ClaimSection
    used: tuple[Outcome, ...]
    difference: Difference | None
    uneven: Uneven | None
    unusable: tuple[str, ...]


def _evidence(
    claim: ClaimSection, outcomes: Sequence[Outcome], rng: np.random.Generator
) -> _Evidence:
    """Return the evidence on a claim from the valid trials of its strategies and condition.

    The mean of `against`, by which a relative `smallest` is resolved, is taken as known.
    """
    sides: tuple[dict[int, Outcome], ...] = tuple({} for _ in claim.sides)
    unusable = list[str]()
    for each in outcomes:
        identity = each.identity
        side = claim.side_of(identity.strategy, identity.labels)
        if identity.seed is None or side is None:
            continue
        if each.valid:
            sides[side][identity.seed] = each
        if why := why_unknown(each, claim.metric):
            unusable.append(f"{identity.trial} ({why})")
    shared = set(sides[0]).intersection(*sides)
    used = tuple(each for side in sides for seed, each in side.items() if seed in shared)
    rows = [{seed: known(each) for seed, each in side.items()} for side in sides]
    own = rows[0]
    base = {seed: {claim.metric: 0.0} for seed in own} if claim.one_sample else rows[1]
    if (gap := uneven(own, base, claim.metric)) is not None:
        return _Evidence(claim, used, None, gap, tuple(unusable))
    values, others = (values_of(trials, claim.metric) for trials in (own, base))
    resolved = claim.resolved(float(np.mean([*others.values()]))) if others else claim
    if not resolved.smallest:
        unusable.append(f"a share of the mean of {claim.baseline}, which is 0")
        return _Evidence(claim, used, None, None, tuple(unusable))
    difference = paired(values, others, rng, is_count(claim))
    return _Evidence(resolved, used, difference, None, tuple(unusable))


def _power(claim: ClaimSection, sd: float, level: float, seeds: int) -> float:
    """The power where the difference is the smallest of interest; of an equivalence, 0."""
    effect = {"less": -claim.smallest, "more": claim.smallest, "equivalent": 0.0}[claim.direction]
    return power_of_claim(region_of(claim), seeds, sd, effect, level, is_count(claim))


def _needed(claim: ClaimSection, found: Difference | None, level: float) -> int | None:
    if found is None or found.sd is None:
        return None
    return seeds_needed(partial(_power, claim, found.sd, level))
