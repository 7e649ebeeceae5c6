"""Nodes that are told to leave, by SIGTERM or by their lifetime, with real processes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from dps import ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec
from dps.cluster.node.member import margin
from dps.events import Evaluated, NodeDrained, NodeJoined, NodeLeaving, NodeLeft
from tests.support.deployment import deployed, workers
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    audited,
    count_until,
    count_while_wanted,
    nodes,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

SHARDS = 3
PARAMS = {f"w{i}": np.zeros(300) for i in range(SHARDS)}


def counting(
    client: Client, events: Events, recovery: Recovery | str = "none", servers: int | None = None
) -> ParameterServer:
    return ParameterServer(
        client,
        PARAMS,
        shards=SHARDS,
        servers=servers,
        optimizer=COUNTING,
        recovery=recovery,
        on_event=events,
    )


def tell_to_leave(cluster: LocalCluster, name: str) -> None:
    os.kill(cluster.pids[name], signal.SIGTERM)


def scores_again(events: Events) -> None:
    scored = len(events.of(Evaluated))
    eventually(lambda: len(events.of(Evaluated)) > scored, SECONDS)


def check_counts(ps: ParameterServer, pushed: int) -> None:
    """Every weight of every shard counts each update once."""
    assert {float(x) for array in ps.pull().values() for x in array} == {float(pushed)}
    assert [reply.version for reply in audited(ps)] == [pushed] * SHARDS
    assert [sum(reply.applied.values()) for reply in audited(ps)] == [pushed] * SHARDS


@pytest.mark.slow
def test_a_server_that_is_told_to_leave_moves_all_away_and_no_update_is_lost(
    tmp_path: Path,
) -> None:
    events, flag = Events(), str(tmp_path / "enough")
    with (
        LocalCluster(nodes(servers=3), PRELOAD) as cluster,
        counting(cluster.client, events) as ps,
    ):
        futures = ps.run(partial(count_until, flag), workers=2)
        eventually(lambda: min(versions(ps)) > 20, SECONDS)
        tell_to_leave(cluster, "server-0")
        assert cluster.gone("server-0", SECONDS)
        before = min(versions(ps))
        eventually(lambda: min(versions(ps)) > before + 20, SECONDS)
        Path(flag).touch()
        check_counts(ps, sum(results(futures)))
    assert [(e.node, e.why) for e in events.of(NodeLeaving)] == [("server-0", "signal")]
    assert [e.node for e in events.of(NodeDrained)] == ["server-0"]
    assert [e.node for e in events.of(NodeLeft)] == ["server-0"]


@pytest.mark.slow
def test_a_node_that_nobody_can_do_without_serves_on_until_there_is_another(
    tmp_path: Path,
) -> None:
    events, flag, name = Events(), str(tmp_path / "enough"), "store-0"
    with (
        LocalCluster(nodes(servers=1, store=True), PRELOAD) as cluster,
        counting(cluster.client, events, "stateless", 1) as ps,
    ):
        futures = ps.run(partial(count_until, flag), workers=2)
        tell_to_leave(cluster, name)
        eventually(lambda: events.of(NodeLeaving), SECONDS)
        before = min(versions(ps))
        eventually(lambda: min(versions(ps)) > before + 20, SECONDS)
        assert cluster.running(name, 0.0)
        cluster.start(NodeSpec(f"{name}-b", cluster.spec(name).resource))
        assert cluster.gone(name, SECONDS)
        Path(flag).touch()
        check_counts(ps, sum(results(futures)))


def test_a_worker_sees_that_its_node_is_to_leave_and_what_it_returns_is_there() -> None:
    events = Events()
    with (
        LocalCluster(nodes(servers=1), PRELOAD) as cluster,
        counting(cluster.client, events, servers=1) as ps,
    ):
        futures = ps.run(count_while_wanted, workers=2)
        eventually(lambda: min(versions(ps)) > 20, SECONDS)
        tell_to_leave(cluster, "worker-0")
        assert cluster.gone("worker-0", SECONDS)
        assert {node.name for node in ps.nodes if node.role == "worker"} == {"worker-1"}
        tell_to_leave(cluster, "worker-1")
        check_counts(ps, sum(results(futures)))


@pytest.mark.slow
def test_an_evaluator_goes_on_on_the_node_that_takes_its_place() -> None:
    events, evaluator = Events(), NodeSpec("evaluator-0", "evaluator")
    with (
        LocalCluster([*nodes(servers=1, workers=1), evaluator], PRELOAD) as cluster,
        counting(cluster.client, events, servers=1) as ps,
    ):
        ps.evaluate(lambda weights: (0.0, 1.0), every=0.05)
        eventually(lambda: events.of(Evaluated), SECONDS)
        tell_to_leave(cluster, "evaluator-0")
        assert cluster.gone("evaluator-0", SECONDS)
        cluster.start(NodeSpec("evaluator-0-b", "evaluator"))
        scores_again(events)
        cluster.kill("evaluator-0-b")
        assert cluster.gone("evaluator-0-b", SECONDS)
        cluster.start(NodeSpec("evaluator-0-b-b", "evaluator"))
        scores_again(events)
    joined = [e.node for e in events.of(NodeJoined) if e.role == "evaluator"]
    assert joined == ["evaluator-0", "evaluator-0-b", "evaluator-0-b-b"]


@pytest.mark.slow
def test_no_last_score_is_waited_for_where_the_only_node_for_it_is_busy(tmp_path: Path) -> None:
    events, evaluator = Events(), NodeSpec("evaluator-0", "evaluator")
    with LocalCluster([*nodes(servers=1, workers=1), evaluator], PRELOAD) as cluster:
        with counting(cluster.client, events, servers=1) as ps:
            ps.evaluate(lambda weights: (0.0, 1.0), every=0.05)
            cluster.kill("evaluator-0")
            assert cluster.gone("evaluator-0", SECONDS)
            (future,) = ps.run(partial(count_until, str(tmp_path / "never")))
            eventually(lambda: versions(ps)[0] > 0, SECONDS)
        assert future.status in ("error", "cancelled")


def test_a_second_signal_ends_a_node_at_once() -> None:
    events = Events()
    with (
        LocalCluster(nodes(servers=1), PRELOAD) as cluster,
        counting(cluster.client, events, servers=1) as ps,
    ):
        assert ps.table().complete
        tell_to_leave(cluster, "server-0")
        eventually(lambda: events.of(NodeLeaving), SECONDS)
        assert cluster.running("server-0", 0.0)
        tell_to_leave(cluster, "server-0")
        assert cluster.gone("server-0", SECONDS)
    assert not events.of(NodeLeft)


def test_notice_is_taken_early_enough() -> None:
    minute, hour = 60.0, 3600.0
    assert margin(minute) == 30.0
    assert margin(5 * minute) == margin(10 * minute) == minute
    assert margin(hour) == 6 * minute
    assert margin(24 * hour) == 10 * minute


@pytest.mark.slow
def test_dask_workers_of_a_users_own_leave_in_order(tmp_path: Path) -> None:
    """Told by SIGTERM, without a nanny; and by `--lifetime`, with one."""
    events, flag = Events(), str(tmp_path / "enough")
    server = ("--resources", "server=1", "--name")
    groups = (
        workers(1, "--no-nanny", *server, "told"),
        workers(1, "--lifetime", "14s", *server, "old"),
        workers(1, *server, "young"),
        workers(1, "--resources", "worker=1"),
    )
    with deployed(tmp_path, *groups) as address, Client(address) as client:
        client.wait_for_workers(len(groups), timeout=SECONDS)
        with counting(client, events, servers=3) as ps:
            future = ps.run(partial(count_until, flag))
            at = {node.name: node.address for node in ps.nodes}["told"]
            (pid,) = client.run(os.getpid, workers=[at]).values()
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: len(events.of(NodeLeft)) == 2, SECONDS)
            Path(flag).touch()
            check_counts(ps, sum(results(future)))
    told = {event.node: event.why for event in events.of(NodeLeaving)}
    assert told == {"told": "signal", "old": "lifetime"}
