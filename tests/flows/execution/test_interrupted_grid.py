"""A grid whose driver is killed again and again ends with every trial once, and leaves nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.records.record import event_files, read_record, read_start
from flows.tracking.store import default_uri
from tests.flows.execution.test_run import CONFIG, alive_in_session
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

GRID: dict[str, Any] = {
    **CONFIG,
    "experiment": "grid",
    "training": {"workers": 1, "updates": 20},
    "axes": {"optimizer.learning_rate": [0.05, 0.1, 0.2, 0.4], "recovery": ["none", "checkpoint"]},
    "seeds": [0, 1, 2],
}
TRIALS = 24
RUN = [sys.executable, "-m", "flows.cli", "run", "grid.yaml", "--parallel", "2"]


def start(here: Path, scratch: Path) -> subprocess.Popen[str]:
    # No thread pools: the cores are for the trials.
    environment = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.Popen(
        RUN,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def all_gone(session: int) -> bool:
    return not alive_in_session(session)


def begun(here: Path) -> int:
    return len(list((here / "results" / "grid").glob("*/events.jsonl")))


def children(here: Path) -> list[str]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=default_uri(here))
    (experiment,) = client.search_experiments(filter_string="name = 'dps/grid'")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    assert [run.data.tags["dps.kind"] for run in runs].count("experiment") == 1
    return [r.data.tags["dps.trial"] for r in runs if r.data.tags["dps.kind"] == "trial"]


@pytest.mark.slow
def test_a_grid_that_is_killed_three_times_ends_with_every_trial_once(
    tmp_path: Path, scratch: Path
) -> None:
    chance = random.Random(0)  # of the moments: a failure can be repeated
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GRID))
    for part in range(1, 4):
        process = start(tmp_path, scratch)
        eventually(lambda part=part: begun(tmp_path) >= 6 * part, 60)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.8))  # a random moment in a trial, between two, or in MLflow
        process.kill()
        process.communicate(timeout=30)  # until its drivers have closed the pipes, too
        eventually(partial(all_gone, process.pid), 30)

    process = start(tmp_path, scratch)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    eventually(partial(all_gone, process.pid), 10)

    files = event_files(tmp_path / "results" / "grid")
    ends = [read_record(path).ended for path in files]
    assert [end.status for end in ends if end is not None] == ["valid"] * TRIALS
    starts = [first for path in files if (first := read_start(path)) is not None]
    assert len({first.settings["digest"] for first in starts}) == TRIALS
    positions = [first.settings["circumstances"]["position"] for first in starts]
    assert sorted(positions) == list(range(1, TRIALS + 1))
    assert {first.settings["circumstances"]["parallel"] for first in starts} == {2}
    assert sorted(children(tmp_path)) == sorted(path.parent.name for path in files)
    left = {path.name for path in scratch.iterdir()}
    assert [name for name in left if name.startswith(("dps-", "pymp-"))] == []
