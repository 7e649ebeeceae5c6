"""A cluster with TLS: no port of it speaks plainly, and who has no certificate of it is refused."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from distributed import Client
from distributed.core import connect
from distributed.security import Security

from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.tls import SchedulerOfMembers, WorkerOfMembers, temporary
from dps.errors import ConfigurationError
from flows.config.cluster import from_files
from tests.support.stranger import got_by_a_stranger, needs_root
from tests.support.tls import ANSWER_SECONDS, REQUEST, files_of, said_plainly
from tests.support.training import PRELOAD, SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster that no test of this module breaks."""
    with LocalCluster(nodes(1, workers=1), PRELOAD, security=temporary()) as found:
        yield found


def ports(cluster: LocalCluster) -> dict[int, str]:
    """Every port that the driver or a process of the cluster listens on, and whose it is."""
    found = {}
    for name, pid in {"driver": os.getpid(), **cluster.pids}.items():
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = name
    return found


def said_over_tls(port: int, context: ssl.SSLContext) -> bytes:
    """What a port answers to a request; raises `ssl.SSLError` if it wants another certificate."""
    with (
        socket.create_connection(("127.0.0.1", port), SECONDS) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(REQUEST)
        return connection.recv(100)


def without_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def comm_ports(cluster: LocalCluster) -> set[int]:
    """The ports of Dask's own connections."""
    workers = cluster.client.scheduler_info(n_workers=-1)["workers"]
    addresses = [cluster.address, *workers]
    assert all(address.startswith("tls://127.0.0.1:") for address in addresses)
    return {int(address.rpartition(":")[2]) for address in addresses}


def test_no_port_of_any_process_answers_without_tls(cluster: LocalCluster) -> None:
    found = ports(cluster)
    assert found.keys() >= comm_ports(cluster)
    assert set(found.values()) >= cluster.pids.keys()
    for port, name in found.items():
        # A TLS server may say by an alert (21) that it was sent something else.
        answer = said_plainly(port)
        assert answer[:1] in (b"", b"\x15"), f"{name} answers {answer!r}"


def test_pages_and_metrics_too_are_only_for_who_has_a_certificate(cluster: LocalCluster) -> None:
    own = cluster.security.get_connection_args("client")["ssl_context"]
    other = temporary().get_connection_args("client")["ssl_context"]
    other.verify_mode = ssl.CERT_NONE  # it does not mind whose pages these are
    found = ports(cluster).keys()
    for port in found:
        for context in (without_certificate(), other):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                said_over_tls(port, context)
    for port in found - comm_ports(cluster):
        assert said_over_tls(port, own).startswith(b"HTTP/1.1 200 OK")


async def let_in(address: str, security: Security) -> bool:
    """Whether somebody with these certificates, or none, may talk to a Dask process."""
    known = security.get_connection_args("client")
    try:
        comm = await connect(address, timeout=ANSWER_SECONDS, **known)
    except (OSError, TimeoutError):
        return False
    comm.abort()
    return True


def test_scheduler_server_and_worker_let_in_who_has_their_certificate_and_nobody_else(
    cluster: LocalCluster,
) -> None:
    ports = comm_ports(cluster)
    assert len(ports) == 1 + 2, "of the scheduler, a server, which its clients push to, a worker"

    async def all_of_them(scheme: str, by_whom: Security) -> list[bool]:
        asked = (let_in(f"{scheme}://127.0.0.1:{port}", by_whom) for port in ports)
        return await asyncio.gather(*asked)

    for scheme, by_whom, welcome in (
        ("tls", cluster.security, True),
        ("tls", temporary(), False),  # of another cluster
        ("tcp", Security(), False),
    ):
        assert asyncio.run(all_of_them(scheme, by_whom)) == [welcome] * len(ports)


def test_the_key_is_in_files_of_this_user_alone_which_go_with_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LocalCluster(nodes(1, workers=1), PRELOAD, security=temporary()):
        keys = [path for path in tmp_path.rglob("*") if path.is_file() and b"KEY" in _start(path)]
        assert keys
        for path in keys:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(tmp_path.rglob("*.pem")) == []


def keys_below(folder: Path) -> list[Path]:
    """The keys and certificates that are there; folders may go while they are looked through."""
    try:
        return list(folder.rglob("*.pem"))
    except FileNotFoundError:
        return keys_below(folder)


@pytest.mark.slow
def test_the_key_goes_also_if_who_made_it_is_killed(tmp_path: Path, scratch: Path) -> None:
    script = (
        "import sys\n"
        "from dps.cluster.backends.local import LocalCluster\n"
        "from dps.cluster.backends.tls import temporary\n"
        "from tests.support.training import nodes\n"
        "if __name__ == '__main__':\n"
        "    with LocalCluster(nodes(1, workers=1), security=temporary()):\n"
        "        print('up', flush=True)\n"
        "        sys.stdin.read()\n"
    )
    (tmp_path / "script.py").write_text(script)
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        env={
            **os.environ,
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        assert list(scratch.rglob("*key.pem"))
        process.kill()
    eventually(lambda: not keys_below(scratch), SECONDS)


@pytest.mark.slow
@needs_root
def test_another_user_gets_at_no_process_of_a_cluster_unless_tls_is_switched_off() -> None:
    with LocalCluster(nodes(1, workers=1), PRELOAD) as cluster:
        got = got_by_a_stranger(ports(cluster))
        assert len(got) >= 2 * 3, "two of each node, and of the scheduler"
        assert set(map(tuple, got.values())) == {()}, got
    told: list[str] = []
    off = partial(LocalCluster, security="off", notify=told.append)
    with off(nodes(1, workers=1), PRELOAD) as cluster:
        assert told == ["without TLS, every user of this machine can run code as you"]
        got = got_by_a_stranger(ports(cluster))
        found = [each for at_port in got.values() for each in at_port]
        assert found.count(f"{SchedulerOfMembers.__name__} ran code as 0") == 1
        assert found.count(f"{WorkerOfMembers.__name__} ran code as 0") == 2
        assert "/json/identity.json" in found


def test_certificates_of_the_users_own_are_used(tmp_path: Path) -> None:
    own = files_of(temporary(), tmp_path)
    with LocalCluster(nodes(1, workers=1), PRELOAD, security=from_files(**own)) as cluster:
        assert comm_ports(cluster)
        with Client(cluster.address, security=from_files(**own), set_as_default=False) as other:
            assert other.submit(sum, [1, 2]).result(SECONDS) == 3


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    own = files_of(temporary(), tmp_path)
    other = files_of(temporary(), tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"^key: .*no such file"):
        from_files(**{**own, "key": str(tmp_path / "nowhere.pem")})
    with pytest.raises(
        ConfigurationError, match=r"^cert: .*expected an authority with its certificate"
    ):
        from_files(**{**own, "key": other["key"]})


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(100)
