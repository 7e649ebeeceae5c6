"""Outages over all faults of a trial, on hand-made records."""

from __future__ import annotations

from typing import Any

from flows.metrics import BY_KEY
from flows.metrics.faults import FaultTimes, Outage, outages
from flows.metrics.trial import Trial
from flows.records.events import TrainingStarted
from flows.records.record import Record
from tests.support.records import PRICES, acked


def lost(
    began: float, serving: float | None, shard: int | None = 0, applied: float | None = None
) -> FaultTimes:
    after = None if serving is None else serving + 0.5 if applied is None else applied
    moments: dict[str, Any] = {"shard": shard, "serving": serving, "first_applied": after}
    return FaultTimes("kill", "server-0", 1, began, **moments)


TRAINING = Record((TrainingStarted(0.0, 1, 2, 10), acked([1], t=1.0), acked([2], t=40.0)))


def downtime(*faults: FaultTimes) -> tuple[Any, ...]:
    """All and unfinished outages, seconds in total and summed over shards, median recovery."""
    trial = Trial(TRAINING, PRICES)
    vars(trial)["faults"] = faults  # in the place of those of the record
    keys = "outages outages_unrecovered downtime_seconds downtime_shard_seconds "
    keys += "recovery_median_seconds"
    return tuple(BY_KEY[key].compute(trial) for key in keys.split())


def test_a_fault_on_a_shard_that_is_down_prolongs_its_outage() -> None:
    found = outages(
        [lost(12.0, 18.0), lost(10.0, 14.0), lost(11.0, 12.0, shard=1), lost(30.0, 31.0)]
    )
    assert found == (
        Outage(0, 10.0, 18.0, 18.5),
        Outage(1, 11.0, 12.0, 12.5),
        Outage(0, 30.0, 31.0, 31.5),
    )


def test_downtime_is_the_union_and_beside_it_the_sum_over_shards() -> None:
    faults = [lost(10.0, 14.0), lost(12.0, 17.0, shard=1), lost(20.0, 21.0), lost(5.0, None, None)]
    assert downtime(*faults) == (3, 0, 8.0, 10.0, 4.5)


def test_an_outage_that_was_not_over_lasts_to_the_end_and_is_longer_than_any() -> None:
    faults = [lost(10.0, 14.0), lost(20.0, 21.0), lost(30.0, None)]
    assert downtime(*faults) == (3, 1, 15.0, 15.0, 4.5)
    assert downtime(faults[2])[-1] is None


def test_downtime_is_that_of_the_training() -> None:
    faults = [lost(-2.0, 3.0), lost(39.0, 45.0, shard=1), lost(41.0, 42.0, shard=2)]
    assert downtime(*faults)[2:4] == (4.0, 4.0)
