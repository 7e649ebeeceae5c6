"""Outages over all faults of a trial, and the rate outside of them, on hand-made records."""

from __future__ import annotations

import math

import pytest

from dps.events import (
    CapacityRestored,
    Disturbed,
    Event,
    Killed,
    Paused,
    ReplicaAdded,
    Resumed,
    TrainingStarted,
    Undisturbed,
    WorkerJoined,
)
from flows.analysis.effects.outages import Outage, disturbed, downtime, outages, union
from flows.analysis.faults import FaultTimes, fault_times
from flows.analysis.ledger import ledger
from flows.analysis.throughput import pace
from flows.records.record import Record
from tests.support.records import acked


def lost(
    began: float, serving: float | None, shard: int | None = 0, applied: float | None = None
) -> FaultTimes:
    after = None if serving is None else serving + 0.5 if applied is None else applied
    return FaultTimes(
        0, "kill", "server-0", 1, began, shard=shard, serving=serving, first_applied=after
    )


def training(*events: Event, end: float = 40.0) -> Record:
    """A training from 0 to `end`."""
    return Record((TrainingStarted(0.0, 1, 2, 10), acked([1], t=1.0), acked([2], t=end), *events))


def test_a_fault_on_a_shard_that_is_down_prolongs_its_outage() -> None:
    found = outages(
        [lost(12.0, 18.0), lost(10.0, 14.0), lost(11.0, 12.0, shard=1), lost(30.0, 31.0)]
    )
    assert found == (
        Outage(0, 10.0, 18.0, 18.5),
        Outage(1, 11.0, 12.0, 12.5),
        Outage(0, 30.0, 31.0, 31.5),
    )


def test_a_fault_on_a_shard_that_serves_again_makes_another_outage() -> None:
    """Also if no update has been applied since the one before."""
    found = outages([lost(10.0, 14.0, applied=20.0), lost(16.0, 18.0, applied=20.0)])
    assert found == (Outage(0, 10.0, 14.0, 20.0), Outage(0, 16.0, 18.0, 20.0))


def test_downtime_is_the_union_and_beside_it_the_sum_over_shards() -> None:
    faults = [lost(10.0, 14.0), lost(12.0, 17.0, shard=1), lost(20.0, 21.0), lost(5.0, None, None)]
    found = downtime(training(), faults)
    assert (found.outages, found.unrecovered) == (3, 0)
    assert (found.seconds, found.shard_seconds) == (8.0, 10.0)
    assert (found.recovery_median, found.recovery_max) == (4.5, 5.5)


def test_the_median_of_an_even_number_of_outages_lies_between_two() -> None:
    assert downtime(training(), [lost(10.0, 14.0), lost(20.0, 21.0)]).recovery_median == 3.0


def test_an_outage_that_was_not_over_lasts_to_the_end_and_is_longer_than_any() -> None:
    faults = [lost(10.0, 14.0), lost(20.0, 21.0), lost(30.0, None)]
    found = downtime(training(), faults)
    assert (found.outages, found.unrecovered, found.seconds) == (3, 1, 15.0)
    assert (found.recovery_median, found.recovery_max) == (4.5, None)
    assert downtime(training(), faults[2:]).recovery_median is None


def test_downtime_is_that_of_the_training() -> None:
    faults = [lost(-2.0, 3.0), lost(39.0, 45.0, shard=1), lost(41.0, 42.0, shard=2)]
    found = downtime(training(), faults)
    assert (found.seconds, found.shard_seconds) == (4.0, 4.0)


def test_without_a_fault_there_is_no_outage() -> None:
    found = downtime(training(), [])
    assert (found.outages, found.seconds, found.recovery_median) == (0, 0.0, None)


def test_spans_that_overlap_or_touch_are_one() -> None:
    assert union([(3.0, 4.0), (0.0, 2.0), (1.0, 3.0), (6.0, 7.0)]) == [(0.0, 4.0), (6.0, 7.0)]
    assert union([(0.0, 9.0), (1.0, 2.0), (3.0, math.inf), (4.0, 5.0)]) == [(0.0, math.inf)]


def over(*events: Event) -> float:
    record = training(*events)
    [(_, until)] = disturbed(record, fault_times(record))
    return until


def test_a_fault_is_over_when_nothing_is_left_of_it_to_be_seen() -> None:
    worker = Killed(10.0, 0, "worker-0", 7, 5, True)
    assert over(worker) == math.inf
    fresh = CapacityRestored(12.0, 0, "worker-0-b")
    assert over(worker, fresh) == 12.0
    joined = WorkerJoined(12.5, "other", 2, "worker-0-b")
    first = acked([1, 2], t=13.0, worker="other")
    assert over(worker, fresh, joined, first) == 12.0  # of another incarnation: none of its own
    again = WorkerJoined(12.5, "other", 1, "worker-0-b")
    assert over(worker, fresh, again, first) == 13.0
    replica = Killed(10.0, 0, "replica-0-1", 7, 5, True)
    back = CapacityRestored(12.0, 0, "replica-0-1-b")
    assert over(replica, back, ReplicaAdded(14.0, 0, 3, "replica-0-1-b", 5)) == 14.0
    paused = Paused(10.0, 0, "worker-0", 7, 5, True)
    assert over(paused, Resumed(11.0, 0, "worker-0", 7, True)) == 11.0
    slow = Disturbed(10.0, 0, "slow", "server-0", 5, "", True)
    assert over(slow) == math.inf
    assert over(slow, Undisturbed(15.0, 0, "server-0", "")) == 15.0
    assert over(Disturbed(10.0, 0, "corrupt", "server-0", 5, "", True)) == 10.0


def test_the_steady_rate_leaves_out_start_up_and_faults() -> None:
    """10 a second but for a pause from 4 to 6 s, in which there are 2."""
    times = [i / 10 for i in range(1, 41)] + [5.0, 5.5] + [6 + i / 10 for i in range(1, 41)]
    acks = [acked([i], t=t) for i, t in enumerate(times, 1)]
    paused = Paused(4.0, 0, "server-0", 7, 5, True)
    record = Record(
        (
            TrainingStarted(-5.0, 1, 1, 10),
            *acks,
            paused,
            Resumed(6.0, 0, "server-0", 7, True),
        )
    )
    found = pace(record, ledger(record), fault_times(record))
    assert found.steady == pytest.approx(10.0)
    assert found.together == pytest.approx((len(times) - 1) / 9.9)
    assert pace(record, ledger(record), []).steady == found.together
