"""A deployment that somebody else runs: what is used of it, what is refused, what is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest

from dps.cluster.backends import existing
from dps.cluster.backends.existing import ExistingCluster
from dps.cluster.backends.tls import temporary
from dps.cluster.names import NodeSpec
from dps.errors import CapacityError, ConfigurationError
from flows.config.cluster import from_files
from tests.support.deployment import OWN_PIDS, can_have_own_pids, deployed, workers
from tests.support.tls import files_of
from tests.support.training import SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

MEMBERS = nodes(1, replicas=1, workers=1)


@pytest.fixture(scope="module")
def with_roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a deployment with as many Dask workers of each role as `MEMBERS` needs."""
    folder = tmp_path_factory.mktemp("with-roles")
    groups = workers(2, "--resources", "server=1"), workers(1, "--resources", "worker=1")
    with deployed(folder, *groups) as address:
        yield address


def resources(cluster: ExistingCluster) -> dict[str, list[str]]:
    """For each node, the Dask resources of the Dask worker that it is."""
    known = cluster.client.sync(cluster.client.scheduler.identity, n_workers=-1)["workers"]
    found = {cluster.seats.specs.get(at): list(info["resources"]) for at, info in known.items()}
    return {spec.name: resources for spec, resources in found.items() if spec is not None}


@pytest.mark.slow
def test_dask_resources_tell_which_nodes_are_for_what(with_roles: str) -> None:
    with ExistingCluster(with_roles, MEMBERS) as cluster:
        assert resources(cluster) == {
            "server-0": ["server"],
            "replica-0-1": ["server"],
            "worker-0": ["worker"],
        }
        (note,) = cluster.notes
        assert note.startswith("replica-0-1, server-0 share a host")


def test_a_node_comes_back_with_its_nanny(with_roles: str) -> None:
    with ExistingCluster(with_roles, MEMBERS) as cluster:
        cluster.kill("server-0")
        assert cluster.gone("server-0", SECONDS)
        cluster.start(NodeSpec("server-0-b", "server"))
        eventually(lambda: "server-0-b" in cluster.pids, SECONDS)
        assert resources(cluster)["server-0-b"] == ["server"]
        assert cluster.running("server-0-b", 0.0)


def test_no_scheduler_at_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(existing, "CONNECT_SECONDS", 0.5)
    with pytest.raises(CapacityError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        ExistingCluster("tcp://127.0.0.1:9", MEMBERS)


@pytest.mark.parametrize(
    ("address", "own", "configured", "told"),
    [
        ("tls://127.0.0.1:9", False, {}, "needs certificates; name them"),
        ("tcp://127.0.0.1:9", True, {}, "address without TLS, but certificates are given"),
        ("127.0.0.1:9", False, {"require-encryption": True}, "or required by Dask's conf"),
        (
            "tls://127.0.0.1:9",
            False,
            {"tls.ca-file": "/nowhere", "tls.client.cert": "/nowhere"},
            r"cannot be used \(.*No such file",
        ),
        ("http://127.0.0.1:9", False, {}, "not the address of a Dask scheduler; expected tcp://"),
    ],
)
def test_an_address_that_certificates_do_not_fit_is_told_at_once(
    tmp_path: Path, address: str, own: bool, configured: dict[str, Any], told: str
) -> None:
    security = from_files(**files_of(temporary(), tmp_path)) if own else None
    settings = {f"distributed.comm.{name}": value for name, value in configured.items()}
    with dask.config.set(settings), pytest.raises(ConfigurationError, match=told):
        ExistingCluster(address, MEMBERS, security)


@pytest.mark.slow
def test_a_process_that_signals_do_not_reach_is_killed_by_itself_and_never_paused(
    tmp_path: Path,
) -> None:
    if not can_have_own_pids():
        pytest.skip("processes with pids of their own cannot be started here")
    with (
        deployed(tmp_path, workers(3), before=OWN_PIDS) as address,
        ExistingCluster(address, MEMBERS) as cluster,
    ):
        assert cluster.obstacle("server-0", "kill") is None
        for act in ("pause", "limit"):
            assert "cannot stop" in str(cluster.obstacle("server-0", act))
        with pytest.raises(ConfigurationError, match="run dps there"):
            cluster.pause("server-0")
        assert cluster.running("server-0", 0.0)
        cluster.kill("server-0")
        assert cluster.gone("server-0", SECONDS)
        assert not cluster.running("server-0", 0.0)
        with pytest.raises(ProcessLookupError):
            cluster.kill("server-0")
        assert cluster.running("replica-0-1", 0.0)
