"""Power and numbers of seeds against the usual tables, the noncentral t, and each other."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flows.analysis.statistics import difference
from flows.analysis.statistics.decisions import Region, decide, equivalent, less, more
from flows.analysis.statistics.power import (
    fewest_seeds,
    power_of_claim,
    repeats_needed,
    seeds_needed,
)


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
def test_as_many_repeats_find_the_effect_in_four_of_five_cases(effect: float, level: float) -> None:
    """And one less in fewer, if that would be judged at all."""
    rng = np.random.default_rng(20)

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


def test_no_more_repeats_are_told_than_anybody_can_run() -> None:
    assert repeats_needed(1.0, 0.003) == pytest.approx(872_000, rel=0.01)
    assert repeats_needed(1.0, 0.0028) is None
    assert repeats_needed(1.0, 1e-8) is None


def test_the_sign_flip_test_shows_nothing_by_few_seeds() -> None:
    assert [fewest_seeds(exact=True), fewest_seeds(0.05 / 4, exact=True)] == [6, 8]
    assert fewest_seeds() == 3
    assert power_of_claim(more(1.0), 5, 1.0, 100.0, exact=True) == 0
    assert power_of_claim(more(1.0), 6, 1.0, 100.0, exact=True) == pytest.approx(1)


@pytest.mark.parametrize("effect", [0.5, 1.0, 1.5, 1.8, 2.5])
def test_six_counts_have_to_go_the_same_way(effect: float) -> None:
    """The probability that all six are positive is Φ(effect)^6; the t-test finds more."""
    power = power_of_claim(Region(above=0.0), 6, 1.0, effect, exact=True)
    assert power == pytest.approx(stats.norm.cdf(effect) ** 6, abs=0.01)


KINDS = {"more": more, "less": less, "equivalent": equivalent}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "claims"),
    [(6, 1), (7, 3), (8, 1), (10, 20), (13, 3), (14, 1), (20, 100), (30, 3), (31, 1), (40, 20)],
)
def test_claims_about_counts_hold_as_often_as_is_planned(kind: str, n: int, claims: int) -> None:
    """Among claims that hold nothing, so that Holm's method divides the level by all of them."""
    level, rng, repetitions = 0.05 / claims, np.random.default_rng(n), 400
    margin = (3.0 if kind == "equivalent" else 1.0) * float(stats.t.isf(level / 2, n - 1)) / n**0.5
    region = KINDS[kind](1.3 * margin)
    effect = {"more": 1.3, "less": -1.3, "equivalent": 0.0}[kind] * margin
    others = [(None, region)] * (claims - 1)
    held = sum(
        decide([(difference(rng.normal(effect, 1.0, n), rng, counts=True), region), *others])[
            0
        ].verdict
        == "holds"
        for _ in range(repetitions)
    )
    power = power_of_claim(region, n, 1.0, effect, level, exact=True)
    stated = 0.02 if level < 0.005 else 0.01
    chance = 3 * (max(power * (1 - power), 0.01) / repetitions) ** 0.5
    assert held / repetitions == pytest.approx(power, abs=stated + chance)


@pytest.mark.parametrize("level", [0.05, 0.05 / 4, 0.05 / 20])
def test_repeats_of_counts_are_the_first_number_that_is_enough(level: float) -> None:
    needed = repeats_needed(1.0, 1.2, level=level, exact=True)
    powers = {n: power_of_claim(more(1e-9), n, 1.0, 1.2, level, exact=True) for n in range(3, 20)}
    assert needed == next(n for n, power in powers.items() if power >= 0.8)


@pytest.mark.parametrize("n", [3, 5, 20, 400])
@pytest.mark.parametrize("effect", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("level", [0.05, 0.002])
def test_the_power_of_a_direction_is_the_noncentral_t(n: int, effect: float, level: float) -> None:
    """A claim is that, less the cases in which it is shown to be too small to matter."""
    known = stats.nct.sf(stats.t.ppf(1 - level / 2, n - 1), n - 1, np.sqrt(n) * effect)
    assert power_of_claim(Region(above=0.0), n, 1.0, effect, level) == pytest.approx(
        known, abs=2e-3
    )
    of_claim = power_of_claim(more(effect), n, 1.0, effect, level)
    assert known - level / 2 - 2e-3 <= of_claim <= known + 2e-3


@pytest.mark.parametrize("margin", [0.5, 1.0, 2.0])
def test_the_power_of_an_equivalence_is_that_of_two_one_sided_tests(margin: float) -> None:
    """Of many seeds, the standard deviation is known: 2 Φ(√n m/σ − z) − 1."""
    n = 400
    z = stats.norm.ppf(0.975)
    known = max(0.0, 2 * stats.norm.cdf(np.sqrt(n) * margin / 10 - z) - 1)
    assert power_of_claim(equivalent(margin), n, 10.0, 0.0) == pytest.approx(known, abs=0.01)


def test_differences_that_are_all_equal_hold_with_enough_seeds_or_never() -> None:
    found = [power_of_claim(more(1.0), n, 0.0, effect) for n in (5, 6) for effect in (0.5, 1.0)]
    assert found == [0, 0, 0, 1], "half of what matters is shown to be too small"
    assert power_of_claim(equivalent(1.0), 6, 0.0, 0.0) == 1


def test_seeds_needed_is_the_first_number_that_is_enough() -> None:
    assert seeds_needed(lambda n: n / 100, 0.8) == 80
    assert seeds_needed(lambda n: 1.0) == 3
    assert seeds_needed(lambda n: 0.0) is None
