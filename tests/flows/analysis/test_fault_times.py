"""The moments of faults that disturb a node, hit several at once, or cost no service."""

from __future__ import annotations

from dps.events import (
    Applied,
    CapacityRestored,
    Decided,
    Detected,
    Disturbed,
    Event,
    Killed,
    Promoted,
    Restored,
    Undisturbed,
)
from flows.analysis.effects.outages import outages
from flows.analysis.faults import FaultTimes, fault_times
from flows.records.record import Record
from tests.support.records import acked


def applied(t: float, shard: int = 0, epoch: int = 1, node: str = "server-0") -> Applied:
    columns = ("worker-0",), (1,), (1,), (1,), (0,), (0.0,), (False,)
    return Applied(t, node, shard, epoch, True, (t,), *columns)


def disturbed(t: float, kind: str, node: str = "server-0", fault: int = 0) -> Disturbed:
    return Disturbed(t, fault, kind, node, 50, "seen", True)


def times(*events: Event) -> tuple[FaultTimes, ...]:
    return fault_times(Record(events))


def test_what_only_disturbs_costs_no_service() -> None:
    for kind in ("slow", "delay", "disk_full"):
        (found,) = times(
            applied(99.0),
            disturbed(100.0, kind),
            applied(100.5),
            Undisturbed(102.0, 0, "server-0", "seen"),
        )
        assert (found.kind, found.began, found.ended, found.evidence) == (kind, 100, 102, "seen")
        assert (found.shard, found.serving, found.rto_seconds) == (None, None, None)
    (damaged,) = times(disturbed(100.0, "corrupt", "shard-1"))
    assert (damaged.node, damaged.ended, damaged.rto_seconds) == ("shard-1", None, None)


def test_a_cut_that_nobody_notices_ends_by_itself_like_a_pause() -> None:
    (found,) = times(
        applied(99.0),
        disturbed(100.0, "cut"),
        Undisturbed(100.5, 0, "server-0", "seen"),
        applied(100.75),
    )
    assert (found.shard, found.source, found.serving) == (0, "resumed", 100.5)
    assert found.rto_seconds == 0.75


def test_a_cut_that_outlasts_the_lease_has_the_parts_of_a_loss() -> None:
    (found,) = times(
        disturbed(100.0, "cut"),
        Detected(101.0, 0, 2, "server-0", True, "lease"),
        Promoted(101.25, 0, 2, "replica-0-1", 40),
        applied(101.5, epoch=2, node="replica-0-1"),
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
        applied(104.5, epoch=5, node="server-0-b-b"),
    )
    first, second = times(*losses, acked([5], t=100.2), acked([6, 7], t=101.25))
    assert (first.serving, first.first_applied, first.source) == (101.25, 101.25, None)
    assert (second.serving, second.first_applied, second.source) == (104.0, 104.5, "store")
    assert [o.recovered - o.began for o in outages((first, second))] == [1.25, 2.5]
    buffered = acked([6], t=101.25, outcome="buffered")
    first, second = times(*losses, buffered)
    assert (first.serving, first.source) == (104.0, "store")
    assert len(outages((first, second))) == 1
