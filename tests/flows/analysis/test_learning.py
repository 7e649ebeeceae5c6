"""Accuracy, loss and the course of a training, on hand-made records."""

from __future__ import annotations

import math

import pytest

from dps.events import (
    Detected,
    Evaluated,
    Event,
    Killed,
    Restored,
    TrainingStarted,
    TrialResumed,
    TrialStarted,
)
from flows.analysis.learning import Loss, Objective, Target, course
from flows.analysis.outcome import outcome
from flows.analysis.resources import Spending
from flows.analysis.statistics import nearest_rank
from flows.analysis.steps import Steps
from flows.records.record import Record
from tests.support.records import PRICES, acked, fault, scores


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


@pytest.mark.parametrize("struck", [99.5, 100.0])
def test_accuracy_is_around_the_fault_that_recovery_times_are_of(struck: float) -> None:
    took_nothing_down = Killed(struck, 0, "store-0", 8, 50, True)
    record = fault(
        *scores(0.6, 0.7, 0.2, 0.3, 0.5, 0.65, 0.7, 0.8),
        Detected(100.5, 0, 2, "server-0", False, "client"),
        Restored(100.75, 0, 2, "server-0-b", 0, "initial"),
    )
    row = outcome(Record((took_nothing_down, *record.events)), PRICES).row()
    assert (row["fault_node"], row["restore_seconds"]) == ("server-0", 0.25)
    assert (row["accuracy_before"], row["accuracy_after"], row["regain_seconds"]) == (0.7, 0.3, 4.0)


def test_a_fault_that_took_no_shard_down_has_an_accuracy_before_it_and_none_after() -> None:
    record = Record((Killed(100.0, 0, "store-0", 8, 50, True), *scores(0.6, 0.7, 0.2)))
    accuracy = outcome(record, PRICES).accuracy
    assert (accuracy.before, accuracy.after, accuracy.regain_seconds) == (0.7, None, None)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_percentiles_are_nearest_rank(share: float, expected: int) -> None:
    assert nearest_rank(range(1, 101), share) == expected


def test_percentiles_of_nothing_and_of_one() -> None:
    assert nearest_rank([], 0.5) is None
    assert nearest_rank([7.0], 0.01) == 7.0


def trained(
    *events: Event,
    target: float | None = None,
    objective: dict[str, float] | None = None,
    metric: str | None = None,
) -> Record:
    """A training from 100.0 on, of which 4 gradients of 8 examples are acked, a second each."""
    evaluation = {"target": target, "objective": objective, "metric": metric}
    config = {"training": {"batch_size": 8}, "evaluation": evaluation}
    acks = [acked([i], t=100.0 + i) for i in (1, 2, 3, 4)]
    started = TrialStarted(90.0, "t", {"config": config}, {})
    return Record((started, TrainingStarted(100.0, 1, 1, 10), *acks, *events))


def scored(t: float, accuracy: float, loss: float = 1.0) -> Evaluated:
    return Evaluated(t, 0.0, loss, accuracy)


def test_the_course_is_told_in_time_gradients_and_samples() -> None:
    steps = course(trained(scored(99.0, 0.1), scored(102.5, 0.5), scored(110.0, 0.9)))
    assert [s.seconds for s in steps] == [-1.0, 2.5, 10.0]
    assert [s.gradients for s in steps] == [0, 2, 4]
    assert [s.samples for s in steps] == [0, 16, 32]


def test_what_was_refused_or_sent_again_is_no_gradient_more() -> None:
    record = trained(
        acked([1], t=105.0, outcome="duplicate"),
        acked([1], t=101.5, shard=1),
        acked([9], t=103.0, outcome="dropped"),
        scored(120.0, 0.5),
    )
    assert [s.gradients for s in course(record)] == [4]


def test_a_resumed_training_goes_on_from_what_its_checkpoints_held() -> None:
    record = trained(TrialResumed(100.0, "somewhere", 50), scored(102.5, 0.5), scored(110.0, 0.9))
    steps, pushed = course(record), Steps(record)
    assert [s.gradients for s in steps] == [pushed.at(s.t) for s in steps] == [52, 54]
    assert [s.samples for s in steps] == [52 * 8, 54 * 8]
    found = outcome(record, PRICES).accuracy.area_gradients  # 0.5 from 50 to 52, up to 0.9 at 54
    assert found == pytest.approx((0.5 * 2 + 0.7 * 2) / 4)


def test_areas_are_means_of_the_curve_over_its_width() -> None:
    # From 100 to 104: 0 to 0.4 within 2 s, 0.4 for 2 s. Over gradients: at 0, at 2, at 4.
    found = outcome(trained(scored(100.0, 0.0), scored(102.0, 0.4), scored(104.0, 0.4)), PRICES)
    assert found.accuracy.area_time == pytest.approx((0.2 * 2 + 0.4 * 2) / 4)
    assert found.accuracy.area_gradients == pytest.approx((0.2 * 2 + 0.4 * 2) / 4)


def test_a_curve_is_level_beyond_its_points_and_cut_at_the_edges() -> None:
    level = outcome(trained(scored(102.0, 0.5)), PRICES).accuracy
    assert (level.area_time, level.area_gradients) == (0.5, 0.5)
    cut = outcome(trained(scored(98.0, 0.0), scored(108.0, 1.0)), PRICES).accuracy
    assert cut.area_time == pytest.approx(0.4)  # from 0.2 at 100 to 0.6 at 104
    assert outcome(trained(), PRICES).accuracy.area_time is None


def test_time_and_gradients_to_a_target() -> None:
    curve = (scored(99.0, 0.1), scored(101.5, 0.7), scored(103.0, 0.9), scored(104.0, 0.8))
    assert outcome(trained(*curve, target=0.8), PRICES).target == Target(0.8, 3.0, 3)
    assert outcome(trained(*curve, target=0.95), PRICES).target == Target(0.95, None, None)
    assert outcome(trained(*curve), PRICES).target == Target(None, None, None)


LOSS = TrialStarted(90.0, "t", {"config": {"evaluation": {"metric": "loss"}}}, {})


def test_less_of_a_loss_is_better_around_a_fault() -> None:
    record = fault(
        *scores(0.6, 0.5, 1.2, 0.9, 0.7, 0.55, 0.5, 0.4),  # at 98, 99, 100 (the kill), …
        Detected(100.5, 0, 2, "server-0", False, "client"),
        Restored(100.75, 0, 2, "server-0-b", 0, "initial"),
    )
    found = outcome(Record((LOSS, *record.events)), PRICES)
    accuracy = found.accuracy
    assert found.score.key == "loss"
    assert (accuracy.before, accuracy.after, accuracy.lowest_after) == (0.5, 0.9, 0.9)
    assert accuracy.drop == pytest.approx(-0.4)
    assert accuracy.regain_seconds == 4.0
    assert accuracy.best == 0.4
    assert found.cost_per_point is None, "a loss has no percentage points"
    as_accuracy = outcome(record, PRICES).accuracy
    assert (as_accuracy.best, as_accuracy.lowest_after) == (1.2, 0.4)
    assert as_accuracy.regain_seconds == 1.0


def test_a_target_is_reached_from_above_where_less_is_better() -> None:
    curve = (scored(99.0, 70.0), scored(101.5, 60.0), scored(103.0, 55.0), scored(104.0, 58.0))
    found = outcome(trained(*curve, target=58.0, metric="rmse"), PRICES)
    assert found.target == Target(58.0, 3.0, 3)
    assert (found.accuracy.best, found.rmse) == (55.0, found.accuracy.final)
    assert outcome(trained(*curve, target=50.0, metric="rmse"), PRICES).target.seconds is None
    assert outcome(trained(*curve, target=58.0), PRICES).target == Target(58.0, 0.0, 0)


@pytest.mark.parametrize("wild", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_no_value(wild: float) -> None:
    curve = (scored(101.0, 2.0), scored(102.0, wild), scored(103.0, 3.0))
    found = outcome(trained(*curve, target=2.5, metric="loss"), PRICES)
    assert (found.accuracy.final, found.accuracy.area_time) == (None, None)
    assert (found.accuracy.best, found.target.seconds) == (2.0, 1.0)


def test_the_objective_its_excess_and_when_it_was_near_enough() -> None:
    values = (9.0, 5.0, 2.1, 2.3, 2.2)
    curve = [Evaluated(99.0 + i, 0, 1.0, 0.5, value, value / 10) for i, value in enumerate(values)]
    wanted = {"reference": 2.0, "target": 0.1}
    found = outcome(trained(*curve, objective=wanted), PRICES)
    assert found.objective.final == pytest.approx(2.2)
    assert found.objective.lowest == 2.1
    assert found.objective.excess == pytest.approx(0.1)
    assert found.objective.stationarity == pytest.approx(0.22)
    assert found.objective.stationarity_lowest == pytest.approx(0.21)
    assert (found.objective.seconds, found.objective.gradients) == (1.0, 1)
    row = found.row()
    assert (row["objective_target_seconds"], row["objective_target_gradients"]) == (1.0, 1)
    assert row["objective_excess"] == found.objective.excess
    never = outcome(trained(*curve, objective={"reference": 2.0, "target": 0.01}), PRICES)
    assert (never.objective.seconds, never.objective.gradients) == (None, None)
    alone = outcome(trained(*curve, objective={}), PRICES).objective
    assert (alone.excess, alone.seconds) == (None, None)
    assert alone.final == pytest.approx(2.2)


def test_an_objective_that_is_not_finite_is_none_and_one_not_asked_for_neither() -> None:
    wild = [Evaluated(99.0 + i, 0, 1.0, 0.5, v, v) for i, v in enumerate((3.0, float("nan")))]
    found = outcome(trained(*wild, objective={"reference": 2.0}), PRICES).objective
    assert (found.final, found.excess, found.stationarity) == (None, None, None)
    assert (found.lowest, found.stationarity_lowest) == (3.0, 3.0)
    assert outcome(trained(scored(99.0, 0.1)), PRICES).objective == Objective()


def test_money_to_a_target_is_what_was_spent_by_then() -> None:
    curve = (scored(99.0, 0.1), scored(101.5, 0.7), scored(103.0, 0.9), scored(104.0, 0.8))
    record = trained(*curve, target=0.8)
    assert outcome(record, PRICES).row()["target_usd"] == Spending(record, PRICES).at(103.0)
    assert outcome(trained(*curve, target=0.95), PRICES).target_usd is None


def test_a_loss_that_is_not_finite_is_none() -> None:
    losses = [scored(100.0 + i, 0.5, loss) for i, loss in enumerate([3.0, 1.0, 2.0, 3.0])]
    assert outcome(trained(*losses), PRICES).loss == Loss(2.0, 1.0)
    diverged = outcome(trained(*losses, scored(109.0, 0.1, float("nan"))), PRICES).loss
    assert diverged == Loss(None, 1.0)
