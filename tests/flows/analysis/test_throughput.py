"""How fast a training went, and how old its weights were, on hand-made records."""

from __future__ import annotations

import pytest

from dps.events import Detected, Event, Reported, Restored, TrainingStarted
from flows.analysis.faults import fault_times
from flows.analysis.ledger import Row, applied_rows, lost_by_fault
from flows.analysis.outcome import outcome
from flows.analysis.staleness import by_period
from flows.analysis.steps import Steps
from flows.records.record import Record
from tests.support.records import PRICES, acked, applied, audited, fault, restored, start


def computed(times: tuple[float, ...], seconds: tuple[float, ...], run: int = 1) -> Reported:
    steps = tuple(range(1, len(times) + 1))
    return Reported(times[-1], "w", run, "compute_seconds", times, steps, seconds)


def idle(*events: Event) -> float | None:
    return outcome(Record(events), PRICES).pace.idle_share


def test_a_worker_is_idle_while_it_does_not_compute() -> None:
    # From 10 to 14 it computed 0.5 + 1.5 s; the first step, with its loading, does not count.
    assert idle(computed((10.0, 12.0, 14.0), (9.0, 0.5, 1.5))) == pytest.approx(0.5)


def test_incarnations_are_apart_and_workers_are_weighed_by_their_time() -> None:
    first, second = computed((10.0, 12.0), (1.0, 2.0)), computed((50.0, 56.0), (1.0, 0.0), run=2)
    assert idle(first, second) == pytest.approx(6 / 8)


def test_without_reports_nobody_knows() -> None:
    assert idle() is None
    assert idle(computed((10.0,), (1.0,))) is None


def together(*events: Event) -> float | None:
    return outcome(Record(events), PRICES).pace.together


def test_the_pace_of_all_leaves_out_when_some_are_not_at_work() -> None:
    early = [acked([i], t=10.0 + i, worker="early") for i in range(5)]  # until 14
    late = [acked([i], t=13.0 + i / 2, worker="late") for i in range(9)]  # from 13 on
    assert together(*early, *late) == pytest.approx(1 + 2)
    assert together(*early) == pytest.approx(1.0)
    assert together(*early, acked([1], t=20.0, worker="later")) is None
    assert together() is None


def test_goodput_counts_what_survives() -> None:
    record = Record(
        (
            TrainingStarted(10.0, 1, 1, 5),
            start(),
            applied([1, 2, 3, 4]),
            acked([1, 2, 3, 4], t=14.0),
            restored(2),
            audited(2),
        )
    )
    found = outcome(record, PRICES)
    assert found.pace.gradients_per_second == pytest.approx(1.0)
    assert found.pace.goodput == pytest.approx(0.5)


def test_updates_refused_as_too_stale_are_dropped_not_pushed() -> None:
    found = outcome(Record((acked([1], outcome="dropped"), acked([2]))), PRICES)
    assert (found.ledger.dropped, found.pace.pushed) == (1, 1)


@pytest.mark.parametrize("shards", [(0, 1), (1, 0)])
def test_a_gradient_counts_from_when_the_first_shard_had_it(shards: tuple[int, int]) -> None:
    early, late = shards
    acks = {early: acked([1], t=10.0, shard=early), late: acked([1], t=12.0, shard=late)}
    steps = Steps(Record((acks[0], acks[1])))
    assert [steps.at(t) for t in (9.0, 10.0, 12.0)] == [0, 1, 1]


def test_losses_belong_to_the_fault_before_them() -> None:
    assert lost_by_fault([5.0, 20.5, 21.0, 30.0], [20.0, 30.0]) == [2, 1]
    assert lost_by_fault([], []) == []


def test_the_recovery_point_is_the_most_that_one_fault_lost() -> None:
    record = fault(
        start(),
        applied([1, 2, 3, 4, 5]),
        acked([1, 2, 3, 4, 5]),
        restored(3, t=101.0),
        applied([6, 7], [4, 5], epoch=2, t=101.5),
    )
    assert outcome(record, PRICES).ledger.lost_per_fault == 2
    assert outcome(Record((start(),)), PRICES).ledger.lost_per_fault is None


def rows_around(*events: Event) -> dict[str, list[int]]:
    record = fault(*events)
    heads = [row for row in applied_rows(record) if row.head]
    parts = by_period(heads, fault_times(record))
    return {period: [row.id.seq for row in rows] for period, rows in parts.items()}


def test_what_was_read_before_the_shard_served_again_is_of_the_fault() -> None:
    # The kill is at 100, the shard serves from 102 on; weights are 0.1 s old when they are used.
    found = rows_around(
        applied([1], t=99.0),
        Detected(100.5, 0, 2, "server-0", False, "scheduler"),
        Restored(102.0, 0, 2, "server-0-b", 1, "checkpoint"),
        applied([2], epoch=2, t=102.05),
        applied([3], epoch=2, t=103.0),
    )
    assert found == {"before": [1], "during": [2], "after": [3]}


def test_a_shard_that_does_not_come_back_leaves_the_others_in_the_fault() -> None:
    found = rows_around(
        Detected(100.5, 0, 2, "server-0", False, "scheduler"),
        applied([4], shard=1, t=105.0),
    )
    assert found == {"before": [], "during": [4], "after": []}


def test_without_a_fault_everything_is_before() -> None:
    rows: list[Row] = list(applied_rows(Record((applied([1, 2]),))))
    assert [len(part) for part in by_period(rows, ()).values()] == [2, 0, 0]
