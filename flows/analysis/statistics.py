"""The statistics of experiments: intervals, paired differences, verdicts, numbers of repeats.

Pure functions over plain numbers. Trials of two strategies with the same seed start from the same
values and see the same batches, so strategies are compared seed by seed; verdicts are corrected for
how many comparisons are looked at together.

What needs scipy imports it: that takes a second, and every process of a trial imports this module.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np

from flows.metrics.metric import Better


def nearest_rank(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
POWER = 0.8
FEWEST_SEEDS = 3
# What needs more seeds than this to be shown is shown by no experiment.
MOST_SEEDS = 1_000_000
# Sums of floating-point numbers that should be equal differ by less than this share of them.
ROUNDING = 1e-9
# Of normal values, the bootstrapped "95%" interval misses the mean in 10% of cases for 10, 8%
# for 15, 7% for 20 and at most 6.4% from 30 on; Student's t does in 5% for any number. Of values as
# skewed as exponential ones, they miss 12% and 10% for 10, and 7% both for 30.
FEWEST_TO_RESAMPLE = 30

Verdict = Literal[
    "better", "worse", "only before correction", "no difference shown", "too few seeds to tell"
]


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of `n` values with an interval of that mean, of 95% if nothing else is said.

    There are no bounds for a single value.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over `n` seeds of value minus baseline.

    Attributes
    ----------
    low, high
        95% interval of the mean, not corrected for the number of comparisons; None for one seed.
    sd
        Standard deviation of the differences; None for one seed.
    p
        Of the paired t-test that the mean is 0; where all differences are equal, of the exact
        sign-flip test (`p_of_equal`). None for fewer than 3 seeds.
    """

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    p: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def interval(
    values: Sequence[float], rng: np.random.Generator, confidence: float = CONFIDENCE
) -> Interval:
    """Return the mean and its interval, at the 95% level if no other is given.

    Parameters
    ----------
    values
        One or more finite numbers. From 30 on, the interval is bootstrapped (bias-corrected and
        accelerated) and covers the mean of normal values in 93.6% of cases or more; for fewer it
        is Student's t, which covers it in 95%. Where all are equal, so are the bounds.
    rng
        Draws the resamples.
    confidence
        How often the interval is to cover the true mean.

    Raises
    ------
    ValueError
        There is no value, or one that is not finite.
    """
    data = np.asarray(values, float)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"expected one or more finite numbers; got {list(values)}")
    mean = float(data.mean())
    if data.size < 2:
        return Interval(mean, None, None, 1)
    if _constant(data):
        return Interval(mean, mean, mean, data.size)
    if data.size >= FEWEST_TO_RESAMPLE:
        return Interval(mean, *_resampled(data, rng, confidence), data.size)
    reach = float(student_reach(data, confidence))
    return Interval(mean, mean - reach, mean + reach, data.size)


def student_reach(values: np.ndarray, confidence: float = CONFIDENCE) -> np.ndarray:
    """Return half of Student's interval of the mean of two or more values, of each column."""
    from scipy import stats

    n = len(values)
    quantile = stats.t.ppf((1 + confidence) / 2, n - 1)
    return np.asarray(quantile * values.std(axis=0, ddof=1) / math.sqrt(n))


def paired(
    values: Mapping[int, float], baseline: Mapping[int, float], rng: np.random.Generator
) -> Difference | None:
    """Return value minus baseline over the seeds that both have; None where they share none."""
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    differences = np.array([values[seed] - baseline[seed] for seed in seeds])
    found = interval(differences.tolist(), rng)
    sd = float(differences.std(ddof=1)) if found.n > 1 else None
    return Difference(found.mean, found.low, found.high, sd, _p(differences), found.n)


def p_of_equal(n: int) -> float:
    """Return the p-value of `n` differences that are all equal, and not 0.

    They have no variance to test against. If either sign was as likely for each, all would have
    the same one with a probability of 2/2^n: 0.25 for 3 seeds, less than 5% from 6 on.
    """
    return float(min(1.0, 2.0 ** (1 - n)))


def holm(ps: Sequence[float]) -> tuple[float, ...]:
    """Return p-values corrected by Holm's method for how many there are, in the given order."""
    corrected = [0.0] * len(ps)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = highest
    return tuple(corrected)


def corrected(differences: Sequence[Difference | None]) -> tuple[float | None, ...]:
    """Return the corrected p-value of each difference of a family; None where it has none."""
    tested = [i for i, found in enumerate(differences) if found and found.p is not None]
    ps = holm([p for found in differences if found and (p := found.p) is not None])
    by_index = dict(zip(tested, ps, strict=True))
    return tuple(by_index.get(i) for i in range(len(differences)))


def verdicts(
    differences: Sequence[Difference | None], better: Sequence[Better]
) -> tuple[Verdict, ...]:
    """Say of each difference of a family what it shows at the 5% level, corrected for all of them.

    One that is significant taken alone, but not after the correction, is not the same as one of
    which nothing is shown: it is "only before correction". Of differences that are all equal, but
    fewer than can show anything (`p_of_equal`), there are too few seeds to tell.

    Parameters
    ----------
    differences
        Everything that is looked at together; None where there was no seed to compare.
    better
        For each, whether a higher or a lower value is better.
    """
    ps = corrected(differences)
    return tuple(map(_verdict, differences, ps, better))


def direction(difference: Difference, better: Better) -> Literal["better", "worse"]:
    """Say which way a difference goes, whatever it shows."""
    return "better" if (difference.mean > 0) == (better == "higher") else "worse"


def repeats_needed(
    sd_of_differences: float,
    difference: float,
    power: float = POWER,
    level: float = SIGNIFICANCE,
) -> int | None:
    """Return how many seeds a paired t-test needs to find a difference.

    Parameters
    ----------
    sd_of_differences
        Standard deviation of the differences between trials with the same seed; if it is 0, the
        test is that of equal differences (`p_of_equal`).
    difference
        The true mean of the differences.
    power
        The probability with which it is to be found.
    level
        Of the test. Of a family of m comparisons, one that is found at 5% divided by m is found
        whatever the others are (Bonferroni); Holm's correction asks for no more than that.

    Returns
    -------
    int | None
        At least 3, for fewer are never judged; None for a difference of 0 but for rounding, which
        no number shows, and for one that a million seeds would not show.
    """
    if abs(difference) <= ROUNDING * sd_of_differences:
        return None
    if sd_of_differences <= ROUNDING * abs(difference):
        return next(n for n in count(FEWEST_SEEDS) if p_of_equal(n) < level)
    effect = abs(difference) / sd_of_differences
    enough = FEWEST_SEEDS
    while _power(enough, effect, level) < power:
        if enough >= MOST_SEEDS:
            return None
        enough = min(2 * enough, MOST_SEEDS)
    seeds = range(max(FEWEST_SEEDS, enough // 2), enough + 1)
    return seeds[bisect_left(seeds, power, key=lambda n: _power(n, effect, level))]


# -- parts -------------------------------------------------------------------------------------


def _constant(data: np.ndarray) -> bool:
    """Whether the values are equal, but for rounding."""
    return bool(np.ptp(data) <= ROUNDING * np.abs(data).max())


def _resampled(
    data: np.ndarray, rng: np.random.Generator, confidence: float
) -> tuple[float, float]:
    from scipy import stats

    found = stats.bootstrap(
        (data,), np.mean, confidence_level=confidence, method="BCa", rng=rng
    ).confidence_interval
    return float(found.low), float(found.high)


def _p(differences: np.ndarray) -> float | None:
    """The p-value of the paired t-test; that has none where all differences are equal."""
    if differences.size < FEWEST_SEEDS:
        return None
    if _constant(differences):
        return p_of_equal(differences.size) if differences[0] else 1.0
    from scipy import stats

    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def _verdict(difference: Difference | None, p: float | None, better: Better) -> Verdict:
    if difference is None or p is None:
        return "too few seeds to tell"
    if p >= SIGNIFICANCE:
        return _not_shown(difference)
    return direction(difference, better)


def _not_shown(difference: Difference) -> Verdict:
    if difference.p is not None and difference.p < SIGNIFICANCE:
        return "only before correction"
    equal = difference.excludes_zero and difference.low == difference.high
    return "too few seeds to tell" if equal else "no difference shown"


def _power(n: int, effect: float, level: float) -> float:
    """The probability that the two-sided t-test on `n` differences finds this effect size."""
    from scipy import stats

    critical = stats.t.ppf(1 - level / 2, n - 1)
    # The square of t is F. The lower tail of the noncentral t of scipy is not a number at times.
    return float(stats.ncf.sf(critical**2, 1, n - 1, n * effect**2))
