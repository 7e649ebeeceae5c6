"""Power and numbers of seeds against the usual tables, the noncentral t, and each other."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flows.statistics import difference
from flows.statistics.decisions import Region, decide, equivalent, less, more
from flows.statistics.power import fewest_seeds, power_of_claim, seeds_needed


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_repeats_are_those_of_the_usual_tables(effect: float, pairs: int) -> None:
    positive = Region(above=0.0)
    assert seeds_needed(lambda n: power_of_claim(positive, n, 1.0, effect)) == pairs
    assert seeds_needed(lambda n: power_of_claim(positive, n, 0.02, 0.02 * effect)) == pairs


def test_the_sign_flip_test_shows_nothing_by_few_seeds() -> None:
    assert [fewest_seeds(exact=True), fewest_seeds(0.05 / 4, exact=True)] == [6, 8]
    assert fewest_seeds() == 3
    assert power_of_claim(more(1.0), 5, 1.0, 100.0, exact=True) == 0
    assert power_of_claim(more(1.0), 6, 1.0, 100.0, exact=True) == pytest.approx(1)


KINDS = {"more": more, "less": less, "equivalent": equivalent}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "claims"),
    [(6, 1), (13, 3), (20, 100)],
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


@pytest.mark.parametrize(
    ("n", "effect", "level"), [(3, 2.0, 0.05), (5, 0.5, 0.002), (20, 0.1, 0.05), (400, 0.1, 0.002)]
)
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
