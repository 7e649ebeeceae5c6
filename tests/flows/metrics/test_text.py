"""How figures are written, and what they are called by another score than accuracy."""

from __future__ import annotations

import math

import pytest

from flows.metrics import BY_KEY
from flows.metrics.score import SCORES, Score


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("effect_cost_usd", -2.5, "−2.50"),
        ("effect_training_seconds", -12.34, "−12.3"),
        ("effect_training_seconds", -0.0412, "−0.041"),
        ("gradients_deficit", -1234, "−1,234"),
        ("accuracy_drop", -0.0002, "0.0"),
    ],
)
def test_differences_are_as_short_below_zero_as_above(key: str, value: float, text: str) -> None:
    assert BY_KEY[key].text(value) == text
    assert BY_KEY[key].text(-value) == text.removeprefix("−")


@pytest.mark.parametrize("score", [score for score in SCORES.values() if score.better == "lower"])
def test_the_worst_of_an_error_is_the_largest_and_is_called_so(score: Score) -> None:
    assert score.worst([2.0, 5.0, math.inf, 3.0]) == 5.0
    assert score.best([2.0, 5.0, math.inf, 3.0]) == 2.0
    assert score.tracked("fault/accuracy_lowest_after") == f"fault/{score.key}_highest_after"


@pytest.mark.parametrize("score", [score for score in SCORES.values() if not score.share])
def test_what_is_no_share_has_no_per_cent(score: Score) -> None:
    assert score.of(BY_KEY["accuracy_final"]).shown_unit == ""
    assert score.of(BY_KEY["accuracy_final"]).text(0.5) == "0.5"
