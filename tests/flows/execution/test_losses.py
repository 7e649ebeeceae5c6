"""Whole trials that lose workers and stores: every gradient is still computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import CapacityRestored, Killed, Paused, ResourceSampled, Resumed, WorkerJoined
from flows.metrics.faults import training_span
from flows.metrics.prices import node_seconds
from flows.metrics.processes import deaths, joins, process_of
from flows.records.events import Audited, LoadMeasured, TrialEnded
from flows.records.record import Record, read_record
from tests.flows.execution.test_run import CONFIG

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

UPDATES = 160
MOMENT = 40
RUN = """
import sys
from pathlib import Path
from flows.config.experiment import load_experiment
from flows.config.trials import expand
from flows.execution.trial import run_trial

if __name__ == "__main__":
    for path in sys.argv[1:]:
        for trial in expand(load_experiment(path)):
            folder = Path(trial.name)
            folder.mkdir()
            run_trial(trial, folder, lambda event: None)
"""


def fault(kind: str, target: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "target": target, "at_updates": MOMENT, **more}


PLANS: dict[str, list[dict[str, Any]]] = {
    "gone": [
        fault("kill", "worker-1", back_after=None),
        fault("pause", "store-0", seconds=1.3),
    ],
    "replaced": [
        fault("kill", "worker-1", back_after=0.0),
        fault("kill", "store-0", back_after=0.2),
    ],
    "missed": [fault("delay", "server-0", seconds=0.000001)],
}


def config(**changes: Any) -> str:
    """An experiment whose servers keep their state and mail in a store."""
    return yaml.safe_dump(
        {
            **CONFIG,
            "experiment": "losses",
            "training": {"workers": 3, "updates": UPDATES, "compute_seconds": 0.02},
            "server": {"shards": 2},
            "recovery": "stateless",
            **changes,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the records of one trial for each plan are."""
    folder = tmp_path_factory.mktemp("losses")
    nobody = [
        {"kind": "kill", "target": f"worker-{index}", "at_updates": 1, "back_after": None}
        for index in range(3)
    ]
    (folder / "run.py").write_text(RUN)
    (folder / "plans.yaml").write_text(config(axes={"faults": PLANS}))
    (folder / "nobody.yaml").write_text(config(faults=nobody, time_limit=5.0))
    command = [sys.executable, "run.py", "plans.yaml", "nobody.yaml"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def record_of(folder: Path, trial: str) -> Record:
    return read_record(folder / trial / "events.jsonl")


def worker_at(record: Record, node: str) -> str:
    """The worker that was on a node first."""
    return next(joined.worker for joined in record.of(WorkerJoined) if joined.node == node)


@pytest.mark.parametrize("plan", ["gone", "replaced"])
def test_every_gradient_is_computed_and_the_trial_is_valid(folder: Path, plan: str) -> None:
    record = record_of(folder, f"{plan}.seed-0")
    (ended,) = record.of(TrialEnded)
    assert (ended.status, ended.reason) == ("valid", "")
    audits = record.of(Audited)
    assert len(audits) == 2
    for audited in audits:
        assert UPDATES <= audited.version <= UPDATES + 2  # what was under way when a worker died
        assert audited.version == sum(audited.applied.values())


def test_the_others_divide_the_share_of_a_worker_that_is_gone(folder: Path) -> None:
    record = record_of(folder, "gone.seed-0")
    lost = worker_at(record, "worker-1")
    again = {joined.worker for joined in record.of(WorkerJoined) if joined.incarnation > 1}
    assert again | {lost} == {"worker-0", "worker-1", "worker-2"}
    applied = record.of(Audited)[0].applied
    assert UPDATES // 3 - applied.pop(lost) > 10, "it was lost early"
    assert max(applied.values()) - min(applied.values()) <= 2
    # What a node used counts once though two workers run on it in turn.
    span = training_span(record)
    assert span is not None
    assert node_seconds(record)["worker"] <= 3 * (span[1] - span[0])
    sent: dict[int, int] = {}
    for sample in record.of(ResourceSampled):
        if sample.role == "worker":
            assert sample.sent.get("train", 0) >= sent.get(sample.pid, 0)
            sent[sample.pid] = sample.sent.get("train", 0)
    assert len(sent) == 3


def test_a_fresh_node_goes_on_with_the_share_of_the_lost_worker(folder: Path) -> None:
    record = record_of(folder, "replaced.seed-0")
    lost = worker_at(record, "worker-1")
    again = [j for j in record.of(WorkerJoined) if j.incarnation > 1 and j.worker == lost]
    assert {joined.node for joined in again} == {"worker-1-b"}
    assert {event.node for event in record.of(CapacityRestored)} == {"worker-1-b", "store-0-b"}
    applied = record.of(Audited)[0].applied
    assert max(applied.values()) - min(applied.values()) <= 2
    # Samples, starts and deaths name the same processes.
    sampled = {process_of(s) for s in record.of(ResourceSampled) if s.role != "scheduler"}
    assert sampled <= joins(record).keys()
    assert all(0 < joins(record)[each].t - each.started < 60 for each in sampled)
    assert {process.node for process in deaths(record)} == {"worker-1", "store-0"}
    # The load of the machine is recorded at both ends.
    first, last = record.of(LoadMeasured)
    assert record.events.index(first) == 1
    assert record.events.index(last) == len(record.events) - 2
    assert first.cores >= 1


def test_the_loss_of_a_store_is_recorded(folder: Path) -> None:
    killed = record_of(folder, "replaced.seed-0").of(Killed)
    assert {(event.node, event.gone) for event in killed} == {
        ("worker-1", True),
        ("store-0", True),
    }
    record = record_of(folder, "gone.seed-0")
    assert [(event.node, event.stopped) for event in record.of(Paused)] == [("store-0", True)]
    assert [event.running for event in record.of(Resumed)] == [True]


def test_a_trial_whose_fault_had_no_effect_is_invalid_and_without_workers_it_fails(
    folder: Path,
) -> None:
    (ended,) = record_of(folder, "missed.seed-0").of(TrialEnded)
    assert ended.status == "invalid"
    assert "fault on server-0: no effect was seen: a probe" in ended.reason
    # One that has no worker left says so.
    (ended,) = record_of(folder, "seed-0").of(TrialEnded)
    assert ended.status == "failed"
    assert "no worker replaced worker-0, worker-1, worker-2" in ended.reason
