"""Verdicts on claims that were fixed beforehand: holds, does not hold, or not resolved.

A claim bounds an effect. A separate region contradicts the claim: effects short of the smallest one
of interest, or outside the margin. Both are tested in the same way, by one-sided tests of 2.5%
each, and each is corrected by Holm's method for all claims of the family. So the probability of
any false “holds” is at most 2.5%, of any false “does not hold” at most 2.5%, and of any wrong
verdict at most 5%. P-values are doubled, so that they compare with 5%, and with intervals of 95%,
as readers expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flows.statistics import MIN_SEEDS, SIGNIFICANCE, Difference

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
        """Number of sides on which an effect may contradict the claim."""
        return math.isfinite(self.under) + math.isfinite(self.over)


def more(smallest: float) -> Region:
    """Return the region of a claim that an effect is above 0; below `smallest`, it is refuted."""
    return Region(above=0.0, under=smallest)


def less(smallest: float) -> Region:
    """Return the region of a claim that an effect is less than 0; the same, mirrored."""
    return Region(below=0.0, over=-smallest)


def equivalent(margin: float) -> Region:
    """Return the region of a claim that an effect is nowhere beyond a margin."""
    return Region(-margin, margin, -margin, margin)


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of the test of a claim.

    Attributes
    ----------
    verdict
        At the 5% level of all claims together.
    p, corrected
        Of the test that decides: that for the claim, or if it does not hold, that against it;
        two-sided, before and after Holm's correction. None for fewer than 3 seeds.
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
    # `multipletests` of statsmodels collects garbage in each call, which takes 50 to 90 ms.
    values = np.asarray(ps, float)
    order = np.argsort(values, kind="stable")
    raised = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(raised, 1.0)
    return tuple(corrected.tolist())


def p_for(found: Difference, region: Region) -> float:
    """Return the two-sided p-value of the test that a claim holds.

    For two bounds it is that of two one-sided tests, of which the weaker counts (Schuirmann).
    """
    return min(1.0, 2 * max(_one_sided(found, region.above, region.below), default=1.0))


def p_against(found: Difference, region: Region) -> float:
    """Return the two-sided p-value of the test that a claim does not hold.

    For two bounds, the stronger of the tests counts, and its p-value double.
    """
    tests = _one_sided(found, region.over, region.under)
    return min(1.0, 2 * region.sides * min(tests, default=1.0))


def _one_sided(found: Difference, above: float, below: float) -> list[float]:
    """P-values of the tests that an effect is above and below bounds; infinite ones have none."""
    return [
        *([found.p_more(above)] if math.isfinite(above) else []),
        *([found.p_less(below)] if math.isfinite(below) else []),
    ]


def decide(family: Sequence[tuple[Difference | None, Region]]) -> tuple[Decision, ...]:
    """Judge all claims of a family together.

    Claims with too few or no results count as well, because they were made.
    """
    enough = [found is not None and found.n >= MIN_SEEDS for found, _ in family]
    fors = [p_for(found, region) if found else 1.0 for found, region in family]
    againsts = [p_against(found, region) if found else 1.0 for found, region in family]
    tests = zip(holm(fors), _factors(fors), holm(againsts), _factors(againsts), strict=True)
    decisions = []
    for number, (p, factor, other, factor_against) in enumerate(tests):
        against = factor_against * max(1, family[number][1].sides)
        decision = Decision(
            "not resolved", fors[number], p, 1 - SIGNIFICANCE / max(factor, against)
        )
        if not enough[number]:
            decision = replace(decision, p=None, corrected=None)
        elif other < SIGNIFICANCE:
            level = 1 - SIGNIFICANCE / against
            decision = Decision("does not hold", againsts[number], other, level)
        elif p < SIGNIFICANCE:
            decision = Decision("holds", fors[number], p, 1 - SIGNIFICANCE / factor)
        decisions.append(decision)
    return tuple(decisions)


def _factors(ps: Sequence[float]) -> list[int]:
    """The factors by which Holm's method has multiplied the p-values.

    All p-values that remain when it stops have the factor at which it stopped.
    """
    shown = sum(p < SIGNIFICANCE for p in holm(ps))
    factors = [max(1, len(ps) - shown)] * len(ps)
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)[:shown]):
        factors[index] = len(ps) - rank
    return factors
