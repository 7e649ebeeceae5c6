"""How figures are written, and what they are called by another score than accuracy."""

from __future__ import annotations

import math

import pytest

from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.metrics import BY_KEY
from flows.metrics.score import SCORES, Score
from flows.records.record import Record
from tests.support.synthetic import toy_events


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(100.0, "100"), (10.0, "10.0"), (1.0, "1.00"), (0.5, "0.500")]
)
def test_three_digits_are_enough(seconds: float, text: str) -> None:
    assert BY_KEY["downtime_seconds"].text(seconds) == text


@pytest.mark.parametrize(
    "key", ["updates_lost", "downtime_seconds", "store_bytes", "cost_usd", "goodput"]
)
def test_no_interval_of_what_is_counted_or_measured_goes_below_0(key: str) -> None:
    assert BY_KEY[key].cut(-0.1) == 0


def test_what_needs_a_fault_has_a_value_with_one_alone() -> None:
    struck, quiet = (
        outcome(Record(tuple(toy_events("checkpoint", fault))), load_prices()).row()
        for fault in ("kill", "no fault")
    )
    known = {key for key, metric in BY_KEY.items() if metric.metric and struck[key] is not None}
    gained = {key for key in known if quiet[key] is None}
    assert "regain_seconds" in gained
    assert gained == {key for key in known if BY_KEY[key].of_faults}


def test_scores_are_told_in_four_digits_or_as_a_share() -> None:
    assert SCORES["rmse"].text(12.3456) == "12.35"
    assert SCORES["auc"].text(0.9567) == "95.7%"


def test_the_name_of_a_score_takes_the_place_of_accuracy_in_a_text() -> None:
    told = SCORES["loss"].said("Test accuracy. Accuracy minus accuracy_final")
    assert told == "Test loss. Loss minus accuracy_final"


@pytest.mark.parametrize("score", [score for score in SCORES.values() if score.better == "lower"])
def test_the_worst_of_an_error_is_the_largest_and_is_called_so(score: Score) -> None:
    assert score.worst([2.0, 5.0, math.inf, 3.0]) == 5.0
    assert score.best([2.0, 5.0, math.inf, 3.0]) == 2.0
    assert score.tracked("fault/accuracy_lowest_after") == f"fault/{score.key}_highest_after"


@pytest.mark.parametrize("score", [score for score in SCORES.values() if not score.share])
def test_what_is_no_share_has_no_per_cent(score: Score) -> None:
    assert score.of(BY_KEY["accuracy_final"]).shown_unit == ""
    assert score.of(BY_KEY["accuracy_final"]).text(0.5) == "0.5"
