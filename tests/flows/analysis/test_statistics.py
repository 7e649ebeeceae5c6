"""Statistics against tables, other tests of scipy, and synthetic data."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flows.analysis.statistics import Difference, holm, interval, paired, repeats_needed, verdicts


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def difference(p: float | None, mean: float = 1.0, n: int = 5) -> Difference:
    return Difference(mean, mean - 1, mean + 1, 1.0, p, n)


# -- intervals -----------------------------------------------------------------------------------


def test_one_value_has_no_interval(rng: np.random.Generator) -> None:
    found = interval([2.5], rng)
    assert (found.mean, found.low, found.high, found.n) == (2.5, None, None, 1)


@pytest.mark.parametrize("n", [2, 3, 40])
def test_equal_values_have_an_interval_of_no_width(rng: np.random.Generator, n: int) -> None:
    found = interval([0.1] * n, rng)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))


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
# The bounds are three standard errors from 95%. A bootstrap covers 90% of 10 normal values.
@pytest.mark.parametrize(("n", "draws"), [(5, 4000), (10, 4000), (29, 4000), (30, 400)])
def test_intervals_cover_the_mean_of_normal_values_as_often_as_they_say(
    rng: np.random.Generator, n: int, draws: int
) -> None:
    bounds = [interval(values, rng) for values in rng.normal(size=(draws, n)).tolist()]
    covered = sum((i.low or 0) <= 0 <= (i.high or 0) for i in bounds)
    assert covered / draws == pytest.approx(0.95, abs=3 * (0.95 * 0.05 / draws) ** 0.5)


def test_intervals_of_many_skewed_values_are_skewed_too(rng: np.random.Generator) -> None:
    found = interval(rng.exponential(size=40).tolist(), rng)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.mean > 1.05 * (found.mean - found.low)


def test_the_same_generator_gives_the_same_interval() -> None:
    values = list(np.random.default_rng(1).normal(size=35))
    once, again = (interval(values, np.random.default_rng(7)) for _ in range(2))
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
    def verdict(n: int) -> str:
        found = paired(dict.fromkeys(range(n), 7.0), dict.fromkeys(range(n), 4.0), rng)
        return verdicts([found], ["higher"])[0]

    assert [verdict(n) for n in (3, 5, 6)] == ["too few seeds to tell"] * 2 + ["better"]
    none = paired(dict.fromkeys(range(3), 4.0), dict.fromkeys(range(3), 4.0), rng)
    assert verdicts([none], ["higher"]) == ("no difference shown",)
    signs = stats.permutation_test(
        ([3.0] * 6,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    found = paired(dict.fromkeys(range(6), 7.0), dict.fromkeys(range(6), 4.0), rng)
    assert found is not None
    assert found.p == pytest.approx(signs.pvalue)


# -- many comparisons ----------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    # In order: 0.005 × 4 = 0.02, 0.01 × 3 = 0.03, 0.03 × 2 = 0.06, and 0.04 is lifted to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.6, 0.7]) == (1.0, 1.0)
    assert holm([]) == ()


def test_verdicts_are_corrected_for_all_that_were_tested() -> None:
    alone = verdicts([difference(0.03)], ["higher"])
    among = verdicts([difference(0.03), difference(0.5)], ["higher", "higher"])
    assert alone == ("better",)
    assert among == ("only before correction", "no difference shown")


@pytest.mark.parametrize(
    ("mean", "better", "said"),
    [
        (1.0, "higher", "better"),
        (1.0, "lower", "worse"),
        (-1.0, "higher", "worse"),
        (-1.0, "lower", "better"),
    ],
)
def test_a_verdict_knows_which_way_is_better(mean: float, better: str, said: str) -> None:
    assert verdicts([difference(0.001, mean)], [better]) == (said,)  # type: ignore[list-item]


def test_no_interval_that_excludes_0_is_told_as_no_difference(rng: np.random.Generator) -> None:
    """Where it does, the t-test is significant: it is only the correction that hides it."""
    seen = set()
    for _ in range(200):
        draws = rng.normal(0.8, size=(10, 3))
        found = [paired(dict(enumerate(row)), dict.fromkeys(range(3), 0.0), rng) for row in draws]
        said = verdicts(found, ["higher"] * 10)
        seen |= {(each.excludes_zero, verdict) for each, verdict in zip(found, said, strict=True)}  # type: ignore[union-attr]
    assert seen == {
        (False, "no difference shown"),
        (True, "only before correction"),
        (True, "better"),
    }


def test_too_few_seeds_are_not_judged_and_do_not_count() -> None:
    found = verdicts([None, difference(None, n=2), difference(0.04)], ["higher"] * 3)
    assert found == ("too few seeds to tell", "too few seeds to tell", "better")


def test_of_nothing_but_chance_few_families_have_a_verdict(rng: np.random.Generator) -> None:
    families, wrong = 200, 0
    for _ in range(families):
        draws = rng.normal(size=(6, 2, 4))  # six comparisons of four seeds
        found = [paired(dict(enumerate(a)), dict(enumerate(b)), rng) for a, b in draws]
        wrong += not {"better", "worse"}.isdisjoint(verdicts(found, ["higher"] * 6))
    # At most 5% in the long run: of 200, more than 18 has a probability of less than 1%.
    assert wrong <= 18


# -- numbers of repeats --------------------------------------------------------------------------


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_repeats_are_those_of_the_usual_tables(effect: float, pairs: int) -> None:
    assert repeats_needed(1.0, effect) == pairs
    assert repeats_needed(0.02, -0.02 * effect) == pairs


@pytest.mark.parametrize(("effect", "level", "pairs"), [(0.5, 0.01, 51), (1.0, 0.01, 16)])
def test_repeats_at_the_level_of_a_correction(effect: float, level: float, pairs: int) -> None:
    """By the tables for 80%: more seeds than at 5%, and as few as a test of that level needs."""
    assert repeats_needed(1.0, effect, level=level) == pairs
    few = 0.05 / 30
    needed = repeats_needed(1.0, effect, level=few)
    assert needed is not None
    assert needed > pairs
    assert repeats_needed(0.0, 0.5, level=few) == 11, "2/2^11 is less than 0.05/30, 2/2^10 is not"


@pytest.mark.parametrize("effect", [0.7, 1.5, 3.41, 8.0])
@pytest.mark.parametrize("level", [0.05, 0.05 / 32])
def test_as_many_repeats_find_the_effect_in_four_of_five_cases(
    rng: np.random.Generator, effect: float, level: float
) -> None:
    """And one less in fewer, if that would be judged at all."""

    def found(n: int) -> float:
        draws = rng.normal(effect, size=(20_000, n))
        return float((stats.ttest_1samp(draws, 0.0, axis=1).pvalue < level).mean())

    needed = repeats_needed(1.0, effect, level=level)
    assert needed is not None
    assert found(needed) > 0.79
    assert needed == 3 or found(needed - 1) < 0.81


def test_repeats_at_the_edges() -> None:
    assert repeats_needed(1.0, 0.0) is None
    assert repeats_needed(0.0, 0.5) == 6
    assert repeats_needed(1.0, 100.0) == 3
    few, many = repeats_needed(1.0, 0.5, power=0.5), repeats_needed(1.0, 0.5, power=0.95)
    assert few is not None
    assert many is not None
    assert few < 34 < many


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


def test_no_more_repeats_are_told_than_anybody_can_run() -> None:
    assert repeats_needed(1.0, 0.003) == pytest.approx(872_000, rel=0.01)
    assert repeats_needed(1.0, 0.0028) is None
    assert repeats_needed(1.0, 1e-8) is None
