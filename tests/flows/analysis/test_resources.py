"""What a trial used, and what that costs."""

from __future__ import annotations

import pytest

from dps.events import (
    Acked,
    CheckpointWritten,
    Event,
    Killed,
    NodeJoined,
    ResourceSampled,
    TrainingStarted,
)
from flows.analysis.outcome import outcome
from flows.analysis.resources import rented_seconds, storage, usage_by_role
from flows.records.record import Record
from tests.support.records import PRICES


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
    # For a fixed term, at 3/4 of that: one server, whoever has its place, and one worker.
    assert cost.fixed == pytest.approx(2 * 100 * 0.75)


def test_a_lost_head_that_comes_back_as_a_replica_is_rented_once() -> None:
    record = Record(
        (
            NodeJoined(0.0, "server-0", "server", 1, "h"),
            NodeJoined(0.0, "replica-0-1", "replica", 2, "h"),
            TrainingStarted(10.0, 1, 1, 100),
            Killed(20.0, 0, "server-0", 1, 5, True),
            NodeJoined(30.0, "server-0-b", "replica", 3, "h"),
            Acked(110.0, "worker-0", 1, (110.0,), (0,), (1,), (1,), ("applied",)),
        )
    )
    assert rented_seconds(record) == {"server": 100.0, "replica": 100.0}
