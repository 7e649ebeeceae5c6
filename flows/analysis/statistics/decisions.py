"""Verdicts on claims that were fixed beforehand: holds, does not hold, or not resolved.

A claim says between which bounds an effect lies, and what speaks against it is its own region: at
least the smallest effect of interest missed, or the margin left. Both questions are put in the
same way, by one-sided tests of 2.5% each, and each is corrected by Holm's method for all claims of
the family. So the probability that any claim is wrongly said to hold is at most 2.5%, that any is
wrongly said not to hold as much, and that there is any wrong verdict at most 5%. P-values are
doubled, so that they compare with 5%, and with intervals of 95%, as readers are used to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flows.analysis.statistics import FEWEST_SEEDS, SIGNIFICANCE, Difference

Verdict = Literal["holds", "does not hold", "not resolved"]


@dataclass(frozen=True, slots=True)
class Region:
    """Where an effect has to be shown to lie for a claim to hold, and where for it not to.

    Attributes
    ----------
    above, below
        The claim holds for an effect between these two.
    under, over
        It does not hold for an effect under the one or over the other. Where this overlaps with
        the above, as an effect that goes the right way and is too small, this has precedence.
    """

    above: float = -math.inf
    below: float = math.inf
    under: float = -math.inf
    over: float = math.inf

    @property
    def sides(self) -> int:
        """On how many sides an effect may speak against the claim."""
        return math.isfinite(self.under) + math.isfinite(self.over)


def more(smallest: float) -> Region:
    """Return the region of a claim that an effect is more than 0, worth telling from `smallest`."""
    return Region(above=0.0, under=smallest)


def less(smallest: float) -> Region:
    """Return the region of a claim that an effect is less than 0; the same, mirrored."""
    return Region(below=0.0, over=-smallest)


def equivalent(margin: float) -> Region:
    """Return the region of a claim that an effect is nowhere beyond a margin."""
    return between(-margin, margin)


def between(least: float, most: float) -> Region:
    """Return the region of a claim that an effect is between two bounds; either may be infinite."""
    return Region(least, most, least, most)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a test of a claim has shown.

    Attributes
    ----------
    verdict
        At the 5% level of all claims together.
    p, corrected
        Of the test that decides: that for the claim, or where it does not hold, that against it;
        two-sided, by itself and after Holm's correction. None for fewer than 3 seeds.
    confidence
        The level at which the claim was judged after the correction: an interval of this level
        agrees with the verdict.
    """

    verdict: Verdict
    p: float | None
    corrected: float | None
    confidence: float


def holm(ps: Sequence[float]) -> tuple[float, ...]:
    """Return p-values corrected by Holm's method for how many there are, in the given order."""
    corrected = [0.0] * len(ps)
    highest = 0.0
    for rank, index in enumerate(_ranking(ps)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = highest
    return tuple(corrected)


def p_for(found: Difference, region: Region) -> float:
    """Return the two-sided p-value of the test that a claim holds.

    For two bounds it is that of two one-sided tests, of which the weaker counts (Schuirmann).
    """
    tests = [
        *([found.p_more(region.above)] if math.isfinite(region.above) else []),
        *([found.p_less(region.below)] if math.isfinite(region.below) else []),
    ]
    return min(1.0, 2 * max(tests, default=1.0))


def p_against(found: Difference, region: Region) -> float:
    """Return the two-sided p-value of the test that a claim does not hold.

    For two bounds, the stronger of the tests counts, and its p-value double.
    """
    tests = [
        *([found.p_less(region.under)] if math.isfinite(region.under) else []),
        *([found.p_more(region.over)] if math.isfinite(region.over) else []),
    ]
    return min(1.0, 2 * region.sides * min(tests, default=1.0))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the tests of one claim gave, before it is judged with others.

    Attributes
    ----------
    support, oppose
        Two-sided p-values, not corrected: of the test that it holds, and that it does not.
    against
        Of how many tests the strongest is `oppose`.
    enough
        Whether there are seeds enough to test anything.
    """

    support: float = 1.0
    oppose: float = 1.0
    against: int = 1
    enough: bool = False


def evidence(found: Difference | None, region: Region) -> Evidence:
    """Test one claim."""
    return evidence_of_each([] if found is None else [found], region)


def evidence_of_each(parts: Sequence[Difference], region: Region) -> Evidence:
    """Test a claim about each of several settings, as that a price is the same in all of them.

    It holds if it is shown to in each, so the weakest test counts (an intersection-union test); it
    does not if it is shown not to in any, so the strongest counts, and its p-value as many times as
    there are settings.
    """
    against = max(1, region.sides) * max(1, len(parts))
    if not parts or not all(map(_enough, parts)):
        return Evidence(against=against)
    support = max(p_for(part, region) for part in parts)
    oppose = min(1.0, len(parts) * min(p_against(part, region) for part in parts))
    return Evidence(support, oppose, against, enough=True)


def decide(family: Sequence[tuple[Difference | None, Region]]) -> tuple[Decision, ...]:
    """Judge all claims of a family together.

    Those that nothing or too little is known of yet count as well: they were claimed.
    """
    return decide_by([evidence(found, region) for found, region in family])


def decide_by(family: Sequence[Evidence]) -> tuple[Decision, ...]:
    """Judge all claims of a family together by what their tests gave."""
    fors, againsts = [each.support for each in family], [each.oppose for each in family]
    judged = zip(family, holm(fors), holm(againsts), strict=True)
    factors = zip(_factors(fors), _factors(againsts), strict=True)
    return tuple(
        _decision(each.enough, (each.support, p), (each.oppose, q), (mine, other * each.against))
        for (each, p, q), (mine, other) in zip(judged, factors, strict=True)
    )


# -- parts -------------------------------------------------------------------------------------


def _enough(found: Difference) -> bool:
    return found.n >= FEWEST_SEEDS


def _ranking(ps: Sequence[float]) -> list[int]:
    return sorted(range(len(ps)), key=lambda index: ps[index])


def _factors(ps: Sequence[float]) -> list[int]:
    """By what Holm's method has multiplied each p-value when it decided on it.

    What is left when it stops is all judged by the factor at which it did.
    """
    shown = sum(p < SIGNIFICANCE for p in holm(ps))
    factors = [max(1, len(ps) - shown)] * len(ps)
    for rank, index in enumerate(_ranking(ps)[:shown]):
        factors[index] = len(ps) - rank
    return factors


def _decision(
    tested: bool,
    of_claim: tuple[float, float],
    against: tuple[float, float],
    factors: tuple[int, int],
) -> Decision:
    """Decide by the p-values for and against a claim, each by itself and corrected."""
    mine, other = factors
    if not tested:
        return Decision("not resolved", None, None, 1 - SIGNIFICANCE / max(mine, other))
    if against[1] < SIGNIFICANCE:
        return Decision("does not hold", *against, 1 - SIGNIFICANCE / other)
    if of_claim[1] < SIGNIFICANCE:
        return Decision("holds", *of_claim, 1 - SIGNIFICANCE / mine)
    return Decision("not resolved", *of_claim, 1 - SIGNIFICANCE / max(mine, other))
