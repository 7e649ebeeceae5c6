"""Jobs of a real Slurm that end before the training does: by walltime, preemption, or outright."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import Applied, Event, NodeJoined, NodeLeaving, NodeLeft, WorkerLeft
from flows.config.experiment import load_experiment
from flows.config.trials import expand
from flows.execution.trial import run_trial
from flows.metrics.faults import first_unplanned
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.records.record import Record, read_record
from tests.flows.execution.test_leaving import check_whole
from tests.slurm.there import CLUSTER, go

pytestmark = [pytest.mark.cluster, pytest.mark.slurm]

MOMENT = 20


@pytest.fixture(autouse=True)
def _slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, tmp_path)


class Signaller:
    """Has Slurm send signals to jobs of nodes once there are so many updates."""

    def __init__(self, **nodes: str) -> None:
        self._left = {node.replace("_", "-"): number for node, number in nodes.items()}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Applied) and event.versions[-1] >= MOMENT:
            left, self._left = self._left, {}
            for node, number in left.items():
                whom = "--batch" if number == "KILL" else "--full"
                command = ["scancel", f"--signal={number}", whom, f"--name=dps-{node}"]
                subprocess.run(command, check=True)


def trained(
    folder: Path,
    updates: int,
    compute: float,
    sink: Signaller,
    cluster: Any = CLUSTER,
    epochs: int | None = None,
) -> Record:
    config = {
        "experiment": "leaving",
        "workload": {"kind": "softmax"},
        "dataset": {"kind": "digits"},
        "training": {
            "workers": 2,
            "updates": updates,
            "compute_seconds": compute,
            "epochs": epochs,
        },
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "server": {"shards": 2, "lease": 10.0},
        "recovery": "none",
        "time_limit": 180.0,
        "cluster": cluster,
    }
    (folder / "leaving.yaml").write_text(yaml.safe_dump(config))
    (trial,) = expand(load_experiment(folder / "leaving.yaml"))
    run_trial(trial, folder, sink)
    return read_record(folder / "events.jsonl")


@pytest.mark.parametrize("epochs", [None, 6])
def test_a_training_outlives_the_walltime_of_its_jobs(epochs: int | None, tmp_path: Path) -> None:
    cluster = {**CLUSTER, "walltime": "00:01:00"}
    record = trained(tmp_path, 264, 0.5, Signaller(), cluster, epochs)
    check_whole(record, 264)
    assert first_unplanned(record) is None
    row = outcome(record, load_prices()).row()
    assert row["updates_lost"] == 0
    if epochs is not None:
        assert row["examples_applied"] == 264 * 32
        assert row["examples_lost"] == row["examples_repeated"] == 0
    left = {event.node for event in record.of(NodeLeft)}
    assert left >= {"server-0", "server-1", "worker-0", "worker-1", "evaluator-0"}
    assert {event.why for event in record.of(NodeLeaving)} == {"lifetime"}


def test_a_preemption_notice_moves_everything_away_in_time(tmp_path: Path) -> None:
    record = trained(tmp_path, 200, 0.1, Signaller(server_0="TERM", worker_0="TERM"))
    check_whole(record, 200)
    assert first_unplanned(record) is None
    told = {event.node: event.why for event in record.of(NodeLeaving)}
    assert told == {"server-0": "signal", "worker-0": "signal"}
    assert {event.node for event in record.of(NodeLeft)} == told.keys()
    assert {event.node for event in record.of(NodeJoined)} >= {"server-0-b", "worker-0-b"}


def test_jobs_that_are_killed_by_no_fault_are_replaced(tmp_path: Path) -> None:
    signaller = Signaller(worker_0="KILL", worker_1="KILL")
    record = trained(tmp_path, 200, 0.05, signaller)
    check_whole(record, 200, most=2)
    assert {event.node for event in record.of(NodeJoined)} & {"worker-0-b", "worker-1-b"}
    assert "lost" in {event.reason for event in record.of(WorkerLeft)}
    assert first_unplanned(record) is not None
