"""Whole trials whose workers compute while they send: every gradient once, as stale as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import Applied, Audited, TrialEnded, WorkerJoined
from flows.records.record import Record, read_record
from tests.flows.execution.test_losses import RUN

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

UPDATES = 80
AHEAD = 2


def config(name: str, **changes: Any) -> str:
    return yaml.safe_dump(
        {
            "experiment": name,
            "workload": {"kind": "softmax"},
            "dataset": {"kind": "digits"},
            "training": {"workers": 1, "updates": UPDATES, "compute_seconds": 0.01},
            "optimizer": {"kind": "sgd", "learning_rate": 0.1},
            "server": {"shards": 2},
            "recovery": "chain",
            **changes,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the records are: of one worker that is ahead or not, and of two, one of them lost."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "run.py").write_text(RUN)
    axes = {"training.ahead": {"ahead 0": 0, "ahead 2": AHEAD}}
    (folder / "alone.yaml").write_text(config("alone", axes=axes))
    training = {"workers": 2, "updates": UPDATES, "compute_seconds": 0.01, "ahead": AHEAD}
    kill = {"kind": "kill", "target": "worker-1", "at_updates": 20, "back_after": 0.0}
    lost = config(
        "lost", training=training, faults=[kill], consistency={"kind": "ssp", "tau": AHEAD}
    )
    (folder / "lost.yaml").write_text(lost)
    command = [sys.executable, "run.py", "alone.yaml", "lost.yaml"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def record_of(folder: Path, trial: str) -> Record:
    record = read_record(folder / trial / "events.jsonl")
    (ended,) = record.of(TrialEnded)
    assert (ended.status, ended.reason) == ("valid", "")
    return record


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_one_worker_is_as_stale_as_it_is_ahead(folder: Path, ahead: int) -> None:
    record = record_of(folder, f"ahead-{ahead}.seed-0")
    assert [audited.version for audited in record.of(Audited)] == [UPDATES, UPDATES]
    stale = [each for event in record.of(Applied) if event.head for each in event.staleness]
    assert len(stale) == 2 * UPDATES
    assert max(stale) <= ahead
    assert (max(stale) > 0) == (ahead > 0)


def test_what_was_under_way_when_a_worker_died_is_computed_again_or_was_applied(
    folder: Path,
) -> None:
    record = record_of(folder, "seed-0")
    assert [joined.incarnation for joined in record.of(WorkerJoined)].count(2) == 1
    for audited in record.of(Audited):
        assert UPDATES <= audited.version <= UPDATES + AHEAD + 1
        assert audited.version == sum(audited.applied.values())
