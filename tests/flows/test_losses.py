"""Whole trials that lose workers and stores, or are disturbed: every gradient is still computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import (
    Audited,
    CapacityRestored,
    Killed,
    Paused,
    Reported,
    Resumed,
    TrialEnded,
    WorkerJoined,
    WorkerLeft,
)
from flows.crew import shares_of
from flows.record import Record, read_record

pytestmark = pytest.mark.cluster

UPDATES = 160
MOMENT = 40


def kill(target: str, back_after: float | None) -> dict[str, Any]:
    return {"kind": "kill", "target": target, "at_updates": MOMENT, "back_after": back_after}


def pause(target: str) -> dict[str, Any]:
    return {"kind": "pause", "target": target, "at_updates": MOMENT, "seconds": 1.3}


PLANS: dict[str, list[dict[str, Any]]] = {
    "worker-gone": [kill("worker-1", None)],
    "worker-replaced": [kill("worker-1", 0.0)],
    "worker-paused": [pause("worker-1")],
    "store-replaced": [kill("store-0", 0.2)],
    "store-paused": [pause("store-0")],
}


def run(folder: Path, **changes: Any) -> None:
    config = {
        "experiment": "losses",
        "workload": {"kind": "softmax"},
        "dataset": {"kind": "digits"},
        "training": {"workers": 3, "updates": UPDATES, "compute_seconds": 0.02},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "server": {"shards": 2},
        "recovery": "stateless",
        **changes,
    }
    (folder / "losses.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "flows.cli", "run", "losses.yaml"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the records of one trial for each plan are."""
    folder = tmp_path_factory.mktemp("losses")
    run(folder, axes={"faults": PLANS})
    return folder / "results" / "losses"


def record_of(folder: Path, plan: str) -> Record:
    return read_record(folder / f"{plan}.seed-0" / "events.jsonl")


@pytest.mark.parametrize("plan", PLANS)
def test_every_gradient_is_computed_and_the_trial_is_valid(folder: Path, plan: str) -> None:
    record = record_of(folder, plan)
    (ended,) = record.of(TrialEnded)
    assert (ended.status, ended.reason) == ("valid", "")
    audits = record.of(Audited)
    assert len(audits) == 2
    for audited in audits:
        assert UPDATES <= audited.version <= UPDATES + 3  # what was under way when a worker died
        assert audited.version == sum(audited.applied.values())


def test_the_others_divide_the_share_of_a_worker_that_is_gone(folder: Path) -> None:
    record = record_of(folder, "worker-gone")
    assert [left.reason for left in record.of(WorkerLeft) if left.worker == "worker-1"] == ["lost"]
    assert max(joined.incarnation for joined in record.of(WorkerJoined)) == 2
    assert {joined.worker for joined in record.of(WorkerJoined) if joined.incarnation == 2} == {
        "worker-0",
        "worker-2",
    }
    (applied, _) = [audited.applied for audited in record.of(Audited)]
    missing = UPDATES // 3 - applied["worker-1"]
    assert missing > 10
    assert abs(applied["worker-0"] - applied["worker-2"]) <= 2


def test_a_fresh_node_goes_on_with_the_share_of_the_lost_worker(folder: Path) -> None:
    record = record_of(folder, "worker-replaced")
    (again,) = [joined for joined in record.of(WorkerJoined) if joined.incarnation == 2]
    assert (again.worker, again.node) == ("worker-1", "worker-1-b")
    assert [restored.node for restored in record.of(CapacityRestored)] == ["worker-1-b"]
    applied = record.of(Audited)[0].applied
    assert max(applied.values()) - min(applied.values()) <= 2
    assert len({report.worker for report in record.of(Reported)}) == 3


def test_the_loss_of_a_store_is_recorded(folder: Path) -> None:
    (killed,) = record_of(folder, "store-replaced").of(Killed)
    assert (killed.node, killed.gone) == ("store-0", True)
    record = record_of(folder, "store-paused")
    assert [paused.stopped for paused in record.of(Paused)] == [True]
    assert [resumed.running for resumed in record.of(Resumed)] == [True]


def test_a_trial_that_has_no_worker_left_says_so(tmp_path: Path) -> None:
    plan = [kill(f"worker-{index}", None) for index in range(3)]
    run(tmp_path, faults=plan, time_limit=3.0)
    (ended,) = read_record(tmp_path / "results/losses/seed-0/events.jsonl").of(TrialEnded)
    assert ended.status == "failed"
    assert "nobody was left to go on for worker-0, worker-1, worker-2" in ended.reason


def test_shares_go_on_from_what_was_done_before() -> None:
    assert shares_of(8, 3, {}) == {
        "worker-0": range(3),
        "worker-1": range(3),
        "worker-2": range(2),
    }
    assert shares_of(5, 2, {"worker-0": 1, "worker-1": 2}) == {
        "worker-0": range(1, 3),
        "worker-1": range(2, 2),
    }
