"""What is left of a worker's share, by what the shards have of it, on real Dask processes."""

from __future__ import annotations

import numpy as np
import pytest

from dps import SGD, ParameterServer, Worker
from dps.cluster.backends.local import LocalCluster
from flows.execution.workers import WorkerPool, shares_of
from tests.support.training import PRELOAD, nodes, results

ONE = np.ones(1)


def push_more_to_one_shard(worker: Worker) -> None:
    worker.push_pull({"a": ONE, "b": ONE})
    for _ in range(2):
        worker.push_pull({"a": ONE})


@pytest.mark.cluster
def test_a_gradient_is_done_when_every_shard_has_it() -> None:
    with LocalCluster(nodes(workers=1), PRELOAD) as cluster:
        params = {"a": np.zeros(1), "b": np.zeros(1)}
        with ParameterServer(cluster.client, params, optimizer=SGD(0.1), shards=2) as ps:
            results(ps.run(push_more_to_one_shard, workers=1))
            shares = shares_of(5, 1, {})
            pool = WorkerPool(cluster.client, ps, lambda *_: True, shares)
            assert pool._applied() == {"worker-0": 1}
