"""How metrics are written, and which need a fault."""

from __future__ import annotations

import pytest

from flows.metrics import BY_KEY
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.records.record import Record
from tests.support.synthetic import toy_events


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("effect_cost_usd", -2.5, "−2.50"),
        ("effect_training_seconds", -12.34, "−12.3"),
        ("effect_training_seconds", -0.0412, "−0.041"),
        ("gradients_deficit", -1234, "−1,234"),
        ("effect_time_end", -0.0002, "0.0"),
    ],
)
def test_differences_are_as_short_below_zero_as_above(key: str, value: float, text: str) -> None:
    assert BY_KEY[key].format(value) == text
    assert BY_KEY[key].format(-value) == text.removeprefix("−")


def test_what_needs_a_fault_has_a_value_with_one_alone() -> None:
    struck, quiet = (
        outcome(Record(tuple(toy_events("checkpoint", fault))), load_prices()).row()
        for fault in ("kill", "no fault")
    )
    known = {key for key, metric in BY_KEY.items() if metric.number and struck[key] is not None}
    gained = {key for key in known if quiet[key] is None}
    parts = ("detect", "wait_capacity", "restore", "first_applied", "rto", "recovery_median")
    assert gained == {"updates_lost_per_fault", *(f"{part}_seconds" for part in parts)}
