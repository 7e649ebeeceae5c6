"""Statistics against tables, other tests of scipy, and synthetic data."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flows.analysis.statistics import Interval, are_apart, difference, interval, paired
from flows.analysis.statistics.power import repeats_needed


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


# -- intervals -----------------------------------------------------------------------------------


def test_one_value_has_no_interval(rng: np.random.Generator) -> None:
    found = interval([2.5], rng)
    assert (found.mean, found.low, found.high, found.n) == (2.5, None, None, 1)


@pytest.mark.parametrize("n", [6, 40])
def test_equal_values_have_an_interval_of_no_width(rng: np.random.Generator, n: int) -> None:
    found = interval([0.1] * n, rng)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_equal_values_tell_nothing_of_how_others_would_vary(
    rng: np.random.Generator, n: int
) -> None:
    assert interval([0.1] * n, rng).low is None
    assert interval([0.1] * n, rng, confidence=0.5 if n == 3 else 0.1).low == pytest.approx(0.1)


def test_few_values_have_the_interval_of_student(rng: np.random.Generator) -> None:
    # Mean 5, variance 4, standard error 1; the 97.5% quantile of t with 3 degrees is 3.182.
    found = interval([5 - 6**0.5, 5.0, 5.0, 5 + 6**0.5], rng)
    assert found.mean == pytest.approx(5.0)
    assert (found.low, found.high) == (
        pytest.approx(1.818, abs=1e-3),
        pytest.approx(8.182, abs=1e-3),
    )


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_what_has_no_mean_is_refused(rng: np.random.Generator, values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values, rng)


@pytest.mark.slow
# The bounds are three standard errors from 95%.
@pytest.mark.parametrize(("n", "draws"), [(5, 4000), (10, 4000), (30, 4000)])
def test_intervals_cover_the_mean_of_normal_values_as_often_as_they_say(
    rng: np.random.Generator, n: int, draws: int
) -> None:
    bounds = [interval(values, rng) for values in rng.normal(size=(draws, n)).tolist()]
    covered = sum((i.low or 0) <= 0 <= (i.high or 0) for i in bounds)
    assert covered / draws == pytest.approx(0.95, abs=3 * (0.95 * 0.05 / draws) ** 0.5)


def test_intervals_of_counts_are_never_below_0(rng: np.random.Generator) -> None:
    found = interval([0.0] * 8 + [30.0, 31.0], rng, counts=True)
    assert found.low is not None
    assert found.low >= 0
    by_student = interval([0.0] * 8 + [30.0, 31.0], rng)
    assert by_student.low is not None
    assert by_student.low < 0, "else this is not the case to be tested"


@pytest.mark.parametrize("bound", [-1.0, 0.0, 0.4, 1.0, 3.0])
def test_counts_are_judged_by_the_sign_flip_test(rng: np.random.Generator, bound: float) -> None:
    values = np.array([1.0, 0.0, 0.0, 2.0, 5.0, -1.0, 0.0])
    found = difference(values.tolist(), rng, counts=True)

    def flipped(alternative: str) -> float:
        test = stats.permutation_test(
            (values - bound,),
            np.sum,
            permutation_type="samples",
            n_resamples=np.inf,
            alternative=alternative,
        )
        return float(test.pvalue)

    assert found.p_more(bound) == pytest.approx(flipped("greater"))
    assert found.p_less(bound) == pytest.approx(flipped("less"))


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_an_interval_excludes_what_the_test_does(
    rng: np.random.Generator, counts: bool, confidence: float
) -> None:
    for _ in range(20):
        found = difference(rng.poisson(4, 9) - 3.0, rng, counts)  # type: ignore[arg-type]
        low, high = found.bounds(confidence) or (-np.inf, np.inf)
        for bound in np.linspace(-3, 5, 41):
            excluded = 2 * min(found.p_more(bound), found.p_less(bound)) < 1 - confidence
            assert excluded == (not low <= bound <= high)


def test_the_same_generator_gives_the_same_interval() -> None:
    values = list(np.random.default_rng(1).poisson(5, size=35))
    once, again = (interval(values, np.random.default_rng(7), counts=True) for _ in range(2))
    assert once == again


# -- paired differences --------------------------------------------------------------------------


def test_a_paired_difference_is_that_of_scipy(rng: np.random.Generator) -> None:
    mine = {seed: float(rng.normal(1.0)) for seed in range(6)}
    base = {seed: float(rng.normal(0.0)) for seed in range(6)}
    found = paired(mine, base, rng)
    expected = stats.ttest_rel(list(mine.values()), list(base.values()))
    bounds = expected.confidence_interval(0.95)
    assert found is not None
    assert (found.p, found.n) == (pytest.approx(expected.pvalue), 6)
    assert (found.low, found.high) == (pytest.approx(bounds.low), pytest.approx(bounds.high))


def test_only_seeds_that_both_have_are_compared(rng: np.random.Generator) -> None:
    found = paired({0: 1.0, 1: 2.0, 5: 100.0}, {1: 1.5, 0: 0.5, 7: -100.0}, rng)
    assert found is not None
    assert (found.mean, found.n) == (0.5, 2)
    assert paired({0: 1.0}, {1: 1.0}, rng) is None


@pytest.mark.parametrize(
    ("values", "p"), [([1.0, 2.0, 3.0], 1.0), ([1.1, 2.1, 3.1], 0.25), ([1.5, 2.5], None)]
)
def test_differences_that_are_all_equal(
    rng: np.random.Generator, values: list[float], p: float | None
) -> None:
    found = paired(dict(enumerate(values)), {0: 1.0, 1: 2.0, 2: 3.0}, rng)
    assert found is not None
    assert found.p == p


def test_equal_differences_show_something_from_six_seeds_on(rng: np.random.Generator) -> None:
    def found(n: int) -> tuple[float | None, bool]:
        same = difference([3.0] * n, rng)
        return same.p, same.excludes_zero

    assert [found(n) for n in (3, 5, 6)] == [(0.25, False), (0.0625, False), (0.03125, True)]
    signs = stats.permutation_test(
        ([3.0] * 6,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert found(6)[0] == pytest.approx(signs.pvalue)


def test_differences_that_cancel_but_for_rounding_need_no_number_of_repeats(
    rng: np.random.Generator,
) -> None:
    chain = {0: 0.9120370370370371, 1: 0.9203703703703704, 2: 0.9111111111111111}
    none = {0: 0.9212962962962964, 1: 0.912962962962963, 2: 0.9092592592592593}
    found = paired(chain, none, rng)
    assert found is not None
    assert found.sd is not None
    assert found.mean != 0, "else this is not the case to be tested"
    assert repeats_needed(found.sd, found.mean) is None


def test_effects_are_apart_by_the_bounds_that_look_at_each_other() -> None:
    """Intervals of counts reach further to one side."""
    less = Interval(0.0, -1.0, 3.0, 8)
    assert are_apart(less, Interval(4.0, 3.5, 10.0, 8)), "4 is more than √(0.5² + 3²)"
    assert are_apart(Interval(4.0, 3.5, 10.0, 8), less)
    assert not are_apart(less, Interval(4.0, 1.0, 4.1, 8)), "4 is less than √(3² + 3²)"
    assert are_apart(Interval(1.0, 1.0, 1.0, 8), Interval(4.0, 1.1, 9.0, 8))
    assert not are_apart(Interval(1.0, 1.0, 1.0, 8), Interval(4.0, 1.0, 9.0, 8)), "it has 1 in it"
    assert not are_apart(less, Interval(40.0, None, None, 2))
