"""The clusters that the tests of one module share, where they do not break them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from dps.cluster.backends.local import LocalCluster
from tests.support.training import PRELOAD, nodes


@pytest.fixture(scope="module")
def plain() -> Iterator[Client]:
    """A client of four ordinary Dask nodes, without roles."""
    with Client(n_workers=4, threads_per_worker=1, dashboard_address=None) as client:
        yield client


@pytest.fixture(scope="module")
def with_roles() -> Iterator[Client]:
    """A client of a cluster of ours: two servers, a replica for each, two workers."""
    with LocalCluster(nodes(replicas=1), PRELOAD) as cluster:
        yield cluster.client


@pytest.fixture(params=["plain", "with_roles"])
def client(request: pytest.FixtureRequest) -> Client:
    """Either of them."""
    found: Client = request.getfixturevalue(request.param)
    return found
