"""Which hosts have room for a job, by what Slurm's `sinfo` prints."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dps.cluster.backends import jobs, slurm
from dps.cluster.backends.base import Cluster
from dps.cluster.backends.jobs import Jobs
from dps.cluster.backends.slurm import SlurmCluster, hosts_with_room
from dps.cluster.names import NodeSpec

ROWS = """\
ps idle idle 0/8/0/8 16000 0
ps mixed mix 6/2/0/8 16000 1000
ps full mix 8/0/0/8 16000 1000
ps taken mix 2/6/0/8 16000 15800
ps begun alloc 0/8/0/8 16000 0
ps busy alloc 8/0/0/8 16000 8000
ps turning alloc+ 1/7/0/8 16000 500
ps ending comp 0/8/0/8 16000 0
ps small idle 0/1/0/1 16000 0
ps gone down 0/0/8/8 16000 0
ps silent idle* 0/8/0/8 16000 0
ps leaving drng 1/7/0/8 16000 0
compute* other idle 0/8/0/8 16000 0
"""


@pytest.fixture(autouse=True)
def _sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "sinfo"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{ROWS}END\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_hosts_have_room_by_their_cores_and_memory_whatever_they_are_doing() -> None:
    found = hosts_with_room("ps", 2, 500.0)
    assert found == {"idle", "mixed", "begun", "turning", "ending"}


def test_the_default_partition_is_the_one_with_a_star() -> None:
    assert hosts_with_room(None, 1, 500.0) == hosts_with_room("compute", 1, 500.0) == {"other"}


class Waiting(SlurmCluster):
    """A head that has a host, and its replica, whose job waits."""

    def __post_init__(self) -> None:
        Cluster.__init__(self)
        self._at["server-0"] = "mixed"
        self._specs = {name: NodeSpec(name, "server") for name in ("server-0", "replica-0-1")}
        self._job_of = {"replica-0-1": SimpleNamespace(job_id="7")}
        self._submitted = []
        self._submit(self._specs["replica-0-1"])

    waiting = SlurmCluster._waiting
    cancel = SlurmCluster._cancel


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    monkeypatch.setattr(jobs.JobCluster, "_submit", lambda *_: None)
    group = {"cores": 2, "memory": "500MB", "queue": "ps"}
    return Waiting(Jobs("slurm", {"server": group}), [], None, 1.0, print)


def test_only_jobs_that_have_just_started_are_moved(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    cancelled: list[tuple[str, ...]] = []

    def command(*words: str, check: bool = True) -> str:
        (asked if words[0] == "sinfo" else cancelled).append(words)
        return "".join(f"{' '.join(row.split())}\n" for row in ROWS.splitlines())

    monkeypatch.setattr(slurm, "run_command", command)
    monkeypatch.setattr(slurm, "job_states", lambda _: {"7": ("PENDING", "")})
    assert "replica-0-1" in waiting.waiting()
    assert not asked
    monkeypatch.setattr(slurm, "job_states", lambda _: {"7": ("RUNNING", "mixed")})
    assert "replica-0-1" in waiting.waiting()
    assert asked
    assert cancelled == [("scancel", "7")]


def test_no_timer_runs_on_after_the_end(waiting: Waiting) -> None:
    (timer,) = waiting._spreading
    waiting.cancel()
    assert timer.finished.is_set()
