"""Trials on leased data: every example once in each epoch, also if workers are lost or added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    ],
    ids=["still", "kill", "pause", "kills", "elastic", "ahead"],
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


def test_examples_of_equal_shares_are_counted(tmp_path: Path) -> None:
    shares = {"workers": 2, "updates": 90, "batch_size": BATCH}
    done = virtual_trial(
        tmp_path / "trial",
        training=shares,
        recovery={"preset": "checkpoint", "durability": {"every": 20}},
        faults=[{**KILL, "target": "server-0", "at_updates": 50}],
    )
    row = done.outcome.row()
    assert row["examples_applied"] + row["examples_lost"] == 90 * BATCH
    assert row["examples_lost"] > 0
    assert row["examples_repeated"] == 0
    assert row["epochs"] is None
