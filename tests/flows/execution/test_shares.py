"""Workers that take the place of others, and what is left for them, on real Dask processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from distributed import Client

from dps import SGD, ParameterServer, Worker
from dps.cluster.backends.local import LocalCluster
from dps.cluster.platform import platform_of
from dps.events import WorkerJoined
from flows.execution.elastic_workers import ElasticWorkerPool
from flows.execution.workers import WorkerPool, shares_of
from tests.support.training import PRELOAD, SECONDS, nodes, results
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

ONE = np.ones(1)


def push_more_to_one_shard(worker: Worker) -> None:
    worker.push_pull({"a": ONE, "b": ONE})
    for _ in range(2):
        worker.push_pull({"a": ONE})


def wait_to_leave(worker: Worker) -> None:
    while not worker.leaving:
        worker.pull()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with LocalCluster(nodes(workers=2), PRELOAD) as cluster:
        yield cluster.client


@pytest.fixture
def ps(client: Client) -> Iterator[ParameterServer]:
    params = {"a": np.zeros(1), "b": np.zeros(1)}
    with ParameterServer(client, params, optimizer=SGD(0.1), shards=2) as ps:
        yield ps


@pytest.fixture
def pool(client: Client, ps: ParameterServer) -> WorkerPool:
    return WorkerPool(client, ps, lambda *_: True, shares_of(5, 1, {}))


def test_a_gradient_is_done_when_every_shard_has_it(ps: ParameterServer, pool: WorkerPool) -> None:
    results(ps.run(push_more_to_one_shard, workers=1))
    assert pool._applied() == {"worker-0": 1}


def test_a_fresh_node_is_given_no_more_workers_than_it_has_threads(pool: WorkerPool) -> None:
    present = {"worker-0-b": 2, "worker-1-b": 1}
    assert pool._free(present) == ["worker-0-b", "worker-0-b", "worker-1-b"]
    pool.note(WorkerJoined(1.0, "worker-0", 2, "worker-0-b"))
    pool.note(WorkerJoined(1.0, "worker-2", 2, "worker-1-b"))
    assert pool._free(present) == ["worker-0-b"]


def test_who_has_left_is_not_made_good_for_twice(client: Client, ps: ParameterServer) -> None:
    """A change of the number of workers takes care of those that have left with their nodes."""
    clock = platform_of(client).clock
    pool = ElasticWorkerPool(client, ps, wait_to_leave, [], 1, 10, clock, lambda event: None)
    pool._have(1)
    ps.remove_worker("worker-0")
    eventually(pool._running["worker-0"].done, SECONDS)
    assert pool._look() is None
    pool._have(1)
    pool._make_good()
    assert list(pool._running) == ["worker-1"]
    pool._have(0)
    assert pool._gone(SECONDS)
