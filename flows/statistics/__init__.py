"""The statistics of experiments: means of paired differences, with intervals and tests that agree.

Pure functions over plain numbers. Trials of two strategies with the same seed start from the same
values and see the same batches, so strategies are compared seed by seed. An interval inverts its
test: it excludes a number if, and only if, the test rejects it at that level. Measures are tested
by Student's t, counts by the exact sign-flip test. `decisions` judges claims by these, `power`
computes what a number of seeds resolves, and `claims` applies both to an experiment.

Functions import `scipy.special` where they need it, as every process of a trial imports this
module, and not `scipy.stats`, which takes a second to import and 50 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
MIN_SEEDS = 3
# Sums of floating-point numbers that should be equal differ by less than this share of them.
ROUNDING = 1e-9
# Up to this number of values, the means of all subsets are computed; beyond it, of a sample.
MAX_ENUMERATED = 13
SUBSETS = 9_999


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of `n` values with an interval of that mean, of 95%.

    There are no bounds where so few values have none at that level.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """Mean over `n` seeds of value minus baseline, or of a figure that is a difference itself.

    Attributes
    ----------
    sd
        Standard deviation of the differences; None for one seed.
    subset_means
        For counts, and for differences that are all equal: the means of the subsets of the
        differences, in order, by which the sign-flip test goes. None: Student's t.
    """

    mean: float
    sd: float | None
    n: int
    subset_means: np.ndarray | None = field(default=None, repr=False, compare=False)

    def p_more(self, bound: float) -> float:
        """Return the one-sided p-value against a true mean of `bound` or less.

        It is 1 for fewer than 3 seeds.
        """
        if self.n < MIN_SEEDS:
            return 1.0
        if self.subset_means is not None:
            below = int(np.searchsorted(self.subset_means, bound, side="right"))
            return (1 + below) / (1 + len(self.subset_means))
        return _student(self, bound - self.mean)

    def p_less(self, bound: float) -> float:
        """Return the one-sided p-value against a true mean of `bound` or more."""
        if self.n < MIN_SEEDS:
            return 1.0
        if self.subset_means is not None:
            below = int(np.searchsorted(self.subset_means, bound, side="left"))
            return (1 + len(self.subset_means) - below) / (1 + len(self.subset_means))
        return _student(self, self.mean - bound)

    def bounds(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Return the interval of the true mean; None where there are too few seeds for any."""
        if self.n < 2:
            return None
        if self.subset_means is not None:
            return _ranked(self.subset_means, confidence)
        reach = _quantile(self.n, confidence) * self.standard_error
        return self.mean - reach, self.mean + reach

    @property
    def low(self) -> float | None:
        """Lower bound of the 95% interval, not corrected; None where there is none."""
        return None if self._bounds is None else self._bounds[0]

    @property
    def high(self) -> float | None:
        """Upper bound of the 95% interval, not corrected; None where there is none."""
        return None if self._bounds is None else self._bounds[1]

    @property
    def p(self) -> float | None:
        """The two-sided p-value against 0, not corrected; None for fewer than 3 seeds."""
        if self.n < MIN_SEEDS:
            return None
        return min(1.0, 2 * min(self.p_more(0.0), self.p_less(0.0)))

    @property
    def excludes_zero(self) -> bool:
        """Whether the 95% interval lies on one side of 0."""
        return self._bounds is not None and not self._bounds[0] <= 0 <= self._bounds[1]

    @cached_property
    def _bounds(self) -> tuple[float, float] | None:
        return self.bounds()

    @property
    def standard_error(self) -> float:
        """That of the mean, for tests by Student's t."""
        assert self.sd is not None, "there is one for every test by Student's t"
        return self.sd / math.sqrt(self.n)


def difference(
    values: Sequence[float], rng: np.random.Generator, counts: bool = False
) -> Difference:
    """Return the mean of differences, with its statistics.

    `rng` draws the subsets by whose means counts are judged, where there are more than 13 values.

    Differences of `counts` may be the same in nearly every seed, or 0 in most and large in some,
    for which Student's t is too confident. The sign-flip test is exact for any distribution that is
    symmetric about its mean, such as the difference of two strategies that lose equally much. An
    interval of 95% takes 6 values.

    Raises `ValueError` if there is no value, or one that is not finite.
    """
    data = np.asarray(values, float)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"expected one or more finite numbers; got {list(values)}")
    if data.size < 2:
        return Difference(float(data[0]), None, 1)
    if _constant(data):
        same = np.full(subsets_of(data.size), data[0])
        return Difference(float(data[0]), 0.0, data.size, same)
    points = np.sort(subset_means(data, rng)) if counts else None
    return Difference(float(data.mean()), float(data.std(ddof=1)), data.size, points)


def interval(values: Sequence[float], rng: np.random.Generator, counts: bool = False) -> Interval:
    """Return the mean and its interval of 95%; see `difference` for the parameters.

    The interval is Student's t; that of `counts`, and of values that are all equal, lies between
    the means of subsets, and so is never below 0.
    """
    mean = difference(values, rng, counts)
    return Interval(mean.mean, mean.low, mean.high, mean.n)


def student_reach(values: np.ndarray) -> np.ndarray:
    """Return half of Student's interval of the mean of two or more values, of each column."""
    n = len(values)
    return np.asarray(_quantile(n, CONFIDENCE) * values.std(axis=0, ddof=1) / math.sqrt(n))


def paired(
    values: Mapping[int, float],
    baseline: Mapping[int, float],
    rng: np.random.Generator,
    counts: bool = False,
) -> Difference | None:
    """Return value minus baseline over the seeds that both have; None where they share none."""
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    return difference([values[seed] - baseline[seed] for seed in seeds], rng, counts)


def subset_means(data: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the means of subsets of the values, of each row: Hartigan's typical values.

    To flip the signs of a subset of the values less a bound leaves their sum as it was or more, if
    and only if the mean of the subset is at most the bound. So these means are what the sign-flip
    test counts, for any bound, and each interval between two neighbours is equally likely to cover
    the centre of a symmetric distribution. Subsets of more than 13 values are drawn.
    """
    n = data.shape[-1]
    if n <= MAX_ENUMERATED:
        members = (np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1
    else:
        members = rng.integers(0, 2, size=(SUBSETS, n))
        members[~members.any(axis=1)] = 1
    return np.asarray(data @ members.T / members.sum(axis=1))


def subsets_of(n: int) -> int:
    """Return how many subsets of n values the sign-flip test looks at."""
    return 2**n - 1 if n <= MAX_ENUMERATED else SUBSETS


def rank_of_bound(subsets: int, level: float) -> int:
    """Return the rank, from 1, of the subset mean that bounds the interval; 0: there is no bound.

    The bound is the largest value that the sign-flip test excludes at a two-sided level.
    """
    # Twice the one-sided p-value, which is at least (1 + rank) / (1 + subsets), is below the level.
    return math.ceil(level * (1 + subsets) / 2 - ROUNDING) - 1


def _constant(data: np.ndarray) -> bool:
    """Whether the values are equal, but for rounding."""
    return bool(np.ptp(data) <= ROUNDING * np.abs(data).max())


def _student(found: Difference, distance: float) -> float:
    """The probability that Student's t is at most a distance in standard errors of the mean."""
    from scipy import special

    return float(special.stdtr(found.n - 1, distance / found.standard_error))


def _quantile(n: int, confidence: float) -> float:
    from scipy import special

    return float(special.stdtrit(n - 1, (1 + confidence) / 2))


def _ranked(points: np.ndarray, confidence: float) -> tuple[float, float] | None:
    """The bounds that the sign-flip test leaves at a level; None where it excludes nothing."""
    rank = rank_of_bound(len(points), 1 - confidence)
    return None if rank < 1 else (float(points[rank - 1]), float(points[-rank]))
