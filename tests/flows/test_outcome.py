"""Outcomes: exact ledgers on hand-made histories, and every figure on plausible trials."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import count

import pytest

from dps.events import (
    Acked,
    Applied,
    Audited,
    CapacityRestored,
    CheckpointWritten,
    Decided,
    Detected,
    Evaluated,
    Event,
    FaultMissed,
    Killed,
    NodeJoined,
    Paused,
    Promoted,
    Replayed,
    ResourceSampled,
    Restored,
    Resumed,
    TrainingStarted,
    TrialEnded,
)
from flows.columns import BY_KEY, COLUMNS
from flows.lineage import Ledger, ledger
from flows.outcome import Outcome, outcome
from flows.prices import Prices
from flows.ranks import nearest_rank
from flows.record import Record
from flows.timeline import fault_times
from flows.usage import ROLES, storage, usage_by_role
from tests.flows.synthetic import (
    BACK_AFTER,
    KILL_AT,
    LIMIT,
    STRATEGIES,
    UPDATES,
    missed,
    toy_events,
)

PRICES = Prices(
    node_hour=dict.fromkeys(ROLES, 3600.0),
    spot_hour=dict.fromkeys(ROLES, 1800.0),
    fixed_hour=dict.fromkeys(ROLES, 2700.0),
    gb_moved=1.0,
    gb_month_stored=0.0,
    sources={},
)


def applied(
    ids: Sequence[int],
    versions: Sequence[int] | None = None,
    *,
    epoch: int = 1,
    node: str = "server-0",
    head: bool = True,
    t: float = 10.0,
    worker: str = "w",
    shard: int = 0,
    replayed: bool = False,
) -> Applied:
    """Return a batch of applications of the updates w/1/<id>, at versions equal to the ids."""
    n = len(ids)
    return Applied(
        t=t,
        node=node,
        shard=shard,
        epoch=epoch,
        head=head,
        times=tuple(t + i / 1000 for i in range(n)),
        workers=(worker,) * n,
        incarnations=(1,) * n,
        seqs=tuple(ids),
        versions=tuple(versions or ids),
        staleness=(1,) * n,
        staleness_seconds=(0.1,) * n,
        replayed=(replayed,) * n,
    )


def acked(
    ids: Sequence[int],
    versions: Sequence[int] | None = None,
    *,
    t: float = 10.0,
    outcome: str = "applied",
    worker: str = "w",
    shard: int = 0,
) -> Acked:
    n = len(ids)
    return Acked(
        t, worker, 1, (t,) * n, (shard,) * n, tuple(ids), tuple(versions or ids), (outcome,) * n
    )


def start(shard: int = 0) -> Restored:
    return Restored(1.0, shard, 1, f"server-{shard}", 0, "initial")


def restored(version: int, *, epoch: int = 2, t: float = 20.0) -> Restored:
    return Restored(t, 0, epoch, "server-0-b", version, "checkpoint")


def audited(version: int, counts: dict[str, int] | None = None) -> Audited:
    return Audited(99.0, 0, 9, "server-0", version, counts or {"w": version}, 0)


def of(*events: Event) -> Ledger:
    return ledger(Record(events))


# -- ledgers, by hand --------------------------------------------------------------------------


def test_without_a_fault_everything_acked_is_applied() -> None:
    result = of(start(), applied([1, 2, 3]), acked([1, 2, 3]), audited(3))
    assert (result.attempted, result.acked, result.applied, result.lost) == (3, 3, 3, 0)
    assert (result.applied_twice, result.audit_mismatches, result.unrecorded) == (0, 0, 0)


def test_updates_are_counted_per_shard() -> None:
    events = [start(0), start(1)]
    events2 = [applied([1, 2], shard=s) for s in (0, 1)]
    acks = [acked([1, 2], shard=s) for s in (0, 1)]
    assert of(*events, *events2, *acks).acked == 4


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


def test_a_restart_from_initial_values_loses_everything() -> None:
    result = of(start(), applied([1, 2]), acked([1, 2]), restored(0), audited(0, {}))
    assert (result.lost, result.applied) == (2, 0)


def test_an_update_that_was_cut_back_and_applied_again_is_neither_lost_nor_doubled() -> None:
    result = of(
        start(),
        applied([1, 2, 3]),
        acked([1, 2, 3]),
        restored(2),
        applied([3], [3], epoch=2, t=21.0),
        acked([3], [3], t=21.0),
    )
    assert (result.lost, result.applied_twice, result.acked) == (0, 0, 3)


def test_an_update_that_was_never_acked_cannot_be_lost() -> None:
    assert of(start(), applied([1, 2, 3]), acked([1, 2]), restored(2)).lost == 0


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


def test_acks_after_the_restore_are_not_judged_by_it() -> None:
    result = of(start(), restored(0), acked([1], [1], t=21.0))
    assert result.lost == 0


def test_a_deliberate_second_application_is_found() -> None:
    result = of(
        start(),
        applied([1, 2, 3]),
        acked([1, 2, 3]),
        restored(3),
        applied([3], [4], epoch=2, t=21.0),
    )
    assert result.applied_twice == 1


def test_the_same_number_in_another_incarnation_is_another_update() -> None:
    reborn = dataclasses.replace(applied([1], [2]), incarnations=(2,))
    assert of(start(), applied([1]), reborn).applied_twice == 0


def test_replicas_of_a_chain_do_not_count_as_second_applications() -> None:
    result = of(
        start(),
        applied([1, 2, 3]),
        applied([1, 2, 3], node="replica-0-1", head=False),
        acked([1, 2, 3]),
    )
    assert (result.applied_twice, result.replica_conflicts, result.applied) == (0, 0, 3)


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


def test_a_chain_that_acked_too_early_is_found_out() -> None:
    result = of(
        start(),
        applied([1, 2, 3]),
        acked([1, 2, 3]),
        Promoted(20.0, 0, 2, "replica-0-1", 2),
    )
    assert result.lost == 1


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


def test_truncations_of_one_shard_leave_the_others_alone() -> None:
    result = of(start(0), start(1), applied([1, 2], shard=1), acked([1, 2], shard=1), restored(0))
    assert result.lost == 0


def test_a_push_answered_as_duplicate_counts_as_acked_and_refused() -> None:
    result = of(
        start(), applied([1, 2]), acked([1]), acked([2], [2], outcome="duplicate"), audited(2)
    )
    assert (result.acked, result.duplicates, result.lost) == (2, 1, 0)


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


@pytest.mark.parametrize(
    ("version", "counts"), [(3, {"w": 2}), (3, {"w": 2, "x": 1}), (4, {"w": 4}), (2, {"w": 2})]
)
def test_an_audit_that_contradicts_the_events_is_found(
    version: int, counts: dict[str, int]
) -> None:
    result = of(start(), applied([1, 2, 3]), acked([1, 2, 3]), audited(version, counts))
    assert result.audit_mismatches == 1


# -- times of a fault --------------------------------------------------------------------------


def fault(*events: Event) -> Record:
    return Record((Killed(100.0, 0, "server-0", 7, 50, True), *events))


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


# -- accuracy, staleness, status ---------------------------------------------------------------


def scores(*values: float, step: float = 1.0) -> list[Evaluated]:
    clock = count()
    return [Evaluated(98.0 + step * next(clock), 0, 1.0, value) for value in values]


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


def test_a_record_without_an_end_is_failed() -> None:
    result = outcome(Record(tuple(toy_events()[:-1])), PRICES)
    assert result.status == "failed"
    assert "no end" in result.reason


def test_a_missed_fault_makes_a_trial_invalid_whatever_its_end_says() -> None:
    events = toy_events("chain", "no fault")
    record = Record((*events[:-1], FaultMissed(1.0, 0, "server-0", "too late"), events[-1]))
    result = outcome(record, PRICES)
    assert (result.status, result.valid) == ("invalid", False)
    assert "too late" in result.reason


def test_status_and_reason_are_those_of_the_end() -> None:
    result = outcome(Record(tuple(missed(toy_events("chain", "no fault")))), PRICES)
    assert (result.status, result.reason) == ("invalid", "the training ended first")


def test_an_empty_record_still_has_every_figure() -> None:
    row = outcome(Record(()), PRICES).row()
    assert row.keys() == BY_KEY.keys()
    assert row["status"] == "failed"


# -- resources and money -----------------------------------------------------------------------


def sample(node: str, role: str, pid: int, cpu: float, peak: int, stored: int = 0) -> Event:
    sent = {"train": 1_000_000_000, "control": 0}
    return ResourceSampled(50.0, node, role, pid, cpu, peak, sent, {"train": 5}, stored)


def test_the_last_sample_of_each_process_counts() -> None:
    record = Record(
        (
            sample("server-0", "server", 1, 1.0, 100),
            sample("server-0", "server", 1, 2.0, 150),
            sample("server-0-b", "server", 2, 0.5, 120),
            sample("server-1", "server", 3, 1.0, 100),
        )
    )
    server = usage_by_role(record)["server"]
    assert server.cpu_seconds == 3.5
    assert server.peak_bytes == 250  # server-0-b took the place of server-0
    assert server.sent_bytes == 3_000_000_000


def test_checkpoints_kept_and_store_at_its_fullest() -> None:
    record = Record(
        (
            *(CheckpointWritten(1.0, 0, 1, v, 100, 0.1) for v in (10, 20, 30)),
            CheckpointWritten(1.0, 1, 1, 10, 40, 0.1),
            sample("store-0", "store", 1, 1.0, 1, stored=70),
            sample("store-0", "store", 1, 1.0, 1, stored=50),
        )
    )
    found = storage(record)
    assert found.checkpoint_written_bytes == 340
    assert found.checkpoint_kept_bytes == 240  # two of shard 0, one of shard 1
    assert found.store_bytes == 70
    assert found.stored_bytes == 310


def test_money_counts_nodes_only_while_they_are_up_during_the_training() -> None:
    record = Record(
        (
            NodeJoined(0.0, "server-0", "server", 1, "h"),
            NodeJoined(30.0, "server-0-b", "server", 2, "h"),
            NodeJoined(0.0, "worker-0", "worker", 3, "h"),
            TrainingStarted(10.0, 1, 1, 100),
            Killed(20.0, 0, "server-0", 1, 5, True),
            sample("server-0-b", "server", 2, 1.0, 1),
            Acked(110.0, "worker-0", 1, (110.0,), (0,), (1,), (1,), ("applied",)),
        )
    )
    # At 3600 USD an hour, a node costs a dollar a second.
    cost = outcome(record, PRICES).cost
    assert cost.nodes == pytest.approx((20 - 10) + (110 - 30) + (110 - 10))
    assert cost.moved == pytest.approx(1.0)
    assert cost.total == pytest.approx(191.0)


# -- whole trials ------------------------------------------------------------------------------


def toy(strategy: str, fault: str, seed: int = 0) -> Outcome:
    return outcome(Record(tuple(toy_events(strategy, fault, seed))), PRICES)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", ["no fault", "kill"])
def test_every_row_has_the_same_names_and_is_ready_for_json(strategy: str, fault: str) -> None:
    row = toy(strategy, fault).row()
    assert list(row) == list(toy("none", "no fault").row())
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_every_figure_has_a_definition_and_every_definition_a_figure() -> None:
    assert toy("chain", "kill").row().keys() == BY_KEY.keys()
    assert len(BY_KEY) == len(COLUMNS)
    metrics = [column.metric for column in COLUMNS if column.metric]
    assert len(set(metrics)) == len(metrics)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_applied_twice_and_the_audit_agrees(strategy: str) -> None:
    counts = toy(strategy, "kill").ledger
    assert (counts.applied_twice, counts.replica_conflicts, counts.audit_mismatches) == (0, 0, 0)


@pytest.mark.parametrize(
    ("strategy", "lost"), [("none", KILL_AT), ("checkpoint", 17), ("chain", 0), ("stateless", 0)]
)
def test_what_each_strategy_loses(strategy: str, lost: int) -> None:
    result = toy(strategy, "kill")
    assert result.ledger.lost == lost
    assert result.ledger.applied == 2 * UPDATES - lost
    assert toy(strategy, "no fault").ledger.lost == 0


def test_gradients_of_the_outage_are_replayed_under_stateless() -> None:
    result = toy("stateless", "kill")
    assert (result.ledger.buffered, result.ledger.replayed) == (LIMIT, LIMIT)
    assert result.pace.pushed == UPDATES


def test_recovery_times_of_a_trial() -> None:
    chain, none = toy("chain", "kill").row(), toy("none", "kill").row()
    assert chain["recovered_from"] == "promoted"
    assert chain["rto_seconds"] < 0.1
    assert none["recovered_from"] == "initial"
    assert none["rto_seconds"] > BACK_AFTER
    assert none["wait_capacity_seconds"] == pytest.approx(BACK_AFTER, abs=0.05)
    assert none["accuracy_drop"] > 0.1 > chain["accuracy_drop"]
    assert none["regain_seconds"] > none["rto_seconds"]


def test_identity_comes_from_the_settings() -> None:
    identity = toy("chain", "kill", 1).identity
    assert (identity.strategy, identity.condition, identity.seed) == ("chain", "kill", 1)
    assert identity.trial == "chain.kill.seed-1"
    assert len(identity.digest) == 12


def test_the_end_of_a_failed_trial_is_told() -> None:
    events = [*toy_events()[:-1], TrialEnded(1.0, "failed", "worker-0 ran out of memory")]
    result = outcome(Record(tuple(events)), PRICES)
    assert (result.status, result.reason) == ("failed", "worker-0 ran out of memory")
