"""Where a parameter server goes on a cluster of several hosts, without anybody's saying so."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

from dps import ParameterServer
from tests.support.deployment import deployed, workers
from tests.support.training import SECONDS, params

pytestmark = pytest.mark.cluster

HOSTS = "127.0.0.1", "127.0.0.2"


@pytest.mark.slow
@pytest.mark.parametrize("roles", [(), ("--resources", "server=1")], ids=["none", "servers"])
def test_replicas_of_a_shard_are_on_different_hosts(tmp_path: Path, roles: tuple[str, ...]) -> None:
    groups = [workers(2, "--host", host, *roles) for host in HOSTS]
    with (
        deployed(
            tmp_path, *groups, workers(1, *(("--resources", "worker=1") if roles else ()))
        ) as address,
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(5, timeout=SECONDS)
        with ParameterServer(client, params(), shards=2, recovery="chain") as ps:
            for view in ps.table().views:
                assert sorted(_host(member.address) for member in view.chain) == list(HOSTS)


def _host(address: str) -> str:
    return address.removeprefix("tcp://").partition(":")[0]
