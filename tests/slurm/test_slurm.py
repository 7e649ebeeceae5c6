"""Experiments on a real Slurm: servers in one partition, workers in the other, and jobs killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.cluster.backends.jobs import Jobs
from dps.cluster.backends.slurm import SlurmCluster
from dps.cluster.backends.tls import temporary
from dps.errors import CapacityError, ConfigurationError
from tests.docs.pages import fences
from tests.slurm.there import CLUSTER, go
from tests.support.tls import ports_below, said_plainly
from tests.support.training import SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slurm]

GROUP: dict[str, Any] = {"queue": "ps", "cores": 1, "memory": "500MB"}
CONFIG: dict[str, Any] = {
    "experiment": "jobs",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 120, "compute_seconds": 0.01},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
    "recovery": "chain",
    "time_limit": 90.0,
    "cluster": CLUSTER,
}


@pytest.fixture(autouse=True)
def _slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, tmp_path)
    # Jobs of the test before are cancelled; on a busy machine Slurm takes its time to end them.
    eventually(lambda: not in_queue(), SECONDS)


def open_cluster(group: dict[str, Any] = GROUP, patience: float = 60.0) -> SlurmCluster:
    jobs = Jobs("slurm", {"server": group}, "lo")
    members = nodes(1, workers=0)
    return SlurmCluster(jobs, members, temporary(), patience, lambda line: None)


def in_queue() -> list[str]:
    """The names of the partitions that jobs are in, or wait for."""
    shown = subprocess.run(["squeue", "-h", "-o", "%P"], capture_output=True, text=True, check=True)
    return shown.stdout.split()


def dps(here: Path, *arguments: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    (here / "jobs.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=here, capture_output=True, text=True)


def test_jobs_run_in_the_partition_of_their_group_and_end_with_the_cluster() -> None:
    before = signal.getsignal(signal.SIGINT)
    with open_cluster() as cluster:
        assert in_queue() == ["ps"]
        assert cluster.pids.keys() == {"server-0"}
    eventually(lambda: not in_queue(), SECONDS)
    assert signal.getsignal(signal.SIGINT) is before


def test_jobs_that_wait_for_too_long_are_told_and_cancelled() -> None:
    with pytest.raises(CapacityError, match=r"within 1 s: server-0 \(job \d+\)"):
        open_cluster({"queue": "ps", "cores": 1, "memory": "500MB", "directives": ("--hold",)}, 1.0)
    eventually(lambda: not in_queue(), SECONDS)


def test_a_job_that_slurm_refuses_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)job of server-0 could not be .*nowhere"):
        open_cluster({"queue": "nowhere", "cores": 1, "memory": "500MB"})


def test_an_experiment_runs_as_jobs_from_yaml(tmp_path: Path) -> None:
    kill = {"kind": "kill", "target": "server-0", "at_updates": 40, "back_after": 0.2}
    axes = {"faults": {"none": [], "kill": [kill]}}
    done = dps(tmp_path, "run", "jobs.yaml", axes=axes)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = dps(tmp_path, "results", "jobs", "--json")
    found = json.loads(shown.stdout)["trials"]
    assert [row["status"] for row in found] == ["valid", "valid"]
    assert [row["updates_lost"] for row in found] == [0, 0]
    eventually(lambda: not in_queue(), SECONDS)


def test_all_trials_run_in_the_allocation_of_the_page(tmp_path: Path) -> None:
    (script,) = (f.text for f in fences("bash") if f.page == "docs/howto/slurm.md")
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(CONFIG | {"recovery": "none", "seeds": [0, 1]})
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sbatch", "--wait", "--partition=ps", "--ntasks=3", "job.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path})
    log = "".join(each.read_text() for each in tmp_path.glob("slurm-*.out"))
    assert done.returncode == 0, log
    shown = dps(tmp_path, "results", "jobs", "--json")
    assert [row["status"] for row in json.loads(shown.stdout)["trials"]] == ["valid", "valid"]


def test_nothing_is_left_in_the_queue_by_a_driver_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(
        yaml.safe_dump({**CONFIG, "training": {"updates": 100_000}, "time_limit": 600.0})
    )
    command = [sys.executable, "-m", "flows.cli", "run", "jobs.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=dict(os.environ)
    ) as process:
        try:
            eventually(lambda: len(in_queue()) == 5, SECONDS)
        finally:
            process.kill()
    eventually(lambda: not in_queue(), 60.0)


def test_no_process_of_a_job_answers_without_tls() -> None:
    with open_cluster() as cluster:
        assert ports_below(*cluster.pids.values()), "its Dask worker listens"
        answers = {
            port: said_plainly(port) for port in ports_below(os.getpid(), *cluster.pids.values())
        }
    # A TLS server may say by an alert (21) that it was sent something else.
    assert {answer[:1] for answer in answers.values()} <= {b"", b"\x15"}, answers
