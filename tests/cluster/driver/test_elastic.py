"""Servers and workers that come and go under a training, with real processes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec
from dps.errors import CapacityError, ConfigurationError
from dps.events import Moved, Sink
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
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

SHARDS = 6
PARAMS = {f"w{i}": np.zeros(300) for i in range(SHARDS)}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Four nodes for servers and three for workers, which a test may break."""
    with LocalCluster(nodes(servers=4, workers=3), PRELOAD) as started:
        yield started


def loads(ps: ParameterServer) -> dict[str, int]:
    """How many replicas are on each node that has any."""
    names = {node.address: node.name for node in ps.nodes}
    chains = [view.chain for view in ps.table().views]
    return dict(Counter(names[member.address] for chain in chains for member in chain))


def check_counts(ps: ParameterServer, pushed: int) -> None:
    """Every weight of every shard counts each update once."""
    assert {float(x) for array in ps.pull().values() for x in array} == {float(pushed)}
    assert [reply.version for reply in audited(ps)] == [pushed] * SHARDS


def elastic(client: Client, events: Sink, recovery: Recovery | str = "none") -> ParameterServer:
    return ParameterServer(
        client,
        PARAMS,
        shards=SHARDS,
        servers=2,
        optimizer=COUNTING,
        recovery=recovery,
        on_event=events,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["none", "chain"])
def test_servers_and_workers_come_and_go_and_every_update_counts_once(
    cluster: LocalCluster, tmp_path: Path, recovery: str
) -> None:
    events, flag = Events(), str(tmp_path / "enough")
    with elastic(cluster.client, events, recovery) as ps:
        replicas = ps.group.replicas
        futures = ps.run(partial(count_until, flag))
        futures += [ps.add_worker(count_while_wanted) for _ in range(2)]
        with pytest.raises(
            CapacityError, match="3 threads, of which 0 are free: worker-0, worker-1, worker-2"
        ):
            ps.add_worker(count_while_wanted)
        ps.scale(servers=4)
        assert sorted(loads(ps).values()) == {1: [1, 1, 2, 2], 2: [3] * 4}[replicas]
        assert ps.remove_worker("worker-1") is None
        left = [futures[1].result(timeout=SECONDS)]
        ps.scale(servers=3)
        assert sorted(loads(ps).values()) == [2 * replicas] * 3
        ps.remove_worker("worker-2")
        Path(flag).touch()
        check_counts(ps, sum(left + results([futures[0], futures[2]])))
    moved = len(events.of(Moved))
    assert moved == 3 if replicas == 1 else 9 <= moved <= 11


def test_what_cannot_be_is_refused(cluster: LocalCluster) -> None:
    with elastic(cluster.client, Events()) as ps:
        with pytest.raises(ConfigurationError, match="expected 1 to 6 for"):
            ps.scale(servers=7)
        for servers in (1.5, "3", True):
            with pytest.raises(ConfigurationError, match="expected a whole number"):
                ps.scale(servers=servers)  # type: ignore[arg-type]
        with pytest.raises(CapacityError, match="only 4 nodes can hold shards"):
            ps.scale(servers=5)
        with pytest.raises(ConfigurationError, match="no node 'worker-0' holds"):
            ps.drain("worker-0")
        with pytest.raises(ConfigurationError, match="named 'worker-0'; none was started"):
            ps.remove_worker("worker-0")
        cluster.start(NodeSpec("server-4", "server"))
        eventually(lambda: any(node.name == "server-4" for node in ps.nodes), SECONDS)
        eventually(lambda: _scaled(ps, np.int64(5)), SECONDS)
        assert len(loads(ps)) == 5


def _scaled(ps: ParameterServer, servers: Any) -> bool:
    """Whether there are as many; a node that has joined is not of use at once."""
    try:
        ps.scale(servers)
    except CapacityError:
        return False
    return True


def test_the_loss_of_the_old_holder_in_the_midst_of_moves_costs_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Its shards have a second replica; some have been moved already, and others are to be."""
    flag = str(tmp_path / "enough")
    with elastic(cluster.client, Events(), Recovery(Chain(2))) as ps:
        futures = ps.run(partial(count_until, flag), workers=2)
        scaling = threading.Thread(target=ps.scale, args=(4,))
        scaling.start()
        eventually(lambda: len(loads(ps)) > 2, SECONDS)
        cluster.kill("server-0")
        scaling.join(SECONDS)
        assert not scaling.is_alive()
        eventually(lambda: len(loads(ps)) == 3, SECONDS)
        Path(flag).touch()
        check_counts(ps, sum(results(futures)))


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["none", "stateless"])
def test_a_drained_node_is_shut_down_and_nothing_is_lost(tmp_path: Path, recovery: str) -> None:
    flag = str(tmp_path / "enough")
    with (
        LocalCluster(nodes(servers=3, store=recovery == "stateless"), PRELOAD) as cluster,
        elastic(cluster.client, Events(), recovery) as ps,
    ):
        futures = ps.run(partial(count_until, flag), workers=2)
        with ThreadPoolExecutor(2) as threads:  # whoever asks again meanwhile waits as well
            assert list(threads.map(ps.drain, ["server-0"] * 2)) == [None, None]
        assert loads(ps) == {"server-1": 3, "server-2": 3}
        os.kill(cluster.pids["server-0"], 9)
        eventually(lambda: ps.table().complete, SECONDS)
        Path(flag).touch()
        check_counts(ps, sum(results(futures)))
        if recovery == "stateless":
            with pytest.raises(CapacityError, match="the only node for the state store"):
                ps.drain("store-0")


@pytest.mark.slow
def test_nodes_without_roles_become_servers_when_they_are_wanted() -> None:
    with (
        Client(n_workers=3, threads_per_worker=1, dashboard_address=None) as client,
        ParameterServer(client, PARAMS, shards=SHARDS, servers=1, optimizer=COUNTING) as ps,
    ):
        with pytest.raises(CapacityError, match="only 1 nodes can hold shards"):
            ps.scale(servers=2)
        client.cluster.scale(4)
        eventually(lambda: _scaled(ps, 2), SECONDS)
        assert sorted(loads(ps).values()) == [3, 3]
