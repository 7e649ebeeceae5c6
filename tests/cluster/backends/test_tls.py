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
from distributed.core import ConnectionPool, connect
from distributed.security import Security
from tornado.iostream import IOStream

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone
from dps.cluster.backends.tls import SchedulerOfMembers, WorkerOfMembers, from_files, temporary
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.errors import ConfigurationError, Unreachable
from dps.events import Promoted
from dps.protocol.messages import GetTable
from dps.protocol.transport import Endpoint
from tests.support.stranger import got_by_a_stranger, needs_root
from tests.support.tls import ANSWER_SECONDS, REQUEST, files_of, said_plainly
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    count_until,
    counts,
    nodes,
    params,
    results,
    versions,
)
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


@pytest.mark.parametrize(("whose", "welcome"), [("own", True), ("other", False), ("none", False)])
def test_scheduler_server_and_worker_let_in_who_has_their_certificate_and_nobody_else(
    cluster: LocalCluster, whose: str, welcome: bool
) -> None:
    by_whom = {"own": cluster.security, "other": temporary(), "none": Security()}
    ports = comm_ports(cluster)
    assert len(ports) == 1 + 2, "of the scheduler, a server, which its clients push to, a worker"
    scheme = "tcp" if whose == "none" else "tls"

    async def all_of_them() -> list[bool]:
        asked = (let_in(f"{scheme}://127.0.0.1:{port}", by_whom[whose]) for port in ports)
        return await asyncio.gather(*asked)

    assert asyncio.run(all_of_them()) == [welcome] * len(ports)


def test_a_client_without_the_certificate_is_refused(cluster: LocalCluster) -> None:
    plainly = cluster.address.replace("tls://", "tcp://")
    for address, security in (
        (plainly, None),
        (cluster.address, temporary()),  # one of another cluster
    ):
        with pytest.raises((OSError, TimeoutError)):
            Client(address, security=security, timeout=ANSWER_SECONDS, set_as_default=False)


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


def test_a_kill_is_recovered_from_over_tls(tmp_path: Path) -> None:
    events, flag = Events(), tmp_path / "stop"
    with (
        LocalCluster(nodes(1, replicas=1), PRELOAD, security=temporary()) as cluster,
        ParameterServer(
            cluster.client,
            params(),
            optimizer=COUNTING,
            recovery=Recovery(Chain(2)),
            on_event=events,
        ) as ps,
    ):
        futures = ps.run(partial(count_until, str(flag)), workers=2)
        eventually(lambda: versions(ps)[0] > 20, SECONDS)
        (view,) = ps.table().views
        assert all(host.address.startswith("tls://") for host in view.chain)
        assert is_gone(cluster.kill("server-0"), SECONDS)
        eventually(lambda: events.of(Promoted), SECONDS)
        before = versions(ps)[0]
        eventually(lambda: versions(ps)[0] > before + 20, SECONDS)
        flag.touch()
        pushed = sum(results(futures))
        assert counts(ps) == [pushed]


@pytest.mark.slow
@needs_root
def test_another_user_gets_at_no_process_of_a_cluster_unless_tls_is_switched_off() -> None:
    with LocalCluster(nodes(1, workers=1), PRELOAD) as cluster:
        got = got_by_a_stranger(ports(cluster))
        assert len(got) >= 2 * 3, "two of each node, and of the scheduler"
        assert set(map(tuple, got.values())) == {()}, got
    told: list[str] = []
    off = partial(LocalCluster, security="off", tell=told.append)
    with off(nodes(1, workers=1), PRELOAD) as cluster:
        assert told == [
            "without TLS every user of this machine can run code as you in this cluster"
        ]
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


@pytest.mark.slow
def test_certificates_of_dasks_own_configuration_are_used(tmp_path: Path) -> None:
    own = files_of(temporary(), tmp_path)
    roles = ("client", "scheduler", "worker")
    settings = {
        "REQUIRE_ENCRYPTION": "True",
        "TLS__CA_FILE": own["ca_file"],
        **{f"TLS__{role.upper()}__CERT": own["cert"] for role in roles},
        **{f"TLS__{role.upper()}__KEY": own["key"] for role in roles},
    }
    script = (
        "from dps.cluster.backends.local import LocalCluster\n"
        "from tests.support.training import nodes\n"
        "if __name__ == '__main__':\n"
        "    with LocalCluster(nodes(1, workers=1)) as cluster:\n"
        "        print(cluster.address, *cluster.client.scheduler_info(n_workers=-1)['workers'])\n"
        "        print(cluster.security.tls_ca_file)\n"
    )
    (tmp_path / "script.py").write_text(script)
    environment = {f"DASK_DISTRIBUTED__COMM__{name}": value for name, value in settings.items()}
    run = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("tls://") == 3
    assert own["ca_file"] in run.stdout


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    own = files_of(temporary(), tmp_path)
    other = files_of(temporary(), tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"^key: .*there is no such file"):
        from_files(**{**own, "key": str(tmp_path / "nowhere.pem")})
    with pytest.raises(ConfigurationError, match=r"^cert: .*go together"):
        from_files(**{**own, "key": other["key"]})


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(100)


def test_a_connection_that_breaks_while_it_is_made_is_told_as_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As tornado tells of a peer that ends between the connection and the handshake."""

    def broken(self: IOStream, *args: object, **kwargs: object) -> None:
        self.close()
        raise ValueError("IOStream is not idle; cannot convert to SSL")

    async def scenario() -> None:
        security = temporary().get_connection_args("client")
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1")
        port = listener.sockets[0].getsockname()[1]
        pool = ConnectionPool(connection_args=security)
        await pool.start()
        transport = ClusterTransport(pool, Meter())
        to = Endpoint(f"tls://127.0.0.1:{port}", "nobody")
        try:
            with pytest.raises(Unreachable, match="GetTable to nobody"):
                await transport.call(to, GetTable(-1, 1.0), ANSWER_SECONDS)
        finally:
            await pool.close()
            listener.close()

    monkeypatch.setattr(IOStream, "start_tls", broken)
    asyncio.run(scenario())


FULL = """
import contextlib, os, resource, threading, time
from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec

taken = threading.Event()

def take_all():
    while True:
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
        taken.set()
        time.sleep(1e-4)

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    cluster = LocalCluster([NodeSpec("server-0", "server")])
    threading.Thread(target=take_all, daemon=True).start()
    taken.wait()
    with contextlib.suppress(OSError):
        cluster.close()
    os._exit(0)
"""


def test_no_key_is_left_where_descriptors_run_out(tmp_path: Path) -> None:
    """A folder cannot be listed then, so what is to be removed must be known."""
    (program := tmp_path / "program.py").write_text(FULL)
    (place := tmp_path / "t").mkdir()
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(program)], env=environment, timeout=60, check=True)
    assert not list(place.rglob("*.pem"))
