"""The log of a trial, and those of its processes, on real trials."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import Promoted
from flows.records.events import TrialEnded
from flows.records.log import LOG_FILE, TrialLog
from tests.support.commands import dps
from tests.support.records import applied

CONFIG: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 60, "compute_seconds": 0.01},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
    "recovery": "chain",
    "faults": [{"kind": "kill", "target": "server-0", "at_updates": 30}],
}
PROMOTED = Promoted(1.25, 0, 3, "replica-0-1", 120)


def test_a_trial_that_is_resumed_goes_on_with_its_log(tmp_path: Path) -> None:
    path = tmp_path / LOG_FILE
    for _ in range(2):
        with TrialLog(path, {"trial": "seed-0"}) as log:
            log(PROMOTED)
            log(applied([1]))
        log(TrialEnded(2.0, "valid", ""))  # too late
    assert path.read_text().splitlines() == 2 * [
        "time=1970-01-01T00:00:01.250Z level=INFO logger=dps.shard event=Promoted trial=seed-0 "
        "shard=0 epoch=3 node=replica-0-1 version=120"
    ]


def test_times_are_utc_wherever_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LOG_FILE
    try:
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        with TrialLog(path, {}) as log:
            log(PROMOTED)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert path.read_text().startswith("time=1970-01-01T00:00:01.250Z ")


@pytest.mark.slow
@pytest.mark.cluster
def test_a_trial_leaves_a_log_and_its_processes_write_theirs_if_asked(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    run = dps(tmp_path, "run", "small.yaml", DASK_LOGGING__DPS="info")
    assert run.returncode == 0, run.stderr
    told = r"event=Promoted experiment=small trial=seed-0 .*shard=0 epoch=\d+ node=replica-0-1"
    log = (tmp_path / "results" / "small" / "seed-0" / LOG_FILE).read_text()
    assert len(re.findall(told, log)) == 1
    assert "level=WARNING logger=dps.shard event=Detected" in log
    assert "event=TrialEnded experiment=small trial=seed-0 status=valid" in log
    assert len(re.findall(told, run.stderr)) == 1
