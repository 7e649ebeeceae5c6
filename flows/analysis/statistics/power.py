"""What a number of seeds can resolve: the power of the tests of `decisions`, and seeds to run.

All is computed for normal differences with a known standard deviation, which a pilot tells. The
sign-flip test of counts has about the power of the t-test where it has enough seeds to show
anything at all. A claim is planned at the level of 5% divided by the number of claims: what is
found at that level is found whatever the others show, and Holm's method asks for no more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import count

import numpy as np

from flows.analysis.statistics import FEWEST_SEEDS, ROUNDING, SIGNIFICANCE
from flows.analysis.statistics.decisions import Region

POWER = 0.8
# What needs more seeds than this to be shown is shown by no experiment.
MOST_SEEDS = 1_000_000
# Into how many equally likely parts the standard deviation of a sample is split.
PARTS = 500


def fewest_seeds(level: float = SIGNIFICANCE, exact: bool = False) -> int:
    """Return how many seeds can show anything at all at a level.

    That is 3, fewer are never judged. The sign-flip test, which is `exact`, shows nothing by n
    differences that go the same way unless 2/2^n is below the level: 6 at 5%.
    """
    if not exact:
        return FEWEST_SEEDS
    return next(n for n in count(FEWEST_SEEDS) if 2.0 ** (1 - n) < level)


def power_of_difference(
    n: int, sd: float, effect: float, level: float = SIGNIFICANCE, exact: bool = False
) -> float:
    """Return the probability that the two-sided test shows which way a difference goes.

    Parameters
    ----------
    n
        Number of seeds.
    sd
        Standard deviation of the differences between trials with the same seed.
    effect
        The true mean of the differences.
    level
        Of the test.
    exact
        Whether it is the sign-flip test, as of counts.
    """
    always = sd <= ROUNDING * abs(effect)
    if n < fewest_seeds(level, exact or always):
        return 0.0
    if always:
        return 1.0 if effect else 0.0
    from scipy import stats

    return float(stats.nct.sf(_critical(n, level), n - 1, np.sqrt(n) * abs(effect) / sd))


def power_of_claim(
    region: Region,
    n: int,
    sd: float,
    effect: float,
    level: float = SIGNIFICANCE,
    exact: bool = False,
) -> float:
    """Return the probability that a claim is found to hold.

    Parameters
    ----------
    region
        What is claimed; the rest as of `power_of_difference`.
    """
    always = sd == 0
    if n < fewest_seeds(level, exact or always):
        return 0.0
    if always:
        wrong = effect < region.under or effect > region.over
        return float(region.above < effect < region.below and not wrong)
    reaches = _critical(n, level) * sd / np.sqrt(n) * _spreads(n)
    # What goes the right way and is shown to be too small is not said to hold.
    low = np.maximum(region.above + reaches, region.under - reaches)
    high = np.minimum(region.below - reaches, region.over + reaches)
    return float(np.mean(_between(low, high, effect, sd / np.sqrt(n))))


def seeds_needed(power_at: Callable[[int], float], power: float = POWER) -> int | None:
    """Return the fewest seeds with at least this power; None where a million would not do."""
    enough = FEWEST_SEEDS
    while power_at(enough) < power:
        if enough >= MOST_SEEDS:
            return None
        enough = min(2 * enough, MOST_SEEDS)
    seeds = range(max(FEWEST_SEEDS, enough // 2), enough + 1)
    return seeds[bisect_left(seeds, power, key=power_at)]


def repeats_needed(
    sd: float,
    difference: float,
    power: float = POWER,
    level: float = SIGNIFICANCE,
    exact: bool = False,
) -> int | None:
    """Return how many seeds a two-sided test needs to show a difference; see `seeds_needed`.

    None as well for a difference of 0 but for rounding, which no number shows.
    """
    if abs(difference) <= ROUNDING * sd:
        return None
    return seeds_needed(lambda n: power_of_difference(n, sd, difference, level, exact), power)


# -- parts -------------------------------------------------------------------------------------


def _critical(n: int, level: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(1 - level / 2, n - 1))


def _spreads(n: int) -> np.ndarray:
    """Standard deviations of samples of n over the true one, all equally likely."""
    from scipy import stats

    shares = (np.arange(PARTS) + 0.5) / PARTS
    return np.asarray(np.sqrt(stats.chi2.ppf(shares, n - 1) / (n - 1)))


def _between(low: np.ndarray, high: np.ndarray, mean: float, error: float) -> np.ndarray:
    """The probability that a normal value lies between bounds; 0 where they leave nothing."""
    from scipy import special

    found = special.ndtr((high - mean) / error) - special.ndtr((low - mean) / error)
    return np.asarray(np.maximum(0.0, found))
