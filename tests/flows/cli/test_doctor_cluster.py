"""`dps doctor --cluster`: a job that tries a cluster, on this machine and on Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dps.cluster.backends.local import LocalCluster
from flows.config.trials import load_trials
from flows.execution.cluster_check import NODES, PRELOAD, Check, check_cluster
from tests.slurm.there import CLUSTER, go

CONFIG: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": "checkpoint",
}
TRIED = ["start", "versions", "checkpoints", "network", "end"]


def config(here: Path, **changes: Any) -> str:
    path = here / "small.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    return str(path)


def doctor(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", "doctor", *words],
        cwd=here,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def checks(here: Path, **changes: Any) -> dict[str, Check]:
    _, trials = load_trials(config(here, **changes))
    found = list(check_cluster(trials, here, 300.0, lambda line: None))
    return {check.subject: check for check in found}


@pytest.mark.cluster
def test_this_machine_is_a_cluster_that_is_well(tmp_path: Path) -> None:
    config(tmp_path)
    before = {process.pid for process in psutil.process_iter()}
    found = doctor(tmp_path, "--cluster", "small.yaml", "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["ok"]
    assert [finding["subject"] for finding in said["findings"]] == TRIED
    told = {finding["subject"]: finding["message"] for finding in said["findings"]}
    assert told["start"].startswith("3 nodes in ")
    assert "3 processes here have ended" in told["end"]
    left = [p for p in psutil.process_iter() if p.pid not in before and "forkserver" in p.name()]
    assert left == []
    assert {path.name for path in tmp_path.iterdir()} == {"small.yaml", "results"}
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.slow
@pytest.mark.cluster
def test_each_cluster_that_an_axis_names_is_tried_once(tmp_path: Path) -> None:
    clusters = {
        "here": "local",
        "model": "virtual",
        "open": {"kind": "local", "tls": "off"},
    }
    axes = {"cluster": clusters, "recovery": ["none", "checkpoint"]}
    _, trials = load_trials(config(tmp_path, axes=axes, recovery="none"))
    assert len(trials) == 6
    found = list(check_cluster(trials, tmp_path, 300.0, lambda line: None))
    assert all(check.good for check in found), found
    assert [check.subject for check in found] == ["cluster", *TRIED] * 2
    assert [check.found for check in found if check.subject == "cluster"] == ["here", "open"]


@pytest.mark.cluster
def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "checkpoints")
    recovery = {"preset": "checkpoint", "durability": {"path": path}}
    found = checks(tmp_path, recovery=recovery)
    assert not found["checkpoints"].good
    assert f"{path}: cannot be written here" in found["checkpoints"].found
    assert all(check.good for subject, check in found.items() if subject != "checkpoints")


@pytest.mark.cluster
def test_who_writes_no_checkpoints_needs_no_shared_folder(tmp_path: Path) -> None:
    assert list(checks(tmp_path, recovery="chain")) == [t for t in TRIED if t != "checkpoints"]
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_told_of_with_code_1(tmp_path: Path) -> None:
    config(tmp_path, cluster={"kind": "existing", "address": "tcp://127.0.0.1:1"})
    found = doctor(tmp_path, "--cluster", "small.yaml", "--limit", "5")
    assert found.returncode == 1
    assert found.stdout.startswith("!!  start")
    assert "no Dask scheduler answers at tcp://127.0.0.1:1" in " ".join(found.stdout.split())
    assert "Traceback" not in found.stderr


@pytest.mark.cluster
def test_an_existing_deployment_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    with LocalCluster(NODES, PRELOAD, security="off") as there:
        pids = dict(there.pids)
        found = checks(tmp_path, cluster={"kind": "existing", "address": there.address})
        assert [subject for subject, check in found.items() if check.good] == TRIED
        assert "which are there as before" in found["end"].found
        assert there.pids == pids
        assert all(map(psutil.pid_exists, pids.values()))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cluster": "virtual"}, "on virtual time there are no nodes"),
        ({"cluster": {"kind": "slrm"}}, "did you mean 'slurm'"),
    ],
    ids=["virtual", "kind"],
)
def test_bad_input_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    config(tmp_path, **changes)
    refused = doctor(tmp_path, "--cluster", "small.yaml")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert told in refused.stderr


@pytest.mark.cluster
@pytest.mark.slurm
def test_jobs_of_slurm_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, tmp_path)
    found = checks(tmp_path, cluster=CLUSTER)
    assert list(found) == TRIED
    assert all(check.good for check in found.values()), found
