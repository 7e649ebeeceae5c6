"""`dps doctor`: the check of a machine, and a job that tries a cluster."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.transport import memory
from dps.cluster.transport.memory import Mapping
from flows.config.trials import load_trials
from flows.execution.doctor import NODES, PRELOAD, Finding, examine, examine_cluster
from flows.tracking.tracker import Tracker
from tests.slurm.there import CLUSTER, go
from tests.support.commands import dps

CONFIG: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": "checkpoint",
}
TRIED = ["start", "versions", "checkpoints", "network"]


def found(here: Path) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(here, None)}


def config(here: Path, **changes: Any) -> str:
    path = here / "small.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    return str(path)


def checks(here: Path, **changes: Any) -> dict[str, Finding]:
    _, trials = load_trials(config(here, **changes))
    return {check.subject: check for check in examine_cluster(trials, here, 300.0, print)}


# -- a machine -------------------------------------------------------------------------------------


def test_a_fresh_directory_is_fine_and_stays_fresh(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert all(finding.good for finding in findings.values())
    assert {"dps", "python", "distributed", "mlflow", "cores", "memory"} <= set(findings)
    assert findings["dataset digits"].found == "scikit-learn"
    assert findings["store"].found.startswith(f"sqlite:///{tmp_path.resolve()}/mlruns/mlflow.db")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Mapping:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(memory, "create", refuse)
    transport = found(tmp_path)["transport"]
    assert transport.good
    assert "no shared memory between processes: [Errno 1]" in transport.found


@pytest.mark.slow
def test_a_store_that_is_there_is_tried(tmp_path: Path) -> None:
    Tracker("demo", tmp_path)
    assert found(tmp_path)["store"].good
    (tmp_path / "mlruns" / "mlflow.db").write_text("this is no database, but long enough to be one")
    damaged = found(tmp_path)["store"]
    assert not damaged.good
    assert "cannot be used: file is not a database. Make it writable" in damaged.found
    shown = dps(tmp_path, "doctor")
    assert shown.returncode == 1
    assert "!!  store " in shown.stdout


# -- a cluster -------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_this_machine_is_a_cluster_that_is_well(tmp_path: Path) -> None:
    config(tmp_path)
    before = {process.pid for process in psutil.process_iter()}
    found = dps(tmp_path, "doctor", "--cluster", "small.yaml", "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["ok"]
    assert [finding["subject"] for finding in said["findings"]] == TRIED
    told = {finding["subject"]: finding["found"] for finding in said["findings"]}
    assert told["start"].startswith("3 nodes in ")
    left = [p for p in psutil.process_iter() if p.pid not in before and "forkserver" in p.name()]
    assert left == []
    assert {path.name for path in tmp_path.iterdir()} == {"small.yaml", "results"}
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.slow
@pytest.mark.cluster
def test_a_folder_that_nodes_cannot_write_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "checkpoints")
    unwritable = {"preset": "checkpoint", "durability": {"path": path}}
    axes = {"recovery": {"none": "none", "checkpoint": unwritable}}
    found = checks(tmp_path, axes=axes, recovery="none")
    assert list(found) == TRIED
    assert [check for check in found.values() if not check.good] == [found["checkpoints"]]
    assert f"{path} cannot be written" in found["checkpoints"].found


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_reported_with_code_1(tmp_path: Path) -> None:
    config(tmp_path, cluster={"kind": "existing", "address": "tcp://127.0.0.1:1"})
    found = dps(tmp_path, "doctor", "--cluster", "small.yaml", "--limit", "5")
    assert found.returncode == 1
    assert found.stdout.startswith("!!  start")
    assert "no Dask scheduler answers at tcp://127.0.0.1:1" in found.stdout
    assert "Traceback" not in found.stderr
    virtual = dps(tmp_path, "doctor", "--cluster", "small.yaml", "--set", "cluster=virtual")
    assert (virtual.returncode, virtual.stdout) == (2, "")
    assert "virtual time has no nodes" in virtual.stderr


@pytest.mark.cluster
def test_an_existing_deployment_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    more = NodeSpec("store-0", resource_of("store-0"))
    with LocalCluster((*NODES, more), PRELOAD, security="off") as there:
        pids = dict(there.pids)
        os.kill(pids["store-0"], signal.SIGSTOP)  # it would never answer, so it must not be asked
        cluster = {"kind": "existing", "address": there.address}
        found = checks(tmp_path, cluster=cluster, recovery="chain")
        # Without checkpoints no shared folder is needed.
        without = [subject for subject in TRIED if subject != "checkpoints"]
        assert [subject for subject, check in found.items() if check.good] == without
        assert not (tmp_path / "results").exists()
        assert there.pids == pids
        assert all(map(psutil.pid_exists, pids.values()))


@pytest.mark.cluster
@pytest.mark.slurm
def test_jobs_of_slurm_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, tmp_path)
    found = checks(tmp_path, cluster=CLUSTER)
    assert list(found) == TRIED
    assert all(check.good for check in found.values()), found
