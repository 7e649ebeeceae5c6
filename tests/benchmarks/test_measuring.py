"""The benchmark of what measuring costs: its verdicts, and one real round."""

from __future__ import annotations

import pytest

from benchmarks.measuring import Round, measuring, table, verdict
from flows.analysis.statistics import Interval


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.981, 1.01, "met"), (0.95, 0.97, "missed"), (0.97, 1.0, "not resolved")],
)
def test_a_target_is_met_when_the_whole_interval_says_so(
    low: float, high: float, said: str
) -> None:
    assert verdict(Interval((low + high) / 2, low, high, 5)).startswith(said)


def test_the_table_gives_the_ratio_of_rounds() -> None:
    text = table([Round(99.0, 100.0), Round(50.0, 50.0)])
    assert "0.995 [" in text
    assert "74.5" in text


@pytest.mark.slow
@pytest.mark.cluster
def test_a_real_round_has_both_turns() -> None:
    (found,) = measuring(lambda line: None, rounds=1, updates=20)
    assert found.measured > 0
    assert found.alone > 0
