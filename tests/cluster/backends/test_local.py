"""The cluster of processes on this machine: what it starts, where it listens, and how it ends."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from dps.cluster import names
from dps.cluster.backends import local
from dps.cluster.backends.local import START_SECONDS, LocalCluster
from dps.cluster.backends.processes import is_gone, state_of
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError, SchedulerLost
from tests.support.training import PRELOAD, SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster that no test of this module breaks."""
    with LocalCluster(nodes(1, replicas=1, store=True, workers=1), PRELOAD) as found:
        yield found


def resources(cluster: LocalCluster) -> dict[str, list[str]]:
    """For each node, the Dask resources that it offers."""
    client = cluster.client
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return {str(info["name"]): list(info["resources"]) for info in workers.values()}


def test_nodes_have_names_and_resources_and_are_processes_of_their_own(
    cluster: LocalCluster,
) -> None:
    assert resources(cluster) == {
        "server-0": ["server"],
        "replica-0-1": ["server"],
        "store-0": ["store"],
        "worker-0": ["worker"],
    }
    assert cluster.pids.keys() == {"scheduler", *resources(cluster)}
    assert len({os.getpid(), *cluster.pids.values()}) == 6
    in_nodes = cluster.client.run(os.getpid).values()
    assert sorted([*in_nodes, cluster.pids["scheduler"]]) == sorted(cluster.pids.values())


def test_everything_listens_on_loopback_only(cluster: LocalCluster) -> None:
    listening = [
        connection.laddr.ip
        for pid in (os.getpid(), *cluster.pids.values())
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]
    assert len(listening) >= len(cluster.pids)
    assert set(listening) == {"127.0.0.1"}


def test_a_killed_node_stays_gone_until_another_is_started_and_close_ends_all() -> None:
    with LocalCluster([NodeSpec("server-0", "server")]) as cluster:
        assert is_gone(cluster.kill("server-0"), SECONDS)
        eventually(lambda: resources(cluster) == {}, SECONDS)
        with pytest.raises(ProcessLookupError):
            cluster.kill("server-0")
        cluster.start(NodeSpec("server-0-b", "server"))
        eventually(lambda: resources(cluster) == {"server-0-b": ["server"]}, SECONDS)
        pids = cluster.pids.values()
    assert all(is_gone(pid, 0.0) for pid in pids)


def test_no_process_is_taken_for_a_node_that_has_ended_and_had_its_number() -> None:
    with LocalCluster(nodes(1, replicas=1), PRELOAD) as cluster:
        pid = cluster.kill("server-0")
        assert cluster.gone("server-0", SECONDS)
        with process_numbered(pid) as other:
            assert cluster.gone("server-0", 0.0)
            assert not cluster.running("server-0", 0.0)
            for ask in (cluster.kill, cluster.pause):
                with pytest.raises(ProcessLookupError, match="of server-0 has already ended"):
                    ask("server-0")
            assert other.poll() is None
            assert state_of(other.pid) == "running"


@contextmanager
def process_numbered(pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has been given this number, which is free."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK) or os.geteuid() != 0:
        pytest.skip("only root can choose the number of the next process, and only on Linux")
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        last.write_text(str(pid - 1))
        with subprocess.Popen(["sleep", "600"]) as process:
            try:
                if process.pid == pid:
                    yield process
                    return
            finally:
                process.kill()
    raise AssertionError(f"no process was given the number {pid}")


def test_dasks_dashboard_is_served_where_bokeh_is_installed() -> None:
    nodes = [NodeSpec("worker-0", "worker")]
    choices: dict[str, Any] = {"security": "off", "notify": lambda _: None, "host": "127.0.0.2"}
    with LocalCluster(nodes, dashboard=True, **choices) as cluster:
        assert (cluster.dashboard is not None) == (find_spec("bokeh") is not None)
        if cluster.dashboard is not None:
            assert cluster.dashboard.startswith("http://127.0.0.1:")
            assert urlopen(cluster.dashboard, timeout=SECONDS).status == 200


def test_a_cluster_that_cannot_start_leaves_no_process(cluster: LocalCluster) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert len(before) > len(cluster.pids)
    with pytest.raises(ConfigurationError, match="worker-0"):
        LocalCluster([NodeSpec("worker-0", "worker")] * 2)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if not is_gone(process.pid, SECONDS)]


def test_a_name_is_free_again_if_its_node_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no process can be started")

    node = NodeSpec("worker-0", "worker")
    with LocalCluster([]) as cluster:
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "_start_process", refuse)
            with pytest.raises(OSError, match="no process"):
                cluster.start(node)
        cluster.start(node)
        assert cluster.running("worker-0", 0.0)


def test_the_examples_of_the_docstrings_run() -> None:
    for module in (local, names):
        results = doctest.testmod(module)
        assert results.attempted
        assert not results.failed


class Beheaded(LocalCluster):
    """One whose scheduler dies when the first node is started, before anything connects to it."""

    def start(self, node: NodeSpec) -> None:
        super().start(node)
        self.kill("scheduler")


def test_connecting_stops_at_once_if_the_scheduler_is_lost() -> None:
    began = time.monotonic()
    with pytest.raises(SchedulerLost, match="ended while the nodes started"):
        Beheaded([NodeSpec("worker-0", "worker")])
    assert time.monotonic() - began < START_SECONDS / 2


DRIVER = """
    import json, os, sys, time
    from functools import partial

    from dps import ParameterServer
    from dps.cluster.backends.local import LocalCluster
    from tests.support.training import PRELOAD, count_until, nodes, params, versions
    from tests.support.waiting import eventually

    if __name__ == "__main__":
        with LocalCluster(nodes(1, replicas=1), PRELOAD) as cluster:
            with ParameterServer(cluster.client, params(), recovery="chain") as ps:
                futures = ps.run(partial(count_until, sys.argv[1]), workers=2)
                eventually(lambda: versions(ps)[0] > 10, 30)
                print(json.dumps(cluster.pids), flush=True)
                cluster.client.gather(futures)
"""


@contextmanager
def driver(
    folder: Path,
) -> Iterator[tuple[subprocess.Popen[str], list[int], dict[str, int]]]:
    """A script in the middle of a training that never ends; the processes it started; the nodes."""
    script = folder / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    with subprocess.Popen(
        [sys.executable, script, folder / "never"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            pids = json.loads(process.stdout.readline())
            started = psutil.Process(process.pid).children(recursive=True)
            # The monitor of this machine may be in use by others.
            alive = [child for child in started if child.status() != psutil.STATUS_ZOMBIE]
            named = [(child.pid, " ".join(child.cmdline())) for child in alive]
            found = {pid for pid, command in named if "dps.cluster.monitor" not in command}
            assert found >= set(pids.values())
            yield process, sorted(found), pids
        finally:
            process.kill()


@pytest.mark.slow
def test_no_process_survives_the_death_of_the_driver_not_even_a_paused_one(scratch: Path) -> None:
    with driver(scratch) as (process, started, pids):
        os.kill(pids["server-0"], signal.SIGSTOP)
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
        assert [pid for pid in started if not is_gone(pid, 5.0)] == []
    assert not list(scratch.glob("dps-*"))


@pytest.mark.slow
def test_no_file_survives_the_death_of_the_scheduler_and_the_driver(scratch: Path) -> None:
    """Whoever ends last takes the cluster's folder along: a node, if the scheduler is gone."""
    with driver(scratch) as (process, started, pids):
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(pids["scheduler"], signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
        assert [pid for pid in started if not is_gone(pid, 5.0)] == []
    assert not list(scratch.glob("dps-*"))


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True], ids=["driver", "terminal"])
def test_no_process_survives_an_interruption(scratch: Path, whole_group: bool) -> None:
    with driver(scratch) as (process, started, _):
        if whole_group:  # as Ctrl-C in a terminal does
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
        assert [pid for pid in started if not is_gone(pid, 5.0)] == []
        assert process.returncode != 0
