"""Hosts of a real Slurm: nodes are kept apart on them, requeued, and lost with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.jobs import Jobs
from dps.cluster.backends.slurm import SlurmCluster
from dps.cluster.backends.tls import temporary
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError
from dps.events import CapacityRestored, Event, FaultMissed, Killed
from dps.faults import AtUpdates, Kill
from dps.faults.injector import Injector
from tests.slurm.test_slurm import CONFIG
from tests.slurm.there import go
from tests.support.training import (
    COUNTING,
    SECONDS,
    Events,
    count_until,
    counts,
    nodes,
    params,
    results,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slurm]

GROUPS: dict[str, dict[str, Any]] = {
    "server": {"queue": "ps", "cores": 1, "memory": "500MB"},
    "worker": {"queue": "compute", "cores": 1, "memory": "500MB"},
}
PAIR = nodes(1, replicas=1, workers=1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, tmp_path)


def open_cluster(
    members: list[NodeSpec], groups: dict[str, dict[str, Any]] = GROUPS
) -> SlurmCluster:
    jobs = Jobs("slurm", groups, "lo")
    return SlurmCluster(jobs, members, temporary(), 60.0, lambda line: None)


def state_of(host: str) -> str:
    shown = subprocess.run(
        ["sinfo", "-h", "-n", host, "-o", "%T"], capture_output=True, text=True, check=True
    )
    return shown.stdout.split()[0]


def train_under(plan: tuple[Kill, ...], flag: Path) -> tuple[Events, list[int], int]:
    """Count under a plan until what was killed is back; return what is counted, and was pushed."""
    events = Events()
    listeners: list[Callable[[Event], None]] = [events]
    recovery = Recovery(Chain())

    def on_event(event: Event) -> None:
        for listen in listeners:
            listen(event)

    with (
        open_cluster(PAIR) as cluster,
        ParameterServer(
            cluster.client, params(), on_event=on_event, optimizer=COUNTING, recovery=recovery
        ) as ps,
        Injector(plan, cluster, ps, events) as injector,
    ):
        listeners.append(injector.note)
        futures = ps.run(partial(count_until, str(flag)))
        eventually(lambda: events.of(CapacityRestored), SECONDS)
        eventually(lambda: ps.table().complete, SECONDS)
        flag.touch()
        pushed = sum(results(futures))
        return events, counts(ps), pushed


def test_replicas_of_a_shard_are_on_different_hosts_where_there_is_a_choice() -> None:
    with open_cluster(nodes(2, replicas=1, workers=0)) as cluster:
        assert not cluster.notes
        for shard in (0, 1):
            beside = cluster.on_host_of(f"server-{shard}")
            assert f"replica-{shard}-1" not in beside
    one: dict[str, Any] = {"queue": "compute", "cores": 1, "memory": "500MB"}
    with open_cluster(nodes(1, replicas=1, workers=0), {"server": one}) as cluster:
        (note,) = cluster.notes
        assert note.startswith("replica-0-1, server-0 share a host")


def test_no_update_is_lost_with_a_host_that_the_plan_takes(tmp_path: Path) -> None:
    plan = (Kill("server-0", AtUpdates(50), back_after=0.5, by="host"),)
    events, counted, pushed = train_under(plan, tmp_path / "stop")
    (killed,), (restored,) = events.of(Killed), events.of(CapacityRestored)
    assert killed.gone
    assert killed.by == "host"
    assert "NODE_FAIL" in killed.evidence
    assert killed.evidence.endswith("is DOWN")
    assert restored.node == "server-0-b"
    assert counted == [pushed]
    assert not events.of(FaultMissed)


def test_a_job_that_the_plan_requeues_comes_back_as_another_node(tmp_path: Path) -> None:
    plan = (Kill("server-0", AtUpdates(50), by="requeue"),)
    events, counted, pushed = train_under(plan, tmp_path / "stop")
    (killed,), (restored,) = events.of(Killed), events.of(CapacityRestored)
    assert killed.gone
    assert (killed.by, restored.node) == ("requeue", "server-0-b")
    assert counted == [pushed]


def test_a_host_with_jobs_of_others_is_not_taken() -> None:
    with open_cluster(nodes(1, workers=0)) as cluster:
        host = cluster._host_of("server-0")
        sleep = ["sbatch", "--parsable", "-p", "ps", "-w", host, "-o", "/dev/null"]
        job = subprocess.run(
            [*sleep, "--wrap", "sleep 60"], capture_output=True, text=True, check=True
        ).stdout.strip()
        here = ["squeue", "-h", "-t", "running", "-j", job, "-o", "%i"]
        try:
            eventually(lambda: subprocess.run(here, capture_output=True).stdout, SECONDS)
            with pytest.raises(ConfigurationError, match=f"would end other jobs.*{job}"):
                cluster.take_host("server-0")
        finally:
            subprocess.run(["scancel", job], check=True)
        assert state_of(host) != "down"


def test_a_host_is_given_back_by_a_driver_that_is_killed(tmp_path: Path) -> None:
    kill = {
        "kind": "kill",
        "target": "server-0",
        "at_updates": 10,
        "back_after": None,
        "by": "host",
    }
    changes = {"training": {"workers": 1, "updates": 100_000}, "time_limit": 600.0}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({**CONFIG, **changes, "faults": [kill]}))
    command = [sys.executable, "-m", "flows.cli", "run", "jobs.yaml"]
    hosts = ("a", "b")
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=dict(os.environ)
    ) as process:
        try:
            eventually(lambda: "down" in map(state_of, hosts), 60.0)
        finally:
            process.kill()
    eventually(lambda: all(state_of(host) == "idle" for host in hosts), SECONDS)
