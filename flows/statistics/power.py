"""The power of a number of seeds in the tests of `decisions`, and the number of seeds to run.

The differences are assumed to be normal, with the standard deviation that a pilot shows. The test
is the one that judges the claim: Student's t, or the sign-flip test for counts. A claim is planned
at the level of 5% divided by the number of claims: a result at that level stands regardless of the
other claims, and Holm's method asks for no more.

How far an interval reaches from the mean of a sample is independent of that mean. So the power is
integrated over the mean, and averaged over 500 reaches. For up to 30 counts these are the reaches
of the sign-flip test in samples drawn with a fixed seed. From 31 on they are those of the t-test,
at levels that vary as the subsets that the sign-flip test draws make its level vary. The error of
a power of the sign-flip test is below 1 point, and below 2 at levels under 0.5%.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from itertools import count

import numpy as np

from flows.statistics import (
    MIN_SEEDS,
    ROUNDING,
    SIGNIFICANCE,
    rank_of_bound,
    subset_means,
    subsets_of,
)
from flows.statistics.decisions import Region

POWER = 0.8
# A claim that needs more seeds than this counts as impossible to show.
MAX_SEEDS = 1_000_000
# Over how many standard deviations of a sample the power is averaged; of the sign-flip test, over
# how many samples, each in all these sizes, and how many of them share the subsets that it draws.
SPREADS = 500
SAMPLES = 125
SHARING = 5
# From this number of counts on, the sign-flip test is the t-test except for its drawn subsets.
MANY_COUNTS = 31


def fewest_seeds(level: float = SIGNIFICANCE, exact: bool = False) -> int:
    """Return how many seeds can show anything at all at a level.

    That is 3, fewer are never judged. The sign-flip test, which is `exact`, shows nothing by n
    differences that go the same way unless 2/2^n is below the level: 6 at 5%.
    """
    if not exact:
        return MIN_SEEDS
    return next(n for n in count(MIN_SEEDS) if 2.0 ** (1 - n) < level)


def power_of_claim(
    region: Region,
    n: int,
    sd: float,
    effect: float,
    level: float = SIGNIFICANCE,
    exact: bool = False,
) -> float:
    """Return the probability that a claim is found to hold with `n` seeds.

    `effect` is the true mean of the differences between trials with the same seed, `sd` their
    standard deviation. The `level` is that of the two-sided test, which is `exact` for counts: the
    sign-flip test.
    """
    always = sd <= ROUNDING * abs(effect)
    if n < fewest_seeds(level, exact or always):
        return 0.0
    if always:
        wrong = effect < region.under or effect > region.over
        return float(region.above < effect < region.below and not wrong)
    down, up = (sd * each for each in _reaches(n, level, exact))
    # A claim does not hold if its effect has the right sign but is shown to be too small.
    low = np.maximum(region.above + down, region.under - up)
    high = np.minimum(region.below - up, region.over + down)
    return float(np.mean(_between(low, high, effect, sd / np.sqrt(n))))


def seeds_needed(power_at: Callable[[int], float]) -> int | None:
    """Return the fewest seeds with a power of 80%; None where a million would not do."""
    enough = MIN_SEEDS
    while power_at(enough) < POWER:
        if enough >= MAX_SEEDS:
            return None
        enough = min(2 * enough, MAX_SEEDS)
    seeds = range(max(MIN_SEEDS, enough // 2), enough + 1)
    return seeds[bisect_left(seeds, POWER, key=power_at)]


@lru_cache(maxsize=1024)
def _reaches(n: int, level: float, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """How far intervals reach down and up from the means of samples of a standard normal."""
    from scipy import special

    shares = (np.arange(SPREADS) + 0.5) / SPREADS
    spreads = np.sqrt(special.chdtri(n - 1, 1 - shares) / (n - 1))
    if not exact:
        reach = -special.stdtrit(n - 1, level / 2) * spreads / np.sqrt(n)
        return reach, reach
    rng, rank = np.random.default_rng(n), rank_of_bound(subsets_of(n), level)
    if n < MANY_COUNTS:
        drawn = np.repeat(_drawn_reaches(n, rank, rng), SPREADS // SAMPLES, axis=1)
        down, up = drawn * rng.permutation(spreads)
    else:
        tails = rng.beta(rank, subsets_of(n) + 1 - rank, size=(2, SPREADS))
        down, up = -special.stdtrit(n - 1, tails) * spreads / np.sqrt(n)
    return np.append(down, up), np.append(up, down)  # a sample's mirror image is as likely


def _drawn_reaches(n: int, rank: int, rng: np.random.Generator) -> np.ndarray:
    """The reaches of the sign-flip test down and up, for samples of standard deviation 1."""
    samples = rng.normal(size=(SAMPLES, n))
    samples -= samples.mean(axis=1, keepdims=True)
    samples /= samples.std(axis=1, ddof=1, keepdims=True)
    bounds = []
    for some in np.split(samples, SAMPLES // SHARING):
        means = np.partition(subset_means(some, rng), (rank - 1, -rank), axis=1)
        bounds.append((-means[:, rank - 1], means[:, -rank]))
    return np.concatenate(bounds, axis=1)


def _between(low: np.ndarray, high: np.ndarray, mean: float, error: float) -> np.ndarray:
    """The probability that a normal value lies between bounds; 0 where they leave nothing."""
    from scipy import special

    power = special.ndtr((high - mean) / error) - special.ndtr((low - mean) / error)
    return np.asarray(np.maximum(0.0, power))
