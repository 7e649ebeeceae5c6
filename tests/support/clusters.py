"""The clusters that tests share, where they do not break them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from distributed import Client

from dps.cluster.backends.local import LocalCluster
from tests.support.training import PRELOAD, SECONDS, nodes

NODES = 4


@contextmanager
def nannied(nodes: int) -> Iterator[Client]:
    """A client of ordinary Dask nodes without roles, each of which its nanny starts again."""
    with Client(n_workers=nodes, threads_per_worker=1, dashboard_address=None) as client:
        yield client


@pytest.fixture(scope="package")
def four_nodes() -> Iterator[Client]:
    """A client of four ordinary Dask nodes, for all tests of the package."""
    with nannied(NODES) as client:
        yield client


@pytest.fixture
def plain(four_nodes: Client) -> Client:
    """The same, once those are back that a test has killed."""
    four_nodes.wait_for_workers(NODES, timeout=SECONDS)
    return four_nodes


@pytest.fixture(scope="package")
def with_roles() -> Iterator[Client]:
    """A client of a cluster of ours: two servers, a replica for each, two workers."""
    with LocalCluster(nodes(replicas=1), PRELOAD) as cluster:
        yield cluster.client


@pytest.fixture(params=["plain", "with_roles"])
def client(request: pytest.FixtureRequest) -> Client:
    """Either of them."""
    found: Client = request.getfixturevalue(request.param)
    return found
