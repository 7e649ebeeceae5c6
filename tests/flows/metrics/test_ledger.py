"""Ledgers of updates, exact on hand-made histories."""

from __future__ import annotations

import pytest

from dps.events import Event, Killed, Promoted, Replayed
from flows.metrics.ledger import Ledger
from flows.metrics.trial import Trial
from flows.records.record import Record
from tests.support.records import PRICES, acked, applied, audited, restored, start


def of(*events: Event) -> Ledger:
    return Trial(Record(events), PRICES).ledger


def test_without_a_fault_everything_acked_is_applied() -> None:
    result = of(start(), applied([1, 2, 3]), acked([1, 2, 3]), audited(3))
    assert (result.acked, result.applied, result.lost) == (3, 3, 0)
    assert (result.applied_twice, result.audit_mismatches, result.unrecorded) == (0, 0, 0)


def test_a_restore_loses_what_was_acked_after_the_copy() -> None:
    result = of(
        start(),
        applied([1, 2, 3, 4, 5]),
        acked([1, 2, 3, 4, 5]),
        restored(3),
        applied([6], [4], epoch=2, t=21.0),
        acked([6], [4], t=21.0),
        audited(4),
    )
    assert (result.acked, result.applied, result.lost) == (6, 4, 2)
    assert (result.applied_twice, result.replica_conflicts, result.audit_mismatches) == (0, 0, 0)


def test_an_acked_update_of_a_node_that_never_reported_is_lost_by_its_version() -> None:
    # The killed node's last flush is missing: version 3 is known from the worker's ack alone.
    result = of(start(), applied([1, 2]), acked([1, 2, 3]), restored(2))
    assert result.lost == 1


def test_an_unreported_update_inside_the_copy_survives() -> None:
    result = of(
        start(),
        applied([1]),
        acked([1, 2, 3]),
        restored(3),
        applied([4], [4], epoch=2, t=21.0),
        acked([4], [4], t=21.0),
        audited(4),
    )
    assert (result.lost, result.unrecorded, result.applied) == (0, 2, 4)
    assert result.audit_mismatches == 0


def test_a_promotion_cuts_what_only_the_head_had() -> None:
    # The head applied 4 and 5, the replica got as far as 3; the worker sends 4 and 5 again.
    result = of(
        start(),
        applied([1, 2, 3, 4, 5]),
        applied([1, 2, 3], node="replica-0-1", head=False),
        acked([1, 2, 3]),
        Promoted(20.0, 0, 2, "replica-0-1", 3),
        applied([5, 4], [4, 5], epoch=2, node="replica-0-1", t=21.0),
        acked([5, 4], [4, 5], t=21.0),
        audited(5),
    )
    assert (result.lost, result.applied_twice, result.replica_conflicts) == (0, 0, 0)
    assert (result.acked, result.applied, result.audit_mismatches) == (5, 5, 0)


def test_replicas_that_applied_different_updates_at_one_version_are_found() -> None:
    result = of(start(), applied([1, 2]), applied([2, 1], [1, 2], node="replica-0-1", head=False))
    assert result.replica_conflicts == 2


def test_the_deepest_of_several_truncations_counts() -> None:
    result = of(
        start(),
        applied([1, 2, 3, 4]),
        acked([1, 2, 3, 4]),
        restored(3, epoch=2, t=20.0),
        applied([5], [4], epoch=2, t=21.0),
        acked([5], [4], t=21.0),
        restored(1, epoch=3, t=30.0),
        applied([6], [2], epoch=3, t=31.0),
        acked([6], [2], t=31.0),
    )
    assert (result.lost, result.applied) == (4, 2)


def test_a_duplicate_is_judged_by_its_own_version() -> None:
    # Update 1 is answered as a duplicate when the shard is at 5; the copy at 3 contains it.
    result = of(
        start(),
        applied([1, 2, 3, 4, 5]),
        acked([1], [5], outcome="duplicate"),
        restored(3),
    )
    assert result.lost == 0


def test_buffered_updates_are_replayed_not_lost() -> None:
    result = of(
        start(),
        applied([1]),
        acked([1]),
        acked([2, 3, 4], [1, 1, 1], outcome="buffered"),
        restored(1),
        applied([2, 3], [2, 3], epoch=2, t=21.0, replayed=True),
        Replayed(21.0, 0, 2, "drop_older", 2, 1, 1, 1, 3),
    )
    assert (result.buffered, result.replayed, result.dropped) == (3, 2, 1)
    assert (result.acked, result.lost, result.duplicates) == (1, 0, 1)


def test_buffered_updates_that_are_lost_with_their_mailbox_are_lost_by_that_fault() -> None:
    # The server is killed at 19.0, the store with the mailbox at 19.5, and nothing is replayed.
    result = of(
        start(),
        applied([1]),
        acked([1]),
        Killed(19.0, 0, "server-0", 7, 1, True),
        acked([2, 3, 4], [0, 0, 0], t=19.2, outcome="buffered"),
        Killed(19.5, 1, "store-0", 8, 1, True),
        restored(1),
        applied([5], [2], epoch=2, t=21.0),
        acked([5], [2], t=21.0),
        audited(2),
    )
    assert (result.acked, result.buffered, result.lost) == (2, 3, 3)
    assert (result.lost_per_fault, result.replayed, result.dropped) == (3, 0, 0)


def test_what_a_policy_left_out_is_dropped_and_the_rest_of_the_mailbox_lost() -> None:
    result = of(
        start(),
        acked([1, 2, 3], [0, 0, 0], t=11.0, outcome="buffered"),  # lost with a store
        restored(0, epoch=2, t=12.0),
        acked([4, 5], [0, 0], t=19.0, outcome="buffered"),
        restored(0, epoch=3, t=20.0),
        applied([5], [1], epoch=3, t=21.0, replayed=True),
        Replayed(21.0, 0, 3, "drop_older", 1, 1, 0, 1, 1),
        audited(1),
    )
    assert (result.buffered, result.replayed, result.dropped, result.lost) == (5, 1, 1, 3)


def test_of_buffered_updates_the_last_are_taken_for_lost() -> None:
    """One of three may be in version 2, which nobody reported: one that was there first."""
    buffered = (
        acked([2, 3], [0, 0], outcome="buffered", t=12.0),
        acked([4], [0], outcome="buffered", t=25.0),
    )
    killed = [Killed(t, i, "server-0", 7, 1, True) for i, t in enumerate((15.0, 26.0))]
    result = of(start(), applied([1]), acked([1]), *buffered, *killed, restored(1), audited(2))
    assert (result.unrecorded, result.lost, result.lost_per_fault) == (1, 2, 1)


@pytest.mark.parametrize(
    ("version", "counts"), [(3, {"w": 2}), (3, {"w": 2, "x": 1}), (4, {"w": 4}), (2, {"w": 2})]
)
def test_an_audit_that_contradicts_the_events_is_found(
    version: int, counts: dict[str, int]
) -> None:
    result = of(start(), applied([1, 2, 3]), acked([1, 2, 3]), audited(version, counts))
    assert result.audit_mismatches == 1
