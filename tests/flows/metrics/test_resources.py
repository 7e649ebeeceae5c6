"""What a trial used, and what that costs."""

from __future__ import annotations

import pytest

from dps.events import Acked, CheckpointWritten, Event, Killed, NodeJoined, ResourceSampled
from flows.metrics.outcome import outcome
from flows.metrics.prices import SECONDS_PER_MONTH, Spending, moved_by_link, stored_bytes
from flows.records.events import TrainingStarted, TrialStarted
from flows.records.record import Record
from tests.support.records import PRICES, price


def sample(node: str, role: str, pid: int, cpu: float, peak: int, stored: int = 0) -> Event:
    sent = {"train": 1_000_000_000, "control": 0}
    return ResourceSampled(50.0, node, role, pid, cpu, peak, sent, {"train": 5}, stored, "h")


def test_the_last_sample_of_each_process_counts() -> None:
    record = Record(
        (
            sample("server-0", "server", 1, 1.0, 100),
            sample("server-0", "server", 1, 2.0, 150),
            sample("server-0-b", "server", 2, 0.5, 120),
            sample("server-1", "server", 3, 1.0, 100),
        )
    )
    row = outcome(record, PRICES).row()
    assert row["cpu_seconds_server"] == 3.5
    assert row["peak_bytes_server"] == 250  # server-0-b replaced server-0
    assert row["sent_bytes_server"] == 3_000_000_000


def test_checkpoints_kept_and_store_at_its_fullest() -> None:
    record = Record(
        (
            *(CheckpointWritten(1.0, 0, 1, v, 100, 0.1) for v in (10, 20, 30)),
            CheckpointWritten(1.0, 1, 1, 10, 40, 0.1),
            sample("store-0", "store", 1, 1.0, 1, stored=70),
            sample("store-0", "store", 1, 1.0, 1, stored=50),
        )
    )
    row = outcome(record, PRICES).row()
    assert row["checkpoint_written_bytes"] == 340
    assert row["stored_bytes"] == 240 + 70  # two of shard 0, one of shard 1


def test_checkpoints_below_a_chain_have_a_number_to_keep_of_their_own() -> None:
    below = {"every": 10, "seconds": None, "path": None, "keep": 1}
    durability = {"kind": "chain", "replicas": 2, "below": below}
    settings = {"config": {"recovery": {"name": "custom", "durability": durability}}}
    written = [CheckpointWritten(1.0, 0, 1, v, 100, 0.1) for v in (10, 20, 30)]
    record = Record((TrialStarted(0.0, "a trial", settings, {}), *written))
    assert stored_bytes(record) == 100


def test_money_is_spent_as_nodes_live_and_bytes_are_sent() -> None:
    def sent(t: float, pid: int, size: int) -> Event:
        return ResourceSampled(t, f"n-{pid}", "server", pid, 1.0, 1, {"train": size}, {}, 0, "h")

    record = Record(
        (
            NodeJoined(0.0, "n-1", "server", 1, "h"),
            NodeJoined(30.0, "n-2", "server", 2, "h"),
            NodeJoined(0.0, "worker-0", "worker", 3, "h"),
            TrainingStarted(10.0, 1, 1, 100),
            Killed(20.0, 0, "n-1", 1, 5, True),
            CheckpointWritten(50.0, 0, 1, 5, 8_000_000_000, 0.1),
            sent(20.0, 1, 10**9),
            sent(70.0, 2, 4 * 10**9),
            sent(120.0, 2, 6 * 10**9),  # after the training, of which it is counted all the same
            Acked(110.0, "worker-0", 1, (110.0,), (0,), (1,), (1,), ("applied",)),
        )
    )
    prices = PRICES.model_copy(
        update={"gb_month_stored": price(SECONDS_PER_MONTH)}
    )  # $1 per GB and second
    spending = Spending(record, prices)
    assert spending.at(10.0) == 0.0
    # Two nodes of a dollar a second, 0.75 GB of n-1, which sends one in its 20 s; 8 GB stored.
    assert spending.at(15.0) == pytest.approx(5 * 2 + 0.75 + 5 * 8)
    assert spending.at(25.0) == pytest.approx((10 + 15) + 1 + 15 * 8)  # the worker alone goes on
    assert spending.at(50.0) == pytest.approx((10 + 20 + 40) + (1 + 2) + 40 * 8)
    assert spending.at(90.0) == pytest.approx((10 + 60 + 80) + (1 + 5) + 80 * 8)
    assert spending.at(110.0) == spending.at(500.0) == spending.total
    assert spending.at(110.0 - 1e-6) == pytest.approx(spending.total, abs=1e-3)


def killed_unseen(first: float) -> Record:
    """Two servers, of which the first is killed at 20 s, and was sampled for the last time before.

    It sends 10 bytes a second to the worker and 5 to the store, and hears 2 from the worker.
    """

    def of(
        t: float, node: str, role: str, pid: int, sent: dict[str, int], heard: dict[str, int]
    ) -> Event:
        return ResourceSampled(t, node, role, pid, 1.0, 1, sent, heard, 0, "h")

    lived = int(first - 10)
    return Record(
        (
            NodeJoined(0.0, "server-0", "server", 1, "h"),
            NodeJoined(0.0, "store-0", "store", 2, "h"),
            NodeJoined(0.0, "worker-0", "worker", 3, "h"),
            TrainingStarted(10.0, 1, 1, 100),
            of(first, "server-0", "server", 1, {"train": 10 * lived, "store": 5 * lived}, {}),
            Killed(20.0, 0, "server-0", 1, 5, True),
            NodeJoined(20.0, "server-0-b", "server", 4, "h"),
            of(30.0, "server-0-b", "server", 4, {"train": 100, "store": 50}, {"train": 20}),
            of(30.0, "store-0", "store", 2, {}, {"store": 100}),
            of(30.0, "worker-0", "worker", 3, {"train": 40}, {"train": 200}),
            Acked(30.0, "worker-0", 1, (30.0,), (0,), (1,), (1,), ("applied",)),
        )
    )


@pytest.mark.parametrize("first", [10.0, 16.0, 20.0])
def test_what_a_killed_process_sent_last_is_told_by_those_who_received_it(first: float) -> None:
    record = killed_unseen(first)
    assert moved_by_link(record) == {"train": 240, "replicate": 0, "store": 100, "control": 0}
    prices = PRICES.model_copy(
        update={"gb_moved": price(1e9), "node_hour": dict.fromkeys(PRICES.node_hour, price(0.0))}
    )
    assert Spending(record, prices).moved == pytest.approx(340)
    spending = Spending(record, prices)
    # The worker sends 40 in its 30 s; the server has sent all that it ever did.
    assert spending.at(20.0) == pytest.approx(40 * 20 / 30 + 150)
    assert spending.at(30.0) == spending.total == pytest.approx(340)


def test_bytes_are_told_by_role_and_by_link() -> None:
    def sent(node: str, role: str, pid: int, links: dict[str, int]) -> Event:
        return ResourceSampled(50.0, node, role, pid, 1.0, 1, links, {}, 0)

    record = Record(
        (
            sent("server-0", "server", 1, {"train": 5, "replicate": 7}),
            sent("server-1", "server", 2, {"train": 6}),
            sent("worker-0", "worker", 3, {"train": 9, "control": 1}),
        )
    )
    row = outcome(record, PRICES).row()
    assert (row["sent_bytes_server"], row["sent_bytes_worker"], row["sent_bytes_all"]) == (
        18,
        10,
        28,
    )
    assert (row["sent_bytes_link_train"], row["sent_bytes_link_store"]) == (20, 0)


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
    # At three quarters of a dollar a second each.
    assert Spending(record, PRICES).fixed == pytest.approx(2 * 100 * 0.75)
