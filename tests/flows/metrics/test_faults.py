"""The moments of faults, on hand-made records."""

from __future__ import annotations

from dps.events import (
    Applied,
    CapacityRestored,
    Decided,
    Detected,
    Disturbed,
    Event,
    Killed,
    Paused,
    Promoted,
    Restored,
    Resumed,
    Undisturbed,
)
from flows.metrics.faults import FaultTimes, fault_times, outages
from flows.records.record import Record
from tests.support.records import acked, applied, fault


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


def test_the_loss_of_a_follower_ends_with_the_next_update_whatever_comes_later() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", True, "scheduler"),
        applied([1], [41], epoch=2, t=101.0),
        Promoted(105.0, 0, 4, "replica-0-1", 60),
        applied([2], [61], epoch=4, t=105.5),
    )
    [times] = fault_times(record)
    assert (times.source, times.restore_seconds, times.rto_seconds) == ("others", 0.5, 1.0)


def test_a_restoration_that_came_to_nothing_does_not_end_the_recovery() -> None:
    record = fault(
        Detected(100.5, 0, 2, "server-0", False, "scheduler"),
        Restored(101.0, 0, 3, "spare-0", 40, "checkpoint"),
        Restored(102.0, 0, 5, "spare-1", 40, "checkpoint"),
        applied([1], [41], epoch=5, t=102.5),
    )
    [times] = fault_times(record)
    assert (times.restore_seconds, times.rto_seconds) == (1.5, 2.5)


# -- faults that disturb a node, hit several at once, or cost no service ---------------------------


def served(t: float, shard: int = 0, epoch: int = 1, node: str = "server-0") -> Applied:
    """A batch of one update that the head of a shard applied."""
    return applied([1], [1], t=t, shard=shard, epoch=epoch, node=node)


def disturbed(t: float, kind: str, node: str = "server-0", fault: int = 0) -> Disturbed:
    return Disturbed(t, fault, kind, node, 50, "seen", True)


def times(*events: Event) -> tuple[FaultTimes, ...]:
    return fault_times(Record(events))


def test_what_only_disturbs_costs_no_service() -> None:
    for kind in ("slow", "delay", "disk_full"):
        (found,) = times(
            served(99.0),
            disturbed(100.0, kind),
            served(100.5),
            Undisturbed(102.0, 0, "server-0", "seen"),
        )
        assert (found.kind, found.began, found.ended) == (kind, 100, 102)
        assert (found.shard, found.serving, found.rto_seconds) == (None, None, None)
    (damaged,) = times(disturbed(100.0, "corrupt", "shard-1"))
    assert (damaged.node, damaged.ended, damaged.rto_seconds) == ("shard-1", None, None)


def test_a_cut_that_outlasts_the_lease_has_the_parts_of_a_loss() -> None:
    (found,) = times(
        disturbed(100.0, "cut"),
        Detected(101.0, 0, 2, "server-0", True, "lease"),
        Promoted(101.25, 0, 2, "replica-0-1", 40),
        served(101.5, epoch=2, node="replica-0-1"),
        Undisturbed(103.0, 0, "server-0", "seen"),
    )
    assert (found.by, found.source, found.rto_seconds) == ("lease", "promoted", 1.5)
    assert found.ended == 103.0


def test_a_disturbance_without_effect_is_no_fault() -> None:
    assert times(Disturbed(100.0, 0, "slow", "server-0", 50, "nothing seen", False)) == ()


def test_a_fault_on_several_nodes_has_moments_for_each() -> None:
    first, second = times(
        Killed(100.0, 0, "server-0", 7, 50, True),
        Killed(100.01, 0, "server-1", 8, 50, True),
        Detected(100.5, 1, 2, "server-1", False, "scheduler"),
        Detected(100.25, 0, 2, "server-0", False, "scheduler"),
        CapacityRestored(101.0, 0, "server-1-b"),
        CapacityRestored(102.0, 0, "server-0-b"),
        Restored(101.5, 1, 2, "server-1-b", 0, "initial"),
        Restored(102.5, 0, 2, "server-0-b", 0, "initial"),
    )
    assert (first.node, first.shard, first.capacity, first.serving) == ("server-0", 0, 102, 102.5)
    assert (second.node, second.shard, second.capacity, second.serving) == (
        "server-1",
        1,
        101,
        101.5,
    )


def test_a_slow_node_that_is_killed_later_is_lost_to_the_kill() -> None:
    slow, kill = times(
        disturbed(100.0, "slow"),
        Killed(101.0, 1, "server-0", 7, 60, True),
        Detected(101.5, 0, 2, "server-0", False, "scheduler"),
    )
    assert (slow.kind, slow.detected) == ("slow", None)
    assert (kill.kind, kill.detected) == ("kill", 101.5)


def test_a_shard_served_between_two_losses_though_who_did_so_could_not_report_it() -> None:
    """The first replacement is killed with its events; the workers have heard of it."""
    losses = (
        Killed(100.0, 0, "server-0", 7, 50, True),
        Detected(100.5, 0, 2, "server-0", False, "scheduler"),
        Decided(101.0, 0, 3, "server-0-b", "restore"),
        Killed(102.0, 1, "server-0-b", 8, 60, True),
        Detected(102.5, 0, 4, "server-0-b", False, "scheduler"),
        Decided(103.0, 0, 5, "server-0-b-b", "restore"),
        Restored(104.0, 0, 5, "server-0-b-b", 40, "store"),
        served(104.5, epoch=5, node="server-0-b-b"),
    )
    first, second = times(*losses, acked([5], t=100.2), acked([6, 7], t=101.25))
    assert (first.serving, first.first_applied, first.source) == (101.25, 101.25, None)
    assert (second.serving, second.first_applied, second.source) == (104.0, 104.5, "store")
    assert [o.recovered - o.began for o in outages((first, second))] == [1.25, 2.5]
    buffered = acked([6], t=101.25, outcome="buffered")
    first, second = times(*losses, buffered)
    assert (first.serving, first.source) == (104.0, "store")
    assert len(outages((first, second))) == 1
