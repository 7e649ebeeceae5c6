"""Verdicts on families of claims: by hand, at the edges, and one rule for both sides."""

from __future__ import annotations

import numpy as np
import pytest

from flows.statistics import Difference, difference
from flows.statistics.decisions import (
    Region,
    decide,
    equivalent,
    holm,
    less,
    more,
    p_against,
    p_for,
)


def effect(mean: float, error: float = 1.0, n: int = 11) -> Difference:
    """Of 11 seeds, Student's interval of 95% reaches 2.228 standard errors."""
    return Difference(mean, error * n**0.5, n)


def test_holm_by_hand() -> None:
    # In order: 0.005 × 4 = 0.02, 0.01 × 3 = 0.03, 0.03 × 2 = 0.06, and 0.04 is lifted to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.6, 0.7]) == (1.0, 1.0)
    assert holm([]) == ()


@pytest.mark.parametrize(
    ("mean", "region", "verdict"),
    [
        (2.3, more(1.0), "holds"),
        (2.2, more(1.0), "not resolved"),
        (-2.3, less(1.0), "holds"),
        (-1.1, more(1.0), "not resolved"),  # 1 is 2.1 standard errors away
        (-1.3, more(1.0), "does not hold"),
        (1.3, less(1.0), "does not hold"),
        (2.7, more(5.0), "does not hold"),  # it goes the right way, and is too small to matter
        (0.0, equivalent(2.3), "holds"),
        (0.2, equivalent(2.3), "not resolved"),
        (5.0, equivalent(2.3), "does not hold"),
        (-5.0, equivalent(2.3), "does not hold"),
        (4.0, Region(1.0, 7.0, 1.0, 7.0), "holds"),
        (-2.0, Region(above=1.0, under=1.0), "does not hold"),
    ],
)
def test_a_claim_is_judged_by_where_the_effect_is_shown_to_be(
    mean: float, region: Region, verdict: str
) -> None:
    assert decide([(effect(mean), region)])[0].verdict == verdict


def test_both_verdicts_are_corrected_alike() -> None:
    """Each is seen alone, and not among ten: "does not hold" is no easier than "holds"."""
    holds, fails = (effect(2.5), more(1.0)), (effect(-1.5), more(1.0))
    assert [decide([one])[0].verdict for one in (holds, fails)] == ["holds", "does not hold"]
    assert {d.verdict for d in decide([holds] * 10)} == {"not resolved"}
    assert {d.verdict for d in decide([fails] * 10)} == {"not resolved"}


def test_p_values_are_doubled_so_that_they_compare_with_intervals_of_95_percent() -> None:
    found = effect(2.2281388519649385)  # whose interval begins at 0
    assert p_for(found, more(1.0)) == pytest.approx(0.05)
    assert found.p == pytest.approx(0.05)
    # Against an equivalence, the one of two sides that speaks counts double.
    assert p_against(effect(2 + 2.2281388519649385), equivalent(2.0)) == pytest.approx(0.1)


def test_claims_that_nothing_is_known_of_count_for_the_correction() -> None:
    alone = (effect(2.3), more(1.0))
    assert decide([alone])[0].verdict == "holds"
    with_others = decide([alone, (None, more(1.0)), (effect(9.0, n=2), more(1.0))])
    assert [d.verdict for d in with_others] == ["not resolved"] * 3
    assert [d.corrected is None for d in with_others] == [False, True, True]
    assert with_others[0].confidence == pytest.approx(1 - 0.05 / 3)


def test_each_interval_is_at_the_level_at_which_its_claim_was_judged() -> None:
    family = [(effect(mean), more(0.1)) for mean in (9.0, 3.2, 0.3)]
    decisions = decide(family)
    assert [d.verdict for d in decisions] == ["holds", "holds", "not resolved"]
    # Of three, the clearest at 5%/3, the next at 5%/2; against the last, nothing is shown of three.
    assert [d.confidence for d in decisions] == pytest.approx([1 - 0.05 / 3, 0.975, 1 - 0.05 / 3])


def test_the_interval_of_what_speaks_against_two_sides_is_at_half_the_level() -> None:
    """The claim fails just when that interval leaves its region, on either side."""
    for mean, verdict in ((4.9, "not resolved"), (5.0, "does not hold")):
        for found in (effect(mean), effect(-mean)):
            [decision] = decide([(found, equivalent(2.3))])
            assert decision.verdict == verdict
            assert decision.confidence == pytest.approx(0.975)
            low, high = found.bounds(decision.confidence) or (0.0, 0.0)
            assert (low > 2.3 or high < -2.3) == (verdict == "does not hold")


def test_counts_that_are_the_same_in_few_seeds_resolve_nothing() -> None:
    rng = np.random.default_rng(0)

    def verdict(n: int, claims: int = 1) -> str:
        return decide([(difference([-300.0] * n, rng, True), less(50.0))] * claims)[0].verdict

    assert [verdict(n) for n in (3, 5, 6)] == ["not resolved", "not resolved", "holds"]
    assert [verdict(n, 4) for n in (7, 8)] == ["not resolved", "holds"]
