"""Statistics against tables, other tests of scipy, and synthetic data."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flows.statistics import difference, interval, paired


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


# -- intervals -----------------------------------------------------------------------------------


def test_one_value_has_no_interval(rng: np.random.Generator) -> None:
    found = interval([2.5], rng)
    assert (found.mean, found.low, found.high, found.n) == (2.5, None, None, 1)


def test_equal_values_have_an_interval_of_no_width_unless_they_are_few(
    rng: np.random.Generator,
) -> None:
    found = interval([0.1] * 6, rng)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert interval([0.1] * 5, rng).low is None


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_what_has_no_mean_is_refused(rng: np.random.Generator, values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values, rng)


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


@pytest.mark.parametrize(("counts", "confidence"), [(False, 0.95), (True, 0.8), (True, 0.99)])
def test_an_interval_excludes_what_the_test_does(
    rng: np.random.Generator, counts: bool, confidence: float
) -> None:
    for _ in range(20):
        found = difference(rng.poisson(4, 9) - 3.0, rng, counts)  # type: ignore[arg-type]
        low, high = found.bounds(confidence) or (-np.inf, np.inf)
        for bound in np.linspace(-3, 5, 41):
            excluded = 2 * min(found.p_more(bound), found.p_less(bound)) < 1 - confidence
            assert excluded == (not low <= bound <= high)


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


def test_equal_differences_show_something_from_six_seeds_on(rng: np.random.Generator) -> None:
    def found(n: int) -> tuple[float | None, bool]:
        same = difference([3.0] * n, rng)
        return same.p, same.excludes_zero

    assert [found(n) for n in (3, 5, 6)] == [(0.25, False), (0.0625, False), (0.03125, True)]
    signs = stats.permutation_test(
        ([3.0] * 6,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert found(6)[0] == pytest.approx(signs.pvalue)
