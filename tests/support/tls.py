"""What tests of TLS share: ports, plain requests to them, certificates in files."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import psutil
from distributed.security import Security

ANSWER_SECONDS = 10.0
REQUEST = b"GET /metrics HTTP/1.0\r\n\r\n"


def said_plainly(port: int) -> bytes:
    """What a port answers to a request without TLS."""
    with socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS) as connection:
        connection.sendall(REQUEST)
        try:
            return connection.recv(100)
        except ConnectionResetError:
            return b""


def ports_below(*pids: int) -> set[int]:
    """The ports on which processes and all that they have started listen.

    Without that of the monitor, which does what is signed, and is no secret (see
    tests/cluster/test_liveness.py).
    """
    found = set()
    for leader in (psutil.Process(pid) for pid in pids):
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # such as one that has ended meanwhile
                if "dps.cluster.monitor" not in " ".join(process.cmdline()):
                    connections = process.net_connections("inet")
                    found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def files_of(made: Security, folder: Path) -> dict[str, str]:
    """Certificate and key as a user would have them, in files."""
    folder.mkdir(exist_ok=True)
    tls = made.get_tls_config_for_role("worker")
    found = {}
    for name in ("ca_file", "cert", "key"):
        path = folder / f"{name}.pem"
        path.write_text(tls[name])
        found[name] = str(path)
    return found
