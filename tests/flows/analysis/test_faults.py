"""The moments of a fault, on hand-made records."""

from __future__ import annotations

from dps.events import (
    CapacityRestored,
    Decided,
    Detected,
    Killed,
    Paused,
    Promoted,
    Restored,
    Resumed,
)
from flows.analysis.faults import fault_times
from flows.records.record import Record
from tests.support.records import applied, fault


def test_the_parts_of_a_recovery_add_up() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", False, "scheduler"),
        Decided(101.0, 0, 2, "spare-0", "restore"),
        CapacityRestored(102.0, 0, "server-0-b"),
        Decided(102.25, 0, 3, "server-0-b", "restore"),
        Decided(104.0, 0, 4, "server-0-b", "reconfigure"),
        Restored(103.0, 0, 2, "server-0-b", 40, "checkpoint"),
        applied([1, 2], [41, 42], epoch=2, t=103.25),
    )
    [times] = fault_times(record)
    assert times.detect_seconds == 0.5
    assert times.decide_seconds == 1.75
    assert times.wait_capacity_seconds == 1.5
    assert times.restore_seconds == 2.5
    assert times.first_applied_seconds == 0.25
    assert times.rto_seconds == 3.25
    assert times.source == "checkpoint"
    assert times.by == "scheduler"


def test_the_way_of_a_kill_is_told() -> None:
    kills = [Killed(100.0, 0, "server-0", 7, 50, True, by) for by in ("signal", "host", "requeue")]
    kinds = [times.kind for kill in kills for times in fault_times(Record((kill,)))]
    assert kinds == ["kill", "host", "requeue"]


def test_a_promotion_does_not_wait_for_capacity() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", True, "client"),
        Promoted(100.75, 0, 2, "replica-0-1", 40),
        CapacityRestored(102.0, 0, "server-0-b"),
    )
    [times] = fault_times(record)
    assert (times.restore_seconds, times.wait_capacity_seconds) == (0.25, 0.0)
    assert (times.source, times.first_applied, times.rto_seconds) == ("promoted", None, None)


def test_only_the_killed_shard_and_later_epochs_count() -> None:
    record = fault(
        Detected(100.25, 1, 5, "server-1", False, "client"),
        Restored(100.5, 1, 5, "server-1-b", 0, "initial"),
        applied([1], epoch=5, shard=1, t=100.6),
        Detected(101.0, 0, 2, "server-0", False, "client"),
        applied([3], [3], epoch=1, t=101.5),
        Restored(102.0, 0, 3, "server-0-b", 2, "store"),
        applied([4], [3], epoch=3, head=False, t=102.5),
        applied([4], [3], epoch=3, t=103.0),
    )
    [times] = fault_times(record)
    assert (times.shard, times.detected, times.serving) == (0, 101.0, 102.0)
    assert times.first_applied == 103.0


def test_a_shard_that_never_comes_back_has_no_recovery_time() -> None:
    [times] = fault_times(fault(Detected(101.0, 0, 2, "server-0", False, "client")))
    assert times.detect_seconds == 1.0
    assert times.restore_seconds is None
    assert times.wait_capacity_seconds is None
    assert times.rto_seconds is None


def test_a_pause_has_the_parts_of_a_kill() -> None:
    record = Record(
        (
            Paused(100.0, 0, "server-0", 7, 50, True),
            Detected(101.0, 0, 2, "server-0", True, "lease"),
            Promoted(101.25, 0, 2, "replica-0-1", 40),
            applied([1], [41], epoch=2, t=101.5),
            Resumed(102.0, 0, "server-0", 7, True),
        )
    )
    [times] = fault_times(record)
    assert (times.kind, times.source, times.by) == ("pause", "promoted", "lease")
    assert (times.detect_seconds, times.restore_seconds) == (1.0, 0.25)
    assert (times.first_applied_seconds, times.rto_seconds) == (0.25, 1.5)


def test_a_pause_that_nobody_notices_ends_by_itself() -> None:
    record = Record(
        (
            applied([1], [1], t=99.0),
            Paused(100.0, 0, "server-0", 7, 50, True),
            Resumed(100.5, 0, "server-0", 7, True),
            applied([2], [2], t=100.75),
            Paused(103.0, 1, "worker-0", 8, 50, True),
            Resumed(103.5, 1, "worker-0", 8, True),
        )
    )
    server, worker = fault_times(record)
    assert (server.shard, server.source, server.detected) == (0, "resumed", None)
    assert (server.first_applied_seconds, server.rto_seconds) == (0.25, 0.75)
    assert (worker.shard, worker.source, worker.rto_seconds) == (None, None, None)


def test_each_pause_of_a_node_has_its_own_detection() -> None:
    record = Record(
        (
            Paused(100.0, 0, "server-0", 7, 50, True),
            Resumed(100.5, 0, "server-0", 7, True),
            Paused(101.0, 1, "server-0", 7, 60, True),
            Detected(102.0, 0, 2, "server-0", True, "lease"),
        )
    )
    assert [times.detected for times in fault_times(record)] == [None, 102.0]


def test_the_loss_of_a_follower_ends_with_the_next_update() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", True, "scheduler"),
        applied([1], [41], epoch=2, t=101.0),
    )
    [times] = fault_times(record)
    assert (times.source, times.restore_seconds, times.rto_seconds) == ("others", 0.5, 1.0)


def test_what_comes_of_a_later_fault_is_none_of_this_one() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", True, "scheduler"),
        applied([1], [41], epoch=2, t=101.0),
        Promoted(105.0, 0, 4, "replica-0-1", 60),
        applied([2], [61], epoch=4, t=105.5),
    )
    [times] = fault_times(record)
    assert (times.source, times.rto_seconds) == ("others", 1.0)


def test_a_restoration_that_came_to_nothing_does_not_end_the_recovery() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", False, "scheduler"),
        Restored(101.0, 0, 3, "spare-0", 40, "checkpoint"),
        Restored(102.0, 0, 5, "spare-1", 40, "checkpoint"),
        applied([1], [41], epoch=5, t=102.5),
    )
    [times] = fault_times(record)
    assert (times.restore_seconds, times.rto_seconds) == (1.5, 2.5)
