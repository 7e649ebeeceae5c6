"""Accuracy, loss and the course of a training, on hand-made records."""

from __future__ import annotations

import pytest

from dps.events import (
    Detected,
    Restored,
)
from flows.outcome import outcome
from flows.ranks import nearest_rank
from tests.flows.records import PRICES, fault, scores


def test_accuracy_around_a_fault() -> None:
    record = fault(
        *scores(0.6, 0.7, 0.2, 0.3, 0.5, 0.65, 0.7, 0.8),  # at 98, 99, 100 (the kill), …
        Detected(100.5, 0, 2, "server-0", False, "client"),
        Restored(100.75, 0, 2, "server-0-b", 0, "initial"),
    )
    accuracy = outcome(record, PRICES).accuracy
    assert accuracy.before == 0.7
    assert accuracy.before_mean == pytest.approx(0.65)
    assert (accuracy.after, accuracy.lowest_after) == (0.3, 0.3)
    assert accuracy.drop == pytest.approx(0.4)
    assert accuracy.regain_seconds == 4.0
    assert accuracy.final == pytest.approx((0.65 + 0.7 + 0.8) / 3)
    assert accuracy.best == 0.8


def test_an_accuracy_that_is_not_regained_has_no_time() -> None:
    record = fault(
        *scores(0.9, 0.9, 0.1, 0.2, 0.3),
        Detected(100.5, 0, 2, "server-0", False, "client"),
        Restored(100.75, 0, 2, "server-0-b", 0, "initial"),
    )
    assert outcome(record, PRICES).accuracy.regain_seconds is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_percentiles_are_nearest_rank(share: float, expected: int) -> None:
    assert nearest_rank(range(1, 101), share) == expected


def test_percentiles_of_nothing_and_of_one() -> None:
    assert nearest_rank([], 0.5) is None
    assert nearest_rank([7.0], 0.01) == 7.0
