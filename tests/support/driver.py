"""A driver as a process of its own, for tests that kill it: it trains on a deployment.

It takes the nodes of a chain of two and a worker, disturbs a link for far longer than any test
takes, and prints the process ids of its nodes as JSON; then it trains until it is killed.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from distributed import Worker as DaskWorker

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.existing import ExistingCluster
from dps.cluster.transport.calls import BOTH, Condition, links_of
from tests.support.training import COUNTING, count_until, nodes, params

MEMBERS = nodes(1, replicas=1, workers=1)


async def disturb(dask_worker: DaskWorker) -> None:
    """Leave a fault that does not end by itself in time."""
    links_of(dask_worker).impose(0, Condition(BOTH, 0.02), 600.0)


def main(address: str) -> None:
    """Train until the process is killed."""
    with ExistingCluster(address, MEMBERS) as cluster:
        choices = {"optimizer": COUNTING, "recovery": Recovery(Chain()), "seats": cluster.seats}
        with ParameterServer(cluster.client, params(), **choices) as ps:
            (training,) = ps.run(partial(count_until, "/nowhere"))
            cluster.client.run(disturb, workers=list(cluster.seats.specs))
            print(json.dumps(cluster.pids), flush=True)
            training.result()


if __name__ == "__main__":
    main(sys.argv[1])
