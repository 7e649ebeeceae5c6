"""What a training did to the model, on hand-made records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dps.events import Evaluated, Event
from flows.metrics.outcome import outcome
from flows.metrics.prices import Spending
from flows.records.events import TrainingStarted, TrialStarted
from flows.records.record import Record
from tests.support.records import PRICES, acked


def told(record: Record, *keys: str) -> tuple[Any, ...]:
    row = outcome(record, PRICES).row()
    return tuple(row[key] for key in keys)


def trained(
    *events: Event,
    target: float | None = None,
    objective: dict[str, float] | None = None,
    metric: str | None = None,
) -> Record:
    """A training from 100.0 on, of which 4 gradients are acked, a second each."""
    evaluation = {"target": target, "objective": objective, "metric": metric}
    acks = [acked([i], t=100.0 + i) for i in (1, 2, 3, 4)]
    started = TrialStarted(90.0, "t", {"config": {"evaluation": evaluation}}, {})
    return Record((started, TrainingStarted(100.0, 1, 1, 10), *acks, *events))


def scored(t: float, accuracy: float, loss: float = 1.0) -> Evaluated:
    return Evaluated(t, 0.0, loss, accuracy)


@pytest.mark.parametrize(
    ("target", "expected"), [(0.8, (3.0, 3)), (0.95, (None, None)), (None, (None, None))]
)
def test_time_gradients_and_money_to_a_target(target: float | None, expected: object) -> None:
    curve = (scored(99.0, 0.1), scored(101.5, 0.7), scored(103.0, 0.9), scored(104.0, 0.8))
    record = trained(*curve, target=target)
    assert told(record, "target_accuracy") == (target,)
    assert told(record, "target_seconds", "target_gradients") == expected
    money = Spending(record, PRICES).at(103.0) if target == 0.8 else None
    assert told(record, "target_usd") == (money,)


def test_a_target_is_reached_from_above_where_less_is_better() -> None:
    curve = (scored(99.0, 70.0), scored(101.5, 60.0), scored(103.0, 55.0), scored(104.0, 58.0))
    record = trained(*curve, target=58.0, metric="rmse")
    assert told(record, "target_seconds", "target_gradients", "accuracy_best") == (3.0, 3, 55.0)
    assert told(trained(*curve, target=50.0, metric="rmse"), "target_seconds") == (None,)


@pytest.mark.parametrize("wild", [math.inf, math.nan])
def test_what_is_not_finite_is_no_value(wild: float) -> None:
    curve = (scored(101.0, 2.0, 2.0), scored(102.0, wild, wild), scored(103.0, 3.0, 3.0))
    record = trained(*curve, target=2.5, metric="loss")
    assert told(record, "accuracy_final", "loss_final") == (None, None)
    assert told(record, "accuracy_best", "target_seconds") == (2.0, 1.0)


def test_the_objective_its_excess_and_when_it_was_near_enough() -> None:
    values = (9.0, 5.0, 2.1, 2.3, 2.2)
    curve = [Evaluated(99.0 + i, 0, 1.0, 0.5, value, value / 10) for i, value in enumerate(values)]
    keys = ("objective_final", "stationarity_final")
    reached = ("objective_excess", "objective_target_seconds", "objective_target_gradients")
    record = trained(*curve, objective={"reference": 2.0, "target": 0.1})
    assert told(record, *keys) == (pytest.approx(2.2), pytest.approx(0.22))
    assert told(record, *reached) == (pytest.approx(0.1), 1.0, 1)
    never = trained(*curve, objective={"reference": 2.0, "target": 0.01})
    assert told(never, *reached[1:]) == (None, None)
    assert told(trained(*curve, objective={}), *reached) == (None, None, None)
    wild = [Evaluated(99.0 + i, 0, 1.0, 0.5, v, v) for i, v in enumerate((3.0, math.nan))]
    assert told(trained(*wild, objective={"reference": 2.0}), *keys) == (None, None)
    assert told(trained(scored(99.0, 0.1)), *keys, *reached) == (None,) * 5
