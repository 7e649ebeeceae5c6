"""The claims of an experiment, judged together by its trials, and what more seeds would resolve.

Claims are kept beside the records, so that they can be changed without running anything again.
Whether a claim was fixed beforehand is told by the records themselves: each names, sealed with the
rest of it, the claims that there were when its trial began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from flows.analysis.comparison import Trials, Uneven, known, uneven, values_of
from flows.analysis.left_out import why_unknown
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import SIGNIFICANCE, Difference, paired
from flows.analysis.statistics.decisions import (
    Decision,
    Region,
    decide,
    equivalent,
    less,
    more,
)
from flows.analysis.statistics.power import power_of_claim, seeds_needed
from flows.config.claims import ClaimSection
from flows.config.errors import reading_kept
from flows.files import write_whole
from flows.metrics import Metric
from flows.metrics.score import ACCURACY, Score

CLAIMS_FILE = "claims.json"
PLANNED_SEEDS = "seeds"  # among a trial's circumstances
FIXED = "claim-"  # and before the digest of each claim

_REGIONS = {"less": less, "more": more, "equivalent": equivalent}
_CLAIMS = TypeAdapter(tuple[ClaimSection, ...])

# How the mean difference lies to the smallest of interest: beyond it, on this side of it, or both.
Size = Literal["beyond", "within", "open"]


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """One claim, and what its trials show of it.

    Attributes
    ----------
    claim
        What is claimed.
    difference
        Of its figure, seed by seed; None where no seed can tell, or the figure is not comparable.
    uneven
        What makes it so: for some seed, only one of the two came to have the figure.
    decision
        What the tests show, corrected for all claims.
    claims
        How many claims there are.
    needed
        Seeds that would show a difference of the smallest size of interest, or for an equivalence
        none at all, with a probability of 80%; None where that cannot be told.
    late
        How many of the `trials` that it is judged by had begun before the claim was fixed.
    planned
        How many seeds were planned when these trials began; several numbers if they grew.
    score
        What the models of the trials are scored by.
    unusable
        Trials whose seed does not count, each with why.
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
        """What is known of its figure, by the name and in the unit of the score."""
        return self.score.of(self.claim.column)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval of the difference, at the level at which the claim was judged."""
        found = self.difference
        return None if found is None else found.bounds(self.decision.confidence)

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
    """What a number of seeds can resolve of a claim.

    Attributes
    ----------
    claim
        What is claimed.
    sd
        Standard deviation of its differences in the pilot; None without one.
    pilot_seeds
        How many seeds of the pilot can tell it.
    level
        At which it is planned: 5%, divided by the number of claims.
    power
        Probability that it is found to hold with the planned seeds, if the difference is the
        smallest of interest, or for an equivalence, 0; None without a pilot.
    needed
        Seeds for a probability of 80%; None without a pilot, or if a million would not do.
    score
        What models are scored by.
    """

    claim: ClaimSection
    sd: float | None
    pilot_seeds: int
    level: float
    power: float | None
    needed: int | None
    score: Score = ACCURACY


def fixed(claims: Sequence[ClaimSection], seeds: int) -> dict[str, int]:
    """Return what a trial's record is to say of the claims that there are when it begins."""
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

    Parameters
    ----------
    outcomes
        The trials of the experiment.
    claims
        All that was claimed: each counts for the correction, whatever there is to judge it by.
    rng
        Draws the subsets by which counts of many seeds are judged.
    """
    evidence = [_Evidence.of(claim, outcomes, rng) for claim in claims]
    family = [(each.difference, region_of(each.claim)) for each in evidence]
    level = SIGNIFICANCE / max(1, len(claims))
    return tuple(
        JudgedClaim(
            each.claim,
            each.difference,
            each.uneven,
            decision,
            len(claims),
            _needed(each.claim, each.difference, level),
            each.late,
            len(each.used),
            each.planned,
            outcomes[0].score if outcomes else ACCURACY,
            each.unusable,
        )
        for each, decision in zip(evidence, decide(family), strict=True)
    )


def planned(
    claims: Sequence[ClaimSection],
    seeds: int,
    pilot: Sequence[Outcome],
    rng: np.random.Generator,
    score: Score = ACCURACY,
) -> tuple[PlannedClaim, ...]:
    """Say what a number of seeds can resolve of each claim, going by the spread in a pilot.

    `score` is what models are scored by.
    """
    level = SIGNIFICANCE / max(1, len(claims))
    found = []
    for claim in claims:
        evidence = _Evidence.of(claim, pilot, rng).difference
        sd = None if evidence is None else evidence.sd
        power = None if sd is None else _power(claim, sd, level, seeds)
        needed = _needed(claim, evidence, level)
        seen = evidence.n if evidence else 0
        found.append(PlannedClaim(claim, sd, seen, level, power, needed, score))
    return tuple(found)


def write_claims(folder: Path, claims: Sequence[ClaimSection]) -> None:
    """Keep what is claimed of the experiment in `folder`, as of its last run.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    text = _CLAIMS.dump_json(tuple(claims), indent=1).decode()
    write_whole(folder / CLAIMS_FILE, text, "what is claimed")


def read_claims(folder: Path) -> tuple[ClaimSection, ...]:
    """Return what is claimed of the experiment in `folder`; nothing if that was not kept.

    Raises
    ------
    ConfigurationError
        The file was changed by hand, and does not say what it should.
    """
    path = folder / CLAIMS_FILE
    if not path.exists():
        return ()
    with reading_kept(path):
        return _CLAIMS.validate_python(_listed(json.loads(path.read_text(encoding="utf-8"))))


# -- parts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What the valid trials of a claim's strategies and condition say."""

    claim: ClaimSection
    used: tuple[Outcome, ...]
    difference: Difference | None
    uneven: Uneven | None
    unusable: tuple[str, ...]

    @classmethod
    def of(
        cls, claim: ClaimSection, outcomes: Sequence[Outcome], rng: np.random.Generator
    ) -> _Evidence:
        sides: tuple[dict[int, Outcome], ...] = tuple({} for _ in claim.sides)
        unusable = list[str]()
        for each in outcomes:
            who = each.identity
            side = claim.side_of(who.strategy, who.labels)
            if who.seed is None or side is None:
                continue
            if each.valid:
                sides[side][who.seed] = each
            if why := why_unknown(each, claim.metric):
                unusable.append(f"{who.trial} ({why})")
        shared = set(sides[0]).intersection(*sides)
        tellers = tuple(each for side in sides for seed, each in side.items() if seed in shared)
        mine = _figures(sides[0])
        base: Trials = {seed: {claim.metric: 0.0} for seed in mine}
        if not claim.one_sample:
            base = _figures(sides[1])
        gap = uneven(mine, base, claim.metric)
        if gap is not None:
            return cls(claim, tellers, None, gap, tuple(unusable))
        values, others = (values_of(trials, claim.metric) for trials in (mine, base))
        difference = paired(values, others, rng, is_count(claim))
        return cls(claim, tellers, difference, None, tuple(unusable))

    @property
    def late(self) -> int:
        name = FIXED + self.claim.digest
        return sum(name not in outcome.circumstances for outcome in self.used)

    @property
    def planned(self) -> tuple[int, ...]:
        numbers = (outcome.circumstances.get(PLANNED_SEEDS) for outcome in self.used)
        return tuple(sorted({number for number in numbers if number is not None}))


def _figures(trials: Mapping[int, Outcome]) -> Trials:
    return {seed: known(outcome) for seed, outcome in trials.items()}


def _power(claim: ClaimSection, sd: float, level: float, seeds: int) -> float:
    """The power where the difference is the smallest of interest; of an equivalence, 0."""
    effect = {"less": -claim.smallest, "more": claim.smallest, "equivalent": 0.0}[claim.direction]
    return power_of_claim(region_of(claim), seeds, sd, effect, level, is_count(claim))


def _needed(claim: ClaimSection, found: Difference | None, level: float) -> int | None:
    if found is None or found.sd is None:
        return None
    return seeds_needed(partial(_power, claim, found.sd, level))


def _listed(data: Any) -> Any:
    # A tuple is what JSON calls a list.
    return tuple(data) if isinstance(data, list) else data
