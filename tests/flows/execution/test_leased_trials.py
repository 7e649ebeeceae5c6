"""Trials on leased data: every example once in each epoch, also if workers are lost or added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dps.events import WorkerJoined
from flows.records.events import Audited
from tests.support.virtual_trials import virtual_trial

EPOCHS = 4
BATCHES = 40
BATCH = 32
LEASED = {
    "workers": 3,
    "updates": EPOCHS * BATCHES,
    "epochs": EPOCHS,
    "lease": 3,
    "batch_size": BATCH,
    "compute_seconds": 0.01,
}
LOCAL = {"local_steps": 4, "batch_size": BATCH // 4, "inner": {"kind": "sgd", "learning_rate": 0.1}}
KILL = {"kind": "kill", "target": "worker-1", "at_updates": 30, "back_after": 0.5}
PAUSE = {"kind": "pause", "target": "worker-1", "at_updates": 30, "seconds": 20.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"faults": [KILL]},
        {"faults": [PAUSE]},
        {"faults": [KILL, {**KILL, "target": "server-0", "at_updates": 60}], "recovery": "chain"},
        {"elastic": [{"at_updates": 20, "workers": 5}, {"at_updates": 90, "workers": 1}]},
        {"training": {**LEASED, "ahead": 2}, "consistency": {"kind": "ssp", "tau": 3}},
        {"training": {**LEASED, **LOCAL}, "faults": [KILL], "recovery": "chain"},
    ],
    ids=["still", "kill", "pause", "kills", "elastic", "ahead", "local"],
)
def test_every_example_is_applied_once_in_each_epoch(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    done = virtual_trial(tmp_path / "trial", **{"training": LEASED, **changes})
    assert done.outcome.status == "valid", done.outcome.reason
    for audited in done.record.of(Audited):
        assert audited.version == audited.batches == EPOCHS * BATCHES
    row = done.outcome.row()
    assert row["examples_applied"] == EPOCHS * BATCHES * BATCH
    assert (row["examples_lost"], row["examples_repeated"]) == (0, 0)
    assert row["epochs"] == EPOCHS


def test_what_a_restored_shard_lacks_is_computed_again(tmp_path: Path) -> None:
    done = virtual_trial(
        tmp_path / "trial",
        training=LEASED,
        recovery={"preset": "checkpoint", "durability": {"every": 20}},
        faults=[{**KILL, "target": "server-0", "at_updates": 75}],
    )
    assert done.outcome.status == "valid", done.outcome.reason
    row = done.outcome.row()
    assert row["updates_lost"] > 0
    assert (row["examples_lost"], row["examples_repeated"]) == (0, 0)


def test_examples_are_counted_on_leased_data_alone(tmp_path: Path) -> None:
    done = virtual_trial(tmp_path / "trial", training={"workers": 2, "updates": 20})
    row = done.outcome.row()
    assert {row[key] for key in ("examples_applied", "examples_lost", "epochs")} == {None}


def test_a_lost_worker_is_replaced_on_a_node_that_joins(tmp_path: Path) -> None:
    done = virtual_trial(tmp_path / "trial", training=LEASED, faults=[{**KILL, "back_after": 0.2}])
    assert done.outcome.status == "valid", done.outcome.reason
    *_, last = done.record.of(WorkerJoined)
    assert (last.worker, last.node) == ("worker-3", "worker-1-b")
    assert {worker for audited in done.record.of(Audited) for worker in audited.applied} == {
        *(f"worker-{number}" for number in range(4))
    }


def test_all_workers_may_be_lost_at_once(tmp_path: Path) -> None:
    kills = [{**KILL, "target": f"worker-{number}"} for number in range(3)]
    done = virtual_trial(tmp_path / "trial", training=LEASED, faults=kills)
    assert done.outcome.status == "valid", done.outcome.reason
    assert done.outcome.row()["examples_applied"] == EPOCHS * BATCHES * BATCH


@pytest.mark.parametrize("updates", [130, 150, 158])
def test_a_server_may_be_lost_near_the_end(tmp_path: Path, updates: int) -> None:
    done = virtual_trial(
        tmp_path / "trial",
        training=LEASED,
        recovery={"preset": "checkpoint", "durability": {"every": 20}},
        faults=[{**KILL, "target": "server-0", "at_updates": updates, "back_after": 8.0}],
    )
    assert done.outcome.status == "valid", done.outcome.reason
    row = done.outcome.row()
    assert (row["examples_lost"], row["examples_repeated"]) == (0, 0)
