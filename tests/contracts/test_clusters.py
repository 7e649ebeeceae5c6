"""What every kind of cluster does: one suite for real ones and for the one on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

import pytest

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.base import Act, Cluster
from dps.cluster.backends.existing import ExistingCluster
from dps.cluster.backends.jobs import Jobs
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.slurm import SlurmCluster
from dps.cluster.names import NodeSpec
from dps.cluster.platform import platform_of
from dps.errors import ConfigurationError
from dps.events import CapacityRestored, Event, FaultMissed, Killed
from dps.faults import AtUpdates, InChain, Kill
from dps.faults.injector import Injector
from dps.virtual.client import VirtualClient
from tests.slurm.there import go
from tests.support.deployment import deployed, workers
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    count_until,
    counts,
    nodes,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

T = TypeVar("T")
Open = Callable[[Sequence[NodeSpec]], AbstractContextManager[Cluster]]
QUEUED: tuple[Act, ...] = ("requeue", "host")
MEMBERS = nodes(1, replicas=1, store=True, workers=1)


@pytest.fixture(
    scope="module",
    params=["local", "existing", "virtual", pytest.param("slurm", marks=pytest.mark.slurm)],
)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Open]:
    """How to get a cluster of each kind with the nodes that are asked for, one at a time."""
    if request.param == "local":
        yield lambda members: LocalCluster(members, PRELOAD)
        return
    if request.param == "virtual":
        yield VirtualClient
        return
    if request.param == "slurm":
        groups = {
            node.resource: {"queue": "compute", "cores": 1, "memory": "500MB"} for node in MEMBERS
        }
        jobs = Jobs("slurm", groups, "lo")
        with pytest.MonkeyPatch.context() as patch:
            go(patch, tmp_path_factory.mktemp("jobs"))
            yield lambda members: SlurmCluster(jobs, members, None, SECONDS, lambda line: None)
        return
    folder = tmp_path_factory.mktemp("deployment")
    with deployed(folder, workers(len(MEMBERS) + 1)) as address:
        yield partial(ExistingCluster, address)


@contextmanager
def serving(cluster: Cluster, events: Callable[[Event], None]) -> Iterator[ParameterServer]:
    """A parameter server of one shard in a chain of two."""
    recovery = Recovery(Chain())
    choices = {"optimizer": COUNTING, "recovery": recovery, "seats": cluster.seats}
    with ParameterServer(cluster.client, params(), on_event=events, **choices) as ps:
        yield ps


def wait_for(cluster: Cluster, predicate: Callable[[], T]) -> T:
    """Wait until `predicate()` is true, on the clock of the cluster; return what it returned."""

    def look() -> T:
        result = predicate()
        if not result:
            platform_of(cluster.client).sleep(0.01)
        return result

    return eventually(look, SECONDS)


def places(ps: ParameterServer) -> dict[str, tuple[str, int]]:
    """For each node, its role and the shard that it is meant for."""
    return {node.name: (node.role, node.home) for node in ps.nodes}


def test_nodes_have_their_names_and_are_paused_and_go_on(opened: Open) -> None:
    names = {spec.name for spec in MEMBERS}
    with opened(MEMBERS) as cluster:
        with serving(cluster, Events()) as ps:
            assert places(ps) == {
                "server-0": ("server", 0),
                "replica-0-1": ("replica", 0),
                "store-0": ("store", -1),
                "worker-0": ("worker", -1),
            }
        assert names <= cluster.pids.keys()
        assert len(set(cluster.pids.values())) == len(cluster.pids)
        assert [cluster.spec(spec.name) for spec in MEMBERS] == MEMBERS
        pauses_and_resumes(cluster)
        says_what_is_possible(cluster)
        for ask in (cluster.kill, cluster.pause, cluster.resume, cluster.spec):
            with pytest.raises(KeyError, match="nobody"):
                ask("nobody")
        with pytest.raises(KeyError, match="nobody"):
            cluster.gone("nobody", 0.0)
        with pytest.raises(ConfigurationError, match="worker-0"):  # a name is given once
            cluster.start(NodeSpec("worker-0", "worker"))


def pauses_and_resumes(cluster: Cluster) -> None:
    pid = cluster.pids["server-0"]
    assert cluster.running("server-0", 0.0)
    assert cluster.pause("server-0") == pid
    assert cluster.stopped("server-0", SECONDS)
    assert not cluster.gone("server-0", 0.0)
    assert not cluster.running("server-0", 0.0)
    assert cluster.resume("server-0") == pid
    assert cluster.running("server-0", SECONDS)
    assert not cluster.stopped("server-0", 0.0)


def says_what_is_possible(cluster: Cluster) -> None:
    """Only a queueing system can requeue jobs, and only a real disk can be full."""
    asked = {"requeue": cluster.requeue, "host": cluster.take_host}
    impossible = set() if isinstance(cluster, SlurmCluster) else set(QUEUED)
    impossible |= {"limit"} if isinstance(cluster, VirtualClient) else set()
    for act in get_args(Act):
        assert (cluster.obstacle("worker-0", act) is None) == (act not in impossible), act
        if act in impossible & asked.keys():
            with pytest.raises(ConfigurationError, match="Slurm jobs"):
                asked[act]("worker-0")
    assert "worker-0" in cluster.on_host_of("worker-0")


def test_another_node_takes_the_place_of_one_that_was_killed(opened: Open) -> None:
    with (
        opened(nodes(1, replicas=1, workers=1)) as cluster,
        serving(cluster, Events()) as ps,
    ):
        pid = cluster.pause("server-0")  # a process that is stopped can be killed as well
        assert cluster.stopped("server-0", SECONDS)
        assert cluster.kill("server-0") == pid
        assert cluster.gone("server-0", SECONDS)
        assert not cluster.running("server-0", 0.0)
        for ask in (cluster.kill, cluster.pause, cluster.resume):
            with pytest.raises(ProcessLookupError):
                ask("server-0")
        cluster.start(NodeSpec("server-0-b", "server"))
        wait_for(cluster, lambda: places(ps).get("server-0-b") == ("server", 0))
        wait_for(cluster, lambda: ps.table().complete)
        assert cluster.pids["server-0-b"] != pid == cluster.pids["server-0"]
        assert cluster.running("server-0-b", 0.0)


@pytest.mark.slow
def test_no_update_is_lost_with_a_node_that_the_plan_kills(opened: Open, tmp_path: Path) -> None:
    events, flag = Events(), tmp_path / "stop"
    listeners: list[Callable[[Event], None]] = [events]

    def on_event(event: Event) -> None:
        for listen in listeners:
            listen(event)

    with (
        opened(nodes(1, replicas=1, workers=1)) as cluster,
        serving(cluster, on_event) as ps,
    ):
        plan = (Kill(InChain(0), AtUpdates(50), back_after=0.2),)
        with Injector(plan, cluster, ps, events) as injector:
            listeners.append(injector.note)
            futures = ps.run(partial(count_until, str(flag)))
            (restored,) = wait_for(cluster, lambda: events.of(CapacityRestored))
            reached = versions(ps)[0]
            wait_for(cluster, lambda: versions(ps)[0] > reached + 20)
            flag.touch()
            pushed = sum(results(futures))
        assert counts(ps) == [pushed]
    (killed,) = events.of(Killed)
    assert killed.gone
    assert (killed.node, restored.node) == ("server-0", "server-0-b")
    assert not events.of(FaultMissed)
